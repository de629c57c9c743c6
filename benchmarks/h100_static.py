"""Formulations of ZeRO, compiled for H100s without one, beside hand-written baselines.

Usage: python benchmarks/h100_static.py [--hosts 8] [--json FILE]

A transformer of 1.275 B bfloat16 parameters, scanned and rematerialised layer by layer, with
float32 masters and Adam, in 4 microbatches of 4 x 2048 tokens on each device.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from jax import lax
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax

LAYERS, WIDTH, HEADS, WORDS = 24, 2048, 16, 32768
TIME, BATCH, ACCUMULATE = 2048, 4, 4  # BATCH: on each device in one microbatch
SHAPES = {
    "embed": (WORDS, WIDTH),
    "layers": {
        "qkv": (LAYERS, WIDTH, 3 * WIDTH),
        "out": (LAYERS, WIDTH, WIDTH),
        "up": (LAYERS, WIDTH, 4 * WIDTH),
        "down": (LAYERS, 4 * WIDTH, WIDTH),
    },
}
SHARDS = {"embed": P("data"), "layers": P(None, "data")}
ADAM = optax.adamw(1e-4)


def loss_fn(params: Any, tokens: jax.Array, layer_weights: Any = None, pin: Any = None) -> Any:
    """The mean loss of next tokens; `layer_weights` makes weights whole where they are used."""
    whole = layer_weights or (lambda weights: weights)
    pin = pin or (lambda x: x)
    embed = whole(params["embed"])
    x = pin(embed[tokens])

    def normal(x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype)

    def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        weights = whole(weights)
        q, k, v = jnp.split((normal(x) @ weights["qkv"]).reshape(*x.shape[:2], HEADS, -1), 3, -1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1]).astype(q.dtype)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)
        x = x + mixed.reshape(x.shape) @ weights["out"]
        return pin(x + jax.nn.gelu(normal(x) @ weights["up"]) @ weights["down"]), None

    x, _ = lax.scan(jax.checkpoint(layer), x, params["layers"])
    logits = (normal(x) @ embed.T)[:, :-1].astype(jnp.float32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))


def model_flops() -> int:
    """Operations on one device: forward, twice backward, and once more all but the last product."""
    products = 12 * WIDTH**2 + 2 * TIME * WIDTH
    layer = 4 * products - 4 * WIDTH**2
    return 2 * ACCUMULATE * BATCH * TIME * (LAYERS * layer + 3 * WORDS * WIDTH)


# The library's formulations.


def library(mesh: Mesh, stage: int, unshard: Any, plain: bool = False) -> tuple[Any, ...]:
    shapes = tree_of(SHAPES, lambda shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    scan_dims = {"embed": 0, "layers": 1}
    part = zerojax.partition(shapes, mesh, P(), stage=stage, scan_dims=scan_dims)
    tx = zerojax.zero(ADAM, part, master_dtype=jnp.float32)
    if plain:
        loss = partial(loss_fn, layer_weights=unshard, pin=over_data(mesh))
        grad_fn = microbatches(lambda params, tokens: loss(part.shards(params), tokens))
        tokens = on(mesh, (ACCUMULATE, BATCH * mesh.size, TIME), P(None, "data"), jnp.int32)
    else:
        grad_fn = zerojax.value_and_grad(
            partial(loss_fn, layer_weights=unshard), part,
            accumulate=ACCUMULATE, grad_dtype=jnp.float32,
        )  # fmt: skip
        tokens = on(mesh, (ACCUMULATE * BATCH * mesh.size, TIME), P("data"), jnp.int32)
    params = jax.tree.map(
        lambda leaf, spec: on(mesh, part.param_shape(leaf), spec, jnp.bfloat16),
        part.treedef.unflatten(part.leaves), part.param_specs,
    )  # fmt: skip
    return zerojax.train_step(grad_fn, tx, part), params, zerojax.abstract_state(tx, part), tokens


# The same by hand.


def microbatches(loss: Callable[..., Any], dtype: Any = jnp.float32) -> Callable[..., Any]:
    """`jax.value_and_grad` of a loss, averaged over microbatches that are stacked on dim 0."""

    def grad_fn(params: Any, tokens: jax.Array) -> Any:
        def add(total: Any, tokens: jax.Array) -> tuple[Any, None]:
            value, grads = jax.value_and_grad(loss)(params, tokens)
            return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, (value, grads)), None

        zeros = jnp.zeros((), dtype), jax.tree.map(lambda p: jnp.zeros_like(p, dtype), params)
        total, _ = lax.scan(add, zeros, tokens)
        return jax.tree.map(lambda t: t / ACCUMULATE, total)

    return grad_fn


def update(grads: Any, state: Any) -> tuple[Any, Any]:
    """Adam on float32 masters; the new parameters are the masters rounded."""
    master, adam = state
    updates, adam = ADAM.update(grads, adam, master)
    master = optax.apply_updates(master, updates)
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), master), (master, adam)


def by_constraints(mesh: Mesh, stage: int, whole: Any = None, pin: Any = None) -> tuple[Any, ...]:
    """Plain jit: parameters, and optimizer state, where their shardings say."""
    sharded, replicated = shardings(mesh, SHARDS), shardings(mesh, P())
    at, state_at = (sharded if stage == 3 else replicated), (sharded if stage else replicated)
    grad_fn = microbatches(partial(loss_fn, layer_weights=whole, pin=pin))

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        loss, grads = grad_fn(params, tokens)
        params, (master, (adam, *rest)) = update(
            lax.with_sharding_constraint(grads, state_at), state
        )
        adam = adam._replace(mu=pinned(adam.mu, state_at), nu=pinned(adam.nu, state_at))
        return pinned(params, at), (pinned(master, state_at), (adam, *rest)), loss

    tokens = on(mesh, (ACCUMULATE, BATCH * mesh.size, TIME), P(None, "data"), jnp.int32)
    params, state = arguments(at, state_at)
    return jax.jit(step, donate_argnums=(0, 1)), params, state, tokens


def by_shard_map(mesh: Mesh) -> tuple[Any, ...]:
    """FSDP, written out: each layer is gathered where it is used, and its gradient scattered."""
    sharded = shardings(mesh, SHARDS)

    def gather(weights: Any) -> Any:
        return jax.tree.map(lambda w: lax.all_gather(w, "data", tiled=True), weights)

    def local(params: Any, state: Any, tokens: jax.Array) -> Any:
        loss, grads = microbatches(partial(loss_fn, layer_weights=gather))(params, tokens)
        grads = jax.tree.map(lambda g: g / mesh.size, grads)
        return *update(grads, state), lax.pmean(loss, "data")

    params, state = arguments(sharded, sharded)
    tokens = on(mesh, (ACCUMULATE, BATCH * mesh.size, TIME), P(None, "data"), jnp.int32)
    specs = jax.tree.map(lambda x: x.sharding.spec, (params, state, tokens))
    step = jax.shard_map(
        local, mesh=mesh, in_specs=specs, out_specs=(*specs[:2], P()), check_vma=False
    )
    return jax.jit(step, donate_argnums=(0, 1)), params, state, tokens


def arguments(at: Any, state_at: Any) -> tuple[Any, Any]:
    def place(dtype: Any, at: Any) -> Any:
        shapes = tree_of(SHAPES, lambda shape: jax.ShapeDtypeStruct(shape, dtype))
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, dtype, sharding=s), shapes, at
        )

    master = place(jnp.float32, state_at)
    adam, *rest = jax.eval_shape(ADAM.init, master)
    mesh = jax.tree.leaves(at)[0].mesh
    adam = adam._replace(mu=master, nu=master, count=on(mesh, (), P(), jnp.int32))
    return place(jnp.bfloat16, at), (master, (adam, *rest))


def tree_of(shapes: Any, make: Callable[[Any], Any]) -> Any:
    return jax.tree.map(make, shapes, is_leaf=lambda x: isinstance(x, tuple))


def shardings(mesh: Mesh, specs: Any) -> Any:
    prefix = specs if isinstance(specs, dict) else {"embed": specs, "layers": specs}
    layers = tree_of(SHAPES["layers"], lambda _: NamedSharding(mesh, prefix["layers"]))
    return {"embed": NamedSharding(mesh, prefix["embed"]), "layers": layers}


def on(mesh: Mesh, shape: tuple[int, ...], spec: P, dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def over_data(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    return lambda x: lax.with_sharding_constraint(x, NamedSharding(mesh, P("data")))


pinned = lax.with_sharding_constraint
