"""What test_checkpoint.py runs in processes of their own: saves that are killed, peak memory.

`save DIR` saves step after step, of which every element is the number, and prints what is safe.
`measure DIR OUT` prints the peak memory of a restore, consolidate and load, in units of a leaf.
"""

import itertools
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import optax
import orbax.checkpoint as ocp
from jax import numpy as jnp

import zerojax
from zerojax import checkpoint


def plan(shape, leaves, **options):
    params = {f"w{i}": jax.ShapeDtypeStruct(shape, jnp.float32) for i in range(leaves)}
    mesh = jax.make_mesh((8,), ("data",))
    part = zerojax.partition(params, mesh, shard_dim=lambda *_: 0, **options)
    return part, zerojax.zero(optax.adam(0.1), part)


def filled(part, tx, value):
    """Parameters and state, every element of which is the value."""

    def fill(like):
        return jnp.full(like.shape, value, like.dtype, device=like.sharding)

    target = checkpoint.restore_target(tx, part)
    return checkpoint.from_natural(jax.tree.map(fill, target), tx, part)


def save(directory):
    part, tx = plan((257, 64), 6, stage=3)
    with ocp.CheckpointManager(directory) as manager:
        last = manager.latest_step() or 0
        state = filled(part, tx, last + 1)
        checkpoint.to_natural(*state, tx, part)  # compiles
        print("ready", flush=True)
        for step in itertools.count(last + 1):
            checkpoint.save(manager, step, *filled(part, tx, step), tx, part)
            manager.wait_until_finished()
            print(step, flush=True)


def memory(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def measure(directory, out):
    def peak(fn):
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # VmHWM starts again
        before = memory("VmRSS")
        result = fn()
        return memory("VmHWM") - before, result

    def restore(directory, tx, part):
        with ocp.CheckpointManager(directory) as manager:
            return jax.block_until_ready(checkpoint.restore(manager, None, tx, part))

    sizes = {}
    for rows in (16, 1021):  # the first run makes the threads, and what else stays
        part, tx = plan((rows, 2048), 4, stage=3)
        path = f"{directory}/{rows}"
        with ocp.CheckpointManager(path) as manager:
            checkpoint.save(manager, 1, *filled(part, tx, 1), tx, part)
        sizes["restore"], state = peak(lambda: restore(path, tx, part))  # noqa: B023
        arrays = jax.tree.leaves(state)
        sizes["restore"] -= sum(s.data.nbytes for x in arrays for s in x.addressable_shards)
        sizes["consolidate"], _ = peak(lambda: checkpoint.consolidate(path, out))  # noqa: B023
        sizes["load"], loaded = peak(lambda: checkpoint.load_safetensors(out, part))  # noqa: B023
        arrays = jax.tree.leaves(loaded)
        sizes["load"] -= sum(s.data.nbytes for x in arrays for s in x.addressable_shards)
    print(*(f"{name}={size / (1021 * 2048 * 4):.2f}" for name, size in sizes.items()))


if __name__ == "__main__":
    {"save": save, "measure": measure}[sys.argv[1]](*sys.argv[2:])
