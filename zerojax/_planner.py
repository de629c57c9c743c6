"""`partition`: makes the plan for a tree of parameters."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax._boxes import declared_specs, pure
from zerojax._leaf_plan import LeafPlan, plan_dims
from zerojax._partition import Partition, dtype_of
from zerojax._specs import (
    Axes,
    Spec,
    as_axes,
    axes_of_type,
    broadcast_prefix,
    from_spec,
    is_inexact,
    is_spec,
    raise_all,
    to_spec,
)


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
      params: tree of arrays or `jax.ShapeDtypeStruct`s. Of flax's boxes and variables too; the
        plan is then for the arrays in variables (`nnx.as_pure`), as `nnx.Optimizer` has it.
      mesh: the mesh; axes that are neither sharded nor replicated over are *model* axes.
      specs: the model PartitionSpecs (tensor, pipeline, expert axes), a tree or a prefix of one;
        `None` reads what flax's boxes (by `flax.linen.logical_axis_rules`, if they are logical)
        and variables declare, else the `NamedSharding`s of the arrays; where some leaves declare
        theirs, one that says nothing is replicated, as flax has it.
      shard_axes: data axes to sum gradients and shard state over. A leaf is neither summed nor
        sharded over an axis that its own spec uses (an expert-parallel weight). Of several name
        the fastest one last: gradients are scattered over it first and parameters gathered last.
      replicate_axes: data axes to sum gradients over, on the shard (HSDP).
      stage: 0 data parallelism, 1 shards optimizer state, 2 also gradient accumulators, 3 also
        the parameters, which then live padded to their stored shapes.
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
    shard_axes, replicate_axes = as_axes(shard_axes), as_axes(replicate_axes)
    _check_axes(mesh, shard_axes, replicate_axes)
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage must be 0, 1, 2 or 3, got {stage!r}.")
    boxed, params = params, pure(params)
    with_paths, treedef = jax.tree.flatten_with_path(params)
    paths = [jax.tree_util.keystr(path) for path, _ in with_paths]
    values = [value for _, value in with_paths]
    if specs is None:
        model_axes = {*mesh.shape} - {*shard_axes, *replicate_axes}
        leaf_specs = _infer_specs(paths, values, declared_specs(boxed), mesh, model_axes)
    else:
        leaf_specs = broadcast_prefix("partition: specs", pure(specs), params, is_spec)
    scans = broadcast_prefix("partition: scan_dims", scan_dims, params)

    sizes = dict(mesh.shape)
    rule = functools.lru_cache(maxsize=None)(
        functools.partial(plan_dims, sizes=sizes, shard_axes=shard_axes, pad=pad, stage=stage)
    )
    leaves, problems = [], []
    for path, value, spec, scan in zip(paths, values, leaf_specs, scans, strict=True):
        try:
            shape, dtype = tuple(np.shape(value)), dtype_of(value)
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
            leaves.append(LeafPlan(path, shape, dtype, model, shard, stored, reason, scan))
        except (ValueError, TypeError) as error:
            problems.append(f"  {path or '(root)'}: {error}")
    raise_all("partition: these leaves cannot be planned", problems)
    return Partition(mesh, stage, shard_axes, replicate_axes, treedef, tuple(leaves))


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
    paths: list[str],
    values: list[Any],
    declared: list[P | None],
    mesh: Mesh | AbstractMesh,
    model_axes: set[str],
) -> list[P]:
    """Specs that are declared or that arrays know; none is assumed on a mesh with model axes."""
    model_axes = {axis for axis in model_axes if mesh.shape[axis] > 1}
    specs = [
        _known_spec(value, model_axes) if spec is None else spec
        for spec, value in zip(declared, values, strict=True)
    ]
    silent = model_axes and all(spec is None for spec in declared)  # flax: bare is replicated
    unknown = [
        f"  {path}: {type(value).__name__} without a NamedSharding on this mesh"
        for path, value, spec in zip(paths, values, specs, strict=True)
        if spec is None and silent
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
