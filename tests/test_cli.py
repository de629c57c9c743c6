"""The command line: what it prints, in which form, and what it says of bad input."""

import importlib.util
import io
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from hlo_text import LOOPS
from jax import numpy as jnp
from jax.sharding import AbstractMesh
from safetensors import safe_open

import zerojax
from tests.conftest import make_mesh
from zerojax.__main__ import main
from zerojax._compile import CompiledProgram, MemoryStats

MEMORY = ["memory", "--params", "7.5e9", "--devices", "64"]

MODEL = """
import jax, optax, zerojax
import numpy as np
from jax import numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P

SIZE, number = 64, 3

def plan(mesh=AbstractMesh((4,), ("data",))):
    return zerojax.partition({"w": jax.ShapeDtypeStruct((SIZE, 13), np.float32)}, mesh)

def tags():
    return zerojax.partition({"[bold]": jax.ShapeDtypeStruct((64, 13), np.float32)},
                             AbstractMesh((4,), ("data",)))

def step(devices):
    mesh = Mesh(devices, ("data",))
    part = plan(mesh)
    tx = zerojax.zero(optax.adam(1e-3), part)
    grad_fn = zerojax.value_and_grad(lambda p, x: jnp.mean((x @ p["w"]) ** 2), part)
    on = lambda shape, spec: jax.ShapeDtypeStruct(shape, np.float32,
                                                  sharding=NamedSharding(mesh, spec))
    params = {"w": on((SIZE, 13), P())}
    state = zerojax.abstract_state(tx, part)
    return zerojax.train_step(grad_fn, tx, part), (params, state, on((16, SIZE), P("data")))

def large(devices):
    x = jax.ShapeDtypeStruct((2**36,), np.float32)
    return jnp.sin, (x,)

def optimizer():
    return optax.sgd(0.1, momentum=0.9)

def nothing(*devices):
    return None

def rename(name):
    return "model." + name

def one(devices):
    return jnp.sin, 1.0

def broken(*devices):
    raise KeyError("no\\nsuch")
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of bfloat16 weights with float32 masters."""
    params = {"embed": jnp.full((16, 3), 1.5, jnp.bfloat16), "scale": jnp.ones(3)}
    part = zerojax.partition(params, jax.make_mesh((8,), ("data",)))
    tx = zerojax.zero(optax.adam(1e-3), part, master_dtype=jnp.float32)
    state = tx.init({"embed": params["embed"] + jnp.float32(2**-20), "scale": params["scale"]})
    path = tmp_path_factory.mktemp("checkpoint")
    with ocp.CheckpointManager(path) as manager:
        zerojax.checkpoint.save(manager, 3, part.place(params), state, tx, part)
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch, saved):
    """A user's folder, in which commands run."""
    (tmp_path / "saved").symlink_to(saved)
    (tmp_path / "cli_model.py").write_text(MODEL)
    (tmp_path / "cli_broken.py").write_text("import there_is_no_such_module")
    (tmp_path / "step.hlo").write_text(LOOPS)
    (tmp_path / "notes.txt").write_text("buy milk")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff\x00")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in ("cli_model", "cli_broken"):
        sys.modules.pop(name, None)


def run(capsys, *argv):
    """The exit code, and what was printed to both streams."""
    try:
        code = main(argv)
    except SystemExit as error:  # argparse's
        code = error.code
    return code, *capsys.readouterr()


# What is printed.


def test_memory_is_the_library_s_report(capsys, folder):
    code, out, err = run(capsys, *MEMORY, "--plot", "memory.png")
    assert (code, err) == (0, "")
    for line in (
        "                        stage 0  stage 1  stage 2  stage 3",
        "with gradients          120 GB   31.4 GB  16.6 GB  1.88 GB",
    ):
        assert line in out.splitlines()
    assert (folder / "memory.png").read_bytes()[1:4] == b"PNG"


def memory_json(capsys, *argv):
    code, out, _ = run(capsys, *MEMORY, "--json", *argv)
    assert code == 0
    document = json.loads(out)
    return document, {row["name"]: row["bytes"] for row in document["rows"]}


