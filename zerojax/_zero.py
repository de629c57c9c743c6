"""The optax wrapper: an optimizer whose state is sharded over the data axes."""

import functools
from typing import Any, Literal

import jax
import numpy as np
import optax
from jax import numpy as jnp
from jax.sharding import NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from zerojax import _collectives
from zerojax._boxes import pure
from zerojax._contexts import (
    constrain,
    manual_axes,
    refuse_explicit_constants,
    run_globally,
    to_natural,
    to_stored,
)
from zerojax._leaf_plan import LeafPlan
from zerojax._manual import is_manual, reduce_to_shards
from zerojax._master import is_wider, subtract_params, with_master, working_dtype
from zerojax._partition import Partition
from zerojax._shard_locality import not_shard_local
from zerojax._sharding_types import (
    StateLeaf,
    inner_state_specs,
    on_twin,
    state_specs,
    twin_mesh,
    typed,
)
from zerojax._specs import axes_size, from_spec, raise_all


def zero(
    inner: optax.GradientTransformation,
    part: Partition,
    *,
    master_dtype: Any = None,
    local_gradients: Literal["mean", "sum"] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Shards the state of an optax transformation over the data axes (ZeRO).

    The result is an ordinary optax transformation. Under jit, on Auto or Explicit axes, it takes
    the global gradient and equals `inner` for every optimizer; XLA reduce-scatters the gradients
    and all-gathers the updates. Inside `jax.shard_map` it reads from each gradient's type whether
    it is still to be summed, scatters it, updates the shard and gathers the update; there `inner`
    must be shard-local, and is refused otherwise. At stage 3 parameters, gradients and updates are
    shards, in stored shapes.

    State leaves have the tree and the shapes that `inner` gives them, padded where
    `print(part)` says so. `inner` does not see integer and bool parameters; their update is zero.
    Gradients are cast to the dtype of their parameter, or of its master. Give it placed parameters
    (`part.place`): where neither they nor the batch have a sharding, XLA may choose one for them.
    `init` also takes parameters in a wider dtype than planned: a master keeps their bits.

    With `master_dtype`, `inner` works on a sharded copy of each lower-precision parameter, so that
    steps smaller than the parameter's rounding add up. The new parameters are gathered in their
    own dtype; the update is their distance in `master_dtype`, and `optax.apply_updates` lands on
    the rounded master (but for a weight that one step makes thousands of times smaller, which
    lands next to it until the step after). Put it last in a chain: what changes the update behind
    it does not reach the master.

    Args:
      inner: the transformation whose state is sharded.
      part: the plan, from `zerojax.partition`.
      master_dtype: of the master copies, normally float32; the state is then a `MasterState`.
      local_gradients: inside `jax.shard_map`, for gradients typed *varying* over a data axis:
        "mean" if each device holds the gradient of the mean over its own examples, "sum" if these
        gradients only have to be summed (a summed loss, or one divided by the global batch).

    Returns:
      A `GradientTransformationExtraArgs`; extra arguments go to `inner`.

    Raises:
      ValueError: `master_dtype` is not floating. From `init` and `update`: the tree differs from
        the partition's; a master needs `params`; or, inside `jax.shard_map`, `inner` is not
        shard-local or `local_gradients` is needed.
      TypeError: from `init` and `update`, inside `jax.shard_map(check_vma=False)`.

    References:
      Rajbhandari et al., "ZeRO", 2020, section 5.1; Xu et al., "Automatic Cross-Replica Sharding
      of Weight Update in Data-Parallel Training", 2020, section 4; Micikevicius et al., "Mixed
      Precision Training", 2018, section 3.1 (master copies).

    >>> import optax
    >>> params = {"w": jnp.ones((16, 4))}
    >>> part = zerojax.partition(params, jax.make_mesh((8,), ("data",)))
    >>> tx = zerojax.zero(optax.adam(0.1), part)
    >>> state = tx.init(part.place(params))
    >>> state[0].mu["w"].sharding.spec
    P('data', None)
    """
    if local_gradients not in (None, "mean", "sum"):
        raise ValueError(f"local_gradients must be 'mean' or 'sum', got {local_gradients!r}.")
    inner = optax.with_extra_args_support(inner)
    if master_dtype is not None:
        if not jnp.issubdtype(master_dtype, jnp.floating):
            raise ValueError(f"master_dtype must be floating, as float32 is, got {master_dtype!r}.")
        master_dtype = jax.dtypes.canonicalize_dtype(master_dtype)
        inner = with_master(inner, part, master_dtype)

    @functools.lru_cache(maxsize=32)
    def layout_of(leaves: tuple[LeafPlan, ...], treedef: Any) -> Any:
        return inner_state_specs(part, inner.init, leaves, treedef)

    def layout(tree: Any) -> Any:
        return layout_of(tuple(part.plans(tree)), jax.tree.structure(tree))

    def take(leaf: LeafPlan, x: jax.Array) -> jax.Array:
        return x if part.stage == 3 else _collectives.take(part, leaf, leaf, x)

    def unpad(leaf: LeafPlan, x: jax.Array) -> jax.Array:
        return _collectives.unpad(x, leaf) if part.stage == 3 else x

    def pad(leaf: LeafPlan, x: jax.Array) -> jax.Array:
        return _collectives.pad(x, leaf) if part.stage == 3 else x

    def give(leaf: LeafPlan, x: jax.Array) -> jax.Array:
        return x if part.stage == 3 else _collectives.gather(part, leaf, leaf, x)

    def cast(leaf: LeafPlan, x: jax.Array) -> jax.Array:
        return x.astype(working_dtype(leaf, master_dtype))

    def to_shard(leaf: LeafPlan, x: jax.Array) -> jax.Array:
        return to_natural(part.mesh, x, leaf.shape, leaf.shard_spec)

    def to_updates(updates: Any, state: Any, params: Any) -> Any:
        return updates if master_dtype is None else subtract_params(updates, state, params)

    def init(params: Any) -> Any:
        params = pure(params)
        check_leaves(part, params, "zero.init", wider=True)
        params = _hide_untrainable(part, params)
        if any(map(on_twin, jax.tree.leaves(params))):
            leaves = layout(params)
            try:
                natural = part.map(unpad, params)
                state = inner.init(part.map(lambda leaf, x: reshard(x, leaf.shard_spec), natural))
            except Exception:  # an init that refuses the twin's types; nothing else matters there
                state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), leaves)
            return jax.tree.map(lambda leaf, x: reshard(x, leaf.spec), leaves, state)
        if is_manual(part, "zero.init"):
            state = inner.init(part.map(cast, part.map(take, params)))
            _check_state(part, layout(params), state, "init of a transformation in a Manual region")
            return state
        specs = jax.tree.map(lambda leaf: leaf.spec, layout(params))
        return run_globally(init_globally, part.mesh, params, out_specs=specs)

    def init_globally(params: Any) -> Any:
        state = inner.init(part.map(cast, part.map(to_shard, params)))
        return _store(part, layout(params), state)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        updates, params, extra = pure((updates, params, extra))
        check_leaves(part, updates, "zero.update", dtypes=False)
        check_leaves(part, params, "zero.update")
        if params is not None:
            _check_same_tree(updates, params)
        elif master_dtype is not None:
            raise ValueError(
                "zero.update: with master_dtype the update is what leads from params to the "
                "rounded master. Pass them: tx.update(grads, state, params)."
            )
        whole, structure = updates, jax.tree.structure(updates)
        updates = _hide_untrainable(part, updates)
        params = _hide_untrainable(part, params)
        leaves = layout(updates if params is None else params)
        for name, value in extra.items():
            if jax.tree.structure(value) == structure and not callable(value):  # such as grad=
                extra[name] = _hide_untrainable(part, value)
        arrays, functions = _split_callables(extra)
        if is_manual(part, "zero.update"):
            problems = [
                f"  {line}" for line in not_local(updates, leaves, params, arrays, functions)
            ]
            if problems and params is None:
                problems.append("  update was called without params; does it need them?")
            raise_all(
                "zero.update: this transformation needs more than its own shard, and inside a "
                "Manual region would be silently wrong. Call tx.update under jit outside of "
                "jax.shard_map; for clipping use zerojax.clip_by_global_norm",
                problems,
            )
            _check_state(part, leaves, state, "zero.update")
            shards = part.map(cast, reduce_to_shards(part, updates, local_gradients))
            updates, state = inner.update(shards, state, part.map(take, params), **extra)
            updates = to_updates(part.map(give, updates), state, params)
        elif any(map(on_twin, jax.tree.leaves(updates))):
            updates, params = (part.map(unpad, tree) for tree in (updates, params))
            updates, state = inner.update(updates, state, params, **extra)
            updates = part.map(pad, to_updates(updates, state, params))
        else:
            _check_state(part, leaves, state, "zero.update")
            specs = (
                part.map(lambda leaf, _: part.param_spec(leaf), updates),
                jax.tree.map(lambda leaf: leaf.spec, leaves),
            )
            try:
                updates, state = run_globally(
                    update_globally, part.mesh, updates, state, params, arrays,
                    out_specs=specs, static=functions,
                )  # fmt: skip
            except ValueError:
                bare = functools.partial(inner.update, **functions)
                refuse_explicit_constants(bare, updates, state, params, **arrays)
                raise
        return _show_untrainable(part, updates, whole), state

    def update_globally(
        updates: Any, state: Any, params: Any, arrays: Any, **functions: Any
    ) -> tuple[Any, Any]:
        leaves = layout(updates if params is None else params)
        updates = part.map(cast, part.map(to_shard, updates))
        # First to the specs where they live: XLA must not move unplaced parameters elsewhere.
        params = part.map(lambda leaf, x: constrain(part.mesh, x, part.param_spec(leaf)), params)
        shards = part.map(to_shard, params)
        state = jax.tree.map(
            lambda leaf, x: to_natural(part.mesh, x, leaf.shape, leaf.spec), leaves, state
        )
        updates, state = inner.update(updates, state, shards, **arrays, **functions)
        updates = part.map(functools.partial(_to_params, part), updates)
        return to_updates(updates, state, params), _store(part, leaves, state)

    def not_local(
        updates: Any, leaves: Any, params: Any, arrays: Any, functions: dict[str, Any]
    ) -> list[str]:
        manual = manual_axes()
        if axes_size(part.mesh, manual) == 1:
            return []
        arrays = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)), arrays
        )

        def arguments(one_shard: bool) -> tuple[Any, ...]:
            def abstract(leaf: LeafPlan | StateLeaf, spec: P) -> jax.ShapeDtypeStruct:
                axes = from_spec(spec, len(leaf.shape))
                shape = _collectives.local_shape(part, leaf.stored, axes, manual)
                return typed(part, shape if one_shard else leaf.shape, leaf.dtype, spec)

            def abstract_param(leaf: LeafPlan, _: Any) -> jax.ShapeDtypeStruct:
                return abstract(leaf, leaf.shard_spec)

            state = jax.tree.map(lambda leaf: abstract(leaf, leaf.spec), leaves)
            grads, own = part.map(abstract_param, updates), part.map(abstract_param, params)
            return grads, state, own, arrays

        def traced(updates: Any, state: Any, params: Any, arrays: Any) -> Any:
            return inner.update(updates, state, params, **arrays, **functions)

        return not_shard_local(
            twin_mesh(part.mesh), manual, traced, arguments(False), arguments(True)
        )

    return optax.GradientTransformationExtraArgs(init, update)


def abstract_state(tx: optax.GradientTransformation, part: Partition) -> Any:
    """The state of a transformation that contains `zero`, as shapes with shardings.

    For `shard_map` specs, checkpoint targets and memory estimates; needs no devices.

    Args:
      tx: any transformation with `zerojax.zero` somewhere in it, or without.
      part: the partition that `zero` was given.

    Returns:
      The tree of `tx.init(params)` with a `jax.ShapeDtypeStruct` for each array: the stored shape,
      and a `NamedSharding` on the partition's mesh.

    >>> import optax
    >>> part = zerojax.partition({"w": jnp.ones((13, 3))}, jax.make_mesh((8,), ("data",)))
    >>> state = zerojax.abstract_state(zerojax.zero(optax.sgd(0.1, momentum=0.9), part), part)
    >>> state[0].trace["w"].shape, state[0].trace["w"].sharding.spec
    ((16, 3), P('data', None))
    """

    def abstract(leaf: StateLeaf) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(part.mesh, leaf.spec)
        return jax.ShapeDtypeStruct(leaf.stored, leaf.dtype, sharding=sharding)

    return jax.tree.map(abstract, state_layout(tx, part))


def state_layout(tx: optax.GradientTransformation, part: Partition) -> Any:
    """As `abstract_state`, with `StateLeaf`s, which also know their natural shapes."""
    leaves, treedef = _state_leaves(tx, part)
    return treedef.unflatten(leaves)


@functools.lru_cache(maxsize=32)
def _state_leaves(tx: optax.GradientTransformation, part: Partition) -> tuple[list[Any], Any]:
    pairs = zip(part.leaves, jax.tree.leaves(part.param_specs), strict=True)
    params = [typed(part, part.param_shape(leaf), leaf.dtype, spec) for leaf, spec in pairs]
    return jax.tree.flatten(state_specs(part, tx.init, part.treedef.unflatten(params)))


def check_leaves(
    part: Partition, tree: Any, where: str, *, dtypes: bool = True, wider: bool = False
) -> None:
    """Raises unless every leaf of a tree, perhaps a subset of the parameters, is in the plan.

    With `wider`, a leaf may also have a wider floating dtype than planned. On the twin, where
    nothing is padded, natural shapes will do at stage 3 too.
    """
    manual, problems = manual_axes(), []
    for path, x in jax.tree.leaves_with_path(tree):
        path = jax.tree_util.keystr(path)
        leaf = part.by_path.get(path)
        if leaf is None:
            problems.append(f"  {path}: was not there when the partition was made")
            continue
        shape = part.param_shape(leaf)
        axes = from_spec(part.param_spec(leaf), len(shape))
        shape = _collectives.local_shape(part, shape, axes, manual)
        if np.shape(x) != shape and not (np.shape(x) == leaf.shape and on_twin(x)):
            problems.append(f"  {path}: expected shape {shape}, got {np.shape(x)}")
        elif dtypes and x.dtype != leaf.dtype and not (wider and is_wider(x.dtype, leaf.dtype)):
            problems.append(f"  {path}: expected dtype {leaf.dtype}, got {x.dtype}")
    raise_all(
        f"{where}: these leaves are not those of the partition (call zerojax.partition again after "
        "a change of the model, with the very tree that init and update see)",
        problems,
    )


def _split_callables(extra: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Extra arguments that are trees of arrays, and those that are functions, as `value_fn=`."""
    functions = {name: value for name, value in extra.items() if callable(value)}
    return {k: value for k, value in extra.items() if k not in functions}, functions


def _check_same_tree(updates: Any, params: Any) -> None:
    """Raises unless gradients and parameters have the same leaves."""
    there, grads = map(_paths, (params, updates))
    problems = [f"  {path}: has no gradient" for path in there if path not in grads]
    problems += [f"  {path}: has no parameter" for path in grads if path not in there]
    raise_all("zero.update: gradients and params must be trees of the same leaves", problems)


def _paths(tree: Any) -> list[str]:
    leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda x: x is None)
    return [jax.tree_util.keystr(path) for path, _ in leaves]


