"""`nnx.Optimizer` with `zero` trains as plain nnx, with 1/N of its state on each device."""

import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax import numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from models import row_parallel
from pairs import product
from trees import (
    DEVICES,
    EXTRA,
    assert_close,
    loss,
    make_few,
    optimizers,
    random_like,
    transformations,
)

import zerojax
from tests.conftest import compilations, make_mesh
from zerojax.integrations.nnx import create

STEPS = 5

# Every optimizer, on two parameters of which one is padded.

LEAVES = make_few(["matrix", "odd"])
TARGETS = [nnx.State(random_like(LEAVES, seed)) for seed in range(STEPS)]
ODD = nnx.State({"matrix": False, "odd": True})
OPTIMIZERS = {
    **optimizers(),
    **transformations(*LEAVES),
    # With masks of dicts, where nnx has a `State`, plain nnx refuses them.
    "freeze": lambda: optax.chain(optax.freeze(ODD), optax.sgd(0.1, momentum=0.9)),
    "selective_transform": lambda: optax.selective_transform(optax.adam(0.1), freeze_mask=ODD),
}
MAIN = {
    *optimizers(), "adafactor, factored", "adamw, decay masked by path", "apply_if_finite",
    "inject_hyperparams, schedule", "masked", "MultiSteps", "multi_transform", "freeze",
}  # fmt: skip


def adam():
    return optax.adam(0.1)


MATRIX = nnx.State({"matrix": True, "odd": False})
OUTSIDE = {
    "chain": lambda zero: optax.chain(
        optax.clip(0.1), zero(optax.scale_by_adam()), optax.scale(0.1)
    ),
    "inject_hyperparams": lambda zero: optax.inject_hyperparams(lambda lr: zero(optax.adam(lr)))(
        lr=optax.linear_schedule(0.0, 0.1, 3)
    ),
    "masked": lambda zero: optax.masked(zero(adam()), MATRIX),
    "MultiSteps": lambda zero: optax.MultiSteps(zero(adam()), 2),
    "multi_transform": lambda zero: optax.multi_transform(
        {True: zero(adam()), False: zero(optax.sgd(0.1, momentum=0.9))}, MATRIX
    ),
}


class Leaves(nnx.Module):
    def __init__(self):
        self.matrix, self.odd = (nnx.Param(jnp.asarray(x)) for x in LEAVES.values())


def make_step(name):
    """A step on the loss of `trees`, with the extra arguments that the optimizer knows."""

    @nnx.jit
    def step(model, optimizer, targets):
        def loss_fn(model):
            return loss(nnx.as_pure(nnx.state(model, nnx.Param)), targets)

        value, grads = nnx.value_and_grad(loss_fn)(model)
        function = functools.partial(loss, targets=targets)
        extra = {"value": value, "grad": grads, "value_fn": function, "obj_fn": function}
        names = EXTRA.get(name, ["value", "grad", "value_fn"])
        optimizer.update(model, grads, **{key: extra[key] for key in names})
        return value

    return step


def run(name, model, optimizer):
    """The losses of some steps, and parameters and state behind them."""
    step = make_step(name)
    losses = [step(model, optimizer, targets) for targets in TARGETS]
    return losses, *nnx.as_pure((nnx.state(model, nnx.Param), optimizer.opt_state))


def plainly(tx):
    model = Leaves()
    return model, nnx.Optimizer(model, optax.with_extra_args_support(tx), wrt=nnx.Param)


def assert_sharded(plain, state):
    """Each leaf takes an eighth, along the dim that wastes least; too small ones are whole."""
    for plain, x in zip(*map(jax.tree.leaves, (plain, state)), strict=True):
        elements = plain.size
        if elements >= DEVICES:
            elements = min(-(-n // DEVICES) * (elements // n) for n in plain.shape)
        held = {shard.data.size for shard in x.addressable_shards}
        assert held == {elements}, (x.shape, x.sharding)
        if plain.shape in [leaf.shape for leaf in LEAVES.values()]:
            where = jax.NamedSharding(x.sharding.mesh, P("data"))
            assert x.sharding.is_equivalent_to(where, x.ndim), (x.shape, x.sharding)


def assert_same(plain, ours):
    """Leaves are in the same order; flax makes dicts of some sequences."""
    for a, b in zip(plain, ours, strict=True):
        assert_close(jax.tree.leaves(a), jax.tree.leaves(b), "after five steps:")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in MAIN else [pytest.mark.full])
        for name in OPTIMIZERS
        if name != "dpsgd"  # which takes gradients of examples, nnx or not
    ],
)
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # optimistic_adam
def test_every_optimizer_equals_plain_nnx(x64, name):
    tx = OPTIMIZERS[name]()
    plain = run(name, *plainly(tx))
    part = zerojax.partition(nnx.state(nnx.eval_shape(Leaves), nnx.Param), make_mesh("mesh8"))
    model, optimizer = create(Leaves, zerojax.zero(tx, part), part)
    assert_sharded(plain[2], nnx.as_pure(optimizer.opt_state))
    with compilations() as compiled:
        ours = run(name, model, optimizer)
    assert compiled == ["jit(step)"]
    assert_same(plain, ours)
    assert_sharded(plain[2], ours[2])
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(ours[1]))


