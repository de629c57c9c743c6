"""What the compiled programs communicate, hold and compute."""

import collections
import functools
import math
import re

import chex
import jax
import numpy as np
import optax
import pytest
from jax import numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from models import SCAN_DIMS, SPECS, loss_fn, make_batch, make_params, row_parallel
from pairs import product

import zerojax
from tests.conftest import make_mesh

SMALL = 8  # elements: scalars, and leaves that stay whole
# On jax 0.10.2 conftest.py turns these off, and equal programs then round differently.
BITS = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else {}
UNUSED = 24  # elements of the leaf that the loss never uses


def plan(mesh, **options):
    specs = SPECS if "model" in mesh.axis_names else P()
    return zerojax.partition(make_params(np.float32), mesh, specs, scan_dims=SCAN_DIMS, **options)


def batch():
    tokens, targets = make_batch()
    return tokens, targets.astype(np.float32)


def compiled_step(part, **options):
    tx = zerojax.zero(optax.adamw(1e-3), part)
    params = part.place(make_params(np.float32))
    step = zerojax.train_step(zerojax.value_and_grad(loss_fn, part, **options), tx, part)
    return step.lower(params, tx.init(params), *batch()).compile()


def local_elements(part, leaf):
    """Elements of a leaf on one device before ZeRO: what its reduce-scatter moves."""
    shards = math.prod(part.mesh.shape[a] for a in leaf.model_axes)
    return math.prod(leaf.stored) // shards


@pytest.mark.parametrize(
    *product(
        stage=[1, 2, 3, 0],
        accumulate=[1, 4],
        mesh=["mesh8", "mesh4x2", "mesh2x4"],
        axis_type=[AxisType.Auto, AxisType.Explicit],
    )
)
def test_one_reduce_scatter_and_one_all_gather(stage, accumulate, mesh, axis_type):
    mesh = make_mesh(mesh, axis_type)
    replicate = [a for a in mesh.axis_names if a == "replica"]
    part = plan(mesh, stage=stage, replicate_axes=replicate)
    found = zerojax.audit(compiled_step(part, accumulate=accumulate), mesh).collectives
    big = [c for c in found if c.elements > SMALL]

    sharded = [leaf for leaf in part.leaves if leaf.shard_axes]
    sizes = collections.Counter(local_elements(part, leaf) for leaf in sharded)
    sizes = collections.Counter({n: k for n, k in sizes.items() if n > SMALL})
    used = sizes - collections.Counter([UNUSED])  # no gradient: nothing to reduce
    times = accumulate if stage > 1 else 1
    scattered = collections.Counter()
    for c in big:
        if c.kind == "reduce-scatter":
            assert c.axes == ("data",) and c.in_loop == (times > 1)
            scattered[c.elements] += c.trips
    assert scattered == collections.Counter({n: k * times for n, k in used.items()})

    gathered = collections.Counter(c.elements for c in big if c.kind == "all-gather")
    assert gathered == (used if stage == 3 else sizes)
    assert all(c.axes == ("data",) and not c.in_loop for c in big if c.kind == "all-gather")

    # Sums over replicas are of shards; sums over `model` are of activations, in the model's loops.
    rest = [c for c in big if c.kind not in ("reduce-scatter", "all-gather")]
    replica = sum(c.elements * c.trips for c in rest if c.axes == ("replica",))
    shards = sum(k * n for n, k in sizes.items()) // mesh.shape["data"]
    assert replica <= (shards + 8 * SMALL) * times if replicate else replica == 0
    activations = batch()[0].size // part.data_size * 8
    for c in rest:
        if c.axes == ("model",):
            assert c.kind == "all-reduce" and c.elements * accumulate == activations, c
        elif stage:
            assert c.axes == ("replica",), c


@pytest.mark.parametrize("mesh", ["mesh8", "mesh4x2"])
def test_no_full_gradient_is_all_reduced(mesh):
    mesh = make_mesh(mesh)
    part = plan(mesh)
    found = zerojax.audit(compiled_step(part, accumulate=4), mesh).collectives
    over_data = [c for c in found if c.kind == "all-reduce" and "data" in c.axes]
    assert all(c.elements <= SMALL for c in over_data)
    # The loss, the norm, and the leaves that stay whole: no more than one each.
    whole = [leaf for leaf in part.leaves if leaf.trainable and not leaf.shard_axes]
    assert len(over_data) <= 2 + len(whole)


