"""One process of `test_multiprocess`: trains a few steps and prints the losses as JSON.

Usage: multiprocess_worker.py PORT PROCESSES RANK
"""

import json
import os
import sys

import jax
import numpy as np
import optax
from models import SCAN_DIMS, loss_fn, make_batch, make_params

import zerojax


def train() -> list[float]:
    mesh = jax.make_mesh((8,), ("data",))
    part = zerojax.partition(make_params(np.float32), mesh, scan_dims=SCAN_DIMS)
    tx = zerojax.zero(optax.chain(zerojax.clip_by_global_norm(1.0), optax.adamw(1e-2)), part)
    step = zerojax.train_step(zerojax.value_and_grad(loss_fn, part, accumulate=2), tx, part)
    params = part.place(make_params(np.float32))
    state = tx.init(params)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    batch = [
        jax.make_array_from_callback(x.shape, sharding, lambda index, x=x: x[index])
        for x in (make_batch()[0], make_batch()[1].astype(np.float32))
    ]
    losses = []
    for _ in range(3):
        params, state, metrics = step(params, state, *batch)
        losses += [float(metrics["loss"]), float(metrics["grad_norm"])]
    return losses


def main() -> None:
    port, processes, rank = sys.argv[1:]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{port}", int(processes), int(rank),
        initialization_timeout=30, heartbeat_timeout_seconds=10, shutdown_timeout_seconds=10,
    )  # fmt: skip
    assert jax.device_count() == 8 and jax.local_device_count() == 8 // int(processes)
    print(json.dumps(train()), flush=True)


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)  # an ordinary exit would wait for the other process
