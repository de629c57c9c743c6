"""The 3D example equals one device, communicates what it should, and names a wrong argument."""

import math
import re
from collections import Counter

import jax
import optax
import pytest
from example_runs import assert_refused, load, run
from jax import numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax

TINY = "--steps 3 --batch 36 --length 10 --dim 64 --layers 4 --microbatches 6".split()
SMALL = 8  # elements: scalars, one for each kind of leaf in the norm


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("Every unhappy family is unhappy in its own way. " * 100)
    return path


@pytest.fixture(scope="module")
def example():
    return load("pipeline_3d")


@pytest.mark.parametrize("flags", ["--zero 1 --manual-model", "--zero 3"])
def test_trains_as_one_device_does(flags, text, tmp_path):
    printed = run("pipeline_3d", [*TINY, *flags.split()], text, tmp_path)
    assert "pipeline = one device: all 3 losses differ by at most" in printed
    row = re.search(r"optimizer state +(.*)", printed)[1].replace(",", "")
    replicated, plain, zero1, zero3 = map(int, row.split())
    assert replicated > 3 * plain and zero1 == zero3
    assert zero1 - 4 == (plain - 4) / 2  # the step count is whole
    assert (tmp_path / "pipeline_3d.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("model", ["automatic", "manual"])
@pytest.mark.parametrize("zero", [1, 3])
def test_what_is_communicated(zero, model, example, text, tmp_path):
    flags = [*TINY, "--text", str(text), "--out", str(tmp_path)]
    flags += ["--manual-model"] if model == "manual" else []
    args = example.make_parser().parse_args(flags)
    shapes = jax.eval_shape(lambda key: example.init_params(key, args), jax.random.key(0))
    part = example.set_up(args, shapes)[1][f"3D, ZeRO {zero}"]
    tx = zerojax.zero(optax.adamw(1e-3), part)
    step = zerojax.train_step(example.make_grad_fn(part, args), tx, part)
    params, tokens = (
        jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), *pair)
        for pair in (
            (shapes, part.shardings(part.param_specs)),
            (jnp.zeros((36, 11), jnp.int32), NamedSharding(part.mesh, P("data"))),
        )
    )
    compiled = step.lower(params, zerojax.abstract_state(tx, part), tokens).compile()
    big = [c for c in zerojax.audit(compiled, part.mesh).collectives if c.elements > SMALL]
    assert all(len(c.axes) == 1 for c in big)
    over = {axis: [c for c in big if c.axes == (axis,)] for axis in part.mesh.axis_names}

    # Over `model`: of each microbatch's activations, after attention and after the hidden units,
    # forward and backward, in each of 2 layers and 7 ticks.
    activations = 3 * 10 * 64
    found = Counter()
    for c in over["model"]:
        found[c.kind, c.elements, c.in_loop] += c.trips
    assert found == {("all-reduce", activations, True): 4 * 2 * 7}

    # Over `stage`: activations from tick to tick, those of 6 microbatches to the heads and back,
    # and once the gradients of what all stages hold, as shards.
    found = Counter()
    for c in over["stage"]:
        if c.kind != "all-reduce":
            found[c.kind, c.elements, c.in_loop] += c.trips
    assert found == {
        ("collective-permute", activations, True): 2 * 7,
        ("reduce-scatter", 6 * activations, False): 1,
        ("all-gather", 6 * activations, False): 1,
    }
    sums = [c for c in over["stage"] if c.kind == "all-reduce"]
    tied = [leaf for leaf in part.leaves if not leaf.model_axes]
    assert [leaf.path for leaf in tied] == ["['embed']", "['norm']", "['position']"]
    shards = sum(math.prod(leaf.stored) // 2 for leaf in tied)
    assert shards <= sum(c.elements for c in sums) <= shards + SMALL
    assert not any(c.in_loop for c in sums)

    # Over `data`: never a whole gradient; at ZeRO 1 once per step.
    assert {c.kind for c in over["data"]} == {"reduce-scatter", "all-gather"}
    assert zero == 3 or not any(c.in_loop for c in over["data"])


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--zero 2", "--zero: invalid choice: 2"),
        ("--mesh eight", "--mesh eight: expected data=N,stage=N,model=N that make 8 devices"),
        ("--mesh data=2,stage=2,model=1", "--mesh data=2,stage=2,model=1: expected"),
        ("--layers 3", "--layers 3: does not divide by stage = 2"),
        ("--microbatches 3", "--microbatches 3: does not divide by stage = 2"),
        ("--batch 32", "--batch 32: does not divide by data x microbatches = 12"),
        ("--dim 32", "['layers']['qkv']: dim 3 of (4, 32, 3, 1, 32) does not divide"),
        ("--learning-rate nan", "--learning-rate nan: expected a number above 0"),
        ("--text nowhere", "No such file or directory: 'nowhere'"),
        ("--length 500", "bytes, but 10020 are needed"),
        ("--steps -3", "--steps -3: expected at least 1"),
        ("--layers two", "--layers: invalid int value: 'two'"),
        ("--out {text}/folder", "Not a directory"),
    ],
)
def test_wrong_argument(flags, message, example, text, tmp_path, capsys):
    flags = flags.format(text=text).split()
    flags = [*TINY, "--text", str(text), "--out", str(tmp_path), *flags]
    assert_refused(example, flags, message, capsys)