def test_the_norm_is_one_scalar_collective():
    mesh = make_mesh("mesh4x2")
    part = plan(mesh)
    grads = jax.device_put(make_params(np.float32), part.shardings(part.model_specs))
    norm = jax.jit(lambda g: zerojax._collectives.norm_of_shards(part, g))
    found = zerojax.audit(norm.lower(grads).compile(), mesh).collectives
    assert [(c.kind, c.elements) for c in found] == [("all-reduce", 1)]
    floating = [x for x in jax.tree.leaves(make_params()) if x.dtype == np.float64]
    want = math.sqrt(sum(np.sum(np.square(x.astype(np.float32))) for x in floating))
    assert float(norm(grads)) == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("stage, accumulate", [(1, 1), (2, 1), (1, 4)])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_one_device_runs_the_plain_program(stage, accumulate, axis_type):
    """At N=1: the same operations, the same bytes, the same bits as plain jax and optax."""
    part = plan(make_mesh("mesh1", axis_type), stage=stage)
    params = {k: v for k, v in make_params(np.float32).items() if k != "ids"}
    part = zerojax.partition(params, part.mesh, stage=stage)
    tx = optax.adamw(1e-3)

    def loss(params, *args):
        return loss_fn(params, *args)

    def plain(params, state, *args):
        if accumulate == 1:
            value, grads = jax.value_and_grad(loss)(params, *args)
        else:

            def add(total, part_of_batch):
                value, grads = jax.value_and_grad(loss)(params, *part_of_batch)
                return jax.tree.map(jnp.add, total, grads), value

            split = [x.reshape(accumulate, -1, *x.shape[1:]) for x in args]
            grads, values = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), split)
            grads = jax.tree.map(lambda g: g / accumulate, grads)
            value = jnp.sum(values) / accumulate
        squares = [jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)]
        updates, state = tx.update(grads, state, params)
        metrics = {"loss": value, "grad_norm": jnp.sqrt(sum(squares))}
        return optax.apply_updates(params, updates), state, metrics

    step = zerojax.train_step(
        zerojax.value_and_grad(loss, part, accumulate=accumulate), zerojax.zero(tx, part), part
    )
    placed = part.place(params)
    args = (placed, zerojax.zero(tx, part).init(placed), *batch())
    ours = step.lower(*args).compile(BITS)
    plain_args = (jax.tree.map(jnp.asarray, params), tx.init(params), *batch())
    theirs = jax.jit(plain, donate_argnums=(0, 1)).lower(*plain_args).compile(BITS)
    assert operations(ours) == operations(theirs)
    for key in ("flops", "bytes accessed"):
        assert ours.cost_analysis()[key] == theirs.cost_analysis()[key]
    chex.assert_trees_all_equal(jax.tree.leaves(ours(*args)), jax.tree.leaves(theirs(*plain_args)))


def operations(compiled):
    pattern = r"^\s*(?:ROOT )?%\S+ = .+? ([a-z][\w-]*)\("
    return collections.Counter(re.findall(pattern, compiled.as_text(), re.MULTILINE))


# Layer by layer.

LAYERS = 4
WIDE = 4 * SMALL  # hidden units


def layered_plan(mesh, stage, layers=LAYERS, dim=2 * SMALL, hidden=WIDE):
    params = {
        "up": np.zeros((layers, dim, hidden), np.float32),
        "down": np.zeros((layers, hidden, dim), np.float32),
    }
    specs = P()
    if "model" in mesh.axis_names:
        specs = {"up": P(None, None, "model"), "down": P(None, "model")}
    replicate = [a for a in mesh.axis_names if a == "replica"]
    return zerojax.partition(
        params, mesh, specs, stage=stage, scan_dims=1, replicate_axes=replicate
    )


def layered_loss(params, x, policy=zerojax.regather):
    def layer(x, weights):
        weights = zerojax.unshard(weights)
        return row_parallel(jnp.tanh(x @ weights["up"]), weights["down"]), None

    x, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy), x, params)
    return jnp.mean(x**2)


