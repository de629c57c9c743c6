"""`zero` inside the user's own `shard_map`, and with gradients typed unreduced on Explicit axes."""

import chex
import jax
import numpy as np
import optax
import pytest
from hlo import collectives
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from pairs import product

import zerojax
from tests.conftest import make_mesh

TIGHT = {"rtol": 1e-12, "atol": 1e-12}
STEPS = 3
SPECS = {
    "w": P(),
    "padded": P(),
    "bias": P(),
    "scalar": P(),
    "empty": P(),
    "wide": P(None, "model"),
}
# A dim that `model` and `data` share needs both axes Manual.
SHARED = {**SPECS, "column": P("model")}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def make_params():
    shapes = {"w": (16, 4), "padded": (13, 5), "bias": (3,), "scalar": (), "empty": (0, 4)}
    shapes |= {"wide": (8, 6), "column": (16,)}
    return {k: normal(*shape, seed=i) for i, (k, shape) in enumerate(shapes.items())}


def loss_fn(params, x):
    return jnp.mean(x) * sum(jnp.sum(jnp.sin(p)) for p in jax.tree.leaves(params))


def optimizer(clip):
    """Scales with the gradient, as Adam and an active clip do not: they hide a wrong factor."""
    return optax.chain(clip(1e3), optax.add_decayed_weights(0.1), optax.sgd(1e-1, momentum=0.9))


def expected(params, x):
    state = (tx := optimizer(optax.clip_by_global_norm)).init(params)
    for _ in range(STEPS):
        updates, state = tx.update(jax.grad(loss_fn)(params, x), state, params)
        params = optax.apply_updates(params, updates)
    return params


def gradients(kind, params, x, model_is_manual):
    """Gradients of one device, of every type that they can have."""

    def loss(params, x):
        sharded = {k: v for k, v in params.items() if k in ("wide", "column")}
        value = loss_fn({k: v for k, v in params.items() if k not in sharded}, x)
        part = loss_fn(sharded, x)
        return value + (jax.lax.psum(part, "model") if model_is_manual else part)

    if kind == "invariant":
        return jax.grad(lambda p: jax.lax.pmean(loss(p, x), "data"))(params)
    local = jax.tree.map(lambda p: jax.lax.pcast(p, "data", to="varying"), params)
    if kind == "mean":
        return jax.grad(loss)(local, x)
    grads = jax.grad(lambda p: loss(p, x) / jax.lax.axis_size("data"))(local)
    if kind == "sum":
        return grads
    return jax.tree.map(lambda g: jax.lax.pcast(g, "data", to="unreduced"), grads)


@pytest.mark.parametrize(
    *product(
        kind=["mean", "sum", "invariant", "unreduced"],
        mesh=["mesh8", "mesh4x2"],
        axis_type=[AxisType.Auto, AxisType.Explicit],
        manual=["data", "all"],
    )
)
def test_update_in_a_manual_region(x64, kind, mesh, axis_type, manual):
    mesh = make_mesh(mesh, axis_type)
    manual = {"data"} if manual == "data" else set(mesh.axis_names)
    specs = SHARED if manual >= {"model"} else SPECS
    params = {k: v for k, v in make_params().items() if k in specs}
    part = zerojax.partition(params, mesh, specs if "model" in mesh.axis_names else P())
    tx = zerojax.zero(
        optimizer(zerojax.clip_by_global_norm), part,
        local_gradients=kind if kind in ("mean", "sum") else None,
    )  # fmt: skip

    def on_manual_axes(specs):
        def restrict(spec):
            dims = [e if isinstance(e, tuple) else (e,) for e in spec]
            return P(*(tuple(a for a in dim if a in manual) or None for dim in dims))

        return jax.tree.map(restrict, specs)

    param_specs = on_manual_axes(part.model_specs)
    state_specs = on_manual_axes(
        jax.tree.map(lambda leaf: leaf.sharding.spec, zerojax.abstract_state(tx, part))
    )

    def step(params, state, x):
        grads = gradients(kind, params, x, "model" in manual)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(
        jax.shard_map(
            step, mesh=mesh, axis_names=manual,
            in_specs=(param_specs, state_specs, P("data")), out_specs=(param_specs, state_specs),
        )
    )  # fmt: skip
    x = jax.device_put(normal(8, seed=9), NamedSharding(mesh, P("data")))
    placed = part.place(params)
    state = tx.init(placed)
    found = collectives(step.lower(placed, state, x).compile(), mesh)
    for _ in range(STEPS):
        placed, state = step(placed, state, x)
    chex.assert_trees_all_close(placed, expected(params, np.asarray(x)), **TIGHT)

    # Each sharded leaf is gathered once and, unless its gradient is summed already, scattered once.
    sharded = [leaf for leaf in part.leaves if leaf.shard_axes]
    scattered = [c for c in found if c.kind == "reduce-scatter"]
    padded = [leaf for leaf in sharded if leaf.padded]
    expected_scatters = {"invariant": 0, "unreduced": len(sharded) - len(padded)}
    assert len(scattered) == expected_scatters.get(kind, len(sharded))
    gathered = [c for c in found if c.kind == "all-gather"]
    if axis_type == AxisType.Explicit and "model" not in manual:
        # jax itself gathers over Explicit axes at the border of a region that leaves them out.
        gathered = [c for c in gathered if c.axes != {"model"}]
    assert len(gathered) == len(sharded)
    assert all(c.axes == {"data"} for c in scattered + gathered)


