"""The plan: which dim of which leaf is sharded over which mesh axes, from shapes alone."""

import collections
import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Axes = tuple[str, ...]
Spec = tuple[Axes, ...]  # the mesh axes of every dim, major axis first


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """Where one parameter, and everything of its shape, is sharded.

    Attributes:
      path: key path of the leaf, as `jax.tree_util.keystr` prints it.
      shape: the *natural* shape, the user's.
      dtype: dtype of the parameter.
      model: per dim, the model axes that the user's spec puts there.
      shard: per dim, the data axes that ZeRO adds behind them.
      stored: the shape that is sharded: `shape`, padded where no dim divides.
      reason: why the leaf stays whole, or is padded; empty when neither.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    model: Spec
    shard: Spec
    stored: tuple[int, ...]
    reason: str = ""

    @property
    def model_spec(self) -> P:
        """The user's PartitionSpec."""
        return to_spec(self.model)

    @property
    def shard_spec(self) -> P:
        """The PartitionSpec of optimizer state and reduced gradients."""
        return to_spec(tuple(m + s for m, s in zip(self.model, self.shard, strict=True)))

    @property
    def model_axes(self) -> Axes:
        """The mesh axes that the user's own spec uses."""
        return sum(self.model, ())

    @property
    def shard_axes(self) -> Axes:
        """The data axes over which ZeRO shards this leaf; empty if it stays whole."""
        return sum(self.shard, ())

    @property
    def padded(self) -> bool:
        """Whether the stored shape differs from the natural one."""
        return self.stored != self.shape

    @property
    def trainable(self) -> bool:
        """Whether the leaf can have a gradient: integers, bools and PRNG keys cannot."""
        return is_inexact(self.dtype)


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
        return [
            {
                "path": leaf.path,
                "shape": list(leaf.shape),
                "dtype": str(leaf.dtype),
                "model_spec": _spec_text(leaf.model_spec),
                "shard_spec": _spec_text(leaf.shard_spec),
                "bytes_whole": _bytes(self.mesh, leaf.shape, leaf.model_spec, leaf.dtype),
                "bytes_shard": _bytes(self.mesh, leaf.stored, leaf.shard_spec, leaf.dtype),
                "reason": leaf.reason,
            }
            for leaf in self.leaves
        ]

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
            f"one array for each parameter (gradients; each Adam moment): "
            f"{whole:,} bytes per device before, {shard:,} after ({shard / max(whole, 1):.1%})",
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


