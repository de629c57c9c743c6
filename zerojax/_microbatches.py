"""One device's part of a step: its microbatches, and when their gradients are reduced."""

from collections.abc import Iterable
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from zerojax._batch import Batch
from zerojax._formulation import Formulation, Options, choose_formulation
from zerojax._shard import Shard
from zerojax._specs import widened

Leaves = dict[int, jax.Array]  # some of the parameters' leaves, by their index in the partition


def device_gradients(
    options: Options, batch: Batch, held: list[jax.Array], args: list[jax.Array], loss_scale: Any
) -> tuple[jax.Array, Any, list[jax.Array], str]:
    """One device's program. Inside a region that is Manual over the data axes.

    Args:
      options: of `value_and_grad`.
      batch: the plan of the loss's arguments.
      held: what this device holds of each parameter; at stage 3 its shard of the `split_view`.
      args: the leaves of its part of the arguments.
      loss_scale: `None`, or a scalar with which the loss is multiplied before the backward pass.

    Returns:
      The loss, the auxiliary output, the reduced gradients of the trained leaves as shards of
      their `split_view`s, and a text that says which formulation was chosen.
    """
    part, accumulate = options.part, options.accumulate
    leaves = part.leaves
    shared, split = batch.on_device(args, lax.axis_index(part.data_axes))
    example = batch.microbatch(shared, [x[0] for x in split], 0)
    step, layer, text = choose_formulation(options, batch, example)
    how, wire = layer or step, step.wire
    local_first = part.stage == 1 and accumulate > 1  # all microbatches but the last
    weights = {
        i: wire.weight(leaf, x)
        for i, (leaf, x) in enumerate(zip(leaves, held, strict=True))
        if i not in how.shards or local_first
    }

    def microbatch(
        how: Formulation, slices: list[jax.Array], index: Any, totals: Leaves
    ) -> tuple[Leaves, Any]:
        """The gradients, and the loss, its weight and the auxiliary output, of one microbatch."""
        arguments = batch.microbatch(shared, slices, index)

        def loss_of(inputs: Leaves) -> Any:
            def param(i: int) -> Any:
                if i not in how.shards:
                    return inputs.get(i, weights.get(i))
                slot = inputs.get(i)
                return Shard(
                    held[i], slot, totals.get(i), leaf=leaves[i], mesh=part.mesh, wire=wire
                )

            loss, rest = how.loss.call([*map(param, range(len(leaves)))], arguments)
            scaled = loss if loss_scale is None else loss * loss_scale.astype(loss.dtype)
            return scaled, (loss, *rest)

        inputs = {
            i: wire.zeros(leaves[i], how.layered[i]) if i in how.layered else weights[i]
            for i in options.trained
        }
        return jax.grad(loss_of, has_aux=True)(inputs)

    def add_up(
        how: Formulation, reduced: frozenset[int], split: list[jax.Array], count: int
    ) -> tuple[Leaves, Any]:
        """The sums of the gradients of microbatches, and their outputs stacked."""

        def add(totals: Leaves, xs: Any) -> tuple[Leaves, Any]:
            slices, index = xs
            grads, (loss, *rest) = microbatch(how, slices, index, {})
            grads = reduce(grads, reduced - how.layered.keys())
            totals = {i: total + grads[i].astype(total.dtype) for i, total in totals.items()}
            return totals, (loss.astype(widened(loss.dtype)), *rest)

        totals = {
            i: wire.zeros(leaves[i], widened(leaves[i].dtype))
            if i in reduced
            else jnp.zeros_like(weights[i], widened(leaves[i].dtype))
            for i in options.trained
        }
        return lax.scan(add, totals, (split, jnp.arange(count)))

    def reduce(grads: Leaves, some: Iterable[int]) -> Leaves:
        return grads | {i: wire.gradient(leaves[i], grads[i]) for i in some}

    if accumulate == 1:
        reduced = frozenset(how.layered)
        grads, out = microbatch(how, [x[0] for x in split], 0, {})
    elif layer and local_first:
        reduced, last = frozenset(layer.layered), accumulate - 1
        totals, out = add_up(step, frozenset(), [x[:last] for x in split], last)
        delivered = {i: totals[i] for i in reduced}
        grads, out_of_last = microbatch(layer, [x[last] for x in split], last, delivered)
        grads |= {i: totals[i] + grads[i] for i in grads.keys() - reduced}
        out = jax.tree.map(lambda xs, x: jnp.append(xs, x[None], axis=0), out, out_of_last)
    else:
        reduced = {i for i in options.trained if leaves[i].shard_axes and part.stage > 1}
        reduced = frozenset(reduced)
        grads, out = add_up(how, reduced, split, accumulate)
    grads = reduce(grads, sorted(grads.keys() - reduced))
    grads = {i: wire.sum_copies(leaves[i], grads[i]) for i in options.trained}
    return *_combine(options, how, grads, out, loss_scale), text


def _combine(
    options: Options, how: Formulation, grads: Leaves, out: Any, loss_scale: Any
) -> tuple[jax.Array, Any, list[jax.Array]]:
    """Loss, auxiliary output and gradients of all devices and microbatches together."""
    part, accumulate = options.part, options.accumulate
    devices = part.data_size

    def over_devices(x: jax.Array) -> jax.Array:
        x = how.wire.vary(x, part.data_axes)
        return lax.psum(x, part.data_axes) if devices > 1 or how.wire.manual_axes else x

    loss, weight, aux = out
    if accumulate > 1:
        loss, weight = jnp.sum(loss), jnp.sum(weight)
        aux = [
            x.reshape(-1, *x.shape[2:]) if way == "concat" else jnp.sum(x, 0) / accumulate
            for x, way in zip(aux, how.loss.aux, strict=True)
        ]
    loss = over_devices(loss.astype(widened(loss.dtype)))
    shards = [grads[i] for i in options.trained]
    if options.reduction == "weighted":
        weight = over_devices(weight.astype(widened(loss.dtype)))
        loss, scale = loss / weight, devices / weight
        shards = [g.astype(widened(g.dtype)) for g in shards]
        shards = [g * scale.astype(g.dtype) for g in shards]
    elif options.reduction == "mean" and devices * accumulate > 1:
        loss, shards = loss / (devices * accumulate), [g / accumulate for g in shards]
    if loss_scale is not None:
        shards = [g.astype(widened(g.dtype)) for g in shards]
        shards = [g / loss_scale.astype(g.dtype) for g in shards]
    dtypes = [options.grad_dtype or part.leaves[i].dtype for i in options.trained]
    if loss_scale is not None and options.grad_dtype is None:
        dtypes = [*map(widened, dtypes)]  # divided, they may be too small for the parameter's
    shards = [g.astype(dtype) for g, dtype in zip(shards, dtypes, strict=True)]
    aux = [
        x if way == "concat" else (over_devices(x) / devices).astype(x.dtype)
        for x, way in zip(aux, how.loss.aux, strict=True)
    ]
    return loss.astype(how.loss.dtype), how.loss.aux_treedef.unflatten(aux), shards
