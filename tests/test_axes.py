"""Tensor, pipeline, expert, replicated and context axes beside the data axes."""

import functools

import chex
import jax
import numpy as np
import optax
import pytest
from jax import lax
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from pairs import product

import zerojax

TIGHT = {"rtol": 1e-12, "atol": 1e-12}
VOCABULARY, DIM, HIDDEN, LAYERS, TICKED = 16, 8, 16, 4, 2


def normal(*shape, seed):
    return np.random.default_rng(seed).normal(size=shape) / 3


PARAMS = {
    "embed": normal(VOCABULARY, DIM, seed=0),  # tied: it is the head too
    "layers": {
        "norm": normal(LAYERS, DIM, seed=1) + 1,
        "up": normal(LAYERS, DIM, HIDDEN, seed=2),
        "bias": normal(LAYERS, HIDDEN, seed=3),
        "down": normal(LAYERS, HIDDEN, DIM, seed=4),
    },
    "norm": normal(DIM, seed=5) + 1,
    "shared": normal(HIDDEN, seed=6),  # by all layers and stages, split over `model`
    "temperature": normal(DIM, seed=7) + 1,  # by all layers, stages and tensor shards
    "odd": normal(5, seed=8),
    "unused": normal(16, seed=9),
}
SPECS = {
    "embed": P(),
    "layers": {
        "norm": P("stage"),
        "up": P("stage", None, "model"),
        "bias": P("stage", "model"),
        "down": P("stage", "model"),
    },
    "norm": P(),
    "shared": P("model"),
    "temperature": P(),
    "odd": P(),
    "unused": P(),
}
SCAN_DIMS = {name: int(name == "layers") for name in PARAMS}
TOKENS = np.random.default_rng(10).integers(0, VOCABULARY, size=(16, 3))


def make_mesh(axis_type, **sizes):
    kinds = [axis_type.get(a, AxisType.Auto) if isinstance(axis_type, dict) else axis_type
             for a in sizes]  # fmt: skip
    count = int(np.prod([*sizes.values()]))
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=tuple(kinds), devices=jax.devices()[:count]
    )


def only(specs, axes):
    return jax.tree.map(lambda spec: P(*(a if a in axes else None for a in spec)), specs)


def block(x, layer, params, reduce):
    layer, shared = zerojax.unshard(layer), zerojax.unshard(params["shared"])
    h = jnp.tanh((x * layer["norm"]) @ layer["up"] + layer["bias"]) * shared
    return x + reduce(h, layer["down"]) * zerojax.unshard(params["temperature"])