def test_options_of_memory(capsys, folder):
    document, whole = memory_json(capsys)
    n = document["elements"]
    assert document["stages"] == [0, 1, 2, 3] and whole["mu"]["0"] == 4 * n
    document, rows = memory_json(
        capsys, "--stages", "3,1", "--param-dtype", "fp32", "--accumulate", "2"
    )
    assert document["stages"] == [3, 1] and rows["master"] == {"3": 0, "1": 0}
    assert rows["parameters"]["1"] == rows["accumulators"]["1"] == 4 * n
    _, rows = memory_json(capsys, "--master-dtype", "none")
    assert rows["master"]["0"] == 0 and rows["mu"]["0"] == 2 * n
    # Each device holds an eighth of the matrices, and all of what a row of them does not split.
    _, rows = memory_json(capsys, "--tensor", "8")
    assert rows["mu"]["0"] == pytest.approx(whole["mu"]["0"] / 8, rel=1e-3)
    _, rows = memory_json(capsys, "--optimizer", "lion")
    assert "mu" in rows and "nu" not in rows
    _, rows = memory_json(capsys, "--optimizer", "cli_model:optimizer")
    assert rows["trace"]["0"] == 4 * n


def test_plan(capsys, folder):
    part = zerojax.partition(
        {"w": jax.ShapeDtypeStruct((64, 13), "float32")}, AbstractMesh((4,), ("data",))
    )
    assert run(capsys, "plan", "cli_model:plan") == (0, f"{part}\n", "")
    assert run(capsys, "plan", "cli_model:plan", "--json") == (0, f"{part.to_json()}\n", "")


def test_audit(capsys, folder):
    report = zerojax.audit(LOOPS, AbstractMesh((4, 2), ("data", "model")))
    mesh = ["--mesh", "data=4,model=2"]
    assert run(capsys, "audit", "step.hlo", *mesh) == (0, f"{report}\n", "")
    code, out, _ = run(
        capsys, "audit", "step.hlo", *mesh, "--json", "--plot", "t.png", "--chip", "a100"
    )
    assert (code, out) == (0, f"{report.to_json()}\n")
    assert (folder / "t.png").read_bytes()[1:4] == b"PNG"
    assert " - " in run(capsys, "audit", "step.hlo")[1]  # axes without a mesh


@pytest.fixture
def pretend(monkeypatch):
    """Compiles for eight CPUs, and says that the program needs some memory."""
    needs = {"bytes": 1000}

    def compile_for(step, *args, topology):
        assert topology.shape == (8,)
        text = step.lower(*args).compile().as_text()
        return CompiledProgram(text, MemoryStats(needs["bytes"], 60, 50, 5, 0), "h100", 8)

    def topology(chip, *, hosts, gpus_per_host):
        assert (chip, hosts, gpus_per_host) == ("h100", 2, 4)
        return make_mesh("mesh8").devices

    monkeypatch.setattr(zerojax, "topology", topology)
    monkeypatch.setattr(zerojax, "compile_for", compile_for)
    return needs


COMPILE = ["compile", "cli_model:step", "--hosts", "2", "--gpus-per-host", "4"]


def test_compile_and_whether_it_fits(capsys, folder, pretend):
    code, out, err = run(capsys, *COMPILE, "--plot", "t.png")
    assert (code, err) == (0, "")
    for line in (
        "compiled for 8 x h100",
        "outputs that reuse no argument  10 B     10",
        "in all                          1.01 kB  1,015",
        "fits: 0% of its memory",
    ):
        assert line in out.splitlines()
    assert "data  8" in out.replace("data        8", "data  8")  # the audit knows the mesh
    assert (folder / "t.png").exists()
    pretend["bytes"] = 10**11
    code, out, err = run(capsys, *COMPILE, "--json")
    document = json.loads(out)
    assert (code, document["fits"], document["peak_bytes"]) == (1, False, 10**11 + 15)
    assert document["communication"]["devices"] == 8 and document["chip_bytes"] < 10**11
    assert err == (
        "zerojax compile: does not fit: the step needs 100 GB on each device, and an h100 has "
        "84.9 GB\n"
    )


