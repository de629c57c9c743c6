"""`memory`: the paper's table, what compiled steps hold, and models that fit nowhere here."""

import dataclasses
import json
import math
import time
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest
from jax import numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from pairs import product

import zerojax
from tests.conftest import make_mesh
from zerojax._compile import MemoryStats
from zerojax._synthetic import TRANSFORMER_SPECS, transformer

ALL = (0, 1, 2, 3)


def adamw(part):
    return zerojax.zero(optax.adamw(1e-3), part, master_dtype=jnp.float32)


def shape(*dims, dtype=np.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def data(n):
    return AbstractMesh((n,), ("data",))


# By hand.


def test_the_table_of_the_zero_paper():
    """Figure 1: 7.5 B parameters on 64 devices, 16 bytes each, in GB."""
    part = zerojax.partition(transformer(7.5e9, jnp.bfloat16), data(64), scan_dims=1)
    report = zerojax.memory(part, adamw, stages=ALL)
    for stage, paper in zip(ALL, (120, 31.4, 16.6, 1.9), strict=True):
        assert report.bytes("model states", stage) / 1e9 == pytest.approx(paper, rel=0.03)
    n = report.elements
    assert [report.bytes(name, 0) / n for name in ("parameters", "gradients")] == [2, 2]
    assert [report.bytes(name, 0) / n for name in ("master", "mu", "nu")] == [4, 4, 4]


def model():
    """A stack of 6 layers, a padded leaf, one that stays whole, and integers."""
    layer = shape(6, 64, 32, dtype=jnp.bfloat16)
    vector = shape(6, 64)
    return {
        "layers": {"w": layer, "b": vector}, "head": shape(13, 3), "one": shape(3),
        "ids": shape(8, dtype=np.int32),
    }  # fmt: skip


SCANS = {"layers": 1, "head": 0, "one": 0, "ids": 0}
W, B, HEAD, ONE, IDS = 6 * 64 * 32, 6 * 64, 13 * 3, 3, 8  # elements


def plan(stage=1, **options):
    return zerojax.partition(model(), data(8), scan_dims=SCANS, stage=stage, **options)


def test_every_row_by_hand():
    report = zerojax.memory(plan(), adamw, stages=ALL, accumulate=2)
    trained, rest = 2 * W + 4 * (B + HEAD + ONE), 4 * IDS

    def shards(size):  # of one float32 array for each parameter
        return 4 * (W + B) // 8 + size * HEAD // 8 + size * ONE

    whole = {"parameters": trained + rest, "padding": 0, "gradients": trained, "gathered": 0}
    expected = {name: report.bytes(name, 0) for name in whole}
    assert expected == whole
    # adamw keeps its moments in the dtype that it sees, that of the master.
    assert report.bytes("master", 0) == 4 * W and report.bytes("mu", 0) == 4 * (W + B + HEAD + ONE)
    assert report.bytes("accumulators", 0) == 4 * (W + B + HEAD + ONE)
    for stage in (1, 2, 3):
        assert report.bytes("master", stage) == 4 * W // 8
        assert report.bytes("nu", stage) == shards(4)
        assert report.bytes("count", stage) == 4
        moments = 2 * (4 * 2 * 3 - 4 * HEAD // 8)
        parameters = (4 * 2 * 3 - 4 * HEAD // 8) * (stage == 3)
        assert report.bytes("padding", stage) == moments + parameters
    assert report.bytes("parameters", 2) == trained + rest
    shard = 2 * W // 8 + 4 * B // 8
    assert report.bytes("parameters", 3) == shard + 4 * HEAD // 8 + 4 * ONE + rest
    block = 4 * 2 * 3 + 4 * ONE  # of head and one, with the zeros
    assert [report.bytes("gradients", s) for s in (1, 2, 3)] == [trained, *[shard + block] * 2]
    sums = 4 * (W + B) // 8 + block
    assert [report.bytes("accumulators", s) for s in (1, 2, 3)] == [
        report.bytes("accumulators", 0), sums, sums,
    ]  # fmt: skip
    assert [report.bytes("gathered", s) for s in ALL] == [0, 0, 0, (2 * W + 4 * B) // 6]
    for stage in ALL:
        rows = [row for row in report.rows() if row["persistent"]]
        assert report.bytes("persistent", stage) == sum(row["bytes"][stage] for row in rows)
        later = ("gradients", "accumulators", "gathered")
        assert report.bytes("total", stage) - report.bytes("persistent", stage) == sum(
            report.bytes(name, stage) for name in later
        )


@pytest.mark.parametrize(
    "options, category, stage, expected",
    [
        ({}, "accumulators", 2, 0),
        ({"by_layer": False}, "gathered", 3, 2 * W + 4 * (B + HEAD)),
        ({"by_layer": False}, "gradients", 3, 2 * W + 4 * (B + HEAD + ONE)),
        ({"compute_dtype": jnp.bfloat16}, "gathered", 3, 2 * (W + B) // 6),
        # What is wider is cast, also where nothing is gathered.
        ({"compute_dtype": jnp.bfloat16}, "gathered", 1, 2 * B // 6),
        ({"compute_dtype": "bfloat16", "by_layer": False}, "gathered", 1, 2 * (B + HEAD + ONE)),
        ({"compute_dtype": jnp.bfloat16}, "gradients", 1, 2 * (W + B + HEAD) + 4 * ONE),
        ({"grad_dtype": jnp.float32}, "gradients", 2, 4 * (W + B) // 8 + 4 * 2 * 3 + 4 * ONE),
        ({"grad_dtype": "float32"}, "gradients", 0, 4 * (W + B + HEAD + ONE)),
        ({"trainable": {"layers": {"w": True, "b": False}, "head": False, "one": False,
                        "ids": False}}, "gradients", 1, 2 * W),
        ({"trainable": False, "accumulate": 2}, "accumulators", 1, 0),
    ],
)  # fmt: skip
def test_options(options, category, stage, expected):
    part = plan(stage)
    assert zerojax.memory(part, adamw(part), **options).bytes(category) == expected


def test_stages_are_planned_again_as_they_would_be():
    for stage in ALL:
        alone = zerojax.memory(plan(stage), adamw)
        for start in (1, 2, 3):
            together = zerojax.memory(plan(start), adamw, stages=ALL)
            assert together.columns[stage] == alone.columns[0]


# Named by the state's own tree.

FIELDS = {
    "adamw": (lambda wrap: wrap(optax.adamw(1e-3)), {"count", "mu", "nu"}),
    "adafactor": (
        lambda wrap: wrap(optax.adafactor(1e-3, min_dim_size_to_factor=4)),
        {"count", "v_row", "v_col", "v"},
    ),
    "sgd momentum": (lambda wrap: wrap(optax.sgd(1e-3, momentum=0.9)), {"trace"}),
    "master": (
        lambda wrap: wrap(optax.adam(1e-3), master_dtype=jnp.float32),
        {"count", "mu", "nu"},
    ),
    "multisteps inside": (
        lambda wrap: wrap(optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation()),
        {"mini_step", "gradient_step", "count", "mu", "nu", "acc_grads", "skip_state"},
    ),
    "multisteps outside": (
        lambda wrap: optax.MultiSteps(wrap(optax.adam(1e-3)), 2).gradient_transformation(),
        {"mini_step", "gradient_step", "count", "mu", "nu", "acc_grads", "skip_state"},
    ),
    "hyperparameters": (
        lambda wrap: wrap(optax.inject_hyperparams(optax.adam)(1e-3)),
        {"count", "hyperparams", "mu", "nu"},
    ),
    "plain": (lambda wrap: optax.adam(1e-3), {"count", "mu", "nu"}),
}


def make_tx(optimizer, part):
    return FIELDS[optimizer][0](lambda inner, **options: zerojax.zero(inner, part, **options))


@pytest.mark.parametrize("optimizer", FIELDS)
def test_fields_have_the_names_of_the_state(optimizer):
    part = plan()
    rows = zerojax.memory(part, make_tx(optimizer, part)).rows()
    found = {row["name"] for row in rows if row["category"] == "optimizer state"}
    assert found <= FIELDS[optimizer][1] | {"inner_opt_state"}
    assert found >= FIELDS[optimizer][1] - {"skip_state"}


def test_parameters_with_fields_of_their_own():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Layer:
        count: jax.ShapeDtypeStruct
        mu: jax.ShapeDtypeStruct

    part = zerojax.partition({"layer": Layer(shape(64), shape(16, 8))}, data(8))
    report = zerojax.memory(part, zerojax.zero(optax.adam(1e-3), part))
    assert [report.bytes(name) for name in ("count", "mu", "nu")] == [4, 4 * 24, 4 * 24]


def test_a_state_with_a_field_of_our_own_name():
    class State(NamedTuple):
        master: Any

    part = plan()
    tx = zerojax.zero(optax.GradientTransformation(State, optax.identity().update), part)
    report = zerojax.memory(part, tx)
    assert report.bytes("master") == 0
    assert report.bytes("state.master") == report.bytes("optimizer state") > 0


def test_zeros_of_a_state_around_zero_are_padding_too():
    """At stage 3 it sees parameters in their stored shapes."""
    part = plan(3)
    report = zerojax.memory(part, make_tx("multisteps outside", part))
    own, stored = 4 * HEAD // 8, 4 * 2 * 3
    # In the parameter, two moments and the sum of gradients.
    assert report.bytes("padding") == 4 * (stored - own)
    assert report.bytes("acc_grads") == 4 * (W + B) // 8 + own + 4 * ONE + 4 * IDS


def test_a_layer_is_not_scanned_over():
    (leaf,) = (leaf for leaf in plan().leaves if leaf.path == "['layers']['w']")
    assert [leaf.trailing(n).scan_dims for n in (2, 3, 4)] == [0, 1, 2]


# Against the compiler.


HELD = ["adamw", "adafactor", "sgd momentum", "master", "multisteps outside"]


def compiled_step(optimizer, stage, mesh, accumulate):
    """A step of a small model, compiled without an array; and the bytes of its batch."""
    dtype = jnp.bfloat16 if optimizer == "master" else np.float32
    model = {"layers": shape(3, 16, 16, dtype=dtype), "head": shape(16, 5, dtype=dtype),
             "bias": shape(13, dtype=dtype)}  # fmt: skip
    specs = {"layers": P(None, None, "model") if "model" in mesh.axis_names else P(),
             "head": P(), "bias": P()}  # fmt: skip
    scans = {"layers": 1, "head": 0, "bias": 0}
    part = zerojax.partition(model, mesh, specs, scan_dims=scans, stage=stage)
    tx = make_tx(optimizer, part)

    def loss_fn(params, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
        return jnp.mean(x @ params["head"]) + jnp.sum(params["bias"])

    params = part.abstract_params()
    x = jax.ShapeDtypeStruct((32, 16), dtype, sharding=NamedSharding(mesh, P("data")))
    grad_fn = zerojax.value_and_grad(loss_fn, part, accumulate=accumulate)
    step = zerojax.train_step(grad_fn, tx, part)
    compiled = step.lower(params, zerojax.abstract_state(tx, part), x).compile()
    return part, tx, compiled, x.size * x.dtype.itemsize // mesh.shape["data"]


@pytest.mark.parametrize(
    *product(
        optimizer=HELD, stage=[1, 2, 3], mesh=["mesh8", "mesh4x2"], accumulate=[1, 2]
    )
)  # fmt: skip
def test_what_is_held_is_what_the_program_is_given(optimizer, stage, mesh, accumulate):
    part, tx, compiled, batch = compiled_step(optimizer, stage, make_mesh(mesh), accumulate)
    report = zerojax.memory(part, tx, accumulate=accumulate)
    comparison = report.compare(compiled)
    assert comparison.arguments == report.bytes("persistent") + batch
    # Also adafactor's, which does not read the placeholders in its state.
    assert comparison.exact and comparison.updated == comparison.aliased
    text = repr(comparison)
    assert "both are equal" in text and f" {batch:,} " in text
    assert comparison.temp > 0 and f" {comparison.temp:,} " in text


@pytest.mark.parametrize("kind", [list, tuple])
def test_an_element_of_a_list_is_a_layer(kind):
    layers = kind([{"up": shape(8, 32), "down": [shape(32, 8), shape(16)]}, {"up": shape(64, 8)}])
    part = zerojax.partition({"head": shape(40, 8), "layers": layers}, data(8), stage=3)
    report = zerojax.memory(part, adamw(part))
    assert report.bytes("gathered") == 4 * (8 * 32 + 32 * 8 + 16)


def test_a_program_that_holds_something_else():
    part, tx, compiled, _ = compiled_step("adamw", 1, make_mesh("mesh8"), 1)
    one_moment = zerojax.memory(part, zerojax.zero(optax.sgd(1e-3, momentum=0.9), part))
    comparison = one_moment.compare(compiled)
    held = zerojax.memory(part, tx).bytes("persistent")
    missing = held - one_moment.bytes("persistent")
    assert not comparison.exact and missing > 0
    assert f"both differ by {missing:+,} bytes" in repr(comparison)
    assert "<td>gradients, gathered weights</td>" in comparison._repr_html_()
    with pytest.raises(ValueError, match="stage must be one of"):
        zerojax.memory(part, adamw, stages=(1, 2)).compare(compiled)

    class Undonated:
        """The same without aliases: then all arguments must be known."""

        def memory_analysis(self):
            stats = compiled.memory_analysis()
            return MemoryStats(held, stats.output_size_in_bytes, 0, stats.temp_size_in_bytes, 0)

    assert zerojax.memory(part, tx).compare(Undonated()).exact


# Models that fit nowhere here.


@pytest.mark.parametrize("elements, tensor", [(175e9, 1), (1e12, 8)])
def test_no_devices_are_needed(elements, tensor):
    mesh = AbstractMesh((4096 // tensor, tensor), ("data", "model"))
    specs = TRANSFORMER_SPECS
    part = zerojax.partition(transformer(elements, jnp.bfloat16), mesh, specs, scan_dims=1)
    start = time.monotonic()
    report = zerojax.memory(part, adamw, stages=ALL)
    assert time.monotonic() - start < 10
    assert report.elements == pytest.approx(elements, rel=0.01) and report.devices == 4096
    states = report.bytes("model states", 3)
    assert 16 * elements / 4096 == pytest.approx(states - report.bytes("padding", 3), rel=0.02)
    assert report.bytes("model states", 0) == pytest.approx(16 * elements / tensor, rel=0.01)


def test_many_leaves_take_seconds():
    layer = {name: shape(*x.shape[1:], dtype=x.dtype) for name, x in transformer(175e9).items()}
    part = zerojax.partition([layer] * 96, data(4096), stage=3)
    start = time.monotonic()
    report = zerojax.memory(part, adamw)
    assert time.monotonic() - start < 20
    one = sum(math.prod(x.shape) for x in layer.values())
    assert report.bytes("gathered") == 4 * one


@pytest.mark.parametrize("elements", [1e6, 3e7, 1.25e8, 1.3e9, 7.5e9, 1.75e11, 1e12])
def test_transformers_of_any_size(elements):
    total = sum(math.prod(x.shape) for x in transformer(elements).values())
    assert total == pytest.approx(elements, rel=0.01 if elements > 1e8 else 0.05)


@pytest.mark.parametrize("elements", [1e3, -1.0, float("inf"), float("nan")])
def test_transformers_of_no_size(elements):
    with pytest.raises(ValueError, match="needs at least 1e6 parameters"):
        transformer(elements)


# The report.


def test_the_table_as_text_html_json_and_picture(tmp_path):
    part = zerojax.partition(transformer(7.5e9, jnp.bfloat16), data(64), scan_dims=1)
    report = zerojax.memory(part, adamw, stages=ALL)
    text = repr(report)
    for line in (
        "7,500,489,216 parameters on 64 devices, bytes on each",
        "                        stage 0  stage 1  stage 2  stage 3",
        "optimizer state: mu     30 GB    469 MB   469 MB   469 MB",
        "with gradients          120 GB   31.4 GB  16.6 GB  1.88 GB",
        "gathered                0 B      0 B      0 B      441 MB",
    ):
        assert line in text.splitlines()
    assert "padding" not in text and "accumulators" not in text  # nothing to say
    assert "<td>optimizer state: mu</td>" in report._repr_html_()
    document = json.loads(report.to_json())
    assert document["totals"]["model states"]["3"] == report.bytes("model states", 3)
    (mu,) = (row for row in document["rows"] if row["name"] == "mu")
    assert mu == {
        "category": "optimizer state", "name": "mu", "persistent": True,
        "bytes": {str(s): report.bytes("mu", s) for s in ALL},
    }  # fmt: skip
    report.plot(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes()[1:4] == b"PNG"


def test_one_stage_needs_no_name():
    part = plan(2)
    report = zerojax.memory(part, adamw(part))
    assert report.stages == (2,) and report.bytes("mu") == report.bytes("mu", 2)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda part: zerojax.memory(part, adamw(part), stages=(1, 2)), TypeError,
         "Pass a function instead: lambda part: zerojax.zero"),
        (lambda part: zerojax.memory(part, adamw, stages=(1, 4)), ValueError,
         "stages must be 0, 1, 2 or 3, got 4"),
        (lambda part: zerojax.memory(plan(0), adamw, stages=(0, 1)), ValueError,
         "Make it with stage=1 and ask for stages="),
        (lambda part: zerojax.memory(part, adamw, accumulate=0), ValueError,
         "accumulate must be at least 1"),
        (lambda part: zerojax.memory(part, adamw, trainable={"w": True}), ValueError,
         "trainable must be a tree of this structure"),
        (lambda part: zerojax.memory(part, adamw).bytes("moo"), ValueError,
         "no category 'moo'; there are parameters, master, count, mu, nu, padding"),
        (lambda part: zerojax.memory(part, adamw, stages=(1, 2)).bytes("mu"), ValueError,
         r"stage must be one of \(1, 2\), got None"),
    ],
)  # fmt: skip
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call(plan())
