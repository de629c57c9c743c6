"""Every optax optimizer inside `zero` equals plain optax, with 1/8 of its state on each device."""

import functools
import math

import jax
import numpy as np
import optax
import optax.contrib
import pytest
from jax import numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from trees import (
    DEVICES,
    EXTRA,
    LEAVES,
    LEFT_OUT,
    REFUSED,
    SMALL,
    STEPS,
    assert_close,
    compare,
    hide_integers,
    loss,
    make_few,
    make_tree,
    optimizers,
    random_like,
    transformations,
)

import zerojax
from tests.conftest import make_mesh

OPTIMIZERS = optimizers()
FEW = ["matrix", "odd", "scalar", "ids"]
TRANSFORMATIONS = transformations(*FEW)
# Their point is a gradient that is not finite.
POISONED = {"apply_if_finite", "MultiSteps, skipping", "zero_nans"}


def elements_per_device(shape):
    """An eighth along the dim that wastes least; too small ones are whole."""
    size = math.prod(shape)
    if size < DEVICES:
        return size
    return min(-(-n // DEVICES) * (size // n) for n in shape)


def assert_sharded(plain_state, state):
    """Each leaf takes what the table of the tree allows, and lies where its parameter does."""
    for (path, plain), (_, x) in zip(
        jax.tree.leaves_with_path(plain_state), jax.tree.leaves_with_path(state), strict=True
    ):
        path = jax.tree_util.keystr(path)
        leaf = next((leaf for end, leaf in LEAVES.items() if path.endswith(end)), None)
        if leaf and plain.shape == leaf.shape:
            where = jax.NamedSharding(x.sharding.mesh, leaf.spec)
            assert x.sharding.is_equivalent_to(where, x.ndim), (path, x.sharding.spec)
            assert x.shape == (leaf.stored or leaf.shape), path
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            continue
        stays_whole = leaf and leaf.spec == P()  # so does what follows it, such as a history
        elements = plain.size if stays_whole else elements_per_device(plain.shape)
        held = {shard.data.nbytes for shard in x.addressable_shards}
        assert held == {elements * x.dtype.itemsize}, (path, x.shape, x.sharding.spec)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "dpsgd"])
@pytest.mark.parametrize(
    "leaves",
    [
        # One of each kind; "odd" is the matrix.
        ["stack", "bias", "scalar", "empty", "odd", "half", "ids"],
        pytest.param(list(make_tree()), marks=pytest.mark.full),
    ],
    ids=["small", "whole"],
)
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # optimistic_adam
def test_every_optimizer_equals_plain_optax(x64, name, leaves):
    without = [*REFUSED.get(name, ()), *LEFT_OUT.get(name, ())]
    params = make_few(leaves, without)
    tx = OPTIMIZERS[name]()
    for plain, state in compare(name, tx, functools.partial(zerojax.zero, tx), params):
        assert_sharded(plain, state)


# Chained with sgd, and in no list of what users combine: the oracle of shard-locality has them.
INGREDIENTS = {
    "add_noise", "apply_every", "centralize", "clip", "clip_by_block_rms",
    "conditionally_transform", "keep_params_nonnegative", "normalize", "normalize_by_update_norm",
    "scale_by_factored_rms", "scale_by_param_block_norm", "scale_by_param_block_rms",
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.full] if name in INGREDIENTS else [])
        for name in TRANSFORMATIONS
    ],
)
def test_every_wrapper_equals_plain_optax(x64, name):
    params = make_few(FEW)
    tx = TRANSFORMATIONS[name]()
    ours = functools.partial(zerojax.zero, tx)
    for plain, state in compare(name, tx, ours, params, name in POISONED):
        assert_sharded(plain, state)


