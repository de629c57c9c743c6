"""Dtypes of computation, on the wire and of accumulators; scaled losses; frozen leaves."""

import functools
import re

import chex
import jax
import numpy as np
import optax
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
    reference,
)
from pairs import product

import zerojax
from tests.conftest import make_mesh
from zerojax._shard_uses import equations

LOSSES = {"step": loss_fn, "layer": layered_loss_fn}
MESHES = ["mesh8", "mesh4x2"]


def plan(mesh, params, axis_type=AxisType.Auto, **options):
    mesh = make_mesh(mesh, axis_type)
    specs = SPECS if "model" in mesh.axis_names else P()
    return zerojax.partition(params, mesh, specs, scan_dims=SCAN_DIMS, **options)


def batch(dtype):
    tokens, targets = make_batch()
    return tokens, targets.astype(dtype)


def cast(tree, dtype):
    floating = functools.partial(jnp.issubdtype, arg2=jnp.floating)
    return jax.tree.map(lambda x: x.astype(dtype) if floating(x.dtype) else x, tree)


@functools.cache
def exact():
    """The gradients at parameters rounded to bfloat16, in float64."""
    params = cast(cast(make_params(), jnp.bfloat16), np.float64)
    return jax.tree.map(np.asarray, reference(loss_fn, params, *batch(np.float64)))


@pytest.mark.parametrize(
    *product(
        stage=[1, 2, 3, 0],
        by=["step", "layer"],
        accumulate=[1, 4],
        mesh=MESHES,
        axis_type=[AxisType.Auto, AxisType.Explicit],
    )
)
def test_bfloat16_computation_with_float32_reduction(x64, stage, by, accumulate, mesh, axis_type):
    params = make_params(np.float32)
    part = plan(mesh, params, axis_type, stage=stage)
    grad_fn = zerojax.value_and_grad(
        LOSSES[by], part, accumulate=accumulate, compute_dtype=jnp.bfloat16,
        reduce_dtype=jnp.float32,
    )  # fmt: skip
    loss, grads = jax.jit(grad_fn)(part.place(params), *batch(jnp.bfloat16))
    want_loss, want = exact()
    assert float(loss) == pytest.approx(float(want_loss), rel=2**-7)
    grads = part.gather(grads)
    chex.assert_trees_all_equal_dtypes(grads, params)
    total = np.sqrt(sum(np.sum(np.square(b)) for b in jax.tree.leaves(want)))
    for leaf, a, b in zip(part.leaves, jax.tree.leaves(grads), jax.tree.leaves(want), strict=True):
        # A dozen operations lie between a weight and the loss, forwards and back, and each rounds
        # to eight bits: errors of 2**-9 that add up like a random walk, to about 2**-6. What is
        # summed to a scalar, here of 1,536 products, cancels and keeps the errors of its addends.
        error = np.linalg.norm(np.float64(a) - b)
        floor = total * (2**-9 if b.ndim else 2**-6)
        assert error < 2**-5 * np.linalg.norm(b) + floor, (leaf.path, error)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("by", LOSSES)
@pytest.mark.parametrize("reduce_dtype", [None, jnp.float32])
def test_what_crosses_the_wire(stage, by, reduce_dtype):
    """In the lowered program: CPUs compile 16-bit collectives to float32 ones."""
    params = make_params(np.float32)
    part = plan("mesh8", params, stage=stage)
    grad_fn = zerojax.value_and_grad(
        LOSSES[by], part, compute_dtype=jnp.bfloat16, reduce_dtype=reduce_dtype
    )
    text = jax.jit(grad_fn).lower(part.place(params), *batch(jnp.bfloat16)).as_text()
    result = r".*?-> tensor<(?:\d+x)*(\w+)>"
    gathered = re.findall(r"stablehlo\.all_gather" + result, text)
    reduced = re.findall(r"stablehlo\.reduce_scatter" + result, text, re.DOTALL)
    assert set(gathered) == ({"bf16"} if stage == 3 else set())
    assert set(reduced) == {"bf16" if reduce_dtype is None else "f32"}


