"""Model code that knows nothing of zerojax, and the losses that `check` has to find."""

import chex
import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from tests.conftest import make_mesh

RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 8)).astype(np.float32)
Y = RNG.normal(size=(32, 4)).astype(np.float32)
W = {
    "w": RNG.normal(size=(8, 4)).astype(np.float32),
    "u": RNG.normal(size=(4, 4)).astype(np.float32) / 2,
}


def recurrent(params, x, y):
    def step(carry, row):
        return jnp.tanh(carry @ params["u"] + row), None

    rows = jnp.stack([x @ params["w"]] * 3)
    out, _ = jax.lax.scan(step, jnp.zeros(y.shape), rows)
    return jnp.mean((out - y) ** 2)


def fixed_point(params, x, y):
    """A while loop, differentiated through its fixed point only (a custom rule)."""

    def iterate(z):
        return jax.lax.while_loop(
            lambda c: c[1] < 4, lambda c: (jnp.tanh(c[0] @ params["u"]), c[1] + 1), (z, 0)
        )[0]

    z = jax.lax.stop_gradient(iterate(jnp.zeros(y.shape)))
    return jnp.mean((jnp.tanh(z @ params["u"] + x @ params["w"]) - y) ** 2)


def conditional(params, x, y):
    out = jax.lax.cond(x[0, 0] > 100, lambda: jnp.zeros(y.shape), lambda: x @ params["w"])
    return jnp.mean((out @ params["u"] - y) ** 2)


def rematerialised(params, x, y):
    layer = jax.checkpoint(lambda x: jnp.tanh(x @ params["w"]) @ params["u"])
    return jnp.mean((layer(x) - y) ** 2)


@jax.custom_vjp
def rounded(x):
    return jnp.round(x)


rounded.defvjp(lambda x: (jnp.round(x), None), lambda _, ct: (ct,))  # straight through


def custom_rule(params, x, y):
    return jnp.mean((rounded(x @ params["w"]) @ params["u"] - y) ** 2)


def vmapped(params, x, y):
    def one(x, y):
        return jnp.sum((x @ params["w"] @ params["u"] - y) ** 2)

    return jnp.mean(jax.vmap(one)(x, y))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "loss", [recurrent, fixed_point, conditional, rematerialised, custom_rule, vmapped]
)
def test_plain_model_code(loss, axis_type):
    part = zerojax.partition(W, make_mesh("mesh8", axis_type))
    grad_fn = jax.jit(zerojax.value_and_grad(loss, part, accumulate=2))
    got = grad_fn(part.place(W), X, Y)
    chex.assert_trees_all_close(got, jax.value_and_grad(loss)(W, X, Y), rtol=1e-5, atol=1e-6)


class Linen(nn.Module):
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x, deterministic):
        x = nn.LayerNorm()(nn.Dense(16)(x))
        x = nn.RNN(nn.SimpleCell(16))(x[:, None].repeat(2, 1))[:, -1]
        return nn.Dense(4)(nn.Dropout(self.dropout, deterministic=deterministic)(x))


def test_flax_linen_with_dropout():
    model = Linen(dropout=0.5)
    variables = model.init(jax.random.key(0), X, True)
    part = zerojax.partition(variables, make_mesh("mesh8"))

    def loss(variables, x, y, key):
        out = model.apply(variables, x, False, rngs={"dropout": key})
        return jnp.mean((out - y) ** 2), out == 0

    grad_fn = zerojax.value_and_grad(loss, part, has_aux=True, aux_reduction="concat")
    keys = jax.random.key(1)
    (value, _), grads = jax.jit(grad_fn)(part.place(variables), X, Y, keys)
    # The same as a device loop by hand: each device folds its index into the key.
    local = jax.jit(jax.value_and_grad(lambda *args: loss(*args)[0]))
    parts = [
        local(variables, X[4 * i : 4 * i + 4], Y[4 * i : 4 * i + 4], jax.random.fold_in(keys, i))
        for i in range(8)
    ]
    want = jax.tree.map(lambda *x: sum(x) / 8, *parts)
    chex.assert_trees_all_close((value, grads), want, rtol=1e-4, atol=1e-5)


def test_flax_nnx_split():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(8, 16, rngs=rngs)
            self.second = nnx.Linear(16, 4, rngs=rngs)

        def __call__(self, x):
            return self.second(nnx.relu(self.first(x)))

    graph, params = nnx.split(Model(nnx.Rngs(0)), nnx.Param)
    params = nnx.to_pure_dict(params)
    part = zerojax.partition(params, make_mesh("mesh8"))

    def loss(params, x, y):
        state = nnx.state(nnx.eval_shape(lambda: Model(nnx.Rngs(0))), nnx.Param)
        nnx.replace_by_pure_dict(state, params)
        return jnp.mean((nnx.merge(graph, state)(x) - y) ** 2)

    tx = zerojax.zero(optax.adamw(1e-2), part)
    step = zerojax.train_step(zerojax.value_and_grad(loss, part), tx, part)
    placed = part.place(params)
    value, grads = jax.value_and_grad(loss)(params, X, Y)
    updates, _ = optax.adamw(1e-2).update(grads, optax.adamw(1e-2).init(params), params)
    got, _, metrics = step(placed, tx.init(placed), X, Y)
    assert float(metrics["loss"]) == pytest.approx(float(value), rel=1e-5)
    chex.assert_trees_all_close(got, optax.apply_updates(params, updates), rtol=1e-4, atol=1e-5)


