"""flax.linen: `TrainState`s that stay in their shards, boxed or bare, and modules by layer."""

import collections
import functools

import chex
import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from trees import optimizers

import zerojax
from tests.conftest import compilations, make_mesh
from zerojax.integrations import linen

STEPS = 5
TIGHT = {"rtol": 1e-12, "atol": 1e-12}
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(32, 16)), RNG.normal(size=(32, 16))
KEY = jax.random.key(0)


def make_loss(model):
    return lambda params, x, y: jnp.mean((model.apply({"params": params}, x) - y) ** 2)


def step_with(grad_fn):
    """The training step of a flax script."""

    def step(state, *batch):
        loss, grads = grad_fn(state.params, *batch)
        return state.apply_gradients(grads=grads), loss

    return step


def train(step, state, *batch):
    """Five steps: the state, losses, and how often they were compiled; nothing moves."""
    step, losses = jax.jit(step, donate_argnums=0), []
    with compilations() as compiled:
        for _ in range(STEPS):
            before = jax.tree.leaves(state)
            state, loss = step(state, *batch)
            losses.append(loss)
            for old, new in zip(before, jax.tree.leaves(state), strict=True):
                if isinstance(getattr(old, "sharding", None), NamedSharding):
                    assert old.sharding.is_equivalent_to(new.sharding, new.ndim), new.shape
                    reused = old.is_deleted() or old.size == 1  # it may be a constant
                    assert reused, f"the buffer of {old.shape} was copied"
    return state, jax.tree.map(lambda *xs: np.array(xs), *losses), len(compiled)


def on(mesh, batch=(X, Y)):
    return jax.device_put(batch, NamedSharding(mesh, P("data")))


