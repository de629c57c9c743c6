"""Checkpoints in natural shapes: those of a plain optax run, at any number of devices.

A checkpoint holds `{"params": params, "opt_state": opt_state}`: the tree, shapes and dtypes that
the same transformation without `zerojax.zero` gives. A plain optax script restores it, and zerojax
restores that script's. Two kinds of leaf need a word:

* Integer, bool and key parameters have no optimizer state, as in `optax.masked`. For the same tree
  in both scripts write `optax.masked(tx, trainable)` there and `zero(optax.masked(tx, trainable),
  part)` here.
* Orbax stores no array without elements. Such a leaf is `None` in the checkpoint.

`zerojax.MasterState` and `zerojax.LossScaleState` are saved as they are. They have no counterpart
in optax, whose state is their `inner`.
"""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax import numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax._boxes import pure
from zerojax._contexts import run_globally
from zerojax._contexts import to_natural as _to_natural
from zerojax._partition import Partition, dtype_of, put
from zerojax._processes import check_equal, is_local, to_global
from zerojax._sharding_types import state_specs, typed
from zerojax._specs import axes_size, from_spec, raise_all, to_spec
from zerojax._weights import consolidate, item_directory, load_safetensors, saved_arrays
from zerojax._zero import abstract_state

__all__ = [
    "consolidate",
    "from_natural",
    "load_safetensors",
    "restore",
    "restore_target",
    "save",
    "to_natural",
]

Name = tuple[str, ...]  # of a leaf, as orbax has it: ("opt_state", "0", "mu", "w")


class _Leaf(NamedTuple):
    """A leaf of a checkpoint: what is saved, and what a training step holds."""

    name: Name
    natural: jax.ShapeDtypeStruct
    stored: jax.ShapeDtypeStruct

    @property
    def padded(self) -> bool:
        return self.natural.shape != self.stored.shape


def restore_target(tx: optax.GradientTransformation, part: Partition) -> dict[str, Any]:
    """What to restore a checkpoint into, for orbax code of your own; then call `from_natural`.

    Args:
      tx: any transformation, normally one that contains `zerojax.zero`.
      part: the partition that `zero` was given.

    Returns:
      `{"params": ..., "opt_state": ...}` with a `jax.ShapeDtypeStruct` for each array, of its
      natural shape and with a sharding: the one it has in training, and for a leaf that is padded
      there one that divides it, so that such a leaf is whole on each device.

    Raises:
      ValueError: at stage 3, a transformation outside of `zero` makes other state for padded
        parameters than for natural ones.

    >>> import optax
    >>> part = zerojax.partition({"w": jnp.ones((13, 3))}, jax.make_mesh((8,), ("data",)))
    >>> tx = zerojax.zero(optax.sgd(0.1, momentum=0.9), part)
    >>> zerojax.checkpoint.restore_target(tx, part)["opt_state"][0].trace["w"].shape
    (13, 3)
    """
    leaves, treedef = _layout(tx, part)
    return treedef.unflatten([leaf.natural if leaf.natural.size else None for leaf in leaves])


def to_natural(
    params: Any, opt_state: Any, tx: optax.GradientTransformation, part: Partition
) -> dict[str, Any]:
    """The tree that a checkpoint holds, for orbax code of your own.

    Args:
      params: parameters as a training step holds them.
      opt_state: optimizer state as a training step holds it.
      tx: the transformation that made it.
      part: the partition that `zero` was given.

    Returns:
      `{"params": ..., "opt_state": ...}` in natural shapes, sharded as `restore_target` says. What
      is not padded is the very same array, if it is a global one.

    Raises:
      ValueError: leaves are missing or unknown, or have another shape or dtype.

    >>> import optax
    >>> part = zerojax.partition({"w": jnp.ones((13, 3))}, jax.make_mesh((8,), ("data",)), stage=3)
    >>> tx = zerojax.zero(optax.sgd(0.1, momentum=0.9), part)
    >>> params = part.place({"w": jnp.ones((13, 3))})
    >>> natural = zerojax.checkpoint.to_natural(params, tx.init(params), tx, part)
    >>> params["w"].shape, natural["params"]["w"].shape
    ((16, 3), (13, 3))
    """
    leaves, treedef = _layout(tx, part)
    held = pure({"params": params, "opt_state": opt_state})
    values = _match(
        {leaf.name: leaf.stored for leaf in leaves},
        _by_name(held),
        "checkpoint: these are not the parameters and the state of this tx and part, as a training "
        "step holds them",
    )
    check_equal(held, part.mesh)
    for leaf in leaves:  # a new state's counters, outside of zero
        if is_local(values[leaf.name], part.mesh):
            values[leaf.name] = to_global(values[leaf.name], leaf.stored.sharding)
    padded = [leaf for leaf in leaves if leaf.padded]
    cut = iter(
        run_globally(
            _cut,
            part.mesh,
            [values[leaf.name] for leaf in padded],
            out_specs=[leaf.natural.sharding.spec for leaf in padded],
            static={"part": part, "leaves": tuple(leaf.natural for leaf in padded)},
        )
        if padded
        else []
    )
    natural = [next(cut) if leaf.padded else values[leaf.name] for leaf in leaves]
    return treedef.unflatten([x if x.size else None for x in natural])


