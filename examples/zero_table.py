"""The ZeRO paper's table, from a compiler: what each of many H100s holds and sends. None is needed.

    python examples/zero_table.py --json table.json --plot table.png
    python examples/zero_table.py --quick    # a small model on 8 H100s, two programs; else eight

Two tables: 7.5 B parameters on 64 H100s, replicated and at ZeRO stages 1, 2 and 3; and stage 3 with
a constant batch on each of ever more H100s, up to 175 B parameters beside tensor parallelism. What
a device holds is set against the paper, what it sends against the theory, and both against training
steps that XLA compiles for H100s. Times are modelled, by `zerojax.audit`: they compare schedules.
"""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax import numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure

import zerojax

HEAD, LENGTH = 128, 2048  # features of an attention head, tokens of a sequence
LAYER_SPECS = {  # tensor parallelism within a host; where there is none, the axis has size 1
    "norms": P(),
    "qkv": P(None, None, None, "model"),
    "out": P(None, "model"),
    "up": P(None, None, "model"),
    "down": P(None, "model"),
}
SPECS = {"embed": P("model"), "norm": P(), "layers": LAYER_SPECS}


@dataclasses.dataclass(frozen=True)
class Model:
    """A GPT without positions; `parameters` is the round number that it is called by."""

    name: str
    parameters: float
    layers: int
    width: int
    words: int

    def shapes(self) -> dict[str, Any]:
        """The parameters in bfloat16; those of all layers are stacked, to scan over."""
        n, d, heads = self.layers, self.width, self.width // HEAD

        def weights(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

        layers = {
            "norms": weights(n, 2, d),
            "qkv": weights(n, d, 3, heads, HEAD),
            "out": weights(n, heads, HEAD, d),
            "up": weights(n, d, 4 * d),
            "down": weights(n, 4 * d, d),
        }
        return {"embed": weights(self.words, d), "norm": weights(d), "layers": layers}


@dataclasses.dataclass(frozen=True)
class Plan:
    """One column of a table; `tensor` of the devices share each layer."""

    model: Model
    devices: int
    stage: int
    tensor: int = 1

    def __str__(self) -> str:
        tensor = f", tensor {self.tensor}" * (self.tensor > 1)
        return f"{self.model.name} on {self.devices:,}{tensor}"


GPT_7B = Model("7.5 B", 7.5e9, layers=36, width=4096, words=50304)  # GPT-3's 6.7 B, and 4 layers
GPT_175B = Model("175 B", 175e9, layers=96, width=12288, words=51200)  # GPT-3
GPT_2M = Model("1.7 M", 1.7e6, layers=2, width=256, words=512)
STAGES = [Plan(GPT_7B, 64, stage) for stage in range(4)]
SCALING = [Plan(GPT_7B, devices, 3) for devices in (8, 64, 256, 1024)]
SCALING += [Plan(GPT_175B, 1024, 3, tensor=8)]
QUICK = [Plan(GPT_2M, 8, 3), Plan(GPT_2M, 8, 3, tensor=2)]
# Categories of zerojax.memory, and their colors in the picture.
STATES = {"parameters": "#4a6785", "gradients": "#9db3c8"}
STATES |= {"master": "#c1272d", "optimizer state": "#e8a5a7"}


def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of each next one of `tokens` (batch, LENGTH)."""

    def normal(x: jax.Array, scale: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide *= jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
        return wide.astype(x.dtype) * scale

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        p = zerojax.unshard(p)
        q, k, v = jnp.einsum("bld,dchk->cblhk", normal(x, p["norms"][0]), p["qkv"])
        scores = jnp.einsum("bqhk,bthk->bhqt", q, k) * HEAD**-0.5
        scores = jnp.where(jnp.tri(LENGTH, dtype=bool), scores, -jnp.inf)
        attended = jnp.einsum("bhqt,bthk->bqhk", jax.nn.softmax(scores), v)
        x = x + jnp.einsum("blhk,hkd->bld", attended, p["out"])
        return x + jax.nn.gelu(normal(x, p["norms"][1]) @ p["up"]) @ p["down"], None

    embed = zerojax.unshard(params["embed"])
    # Of a layer only its input is kept: no weights, and not the 170 GB of activations that
    # policy=zerojax.regather would keep of the 7.5 B model.
    x, _ = jax.lax.scan(jax.checkpoint(layer), embed[tokens], params["layers"])
    logits = normal(x, zerojax.unshard(params["norm"])) @ embed.T
    logits = logits[:, :-1].astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def sharded(plan: Plan, mesh: Mesh | AbstractMesh) -> tuple[zerojax.Partition, Any]:
    """The partition, and Adam with float32 masters."""
    shapes = plan.model.shapes()
    scan_dims = {key: int(key == "layers") for key in shapes}
    part = zerojax.partition(shapes, mesh, SPECS, stage=plan.stage, scan_dims=scan_dims)
    return part, zerojax.zero(optax.adamw(1e-4), part, master_dtype=jnp.float32)


def paper_bytes(plan: Plan) -> float:
    """Bytes of model states on each device, by the paper (Rajbhandari et al., 2020, figure 1).

    For a parameter 2 of itself and 2 of its gradient, both in 16 bits, and 12 of optimizer state:
    its float32 master, mean and variance.
    """
    sizes = (12, 2, 2)  # stage 1 shards the first of them, stage 2 two, stage 3 all
    whole, shards = sum(sizes[plan.stage :]), sum(sizes[: plan.stage])
    return plan.model.parameters * (whole / plan.tensor + shards / plan.devices)


def measure(plan: Plan, batch: int) -> dict[str, Any]:
    """A column: bytes on each device, modelled seconds of a step, seconds of the compiler."""
    devices = zerojax.topology("h100", hosts=plan.devices // 8)
    mesh = Mesh(devices.reshape(-1, plan.tensor), ("data", "model"))
    part, tx = sharded(plan, mesh)
    held, paper = zerojax.memory(part, tx), paper_bytes(plan)
    states = held.bytes("model states")
    assert abs(states / paper - 1) < 0.03, f"{plan}: {states:,} bytes, by the paper {paper:,.0f}"
    tokens = jax.ShapeDtypeStruct(
        (batch * mesh.shape["data"], LENGTH), jnp.int32, sharding=NamedSharding(mesh, P("data"))
    )
    step = zerojax.train_step(zerojax.value_and_grad(loss_fn, part), tx, part)
    start = time.perf_counter()
    program = zerojax.compile_for(
        step.jitted, part.abstract_params(), zerojax.abstract_state(tx, part), tokens,
        topology=devices, xla_options=zerojax.xla_options("h100", stage=plan.stage),
    )  # fmt: skip
    seconds = time.perf_counter() - start
    report = zerojax.audit(program, mesh)
    by_layer = {key: key == "layers" for key in SPECS}
    theory = zerojax.expected_communication(part, by_layer=by_layer).bytes()
    sent = report.bytes(axis="data")
    assert abs(sent / theory - 1) < 0.02, f"{plan}: sends {sent:,} bytes, in theory {theory:,}"
    return {
        "paper": paper, "states": states, **{name: held.bytes(name) for name in STATES},
        "arguments": program.memory.argument_size_in_bytes,
        "temporary": program.memory.temp_size_in_bytes,
        "peak": program.peak_bytes, "fits": program.fits,
        "theory": theory, "sent": sent, "hidden": report.hidden_bytes(axis="data") / sent,
        "tensor": report.bytes(axis="model"),
        "step": report.step_time, "computing": report.step_time - report.exposed_time,
        "waiting": report.exposed_time, "compiling": seconds,
    }  # fmt: skip


ROWS = {  # of the printed tables: what, in which unit and format
    "paper": ("GB of model states: the paper", 1e9, ".3g"),
    "states": ("GB of model states: zerojax.memory", 1e9, ".3g"),
    "arguments": ("GB compiled: arguments", 1e9, ".3g"),
    "temporary": ("GB compiled: temporary", 1e9, ".3g"),
    "fits": ("fits an H100 of 80 GB", 0, ""),
    "theory": ("GB sent in a step: theory", 1e9, ".3g"),
    "sent": ("GB sent in a step: compiled", 1e9, ".3g"),
    "hidden": ("of which behind matrix products", 1, ".0%"),
    "tensor": ("GB sent by tensor parallelism", 1e9, ".3g"),
    "step": ("modelled ms of a step", 1e-3, ".0f"),
    "waiting": ("of which waiting for communication", 1e-3, ".1f"),
}


def print_table(title: str, heads: list[str], columns: list[dict[str, Any]]) -> None:
    """In Markdown, aligned; without rows that are all zeros."""

    def cell(value: Any, unit: float, form: str) -> str:
        return ("no", "yes")[value] if isinstance(value, bool) else format(value / unit, form)

    lines = [[label, *(cell(c[key], *how) for c in columns)] for key, (label, *how) in ROWS.items()]
    lines = [["on each device", *heads], *(line for line in lines if {*line[1:]} != {"0"})]
    first, *others = (max(map(len, cells)) for cells in zip(*lines, strict=True))
    lines.insert(1, ["-" * first, *("-" * (width - 1) + ":" for width in others)])
    print(f"\n{title}\n")
    for label, *cells in lines:
        right = (cell.rjust(width) for cell, width in zip(cells, others, strict=True))
        print(f"| {' | '.join([label.ljust(first), *right])} |")


def draw_picture(path: Path, title: str, heads: list[str], columns: list[dict[str, Any]]) -> None:
    """What a device holds, by zerojax.memory, the paper and the compiler; and a modelled step."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2, width_ratios=(1.6, 1))
    places = np.arange(len(columns))

    def values(key: str, unit: float) -> np.ndarray:
        return np.array([column[key] for column in columns]) / unit

    def stack(axes: Any, places: Any, unit: float, colors: dict[str, str]) -> Any:
        ends = np.zeros(len(columns))
        for key, color in colors.items():
            bars = axes.bar(places, values(key, unit), 0.36, ends, label=key, color=color)
            ends = ends + values(key, unit)
        return bars

    stack(left, places - 0.2, 1e9, STATES)
    paper = values("paper", 1e9)
    left.plot(places - 0.2, paper, "k_", ms=30, mew=2, label="by the paper")
    for place, size in zip(places - 0.2, paper, strict=True):
        left.annotate(f"{size:.3g}", (place, size), (0, 4), textcoords="offset points", ha="center")
    bars = stack(left, places + 0.2, 1e9, {"arguments": "#666666", "temporary": "#c4c4c4"})
    left.bar_label(bars, [f"{peak:.3g}" for peak in values("peak", 1e9)], padding=3)
    left.axhline(80, color="k", lw=1, ls=":", label="an H100")
    left.set(ylabel="GB on each device", title="model states (left bars), and compiled (right)")
    bars = stack(right, places, 1e-3, {"computing": "#c4c4c4", "waiting": "#c1272d"})
    labels = [f"{c['sent'] / 1e9:.3g} GB\n{c['hidden']:.0%} hidden" for c in columns]
    right.bar_label(bars, labels, padding=3)
    right.set(ylabel="ms", title="a modelled step, and what it sends")
    for axes in (left, right):
        axes.set_xticks(places, heads)
        axes.margins(0.1, 0.15)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(edgecolor="none", framealpha=1)
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=__doc__)
    parser.formatter_class, add = argparse.RawDescriptionHelpFormatter, parser.add_argument
    add("--quick", action="store_true", help="a small model on 8 H100s")
    add("--batch", type=int, default=4, help=f"sequences of {LENGTH} tokens on each device")
    add("--json", type=Path, help="a file for all numbers")
    add("--plot", type=Path, help="a file for the picture of the first table")
    args = parser.parse_args(argv)
    if args.batch < 1:
        parser.error(f"--batch {args.batch}: expected at least 1")
    try:  # before minutes of work
        for path in filter(None, (args.json, args.plot)):
            if not path.parent.is_dir():
                raise ValueError(f"{path}: there is no folder {path.parent}")
        if args.plot and args.plot.suffix[1:] not in Figure().canvas.get_supported_filetypes():
            raise ValueError(f"--plot {args.plot}: expected a picture's name, such as table.png")
        zerojax.topology("h100")
    except (ImportError, RuntimeError, ValueError) as error:
        parser.error(" ".join(str(error).split()))  # one line

    stages, scaling = ([QUICK[0]], QUICK) if args.quick else (STAGES, SCALING)
    plans, columns = list(dict.fromkeys([*stages, *scaling])), {}
    for n, plan in enumerate(plans, start=1):
        print(f"compiling {n} of {len(plans)}: {plan}, stage {plan.stage}", file=sys.stderr)
        columns[plan] = measure(plan, args.batch)
        print(f"  in {columns[plan]['compiling']:.0f} s", file=sys.stderr)

    model, devices = stages[0].model, stages[0].devices
    tokens = f"{args.batch} x {LENGTH} tokens on each"
    title = f"{model.name} parameters on {devices} H100s, {tokens}, jax {jax.__version__}"
    table = [f"stage {plan.stage}" for plan in stages], [columns[plan] for plan in stages]
    print_table(title, *table)
    scaled = f"stage 3, {tokens} or on each group of tensor parallel ones"
    print_table(scaled, [*map(str, scaling)], [columns[plan] for plan in scaling])
    if args.json:
        rows = [dataclasses.asdict(plan) | column for plan, column in columns.items()]
        document = {"jax": jax.__version__, "batch": args.batch, "columns": rows}
        args.json.write_text(json.dumps(document, indent=1))
    if args.plot:
        draw_picture(args.plot, title, *table)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # what is here does not matter
    main()
