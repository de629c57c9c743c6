"""`zero(..., master_dtype=)`: parameters in 16 bits that move as those of a float32 run do."""

import functools
import math
import re

import jax
import numpy as np
import optax
import pytest
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from pairs import product

import zerojax
from tests.conftest import compilations, make_mesh

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
STEPS = 3
ULP = 2.0**-22  # of float32, relative: what fusing differently on shards leaves


def normal(*shape, dtype=BF16, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(dtype)


SPECS = {
    "matrix": P(),
    "odd": P(),
    "small": P(),
    "half": P(),
    "half_odd": P(),
    "scale": P(),
    "up": P(None, "model"),
    "column": P("model"),
    "full": P(),
    "ids": P(),
    "mask": P(),
}


def make_params():
    return {
        "matrix": normal(16, 4),
        "odd": normal(13),
        "small": normal(3),
        "half": normal(24, 2, dtype=F16),
        "half_odd": normal(5, 3, dtype=F16),
        "scale": normal(),
        "up": normal(8, 6),
        "column": normal(16),  # a dim that two axes of mesh4x2 share
        "full": normal(32, dtype=F32),
        "ids": np.arange(4, dtype=np.int32),
        "mask": np.arange(8) % 2 == 0,
    }


def plan(mesh, params, **options):
    specs = {k: SPECS[k] for k in params} if "model" in mesh.axis_names else P()
    return zerojax.partition(params, mesh, specs, **options)


def is_floating(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def in_float32(tree):
    """What plain optax trains in place of the parameters: no integers, and nothing rounded."""
    return {k: jnp.asarray(x, F32) for k, x in tree.items() if is_floating(x)}


def make_grads(params, seed):
    """Float32 gradients with bits that a cast to 16 bits would lose; zeros for integers."""
    return {
        k: normal(*x.shape, dtype=F32, seed=seed) if is_floating(x) else np.zeros_like(x)
        for k, x in params.items()
    }


def master_states(state):
    """The states with masters, wherever they are in an optimizer's state."""

    def is_master(x):
        return isinstance(x, zerojax.MasterState)

    return [*filter(is_master, jax.tree.leaves(state, is_leaf=is_master))]


def assert_lands_on_masters(part, params, state):
    """Parameters are their masters, rounded; wider ones have none, and dtypes are the plan's."""
    (state,) = master_states(state)
    for name, p in params.items():
        leaf, master = part.by_path[f"['{name}']"], state.master[name]
        assert p.dtype == leaf.dtype, name
        if leaf.dtype not in (BF16, F16):
            assert isinstance(master, optax.MaskedNode), name
        elif not isinstance(master, optax.MaskedNode):
            assert master.dtype == F32 and master.shape == leaf.stored, name
            natural = np.asarray(master)[tuple(slice(n) for n in p.shape)]
            np.testing.assert_array_equal(np.asarray(p), natural.astype(p.dtype), name)


def assert_as_abstract(tx, part, state):
    abstract = zerojax.abstract_state(tx, part)
    assert jax.tree.structure(state) == jax.tree.structure(abstract)
    for (path, x), want in zip(
        jax.tree.leaves_with_path(state), jax.tree.leaves(abstract), strict=True
    ):
        path = jax.tree_util.keystr(path)
        assert (x.shape, x.dtype) == (want.shape, want.dtype), path
        assert x.sharding.is_equivalent_to(want.sharding, x.ndim), (path, x.sharding)


def assert_one_nth(part, state):
    """Masters and moments take what the plan says on each device."""
    for tree in (state.master, state.inner[0].mu, state.inner[0].nu):
        for leaf, x in zip(part.plans(tree), jax.tree.leaves(tree), strict=True):
            devices = math.prod(part.mesh.shape[a] for a in leaf.model_axes + leaf.shard_axes)
            held = {shard.data.nbytes for shard in x.addressable_shards}
            assert held == {4 * math.prod(leaf.stored) // devices}, leaf.path


@pytest.mark.parametrize(
    *product(mesh=["mesh8", "mesh4x2"], axis_type=[AxisType.Auto, AxisType.Explicit], stage=[1, 2])
)
def test_a_thousand_small_steps_are_those_of_float32(mesh, axis_type, stage):
    def away_from_zero(*shape):
        x = np.asarray(normal(*shape), np.float32)
        return (np.sign(x) * (0.5 + np.abs(x))).astype(BF16)

    params = {
        "matrix": away_from_zero(16, 4),
        "odd": away_from_zero(13),
        "up": away_from_zero(8, 6),
    }
    part = plan(make_mesh(mesh, axis_type), params, stage=stage)
    # Exactly representable, and not the same at each step.
    grads = jax.tree.map(lambda x: jnp.asarray(np.sign(x), BF16), params)

    def train(tx, params, grads):
        def step(i, carry):
            params, state = carry
            scaled = jax.tree.map(lambda g: g * jnp.where(i % 4 == 0, 4, 1).astype(g.dtype), grads)
            updates, state = tx.update(scaled, state, params)
            return optax.apply_updates(params, updates), state

        def run(params, state, grads):
            return jax.lax.fori_loop(0, 1000, step, (params, state))

        return jax.jit(run)(params, tx.init(params), grads)

    adam = optax.adam(1e-4)
    placed = part.place(params), part.place(grads)
    got, state = train(zerojax.zero(adam, part, master_dtype=F32), *placed)
    assert_lands_on_masters(part, got, state)
    want, _ = train(adam, in_float32(params), in_float32(grads))
    plain, _ = train(zerojax.zero(adam, part), *placed)
    for name, x in got.items():
        np.testing.assert_array_equal(np.asarray(x), np.asarray(want[name].astype(BF16)), name)
        assert np.all(np.asarray(x) != params[name]), name
        np.testing.assert_array_equal(np.asarray(plain[name]), params[name], name)


@functools.cache
def expected():
    """Three steps of plain optax in float32."""
    tx, params = optax.adamw(1e-2), in_float32(make_params())
    state = tx.init(params)
    for seed in range(1, STEPS + 1):
        grads = in_float32(make_grads(make_params(), seed))
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize(
    *product(
        where=["eager", "jit", "manual"],
        mesh=["mesh8", "mesh4x2"],
        axis_type=[AxisType.Auto, AxisType.Explicit],
        stage=[1, 2],
    )
)
def test_a_tree_of_many_dtypes(where, mesh, axis_type, stage):
    params = make_params()
    part = plan(make_mesh(mesh, axis_type), params, stage=stage)
    tx = zerojax.zero(optax.adamw(1e-2), part, master_dtype=F32)
    placed = part.place(params)
    state = tx.init(placed)
    update = tx.update
    if where == "manual":
        specs = jax.tree.map(lambda x: x.sharding.spec, zerojax.abstract_state(tx, part))
        update = jax.shard_map(
            tx.update, mesh=part.mesh, out_specs=(part.model_specs, specs),
            in_specs=(part.model_specs, specs, part.model_specs),
        )  # fmt: skip
    if where != "eager":
        update = jax.jit(update)
    for seed in range(1, STEPS + 1):
        grads = jax.device_put(make_grads(params, seed), part.shardings(part.model_specs))
        updates, state = update(grads, state, placed)
        placed = optax.apply_updates(placed, updates)
        assert_lands_on_masters(part, placed, state)
        assert_as_abstract(tx, part, state)
        for leaf, x in zip(part.leaves, jax.tree.leaves(placed), strict=True):
            assert x.sharding.is_equivalent_to(NamedSharding(part.mesh, leaf.model_spec), x.ndim)
    assert_one_nth(part, state)
    for name in ("ids", "mask"):
        np.testing.assert_array_equal(placed[name], params[name])
    want, want_state = expected()
    for name, x in want.items():
        for got, wanted in [
            (state.master[name] if part.by_path[f"['{name}']"].dtype != F32 else placed[name], x),
            (state.inner[0].mu[name], want_state[0].mu[name]),
        ]:
            natural = np.asarray(got)[tuple(slice(n) for n in x.shape)]
            np.testing.assert_allclose(natural, wanted, rtol=1e-5, atol=4 * ULP, err_msg=name)


def test_in_a_manual_region_new_parameters_are_gathered_in_16_bits():
    params = make_params()
    part = plan(make_mesh("mesh8"), params)
    tx = zerojax.zero(optax.adamw(1e-2), part, master_dtype=F32, local_gradients="mean")
    specs = jax.tree.map(lambda x: x.sharding.spec, zerojax.abstract_state(tx, part))

    def step(grads, state, params):
        grads = jax.tree.map(lambda g: jax.lax.pcast(g, "data", to="varying"), grads)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    region = jax.shard_map(
        step, mesh=part.mesh, in_specs=(P(), specs, P()), out_specs=(P(), specs)
    )  # fmt: skip
    placed = part.place(params)
    # What is given to XLA: on CPU it gathers every 16-bit array as float32.
    text = jax.jit(region).lower(placed, tx.init(placed), placed).as_text()
    got = re.findall(r"stablehlo\.all_gather.* -> tensor<(\S+)>", text)
    names = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
    assert sorted(got) == sorted(
        "x".join([*map(str, leaf.stored), names[str(leaf.dtype)]])
        for leaf in part.leaves
        if leaf.shard_axes
    )


def test_what_mixes_shards_is_refused_in_a_manual_region():
    params = {"matrix": make_params()["matrix"]}
    part = plan(make_mesh("mesh8"), params)
    tx = zerojax.zero(optax.lamb(1e-2), part, master_dtype=F32)
    state = zerojax.abstract_state(tx, part)
    specs = jax.tree.map(lambda x: x.sharding.spec, state)
    update = jax.shard_map(
        tx.update, mesh=part.mesh, in_specs=(P(), specs, P()), out_specs=(P(), specs)
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"more than its own shard[\s\S]*reduce_sum"):
        jax.eval_shape(update, params, state, params)


# Initial values that are wider than the plan.


def make_wide():
    """The parameters before they are rounded."""
    return {
        k: normal(*x.shape, dtype=F32, seed=7) if is_floating(x) else x
        for k, x in make_params().items()
    }


def natural(x, shape):
    return np.asarray(x)[tuple(slice(n) for n in shape)]


def assert_unrounded_masters(part, state, wide):
    for name, x in wide.items():
        if part.by_path[f"['{name}']"].dtype in (BF16, F16):
            np.testing.assert_array_equal(natural(state.master[name], x.shape), x, name)


@pytest.mark.parametrize("how", ["numpy", "jit", "placed", "manual"])
def test_init_takes_unrounded_parameters(how):
    wide = make_wide()
    part = plan(make_mesh("mesh8"), make_params())
    tx = zerojax.zero(optax.adamw(1e-2), part, master_dtype=F32)
    init, params = tx.init, wide
    if how == "placed":
        params = jax.device_put(wide, NamedSharding(part.mesh, P()))
    if how == "manual":
        specs = jax.tree.map(lambda x: x.sharding.spec, zerojax.abstract_state(tx, part))
        init = jax.shard_map(tx.init, mesh=part.mesh, in_specs=(P(),), out_specs=specs)
    if how in ("jit", "manual"):
        init = jax.jit(init)
    state = init(params)
    assert_as_abstract(tx, part, state)
    assert_unrounded_masters(part, state, wide)
    if how == "placed":  # the caller's arrays survive the donation of the state
        jax.jit(lambda x: jax.tree.map(jnp.negative, x), donate_argnums=0)(state)
        np.testing.assert_array_equal(params["matrix"], wide["matrix"])


def test_without_masters_init_rounds_first():
    wide = {k: make_wide()[k] for k in BRAIN}
    part = plan(make_mesh("mesh8"), {k: make_params()[k] for k in BRAIN})
    tx = zerojax.zero(optax.contrib.schedule_free_sgd(1e-2), part)
    state = tx.init(wide)
    assert_as_abstract(tx, part, state)
    z = natural(state.z["odd"], wide["odd"].shape)
    np.testing.assert_array_equal(z, wide["odd"].astype(BF16))


BRAIN = ["matrix", "odd", "scale", "up", "column", "full"]  # schedule_free refuses both kinds of 16
WRAPPERS = {
    "zero": lambda tx: tx,
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "schedule_free": lambda tx: optax.contrib.schedule_free(tx, 0.1),
    "dynamic_loss_scale": zerojax.dynamic_loss_scale,
}


@pytest.mark.parametrize(
    *product(
        wrapper=list(WRAPPERS),
        mesh=["mesh8", "mesh4x2"],
        axis_type=[AxisType.Auto, AxisType.Explicit],
        stage=[1, 3],
    )
)
def test_zerojax_init_keeps_unrounded_values_in_masters(wrapper, mesh, axis_type, stage):
    wide, planned = ({k: tree[k] for k in BRAIN} for tree in (make_wide(), make_params()))
    part = plan(make_mesh(mesh, axis_type), planned, stage=stage)
    tx = WRAPPERS[wrapper](zerojax.zero(optax.adamw(1e-2), part, master_dtype=F32))
    params, state = zerojax.init(lambda: jax.tree.map(jnp.asarray, wide), tx, part)()
    assert_as_abstract(tx, part, state)
    for name, x in params.items():
        rounded = wide[name].astype(planned[name].dtype)
        np.testing.assert_array_equal(natural(x, rounded.shape), rounded, name)
    (of_zero,) = master_states(state)
    assert_unrounded_masters(part, of_zero, wide)


def test_another_dtype_than_a_wider_one_is_an_error():
    part = plan(make_mesh("mesh8"), make_params())
    tx = zerojax.zero(optax.adamw(1e-2), part, master_dtype=F32)
    bad = make_wide() | {"full": normal(32), "ids": np.zeros(4, np.float32)}
    bad |= {"half": np.zeros((24, 2), np.int32)}
    for init in (tx.init, zerojax.init(lambda params: params, tx, part)):
        with pytest.raises(ValueError, match="init") as error:
            init(bad)
        lines = str(error.value).splitlines()[1:]
        assert [line.split(":")[0] for line in lines] == ["  ['full']", "  ['half']", "  ['ids']"]
        assert all("expected" in line and "got" in line for line in lines)


def test_errors_say_what_to_do():
    params = make_params()
    part = plan(make_mesh("mesh8"), params)
    tx = zerojax.zero(optax.sgd(1e-2), part, master_dtype=F32)
    with pytest.raises(ValueError, match=r"Pass them: tx.update\(grads, state, params\)"):
        tx.update(params, tx.init(params))
    with pytest.raises(ValueError, match="master_dtype must be floating"):
        zerojax.zero(optax.sgd(1e-2), part, master_dtype=jnp.int32)
    plain = zerojax.zero(optax.sgd(1e-2), part)
    with pytest.raises(ValueError, match=r"\.master\['matrix'\]: is missing"):
        tx.update(params, plain.init(params), params)


# Steps.


@pytest.mark.parametrize(
    *product(
        mesh=["mesh8", "mesh4x2"], axis_type=[AxisType.Auto, AxisType.Explicit], stage=[1, 2, 3]
    )
)
def test_training_steps_compile_once_and_happen_in_place(mesh, axis_type, stage):
    params = make_params()
    part = plan(make_mesh(mesh, axis_type), params, stage=stage)

    def loss(params, x):
        return jnp.mean(x) * sum(
            jnp.sum(jnp.sin(p.astype(F32))) for k, p in params.items() if is_floating(p)
        )

    tx = zerojax.zero(optax.adamw(1e-2), part, master_dtype=F32)
    step = zerojax.train_step(
        zerojax.value_and_grad(loss, part, grad_dtype=F32, accumulate=2), tx, part
    )  # fmt: skip
    placed = part.place(params)
    state, x = tx.init(placed), np.ones(16, np.float32)
    with compilations() as compiled:
        for _ in range(STEPS):
            before = jax.tree.leaves((placed, state))
            placed, state, _ = step(placed, state, x)
            assert all(x.is_deleted() for x in before)
            assert_lands_on_masters(part, placed, state)
            assert_as_abstract(tx, part, state)
    assert len(compiled) == 1


# A small tree for what is composed of many pieces. Its gradients add up exactly in 16 bits.
FEW = ["matrix", "odd", "half", "full"]
MATRIX_ONLY = {name: name == "matrix" for name in FEW}
adam = functools.partial(optax.adam, 0.1)
COMPOSITIONS = {
    "MultiSteps around": lambda zero: optax.MultiSteps(zero(adam()), 2).gradient_transformation(),
    "chain": lambda zero: optax.chain(optax.clip(0.5), zero(adam())),
    "chain inside": lambda zero: zero(optax.chain(optax.clip_by_global_norm(0.5), adam())),
    "masked": lambda zero: optax.masked(zero(adam()), MATRIX_ONLY),
    "multi_transform": lambda zero: optax.multi_transform(
        {True: zero(adam()), False: zero(optax.sgd(0.1, momentum=0.9))}, MATRIX_ONLY
    ),
    "inject_hyperparams": lambda zero: optax.inject_hyperparams(lambda lr: zero(optax.adam(lr)))(
        lr=optax.linear_schedule(0.0, 0.1, 3)
    ),
    "inject_hyperparams inside": lambda zero: zero(
        optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.0, 0.1, 3))
    ),
    "adafactor": lambda zero: zero(optax.adafactor(0.1, min_dim_size_to_factor=2)),
    "schedule_free inside": lambda zero: zero(optax.contrib.schedule_free(adam(), 0.1)),
}


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_composition_moves_as_float32(name):
    params = {k: make_params()[k] for k in FEW}
    part = plan(make_mesh("mesh8"), params)
    exact = jax.tree.map(lambda x: np.round(4 * np.asarray(x, np.float32)) / 8, params)
    grads = jax.tree.map(lambda g, x: g.astype(x.dtype), exact, params)

    def train(tx, params, grads):
        def run(params, state):
            for sign in (1, 1, 1, -1):
                updates, state = tx.update(optax.tree.scale(sign, grads), state, params)
                params = optax.apply_updates(params, updates)
            return params, state

        return jax.jit(run)(params, tx.init(params))

    compose = COMPOSITIONS[name]
    masters = functools.partial(zerojax.zero, part=part, master_dtype=F32)
    got, state = train(compose(masters), part.place(params), part.place(grads))
    want, _ = train(compose(lambda tx: tx), in_float32(params), in_float32(grads))
    for of_zero in master_states(state):
        assert_lands_on_masters(part, {k: got[k] for k in of_zero.master}, of_zero)
        for k, master in of_zero.master.items():
            if not isinstance(master, optax.MaskedNode):
                x = natural(master, params[k].shape)
                np.testing.assert_allclose(x, want[k], rtol=1e-5, atol=4 * ULP, err_msg=k)
    assert any(np.any(np.asarray(x) != params[k]) for k, x in got.items())
    np.testing.assert_allclose(got["full"], want["full"], rtol=1e-5, atol=4 * ULP)