def test_a_narrow_reduce_dtype_halves_what_accumulators_send():
    params = make_params(np.float32)
    part = plan("mesh8", params)
    grad_fn = zerojax.value_and_grad(loss_fn, part, accumulate=2, reduce_dtype=jnp.bfloat16)
    text = jax.jit(grad_fn).lower(part.place(params), *batch(np.float32)).as_text()
    reduced = re.findall(r"stablehlo\.reduce_scatter.*?-> tensor<(?:\d+x)*(\w+)>", text, re.DOTALL)
    assert set(reduced) == {"bf16"}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    "often, reduce_dtype, dtype",
    [(1, None, jnp.bfloat16), (2, None, np.float32), (1, np.float32, np.float32)],
)
def test_gradients_by_layer_are_kept_as_wide_as_they_are(stage, often, reduce_dtype, dtype):
    """In the dtype in which they crossed the wire; several of one weight add up in float32."""
    params = {"w": jnp.ones((2, 16), jnp.bfloat16)}
    part = zerojax.partition(params, make_mesh("mesh8"), stage=stage, scan_dims=1)

    def loss(params, x):
        def layer(total, w):
            for power in range(0, -9 * often, -9):
                total += jnp.sum(zerojax.unshard(w)).astype(np.float32) * x[0] * 2.0**power
            return total, None

        return jax.lax.scan(layer, jnp.float32(0), params["w"])[0]

    grad_fn = zerojax.value_and_grad(
        loss, part, accumulate=2, reduce_dtype=reduce_dtype, grad_dtype=np.float32
    )
    x = np.ones(16, np.float32)
    x[14:] += 2**-5 if reduce_dtype else 0  # on one device; of the mean that is 2**-8
    grads = grad_fn(part.place(params), x)[1]["w"]
    expected = 1 + (2**-9 if often > 1 else 0) + (2**-8 if reduce_dtype else 0)
    np.testing.assert_array_equal(np.asarray(grads), np.float32(expected))
    jaxpr = jax.make_jaxpr(grad_fn)(part.place(params), x)
    scans = [eqn for eqn in equations(jaxpr.jaxpr) if eqn.primitive.name == "scan"]
    shards = [v.aval.dtype for eqn in scans for v in eqn.outvars if v.aval.shape == (2, 2)]
    assert shards == [np.float32, dtype]  # of microbatches, and in each of layers


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_float16_does_not_overflow_where_the_mean_does_not(stage, by_layer, accumulate):
    params = {"w": jnp.zeros(16, jnp.float16)}
    part = zerojax.partition(params, make_mesh("mesh8"), stage=stage)

    def loss(params, x):
        w = zerojax.unshard(params["w"]) if by_layer else params["w"]
        return jnp.mean(x.astype(jnp.float16) * jnp.sum(w))

    grad_fn = zerojax.value_and_grad(loss, part, accumulate=accumulate)
    _, grads = grad_fn(part.place(params), jnp.full(16, 3e4))
    assert grads["w"].dtype == jnp.float16
    # Eight addends of an eighth each: the sum itself rounds.
    np.testing.assert_allclose(np.float32(grads["w"]), 3e4, rtol=2e-3)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum", "weighted"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_scale_changes_what_is_representable_and_nothing_else(stage, reduction, accumulate):
    """Gradients of 2**-26 are zero in float16; scaled by 2**15 they are exact."""
    params = {"w": jnp.zeros(16, jnp.float16)}
    part = zerojax.partition(params, make_mesh("mesh8"), stage=stage)

    def loss(params, x):
        values = jnp.mean(params["w"] * x.astype(jnp.float16)[:, None], 1)  # 2**-4 each
        total = jnp.sum(values.astype(jnp.float32))
        ones = jnp.ones((), jnp.float32) * len(x)
        return {"mean": total / len(x), "sum": total, "weighted": (total, ones)}[reduction]

    x = jnp.full(32, 2.0**-22)
    grad_fn = zerojax.value_and_grad(loss, part, reduction=reduction, accumulate=accumulate)
    placed = part.place(params)
    _, plain = grad_fn(placed, x)
    assert plain["w"].dtype == jnp.float16 and not np.any(plain["w"])
    value, scaled = jax.jit(grad_fn)(placed, x, loss_scale=jnp.float32(2**15))
    assert scaled["w"].dtype == jnp.float32 and float(value) == 0
    want = 2.0**-26 * (32 if reduction == "sum" else 1)
    np.testing.assert_array_equal(np.asarray(scaled["w"]), np.float32(want))


def test_the_scaled_loss_is_returned_unscaled():
    part = zerojax.partition({"w": jnp.ones(8)}, make_mesh("mesh8"))
    grad_fn = zerojax.value_and_grad(lambda p, x: jnp.mean(x * jnp.sum(p["w"])), part)
    loss, grads = grad_fn(part.place({"w": jnp.ones(8)}), jnp.ones(8), loss_scale=jnp.float32(512))
    assert float(loss) == 8.0 and np.all(np.asarray(grads["w"]) == 1.0)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("devices", [0, 1, 8])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_bad_example_on_any_device_is_seen_by_all(bad, devices, stage):
    part = zerojax.partition({"w": jnp.ones(16), "b": jnp.ones(3)}, make_mesh("mesh8"), stage=stage)
    params = part.place({"w": jnp.ones(16), "b": jnp.ones(3)})
    x = np.ones(16, np.float32)
    x[: 2 * devices : 2] = bad

    def loss(params, x):
        return jnp.mean(x * (jnp.sum(params["w"]) + jnp.sum(params["b"])))

    _, grads = zerojax.value_and_grad(loss, part, accumulate=2)(params, x)
    for g in jax.tree.leaves(grads):
        assert np.isfinite(np.asarray(g)).all() == (devices == 0)
        assert devices == 0 or not np.isfinite(np.asarray(g)).any()


