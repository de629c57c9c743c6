"""`unshard` and `Shard`: what a model may do with them, and what it is told otherwise."""

import functools
import operator

import chex
import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from jax.sharding import AxisType
from pairs import product

import zerojax
from tests.conftest import make_mesh
from zerojax import unshard

RNG = np.random.default_rng(0)
SHAPES = {
    "layers": {"w": (4, 8, 16), "b": (4, 16), "v": (4, 16, 8)},
    "experts": (2, 8, 8),
    "tied": (8, 8),
    "odd": (5, 3),
    "small": (3,),
    "unused": (16,),
}
SCAN_DIMS = dict.fromkeys(SHAPES, 0) | {"layers": 1, "experts": 1}
PARAMS = jax.tree.map(
    lambda shape: RNG.normal(size=shape) / 3, SHAPES, is_leaf=lambda x: isinstance(x, tuple)
)
# Of every device and microbatch another one: what depends on data differs between them.
X = RNG.normal(size=(32, 8)) + np.arange(32)[:, None] / 16


def plan(mesh="mesh8", axis_type=AxisType.Auto, stage=3, **options):
    mesh = make_mesh(mesh, axis_type)
    options = {"scan_dims": SCAN_DIMS} | options
    return zerojax.partition(PARAMS, mesh, jax.sharding.PartitionSpec(), stage=stage, **options)


def block(x, layer):
    layer = unshard(layer)
    return jnp.tanh(x @ layer["w"] + layer["b"]) @ layer["v"]


def scanned(params, x, body=block):
    return lax.scan(lambda x, layer: (body(x, layer), None), x, params["layers"])[0]


def sliced(params, x):
    for i in range(4):
        x = block(x, jax.tree.map(lambda w, i=i: w[i], params["layers"]))
    return x


def indexed(params, x):
    def body(x, i):
        return block(x, jax.tree.map(lambda w: w[i], params["layers"])), None

    return lax.scan(body, x, jnp.array([3, 1, 2, 1]))[0]


def picked_by_data(params, x):
    """The layer, and so whether an accumulator is used at all, depends on the microbatch."""
    layer = jax.tree.map(lambda w: w[(x[0, 0] > 1).astype(int)], params["layers"])
    return block(x, layer)


def picked_in_a_loop(params, x):
    def body(carry, _):
        x, i = carry
        x = block(x, jax.tree.map(lambda w: w[i], params["layers"]))
        return (x, (x[0, 0] > 0).astype(int)), None

    return lax.scan(body, (x, 0), None, length=2)[0][0]


def as_long_as_the_data_tell(params, x):
    def body(y):
        return lax.stop_gradient(y @ unshard(params["tied"]) / 4)

    y = lax.while_loop(lambda y: jnp.abs(y[0, 0]) > 1e-3, body, lax.stop_gradient(x))
    return x + y


def mapped(params, x):
    halves = x.reshape(2, -1, 8)
    return jax.vmap(lambda w, x: jnp.tanh(x @ unshard(w)))(params["experts"], halves)


def rematerialised(params, x):
    return scanned(params, x, jax.checkpoint(block, policy=zerojax.regather))


def with_another_policy(params, x):
    other = jax.checkpoint_policies.save_anything_except_these_names("hidden")

    def both(*args, **params):
        return zerojax.regather(*args, **params) and other(*args, **params)

    return scanned(params, x, jax.checkpoint(block, policy=both))


def conditional(params, x):
    return lax.cond(
        x[0, 0] > 1, lambda: x @ unshard(params["tied"]), lambda: x * unshard(params["small"])[0]
    )


def every_other_layer(params, x):
    """A branch that all devices take at the same time."""

    def body(x, xs):
        i, layer = xs
        return lax.cond(i % 2 == 0, lambda: block(x, layer), lambda: x), None

    return lax.scan(body, x, (jnp.arange(4), params["layers"]))[0]


def while_loop(params, x):
    def body(carry):
        return carry[0] + 1, lax.stop_gradient(jnp.tanh(carry[1] @ unshard(params["tied"])))

    _, y = lax.while_loop(lambda carry: carry[0] < 2, body, (0, lax.stop_gradient(x)))
    return x + y


def twice(params, x):
    return jnp.tanh(x @ unshard(params["tied"])) @ unshard(params["tied"]).T


