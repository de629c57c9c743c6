"""Two real processes of four devices each train as one process with eight."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys

import pytest
from multiprocess_worker import train

DEADLINE = 120  # seconds


def test_two_processes_train_as_one():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here = pathlib.Path(__file__).parent
    flags = re.sub(r"(device_count)=8", r"\1=4", os.environ["XLA_FLAGS"])
    env = os.environ | {
        "XLA_FLAGS": flags,
        "PYTHONPATH": os.pathsep.join([str(here.parent), str(here)]),
    }
    workers = [
        subprocess.Popen(
            [sys.executable, str(here / "multiprocess_worker.py"), str(port), "2", str(rank)],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        expected = train()
        outputs = [worker.communicate(timeout=DEADLINE) for worker in workers]
    finally:
        for worker in workers:  # a peer that waits for a dead one would hang
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)
    for worker, (out, err) in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, err
        assert json.loads(out.splitlines()[-1]) == pytest.approx(expected, rel=1e-5)
