"""One leaf's reduce-scatter and all-gather, padding, and the global norm."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax import lax
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.sharding import get_abstract_mesh

from zerojax._contexts import current_mesh, manual_axes, to_stored
from zerojax._leaf_plan import LeafPlan
from zerojax._partition import Partition
from zerojax._specs import Spec, axes_size, from_spec, restrict, widened


def split_view(part: Partition, leaf: LeafPlan) -> LeafPlan:
    """The same leaf with each dim that model *and* shard axes share viewed as two dims.

    A reduce-scatter along a dim that an automatic axis shards too would permute its order; along
    the second half of the view `(model shards, rest)` it does not. Where no dim is shared the
    view is the leaf itself.
    """
    shape, stored, model, shard = [], [], [], []
    for n, s, m, z in zip(leaf.shape, leaf.stored, leaf.model, leaf.shard, strict=True):
        if m and z:
            blocks = axes_size(part.mesh, m)
            shape += [blocks, n // blocks]
            stored += [blocks, s // blocks]
            model += [m, ()]
            shard += [(), z]
        else:
            shape, stored, model, shard = [*shape, n], [*stored, s], [*model, m], [*shard, z]
    if len(shape) == len(leaf.shape):
        return leaf
    return dataclasses.replace(
        leaf, shape=tuple(shape), stored=tuple(stored), model=tuple(model), shard=tuple(shard)
    )


def to_view(part: Partition, leaf: LeafPlan, view: LeafPlan, x: jax.Array) -> jax.Array:
    """A global array in its shard spec as its `split_view`; moves nothing."""
    return x if view is leaf else _reshape_blocks(part, leaf, view, x)


def merge_view(part: Partition, leaf: LeafPlan, view: LeafPlan, x: jax.Array) -> jax.Array:
    """Undoes `to_view`; moves nothing."""
    return x if view is leaf else _reshape_blocks(part, view, leaf, x)


def _reshape_blocks(part: Partition, before: LeafPlan, after: LeafPlan, x: jax.Array) -> jax.Array:
    shape = local_shape(part, after.stored, from_spec(after.shard_spec, len(after.stored)))
    reshape = jax.shard_map(
        lambda x: x.reshape(shape),
        mesh=current_mesh(part.mesh), in_specs=before.shard_spec, out_specs=after.shard_spec,
        check_vma=False,
    )  # fmt: skip
    return reshape(x)


def scatter(
    part: Partition, leaf: LeafPlan, view: LeafPlan, x: jax.Array, rest: tuple[str, ...]
) -> jax.Array:
    """Sums over the data axes; each device keeps its shard. In a Manual region.

    The last one of `shard_axes` comes first: over the axes before it, which may be the slow ones,
    then go shards only.

    Args:
      part: the partition.
      leaf: the leaf's plan.
      view: its `split_view`, or `leaf` itself where the model axes are Manual already.
      x: one device's gradient in its natural shape.
      rest: further axes to sum over, along which the leaf is not sharded; on the shard.

    Returns:
      This device's shard of the view's stored shape.
    """

    def collective(x: jax.Array) -> jax.Array:
        x = pad(_split(leaf, view, x), view)
        for axis, dim in reversed(_shard_steps(part, view)):
            x = lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
        return lax.psum(x, rest) if rest else x

    return fully_manual(collective, leaf, view)(x)


def take(part: Partition, leaf: LeafPlan, view: LeafPlan, x: jax.Array) -> jax.Array:
    """This device's shard of an array that every device holds whole. In a Manual region."""

    def collective(x: jax.Array) -> jax.Array:
        x = pad(_split(leaf, view, x), view)
        for dim, axes in enumerate(view.shard):
            if axes:
                size = x.shape[dim] // axes_size(part.mesh, axes)
                x = lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, dim)
        return x

    return fully_manual(collective, leaf, view)(x)


def gather(part: Partition, leaf: LeafPlan, view: LeafPlan, x: jax.Array) -> jax.Array:
    """The whole array, natural shape, typed invariant, from every device's shard of the view.

    The first one of `shard_axes` comes first, as in `scatter` it comes last.
    """

    def collective(x: jax.Array) -> jax.Array:
        for axis, dim in _shard_steps(part, view):
            x = lax.all_gather(x, axis, axis=dim, tiled=True, to="invarying")
        return _merge(leaf, view, unpad(x, view))

    return fully_manual(collective, view, leaf)(x)


