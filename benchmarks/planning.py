"""How long planning takes: no devices, no compilation, only shapes and types.

Usage: python benchmarks/planning.py
"""

import time

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh

import zerojax


def timed(fn, *args):
    """Seconds that a call takes, and its result."""
    start = time.perf_counter()
    result = fn(*args)
    return time.perf_counter() - start, result


def shapes(leaves: int) -> dict[str, jax.ShapeDtypeStruct]:
    """A tree of many leaves, of a few hundred different shapes."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 40, size=(300, 2)) * 16
    return {
        f"layer{i}": jax.ShapeDtypeStruct(tuple(map(int, sizes[i % len(sizes)])), np.float32)
        for i in range(leaves)
    }


def main() -> None:
    mesh = AbstractMesh((64, 8), ("data", "model"))
    specs = jax.sharding.PartitionSpec()
    many, some = shapes(10_000), shapes(1_000)
    seconds, _ = timed(lambda: zerojax.partition(many, mesh, specs))
    print(f"partition of 10,000 leaves: {seconds:.2f} s (limit 1 s)")
    part = zerojax.partition(some, mesh, specs)
    for name, tx in {"adamw": optax.adamw(1e-3), "adafactor": optax.adafactor(1e-3)}.items():
        tx = zerojax.zero(tx, part)
        first, _ = timed(zerojax.abstract_state, tx, part)
        second, _ = timed(zerojax.abstract_state, tx, part)
        print(
            f"abstract_state of {name} over 1,000 leaves: {first:.2f} s (limit 5 s), "
            f"again {1000 * second:.2f} ms (limit 10 ms)"
        )


if __name__ == "__main__":
    main()