# Models that cannot run in a Manual region: an error, and the same numbers the other way.


def constrained(mesh, spec):
    def loss(params, x, y):
        h = jax.lax.with_sharding_constraint(x @ params["w"], NamedSharding(mesh, spec))
        return jnp.mean((h @ params["u"] - y) ** 2)

    return loss


def averaging(params, x, y):
    return jax.lax.pmean(jnp.mean((x @ params["w"] @ params["u"] - y) ** 2), "data")


def test_constraints_over_data_work_with_plain_gradients():
    mesh = make_mesh("mesh8")
    part = zerojax.partition(W, mesh)
    loss = constrained(mesh, P("data"))
    with pytest.raises(ValueError, match=r"(?s)Manual region.*jax.value_and_grad"):
        zerojax.value_and_grad(loss, part)(part.place(W), X, Y)
    step_equals_plain(part, loss, jax.value_and_grad(loss))


def test_a_loss_that_averages_by_itself_is_refused():
    part = zerojax.partition(W, make_mesh("mesh8"))
    with pytest.raises(ValueError, match=r"(?s)reduces over the data axes.*psum"):
        zerojax.value_and_grad(averaging, part)(part.place(W), X, Y)


def step_equals_plain(part, loss, grad_fn, *args):
    """A step with some gradient function equals one of plain jax and optax."""
    args = args or (X, Y)
    tx = optax.adamw(1e-2)
    sharded = zerojax.zero(tx, part)
    params = part.place(W)
    step = zerojax.train_step(grad_fn, sharded, part)
    got, _, metrics = step(params, sharded.init(params), *args)
    value, grads = jax.value_and_grad(loss)(W, *args)
    updates, _ = tx.update(grads, tx.init(W), W)
    assert float(metrics["loss"]) == pytest.approx(float(value), rel=1e-5)
    chex.assert_trees_all_close(got, optax.apply_updates(W, updates), rtol=1e-4, atol=1e-5)


# Losses that mean something else on a part of the batch.

MASK = (RNG.uniform(size=32) < np.linspace(0.1, 1, 32)).astype(np.float32)


def batch_norm(params, x, y):
    h = x @ params["w"]
    h = (h - jnp.mean(h, 0)) / jnp.sqrt(jnp.var(h, 0) + 1e-5)
    return jnp.mean((h @ params["u"] - y) ** 2)


def masked_mean(params, x, y, mask):
    errors = jnp.mean((x @ params["w"] @ params["u"] - y) ** 2, -1)
    return jnp.sum(errors * mask) / jnp.sum(mask)


def contrastive(params, x, y):
    scores = (x @ params["w"]) @ (y @ params["u"]).T
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(scores)))


def total(params, x, y):
    return jnp.sum((x @ params["w"] @ params["u"] - y) ** 2)


COUPLED = {
    "batch normalisation": (batch_norm, (X, Y), "jax.value_and_grad"),
    "masked mean": (masked_mean, (X, Y, MASK), 'reduction="weighted"'),
    "contrastive": (contrastive, (X, Y), "jax.value_and_grad"),
    "sum": (total, (X, Y), 'Pass reduction="sum"'),
}


@pytest.mark.parametrize("name", COUPLED)
def test_check_finds_losses_that_are_no_means(name):
    loss, args, remedy = COUPLED[name]
    part = zerojax.partition(W, make_mesh("mesh8"))
    with pytest.raises(ValueError, match=r"(?s)means something else.*loss.*differs") as error:
        zerojax.check(loss, part, W, *args)
    assert remedy in str(error.value) and "['w']" in str(error.value)
    # What it recommends is right.
    step_equals_plain(part, loss, jax.value_and_grad(loss), *args)


def test_check_accepts_what_is_right():
    part = zerojax.partition(W, make_mesh("mesh8"))
    for loss in (recurrent, vmapped, custom_rule):
        assert zerojax.check(loss, part, W, X, Y, accumulate=2).loss > 0

    def weighted(params, x, y, mask):
        errors = jnp.mean((x @ params["w"] @ params["u"] - y) ** 2, -1)
        return jnp.sum(errors * mask), jnp.sum(mask)

    zerojax.check(weighted, part, W, X, Y, MASK, reduction="weighted", accumulate=2)
    zerojax.check(total, part, W, X, Y, reduction="sum")
    grad_fn = zerojax.value_and_grad(weighted, part, reduction="weighted", accumulate=4)
    step_equals_plain(part, masked_mean, grad_fn, X, Y, MASK)


def test_check_names_a_dropout_key():
    def loss(params, x, key):
        keep = jax.random.bernoulli(key, 0.5, (x.shape[0], 4))
        return jnp.mean((x @ params["w"]) ** 2 * keep)

    part = zerojax.partition(W, make_mesh("mesh8"))
    with pytest.raises(ValueError, match="random numbers"):
        zerojax.check(loss, part, W, X, jax.random.key(0))
