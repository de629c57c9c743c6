"""How exact sums of bfloat16 gradients over microbatches are, by how they are kept.

Usage: JAX_PLATFORMS=cpu python benchmarks/sums.py

Gradients are normal noise around a mean of a quarter of it. Printed are relative errors (2-norm).
"""

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

SIZE, NARROW = 200_000, jnp.bfloat16


def stochastic(x: jax.Array, key: jax.Array) -> jax.Array:
    """Rounds float32 to bfloat16, up or down at random, so that the mean is right."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    bits += jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    return lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), NARROW)


def sums(grads: np.ndarray) -> dict[str, jax.Array]:
    wide = jnp.asarray(grads)  # all sums below round only where they are kept
    float32, narrow, noisy, high, low = (jnp.zeros(SIZE) for _ in range(5))
    for k, g in enumerate(wide):
        float32 += g
        narrow = (narrow + g).astype(NARROW).astype(g.dtype)
        noisy = stochastic(noisy + g, jax.random.key(k)).astype(g.dtype)
        both = high + low + g
        high = both.astype(NARROW).astype(g.dtype)
        low = (both - high).astype(NARROW).astype(g.dtype)
    two = (wide[::2] + wide[1::2]).astype(NARROW).astype(jnp.float32)
    return {
        "float32": float32, "bfloat16": narrow, "bfloat16, stochastic": noisy,
        "two bfloat16": high + low, "pairs, then float32": jnp.sum(two, 0),
    }  # fmt: skip


def main() -> None:
    rng = np.random.default_rng(0)
    for count in (4, 16, 64):
        grads = rng.normal(size=(count, SIZE)) + rng.normal(size=SIZE) / 4
        grads = np.asarray(jnp.asarray(grads, NARROW), np.float32)
        exact = grads.astype(np.float64).sum(0)
        for name, total in sums(grads).items():
            error = np.linalg.norm(np.float64(total) - exact) / np.linalg.norm(exact)
            print(f"{count:3} microbatches  {name:22}{error:.1e}")


if __name__ == "__main__":
    main()