def shared_by_all_layers(params, x):
    return scanned(params, x, lambda x, p: block(x, p) @ unshard(params["tied"]))


def in_two_loops(params, x):
    halves = jax.tree.map(lambda w: w.reshape(2, 2, *w.shape[1:]), params["layers"])
    return lax.scan(lambda x, half: (scanned({"layers": half}, x), None), x, halves)[0]


def rebuilt(params, x):
    leaves, treedef = jax.tree.flatten(params)
    return scanned(jax.tree.map(lambda w: w, treedef.unflatten(leaves)), x)


def padded_and_whole(params, x):
    return (x[:, :5] @ unshard(params["odd"])) * unshard(params["small"])


def frozen_by_the_model(params, x):
    return x @ unshard(lax.stop_gradient(params["tied"])) @ unshard(params["experts"])[1]


def jitted(params, x):
    return jax.jit(scanned)(params, x)


MODELS = [
    scanned, sliced, indexed, mapped, rematerialised, with_another_policy, every_other_layer,
    while_loop, twice, shared_by_all_layers, in_two_loops, rebuilt, padded_and_whole,
    frozen_by_the_model, jitted,
]  # fmt: skip


# At stage 1 the gradients of these add up on each device; with shards they would deadlock, or be
# put together from slices of different layers.
DIVERGING = {
    picked_by_data: "of which the data choose a slice",
    picked_in_a_loop: "of which the data choose a slice",
    conditional: "in a branch that the data choose",
    as_long_as_the_data_tell: "in a while loop that ends where the data tell",
}


def loss_of(model):
    return lambda params, x: jnp.mean(jnp.sin(model(params, x)) ** 2)


@functools.cache
def expected(model, parts):
    """On one device, which takes each device's microbatches one after another."""
    grads = [jax.grad(loss_of(model))(PARAMS, x) for x in X.reshape(parts, -1, 8)]
    return jax.tree.map(lambda *gs: np.asarray(sum(gs) / len(gs)), *grads)


@pytest.mark.parametrize(
    *product(
        model=MODELS,
        stage=[1, 2, 3],
        accumulate=[1, 2],
        mesh=["mesh8", "mesh2x4"],
        axis_type=[AxisType.Auto, AxisType.Explicit],
    )
)
def test_equals_one_device(x64, model, stage, accumulate, mesh, axis_type):
    replicate = ["replica"] if mesh == "mesh2x4" else []
    part = plan(mesh, axis_type, stage, replicate_axes=replicate)
    grad_fn = zerojax.value_and_grad(loss_of(model), part, accumulate=accumulate)
    _, grads = jax.jit(grad_fn)(part.place(PARAMS), X)
    assert "unshard" in repr(grad_fn) and "does not call" not in repr(grad_fn)
    want = expected(model, 8 * accumulate)
    chex.assert_trees_all_close(part.gather(grads), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("model", DIVERGING)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_devices_do_differently_is_reduced_at_the_end_at_stage_1(x64, model, accumulate):
    part = plan(stage=1)
    grad_fn = zerojax.value_and_grad(loss_of(model), part, accumulate=accumulate)
    _, grads = jax.jit(grad_fn)(part.place(PARAMS), X)
    chex.assert_trees_all_close(grads, expected(model, 8 * accumulate), rtol=1e-12, atol=1e-12)
    assert "depends on data" in repr(grad_fn)


@pytest.mark.parametrize("model", DIVERGING)
@pytest.mark.parametrize("stage", [2, 3])
def test_what_devices_do_differently_is_refused_at_stages_2_and_3(model, stage):
    part = plan(stage=stage)
    params = part.place(jax.tree.map(np.float32, PARAMS))
    with pytest.raises(ValueError, match="wait for ever") as error:
        zerojax.value_and_grad(loss_of(model), part)(params, X.astype(np.float32))
    assert DIVERGING[model] in str(error.value)


def test_the_same_model_runs_on_one_device_as_it_is():
    x = X.astype(np.float32)
    params = jax.tree.map(lambda w: w.astype(np.float32), PARAMS)
    plain = lax.scan(
        lambda x, p: (jnp.tanh(x @ p["w"] + p["b"]) @ p["v"], None), x, params["layers"]
    )[0]
    assert np.array_equal(scanned(params, x), plain)
    jaxpr = str(jax.make_jaxpr(scanned)(params, x))
    assert "all_gather" not in jaxpr and "shard_map" not in jaxpr


# Under plain jax.value_and_grad.


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("model", [rematerialised, twice, mapped, padded_and_whole, sliced])
def test_plain_gradients_of_shards_equal_one_device(x64, model, axis_type):
    part = plan("mesh8", axis_type)
    params = part.place(PARAMS)

    @jax.jit
    def gradients(params, x):
        return jax.grad(lambda p: loss_of(model)(part.shards(p), x))(params)

    grads = gradients(params, X)
    want = jax.grad(loss_of(model))(PARAMS, X)
    chex.assert_trees_all_close(part.gather(grads), want, rtol=1e-12, atol=1e-12)
    for leaf, g in zip(part.leaves, jax.tree.leaves(grads), strict=True):
        want = jax.sharding.NamedSharding(part.mesh, leaf.shard_spec)
        used = bool(np.any(g))  # XLA keeps the zeros of the others where it likes
        assert g.shape == leaf.stored, leaf.path
        assert g.sharding.is_equivalent_to(want, g.ndim) or not used, leaf.path


def test_plain_gradients_of_arrays_as_they_are_where_every_dim_divides(x64):
    params = {"layers": PARAMS["layers"]}
    part = zerojax.partition(params, make_mesh("mesh8"), stage=3, scan_dims=1)
    tx = zerojax.zero(zerojax.clip_by_global_norm(1.0), part)
    step = zerojax.train_step(jax.value_and_grad(loss_of(scanned)), tx, part)
    placed = part.place(params)
    after, _, metrics = step(placed, tx.init(placed), X)
    loss, grads = jax.value_and_grad(loss_of(scanned))(params, X)
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-12)
    norm = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(grads)))
    want = jax.tree.map(lambda p, g: p + g / max(norm, 1.0), params, grads)
    chex.assert_trees_all_close(part.gather(after), want, rtol=1e-12, atol=1e-12)