@pytest.mark.parametrize(
    *product(
        stage=[3, 2, 1],
        accumulate=[1, 4],
        mesh=["mesh8", "mesh4x2", "mesh2x4"],
        axis_type=[AxisType.Auto, AxisType.Explicit],
    )
)
def test_by_layer_every_weight_is_gathered_and_reduced_in_the_loop(
    stage, accumulate, mesh, axis_type
):
    mesh = make_mesh(mesh, axis_type)
    part = layered_plan(mesh, stage)
    tx = zerojax.zero(optax.adamw(1e-3), part)
    step = zerojax.train_step(
        zerojax.value_and_grad(layered_loss, part, accumulate=accumulate), tx, part
    )
    x = np.zeros((32, 2 * SMALL), np.float32)
    compiled = step.lower(part.abstract_params(), zerojax.abstract_state(tx, part), x).compile()
    big = [c for c in zerojax.audit(compiled, mesh).collectives if c.elements > SMALL]

    def count(kind):
        return collections.Counter(
            {key: sum(c.trips for c in big if of(c) == key and c.kind == kind)
             for key in {of(c) for c in big if c.kind == kind}}
        )  # fmt: skip

    def of(c):
        return c.elements, c.in_loop, tuple(sorted(c.axes))

    model = mesh.shape.get("model", 1)
    weight = 2 * SMALL * WIDE // model  # of one layer
    weights, data = 2, ("data",)
    if stage == 3:  # in the forward pass, and again in the backward pass
        assert count("all-gather") == {(weight, True, data): 2 * weights * LAYERS * accumulate}
    else:  # of the new parameters
        assert count("all-gather") == {(weight * LAYERS, False, data): weights}
    reductions = LAYERS * (accumulate if stage > 1 else 1)
    assert count("reduce-scatter") == {(weight, True, data): weights * reductions}
    rest = [c for c in big if c.kind not in ("all-gather", "reduce-scatter")]
    activations = x.size // part.data_size
    for c in rest:
        if c.axes == ("replica",):  # of shards
            assert c.kind == "all-reduce" and c.elements <= weights * weight // mesh.shape["data"]
        else:  # of activations
            assert c.axes == ("model",) and c.kind == "all-reduce"
            assert c.elements * accumulate == activations
    replica = sum(c.elements * c.trips for c in rest if c.axes == ("replica",))
    shards = weights * weight * reductions // mesh.shape["data"]
    assert replica == (shards if "replica" in mesh.axis_names else 0)


# Memory.


