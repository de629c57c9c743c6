"""Scheduled HLO: hand-written programs with numbers by hand, and real ones of this jax."""

import jax
import numpy as np
import pytest
from hlo_text import FLOPS, LOOPS, entry
from jax import numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from tests.conftest import make_mesh
from zerojax._hlo import Array, parse
from zerojax._hlo_collectives import find_collectives, wire_bytes
from zerojax._hlo_cost import Costs, Work
from zerojax._hlo_groups import device_groups, group_axes

NAMES, SIZES = ("data", "model"), (4, 2)


def found(text):
    module = parse(text)
    collectives, unknown = find_collectives(module, Costs(module), NAMES, SIZES)
    assert not unknown
    return {c.name: c for c in collectives}


def work(text):
    module = parse(text)
    return Costs(module).computation(module.computations["main"])


def test_loops_multiply_and_windows_hide():
    collectives = found(LOOPS)
    scatter, gather = collectives["scatter"], collectives["gather"]
    assert list(collectives) == ["scatter", "gather", "reduced", "moved"]
    assert [c.trips for c in collectives.values()] == [1, 15, 5, 1]
    assert [c.in_loop for c in collectives.values()] == [False, True, True, False]
    assert [c.asynchronous for c in collectives.values()] == [True, True, False, False]
    # One product in the window of the gather; all 15 in that of the scatter.
    assert [c.flops for c in collectives.values()] == [15 * FLOPS, FLOPS, 0, 0]
    assert gather.memory_bytes == 2 * (64 * 32 + 32 * 16 + 64 * 16)
    assert work(LOOPS).flops == 15 * FLOPS
    assert gather.source == "jit(step)/while/body/all_gather("
    assert (gather.kind, gather.axes, gather.group_size) == ("all-gather", ("data",), 4)
    assert gather.bytes == 64 * 32 * 4 * 3 // 4 and gather.total_bytes == 15 * gather.bytes
    assert scatter.arrays == (Array("f32", (64, 32)), Array("f32", (8, 8)))
    assert scatter.axes == ("data",) and scatter.elements == 64 * 32 + 8 * 8
    assert scatter.bytes == (64 * 32 + 8 * 8) * 4 * 3 // 4
    assert collectives["reduced"].axes == NAMES and collectives["reduced"].bytes == 4 * 2 * 7 // 8
    assert collectives["moved"].axes == ("data",) and collectives["moved"].bytes == 16 * 32 * 4


