"""`value_and_grad`: gradients of a local loss, reduced to shards."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

from zerojax import _collectives, _contexts
from zerojax._batch import check_accumulate, plan_batch
from zerojax._boxes import boxed_as
from zerojax._contexts import (
    constrain,
    current_mesh,
    is_boundary,
    run_globally,
    standing_on,
    to_natural,
)
from zerojax._formulation import Options
from zerojax._leaf_plan import LeafPlan
from zerojax._loss import PLAIN, NotTraced
from zerojax._microbatches import device_gradients
from zerojax._partition import Partition, check_tree
from zerojax._specs import as_axes, restrict
from zerojax._wire import Wire


@dataclasses.dataclass(frozen=True, eq=False)
class GradientFunction:
    """What `value_and_grad` returns: call it with `(params, *args)`.

    Printed after its first call, it says how it differentiates the loss.

    Attributes:
      call: the function, whose first argument is the loss scale.
      options: what it was made from.
      aux_specs: PartitionSpecs of the auxiliary output, a tree prefix; `None` without `has_aux`.
      formulation: what was chosen when the loss was last traced; empty before.
    """

    call: Callable[..., Any]
    options: Options
    aux_specs: Any
    formulation: list[str]

    @property
    def part(self) -> Partition:
        """The partition that it was made for."""
        return self.options.part

    def __call__(self, params: Any, *args: Any, loss_scale: Any = None) -> Any:
        return self.call(loss_scale, params, *args)

    def __repr__(self) -> str:
        text = "".join(self.formulation) or "the loss has not been traced yet"
        return f"zerojax.value_and_grad at stage {self.part.stage}, {text}"


def value_and_grad(
    loss_fn: Callable[..., Any],
    part: Partition,
    *,
    accumulate: int = 1,
    has_aux: bool = False,
    aux_reduction: Any = None,
    reduction: Literal["mean", "sum", "weighted"] = "mean",
    batch_specs: Any = None,
    compute_dtype: Any = None,
    reduce_dtype: Any = None,
    grad_dtype: Any = None,
    trainable: Any = True,
    manual_axes: str | Sequence[str] = (),
) -> GradientFunction:
    """Like `jax.value_and_grad`, with gradients reduce-scattered to their shards.

    `loss_fn(params, *args)` runs on each device's part of the batch and need not know of it. If it
    calls `zerojax.unshard` on the weights of each layer, these are gathered (at stage 3) and their
    gradients are reduced layer by layer; otherwise once for all. `print` the result to see which.

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
        gradients add up locally and are reduced once; at stages 2 and 3 each is reduced as it
        comes, and the accumulators take 1/N of the memory.
      has_aux: whether `loss_fn` also returns auxiliary output.
      aux_reduction: "mean" or "concat" (per-example output, joined on dim 0 in the order of the
        batch), a tree prefix of aux. By default floating scalars are averaged and nothing else
        is allowed.
      reduction: how the losses of devices and microbatches combine. "weighted" divides the sum of
        the loss sums by the sum of the weights, which count as constants.
      batch_specs: PartitionSpecs of `args`, a tree prefix; `PartitionSpec()` for what is not per
        example. By default arrays are split on dim 0, and must agree on its size, and scalars are
        replicated. Typed PRNG keys that are replicated are folded with the device's and the
        microbatch's index.
      compute_dtype: dtype in which the loss sees floating parameters, such as bfloat16; in it they
        are gathered. Cast the batch yourself, and let the loss end in float32.
      reduce_dtype: dtype in which gradients are summed over devices; by default that in which they
        are computed, or added up. float32 beside a 16-bit `compute_dtype` doubles the bytes of the
        reduce-scatter and rounds once where 16 bits round at each device.
      grad_dtype: dtype of the gradients; by default that of each parameter. Use float32 beside
        `zero(master_dtype=)`. Microbatches add up in float32 or wider.
      manual_axes: model axes that `loss_fn` communicates over by itself (`psum`, `ppermute`); it
        then sees each device's block of a leaf whose spec uses them. The loss must come out the
        same along them, by its type.
      trainable: tree prefix of bools; where false the gradient is zero, and costs nothing (LoRA).

    Returns:
      `grad_fn(params, *args) -> (loss, grads)`, or `((loss, aux), grads)`, on global arrays, inside
      jit or outside. Gradients have the tree and the shapes of the parameters and
      `part.shard_specs`, integer and bool leaves zeros. Below stage 3 a padded leaf is unevenly
      sharded inside jit, and gathered where it leaves it or where the mesh axes are Explicit
      (`train_step` avoids both).
      `grad_fn(..., loss_scale=scale)` multiplies the loss before the backward pass and divides the
      reduced gradients, which then are float32 unless `grad_dtype` says otherwise.

    Raises:
      ValueError: from `grad_fn`: the batch does not divide by devices x `accumulate`, arguments
        disagree on its size, the loss reduces over the data axes itself, cannot be traced inside a
        Manual region, or is no floating scalar, or is typed varying over one of `manual_axes`; aux
        that needs `aux_reduction`; a parameter that some devices would not unshard as others do.
      TypeError: the loss calls `unshard` and uses another parameter without it, or computes with a
        parameter before it unshards it.

    References:
      Rajbhandari et al., "ZeRO", 2020, sections 5.1 to 5.3; Micikevicius et al., "Mixed Precision
      Training", 2018, section 3.

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
    check_accumulate(accumulate)
    manual_axes = as_axes(manual_axes)
    if unknown := [a for a in manual_axes if a not in part.model_axes]:
        raise ValueError(
            f"value_and_grad: manual_axes names {unknown}; the model axes of this partition are "
            f"{part.model_axes} (the data axes {part.data_axes} are Manual already)."
        )
    wire = Wire(part, reduction != "sum", compute_dtype, reduce_dtype, manual_axes)
    trained = tuple(i for i, train in enumerate(part.trained(trainable)) if train)
    views = [_collectives.split_view(part, leaf) for leaf in part.leaves]
    options = Options(
        loss_fn, part, wire, accumulate, has_aux, aux_reduction, reduction, grad_dtype, trained,
    )  # fmt: skip
    formulation: list[str] = []
    aux_specs = jax.tree.map(
        lambda how: P(part.data_axes) if how == "concat" else P(),
        aux_reduction,
        is_leaf=lambda how: how is None,
    )

    def run(params: Any, args: Any, loss_scale: Any, *, boundary: bool) -> Any:
        """The whole computation, on global arrays with the mesh axes in Auto mode."""
        batch = plan_batch(part, args, batch_specs, accumulate)
        held, held_specs = [], []
        for leaf, view, x in zip(part.leaves, views, jax.tree.leaves(params), strict=True):
            x = constrain(part.mesh, x, part.param_spec(leaf))
            held.append(_collectives.to_view(part, leaf, view, x) if part.stage == 3 else x)
            held_specs.append(view.shard_spec if part.stage == 3 else leaf.model_spec)
        pairs = zip(batch.specs, jax.tree.leaves(args), strict=True)
        leaves = [constrain(part.mesh, x, spec) for spec, x in pairs]

        def local(held: Any, leaves: Any, loss_scale: Any) -> Any:
            *result, formulation[:] = device_gradients(options, batch, held, leaves, loss_scale)
            return result

        region = jax.shard_map(
            local,
            mesh=current_mesh(part.mesh),
            in_specs=(in_region(held_specs), in_region(list(batch.specs)), P()),
            out_specs=[P(), aux_specs, in_region([views[i].shard_spec for i in trained])],
            axis_names=set(wire.region_axes),
            # Over data axes any model code runs, and the reductions are explicit; where the user
            # communicates as well, types tell what is still to be summed.
            check_vma=bool(manual_axes),
        )
        loss, aux, shards = region(held, leaves, loss_scale)
        reduced = dict(zip(trained, shards, strict=True))

        def gradient(i: int, leaf: LeafPlan) -> jax.Array:
            shape = part.param_shape(leaf)
            if i not in reduced:
                return constrain(part.mesh, jnp.zeros(shape, leaf.dtype), grad_spec(leaf, boundary))
            grad = _collectives.merge_view(part, leaf, views[i], reduced[i])
            grad = to_natural(part.mesh, grad, shape, leaf.shard_spec)
            return constrain(part.mesh, grad, grad_spec(leaf, boundary))

        grads = part.treedef.unflatten([gradient(i, leaf) for i, leaf in enumerate(part.leaves)])
        return ((loss, aux) if has_aux else loss), grads

    def in_region(specs: Any) -> Any:
        return jax.tree.map(lambda spec: restrict(spec, wire.region_axes), specs)

    def grad_spec(leaf: LeafPlan, boundary: bool) -> P:
        """Where a gradient is left; an uneven sharding cannot pass a boundary."""
        uneven = leaf.padded and part.stage < 3
        return leaf.model_spec if boundary and uneven else leaf.shard_spec

    def call(loss_scale: Any, params: Any, *args: Any) -> Any:
        if manual := _contexts.manual_axes():
            raise ValueError(
                f"value_and_grad: called inside a jax.shard_map over {sorted(manual)}, and makes "
                "its own. Call it outside, or use jax.value_and_grad and zero(local_gradients=)."
            )
        given = params
        params = part.treedef.unflatten(check_tree(part, params, "value_and_grad"))
        boundary = is_boundary(part.mesh, params, args)
        grad_specs = part.treedef.unflatten([grad_spec(leaf, boundary) for leaf in part.leaves])
        try:
            value, grads = run_globally(
                run, part.mesh, params, args, loss_scale,
                out_specs=((P(), aux_specs) if has_aux else P(), grad_specs),
                static={"boundary": boundary},
            )  # fmt: skip
            return value, boxed_as(given, grads)
        except NotTraced as failure:
            error = failure.__cause__ or failure
        natural = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(
                leaf.shape, options.wire.dtype(leaf), sharding=sharding
            ),
            part.treedef.unflatten(part.leaves),
            part.shardings(part.model_specs),
        )
        try:
            with standing_on(part.mesh):
                jax.eval_shape(loss_fn, natural, *args)
        except Exception:  # the model itself is at fault
            raise error from None
        raise ValueError(
            "value_and_grad: the loss can be traced on the global batch, but not on one device's "
            f"part of it inside a Manual region over {part.data_axes}: {error}\n"
            "Sharding constraints that name the data axes, or a NamedSharding(mesh, ...), cannot "
            "stand there, nor can code that relies on the size of the global batch. Constrain "
            f"with PartitionSpecs over model axes only, or {PLAIN}."
        ) from error

    return GradientFunction(call, options, aux_specs if has_aux else None, formulation)
