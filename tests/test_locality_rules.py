"""The walk behind shard-locality, on single operations: what it accepts is equal on shards."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from zerojax._shard_locality import not_shard_local
from zerojax._sharding_types import twin_mesh

MESH = AbstractMesh((4,), ("data",))
SHAPE = (8, 12)
KEY = jax.random.key(0)

# Of one array.
ACCEPTED_ON_BOTH_DIMS = {
    "tanh": jnp.tanh,
    "cube": lambda x: x**3,
    "clip": lambda x: jnp.clip(x, -1, 1),
    "relu": jax.nn.relu,
    "cast": lambda x: x.astype(jnp.float32).astype(x.dtype),
    "constant": lambda x: x * jnp.full(x.shape, 2.0) + jnp.ones_like(x),
    "finite": lambda x: x * jnp.isfinite(x),
    "transpose": lambda x: jnp.tanh(x.T).T,
    "squeeze": lambda x: jnp.squeeze(x[None]),
    "checkpoint": jax.checkpoint(jnp.sin),
    "loop": lambda x: jax.lax.fori_loop(0, 2, lambda i, c: jnp.sin(c) + i, x),
}
ACCEPTED_ON_DIM_0 = {
    "row mean": lambda x: x - jnp.mean(x, 1, keepdims=True),
    "row max": lambda x: x - jnp.max(x, 1)[:, None],
    "row norm": lambda x: x / jnp.linalg.norm(x, axis=1, keepdims=True),
    "row softmax": lambda x: jax.nn.softmax(x, 1),
    "row sort": lambda x: jnp.sort(x, 1),
    "row cumsum": lambda x: jnp.cumsum(x, 1),
    "row argmax": lambda x: x * jnp.argmax(x, 1)[:, None],
    "vmap": jax.vmap(lambda row: row - row.mean()),
    "columns": lambda x: x + jnp.arange(x.shape[1]),
}
ACCEPTED_NOWHERE = {
    "mean": lambda x: x - jnp.mean(x),
    "all finite": lambda x: x * jnp.all(jnp.isfinite(x)),
    "position": lambda x: x + jnp.arange(x.size).reshape(x.shape),
    "noise": lambda x: x + jax.random.normal(KEY, x.shape),
    "size": lambda x: x * x.size,
    "rows and columns": lambda x: x / np.sqrt(x.shape[0]) / np.sqrt(x.shape[1]),
    "gram": lambda x: (x @ x.T) @ x,
    "triangle": jnp.triu,
    "median": lambda x: jnp.where(x > jnp.median(x), x, 0),
    "cond": lambda x: jax.lax.cond(jnp.sum(x) > 0, lambda: x, lambda: -x),
    "while": lambda x: jax.lax.while_loop(lambda c: jnp.max(c) > 1, lambda c: c / 2, x),
    "count": lambda x: x * jnp.sum(jnp.ones_like(x)),
}
EITHER = {  # right to refuse, and right to accept where it is equal
    "column mean": lambda x: x - jnp.mean(x, 0, keepdims=True),
    "column sort": lambda x: jnp.sort(x, 0),
    "column cumsum": lambda x: jnp.cumsum(x, 0),
    "scan": lambda x: jax.lax.associative_scan(jnp.add, x, axis=0),
    "flip rows": lambda x: jnp.flip(x, 0),
    "roll": lambda x: jnp.roll(x, 1, 0),
    "set": lambda x: x.at[0].set(0),
    "take": lambda x: jnp.take(x, jnp.arange(x.shape[0])[::-1], 0),
    "pad": lambda x: jnp.pad(x, ((1, 0), (0, 0)))[:-1],
    "flat": lambda x: (x.reshape(-1) * 2).reshape(x.shape),
    "identity product": lambda x: x @ jnp.eye(x.shape[1]),
    "fft": lambda x: jnp.fft.fft(x, axis=0).real,
    "halves": lambda x: jnp.concatenate([x[1:], x[:1]], 0),
    "sqrt rows": lambda x: x / np.sqrt(x.shape[0]),
    "row noise": lambda x: x + jax.random.normal(KEY, (x.shape[0], 1)),
    "parity": lambda x: x * (jnp.arange(x.shape[0]) % 2 == 0)[:, None],
}
OPERATIONS = ACCEPTED_ON_BOTH_DIMS | ACCEPTED_ON_DIM_0 | ACCEPTED_NOWHERE | EITHER
# Of two.
PAIRS = {
    "add": jnp.add,
    "where": lambda a, b: jnp.where(a > 0, a, b),
    "row scale": lambda a, b: a * b.mean(1, keepdims=True),
    "first row": lambda a, b: a + b[:1],
    "total": lambda a, b: a * jnp.sum(b),
    "product": lambda a, b: jnp.matmul(a, b.T) @ a,
}


def is_accepted(fn, dim):
    spec = P("data") if dim == 0 else P(None, "data")
    shard = tuple(n // 4 if i == dim else n for i, n in enumerate(SHAPE))

    def arguments(shape):
        sharding = jax.sharding.NamedSharding(twin_mesh(MESH), spec)
        return (jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding),) * 2

    return not not_shard_local(twin_mesh(MESH), {"data"}, fn, arguments(SHAPE), arguments(shard))


def is_equal(fn, dim):
    """The oracle: the function on each shard alone, joined, is the function on the whole."""
    rng = np.random.default_rng(0)
    a, b = (2 * rng.normal(size=SHAPE).astype(np.float32) for _ in range(2))
    try:
        parts = [fn(jnp.asarray(x), jnp.asarray(y)) for x, y in zip(
            np.split(a, 4, dim), np.split(b, 4, dim), strict=True
        )]  # fmt: skip
    except TypeError:
        return False  # cannot even run on a shard
    joined, whole = np.concatenate(parts, dim), np.asarray(fn(jnp.asarray(a), jnp.asarray(b)))
    return joined.shape == whole.shape and np.allclose(joined, whole, rtol=1e-4, atol=1e-5)


def one(name):
    return lambda a, _: OPERATIONS[name](a)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name, dim):
    accepted = is_accepted(one(name), dim)
    if name in ACCEPTED_ON_BOTH_DIMS or (name in ACCEPTED_ON_DIM_0 and dim == 0):
        assert accepted
    if name in ACCEPTED_NOWHERE:
        assert not accepted
    assert is_equal(one(name), dim) or not accepted


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(
    first=st.sampled_from(sorted(OPERATIONS)),
    second=st.sampled_from(sorted(OPERATIONS)),
    pair=st.sampled_from(sorted(PAIRS)),
    last=st.sampled_from(sorted(OPERATIONS)),
    dim=st.sampled_from([0, 1]),
)
def test_what_is_accepted_is_equal(first, second, pair, last, dim):
    def fn(a, b):
        return OPERATIONS[last](PAIRS[pair](OPERATIONS[first](a), OPERATIONS[second](b)))

    assert not is_accepted(fn, dim) or is_equal(fn, dim)