@pytest.mark.parametrize(
    "text, groups",
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("replica_groups={{0,1,2},{3}}", [[0, 1, 2], [3]]),
        ("replica_groups={}", [[*range(8)]]),
        ("replica_groups=[1,8]<=[8]", [[*range(8)]]),
        ("replica_groups=[4,2]<=[8]", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("replica_groups=[2,4]<=[2,2,2]T(1,0,2)", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("replica_groups=mesh['data'=4,'model'=2] {'data'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("replica_groups=mesh['data'=4,'model'=2]{'data','model'}", [[*range(8)]]),
        ("replica_groups=mesh[a=2,b=2,c=2] {a,c}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("replica_groups=mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("replica_groups=mesh['a'=8] {'a':(1)2,'a':(4)2}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (
            "replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}",
            [[0, 2, 4, 6], [1, 3, 5, 7]],
        ),
        (
            "replica_groups=mesh['a'=2,'b'=4], device_ids=(7,6,5,4,3,2,1,0) {'b'}",
            [[7, 6, 5, 4], [3, 2, 1, 0]],
        ),
        ("source_target_pairs={{0,1},{1,0}}", [[0, 1], [1, 0]]),
    ],
)
def test_groups_in_all_notations(text, groups):
    module = parse(entry("%x = f32[8] parameter(0)", f"%c = f32[8] all-reduce(%x), {text}, a=b"))
    read = device_groups(module.root("main"), module.devices)
    assert read == tuple(map(tuple, groups))


def test_axes_are_those_along_which_a_group_differs():
    assert group_axes(((0, 2), (1, 3)), ("a", "b", "c"), (2, 2, 2)) == ("b",)
    assert group_axes(((0, 7),), ("a", "b", "c"), (2, 2, 2)) == ("a", "b", "c")
    assert group_axes(((3,),), ("a", "b"), (2, 2)) == ()
    assert group_axes(((0, 1),), (), ()) == ()


@pytest.mark.parametrize(
    "kind, sent",
    [
        ("all-gather", 700), ("reduce-scatter", 700), ("all-to-all", 700), ("all-reduce", 1400),
        ("collective-permute", 800),
    ],
)  # fmt: skip
def test_the_ring_convention(kind, sent):
    assert wire_bytes(kind, 800, 8) == sent and wire_bytes(kind, 800, 1) == 0


@pytest.mark.parametrize(
    "type_",
    [
        "(f32[2,32]{1,0}, f32[8,32]{1,0})",
        "((f32[2,32]{1,0}), f32[8,32]{1,0})",
        "(f32[2,32]{1,0}, f32[8,32]{1,0}, u32[], u32[])",
        "((f32[2,32]{1,0:T(8,128)S(1)}), f32[8,32]{1,0:T(8,128)})",
    ],
)
def test_a_start_prints_both_sides_and_one_counts(type_):
    lines = [
        "%x = f32[2,32]{1,0} parameter(0)",
        f"%s = {type_} all-gather-start(%x), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={{0}}",
        "%d = f32[8,32]{1,0} all-gather-done(%s)",
    ]
    assert found(entry(*lines))["s"].arrays == (Array("f32", (8, 32)),)


@pytest.mark.parametrize("name", ["x", "%x", "f32[8]{0} %x", "(f32[8]{0}) x"])
def test_operands_with_and_without_types_and_percent_signs(name):
    module = parse(entry("x = f32[8]{0} parameter(0)", f"y = f32[8]{{0}} add({name}, {name})"))
    assert module.root("main").operands == ("x", "x")


def test_a_combined_all_reduce_and_one_that_xla_runs_as_one():
    lines = [
        "%x = f32[100] parameter(0)",
        "%y = bf16[8] parameter(1)",
        "%s = (f32[100], bf16[8]) all-reduce-start(%x, %y), replica_groups={{0,1,2,3,4,5,6,7}}, "
        'to_apply=%add, backend_config={"collective_backend_config":{"is_sync":true}}',
        "%d = (f32[100], bf16[8]) all-reduce-done(%s)",
    ]
    c = found(entry(*lines))["s"]
    assert not c.asynchronous and c.flops == 0
    assert c.bytes == (400 + 16) * 2 * 7 // 8


def test_generic_async_wrappers():
    lines = [
        "%x = bf16[64,32] parameter(0)",
        "%w = bf16[32,16] parameter(1)",
        "%s = ((bf16[64,32]), bf16[64,32], s32[]) async-start(%x), calls=%wrapped",
        "%y = bf16[64,16] fusion(%x, %w), kind=kLoop, calls=%fused_dot",
        "%u = ((bf16[64,32]), bf16[64,32], s32[]) async-update(%s)",
        "%d = bf16[64,32] async-done(%u)",
    ]
    wrapped = (
        "%wrapped (p: bf16[64,32]) -> bf16[64,32] {\n  %p = bf16[64,32] parameter(0)\n"
        "  ROOT %a = bf16[64,32] all-to-all(%p), replica_groups={{0,1,2,3},{4,5,6,7}}\n}\n\nENTRY"
    )
    (c,) = found(entry(*lines).replace("ENTRY", wrapped)).values()
    assert (c.kind, c.name, c.asynchronous, c.flops) == ("all-to-all", "s", True, FLOPS)
    assert c.bytes == 64 * 32 * 2 * 3 // 4


LOOP = """\
HloModule peeled, is_scheduled=true, num_partitions=8

%fused_compare (p: s32[], q: s32[]) -> pred[] {{
  %p = s32[] parameter(0)
  {limit}
  ROOT %less = pred[] compare(%p, %n), direction={direction}
}}

%condition (t: (f32[8], s32[])) -> pred[] {{
  %t = (f32[8], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=1
  %k = s32[] constant(7)
  ROOT %go = pred[] fusion(%i, %k), kind=kLoop, calls=%fused_compare
}}

%body (t: (f32[8], s32[])) -> (f32[8], s32[]) {{
  %t = (f32[8], s32[]) parameter(0)
  %x = f32[8] get-tuple-element(%t), index=0
  %r = f32[8] all-gather(%x), replica_groups={{{{0}}}}, dimensions={{0}}
  ROOT %u = (f32[8], s32[]) tuple(%x, %i)
}}

ENTRY main {{
  %x = f32[8] parameter(0)
  %c = s32[] constant(1)
  %copied = s32[] copy(%c)
  %init = (f32[8], s32[]) tuple(%x, %copied)
  ROOT %loop = (f32[8], s32[]) while(%init), condition=%condition, body=%body, \
backend_config={{"known_induction_variable":{{"tuple_index":"1"}}{step}}}
}}
"""


@pytest.mark.parametrize(
    "limit, direction, step, trips",
    [
        ("%n = s32[] constant(4)", "LT", "", 3),  # from the constant 1
        ("%n = s32[] parameter(1)", "LT", "", 6),  # the limit comes from outside the fusion
        ("%n = s32[] constant(6)", "LT", ',"known_init_step":{"init":"1","step":"2"}', 3),
        ("%n = s32[] constant(1)", "LT", "", 0),
        ("%n = s32[] constant(4)", "NE", "", None),
    ],
)
def test_trips_of_a_peeled_loop_are_read_from_its_condition(limit, direction, step, trips):
    module = parse(LOOP.format(limit=limit, direction=direction, step=step))
    (c,), unknown = find_collectives(module, Costs(module), NAMES, SIZES)
    assert c.trips == (1 if trips is None else trips) and c.in_loop
    assert unknown == (("loop",) if trips is None else ())


CUBLAS = (
    'custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config"'
    ':{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":'
    '["1"],"lhs_batch_dimensions":["0"]}}}'
)


@pytest.mark.parametrize(
    "line, flops",
    [
        (
            "%r = f32[4,64,16] dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, "
            "rhs_batch_dims={0}, rhs_contracting_dims={1}",
            4 * FLOPS,
        ),
        (f"%r = (f32[4,64,16], s8[4194304]) {CUBLAS}", 4 * FLOPS),
        ('%r = f32[4,64,16] custom-call(%a, %b), custom_call_target="__onednn$matmul"', 4 * FLOPS),
        ('%r = f32[4,64,16] custom-call(%a, %b), custom_call_target="other"', 0),
        ("%r = bf16[64,16] call(%x, %w), to_apply=%fused_dot", FLOPS),
        ("%r = bf16[64,16] fusion(%x, %w), kind=kCustom, calls=%fused_dot, backend_config="
         '{"fusion_backend_config":{"kind":"__triton_gemm"}}', FLOPS),
        ("%r = ((bf16[64,32], bf16[32,16]), bf16[64,16], u32[]) fusion-start(%x, %w), kind=kCustom,"
         " calls=%fused_dot", FLOPS),
        ("%r = bf16[64,16] conditional(%i, %x, %w), branch_computations={%fused_dot, %fused_dot}",
         2 * FLOPS),
        # 3 x 3 taps of 8 channels for each of 2 x 5 x 5 x 16 outputs.
        ("%r = f32[2,5,5,16] convolution(%image, %kernel), window={size=3x3}, "
         "dim_labels=b01f_01io->b01f", 2 * (2 * 5 * 5 * 16) * 3 * 3 * 8),
    ],
)  # fmt: skip
def test_operations_of_products_in_every_form(line, flops):
    lines = [
        "%a = f32[4,64,32] parameter(0)", "%b = f32[4,32,16] parameter(1)",
        "%x = bf16[64,32] parameter(2)", "%w = bf16[32,16] parameter(3)", "%i = s32[] parameter(4)",
        "%image = f32[2,7,7,8] parameter(5)", "%kernel = f32[3,3,8,16] parameter(6)",
    ]  # fmt: skip
    assert work(entry(*lines, line)).flops == flops


def test_a_fusion_moves_the_slices_that_it_reads_and_updates():
    """A layer's weights out of the stack of all, and its output into the stack of outputs."""
    fused = """\
%fused (s: f32[10,100], o: f32[10,100], i: s32[], v: f32[1,100]) -> f32[10,100] {
  %s = f32[10,100] parameter(0)
  %o = f32[10,100] parameter(1)
  %i = s32[] parameter(2)
  %v = f32[1,100] parameter(3)
  %zero = s32[] constant(0)
  %b = f32[10,100] bitcast(%s)
  %slice = f32[1,100] dynamic-slice(%b, %i, %zero), dynamic_slice_sizes={1,100}
  %sum = f32[1,100] add(%slice, %v)
  ROOT %u = f32[10,100] dynamic-update-slice(%o, %sum, %i, %zero)
}

ENTRY"""
    lines = [
        "%s = f32[10,100] parameter(0)",
        "%o = f32[10,100] parameter(1)",
        "%i = s32[] parameter(2)",
        "%v = f32[1,100] parameter(3)",
        "%r = f32[10,100] fusion(%s, %o, %i, %v), kind=kLoop, calls=%fused",
    ]
    # One slice read, the value, the index, and one slice written.
    assert work(entry(*lines).replace("ENTRY", fused)) == Work(0, 400 + 400 + 4 + 400)


@pytest.mark.parametrize(
    "dtype, size", [("pred", 10), ("bf16", 20), ("f8e4m3fn", 10), ("s4", 5), ("c64", 80)]
)
def test_bytes_of_dtypes(dtype, size):
    assert Array(dtype, (2, 5)).bytes == size


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "this is not HLO"),
        ("module @jit_f { }", "this is not HLO.*begins with 'HloModule', and this with 'module"),
        (LOOPS[: LOOPS.index("ENTRY")], "no ENTRY computation"),
        (LOOPS[: LOOPS.index("all-reduce(%norm") + 12], "cut off"),
        (entry("%r = f32[] all-reduce(%x), groups=3"), "no replica groups that zerojax can read"),
    ],
)
def test_what_is_not_hlo_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        zerojax.audit(text)


