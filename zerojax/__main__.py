"""The command line: `zerojax`, or `python -m zerojax`."""

import argparse
import functools
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import optax
from jax import numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding

import zerojax
from zerojax._chips import CHIPS, chip_named
from zerojax._synthetic import TRANSFORMER_SPECS, transformer
from zerojax._tables import Table, in_bytes

_DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16, "fp32": jnp.float32}

_DESCRIPTION = "Plans, estimates and reads ZeRO training in JAX; needs no GPU."
_EXIT = "Exit codes: 0; 1 if the program does not fit the chip; 2 if something is wrong."
_MEMORY = """\
Bytes on each device, by ZeRO stage and category, for a transformer of a given size: stacked layers
about 128 times as wide as deep, without embeddings or activations. For a model of your own see
zerojax.memory.

  zerojax memory --params 7.5e9 --devices 64 --stages 0,1,2,3 --optimizer adamw --param-dtype bf16
  zerojax memory --params 175e9 --devices 512 --tensor 8 --stages 3 --plot memory.png
  zerojax memory --params 1e9 --devices 8 --optimizer my_package.optim:make --json
"""
_PLAN = """\
Prints where each parameter of your model, its gradient and its state live. The function takes no
arguments and returns a zerojax.Partition; on a jax.sharding.AbstractMesh it needs no devices.

  zerojax plan my_model:plan        # my_model.py is here, or installed
"""
_AUDIT = """\
Prints what a compiled program communicates, and how much of that its schedule hides. The file is
what compiled.as_text() returns.

  zerojax audit step.hlo --mesh data=8,model=8 --plot timeline.png
"""
_COMPILE = """\
Compiles your step for GPUs that need not be there, prints what it holds and sends, and says whether
it fits. The function takes the devices of zerojax.topology, makes its mesh of them, and returns the
step and a tuple of its abstract arguments (jax.ShapeDtypeStructs with shardings on that mesh).

  zerojax compile my_model:step --chip h100 --hosts 8 --gpus-per-host 8
  zerojax compile my_model:step --chip b200 --json > program.json
"""
_CONSOLIDATE = """\
Writes the weights of a checkpoint as one safetensors file, in float32 from the master copies where
there are any. Needs no devices, and memory for one weight at a time.

  zerojax consolidate checkpoints model.safetensors           # the latest step in a directory
  zerojax consolidate checkpoints/1000 model.safetensors --dtype bf16
  zerojax consolidate checkpoints model.safetensors --tied lm_head.weight=embed.weight
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: the words behind the program's name; by default those that it was started with.

    Returns:
      The exit code.
    """
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, TypeError, ImportError, RuntimeError, OSError) as error:
        print(f"zerojax {args.command}: {_one_line(error)}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("zerojax", description=_DESCRIPTION, epilog=_EXIT)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[..., int], text: str, short: str) -> _Parser:
        sub = commands.add_parser(
            name, help=short, description=text, epilog=_EXIT,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        sub.set_defaults(run=run)
        sub.add_argument("--json", action="store_true", help="print a JSON document")
        return sub

    sub = command(
        "memory", _memory, _MEMORY, "bytes on each device, for a transformer of some size"
    )
    sub.add_argument("--params", type=float, required=True, help="their number, such as 7.5e9")
    sub.add_argument("--devices", type=_positive, required=True)
    sub.add_argument("--tensor", type=_positive, default=1, help="of which so many share a layer")
    sub.add_argument("--stages", type=_stages, default=(0, 1, 2, 3), help="default: 0,1,2,3")
    optimizer = "a name in optax, or module:function that makes one (default: adamw)"
    sub.add_argument("--optimizer", default="adamw", help=optimizer)
    sub.add_argument("--param-dtype", choices=_DTYPES, default="bf16", help="default: bf16")
    master = "of copies of narrower parameters (default: fp32)"
    sub.add_argument("--master-dtype", choices=["fp32", "none"], default="fp32", help=master)
    sub.add_argument("--accumulate", type=_positive, default=1, help="number of microbatches")
    sub.add_argument("--plot", metavar="FILE.png", help="draw a bar for each stage")

    sub = command("plan", _plan, _PLAN, "where the parameters of your model live")
    sub.add_argument("function", metavar="module:function")

    sub = command("audit", _audit, _AUDIT, "what a compiled program communicates")
    sub.add_argument("file", metavar="FILE.hlo")
    sub.add_argument("--mesh", type=_mesh, help="names the axes, as data=8,model=8")
    sub.add_argument(
        "--chip", choices=sorted(CHIPS), default="h100", help="to plot (default: h100)"
    )
    sub.add_argument("--plot", metavar="FILE.png", help="draw a modelled timeline")

    sub = command("compile", _compile, _COMPILE, "what your step holds and sends on GPUs")
    sub.add_argument("function", metavar="module:function")
    sub.add_argument("--chip", choices=sorted(CHIPS), default="h100", help="default: h100")
    sub.add_argument("--hosts", type=_positive, default=1, help="default: 1")
    sub.add_argument("--gpus-per-host", type=_positive, default=8, help="default: 8")
    sub.add_argument("--plot", metavar="FILE.png", help="draw a modelled timeline")

    sub = command("consolidate", _consolidate, _CONSOLIDATE, "a checkpoint's weights as one file")
    sub.add_argument("checkpoint", metavar="CHECKPOINT", help="directory of a step, or of steps")
    sub.add_argument("out", metavar="OUT.safetensors")
    dtype = "of floating weights (default: fp32; saved: each one's own)"
    sub.add_argument("--dtype", choices=[*_DTYPES, "saved"], default="fp32", help=dtype)
    tied = "write the weights of OTHER as NAME too; may be given several times"
    sub.add_argument(
        "--tied", type=_pair, action="append", default=[], metavar="NAME=OTHER", help=tied
    )
    rename = "from a parameter's name, as layers.0.up, to that in the file"
    sub.add_argument("--rename", metavar="module:function", help=rename)
    return parser


def _memory(args: argparse.Namespace) -> int:
    if args.devices % args.tensor:
        raise ValueError(f"--devices {args.devices} does not divide by --tensor {args.tensor}.")
    inner = _optimizer(args.optimizer)
    shapes = transformer(args.params, _DTYPES[args.param_dtype])
    mesh = AbstractMesh((args.devices // args.tensor, args.tensor), ("data", "model"))
    part = zerojax.partition(shapes, mesh, TRANSFORMER_SPECS, scan_dims=1)
    master = jnp.float32 if args.master_dtype == "fp32" else None
    report = zerojax.memory(
        part,
        lambda part: zerojax.zero(inner, part, master_dtype=master),
        stages=args.stages,
        accumulate=args.accumulate,
    )
    if args.plot:
        report.plot(args.plot)
    _print(args, report.to_json(), report.table())
    return 0


def _plan(args: argparse.Namespace) -> int:
    part = _call(args.function)
    if not isinstance(part, zerojax.Partition):
        raise TypeError(f"{args.function} must return a zerojax.Partition, got {_kind(part)}.")
    _print(args, part.to_json(), part.table())
    return 0


def _audit(args: argparse.Namespace) -> int:
    try:
        text = Path(args.file).read_text(errors="replace")  # audit says what is wrong
        report = zerojax.audit(text, args.mesh)
    except ValueError as error:
        raise ValueError(f"{args.file}: {error}") from error
    if args.plot:
        report.plot(args.plot, args.chip)
    _print(args, report.to_json(), report.table())
    return 0


def _compile(args: argparse.Namespace) -> int:
    jax.config.update("jax_platforms", "cpu")  # what is here does not matter
    devices = zerojax.topology(args.chip, hosts=args.hosts, gpus_per_host=args.gpus_per_host)
    result = _call(args.function, devices)
    if not (isinstance(result, tuple) and len(result) == 2 and callable(result[0])):
        raise TypeError(f"{args.function} must return (step, arguments), got {_kind(result)}.")
    step, arguments = result
    if not isinstance(arguments, tuple | list):
        raise TypeError(f"{args.function}: the arguments must be a tuple, got {_kind(arguments)}.")
    program = zerojax.compile_for(step, *arguments, topology=devices)
    shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves(arguments)]
    meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding)]
    report = zerojax.audit(program, meshes[0] if meshes else None)
    memory = chip_named(args.chip).memory
    document = {
        "chip": program.chip, "devices": program.devices, "flops": program.flops,
        "memory": program.memory._asdict(), "peak_bytes": program.peak_bytes,
        "chip_bytes": memory, "fits": program.fits, "communication": json.loads(report.to_json()),
    }  # fmt: skip
    if args.plot:
        report.plot(args.plot, args.chip)
    _print(args, json.dumps(document), _held(program, memory), report.table())
    if program.fits:
        return 0
    print(
        f"zerojax compile: does not fit: the step needs {in_bytes(program.peak_bytes)} on each "
        f"device, and an {args.chip} has {in_bytes(memory)}",
        file=sys.stderr,
    )
    return 1


def _consolidate(args: argparse.Namespace) -> int:
    from safetensors import safe_open

    jax.config.update("jax_platforms", "cpu")
    rename = functools.partial(_call, args.rename) if args.rename else None
    names = zerojax.checkpoint.consolidate(
        args.checkpoint, args.out, dtype=_DTYPES.get(args.dtype), rename=rename,
        tied=dict(args.tied),
    )  # fmt: skip
    with safe_open(args.out, framework="numpy") as file:
        views = [file.get_slice(name) for name in names]
    rows = [
        {"name": name, "shape": view.get_shape(), "dtype": view.get_dtype()}
        for name, view in zip(names, views, strict=True)
    ]
    size = Path(args.out).stat().st_size
    cells = [[r["name"], "x".join(map(str, r["shape"])) or "scalar", r["dtype"]] for r in rows]
    summary = f"{len(rows)} weights, {in_bytes(size)}, in {args.out}"
    document = json.dumps({"file": args.out, "bytes": size, "weights": rows})
    _print(args, document, Table(["name", "shape", "dtype"], cells, [summary]))
    return 0


def _held(program: zerojax.CompiledProgram, memory: int) -> Table:
    """What a compiled step needs on each device."""
    stats = program.memory
    rows = {
        "arguments": stats.argument_size_in_bytes,
        "outputs that reuse no argument": stats.output_size_in_bytes - stats.alias_size_in_bytes,
        "temporary": stats.temp_size_in_bytes,
        "in all": program.peak_bytes,
        f"of an {program.chip}": memory,
    }
    share = f"{program.peak_bytes / memory:.0%} of its memory"
    verdict = f"fits: {share}" if program.fits else f"does not fit: {share}"
    title = f"compiled for {program.devices} x {program.chip}"
    cells = [[name, in_bytes(n), f"{n:,}"] for name, n in rows.items()]
    return Table(["on each device", "", "bytes"], cells, [verdict, ""], title)


def _optimizer(name: str) -> Any:
    """An optimizer by its name in optax, or made by a function of the user's."""
    if ":" in name:
        tx = _call(name)
    else:
        try:
            tx = getattr(optax, name)(1e-3)
        except (AttributeError, TypeError):  # no such name, or not that of an optimizer
            tx = None
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise ValueError(
            f"unknown optimizer {name!r}: give the name of one in optax that takes a learning "
            "rate, such as adamw, or module:function that returns one."
        )
    return tx


def _call(name: str, *args: Any) -> Any:
    """Calls a function of the user's by its `module:function`."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ValueError(f"expected module:function, got {name!r}.")
    if os.getcwd() not in sys.path:  # a script's own folder is there instead
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module may raise anything
        raise ImportError(f"cannot import {module_name}: {_one_line(error)}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ValueError(f"{module_name} has no function {attribute!r}.")
    try:
        return function(*args)
    except Exception as error:
        raise RuntimeError(f"{name} raised {type(error).__name__}: {_one_line(error)}") from error


def _print(args: argparse.Namespace, document: str, *tables: Table) -> None:
    """Prints JSON, or tables: plain, or with rich where that is installed and someone looks."""
    if args.json:
        print(document)
    elif sys.stdout.isatty() and importlib.util.find_spec("rich"):
        from rich.console import Console
        from rich.table import Table as RichTable

        console = Console(markup=False, highlight=False)
        for table in tables:
            rich = RichTable(*table.head, title=table.title or None, title_justify="left")
            for row in table.rows:
                rich.add_row(*row)
            console.print(rich, *table.summary, sep="\n")
    else:
        print(*tables, sep="\n")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _stages(text: str) -> tuple[int, ...]:
    stages = tuple(dict.fromkeys(text.split(",")))
    if not {*stages} <= {"0", "1", "2", "3"}:
        raise argparse.ArgumentTypeError(f"must be some of 0,1,2,3, got {text!r}")
    return tuple(map(int, stages))


def _pair(text: str) -> tuple[str, str]:
    name, _, other = text.partition("=")
    if not name or not other:
        raise argparse.ArgumentTypeError(f"must be like lm_head.weight=embed.weight, got {text!r}")
    return name, other


def _mesh(text: str) -> AbstractMesh:
    names, equals, sizes = zip(*(part.partition("=") for part in text.split(",")), strict=True)
    if not all(names) or not all(equals) or not all(map(str.isdecimal, sizes)):
        raise argparse.ArgumentTypeError(f"must be like data=8,model=8, got {text!r}")
    return AbstractMesh(tuple(map(int, sizes)), names)


if __name__ == "__main__":
    sys.exit(main())