def from_natural(
    natural: Any, tx: optax.GradientTransformation, part: Partition
) -> tuple[Any, Any]:
    """Parameters and optimizer state for a training step; undoes `to_natural`.

    Args:
      natural: `{"params": ..., "opt_state": ...}` of host or device arrays in natural shapes, host
        arrays the same in every process.
        Leaves are found by name, so what orbax restores without a target will do.
      tx: a transformation that makes state of this tree.
      part: the partition that `zero` was given; its mesh, stage and specs need not be those of
        the run that saved.

    Returns:
      `(params, opt_state)`, placed leaf by leaf, padded where the plan says so. They share no
      buffer with `natural`.

    Raises:
      ValueError: leaves are missing or unknown, have another shape or dtype, or differ between
        processes.

    >>> import optax
    >>> params = {"w": jnp.ones((13, 3))}
    >>> plain = optax.sgd(0.1, momentum=0.9)
    >>> part = zerojax.partition(params, jax.make_mesh((8,), ("data",)))
    >>> params, opt_state = zerojax.checkpoint.from_natural(
    ...     {"params": params, "opt_state": plain.init(params)}, zerojax.zero(plain, part), part)
    >>> opt_state[0].trace["w"].shape
    (16, 3)
    """
    leaves, treedef = _layout(tx, part)
    expected = {leaf.name: leaf.natural for leaf in leaves if leaf.natural.size}
    values = _match(
        expected,
        {name: x for name, x in _by_name(natural).items() if np.size(x)},
        "checkpoint: this is not the natural state of this tx and part",
    )
    check_equal(natural, part.mesh)
    placed = [
        put(values[leaf.name], leaf.stored.shape, leaf.stored.sharding)
        if leaf.natural.size
        else _empty(leaf)
        for leaf in leaves
    ]
    tree = treedef.unflatten(placed)
    return tree["params"], tree["opt_state"]


def save(
    manager: Any,
    step: int,
    params: Any,
    opt_state: Any,
    tx: optax.GradientTransformation,
    part: Partition,
) -> bool:
    """Saves a step with an `orbax.checkpoint.CheckpointManager`.

    By default the manager writes in the background: this returns when the arrays are copied to the
    host, so the next step may donate them. An interrupted save leaves no step behind. A leaf that
    is padded is whole on each device while it is copied.

    Args:
      manager: the `CheckpointManager`; its options say how often, how many and where.
      step: the number of the step.
      params: parameters as a training step holds them.
      opt_state: optimizer state as a training step holds it.
      tx: the transformation that made it.
      part: the partition that `zero` was given.

    Returns:
      Whether the manager's options had this step saved.

    Raises:
      ValueError: leaves are missing or unknown, or have another shape or dtype.

    >>> import optax, tempfile, orbax.checkpoint as ocp
    >>> params = {"w": jnp.ones((13, 3))}
    >>> part = zerojax.partition(params, jax.make_mesh((8,), ("data",)))
    >>> tx = zerojax.zero(optax.adam(0.1), part)
    >>> params = part.place(params)
    >>> with tempfile.TemporaryDirectory() as path, ocp.CheckpointManager(path) as manager:
    ...     zerojax.checkpoint.save(manager, 7, params, tx.init(params), tx, part)
    ...     manager.wait_until_finished()
    ...     params, opt_state = zerojax.checkpoint.restore(manager, None, tx, part)
    True
    """
    import orbax.checkpoint as ocp

    if not manager.should_save(step):
        return False
    return manager.save(step, args=ocp.args.StandardSave(to_natural(params, opt_state, tx, part)))