# Real programs.


def test_a_program_of_this_jax():
    """Products in two nested scans, a psum in the inner one, and one gather outside."""
    mesh = make_mesh("mesh4x2")

    def f(x, w):
        def inner(x, _):
            return jax.lax.psum(x @ w, "data"), None

        def outer(x, _):
            return jax.lax.scan(inner, x, None, length=3)[0], None

        x, _ = jax.lax.scan(outer, x, None, length=5)
        return jax.lax.all_gather(x, "data", tiled=True)

    step = jax.shard_map(f, mesh=mesh, in_specs=(P("data"), P()), out_specs=P(), check_vma=False)
    shapes = [
        jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in (((64, 32), P("data")), ((32, 32), P()))
    ]
    report = zerojax.audit(jax.jit(step).lower(*shapes).compile())
    assert report.flops == 15 * 2 * 16 * 32 * 32
    (reduce,) = (c for c in report.collectives if c.kind == "all-reduce")
    (gather,) = (c for c in report.collectives if c.kind == "all-gather")
    assert reduce.trips == 15 and reduce.axes == ("data",) and reduce.in_loop
    assert reduce.bytes == 16 * 32 * 4 * 2 * 3 // 4
    assert gather.trips == 1 and gather.axes == ("data",) and gather.bytes == 64 * 32 * 4 * 3 // 4
    assert report.overlap == 0 and not report.unknown_loops


def test_operations_are_xlas_own():
    """Where products are all there is, XLA's cost analysis counts the same."""

    def f(a, b, c):
        return jnp.einsum("bij,bjk->bik", a, b) @ c

    shapes = [jax.ShapeDtypeStruct(s, np.float32) for s in ((3, 8, 16), (3, 16, 4), (4, 5))]
    compiled = jax.jit(f).lower(*shapes).compile()
    assert zerojax.audit(compiled).flops == compiled.cost_analysis()["flops"]
