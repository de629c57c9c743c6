"""What each device holds, by category, from shapes alone."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

from zerojax._batch import check_accumulate
from zerojax._leaf_plan import LeafPlan
from zerojax._master import MasterState
from zerojax._memory_report import AFTER, BEFORE, MemoryReport
from zerojax._partition import Partition
from zerojax._sharding_types import StateLeaf
from zerojax._specs import Axes, axes_size, from_spec, widened
from zerojax._wire import Wire
from zerojax._zero import state_layout


def memory(
    part: Partition,
    tx: Any,
    *,
    stages: Sequence[int] | None = None,
    accumulate: int = 1,
    by_layer: bool = True,
    compute_dtype: Any = None,
    grad_dtype: Any = None,
    trainable: Any = True,
) -> MemoryReport:
    """Bytes that each device holds, by category, from shapes alone: no device is needed.

    What is held between steps is exact. What a step needs on top of it is an account of what ZeRO
    is about, for a loss that calls `zerojax.unshard` layer by layer; activations are not in it:

    * gradients: as they leave the backward pass at stages 0 and 1, whole, in the dtype in which the
      loss sees the weights; from stage 2 on shards, as `value_and_grad` returns them. (By layer
      and without accumulation stage 1 needs no more than stage 2.)
    * accumulators, with `accumulate > 1`: float32 or wider, whole at stages 0 and 1, then shards.
    * gathered: the largest layer of the weights that are not used where they are held, since they
      are gathered (stage 3) or cast (`compute_dtype`). All leaves that the model scans over
      equally often (`scan_dims`) make one layer, and so does each element of a list or tuple of
      the parameters; any other leaf is one by itself.

    Args:
      part: the plan, on a mesh with devices or a `jax.sharding.AbstractMesh`.
      tx: a transformation that contains `zerojax.zero`, or none; or a function that makes it from
        a partition, `lambda part: zerojax.zero(optax.adamw(1e-3), part)`, which `stages` needs.
      stages: the ZeRO stages to compare; by default only that of `part`.
      accumulate: the number of microbatches.
      by_layer: whether the loss calls `zerojax.unshard`. If not, gradients are whole at every
        stage, and all weights are gathered or cast at once.
      compute_dtype: as `value_and_grad` is given it.
      grad_dtype: likewise.
      trainable: likewise.

    Returns:
      The report: print it, or see its methods.

    Raises:
      ValueError: `accumulate` or a stage is not one, or others are asked of a stage 0 partition,
        which does not know how it would be sharded.
      TypeError: `stages` were asked for, and `tx` is no function.

    References:
      Rajbhandari et al., "ZeRO", 2020, section 3.1 (16 bytes per parameter: float16 parameters and
      gradients, float32 master, mean and variance), section 5 and figure 1.

    >>> import optax
    >>> mesh = jax.sharding.AbstractMesh((64,), ("data",))
    >>> params = {"w": jax.ShapeDtypeStruct((48, 12500, 12500), jnp.bfloat16)}
    >>> part = zerojax.partition(params, mesh, scan_dims=1)
    >>> def make_tx(part):
    ...     return zerojax.zero(optax.adamw(1e-3), part, master_dtype=jnp.float32)
    >>> report = zerojax.memory(part, make_tx, stages=(0, 1, 2, 3))
    >>> [round(report.bytes("model states", stage) / 1e9, 1) for stage in (0, 1, 2, 3)]
    [120.0, 31.4, 16.6, 1.9]
    """
    check_accumulate(accumulate)
    if stages is not None and not callable(tx):
        raise TypeError(
            "memory: a transformation is made for one partition, and stages= needs one for each. "
            "Pass a function instead: lambda part: zerojax.zero(optax.adamw(1e-3), part)."
        )
    wanted = tuple(stages or (part.stage,))
    columns = []
    for staged in (_at_stage(part, stage) for stage in wanted):
        held = _persistent(staged, tx(staged) if callable(tx) else tx)
        wire = Wire(staged, True, compute_dtype and jnp.dtype(compute_dtype))
        columns.append(held | _transient(wire, accumulate, by_layer, grad_dtype, trainable))
    elements = sum(math.prod(leaf.shape) for leaf in part.leaves)
    return MemoryReport(wanted, elements, part.mesh.size, tuple(columns))


def _at_stage(part: Partition, stage: int) -> Partition:
    """The same plan at another stage; the dims of shards are the same at all but stage 0."""
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"memory: stages must be 0, 1, 2 or 3, got {stage!r}.")
    if stage == part.stage:
        return part
    if part.stage == 0:
        raise ValueError(
            "memory: a partition of stage 0 does not know how others would shard its leaves. Make "
            "it with stage=1 and ask for stages=(0, 1, 2, 3)."
        )
    leaves = part.leaves
    if stage == 0:
        leaves = tuple(
            dataclasses.replace(leaf, shard=((),) * len(leaf.shape), stored=leaf.shape)
            for leaf in leaves
        )
    return dataclasses.replace(part, stage=stage, leaves=leaves)


def _persistent(part: Partition, tx: Any) -> dict[str, int]:
    """What is held between steps: zeros apart, of which there are as many as padding adds."""
    held: dict[str, int] = dict.fromkeys(BEFORE, 0)
    padding = 0

    def hold(name: str, shape: Sequence[int], stored: Sequence[int], dtype: Any, spec: P) -> None:
        nonlocal padding
        axes = sum(from_spec(spec, len(stored)), ())
        block, own = (_bytes(part, s, dtype, axes) for s in (stored, shape))
        held[name] = held.get(name, 0) + own
        padding += block - own

    for leaf in part.leaves:
        hold("parameters", leaf.shape, part.param_shape(leaf), leaf.dtype, part.param_spec(leaf))
    for name, leaf in _fields(part, state_layout(tx, part)):
        hold(name, leaf.shape, leaf.stored, leaf.dtype, leaf.spec)
    return held | {"padding": padding}


def _bytes(part: Partition, shape: Sequence[int], dtype: Any, axes: Axes) -> int:
    """An array's bytes on each device; on average, if it is not padded."""
    return (
        math.prod(shape)
        * jax.ShapeDtypeStruct((), dtype).dtype.itemsize
        // axes_size(part.mesh, axes)
    )


