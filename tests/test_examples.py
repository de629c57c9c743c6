"""The example trains as it says it does, and names a wrong argument in one line."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "train_lm.py"
TINY = "--steps 3 --batch 8 --length 16 --dim 64 --layers 1".split()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("All happy families are alike. " * 100)
    return path


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_lm", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "flags, formulation, shares",
    [
        ("--stage 1 --precision fp16 --accumulate 2 --mesh data=4,model=2", "by layer", (1, 1, 4)),
        ("--stage 2 --optimizer lion --learning-rate 1e-4", "by layer", (1, 8, 8)),
        ("--stage 3 --precision bf16 --mesh data=4,model=2", "by layer", (4, 4, 4)),
        ("--stage 3 --by-step", "by step", (8, 8, 8)),
    ],
)
def test_trains(flags, formulation, shares, text, tmp_path):
    command = [sys.executable, EXAMPLE, *TINY, *flags.split(), "--text", text, "--out", tmp_path]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count(f"value_and_grad at stage {flags[8]}, {formulation}: ") == 1
    assert "sharded = unsharded: losses within" in run.stdout
    assert re.search(r"validation loss: \d\.\d+ nats per byte", run.stdout)
    for name, share in zip(("parameters", "gradients", "optimizer state"), shares, strict=True):
        row = re.search(rf"{name} +([\d,]+) +([\d,]+)", run.stdout)
        replicated, own = (int(number.replace(",", "")) for number in row.groups())
        assert replicated > 50_000
        assert own == pytest.approx(replicated / share, rel=1e-3)  # counters are whole
    assert (tmp_path / "train_lm.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--stage 4", "--stage: invalid choice: 4"),
        ("--precision fp8", "--precision: invalid choice: 'fp8'"),
        ("--mesh eight", "--mesh eight: expected data=N or data=N,model=M that make 8 devices"),
        ("--mesh data=4", "--mesh data=4: expected"),
        ("--mesh data=2,model=4", "['layers']['qkv']: dim 3 of (1, 64, 3, 2, 32) does not divide"),
        ("--optimizer adamm", "--optimizer adamm: module 'optax' has no attribute 'adamm'"),
        ("--optimizer l2_loss", "--optimizer l2_loss: "),
        ("--optimizer lbfgs", "--optimizer lbfgs: "),
        ("--learning-rate nan", "--learning-rate nan: expected a number above 0"),
        ("--text nowhere", "No such file or directory: 'nowhere'"),
        ("--length 500", "bytes, but 10020 are needed"),
        ("--batch 12", "--batch 12: does not divide by data x accumulate = 8"),
        ("--accumulate 2", "--batch 8: does not divide by data x accumulate = 16"),
        ("--steps -3", "--steps -3: expected at least 1"),
        ("--layers two", "--layers: invalid int value: 'two'"),
        ("--out {text}/folder", "Not a directory"),
    ],
)
def test_wrong_argument(flags, message, example, text, tmp_path, capsys):
    flags = flags.format(text=text).split()
    with pytest.raises(SystemExit) as exit_:
        example.main([*TINY, "--text", str(text), "--out", str(tmp_path), *flags])
    out, err = capsys.readouterr()
    assert (exit_.value.code, out, err.count("\n")) == (2, "", 1)
    assert message in err
