"""How a loss is differentiated: by step or by layer, as is seen from the loss itself."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.sharding import PartitionSpec as P

from zerojax import _collectives
from zerojax._batch import Batch
from zerojax._contexts import as_typed
from zerojax._leaf_plan import LeafPlan
from zerojax._loss import NotTraced, TracedLoss, trace_loss
from zerojax._partition import Partition
from zerojax._shard import Shard
from zerojax._shard_uses import REDUCED, ShardUses, Value, equations
from zerojax._specs import from_spec, raise_all, widened
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
      shards: the parameters that it receives as `Shard`s; the others are whole weights.
      layered: those of them whose reduced gradients its backward pass delivers.
    """

    loss: TracedLoss
    shards: frozenset[int] = frozenset()
    layered: frozenset[int] = frozenset()


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
    part, wire, leaves = options.part, options.wire, options.part.leaves

    def trace(shards: frozenset[int], layered: frozenset[int]) -> Formulation:
        params = part.treedef.unflatten(
            [
                _shard(options, leaf, i in layered)
                if i in shards
                else _Held(leaf.shape, leaf.model_spec, wire.dtype(leaf))
                for i, leaf in enumerate(leaves)
            ]
        )
        specs = jax.tree.map(lambda held: held.spec, params)
        loss = trace_loss(
            as_typed(
                options.loss_fn, part.mesh, part.model_axes,
                (specs, *batch.treedef.unflatten(batch.specs)),
            ),
            jax.tree.map(lambda held: held.on_device(part), params), example,
            data_axes=part.data_axes, has_aux=options.has_aux,
            aux_reduction=options.aux_reduction, weighted=options.reduction == "weighted",
        )  # fmt: skip
        return Formulation(loss, shards, layered)

    step = trace(frozenset(), frozenset())
    sharded = frozenset(i for i, leaf in enumerate(leaves) if leaf.shard_axes)
    if not (step.loss.unshards and sharded):
        return step, None, _text(options, None, {})
    layered = sharded.intersection(options.trained)
    shards = sharded if part.stage == 3 else layered
    uses = ShardUses(
        step.loss.jaxpr,
        [Value(leaf=leaf if i in shards else None) for i, leaf in enumerate(leaves)]
        + [Value(varies=varies) for varies in batch.varies(example)],
    )
    raise_all(
        "value_and_grad: on its way to zerojax.unshard a parameter may only be sliced along dims "
        "that are not sharded, scanned over and rematerialised, since a device holds just a part "
        "of it. Call zerojax.unshard on it first",
        dict.fromkeys(uses.problems),
        TypeError,
    )
    often = {}
    if part.stage == 1:
        often = {i: n for i in layered if (n := uses.counts[leaves[i].path]) > 1}
        layered = shards = layered - often.keys()
    else:
        raise_all(
            "value_and_grad: each device would gather or reduce something else here, or wait for "
            "ever for those that do nothing. Call zerojax.unshard before the branch, and on all "
            "of the parameter",
            dict.fromkeys(uses.uneven),
        )
    try:
        layer = trace(shards, layered)
    except NotTraced as failure:  # code that needs to know what a Shard does not tell
        raise failure.__cause__ or failure from None
    names = [str(eqn.params.get("name")) for eqn in equations(layer.loss.jaxpr)]
    raise_all(
        "value_and_grad: the loss differentiates with respect to shards. Differentiate with "
        "respect to what zerojax.unshard returns",
        dict.fromkeys(f"  {n.removeprefix(REDUCED)}" for n in names if n.startswith(REDUCED)),
        TypeError,
    )
    return step, layer, _text(options, layer, often)


@dataclasses.dataclass(frozen=True)
class _Held:
    """What a device holds of an array: the shape and spec of the whole, and the dtype."""

    shape: tuple[int, ...]
    spec: P
    dtype: Any

    def on_device(self, part: Partition) -> jax.ShapeDtypeStruct:
        axes = from_spec(self.spec, len(self.shape))
        shape = _collectives.local_shape(part, self.shape, axes, part.data_axes)
        return jax.ShapeDtypeStruct(shape, self.dtype)


def _shard(options: Options, leaf: LeafPlan, layered: bool) -> Shard:
    """The `Shard` of a leaf, with a `_Held` for each array."""
    part, wide = options.part, widened(leaf.dtype)
    view = _collectives.split_view(part, leaf)
    value = _Held(leaf.shape, leaf.model_spec, leaf.dtype)
    if part.stage == 3:
        value = _Held(view.stored, view.shard_spec, leaf.dtype)
    accumulates = layered and part.stage == 1 and options.accumulate > 1
    return Shard(
        value,
        _Held(view.stored, view.shard_spec, wide) if layered else None,
        _Held(leaf.shape, leaf.model_spec, wide) if accumulates else None,
        leaf=leaf, mesh=part.mesh, wire=options.wire,
    )  # fmt: skip


def _text(options: Options, layer: Formulation | None, often: dict[int, float]) -> str:
    """What `print(grad_fn)` says of the formulation."""
    part, several = options.part, options.accumulate > 1
    leaves = part.leaves
    when = "after the backward pass"
    if several:
        when = "after the last microbatch" if part.stage < 2 else "after each microbatch"
    if layer is None:
        gathered = "weights are gathered once; " if part.stage == 3 else ""
        return (
            f"by step: {gathered}gradients are reduced {when}, since the loss does not call "
            "zerojax.unshard"
        )
    last = "the last microbatch's" if part.stage == 1 and several else "the"
    gathered = "weights are gathered, and " if part.stage == 3 else ""
    lines = [
        f"by layer: {gathered}gradients are reduced in {last} backward pass, by zerojax.unshard"
    ]
    if part.stage == 1:
        lines += [
            f"  {leaves[i].path}: reduced {when}, since unshard sees "
            + (f"it {n:.0f} times" if n < math.inf else "it a number of times that depends on data")
            for i, n in often.items()
        ]
    return "\n".join(lines)
