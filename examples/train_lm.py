"""Trains a small language model with ZeRO, beside an unsharded run.

    python examples/train_lm.py                          # stage 1, on 8 virtual CPUs or all GPUs
    python examples/train_lm.py --stage 3 --precision bf16
    python examples/train_lm.py --stage 2 --accumulate 2 --optimizer lion --learning-rate 3e-4
    python examples/train_lm.py --mesh data=4,model=2    # with tensor parallelism
    python examples/train_lm.py --text my_folder --no-compare

The text is the source of Python's standard library, byte by byte, or `--text`. At the end come the
validation loss, generated text and what a device holds; `--out` gets the picture, train_lm.png.
"""

import argparse
import functools
import inspect
import itertools
import math
import random
import re
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure
from rich.progress import Progress

import zerojax

# Tensor parallelism: weights before a nonlinearity are split by columns (heads, hidden units),
# those behind it by rows. XLA adds the sums over "model" that this asks for.
QKV, UP, ROWS = P(None, None, None, "model"), P(None, None, "model"), P(None, "model")
LAYER_SPECS = {"norm1": P(), "qkv": QKV, "out": ROWS, "norm2": P(), "up": UP, "down": ROWS}

PRECISIONS = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}
LOSS_SCALE = 2.0**10  # of fp16; so low that no step is skipped, which plain_step could not
KEPT = "parameters", "gradients", "optimizer state"


