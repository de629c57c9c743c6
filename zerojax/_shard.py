"""`Shard`: a parameter that a model must `unshard` before it computes with it."""

import dataclasses
from typing import Any, NoReturn

import jax
from jax.sharding import AbstractMesh, Mesh

from zerojax._leaf_plan import LeafPlan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Shard:
    """One parameter on its way to `zerojax.unshard`; not an array.

    A pytree node, so that `scan`, `vmap`, `checkpoint` and `cond` take it as they take the array.
    Its plan counts dims from the end: what is sliced off in front leaves it right.

    Attributes:
      value: what the device holds of the parameter.
      slot: zeros in the shape of the reduced gradient, which is delivered as their cotangent;
        `None` where nothing is, or where XLA reduces.
      accumulator: gradients of earlier microbatches, to be reduced with this one's.
      leaf: the plan of the parameter.
      mesh: the mesh of the plan.
      wire: the `Wire` that gathers and reduces in a Manual region; `None` leaves it to XLA.
    """

    value: Any
    slot: Any = None
    accumulator: Any = None
    leaf: LeafPlan = dataclasses.field(kw_only=True, metadata={"static": True})
    mesh: Mesh | AbstractMesh = dataclasses.field(kw_only=True, metadata={"static": True})
    wire: Any = dataclasses.field(default=None, kw_only=True, metadata={"static": True})

    def __repr__(self) -> str:
        leaf = self.leaf  # jax's own errors print this, and no more
        return f"Shard({leaf.path}: {leaf.dtype}{list(leaf.shape)}, for zerojax.unshard)"

    @property
    def __jax_array__(self) -> NoReturn:  # jax.lax only asks whether it is there
        _refuse(self)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_") or not hasattr(jax.Array, name):
            raise AttributeError(name)
        _refuse(self)


def _refuse(shard: Shard, *_: Any) -> NoReturn:
    raise TypeError(
        f"{shard!r} is not an array: each device holds a part of it. Call zerojax.unshard on it, "
        "or on the tree of the layer that it belongs to, where the model uses it."
    )


# Whatever makes Python or jax take an object for an array.
_OPERATORS = "add and divmod floordiv lshift matmul mod mul or pow rshift sub truediv xor".split()
_UNARY = "abs array bool float getitem int invert iter len neg pos".split()
_COMPARISONS = "ge gt le lt".split()
for _name in [*_OPERATORS, *(f"r{name}" for name in _OPERATORS), *_UNARY, *_COMPARISONS]:
    setattr(Shard, f"__{_name}__", _refuse)
