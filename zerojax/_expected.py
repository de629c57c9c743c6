"""What ZeRO has to communicate in theory, and what a program sends beyond it."""

import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import Any

from jax import numpy as jnp

from zerojax._batch import check_accumulate
from zerojax._collectives import split_view, unsharded_axes
from zerojax._hlo_collectives import Collective, wire_bytes
from zerojax._leaf_plan import LeafPlan
from zerojax._partition import Partition
from zerojax._specs import Axes, axes_size, broadcast_prefix, widened
from zerojax._tables import in_bytes, text_table
from zerojax._wire import Wire


@dataclasses.dataclass(frozen=True)
class Message:
    """One array that theory sends.

    Attributes:
      path: key path of the parameter.
      kind: such as `"reduce-scatter"`.
      elements: of the whole array on one device; the leaf with its padding, 1/N along model axes.
      itemsize: bytes of an element.
      axes: the mesh axes that it is sent over.
      devices: how many devices these are.
      times: how often in a step.
      sizes: numbers of elements in which it may be sent instead, by layer or axis by axis.
    """

    path: str
    kind: str
    elements: int
    itemsize: int
    axes: Axes
    devices: int
    times: int
    sizes: frozenset[int] = dataclasses.field(repr=False)

    @property
    def total_bytes(self) -> int:
        """Bytes that a device sends in one step."""
        return self.times * wire_bytes(self.kind, self.elements * self.itemsize, self.devices)


@dataclasses.dataclass(frozen=True)
class ExpectedCommunication:
    """The theory for one partition. Made by `zerojax.expected_communication`.

    Attributes:
      messages: what is sent.
      data_axes: the axes over which ZeRO communicates.
      smallest: elements of the smallest parameter, or layer of one, that has some for each device.
      model_sizes: elements of each parameter that model axes shard, whole, and of its layers.
    """

    messages: tuple[Message, ...]
    data_axes: Axes
    smallest: int
    model_sizes: frozenset[int] = dataclasses.field(repr=False)

    def bytes(self, kind: str | None = None, axis: str | None = None) -> int:
        """Bytes that a device sends in one step, of one kind or over one mesh axis if asked."""
        return sum(
            m.total_bytes
            for m in self.messages
            if kind in (None, m.kind) and (axis is None or axis in m.axes)
        )

    def unexpected(
        self, collectives: Iterable[Collective], tolerance: float, ignore: Iterable[str]
    ) -> list[str]:
        """A line for each parameter-sized thing that is sent and is not in the theory.

        Over data axes everything counts that is as large as the smallest parameter, in number of
        elements: less has the loss, or a norm. A size that the theory has for this kind may be
        sent up to the theory's bytes of this kind, and so may arrays of one dim: XLA joins several
        into one. Over model axes alone, where activations of any size may travel, it is an array,
        not all-reduced, that is as large as a whole parameter which the model shards there.
        """
        ignored, data = frozenset(ignore), frozenset(self.data_axes)
        problems: list[str] = []
        senders: dict[str, list[Collective]] = {}
        sent: dict[str, float] = {}
        for c in collectives:
            axes = frozenset(c.axes) - ignored
            sizes = {n for m in self.messages if m.kind == c.kind for n in m.sizes}
            if axes & data:
                large = [a for a in c.arrays if a.elements >= self.smallest]
                known = [a for a in large if a.elements in sizes or (sizes and len(a.shape) == 1)]
                strange = [a for a in large if a not in known]
                ours = sum(a.bytes for a in known)
                if ours:
                    senders.setdefault(c.kind, []).append(c)
                    bytes_ = c.trips * wire_bytes(c.kind, ours, c.group_size)
                    sent[c.kind] = sent.get(c.kind, 0) + bytes_
                why = "" if sizes else f" ({c.kind} is not in the theory)"
            else:
                strange = [a for a in c.arrays if a.elements in self.model_sizes]
                strange = strange if axes and c.kind != "all-reduce" else []
                why = " (a whole parameter over model axes)"
            if strange:
                arrays = " ".join(map(str, strange))
                problems.append(f"  {c.name}: {c.kind} of {arrays} over {c.axes}, {c.trips}x{why}")
        for kind, bytes_ in sent.items():
            if bytes_ > self.bytes(kind) * (1 + tolerance):
                problems.append(
                    f"  {kind}: {in_bytes(bytes_)} on each device instead of "
                    f"{in_bytes(self.bytes(kind))}, in"
                )
                problems += [
                    f"    {c.name}: {' '.join(map(str, c.arrays))} over {c.axes}, {c.trips}x"
                    for c in senders[kind]
                ]
        return problems

    def __repr__(self) -> str:
        head = ["path", "collective", "elements", "axes", "times", "bytes/device"]
        rows = [
            [m.path, m.kind, f"{m.elements:,}", ",".join(m.axes), str(m.times),
             f"{m.total_bytes:,}"]
            for m in self.messages
        ]  # fmt: skip
        total = f"in theory each device sends {in_bytes(self.bytes())} in a step"
        return "\n".join([*text_table(head, rows), total])