def init_params(key: jax.Array, args: argparse.Namespace) -> dict[str, Any]:
    """The parameters; those of all layers are stacked, with a leading dim to scan over."""
    n, d, heads = args.layers, args.dim, max(1, args.dim // 32)
    keys = iter(jax.random.split(key, 6))

    def normal(std: float, *shape: int) -> jax.Array:
        return std * jax.random.normal(next(keys), shape)

    return {
        "embed": normal(0.3, 256, d),
        "layers": {
            "norm1": jnp.ones((n, d)),
            "qkv": normal(d**-0.5, n, d, 3, heads, 32),
            "out": normal((2 * n * d) ** -0.5, n, heads, 32, d),
            "norm2": jnp.ones((n, d)),
            "up": normal(d**-0.5, n, d, 4 * d),
            "down": normal((8 * n * d) ** -0.5, n, 4 * d, d),
        },
        "norm": jnp.ones(d),
        "logits": normal(0.02, d, 256),
    }


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


def rotary(x: jax.Array) -> jax.Array:
    """Rotates pairs of features of x (batch, length, heads, 32) by angles that tell positions."""
    angles = jnp.arange(x.shape[1])[:, None, None] / 1000 ** (jnp.arange(16) / 16)
    (a, b), cos, sin = jnp.split(x, 2, axis=-1), jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def logits_of(params: Any, tokens: jax.Array, unshard: Any = zerojax.unshard) -> jax.Array:
    """Logits (batch, length, 256) of the byte that follows each of `tokens` (batch, length)."""

    def layer(x: jax.Array, p: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        p = unshard(p)
        q, k, v = jnp.einsum("bld,dchk->cblhk", rms_norm(x, p["norm1"]), p["qkv"])
        q, k, v = rotary(q), rotary(k), v.astype(jnp.float32)  # CPUs have no float16 attention
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True).astype(x.dtype)
        x = x + jnp.einsum("blhk,hkd->bld", attended, p["out"])
        return x + jax.nn.gelu(rms_norm(x, p["norm2"]) @ p["up"]) @ p["down"], None

    layer = jax.checkpoint(layer, policy=zerojax.regather)  # or the weights of all layers are kept
    x, _ = jax.lax.scan(layer, unshard(params["embed"])[tokens], params["layers"])
    logits = rms_norm(x, unshard(params["norm"])) @ unshard(params["logits"])
    return logits.astype(jnp.float32)


def loss_fn(params: Any, tokens: jax.Array, unshard: Any = zerojax.unshard) -> jax.Array:
    """Mean cross-entropy in nats per byte of `tokens` (batch, length + 1)."""
    logits = logits_of(params, tokens[:, :-1], unshard)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def make_optimizer(args: argparse.Namespace) -> optax.GradientTransformation:
    """Clipping, and an optax alias with a warm-up cosine schedule and, if it has one, a decay."""
    peak, warmup = args.learning_rate, args.steps // 10
    schedule = optax.warmup_cosine_decay_schedule(peak / 10, peak, warmup, args.steps)
    alias = getattr(optax, args.optimizer)
    decays = "weight_decay" in inspect.signature(alias).parameters
    optimizer = alias(learning_rate=schedule, **({"weight_decay": 0.1} if decays else {}))
    return optax.chain(optax.clip_by_global_norm(1.0), optimizer)


def plain_step(optimizer: Any, dtype: Any, params: Any, opt_state: Any, tokens: jax.Array) -> Any:
    """The same in plain jax and optax, on float32 parameters that the loss sees in `dtype`."""
    scale = LOSS_SCALE if dtype == jnp.float16 else 1.0
    scaled_grad_fn = jax.value_and_grad(lambda params: scale * loss_fn(params, tokens))
    scaled = scaled_grad_fn(optax.tree.cast(params, dtype))
    loss, grads = jax.tree.map(lambda x: x.astype(jnp.float32) / scale, scaled)
    updates, opt_state = optimizer.update(grads, opt_state, params, value=loss, grad=grads)
    metrics = {"loss": loss, "grad_norm": optax.global_norm(grads)}
    return optax.apply_updates(params, updates), opt_state, metrics


def read_text(path: Path, at_least: int) -> np.ndarray:
    """The bytes of a file, or of up to 500 of the .py and .txt files of a folder, shuffled."""
    files = [*path.rglob("*.py"), *path.rglob("*.txt")] if path.is_dir() else [path]
    files = sorted(file for file in files if "site-packages" not in file.parts)
    random.Random(0).shuffle(files)
    text = b"".join(file.read_bytes() for file in files[:500])
    if len(text) < at_least:
        raise ValueError(f"--text {path}: {len(text)} bytes, but {at_least} are needed")
    return np.frombuffer(text, np.uint8)


def batches(text: np.ndarray, args: Any, sharding: Any = None) -> Iterator[jax.Array]:
    """Endless random windows (batch, length + 1) of the text; the same for the same seed."""
    rng = np.random.default_rng(args.seed)
    while True:
        starts = rng.integers(len(text) - args.length, size=(args.batch, 1))
        tokens = text[starts + np.arange(args.length + 1)].astype(np.int32)
        yield jax.device_put(tokens, sharding)


def train(name: str, how: Any, step: Any, state: Any, data: Any, steps: int) -> Any:
    """Takes the steps; returns the parameters, and loss and gradient norm of each (steps, 2)."""
    curve, started, live = [], 0.0, sys.stdout.isatty()
    with Progress(disable=not live) as progress:
        bar = progress.add_task(f"{name}: compiling", total=steps)
        for i, tokens in enumerate(itertools.islice(data, steps), start=1):
            *state, metrics = step(*state, tokens)
            curve.append([float(metrics["loss"]), float(metrics["grad_norm"])])
            if i == 1:  # which traced the loss and compiled
                started = time.perf_counter()
                print(f"{name}: {how}")
            rate = (i - 1) * tokens[:, 1:].size / (time.perf_counter() - started + 1e-9)
            status = f"{name}: loss {curve[-1][0]:.3f}, {rate:.0f} tokens/s, {steps - i} steps left"
            progress.update(bar, completed=i, description=status)
            if not live and i % math.ceil(steps / 10) == 0:
                print(status, flush=True)
    return state[0], np.array(curve)


def assert_agree(sharded: np.ndarray, unsharded: np.ndarray, dtype: Any) -> None:
    """Equal up to rounding, which hundreds of steps amplify to a per cent in any precision."""
    errors = np.abs(sharded / unsharded - 1)
    first, losses = errors[:10].max(), errors[:, 0].max()
    bound = max(1e-4, 8 * float(jnp.finfo(dtype).eps))  # some CPU kernels add up in 16 bits
    assert first < bound, f"the runs differ, by {first:.1e} in the first steps"
    assert losses < 0.05, f"the losses drift apart, by {losses:.1e}"
    print(f"sharded = unsharded: losses within {losses:.0e}, gradient norms at first {first:.0e}")


@jax.jit
def generate(params: Any, window: jax.Array, keys: jax.Array) -> jax.Array:
    """A byte for each key, drawn at temperature 0.7 from what may follow the window before it."""

    def draw(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        token = jax.random.categorical(key, logits_of(params, window[None])[0, -1] / 0.7)
        return jnp.roll(window, -1).at[-1].set(token), token

    return jax.lax.scan(draw, window, keys)[1]


def kept_bytes(part: zerojax.Partition, tx: optax.GradientTransformation) -> list[int]:
    """Of parameters, gradients (float32) and state, on a device, from microbatch to microbatch."""
    whole, shard = (sum(row[key] for row in part.rows()) for key in ("bytes_whole", "bytes_shard"))
    grads = (shard if part.stage >= 2 else whole) * 4 // part.leaves[0].dtype.itemsize
    state = jax.tree.leaves(zerojax.abstract_state(tx, part))
    sizes = (math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in state)
    return [shard if part.stage == 3 else whole, grads, sum(sizes)]


def draw_picture(path: Path, title: str, curves: dict[str, Any], kept: dict[str, Any]) -> None:
    """Loss curves, which should lie on each other, and bytes per device."""
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2)
    looks = ("unsharded", "replicated", "#b8c4d0", 5), ("sharded", "zerojax", "#c1272d", 1)
    for i, (run, holder, color, width) in enumerate(looks):
        if run in curves:
            left.plot(curves[run][:, 0], label=run, color=color, lw=width)
        sizes = np.array(kept[holder]) / 1e6
        bars = right.bar(np.arange(3) + 0.4 * i, sizes, 0.4, label=holder, color=color)
        right.bar_label(bars, fmt="%.2f", padding=2)
    left.set(xlabel="step", ylabel="training loss (nats per byte)")
    right.set(ylabel="MB per device", xticks=np.arange(3) + 0.2, xticklabels=KEPT)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def set_up(args: argparse.Namespace, shapes: Any) -> Any:
    """The text, the optimizer, and plan and sharded optimizer at `--stage` and at stage 0."""
    match = re.fullmatch(r"data=(\d+)(?:,model=(\d+))?", args.mesh)
    sizes = tuple(int(size) for size in match.groups() if size) if match else (0,)
    if math.prod(sizes) != jax.device_count():
        form = f"data=N or data=N,model=M that make {jax.device_count()} devices"
        raise ValueError(f"--mesh {args.mesh}: expected {form}")
    if args.batch % (parts := sizes[0] * args.accumulate):
        raise ValueError(f"--batch {args.batch}: does not divide by data x accumulate = {parts}")
    if not 0 < args.learning_rate < math.inf:
        raise ValueError(f"--learning-rate {args.learning_rate}: expected a number above 0")
    text = read_text(args.text, 20 * (args.length + 1))
    try:  # some need more than a schedule and gradients
        optimizer = optax.with_extra_args_support(make_optimizer(args))
        state = jax.eval_shape(optimizer.init, shapes)
        jax.eval_shape(optimizer.update, shapes, state, shapes, value=jnp.zeros(()), grad=shapes)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"--optimizer {args.optimizer}: {error}") from error
    axes, kinds = ("data", "model")[: len(sizes)], (AxisType.Auto,) * len(sizes)
    specs = {key: P() for key in shapes} | {"layers": LAYER_SPECS if len(sizes) > 1 else P()}
    scan_dims = {key: int(key == "layers") for key in shapes}
    mesh = jax.make_mesh(sizes, axes, axis_types=kinds)
    args.out.mkdir(parents=True, exist_ok=True)
    dtype = PRECISIONS[args.precision]
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), shapes)

    def sharded(stage: int) -> tuple[zerojax.Partition, optax.GradientTransformation]:
        part = zerojax.partition(shapes, mesh, specs, stage=stage, scan_dims=scan_dims)
        tx = zerojax.zero(optimizer, part, master_dtype=jnp.float32)  # of 16-bit parameters only
        if args.precision == "fp16":
            tx = zerojax.dynamic_loss_scale(tx, initial=LOSS_SCALE)
        return part, tx

    return text, optimizer, sharded(args.stage), sharded(0)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=__doc__)
    parser.formatter_class, add = argparse.RawDescriptionHelpFormatter, parser.add_argument
    add("--stage", type=int, choices=range(4), default=1, help="0 is plain data parallelism")
    add("--precision", choices=PRECISIONS, default="fp32", help="in 16 bits, masters are float32")
    add("--by-step", action="store_true", help="not layer by layer: without unshard")
    add("--mesh", default=f"data={jax.device_count()}", help="like data=8, or data=4,model=2")
    add("--accumulate", type=int, default=1, help="microbatches per step")
    add("--optimizer", default="adamw", help="an optax alias")
    add("--learning-rate", type=float, default=4e-3)
    add("--steps", type=int, default=300)
    add("--batch", type=int, default=32, help="sequences per step")
    add("--length", type=int, default=64, help="bytes per sequence")
    add("--dim", type=int, default=128)
    add("--layers", type=int, default=2)
    add("--text", type=Path, default=sysconfig.get_path("stdlib"), help="a file or folder")
    add("--out", type=Path, default="runs/train_lm", help="folder for the picture")
    add("--seed", type=int, default=0)
    add("--no-compare", action="store_true", help="leave out the unsharded run")
    args = parser.parse_args(argv)
    for name in ("accumulate", "steps", "batch", "length", "dim", "layers"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: expected at least 1")
    init, key = functools.partial(init_params, args=args), jax.random.key(args.seed)
    shapes = jax.eval_shape(init, key)  # not in the try: an error in a changed model is no typo
    try:
        text, optimizer, (part, tx), replicated = set_up(args, shapes)
    except (OSError, TypeError, ValueError) as error:
        parser.error(" ".join(str(error).split()))  # one line
    print(part)

    accumulate, dtype = args.accumulate, PRECISIONS[args.precision]
    loss = functools.partial(loss_fn, unshard=lambda p: p) if args.by_step else loss_fn
    grad_fn = zerojax.value_and_grad(loss, part, accumulate=accumulate, grad_dtype=jnp.float32)
    step, state = zerojax.train_step(grad_fn, tx, part), zerojax.init(init, tx, part)(key)
    training, held_out = np.split(text, [len(text) * 9 // 10])
    split, curves = NamedSharding(part.mesh, P("data")), {}
    data, steps = batches(training, args, split), args.steps
    params, curves["sharded"] = train("sharded", grad_fn, step, state, data, steps)
    if not args.no_compare:
        step = jax.jit(functools.partial(plain_step, optimizer, dtype), donate_argnums=(0, 1))
        plain, data = jax.jit(init)(key), batches(training, args)
        how, state = "plain jax and optax on one device", (plain, optimizer.init(plain))
        _, curves["unsharded"] = train("unsharded", how, step, state, data, steps)
        assert_agree(**curves, dtype=dtype)

    # Evaluated layer by layer, on shards; generated on one device, which holds the whole model.
    evaluate = jax.jit(lambda params, tokens: loss_fn(part.shards(params), tokens))
    data = itertools.islice(batches(held_out, args, split), 8)
    validation = np.mean([evaluate(params, tokens) for tokens in data])
    print(f"validation loss: {validation:.3f} nats per byte")
    whole = jax.device_put(part.gather(params), jax.devices()[0])
    window, keys = held_out[: args.length].astype(np.int32), jax.random.split(key, 400)
    sample = "".join(map(chr, generate(whole, window, keys).tolist()))
    print("a sample:\n" + re.sub(r"[^\n -~]", "?", sample) + "\n")
    kept = {"replicated": kept_bytes(*replicated), "zerojax": kept_bytes(part, tx)}
    print(f"{'bytes per device':<16}{'replicated':>14}{'zerojax':>14}")
    for name, whole, own in zip(KEPT, *kept.values(), strict=True):
        print(f"{name:<16}{whole:>14,}{own:>14,}  ({own / whole:.1%})")
    title = f"{args.optimizer}, ZeRO stage {args.stage}, {args.precision}, on {args.mesh}"
    draw_picture(args.out / "train_lm.png", title, curves, kept)
    print(f"picture: {args.out / 'train_lm.png'}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
