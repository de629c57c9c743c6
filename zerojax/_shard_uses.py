"""What a loss does with its parameters before it calls `unshard` on them, read in its jaxpr.

`Shard` is a pytree node, so that `jax.tree.leaves` sees through it; what is computed on local
shards would be silently wrong. And all devices must gather the same slice at the same time.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend import core as jex_core

from zerojax._leaf_plan import LeafPlan

UNSHARDED = "zerojax_unshard"  # the name of what `unshard` returns
REDUCED = "zerojax_reduce "  # the start of the name of a gradient that it reduces; then the path

# These may cut a shard along dims that are not sharded, or leave it as it is.
_SLICES = frozenset(
    """copy dynamic_slice gather mesh_cast optimization_barrier reshape reshard slice split squeeze
    stop_gradient""".split()
)


@dataclasses.dataclass(frozen=True)
class Value:
    """What is known of a value in the jaxpr.

    Attributes:
      varies: whether it may differ between devices.
      leaf: the plan of the parameter that it is, or a slice of along leading dims; or `None`.
      times: how often the loss sees any one element of that parameter, at most.
    """

    varies: bool = False
    leaf: LeafPlan | None = None
    times: float = 1

    def repeated(self, times: float) -> "Value":
        """The same in code that runs several times."""
        return dataclasses.replace(self, times=self.times * times)

    @property
    def kept_dims(self) -> int:
        """The number of trailing dims that no slice may touch: from the first sharded one on."""
        dims = self.leaf.shard if self.leaf else ()
        return len(dims) - next(dim for dim, axes in enumerate(dims) if axes)


Values = Sequence[Value]


class ShardUses:
    """How often each parameter is unsharded, and what else is done with it.

    Attributes:
      counts: by key path, how often `unshard` sees any one element; infinite where only the data
        tell.
      problems: a line for each equation that uses a parameter in another way.
      uneven: a line for each `unshard` that some devices may not reach, or with another slice.
    """

    def __init__(self, jaxpr: Any, inputs: Values):
        """Reads the jaxpr of a loss that was traced on whole parameters."""
        self.counts: defaultdict[str, float] = defaultdict(int)
        self.problems: list[str] = []
        self.uneven: list[str] = []
        self._branch: str = ""  # the innermost branch that only some devices may take
        self._refuse(self._walk(jaxpr, inputs), "is returned")

    def _walk(self, jaxpr: Any, inputs: Values) -> Values:
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        known = dict(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Value:
            return Value() if isinstance(atom, jex_core.Literal) else known.get(atom, Value())

        for eqn in jaxpr.eqns:
            outs = self._equation(eqn, [*map(read, eqn.invars)])
            known.update(zip(eqn.outvars, outs, strict=True))
        return [*map(read, jaxpr.outvars)]

    def _equation(self, eqn: Any, ins: Values) -> Values:
        name, params = eqn.primitive.name, eqn.params
        if params.get("name") == UNSHARDED:
            return self._unshard(ins[0])
        if name in ("scan", "cond", "while"):
            return getattr(self, f"_{name}")(eqn, ins)
        inner = list(jex_core.jaxprs_in_params(params))
        if len(inner) == 1 and len(inner[0].invars) == len(eqn.invars):  # a call
            return self._walk(inner[0], ins)
        for jaxpr in inner:
            self._walk(jaxpr, [Value(varies=True)] * len(jaxpr.invars))
        varies = name == "axis_index" or any(value.varies for value in ins)
        if name in _SLICES and ins[0].leaf and _keeps(eqn, ins[0]):
            times = math.inf if name in ("dynamic_slice", "gather") else 1
            out = dataclasses.replace(ins[0].repeated(times), varies=varies)
        else:
            types = ", ".join(atom.aval.str_short(short_dtypes=True) for atom in eqn.invars)
            self._refuse(ins, f"is an operand of {name}({types})")
            out = Value(varies)
        return [out] * len(eqn.outvars)

    def _unshard(self, value: Value) -> Values:
        if value.leaf:
            self.counts[value.leaf.path] += value.times
            if self._branch:
                self.uneven.append(f"  {value.leaf.path}: {self._branch}")
            if value.varies:
                self.uneven.append(f"  {value.leaf.path}: of which the data choose a slice")
        return [Value()]  # gathered from all devices, and so the same on each

    def _scan(self, eqn: Any, ins: Values) -> Values:
        body, length = eqn.params["jaxpr"], eqn.params["length"]
        inside, carries = [], []
        for value, atom, inner in zip(ins, eqn.invars, body.jaxpr.invars, strict=True):
            scanned_over = atom.aval.ndim > inner.aval.ndim
            if value.leaf and scanned_over and value.kept_dims == atom.aval.ndim:
                self._refuse([value], "is scanned over along its sharded dim")
            if not scanned_over:
                carries.append(len(inside))  # or constants, which come before them
            # Every iteration sees its own slice of what is scanned over, and all of the rest.
            inside.append(value.repeated(1 if scanned_over else length))
        pairs = zip(eqn.outvars, body.jaxpr.outvars, strict=True)
        carried = sum(outer.aval.ndim == inner.aval.ndim for outer, inner in pairs)
        outs = self._loop(body, inside, carries[len(carries) - carried :])
        self._refuse(outs, "is returned from a scan, or carried through it")
        return [Value(out.varies) for out in outs]

    def _while(self, eqn: Any, ins: Values) -> Values:
        params = eqn.params
        first, last = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        self._refuse(ins[last:], "is in the carry of a while loop")
        ins = [value.repeated(math.inf) for value in ins]
        inside = [*ins[first:last], *ins[last:]]
        carries = [*range(last - first, len(inside))]
        outs = self._loop(params["body_jaxpr"], inside, carries)
        again = self._walk(params["cond_jaxpr"], [*ins[:first], *outs])
        if again[0].varies:
            before, self._branch = self._branch, "in a while loop that ends where the data tell"
            self._loop(params["body_jaxpr"], inside, carries)
            self._branch = before
        self._refuse(outs, "is returned from a while loop")
        return [Value(out.varies or again[0].varies) for out in outs]

    def _cond(self, eqn: Any, ins: Values) -> Values:
        which, *rest = ins
        before = self._branch
        if which.varies:
            self._branch = "in a branch that the data choose"
        rest = [value.repeated(math.inf) for value in rest]
        branches = [self._walk(branch, rest) for branch in eqn.params["branches"]]
        self._branch = before
        for outs in branches:
            self._refuse(outs, "is returned from a branch")
        varies = [any(v.varies for v in outs) for outs in zip(*branches, strict=True)]
        return [Value(which.varies or v) for v in varies]

    def _loop(self, body: Any, inside: list[Value], carries: list[int]) -> Values:
        """Walks through the body of a loop until what varies in its carries no longer changes."""
        while True:
            before = dict(self.counts), [*self.problems], [*self.uneven]
            outs = self._walk(body, inside)
            changed = False
            for i, out in zip(carries, outs, strict=False):
                if out.varies and not inside[i].varies:
                    inside[i] = dataclasses.replace(inside[i], varies=True)
                    changed = True
            if not changed:
                return outs
            counts, self.problems, self.uneven = before
            self.counts = defaultdict(int, counts)

    def _refuse(self, values: Values, what: str) -> None:
        self.problems += [f"  {value.leaf.path}: {what}" for value in values if value.leaf]


def _keeps(eqn: Any, value: Value) -> bool:
    """Whether a slicing equation leaves the trailing dims of its first operand as they are."""
    kept, before = value.kept_dims, eqn.invars[0].aval.shape
    same = all(out.aval.shape[-kept:] == before[-kept:] for out in eqn.outvars)
    if eqn.primitive.name == "gather":
        ndim = eqn.outvars[0].aval.ndim
        offsets = eqn.params["dimension_numbers"].offset_dims
        same &= [*offsets[-kept:]] == [*range(ndim - kept, ndim)]
    return same


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr, and of those inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jex_core.jaxprs_in_params(eqn.params):
            yield from equations(inner)
