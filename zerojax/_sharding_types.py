"""How optimizer state is sharded, asked of JAX's sharding types.

The question is put on the *twin*: an abstract mesh of the same axes, all Explicit and of size 1,
so that natural shapes divide. Nothing is computed there; only types flow.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from zerojax._leaf_plan import LeafPlan, plan_dims
from zerojax._partition import Partition
from zerojax._specs import axes_size, from_spec, to_spec

MARK = "zerojax_twin"  # an axis that no user's mesh has
NO_MESH = AbstractMesh((), ())


@dataclasses.dataclass(frozen=True)
class StateLeaf:
    """One leaf of optimizer state: natural shape, stored (padded) shape, dtype and spec."""

    shape: tuple[int, ...]
    stored: tuple[int, ...]
    dtype: Any
    spec: P


def twin_mesh(mesh: Mesh | AbstractMesh) -> AbstractMesh:
    """The abstract Explicit twin of a mesh, every axis of size 1."""
    names = (*mesh.axis_names, MARK)
    return AbstractMesh((1,) * len(names), names, axis_types=(AxisType.Explicit,) * len(names))


@contextlib.contextmanager
def tracing_on(mesh: AbstractMesh) -> Iterator[None]:
    """Enters an abstract mesh from whatever mesh the caller stands on."""
    with use_abstract_mesh(NO_MESH), use_abstract_mesh(mesh):
        yield


def on_twin(x: Any) -> bool:
    """Whether an array is being traced on the twin."""
    return MARK in jax.typeof(x).sharding.mesh.axis_names


def typed(part: Partition, shape: tuple[int, ...], dtype: Any, spec: P) -> jax.ShapeDtypeStruct:
    """An abstract array on the twin."""
    sharding = NamedSharding(twin_mesh(part.mesh), spec)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def state_specs(part: Partition, init: Callable[[Any], Any], params: Any) -> Any:
    """The `StateLeaf`s of the state that `init` makes, from the types that flow through it.

    Args:
      part: the partition.
      init: an optimizer's `init`.
      params: tree of `typed` parameters.

    Returns:
      The tree of `init`'s result, with a `StateLeaf` in place of each array.
    """
    with tracing_on(twin_mesh(part.mesh)):
        state = jax.eval_shape(init, params)
    return jax.tree.map(lambda x: _state_leaf(part, x, _spec_of(x)), state)


def inner_state_specs(
    part: Partition, init: Callable[[Any], Any], leaves: Sequence[LeafPlan], treedef: Any
) -> Any:
    """As `state_specs`, for the transformation inside `zero`, whose parameters are shards.

    Leaves that the types leave unsharded are decoded by shape (`lbfgs` builds its history with
    `jnp.zeros`), and if `init` cannot be traced on the twin, all are. A leaf that neither way has
    a sharded dim (`optax.flatten`'s vector, a factored moment without its parameter's sharded dim)
    is sharded as a parameter of its shape would be.
    """
    params = [typed(part, leaf.shape, leaf.dtype, leaf.shard_spec) for leaf in leaves]
    try:
        with tracing_on(twin_mesh(part.mesh)):
            state = jax.eval_shape(init, treedef.unflatten(params))
    except Exception:  # whatever an init raises on types that it never saw
        plain = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        with tracing_on(NO_MESH):
            state = jax.eval_shape(init, treedef.unflatten(plain))
    flat, state_def = jax.tree.flatten(state)
    shards = axes_size(part.mesh, part.shard_axes)
    specs = [_spec_of(x) for x in flat]
    open_ = [
        i for i, x in enumerate(flat)
        if x.size >= shards and not any(from_spec(specs[i], x.ndim))
    ]  # fmt: skip
    if open_ and shards > 1 and part.stage > 0:
        by_shape = _decode_by_shape(init, leaves, treedef, state)
        for i in open_:
            specs[i] = by_shape[i] or _own_spec(part, flat[i])
    return state_def.unflatten(
        [_state_leaf(part, x, spec) for x, spec in zip(flat, specs, strict=True)]
    )


def _spec_of(x: jax.ShapeDtypeStruct) -> P:
    return x.sharding.spec if isinstance(x.sharding, NamedSharding) else P()


def _state_leaf(part: Partition, x: jax.ShapeDtypeStruct, spec: P) -> StateLeaf:
    """Pads dims that do not divide, and drops the axes of a dim that cannot be padded."""
    axes, stored = list(from_spec(spec, x.ndim)), list(x.shape)
    for dim, dim_axes in enumerate(axes):
        block = axes_size(part.mesh, dim_axes)
        if stored[dim] % block and not set(dim_axes) <= set(part.shard_axes):
            axes[dim] = ()
        else:
            stored[dim] = -(-stored[dim] // block) * block
    return StateLeaf(x.shape, tuple(stored), x.dtype, to_spec(axes))


def _own_spec(part: Partition, x: jax.ShapeDtypeStruct) -> P:
    """The spec that a parameter of this shape would get."""
    shard, _, _ = plan_dims(
        x.shape, ((),) * x.ndim, 0, None, "",
        sizes=dict(part.mesh.shape), shard_axes=part.shard_axes, pad=True, stage=part.stage,
    )  # fmt: skip
    return to_spec(shard)


def _decode_by_shape(
    init: Callable[[Any], Any], leaves: Sequence[LeafPlan], treedef: Any, state: Any
) -> list[P | None]:
    """Grows every dim of every parameter by its own amount and sees which state dims follow.

    Returns:
      For each state leaf its spec, or `None` if no dim follows a sharded one, or one of a parameter
      that stays whole.
    """
    amounts = itertools.count(1)
    grown, followed = [], {}
    for leaf in leaves:
        shape = []
        for n, axes in zip(leaf.shape, from_spec(leaf.shard_spec, len(leaf.shape)), strict=True):
            amount = next(amounts)
            shape.append(n + amount)
            followed[amount] = (n, axes, not leaf.shard_axes)
        grown.append(jax.ShapeDtypeStruct(tuple(shape), leaf.dtype))
    flat, state_def = jax.tree.flatten(state)
    try:
        with tracing_on(NO_MESH):
            moved = jax.eval_shape(init, treedef.unflatten(grown))
    except Exception:  # an init may refuse the grown shapes
        return [None] * len(flat)
    flat_moved, moved_def = jax.tree.flatten(moved)
    if moved_def != state_def:
        return [None] * len(flat)

    def decode(before: jax.ShapeDtypeStruct, after: jax.ShapeDtypeStruct) -> P | None:
        if before.ndim != after.ndim:
            return None
        dims, used, stays_whole = [], set(), False
        for a, b in zip(before.shape, after.shape, strict=True):
            n, axes, whole = followed.get(b - a, (None, (), False))
            stays_whole |= n == a and whole
            # Two dims may follow one (galore's square): an axis shards the first.
            dims.append(axes if n == a and not used.intersection(axes) else ())
            used.update(dims[-1])
        return to_spec(dims) if any(dims) or stays_whole else None

    return [decode(a, b) for a, b in zip(flat, flat_moved, strict=True)]
