"""Where a step could gather its parameters and keep its gradients, by hand, compiled for H100s.

Usage: python benchmarks/h100_overlap.py PROGRAM ... [--hosts 8] [--options pipelined]

The model, the sizes and the numbers are those of `h100_static.py`; docs/overlap.md says what was
found. The programs are written out in one `shard_map`, but for the two of `layer_outside`.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import h100_static as static
import jax
import numpy as np
import optax
from h100_static import ACCUMULATE, ADAM, BATCH, HEADS, SHAPES, SHARDS, TIME
from jax import lax
from jax import numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import zerojax

WIDE, NARROW = jnp.float32, jnp.bfloat16
PIPELINED = {"xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON"}
ESTIMATED = {"xla_gpu_enable_analytical_sol_latency_estimator": True}
OPTIONS: dict[str, Callable[[int], Any]] = {
    "default": lambda stage: None,
    "ours": lambda stage: zerojax.xla_options("h100", stage=stage),
    "pipelined": lambda stage: zerojax.xla_options("h100", stage=stage) | PIPELINED,
    "estimated": lambda stage: zerojax.xla_options("h100", stage=stage) | ESTIMATED,
}


def normal(x: jax.Array) -> jax.Array:
    wide = x.astype(WIDE)
    return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def block(x: jax.Array, weights: Any) -> jax.Array:
    q, k, v = jnp.split((normal(x) @ weights["qkv"]).reshape(*x.shape[:2], HEADS, -1), 3, -1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1]).astype(q.dtype)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)
    x = x + mixed.reshape(x.shape) @ weights["out"]
    return x + jax.nn.gelu(normal(x) @ weights["up"]) @ weights["down"]


def head(x: jax.Array, embed: jax.Array, tokens: jax.Array) -> jax.Array:
    logits = (normal(x) @ embed.T)[:, :-1].astype(WIDE)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))


def model(whole: Callable[..., Any], params: Any, tokens: jax.Array, policy: Any = None) -> Any:
    """The mean loss, and the weights that `whole` made of each leaf of `params`, a tuple."""
    embed = whole(*params["embed"])

    def layer(x: jax.Array, parts: Any) -> tuple[jax.Array, Any]:
        weights = {name: whole(*part) for name, part in parts.items()}
        return block(x, weights), weights

    layer = jax.checkpoint(layer, policy=policy)
    x, layers = lax.scan(layer, embed[tokens], params["layers"])
    return head(x, embed, tokens), {"embed": embed, "layers": layers}


# What `whole` may be: the gradient of the last argument is whatever the backward pass delivers.


def gather(x: jax.Array, dim: int = 0) -> jax.Array:
    return lax.all_gather(x, "data", axis=dim, tiled=True)


def scatter(x: jax.Array) -> jax.Array:
    return lax.psum_scatter(x, "data", tiled=True)


@jax.custom_vjp
def gathered(shard: jax.Array, slot: jax.Array) -> jax.Array:
    return gather(shard)


gathered.defvjp(lambda shard, _: (gather(shard), None), lambda _, g: (None, g))


@jax.custom_vjp
def scattered(weight: jax.Array, total: jax.Array, slot: jax.Array) -> jax.Array:
    return weight


scattered.defvjp(
    lambda weight, total, slot: (weight, (total, slot)),
    lambda kept, g: (None, None, scatter((kept[0] + g).astype(kept[1].dtype))),
)


@jax.custom_vjp
def updated(
    weight: jax.Array, total: jax.Array, state: Any, count: jax.Array, slot: Any
) -> jax.Array:
    return weight


def updated_backward(kept: Any, g: jax.Array) -> Any:
    total, (master, mu, nu), count = kept
    g = scatter(total + g.astype(WIDE)) / (lax.axis_size("data") * ACCUMULATE)
    mu, nu = 0.9 * mu + 0.1 * g, 0.999 * nu + 0.001 * g**2
    step = mu / (1 - 0.9**count) / (jnp.sqrt(nu / (1 - 0.999**count)) + 1e-8)
    master = master - 1e-4 * (step + 1e-4 * master)
    return None, None, None, None, (master, mu, nu, gather(master.astype(NARROW)))


updated.defvjp(lambda weight, *rest: (weight, rest[:3]), updated_backward)


def zipped(*trees: Any) -> Any:
    return jax.tree.map(lambda *leaves: leaves, *trees)


def zeros(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), tree)


def add(totals: Any, grads: Any) -> Any:
    return jax.tree.map(lambda t, g: (t + g.astype(WIDE)).astype(t.dtype), totals, grads)


def by_hand(mesh: Mesh, *, parameters: str = "end", sums: str = "float32") -> tuple[Any, ...]:
    """Stage 1 by layer.

    Args:
      mesh: of the devices.
      parameters: are gathered at the "end" of the step; at its "start", kept in shards between
        steps; so, but by layer in the "first" microbatch's forward pass, and kept for the others;
        or, with the update, in the last microbatch's "backward" pass.
      sums: of gradients on each device: of all microbatches in "float32" or "bfloat16", or of
        "pairs" of microbatches, in bfloat16, which are then reduced.
    """
    dims = {"embed": 0, "layers": dict.fromkeys(SHAPES["layers"], 1)}
    late = parameters in ("start", "first")

    def grads_of(weights: Any, tokens: jax.Array) -> Any:
        return jax.grad(lambda weights: model(lambda w: w, zipped(weights), tokens)[0])(weights)

    def reduced(weights: Any, totals: Any, slots: Any, tokens: jax.Array) -> Any:
        return jax.grad(lambda slots: model(scattered, zipped(weights, totals, slots), tokens)[0])(
            slots
        )

    def local(params: Any, state: Any, tokens: jax.Array) -> Any:
        master, (adam, *rest) = state
        weights, others = params, tokens[:-1]
        if parameters == "start":
            weights = jax.tree.map(gather, params, dims)
        totals = zeros(weights, NARROW if sums == "bfloat16" else WIDE)
        if parameters == "first":
            whole = static.tree_of(SHAPES, lambda shape: jnp.zeros(shape, NARROW))
            keep = lambda primitive, *_, **params: primitive.name == "all_gather"  # noqa: E731
            grads, weights = jax.grad(
                lambda slots: model(gathered, zipped(params, slots), tokens[0], keep),
                has_aux=True,
            )(whole)
            totals, others = jax.tree.map(lambda g: g.astype(WIDE), grads), tokens[1:-1]
        if sums == "pairs":

            def pair(totals: Any, two: jax.Array) -> tuple[Any, None]:
                slots = zeros(master, NARROW)
                return add(totals, reduced(weights, grads_of(weights, two[0]), slots, two[1])), None

            two = tokens.reshape(-1, 2, *tokens.shape[1:])
            grads, _ = lax.scan(pair, zeros(master, WIDE), two)
        else:
            totals, _ = lax.scan(lambda t, x: (add(t, grads_of(weights, x)), None), totals, others)
            if parameters == "backward":
                count = adam.count + 1
                counts = jax.tree.map(
                    lambda m: jnp.broadcast_to(count, m.shape[:-2]).astype(WIDE), master
                )
                states = zipped(master, adam.mu, adam.nu)
                slots = jax.tree.map(jnp.zeros_like, zipped(master, adam.mu, adam.nu, weights))
                slots = jax.grad(
                    lambda slots: model(
                        updated,
                        jax.tree.map(
                            lambda w, *parts: (w, *parts), weights, totals, states, counts, slots
                        ),
                        tokens[-1],
                    )[0]
                )(slots)
                master, mu, nu, params = (
                    jax.tree.map(lambda _, slot, i=i: slot[i], weights, slots) for i in range(4)
                )
                return params, (master, (adam._replace(count=count, mu=mu, nu=nu), *rest))
            grads = reduced(weights, totals, zeros(master, WIDE), tokens[-1])
        grads = jax.tree.map(lambda g: g / (mesh.size * ACCUMULATE), grads)
        params, state = static.update(grads, state)
        return (params if late else jax.tree.map(gather, params, dims)), state

    sharded, everywhere = static.shardings(mesh, SHARDS), static.shardings(mesh, P())
    params, state = static.arguments(sharded if late else everywhere, sharded)
    tokens = static.on(mesh, (ACCUMULATE, BATCH * mesh.size, TIME), P(None, "data"), jnp.int32)
    specs = jax.tree.map(lambda x: x.sharding.spec, (params, state, tokens))
    step = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[:2], check_vma=False)
    return jax.jit(step, donate_argnums=(0, 1)), params, state, tokens


def layer_outside(mesh: Mesh, accumulate: int, reduce_dtype: Any) -> tuple[Any, ...]:
    """Each layer loops over microbatches, in float32, so that its gradient is reduced once."""

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        tokens = tokens.reshape(-1, BATCH, TIME)
        embed = zerojax.unshard(params["embed"])

        def narrow(weights: Any) -> Any:
            return jax.tree.map(lambda w: w.astype(NARROW), weights)

        def layer(xs: jax.Array, weights: Any) -> tuple[jax.Array, None]:
            wide = jax.tree.map(lambda w: w.astype(WIDE), zerojax.unshard(weights))
            return lax.map(jax.checkpoint(lambda x: block(x, narrow(wide))), xs), None

        xs = lax.map(lambda some: embed[some], tokens)
        xs, _ = lax.scan(jax.checkpoint(layer), xs, params["layers"])
        wide = embed.astype(WIDE)
        loss = jax.checkpoint(lambda both: head(both[0], narrow(wide), both[1]))
        return jnp.mean(lax.map(loss, (xs, tokens)))

    shapes = static.tree_of(SHAPES, lambda shape: jax.ShapeDtypeStruct(shape, NARROW))
    part = zerojax.partition(shapes, mesh, P(), stage=2, scan_dims={"embed": 0, "layers": 1})
    tx = zerojax.zero(ADAM, part, master_dtype=WIDE)
    grad_fn = zerojax.value_and_grad(
        loss_fn, part, accumulate=accumulate, reduce_dtype=reduce_dtype, grad_dtype=WIDE
    )
    tokens = static.on(mesh, (ACCUMULATE * BATCH * mesh.size, TIME), P("data"), jnp.int32)
    step = zerojax.train_step(grad_fn, tx, part)
    return step, part.abstract_params(), zerojax.abstract_state(tx, part), tokens


PROGRAMS = static.PROGRAMS | {
    "end": (by_hand, 1),
    "start": (partial(by_hand, parameters="start"), 1),
    "first": (partial(by_hand, parameters="first"), 1),
    "backward": (partial(by_hand, parameters="backward"), 1),
    "bfloat16 sums": (partial(by_hand, sums="bfloat16"), 1),
    "pairs": (partial(by_hand, sums="pairs"), 1),
    "layer outside": (partial(layer_outside, accumulate=1, reduce_dtype=WIDE), 2),
    "layer outside, pairs": (partial(layer_outside, accumulate=2, reduce_dtype=None), 2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("programs", nargs="+", choices=PROGRAMS, metavar="PROGRAM")
    parser.add_argument("--hosts", type=int, default=1, help="of 8 GPUs each; 1 by default")
    parser.add_argument("--options", choices=OPTIONS, default="ours", help="of XLA")
    asked = parser.parse_args()
    mesh = Mesh(zerojax.topology("h100", hosts=asked.hosts), ("data",))
    print(f"{'program':27}wire/min  overlap  temp GB  exposed ms  step ms  flops/model")
    for name in asked.programs:
        make, stage = PROGRAMS[name]
        row = static.measure(name, make, mesh, OPTIONS[asked.options](stage))
        print(
            f"{name:27}{row.wire:8.2f}{row.overlap:9.0%}{row.temp / 1e9:9.2f}"
            f"{row.exposed * 1e3:12.1f}{row.step * 1e3:9.1f}{row.flops:13.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
