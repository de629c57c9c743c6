"""The plan for a tree of parameters: made from shapes alone, read by everything downstream."""

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax._boxes import pure
from zerojax._contexts import run_globally, to_natural
from zerojax._leaf_plan import LeafPlan
from zerojax._processes import check_equal, to_global
from zerojax._shard import Shard
from zerojax._specs import (
    Axes,
    axes_size,
    broadcast_prefix,
    from_spec,
    raise_all,
)
from zerojax._tables import Table


@dataclasses.dataclass(frozen=True, eq=False)
class Partition:
    """A frozen, printable plan for a tree of parameters. Made by `zerojax.partition`.

    Attributes:
      mesh: the device mesh, concrete or abstract.
      stage: the ZeRO stage, 0 to 3.
      shard_axes: data axes that gradients are summed and state is sharded over.
      replicate_axes: data axes that gradients are only summed over.
      treedef: structure of the parameters.
      leaves: one `LeafPlan` per parameter, in the order of `jax.tree.leaves`.
    """

    mesh: Mesh | AbstractMesh
    stage: int
    shard_axes: Axes
    replicate_axes: Axes
    treedef: Any
    leaves: tuple[LeafPlan, ...]

    @property
    def model_specs(self) -> Any:
        """Tree of the user's PartitionSpecs."""
        return self.treedef.unflatten([leaf.model_spec for leaf in self.leaves])

    @property
    def shard_specs(self) -> Any:
        """Tree of PartitionSpecs of optimizer state and reduced gradients."""
        return self.treedef.unflatten([leaf.shard_spec for leaf in self.leaves])

    @property
    def param_specs(self) -> Any:
        """Tree of PartitionSpecs in which the parameters live between steps."""
        return self.treedef.unflatten([self.param_spec(leaf) for leaf in self.leaves])

    def param_spec(self, leaf: LeafPlan) -> P:
        """Where a parameter lives between steps: in its shard spec at stage 3."""
        return leaf.shard_spec if self.stage == 3 else leaf.model_spec

    def param_shape(self, leaf: LeafPlan) -> tuple[int, ...]:
        """The shape in which a parameter lives: the stored one at stage 3."""
        return leaf.stored if self.stage == 3 else leaf.shape

    @functools.cached_property
    def data_axes(self) -> Axes:
        """The axes over which the batch is split, in the order of the mesh."""
        return tuple(a for a in self.mesh.axis_names if a in self.shard_axes + self.replicate_axes)

    @property
    def model_axes(self) -> Axes:
        """The other axes of the mesh."""
        return tuple(a for a in self.mesh.axis_names if a not in self.data_axes)

    @property
    def data_size(self) -> int:
        """The number of parts into which the batch is split."""
        return axes_size(self.mesh, self.data_axes)

    def replicated(self, spec: P) -> bool:
        """Whether an array of this spec is the same along all data axes."""
        return not any(axis in self.data_axes for dim in from_spec(spec, len(spec)) for axis in dim)

    @functools.cached_property
    def by_path(self) -> dict[str, LeafPlan]:
        """The plan of each leaf by its key path."""
        return {leaf.path: leaf for leaf in self.leaves}

    def plans(self, tree: Any) -> list[LeafPlan]:
        """The plans of the leaves of a tree of these parameters, or of some of them, by path."""
        paths = (jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree))
        return [self.by_path[path] for path in paths]

    def map(self, fn: Callable[[LeafPlan, Any], Any], tree: Any) -> Any:
        """`fn(plan, leaf)` over the leaves of a tree of these parameters, or of some of them."""
        leaves, treedef = jax.tree.flatten(tree)
        return treedef.unflatten([fn(*pair) for pair in zip(self.plans(tree), leaves, strict=True)])

    def trained(self, trainable: Any) -> list[bool]:
        """For each leaf whether it has a gradient; `trainable` is a tree prefix of bools."""
        masks = broadcast_prefix("trainable", trainable, self.treedef.unflatten(self.leaves))
        pairs = zip(self.leaves, masks, strict=True)
        return [leaf.trainable and bool(mask) for leaf, mask in pairs]

    def shardings(self, specs: Any) -> Any:
        """Tree of `NamedSharding`s on this partition's mesh for a tree of PartitionSpecs."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)

    def place(self, params: Any) -> Any:
        """Moves host or device arrays to where the parameters live, leaf by leaf.

        Host arrays go to each device slice by slice; of several processes each gives the same. The
        result never shares a buffer with the argument, so that a step which donates it leaves the
        caller's arrays alone.

        Args:
          params: tree of numpy or jax arrays, in the shapes that `partition` saw.

        Returns:
          The same tree as jax arrays in `param_specs`, at stage 3 padded to their stored shapes.

        Raises:
          ValueError: the tree, a shape or a dtype differs from the plan, or a value between
            processes.
        """
        _check_devices(self.mesh, "place")
        flat = check_tree(self, params, "place", natural=True)
        check_equal(params, self.mesh)
        placed = []
        for leaf, value in zip(self.leaves, flat, strict=True):
            sharding = NamedSharding(self.mesh, self.param_spec(leaf))
            placed.append(put(value, self.param_shape(leaf), sharding))
        return self.treedef.unflatten(placed)

    def abstract_params(self) -> Any:
        """The parameters as they live, a `jax.ShapeDtypeStruct` with a sharding for each."""
        return self.treedef.unflatten(
            [
                jax.ShapeDtypeStruct(
                    self.param_shape(leaf), leaf.dtype,
                    sharding=NamedSharding(self.mesh, self.param_spec(leaf)),
                )
                for leaf in self.leaves
            ]
        )  # fmt: skip

    def gather(self, params: Any) -> Any:
        """Parameters in their natural shapes and model specs, for evaluation and export.

        Args:
          params: parameters as a training step holds them.

        Returns:
          The same values; where nothing has to move, the same arrays.

        Raises:
          ValueError: the tree, a shape or a dtype differs from the plan.
        """
        _check_devices(self.mesh, "gather")
        params = self.treedef.unflatten(check_tree(self, params, "gather"))
        if self.stage < 3:
            return jax.device_put(params, self.shardings(self.model_specs))
        return run_globally(
            _natural, self.mesh, params, out_specs=self.model_specs, static={"part": self}
        )

    def shards(self, params: Any) -> Any:
        """Parameters as `Shard`s, for a loss that calls `unshard` under plain `jax.value_and_grad`.

        Differentiate the function that calls this: its gradient is then a tree like `params`.

        Args:
          params: parameters as a training step holds them.

        Returns:
          The tree with a `Shard` for each leaf that is sharded; below stage 3, of `params`.

        Raises:
          ValueError: the tree, a shape or a dtype differs from the plan.
        """
        flat = check_tree(self, params, "shards")
        if self.stage < 3:
            return self.treedef.unflatten(flat)
        pairs = zip(self.leaves, flat, strict=True)
        return self.treedef.unflatten(
            [Shard(x, leaf=leaf, mesh=self.mesh) if leaf.shard_axes else x for leaf, x in pairs]
        )

    def rows(self) -> list[dict[str, Any]]:
        """The table that `print` shows, a dict per leaf; bytes are per device."""
        return [leaf.row(self.mesh) for leaf in self.leaves]

    def to_json(self) -> str:
        """The table as a JSON document."""
        mesh = dict(zip(self.mesh.axis_names, self.mesh.axis_sizes, strict=True))
        axes = {"shard_axes": self.shard_axes, "replicate_axes": self.replicate_axes}
        return json.dumps({"mesh": mesh, "stage": self.stage, **axes, "leaves": self.rows()})

    def table(self) -> Table:
        """What `print` shows."""
        rows = self.rows()
        mesh = ", ".join(f"{a}={n}" for a, n in self.mesh.shape.items())
        whole, shard = (sum(row[key] for row in rows) for key in ("bytes_whole", "bytes_shard"))
        head = ["path", "shape", "dtype", "model spec", "shard spec", "bytes/device", "reason"]
        cells = [
            [
                row["path"],
                "x".join(map(str, row["shape"])) or "scalar",
                row["dtype"],
                row["model_spec"],
                row["shard_spec"],
                f"{row['bytes_shard']:,}",
                row["reason"],
            ]
            for row in rows
        ]
        title = f"ZeRO stage {self.stage} on mesh({mesh}), sharded over {self.shard_axes}"
        if self.replicate_axes:
            title += f", replicated over {self.replicate_axes}"
        summary = (
            f"what is sharded takes, for each array of the parameters' shape and dtype, "
            f"{shard:,} bytes per device instead of {whole:,} ({shard / max(whole, 1):.1%})"
        )
        return Table(head, cells, [summary], title)

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table().html()


def check_tree(part: Partition, tree: Any, where: str, *, natural: bool = False) -> list[Any]:
    """Leaves of a tree that must be the planned parameters; raises with every difference.

    They are expected in the shapes in which they live; with `natural` the user's will do too.
    """
    with_paths, _ = jax.tree.flatten_with_path(pure(tree))
    found = {jax.tree_util.keystr(path): value for path, value in with_paths}
    problems = [f"  {path}: is missing" for path in part.by_path if path not in found]
    for path, value in found.items():
        leaf = part.by_path.get(path)
        if leaf is None:
            problems.append(f"  {path}: was not there when the partition was made")
            continue
        shapes = [leaf.shape, part.param_shape(leaf)][not natural :]
        if tuple(np.shape(value)) not in shapes or dtype_of(value) != leaf.dtype:
            came = f"{dtype_of(value)}{list(np.shape(value))}"
            padded = ", padded by part.place" if shapes[0] != leaf.shape else ""
            expected = f"{leaf.dtype}{list(shapes[0])}{padded}"
            problems.append(f"  {path}: expected {expected}, got {came}")
    raise_all(
        f"{where}: the parameters are not those of this partition "
        "(call zerojax.partition again after a change of the model)",
        problems,
    )
    return [found[leaf.path] for leaf in part.leaves]


def dtype_of(value: Any) -> Any:
    """The dtype that jax gives a value; PRNG keys keep their extended dtype."""
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return jnp.result_type(value)
    extended = jnp.issubdtype(dtype, jax.dtypes.extended)
    return dtype if extended else jax.dtypes.canonicalize_dtype(dtype)


def put(value: Any, shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    """A copy of a host or device array in a shape and sharding, which shares no memory with it."""
    if np.shape(value) != shape:
        widths = [(0, stored - n) for n, stored in zip(np.shape(value), shape, strict=True)]
        value = (jnp if isinstance(value, jax.Array) else np).pad(value, widths)
    # Even with may_alias=False device_put shares the buffer of a device that holds the same block
    # already and, on CPU, numpy's memory; a step that donates the one would take both.
    copy = jax.jit(jnp.copy, out_shardings=sharding)
    return jax.block_until_ready(copy(to_global(value, sharding)))


def _natural(params: Any, *, part: Partition) -> Any:
    """Stored parameters of an Auto-mode program in their natural shapes and model specs."""
    return part.map(lambda leaf, x: to_natural(part.mesh, x, leaf.shape, leaf.model_spec), params)


def _check_devices(mesh: Mesh | AbstractMesh, where: str) -> None:
    if isinstance(mesh, AbstractMesh):
        raise ValueError(
            f"{where}: this partition is on an AbstractMesh, which has no devices. Make it with a "
            "jax.sharding.Mesh, such as jax.make_mesh gives."
        )
