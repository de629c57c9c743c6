"""Trains a small language model in three parallel ways at once, beside a run on one device.

    python examples/pipeline_3d.py                       # 8 virtual CPU devices, or all GPUs
    python examples/pipeline_3d.py --zero 3              # with sharded parameters, too
    python examples/pipeline_3d.py --manual-model        # tensor parallelism by hand
    python examples/pipeline_3d.py --mesh data=2,stage=4,model=1 --microbatches 8

The mesh has an axis for each way: "data" splits the batch, and ZeRO the optimizer state; "stage"
splits the layers into a pipeline, through which the microbatches of a step follow each other as in
GPipe (Huang et al., 2019); "model" splits the heads and hidden units of each layer. The text is the
source of Python's standard library, byte by byte. At the end come the bytes that a device holds;
`--out` gets the picture, pipeline_3d.png, with the schedule.
"""

import argparse
import functools
import itertools
import math
import random
import re
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax import lax
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib import colormaps
from matplotlib.figure import Figure
from rich.progress import BarColumn, Progress, TextColumn

import zerojax

# Layers are stacked, and each stage holds a block of the stack. Weights before a nonlinearity are
# split by columns (heads, hidden units) over "model", those behind it by rows.
SPECS = {
    "embed": P(),  # also the head: every stage needs it
    "position": P(),
    "layers": {
        "norm1": P("stage"),
        "qkv": P("stage", None, None, "model"),
        "out": P("stage", "model"),
        "norm2": P("stage"),
        "up": P("stage", None, "model"),
        "down": P("stage", "model"),
    },
    "norm": P(),
}


