"""`value_and_grad` against one device: numbers, shardings, and what it does with arguments."""

import functools

import chex
import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from models import (
    SCAN_DIMS,
    SPECS,
    layered_loss_fn,
    loss_fn,
    make_batch,
    make_params,
    per_example,
    reference,
)
from pairs import product

import zerojax
from tests.conftest import make_mesh

TIGHT = {"rtol": 1e-12, "atol": 1e-12}


def plan(mesh, params=None, **options):
    params = make_params() if params is None else params
    specs = SPECS if "model" in mesh.axis_names else P()
    return zerojax.partition(params, mesh, specs, scan_dims=SCAN_DIMS, **options)


def sum_loss(params, tokens, targets, *unshard):
    return jnp.sum(per_example(params, tokens, targets, *unshard))


def weighted_loss(params, tokens, targets, *unshard):
    weights = (tokens[:, 0] % 3).astype(targets.dtype)
    return jnp.sum(weights * per_example(params, tokens, targets, *unshard)), jnp.sum(weights)


# By step, by layer, and on one device.
LOSSES = {
    "mean": (loss_fn, layered_loss_fn, loss_fn),
    "sum": (sum_loss, lambda *args: sum_loss(*args, zerojax.unshard), sum_loss),
    "weighted": (
        weighted_loss,
        lambda *args: weighted_loss(*args, zerojax.unshard),
        lambda *args: jnp.divide(*weighted_loss(*args)),
    ),
}


@functools.cache
def expected(reduction):
    return jax.tree.map(np.asarray, reference(LOSSES[reduction][2], make_params(), *make_batch()))


@pytest.mark.parametrize(
    *product(
        stage=[1, 2, 3, 0],
        accumulate=[1, 2, 4],
        by=["step", "layer"],
        mesh=["mesh8", "mesh4x2", "mesh2x4", "mesh1"],
        axis_type=[AxisType.Auto, AxisType.Explicit],
        reduction=["mean", "sum", "weighted"],
        how=["jit", "eager"],
    )
)
def test_equals_one_device(x64, stage, accumulate, by, mesh, axis_type, reduction, how):
    mesh = make_mesh(mesh, axis_type)
    replicate = [a for a in mesh.axis_names if a == "replica"]
    part = plan(mesh, stage=stage, replicate_axes=replicate)
    grad_fn = zerojax.value_and_grad(
        LOSSES[reduction][by == "layer"], part, accumulate=accumulate, reduction=reduction
    )
    call = jax.jit(grad_fn) if how == "jit" else grad_fn
    params = part.place(make_params())
    loss, grads = call(params, *make_batch())
    chex.assert_trees_all_close((loss, part.gather(grads)), expected(reduction), **TIGHT)
    chex.assert_trees_all_equal_shapes_and_dtypes(grads, params)
    shards = any(leaf.shard_axes for leaf in part.leaves)
    assert ("by layer" if shards and by == "layer" else "by step") in repr(grad_fn)
    for leaf, grad in zip(part.leaves, jax.tree.leaves(grads), strict=True):
        if not leaf.padded or stage == 3:
            want = jax.sharding.NamedSharding(mesh, leaf.shard_spec)
            assert grad.sharding.is_equivalent_to(want, grad.ndim), leaf.path


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("mesh", ["mesh8", "mesh4x2"])
def test_float32_gradients(mesh, accumulate):
    part = plan(make_mesh(mesh), make_params(np.float32))
    tokens, targets = make_batch()
    targets = targets.astype(np.float32)
    params = part.place(make_params(np.float32))
    _, grads = zerojax.value_and_grad(loss_fn, part, accumulate=accumulate)(params, tokens, targets)
    _, want = reference(loss_fn, make_params(np.float32), tokens, targets)
    for leaf, a, b in zip(part.leaves, jax.tree.leaves(grads), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b) + 1e-7, leaf.path


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_sixteen_bits_do_not_overflow_where_the_mean_does_not(stage, dtype):
    part = zerojax.partition({"w": jnp.zeros(16, dtype)}, make_mesh("mesh8"), stage=stage)
    big = 3e4 if dtype == jnp.float16 else 1e38  # two of them still add up in float32

    def loss(params, x):
        return jnp.mean(x.astype(dtype) * jnp.sum(params["w"]))

    params = part.place({"w": jnp.zeros(16, dtype)})
    for accumulate in (1, 2):
        grad_fn = zerojax.value_and_grad(loss, part, accumulate=accumulate)
        _, grads = grad_fn(params, jnp.full(16, big))
        assert grads["w"].dtype == dtype
        # Eight addends of an eighth each: the sum itself rounds.
        np.testing.assert_allclose(
            grads["w"].astype(jnp.float32), big, rtol=2 * float(jnp.finfo(dtype).eps)
        )


