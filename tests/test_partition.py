"""The plan: which dim goes over which axes, why a leaf stays whole, and moving arrays by it."""

import itertools
import json
import math

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax


def abstract(**axes):
    return AbstractMesh(tuple(axes.values()), tuple(axes))


def real(types=AxisType.Auto, **axes):
    devices = np.array(jax.devices()[: math.prod(axes.values())]).reshape(*axes.values())
    return Mesh(devices, tuple(axes), axis_types=(types,) * len(axes))


def plan(shape, mesh, specs=None, dtype=jnp.float32, **options):
    """The plan of a single leaf."""
    leaf = jax.ShapeDtypeStruct(shape, dtype)
    return zerojax.partition({"w": leaf}, mesh, specs, **options).leaves[0]


DATA, BOTH = {"data": 8}, {"data": 4, "model": 2}
AB = {"shard_axes": ("a", "b")}
FEW = "elements are fewer than"

# shape, mesh, options -> shard spec; stored shape where padded; what the reason must say
RULES = {
    "the second dim, so that no device is empty": (
        (2, 4096), DATA, {}, P(None, "data"), None, ""),
    "the largest dim": ((64, 128, 8), DATA, {}, P(None, "data", None), None, ""),
    "ties to the left": ((3, 64, 64), DATA, {}, P(None, "data", None), None, ""),
    "a dim that divides, not the largest": (
        (50257, 768), DATA, {}, P(None, "data"), None, ""),
    "exactly one element per device": ((8,), DATA, {}, P("data"), None, ""),
    "pads the dim that wastes least": (
        (7, 15), DATA, {}, P(None, "data"), (7, 16), "dim 1: 15 to 16"),
    "pads, though the dim is smaller than the axis": (
        (5, 3), DATA, {}, P("data", None), (8, 3), "dim 0: 5 to 8"),
    "pads a vector": ((13,), DATA, {}, P("data"), (16,), "padded, no dim divides: dim 0: 13 to 16"),
    "4096 on 24": ((4096,), {"data": 24}, {}, P("data"), (4104,), "dim 0: 4096 to 4104"),
    "4096 x 48 on 24": ((4096, 48), {"data": 24}, {}, P(None, "data"), None, ""),
    "pad=False": ((5, 3), DATA, {"pad": False}, P(None, None), None,
                  "no dim divides by 8, and pad=False"),
    "pad=False where a dim divides": ((5, 16), DATA, {"pad": False}, P(None, "data"), None, ""),
    # leaves that are too small
    "scalar": ((), DATA, {}, P(), None, "scalar"),
    "one element": ((1,), DATA, {}, P(None), None, f"1 {FEW} 8 shards"),
    "three elements": ((3,), DATA, {}, P(None), None, f"3 {FEW} 8 shards"),
    "no element": ((0,), DATA, {}, P(None), None, f"0 {FEW} 8 shards"),
    "no element in two dims": ((0, 4), DATA, {}, P(None, None), None, f"0 {FEW} 8 shards"),
    "one fewer than devices": ((7,), DATA, {}, P(None), None, f"7 {FEW} 8 shards"),
    "under min_size": ((8, 8), DATA, {"min_size": 65}, P(None, None), None,
                       f"64 {FEW} min_size=65"),
    "of min_size": ((8, 8), DATA, {"min_size": 64}, P("data", None), None, ""),
    # several shard axes
    "two axes on one dim": ((3, 16), {"a": 2, "b": 4}, AB, P(None, ("b", "a")), None, ""),
    "one dim rather than two": ((8, 8), {"a": 2, "b": 4}, AB, P(("b", "a"), None), None, ""),
    "a dim each, where a greedy choice would pad": (
        (6, 12), {"a": 2, "b": 4}, AB, P("a", "b"), None, ""),
    "a dim each, crosswise": ((12, 6), {"a": 2, "b": 4}, AB, P("b", "a"), None, ""),
    "order of shard_axes": (
        (16,), {"a": 2, "b": 4}, {"shard_axes": ("b", "a")}, P(("a", "b")), None, ""),
    "two axes, padded": ((9,), {"a": 2, "b": 4}, AB, P(("b", "a")), (16,), "dim 0: 9 to 16"),
    "an axis of size 1 is left out": ((8, 4), {"a": 1, "b": 4}, AB, P("b", None), None, ""),
    "replicate_axes": ((8,), {"data": 4, "rep": 2}, {"replicate_axes": "rep"}, P("data"), None, ""),
    # model axes
    "an unsharded dim before co-sharding": (
        (64, 4), BOTH, {"specs": P("model")}, P("model", "data"), None, ""),
    "co-sharding, behind the model axis": (
        (64, 3), BOTH, {"specs": P("model")}, P(("model", "data"), None), None, ""),
    "the largest after the model axes": (
        (12, 16, 8), BOTH, {"specs": P(None, "model", None)}, P("data", "model", None), None, ""),
    "of two co-sharded dims the larger block": (
        (64, 48), {"data": 4, "model": 2, "pipe": 4}, {"specs": P("pipe", "model")},
        P("pipe", ("model", "data")), None, ""),
    "a model axis's dim is never padded": (
        (6, 5), BOTH, {"specs": P("model")}, P("model", "data"), (6, 8), "dim 1: 5 to 8"),
    "padding nothing but a model axis's dim": (
        (10,), BOTH, {"specs": P("model")}, P("model"), None, "split a model axis's shards"),
    "too small after the model axes": (
        (6,), BOTH, {"specs": P("model")}, P("model"), None, f"3 {FEW} 4 shards"),
    "two model axes on a dim": (
        (8, 4), {"data": 4, "x": 2, "y": 2}, {"specs": P(("y", "x"))}, P(("y", "x"), "data"),
        None, ""),
    # its own spec uses a data axis (an expert-parallel weight)
    "own spec uses the axis": ((8, 8), DATA, {"specs": P("data")}, P("data", None), None,
                               "its own spec already uses ('data',)"),
    "own spec uses one of two": (
        (8, 8), {"a": 2, "b": 4}, {**AB, "specs": P("a")}, P("a", "b"), None, ""),
    "own spec uses a replicate axis": (
        (8, 8), {"data": 4, "rep": 2}, {"replicate_axes": "rep", "specs": P("rep")},
        P("rep", "data"), None, ""),
    # options
    "scan_dims": ((48, 16), DATA, {"scan_dims": 1}, P(None, "data"), None, ""),
    "scan_dims, padded behind them": (
        (64, 9), DATA, {"scan_dims": 1}, P(None, "data"), (64, 16), "dim 1: 9 to 16"),
    "only scanned dims": ((16, 8), DATA, {"scan_dims": 2}, P(None, None), None,
                          "every dim is scanned over (scan_dims=2)"),
    "shard_dim": ((8, 64), DATA, {"shard_dim": lambda *_: 0}, P("data", None), None, ""),
    "shard_dim leaves it to the rule": (
        (8, 64), DATA, {"shard_dim": lambda *_: None}, P(None, "data"), None, ""),
    "shard_dim that does not divide": (
        (5, 64), DATA, {"shard_dim": lambda *_: 0}, P("data", None), (8, 64),
        "padded, shard_dim chose it: dim 0: 5 to 8"),
    "shard_dim puts all axes on it": (
        (8, 64), {"a": 2, "b": 4}, {**AB, "shard_dim": lambda *_: 0}, P(("b", "a"), None),
        None, ""),
    "stage 0": ((64,), DATA, {"stage": 0}, P(None), None, "stage 0 shards no state"),
    "stage 2": ((64,), DATA, {"stage": 2}, P("data"), None, ""),
    "one device": ((64,), {"data": 1}, {}, P(None), None, "one device on ('data',)"),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_rule(name):
    shape, axes, options, spec, stored, reason = RULES[name]
    leaf = plan(shape, abstract(**axes), **options)
    assert leaf.shard_spec == spec
    assert leaf.stored == (stored or shape) and leaf.padded == (stored is not None)
    assert reason in leaf.reason and bool(leaf.reason) == bool(reason)


@pytest.mark.parametrize(
    "dtype, trainable",
    [("float32", True), ("bfloat16", True), ("float16", True), ("complex64", True),
     ("int32", False), ("uint8", False), ("bool", False), (jax.random.key(0).dtype, False)],
    ids=str,
)  # fmt: skip
def test_leaves_without_gradient_stay_whole(dtype, trainable):
    leaf = plan((64,), abstract(**DATA), dtype=dtype)
    assert leaf.trainable == trainable
    assert leaf.shard_spec == (P("data") if trainable else P(None))
    assert leaf.reason == ("" if trainable else f"no gradient: {leaf.dtype}")


def test_shard_dim_is_asked_with_path_shape_and_spec():
    asked = []
    params = {"a": [jnp.zeros((4, 6))], "b": jnp.zeros(8)}
    zerojax.partition(
        params, abstract(**BOTH), {"a": P(None, "model"), "b": P()},
        shard_dim=lambda *args: asked.append(args),
    )  # fmt: skip
    assert asked == [("['a'][0]", (4, 6), P(None, "model")), ("['b']", (8,), P(None))]


def test_scan_dims_is_a_prefix_tree():
    leaf = jnp.zeros((48, 16))
    params = {"layers": {"w": leaf, "v": leaf}, "head": leaf}
    part = zerojax.partition(params, abstract(**DATA), scan_dims={"layers": 1, "head": 0})
    assert part.shard_specs == {
        "layers": {"w": P(None, "data"), "v": P(None, "data")}, "head": P("data", None)
    }  # fmt: skip


W = jnp.zeros((8, 16))
TREE = {"block": {"w": W, "v": W}, "head": W}
COLUMNS = {"block": {"w": P(None, "model"), "v": P(None, "model")}, "head": P(None, None)}


@pytest.mark.parametrize(
    "specs, expected",
    [
        (P(), jax.tree.map(lambda _: P(None, None), TREE)),
        (P(None, "model"), jax.tree.map(lambda _: P(None, "model"), TREE)),
        ({"block": P(None, "model"), "head": P()}, COLUMNS),
        ({"block": P(None, "model"), "head": None}, COLUMNS),
        ({"block": {"w": P(None, "model"), "v": P(None, ("model",))}, "head": P()}, COLUMNS),
    ],
    ids=["one spec", "one spec with an axis", "prefix", "None", "whole tree"],
)
def test_specs_are_a_tree_prefix(specs, expected):
    part = zerojax.partition(TREE, abstract(**BOTH), specs)
    assert part.model_specs == part.param_specs == expected


def sharded(mesh, spec):
    return jax.device_put(W, NamedSharding(mesh, spec))


def test_specs_are_read_from_what_knows_its_sharding():
    mesh = real(**BOTH)
    sharding = NamedSharding(mesh, P(None, "model"))
    params = {
        "array": sharded(mesh, P(None, "model")),
        "struct": jax.ShapeDtypeStruct(W.shape, W.dtype, sharding=sharding),
        "replicated": sharded(mesh, P()),
    }
    part = zerojax.partition(params, mesh)
    assert part.model_specs == {
        "array": P(None, "model"), "struct": P(None, "model"), "replicated": P(None, None)
    }  # fmt: skip
    explicit = real(AxisType.Explicit, **BOTH)
    parts = []
    jax.jit(lambda w: parts.append(zerojax.partition({"w": w}, explicit)))(
        sharded(explicit, P(None, "model"))
    )
    assert parts[0].model_specs == {"w": P(None, "model")}


@pytest.mark.parametrize(
    "make",
    [
        lambda mesh: W,
        lambda mesh: np.zeros((8, 16)),
        lambda mesh: jax.ShapeDtypeStruct((8, 16), jnp.float32),
        lambda mesh: sharded(real(data=8), P("data")),
    ],
    ids=["array", "numpy", "shape", "array on a mesh without the axis"],
)
def test_nothing_is_assumed_on_a_mesh_with_model_axes(make):
    mesh = real(**BOTH)
    params = {"known": sharded(mesh, P()), "unknown": make(mesh)}
    with pytest.raises(ValueError, match=r"model axes \['model'\]") as error:
        zerojax.partition(params, mesh)
    assert "['unknown']" in str(error.value) and "['known']" not in str(error.value)
    assert "Pass specs=" in str(error.value)
    # The same leaf is no question where no model axis is larger than 1, or specs are given.
    assert zerojax.partition(params, mesh, P()).leaves[1].model_spec == P(None, None)
    assert zerojax.partition({"w": W}, abstract(data=8, model=1)).leaves[0].model_spec == P(
        None, None
    )


@pytest.mark.parametrize("axes", [DATA, BOTH], ids=str)
def test_the_type_of_a_tracer_over_auto_axes_says_nothing(axes):
    mesh = real(**axes)
    parts = []
    trace = jax.jit(lambda w: parts.append(zerojax.partition({"w": w}, mesh)))
    if axes is DATA:
        trace(W)
        assert parts[0].model_specs == {"w": P(None, None)}
    else:
        with pytest.raises(ValueError, match=r"\['w'\]: .*Tracer without"):
            trace(sharded(mesh, P(None, "model")))


def test_axes_of_the_batch():
    part = zerojax.partition(
        {"w": W}, abstract(rep=2, model=2, data=4), P(), replicate_axes="rep", shard_axes=("data",)
    )
    assert part.data_axes == ("rep", "data") and part.data_size == 8
    assert part.shard_axes == ("data",) and part.replicate_axes == ("rep",)


SHOWN = {
    "attention": jax.ShapeDtypeStruct((64, 32), jnp.float32),
    "bias": jax.ShapeDtypeStruct((13,), jnp.bfloat16),
    "scale": jax.ShapeDtypeStruct((), jnp.float32),
    "steps": jax.ShapeDtypeStruct((3,), jnp.int32),
}
SHOWN_SPECS = {"attention": P("model"), "bias": None, "scale": None, "steps": None}


def test_print():
    part = zerojax.partition(SHOWN, abstract(**BOTH, rep=3), SHOWN_SPECS, replicate_axes="rep")
    # Whole: 64/2 x 32 x 4 + 13 x 2 + 4 + 3 x 4; sharded: 64/2 x 32/4 x 4 + 16/4 x 2 + 4 + 3 x 4.
    assert (
        repr(part)
        == """\
ZeRO stage 1 on mesh(data=4, model=2, rep=3), sharded over ('data',), replicated over ('rep',)
path           shape   dtype     model spec   shard spec          bytes/device  reason
['attention']  64x32   float32   P('model',)  P('model', 'data')  1,024
['bias']       13      bfloat16  P()          P('data',)          8             \
padded, no dim divides: dim 0: 13 to 16
['scale']      scalar  float32   P()          P()                 4             scalar
['steps']      3       int32     P()          P()                 12            \
no gradient: int32
what is sharded takes, for each array of the parameters' shape and dtype, \
1,048 bytes per device instead of 4,138 (25.3%)"""
    )


def test_to_json():
    part = zerojax.partition(SHOWN, abstract(**BOTH), SHOWN_SPECS)
    table = json.loads(part.to_json())
    leaves = table.pop("leaves")
    assert table == {"mesh": BOTH, "stage": 1, "shard_axes": ["data"], "replicate_axes": []}
    assert leaves == part.rows()
    assert leaves[0] == {
        "path": "['attention']", "shape": [64, 32], "dtype": "float32",
        "model_spec": "P('model',)", "shard_spec": "P('model', 'data')",
        "bytes_whole": 4096, "bytes_shard": 1024, "reason": "",
    }  # fmt: skip
    assert [leaf["bytes_whole"] for leaf in leaves] == [4096, 26, 4, 12]
    assert [leaf["bytes_shard"] for leaf in leaves] == [1024, 8, 4, 12]


@pytest.mark.parametrize("params", [{}, None, {"k": jax.random.key(0)}], ids=["{}", "None", "key"])
def test_trees_without_anything_to_shard(params):
    part = zerojax.partition(params, real(**DATA))
    assert "ZeRO stage 1" in repr(part) and json.loads(part.to_json())["leaves"] == part.rows()
    assert jax.tree.structure(part.place(params)) == jax.tree.structure(params)


# Properties: what holds for every plan.


def examples(count):
    """The same examples in every run: a failure is a change of the code."""
    return hypothesis.settings(max_examples=count, deadline=None, derandomize=True, database=None)


@st.composite
def partitions(draw, axes, leaves, mesh=abstract, **options):
    """Partitions of random trees over meshes of these axes, some of them model axes."""
    axes = draw(axes)
    roles = {name: draw(st.sampled_from(["shard", "replicate", "model"])) for name in axes}
    roles[draw(st.sampled_from(sorted(axes)))] = "shard"
    shapes = draw(st.lists(st.lists(st.integers(0, 40), max_size=4), min_size=1, max_size=leaves))
    specs = []
    for shape in shapes:
        spec, local = [[] for _ in shape], list(shape)
        for name, size in axes.items():
            # A data axis in a leaf's own spec is an expert's; less often.
            use = draw(st.integers(0, 2 if roles[name] == "model" else 8)) == 0
            dims = [d for d, n in enumerate(local) if n % size == 0]
            if use and dims:
                dim = draw(st.sampled_from(dims))
                spec[dim].append(name)
                local[dim] //= size
        specs.append(P(*(tuple(names) or None for names in spec)))
    dtypes = st.sampled_from(["float32", "float16", "bfloat16", "complex64", "int8", "bool"])
    part = zerojax.partition(
        [jax.ShapeDtypeStruct(tuple(shape), draw(dtypes)) for shape in shapes],
        mesh(**axes),
        specs,
        shard_axes=draw(st.permutations([a for a in axes if roles[a] == "shard"])),
        replicate_axes=[a for a in axes if roles[a] == "replicate"],
        stage=draw(st.integers(0, 2)),
        scan_dims=draw(st.integers(0, 2)),
        min_size=draw(st.sampled_from([0, 0, 30])),
        pad=draw(st.booleans()),
    )
    return part


def any_axes(sizes):
    return dict(zip("abcd", sizes, strict=False))


axes_of_any_size = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(any_axes)


def names_of(spec):
    return [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec]


def times_held(shape, spec, sizes):
    """How many of the blocks along the axes of an array's spec hold each of its elements."""
    dims = names_of(spec)
    axes = [axis for dim in dims for axis in dim]
    held = np.zeros(shape, int)
    for position in itertools.product(*(range(sizes[a]) for a in axes)):
        at, block = dict(zip(axes, position, strict=True)), []
        for n, dim in zip(shape, dims, strict=True):
            index, count = 0, 1
            for axis in dim:  # the first is the major one
                index, count = index * sizes[axis] + at[axis], count * sizes[axis]
            assert n % count == 0
            block.append(slice(index * n // count, (index + 1) * n // count))
        held[tuple(block)] += 1
    return held


def ways(leaf, free, sizes, scan):
    """Stored shapes of every assignment of the free shard axes to dims; model dims must divide."""
    for dims in itertools.product(range(scan, len(leaf.shape)), repeat=len(free)):
        stored = list(leaf.shape)
        for dim in set(dims):
            shards = math.prod(sizes[a] for a, d in zip(free, dims, strict=True) if d == dim)
            block = shards * math.prod(sizes[a] for a in names_of(leaf.model_spec)[dim])
            stored[dim] = math.ceil(stored[dim] / block) * block
            if leaf.model[dim] and stored[dim] != leaf.shape[dim]:
                break
        else:
            yield tuple(stored)


@examples(250)
@hypothesis.given(partitions(axes_of_any_size, leaves=1))
def test_a_plan_covers_every_element_once(part):
    (leaf,), sizes = part.leaves, dict(part.mesh.shape)
    held = times_held(leaf.stored, leaf.shard_spec, sizes)
    assert (held == 1).all()
    assert (times_held(leaf.shape, leaf.model_spec, sizes) == 1).all()

    used = [axis for dim in names_of(leaf.shard_spec) for axis in dim]
    assert len(set(used)) == len(used), "an axis twice"
    assert {*leaf.shard_axes} <= {*part.shard_axes} - {*leaf.model_axes}
    for stored, n, model, dim in zip(
        leaf.stored, leaf.shape, leaf.model, names_of(leaf.shard_spec), strict=True
    ):
        assert dim[: len(model)] == model, "the user's axes stay the major ones"
        assert 0 <= stored - n < max(math.prod(sizes[a] for a in dim), 1)
        assert stored == n or not model, "padding would split a model axis's shards"

    model = math.prod(sizes[a] for a in leaf.model_axes)
    shards = math.prod(sizes[a] for a in leaf.shard_axes)
    assert math.prod(leaf.stored) <= math.prod(leaf.shape) * shards, "a share exceeds the whole"
    assert bool(leaf.reason) == (not leaf.shard_axes or leaf.padded)
    if leaf.shard_axes and not leaf.padded:
        assert math.prod(leaf.shape) % (shards * model) == 0
    assert leaf.shard_axes == () or (part.stage > 0 and leaf.trainable)


@examples(250)
@hypothesis.given(axes_of_any_size, st.data())
def test_no_better_plan_exists(axes, data):
    """A leaf is padded or whole only where it must be, and padded by the fewest elements."""
    scan, pad = data.draw(st.integers(0, 2)), data.draw(st.booleans())
    shape = tuple(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4)))
    *shard_axes, last = axes
    free = tuple(a for a in shard_axes or [last] if axes[a] > 1)
    dim = data.draw(st.integers(0, len(shape) - 1))
    spec = P()
    if shard_axes and shape[dim] % axes[last] == 0:
        spec = P(*[None] * dim, last)
    leaf = plan(
        shape, abstract(**axes), spec, shard_axes=shard_axes or last, scan_dims=scan, pad=pad
    )
    local = math.prod(shape) // math.prod(axes[a] for a in leaf.model_axes)
    if local < math.prod(axes[a] for a in free) or not free:
        assert leaf.shard_axes == ()
        return
    stored = [s for s in ways(leaf, free, axes, scan) if pad or s == shape]
    assert sorted(leaf.shard_axes) == (sorted(free) if stored else [])
    if stored:
        assert math.prod(leaf.stored) == min(map(math.prod, stored))
        # Among those, no dim of a model axis is used without need.
        model_dims = [d for d in range(scan, len(shape)) if leaf.model[d]]
        if leaf.stored == shape and any(leaf.shard[d] for d in model_dims):
            rest = [d for d in range(scan, len(shape)) if d not in model_dims]
            for dims in itertools.product(rest, repeat=len(free)):
                blocks = [1] * len(shape)
                for axis, d in zip(free, dims, strict=True):
                    blocks[d] *= axes[axis]
                assert any(n % b for n, b in zip(shape, blocks, strict=True))


# Moving arrays by a plan.

EIGHT = [(8,), (4, 2), (2, 4), (1, 8), (2, 2, 2), (2, 1, 4), (2, 2, 1, 2), (3, 2), (1, 1), (5,)]
real_axes = st.sampled_from(EIGHT).map(any_axes)
explicit_or_auto = st.sampled_from([AxisType.Auto, AxisType.Explicit])


def random_bits(rng, shape, dtype):
    """Numpy arrays of any bits, NaNs and denormals too."""
    dtype = jnp.dtype(dtype)
    bits = rng.integers(0, 2 if dtype.kind == "b" else 256, (*shape, dtype.itemsize), np.uint8)
    return bits.view(dtype).reshape(shape)


def in_bits(x):
    # jax cannot read an empty array that several devices hold.
    return np.asarray(x).tobytes() if np.size(x) else b""


def memory(x):
    """Where the blocks of an array lie, as (first byte, behind the last byte)."""
    if isinstance(x, np.ndarray):
        return [(x.ctypes.data, x.ctypes.data + x.nbytes)]
    blocks = [shard.data for shard in x.addressable_shards]
    return [(b.unsafe_buffer_pointer(), b.unsafe_buffer_pointer() + b.nbytes) for b in blocks]


def share_memory(x, y):
    return any(a < d and c < b for (a, b), (c, d) in itertools.product(memory(x), memory(y)))


@examples(60)
@hypothesis.given(
    explicit_or_auto.flatmap(
        lambda types: partitions(real_axes, leaves=3, mesh=lambda **axes: real(types, **axes))
    ),
    st.sampled_from(["numpy", "one device", "placed", "elsewhere"]),
    st.randoms(use_true_random=False),
)
def test_place_then_gather_is_the_identity(part, source, random):
    rng = np.random.default_rng(random.randrange(2**32))
    host = [random_bits(rng, leaf.shape, leaf.dtype) for leaf in part.leaves]
    params = {
        "numpy": lambda: host,
        "one device": lambda: jax.device_put(host, jax.devices()[0]),
        "placed": lambda: jax.device_put(host, part.shardings(part.param_specs)),
        "elsewhere": lambda: jax.device_put(host, NamedSharding(real(x=4, y=2), P())),
    }[source]()
    placed = part.place(params)
    specs = zip(placed, part.param_specs, strict=True)
    assert all(x.sharding == NamedSharding(part.mesh, spec) for x, spec in specs)
    gathered = part.gather(placed)
    for before, x, after, leaf in zip(host, placed, gathered, part.leaves, strict=True):
        assert after.shape == leaf.shape and after.dtype == leaf.dtype
        assert after.sharding == NamedSharding(part.mesh, leaf.model_spec)
        assert in_bits(before) == in_bits(x) == in_bits(after)
        # jax agrees with the plan about who holds what.
        held = np.zeros(leaf.stored, int)
        sharding = NamedSharding(part.mesh, leaf.shard_spec)
        blocks = sharding.devices_indices_map(leaf.stored).values()
        for block in {str(block): block for block in blocks}.values():
            held[block] += 1
        assert (held == 1).all()
    for before, x in zip(params, placed, strict=True):
        assert not share_memory(before, x)
    for x in placed:
        x.delete()
    assert [*map(in_bits, params)] == [*map(in_bits, host)]


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_step_that_donates_placed_params_leaves_the_caller_his_own(types):
    host = {"w": np.arange(64.0, dtype=np.float32), "b": np.ones((8, 8), np.float32)}
    part = zerojax.partition(host, real(types, **BOTH), {"w": P("model"), "b": P()})
    step = jax.jit(lambda p: jax.tree.map(lambda x: x * 0, p), donate_argnums=0)
    for params in [host, jax.tree.map(jnp.asarray, host), part.place(host)]:
        placed = part.place(params)
        step(placed)
        assert all(x.is_deleted() for x in jax.tree.leaves(placed))
        for name in host:
            assert in_bits(params[name]) == in_bits(host[name])


def test_place_and_gather_a_key():
    params = {"key": jax.random.key(3), "keys": jax.random.split(jax.random.key(4), 16)}
    part = zerojax.partition(params, real(**DATA))
    moved = part.gather(part.place(params))
    for name, key in params.items():
        assert moved[name].dtype == key.dtype
        assert in_bits(jax.random.key_data(moved[name])) == in_bits(jax.random.key_data(key))


def test_place_takes_numbers_and_wide_numpy_arrays_as_jax_does():
    params = {"f": np.arange(16.0), "i": np.arange(16), "n": 2.5}
    assert params["f"].dtype == np.float64
    part = zerojax.partition(params, real(**DATA))
    placed = part.place(params)
    assert [placed[k].dtype for k in "fin"] == [jnp.float32, jnp.int32, jnp.float32]
    assert placed["f"].tolist() == params["f"].tolist() and placed["n"] == 2.5


def test_gather_moves_nothing_that_is_in_place():
    part = zerojax.partition({"w": W}, real(**DATA))
    placed = part.place({"w": W})
    assert memory(part.gather(placed)["w"]) == memory(placed["w"])


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_gather_brings_back_what_lies_elsewhere(types):
    part = zerojax.partition({"w": W}, real(types, **BOTH), P(None, "model"))
    x = jnp.arange(128.0).reshape(8, 16)
    for spec in [P("data"), P("data", "model"), P()]:
        moved = jax.device_put(x, NamedSharding(part.mesh, spec))
        gathered = part.gather({"w": moved})["w"]
        assert gathered.sharding == NamedSharding(part.mesh, P(None, "model"))
        assert in_bits(gathered) == in_bits(x)


def test_gather_under_jit():
    part = zerojax.partition({"w": W}, real(**BOTH), P(None, "model"))
    x = jnp.arange(128.0).reshape(8, 16)
    gathered = jax.jit(part.gather)(part.place({"w": x}))
    assert gathered["w"].sharding.spec == P(None, "model")
    assert in_bits(gathered["w"]) == in_bits(x)


WRONG = {
    "a missing leaf": ({"w": W}, "['b']: is missing"),
    "one too many": ({"w": W, "b": jnp.ones(8), "c": W}, "['c']: was not there"),
    "reshaped": (
        {"w": W.T, "b": jnp.ones(8)}, "['w']: expected float32[8, 16], got float32[16, 8]"),
    "another dtype": (
        {"w": W, "b": jnp.ones(8, jnp.int32)}, "['b']: expected float32[8], got int32[8]"),
    "another tree": ([W, jnp.ones(8)], "[1]: was not there"),
    "nothing": (None, "['w']: is missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("method", ["place", "gather"])
def test_wrong_trees(method, name):
    params, fragment = WRONG[name]
    part = zerojax.partition({"w": W, "b": jnp.ones(8)}, real(**DATA))
    with pytest.raises(ValueError, match=f"{method}: the parameters are not those") as error:
        getattr(part, method)(params)
    assert fragment in str(error.value) and "zerojax.partition again" in str(error.value)
