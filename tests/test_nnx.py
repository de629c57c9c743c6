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
    part = zerojax.partition(nnx.state(model, nnx.Param), make_mesh("mesh8", AxisType.Explicit))
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
        assert moment.sharding.spec == P("data", None)
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(ours[1]))