def test_grad_dtype_keeps_the_precision_of_the_accumulators():
    part = zerojax.partition({"w": jnp.zeros(8, jnp.bfloat16)}, make_mesh("mesh8"))
    grad_fn = zerojax.value_and_grad(
        lambda p, x: jnp.mean(x @ p["w"].astype(jnp.float32)), part,
        accumulate=2, grad_dtype=jnp.float32,
    )  # fmt: skip
    x = np.full((16, 8), 1.0, np.float32)
    x[1::2] += 2**-6  # the mean needs more bits than bfloat16 has
    _, grads = grad_fn(part.place({"w": jnp.zeros(8, jnp.bfloat16)}), x)
    assert grads["w"].dtype == jnp.float32
    np.testing.assert_array_equal(grads["w"], x.mean(0))


# Arguments.


def linear(mesh="mesh8", **options):
    part = zerojax.partition({"w": jnp.ones((8, 4))}, make_mesh(mesh), **options)
    return part, part.place({"w": jnp.ones((8, 4))})


def test_scalars_tables_and_per_example_arguments():
    part, params = linear()
    x, positions = np.random.default_rng(0).normal(size=(16, 8)), np.arange(16.0)[:, None]

    def loss(params, batch, scale, table):
        return jnp.mean((batch["x"] @ params["w"]) * scale) + jnp.sum(table[-1] * params["w"])

    grad_fn = zerojax.value_and_grad(loss, part, accumulate=2, batch_specs=(None, None, P()))
    got = grad_fn(params, {"x": x}, 3.0, positions)
    want = jax.value_and_grad(loss)({"w": jnp.ones((8, 4))}, {"x": x}, 3.0, positions)
    chex.assert_trees_all_close(got, want, rtol=1e-5)


def test_batch_specs_may_split_another_dim():
    part, params = linear()
    x = np.random.default_rng(0).normal(size=(3, 16, 8)).astype(np.float32)
    grad_fn = zerojax.value_and_grad(
        lambda p, x: jnp.mean((x @ p["w"]) ** 2), part, batch_specs=P(None, "data")
    )
    want = jax.value_and_grad(lambda p, x: jnp.mean((x @ p["w"]) ** 2))({"w": jnp.ones((8, 4))}, x)
    chex.assert_trees_all_close(grad_fn(params, x), want, rtol=1e-5)


@pytest.mark.parametrize("stage", [1, 2])
def test_prng_keys_differ_by_device_and_microbatch(stage):
    part, params = linear(stage=stage)

    def loss(params, x, key):
        return jnp.mean(x) + 0 * jnp.sum(params["w"]), jax.random.uniform(key, (1,))

    grad_fn = zerojax.value_and_grad(loss, part, accumulate=2, has_aux=True, aux_reduction="concat")
    (_, draws), _ = grad_fn(params, jnp.ones((16, 1)), jax.random.key(0))
    assert len(set(np.asarray(draws).tolist())) == 16