def expected_communication(
    part: Partition,
    *,
    accumulate: int = 1,
    by_layer: Any = None,
    compute_dtype: Any = None,
    reduce_dtype: Any = None,
    trainable: Any = True,
) -> ExpectedCommunication:
    """What `train_step` has to send for a partition, in theory.

    For `K` microbatches on `N` devices, each time `(N-1)/N` of the parameters' size:

    | stage | gradients are reduce-scattered | parameters are all-gathered |
    |---|---|---|
    | 0 | all-reduced once | never |
    | 1 | once | once, after the update |
    | 2 | `K` times | once, after the update |
    | 3 | `K` times | once, if the loss never calls `unshard`; else `K` or `2K` times |

    A leaf that stays whole is all-reduced once; with `replicate_axes` each shard is all-reduced
    over them as often as it is scattered. That a loss unshards a leaf twice is not foreseen.

    Args:
      part: the partition.
      accumulate: the number of microbatches, `K`.
      by_layer: at stage 3, a tree prefix: `None` where the loss does not call `unshard`, `False`
        where it does once per microbatch, `True` where it does in a rematerialised layer, and again
        in its backward pass.
      compute_dtype: as `value_and_grad` was given it.
      reduce_dtype: likewise.
      trainable: likewise.

    Returns:
      The messages, for `report.check(expected)`; printable.

    References:
      Rajbhandari et al., "ZeRO", 2020, section 7.

    >>> params = {"w": jnp.ones((1024, 64))}
    >>> part = zerojax.partition(params, jax.make_mesh((8,), ("data",)))
    >>> zerojax.expected_communication(part).bytes("reduce-scatter")
    229376
    """
    check_accumulate(accumulate)
    tree = part.treedef.unflatten(part.leaves)
    layered = broadcast_prefix("by_layer", by_layer, tree, is_leaf=lambda x: x is None)
    messages: list[Message] = []
    layer_sizes: set[int] = set()
    model_sizes: set[int] = set()

    def send(
        leaf: LeafPlan, kind: str, dtype: Any, axes: Axes, times: int, shards: int = 1
    ) -> None:
        axes = tuple(a for a in axes if part.mesh.shape[a] > 1)
        if not axes or not times or not math.prod(leaf.shape):
            return
        sizes = _sizes(part, leaf, shards)
        messages.append(
            Message(
                leaf.path, kind, max(sizes), jnp.dtype(dtype).itemsize, axes,
                axes_size(part.mesh, axes), times, sizes,
            )
        )  # fmt: skip

    wire = Wire(part, True, compute_dtype, reduce_dtype)
    for leaf, train, layer in zip(part.leaves, part.trained(trainable), layered, strict=True):
        view, rest = split_view(part, leaf), unsharded_axes(part, leaf)
        weight = wire.dtype(leaf)
        added_up = accumulate > 1 and (part.stage < 2 or not leaf.shard_axes)
        computed = widened(leaf.dtype) if added_up else weight
        gradient = reduce_dtype or computed
        scatters = accumulate if part.stage > 1 and leaf.shard_axes else 1
        if train:
            shards = axes_size(part.mesh, leaf.shard_axes)
            send(view, "reduce-scatter", gradient, leaf.shard_axes, scatters)
            send(view, "all-reduce", gradient, rest, scatters, shards)
        if part.stage < 3 and leaf.trainable:
            send(view, "all-gather", leaf.dtype, leaf.shard_axes, 1)
        elif part.stage == 3:
            gathers = 1 if layer is None else accumulate * (2 if layer else 1)
            send(view, "all-gather", weight, leaf.shard_axes, gathers)
        if leaf.trainable and math.prod(leaf.shape) >= part.data_size:
            layer_sizes |= _sizes(part, view)
        if leaf.model_axes:
            model_sizes |= _sizes(part, dataclasses.replace(leaf, model=((),) * len(leaf.shape)))
    smallest = min(layer_sizes, default=1)
    return ExpectedCommunication(tuple(messages), part.data_axes, smallest, frozenset(model_sizes))


def _sizes(part: Partition, leaf: LeafPlan, shards: int = 1) -> frozenset[int]:
    """Elements on one device of a leaf, of its slices along leading dims, and of parts of them.

    The parts are what is left, or still missing, where some of several shard axes are done.
    """
    model = zip(leaf.stored, leaf.model, strict=True)
    shape = [n // axes_size(part.mesh, axes) for n, axes in model]
    used = [bool(m + s) for m, s in zip(leaf.model, leaf.shard, strict=True)]
    leading = used.index(True) if any(used) else 0
    wholes = {math.prod(shape[dim:]) for dim in range(leading + 1)}
    axes = [part.mesh.shape[a] for a in leaf.shard_axes]
    parts = {
        math.prod(some)
        for n in range(max(len(axes), 1))
        for some in itertools.combinations(axes, n)
    }
    return frozenset(whole // (shards * p) for whole in wholes for p in parts)
