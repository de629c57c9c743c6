"""The communication report, the theory that it is checked against, and the modelled timeline."""

import dataclasses
import json

import jax
import numpy as np
import optax
import pytest
from hlo_text import FLOPS, LOOPS, entry
from jax import numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from models import SCAN_DIMS, SPECS, loss_fn, make_batch, make_params

import zerojax
from tests.conftest import make_mesh
from zerojax._timeline import CostModel, cost_model, simulate

MESH = AbstractMesh((4, 2), ("data", "model"))
GATHER = 15 * (64 * 32 * 4) * 3 // 4
SCATTER = (64 * 32 + 8 * 8) * 4 * 3 // 4
REDUCE = 5 * 7
PERMUTE = 16 * 32 * 4
TOTAL = GATHER + SCATTER + REDUCE + PERMUTE


def shape(*dims, dtype=np.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


# The report.


def test_bytes_by_kind_and_axis():
    report = zerojax.audit(LOOPS, MESH)
    assert (report.bytes(), report.devices, report.flops) == (TOTAL, 8, 15 * FLOPS)
    assert report.bytes("all-gather") == report.bytes("all-gather", "data") == GATHER
    assert report.bytes(axis="model") == report.bytes("all-reduce") == REDUCE
    assert report.bytes("all-to-all") == report.bytes("all-gather", "model") == 0
    assert report.overlap == (GATHER + SCATTER) / TOTAL
    assert report.hidden_bytes(axis="data") == GATHER + SCATTER < report.bytes(axis="data")
    assert report.hidden_bytes("all-reduce") == 0 < report.bytes("all-reduce")


def test_the_table_as_text_html_and_json(tmp_path):
    report = zerojax.audit(LOOPS, MESH)
    text = repr(report)
    for part in (
        "all-gather          f32[64,32]           data        4        15     92,160",
        "reduce-scatter      f32[64,32] f32[8,8]  data        4        1      6,336",
        "each of 8 devices sends 101 kB, 98% of it while a matrix product is computed",
        "all-gather over data: 92.2 kB",
    ):
        assert part in text
    html = report._repr_html_()
    assert html.count("<tr>") == 5 and "<td>f32[64,32] f32[8,8]</td>" in html
    document = json.loads(report.to_json())
    assert document["bytes"] == TOTAL and document["overlap"] == report.overlap
    scatter, gather, *_ = document["collectives"]
    assert gather["trips"] == 15 and gather["async"] and gather["flops_hidden_behind"] == FLOPS
    assert scatter["arrays"][1] == {"dtype": "f32", "shape": [8, 8]}
    assert document["modelled_h100"]["exposed_time"] == report.exposed_time
    for name in ("timeline.png", "timeline.svg"):
        report.plot(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    assert (tmp_path / "timeline.png").read_bytes()[1:4] == b"PNG"


def test_a_program_that_sends_nothing(tmp_path):
    report = zerojax.audit(jax.jit(lambda x: x + 1).lower(shape(8)).compile())
    assert (report.collectives, report.bytes(), report.overlap) == ((), 0, 1.0)
    assert "each of 1 devices sends 0 B" in repr(report)
    report.plot(tmp_path / "empty.png")


def test_the_mesh_is_that_of_the_arguments_or_must_fit():
    mesh = make_mesh("mesh4x2")
    x = jax.ShapeDtypeStruct((8, 4), np.float32, sharding=NamedSharding(mesh, P("data")))
    compiled = jax.jit(lambda x: jnp.sum(x)).lower(x).compile()
    (c,) = zerojax.audit(compiled).collectives
    assert c.axes == ("data",)
    (c,) = zerojax.audit(compiled.as_text()).collectives
    assert c.axes == () and c.group_size == 4
    with pytest.raises(ValueError, match="the mesh has 2 devices and the program runs on 8"):
        zerojax.audit(compiled, AbstractMesh((2,), ("data",)))


# The timeline.

# 1 operation and 1 byte per second; 1 byte per second of wire, 100 or 1000 seconds to begin.
MODEL = CostModel(1.0, float("inf"), (1.0, 100.0), (1.0, 1000.0), gpus_per_host=4)


def timeline(*lines, model=MODEL):
    report = zerojax.audit(entry(*lines))
    found = {(c.place, c.name): c for c in report.collectives}
    return simulate(report._module, report._costs, found, model)


X = "%x = bf16[64,32] parameter(0)"
W = "%w = bf16[32,16] parameter(1)"
START = (
    "%s{n} = (f32[100], f32[400]) all-gather-start(%g), replica_groups={{{{0,1,2,3}},"
    "{{4,5,6,7}}}}, dimensions={{0}}"
)
G = "%g = f32[100] parameter(2)"
SENT = 400 * 4 * 3 // 4 + 100  # bytes and latency of that


def product(n):
    return f"%y{n} = bf16[64,16] fusion(%x, %w), kind=kLoop, calls=%fused_dot"


def done(n):
    return f"%d{n} = f32[400] all-gather-done(%s{n})"


@pytest.mark.parametrize(
    "lines, step, exposed",
    [
        # Hidden, exposed whole, and queued behind another while there is one product to hide both.
        ([START.format(n=1), product(1), done(1)], FLOPS, 0),
        ([product(1), START.format(n=1), done(1)], FLOPS + SENT, SENT),
        ([START.format(n=1), START.format(n=2), done(2), done(1), product(1)],
         2 * SENT + FLOPS, 2 * SENT),
    ],
)  # fmt: skip
def test_two_streams(lines, step, exposed):
    times = timeline(X, W, G, *lines)
    assert (times.step, times.exposed, times.compute) == (step, exposed, FLOPS)
    assert times.communication == SENT * sum("start" in line for line in lines)


def test_memory_bounds_what_computes_nothing_and_hosts_take_longer():
    slow = dataclasses.replace(MODEL, bandwidth=2.0)
    assert timeline(X, "%z = bf16[64,32] add(%x, %x)", model=slow).step == 3 * 64 * 32 * 2 / 2
    within, across = "{{0,1,2,3}},{{4,5,6,7}}", "{{0,2,4,6}},{{1,3,5,7}}"
    start = START.replace(f"{{{{{within}}}}}", f"{{{{{across}}}}}").replace(within, across)
    assert timeline(G, start.format(n=1), done(1)).step == SENT - 100 + 1000


def test_the_constants():
    model = cost_model("h100")
    assert (model.flops, model.bandwidth) == (600e12, 2.8e12)
    assert (model.near, model.far, model.gpus_per_host) == ((320e9, 20e-6), (200e9, 50e-6), 8)
    assert cost_model("b200").flops == pytest.approx(600e12 * 2250 / 989)
    with pytest.raises(
        ValueError, match="unknown chip 'tpu': zerojax knows a100, b200, h100, h200"
    ):
        cost_model("tpu")


# The theory.


def parameters():
    return {"w": shape(6, 64, 32), "v": shape(64, 48), "one": shape(3), "ids": shape(8, dtype=int)}


W_SIZE, V_SIZE, ONE = 6 * 64 * 32, 64 * 48, 3  # elements


@pytest.mark.parametrize(
    "stage, options, scattered, gathered",
    [
        (0, {"accumulate": 4}, 0, 0),
        (1, {}, 4, 4),
        (1, {"accumulate": 4, "compute_dtype": jnp.bfloat16}, 4, 4),  # added up in float32
        (1, {"compute_dtype": jnp.bfloat16}, 2, 4),
        (2, {"accumulate": 4}, 4 * 4, 4),
        (2, {"accumulate": 4, "compute_dtype": jnp.bfloat16}, 4 * 2, 4),
        (2, {"accumulate": 4, "compute_dtype": jnp.bfloat16, "reduce_dtype": np.float32}, 16, 4),
        (3, {"accumulate": 4, "compute_dtype": jnp.bfloat16}, 4 * 2, 2),
        (3, {"accumulate": 4, "by_layer": False}, 4 * 4, 4 * 4),
        (3, {"accumulate": 4, "by_layer": True}, 4 * 4, 8 * 4),
        (3, {"by_layer": True, "trainable": False}, 0, 2 * 4),
    ],
)
def test_bytes_in_theory(stage, options, scattered, gathered):
    """Times (N-1)/N of the sharded parameters' elements."""
    part = zerojax.partition(parameters(), AbstractMesh((8,), ("data",)), stage=stage, scan_dims=0)
    expected = zerojax.expected_communication(part, **options)
    assert expected.bytes("reduce-scatter", "data") == (W_SIZE + V_SIZE) * scattered * 7 // 8
    assert expected.bytes("all-gather", "data") == (W_SIZE + V_SIZE) * gathered * 7 // 8
    # What stays whole is all-reduced, twice (N-1)/N.
    wide = 2 if stage and options == {"compute_dtype": jnp.bfloat16} else 4
    whole = [ONE, W_SIZE, V_SIZE] if stage == 0 else [ONE] * options.get("trainable", True)
    assert expected.bytes("all-reduce") == sum(2 * n * wide * 7 // 8 for n in whole)


def test_theory_on_model_axes_and_replicas():
    mesh = AbstractMesh((2, 4, 2), ("replica", "data", "model"))
    specs = {"w": P(None, None, "model"), "v": P(), "one": P(), "ids": P()}
    part = zerojax.partition(
        parameters(), mesh, specs, stage=2, replicate_axes="replica", scan_dims=0
    )
    expected = zerojax.expected_communication(part, accumulate=3)
    local = W_SIZE // 2 + V_SIZE
    assert expected.bytes("reduce-scatter") == 3 * local * 4 * 3 // 4
    shards = expected.bytes("all-reduce", "replica") - expected.bytes("all-reduce", "data")
    assert shards == 3 * 2 * (local // 4) * 4 // 2
    row = ["['w']", "reduce-scatter", "6,144", "data", "3", "55,296"]
    assert row in [line.split() for line in repr(expected).splitlines()]


def test_bad_arguments_of_the_theory():
    part = zerojax.partition(parameters(), AbstractMesh((8,), ("data",)))
    with pytest.raises(ValueError, match="accumulate must be at least 1"):
        zerojax.expected_communication(part, accumulate=0)
    with pytest.raises(ValueError, match="by_layer must be a tree of this structure"):
        zerojax.expected_communication(part, by_layer={"w": True})


@pytest.mark.parametrize(
    "stage, mesh, accumulate", [(1, "mesh8", 4), (2, "mesh4x2", 2), (3, "mesh2x4", 2)]
)
def test_a_training_step_sends_what_the_theory_says(stage, mesh, accumulate):
    mesh = make_mesh(mesh)
    params = make_params(np.float32)
    part = zerojax.partition(
        params, mesh, SPECS if "model" in mesh.axis_names else P(), scan_dims=SCAN_DIMS,
        stage=stage, replicate_axes=[a for a in mesh.axis_names if a == "replica"],
    )  # fmt: skip
    tx = zerojax.zero(optax.adamw(1e-3), part)
    params = part.place(params)
    tokens, targets = make_batch()
    step = zerojax.train_step(
        zerojax.value_and_grad(loss_fn, part, accumulate=accumulate), tx, part
    )
    batch = (tokens, targets.astype(np.float32))
    report = zerojax.audit(step.lower(params, tx.init(params), *batch).compile())
    expected = zerojax.expected_communication(part, accumulate=accumulate)
    report.check(expected)
    # One leaf of this model has no gradient.
    unused = sum(m.total_bytes for m in expected.messages if "unused" in m.path)
    for kind in ("reduce-scatter", "all-gather"):
        assert 0.98 * expected.bytes(kind) - unused <= report.bytes(kind, "data")
        assert report.bytes(kind, "data") <= 1.02 * expected.bytes(kind)


# Check.


def checked(lines, mesh=MESH, **options):
    part = zerojax.partition(
        parameters(), mesh, {"w": P(None, None, "model"), "v": P(), "one": P(), "ids": P()},
        scan_dims={"w": 1, "v": 0, "one": 0, "ids": 0}, stage=1,
    )  # fmt: skip
    report = zerojax.audit(entry(*lines), mesh)
    report.check(zerojax.expected_communication(part), **options)


def collective(kind, operand, result, groups="mesh['data'=4,'model'=2] {'data'}", name="c"):
    opcode = f"{name} = {result} {kind}({name}x), replica_groups={groups}, dimensions={{0}}"
    return [f"{name}x = {operand} parameter(0)", opcode]


OVER_MODEL = "mesh['data'=4,'model'=2] {'model'}"
FINE = [
    *collective("reduce-scatter", "f32[64,48]", "f32[16,48]", name="v"),
    *collective("reduce-scatter", "f32[6,64,16]", "f32[6,16,16]", name="w"),
    *collective("all-gather", "f32[16,48]", "f32[64,48]", name="gathered_v"),
    *collective("all-reduce", "f32[2]", "f32[2]", name="norm"),
    *collective("all-reduce", "f32[4096]", "f32[4096]", OVER_MODEL, name="activation"),
    *collective("all-gather", "f32[16,48]", "f32[32,48]", OVER_MODEL, name="small"),
]


@pytest.mark.parametrize(
    "extra, problems",
    [
        ([], ()),
        (
            collective("all-reduce", "f32[64,48]", "f32[64,48]"),
            ["c: all-reduce of f32[64,48] over ('data',), 1x"],
        ),
        (
            collective("all-gather", "f32[16,100]", "f32[64,100]"),
            ["c: all-gather of f32[64,100] over ('data',), 1x"],
        ),
        (
            collective("reduce-scatter", "f32[64,48]", "f32[16,48]"),
            ["reduce-scatter: 36.9 kB on each device instead of 27.6 kB, in", "c: f32[64,48]"],
        ),
        (  # XLA joins small arrays to one; this one comes on top of what the theory sends
            collective("reduce-scatter", "f32[6000]", "f32[1500]"),
            ["reduce-scatter: 45.6 kB on each device instead of 27.6 kB, in", "c: f32[6000]"],
        ),
        (
            collective("all-gather", "f32[64,16]", "f32[64,32]", OVER_MODEL),
            ["c: all-gather of f32[64,32] over ('model',), 1x (a whole parameter over model axes)"],
        ),
    ],
)
def test_check_names_what_the_theory_does_not_know(extra, problems):
    if not problems:
        checked(FINE + extra)
        return
    with pytest.raises(ValueError, match="the program sends what ZeRO need not send") as error:
        checked(FINE + extra)
    for problem in problems:
        assert problem in str(error.value)
    assert "norm" not in str(error.value) and "activation" not in str(error.value)


def test_check_knows_arrays_that_are_joined():
    joined = 6 * 64 * 16 + 64 * 48
    checked(collective("reduce-scatter", f"f32[{joined}]", f"f32[{joined // 4}]"))
    with pytest.raises(ValueError, match=r"all-reduce: 55\.3 kB on each device instead of 18 B"):
        checked(collective("all-reduce", f"f32[{joined}]", f"f32[{joined}]"))


def test_check_ignores_axes_tolerates_a_share_and_needs_a_mesh():
    gathered = collective("all-gather", "f32[64,16]", "f32[64,32]", OVER_MODEL)
    checked(FINE + gathered, ignore=["model"])
    twice = collective("reduce-scatter", "f32[64,48]", "f32[16,48]")
    checked(FINE + twice, tolerance=0.5)
    part = zerojax.partition(parameters(), AbstractMesh((8,), ("data",)))
    with pytest.raises(ValueError, match="the audit needs the mesh"):
        zerojax.audit(LOOPS).check(zerojax.expected_communication(part))
