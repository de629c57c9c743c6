"""The example trains as it says it does, and names a wrong argument in one line."""

import re

import pytest
from example_runs import assert_refused, load, run

TINY = "--steps 3 --batch 8 --length 16 --dim 64 --layers 1".split()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("All happy families are alike. " * 100)
    return path


@pytest.fixture(scope="module")
def example():
    return load("train_lm")


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
    printed = run("train_lm", [*TINY, *flags.split()], text, tmp_path)
    assert printed.count(f"value_and_grad at stage {flags[8]}, {formulation}: ") == 1
    assert "sharded = unsharded: losses within" in printed
    assert re.search(r"validation loss: \d\.\d+ nats per byte", printed)
    for name, share in zip(("parameters", "gradients", "optimizer state"), shares, strict=True):
        row = re.search(rf"{name} +([\d,]+) +([\d,]+)", printed)
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
    flags = [*TINY, "--text", str(text), "--out", str(tmp_path), *flags]
    assert_refused(example, flags, message, capsys)