adam = functools.partial(optax.adam, 0.1)
MATRIX_ONLY = {name: name == "matrix" for name in FEW if name != "ids"}
OUTSIDE = {
    "chain": lambda zero: optax.chain(
        optax.clip(0.1), zero(optax.scale_by_adam()), optax.scale(0.1)
    ),
    "inject_hyperparams": lambda zero: optax.inject_hyperparams(lambda lr: zero(optax.adam(lr)))(
        lr=optax.linear_schedule(0.0, 0.1, 3)
    ),
    "masked": lambda zero: optax.masked(zero(adam()), MATRIX_ONLY),
    "MultiSteps": lambda zero: optax.MultiSteps(zero(adam()), 2).gradient_transformation(),
    "multi_transform": lambda zero: optax.multi_transform(
        {True: zero(adam()), False: zero(optax.sgd(0.1, momentum=0.9))}, MATRIX_ONLY
    ),
    "partition": lambda zero: optax.partition(
        {True: zero(adam()), False: optax.set_to_zero()}, MATRIX_ONLY
    ),
    "schedule_free": lambda zero: optax.contrib.schedule_free(zero(adam()), 0.1),
    "apply_if_finite": lambda zero: optax.apply_if_finite(zero(adam()), 5),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_zero_inside_of_a_wrapper_equals_plain_optax(x64, name):
    # What stands outside of zero sees integer leaves as plain optax does.
    params = make_few(MATRIX_ONLY)
    compose = OUTSIDE[name]

    def ours(part):
        return compose(lambda inner: zerojax.zero(inner, part))

    for _, state in compare(name, compose(lambda tx: tx), ours, params, name in POISONED):
        moments = {jax.tree_util.keystr(path): x for path, x in jax.tree.leaves_with_path(state)}
        (moment,) = [x for path, x in moments.items() if path.endswith(".mu['matrix']")]
        where = jax.NamedSharding(moment.sharding.mesh, LEAVES["['matrix']"].spec)
        assert moment.sharding.is_equivalent_to(where, moment.ndim)


def test_lookahead_outside_of_zero(x64):
    """Its parameters are two trees, of which the optimizer and so `zero` sees the first."""
    params = make_few(MATRIX_ONLY)
    part = zerojax.partition(params, make_mesh("mesh8"))

    def run(tx, params):
        params = optax.LookaheadParams.init_synced(params)
        state, update = tx.init(params), jax.jit(tx.update)
        for seed in range(1, STEPS + 1):
            updates, state = update(random_like(params.fast, seed), state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    plain = run(optax.lookahead(adam(), 2, 0.5), jax.tree.map(jnp.asarray, params))
    ours = run(optax.lookahead(zerojax.zero(adam(), part), 2, 0.5), part.place(params))
    assert_close(plain, ours, "lookahead")
    assert ours[1].fast_state[0].mu["matrix"].sharding.spec == P("data")


@pytest.mark.filterwarnings('ignore:"seed" is deprecated:DeprecationWarning')
def test_per_example_gradients_are_aggregated_outside_of_zero(x64):
    """What dpsgd takes has one dim more, and is not the gradients of the partition."""
    params = make_few(["matrix"])
    part = zerojax.partition(params, make_mesh("mesh8"))
    examples = [random_like({"matrix": np.zeros((4, 24, 16))}, seed) for seed in range(STEPS)]
    private = functools.partial(
        optax.contrib.differentially_private_aggregate,
        l2_norm_clip=1.0,
        noise_multiplier=0.1,
        key=0,
    )

    def run(tx, params):
        state, update = tx.init(params), jax.jit(tx.update)
        for grads in examples:
            updates, state = update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    plain = run(optax.chain(private(), adam()), jax.tree.map(jnp.asarray, params))
    ours = run(optax.chain(private(), zerojax.zero(adam(), part)), part.place(params))
    assert_close(plain, ours, "dpsgd")
    tx = zerojax.zero(OPTIMIZERS["dpsgd"](), part)
    message = r"\['matrix'\]: expected shape \(24, 16\), got \(4, 24, 16\)"
    with pytest.raises(ValueError, match=message):
        tx.update(examples[0], tx.init(part.place(params)), part.place(params))


def test_no_optimizer_is_missing():
    assert len(OPTIMIZERS) >= 45
    assert {"adamw", "muon", "lbfgs", "schedule_free", "prodigy", "nadamw"} <= OPTIMIZERS.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_plain_optax_refuses_the_leaves_left_out(x64, name):
    """Otherwise they would have to be in the tables above."""
    for leaf, error in REFUSED[name].items():
        params = hide_integers(make_few(set(SMALL) - set(REFUSED[name]) | {leaf}))

        def run(params):
            tx = optax.with_extra_args_support(OPTIMIZERS[name]())
            extra = {"obj_fn": functools.partial(loss, targets=params)} if name in EXTRA else {}
            return tx.update(params, tx.init(params), params, **extra)

        with pytest.raises(error):
            jax.eval_shape(run, params)


FULL = {
    "adamw": lambda: optax.adamw(0.1),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=4),
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "lion": lambda: optax.lion(0.1),
    "muon": lambda: optax.contrib.muon(0.1),
}


@functools.cache
def whole_tree_without_zero(name):
    params, grads = whole_tree(name)
    params = jax.tree.map(jnp.array, hide_integers(params))
    state, step = FULL[name]().init(params), make_step(FULL[name](), [])
    for g in grads:
        params, state, _ = step(params, state, hide_integers(g))
    return params, state


def whole_tree(name):
    params = make_tree()
    if name == "muon":  # see REFUSED
        del params["empty"]
    return params, [random_like(params, seed) for seed in range(1, STEPS + 1)]


def make_step(tx, traces):
    def step(params, state, grads):
        traces.append(1)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, updates

    return jax.jit(step, donate_argnums=(0, 1))


@pytest.mark.parametrize(
    "name, axis_type",
    [
        ("adamw", AxisType.Auto),
        ("adamw", AxisType.Explicit),
        *(
            pytest.param(name, axis_type, marks=pytest.mark.full)
            for name in ["adafactor", "lion", "muon", "sgd"]
            for axis_type in [AxisType.Auto, AxisType.Explicit]
        ),
    ],
)
def test_whole_tree(x64, name, axis_type):
    """Numbers, one compilation, and everything stays where it was, on the complete tree."""
    params, grads = whole_tree(name)
    plain_params, plain_state = whole_tree_without_zero(name)
    part = zerojax.partition(params, make_mesh("mesh8", axis_type))
    tx = zerojax.zero(FULL[name](), part)
    placed = part.place(params)
    traces = []
    state, step = tx.init(placed), make_step(tx, traces)
    abstract = zerojax.abstract_state(tx, part)
    assert_same_places(abstract, state)
    for g in grads:
        placed, state, updates = step(placed, state, part.place(g))
        assert_same_places(abstract, state)
        for tree in (placed, updates):
            assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(tree))
    assert len(traces) == 1
    assert np.array_equal(placed["ids"], params["ids"])
    assert_close(plain_params, hide_integers(placed), "params")
    assert_close(plain_state, state, "state")
    assert_sharded(plain_state, state)


