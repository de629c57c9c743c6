"""A user's loss function, traced once on a device's part of the batch and looked at."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax import numpy as jnp
from jax.extend import core as jex_core

from zerojax._partition import broadcast_prefix, is_inexact, raise_all

PLAIN = (
    "use plain jax.value_and_grad under jit with zerojax.zero, which sees the global batch "
    "(XLA then reduces once per microbatch: more traffic, same numbers)"
)
# Reductions after which every device holds the same; all_to_all and the like transpose correctly.
_REDUCTIONS = frozenset({"psum", "psum_invariant", "pmax", "pmin"})


class NotTraced(Exception):
    """The loss cannot be traced on a device's part of the batch; the cause says why."""


@dataclasses.dataclass(frozen=True)
class TracedLoss:
    """A loss function as a jaxpr.

    Attributes:
      call: `(params, args) -> (loss, (weight, aux_leaves))` on local arrays.
      dtype: of the loss.
      aux_treedef: structure of the auxiliary output.
      aux: "mean" or "concat" for each of its leaves.
    """

    call: Callable[[Any, Any], tuple[jax.Array, tuple[jax.Array, list[jax.Array]]]]
    dtype: Any
    aux_treedef: Any
    aux: list[str]


def trace_loss(
    loss_fn: Callable[..., Any],
    params: Any,
    args: tuple[Any, ...],
    *,
    data_axes: tuple[str, ...],
    has_aux: bool,
    aux_reduction: Any,
    weighted: bool,
) -> TracedLoss:
    """Traces a loss on example arguments and checks what it returns and communicates.

    Raises:
      NotTraced: `loss_fn` itself raised.
      ValueError: it reduces over the data axes, or returns something else than announced.
    """
    try:
        closed, out = jax.make_jaxpr(loss_fn, return_shape=True)(params, *args)
    except Exception as error:
        raise NotTraced from error
    raise_all(
        f"value_and_grad: the loss reduces over the data axes {data_axes} by itself; zerojax "
        "averages it, so return the mean over this device's examples. If the loss couples "
        f"examples (batch normalisation), {PLAIN}",
        [f"  {line}" for line in dict.fromkeys(_reductions(closed.jaxpr, {*data_axes}))],
    )
    result, aux = out if has_aux else (out, ())
    loss, weight = result if weighted else (result, None)
    for name, x in {"loss": loss, "weight": weight}.items():
        if x is None:
            continue
        if not isinstance(x, jax.ShapeDtypeStruct) or x.shape:
            raise ValueError(f"value_and_grad: the {name} must be a scalar, got {x}.")
        if name == "loss" and not is_inexact(x.dtype):
            raise ValueError(f"value_and_grad: the loss must be floating, got {x.dtype}.")
    aux_with_paths, aux_treedef = jax.tree.flatten_with_path(aux)
    reductions = broadcast_prefix(
        "aux_reduction", aux_reduction, aux, lambda x: x is None or isinstance(x, str)
    )
    problems, how = [], []
    for (path, x), reduction in zip(aux_with_paths, reductions, strict=True):
        name, floating = jax.tree_util.keystr(path), is_inexact(x.dtype)
        if reduction is None and (x.shape or not floating):
            problems.append(f'  aux{name}: {x.str_short()} needs "mean" or "concat"')
        elif reduction not in (None, "mean", "concat"):
            problems.append(f'  aux{name}: expected "mean" or "concat", got {reduction!r}')
        elif reduction == "concat" and not x.shape:
            problems.append(f"  aux{name}: a scalar has no dim to concatenate")
        elif reduction == "mean" and not floating:
            problems.append(f"  aux{name}: the mean of {x.dtype} is not {x.dtype}; cast it")
        how.append(reduction or "mean")
    raise_all("value_and_grad: say how auxiliary output combines, with aux_reduction=", problems)

    def call(params: Any, args: Any) -> Any:
        flat = jax.tree.leaves((params, args))
        result = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *flat)
        weight = result[1] if weighted else jnp.ones((), result[0].dtype)
        return result[0], (weight, result[1 + weighted :])

    return TracedLoss(call, loss.dtype, aux_treedef, how)


def _reductions(jaxpr: Any, axes: set[str]) -> Iterator[str]:
    """The equations of a jaxpr, and of those inside it, that reduce over some mesh axes."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _REDUCTIONS and axes & set(eqn.params["axes"]):
            types = ", ".join(str(atom.aval) for atom in eqn.invars)
            yield f"{eqn.primitive.name}({types}) over {eqn.params['axes']}"
        for inner in jex_core.jaxprs_in_params(eqn.params):
            yield from _reductions(inner, axes)