def restore(
    manager: Any, step: int | None, tx: optax.GradientTransformation, part: Partition
) -> tuple[Any, Any]:
    """Restores a step that `save`, or a plain optax script, has saved; see `save` for an example.

    Each device reads its own shards, which are padded as they are read: on the way there
    nothing is whole that is not whole in training.

    Args:
      manager: an `orbax.checkpoint.CheckpointManager` on the directory.
      step: the number of the step; `None` for the latest.
      tx: a transformation that makes state of the saved tree.
      part: the partition that `zero` was given; its mesh, stage and specs need not be those of
        the run that saved.

    Returns:
      `(params, opt_state)` for a training step.

    Raises:
      FileNotFoundError: there is no such step.
      ValueError: leaves are missing or unknown, or have another shape or dtype.
    """
    import orbax.checkpoint as ocp

    manager.wait_until_finished()  # or a step that is being saved is not there yet
    if step is None:
        step = manager.latest_step()
    if step is None:
        raise FileNotFoundError(f"restore: there is no checkpoint in {manager.directory}.")
    leaves, treedef = _layout(tx, part)
    leaves_there = [leaf for leaf in leaves if leaf.natural.size]
    # Orbax pads, cuts and casts in silence: nothing may be left for it but the padding.
    _match(
        {leaf.name: _as_saved(leaf.natural) for leaf in leaves_there},
        saved_arrays(item_directory(manager.directory, step)),
        f"restore: step {step} in {manager.directory} was not saved from these parameters and "
        "this optimizer. Restore it with those it was saved from, or change the tree "
        '{"params": ..., "opt_state": ...} that plain orbax gives and pass it to from_natural',
    )
    target = treedef.unflatten([leaf.stored if leaf.natural.size else None for leaf in leaves])
    tree = manager.restore(step, args=ocp.args.StandardRestore(target, strict=False))
    values = _by_name(tree)
    tree = treedef.unflatten(
        [values[leaf.name] if leaf.natural.size else _empty(leaf) for leaf in leaves]
    )
    return tree["params"], tree["opt_state"]


@functools.lru_cache(maxsize=32)
def _layout(tx: optax.GradientTransformation, part: Partition) -> tuple[list[_Leaf], Any]:
    """The leaves of a checkpoint, and its tree."""
    params = part.treedef.unflatten(
        [typed(part, leaf.shape, leaf.dtype, part.param_spec(leaf)) for leaf in part.leaves]
    )
    natural = {"params": params, "opt_state": state_specs(part, tx.init, params)}
    stored = {"params": part.abstract_params(), "opt_state": abstract_state(tx, part)}
    found, held, leaves = _by_name(natural), _by_name(stored), []
    problems = [f"  {'.'.join(name)}" for name in found.keys() ^ held.keys()]
    for name, like in held.items():
        shape = found[name].shape if name in found else like.shape
        if len(shape) != like.ndim or any(n > s for n, s in zip(shape, like.shape, strict=True)):
            problems.append(f"  {'.'.join(name)}: {list(shape)}, but {list(like.shape)}")
            continue
        sharding = NamedSharding(part.mesh, _even(part, shape, like.sharding.spec))
        leaves.append(_Leaf(name, jax.ShapeDtypeStruct(shape, like.dtype, sharding=sharding), like))
    raise_all(
        "checkpoint: outside of zero, at stage 3, parameters are padded, and for this state that "
        "makes a difference that no checkpoint can undo. Move what makes it inside of zero",
        problems,
    )
    return leaves, jax.tree.structure(stored)


def _even(part: Partition, shape: tuple[int, ...], spec: P) -> P:
    """A spec without the axes of dims that they do not divide."""
    dims = zip(shape, from_spec(spec, len(shape)), strict=True)
    return to_spec(() if n % axes_size(part.mesh, axes) else axes for n, axes in dims)


def _cut(
    arrays: list[jax.Array], *, part: Partition, leaves: tuple[jax.ShapeDtypeStruct, ...]
) -> list[jax.Array]:
    """Stored arrays of an Auto-mode program in their natural shapes."""
    return [
        _to_natural(part.mesh, x, leaf.shape, leaf.sharding.spec)
        for x, leaf in zip(arrays, leaves, strict=True)
    ]


def _empty(leaf: _Leaf) -> jax.Array:
    return jnp.zeros(leaf.stored.shape, leaf.stored.dtype, device=leaf.stored.sharding)


def _as_saved(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """PRNG keys are saved as the integers that they are made of."""
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.eval_shape(jax.random.key_data, x) if is_key else x


def _by_name(tree: Any) -> dict[Name, Any]:
    leaves = jax.tree.leaves_with_path(tree)
    return {tuple(jax.tree_util.keystr((k,), simple=True) for k in path): x for path, x in leaves}


def _match(expected: dict[Name, Any], found: dict[Name, Any], message: str) -> dict[Name, Any]:
    """`found`, if it has what is expected and nothing else; or raises with every difference."""
    problems = []
    for name, want in expected.items():
        wanted = f"{want.dtype}{list(want.shape)}"
        if name not in found:
            problems.append(f"  {'.'.join(name)}: is missing, expected {wanted}")
            continue
        came = f"{dtype_of(found[name])}{list(np.shape(found[name]))}"
        if came != wanted:
            problems.append(f"  {'.'.join(name)}: expected {wanted}, got {came}")
    problems += [f"  {'.'.join(name)}: is not expected" for name in found if name not in expected]
    raise_all(message, problems)
    return found