def bytes_per_device(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


# Every optimizer.

OPTIMIZERS = optimizers()
# `apply_gradients` passes on gradients and parameters, no loss; dpsgd takes gradients by example.
NEED_MORE = {"dpsgd", "lbfgs", "momo", "momo_adam", "sophia"}
SUPPORTED = [name for name in OPTIMIZERS if name not in NEED_MORE]
DENSE = nn.Dense(16, param_dtype=jnp.float64)


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_plain_flax_supports_all_other_optimizers(x64):
    params = jax.eval_shape(DENSE.init, KEY, X)["params"]

    def fails(tx):
        try:
            updates, _ = jax.eval_shape(lambda p: tx.update(p, tx.init(p), p), params)
        except (TypeError, ValueError):
            return True
        return jax.tree.map(jnp.shape, updates) != jax.tree.map(jnp.shape, params)

    assert {name for name, make in OPTIMIZERS.items() if fails(make())} == NEED_MORE


@pytest.mark.parametrize("first", range(0, len(SUPPORTED), 8))
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # optimistic_adam
def test_every_optimizer(x64, first):
    """Eight optimizers side by side, in one program, which is compiled once."""
    chosen = {name: OPTIMIZERS[name]() for name in SUPPORTED[first : first + 8]}
    mesh = make_mesh("mesh8", [AxisType.Auto, AxisType.Explicit][first // 8 % 2])
    params = DENSE.init(KEY, X)["params"]
    part = zerojax.partition(params, mesh)
    one_step = step_with(jax.value_and_grad(make_loss(DENSE)))

    def step(states, *batch):
        pairs = {name: one_step(state, *batch) for name, state in states.items()}
        return tuple({name: pair[i] for name, pair in pairs.items()} for i in range(2))

    def create(wrap, params):
        return {
            name: TrainState.create(apply_fn=DENSE.apply, params=params, tx=wrap(tx))
            for name, tx in chosen.items()
        }

    plain = jax.jit(functools.partial(create, lambda tx: tx))(params)
    plain, expected, _ = train(step, plain, X, Y)
    wrap = functools.partial(zerojax.zero, part=part)
    with jax.set_mesh(mesh):
        states = jax.jit(functools.partial(create, wrap))(part.place(params))
    states, losses, compiled = train(step, states, *on(mesh))

    assert compiled == 1
    chex.assert_trees_all_close(losses, expected, **TIGHT)
    for name, state in states.items():
        specs = zerojax.abstract_state(state.tx, part)
        for (path, x), whole, want in zip(
            jax.tree.leaves_with_path(state.opt_state),
            *map(jax.tree.leaves, (plain[name].opt_state, specs)),
            strict=True,
        ):
            path = name + jax.tree_util.keystr(path)
            shards = 8 if whole.size >= 8 else 1
            assert bytes_per_device(x) * shards == whole.nbytes, path
            assert x.sharding.is_equivalent_to(want.sharding, x.ndim), path
        assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(state.params))


# Boxes, and where a state is created.

AXES = {"in": None, "hidden": None, "out": "model"}  # of the boxes' names


class Model(nn.Module):
    """Thirteen hidden units, whose bias is padded; the last kernel is split over `model`."""

    boxes: str = "bare"
    dense: type[nn.Module] = nn.Dense

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(self.make_dense(13, "in", "hidden")(x))
        return self.make_dense(16, "hidden", "out")(x)

    def make_dense(self, features, *names):
        return self.dense(
            features,
            param_dtype=jnp.float64,
            kernel_init=self.box(nn.initializers.lecun_normal(), *names),
            bias_init=self.box(nn.initializers.zeros, *names[1:]),
        )

    def box(self, initializer, *names):
        if self.boxes == "boxed":
            return nn.with_partitioning(initializer, tuple(map(AXES.get, names)))
        if self.boxes == "logical":
            return nn.with_logical_partitioning(initializer, names)
        return initializer


@functools.cache
def plain_losses(model):
    params = jax.jit(model.init)(KEY, X)["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(0.1))
    return train(step_with(jax.value_and_grad(make_loss(model))), state, X, Y)[1]


# Elements on each device: of the parameters in their model specs, and in shards.
ELEMENTS = {
    ("mesh8", "whole"): (445, 26 + 2 + 26 + 2),
    ("mesh4x2", "whole"): (445, 52 + 4 + 52 + 4),
    ("mesh4x2", "split"): (333, 52 + 4 + 26 + 2),
}


@pytest.mark.parametrize(
    "created, boxes, mesh, axis_type, gradients, stage",
    [
        ("outside", "bare", "mesh8", AxisType.Auto, "jax", 1),
        ("outside", "bare", "mesh8", AxisType.Explicit, "by layer", 2),
        ("outside", "boxed", "mesh4x2", AxisType.Auto, "by layer", 3),
        ("outside", "boxed", "mesh4x2", AxisType.Explicit, "jax", 1),
        ("inside", "bare", "mesh4x2", AxisType.Explicit, "by step", 1),
        ("inside", "boxed", "mesh4x2", AxisType.Auto, "by layer", 1),
        ("inside", "logical", "mesh8", AxisType.Explicit, "jax", 1),
        ("linen", "bare", "mesh8", AxisType.Explicit, "by step", 3),
        ("linen", "boxed", "mesh4x2", AxisType.Explicit, "by layer", 3),
        ("linen", "logical", "mesh4x2", AxisType.Auto, "by step", 2),
        ("linen", "logical", "mesh4x2", AxisType.Explicit, "jax", 1),
        ("linen", "logical", "mesh8", AxisType.Auto, "by layer", 3),
    ],
)
def test_a_state_stays_where_it_was_created(x64, created, boxes, mesh, axis_type, gradients, stage):
    model = Model(boxes, linen.unshard(nn.Dense) if gradients == "by layer" else nn.Dense)
    split = "split" if mesh == "mesh4x2" and boxes != "bare" else "whole"
    whole_elements, elements = ELEMENTS[mesh, split]
    rules = AXES if mesh == "mesh4x2" else dict.fromkeys(AXES)
    mesh = make_mesh(mesh, axis_type)

    def create(params):
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    with nn.logical_axis_rules(tuple(rules.items())):
        shapes = jax.eval_shape(model.init, KEY, X)["params"]
        specs = P() if boxes == "bare" else None  # they are read from the boxes
        part = zerojax.partition(shapes, mesh, specs, stage=stage)
        tx = zerojax.zero(optax.adamw(0.1), part)
        if created == "linen":
            state = linen.create_train_state(model, tx, part)(KEY, X)
        elif created == "outside":
            state = create(part.place(jax.jit(model.init)(KEY, X)["params"]))
        else:

            def init_and_create(*args):
                params = model.init(*args)["params"]
                if boxes == "boxed":  # or they are born where XLA likes
                    shardings = nn.get_sharding(params, mesh)
                    params = jax.lax.with_sharding_constraint(params, shardings)
                return create(params)

            with jax.set_mesh(mesh):
                state = jax.jit(init_and_create)(KEY, X)
        value_and_grad = functools.partial(zerojax.value_and_grad, part=part)
        grad_fn = (jax.value_and_grad if gradients == "jax" else value_and_grad)(make_loss(model))
        first = state.opt_state
        state, losses, compiled = train(step_with(grad_fn), state, *on(mesh))

    # `TrainState.create` makes a Python number of the step, which then is one on the mesh.
    assert compiled == (2 if created == "outside" else 1)
    np.testing.assert_allclose(losses, plain_losses(Model()), **TIGHT)
    params = elements if stage == 3 else whole_elements
    assert bytes_per_device(state.params) == 8 * params
    for opt_state in (first, state.opt_state):
        for x, want in zip(
            jax.tree.leaves(opt_state),
            jax.tree.leaves(zerojax.abstract_state(tx, part)),
            strict=True,
        ):
            assert (x.shape, x.dtype) == (want.shape, want.dtype)
            assert x.sharding.is_equivalent_to(want.sharding, x.ndim)
    assert bytes_per_device(state.opt_state) == 8 * 2 * elements + 4  # and the count
    for leaf, x in zip(part.leaves, jax.tree.leaves(state.params), strict=True):
        want = NamedSharding(mesh, part.param_spec(leaf))
        assert x.sharding.is_equivalent_to(want, x.ndim), leaf.path


def test_boxes_among_bare_arrays_are_read_as_flax_reads_them():
    model = nn.Dense(16, kernel_init=nn.with_partitioning(nn.initializers.ones, (None, "model")))
    shapes = jax.eval_shape(model.init, KEY, X)["params"]
    mesh = make_mesh("mesh4x2")
    for specs in (None, nn.get_partition_spec(shapes)):
        part = zerojax.partition(shapes, mesh, specs)
        assert [leaf.model_spec for leaf in part.leaves] == [P(None), P(None, "model")]


# What `create_train_state` does beyond `TrainState.create`.


class State(TrainState):
    batch_stats: dict
    key: jax.Array
    noise: float = 0.0


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(not train)(nn.Dense(13)(x))
        return nn.Dense(16)(nn.tanh(x))


def test_a_subclass_with_statistics_and_a_key():
    model, x, y = Normed(), *map(np.float32, (X, Y))
    mesh = make_mesh("mesh8", AxisType.Explicit)

    def step(state, x, y):
        key = jax.random.fold_in(state.key, state.step)
        x += state.noise * jax.random.normal(key)

        def loss_fn(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            out, new = model.apply(variables, x, True, mutable=["batch_stats"])
            return jnp.mean((out - y) ** 2), new["batch_stats"]

        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)  # the batch is coupled
        (loss, stats), grads = grad_fn(state.params)
        return state.apply_gradients(grads=grads, batch_stats=stats), loss

    fields = {"key": jax.random.key(1), "noise": 0.1}
    variables = jax.jit(functools.partial(model.init, train=False))(KEY, x)
    plain = State.create(apply_fn=model.apply, tx=optax.adam(0.1), **variables, **fields)
    plain, want, _ = train(step, jax.tree.map(jnp.array, plain), x, y)

    part = zerojax.partition(variables["params"], mesh)
    tx = zerojax.zero(optax.adam(0.1), part)
    state = linen.create_train_state(model, tx, part, State, **fields)(KEY, x, train=False)
    assert bytes_per_device(state.opt_state) == 4 * 2 * (26 + 3 * 2 + 26 + 2) + 4
    state, losses, compiled = train(step, state, *on(mesh, (x, y)))
    assert compiled == 1
    np.testing.assert_allclose(losses, want, rtol=1e-4)  # float32, which adam amplifies
    for x in jax.tree.leaves((state.step, state.batch_stats, state.noise)):
        assert x.sharding.is_fully_replicated and len(x.sharding.device_set) == 8


class Averaged(TrainState):
    average: dict
    seen: dict

    @classmethod
    def create(cls, *, params, **fields):
        return super().create(params=params, average=jax.tree.map(jnp.copy, params), **fields)


class Seeing(nn.Module):
    @nn.compact
    def __call__(self, x):
        self.variable("seen", "x", lambda: x)
        return nn.Dense(13)(x)


@pytest.mark.parametrize(
    "stage, axis_type", [(1, AxisType.Auto), (3, AxisType.Auto), (3, AxisType.Explicit)]
)
def test_an_average_of_the_parameters_lives_where_they_do_and_the_rest_is_whole(stage, axis_type):
    model, mesh, x = Seeing(), make_mesh("mesh8", axis_type), np.float32(X[:, :13])
    shapes = jax.eval_shape(model.init, KEY, x)["params"]
    part = zerojax.partition(shapes, mesh, stage=stage)
    tx = zerojax.zero(optax.adam(0.1), part)
    state = linen.create_train_state(model, tx, part, Averaged)(KEY, on(mesh, x))
    for params in (state.params, state.average):
        for leaf, p in zip(part.leaves, jax.tree.leaves(params), strict=True):
            want = NamedSharding(mesh, part.param_spec(leaf))
            assert p.sharding.is_equivalent_to(want, p.ndim), leaf.path
    chex.assert_trees_all_equal(state.params, state.average)
    assert np.array_equal(state.seen["x"], x) and state.seen["x"].sharding.is_fully_replicated


def test_the_whole_state_is_never_on_a_device():
    model, x = nn.Sequential([nn.Dense(256) for _ in range(4)]), jnp.ones((1, 256))
    shapes = jax.eval_shape(model.init, KEY, x)["params"]
    part = zerojax.partition(shapes, make_mesh("mesh8"), stage=3)
    tx = zerojax.zero(optax.adam(0.1), part)
    create = jax.jit(linen.create_train_state(model, tx, part))
    memory = create.lower(KEY, x).compile().memory_analysis()
    size = sum(4 * x.size for x in jax.tree.leaves(shapes))
    assert memory.output_size_in_bytes <= 3 * size / 8 + 1024
    assert memory.temp_size_in_bytes <= 2 * size / 8  # random bits: a shard of each leaf, or less


def test_masters_and_a_loss_scale():
    """`apply_gradients` is what `zerojax.train_step` does; masters are born unrounded."""
    model = nn.Dense(13)
    x, y = np.float16(X[:, :13]), np.float32(Y[:, :13])
    params = jax.jit(model.init)(KEY, x)["params"]
    half = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float16), params)
    part = zerojax.partition(half, make_mesh("mesh8"), stage=3)
    inner = zerojax.zero(optax.adam(0.1), part, master_dtype=jnp.float32)
    tx = zerojax.dynamic_loss_scale(inner, initial=2.0**4)
    create = linen.create_train_state(model, tx, part)
    grad_fn = zerojax.value_and_grad(make_loss(model), part, grad_dtype=jnp.float32)

    def step(state, *batch):
        loss, grads = grad_fn(state.params, *batch, loss_scale=state.opt_state.scale)
        return state.apply_gradients(grads=grads), loss

    state = create(KEY, x)
    assert state.params["kernel"].dtype == jnp.float16
    assert state.params["kernel"].shape == (16, 13)  # padded
    master = state.opt_state.inner.master["kernel"][:13]
    np.testing.assert_allclose(master, params["kernel"], rtol=1e-5)  # not rounded to 16 bits
    state, losses, compiled = train(step, state, x, y)
    assert compiled == 1

    other = create(KEY, x)
    ours = zerojax.train_step(grad_fn, tx, part)
    params, opt_state = other.params, other.opt_state
    for loss in losses:
        params, opt_state, metrics = ours(params, opt_state, x, y)
        assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-3)


