"""Dynamic loss scaling: steps whose gradients are not finite are skipped, on every device."""

import functools
from collections import defaultdict
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax import lax
from jax import numpy as jnp
from jax.core import Tracer

from zerojax._collectives import vma_is_checked
from zerojax._contexts import manual_axes
from zerojax._specs import is_inexact, raise_all


class LossScaleState(NamedTuple):
    """State of `zerojax.dynamic_loss_scale`.

    Attributes:
      scale: float32 scalar, the factor for the next step's loss; nan once the floor is reached.
      clean_steps: int32 scalar, steps since `scale` last changed.
      skipped: int32 scalar, steps skipped so far.
      inner: state of the inner transformation.
    """

    scale: Any
    clean_steps: Any
    skipped: Any
    inner: Any


def dynamic_loss_scale(
    inner: optax.GradientTransformation,
    *,
    initial: float = 2.0**15,
    growth_interval: int = 2000,
    factor: float = 2.0,
    floor: float = 1.0,
) -> optax.GradientTransformationExtraArgs:
    """Skips steps whose gradients are not finite, and adapts the loss scale of float16 training.

    Normally around `zerojax.zero`, with `master_dtype`. The gradients that `update` sees are
    unscaled already. If one element of them, on any device, is infinite or nan, the update is zero
    everywhere, the inner state keeps its bits (a schedule does not run ahead), and the scale is
    divided by `factor`; after `growth_interval` clean steps it is multiplied by it.

    `zerojax.train_step` finds the state, scales the loss, and puts "loss_scale" and "skipped" into
    its metrics. In a loop of your own: `grad_fn(params, *args, loss_scale=state.scale)`.

    A scale that would fall below `floor` becomes nan instead, and no further step is taken. The
    next call of the training step, or of an eager `update`, that finds this result computed raises
    FloatingPointError. None waits for it, and the compiled program holds no callback: one that
    raises on a device leaves the others waiting in their collectives. Of several processes one may
    raise a call before the others, and ends the job as any error in one process does.

    Args:
      inner: the transformation whose steps are skipped.
      initial: the first scale.
      growth_interval: clean steps before the scale grows.
      factor: by which it grows and shrinks; a power of two keeps every bit of the gradients.
      floor: the smallest scale.

    Returns:
      A `GradientTransformationExtraArgs` with a `LossScaleState`; extra arguments go to `inner`.

    Raises:
      ValueError: `initial`, `growth_interval`, `factor` or `floor` make no sense; from `update`:
        gradients are still to be summed (typed unreduced).
      TypeError: from `update`, inside `jax.shard_map(check_vma=False)`.
      FloatingPointError: the floor was reached.

    References:
      Micikevicius et al., "Mixed Precision Training", 2018, section 3.2.

    >>> import optax
    >>> tx = zerojax.dynamic_loss_scale(optax.sgd(1.0), initial=8.0)
    >>> params = {"w": jnp.ones(2)}
    >>> updates, state = tx.update({"w": jnp.array([jnp.inf, 1.0])}, tx.init(params), params)
    >>> updates["w"].tolist(), float(state.scale), int(state.skipped)
    ([0.0, 0.0], 4.0, 1)
    """
    if not (factor > 1 and 0 < floor <= initial and growth_interval >= 1):
        raise ValueError(
            "dynamic_loss_scale needs factor > 1, 0 < floor <= initial and growth_interval >= 1, "
            f"got {factor=}, {floor=}, {initial=}, {growth_interval=}."
        )
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> LossScaleState:
        steps, skipped = (jnp.zeros((), jnp.int32) for _ in range(2))  # both can be donated
        return LossScaleState(jnp.asarray(initial, jnp.float32), steps, skipped, inner.init(params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        raise_at_floor(state.scale)
        clean = _all_finite(updates) & jnp.isfinite(state.scale)
        updates, inner_state = inner.update(updates, state.inner, params, **extra)
        # Selected, not branched: on a GPU the host waits for the predicate of a conditional.
        select = functools.partial(jnp.where, clean)
        updates = jax.tree.map(lambda u: select(u, jnp.zeros_like(u)), updates)
        inner_state = jax.tree.map(select, inner_state, state.inner)

        steps = state.clean_steps + 1
        larger, smaller = state.scale * factor, state.scale / factor
        grow = (steps >= growth_interval) & jnp.isfinite(larger)
        scale = select(
            jnp.where(grow, larger, state.scale), jnp.where(smaller >= floor, smaller, jnp.nan)
        )
        steps = select(jnp.where(steps >= growth_interval, 0, steps), 0)
        return updates, LossScaleState(scale, steps, state.skipped + ~clean, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def find_loss_scale(opt_state: Any) -> LossScaleState | None:
    """The one `LossScaleState` in an optimizer's state, if there is one."""

    def find(tree: Any) -> list[LossScaleState]:
        leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, LossScaleState))
        states = [x for x in leaves if isinstance(x, LossScaleState)]
        return states + [inner for state in states for inner in find(state.inner)]

    found = find(opt_state)
    if len(found) > 1:
        raise ValueError(
            f"the optimizer's state holds {len(found)} loss scales, and a loss is scaled by one. "
            "Put one dynamic_loss_scale around the whole optimizer."
        )
    return found[0] if found else None


def check_floor(opt_state: Any) -> None:
    """Raises if the loss scale in an optimizer's state is known to have reached its floor."""
    leaves, treedef = jax.tree.flatten(opt_state)
    index = _index_of_scale(treedef)
    if index is not None:
        raise_at_floor(leaves[index])


@functools.lru_cache(maxsize=32)  # a search at every step would take longer than its dispatch
def _index_of_scale(treedef: Any) -> int | None:
    state = find_loss_scale(treedef.unflatten(range(treedef.num_leaves)))
    return None if state is None else state.scale


def raise_at_floor(scale: Any) -> None:
    """Raises if a loss scale is nan; does nothing while it is being computed."""
    if isinstance(scale, Tracer) or not getattr(scale, "is_ready", lambda: True)():
        return
    if np.isnan(scale):
        raise FloatingPointError(
            "dynamic_loss_scale reached its floor: gradients were not finite however small the "
            "loss scale, so the model itself gives inf or nan. Parameters and optimizer state are "
            "those of the last clean step. Look for its cause in the batch or in the model (a "
            "float16 activation above 65504, a log or a division at zero), or lower the learning "
            "rate, and go on from a checkpoint."
        )


def _all_finite(grads: Any) -> jax.Array:
    """A bool scalar, the same on every device."""
    if manual_axes() and not vma_is_checked():
        raise TypeError(
            "dynamic_loss_scale: inside jax.shard_map(check_vma=False) no type says over which "
            "axes a gradient varies, so devices cannot agree to skip. Remove check_vma=False."
        )
    counts, unreduced = defaultdict(list), []
    for path, x in jax.tree.leaves_with_path(grads):
        if not is_inexact(jnp.result_type(x)):
            continue
        kind = jax.typeof(x)
        axes = kind.manual_axis_type.varying
        if pending := {*kind.manual_axis_type.unreduced, *kind.sharding.spec.unreduced}:
            unreduced.append(f"  {jax.tree_util.keystr(path)}: over {sorted(pending)}")
        else:
            counts[tuple(sorted(axes))].append(jnp.any(~jnp.isfinite(x)))
    raise_all(
        "dynamic_loss_scale: these gradients are still to be summed (typed unreduced), and their "
        "sum may not be finite. Sum them first, or under jit put dynamic_loss_scale inside zero",
        unreduced,
    )
    total = jnp.zeros((), jnp.int32)
    for axes, found in counts.items():
        bad = functools.reduce(jnp.logical_or, found).astype(jnp.int32)
        total += lax.psum(bad, axes) if axes else bad
    return total == 0