def _shard_steps(part: Partition, view: LeafPlan) -> list[tuple[str, int]]:
    """The shard axes of a leaf, from the first to the last of the partition's, with their dims."""
    dims = {axis: dim for dim, axes in enumerate(view.shard) for axis in axes}
    return [(axis, dims[axis]) for axis in part.shard_axes if axis in dims]


def zeros(part: Partition, view: LeafPlan, dtype: Any) -> jax.Array:
    """One device's shard of zeros in a view's stored shape. In a Manual region."""
    axes = from_spec(view.shard_spec, len(view.stored))
    shape = local_shape(part, view.stored, axes, manual_axes())
    # Through an empty collective: XLA then shards them over the model axes.
    return fully_manual(lambda x: x, view, view)(jnp.zeros(shape, dtype))


def total(view: LeafPlan, x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """The sum over Manual axes of a device's shard of a view."""
    return fully_manual(lambda x: lax.psum(x, tuple(axes)), view, view)(x) if axes else x


def unsharded_axes(part: Partition, leaf: LeafPlan) -> tuple[str, ...]:
    """The data axes that a leaf is summed over without being sharded over them."""
    spec_axes = leaf.model_axes + leaf.shard_axes
    return tuple(a for a in part.data_axes if a not in spec_axes and part.mesh.shape[a] > 1)


def fully_manual(fn: Callable[..., Any], leaf: LeafPlan, view: LeafPlan) -> Callable[..., Any]:
    """Runs a collective with the remaining, model axes Manual too.

    In a region that is manual over the data axes only, XLA would all-gather a tensor-sharded
    array over the model axes before each collective.
    """
    rest = set(get_abstract_mesh().axis_names) - manual_axes()
    if not rest:
        return fn
    before, after = (restrict(plan.model_spec, rest) for plan in (leaf, view))
    checked = vma_is_checked()
    return jax.shard_map(fn, in_specs=before, out_specs=after, axis_names=rest, check_vma=checked)


def local_shape(
    part: Partition, shape: Sequence[int], axes: Spec, manual: Iterable[str] | None = None
) -> tuple[int, ...]:
    """The shape of one device's block, over all mesh axes or only the Manual ones."""
    return tuple(
        n // axes_size(part.mesh, [a for a in dim if manual is None or a in manual])
        for n, dim in zip(shape, axes, strict=True)
    )


def vma_is_checked() -> bool:
    """Whether the enclosing Manual region has types: `shard_map(..., check_vma=True)`."""
    axis = next(iter(manual_axes()))
    return bool(jax.typeof(lax.axis_index(axis)).manual_axis_type.varying)


def _split(leaf: LeafPlan, view: LeafPlan, x: jax.Array) -> jax.Array:
    """One device's block of a leaf as its block of the view; all axes are Manual here."""
    if view is leaf:
        return x
    dims = zip(x.shape, leaf.model, leaf.shard, strict=True)
    return x.reshape([size for n, m, s in dims for size in ([1, n] if m and s else [n])])


def _merge(leaf: LeafPlan, view: LeafPlan, x: jax.Array) -> jax.Array:
    """Undoes `_split`."""
    if view is leaf:
        return x
    sizes = iter(x.shape)
    shape = []
    for m, s in zip(leaf.model, leaf.shard, strict=True):
        blocks = next(sizes) if m and s else 1
        shape.append(blocks * next(sizes))
    return x.reshape(shape)


def pad(x: jax.Array, view: LeafPlan) -> jax.Array:
    """From a natural to a stored shape; only dims that no model axis shards ever grow."""
    widths = [(0, s - n) for n, s in zip(view.shape, view.stored, strict=True)]
    return jnp.pad(x, widths) if view.padded else x


def unpad(x: jax.Array, view: LeafPlan) -> jax.Array:
    """Undoes `pad`."""
    for dim, (n, s) in enumerate(zip(view.shape, view.stored, strict=True)):
        x = lax.slice_in_dim(x, 0, n, axis=dim) if n != s else x
    return x


def global_norm(updates: Any) -> jax.Array:
    """The Euclidean norm over all leaves of a tree, each element counted once.

    Right under jit (Auto and Explicit axes) and inside a Manual region, where a leaf's type says
    over which axes it is sharded; there it costs one psum per distinct set of such axes.

    Args:
      updates: tree of arrays; inside a Manual region the shards of one.

    Returns:
      A scalar, float32 or wider; invariant over all axes in a Manual region.

    Raises:
      TypeError: inside a Manual region with `check_vma=False`, which has no types to ask.

    >>> float(global_norm({"a": jnp.array([3.0]), "b": jnp.array(4.0)}))
    5.0
    """
    if manual_axes() and not vma_is_checked():
        raise TypeError(
            "zerojax.global_norm: inside jax.shard_map(check_vma=False) no type says over which "
            "axes a leaf is sharded. Remove check_vma=False."
        )
    return zerojax_global_norm(jax.tree.leaves(updates))


@jax.jit  # as one equation of this name the shard-locality walk can tell it from a plain sum
def zerojax_global_norm(leaves: list[jax.Array]) -> jax.Array:
    """The norm of a list of arrays; see `global_norm`."""
    groups = defaultdict(list)
    for x in leaves:
        groups[tuple(sorted(jax.typeof(x).manual_axis_type.varying))].append(_sum_of_squares(x))
    sums = [lax.psum(sum(parts), axes) if axes else sum(parts) for axes, parts in groups.items()]
    return jnp.sqrt(sum(sums, jnp.zeros((), jnp.float32)))


class ClipByGlobalNormState(NamedTuple):
    """`clip_by_global_norm` has no state."""


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """`optax.clip_by_global_norm` that is also right on shards inside a Manual region.

    Args:
      max_norm: gradients with a larger `zerojax.global_norm` are scaled down to it.

    Returns:
      A gradient transformation, for use inside `zerojax.zero` or outside.

    >>> tx = clip_by_global_norm(1.0)
    >>> grads = {"w": jnp.array([3.0, 4.0])}
    >>> tx.update(grads, tx.init(grads))[0]["w"].tolist()
    [0.6000000238418579, 0.800000011920929]
    """

    def init(params: Any) -> ClipByGlobalNormState:
        return ClipByGlobalNormState()

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        norm = global_norm(updates)

        def clip(x: jax.Array) -> jax.Array:
            clipped = (x / norm.astype(x.dtype)) * max_norm
            return jnp.where(norm < max_norm, x, clipped.astype(x.dtype))

        return jax.tree.map(clip, updates), state

    return optax.GradientTransformation(init, update)


def norm_of_shards(part: Partition, grads: Any) -> jax.Array:
    """The global norm of a gradient tree in an Auto-mode program: one scalar all-reduce."""
    leaves = [leaf for leaf in part.leaves if leaf.trainable]
    values = [
        to_stored(part.mesh, x, leaf.stored, leaf.shard_spec)
        for x, leaf in zip(jax.tree.leaves(grads), part.leaves, strict=True)
        if leaf.trainable
    ]
    mesh = current_mesh(part.mesh)
    axes = tuple(a for a in mesh.axis_names if mesh.shape[a] > 1)

    def local(*shards: jax.Array) -> jax.Array:
        total = jnp.zeros((), jnp.float32)
        for leaf, x in zip(leaves, shards, strict=True):
            # Of the devices that hold the same elements, the first one counts them.
            same = tuple(a for a in axes if a not in leaf.model_axes + leaf.shard_axes)
            squares = _sum_of_squares(x)
            total += jnp.where(lax.axis_index(same) == 0, squares, 0) if same else squares
        return jnp.sqrt(lax.psum(total, axes) if axes else total)

    specs = tuple(leaf.shard_spec for leaf in leaves)
    region = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    return region(*values)


def _sum_of_squares(x: jax.Array) -> jax.Array:
    x = jnp.abs(x)
    return jnp.sum(jnp.square(x.astype(widened(x.dtype))))