def plan_dims(
    shape: tuple[int, ...],
    model: Spec,
    scan_dims: int,
    override: int | None,
    skip: str,
    *,
    sizes: dict[str, int],
    shard_axes: Axes,
    pad: bool,
    stage: int,
) -> tuple[Spec, tuple[int, ...], str]:
    """Per dim the shard axes, the stored shape, and the reason why whole or padded."""
    whole = ((),) * len(shape)
    used = sum(model, ())
    free = tuple(a for a in shard_axes if a not in used)
    axes = tuple(a for a in free if sizes[a] > 1)
    shards = math.prod(sizes[a] for a in axes)
    # Padding a dim that a model axis shards would interleave the padding; such a dim must divide.
    local = [n // math.prod(sizes[a] for a in m) for n, m in zip(shape, model, strict=True)]
    candidates = range(scan_dims, len(shape))
    if override is not None:
        if not 0 <= override < len(shape):
            raise ValueError(f"shard_dim gave dim {override} for shape {shape}.")
        candidates = [override]

    def search(pad: bool) -> tuple[int, ...] | None:
        """The dim of each axis, by the order that `partition` documents."""
        best, best_key = None, None
        for dims in itertools.product(candidates, repeat=len(axes)):
            stored, fits = _stored(shape, model, dims, axes, sizes)
            if not fits or (not pad and stored != shape):
                continue
            distinct = set(dims)
            key = (
                math.prod(stored),
                sum(bool(model[d]) for d in distinct),
                len(distinct),
                -max(local[d] for d in distinct),
                dims,
            )
            if best_key is None or key < best_key:
                best, best_key = dims, key
        return best

    dims = None
    if stage == 0:
        reason = "stage 0 shards no state"
    elif skip:
        reason = skip
    elif not free:
        reason = f"its own spec already uses {shard_axes}"
    elif not axes:
        reason = f"one device on {free}"
    elif not shape:
        reason = "scalar"
    elif math.prod(local) < shards:
        reason = f"{math.prod(local)} elements are fewer than {shards} shards"
    elif not candidates:
        reason = f"every dim is scanned over (scan_dims={scan_dims})"
    elif (dims := search(pad)) is None:
        reason = f"no dim divides by {shards}" + (
            ", and padding would split a model axis's shards" if pad else ", and pad=False"
        )
        if override is not None and pad:
            raise ValueError(f"shard_dim gave dim {override} of {shape}, but {reason}.")
    else:
        reason = ""
    if dims is None:
        return whole, shape, reason
    stored, _ = _stored(shape, model, dims, axes, sizes)
    shard = tuple(
        tuple(a for a, d in zip(axes, dims, strict=True) if d == i) for i in range(len(shape))
    )
    if stored != shape:
        grown = [f"dim {i}: {a} to {b}" for i, (a, b) in enumerate(zip(shape, stored)) if a != b]
        why = "no dim divides" if override is None else "shard_dim chose it"
        reason = f"padded, {why}: " + ", ".join(grown)
    return shard, stored, reason


def _stored(
    shape: tuple[int, ...], model: Spec, dims: Sequence[int], axes: Axes, sizes: dict[str, int]
) -> tuple[tuple[int, ...], bool]:
    """The padded shape, and whether padding leaves the dims of model axes alone."""
    factors = [1] * len(shape)
    for dim, axis in zip(dims, axes, strict=True):
        factors[dim] *= sizes[axis]
    stored, fits = list(shape), True
    for dim in set(dims):
        block = factors[dim] * math.prod(sizes[a] for a in model[dim])
        stored[dim] = -(-shape[dim] // block) * block
        fits &= stored[dim] == shape[dim] or not model[dim]
    return tuple(stored), fits


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


def raise_all(message: str, problems: Iterable[str]) -> None:
    """Raises one ValueError that lists all problems, if there are any."""
    problems = list(problems)
    if problems:
        raise ValueError("\n".join([message + ":", *problems]))


def to_spec(axes: Iterable[Axes]) -> P:
    """A PartitionSpec from the mesh axes of each dim."""
    return P(*(a[0] if len(a) == 1 else a or None for a in axes))


def from_spec(spec: P, ndim: int) -> Spec:
    """The mesh axes of each dim from a PartitionSpec."""
    if not isinstance(spec, P):
        raise TypeError(f"expected a PartitionSpec or None, got {spec!r}.")
    if len(spec) > ndim:
        raise ValueError(f"{spec} has {len(spec)} entries for an array of {ndim} dims.")
    if any(entry is P.UNCONSTRAINED for entry in spec):
        raise ValueError(f"{spec} leaves a dim open; name its axes, or None.")
    entries = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec]
    return tuple(entries) + ((),) * (ndim - len(spec))


def restrict(spec: P, axes: Iterable[str]) -> P:
    """A PartitionSpec without the axes that are not among `axes`."""
    return to_spec(tuple(a for a in dim if a in axes) for dim in from_spec(spec, len(spec)))


def axes_size(mesh: Mesh | AbstractMesh, axes: Iterable[str]) -> int:
    """The number of devices along some mesh axes."""
    return math.prod(mesh.shape[axis] for axis in axes)


def is_inexact(dtype: Any) -> bool:
    """Whether arrays of this dtype can have gradients."""
    return jnp.issubdtype(dtype, jnp.inexact)


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


def _bytes(mesh: Mesh | AbstractMesh, shape: tuple[int, ...], spec: P, dtype: Any) -> int:
    shards = axes_size(mesh, sum(from_spec(spec, len(shape)), ()))
    return math.prod(shape) // shards * dtype.itemsize


def _spec_text(spec: P) -> str:
    return str(spec).replace("PartitionSpec", "P")


def is_spec(x: Any) -> bool:
    """Whether a node of a tree of specs is a leaf."""
    return x is None or isinstance(x, P)


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
    twice = [a for a, n in collections.Counter(asked).items() if n > 1]
    if twice or not shard_axes:
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


def broadcast_prefix(name: str, prefix: Any, tree: Any, is_leaf: Any = None) -> list[Any]:
    """The leaves of a prefix tree, one for each leaf of `tree`."""
    try:
        full = jax.tree.broadcast(prefix, tree, is_leaf=is_leaf)
    except ValueError as error:
        raise ValueError(
            f"{name} must be a tree of this structure, or a prefix of it: "
            f"{str(error).replace('broadcast_prefix prefix_tree', 'prefix')}\n"
            f"  structure: {jax.tree.structure(tree)}"
        ) from error
    return jax.tree.structure(tree).flatten_up_to(full)


def _infer_specs(
    paths: list[str], values: list[Any], mesh: Mesh | AbstractMesh, data_axes: set[str]
) -> list[P]:
    """Specs of arrays that know theirs; nothing is assumed on a mesh with model axes."""
    model_axes = {a for a, n in mesh.shape.items() if n > 1} - data_axes
    specs, unknown = [], []
    for path, value in zip(paths, values, strict=True):
        sharding = getattr(value, "sharding", None)
        if isinstance(value, jax.core.Tracer):
            sharding = jax.typeof(value).sharding
        known = isinstance(sharding, NamedSharding) and model_axes <= set(sharding.mesh.axis_names)
        if isinstance(value, jax.core.Tracer):
            types = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))
            known = all(types.get(a) == AxisType.Explicit for a in model_axes)
        if known or not model_axes:
            specs.append(sharding.spec if known else P())
        else:
            unknown.append(f"  {path}: {type(value).__name__} without a NamedSharding on this mesh")
            specs.append(P())
    raise_all(
        f"partition: the mesh has model axes {sorted(model_axes)}, and these leaves do not say how "
        "they are sharded over them. Pass specs= (PartitionSpec() where a leaf is replicated)",
        unknown,
    )
    return specs
