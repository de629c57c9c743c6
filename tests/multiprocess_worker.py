"""What test_multiprocess.py runs in several processes, and for comparison in its own.

Usage: multiprocess_worker.py JOB DIRECTORY PORT PROCESSES RANK
"""

import json
import os
import sys
import traceback
import zlib

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax import numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from models import SCAN_DIMS, loss_fn, make_batch, make_params

import zerojax
from zerojax import checkpoint


class Run:
    """A training at one stage on the first devices."""

    def __init__(self, stage, devices=8):
        mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
        self.split = NamedSharding(mesh, P("data"))
        self.part = zerojax.partition(
            make_params(np.float32), mesh, scan_dims=SCAN_DIMS, stage=stage
        )
        inner = optax.chain(zerojax.clip_by_global_norm(1.0), optax.adamw(1e-2))
        self.tx = zerojax.zero(inner, self.part)
        grad_fn = zerojax.value_and_grad(loss_fn, self.part, accumulate=2)
        self.step = zerojax.train_step(grad_fn, self.tx, self.part)

    def start(self):
        self.params = self.part.place(make_params(np.float32))
        self.state = self.tx.init(self.params)

    def restore(self, directory):
        with ocp.CheckpointManager(directory) as manager:
            self.params, self.state = checkpoint.restore(manager, None, self.tx, self.part)

    def save(self, directory):
        with ocp.CheckpointManager(directory) as manager:
            assert checkpoint.save(manager, 2, self.params, self.state, self.tx, self.part)

    def go_on(self):
        """Losses and gradient norms of two steps."""
        batch = [
            jax.make_array_from_process_local_data(
                self.split, np.split(x, jax.process_count())[jax.process_index()]
            )
            for x in (make_batch()[0], make_batch()[1].astype(np.float32))
        ]
        numbers = []
        for _ in range(2):
            self.params, self.state, metrics = self.step(self.params, self.state, *batch)
            numbers += [float(metrics["loss"]), float(metrics["grad_norm"])]
        return numbers

    def bits(self):
        """A checksum for each leaf of the checkpoint of what the run holds now."""
        tree = checkpoint.to_natural(self.params, self.state, self.tx, self.part)
        return {jax.tree_util.keystr(path): crc(x) for path, x in jax.tree.leaves_with_path(tree)}


def crc(x):
    return zlib.crc32(whole(x).tobytes())


def whole(x):
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        x = jax.device_put(x, NamedSharding(x.sharding.mesh, P()))
    return np.asarray(x)


def assert_same(tree, expected):
    pairs = zip(jax.tree.leaves_with_path(tree), jax.tree.leaves(expected), strict=True)
    for (path, x), y in pairs:
        np.testing.assert_array_equal(whole(x), whole(y), jax.tree_util.keystr(path))


def first(directory):
    """Trains and saves, and trains on."""
    run = Run(stage=3)
    run.start()
    numbers = run.go_on()
    run.save(directory)
    bits = run.bits()
    if jax.process_index() == 0:  # without the others
        checkpoint.consolidate(directory, f"{directory}/weights")
    numbers += run.go_on()
    calls(directory)
    return {"numbers": numbers, "bits": bits}


def again(directory):
    """Restores what `first` has saved, at another stage, and trains on."""
    run = Run(stage=1)
    run.restore(directory)
    bits = run.bits()
    shapes = make_params(np.float32)
    del shapes["empty"]  # which orbax does not store
    scan_dims = {name: SCAN_DIMS[name] for name in shapes}
    part = zerojax.partition(shapes, run.part.mesh, scan_dims=scan_dims, stage=3)
    weights = part.gather(checkpoint.load_safetensors(f"{directory}/weights", part))
    for path, x in jax.tree.leaves_with_path(weights):
        assert crc(x) == bits[f"['params']{jax.tree_util.keystr(path)}"], path
    return {"numbers": run.go_on(), "bits": bits}