# Layer by layer.

LAYERS, WIDTH, HIDDEN = 4, 16, 32


class Block(nn.Module):
    boxed: bool

    @nn.compact
    def __call__(self, x, _):
        def dense(features, *names):
            init = nn.initializers.lecun_normal()
            init = nn.with_partitioning(init, names) if self.boxed else init
            return nn.Dense(features, use_bias=False, kernel_init=init, param_dtype=x.dtype)

        hidden = dense(HIDDEN, None, "model")(x)
        return x + nn.tanh(dense(WIDTH, None, None)(x) + hidden.sum(-1, keepdims=True)), None


class Layers(nn.Module):
    """Scanned blocks between a tied embedding, as flax has them, with or without `unshard`."""

    by_layer: bool
    boxed: bool = False

    @nn.compact
    def __call__(self, tokens):
        block, embed = Block, nn.Embed
        if self.by_layer:
            block = nn.remat(linen.unshard(Block), policy=zerojax.regather, prevent_cse=False)
            embed = linen.unshard(nn.Embed, methods=("__call__", "attend"))
        init = nn.initializers.normal()
        init = nn.with_partitioning(init, (None, None)) if self.boxed else init
        embed = embed(24, WIDTH, embedding_init=init)
        layers = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
            metadata_params={nn.PARTITION_NAME: None},
        )
        x, _ = layers(self.boxed, name="layers")(embed(tokens), None)
        return embed.attend(x)