def head(params, x, tokens):
    params = {name: zerojax.unshard(params[name]) for name in ("norm", "embed", "odd")}
    logits = (x * params["norm"]) @ params["embed"].T
    right = jnp.take_along_axis(logits, tokens[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - right + jnp.sum(params["odd"] ** 2))


def row_parallel(x, weights):
    """A product that XLA sums over `model`; Explicit axes want to be told the result's type."""
    sharding = jax.typeof(weights).sharding
    out = NamedSharding(sharding.mesh, P()) if "model" in sharding.spec else None
    return jnp.einsum("...i,ij->...j", x, weights, out_sharding=out)


def summed(x, weights):
    """The same by hand, as Megatron-LM does it."""
    return lax.psum(x @ weights, "model")


def in_turn(params, tokens, reduce=row_parallel):
    """All layers, one after another."""
    x = zerojax.unshard(params["embed"])[tokens]
    x, _ = lax.scan(lambda x, p: (block(x, p, params, reduce), None), x, params["layers"])
    return head(params, x, tokens)


def in_a_pipeline(params, tokens, reduce=row_parallel):
    """GPipe: every stage works on another microbatch; the embedding comes before the ticks."""
    stages, stage = lax.axis_size("stage"), lax.axis_index("stage")
    x = zerojax.unshard(params["embed"])[tokens]
    x = x.reshape(TICKED, -1, *x.shape[1:])

    def tick(state, t):
        state = jnp.where(stage == 0, x[jnp.clip(t, 0, TICKED - 1)], state)
        y, _ = lax.scan(lambda x, p: (block(x, p, params, reduce), None), state, params["layers"])
        return lax.ppermute(y, "stage", [(i, (i + 1) % stages) for i in range(stages)]), y

    missing = {"stage"} - jax.typeof(x).manual_axis_type.varying
    start = jnp.zeros_like(x[0])
    start = lax.pcast(start, tuple(missing), to="varying") if missing else start
    _, ys = lax.scan(tick, start, jnp.arange(TICKED + stages - 1))
    out = ys[stages - 1 :].reshape(-1, *x.shape[2:])
    return lax.psum(jnp.where(stage == stages - 1, head(params, out, tokens), 0.0), "stage")


@functools.cache
def expected():
    return jax.tree.map(np.asarray, jax.value_and_grad(in_turn)(PARAMS, TOKENS))


def plan(mesh, stage, specs=None, **options):
    specs = only(SPECS, mesh.axis_names) if specs is None else specs
    replicate = [a for a in mesh.axis_names if a == "replica"]
    options = {"replicate_axes": replicate, "scan_dims": SCAN_DIMS} | options
    return zerojax.partition(PARAMS, mesh, specs, stage=stage, **options)


def assert_equal(part, grad_fn, accumulate=1):
    params = part.place(PARAMS)
    loss, grads = jax.jit(grad_fn)(params, TOKENS)
    want_loss, want = expected()
    assert float(loss) == pytest.approx(float(want_loss), rel=1e-12)
    natural = part.gather(grads) if part.stage == 3 else grads
    chex.assert_trees_all_close(natural, want, **TIGHT)
    norm = jax.jit(zerojax.global_norm)(grads)
    total = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(want)))
    assert float(norm) == pytest.approx(total, rel=1e-12)
    # And what `train_step` reports, from shards.
    tx = zerojax.zero(optax.sgd(1.0), part)
    step = zerojax.train_step(grad_fn, tx, part)
    after, _, metrics = step(params, tx.init(params), TOKENS)
    assert float(metrics["grad_norm"]) == pytest.approx(total, rel=1e-12)
    chex.assert_trees_all_close(
        part.gather(after), jax.tree.map(np.subtract, PARAMS, want), **TIGHT
    )


def three_d(tensor, pipeline, replicate, data_axis_type=AxisType.Auto):
    """The mesh, the loss and the Manual axes of a combination."""
    sizes = {"replica": 2} if replicate else {}
    sizes |= {"stage": 2} if pipeline else {}
    data = {0: 4, 1: 2, 2: 1}[len(sizes)] if tensor != "none" else 8 // 2 ** len(sizes)
    sizes |= {"data": data} | ({"model": 2} if tensor != "none" else {})
    kinds = dict.fromkeys(sizes, data_axis_type)
    kinds["model"] = AxisType.Explicit if tensor == "explicit" else AxisType.Auto
    reduce = summed if tensor == "manual" else row_parallel
    loss = functools.partial(in_a_pipeline if pipeline else in_turn, reduce=reduce)
    manual = ["stage"] * pipeline + ["model"] * (tensor == "manual")
    return make_mesh(kinds, **sizes), loss, manual


@pytest.mark.parametrize(
    *product(
        tensor=["manual", "auto", "explicit", "none"],
        stage=[1, 2, 3],
        pipeline=[False, True],
        replicate=[False, True],
        accumulate=[1, 2],
        axis_type=[AxisType.Auto, AxisType.Explicit],
    )
)
def test_gradients_and_norms_equal_one_device(
    x64, tensor, stage, pipeline, replicate, accumulate, axis_type
):
    mesh, loss, manual = three_d(tensor, pipeline, replicate, axis_type)
    part = plan(mesh, stage)
    grad_fn = zerojax.value_and_grad(loss, part, accumulate=accumulate, manual_axes=manual)
    assert_equal(part, grad_fn)


ORDERS = {
    "model before data": ({"model": 2, "stage": 2, "data": 2}, {}),
    "an axis of size 1": ({"data": 4, "model": 2, "stage": 1}, {}),
    "an axis that nothing uses": ({"data": 2, "other": 2, "model": 2, "stage": 1}, {}),
    "one data device": ({"data": 1, "model": 2, "stage": 2}, {}),
    "several shard axes": (
        {"replica": 2, "data": 2, "model": 2, "stage": 1},
        {"shard_axes": ("replica", "data"), "replicate_axes": ()},
    ),
    "the other way round": (
        {"replica": 2, "data": 2, "model": 2, "stage": 1},
        {"shard_axes": ("data", "replica"), "replicate_axes": ()},
    ),
    "model between two data axes": (
        {"replica": 2, "model": 2, "stage": 1, "data": 2},
        {"shard_axes": ("replica", "data"), "replicate_axes": ()},
    ),
}


