"""May an update run on each shard alone? Asked of the sharding types in its jaxpr.

An update that reads more than its own shard (a global norm, a factored moment, noise drawn for the
whole array) is right under jit, where arrays are global, and silently wrong inside a Manual region.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.core
import numpy as np
from jax import numpy as jnp
from jax.extend import core as jex_core
from jax.sharding import AbstractMesh

from zerojax._sharding_types import tracing_on
from zerojax._specs import from_spec

# Every element of the result depends on the elements at the same place alone.
_ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp complex conj
    convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1
    floor ge gt igamma igammac imag integer_pow is_finite le lgamma log log1p logistic lt
    max min mul ne neg nextafter not or pow real reduce_precision rem round rsqrt select_n
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
    stop_gradient sub tan tanh xor""".split()
)
# These keep to each shard as long as their types keep every sharded dim sharded.
_TYPED = frozenset(
    """argmax argmin broadcast_in_dim dot_general expand_dims optimization_barrier
    reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor reshape reshard
    sharding_constraint squeeze transpose""".split()
)
# These act along one dim, the parameter named here, which must not be a sharded one.
_ALONG = {
    "concatenate": "dimension", "cumlogsumexp": "axis", "cummax": "axis", "cummin": "axis",
    "cumprod": "axis", "cumsum": "axis", "sort": "dimension", "split": "axis",
}  # fmt: skip

Dims = frozenset[int]  # dims along which a value is known to be constant


def not_shard_local(
    mesh: AbstractMesh,
    axes: Iterable[str],
    fn: Callable[..., Any],
    whole: tuple[Any, ...],
    shard: tuple[Any, ...],
) -> list[str]:
    """The equations of `fn` that mix elements of different shards, or know of their number.

    Args:
      mesh: the twin of the partition's mesh.
      axes: the axes that are Manual where `fn` is to run.
      fn: an optimizer's `update`.
      whole: its arguments, trees of arrays typed on the twin in their natural shapes.
      shard: the same in the shapes of one shard.

    Returns:
      One line for each offending equation; empty if `fn` may run on each shard alone.
    """
    try:
        with tracing_on(mesh):
            jaxpr, on_shard = (jax.make_jaxpr(fn)(*args) for args in (whole, shard))
    except Exception as error:  # a ShardingTypeError, or what its author made of it
        text = next(iter(str(error).splitlines()), "")
        return [f"it cannot be traced on sharded arrays: {type(error).__name__}: {text}"]
    walk = _Walk(frozenset(axes))
    walk.run(jaxpr, [frozenset()] * len(jaxpr.jaxpr.invars))
    problems = list(dict.fromkeys(walk.problems))
    return problems or list(itertools.islice(_size_dependent(jaxpr, on_shard), 1))


def _size_dependent(whole: Any, shard: Any) -> Iterator[str]:
    """Numbers that Python code computed from the size of a sharded dim."""
    for one, other in itertools.zip_longest(whole.consts, shard.consts):
        if one is not other and _differ(one, other):
            yield "a constant depends on the size of a sharded dim"
    for one, other in itertools.zip_longest(_operations(whole.jaxpr), _operations(shard.jaxpr)):
        if one != other:
            yield (
                f"{one} on the whole array, {other} on a shard: it depends on the size of a "
                "sharded dim"
            )


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, jax.core.Tracer) or np.shape(one) != np.shape(other):
        return True
    key = jnp.issubdtype(one.dtype, jax.dtypes.extended)
    return not key and not np.array_equal(one, other)


def _operations(jaxpr: Any) -> Iterator[str]:
    """Each primitive with the numbers that it is given."""
    for eqn in jaxpr.eqns:
        numbers = [str(a.val) for a in eqn.invars if isinstance(a, jex_core.Literal)]
        numbers += [str(x) for x in eqn.params.values() if isinstance(x, int | float)]
        yield f"{eqn.primitive.name}({', '.join(numbers)})"
        for inner in jex_core.jaxprs_in_params(eqn.params):
            yield from _operations(inner)


