"""`global_norm` and `clip_by_global_norm`: every element once, in every context."""

import jax
import numpy as np
import optax
import pytest
from jax import numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import zerojax

SIZES, NAMES = (2, 2, 2), ("data", "model", "stage")
SPECS = {
    "data": P("data"),
    "data and model": P(("model", "data")),
    "two dims": P("data", "model"),
    "stage": P(None, "stage"),
    "nowhere": P(),
    "all": P(("stage", "data"), "model"),
}
TREE = {k: np.random.default_rng(i).normal(size=(8, 4)) for i, k in enumerate(SPECS)}


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("manual", [False, True])
def test_counts_every_element_once(x64, axis_type, manual):
    mesh = jax.make_mesh(SIZES, NAMES, axis_types=(axis_type,) * 3)
    tree = {
        k: jax.device_put(x, jax.sharding.NamedSharding(mesh, SPECS[k])) for k, x in TREE.items()
    }
    clip = zerojax.clip_by_global_norm(1.0)

    def norm_and_clip(tree):
        return zerojax.global_norm(tree), clip.update(tree, clip.init(tree))[0]

    fn = norm_and_clip
    if manual:
        # The output spec says that the norm is the same on all devices: jax checks the type.
        fn = jax.shard_map(fn, mesh=mesh, in_specs=(SPECS,), out_specs=(P(), SPECS))
    norm, clipped = jax.jit(fn)(tree)
    assert float(norm) == pytest.approx(float(optax.tree.norm(TREE)), rel=1e-14)
    want, _ = optax.clip_by_global_norm(1.0).update(TREE, optax.EmptyState())
    for k in TREE:
        np.testing.assert_allclose(clipped[k], want[k], rtol=1e-14)


def test_needs_types_in_a_manual_region():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    fn = jax.shard_map(
        zerojax.global_norm, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False
    )
    with pytest.raises(TypeError, match="check_vma=False"):
        jax.jit(fn)(jnp.ones(8))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sixteen_bits_are_summed_in_float32(dtype):
    x = jnp.full(4096, 300.0, dtype)  # the square overflows float16
    assert float(zerojax.global_norm([x])) == pytest.approx(64 * 300.0, rel=1e-6)
    clip = zerojax.clip_by_global_norm(1.0)
    assert clip.update([x], clip.init([x]))[0][0].dtype == dtype


def test_of_nothing_and_of_integers():
    assert float(zerojax.global_norm({})) == 0
    assert float(zerojax.global_norm([jnp.arange(3)])) == pytest.approx(5**0.5)