def assert_same_places(abstract, tree):
    for (path, want), (_, x) in zip(
        jax.tree.leaves_with_path(abstract), jax.tree.leaves_with_path(tree), strict=True
    ):
        assert (x.shape, x.dtype) == (want.shape, want.dtype), path
        assert x.sharding.is_equivalent_to(want.sharding, x.ndim), (path, x.sharding)


def test_plan_is_the_one_written_down(x64):
    part = zerojax.partition(make_tree(), make_mesh("mesh8"))
    assert part.by_path.keys() == LEAVES.keys()
    for path, leaf in LEAVES.items():
        plan = part.by_path[path]
        assert plan.shard_spec == P(*leaf.spec, *[None] * (len(leaf.shape) - len(leaf.spec))), path
        assert (plan.shape, plan.dtype, plan.reason) == (leaf.shape, leaf.dtype, leaf.reason), path
        assert plan.stored == (leaf.stored or leaf.shape), path


@pytest.mark.parametrize("how", ["eager", "jit", "numpy", "jit of numpy", "shapes"])
def test_init_is_the_same_from_anywhere(x64, how):
    params = make_tree()
    part = zerojax.partition(params, make_mesh("mesh8"))
    tx = zerojax.zero(optax.adamw(0.1), part)
    abstract = zerojax.abstract_state(tx, part)
    if how == "shapes":
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        of_shapes = zerojax.partition(shapes, part.mesh)
        assert part.leaves == of_shapes.leaves
        state = jax.eval_shape(tx.init, shapes)
        assert jax.tree.structure(state) == jax.tree.structure(abstract)
        for x, want in zip(jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True):
            assert (x.shape, x.dtype) == (want.shape, want.dtype)
        compiled = jax.jit(tx.init).lower(shapes).compile()
        for x, want in zip(
            jax.tree.leaves(compiled.output_shardings), jax.tree.leaves(abstract), strict=True
        ):
            assert x.is_equivalent_to(want.sharding, want.ndim)
        return
    init = jax.jit(tx.init) if "jit" in how else tx.init
    state = init(params if "numpy" in how else part.place(params))
    assert_same_places(abstract, state)
    if how == "jit":
        memory = init.lower(part.place(params)).compile().memory_analysis()
        assert memory.temp_size_in_bytes <= memory.output_size_in_bytes


def test_optax_maps_over_the_state_of_zero(x64):
    params = make_few(SMALL)
    part = zerojax.partition(params, make_mesh("mesh8"))
    tx = zerojax.zero(adam(), part)
    state = tx.init(part.place(params))
    mapped = optax.tree_map_params(tx, lambda x: x + 2, state, transform_non_params=lambda x: x + 1)
    assert mapped[0].count == 1
    for moment in (mapped[0].mu, mapped[0].nu):
        assert all(np.all(np.asarray(x, np.float64) == 2) for x in jax.tree.leaves(moment))