def test_below_stage_3_shards_are_the_parameters():
    part = plan(stage=2)
    params = part.place(jax.tree.map(np.float32, PARAMS))
    assert all(map(operator.is_, jax.tree.leaves(part.shards(params)), jax.tree.leaves(params)))


# `Shard` is not an array.

AS_ARRAYS = {
    "x + shard": lambda s: jnp.ones(3) + s,
    "shard * 2": lambda s: s * 2,
    "x @ shard": lambda s: jnp.ones((2, 5)) @ s,
    "numpy @ shard": lambda s: np.ones((2, 5)) @ s,
    "shard[0]": lambda s: s[0],
    "shard.T": lambda s: s.T,
    "shard.astype": lambda s: s.astype(jnp.bfloat16),
    "shard.shape": lambda s: s.shape,
    "-shard": lambda s: -s,
    "for row in shard": lambda s: list(s),
    "jnp.sum": lambda s: jnp.sum(s),
    "jnp.einsum": lambda s: jnp.einsum("ij,jk", jnp.ones((2, 5)), s),
    "lax.add": lambda s: lax.add(s, 1.0),
    "jax.nn.relu": lambda s: jax.nn.relu(s),
    "np.asarray": lambda s: np.asarray(s),
    "float": lambda s: float(s),
    "shard < 0": lambda s: s < 0,
}


@pytest.mark.parametrize("use", AS_ARRAYS.values(), ids=AS_ARRAYS)
def test_a_shard_used_as_an_array_says_what_to_do(use):
    part = plan()
    shard = part.shards(part.place(jax.tree.map(np.float32, PARAMS)))["odd"]
    with pytest.raises(TypeError) as error:
        use(shard)
    text = f"{error.value} {error.value.__cause__}"  # jax.lax adds its own words
    assert "Shard(['odd']: float32[5, 3], for zerojax.unshard)" in text


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_parameter_that_the_loss_forgot_to_unshard_is_named(stage):
    part = plan(stage=stage)
    grad_fn = zerojax.value_and_grad(
        lambda p, x: jnp.mean(scanned(p, x) @ p["tied"]), part, accumulate=2
    )
    params = part.place(jax.tree.map(np.float32, PARAMS))
    with pytest.raises(TypeError, match=r"Call zerojax.unshard(.|\n)*\['tied'\].*dot_general"):
        grad_fn(params, X.astype(np.float32))


