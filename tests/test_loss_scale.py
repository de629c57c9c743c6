"""`dynamic_loss_scale`: a step that is not finite is skipped everywhere and leaves no trace."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from jax import numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from pairs import product

import zerojax
from tests.conftest import compilations, make_mesh
from zerojax._loss_scale import raise_at_floor

F16, F32 = jnp.float16, jnp.float32
SPECS = {"matrix": P(), "odd": P(), "scale": P(), "column": P("model"), "full": P(), "ids": P()}
FLOOR = "dynamic_loss_scale reached its floor"


def normal(*shape, dtype=F16, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(dtype)


def make_params():
    return {
        "matrix": normal(16, 4),
        "odd": normal(13),
        "scale": normal(),
        "column": normal(16),
        "full": normal(32, dtype=F32),
        "ids": np.arange(4, dtype=np.int32),
    }


def plan(mesh, params, **options):
    specs = {k: SPECS[k] for k in params} if "model" in mesh.axis_names else P()
    return zerojax.partition(params, mesh, specs, **options)


def optimizer():
    """With two counts that must not run ahead, and a hyperparameter that follows one of them."""
    schedule = optax.linear_schedule(0.0, 1.0, 4)
    adam = optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1e-2, 1e-3, 4))
    return optax.chain(adam, optax.scale_by_schedule(schedule))


def make_grads(params, step, bad=None, devices=None):
    """Gradients of one step, or with `devices` of each of them, stacked on a leading dim."""
    rng = np.random.default_rng(step)

    def leaf(x):
        shape = x.shape if devices is None else (devices, *x.shape)
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return np.zeros(shape, x.dtype)
        return rng.normal(size=shape).astype(np.float32)

    grads = {k: leaf(x) for k, x in params.items()}
    if bad == "one nan":  # the last element of a padded leaf, of the last device
        grads["odd"].reshape(-1)[-1] = np.nan
    elif bad == "all inf":
        grads = {k: g * np.float32(-np.inf) if k != "ids" else g for k, g in grads.items()}
    return grads


def make_update(where, part, tx):
    if where == "eager":
        return tx.update
    if where == "jit":
        return jax.jit(tx.update)

    # Each device's own gradients: only one of them knows that its own is not finite.
    def update(grads, state, params):
        return tx.update(jax.tree.map(lambda g: g[0], grads), state, params)

    specs = jax.tree.map(lambda x: x.sharding.spec, zerojax.abstract_state(tx, part))
    stacked = jax.tree.map(lambda spec: P("data", *spec), part.model_specs)
    region = jax.shard_map(
        update, mesh=part.mesh, in_specs=(stacked, specs, part.model_specs),
        out_specs=(part.model_specs, specs),
    )  # fmt: skip

    def place(grads, state, params):
        return jax.jit(region)(jax.device_put(grads, part.shardings(stacked)), state, params)

    return place


def is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def bits(tree):
    """Every shard of every array, as bytes."""
    return {
        (jax.tree_util.keystr(path), shard.device.id): np.asarray(shard.data).tobytes()
        for path, x in jax.tree.leaves_with_path(tree)
        for shard in x.addressable_shards
    }


@pytest.mark.parametrize(
    *product(
        bad=["one nan", "all inf"],
        where=["jit", "manual", "eager"],
        mesh=["mesh8", "mesh4x2"],
        axis_type=[AxisType.Auto, AxisType.Explicit],
        stage=[1, 2],
    )
)
def test_a_step_that_is_not_finite_leaves_no_trace(bad, where, mesh, axis_type, stage):
    params = make_params()
    part = plan(make_mesh(mesh, axis_type), params, stage=stage)
    inner = zerojax.zero(optimizer(), part, master_dtype=F32, local_gradients="mean")
    tx = zerojax.dynamic_loss_scale(inner, initial=1024.0, growth_interval=2)
    update = make_update(where, part, tx)
    devices = part.data_size if where == "manual" else None

    def train(kinds):
        placed = part.place(params)
        state, history = tx.init(placed), []
        for step, kind in enumerate(kinds):
            grads = make_grads(params, step, kind, devices)
            updates, state = update(grads, state, placed)
            placed = optax.apply_updates(placed, updates)
            history.append((updates, state, placed))
        return history

    first, skipped, _, last = train([None, bad, None, None])
    assert bits(skipped[1].inner) == bits(first[1].inner)
    assert bits(skipped[2]) == bits(first[2])
    assert not any(np.any(x) for x in jax.tree.leaves(skipped[0]))
    numbers = [
        (float(state.scale), int(state.clean_steps), int(state.skipped))
        for _, state, _ in (first, skipped, last)
    ]
    assert numbers == [(1024, 1, 0), (512, 0, 1), (1024, 0, 1)]
    assert int(last[1].inner.inner[0].count) == 3
    # The numbers go on as if the skipped step had never been.
    state, placed = first[1], first[2]
    for step in (2, 3):
        updates, state = update(make_grads(params, step, None, devices), state, placed)
        placed = optax.apply_updates(placed, updates)
    assert bits(last[1].inner) == bits(state.inner)
    assert bits(last[2]) == bits(placed)


@pytest.mark.parametrize(
    "options, finite, expected",
    [
        ({}, [1, 1, 1, 1], [(8, 1, 0), (8, 2, 0), (16, 0, 0), (16, 1, 0)]),
        ({}, [1, 0, 1, 1, 1], [(8, 1, 0), (4, 0, 1), (4, 1, 1), (4, 2, 1), (8, 0, 1)]),
        ({"factor": 4.0}, [0, 1, 1, 1], [(2, 0, 1), (2, 1, 1), (2, 2, 1), (8, 0, 1)]),
        ({"floor": 4.0}, [0, 0, 1], [(4, 0, 1), (np.nan, 0, 2), (np.nan, 0, 3)]),
        # Never infinite, from where it could not come back.
        (
            {"initial": 2.0**127, "growth_interval": 1}, [1, 0],
            [(2.0**127, 0, 0), (2.0**126, 0, 1)],
        ),
    ],
)  # fmt: skip
def test_the_scale_grows_and_shrinks(options, finite, expected):
    tx = zerojax.dynamic_loss_scale(
        optax.sgd(1.0), **({"initial": 8.0, "growth_interval": 3} | options)
    )
    state, update, got = tx.init({"w": jnp.ones(3)}), jax.jit(tx.update), []
    for ok in finite:
        _, state = update({"w": jnp.array([1.0, 1.0 if ok else jnp.inf, 1.0])}, state)
        got.append([float(x) for x in (state.scale, state.clean_steps, state.skipped)])
    np.testing.assert_array_equal(got, expected)


# The training step.


def loss_fn(params, x):
    wide = [p.astype(F32) for p in params.values() if jnp.issubdtype(p.dtype, jnp.floating)]
    return jnp.mean(x) * sum(jnp.sum(jnp.sin(p)) for p in wide)


AROUND = {
    "alone": lambda tx: tx,
    "in a chain": lambda tx: optax.chain(optax.clip(1.0), tx),
    "inject_hyperparams": lambda tx: optax.inject_hyperparams(lambda lr: tx)(lr=0.1),
}


@pytest.mark.parametrize(
    *product(
        around=list(AROUND),
        mesh=["mesh8", "mesh4x2"],
        axis_type=[AxisType.Auto, AxisType.Explicit],
        stage=[1, 2, 3],
    )
)
def test_training_step_until_the_floor(around, mesh, axis_type, stage):
    params = make_params()
    part = plan(make_mesh(mesh, axis_type), params, stage=stage)
    inner = zerojax.zero(optax.adamw(1e-2), part, master_dtype=F32)
    tx = AROUND[around](zerojax.dynamic_loss_scale(inner, initial=4.0))
    step = zerojax.train_step(zerojax.value_and_grad(loss_fn, part), tx, part)
    placed, state = zerojax.init(lambda params: params, tx, part)(params)
    good, bad = np.ones(8, np.float32), np.ones(8, np.float32)
    bad[5] = np.nan
    seen = []
    with compilations() as compiled:
        for x in (good, bad, bad, good, bad):
            before = jax.tree.leaves((placed, state))
            placed, state, metrics = step(placed, state, x)
            assert all(x.is_deleted() for x in before)
            seen.append([float(metrics[k]) for k in ("loss_scale", "skipped")])
            assert np.isfinite(metrics["loss"]) == (x is good)
        np.testing.assert_array_equal(seen, [[4, 0], [2, 1], [1, 2], [1, 2], [np.nan, 3]])
        kept = bits(placed)
        with pytest.raises(FloatingPointError, match=FLOOR):  # the result of the last one is there
            step(placed, state, good)
        # Whoever calls the program itself gets no further step.
        frozen, state, _ = step.jitted(placed, state, good)
        assert bits(frozen) == kept
    assert len(compiled) == 1
    for (path, x), want in zip(
        jax.tree.leaves_with_path(state), jax.tree.leaves(zerojax.abstract_state(tx, part)),
        strict=True,
    ):  # fmt: skip
        assert (x.shape, x.dtype) == (want.shape, want.dtype), path
        assert x.sharding.is_equivalent_to(want.sharding, x.ndim), path


def test_the_program_holds_no_callback_and_no_conditional():
    params = make_params()
    part = plan(make_mesh("mesh8"), params)
    tx = zerojax.dynamic_loss_scale(zerojax.zero(optax.adamw(1e-2), part, master_dtype=F32))
    state = zerojax.abstract_state(tx, part)
    text = jax.jit(tx.update).lower(params, state, params).as_text()
    assert "all_reduce" in text or "reduce" in text
    assert "callback" not in text and "stablehlo.case" not in text and "stablehlo.if" not in text


def test_a_state_made_eagerly_can_be_donated():
    params = make_params()
    part = plan(make_mesh("mesh8"), params)
    tx = zerojax.dynamic_loss_scale(zerojax.zero(optax.adamw(1e-2), part, master_dtype=F32))
    placed = part.place(params)
    state = tx.init(placed)
    grads = make_grads(params, 0)
    _, after = jax.jit(tx.update, donate_argnums=1)(grads, state, placed)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    assert int(after.clean_steps) == 1


def test_the_floor_is_noticed_without_waiting():
    @dataclasses.dataclass
    class Scale:
        ready: bool

        def is_ready(self):
            return self.ready

        def __array__(self, dtype=None, copy=None):
            return np.asarray(np.nan, dtype)

    raise_at_floor(Scale(ready=False))
    with pytest.raises(FloatingPointError, match=FLOOR):
        raise_at_floor(Scale(ready=True))
    with pytest.raises(FloatingPointError, match=FLOOR):
        raise_at_floor(np.float32(np.nan))  # restored from a checkpoint


def test_an_eager_update_raises_at_the_floor():
    tx = zerojax.dynamic_loss_scale(optax.sgd(1.0), initial=1.0)
    params = {"w": jnp.ones(3)}
    _, state = tx.update({"w": jnp.full(3, jnp.nan)}, tx.init(params))
    jax.block_until_ready(state)
    with pytest.raises(FloatingPointError, match=FLOOR):
        tx.update(params, state)


COMPOSITIONS = {
    "MultiSteps inside": lambda zero: zerojax.dynamic_loss_scale(
        optax.MultiSteps(zero(optax.adam(0.1)), 2).gradient_transformation()
    ),
    "masked inside": lambda zero: zerojax.dynamic_loss_scale(
        optax.masked(zero(optax.adam(0.1)), {k: k != "odd" for k in SPECS})
    ),
    "masked around": lambda zero: optax.masked(
        zerojax.dynamic_loss_scale(zero(optax.adam(0.1))), {k: k != "matrix" for k in SPECS}
    ),
    "inside of zero": lambda zero: zero(zerojax.dynamic_loss_scale(optax.adam(0.1))),
    "a key in the state": lambda zero: zerojax.dynamic_loss_scale(
        zero(optax.chain(optax.add_noise(0.1, 0.5, key=0), optax.sgd(0.1)))
    ),
}


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_composition(name):
    params = make_params()
    part = plan(make_mesh("mesh8", AxisType.Explicit), params)
    tx = COMPOSITIONS[name](functools.partial(zerojax.zero, part=part, master_dtype=F32))
    placed = part.place(params)
    state, update = tx.init(placed), jax.jit(tx.update)

    def moments(state):
        """All but the numbers that this is about."""
        data = jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, state)
        of_scale = (".scale", ".clean_steps", ".skipped")
        return {k: x for k, x in bits(data).items() if not k[0].endswith(of_scale)}

    updates, state = update(make_grads(params, 0), state, placed)
    shown = {k: k != "matrix" or name != "masked around" for k in updates}
    updates = {k: u if shown[k] else jnp.zeros_like(u) for k, u in updates.items()}
    placed = optax.apply_updates(placed, updates)
    before = moments(state)
    updates, state = update(make_grads(params, 1, "one nan"), state, placed)
    after = moments(state)
    assert after == before
    assert not any(np.any(u) for k, u in updates.items() if shown[k])
    _, state = update(make_grads(params, 2), state, placed)
    assert moments(state) != after
    (found,) = [
        int(x)
        for path, x in jax.tree.leaves_with_path(state)
        if jax.tree_util.keystr(path).endswith(".skipped")
    ]
    assert found == 1


# Errors.


@pytest.mark.parametrize(
    "options", [{"factor": 1.0}, {"floor": 0.0}, {"initial": 0.5}, {"growth_interval": 0}]
)
def test_options_that_make_no_sense(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"dynamic_loss_scale needs .*{name}={options[name]}"):
        zerojax.dynamic_loss_scale(optax.sgd(1.0), **options)


def test_only_our_gradient_function_can_scale_its_loss():
    params = {"w": normal(16)}
    part = plan(make_mesh("mesh8"), params)
    tx = zerojax.dynamic_loss_scale(zerojax.zero(optax.sgd(1.0), part))
    step = zerojax.train_step(jax.value_and_grad(lambda p, x: jnp.sum(p["w"] * x)), tx, part)
    placed = part.place(params)
    with pytest.raises(TypeError, match=r"only a grad_fn from zerojax\.value_and_grad can scale"):
        step(placed, tx.init(placed), np.ones(16, np.float16))


def test_one_loss_has_one_scale():
    params = {"a": normal(16), "b": normal(16)}
    part = plan(make_mesh("mesh8"), params)
    scaled = zerojax.dynamic_loss_scale
    twice = scaled(scaled(zerojax.zero(optax.sgd(1.0), part)))
    groups = optax.multi_transform(
        {k: scaled(zerojax.zero(optax.sgd(1.0), part)) for k in params}, {k: k for k in params}
    )
    placed = part.place(params)
    for tx in (twice, groups):
        step = zerojax.train_step(zerojax.value_and_grad(loss_fn, part), tx, part)
        with pytest.raises(ValueError, match="holds 2 loss scales"):
            step(placed, tx.init(placed), np.ones(8))


def test_devices_that_cannot_agree():
    mesh = make_mesh("mesh8", AxisType.Explicit)
    params = {"w": normal(16, dtype=F32)}
    part = plan(mesh, params)
    tx = zerojax.dynamic_loss_scale(optax.sgd(1.0))
    state = tx.init(part.place(params))

    def unreduced_ones():
        varying = jax.lax.pcast(jnp.ones(2), "data", to="varying")
        return jax.lax.pcast(varying, "data", to="unreduced")

    def in_region(grads, check_vma):
        def update(state):
            return tx.update(grads(), state)

        region = jax.shard_map(
            update, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=check_vma
        )  # fmt: skip
        return jax.eval_shape(region, state)

    with pytest.raises(TypeError, match="Remove check_vma=False"):
        in_region(lambda: {"w": jnp.ones(2)}, False)
    unreduced = r"still to be summed[\s\S]*\['w'\]: over \['data'\]"
    with pytest.raises(ValueError, match=unreduced):
        in_region(lambda: {"w": unreduced_ones()}, True)

    def loss(params, x):
        return jnp.sum(x @ params["w"])

    def update(params, x):
        reduced = jax.tree.map(lambda p: jax.reshard(p, P(reduced={"data"})), params)
        return tx.update(jax.grad(loss)(reduced, x), state)

    x = jax.device_put(np.ones((8, 16), np.float32), jax.NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=unreduced):
        jax.jit(update).lower(part.place(params), x)


# Gradients that float16 cannot hold without a scale.


def half_loss(params, x):
    """A mean whose gradients, about 1e-9, float16 cannot hold."""
    per_example = jnp.sum((x * params["w"]).astype(F32), 1) + jnp.sum(params["full"]) * x[:, 0]
    return jnp.mean(per_example.astype(F32)) * 1e-8


def half_batch():
    return np.random.default_rng(3).uniform(0.5, 1.0, size=(32, 16)).astype(np.float16)


def half_params():
    return {"w": normal(16), "full": normal(8, dtype=F32)}


@pytest.mark.parametrize(
    *product(
        stage=[1, 3],
        accumulate=[1, 2],
        mesh=["mesh8", "mesh4x2"],
        axis_type=[AxisType.Auto, AxisType.Explicit],
    )
)
def test_scaled_gradients_are_those_of_float32(stage, accumulate, mesh, axis_type):
    params = half_params()
    part = zerojax.partition(params, make_mesh(mesh, axis_type), P(), stage=stage)
    grad_fn = zerojax.value_and_grad(half_loss, part, accumulate=accumulate)
    loss, grads = grad_fn(part.place(params), half_batch(), loss_scale=jnp.float32(2.0**15))
    wide = jax.tree.map(lambda x: jnp.asarray(x, F32), params)
    want_loss, want = jax.value_and_grad(half_loss)(wide, half_batch().astype(np.float32))
    assert float(loss) == pytest.approx(float(want_loss), rel=1e-2)
    for name, g in grads.items():
        assert g.dtype == F32
        np.testing.assert_allclose(g, want[name], rtol=2e-2)
    if accumulate == 1:
        plain_loss, plain = grad_fn(part.place(params), half_batch())
        assert float(plain_loss) == float(loss)
        assert not np.any(plain["w"])  # what the scale is for


@pytest.mark.parametrize(
    *product(
        stage=[1, 2, 3], mesh=["mesh8", "mesh4x2"], axis_type=[AxisType.Auto, AxisType.Explicit]
    )
)
def test_float16_training_as_in_float32(stage, mesh, axis_type):
    params = half_params()
    part = zerojax.partition(params, make_mesh(mesh, axis_type), P(), stage=stage)
    adam = optax.adam(1e-3, eps=1e-12)
    tx = zerojax.dynamic_loss_scale(zerojax.zero(adam, part, master_dtype=F32), growth_interval=3)
    step = zerojax.train_step(zerojax.value_and_grad(half_loss, part), tx, part)
    placed, state = zerojax.init(lambda params: params, tx, part)(params)
    x, bad = half_batch(), half_batch()
    bad[-1, 3] = np.inf  # one example, on the last device
    plain = jax.tree.map(lambda x: jnp.asarray(x, F32), params)
    plain_state = adam.init(plain)
    scales = []
    for batch in (x, bad, x, x, x):
        if batch is x:
            loss, grads = jax.value_and_grad(half_loss)(plain, x.astype(np.float32))
            updates, plain_state = adam.update(grads, plain_state)
            plain = optax.apply_updates(plain, updates)
        placed, state, metrics = step(placed, state, batch)
        scales.append((float(metrics["loss_scale"]), int(metrics["skipped"])))
        if batch is x:
            assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-2)
    assert scales == [(2**15, 0), (2**14, 1), (2**14, 1), (2**14, 1), (2**15, 1)]
    np.testing.assert_allclose(state.inner.master["w"], plain["w"], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(placed["w"], np.asarray(state.inner.master["w"]).astype(F16))
    np.testing.assert_allclose(placed["full"], plain["full"], rtol=1e-4, atol=1e-5)