def test_init_in_a_manual_region_is_the_same_state(x64):
    mesh = make_mesh("mesh8")
    params = make_params()
    part = zerojax.partition(params, mesh)
    tx = zerojax.zero(optax.chain(optax.trace(0.9), optax.ema(0.9)), part)
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, zerojax.abstract_state(tx, part))
    inside = jax.shard_map(
        tx.init, mesh=mesh, in_specs=(jax.tree.map(lambda _: P(), params),), out_specs=specs
    )
    placed = part.place(params)
    chex.assert_trees_all_equal(jax.jit(inside)(placed), tx.init(placed))


@pytest.mark.parametrize("optimizer", [optax.adamw, optax.adafactor])
def test_unreduced_gradients_on_explicit_axes(x64, optimizer):
    mesh = make_mesh("mesh8", AxisType.Explicit)
    params = {"w": normal(16, 8), "odd": normal(8, 13)}
    part = zerojax.partition(params, mesh)
    tx = zerojax.zero(optimizer(1e-2), part)

    def loss(params, x):
        return jnp.sum((x @ params["w"].T) @ params["w"] @ params["odd"]) / 32

    def step(params, state, x):
        reduced = jax.tree.map(lambda p: jax.reshard(p, P(reduced={"data"})), params)
        grads = jax.grad(loss)(reduced, x)
        assert all("data" in jax.typeof(g).sharding.spec.unreduced for g in grads.values())
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(mesh):
        x = jax.device_put(normal(32, 8), NamedSharding(mesh, P("data")))
        placed = part.place(params)
        got, _ = jax.jit(step)(placed, tx.init(placed), x)
    tx, x = optimizer(1e-2), np.asarray(x)
    updates, _ = tx.update(jax.grad(loss)(params, x), tx.init(params), params)
    chex.assert_trees_all_close(got, optax.apply_updates(params, updates), **TIGHT)


@pytest.mark.parametrize("kind", ["mean", "sum"])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_stage_3_in_a_manual_region(x64, kind, axis_type):
    """The user gathers the shards; the transpose of that has summed their gradients."""
    mesh = make_mesh("mesh8", axis_type)
    params = {k: v for k, v in make_params().items() if k in SPECS}
    part = zerojax.partition(params, mesh, P(), stage=3)
    tx = zerojax.zero(optimizer(zerojax.clip_by_global_norm), part, local_gradients=kind)
    state_specs = jax.tree.map(lambda leaf: leaf.sharding.spec, zerojax.abstract_state(tx, part))

    def whole(leaf, x):
        for dim, axes in enumerate(leaf.shard):
            x = jax.lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x
        return x[tuple(map(slice, leaf.shape))]

    def step(params, state, x):
        divisor = 1 if kind == "mean" else jax.lax.axis_size("data")
        local = part.map(
            lambda leaf, p: p if leaf.shard_axes else jax.lax.pcast(p, "data", to="varying"), params
        )
        grads = jax.grad(lambda p: loss_fn(part.map(whole, p), x) / divisor)(local)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(part.param_specs, state_specs, P("data")),
            out_specs=(part.param_specs, state_specs),
        )
    )  # fmt: skip
    x = jax.device_put(normal(8, seed=9), NamedSharding(mesh, P("data")))
    placed = part.place(params)
    inside = jax.shard_map(tx.init, mesh=mesh, in_specs=(part.param_specs,), out_specs=state_specs)
    state = jax.jit(inside)(placed)
    chex.assert_trees_all_equal(state, tx.init(placed))
    for _ in range(STEPS):
        placed, state = step(placed, state, x)
    chex.assert_trees_all_close(part.gather(placed), expected(params, np.asarray(x)), **TIGHT)


def test_stage_3_needs_local_gradients_in_a_manual_region():
    part = zerojax.partition({"w": jnp.ones(16)}, make_mesh("mesh8"), stage=3)
    tx = zerojax.zero(optax.sgd(1.0), part)
    update = jax.shard_map(
        lambda g, p: tx.update(g, tx.init(p), p)[0], mesh=part.mesh,
        in_specs=(part.param_specs,) * 2, out_specs=part.param_specs,
    )  # fmt: skip
    params = part.place({"w": jnp.ones(16)})
    with pytest.raises(ValueError, match=r"local_gradients(.|\n)*\['w'\]: varying over \['data'\]"):
        jax.jit(update)(params, params)
