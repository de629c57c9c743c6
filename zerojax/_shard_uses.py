"""What a loss does with its shards before it calls `unshard` on them, read in its jaxpr.

`Shard` is a pytree node, so that `jax.tree.leaves` sees through it; what is computed on local
shards would be silently wrong.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from jax.extend import core as jex_core

from zerojax._leaf_plan import LeafPlan

UNSHARDED = "zerojax_unshard"  # the name of every equation that `unshard` makes
REDUCED = "zerojax_reduce "  # the start of the name of a gradient that it reduces; then the path

# These may cut a shard along dims that are not sharded, or leave it as it is.
_SLICES = frozenset(
    """copy dynamic_slice gather mesh_cast optimization_barrier reshape reshard slice split squeeze
    stop_gradient""".split()
)


@dataclasses.dataclass(frozen=True)
class Part:
    """A value that is a parameter's shard, or a slice of it along leading dims.

    Attributes:
      leaf: the plan of the parameter.
      times: how often the loss sees any one element of it, at most.
    """

    leaf: LeafPlan
    times: float = 1

    def repeated(self, times: float) -> "Part":
        """The same in code that runs several times."""
        return dataclasses.replace(self, times=self.times * times)

    @property
    def kept_dims(self) -> int:
        """The number of trailing dims that no slice may touch: from the first sharded one on."""
        return len(self.leaf.shard) - next(d for d, axes in enumerate(self.leaf.shard) if axes)


Parts = Sequence[Part | None]


class ShardUses:
    """How often each parameter is unsharded, and what else is done with it.

    Attributes:
      counts: by key path, how often `unshard` sees any one element; infinite where only the data
        tell.
      problems: a line for each equation that uses a shard in another way.
    """

    def __init__(self, jaxpr: Any, leaves: Sequence[LeafPlan | None]):
        """Reads the jaxpr of a loss; `leaves` has for each input the plan of a shard, or `None`."""
        self.counts: defaultdict[str, float] = defaultdict(int)
        self.problems: list[str] = []
        parts = [leaf and Part(leaf) for leaf in leaves]
        self._refuse(self._walk(jaxpr, parts), "is returned")

    def _walk(self, jaxpr: Any, parts: Parts) -> Parts:
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        known = dict(zip(jaxpr.invars, parts, strict=True))

        def read(atom: Any) -> Part | None:
            return None if isinstance(atom, jex_core.Literal) else known.get(atom)

        for eqn in jaxpr.eqns:
            outs = self._equation(eqn, [*map(read, eqn.invars)])
            known.update(zip(eqn.outvars, outs, strict=True))
        return [*map(read, jaxpr.outvars)]

    def _equation(self, eqn: Any, ins: Parts) -> Parts:
        name, params = eqn.primitive.name, eqn.params
        nothing = [None] * len(eqn.outvars)
        used = [part for part in ins if part]
        label = str(params.get("name"))
        if label.startswith(REDUCED):
            self.problems.append(f"  {label.removeprefix(REDUCED)}: a gradient is taken of it")
        if label == UNSHARDED and name != "name":
            for path in {part.leaf.path for part in used}:  # its value, slot and accumulator
                self.counts[path] += max(p.times for p in used if p.leaf.path == path)
            return nothing
        if name == "scan":
            return self._scan(eqn, ins)
        if name in ("cond", "while"):
            return self._unknown_times(eqn, ins)
        inner = list(jex_core.jaxprs_in_params(params))
        if len(inner) == 1 and len(inner[0].invars) == len(eqn.invars):  # a call
            return self._walk(inner[0], ins)
        for jaxpr in inner:
            self._walk(jaxpr, [None] * len(jaxpr.invars))
        if used and name in _SLICES and _keeps(eqn, used[0]):
            index = math.inf if name in ("dynamic_slice", "gather") else 1
            return [used[0].repeated(index)] * len(eqn.outvars)
        types = ", ".join(atom.aval.str_short(short_dtypes=True) for atom in eqn.invars)
        self._refuse(used, f"is an operand of {name}({types})")
        return nothing

    def _scan(self, eqn: Any, ins: Parts) -> Parts:
        body, inside = eqn.params["jaxpr"], []
        for part, atom, inner in zip(ins, eqn.invars, body.jaxpr.invars, strict=True):
            scanned_over = atom.aval.ndim > inner.aval.ndim
            if part and scanned_over and part.kept_dims == atom.aval.ndim:
                self._refuse([part], "is scanned over along its sharded dim")
            # Every iteration sees its own slice of what is scanned over, and all of the rest.
            inside.append(part and part.repeated(1 if scanned_over else eqn.params["length"]))
        self._refuse(self._walk(body, inside), "is returned from a scan, or carried through it")
        return [None] * len(eqn.outvars)

    def _unknown_times(self, eqn: Any, ins: Parts) -> Parts:
        """A conditional or a while loop."""
        params, ins = eqn.params, [part and part.repeated(math.inf) for part in ins]
        if eqn.primitive.name == "cond":
            calls = [(branch, ins[1:]) for branch in params["branches"]]
        else:
            first, last = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
            self._refuse(ins[last:], "is in the carry of a while loop")
            carry = [None] * len(ins[last:])
            calls = [
                (params["cond_jaxpr"], [*ins[:first], *carry]),
                (params["body_jaxpr"], [*ins[first:last], *carry]),
            ]
        for jaxpr, parts in calls:
            self._refuse(self._walk(jaxpr, parts), f"is returned from a {eqn.primitive.name}")
        return [None] * len(eqn.outvars)

    def _refuse(self, parts: Parts, what: str) -> None:
        self.problems += [f"  {part.leaf.path}: {what}" for part in parts if part]


def _keeps(eqn: Any, part: Part) -> bool:
    """Whether a slicing equation leaves the trailing dims of its first operand as they are."""
    kept, before = part.kept_dims, eqn.invars[0].aval.shape
    same = all(out.aval.shape[-kept:] == before[-kept:] for out in eqn.outvars)
    if eqn.primitive.name == "gather":
        ndim = eqn.outvars[0].aval.ndim
        offsets = eqn.params["dimension_numbers"].offset_dims
        same &= [*offsets[-kept:]] == [*range(ndim - kept, ndim)]
    return same
