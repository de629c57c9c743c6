"""Trains a classifier of handwritten digits with ZeRO in several processes, on one or many hosts.

On this machine, in two processes with four virtual CPU devices each:

    python examples/multihost.py --processes 2 --devices-per-process 4
    python examples/multihost.py --processes 2 --stage 3 --checkpoint runs/multihost
    python examples/multihost.py --processes 1 --steps 400 --checkpoint runs/multihost --resume

On clusters every process runs this file, and `--checkpoint` is a folder that all of them share.

SLURM, whose variables `jax.distributed.initialize()` reads; one task for each GPU:

    srun -N 4 --ntasks-per-node 8 --gpus-per-node 8 --kill-on-bad-exit python examples/multihost.py

Kubernetes, which sets JOB_COMPLETION_INDEX in an Indexed Job, here named digits, of completions: 4
and parallelism: 4, with a headless Service as the pods' subdomain: digits, so that they find each
other; in the container:

    command: [python, examples/multihost.py, --processes=4, --checkpoint=/shared, --resume]
    env: [{name: JAX_COORDINATOR_ADDRESS, value: "digits-0.digits:8476"}]
"""

import argparse
import os
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax import numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

import zerojax


def init_params(key: jax.Array) -> dict[str, jax.Array]:
    up = jax.random.normal(key, (64, 256)) / 8
    return {"up": up, "down": jnp.zeros((256, 10)), "bias": jnp.zeros(10)}


def logits_of(params: Any, images: jax.Array) -> jax.Array:
    return jax.nn.gelu(images @ params["up"]) @ params["down"] + params["bias"]


def loss_fn(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    logits = logits_of(params, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train(args: argparse.Namespace) -> None:
    """What each process does: the same jax calls in the same order, on its own part of the data."""
    if args.batch % jax.device_count():
        raise ValueError(f"--batch {args.batch}: does not divide by {jax.device_count()} devices")
    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int32)
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    split, key = NamedSharding(mesh, PartitionSpec("data")), jax.random.key(0)
    part = zerojax.partition(jax.eval_shape(init_params, key), mesh, stage=args.stage)
    tx = zerojax.zero(optax.adamw(3e-3), part)
    step_fn = zerojax.train_step(zerojax.value_and_grad(loss_fn, part), tx, part)
    every = max(1, args.steps // 10)
    options = ocp.CheckpointManagerOptions(save_interval_steps=every, max_to_keep=2)
    manager = args.checkpoint and ocp.CheckpointManager(args.checkpoint.resolve(), options=options)
    done = (manager and manager.latest_step()) or 0
    if done and not args.resume:
        raise ValueError(f"--checkpoint {args.checkpoint}: has step {done}; to go on, --resume")
    if done:
        params, opt_state = zerojax.checkpoint.restore(manager, done, tx, part)
    else:
        params, opt_state = zerojax.init(init_params, tx, part)(key)
    if first := jax.process_index() == 0:
        print(f"{part}\n{jax.process_count()} processes, from step {done}")
    for step in range(done + 1, args.steps + 1):
        # The batch of a step is the same for any number of processes; this one loads its own part.
        rows = np.random.default_rng(step).integers(1500, size=args.batch)
        mine = np.split(rows, jax.process_count())[jax.process_index()]
        batch = [jax.make_array_from_process_local_data(split, x[mine]) for x in (images, labels)]
        params, opt_state, metrics = step_fn(params, opt_state, *batch)
        if manager:
            zerojax.checkpoint.save(manager, step, params, opt_state, tx, part)
        if first and step % every == 0:
            print(f"step {step}: loss {metrics['loss']:.7f}", flush=True)
    if manager:
        manager.close()  # waits for what is being written
    predicted = np.asarray(logits_of(part.gather(params), images[1500:]).argmax(-1))
    if first:
        print(f"{np.mean(predicted == labels[1500:]):.1%} of the digits not trained on are right")


def launch(args: argparse.Namespace) -> None:
    """Starts the processes here, as an Indexed Job would; if one fails, ends them all."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    env = os.environ | {"JAX_COORDINATOR_ADDRESS": address, "JAX_PLATFORMS": "cpu"}
    env |= {"JAX_NUM_CPU_DEVICES": str(args.devices_per_process)}
    command, ends = [sys.executable, "-u", *sys.argv], time.monotonic() + args.deadline
    workers = [
        subprocess.Popen(command, env=env | {"JOB_COMPLETION_INDEX": str(index)})
        for index in range(args.processes)
    ]
    try:
        while None in (codes := [worker.poll() for worker in workers]) and not any(codes):
            if time.monotonic() > ends:
                sys.exit(f"--deadline {args.deadline}: the processes did not end in time")
            time.sleep(0.1)
    finally:
        for worker in workers:  # they would wait for one that is gone
            worker.kill()
            worker.wait()
    if any(codes):
        sys.exit(f"a process failed, and all were ended; exit codes: {codes}")


def main() -> None:
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=__doc__)
    parser.formatter_class, add = argparse.RawDescriptionHelpFormatter, parser.add_argument
    add("--processes", type=int, help="how many there are; not needed on SLURM and TPUs")
    add("--devices-per-process", type=int, default=4, help="virtual CPU devices, on this machine")
    add("--deadline", type=float, default=600, help="seconds until all are ended, on this machine")
    add("--stage", type=int, choices=(1, 2, 3), default=1)
    add("--steps", type=int, default=200)
    add("--batch", type=int, default=64, help="images per step, of all processes together")
    add("--checkpoint", type=Path, help="folder that all processes share")
    add("--resume", action="store_true", help="go on from the latest checkpoint, if there is one")
    args = parser.parse_args()
    if args.resume and not args.checkpoint:
        parser.error("--resume needs --checkpoint")
    index = os.environ.get("JOB_COMPLETION_INDEX")
    if args.processes and index is None:
        return launch(args)
    try:
        jax.distributed.initialize(num_processes=args.processes, process_id=index and int(index))
        train(args)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # an ordinary exit would wait for the other processes


if __name__ == "__main__":
    main()
