"""Checkpoints: the same bits and the same training at any N, any stage, and without zerojax."""

import functools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P
from models import reference
from orbax.checkpoint import v1
from pairs import product
from safetensors.numpy import load_file, save_file

import zerojax
from zerojax import checkpoint

WORKER = Path(__file__).with_name("checkpoint_worker.py")
LAYOUTS = {  # devices by axis
    "8": {"data": 8},
    "4": {"data": 4},
    "2": {"data": 2},
    "1": {"data": 1},
    "6": {"data": 6},
    "4x2": {"data": 4, "model": 2},
}
SPECS = {"up": P(None, "model"), "head": P(), "small": P(), "scale": P(), "ids": P()}
# Padded on every count of devices but one: on eight, the last three hold nothing but padding.
SHAPES = {"up": (4, 12), "head": (12, 5), "small": (5,), "scale": (), "ids": (4,)}
TRAINABLE = {name: name != "ids" for name in SHAPES}
HEAD_DIM = {"['head']": 1}


def make_params(dtype=np.float64):
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()}
    return params | {"ids": np.arange(4)}


def loss_fn(params, x, y):
    hidden = jnp.tanh(x @ params["up"])
    out = hidden @ params["head"] * params["scale"] + params["small"]
    return jnp.mean((out - y) ** 2)


def make_batch():
    rng = np.random.default_rng(1)
    return rng.normal(size=(48, 4)), rng.normal(size=(48, 5))


def optimizer():
    # In float32, of which these numbers need no rounding: XLA may leave roundings out.
    schedule = optax.linear_schedule(1 / 8, 1 / 32, 8)
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(schedule))
    return optax.masked(tx, TRAINABLE)


def plan(layout, stage, params=None, **options):
    sizes = LAYOUTS[layout]
    mesh = jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), devices=jax.devices()[: np.prod([*sizes.values()])],
        axis_types=(jax.sharding.AxisType.Auto,) * len(sizes),
    )  # fmt: skip
    options.setdefault("specs", SPECS if "model" in sizes else None)
    options.setdefault("shard_dim", lambda path, *_: HEAD_DIM.get(path))
    return zerojax.partition(params or make_params(), mesh, stage=stage, **options)


@functools.cache
def setting(layout, stage):
    """Compiled once for all tests."""
    part = plan(layout, stage)
    tx = zerojax.zero(optimizer(), part)
    return part, tx, zerojax.train_step(zerojax.value_and_grad(loss_fn, part), tx, part)


def natural(params, opt_state, tx, part):
    return jax.tree.map(np.asarray, checkpoint.to_natural(params, opt_state, tx, part))


def assert_same(one, other, rtol=0):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for (path, x), y in zip(jax.tree.leaves_with_path(one), jax.tree.leaves(other), strict=True):
        name = jax.tree_util.keystr(path)
        assert (np.shape(x), x.dtype) == (np.shape(y), y.dtype), name
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol, err_msg=name)