class _Walk:
    """Follows Manual axes, and the dims along which values are constant, through a jaxpr."""

    def __init__(self, axes: frozenset[str]):
        self.axes = axes
        self.problems: list[str] = []

    def run(self, jaxpr: Any, constant_in: Sequence[Dims]) -> list[Dims]:
        """Checks each equation; returns the constant dims of each output."""
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        constant = dict(zip(jaxpr.invars, constant_in, strict=True))

        def read(atom: Any) -> Dims:
            literal = isinstance(atom, jex_core.Literal)
            return frozenset() if literal else constant.get(atom, frozenset())

        for eqn in jaxpr.eqns:
            outs = self._equation(eqn, [*map(read, eqn.invars)])
            constant.update(zip(eqn.outvars, outs, strict=True))
        return [*map(read, jaxpr.outvars)]

    def _equation(self, eqn: Any, constant_in: list[Dims]) -> list[Dims]:
        unknown: list[Dims] = [frozenset()] * len(eqn.outvars)
        if eqn.params.get("name") == "zerojax_global_norm":
            return unknown
        inner = list(jex_core.jaxprs_in_params(eqn.params))
        if len(inner) == 1 and len(inner[0].invars) == len(eqn.invars):  # a call
            return self.run(inner[0], constant_in)
        for jaxpr in inner:  # a loop or a conditional
            self.run(jaxpr, [frozenset()] * len(jaxpr.invars))
        return unknown if inner else self._primitive(eqn, constant_in)

    def _primitive(self, eqn: Any, constant_in: list[Dims]) -> list[Dims]:
        name = eqn.primitive.name
        operands = [
            (atom.aval, self._sharded(atom.aval), constant | _dims_of_size_one(atom.aval))
            for atom, constant in zip(eqn.invars, constant_in, strict=True)
        ]
        axes_in = {axis for _, sharded, _ in operands for axis in sharded}
        constant_out = _constant_out(eqn, operands)
        for out in eqn.outvars:
            sharded_out = self._sharded(out.aval)
            if lost := axes_in - sharded_out.keys():
                self._report(eqn, f"the result is no longer sharded over {sorted(lost)}")
            for axis, dim in sharded_out.items():
                if dim in constant_out:
                    continue
                if axis not in axes_in:
                    self._report(eqn, f"the result depends on the position along {axis!r}")
                for aval, sharded, constant in operands:
                    same_dim = name in _ELEMENTWISE and dim in constant
                    if not (axis in sharded or same_dim or len(constant) == aval.ndim):
                        self._report(eqn, f"an operand that varies is not sharded over {axis!r}")
        mixed = _mixed_dims(eqn)
        if axes_in and (
            mixed is None or any({*mixed} & {*sharded.values()} for _, sharded, _ in operands)
        ):
            self._report(eqn, "it is not known to act on each shard alone")
        return [constant_out] * len(eqn.outvars)

    def _sharded(self, aval: Any) -> dict[str, int]:
        """The Manual axes of a type, with their dims."""
        spec = from_spec(aval.sharding.spec, aval.ndim)
        return {axis: dim for dim, axes in enumerate(spec) for axis in axes if axis in self.axes}

    def _report(self, eqn: Any, why: str) -> None:
        types = ", ".join(atom.aval.str_short(short_dtypes=True) for atom in eqn.invars)
        self.problems.append(f"{eqn.primitive.name}({types}): {why}")


def _dims_of_size_one(aval: Any) -> Dims:
    return frozenset(dim for dim, size in enumerate(aval.shape) if size == 1)


def _mixed_dims(eqn: Any) -> Iterable[int] | None:
    """The dims along which an equation moves or combines elements; `None` if that is not known."""
    name, params = eqn.primitive.name, eqn.params
    if name in _ELEMENTWISE | _TYPED:
        return ()
    if name in _ALONG:
        one_part = name in ("concatenate", "split") and len(eqn.invars) == len(eqn.outvars)
        return () if one_part else (params[_ALONG[name]],)
    if name == "rev":
        return params["dimensions"]
    if name == "pad":
        return [dim for dim, config in enumerate(params["padding_config"]) if any(config)]
    if name == "slice":
        sizes = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        return [dim for dim, (whole, part) in enumerate(zip(*sizes, strict=True)) if whole != part]
    return None


def _constant_out(eqn: Any, operands: list[tuple[Any, dict[str, int], Dims]]) -> Dims:
    """The dims along which a result is constant."""
    name, every = eqn.primitive.name, frozenset(range(eqn.outvars[0].aval.ndim))
    if name == "broadcast_in_dim":
        aval, _, constant = operands[0]
        mapped = eqn.params["broadcast_dimensions"]
        shape = eqn.params["shape"]
        varies = {
            d for i, d in enumerate(mapped) if i not in constant and aval.shape[i] == shape[d]
        }
        return every - varies
    if name in _ELEMENTWISE:
        return every.intersection(*(constant for aval, _, constant in operands if aval.ndim))
    if name in _TYPED and all(len(constant) == aval.ndim for aval, _, constant in operands):
        return every
    return frozenset()