def _fields(part: Partition, state: Any) -> Iterator[tuple[str, StateLeaf]]:
    """The leaves of a state, each with the name of the field that it is in."""
    tree = part.treedef.unflatten(part.leaves)
    plans = {tuple(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}

    def is_master(x: Any) -> bool:
        return isinstance(x, MasterState)

    for path, node in jax.tree.leaves_with_path(state, is_leaf=is_master):
        if is_master(node):
            yield from (("master", leaf) for leaf in jax.tree.leaves(node.master))
            yield from _fields(part, node.inner)
            continue
        # Behind the field's name may follow the path of a parameter, which has names of its own.
        ends = [n for n in range(1, len(path) + 1) if path[n:] in plans and _name(path[:n])]
        plan = plans[path[ends[0] :]] if ends else None
        if plan is not None and node.shape == plan.stored:  # around `zero`, at stage 3
            node = dataclasses.replace(node, shape=plan.shape)
        name = _name(path[: ends[0]] if ends else path) or "state"
        yield (f"state.{name}" if name in BEFORE + AFTER else name), node


def _name(path: Sequence[Any]) -> str:
    """The last field of a NamedTuple or dataclass on a path."""
    names = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
    return names[-1] if names else ""


def _transient(
    wire: Wire, accumulate: int, by_layer: bool, grad_dtype: Any, trainable: Any
) -> dict[str, int]:
    """What a step needs besides."""
    part = wire.part
    gradients = accumulators = 0
    layers: dict[Any, int] = {}

    def size(leaf: LeafPlan, dtype: Any, *, whole: bool) -> int:
        shape, axes = (leaf.shape, ()) if whole else (leaf.stored, leaf.shard_axes)
        return _bytes(part, shape, dtype, leaf.model_axes + axes)

    with_paths = jax.tree.leaves_with_path(part.treedef.unflatten(part.leaves))
    for (path, leaf), train in zip(with_paths, part.trained(trainable), strict=True):
        if train:
            computed = size(leaf, wire.dtype(leaf), whole=part.stage < 2 or not by_layer)
            returned = size(leaf, jnp.dtype(grad_dtype or leaf.dtype), whole=False)
            gradients += max(computed, returned)
            if accumulate > 1:
                accumulators += size(leaf, widened(leaf.dtype), whole=part.stage < 2)
        if (part.stage == 3 and leaf.shard_axes) or wire.dtype(leaf) != leaf.dtype:
            scans = leaf.shape[: leaf.scan_dims]
            layer = (scans or _element(path)) if by_layer else None
            one = size(leaf, wire.dtype(leaf), whole=True) // (math.prod(scans) if by_layer else 1)
            layers[layer] = layers.get(layer, 0) + one
    return {
        "gradients": gradients,
        "accumulators": accumulators,
        "gathered": max(layers.values(), default=0),
    }


def _element(path: Sequence[Any]) -> tuple[Any, ...]:
    """A path up to the first list or tuple on it, and the place there."""
    lists = [i for i, key in enumerate(path) if isinstance(key, jax.tree_util.SequenceKey)]
    return tuple(path[: lists[0] + 1] if lists else path)