TOKENS = RNG.integers(24, size=(32, 3))


def token_loss(model):
    def loss_fn(params, tokens):
        logits = model.apply({"params": params}, tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    return loss_fn


@functools.cache
def expected_by_layer():
    model = Layers(by_layer=False)
    params = jax.jit(model.init)(KEY, TOKENS)["params"]
    params = jax.tree.map(lambda p: p.astype(np.float64), params)
    return params, *jax.value_and_grad(token_loss(model))(params, TOKENS)


def test_unshard_changes_no_name_and_nothing_on_plain_arrays():
    plain, ours = Layers(by_layer=False), Layers(by_layer=True)
    params = plain.init(KEY, TOKENS)
    chex.assert_trees_all_equal(params, ours.init(KEY, TOKENS))
    chex.assert_trees_all_equal(plain.apply(params, TOKENS), ours.apply(params, TOKENS))


@pytest.mark.parametrize(
    "stage, boxed, mesh, axis_type",
    [
        (3, True, "mesh4x2", AxisType.Explicit),
        (3, False, "mesh8", AxisType.Explicit),
        (3, True, "mesh4x2", AxisType.Auto),
        (2, False, "mesh8", AxisType.Auto),
        (1, True, "mesh4x2", AxisType.Explicit),
    ],
)
def test_by_layer_equals_one_device(x64, stage, boxed, mesh, axis_type):
    model, mesh = Layers(True, boxed), make_mesh(mesh, axis_type)
    params, want_loss, want = expected_by_layer()
    boxes = jax.eval_shape(model.init, KEY, TOKENS)["params"]
    params = nn.meta.replace_boxed(boxes, params)
    part = zerojax.partition(params, mesh, stage=stage, scan_dims={"Embed_0": 0, "layers": 1})
    grad_fn = zerojax.value_and_grad(token_loss(model), part, accumulate=2)
    loss, grads = jax.jit(grad_fn)(part.place(params), TOKENS)
    assert ", by layer: " in repr(grad_fn)
    assert float(loss) == pytest.approx(float(want_loss), rel=1e-12)
    natural = jax.tree.map(np.asarray, part.gather(grads) if stage == 3 else grads)
    chex.assert_trees_all_close(jax.tree.leaves(natural), jax.tree.leaves(want), **TIGHT)


@pytest.mark.parametrize("stage, axis_type", [(3, AxisType.Explicit), (1, AxisType.Auto)])
def test_by_layer_every_weight_is_gathered_and_reduced_in_the_loop(stage, axis_type):
    model, mesh = Layers(by_layer=True), make_mesh("mesh8", axis_type)
    shapes = jax.eval_shape(model.init, KEY, TOKENS)["params"]
    part = zerojax.partition(shapes, mesh, stage=stage, scan_dims={"Embed_0": 0, "layers": 1})
    tx = zerojax.zero(optax.adam(0.1), part)
    create = linen.create_train_state(model, tx, part)
    step = step_with(zerojax.value_and_grad(token_loss(model), part))
    state = jax.eval_shape(create, KEY, TOKENS).replace(
        params=part.abstract_params(), opt_state=zerojax.abstract_state(tx, part)
    )
    compiled = jax.jit(step, donate_argnums=0).lower(state, TOKENS).compile()
    weights = {WIDTH * HIDDEN, WIDTH * WIDTH}  # of a layer
    times = collections.Counter()
    for c in zerojax.audit(compiled, mesh).collectives:
        if c.elements in weights | {LAYERS * n for n in weights}:
            times[c.kind, c.elements, c.in_loop] += c.trips
    want = {("reduce-scatter", n, True): LAYERS for n in weights}
    if stage == 3:  # for the forward pass, and again for the backward pass
        want |= {("all-gather", n, True): 2 * LAYERS for n in weights}
    else:  # the new parameters
        want |= {("all-gather", LAYERS * n, False): 1 for n in weights}
    assert times == want
