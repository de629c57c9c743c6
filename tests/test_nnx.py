"""`nnx.Optimizer` with `zero` trains as plain nnx, with 1/N of its state on each device."""

import functools

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
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
    "inject_hyperparams inside": lambda zero: zero(
        optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.0, 0.1, 3))
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
    return losses, *arrays_of(model, optimizer)


def plainly(tx):
    model = Leaves()
    return model, nnx.Optimizer(model, optax.with_extra_args_support(tx), wrt=nnx.Param)


def assert_sharded(plain, state):
    """Each leaf takes an eighth, along the dim that wastes least; too small ones are whole."""
    for natural, x in zip(*map(jax.tree.leaves, (plain, state)), strict=True):
        elements = natural.size
        if elements >= DEVICES:
            elements = min(-(-n // DEVICES) * (elements // n) for n in natural.shape)
        held = {shard.data.size for shard in x.addressable_shards}
        assert held == {elements}, (x.shape, x.sharding)
        if natural.shape in [leaf.shape for leaf in LEAVES.values()]:
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
            # What flax would do with the state does not matter to `zero`.
            elsewhere = {"optimizer_sharding": (None,)}
            return nnx.with_partitioning(init, spec, **elsewhere) if declared else init

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
    return losses, *arrays_of(model, optimizer)


def train(model, optimizer, x, y, part, gradients):
    """One step; its gradients come from nnx, from zerojax, or at stage 3 by constraints."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss_fn(params, rest, x, y):
        return mean_error(nnx.merge(graphdef, params, rest, copy=True), x, y)

    if gradients == "zerojax":
        specs = (P(), P("data"), P("data"))
        grad_fn = zerojax.value_and_grad(loss_fn, part, accumulate=2, batch_specs=specs)
        loss, grads = grad_fn(params, rest, x, y)
        assert "by layer" in repr(grad_fn)
    elif part.stage == 3:
        by_constraints = jax.value_and_grad(lambda params: loss_fn(part.shards(params), rest, x, y))
        loss, grads = by_constraints(params)
    else:
        loss, grads = nnx.value_and_grad(mean_error)(model, x, y)
    if isinstance(optimizer, nnx.ModelAndOptimizer):
        optimizer.update(grads)
    else:
        optimizer.update(model, grads)
    return loss


def arrays_of(model, optimizer):
    return nnx.as_pure((nnx.state(model, nnx.Param), optimizer.opt_state))


def assert_at(wanted, arrays):
    for want, x in zip(*map(jax.tree.leaves, (wanted, arrays)), strict=True):
        assert x.shape == want.shape
        assert x.sharding.is_equivalent_to(want.sharding, x.ndim), (x.shape, x.sharding)


@pytest.mark.parametrize(
    *product(
        layout=["mesh8", "mesh4x2", "mesh4x2 declared"],
        axis_type=[AxisType.Explicit, AxisType.Auto],
        stage=[3, 1, 2],
        gradients=["nnx", "zerojax"],
        start=["create", "eager", "nnx.jit"],
        name=list(MODEL_TX),
    )
)
def test_training_equals_plain_nnx(x64, layout, axis_type, stage, gradients, start, name):
    mesh, declared = make_mesh(layout.split()[0], axis_type), "declared" in layout

    def make_model():
        return Model(declared, nnx.Rngs(0))

    with jax.set_mesh(mesh):  # flax wants one where sharding is declared
        model = nnx.eval_shape(make_model) if start == "create" else make_model()
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
        nnx.update(model, part.place(nnx.state(model, nnx.Param)))
        construct = functools.partial(nnx.ModelAndOptimizer, tx=tx)
        optimizer = nnx.jit(construct)(model) if start == "nnx.jit" else construct(model)
    wanted = part.abstract_params(), zerojax.abstract_state(tx, part)
    before = arrays_of(model, optimizer)
    assert_at(wanted, before)

    step = functools.partial(train, part=part, gradients=gradients)
    step = nnx.jit(step, donate_argnums=(0, 1))
    batch = jax.device_put((X, Y), jax.NamedSharding(mesh, P("data")))
    losses, params, state = train_plainly(name)
    with compilations() as compiled:
        got = [step(model, optimizer, *batch) for _ in range(STEPS)]
    assert len(compiled) == (2 if start == "eager" else 1)  # see above
    np.testing.assert_allclose(got, losses, rtol=1e-11)
    got_params, got_state = arrays_of(model, optimizer)
    assert_close(params, part.gather(got_params), "params")
    assert_close(state, got_state, "state")
    assert_at(wanted, (got_params, got_state))
    for x in jax.tree.leaves(before):
        assert x.is_deleted() or x.size < 2, x.shape  # what is not read cannot be reused
    in_place = gradients == "nnx" and stage < 3
    assert model.calls[...] == (STEPS if in_place else 0)


# `create`, and what a model holds beside its parameters.


class Noisy(nnx.Module):
    """Dropout and batch statistics; one parameter is padded, and one large."""

    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
        self.large = nnx.Linear(256, 256, use_bias=False, kernel_init=init, rngs=rngs)
        self.norm = nnx.BatchNorm(256, rngs=rngs)
        self.head = nnx.Linear(256, 13, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


def make_noisy():
    return Noisy(nnx.Rngs(3))


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("stage", [1, 3])
def test_create_makes_what_nnx_makes_and_nothing_whole(stage, axis_type, monkeypatch):
    mesh = make_mesh("mesh4x2", axis_type)
    with jax.set_mesh(mesh):
        plain = make_noisy()
    part = zerojax.partition(nnx.state(plain, nnx.Param), mesh, stage=stage)
    tx = zerojax.zero(optax.adam(0.1), part)
    held, jit = [], jax.jit

    def recording_jit(fn, **options):
        def call(*args, **kwargs):
            if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args)):
                compiled = jit(fn, **options).lower(*args, **kwargs).compile()
                memory = compiled.memory_analysis()
                held.append(memory.argument_size_in_bytes + memory.temp_size_in_bytes)
            return jit(fn, **options)(*args, **kwargs)

        return call

    with monkeypatch.context() as patched:
        patched.setattr(jax, "jit", recording_jit)
        model, _ = create(make_noisy, tx, part)
    # Some shards of the large one, a quarter each of what a model axis leaves to a device.
    assert 0 < max(held) < plain.large.kernel[...].nbytes / 2
    params, rest = nnx.state(model, nnx.Param, ...)
    wanted_params, wanted_rest = nnx.state(plain, nnx.Param, ...)
    assert_at(part.abstract_params(), nnx.as_pure(params))
    assert_close(nnx.as_pure(wanted_rest), nnx.as_pure(rest), "rest")
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(rest))
    for x, want in zip(*map(jax.tree.leaves, (part.gather(params), wanted_params)), strict=True):
        np.testing.assert_allclose(x, want, rtol=1e-5, atol=1e-7)  # compiled as a whole
    assert nnx.graphdef(model) == nnx.graphdef(plain)  # classes of variables, and metadata


def test_create_takes_what_a_checkpoint_restores(x64, tmp_path):
    """A run that is stopped, resharded and resumed ends where one ends that was not."""
    losses, params, state = train_plainly("adamw")

    def make_model():
        return Model(False, nnx.Rngs(0))

    def on(mesh, stage):
        shapes = nnx.state(nnx.eval_shape(make_model), nnx.Param)
        part = zerojax.partition(shapes, mesh, stage=stage, scan_dims=SCAN_DIMS)
        return part, zerojax.zero(MODEL_TX["adamw"], part)

    def go_on(model, optimizer, part, steps):
        step = nnx.jit(functools.partial(train, part=part, gradients="zerojax"))
        return [step(model, optimizer, X, Y) for _ in range(steps)]

    part, tx = on(make_mesh("mesh8"), 3)
    model, optimizer = create(make_model, tx, part)
    got = go_on(model, optimizer, part, 2)
    with ocp.CheckpointManager(tmp_path) as manager:
        zerojax.checkpoint.save(manager, 2, *arrays_of(model, optimizer), tx, part)
        part, tx = on(jax.make_mesh((4,), ("data",), devices=jax.devices()[:4]), 1)
        restored = zerojax.checkpoint.restore(manager, None, tx, part)
    model, optimizer = create(make_model, tx, part, restored, step=2)
    got += go_on(model, optimizer, part, STEPS - 2)
    assert optimizer.step[...] == STEPS
    np.testing.assert_allclose(got, losses, rtol=1e-11)
    got_params, got_state = arrays_of(model, optimizer)
    assert_close(params, got_params, "params")
    assert_close(state, got_state, "state")


def test_dropout_differs_by_device_layer_and_microbatch():
    """Also with the keys of stacked layers, in variables that all devices share."""

    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def make_layers(rngs):
        return nnx.Dropout(0.5, rngs=rngs)

    graphdef, rest = nnx.split(make_layers(nnx.Rngs(0)))
    part = zerojax.partition({"w": np.ones(16)}, make_mesh("mesh8"))

    def loss_fn(params, rest, x):
        draw = nnx.vmap(lambda layer: layer(jnp.ones(64)), in_axes=0)
        return jnp.mean(x * params["w"][0]), draw(nnx.merge(graphdef, rest, copy=True))

    grad_fn = zerojax.value_and_grad(
        loss_fn, part, accumulate=2, has_aux=True, aux_reduction="concat",
        batch_specs=(P(), P("data")),
    )  # fmt: skip
    (_, masks), _ = grad_fn(part.place({"w": np.ones(16)}), rest, jnp.ones(16))
    assert masks.shape == (3 * 8 * 2, 64)
    assert len(np.unique(masks, axis=0)) == len(masks)