def _hide_untrainable(part: Partition, tree: Any) -> Any:
    """Integer and bool leaves become `optax.MaskedNode`s, as `optax.masked` hides leaves."""
    return part.map(lambda leaf, x: x if leaf.trainable else optax.MaskedNode(), tree)


def _show_untrainable(part: Partition, updates: Any, whole: Any) -> Any:
    """The update with zeros for the leaves that were hidden."""
    shown = iter(jax.tree.leaves(updates))

    def show(leaf: LeafPlan, x: Any) -> Any:
        return next(shown) if leaf.trainable else jnp.zeros(np.shape(x), leaf.dtype)

    return part.map(show, whole)


def _to_params(part: Partition, leaf: LeafPlan, x: jax.Array) -> jax.Array:
    """A natural array in its shard spec in the shape and spec of the parameters."""
    x = to_stored(part.mesh, x, part.param_shape(leaf), leaf.shard_spec)
    return constrain(part.mesh, x, part.param_spec(leaf))


def _store(part: Partition, layout: Any, state: Any) -> Any:
    return jax.tree.map(
        lambda leaf, x: to_stored(part.mesh, x, leaf.stored, leaf.spec), layout, state
    )


def _check_state(part: Partition, layout: Any, state: Any, where: str) -> None:
    """Raises unless the state is what `init` makes, or in a Manual region its local shards."""
    manual = manual_axes()
    expected, got = (dict(jax.tree.leaves_with_path(tree)) for tree in (layout, state))
    problems = [
        f"  {jax.tree_util.keystr(path)}: {'is missing' if path in expected else 'is unknown'}"
        for path in expected.keys() ^ got.keys()
    ]
    for path in expected.keys() & got.keys():
        leaf = expected[path]
        axes = from_spec(leaf.spec, len(leaf.stored))
        shape = _collectives.local_shape(part, leaf.stored, axes, manual)
        if np.shape(got[path]) != shape:
            name = jax.tree_util.keystr(path)
            problems.append(f"  {name}: expected shape {shape}, got {np.shape(got[path])}")
    raise_all(
        f"{where}: the optimizer state is not what zero.init makes for these parameters. Make it "
        "with tx.init(params), or restore it into zerojax.abstract_state(tx, part)",
        sorted(problems),
    )
