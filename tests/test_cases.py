"""CASES.md, the rows that no other file has: faults that users of sharded optimizers reported."""

import chex
import jax
import numpy as np
import optax
import pytest
from jax import numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from tests.conftest import compilations, make_mesh

TIGHT = {"rtol": 1e-12, "atol": 1e-12}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def run(tx, params, grads, steps=3):
    """Plain optax on one device."""
    params, state = jax.tree.map(jnp.asarray, params), tx.init(params)
    for _ in range(steps):
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


def run_zero(make, part, params, grads, steps=3):
    """The same with `zero` under jit."""
    tx = make(part)
    params, state = part.place(params), tx.init(part.place(params))

    @jax.jit
    def step(params, state):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = step(params, state)
    return params, state


ODD = [(), (1,), (3,), (0,), (0, 4), (5, 3), (7, 15), (13,), (2, 4096), (2, 3)]


@pytest.mark.parametrize("mesh", ["mesh8", "mesh4x2", "mesh1"])
def test_odd_shapes_at_the_end_and_in_the_middle(x64, mesh):
    shapes = [*ODD, (16, 4), *ODD, (8,), (3,), (), (0,)]
    params = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    grads = [normal(*shape, seed=99 - i) for i, shape in enumerate(shapes)]
    part = zerojax.partition(params, make_mesh(mesh), P())
    tx = optax.adamw(1e-2)
    got, _ = run_zero(lambda part: zerojax.zero(tx, part), part, params, grads)
    chex.assert_trees_all_close(got, run(tx, params, grads), **TIGHT)


def test_a_large_vocabulary_is_sharded_on_the_other_dim(x64):
    params, grads = {"embed": normal(50257, 8)}, {"embed": normal(50257, 8, seed=1)}
    part = zerojax.partition(params, make_mesh("mesh8"))
    tx = optax.adamw(1e-2)
    got, state = run_zero(lambda part: zerojax.zero(tx, part), part, params, grads, 1)
    chex.assert_trees_all_close(got, run(tx, params, grads, 1), **TIGHT)
    assert state[0].mu["embed"].addressable_shards[0].data.shape == (50257, 1)


@pytest.mark.parametrize("wide", [False, True])
def test_every_dtype_is_kept_and_frozen_leaves_keep_their_bits(wide):
    params = {
        "f32": np.float32(normal(16, 4)),
        "bf16": jnp.asarray(normal(16, 4), jnp.bfloat16),
        "f16": np.float16(normal(16, 4)),
        "frozen": np.float32(normal(16, 4)),
        "int": np.arange(16, dtype=np.int32),
        "bool": np.arange(16) % 3 == 0,
        "zero gradient": np.float32(normal(16)),
    }
    # Wider gradients, as float32 accumulators give them, do not widen the state.
    grads = jax.tree.map(lambda x: jnp.ones(x.shape, (wide and jnp.float32) or x.dtype), params)
    grads["zero gradient"] *= 0
    part = zerojax.partition(params, make_mesh("mesh8"))
    labels = {k: "freeze" if k == "frozen" else "train" for k in params}

    def transform(wrap):
        return optax.multi_transform(
            {"train": wrap(optax.adam(1e-2)), "freeze": optax.set_to_zero()}, labels
        )

    for make in (
        lambda part: zerojax.zero(transform(lambda tx: tx), part),
        lambda part: transform(lambda tx: zerojax.zero(tx, part)),
    ):
        got, state = run_zero(make, part, params, grads)
        chex.assert_trees_all_equal_shapes_and_dtypes(got, params)
        for k in ("frozen", "int", "bool", "zero gradient"):
            np.testing.assert_array_equal(got[k], params[k])
        for k in ("f32", "bf16", "f16"):
            assert np.all(np.asarray(got[k]) != np.asarray(params[k]))
        moments = [x for x in jax.tree.leaves(state) if x.ndim == 2]
        assert {x.dtype for x in moments} == {np.dtype(d) for d in ("f4", "f2", jnp.bfloat16)}


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_weight_decay_masks_and_groups_select_the_same_leaves(x64, where):
    params = {
        f"layer{i}": {"w": normal(8, 4, seed=i), "b": normal(8, seed=9 - i)} for i in range(2)
    }
    grads = jax.tree.map(lambda x: np.cos(x), params)

    def is_matrix(params):
        return jax.tree.map(lambda x: x.ndim > 1, params)

    def group(path, _):
        return "slow" if "layer0" in jax.tree_util.keystr(path) else "fast"

    labels = jax.tree.map_with_path(group, params)

    def transform(wrap):
        slow, fast = (wrap(optax.adamw(lr, mask=is_matrix)) for lr in (1e-3, 1e-1))
        return optax.partition({"slow": slow, "fast": fast}, labels)

    part = zerojax.partition(params, make_mesh("mesh8"))

    def make(part):
        if where == "inside":
            return zerojax.zero(transform(lambda tx: tx), part)
        return transform(lambda tx: zerojax.zero(tx, part))

    got, _ = run_zero(make, part, params, grads)
    chex.assert_trees_all_close(got, run(transform(lambda tx: tx), params, grads), **TIGHT)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("devices", [0, 1, 8])