@pytest.mark.gpu_compile
def test_compile_for_h100s(capsys, folder):
    code, out, err = run(capsys, "compile", "cli_model:step", "--gpus-per-host", "2", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert (document["chip"], document["devices"], document["fits"]) == ("h100", 2, True)
    parameter, batch = 64 * 13 * 4, 8 * 64 * 4
    held = 2 * parameter + 4  # the parameter, and halves of two moments
    assert document["memory"]["argument_size_in_bytes"] == held + batch
    assert document["memory"]["alias_size_in_bytes"] == held  # donated
    assert {c["axes"][0] for c in document["communication"]["collectives"]} == {"data"}
    code, out, err = run(capsys, "compile", "cli_model:large", "--gpus-per-host", "1")
    assert code == 1 and "does not fit: 6" in out  # 2 x 275 GB of 84.9
    assert err.startswith("zerojax compile: does not fit: the step needs 550 GB")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("rich", [True, False])
def test_tables_in_a_terminal(folder, monkeypatch, rich):
    if not rich:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["plan", "cli_model:tags"]) == 0
    text = out.getvalue()
    assert "['[bold]']" in text and "64x13" in text  # not taken for rich's markup
    assert "bytes per device instead of" in text and "ZeRO stage 1" in text
    assert ("─" in text) == rich


@pytest.mark.parametrize(
    "words, embed",
    [
        ("", ("F32", 1.5 + 2**-20)),
        ("--dtype bf16", ("BF16", 1.5)),
        ("--dtype saved", ("BF16", 1.5)),
        ("--dtype fp16 --rename cli_model:rename", ("F16", 1.5)),
    ],
)
def test_consolidate(capsys, folder, words, embed):
    prefix = "model." if "rename" in words else ""
    words = f"saved out --tied head={prefix}embed {words}"
    code, out, _ = run(capsys, "consolidate", *words.split())
    assert code == 0 and f"{prefix}embed" in out and "3 weights" in out
    code, document, _ = run(capsys, "consolidate", *words.split(), "--json")
    document = json.loads(document)
    kinds = {weight["name"]: weight["dtype"] for weight in document["weights"]}
    assert kinds[f"{prefix}embed"] == kinds["head"] == embed[0]
    assert document["bytes"] == (folder / "out").stat().st_size
    with safe_open("out", framework="flax") as file:
        for name in (f"{prefix}embed", "head"):
            assert np.all(np.asarray(file.get_tensor(name), np.float32) == np.float32(embed[1]))


@pytest.mark.parametrize("rich", [True, False])
def test_long_work_shows_its_progress_in_a_terminal(folder, monkeypatch, rich):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    if not rich:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["consolidate", "saved", "out"]) == 0
    assert ("writing out" in sys.stderr.getvalue()) == rich


# Bad input: one line, and an exit code.