@pytest.mark.parametrize("case", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("stage", [1, 3])
def test_any_order_of_axes(x64, case, stage):
    sizes, options = case
    part = plan(make_mesh(AxisType.Auto, **sizes), stage, **options)
    loss = functools.partial(in_a_pipeline, reduce=summed)
    assert_equal(part, zerojax.value_and_grad(loss, part, manual_axes=("stage", "model")))


@pytest.mark.parametrize("tensor", ["manual", "none"])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_update_in_the_users_own_region(x64, tensor, axis_type):
    """Copies of a tied weight in two stages are summed as their types say."""
    mesh, loss, manual = three_d(tensor, True, False, axis_type)
    part = plan(mesh, 1)
    tx = zerojax.zero(optax.sgd(1.0), part, local_gradients="mean")
    state_specs = jax.tree.map(lambda leaf: leaf.sharding.spec, zerojax.abstract_state(tx, part))
    axes = {*manual, "data"}

    def step(params, state, tokens):
        copies = jax.tree.map(
            lambda x: lax.pcast(
                x, tuple({"data", "stage"} - jax.typeof(x).manual_axis_type.varying), to="varying"
            ),
            params,
        )
        grads = jax.grad(loss)(copies, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    region = jax.shard_map(
        step, mesh=mesh, axis_names=axes, in_specs=(part.model_specs, state_specs, P("data")),
        out_specs=(part.model_specs, state_specs),
    )  # fmt: skip
    params = part.place(PARAMS)
    tokens = jax.device_put(TOKENS, NamedSharding(mesh, P("data")))
    after, _ = jax.jit(region)(params, tx.init(params), tokens)
    chex.assert_trees_all_close(after, jax.tree.map(np.subtract, PARAMS, expected()[1]), **TIGHT)


# What they send.


def compiled(part, loss, **options):
    tx = zerojax.zero(optax.sgd(1.0), part)
    step = zerojax.train_step(zerojax.value_and_grad(loss, part, **options), tx, part)
    params = part.place(jax.tree.map(np.float32, PARAMS))
    program = step.lower(params, tx.init(params), TOKENS).compile()
    return zerojax.audit(program, part.mesh).collectives


@pytest.mark.parametrize(
    "tensor, pipeline, replicate",
    [("auto", True, False), ("manual", True, False), ("manual", False, True), ("none", True, True)],
)
@pytest.mark.parametrize("stage", [1, 3])
def test_only_the_sum_of_copies_crosses_the_model_axes(tensor, pipeline, replicate, stage):
    mesh, loss, manual = three_d(tensor, pipeline, replicate)
    params = jax.tree.map(np.float32, PARAMS)
    part = zerojax.partition(
        params, mesh, only(SPECS, mesh.axis_names), stage=stage, scan_dims=SCAN_DIMS,
        replicate_axes=[a for a in mesh.axis_names if a == "replica"],
    )  # fmt: skip
    found = compiled(part, loss, manual_axes=manual)
    activations = {TOKENS.size // part.data_size * DIM // k for k in (1, 2)}
    activations |= {n // TICKED for n in activations}
    stage_sums = 0
    for c in found:
        if {*c.axes} <= {"data", "replica"} or c.elements <= 1:
            continue
        if c.axes == ("stage",) and c.kind == "all-reduce":
            assert not c.in_loop
            stage_sums += c.elements
        elif c.axes == ("stage",):
            assert c.kind == "collective-permute"
        else:
            # Of activations; and of the gradient of `temperature`, which is no copy along `model`.
            assert c.axes == ("model",) and c.elements in activations | {DIM}, c
    # Leaves that are replicated over the stages, on their shards.
    sums = 0
    for leaf in part.leaves if pipeline else []:
        if "stage" not in leaf.model_axes and leaf.path != "['unused']":
            shards = int(np.prod([mesh.shape[a] for a in leaf.model_axes + leaf.shard_axes]))
            sums += int(np.prod(leaf.stored)) // shards
    assert sums <= stage_sums <= sums + 1  # and the loss


def test_across_replicas_go_shards_only():
    mesh = make_mesh(AxisType.Auto, replica=2, data=4)
    part = zerojax.partition(
        jax.tree.map(np.float32, PARAMS), mesh, P(), replicate_axes="replica", scan_dims=SCAN_DIMS
    )
    found = compiled(part, in_turn, accumulate=2)
    across = sum(c.elements * c.trips for c in found if "replica" in c.axes and c.elements > 1)
    used = [leaf for leaf in part.leaves if leaf.path != "['unused']"]
    sharded = sum(np.prod(leaf.stored) for leaf in used if leaf.shard_axes)
    whole = sum(np.prod(leaf.shape) for leaf in used if not leaf.shard_axes)
    assert across <= sharded // 4 + whole + 2  # and the loss and the norm


@pytest.mark.parametrize("order", [("replica", "data"), ("data", "replica")])
def test_the_last_shard_axis_is_reduced_first_and_gathered_last(order):
    """The slow axis, named first, moves what the fast one has made smaller."""
    slow, fast = order
    mesh = make_mesh(AxisType.Auto, replica=2, data=4)
    params = {"w": np.zeros((64, 3), np.float32)}
    part = zerojax.partition(params, mesh, shard_axes=order, stage=3)
    assert part.shard_specs["w"] == P((fast, slow), None)
    grad_fn = zerojax.value_and_grad(lambda p, x: jnp.mean(x @ p["w"]), part)
    x = np.ones((8, 64), np.float32)
    program = jax.jit(grad_fn).lower(part.place(params), x).compile()
    found = zerojax.audit(program, mesh).collectives
    sizes = {(c.kind, *c.axes): c.elements for c in found if c.elements > 1}
    assert sizes == {
        ("reduce-scatter", fast): 192,
        ("reduce-scatter", slow): 192 // mesh.shape[fast],
        ("all-gather", slow): 192 // mesh.shape[fast],
        ("all-gather", fast): 192,
    }


# Context axes: the length of the sequences is split.


@pytest.mark.parametrize("shard_axes", [("data",), ("data", "context")])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_context_axes(x64, shard_axes, stage, accumulate):
    mesh = make_mesh(AxisType.Auto, data=4, context=2)
    params = {"q": normal(8, 8, seed=0), "k": normal(8, 8, seed=1), "v": normal(8, 8, seed=2)}
    x = normal(16, 6, 8, seed=3)

    def attention(params, x, gather=lambda x: x):
        q, k, v = (x @ zerojax.unshard(params[name]) for name in "qkv")
        weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, gather(k)))
        return jnp.mean(jnp.einsum("bqk,bkd->bqd", weights, gather(v)) ** 2)

    def local(params, x):  # keys and values of the whole sequence
        return attention(params, x, lambda x: lax.all_gather(x, "context", axis=1, tiled=True))

    replicate = [a for a in ("context",) if a not in shard_axes]
    part = zerojax.partition(
        params, mesh, P(), shard_axes=shard_axes, replicate_axes=replicate, stage=stage
    )
    grad_fn = zerojax.value_and_grad(
        local, part, batch_specs=P("data", "context"), accumulate=accumulate
    )
    loss, grads = jax.jit(grad_fn)(part.place(params), x)
    want_loss, want = jax.value_and_grad(attention)(params, x)
    assert float(loss) == pytest.approx(float(want_loss), rel=1e-12)
    chex.assert_trees_all_close(grads, want, **TIGHT)
    shards = int(np.prod([mesh.shape[a] for a in shard_axes]))
    assert grads["q"].addressable_shards[0].data.size == 64 // shards


# Expert axes: a leaf whose own spec uses a data axis.


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 4, "model": 2}, {"replica": 2, "data": 4}])
def test_expert_parallel_leaves(x64, stage, accumulate, mesh):
    """Every device has its own experts, to which all_to_all brings the tokens of all devices."""
    mesh = make_mesh(AxisType.Auto, **mesh)
    experts, dim, capacity = mesh.shape["data"], 8, 2
    params = {"experts": normal(experts, dim, dim, seed=0), "out": normal(dim, dim, seed=1)}
    x = normal(16, experts * capacity, dim, seed=2)  # a slot of every example for each expert

    def loss(params, x, exchange=lambda x: x, back=lambda x: x):
        tokens = x.reshape(len(x), experts, capacity, dim).swapaxes(0, 1)
        tokens = exchange(tokens)
        y = back(jnp.tanh(jnp.einsum("ebcd,edf->ebcf", tokens, params["experts"])))
        return jnp.mean((y @ params["out"]) ** 2)

    def local(params, x):
        def exchange(x):
            return lax.all_to_all(x, "data", split_axis=0, concat_axis=1, tiled=True)

        def back(x):
            return lax.all_to_all(x, "data", split_axis=1, concat_axis=0, tiled=True)

        return loss(params, x, exchange, back)

    specs = {"experts": P("data"), "out": P()}
    replicate = [a for a in mesh.axis_names if a == "replica"]
    part = zerojax.partition(params, mesh, specs, stage=stage, replicate_axes=replicate)
    assert not part.by_path["['experts']"].shard_axes
    grad_fn = zerojax.value_and_grad(local, part, accumulate=accumulate)
    tx = zerojax.zero(optax.sgd(1.0), part)
    placed = part.place(params)
    value, grads = jax.jit(grad_fn)(placed, x)
    want_value, want = jax.value_and_grad(loss)(params, x)
    assert float(value) == pytest.approx(float(want_value), rel=1e-12)
    chex.assert_trees_all_close(grads, want, **TIGHT)
    assert grads["experts"].addressable_shards[0].data.shape == (1, dim, dim)
    step = zerojax.train_step(grad_fn, tx, part)
    after, _, metrics = step(placed, tx.init(placed), x)
    norm = np.sqrt(sum(np.sum(g**2) for g in want.values()))
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-12)
    chex.assert_trees_all_close(after, jax.tree.map(np.subtract, params, want), **TIGHT)