def init_params(key: jax.Array, args: argparse.Namespace) -> dict[str, Any]:
    n, d, heads = args.layers, args.dim, max(1, args.dim // 32)
    keys = iter(jax.random.split(key, 6))

    def normal(std: float, *shape: int) -> jax.Array:
        return std * jax.random.normal(next(keys), shape)

    return {
        "embed": normal(d**-0.5, 256, d),
        "position": normal(d**-0.5, args.length, d),
        "layers": {
            "norm1": jnp.ones((n, d)),
            "qkv": normal(d**-0.5, n, d, 3, heads, 32),
            "out": normal((2 * n * d) ** -0.5, n, heads, 32, d),
            "norm2": jnp.ones((n, d)),
            "up": normal(d**-0.5, n, d, 4 * d),
            "down": normal((8 * n * d) ** -0.5, n, 4 * d, d),
        },
        "norm": jnp.ones(d),
    }


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


def through_layers(x: jax.Array, layers: Any, total: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """A stack of layers over x (sequences, length, dim); `total` sums what "model" splits."""

    def layer(x: jax.Array, p: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        # ZeRO 3 gathers here, but JAX takes the gathers of a stage's layers out of the tick loop.
        p = zerojax.unshard(p)
        q, k, v = jnp.einsum("bld,dchk->cblhk", rms_norm(x, p["norm1"]), p["qkv"])
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + total(jnp.einsum("blhk,hkd->bld", attended, p["out"]))
        hidden = jax.nn.gelu(rms_norm(x, p["norm2"]) @ p["up"])
        return x + total(hidden @ p["down"]), None

    return lax.scan(jax.checkpoint(layer, policy=zerojax.regather), x, layers)[0]


def cross_entropy(x: jax.Array, norm: jax.Array, embed: jax.Array, targets: jax.Array) -> jax.Array:
    """The head: mean cross-entropy in nats per byte."""
    logits = rms_norm(x, norm) @ embed.T
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def plain_loss(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """The loss of `tokens` (sequences, length + 1) on one device, without a pipeline."""
    x = params["embed"][tokens[:, :-1]] + params["position"]
    x = through_layers(x, params["layers"], total=lambda x: x)
    return cross_entropy(x, params["norm"], params["embed"], tokens[:, 1:])


def pipeline_loss(
    params: dict[str, Any], tokens: jax.Array, *, microbatches: int, manual_model: bool
) -> jax.Array:
    """The same loss where "stage" is Manual: `params["layers"]` are this stage's alone."""
    stage, stages = lax.axis_index("stage"), lax.axis_size("stage")
    tokens = tokens.reshape(microbatches, -1, tokens.shape[-1])
    ring = [(i, (i + 1) % stages) for i in range(stages)]
    # Where "model" is automatic, XLA adds the sums over it.
    total = functools.partial(lax.psum, axis_name="model") if manual_model else lambda x: x

    def tick(received: jax.Array, embedded: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = jnp.where(stage == 0, embedded, received)
        x = through_layers(x, params["layers"], total)
        return lax.ppermute(x, "stage", ring), x

    # The first stage takes a new microbatch every tick, and then zeros until the last has its last.
    # All are embedded beforehand: each tick would add to the gradient of the whole table.
    embed, position, norm = zerojax.unshard([params[k] for k in ("embed", "position", "norm")])
    embedded = embed[tokens[..., :-1]] + position
    embedded = jnp.pad(embedded, [(0, stages - 1), *3 * [(0, 0)]])
    # zeros_like, because its type says that it varies over the axes, as what is received does.
    _, x = lax.scan(tick, jnp.zeros_like(embedded[0]), embedded)
    # The last stage has the results, and deals them out: every stage is the head of some.
    x = jnp.where(stage == stages - 1, x[stages - 1 :], 0)
    x = lax.psum_scatter(x, "stage", tiled=True)
    targets = tokens[..., 1:].reshape(stages, -1, *x.shape[1:-1])[stage]
    return lax.pmean(cross_entropy(x, norm, embed, targets), "stage")


def plain_step(optimizer: Any, params: Any, opt_state: Any, tokens: jax.Array) -> Any:
    """What `zerojax.train_step` replaces, in plain jax and optax."""
    loss, grads = jax.value_and_grad(plain_loss)(params, tokens)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    metrics = {"loss": loss, "grad_norm": optax.global_norm(grads)}
    return optax.apply_updates(params, updates), opt_state, metrics


def make_grad_fn(part: zerojax.Partition, args: argparse.Namespace) -> Any:
    loss_fn = functools.partial(
        pipeline_loss, microbatches=args.microbatches, manual_model=args.manual_model
    )
    manual_axes = ("stage", "model") if args.manual_model else ("stage",)
    return zerojax.value_and_grad(loss_fn, part, manual_axes=manual_axes)


def read_text(path: Path, at_least: int) -> np.ndarray:
    """The bytes of a file, or of up to 500 of a folder's Python files, shuffled."""
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*.py") if "site-packages" not in file.parts)
        random.Random(0).shuffle(files)
    text = b"".join(file.read_bytes() for file in files[:500])
    if len(text) < at_least:
        raise ValueError(f"--text {path}: {len(text)} bytes, but {at_least} are needed")
    return np.frombuffer(text, np.uint8)


def batches(text: np.ndarray, args: Any, sharding: Any = None) -> Iterator[jax.Array]:
    """Endless random windows (batch, length + 1) of the text, always the same."""
    rng = np.random.default_rng(0)
    while True:
        starts = rng.integers(len(text) - args.length, size=(args.batch, 1))
        yield jax.device_put(text[starts + np.arange(args.length + 1)].astype(np.int32), sharding)


def train(name: str, step: Any, params: Any, opt_state: Any, data: Any, steps: int) -> Any:
    """Takes the steps; returns params, opt_state and each step's loss and norm (steps, 2)."""
    curve, started, live = [], 0.0, sys.stdout.isatty()
    columns = (TextColumn(name), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, disable=not live) as progress:
        bar = progress.add_task("compiling", total=steps)
        for i, tokens in enumerate(itertools.islice(data, steps), start=1):
            params, opt_state, metrics = step(params, opt_state, tokens)
            curve.append([float(metrics["loss"]), float(metrics["grad_norm"])])
            started = started or time.perf_counter()  # after the first step, which compiles
            rate = (time.perf_counter() - started) / max(1, i - 1)
            status = f"loss {curve[-1][0]:.3f}, {rate:.2f} s/step, {steps - i} steps left"
            progress.update(bar, completed=i, description=status)
            if not live and i % math.ceil(steps / 5) == 0:
                print(f"{name}: {status}", flush=True)
    return params, opt_state, np.array(curve)


def assert_equal(pipeline: np.ndarray, plain: np.ndarray) -> None:
    """Equal up to float32's rounding (sums in another order), which every step amplifies."""
    errors = np.abs(pipeline / plain - 1)
    first, losses = errors[:10].max(), errors[:, 0].max()
    assert first < 1e-4, f"the runs differ, by {first:.1e} in the first steps"
    assert losses < 1e-2, f"the losses drift apart, by {losses:.1e}"
    print(f"pipeline = one device: all {len(errors)} losses differ by at most {losses:.0e}, the")
    print(f"first 10 and their gradient norms by at most {first:.0e} (relative differences)")


def bytes_per_device(tree: Any) -> int:
    """Of arrays, or of what `zerojax.abstract_state` describes."""
    shards = [(x.sharding.shard_shape(x.shape), x.dtype.itemsize) for x in jax.tree.leaves(tree)]
    return sum(math.prod(shape) * itemsize for shape, itemsize in shards)


def memory_of(optimizer: Any, part: zerojax.Partition) -> dict[str, int]:
    """Bytes per device under a plan; the gradients' at the end of the backward pass."""
    whole, shard = (sum(row[k] for row in part.rows()) for k in ("bytes_whole", "bytes_shard"))
    state = zerojax.abstract_state(zerojax.zero(optimizer, part), part)
    sharded = shard if part.stage == 3 else whole
    sizes = {"parameters": sharded, "gradients": sharded}
    return sizes | {"optimizer state": bytes_per_device(state)}


def draw_picture(path: Path, args: Any, stages: int, memory: dict[str, dict[str, int]]) -> None:
    """The schedule (stages x ticks, coloured by microbatch) and bytes per device."""
    figure = Figure(figsize=(10, 5.6), layout="constrained")
    top, bottom = figure.subplots(2, 1, height_ratios=(1, 1.4))
    ticks, share = args.microbatches + stages - 1, args.microbatches // stages

    def box(stage: int, tick: int, label: str, color: Any) -> None:
        top.barh(stage, 0.96, 0.92, left=tick, color=color)
        top.text(tick + 0.48, stage, label, ha="center", va="center", color="white")

    for stage in range(stages):
        top.barh(stage, 2 * ticks + 0.96, 0.92, color="#eeeeee")  # idle, where nothing covers it
        for m in range(args.microbatches):
            *color, _ = colormaps["viridis"](0.85 * m / args.microbatches)
            box(stage, stage + m, str(m), color)
            box(stage, 2 * ticks - stage - m, str(m), (*color, 0.55))  # mirrored
        own = range(stage * share, (stage + 1) * share)
        box(stage, ticks, ",".join(map(str, own)), "#c1272d")
    top.set(
        ylabel="stage", yticks=range(stages), xlim=(-0.1, 2 * ticks + 1), ylim=(stages - 0.5, -0.5)
    )
    names = {ticks / 2: "forward ticks", ticks + 0.5: "head", 1.5 * ticks + 1: "backward ticks"}
    top.set_xticks(list(names), names.values())
    top.tick_params(length=0)
    bubble = f"idle {(stages - 1) / ticks:.0%} of the time"
    top.set_title(f"{args.microbatches} microbatches in {stages} stages: each is {bubble}")
    base = np.zeros(len(memory))
    for what, color in zip(memory["replicated"], ("#4a6785", "#b8c4d0", "#c1272d"), strict=True):
        sizes = np.array([sizes[what] / 1e6 for sizes in memory.values()])
        bottom.bar(list(memory), sizes, 0.5, base, label=what, color=color)
        base += sizes
    bottom.bar_label(bottom.containers[-1], [f"{total:.2f}" for total in base], padding=2)
    bottom.set(ylabel="MB per device")
    bottom.legend(frameon=False)
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def set_up(args: argparse.Namespace, shapes: Any) -> tuple[np.ndarray, dict[str, Any]]:
    """The text, and plans with and without ZeRO; raises if the arguments do not fit together."""
    match = re.fullmatch(r"data=(\d+),stage=(\d+),model=(\d+)", args.mesh)
    sizes = tuple(map(int, match.groups())) if match else (0,)
    if math.prod(sizes) != jax.device_count():
        form = f"data=N,stage=N,model=N that make {jax.device_count()} devices"
        raise ValueError(f"--mesh {args.mesh}: expected {form}")
    data, stages, _ = sizes
    for name, by, parts in (
        ("layers", "stage", stages),
        ("microbatches", "stage", stages),  # each stage is the head of as many
        ("batch", "data x microbatches", data * args.microbatches),
    ):
        if (value := getattr(args, name)) % parts:
            raise ValueError(f"--{name} {value}: does not divide by {by} = {parts}")
    if not 0 < args.learning_rate < math.inf:
        raise ValueError(f"--learning-rate {args.learning_rate}: expected a number above 0")
    text = read_text(args.text, 20 * (args.length + 1))
    args.out.mkdir(parents=True, exist_ok=True)
    mesh = jax.make_mesh(sizes, ("data", "stage", "model"), axis_types=(AxisType.Auto,) * 3)
    dims = {key: int(key == "layers") for key in shapes}
    plan = functools.partial(zerojax.partition, shapes, mesh, scan_dims=dims)
    plans = {"replicated": plan(P(), stage=0), "3D without ZeRO": plan(SPECS, stage=0)}
    return text, plans | {f"3D, ZeRO {n}": plan(SPECS, stage=n) for n in (1, 3)}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=__doc__)
    parser.formatter_class, add = argparse.RawDescriptionHelpFormatter, parser.add_argument
    add("--zero", type=int, choices=(1, 3), default=1, help="the ZeRO stage")
    add("--mesh", default="data=2,stage=2,model=2", help="sizes that make the number of devices")
    add("--manual-model", action="store_true", help="sum over model in the loss, not by XLA")
    add("--microbatches", type=int, default=4, help="into which a device's sequences are split")
    add("--steps", type=int, default=60)
    add("--batch", type=int, default=16, help="sequences per step")
    add("--length", type=int, default=64, help="bytes per sequence")
    add("--dim", type=int, default=128)
    add("--layers", type=int, default=4)
    add("--learning-rate", type=float, default=3e-3)
    add("--text", type=Path, default=sysconfig.get_path("stdlib"), help="a file or folder")
    add("--out", type=Path, default="runs/pipeline_3d", help="folder for the picture")
    return parser


def main(argv: list[str] | None = None) -> None:
    args = (parser := make_parser()).parse_args(argv)
    for name in ("microbatches", "steps", "batch", "length", "dim", "layers"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: expected at least 1")
    init, key = functools.partial(init_params, args=args), jax.random.key(0)
    shapes = jax.eval_shape(init, key)  # not in the try: an error in a changed model is no typo
    try:
        text, plans = set_up(args, shapes)
    except (OSError, ValueError) as error:
        parser.error(" ".join(str(error).split()))  # one line
    part = plans[f"3D, ZeRO {args.zero}"]
    print(part)

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(args.learning_rate))
    tx, grad_fn = zerojax.zero(optimizer, part), make_grad_fn(part, args)
    step = zerojax.train_step(grad_fn, tx, part)
    state = zerojax.init(init, tx, part)(key)
    data = batches(text, args, NamedSharding(part.mesh, P("data")))
    *state, pipeline = train("pipeline", step, *state, data, args.steps)
    print(grad_fn)  # when gradients are reduced, known since the first step

    step = jax.jit(functools.partial(plain_step, optimizer), donate_argnums=(0, 1))
    params = jax.jit(init)(key)
    plain = optimizer.init(params)
    *_, plain = train("one device", step, params, plain, batches(text, args), args.steps)
    assert_equal(pipeline, plain)

    memory = {name: memory_of(optimizer, plan) for name, plan in plans.items()}
    held = memory[f"3D, ZeRO {args.zero}"]
    assert [*map(bytes_per_device, state)] == [held["parameters"], held["optimizer state"]]
    print(f"{'bytes per device':<16}" + "".join(f"{name:>17}" for name in memory))
    for what in held:
        print(f"{what:<16}" + "".join(f"{sizes[what]:>17,}" for sizes in memory.values()))
    draw_picture(args.out / "pipeline_3d.png", args, part.mesh.shape["stage"], memory)
    print(f"picture: {args.out / 'pipeline_3d.png'}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
