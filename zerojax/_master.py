"""An fp32 copy of each lower-precision parameter, on which an inner transformation works."""

from typing import Any, NamedTuple

import jax
import optax
from jax import lax
from jax import numpy as jnp

from zerojax._leaf_plan import LeafPlan
from zerojax._partition import Partition


class MasterState(NamedTuple):
    """State of `zerojax.zero(..., master_dtype=...)`.

    Attributes:
      master: the parameters in `master_dtype`, an `optax.MaskedNode` where one is as wide already.
      inner: state of the inner transformation.
    """

    master: Any
    inner: Any


def is_wider(dtype: Any, than: Any) -> bool:
    """Whether a real floating dtype has more bits than another."""
    real = all(jnp.issubdtype(d, jnp.floating) for d in (dtype, than))
    return real and jnp.finfo(dtype).bits > jnp.finfo(than).bits


def working_dtype(leaf: LeafPlan, master_dtype: Any) -> Any:
    """The dtype in which the inner transformation sees a leaf and its gradient."""
    wider = master_dtype is not None and is_wider(master_dtype, leaf.dtype)
    return jnp.dtype(master_dtype) if wider else leaf.dtype


def with_master(
    inner: optax.GradientTransformationExtraArgs, part: Partition, dtype: Any
) -> optax.GradientTransformationExtraArgs:
    """Runs a transformation on a wider copy of each lower-precision parameter.

    For a leaf that has a copy `update` returns, in place of an update, the *new parameter* in its
    own dtype, which is what has to be gathered; `subtract_params` makes an update of it then.

    Args:
      inner: the transformation; it sees copies as parameters, and gradients in their dtype.
      part: the plan; its dtypes decide which leaves have a copy.
      dtype: of the copies.

    References:
      Micikevicius et al., "Mixed Precision Training", 2018, section 3.1; Rajbhandari et al.,
      "ZeRO", 2020, section 3.1 (what mixed-precision training holds).
    """

    def cast(leaf: LeafPlan, x: jax.Array) -> jax.Array:
        return x.astype(working_dtype(leaf, dtype))

    def copy(leaf: LeafPlan, x: jax.Array) -> Any:
        return cast(leaf, x) if working_dtype(leaf, dtype) != leaf.dtype else optax.MaskedNode()

    def init(params: Any) -> MasterState:
        return MasterState(part.map(copy, params), inner.init(part.map(cast, params)))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        own = jax.tree.map(lambda p, m: p if _is_absent(m) else m, params, state.master)
        updates = part.map(cast, updates)
        updates, inner_state = inner.update(updates, state.inner, own, **extra)
        applied = optax.apply_updates(own, updates)
        new = jax.tree.map(
            lambda p, m, u, x: u if _is_absent(m) else x.astype(p.dtype),
            params, state.master, updates, applied,
        )  # fmt: skip
        return new, MasterState(part.map(copy, applied), inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def subtract_params(new: Any, state: MasterState, params: Any) -> Any:
    """Updates from what `with_master` returns: in the copy's dtype, in which they are exact.

    A 16-bit update would miss the new parameter, for up to a fifth of small weights.
    """

    def subtract(p: jax.Array, m: Any, x: jax.Array) -> jax.Array:
        if _is_absent(m):
            return x
        # Where nothing is gathered, XLA for GPUs would cancel the rounding against this cast.
        return lax.optimization_barrier(x).astype(m.dtype) - p.astype(m.dtype)

    return jax.tree.map(subtract, params, state.master, new)


def round_wider(part: Partition, params: Any) -> Any:
    """Leaves in a wider floating dtype than planned, rounded to it; others as they are."""

    def round_(path: Any, x: Any) -> Any:
        leaf = part.by_path.get(jax.tree_util.keystr(path))
        return x.astype(leaf.dtype) if leaf and is_wider(jnp.result_type(x), leaf.dtype) else x

    return jax.tree.map_with_path(round_, params)


def _is_absent(master: Any) -> bool:
    return isinstance(master, optax.MaskedNode)