def test_a_shard_is_a_pytree_node_that_prints():
    part = plan()
    shards = part.shards(part.place(jax.tree.map(np.float32, PARAMS)))
    assert "Shard(['odd']: float32[5, 3], for zerojax.unshard)" in repr(shards)
    leaves, treedef = jax.tree.flatten(shards)
    assert [x.shape for x in leaves] == [leaf.stored for leaf in part.leaves]
    again = treedef.unflatten(leaves)
    assert jax.tree.structure(again) == treedef and hash(treedef)
    assert isinstance(again["odd"], zerojax.Shard)
    assert not hasattr(shards["odd"], "no_such_attribute")


# What is computed on the way to unshard would be wrong on each device, without a word.


def l2(params, x):
    return jnp.mean(scanned(params, x)) + sum(jnp.sum(w**2) for w in jax.tree.leaves(params))


def transposed(params, x):
    return jnp.mean(x @ unshard(jax.tree.map(jnp.transpose, params["tied"])))


def cut_along_its_own_dim(params, x):
    return jnp.mean(x[:, :4] @ unshard(jax.tree.map(lambda w: w[: len(w) // 2], params["tied"])))


def scanned_over_its_own_dim(params, x):
    return lax.scan(lambda c, w: (c + jnp.sum(unshard(w)), None), 0.0, params["tied"])[0]


def inner_gradient(params, x):
    grads = jax.grad(lambda p: jnp.mean(x @ unshard(p)))(params["tied"])
    return sum(jnp.sum(g) for g in jax.tree.leaves(grads))


def swapped_in_a_carry(params, x):
    def body(carry, _):
        w, v, x = carry
        return (v, w, x @ unshard(w)), None

    v = jax.tree.map(lambda w: w[0], params["experts"])
    return jnp.mean(lax.scan(body, (params["tied"], v, x), None, length=2)[0][2])


def cast(params, x):
    half = jax.tree.map(lambda w: w.astype(jnp.float16), params["tied"])
    return jnp.mean(x @ unshard(half))


BAD = {
    l2: ["integer_pow|square", "experts", "odd"],
    transposed: ["transpose"],
    cut_along_its_own_dim: ["slice"],
    scanned_over_its_own_dim: ["scanned over along its sharded dim"],
    inner_gradient: ["differentiates with respect to shards"],
    swapped_in_a_carry: ["carried through it"],
    cast: ["convert_element_type"],
}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("loss", BAD, ids=lambda loss: loss.__name__)
def test_other_uses_of_shards_are_errors(loss, stage):
    part = plan(stage=stage)
    params = part.place(jax.tree.map(np.float32, PARAMS))
    with pytest.raises(TypeError, match=r"zerojax\.unshard") as error:
        zerojax.value_and_grad(loss, part)(params, X.astype(np.float32))
    assert "['tied']" in str(error.value)
    for fragment in BAD[loss]:
        assert any(option in str(error.value) for option in fragment.split("|"))


def test_auxiliary_output_cannot_be_a_shard():
    part = plan()

    def loss(params, x):
        return jnp.mean(scanned(params, x)), params["tied"]

    grad_fn = zerojax.value_and_grad(loss, part, has_aux=True, aux_reduction="mean")
    params = part.place(jax.tree.map(np.float32, PARAMS))
    with pytest.raises(TypeError, match=r"\['tied'\]: is returned"):
        grad_fn(params, X.astype(np.float32))


# Which formulation is in force.


def test_the_function_prints_how_it_differentiates():
    part = plan(stage=1)
    params = part.place(jax.tree.map(np.float32, PARAMS))
    x = X.astype(np.float32)

    def text(loss, **options):
        grad_fn = zerojax.value_and_grad(loss, part, **options)
        assert "not been traced" in repr(grad_fn)
        grad_fn(params, x)
        return repr(grad_fn)

    assert "by step" in text(lambda p, x: jnp.mean(x @ p["tied"]))
    many = text(loss_of(shared_by_all_layers), accumulate=2)
    assert "in the last microbatch's backward pass" in many
    assert "['tied']: after the last microbatch, since unshard sees it 4 times" in many
    assert "depends on data" in text(loss_of(conditional), accumulate=2)
    assert "sees" not in text(loss_of(scanned), accumulate=2)
    part = plan(stage=0)
    assert "since no parameter is sharded" in text(loss_of(scanned))