# Frozen parameters.

LORA = {
    "layers": {"w": (3, 16, 16), "a": (3, 16, 2), "b": (3, 2, 16)},
    "odd": (13, 3),
    "head": (16, 8),
}
MASK = {"layers": {"w": False, "a": True, "b": True}, "odd": False, "head": True}


def lora_params():
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda s: rng.normal(size=s) / 3, LORA, is_leaf=lambda x: isinstance(x, tuple)
    )


def lora_loss(params, x, unshard=lambda w: w):
    def layer(x, p):
        p = unshard(p)
        return jnp.tanh(x @ p["w"] + x @ p["a"] @ p["b"]), None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    x = x + jnp.sum(unshard(params["odd"]))
    return jnp.mean((x @ unshard(params["head"])) ** 2)


LORA_LOSSES = {
    "step": lora_loss,
    "layer": lambda params, x: lora_loss(params, x, zerojax.unshard),
}
LORA_SCANS = {"layers": 1, "odd": 0, "head": 0}


@pytest.mark.parametrize(
    *product(
        stage=[1, 2, 3],
        by=["step", "layer"],
        accumulate=[1, 2],
        optimizer=["masked", "multi_transform"],
        axis_type=[AxisType.Auto, AxisType.Explicit],
    )
)
def test_frozen_parameters_keep_their_bits(x64, stage, by, accumulate, optimizer, axis_type):
    params = lora_params()
    mesh = make_mesh("mesh8", axis_type)
    part = zerojax.partition(params, mesh, P(), stage=stage, scan_dims=LORA_SCANS)
    inner = zerojax.zero(optax.adam(1e-2), part)
    if optimizer == "masked":
        tx = optax.masked(inner, MASK)
    else:
        labels = jax.tree.map(lambda train: "train" if train else "freeze", MASK)
        tx = optax.multi_transform({"train": inner, "freeze": optax.set_to_zero()}, labels)
    grad_fn = zerojax.value_and_grad(LORA_LOSSES[by], part, accumulate=accumulate, trainable=MASK)
    placed, x = part.place(params), np.random.default_rng(1).normal(size=(32, 16))
    placed, state = zerojax.init(lambda p: p, tx, part)(placed)
    trained = [leaf for leaf, mask in zip(part.leaves, jax.tree.leaves(MASK), strict=True) if mask]
    held = sum(x.addressable_shards[0].data.size for x in jax.tree.leaves(state))
    moments = sum(2 * np.prod(leaf.stored) // 8 for leaf in trained)
    assert moments <= held <= moments + 4  # and counts: nothing for what is frozen

    step = zerojax.train_step(grad_fn, tx, part)
    plain, plain_state = params, optax.adam(1e-2).init({"t": params})
    losses = []
    for _ in range(2):
        placed, state, metrics = step(placed, state, x)
        loss, grads = jax.value_and_grad(lora_loss)(plain, x)
        grads = jax.tree.map(lambda g, mask: g if mask else g * 0, grads, MASK)
        updates, plain_state = optax.adam(1e-2).update({"t": grads}, plain_state)
        plain = optax.apply_updates(plain, updates["t"])
        losses.append((float(metrics["loss"]), float(loss)))
    np.testing.assert_allclose(*zip(*losses, strict=True), rtol=1e-12)
    after = part.gather(placed)
    chex.assert_trees_all_close(after, plain, rtol=1e-11, atol=1e-11)
    for mask, a, b in zip(*map(jax.tree.leaves, (MASK, after, params)), strict=True):
        assert mask or np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("by", LORA_LOSSES)
def test_frozen_parameters_cost_no_reduction(stage, by):
    params = jax.tree.map(np.float32, lora_params())
    part = zerojax.partition(params, make_mesh("mesh8"), stage=stage, scan_dims=LORA_SCANS)
    grad_fn = zerojax.value_and_grad(LORA_LOSSES[by], part, trainable=MASK, accumulate=2)
    x = np.ones((32, 16), np.float32)
    compiled = jax.jit(grad_fn).lower(part.place(params), x).compile()
    found = zerojax.audit(compiled, part.mesh).collectives
    gathered = sum(c.elements * c.trips for c in found if c.kind == "all-gather")
    reduced = {c.elements for c in found if c.kind == "reduce-scatter"}
    frozen = {3 * 16 * 16, 16 * 16, 16 * 3}
    assert reduced and not reduced & frozen
    assert (gathered >= 3 * 16 * 16 + 16 * 3) == (stage == 3)


def test_trainable_must_be_a_prefix_of_the_parameters():
    part = zerojax.partition({"w": jnp.ones(8)}, make_mesh("mesh8"))
    with pytest.raises(ValueError, match="trainable must be a tree of this structure"):
        zerojax.value_and_grad(lambda p: jnp.sum(p["w"]), part, trainable={"v": True})
