"""Two real processes of four devices each train, save and restore as one process does."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from multiprocess_worker import Run

DEADLINE = 150  # seconds
TESTS = Path(__file__).parent


@contextlib.contextmanager
def two_processes(job, directory):
    """Starts them; gives a function that waits for what each of them reports."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = os.environ | {
        "XLA_FLAGS": re.sub(r"(device_count)=8", r"\1=4", os.environ["XLA_FLAGS"]),
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
    }
    command = [sys.executable, TESTS / "multiprocess_worker.py", job, directory, str(port), "2"]
    workers = [
        subprocess.Popen(
            [*command, str(rank)], env=env, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip

    def reports():
        outputs = [worker.communicate(timeout=DEADLINE) for worker in workers]
        for worker, (_, err) in zip(workers, outputs, strict=True):
            assert worker.returncode == 0, err
        return [json.loads(out.splitlines()[-1]) for out, _ in outputs]

    try:
        yield reports
    finally:
        for worker in workers:  # a peer that waits for a dead one would hang
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)


def test_two_processes_are_as_one(tmp_path):
    with two_processes("first", tmp_path) as reports:
        run = Run(stage=3)
        run.start()
        expected = pytest.approx(run.go_on() + run.go_on(), rel=1e-5)  # never stopped
        saved, other = reports()
    assert saved == other
    assert saved["numbers"] == expected

    # What they have saved goes on in two processes, and in one with as many devices, or half.
    def assert_goes_on(bits, numbers):
        assert bits == saved["bits"]
        assert numbers == pytest.approx(saved["numbers"][4:], rel=1e-5)

    with two_processes("again", tmp_path) as reports:
        for here in (run, Run(stage=2, devices=4)):
            here.restore(tmp_path)
            assert_goes_on(here.bits(), here.go_on())
        for report in reports():
            assert_goes_on(**report)
