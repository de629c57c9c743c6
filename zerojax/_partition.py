"""The plan for a tree of parameters: made from shapes alone, read by everything downstream."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax._leaf_plan import LeafPlan, plan_dims
from zerojax._specs import (
    Axes,
    Spec,
    axes_of_type,
    axes_size,
    broadcast_prefix,
    from_spec,
    is_inexact,
    is_spec,
    raise_all,
    to_spec,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Partition:
    """A frozen, printable plan for a tree of parameters. Made by `zerojax.partition`.

    Attributes:
      mesh: the device mesh, concrete or abstract.
      stage: the ZeRO stage: 0, 1 or 2.
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
        return self.model_specs

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

    def shardings(self, specs: Any) -> Any:
        """Tree of `NamedSharding`s on this partition's mesh for a tree of PartitionSpecs."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)

    def place(self, params: Any) -> Any:
        """Moves host or device arrays to where the parameters live, leaf by leaf.

        Host arrays go to each device slice by slice. The result never shares a buffer with the
        argument, so that a step which donates it leaves the caller's arrays alone.

        Args:
          params: tree of numpy or jax arrays, in the shapes that `partition` saw.

        Returns:
          The same tree as jax arrays in `param_specs`.

        Raises:
          ValueError: the tree, a shape or a dtype differs from the plan.
        """
        _check_devices(self.mesh, "place")
        flat = check_tree(self, params, "place")
        placed = []
        for leaf, value in zip(self.leaves, flat, strict=True):
            placed.append(_put(value, NamedSharding(self.mesh, leaf.model_spec)))
        return self.treedef.unflatten(placed)

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
        check_tree(self, params, "gather")
        return jax.device_put(params, self.shardings(self.model_specs))

    def rows(self) -> list[dict[str, Any]]:
        """The table that `print` shows, a dict per leaf; bytes are per device."""
        return [leaf.row(self.mesh) for leaf in self.leaves]

    def to_json(self) -> str:
        """The table as a JSON document."""
        mesh = dict(zip(self.mesh.axis_names, self.mesh.axis_sizes, strict=True))
        axes = {"shard_axes": self.shard_axes, "replicate_axes": self.replicate_axes}
        return json.dumps({"mesh": mesh, "stage": self.stage, **axes, "leaves": self.rows()})

    def __repr__(self) -> str:
        rows = self.rows()
        mesh = ", ".join(f"{a}={n}" for a, n in self.mesh.shape.items())
        whole, shard = (sum(row[key] for row in rows) for key in ("bytes_whole", "bytes_shard"))
        head = ["path", "shape", "dtype", "model spec", "shard spec", "bytes/device", "reason"]
        table = [
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
        widths = [max(map(len, column)) for column in zip(head, *table, strict=True)]
        lines = [
            f"ZeRO stage {self.stage} on mesh({mesh}), sharded over {self.shard_axes}"
            + (f", replicated over {self.replicate_axes}" if self.replicate_axes else ""),
            *("  ".join(map(str.ljust, row, widths)).rstrip() for row in [head, *table]),
            f"what is sharded takes, for each array of the parameters' size (an Adam moment), "
            f"{shard:,} bytes per device instead of {whole:,} ({shard / max(whole, 1):.1%})",
        ]
        return "\n".join(lines)


def partition(
    params: Any,
    mesh: Mesh | AbstractMesh,
    specs: Any = None,
    *,
    shard_axes: str | Sequence[str] = "data",
    replicate_axes: str | Sequence[str] = (),
    stage: int = 1,
    scan_dims: Any = 0,
    min_size: int = 0,
    pad: bool = True,
    shard_dim: Callable[[str, tuple[int, ...], P], int | None] | None = None,
) -> Partition:
    """Plans how optimizer state and gradients are sharded over the data axes of a mesh.

    For every leaf the dim that wastes no element comes first, then one that no model axis uses,
    then the largest, then the leftmost; several shard axes share a dim where that divides. If no
    dim divides, the one that wastes least is padded. `print` the result to see each choice.

    Args:
      params: tree of arrays or `jax.ShapeDtypeStruct`s.
      mesh: the mesh; axes that are neither sharded nor replicated over are *model* axes.
      specs: the model PartitionSpecs (tensor, pipeline, expert axes), a tree or a prefix of one;
        `None` reads the `NamedSharding`s of the arrays.
      shard_axes: data axes to sum gradients and shard state over. A leaf is neither summed nor
        sharded over an axis that its own spec uses (an expert-parallel weight).
      replicate_axes: data axes to sum gradients over, on the shard (HSDP).
      stage: 0 data parallelism, 1 shards optimizer state, 2 also gradient accumulators.
      scan_dims: how many leading dims the model scans over; they are never sharded. A tree prefix.
      min_size: leaves with fewer elements stay whole.
      pad: pad a leaf that no dim of which divides; otherwise it stays whole.
      shard_dim: `(path, shape, spec) -> dim` to put all shard axes on a dim, or `None` for the
        rule above.

    Returns:
      A `Partition`.

    Raises:
      ValueError: unknown axes, specs that do not fit, all bad leaves named at once; or no specs
        and nothing to read them from on a mesh with model axes.

    References:
      Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
      2020, section 5; Zhang et al., "MiCS", 2022, section 3 (`replicate_axes`).

    >>> mesh = jax.make_mesh((8,), ("data",))
    >>> params = {"w": jnp.zeros((3, 64)), "b": jnp.zeros((3,))}
    >>> part = partition(params, mesh)
    >>> part.shard_specs["w"], part.by_path["['b']"].reason
    (P(None, 'data'), '3 elements are fewer than 8 shards')
    """
    shard_axes, replicate_axes = _as_axes(shard_axes), _as_axes(replicate_axes)
    _check_axes(mesh, shard_axes, replicate_axes)
    if stage not in (0, 1, 2):
        raise ValueError(f"stage must be 0, 1 or 2, got {stage!r}.")
    with_paths, treedef = jax.tree.flatten_with_path(params)
    paths = [jax.tree_util.keystr(path) for path, _ in with_paths]
    values = [value for _, value in with_paths]
    if specs is None:
        leaf_specs = _infer_specs(paths, values, mesh, {*shard_axes, *replicate_axes})
    else:
        leaf_specs = broadcast_prefix("partition: specs", specs, params, is_spec)
    scans = broadcast_prefix("partition: scan_dims", scan_dims, params)

    sizes = dict(mesh.shape)
    rule = functools.lru_cache(maxsize=None)(
        functools.partial(plan_dims, sizes=sizes, shard_axes=shard_axes, pad=pad, stage=stage)
    )
    leaves, problems = [], []
    for path, value, spec, scan in zip(paths, values, leaf_specs, scans, strict=True):
        try:
            shape, dtype = tuple(np.shape(value)), _dtype(value)
            model = from_spec(P() if spec is None else spec, len(shape))
            _check_model(shape, model, sizes)
            if not isinstance(scan, int) or scan < 0:
                raise ValueError(f"scan_dims must be a number of leading dims, got {scan!r}.")
            override = shard_dim and shard_dim(path, shape, to_spec(model))
            skip = (
                f"{math.prod(shape)} elements are fewer than min_size={min_size}"
                if math.prod(shape) < min_size
                else "no gradient: " + str(dtype)
                if not is_inexact(dtype)
                else ""
            )
            shard, stored, reason = rule(shape, model, scan, override, skip)
            leaves.append(LeafPlan(path, shape, dtype, model, shard, stored, reason))
        except (ValueError, TypeError) as error:
            problems.append(f"  {path or '(root)'}: {error}")
    raise_all("partition: these leaves cannot be planned", problems)
    return Partition(mesh, stage, shard_axes, replicate_axes, treedef, tuple(leaves))


def check_tree(part: Partition, tree: Any, where: str) -> list[Any]:
    """Leaves of a tree that must be the planned parameters; raises with every difference."""
    with_paths, _ = jax.tree.flatten_with_path(tree)
    found = {jax.tree_util.keystr(path): value for path, value in with_paths}
    problems = [f"  {path}: is missing" for path in part.by_path if path not in found]
    for path, value in found.items():
        leaf = part.by_path.get(path)
        if leaf is None:
            problems.append(f"  {path}: was not there when the partition was made")
        elif tuple(np.shape(value)) != leaf.shape or _dtype(value) != leaf.dtype:
            came = f"{_dtype(value)}{list(np.shape(value))}"
            problems.append(f"  {path}: expected {leaf.dtype}{list(leaf.shape)}, got {came}")
    raise_all(
        f"{where}: the parameters are not those of this partition "
        "(call zerojax.partition again after a change of the model)",
        problems,
    )
    return [found[leaf.path] for leaf in part.leaves]


def _dtype(value: Any) -> Any:
    """The dtype that jax gives a value; PRNG keys keep their extended dtype."""
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return jnp.result_type(value)
    extended = jnp.issubdtype(dtype, jax.dtypes.extended)
    return dtype if extended else jax.dtypes.canonicalize_dtype(dtype)


def _put(value: Any, sharding: NamedSharding) -> jax.Array:
    """A copy of a host or device array in a sharding, which shares no memory with it."""
    # Even with may_alias=False device_put shares the buffer of a device that holds the same block
    # already and, on CPU, numpy's memory; a step that donates the one would take both.
    copy = jax.jit(jnp.copy, out_shardings=sharding)
    return jax.block_until_ready(copy(jax.device_put(value, sharding)))


def _as_axes(axes: str | Sequence[str]) -> Axes:
    return (axes,) if isinstance(axes, str) else tuple(axes)


def _check_devices(mesh: Mesh | AbstractMesh, where: str) -> None:
    if isinstance(mesh, AbstractMesh):
        raise ValueError(
            f"{where}: this partition is on an AbstractMesh, which has no devices. Make it with a "
            "jax.sharding.Mesh, such as jax.make_mesh gives."
        )


def _check_axes(mesh: Mesh | AbstractMesh, shard_axes: Axes, replicate_axes: Axes) -> None:
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"partition: mesh must be a Mesh or an AbstractMesh, got {mesh!r}.")
    asked = shard_axes + replicate_axes
    unknown = [a for a in asked if a not in mesh.axis_names]
    if unknown:
        raise ValueError(
            f"partition: the mesh has axes {mesh.axis_names}, but shard_axes={shard_axes} and "
            f"replicate_axes={replicate_axes} name {unknown}. Pass shard_axes= the mesh's data "
            "axes, or make the mesh with these names."
        )
    if len({*asked}) < len(asked) or not shard_axes:
        raise ValueError(
            "partition: shard_axes must name at least one axis, and no axis twice or in "
            f"replicate_axes too; got shard_axes={shard_axes}, replicate_axes={replicate_axes}."
        )


def _check_model(shape: tuple[int, ...], model: Spec, sizes: dict[str, int]) -> None:
    names = sum(model, ())
    if unknown := [a for a in names if a not in sizes]:
        raise ValueError(f"{to_spec(model)} names {unknown}; the mesh has {tuple(sizes)}.")
    if len(set(names)) != len(names):
        raise ValueError(f"{to_spec(model)} names an axis twice.")
    for dim, axes in enumerate(model):
        if shape[dim] % (size := math.prod(sizes[a] for a in axes)):
            raise ValueError(
                f"dim {dim} of {shape} does not divide by {size}, the size of {axes}: jax cannot "
                "hold such an array. Pad the model's dim, or leave it out of the spec."
            )


def _infer_specs(
    paths: list[str], values: list[Any], mesh: Mesh | AbstractMesh, data_axes: set[str]
) -> list[P]:
    """Specs of arrays that know theirs; nothing is assumed on a mesh with model axes."""
    model_axes = {a for a, n in mesh.shape.items() if n > 1} - data_axes
    specs = [_known_spec(value, model_axes) for value in values]
    unknown = [
        f"  {path}: {type(value).__name__} without a NamedSharding on this mesh"
        for path, value, spec in zip(paths, values, specs, strict=True)
        if spec is None and model_axes
    ]
    raise_all(
        f"partition: the mesh has model axes {sorted(model_axes)}, and these leaves do not say how "
        "they are sharded over them. Pass specs= (PartitionSpec() where a leaf is replicated)",
        unknown,
    )
    return [P() if spec is None else spec for spec in specs]


def _known_spec(value: Any, model_axes: set[str]) -> P | None:
    """The spec of an array, if it says how it is sharded over the model axes."""
    if isinstance(value, Tracer):
        sharding = jax.typeof(value).sharding
        known = axes_of_type(sharding.mesh, AxisType.Explicit)
    elif isinstance(sharding := getattr(value, "sharding", None), NamedSharding):
        known = {*sharding.mesh.axis_names}
    else:
        return None
    return sharding.spec if model_axes <= known else None
