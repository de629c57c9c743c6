"""The example of several processes trains, goes on in other ones, and leaves none behind."""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from example_runs import ROOT, load


def losses(flags):
    """What a run prints, by step."""
    flags_of_tests = r"--xla_force_host_platform_device_count=\d+"  # which the launcher sets
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": re.sub(flags_of_tests, "", os.environ["XLA_FLAGS"]),
    }
    command = [sys.executable, ROOT / "examples" / "multihost.py", *map(str, flags)]
    launcher = subprocess.Popen(
        command, env=env, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = launcher.communicate(timeout=150)
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)  # its processes too
    assert launcher.returncode == 0, err
    assert re.search(r"\d\d\.\d% of the digits not trained on are right", out)
    found = re.findall(r"^step (\d+): loss (\S+)$", out, re.MULTILINE)
    printed = {int(step): float(loss) for step, loss in found}
    assert len(found) == len(printed)  # by one process
    return printed


def test_a_run_goes_on_in_another_number_of_processes(tmp_path):
    expected = losses(["--processes", 2, "--steps", 6])
    assert list(expected) == [1, 2, 3, 4, 5, 6] and expected[6] < expected[1] / 1.1
    saved = ["--checkpoint", tmp_path, "--steps"]
    stopped = losses(["--processes", 2, "--stage", 3, *saved, 3])
    resumed = losses(["--processes", 1, "--stage", 2, *saved, 6, "--resume"])
    assert (list(stopped), list(resumed)) == ([1, 2, 3], [4, 5, 6])
    # They are float32, and printed with seven decimals; sums over devices round differently.
    assert stopped | resumed == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "code, deadline, message",
    [
        ("sys.exit(3 * index or time.sleep(60))", 60, r"exit codes: \[None, 3\]"),
        ("time.sleep(60)", 1, "--deadline 1: the processes did not end in time"),
        ("sys.exit(int(os.environ['JAX_NUM_CPU_DEVICES']) - 4)", 60, None),
    ],
)
def test_launcher(code, deadline, message, monkeypatch):
    code = f"import os, sys, time; index = int(os.environ['JOB_COMPLETION_INDEX']); {code}"
    monkeypatch.setattr(sys, "argv", ["-c", code])
    example, workers = load("multihost"), []

    def popen(*args, **kwargs):
        workers.append(real_popen(*args, **kwargs))
        return workers[-1]

    real_popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", popen)
    args = argparse.Namespace(processes=2, devices_per_process=4, deadline=deadline)
    started = time.monotonic()
    with pytest.raises(SystemExit, match=message) if message else contextlib.nullcontext():
        example.launch(args)
    assert time.monotonic() - started < 30  # nobody waits for those that sleep
    assert len(workers) == 2 and all(worker.returncode is not None for worker in workers)
