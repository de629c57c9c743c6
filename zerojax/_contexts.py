"""Where the code stands: eager, under jit with Auto or Explicit axes, or inside a Manual region."""

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.core import Tracer
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    get_abstract_mesh,
    use_abstract_mesh,
)
from jax.sharding import PartitionSpec as P

from zerojax._processes import check_equal, to_global
from zerojax._specs import axes_of_type, raise_all, restrict


def manual_axes() -> set[str]:
    """The mesh axes that the enclosing `shard_map`s have made Manual."""
    return axes_of_type(get_abstract_mesh(), AxisType.Manual)


def varying_axes(x: Any) -> set[str]:
    """The mesh axes over which an array of a Manual region is typed varying."""
    return set(jax.typeof(x).manual_axis_type.varying)


def as_varying(x: Any, axes: Iterable[str]) -> Any:
    """An array of a Manual region with types, cast to varying over axes that it does not have."""
    missing = tuple(a for a in axes if a in manual_axes() - varying_axes(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def current_mesh(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """The mesh with the axis types that it has in the surrounding code."""
    here = get_abstract_mesh()
    if here.empty or here.axis_types == mesh.axis_types:
        return mesh
    if isinstance(mesh, AbstractMesh):
        return here
    return Mesh(mesh.devices, mesh.axis_names, axis_types=here.axis_types)


def standing_on(mesh: Mesh | AbstractMesh) -> contextlib.AbstractContextManager[Any]:
    """Enters the mesh for tracing, unless the surrounding code stands on one."""
    here = get_abstract_mesh()
    return use_abstract_mesh(mesh.abstract_mesh) if here.empty else contextlib.nullcontext()


def constrain(mesh: Mesh | AbstractMesh, x: Any, spec: P) -> Any:
    """Constrains an array of an Auto-mode program to a spec."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(current_mesh(mesh), spec))


def to_stored(mesh: Mesh | AbstractMesh, x: Any, stored: tuple[int, ...], spec: P) -> Any:
    """Pads a natural array of an Auto-mode program; each device pads only its own end."""
    if x.shape != stored:
        x = constrain(mesh, x, spec)
        x = jnp.pad(x, [(0, s - n) for n, s in zip(x.shape, stored, strict=True)])
    return constrain(mesh, x, spec)


def to_natural(mesh: Mesh | AbstractMesh, x: Any, shape: tuple[int, ...], spec: P) -> Any:
    """Strips the padding in an Auto-mode program; the result may be unevenly sharded."""
    if x.shape != shape:
        x = constrain(mesh, x, spec)
        x = jax.lax.slice(x, (0,) * x.ndim, shape)
    return constrain(mesh, x, spec)


def run_globally(
    fn: Callable[..., Any],
    mesh: Mesh | AbstractMesh,
    *args: Any,
    out_specs: Any,
    static: dict[str, Any] | None = None,
) -> Any:
    """Calls `fn` on global arrays with the mesh axes in Auto mode.

    Under jit on an Auto mesh this is just `fn(*args)`; Explicit axes are entered with
    `auto_axes`; outside jit, `fn` is jitted.

    Args:
      fn: the same function object at every call, or each eager call compiles anew.
      mesh: the mesh of the partition.
      *args: trees of arrays.
      out_specs: tree of PartitionSpecs of the result, or a prefix, for leaving Explicit axes.
      static: keyword arguments that are not arrays.
    """
    static = static or {}
    explicit = axes_of_type(current_mesh(mesh), AxisType.Explicit)
    if explicit:
        specs, treedef = jax.tree.flatten(out_specs)
        shardings = tuple(NamedSharding(mesh, restrict(spec, explicit)) for spec in specs)
        fn = _enter_auto(fn, mesh, tuple(sorted(explicit)), shardings, treedef)
    if is_eager(args):
        check_equal(args, mesh)
        args = jax.tree.map(lambda x: _on_mesh(x, mesh), args)
        fn = jax.jit(fn, static_argnames=tuple(static))
    return fn(*args, **static)


def as_typed(
    fn: Callable[..., Any], mesh: Mesh | AbstractMesh, axes: Iterable[str], in_specs: Any
) -> Callable[..., Any]:
    """`fn`, called from Auto-mode code, with those of some axes Explicit that `mesh` has so.

    A user's function expects the types of the user's mesh, while XLA partitions collectives well
    only in Auto mode.
    """
    explicit = axes_of_type(mesh, AxisType.Explicit) & {*axes}
    if not explicit:
        return fn
    specs = jax.tree.map(lambda spec: restrict(spec, explicit), in_specs)
    return jax.sharding.explicit_axes(fn, axes=tuple(sorted(explicit)), in_sharding=specs)


@functools.lru_cache(maxsize=64)  # one function object for each, or eager calls compile anew
def _enter_auto(
    fn: Callable[..., Any],
    mesh: Mesh | AbstractMesh,
    axes: tuple[str, ...],
    out: tuple[NamedSharding, ...],
    treedef: Any,
) -> Callable[..., Any]:
    """`fn` with some Explicit axes in Auto mode inside."""

    def run(*args: Any, **static: Any) -> Any:
        inside = functools.partial(fn, **static)
        auto = jax.sharding.auto_axes(inside, axes=axes, out_sharding=treedef.unflatten(out))
        with standing_on(mesh):  # `out` tells it too, but the state of plain sgd has no leaf
            return auto(*args)

    return run


def refuse_explicit_constants(fn: Callable[..., Any], *args: Any, **more: Any) -> None:
    """Raises if an update closes over arrays on Explicit axes, which Auto-mode code cannot use."""
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)), (args, more)
    )
    constants = jax.make_jaxpr(lambda args, more: fn(*args, **more))(*shapes).consts
    types = [jax.typeof(x) for x in constants]
    raise_all(
        "zero.update: on a mesh with Explicit axes the inner transformation must not close over "
        "arrays, as that of inject_hyperparams(lambda rate: zero(...)) does. Write "
        "zero(inject_hyperparams(...)), or use zerojax.train_step",
        [f"  {t}" for t in types if axes_of_type(t.sharding.mesh, AxisType.Explicit)],
    )


def is_eager(tree: Any) -> bool:
    """Whether no array of a tree is being traced."""
    return not any(isinstance(x, Tracer) for x in jax.tree.leaves(tree))


def is_boundary(mesh: Mesh | AbstractMesh, *args: Any) -> bool:
    """Whether what `run_globally` returns leaves Auto mode, where it must be evenly sharded."""
    return is_eager(args) or bool(axes_of_type(current_mesh(mesh), AxisType.Explicit))


def _on_mesh(x: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Replicates an array over the mesh unless it lives on one already."""
    if isinstance(getattr(x, "sharding", None), NamedSharding):
        return x
    return to_global(x, NamedSharding(mesh, P()))
