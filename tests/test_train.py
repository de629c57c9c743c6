"""`train_step` and `init`: the same training as one device, in place, with one compilation."""

import functools

import chex
import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from models import (
    SCAN_DIMS,
    SPECS,
    layered_loss_fn,
    loss_fn,
    make_batch,
    make_params,
    train,
)
from pairs import product

import zerojax
from tests.conftest import compilations, make_mesh

STEPS = 3
OPTIMIZERS = {
    "adamw": lambda wrap: wrap(optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))),
    "clip outside": lambda wrap: optax.chain(
        zerojax.clip_by_global_norm(0.1), wrap(optax.adamw(1e-2))
    ),
    "sgd outside": lambda wrap: optax.chain(wrap(optax.trace(0.9)), optax.scale(-1e-2)),
    "multisteps outside": lambda wrap: optax.MultiSteps(wrap(optax.adamw(1e-2)), 2),
    "multisteps inside": lambda wrap: wrap(optax.MultiSteps(optax.adamw(1e-2), 2)),
}


@functools.cache
def expected(optimizer):
    tx = OPTIMIZERS[optimizer](lambda inner: inner)
    return train(loss_fn, tx, make_params(), STEPS, *make_batch())


def plan(mesh, **options):
    specs = SPECS if "model" in mesh.axis_names else P()
    return zerojax.partition(make_params(), mesh, specs, scan_dims=SCAN_DIMS, **options)


def assert_same_shardings(tree, wanted):
    for (path, x), want in zip(
        jax.tree.leaves_with_path(tree), jax.tree.leaves(wanted), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert (x.shape, x.dtype) == (want.shape, want.dtype), name
        assert x.sharding.is_equivalent_to(want.sharding, x.ndim), (name, x.sharding)


@pytest.mark.parametrize(
    *product(
        optimizer=list(OPTIMIZERS),
        stage=[1, 2, 3, 0],
        mesh=["mesh8", "mesh4x2"],
        axis_type=[AxisType.Auto, AxisType.Explicit],
        gradients=["zerojax", "zerojax by layer", "jax"],
        start=["place", "init"],
    )
)
def test_training_equals_one_device(x64, optimizer, stage, mesh, axis_type, gradients, start):
    part = plan(make_mesh(mesh, axis_type), stage=stage)
    tx = OPTIMIZERS[optimizer](lambda inner: zerojax.zero(inner, part))
    tx = tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx
    traces = []

    def counted(params, *args):
        traces.append(1)
        if gradients == "zerojax":
            return loss_fn(params, *args)
        return layered_loss_fn(params if gradients != "jax" else part.shards(params), *args)

    if gradients != "jax":
        grad_fn = zerojax.value_and_grad(counted, part, accumulate=2)
    else:
        grad_fn = jax.value_and_grad(counted, allow_int=True)
    params = part.place(make_params())
    if start == "init" or "outside" in optimizer:
        params, opt_state = zerojax.init(lambda params: params, tx, part)(params)
    else:
        opt_state = tx.init(params)
    step = zerojax.train_step(grad_fn, tx, part)
    batch = make_batch()
    abstract = zerojax.abstract_state(tx, part)
    wanted_params, wanted_metrics = expected(optimizer)
    with compilations() as compiled:
        for loss, norm in wanted_metrics:
            before = jax.tree.leaves((params, opt_state))
            params, opt_state, metrics = step(params, opt_state, *batch)
            assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-12)
            assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-11)
            assert_same_shardings(opt_state, abstract)
            for leaf, x in zip(part.leaves, jax.tree.leaves(params), strict=True):
                want = NamedSharding(part.mesh, part.param_spec(leaf))
                assert x.sharding.is_equivalent_to(want, x.ndim), leaf.path
            kept = [x.shape for x in before if x.size and not x.is_deleted()]
            assert not kept, "these buffers were not reused"
    assert len(compiled) == 1 and "step" in compiled[0]
    chex.assert_trees_all_close(part.gather(params), wanted_params, rtol=1e-11, atol=1e-11)
    for leaf, x in zip(part.leaves, jax.tree.leaves(params), strict=True):
        padding = np.asarray(x).sum() - np.asarray(x)[tuple(map(slice, leaf.shape))].sum()
        assert abs(padding) < 1e-12, f"the padding of {leaf.path} is no longer zero"
