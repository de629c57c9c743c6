"""`zero` inside a Manual region: gradients summed to shards, as their types say."""

from typing import Any

import jax
from jax import lax

from zerojax import _collectives
from zerojax._contexts import manual_axes
from zerojax._leaf_plan import LeafPlan
from zerojax._partition import Partition
from zerojax._specs import axes_size, raise_all


def is_manual(part: Partition, where: str) -> bool:
    """Whether the data axes are Manual; raises where they are only half so, or have no types."""
    manual = manual_axes()
    if not manual:
        return False
    if missing := [a for a in part.data_axes if a not in manual]:
        raise ValueError(
            f"{where}: inside a jax.shard_map over {sorted(manual)}, but not over the data axes "
            f"{missing}. Add them to its axis_names, or call this outside of it."
        )
    if not _collectives.vma_is_checked():
        raise TypeError(
            f"{where}: inside jax.shard_map(check_vma=False) no type says whether a gradient is "
            "still to be summed. Remove check_vma=False, or call this outside of the shard_map."
        )
    auto = set(part.mesh.axis_names) - manual
    shared = [
        f"  {leaf.path}: {leaf.shard_spec}"
        for leaf in part.leaves
        if any(s and set(m) & auto for m, s in zip(leaf.model, leaf.shard, strict=True))
    ]
    raise_all(
        f"{where}: these leaves share a dim between a model axis that is automatic here and a data "
        "axis that is Manual, which would permute it. Make the model axes Manual too, or choose "
        "another dim with shard_dim=",
        shared,
    )
    return True


def reduce_to_shards(part: Partition, updates: Any, local_gradients: str | None) -> Any:
    """Inside a Manual region: every gradient summed as its type says, as this device's shard.

    Over a model axis that its own spec does not use, a gradient that varies is that of one of
    several copies (a tied weight in two pipeline stages), and their sum is due, on the shard.
    """

    def varying(leaf: LeafPlan, g: jax.Array) -> set[str]:
        axes = jax.typeof(g).manual_axis_type.varying
        return {a for a in part.data_axes if a in axes and part.mesh.shape[a] > 1}

    if local_gradients is None:
        unsure = []
        for leaf, g in zip(part.plans(updates), jax.tree.leaves(updates), strict=True):
            if axes := varying(leaf, g) - {*leaf.model_axes}:
                unsure.append(f"  {leaf.path}: varying over {sorted(axes)}")
        raise_all(
            "zero.update: these gradients are typed varying over the data axes, and no type says "
            'whether to average or to sum them. Pass zero(..., local_gradients="mean") if each is '
            'of the mean over the device\'s own examples, or "sum" if they only have to be summed',
            unsure,
        )

    def reduce(leaf: LeafPlan, g: jax.Array) -> jax.Array:
        local = varying(leaf, g)
        if local_gradients == "mean" and local:
            # Before the sum, which in 16 bits could overflow where the mean would not.
            g = g / axes_size(part.mesh, local)
        unreduced = set(jax.typeof(g).manual_axis_type.unreduced) & set(part.data_axes)
        shard_axes, shard = set(leaf.shard_axes), None
        if part.stage == 3:  # the transposed all-gather has summed it over these already
            local, shard, shard_axes = local - shard_axes, g, set()
        for pending in (local - {*leaf.model_axes}, unreduced):
            rest = tuple(a for a in part.data_axes if a in pending - shard_axes)
            if shard_axes and shard_axes <= pending and not (leaf.padded and pending is unreduced):
                g = _collectives.scatter(part, leaf, leaf, g, rest)
                shard = g
            elif pending:
                g = lax.psum(g, tuple(a for a in part.data_axes if a in pending))
        g = _collectives.take(part, leaf, leaf, g) if shard is None else g
        kind = jax.typeof(g).manual_axis_type
        copies = (kind.varying | kind.unreduced) & {*part.model_axes} - {*leaf.model_axes}
        return _collectives.total(leaf, g, sorted(copies))

    return part.map(reduce, updates)