def go_on(layout, stage, params, opt_state):
    part, tx, step = setting(layout, stage)
    for _ in range(3):
        params, opt_state, _ = step(params, opt_state, *make_batch())
    return natural(params, opt_state, tx, part)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two steps at 8; the checkpoint, what it must hold, and what three more steps give."""

    @functools.cache
    def make(stage):
        directory = tmp_path_factory.mktemp("run")
        part, tx, step = setting("8", stage)
        params = part.place(make_params())
        opt_state = tx.init(params)
        for _ in range(2):
            params, opt_state, _ = step(params, opt_state, *make_batch())
        saved = natural(params, opt_state, tx, part)
        with ocp.CheckpointManager(directory) as manager:
            assert checkpoint.save(manager, 2, params, opt_state, tx, part)
            later = go_on("8", stage, params, opt_state)  # donates what is being written
        return directory, saved, later

    return make


def plain_go_on(params, opt_state):
    for _ in range(3):
        _, grads = reference(loss_fn, params, *make_batch())
        updates, opt_state = optimizer().update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    return {"params": params, "opt_state": opt_state}


@pytest.mark.parametrize(*product(stage=[1, 2, 3], layout=list(LAYOUTS), stage_then=[1, 2, 3]))
def test_a_run_goes_on(x64, run, stage, layout, stage_then):
    directory, saved, later = run(stage)
    part, tx, _ = setting(layout, stage_then)
    with ocp.CheckpointManager(directory) as manager:
        params, opt_state = checkpoint.restore(manager, None, tx, part)
    assert_same(natural(params, opt_state, tx, part), saved)
    for x, like in zip(
        jax.tree.leaves(opt_state), jax.tree.leaves(zerojax.abstract_state(tx, part)), strict=True
    ):
        assert x.shape == like.shape and x.sharding.is_equivalent_to(like.sharding, x.ndim)
    assert_same(go_on(layout, stage_then, params, opt_state), later, rtol=1e-11)


@pytest.mark.parametrize("stage", [1, 3])
def test_plain_optax_goes_on(x64, run, stage):
    directory, saved, later = run(stage)
    params = jax.tree.map(jnp.asarray, make_params())
    target = {"params": params, "opt_state": optimizer().init(params)}
    with ocp.CheckpointManager(directory) as manager:
        there = manager.restore(2, args=ocp.args.StandardRestore(target))
    assert_same(there, saved)
    assert_same(plain_go_on(**there), later, rtol=1e-11)


def test_a_plain_checkpoint_goes_on(x64, tmp_path):
    params = jax.tree.map(jnp.asarray, make_params())
    there = plain_go_on(params, optimizer().init(params))
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(3, args=ocp.args.StandardSave(there))
        part, tx, _ = setting("4x2", 3)
        state = checkpoint.restore(manager, 3, tx, part)
    assert_same(natural(*state, tx, part), there)
    assert_same(go_on("4x2", 3, *state), plain_go_on(**there), rtol=1e-11)


def test_orbax_v1(x64, run, tmp_path):
    directory, saved, later = run(3)
    part, tx, _ = setting("8", 1)
    there = v1.load(directory / "2", checkpoint.restore_target(tx, part))
    state = checkpoint.from_natural(there, tx, part)
    assert_same(natural(*state, tx, part), saved)
    v1.save(tmp_path / "v1", checkpoint.to_natural(*state, tx, part))
    part, tx, _ = setting("4x2", 3)
    state = checkpoint.from_natural(
        v1.load(tmp_path / "v1", checkpoint.restore_target(tx, part)), tx, part
    )
    assert_same(natural(*state, tx, part), saved)
    assert_same(go_on("4x2", 3, *state), later, rtol=1e-11)


def test_every_kind_of_state(tmp_path):
    """Masters, loss scale, accumulators outside of zero, a key, a leaf without elements."""
    params = make_params(np.float32)
    params = {k: jnp.asarray(v, jnp.bfloat16 if v.ndim == 2 else None) for k, v in params.items()}
    params |= {"empty": jnp.zeros((0, 4))}

    def make(layout, stage):
        specs = SPECS | {"empty": P()} if layout == "4x2" else None
        part = plan(layout, stage, params, specs=specs)
        inner = optax.chain(
            optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.adam(optax.linear_schedule(1, 0, 9))
        )
        tx = optax.MultiSteps(zerojax.zero(inner, part, master_dtype=jnp.float32), 3)
        return part, zerojax.dynamic_loss_scale(tx.gradient_transformation())

    def values(tree):
        is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
        tree = jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)
        return jax.tree.map(np.asarray, tree)

    part, tx = make("8", 3)
    stored, state = zerojax.init(lambda params: params, tx, part)(params)
    update = jax.jit(tx.update)
    for value in (1.0, jnp.inf, 2.0):
        grads = part.map(
            lambda leaf, x: jnp.full_like(x, value) if leaf.trainable else x,  # noqa: B023
            stored,
        )
        _, state = update(grads, state, stored)
    assert int(state.skipped) == 1 and int(state.inner.mini_step) == 2
    saved = values(checkpoint.to_natural(stored, state, tx, part))
    assert saved["params"]["empty"] is None
    assert saved["opt_state"].inner.acc_grads["head"].shape == (12, 5)
    assert saved["opt_state"].inner.inner_opt_state.master["head"].dtype == np.float32
    with ocp.CheckpointManager(tmp_path) as manager:
        checkpoint.save(manager, 3, stored, state, tx, part)
        for layout, stage in (("8", 3), ("6", 1), ("4x2", 3)):
            part, tx = make(layout, stage)
            restored = checkpoint.restore(manager, 3, tx, part)
            assert_same(values(checkpoint.to_natural(*restored, tx, part)), saved)
            assert restored[0]["empty"].shape == (0, 4)
    # The weights are taken from their masters.
    names = checkpoint.consolidate(tmp_path, tmp_path / "weights.safetensors")
    weights = load_file(tmp_path / "weights.safetensors")
    assert set(names) == set(weights) == params.keys() - {"empty"}
    np.testing.assert_array_equal(
        weights["head"], saved["opt_state"].inner.inner_opt_state.master["head"]
    )


def test_what_differs_is_listed_by_path(x64, run):
    directory, _, _ = run(1)
    params = make_params() | {"head": np.zeros((12, 7)), "new": np.zeros(3)}
    params["small"] = params["small"].astype(np.float32)
    del params["scale"]
    part = plan("8", 1, params, specs=None)
    tx = zerojax.zero(optax.masked(optax.sgd(0.1), {k: k != "ids" for k in params}), part)
    with ocp.CheckpointManager(directory) as manager:
        with pytest.raises(ValueError, match=r"step 2 in .* was not saved from") as error:
            checkpoint.restore(manager, 2, tx, part)
        with pytest.raises(FileNotFoundError, match="step 7"):
            checkpoint.restore(manager, 7, tx, part)
    for text in (
        "params.head: expected float64[12, 7], got float64[12, 5]",
        "params.new: is missing, expected float64[3]",
        "params.small: expected float32[5], got float64[5]",
        "params.scale: is not expected",
        "opt_state.inner_state.1.0.mu.up: is not expected",
    ):
        assert text in str(error.value)
    assert "'ids'" not in str(error.value)


def test_only_this_training_steps_trees_are_saved(x64, run):
    _, saved, _ = run(1)
    part, tx, _ = setting("8", 3)
    with pytest.raises(ValueError, match=r"params.head: expected float64\[12, 8\], got .*12, 5"):
        checkpoint.to_natural(saved["params"], saved["opt_state"], tx, part)
    some = {name: x for name, x in saved["params"].items() if name != "up"}
    with pytest.raises(ValueError, match=r"params.up: is missing, expected float64\[4, 12\]"):
        checkpoint.from_natural(saved | {"params": some}, tx, part)


def test_state_that_depends_on_the_padding_is_refused():
    params = {"w": jnp.ones((127, 131))}
    part = zerojax.partition(params, jax.make_mesh((8,), ("data",)), stage=3)
    tx = optax.chain(zerojax.zero(optax.adam(0.1), part), optax.scale_by_factored_rms())
    with pytest.raises(ValueError, match=r"(?s)inside of zero.*opt_state\.1\.v\.w"):
        checkpoint.restore_target(tx, part)
    inside = zerojax.zero(optax.chain(optax.adam(0.1), optax.scale_by_factored_rms()), part)
    checkpoint.restore_target(inside, part)


def test_an_empty_directory(tmp_path):
    part, tx, _ = setting("8", 1)
    with ocp.CheckpointManager(tmp_path) as manager, pytest.raises(FileNotFoundError):
        checkpoint.restore(manager, None, tx, part)
    with pytest.raises(FileNotFoundError, match="expected one tree"):
        checkpoint.consolidate(tmp_path / "nothing", tmp_path / "out")


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("layout", ["8", "4x2"])
def test_safetensors_come_and_go(x64, run, tmp_path, layout, stage):
    directory, saved, _ = run(1)
    file = tmp_path / "weights.safetensors"
    names = checkpoint.consolidate(
        directory, file, dtype=None, rename="model.{}".format, tied={"tied": "model.head"}
    )
    weights = load_file(file)
    assert sorted(names) == sorted(weights) == sorted([*(f"model.{k}" for k in SHAPES), "tied"])
    np.testing.assert_array_equal(weights["tied"], saved["params"]["head"])
    assert not list(tmp_path.glob("*.partial"))
    part, _, _ = setting(layout, stage)
    params = checkpoint.load_safetensors(file, part, rename="model.{}".format, ignore=["tied"])
    assert_same(params, part.place(saved["params"]))
    assert jax.tree.all(
        jax.tree.map(lambda x, y: x.sharding == y.sharding, params, part.place(saved["params"]))
    )


def test_consolidated_weights_are_float32(x64, run, tmp_path):
    directory, saved, _ = run(1)
    checkpoint.consolidate(directory / "2", tmp_path / "weights")
    weights = load_file(tmp_path / "weights")
    assert weights["ids"].dtype == saved["params"]["ids"].dtype
    np.testing.assert_array_equal(weights["up"], saved["params"]["up"].astype(np.float32))
    with pytest.raises(ValueError, match=r"(?s)same: 5 weights.*tied: there is no nothing"):
        checkpoint.consolidate(
            directory, tmp_path / "x", rename=lambda _: "same", tied={"tied": "nothing"}
        )


def test_safetensors_that_do_not_fit_are_listed(tmp_path):
    params = make_params(np.float32)
    there = params | {"head": params["head"].T, "more": np.zeros(1), "small": np.arange(5)}
    del there["up"]
    save_file({k: np.ascontiguousarray(v) for k, v in there.items()}, tmp_path / "x")
    with pytest.raises(ValueError, match="rename=") as error:
        checkpoint.load_safetensors(tmp_path / "x", plan("8", 1, params))
    for text in (
        "['up']: the file has no 'up'",
        "['head']: expected float32[12, 5], 'head' is F32[5, 12]",
        "['small']: expected float32[5], 'small' is I64[5]",
        "'more': no parameter has this name",
    ):
        assert text in str(error.value)


def test_weights_in_several_files_and_another_dtype(tmp_path):
    params = make_params(np.float32)
    for name, value in params.items():
        wider = np.float64 if name == "up" else value.dtype
        save_file({name: np.asarray(value, wider)}, tmp_path / name)
    part = plan("8", 3, params)
    loaded = checkpoint.load_safetensors([tmp_path / name for name in params], part)
    assert_same(loaded, part.place(params))


def start(*args):
    path = os.pathsep.join([str(WORKER.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    # glibc gives back what is freed, or the peak would be that of its free lists.
    env = os.environ | {"PYTHONPATH": path, "MALLOC_MMAP_THRESHOLD_": "65536"}
    return subprocess.Popen(
        [sys.executable, str(WORKER), *map(str, args)], env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.full)])
def test_a_save_that_is_killed_leaves_the_last_good_step(tmp_path, kills):
    from checkpoint_worker import plan as worker_plan

    part, tx = worker_plan((257, 64), 6, stage=1)
    moments, good = random.Random(kills), 0
    for _ in range(kills):
        worker = start("save", tmp_path)  # goes on from what the one before has left
        assert worker.stdout.readline().strip() == "ready", worker.stderr.read()
        good = good or int(worker.stdout.readline())  # one step, however slow the machine
        time.sleep(moments.uniform(0.1, 1.0))
        worker.send_signal(signal.SIGKILL)
        out, _ = worker.communicate(timeout=60)
        good = max([good, *map(int, out.split())])
        with ocp.CheckpointManager(tmp_path) as manager:
            step = manager.latest_step()
            assert (step or 0) >= good
            if step is not None:
                state = checkpoint.restore(manager, None, tx, part)
                for x in jax.tree.leaves(checkpoint.to_natural(*state, tx, part)):
                    np.testing.assert_array_equal(x, np.full(x.shape, step, x.dtype))
    assert good > 0


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's /proc")
def test_peak_memory(tmp_path):
    """Beyond what the devices then hold, in units of the largest leaf."""
    out, err = start("measure", tmp_path, tmp_path / "out").communicate(timeout=120)
    assert out, err
    sizes = {k: float(v) for k, v in (entry.split("=") for entry in out.split())}
    assert sizes["restore"] <= 1.5, out
    assert sizes["consolidate"] <= 1.5, out
    assert sizes["load"] <= 1.5, out