def bytes_per_device(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def big_plan(stage=1):
    params = {"w": np.zeros((8, 512, 64), np.float32), "v": np.zeros((8, 64, 512), np.float32)}
    return zerojax.partition(params, make_mesh("mesh8"), stage=stage, scan_dims=1)


def test_arguments_of_the_program_are_params_and_a_share_of_the_state():
    part = big_plan()
    params = part.place(jax.tree.map(lambda s: np.zeros(s.shape, np.float32), shapes(part)))
    tx = zerojax.zero(optax.adam(1e-3), part)
    state = tx.init(params)
    size = bytes_per_device(params)
    assert bytes_per_device(state) == 2 * size // 8 + 4  # two moments, and the count
    step = zerojax.train_step(zerojax.value_and_grad(big_loss, part), tx, part)
    memory = step.lower(params, state, np.zeros((8, 512), np.float32)).compile().memory_analysis()
    batch_bytes = 512 * 4
    assert memory.argument_size_in_bytes == size + bytes_per_device(state) + batch_bytes
    # Donated: parameters and state come back in their own buffers.
    assert memory.alias_size_in_bytes == size + bytes_per_device(state)


def shapes(part):
    return part.treedef.unflatten(
        [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in part.leaves]
    )


def big_loss(params, x):
    def layer(x, weights):
        return jnp.tanh(x @ weights["w"]) @ weights["v"], None

    x, _ = jax.lax.scan(layer, x, params)
    return jnp.mean(x**2)


@pytest.mark.parametrize(
    "stage, accumulate, policy",
    [(3, 1, None), (3, 1, zerojax.regather), (3, 4, None), (2, 1, None), (2, 4, None)],
)
def test_by_layer_more_layers_take_no_more_than_their_carries(stage, accumulate, policy):
    """Never more than about one layer of whole weights, however many layers there are."""
    dim, hidden, examples = 64, 512, 16
    temp = {}
    for layers in (8, 16):
        part = layered_plan(make_mesh("mesh8"), stage, layers, dim, hidden)
        grad_fn = zerojax.value_and_grad(
            functools.partial(layered_loss, policy=policy), part, accumulate=accumulate
        )
        x = np.zeros((8 * examples * accumulate, dim), np.float32)
        temp[layers] = temp_bytes(jax.jit(grad_fn).lower(part.abstract_params(), x))
    layer = 2 * dim * hidden * 4
    saved = examples * dim * 4  # what a layer starts from
    if policy:  # both sides of the nonlinearity
        saved += 2 * examples * hidden * 4
    accumulators = layer // 8 if accumulate > 1 else 0
    assert temp[16] - temp[8] - 8 * (saved + accumulators) <= 0.01 * layer
    assert temp[8] - 8 * (saved + accumulators) <= 3 * layer


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_persistent_bytes_are_the_formula(stage):
    """4 bytes of fp32 parameters and 8 of moments, each on one device or on all of them."""
    part = layered_plan(make_mesh("mesh8"), stage)
    tx = zerojax.zero(optax.adam(1e-3), part)
    step = zerojax.train_step(zerojax.value_and_grad(layered_loss, part), tx, part)
    x = np.zeros((8, 2 * SMALL), np.float32)
    memory = step.lower(part.abstract_params(), zerojax.abstract_state(tx, part), x).compile()
    memory = memory.memory_analysis()
    n = sum(math.prod(leaf.shape) for leaf in part.leaves)
    persistent = 4 * n // (8 if stage == 3 else 1) + 8 * n // 8 + 4  # and the count
    assert memory.argument_size_in_bytes == persistent + 2 * SMALL * 4
    assert memory.alias_size_in_bytes == persistent


def test_stage_2_accumulators_take_one_nth():
    """What the loop over microbatches adds: full accumulators at stage 1, shards at stage 2."""
    size = sum(leaf.dtype.itemsize * math.prod(leaf.shape) for leaf in big_plan().leaves)
    added = {}
    for stage in (1, 2):
        part, temp = big_plan(stage), {}
        for accumulate in (1, 4):
            grad_fn = zerojax.value_and_grad(big_loss, part, accumulate=accumulate)
            x = np.zeros((16 * accumulate, 512), np.float32)
            temp[accumulate] = temp_bytes(jax.jit(grad_fn).lower(shapes(part), x))
        added[stage] = temp[4] - temp[1]
    assert added[1] >= 0.5 * size  # XLA finds room for some of it
    assert added[2] <= size / 8


def temp_bytes(lowered):
    return lowered.compile().memory_analysis().temp_size_in_bytes


def test_each_device_updates_its_shard_only():
    """Under jit XLA decides; the constraints make it compute 1/N of the update on each device."""
    part = big_plan()
    flops = {}
    for name, tx in {
        "plain": optax.adamw(1e-3),
        "zero": zerojax.zero(optax.adamw(1e-3), part),
    }.items():
        arrays = jax.tree.map(
            lambda s, spec: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=spec),
            shapes(part), part.shardings(part.model_specs),
        )  # fmt: skip
        state = zerojax.abstract_state(tx, part)
        compiled = jax.jit(tx.update).lower(arrays, state, arrays).compile()
        flops[name] = compiled.cost_analysis()["flops"]
    assert flops["zero"] == pytest.approx(flops["plain"] / 8, rel=0.01)


@pytest.mark.parametrize("how", ["eager", "jit", "zerojax.init"])
def test_init_never_holds_the_whole_state(how):
    part = big_plan()
    tx = zerojax.zero(optax.adam(1e-3), part)
    keys = jax.random.key(0)

    def init_fn(key):
        return jax.tree.map(lambda s: jax.random.normal(key, s.shape), shapes(part))

    size = sum(leaf.dtype.itemsize * math.prod(leaf.shape) for leaf in part.leaves)
    if how == "zerojax.init":
        memory = jax.jit(zerojax.init(init_fn, tx, part)).lower(keys).compile().memory_analysis()
        assert memory.output_size_in_bytes <= size + 2 * size // 8 + 1024
        assert memory.temp_size_in_bytes <= size  # the random bits of a leaf
    else:
        params = part.place(init_fn(keys))
        state = tx.init(params) if how == "eager" else jax.jit(tx.init)(params)
        assert bytes_per_device(state) == 2 * size // 8 + 4
        memory = jax.jit(tx.init).lower(params).compile().memory_analysis()
        assert memory.output_size_in_bytes <= 2 * size // 8 + 64  # and the tuple
        assert memory.temp_size_in_bytes <= size // 8
