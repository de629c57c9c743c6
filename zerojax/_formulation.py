"""How a loss is differentiated: by step or by layer, as is seen from the loss itself."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

from zerojax import _collectives
from zerojax._batch import Batch
from zerojax._contexts import as_typed
from zerojax._leaf_plan import LeafPlan
from zerojax._loss import NotTraced, TracedLoss, trace_loss
from zerojax._partition import Partition
from zerojax._shard import Shard
from zerojax._shard_uses import REDUCED, ShardUses, Value, equations
from zerojax._specs import Axes, from_spec, raise_all, widened
from zerojax._wire import Wire


@dataclasses.dataclass(frozen=True, eq=False)
class Options:
    """What `value_and_grad` was asked for; `trained` has the indices of leaves with gradients."""

    loss_fn: Callable[..., Any]
    part: Partition
    wire: Wire
    accumulate: int
    has_aux: bool
    aux_reduction: Any
    reduction: Literal["mean", "sum", "weighted"]
    grad_dtype: Any
    trained: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Formulation:
    """A loss traced in one way; leaves are named by their index in the partition.

    Attributes:
      loss: the traced loss.
      wire: how weights reach it, and gradients leave it.
      shards: the parameters that it receives as `Shard`s; the others are whole weights.
      layered: those of them whose reduced gradients its backward pass delivers, and the dtypes in
        which it does.
    """

    loss: TracedLoss
    wire: Wire
    shards: frozenset[int] = frozenset()
    layered: Mapping[int, Any] = dataclasses.field(default_factory=dict)


def choose_formulation(
    options: Options, batch: Batch, example: Any
) -> tuple[Formulation, Formulation | None, str]:
    """Traces the loss on whole weights and, if it calls `unshard`, on shards.

    Args:
      options: of `value_and_grad`.
      batch: the plan of the loss's arguments.
      example: the arguments on one device.

    Returns:
      The formulation by step; the one by layer, or `None`; and a text that says what was chosen.

    Raises:
      TypeError: the loss does something else with shards than to slice and unshard them.
      ValueError: devices would not unshard the same.
      NotTraced: it cannot be traced.
    """
    part, leaves = options.part, options.part.leaves

    def trace(wire: Wire, shards: frozenset[int], layered: Mapping[int, Any]) -> Formulation:
        params = part.treedef.unflatten(
            [
                _shard(options, wire, leaf, layered.get(i))
                if i in shards
                else _Held(leaf.shape, leaf.model_spec, wire.dtype(leaf), wire.weight_axes(leaf))
                for i, leaf in enumerate(leaves)
            ]
        )
        specs = jax.tree.map(lambda held: held.spec, params)
        loss = trace_loss(
            as_typed(
                options.loss_fn, part.mesh,
                [a for a in part.model_axes if a not in wire.manual_axes],
                (specs, *batch.treedef.unflatten(batch.specs)),
            ),
            jax.tree.map(lambda held: held.on_device(wire), params), example,
            data_axes=part.data_axes, has_aux=options.has_aux,
            aux_reduction=options.aux_reduction, weighted=options.reduction == "weighted",
        )  # fmt: skip
        return Formulation(loss, wire, shards, layered)

    step = _trace_copied(options, lambda wire: trace(wire, frozenset(), {}))
    wire = step.wire
    sharded = frozenset(i for i, leaf in enumerate(leaves) if leaf.shard_axes)
    if not (step.loss.unshards and sharded):
        return step, None, _text(options, None, {})
    layered = sharded.intersection(options.trained)
    shards = sharded if part.stage == 3 else layered
    uses = ShardUses(
        step.loss.jaxpr,
        [Value(leaf=leaf if i in shards else None) for i, leaf in enumerate(leaves)]
        + [Value(varies=varies) for varies in batch.varies(example)],
        part.data_axes,
    )
    raise_all(
        "value_and_grad: on its way to zerojax.unshard a parameter may only be sliced along dims "
        "that are not sharded, scanned over and rematerialised, since a device holds just a part "
        "of it. Call zerojax.unshard on it first",
        dict.fromkeys(uses.problems),
        TypeError,
    )
    often = {i: n for i in layered if (n := uses.counts[leaves[i].path]) > 1}
    if part.stage == 1:
        layered = shards = layered - often.keys()
        if not layered:
            return step, None, _text(options, None, often)
    else:
        raise_all(
            "value_and_grad: each device would gather or reduce something else here, or wait for "
            "ever for those that do nothing. Call zerojax.unshard before the branch, and on all "
            "of the parameter",
            dict.fromkeys(uses.uneven),
        )
    dtypes = {
        # What is delivered once need not be wider than it was on the wire; several are added up.
        i: widened(leaves[i].dtype)
        if i in often
        else wire.gradient_dtype(leaves[i], added_up=part.stage == 1 and options.accumulate > 1)
        for i in layered
    }
    try:
        layer = trace(wire, shards, dtypes)
    except NotTraced as failure:  # code that needs to know what a Shard does not tell
        raise failure.__cause__ or failure from None
    names = [str(eqn.params.get("name")) for eqn in equations(layer.loss.jaxpr)]
    raise_all(
        "value_and_grad: the loss differentiates with respect to shards. Differentiate with "
        "respect to what zerojax.unshard returns",
        dict.fromkeys(f"  {n.removeprefix(REDUCED)}" for n in names if n.startswith(REDUCED)),
        TypeError,
    )
    return step, layer, _text(options, layer, often if part.stage == 1 else {})


def _trace_copied(options: Options, trace: Callable[[Wire], Formulation]) -> Formulation:
    """Traces with copies of weights over as many Manual axes as the types of the loss allow.

    Gradients of copies are summed once per step, on shards. Without copies JAX sums a gradient
    where the weight is used: per layer, or in one branch of a conditional only. But what is
    computed from a copy is typed varying, and may stay so up to the loss.
    """
    axes = options.wire.manual_axes
    subsets = (itertools.combinations(axes, size) for size in range(len(axes), -1, -1))
    varies = frozenset()
    for copied in itertools.chain.from_iterable(subsets):
        try:
            step = trace(dataclasses.replace(options.wire, copied=copied))
        except NotTraced:
            if copied:
                continue
            raise
        varies = step.loss.varying & {*axes}
        if not varies:
            return step
    raise ValueError(
        f"value_and_grad: the loss is typed varying over {sorted(varies)}, so that its gradients "
        "would count once for each device along it. Return the same value from all of them: "
        "jax.lax.psum over the axis if one device has the loss and the others zero, "
        "jax.lax.pmean if all have it already"
    )


@dataclasses.dataclass(frozen=True)
class _Held:
    """What a device holds of an array.

    Attributes:
      shape, spec: of the whole array.
      dtype: of the array.
      varying: the axes over which it varies, where the Manual region has types.
    """

    shape: tuple[int, ...]
    spec: P
    dtype: Any
    varying: Axes

    def on_device(self, wire: Wire) -> jax.Array | jax.ShapeDtypeStruct:
        axes = from_spec(self.spec, len(self.shape))
        shape = _collectives.local_shape(wire.part, self.shape, axes, wire.region_axes)
        if not wire.manual_axes:
            return jax.ShapeDtypeStruct(shape, self.dtype)
        return wire.vary(jnp.zeros(shape, self.dtype), self.varying)


def _shard(options: Options, wire: Wire, leaf: LeafPlan, dtype: Any) -> Shard:
    """The `Shard` of a leaf, with a `_Held` for each array; `dtype` is that of its gradient."""
    part = options.part
    view = _collectives.split_view(part, leaf)
    stored, own = (view.stored, view.shard_spec), leaf.model_axes
    whole = (leaf.shape, leaf.model_spec)
    value = _Held(*whole, leaf.dtype, own)
    if part.stage == 3:
        value = _Held(*stored, leaf.dtype, own + leaf.shard_axes)
    accumulates = dtype is not None and part.stage == 1 and options.accumulate > 1
    return Shard(
        value,
        _Held(*stored, dtype, wire.shard_axes(leaf)) if dtype is not None else None,
        _Held(*whole, widened(leaf.dtype), wire.weight_axes(leaf)) if accumulates else None,
        leaf=leaf, mesh=part.mesh, wire=wire,
    )  # fmt: skip


def _text(options: Options, layer: Formulation | None, often: dict[int, float]) -> str:
    """What `print(grad_fn)` says of the formulation; `often`: leaves that are not by layer."""
    part, several = options.part, options.accumulate > 1
    at_end = "after the backward pass"
    if several:
        at_end = "after the last microbatch" if part.stage < 2 else "after each microbatch"
    if layer:
        when = (
            "in the last microbatch's backward pass"
            if part.stage == 1 and several
            else ("in the backward pass")
        )
        gathered = "weights are gathered and " if part.stage == 3 else ""
        head = f"by layer: {gathered}gradients are reduced by zerojax.unshard, {when}"
    else:
        gathered = "weights are gathered once, " if part.stage == 3 else ""
        head = f"by step: {gathered}gradients are reduced {at_end}"
        if not any(leaf.shard_axes for leaf in part.leaves):
            head += ", since no parameter is sharded"
        elif not often:
            head += ", since the loss does not call zerojax.unshard"
    lines = [head]
    for i, n in often.items():
        seen = "a number of times that depends on data" if n == math.inf else f"{n:.0f} times"
        lines.append(f"  {part.leaves[i].path}: {at_end}, since unshard sees it {seen}")
    return "\n".join(lines)
