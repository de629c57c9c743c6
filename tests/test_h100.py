"""Whole training steps as XLA compiles them for H100s: what is computed, sent and held."""

import functools
import os
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from tests.pairs import product
from zerojax import _xla_options

LAYERS, WIDTH, HEADS, WORDS, TIME, ACCUMULATE = 2, 128, 2, 512, 64, 4
SHAPES = {
    "embed": (WORDS, WIDTH),
    "layers": {
        "qkv": (LAYERS, WIDTH, 3 * WIDTH),
        "out": (LAYERS, WIDTH, WIDTH),
        "up": (LAYERS, WIDTH, 4 * WIDTH),
        "bias": (LAYERS, 4 * WIDTH),
        "down": (LAYERS, 4 * WIDTH, WIDTH),
    },
}
SPECS = {
    "embed": P("model"),
    "layers": {
        "qkv": P(None, None, "model"),
        "out": P(None, "model"),
        "up": P(None, None, "model"),
        "bias": P(None, "model"),
        "down": P(None, "model"),
    },
}
SIZE = WORDS * WIDTH + LAYERS * (12 * WIDTH**2 + 4 * WIDTH)  # parameters


def loss_fn(params, tokens, by_layer):
    unshard = zerojax.unshard if by_layer else lambda weights: weights
    embed = unshard(params["embed"])
    one_hot = jax.nn.one_hot(tokens, WORDS, dtype=embed.dtype)
    x = one_hot @ embed

    def layer(x, weights):
        weights = unshard(weights)
        qkv = (x @ weights["qkv"]).reshape(*x.shape[:2], HEADS, -1)
        q, k, v = jnp.split(qkv, 3, -1)
        scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), -1)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", scores, v)
        x = x + mixed.reshape(x.shape) @ weights["out"]
        return x + jax.nn.gelu(x @ weights["up"] + weights["bias"]) @ weights["down"], None

    x, _ = jax.lax.scan(jax.checkpoint(layer, policy=zerojax.regather), x, params["layers"])
    logits = (x @ embed.T).astype(np.float32)
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * one_hot, -1))


def flops(tokens):
    """Operations of all matrix products on these tokens: forward, and twice that backward."""
    layer = 12 * WIDTH**2 + 2 * TIME * WIDTH  # weights, and attention
    head, lookup = 3 * WORDS * WIDTH, 2 * WORDS * WIDTH  # tokens have no gradient
    return 2 * tokens * (3 * LAYERS * layer + head + lookup)


@pytest.mark.gpu_compile
@pytest.mark.parametrize(
    *product(
        stage=[1, 2, 3], by_layer=[False, True], hosts=[1, 8], model=[1, 2],
        recommended=[False, True],
    )
)  # fmt: skip
def test_a_transformer(stage, by_layer, hosts, model, recommended):
    devices = zerojax.topology("h100", hosts=hosts)
    mesh = Mesh(devices.reshape(-1, model), ("data", "model"))
    data = mesh.shape["data"]
    shapes = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16), SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )  # fmt: skip
    scan_dims = {"embed": 0, "layers": 1}
    part = zerojax.partition(
        shapes, mesh, SPECS if model > 1 else P(), stage=stage, scan_dims=scan_dims
    )
    tx = zerojax.zero(optax.adamw(1e-3), part, master_dtype=np.float32)
    loss = functools.partial(loss_fn, by_layer=by_layer)
    grad_fn = zerojax.value_and_grad(loss, part, accumulate=ACCUMULATE, grad_dtype=np.float32)

    split = NamedSharding(mesh, P("data"))
    batch = jax.ShapeDtypeStruct((data * ACCUMULATE, TIME), np.int32, sharding=split)
    step = zerojax.train_step(grad_fn, tx, part)
    program = zerojax.compile_for(
        step.jitted, part.abstract_params(), zerojax.abstract_state(tx, part), batch,
        topology=devices,
        xla_options=zerojax.xla_options("h100", stage=stage) if recommended else None,
    )  # fmt: skip

    assert ("by layer" in repr(grad_fn)) == by_layer
    # Parameters in bfloat16; a master and two moments in float32, and Adam's count; tokens.
    held = 2 * SIZE // (data if stage == 3 else 1) + 3 * 4 * SIZE // data
    arguments = program.memory.argument_size_in_bytes
    assert arguments == held // model + 4 + ACCUMULATE * TIME * 4
    assert program.flops == pytest.approx(flops(ACCUMULATE * TIME) / model, rel=5e-3)

    report = zerojax.audit(program, mesh)
    expected = zerojax.expected_communication(
        part, accumulate=ACCUMULATE, by_layer={"embed": False, "layers": True} if by_layer else None
    )
    report.check(expected)  # nothing else that is parameter-sized, over `model` neither
    for kind in ("reduce-scatter", "all-gather"):
        assert report.bytes(kind, "data") == pytest.approx(expected.bytes(kind), rel=0.02)
    # The loss and the norm.
    assert report.bytes(axis="data") == pytest.approx(expected.bytes(), rel=0.02)
    if stage == 1:  # the least that there can be
        least = (4 + 2) * SIZE // model * (data - 1) // data
        assert report.bytes(axis="data") == pytest.approx(least, rel=0.02)


@pytest.mark.parametrize("stage", range(4))
def test_the_options_are_those_that_this_xla_knows(stage):
    options = zerojax.xla_options("h100", stage=stage)
    assert len(options) == (0, 3, 3, 5)[stage]  # one of two names of an option
    assert jax.jit(lambda x: x + 1, compiler_options=options)(1) == 2
    assert not _xla_options._is_known("xla_no_such_option", 1)


def test_the_options_as_flags_of_a_process():
    flags = zerojax.xla_flags(zerojax.xla_options("h100", stage=3))
    assert len(flags.split()) == 5
    environment = {**os.environ, "XLA_FLAGS": flags}  # with an unknown one the process would end
    code = [sys.executable, "-c", "import jax; jax.devices()"]
    subprocess.run(code, env=environment, check=True, capture_output=True)


@pytest.mark.parametrize(
    "arguments, message",
    [(("h900", 1), "unknown chip 'h900'"), (("h100", 4), "stage must be 0, 1, 2 or 3, got 4")],
)
def test_options_for_what_there_is_not(arguments, message):
    with pytest.raises(ValueError, match=message):
        zerojax.xla_options(arguments[0], stage=arguments[1])
