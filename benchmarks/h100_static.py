"""Formulations of ZeRO, compiled for H100s without one, beside hand-written baselines.

Usage: python benchmarks/h100_static.py [--hosts 8] [--json FILE]

A transformer of 1.275 B bfloat16 parameters, scanned and rematerialised layer by layer, with
float32 masters and Adam, in 4 microbatches of 4 x 2048 tokens on each device. Nothing is run: all
numbers are read off the schedules, times by the two-stream model of `zerojax.audit`.
"""

import argparse
import dataclasses
import json
import math
import sys
import time
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
    state = zerojax.abstract_state(tx, part)
    return zerojax.train_step(grad_fn, tx, part), part.abstract_params(), state, tokens


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
    """Plain jit: XLA finds out what to send from where parameters and state are to be."""
    sharded, everywhere = shardings(mesh, SHARDS), shardings(mesh, P())
    at, state_at = (sharded if stage == 3 else everywhere), (sharded if stage else everywhere)
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
    return lambda x: pinned(x, NamedSharding(mesh, P("data")))


def replicated(mesh: Mesh) -> Callable[[Any], Any]:
    return lambda weights: jax.tree.map(lambda w: pinned(w, NamedSharding(mesh, P())), weights)


pinned = lax.with_sharding_constraint

# Name: how to make the step and its arguments, and the stage whose XLA options fit.
PROGRAMS: dict[str, tuple[Callable[[Mesh], tuple[Any, ...]], int]] = {
    "zerojax stage 1, by step": (lambda mesh: library(mesh, 1, None), 1),
    "zerojax stage 1, by layer": (lambda mesh: library(mesh, 1, zerojax.unshard), 1),
    "zerojax stage 2, by layer": (lambda mesh: library(mesh, 2, zerojax.unshard), 2),
    "zerojax stage 3, by layer": (lambda mesh: library(mesh, 3, zerojax.unshard), 3),
    "plain jit, part.shards": (lambda mesh: library(mesh, 3, zerojax.unshard, plain=True), 3),
    "replicated": (lambda mesh: by_constraints(mesh, 0), 0),
    "XLA's ZeRO-1": (lambda mesh: by_constraints(mesh, 1), 1),
    "shardings alone, stage 3": (lambda mesh: by_constraints(mesh, 3), 3),
    "and constraints": (  # of activations, and of weights where they are used
        lambda mesh: by_constraints(mesh, 3, replicated(mesh), over_data(mesh)),
        3,
    ),
    "shard_map, stage 3": (by_shard_map, 3),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """What the schedule of one program says; bytes and times of one step on one device."""

    program: str
    options: bool  # those of zerojax.xla_options, or XLA's defaults
    wire: float  # bytes sent, over one float32 reduce-scatter and one bfloat16 all-gather
    overlap: float  # share of them with a matrix product in their window
    temp: int
    exposed: float
    step: float
    flops: float  # over the model's


def measure(name: str, make: Callable[[Mesh], tuple[Any, ...]], mesh: Mesh, options: Any) -> Row:
    step, *args = make(mesh)
    program = zerojax.compile_for(
        getattr(step, "jitted", step), *args, topology=mesh.devices, xla_options=options
    )
    report = zerojax.audit(program, mesh)
    size = sum(math.prod(shape) for shape in (SHAPES["embed"], *SHAPES["layers"].values()))
    least = (4 + 2) * size * (mesh.size - 1) // mesh.size
    return Row(
        name, options is not None, report.bytes() / least, report.overlap,
        program.memory.temp_size_in_bytes, report.exposed_time, report.step_time,
        report.flops / model_flops(),
    )  # fmt: skip


def criteria(rows: list[Row], hosts: int) -> list[tuple[str, float, str, float, bool]]:
    """What is asked, the number, the limit, and whether it holds; of rows with equal options."""
    by = {row.program: row for row in rows}
    step, one, two, three = (by[name] for name in list(PROGRAMS)[:4])
    xla, alone, constrained, manual = (by[name] for name in list(PROGRAMS)[-4:])
    wanted = [
        ("stage 1 by layer: bytes with a product in their window", one.overlap, ">=", 0.6),
        ("stage 1 by layer: exposed / at the end", one.exposed / step.exposed, "<=",
         0.25 if hosts == 1 else 0.4),
        ("stage 2 by layer: temp / XLA's ZeRO-1", two.temp / xla.temp, "<=", 1.2),
        ("stage 2 by layer: bytes with a product in their window", two.overlap, ">=", 0.75),
        ("stage 3 by layer: wire / shard_map", three.wire / manual.wire, "<=", 1.001),
        ("stage 3 by layer: wire / shardings alone", three.wire / alone.wire, "<=", 0.8),
        ("stage 3 by layer: wire / and constraints", three.wire / constrained.wire, "<=", 0.8),
        ("all of zerojax: most flops / model", max(r.flops for r in rows[:5]), "<=", 1.005),
    ]  # fmt: skip
    return [
        (what, value, sign, limit, value >= limit if sign == ">=" else value <= limit)
        for what, value, sign, limit in wanted
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=1, help="of 8 GPUs each; 1 by default")
    parser.add_argument("--json", help="a file for all numbers")
    asked = parser.parse_args()
    devices = zerojax.topology("h100", hosts=asked.hosts)
    mesh = Mesh(devices, ("data",))
    rows: list[Row] = []
    total, start = 2 * len(PROGRAMS), time.perf_counter()
    for options in (False, True):
        for name, (make, stage) in PROGRAMS.items():
            ours = zerojax.xla_options("h100", stage=stage) if options else None
            rows.append(measure(name, make, mesh, ours))
            seconds = time.perf_counter() - start
            print(f"{len(rows)} of {total} compiled, {seconds:.0f} s", file=sys.stderr)
    print(f"{mesh.size} H100s, jax {jax.__version__}, {rows[0].step * 1e3:.0f} ms a step")
    print(f"{'program':27}options  wire/min  overlap  temp GB  exposed ms  flops/model")
    for row in rows:
        print(
            f"{row.program:27}{'ours' if row.options else 'default':7}{row.wire:10.2f}"
            f"{row.overlap:9.0%}{row.temp / 1e9:9.1f}{row.exposed * 1e3:12.1f}{row.flops:13.3f}"
        )
    judged = {}
    for options in (False, True):
        print(f"with {'zerojax.xla_options' if options else 'the defaults of XLA'}:")
        some = [row for row in rows if row.options == options]
        judged["options" if options else "default"] = criteria(some, asked.hosts)
        for what, value, sign, limit, holds in criteria(some, asked.hosts):
            print(f"  {'holds' if holds else 'FAILS'}  {what}: {value:.3f} {sign} {limit}")
    if asked.json:
        document = {
            "jax": jax.__version__,
            "devices": mesh.size,
            "rows": [dataclasses.asdict(row) for row in rows],
            "criteria": judged,
        }
        with open(asked.json, "w") as file:
            json.dump(document, file, indent=1)


if __name__ == "__main__":
    main()