def test_a_nan_on_some_devices_skips_the_step_on_all(bad, devices):
    part = zerojax.partition({"w": np.zeros((8, 4), np.float32)}, make_mesh("mesh8"))
    tx = zerojax.zero(optax.apply_if_finite(optax.adam(1e-2), 5), part)
    params = part.place({"w": np.float32(normal(8, 4))})
    step = zerojax.train_step(
        zerojax.value_and_grad(lambda p, x: jnp.mean(p["w"] * x[:, None]), part), tx, part
    )
    params, state, _ = step(params, tx.init(params), np.ones(8, np.float32))
    before = jax.tree.map(np.asarray, (params, state.inner_state))
    x = np.ones(8, np.float32)
    x[:devices] = bad
    params, state, _ = step(params, state, x)
    same = jax.tree.map(np.array_equal, before, (params, state.inner_state))
    if devices:
        assert all(jax.tree.leaves(same))
    else:
        assert not same[0]["w"]
    assert int(state.total_notfinite) == (devices > 0)


def test_untouched_rows_of_an_embedding_have_exactly_zero_gradient():
    mesh = make_mesh("mesh4x2")
    params = {"embed": np.float32(normal(16, 8))}
    part = zerojax.partition(params, mesh, {"embed": P("model")})
    tokens = np.array([1, 3, 3, 12] * 4)

    def loss(params, tokens):
        return jnp.mean(params["embed"][tokens] ** 2)

    _, grads = jax.jit(zerojax.value_and_grad(loss, part, accumulate=2))(part.place(params), tokens)
    touched = np.isin(np.arange(16), tokens)
    assert np.all(np.asarray(grads["embed"])[~touched] == 0)
    assert np.all(np.asarray(grads["embed"])[touched] != 0)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_hsdp_equals_flat_sharding_equals_one_device(x64, accumulate):
    params, x = {"w": normal(16, 12), "b": normal(5)}, normal(32, 16)

    def loss(params, x):
        return jnp.mean((x @ params["w"]) ** 2) + jnp.sum(params["b"] ** 2)

    tx = optax.adamw(1e-2)
    results = []
    for mesh, options in [
        ("mesh2x4", {"replicate_axes": "replica"}),
        ("mesh2x4", {"shard_axes": ("replica", "data")}),
        ("mesh8", {}),
    ]:
        part = zerojax.partition(params, make_mesh(mesh), **options)
        sharded = zerojax.zero(tx, part)
        step = zerojax.train_step(
            zerojax.value_and_grad(loss, part, accumulate=accumulate), sharded, part
        )
        placed = part.place(params)
        new, state, _ = step(placed, sharded.init(placed), x)
        results.append(new)
        shards = 4 if "replicate_axes" in options else 8
        assert state[0].mu["w"].addressable_shards[0].data.size == 16 * 12 // shards
    want = run(tx, params, jax.grad(loss)(params, x), 1)
    for got in results:
        chex.assert_trees_all_close(got, want, **TIGHT)


def test_unplaced_parameters_do_not_drift():
    """Raw parameters beside a placed batch come back replicated, not as XLA likes them best."""
    params = {"w": np.float32(normal(16, 4)), "odd": np.float32(normal(13, 5))}
    part = zerojax.partition(params, make_mesh("mesh8"))
    tx = zerojax.zero(optax.adam(1e-2), part)
    placed = part.place(params)
    step = zerojax.train_step(jax.value_and_grad(lambda p, x: jnp.mean(p["w"]) * x), tx, part)
    with compilations() as compiled:
        state, current = tx.init(placed), placed
        for _ in range(3):
            current, state, _ = step(current, state, 1.0)
    assert sum("step" in name for name in compiled) == 1
    raw = jax.tree.map(jnp.asarray, params)

    @jax.jit
    def plain_step(params, state, x):
        grads = jax.grad(lambda p: jnp.mean((jnp.tanh(x @ p["w"]) @ p["odd"][:4]) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        return updates, optax.apply_updates(params, updates), state

    x = jax.device_put(normal(32, 16), NamedSharding(part.mesh, P("data")))
    *trees, state = plain_step(raw, tx.init(raw), x)
    for tree in (current, *trees):
        assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(tree))
    specs = [x.sharding.spec[0] for x in jax.tree.leaves(state) if x.ndim]
    assert specs == ["data"] * 4


def test_what_cannot_be_sharded_says_so():
    params = {"small": np.ones(3), "odd": np.ones((13, 5)), "fits": np.ones(8)}
    part = zerojax.partition(params, make_mesh("mesh8"), pad=False)
    for leaf in part.leaves:
        assert bool(leaf.reason) == (not leaf.shard_axes)
        assert leaf.reason in str(part)