@pytest.mark.parametrize(
    "argv, message",
    [
        ("audit notes.txt", "zerojax audit: notes.txt: "),
        ("audit picture.png", "zerojax audit: picture.png: "),
        ("audit missing.hlo", "zerojax audit: [Errno 2] No such file or directory: 'missing.hlo'"),
        ("audit step.hlo --mesh data=2", "step.hlo: audit: the mesh has 2 devices"),
        ("audit step.hlo --mesh data:2", "argument --mesh: must be like data=8,model=8"),
        ("audit step.hlo --plot t.nope", "Format 'nope' is not supported"),
        ("compile cli_model:step --chip h900", "argument --chip: invalid choice: 'h900'"),
        ("compile cli_model:step --hosts 0", "argument --hosts: must be at least 1, got 0"),
        ("compile cli_model:nothing", "cli_model:nothing must return (step, arguments), got a "),
        ("compile cli_model:one", "cli_model:one: the arguments must be a tuple, got a float"),
        ("compile cli_model:broken", "cli_model:broken raised KeyError: 'no\\nsuch'"),
        ("plan no_such_module:plan", "cannot import no_such_module: No module named 'no_such_mod"),
        ("plan cli_broken:plan", "cannot import cli_broken: No module named 'there_is_no_such_m"),
        ("plan cli_model:missing", "cli_model has no function 'missing'"),
        ("plan cli_model:number", "cli_model has no function 'number'"),
        ("plan cli_model", "expected module:function, got 'cli_model'"),
        ("plan :plan", "expected module:function, got ':plan'"),
        ("plan cli_model:nothing", "cli_model:nothing must return a zerojax.Partition, got a Non"),
        ("plan cli_model:broken", "cli_model:broken raised KeyError"),
        ("memory --params 10 --devices 4", "a transformer needs at least 1e6 parameters, got 10"),
        ("memory --params x --devices 4", "argument --params: invalid float value: 'x'"),
        ("memory --params 1e9 --devices 0", "argument --devices: must be at least 1, got 0"),
        ("memory --params 1e9", "the following arguments are required: --devices"),
        ("memory --params 1e9 --devices 4 --stages 4", "must be some of 0,1,2,3, got '4'"),
        ("memory --params 1e9 --devices 4 --tensor 3", "--devices 4 does not divide by --tensor 3"),
        ("memory --params 1e9 --devices 4 --optimizer adamx", "unknown optimizer 'adamx': give"),
        ("memory --params 1e9 --devices 4 --optimizer Params", "unknown optimizer 'Params'"),
        ("memory --params 1e9 --devices 4 --optimizer cli_model:nothing", "unknown optimizer 'cli"),
        ("memory --params 1e9 --devices 4 --plot no/such.png", "No such file or directory"),
        ("consolidate nothing out", "zerojax consolidate: expected one tree as a checkpoint in"),
        ("consolidate saved out --tied a", "argument --tied: must be like lm_head.weight=embed."),
        ("consolidate saved out --tied a=x", "a: there is no x"),
        ("consolidate saved out --dtype int8", "argument --dtype: invalid choice: 'int8'"),
        ("consolidate saved no/such/out", "No such file or directory: 'no/such/out."),
        ("consolidate saved out --rename cli_model:gone", "cli_model has no function 'gone'"),
        ("frobnicate", "invalid choice: 'frobnicate'"),
        ("", "the following arguments are required: COMMAND"),
    ],
)
def test_bad_input_is_one_line(capsys, folder, monkeypatch, argv, message):
    monkeypatch.setattr(zerojax, "topology", lambda chip, **options: jax.devices())
    code, out, err = run(capsys, *argv.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_a_missing_extra_is_one_line(capsys, folder, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, _, err = run(capsys, "compile", "cli_model:step")
    assert code == 2 and err.count("\n") == 1 and 'pip install "zerojax[gpu-compile]"' in err


@pytest.mark.parametrize("command", ["memory", "plan", "audit", "compile", "consolidate"])
def test_help_has_examples_that_parse(capsys, command, monkeypatch):
    code, out, _ = run(capsys, command, "--help")
    assert code == 0 and "Exit codes" in out
    examples = [line.split("#")[0].split(">")[0] for line in out.splitlines()
                if line.startswith("  zerojax ")]  # fmt: skip
    assert examples
    ran = []
    monkeypatch.setattr(f"zerojax.__main__._{command}", lambda args: ran.append(args) or 0)
    assert (
        [main(example.split()[1:]) for example in examples]
        == [0] * len(examples)
        == [0 for _ in ran]
    )


def test_as_a_module_from_the_folder_of_a_model(folder):
    root = Path(__file__).parents[1]
    code = textwrap.dedent(f"""
        import sys; sys.path.append({str(root)!r})
        import runpy; sys.argv = ["zerojax", *sys.argv[1:]]
        runpy.run_module("zerojax", run_name="__main__")
    """)
    for name, status in (("plan", 0), ("missing", 2)):
        result = subprocess.run(
            [sys.executable, "-P", "-c", code, "plan", f"cli_model:{name}"],
            cwd=folder, capture_output=True, text=True,
        )  # fmt: skip
        assert result.returncode == status, result.stderr
        assert ("ZeRO stage 1 on mesh(data=4)" in result.stdout) == (status == 0)
        assert "Traceback" not in result.stderr