def test_prng_key_is_untouched_on_one_device():
    part, params = linear("mesh1")
    key = jax.random.key(3)

    def loss(params, x, key):
        return jnp.mean(x) * jnp.sum(params["w"]), jax.random.uniform(key, (4,))

    grad_fn = zerojax.value_and_grad(loss, part, has_aux=True, aux_reduction="concat")
    (_, draws), _ = grad_fn(params, jnp.ones((4, 1)), key)
    np.testing.assert_array_equal(draws, jax.random.uniform(key, (4,)))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_aux(axis_type, accumulate):
    part = zerojax.partition({"w": jnp.ones((8, 4))}, make_mesh("mesh8", axis_type))
    params = part.place({"w": jnp.ones((8, 4))})
    x = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)

    def loss(params, x):
        y = x @ params["w"]
        aux = {
            "scalar": jnp.mean(x),
            "vector": jnp.mean(x, 0),
            "rows": y,
            "index": jnp.argmax(y, -1),
        }
        return jnp.mean(y**2), aux

    how = {"scalar": None, "vector": "mean", "rows": "concat", "index": "concat"}
    grad_fn = zerojax.value_and_grad(
        loss, part, accumulate=accumulate, has_aux=True, aux_reduction=how
    )
    got = jax.jit(grad_fn)(params, x)
    want = jax.value_and_grad(loss, has_aux=True)({"w": jnp.ones((8, 4))}, x)
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_equal_dtypes(got, want)


def test_a_leaf_sharded_over_data_is_neither_summed_nor_sharded_again(x64):
    """An expert-parallel weight: each device holds its experts, tokens come by all_to_all."""
    rng = np.random.default_rng(0)
    params = {"experts": rng.normal(size=(8, 6, 6)), "w": rng.normal(size=(6, 16))}
    mesh = make_mesh("mesh8")
    part = zerojax.partition(params, mesh, {"experts": P("data"), "w": P()})
    x = rng.normal(size=(64, 6))

    def loss(params, x):  # the i-th token of each device goes to the i-th expert
        sent = jax.lax.all_to_all(x[:, None], "data", 0, 1, tiled=True)[0]
        back = jnp.tanh(sent @ params["experts"][0])
        x = jax.lax.all_to_all(back[None], "data", 1, 0, tiled=True)[:, 0]
        return jnp.mean((x @ params["w"]) ** 2)

    def whole(params, x):
        y = jnp.tanh(jnp.einsum("tei,eij->tej", x.reshape(8, 8, 6), params["experts"]))
        return jnp.mean((y.reshape(64, 6) @ params["w"]) ** 2)

    got = jax.jit(zerojax.value_and_grad(loss, part))(part.place(params), x)
    chex.assert_trees_all_close(got, reference(whole, params, x), **TIGHT)
    assert got[1]["experts"].sharding.spec[0] == "data"


def test_microbatches_of_an_argument_split_on_another_dim():
    """Dim 0 is cut into microbatches only, and need not divide by the devices."""
    part, params = linear()
    x = np.random.default_rng(0).normal(size=(6, 16, 8)).astype(np.float32)

    def loss(params, x):
        return jnp.mean((x @ params["w"]) ** 2)

    grad_fn = zerojax.value_and_grad(loss, part, accumulate=3, batch_specs=P(None, "data"))
    want = jax.value_and_grad(loss)({"w": jnp.ones((8, 4))}, x)
    chex.assert_trees_all_close(grad_fn(params, x), want, rtol=1e-5)
    with pytest.raises(ValueError, match=r"dim 0 of \(6, 16, 8\) .* x 4 microbatches"):
        zerojax.value_and_grad(loss, part, accumulate=4, batch_specs=P(None, "data"))(params, x)


def test_an_old_key_may_be_shared_by_all_devices():
    part, params = linear()
    key = jax.random.key_data(jax.random.key(0))

    def loss(params, x, key):
        return jnp.mean((x @ params["w"]) ** 2) + 0 * key[0].astype(jnp.float32)

    x = jnp.ones((16, 8))
    got = zerojax.value_and_grad(loss, part, batch_specs=(None, P()))(params, x, key)
    want = jax.value_and_grad(loss)({"w": jnp.ones((8, 4))}, x, key)
    chex.assert_trees_all_close(got, want, rtol=1e-5)