@pytest.mark.parametrize("where", ["eager", "nnx.jit"])
@pytest.mark.parametrize("name", OUTSIDE)
def test_zero_inside_of_a_wrapper_equals_plain_nnx(x64, name, where):
    """Constructed as nnx users do; the step counter, which flax leaves on a device, counts."""
    plain = run(name, *plainly(OUTSIDE[name](lambda tx: tx)))
    model = Leaves()
    # On Explicit axes JAX does not let what `zero` runs close over the injected hyperparameters.
    kind = AxisType.Auto if name == "inject_hyperparams" else AxisType.Explicit
    part = zerojax.partition(nnx.state(model, nnx.Param), make_mesh("mesh8", kind))
    tx = OUTSIDE[name](lambda inner: zerojax.zero(inner, part))
    nnx.update(model, part.place(nnx.state(model, nnx.Param)))
    construct = functools.partial(nnx.Optimizer, tx=tx, wrt=nnx.Param)
    optimizer = nnx.jit(construct)(model) if where == "nnx.jit" else construct(model)

    def moments(state):
        leaves = jax.tree.leaves_with_path(nnx.as_pure(state))
        return [x for path, x in leaves if jax.tree_util.keystr(path).endswith(".mu['matrix']")]

    (before,) = moments(optimizer.opt_state)
    with compilations() as compiled:
        ours = run(name, model, optimizer)
    assert len(compiled) == (1 if where == "nnx.jit" else 2)
    assert_same(plain, ours)
    for moment in (before, *moments(optimizer.opt_state)):
        assert moment.sharding.is_equivalent_to(part.shardings(P("data")), 2)
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(ours[1]))


# A model with stacked layers, sharded over `model` if it says so.


class Block(nnx.Module):
    def __init__(self, declared, rngs):
        def made(init, *spec):
            return nnx.with_partitioning(init, spec) if declared else init

        lecun, zeros = nnx.initializers.lecun_normal(), nnx.initializers.zeros
        linear = functools.partial(nnx.Linear, param_dtype=np.float64, rngs=rngs)
        bias = made(zeros, "model")
        self.up = linear(8, 16, kernel_init=made(lecun, None, "model"), bias_init=bias)
        self.down = linear(16, 8, kernel_init=made(lecun, "model", None), use_bias=False)

    def __call__(self, x):
        return x + row_parallel(jnp.tanh(self.up(x)), self.down.kernel[...])


