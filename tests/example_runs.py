"""Runs the examples: as a user does, or their functions in this process."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def load(name):
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name, flags, text, out):
    """Runs an example on a text; what it prints."""
    example = ROOT / "examples" / f"{name}.py"
    command = [sys.executable, example, *flags, "--text", text, "--out", out]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_refused(example, flags, message, capsys):
    """An example ends with one line that names the wrong argument."""
    with pytest.raises(SystemExit) as exit_:
        example.main(flags)
    out, err = capsys.readouterr()
    assert (exit_.value.code, out, err.count("\n")) == (2, "", 1)
    assert message in err
