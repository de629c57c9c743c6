"""Gradients of a local loss, reduced to shards: where shard_map and psum_scatter live."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
from jax import lax
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

from zerojax import _collectives
from zerojax._batch import Batch, plan_batch
from zerojax._contexts import (
    as_typed,
    constrain,
    current_mesh,
    is_boundary,
    manual_axes,
    run_globally,
    standing_on,
)
from zerojax._leaf_plan import LeafPlan
from zerojax._loss import PLAIN, NotTraced, trace_loss
from zerojax._partition import Partition, check_tree
from zerojax._specs import restrict


@dataclasses.dataclass(frozen=True, eq=False)
class GradientFunction:
    """What `value_and_grad` returns: call it with `(params, *args)`.

    Attributes:
      call: the function.
      part: the partition that it was made for.
      aux_specs: PartitionSpecs of the auxiliary output, a tree prefix; `None` without `has_aux`.
    """

    call: Callable[..., Any]
    part: Partition
    aux_specs: Any

    def __call__(self, params: Any, *args: Any) -> Any:
        return self.call(params, *args)


def value_and_grad(
    loss_fn: Callable[..., Any],
    part: Partition,
    *,
    accumulate: int = 1,
    has_aux: bool = False,
    aux_reduction: Any = None,
    reduction: Literal["mean", "sum", "weighted"] = "mean",
    batch_specs: Any = None,
    grad_dtype: Any = None,
) -> GradientFunction:
    """Like `jax.value_and_grad`, with gradients reduce-scattered to their shards.

    `loss_fn(params, *args)` runs on each device's part of the batch and need not know of it.
    **Its loss must be a mean (or sum) over examples.** One that couples the examples of a batch
    (batch normalisation in training, contrastive losses, expert balancing), or a masked mean with
    unequal masks, means something else on a part of the batch, and no type can see this:
    try `zerojax.check` once. Such a loss takes `reduction="weighted"`, or plain
    `jax.value_and_grad` under jit, which `zerojax.zero` follows just as well.

    Args:
      loss_fn: `(params, *args) -> loss`, a floating scalar; `(loss, aux)` with `has_aux`; a pair
        `(loss_sum, weight)` in place of the loss with `reduction="weighted"`.
      part: the plan for `params`.
      accumulate: number of microbatches into which each device's part is split. At stage 1 their
        gradients add up locally and are reduced once; at stage 2 each is reduced as it comes, and
        the accumulators take 1/N of the memory.
      has_aux: whether `loss_fn` also returns auxiliary output.
      aux_reduction: "mean" or "concat" (per-example output, joined on dim 0 in the order of the
        batch), a tree prefix of aux. By default floating scalars are averaged and nothing else
        is allowed.
      reduction: how the losses of devices and microbatches combine. "weighted" divides the sum of
        the loss sums by the sum of the weights, which count as constants.
      batch_specs: PartitionSpecs of `args`, a tree prefix; `PartitionSpec()` for what is not per
        example. By default arrays are split on dim 0, and must agree on its size, scalars are
        replicated, and a typed PRNG key is folded with the device's and the microbatch's index.
      grad_dtype: dtype of the gradients; by default that of each parameter. Microbatches add up in
        float32 or wider.

    Returns:
      `grad_fn(params, *args) -> (loss, grads)`, or `((loss, aux), grads)`, on global arrays, inside
      jit or outside. Gradients have the shapes of the parameters and `part.shard_specs`, integer
      and bool leaves zeros. A padded leaf is unevenly sharded inside jit, and gathered where it
      leaves it or where the mesh axes are Explicit (`train_step` avoids both).

    Raises:
      ValueError: from `grad_fn`: the batch does not divide by devices x `accumulate`, arguments
        disagree on its size, the loss reduces over the data axes itself, cannot be traced inside a
        Manual region, or is no floating scalar; aux that needs `aux_reduction`.

    References:
      Rajbhandari et al., "ZeRO", 2020, sections 5.1 and 5.2 (reduce-scattered gradients).

    >>> part = zerojax.partition({"w": jnp.ones((16, 4))}, jax.make_mesh((8,), ("data",)))
    >>> def loss_fn(params, x):
    ...     return jnp.mean((x @ params["w"]) ** 2)
    >>> params = part.place({"w": jnp.ones((16, 4))})
    >>> loss, grads = zerojax.value_and_grad(loss_fn, part)(params, jnp.ones((32, 16)))
    >>> float(loss), grads["w"].sharding.spec
    (256.0, P('data', None))
    """
    if reduction not in ("mean", "sum", "weighted"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'weighted', got {reduction!r}.")
    if not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"accumulate must be at least 1, and an int, got {accumulate!r}.")
    trainable = [leaf for leaf in part.leaves if leaf.trainable]
    views = [_collectives.split_view(part, leaf) for leaf in trainable]
    devices = part.data_size
    aux_specs = jax.tree.map(
        lambda how: P(part.data_axes) if how == "concat" else P(),
        aux_reduction,
        is_leaf=lambda how: how is None,
    )

    def local(batch: Batch, params: Any, leaves: Any) -> Any:
        """One device's program: its loss, its gradients, and their reduction."""
        shared, split = batch.on_device(leaves, lax.axis_index(part.data_axes))
        first = [x[0] for x in split]
        typed_loss = as_typed(
            loss_fn, part.mesh, part.model_axes,
            (part.model_specs, *batch.treedef.unflatten(batch.specs)),
        )  # fmt: skip
        traced = trace_loss(
            typed_loss, params, batch.microbatch(shared, first, 0), data_axes=part.data_axes,
            has_aux=has_aux, aux_reduction=aux_reduction, weighted=reduction == "weighted",
        )  # fmt: skip
        flat = jax.tree.leaves(params)
        weights = [x for leaf, x in zip(part.leaves, flat, strict=True) if leaf.trainable]

        def microbatch(slices: list[jax.Array], index: Any) -> Any:
            args = batch.microbatch(shared, slices, index)

            def loss_of(weights: list[jax.Array]) -> Any:
                replaced = iter(weights)
                pairs = zip(part.leaves, flat, strict=True)
                return traced.call([next(replaced) if p.trainable else x for p, x in pairs], args)

            (loss, (weight, aux)), grads = jax.value_and_grad(loss_of, has_aux=True)(weights)
            return loss, weight, aux, reduce(grads) if part.stage == 2 else grads

        def reduce(grads: list[jax.Array]) -> list[jax.Array]:
            if reduction != "sum" and devices > 1:
                # Before the sum, which in 16 bits could overflow where the mean would not.
                grads = [g / devices for g in grads]
            return [
                _collectives.scatter(leaf, view, g, _collectives.unsharded_axes(part, leaf))
                for leaf, view, g in zip(trainable, views, grads, strict=True)
            ]

        if accumulate == 1:
            loss, weight, aux, grads = microbatch(first, 0)
        else:
            zeros = [jnp.zeros_like(x, _wide(x)) for x in weights]
            if part.stage == 2:
                takes = zip(trainable, views, zeros, strict=True)
                zeros = [_collectives.take(part, leaf, view, x) for leaf, view, x in takes]

            def add(total: list[jax.Array], xs: Any) -> Any:
                loss, weight, aux, grads = microbatch(*xs)
                total = [t + g.astype(t.dtype) for t, g in zip(total, grads, strict=True)]
                return total, (loss.astype(_wide(loss)), weight, aux)

            grads, (loss, weight, aux) = lax.scan(add, zeros, (split, jnp.arange(accumulate)))
            loss, weight = jnp.sum(loss), jnp.sum(weight)
            aux = [
                x.reshape(-1, *x.shape[2:]) if how == "concat" else jnp.sum(x, 0) / accumulate
                for x, how in zip(aux, traced.aux, strict=True)
            ]
        if part.stage < 2:
            grads = reduce(grads)
        loss = sum_over_data(loss.astype(_wide(loss)))
        if reduction == "weighted":
            weight = sum_over_data(weight.astype(_wide(loss)))
            loss, scale = loss / weight, devices / weight
            grads = [g.astype(_wide(g)) * scale.astype(_wide(g)) for g in grads]
        elif reduction == "mean" and devices * accumulate > 1:
            loss, grads = loss / (devices * accumulate), [g / accumulate for g in grads]
        dtypes = [grad_dtype or leaf.dtype for leaf in trainable]
        grads = [g.astype(dtype) for g, dtype in zip(grads, dtypes, strict=True)]
        aux = [
            x if how == "concat" else (sum_over_data(x) / devices).astype(x.dtype)
            for x, how in zip(aux, traced.aux, strict=True)
        ]
        return loss.astype(traced.dtype), traced.aux_treedef.unflatten(aux), grads

    def sum_over_data(x: jax.Array) -> jax.Array:
        return lax.psum(x, part.data_axes) if devices > 1 else x

    def run(params: Any, args: Any, *, boundary: bool) -> Any:
        """The whole computation, on global arrays with the mesh axes in Auto mode."""
        batch = plan_batch(part, args, batch_specs, accumulate)
        pairs = zip(part.leaves, jax.tree.leaves(params), strict=True)
        values = [constrain(part.mesh, x, leaf.model_spec) for leaf, x in pairs]
        pairs = zip(batch.specs, jax.tree.leaves(args), strict=True)
        leaves = [constrain(part.mesh, x, spec) for spec, x in pairs]
        region = jax.shard_map(
            functools.partial(local, batch),
            mesh=current_mesh(part.mesh),
            in_specs=(on_data_axes(part.model_specs), on_data_axes(list(batch.specs))),
            out_specs=(P(), aux_specs, on_data_axes([view.shard_spec for view in views])),
            axis_names=set(part.data_axes),
            check_vma=False,  # any model code runs; the reductions are explicit
        )
        loss, aux, shards = region(part.treedef.unflatten(values), leaves)
        reduced = zip(views, shards, strict=True)

        def gradient(leaf: LeafPlan) -> jax.Array:
            if not leaf.trainable:
                return jnp.zeros(leaf.shape, leaf.dtype)
            grad = _collectives.merge_view(part, leaf, *next(reduced))
            grad = _collectives.to_natural(part, grad, leaf.shape, leaf.shard_spec)
            return constrain(part.mesh, grad, grad_spec(leaf, boundary))

        grads = part.treedef.unflatten([gradient(leaf) for leaf in part.leaves])
        return ((loss, aux) if has_aux else loss), grads

    def on_data_axes(specs: Any) -> Any:
        return jax.tree.map(lambda spec: restrict(spec, part.data_axes), specs)

    def grad_spec(leaf: LeafPlan, boundary: bool) -> P:
        """Where a gradient is left; an uneven sharding cannot pass a boundary."""
        return leaf.model_spec if boundary and leaf.padded else leaf.shard_spec

    def call(params: Any, *args: Any) -> Any:
        if manual := manual_axes():
            raise ValueError(
                f"value_and_grad: called inside a jax.shard_map over {sorted(manual)}, and makes "
                "its own. Call it outside, or use jax.value_and_grad and zero(local_gradients=)."
            )
        check_tree(part, params, "value_and_grad")
        boundary = is_boundary(part.mesh, params, args)
        grad_specs = part.treedef.unflatten([grad_spec(leaf, boundary) for leaf in part.leaves])
        try:
            return run_globally(
                run, part.mesh, params, args,
                out_specs=((P(), aux_specs) if has_aux else P(), grad_specs),
                static={"boundary": boundary},
            )  # fmt: skip
        except NotTraced as failure:
            error = failure.__cause__ or failure
        try:
            with standing_on(part.mesh):
                jax.eval_shape(loss_fn, params, *args)
        except Exception:  # the model itself is at fault
            raise error from None
        raise ValueError(
            "value_and_grad: the loss can be traced on the global batch, but not on one device's "
            f"part of it inside a Manual region over {part.data_axes}: {error}\n"
            "Sharding constraints that name the data axes, or a NamedSharding(mesh, ...), cannot "
            "stand there, nor can code that relies on the size of the global batch. Constrain "
            f"with PartitionSpecs over model axes only, or {PLAIN}."
        ) from error

    return GradientFunction(call, part, aux_specs if has_aux else None)


def _wide(x: jax.Array) -> Any:
    """The dtype in which values of this one's are added up: float32 or wider."""
    return jnp.promote_types(x.dtype, jnp.float32)
