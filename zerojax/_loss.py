"""A user's loss function, traced once on a device's part of the batch and looked at."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax import numpy as jnp
from jax.core import eval_jaxpr
from jax.sharding import NamedSharding

from zerojax._shard_uses import UNSHARDED, equations
from zerojax._specs import broadcast_prefix, is_inexact, raise_all

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
      jaxpr: of `loss_fn`.
      unshards: whether it calls `unshard`.
      dtype: of the loss.
      aux_treedef: structure of the auxiliary output.
      aux: "mean" or "concat" for each of its leaves.
    """

    call: Callable[[Any, Any], tuple[jax.Array, tuple[jax.Array, list[jax.Array]]]]
    jaxpr: Any
    unshards: bool
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
    every = list(equations(closed.jaxpr))
    if pinned := list(_constraints(every, {*data_axes})):
        raise NotTraced from ValueError("; ".join(dict.fromkeys(pinned)))  # lowering would raise
    raise_all(
        f"value_and_grad: the loss reduces over the data axes {data_axes} by itself; zerojax "
        "averages it, so return the mean over this device's examples. If the loss couples "
        f"examples (batch normalisation), {PLAIN}",
        [f"  {line}" for line in dict.fromkeys(_reductions(every, {*data_axes}))],
    )
    result, aux = _pair(out, "has_aux=True", "(loss, aux)") if has_aux else (out, ())
    scalars = {"loss": result}
    if weighted:
        pair = _pair(result, 'reduction="weighted"', "(loss_sum, weight)")
        scalars = dict(zip(["loss", "weight"], pair, strict=True))
    for name, x in scalars.items():
        if not isinstance(x, jax.ShapeDtypeStruct) or x.shape:
            raise ValueError(
                f"value_and_grad: the {name} must be a scalar, got {_text(x)}. Return the mean "
                "over examples, and auxiliary output only with has_aux=True."
            )
    loss = scalars["loss"]
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise ValueError(f"value_and_grad: the loss must be floating, got {loss.dtype}.")
    aux_with_paths, aux_treedef = jax.tree.flatten_with_path(aux)
    reductions = broadcast_prefix(
        "aux_reduction", aux_reduction, aux, lambda x: x is None or isinstance(x, str)
    )
    problems, how = [], []
    for (path, x), reduction in zip(aux_with_paths, reductions, strict=True):
        name, floating = jax.tree_util.keystr(path), is_inexact(x.dtype)
        if reduction is None and (x.shape or not floating):
            problems.append(f'  aux{name}: {_text(x)} needs "mean" or "concat"')
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
        result = eval_jaxpr(closed.jaxpr, closed.consts, *flat)
        result = [jnp.asarray(x) for x in result]  # a constant comes as a Python number
        weight = result[1] if weighted else jnp.ones((), result[0].dtype)
        return result[0], (weight, result[1 + weighted :])

    unshards = any(eqn.params.get("name") == UNSHARDED for eqn in every)
    return TracedLoss(call, closed.jaxpr, unshards, loss.dtype, aux_treedef, how)


def _pair(out: Any, option: str, expected: str) -> tuple[Any, Any]:
    """What a loss returns as a pair of two."""
    if not isinstance(out, tuple) or len(out) != 2:
        raise ValueError(
            f"value_and_grad: with {option} the loss must return {expected}, got {_text(out)}."
        )
    return out


def _text(tree: Any) -> str:
    """The dtypes and shapes of a tree of arrays."""
    return str(jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree)).replace("'", "")


def _reductions(equations: list[Any], axes: set[str]) -> Iterator[str]:
    """The equations that reduce over some mesh axes."""
    for eqn in equations:
        if eqn.primitive.name in _REDUCTIONS and axes & set(eqn.params["axes"]):
            types = ", ".join(str(atom.aval) for atom in eqn.invars)
            yield f"{eqn.primitive.name}({types}) over {eqn.params['axes']}"


def _constraints(equations: list[Any], axes: set[str]) -> Iterator[str]:
    """The shardings that name some mesh axes, with their equations."""
    for eqn in equations:
        for sharding in jax.tree.leaves([*eqn.params.values()]):
            if not isinstance(sharding, NamedSharding):
                continue
            if axes & {a for a in jax.tree.leaves([*sharding.spec]) if isinstance(a, str)}:
                yield f"{eqn.primitive.name} with {sharding.spec} names {sorted(axes)}"