def calls(directory):
    """Everything else, on values that each process holds for itself and on global arrays."""
    rank, mesh = jax.process_index(), jax.make_mesh((8,), ("data",))
    shapes = {"w": np.ones((13, 5), np.float32), "b": np.ones(16, np.float32)}
    part = zerojax.partition(shapes, mesh, stage=3)
    w, nan = np.arange(65, dtype=np.float32).reshape(13, 5), np.full(16, np.nan, np.float32)
    host = {"w": w, "b": nan}
    x = np.linspace(0, 1, 16 * 13, dtype=np.float32).reshape(16, 13)

    def mean(params, x):
        return jnp.mean((x @ params["w"]) ** 2) + jnp.mean(params["b"])

    # Placed: from the host, from this process's devices, from all devices.
    placed = part.place(host)
    local = jax.device_put(host, jax.local_devices()[0])
    for params in (placed, part.place(local), part.place(part.gather(placed))):
        assert_same(part.gather(params), host)
    with pytest.raises(ValueError, match=r"not the same in every process.*\n  \['w'\]$"):
        part.place(host | {"w": w + rank})

    # Made from a key, and with a state whose counters are outside of zero.
    tx = zerojax.dynamic_loss_scale(zerojax.zero(optax.adam(0.1), part), initial=2.0)
    key = jax.random.key(0)
    init_fn = lambda key: {"w": jax.random.normal(key, (13, 5)), "b": jnp.ones(16)}  # noqa: E731
    params, _ = zerojax.init(init_fn, tx, part)(key)
    assert_same(part.gather(params), init_fn(key))
    with pytest.raises(ValueError, match="not the same in every process"):
        zerojax.init(init_fn, tx, part)(jax.random.key(rank))
    state = tx.init(params)
    natural = checkpoint.to_natural(params, state, tx, part)
    assert_same(checkpoint.from_natural(natural, tx, part), (params, state))
    with ocp.CheckpointManager(f"{directory}/new") as manager:
        checkpoint.save(manager, 0, params, state, tx, part)
        assert_same(checkpoint.restore(manager, 0, tx, part), (params, state))

    # Checked, and a batch that each process holds for itself.
    zerojax.check(mean, part, params, x)
    with pytest.raises(ValueError, match="means something else"):
        zerojax.check(lambda params, x: jnp.var(x @ params["w"]), part, params, x)
    grad_fn = zerojax.value_and_grad(mean, part)
    with pytest.raises(ValueError, match="not the same in every process"):
        grad_fn(params, x + rank)
    step = zerojax.train_step(grad_fn, tx, part)
    with pytest.raises(ValueError, match=r"must be global.*\n  args\[0\]: float32\[16, 13\]$"):
        step(params, state, x)

    # Compiled, and taken until the loss scale reaches its floor.
    huge = jax.device_put(np.full_like(x, 1e30), NamedSharding(mesh, P("data")))
    compiled = step.lower(params, state, huge).compile()
    assert zerojax.memory(part, tx).compare(compiled).exact
    rows = zerojax.audit(compiled).rows()
    assert rows and all(row["axes"] == ["data"] for row in rows)
    for scale in (1.0, np.nan):
        params, state, metrics = step(params, state, huge)
        np.testing.assert_equal(float(metrics["loss_scale"]), scale)
    jax.block_until_ready(state)
    with pytest.raises(FloatingPointError, match="reached its floor"):
        step(params, state, huge)


def main():
    job, directory, port, processes, rank = sys.argv[1:]
    jax.distributed.initialize(
        f"127.0.0.1:{port}", int(processes), int(rank),
        initialization_timeout=60, heartbeat_timeout_seconds=10, shutdown_timeout_seconds=10,
    )  # fmt: skip
    assert jax.device_count() == 8 and jax.local_device_count() == 8 // int(processes)
    print(json.dumps({"first": first, "again": again}[job](directory)), flush=True)


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # an ordinary exit would wait for the other process
