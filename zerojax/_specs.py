"""PartitionSpecs as tuples of mesh axes, prefix trees, and errors that name every bad leaf."""

import math
from collections.abc import Iterable
from typing import Any

import jax
from jax import numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

Axes = tuple[str, ...]
Spec = tuple[Axes, ...]  # the mesh axes of every dim, major axis first


def to_spec(axes: Iterable[Axes]) -> P:
    """A PartitionSpec from the mesh axes of each dim."""
    return P(*(a[0] if len(a) == 1 else a or None for a in axes))


def from_spec(spec: P, ndim: int) -> Spec:
    """The mesh axes of each dim from a PartitionSpec."""
    if not isinstance(spec, P):
        raise TypeError(f"expected a PartitionSpec or None, got {spec!r}.")
    if len(spec) > ndim:
        raise ValueError(f"{spec} has {len(spec)} entries for an array of {ndim} dims.")
    if any(entry is P.UNCONSTRAINED for entry in spec):
        raise ValueError(f"{spec} leaves a dim open; name its axes, or None.")
    entries = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec]
    return tuple(entries) + ((),) * (ndim - len(spec))


def restrict(spec: P, axes: Iterable[str]) -> P:
    """A PartitionSpec without the axes that are not among `axes`."""
    return to_spec(tuple(a for a in dim if a in axes) for dim in from_spec(spec, len(spec)))


def axes_size(mesh: Mesh | AbstractMesh, axes: Iterable[str]) -> int:
    """The number of devices along some mesh axes."""
    return math.prod(mesh.shape[axis] for axis in axes)


def axes_of_type(mesh: Mesh | AbstractMesh, kind: AxisType) -> set[str]:
    """The names of the mesh axes of one type."""
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name for name, axis_type in types if axis_type == kind}


def is_spec(x: Any) -> bool:
    """Whether a node of a tree of specs is a leaf."""
    return x is None or isinstance(x, P)


def is_inexact(dtype: Any) -> bool:
    """Whether arrays of this dtype can have gradients."""
    return jnp.issubdtype(dtype, jnp.inexact)


def widened(dtype: Any) -> Any:
    """The dtype in which values of this one are added up: float32 or wider."""
    return jnp.promote_types(dtype, jnp.float32)


def broadcast_prefix(name: str, prefix: Any, tree: Any, is_leaf: Any = None) -> list[Any]:
    """The leaves of a prefix tree, one for each leaf of `tree`."""
    try:
        full = jax.tree.broadcast(prefix, tree, is_leaf=is_leaf)
    except ValueError as error:
        raise ValueError(
            f"{name} must be a tree of this structure, or a prefix of it: "
            f"{str(error).replace('broadcast_prefix prefix_tree', 'prefix')}\n"
            f"  structure: {jax.tree.structure(tree)}"
        ) from error
    return jax.tree.structure(tree).flatten_up_to(full)


def raise_all(message: str, problems: Iterable[str], error: type[Exception] = ValueError) -> None:
    """Raises one error that lists all problems, if there are any."""
    problems = list(problems)
    if problems:
        raise error("\n".join([message + ":", *problems]))
