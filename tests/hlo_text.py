"""Hand-written HLO, with numbers that can be computed by hand."""

# The fusion is a product of 64 x 32 and 32 x 16: 2 * 64 * 32 * 16 operations.
FLOPS = 65536

COMPUTATIONS = """\
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%fused_dot (p0: bf16[64,32], p1: bf16[32,16]) -> bf16[64,16] {
  %p0 = bf16[64,32]{1,0} parameter(0)
  %p1 = bf16[32,16]{1,0} parameter(1)
  ROOT %product = bf16[64,16]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""

# An outer loop of 5 around an inner one of 3; each inner trip gathers asynchronously behind one
# product, each outer trip reduces after the inner loop, and the program scatters behind all of it.
LOOPS = f"""\
HloModule jit_step, is_scheduled=true, entry_computation_layout={{()->f32[]}}, num_partitions=8

FileNames
1 "a file (with = in its name) {{"

{COMPUTATIONS}
%inner_body (t: (s32[], bf16[64,32], bf16[32,16])) -> (s32[], bf16[64,32], bf16[32,16]) {{
  %t = (s32[], bf16[64,32]{{1,0}}, bf16[32,16]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = bf16[64,32]{{1,0}} get-tuple-element(%t), index=1
  %w = bf16[32,16]{{1,0}} get-tuple-element(%t), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %part = f32[16,32]{{1,0}} constant({{...}})
  %gather = (f32[16,32]{{1,0}}, f32[64,32]{{1,0}}) all-gather-start(%part), channel_id=1, \
replica_groups=[2,4]<=[4,2]T(1,0), dimensions={{0}}, use_global_device_ids=true, \
metadata={{op_name="jit(step)/while/body/all_gather(" stack_frame_id=3}}
  %y = bf16[64,16]{{1,0}} fusion(%x, %w), kind=kCustom, calls=%fused_dot
  %gathered = f32[64,32]{{1,0}} all-gather-done(%gather)
  ROOT %out = (s32[], bf16[64,32]{{1,0}}, /*index=2*/bf16[32,16]{{1,0}}) tuple(%next, %x, %w)
}}

%inner_condition (t: (s32[], bf16[64,32], bf16[32,16])) -> pred[] {{
  %t = (s32[], bf16[64,32]{{1,0}}, bf16[32,16]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %three = s32[] constant(3)
  ROOT %less = pred[] compare(%i, %three), direction=LT
}}

%outer_body (s: (s32[], bf16[64,32], bf16[32,16])) -> (s32[], bf16[64,32], bf16[32,16]) {{
  %s = (s32[], bf16[64,32]{{1,0}}, bf16[32,16]{{1,0}}) parameter(0)
  %loop = (s32[], bf16[64,32]{{1,0}}, bf16[32,16]{{1,0}}) while(%s), condition=%inner_condition, \
body=%inner_body, backend_config={{"known_trip_count":{{"n":"3"}}}}
  %norm = f32[] constant(0)
  %reduced = f32[] all-reduce(%norm), channel_id=2, replica_groups={{{{0,1,2,3,4,5,6,7}}}}, \
to_apply=%add
  ROOT %same = (s32[], bf16[64,32]{{1,0}}, bf16[32,16]{{1,0}}) tuple(%loop)
}}

ENTRY %main (p: (s32[], bf16[64,32], bf16[32,16]), g: f32[64,32], h: f32[8,8]) -> f32[8,32] {{
  %p = (s32[], bf16[64,32]{{1,0}}, bf16[32,16]{{1,0}}) parameter(0)
  %g = f32[64,32]{{1,0}} parameter(1)
  %h = f32[8,8]{{1,0}} parameter(2)
  %scatter = ((f32[64,32]{{1,0}}, f32[8,8]{{1,0}}), (f32[16,32]{{1,0}}, f32[2,8]{{1,0}})) \
reduce-scatter-start(%g, %h), channel_id=3, \
replica_groups=mesh['data'=4,'model'=2] {{'data'}}, dimensions={{0}}, to_apply=%add
  %loops = (s32[], bf16[64,32]{{1,0}}, bf16[32,16]{{1,0}}) while(%p), condition=%inner_condition, \
body=%outer_body, backend_config={{"known_trip_count":{{"n":"5"}}}}
  %scattered = (f32[16,32]{{1,0}}, f32[2,8]{{1,0}}) reduce-scatter-done(%scatter)
  %shard = f32[16,32]{{1,0}} get-tuple-element(%scattered), index=0
  ROOT %moved = f32[16,32]{{1,0}} collective-permute(%shard), channel_id=4, \
source_target_pairs={{{{0,2}},{{2,4}},{{4,6}},{{6,0}},{{1,3}},{{3,5}},{{5,7}},{{7,1}}}}
}}
"""


def entry(*lines: str, devices: int = 8) -> str:
    """A module with these lines as its entry, the last of them its result."""
    *lines, root = lines
    body = "\n".join([*(f"  {line}" for line in lines), f"  ROOT {root}"])
    head = f"HloModule hand, is_scheduled=true, num_partitions={devices}"
    return f"{head}\n\n{COMPUTATIONS}\nENTRY %main () -> f32[] {{\n{body}\n}}\n"