class Model(nnx.Module):
    def __init__(self, declared, rngs):
        @nnx.split_rngs(splits=2)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: None})
        def make_layers(rngs):
            return Block(declared, rngs)

        self.layers = make_layers(rngs)
        self.head = nnx.Linear(8, 13, param_dtype=np.float64, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        def apply(x, layer):
            return zerojax.unshard(layer)(x), None

        self.calls[...] += 1
        apply = jax.checkpoint(apply, policy=zerojax.regather)
        return zerojax.unshard(self.head)(jax.lax.scan(apply, x, self.layers)[0])


X, Y = (np.random.default_rng(i).normal(size=(32, n)) for i, n in enumerate([8, 13]))
SCAN_DIMS = nnx.State({"layers": 1, "head": 0})
MODEL_TX = {
    "adamw": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "muon": optax.contrib.muon(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
}


def mean_error(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


@functools.cache
def train_plainly(name):
    model = Model(False, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, MODEL_TX[name], wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(mean_error)(model, X, Y)
        optimizer.update(model, grads)
        return loss

    losses = [step(model, optimizer) for _ in range(STEPS)]
    return losses, *nnx.as_pure((nnx.state(model, nnx.Param), optimizer.opt_state))


def train(model, optimizer, part, gradients, x, y):
    """One step; with `nnx.value_and_grad`, with that of zerojax, or at stage 3 by constraints."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss_fn(params, rest, x, y):
        return mean_error(nnx.merge(graphdef, params, rest, copy=True), x, y)

    if gradients == "zerojax":
        specs = (P(), P("data"), P("data"))
        grad_fn = zerojax.value_and_grad(loss_fn, part, accumulate=2, batch_specs=specs)
        loss, grads = grad_fn(params, rest, x, y)
        assert "by layer" in repr(grad_fn)
    elif part.stage == 3:
        loss, grads = jax.value_and_grad(lambda p, *args: loss_fn(part.shards(p), *args))(
            params, rest, x, y
        )
    else:
        loss, grads = nnx.value_and_grad(mean_error)(model, x, y)
    optimizer.update(*([] if isinstance(optimizer, nnx.ModelAndOptimizer) else [model]), grads)
    return loss


@pytest.mark.parametrize(
    *product(
        layout=["mesh8", "mesh4x2", "mesh4x2 declared"],
        axis_type=[AxisType.Explicit, AxisType.Auto],
        stage=[3, 1, 2],
        gradients=["nnx", "zerojax"],
        start=["create", "eager", "nnx.jit"],
        optimizer=list(MODEL_TX),
    )
)
def test_training_equals_plain_nnx(x64, layout, axis_type, stage, gradients, start, optimizer):
    mesh, declared = make_mesh(layout.split()[0], axis_type), "declared" in layout
    name = optimizer

    def make_model():
        return Model(declared, nnx.Rngs(0))

    with jax.set_mesh(mesh):
        model = nnx.eval_shape(make_model)
    part = zerojax.partition(
        nnx.state(model, nnx.Param), mesh, None if declared else P(),
        stage=stage, scan_dims=SCAN_DIMS,
    )  # fmt: skip
    if declared:
        assert part.by_path["['layers']['up']['kernel']"].model_spec == P(None, None, "model")
    tx = zerojax.zero(MODEL_TX[name], part)
    if start == "create":
        model, optimizer = create(make_model, tx, part)
    else:
        with jax.set_mesh(mesh):
            model = make_model()
        nnx.update(model, part.place(nnx.state(model, nnx.Param)))
        construct = functools.partial(nnx.ModelAndOptimizer, tx=tx)
        optimizer = nnx.jit(construct)(model) if start == "nnx.jit" else construct(model)

    def held():
        return nnx.as_pure(nnx.state((model, optimizer)))

    @functools.partial(nnx.jit, donate_argnums=(0, 1))
    def step(model, optimizer, x, y):
        return train(model, optimizer, part, gradients, x, y)

    before = held()
    sharding = jax.NamedSharding(mesh, P("data"))
    x, y = (jax.device_put(array, sharding) for array in (X, Y))
    losses, params, state = train_plainly(name)
    with compilations() as compiled:
        got = [step(model, optimizer, x, y) for _ in range(STEPS)]
    assert len(compiled) == (2 if start == "eager" else 1)  # see above
    np.testing.assert_allclose(got, losses, rtol=1e-11)
    assert_close(params, part.gather(nnx.state(model, nnx.Param)), "params")
    got_state = nnx.as_pure(optimizer.opt_state)
    assert_close(state, got_state, "state")
    # Nothing has moved, and everything is where the plan has it.
    after = held()
    for x, y in zip(*map(jax.tree.leaves, (before, after)), strict=True):
        assert x.is_deleted() or x.size < 2  # what is not read cannot be reused
        assert x.ndim == 0 or x.sharding.is_equivalent_to(y.sharding, x.ndim), (x.shape, x.sharding, y.sharding)
    wanted = part.abstract_params(), zerojax.abstract_state(tx, part)
    for like, x in zip(*map(jax.tree.leaves, (wanted, (params_of(model), got_state))), strict=True):
        assert like.shape == x.shape and x.sharding.is_equivalent_to(like.sharding, x.ndim)
    assert model.calls[...] == (0 if gradients == "zerojax" or stage == 3 else STEPS)


def params_of(model):
    return nnx.as_pure(nnx.state(model, nnx.Param))