# What would be silently wrong.


def tiny(**sizes):
    mesh = make_mesh(AxisType.Auto, **sizes)
    params = {"w": normal(8, 8, seed=0), "v": normal(8, 8, seed=1)}
    specs = {"w": P(None, "model" if "model" in sizes else None), "v": P()}
    part = zerojax.partition(params, mesh, specs)
    return part, part.place(jax.tree.map(np.float32, params))


X = np.ones((8, 8), np.float32)


@pytest.mark.parametrize("axis", ["model", "stage"])
def test_a_loss_that_varies_over_a_manual_axis(axis):
    part, params = tiny(data=4, **{axis: 2})

    def loss(params, x):
        here = (lax.axis_index(axis) == 0) * jnp.mean(x @ params["w"])
        return here + jnp.mean(params["v"])

    grad_fn = zerojax.value_and_grad(loss, part, manual_axes=axis)
    with pytest.raises(ValueError, match=rf"varying over \['{axis}'\].*lax\.psum.*lax\.pmean"):
        grad_fn(params, X)


def test_a_loss_that_averages_over_the_data_axes_by_itself():
    part, params = tiny(data=4, model=2)

    def loss(params, x):
        y = lax.psum(jnp.mean(x @ params["w"]), "model")
        return lax.pmean(y, "data")

    with pytest.raises(ValueError, match="reduces over the data axes"):
        zerojax.value_and_grad(loss, part, manual_axes="model")(params, X)


def test_manual_axes_must_be_model_axes():
    part, _ = tiny(data=4, model=2)
    for bad in ("data", "stage"):
        with pytest.raises(ValueError, match=rf"manual_axes names \['{bad}'\].*\('model',\)"):
            zerojax.value_and_grad(lambda p, x: 0.0, part, manual_axes=bad)


def test_check_has_nothing_to_compare_with():
    part, params = tiny(data=4, model=2)
    with pytest.raises(ValueError, match="check: a loss that communicates over manual_axes"):
        zerojax.check(lambda p, x: 0.0, part, params, X, manual_axes="model")


def test_a_branch_that_differs_along_an_axis_gives_no_invariant_loss():
    """JAX types it invariant, and its gradients are wrong (PITFALLS)."""
    part, params = tiny(data=4, stage=2)

    def loss(params, x):
        last = lax.axis_index("stage") == 1
        return lax.cond(last, lambda: jnp.mean(x @ params["w"]), lambda: jnp.mean(params["v"]))

    with pytest.raises(ValueError, match=r"cond.*\['stage'\]"):
        zerojax.value_and_grad(loss, part, manual_axes="stage")(params, X)
