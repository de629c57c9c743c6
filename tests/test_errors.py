"""Bad input: one clear error that names what is wrong, what was expected, and the remedy."""

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from jax import lax
from jax import numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax


def make_mesh(types=AxisType.Auto, **axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(types,) * len(axes))


AUTO, EXPLICIT = make_mesh(data=8), make_mesh(AxisType.Explicit, data=8)
BOTH = make_mesh(data=4, model=2)
HSDP = make_mesh(data=4, rep=2)

HOST = {
    "a": {"w": np.ones((16, 4), np.float32), "b": np.zeros(4, np.float32)},
    "c": np.ones(8, np.float32),
    "d": np.ones((8, 2), jnp.bfloat16),
}
X = jnp.ones((16, 16))


def loss(params, x, *more):
    return jnp.mean((x @ params["a"]["w"] + params["a"]["b"]) ** 2) + sum(params["c"])


class Setup:
    """Parameters and state on a mesh, which no failed call may touch."""

    def __init__(self, mesh, **options):
        self.part = zerojax.partition(HOST, mesh, **options)
        self.params = self.part.place(HOST)
        self.tx = zerojax.zero(optax.adamw(1e-3), self.part)
        self.state = self.tx.init(self.params)
        self.kept = jax.tree.map(np.asarray, (self.params, self.state))

    def fails(self, call, kind, *fragments):
        """Checks what `call(self)` raises, and that it leaves everything alone."""
        with pytest.raises(kind) as caught:
            call(self)
        assert type(caught.value) is kind
        for fragment in fragments:
            assert fragment in str(caught.value)
        assert "DynamicJaxprTracer" not in str(caught.value)
        assert not any(x.is_deleted() for x in jax.tree.leaves((self.params, self.state)))
        jax.tree.map(np.testing.assert_array_equal, (self.params, self.state), self.kept)


@pytest.fixture(scope="module")
def setups():
    return {
        AxisType.Auto: Setup(AUTO),
        AxisType.Explicit: Setup(EXPLICIT),
        "hsdp": Setup(HSDP, replicate_axes="rep"),
        "model": Setup(BOTH, specs=P()),
    }


def run(cases):
    """A decorator that parametrises over the rows of a table, by name."""
    return pytest.mark.parametrize("case", cases.values(), ids=cases)


LEAF = jnp.ones((16, 4))


def plan(params=None, mesh=BOTH, specs=P(), **options):
    return lambda: zerojax.partition(params or {"w": LEAF, "b": LEAF}, mesh, specs, **options)


MESH_HAS = "the mesh has axes ('data', 'model')"
PLANS = {
    "unknown shard axis": (
        plan(shard_axes="dp"), ValueError, MESH_HAS, "shard_axes=('dp',)", "name ['dp']",
        "make the mesh with these names"),
    "unknown replicate axis": (
        plan(replicate_axes="rep"), ValueError, MESH_HAS, "replicate_axes=('rep',)",
        "name ['rep']"),
    "all unknown axes at once": (
        plan(shard_axes=("x", "data"), replicate_axes=("y",)), ValueError, "name ['x', 'y']"),
    "a mesh without data axis": (
        plan(mesh=make_mesh(batch=8)), ValueError, "the mesh has axes ('batch',)", "('data',)"),
    "unknown axis in a spec": (
        plan(specs={"w": P(None, "tp"), "b": P(("model", "pp"))}), ValueError,
        "['w']: P(None, 'tp') names ['tp']; the mesh has ('data', 'model')",
        "['b']: P(('model', 'pp'), None) names ['pp']"),
    "a shard axis twice": (
        plan(shard_axes=("data", "data")), ValueError, "no axis twice",
        "shard_axes=('data', 'data')"),
    "an axis sharded and replicated over": (
        plan(replicate_axes="data"), ValueError, "no axis twice or in replicate_axes too",
        "replicate_axes=('data',)"),
    "an axis twice in a spec": (
        plan(specs={"w": P("model", "model"), "b": P()}), ValueError,
        "['w']: P('model', 'model') names an axis twice"),
    "no shard axis": (
        plan(shard_axes=()), ValueError, "must name at least one axis", "shard_axes=()"),
    "a spec is missing": (
        plan(specs={"w": P()}), ValueError, "specs must be a tree of this structure, or a prefix",
        "b", "structure: PyTreeDef({'b': *, 'w': *})"),
    "a spec too many": (
        plan(specs={"w": P(), "b": P(), "extra": P()}), ValueError, "specs must be", "extra"),
    "specs of another kind": (
        plan({"in": {"w": LEAF}}, specs={"in": [P()]}), ValueError, "specs must be", "['in']",
        "list"),
    "scan_dims of another tree": (
        plan(scan_dims={"w": 1}), ValueError, "scan_dims must be a tree of this structure"),
    "a negative number of scan_dims": (
        plan(scan_dims={"w": -1, "b": 1}), ValueError,
        "['w']: scan_dims must be a number of leading dims, got -1"),
    "a spec longer than the array": (
        plan(specs={"w": P(None, None, "model"), "b": P()}), ValueError,
        "['w']: P(None, None, 'model') has 3 entries for an array of 2 dims"),
    "specs that do not divide, all at once": (
        plan({"w": jnp.ones((5, 3)), "b": jnp.ones(7), "c": LEAF}, specs=P("model")), ValueError,
        "['w']: dim 0 of (5, 3) does not divide by 2, the size of ('model',)",
        "['b']: dim 0 of (7,) does not divide by 2", "Pad the model's dim, or leave it out"),
    "no PartitionSpec": (
        plan(specs={"w": "data", "b": P()}), ValueError,
        "['w']: expected a PartitionSpec or None, got 'data'"),
    "a sharding for a spec": (
        plan(specs=NamedSharding(BOTH, P())), ValueError, "expected a PartitionSpec or None",
        "NamedSharding"),
    "an unconstrained dim": (
        plan(specs=P(P.UNCONSTRAINED)), ValueError, "['w']: P(UNCONSTRAINED,) leaves a dim open"),
    "no specs on a mesh with model axes": (
        plan(specs=None), ValueError, "model axes ['model']", "['b']", "['w']", "Pass specs="),
    "stage 7": (plan(stage=7), ValueError, "stage must be 0, 1, 2 or 3, got 7"),
    "stage as text": (plan(stage="1"), ValueError, "stage must be 0, 1, 2 or 3, got '1'"),
    "shard_dim outside the array": (
        plan(shard_dim=lambda *_: 3), ValueError, "['w']: shard_dim gave dim 3 for shape (16, 4)"),
    "shard_dim where nothing may be padded": (
        plan({"w": jnp.ones((10, 4))}, specs=P("model"), shard_dim=lambda *_: 0), ValueError,
        "['w']: shard_dim gave dim 0 of (10, 4)", "padding would split a model axis's shards"),
    "no mesh": (plan(mesh="data"), TypeError, "mesh must be a Mesh or an AbstractMesh, got 'data'"),
    "no array": (plan({"w": "text"}), ValueError, "['w']", "text"),
}  # fmt: skip


@run(PLANS)
def test_partition(case):
    call, kind, *fragments = case
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value).startswith(("partition: ", "stage must be"))
    for fragment in fragments:
        assert fragment in str(caught.value)


# A model that changed after `partition`: b is gone, e is new, w has another shape, c another dtype.
CHANGED = {
    "a": {"w": np.ones((16, 5), np.float32)},
    "c": np.ones(8, np.float16),
    "d": HOST["d"],
    "e": np.ones(3, np.float32),
}
MISSING, EXTRA = "['a']['b']: is missing", "['e']: was not there when the partition was made"
DIFFERENCES = (
    MISSING, EXTRA, "['a']['w']: expected float32[16, 4], got float32[16, 5]",
    "['c']: expected float32[8], got float16[8]", "zerojax.partition again",
)  # fmt: skip
# `zero` also serves subsets of the parameters (optax.masked), and casts gradients.
OF_SUBSET = (EXTRA, "['a']['w']: expected shape (16, 4), got (16, 5)", "zerojax.partition again")
WITH_DTYPE = (*OF_SUBSET, "['c']: expected dtype float32, got float16")
WITHOUT_B = {**HOST, "a": {"w": HOST["a"]["w"]}}


def step_of(s, grad_fn=None, tx=None):
    grad_fn = grad_fn or zerojax.value_and_grad(loss, s.part)
    return zerojax.train_step(grad_fn, tx or s.tx, s.part)


TREES = {
    "place": (lambda s: s.part.place(CHANGED), "place: ", *DIFFERENCES),
    "gather": (lambda s: s.part.gather(CHANGED), "gather: ", *DIFFERENCES),
    "zero.init": (lambda s: s.tx.init(CHANGED), "zero.init: ", *WITH_DTYPE),
    "zero.update, params": (
        lambda s: s.tx.update(s.params, s.state, CHANGED), "zero.update: ", *WITH_DTYPE),
    "zero.update, gradients": (
        lambda s: s.tx.update(CHANGED, s.state, s.params), "zero.update: ", *OF_SUBSET),
    "zero.update, a gradient is missing": (
        lambda s: s.tx.update(WITHOUT_B, s.state, s.params),
        "gradients and params must be trees of the same leaves", "['a']['b']: has no gradient"),
    "zero.update, a parameter is missing": (
        lambda s: s.tx.update(s.params, s.state, WITHOUT_B), "['a']['b']: has no parameter"),
    "zero.update, both are missing": (
        lambda s: s.tx.update(WITHOUT_B, s.state, WITHOUT_B),
        "the optimizer state is not what zero.init makes", "[0].mu['a']['b']: is unknown",
        "tx.init(params)", "zerojax.abstract_state(tx, part)"),
    "value_and_grad": (
        lambda s: zerojax.value_and_grad(loss, s.part)(CHANGED, X), "value_and_grad: ",
        *DIFFERENCES),
    "check": (lambda s: zerojax.check(loss, s.part, CHANGED, X), *DIFFERENCES),
    "init": (
        lambda s: zerojax.init(lambda: CHANGED, s.tx, s.part)(), "init: ", *DIFFERENCES),
    "train_step": (lambda s: step_of(s)(CHANGED, s.state, X), "train_step: ", *DIFFERENCES),
    "train_step, jax.value_and_grad": (
        lambda s: step_of(s, jax.value_and_grad(loss))(CHANGED, s.state, X), "train_step: ",
        *DIFFERENCES),
}  # fmt: skip


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit], ids=str)
@run(TREES)
def test_params_that_changed_since_partition(setups, types, case):
    call, *fragments = case
    setups[types].fails(call, ValueError, *fragments)


def sgd_state(s):
    return optax.sgd(1.0, momentum=0.9).init(HOST)


STATE = "the optimizer state is not what zero.init makes for these parameters"
NEEDS_PARAMS = "you are not passing `params` when calling `update`"


def without_params(inner):
    """Calls `update` without params, on the state of the plain transformation: the same tree."""
    return lambda s: zerojax.zero(inner, s.part).update(s.params, inner.init(s.params))


def misuse(fn):
    return lambda s: fn(s.params, s.state)


UPDATES = {
    "state of another optimizer": (
        lambda s: s.tx.update(s.params, sgd_state(s), s.params), STATE, "[0].mu['c']: is missing",
        "[0].trace['c']: is unknown", "tx.init(params)", "zerojax.abstract_state(tx, part)"),
    "state of other parameters": (
        lambda s: s.tx.update(s.params, optax.adamw(1.0).init(CHANGED), s.params), STATE,
        "[0].mu['a']['b']: is missing", "[0].nu['e']: is unknown",
        "[0].mu['a']['w']: expected shape (16, 4), got (16, 5)"),
    "no state": (lambda s: s.tx.update(s.params, None, s.params), STATE, "[0].count: is missing"),
    "params in place of the state": (
        lambda s: s.tx.update(s.params, s.params, s.state), "zero.update: these leaves are not"),
    "weight decay without params": (without_params(optax.adamw(1.0)), NEEDS_PARAMS),
    "trust ratio without params": (without_params(optax.lamb(1.0)), NEEDS_PARAMS),
    "decayed weights without params": (
        without_params(optax.chain(optax.sgd(1.0), optax.add_decayed_weights(0.1))), NEEDS_PARAMS),
    "lars without params": (without_params(optax.lars(1.0)), NEEDS_PARAMS),
    "local_gradients": (
        lambda s: zerojax.zero(optax.sgd(1.0), s.part, local_gradients="max"),
        "local_gradients must be 'mean' or 'sum', got 'max'"),
    "state of another optimizer in train_step": (
        lambda s: step_of(s)(s.params, sgd_state(s), X), STATE, "[0].mu['c']: is missing"),
    "state and params swapped in train_step": (
        lambda s: step_of(s)(s.state, s.params, X), "train_step: the parameters are not",
        "['c']: is missing"),
    "gradients of another partition": (
        lambda s: step_of(s, zerojax.value_and_grad(loss, zerojax.partition(HOST, s.part.mesh))),
        "grad_fn was made with another partition", "Pass the same one"),
}  # fmt: skip


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit], ids=str)
@run(UPDATES)
def test_update_and_train_step(setups, types, case):
    call, *fragments = case
    setups[types].fails(call, ValueError, *fragments)


def test_update_under_jit(setups):
    setups[AxisType.Auto].fails(
        lambda s: jax.jit(s.tx.update)(s.params, sgd_state(s), s.params), ValueError, STATE
    )
    setups[AxisType.Auto].fails(
        lambda s: jax.jit(s.tx.update)(s.params, s.state), ValueError, NEEDS_PARAMS
    )


GRADIENT_FUNCTIONS = {
    "a loss": (loss, "got: PyTreeDef(*)"),
    "gradients alone": (jax.grad(loss), "got: PyTreeDef({'a': {'b': *, 'w': *}, 'c': *, 'd': *})"),
    "gradients of an argument": (
        jax.value_and_grad(loss, argnums=1), "got: PyTreeDef((*, *))"),
}  # fmt: skip


@run(GRADIENT_FUNCTIONS)
def test_what_is_no_gradient_function(setups, case):
    grad_fn, got = case
    setups[AxisType.Auto].fails(
        lambda s: step_of(s, grad_fn)(s.params, s.state, X),
        TypeError, "grad_fn must return (value, gradients), as jax.value_and_grad does", got,
        "gradients expected: PyTreeDef({'a': {'b': *, 'w': *}, 'c': *, 'd': *})",
        "Wrap the loss in zerojax.value_and_grad",
    )  # fmt: skip


@pytest.mark.parametrize("method", ["place", "gather"])
def test_moving_to_a_mesh_without_devices(method):
    part = zerojax.partition(HOST, AbstractMesh((8,), ("data",)))
    with pytest.raises(ValueError, match=f"{method}: .*no devices.* jax.make_mesh"):
        getattr(part, method)(HOST)


# value_and_grad: loss function, further arguments, options, and what the error must say.


def with_aux(make):
    return lambda params, x: (loss(params, x), make(params, x))


NOT_SCALAR = "the loss must be a scalar, got "
SAY_HOW = "say how auxiliary output combines, with aux_reduction="
BY_ITSELF = ("reduces over the data axes ('data',) by itself", "return the mean over this device's",
             "plain jax.value_and_grad under jit with zerojax.zero")  # fmt: skip
GRADIENTS = {
    "a batch that does not divide": (
        loss, (jnp.ones((12, 16)),), {}, "a batch of 12 does not divide by 8 devices (data) x 1",
        "args[0]", "Pad it, drop its rest, or change accumulate"),
    "a batch that does not divide by microbatches": (
        loss, ({"x": jnp.ones((24, 16))},), {"accumulate": 2},
        "a batch of 24 does not divide by 8 devices (data) x 2 microbatches", "args[0]['x']"),
    "an empty batch": (loss, (jnp.ones((0, 16)),), {}, "batch is empty: dim 0 of args[0] is 0"),
    "arguments that disagree": (
        loss, (X, {"y": jnp.ones(8)}), {}, "disagree on the size of the batch",
        "args[0]: dim 0 is 16", "args[1]['y']: dim 0 is 8", "batch_specs= with PartitionSpec()"),
    "a table that is not per example": (
        loss, (X, jnp.ones(32)), {}, "args[1]: dim 0 is 32", "tables of positions"),
    "a legacy key": (
        loss, (X, jax.random.PRNGKey(0)), {}, "args[1]: looks like an old PRNG key",
        "jax.random.key"),
    "batch_specs: unknown axis": (
        loss, (X,), {"batch_specs": P("dp")}, "args[0]: P('dp',) names ['dp']",
        "the mesh has ('data',)"),
    "batch_specs: too long": (
        loss, (X,), {"batch_specs": P(None, None, "data")},
        "args[0]: P(None, None, 'data') has 3 entries for an array of 2 dims"),
    "batch_specs: no spec": (
        loss, (X,), {"batch_specs": "data"}, "args[0]: expected a PartitionSpec or None, got"),
    "batch_specs: another tree": (
        loss, (X,), {"batch_specs": (P(), P())}, "batch_specs must be a tree of this structure"),
    "batch_specs: a dim that does not divide": (
        loss, (jnp.ones((4, 12)),), {"batch_specs": P(None, "data")},
        "args[0]: dim 1 of (4, 12) does not divide by 8"),
    "loss: an array": (
        lambda p, x: x @ p["a"]["w"], (X,), {}, NOT_SCALAR + "float32[2, 4]", "Return the mean"),
    "loss: an integer": (
        lambda p, x: jnp.sum(x).astype(int), (X,), {}, "the loss must be floating, got int32"),
    "loss: complex": (
        lambda p, x: loss(p, x) + 0j, (X,), {}, "the loss must be floating, got complex64"),
    "loss: nothing": (lambda p, x: None, (X,), {}, NOT_SCALAR + "None"),
    "loss: aux without has_aux": (
        with_aux(lambda p, x: 1.0), (X,), {}, NOT_SCALAR + "(float32[], float32[])",
        "only with has_aux=True"),
    "has_aux, but no aux": (
        loss, (X,), {"has_aux": True}, "has_aux=True the loss must return (loss, aux)",
        "got float32[]"),
    "weighted, but no weight": (
        loss, (X,), {"reduction": "weighted"}, "must return (loss_sum, weight), got float32[]"),
    "weighted: weights": (
        lambda p, x: (loss(p, x), jnp.sum(x, 1)), (X,), {"reduction": "weighted"},
        "the weight must be a scalar, got float32[2]"),
    "aux: an array": (
        with_aux(lambda p, x: {"ok": 1.0, "logits": x}), (X,), {"has_aux": True}, SAY_HOW,
        """aux['logits']: float32[2, 16] needs "mean" or "concat\""""),
    "aux: a count": (
        with_aux(lambda p, x: (jnp.int32(3),)), (X,), {"has_aux": True}, SAY_HOW,
        "aux[0]: int32[] needs"),
    "aux: all at once": (
        with_aux(lambda p, x: {"n": 3, "y": x}), (X,), {"has_aux": True}, "aux['n']", "aux['y']"),
    "aux: concat of a scalar": (
        with_aux(lambda p, x: {"acc": x[0, 0]}), (X,),
        {"has_aux": True, "aux_reduction": {"acc": "concat"}}, SAY_HOW,
        "aux['acc']: a scalar has no dim to concatenate"),
    "aux: mean of a count": (
        with_aux(lambda p, x: {"n": jnp.int32(1)}), (X,),
        {"has_aux": True, "aux_reduction": "mean"}, "aux['n']: the mean of int32 is not int32"),
    "aux: unknown reduction": (
        with_aux(lambda p, x: {"y": x}), (X,), {"has_aux": True, "aux_reduction": "max"},
        """aux['y']: expected "mean" or "concat", got 'max'"""),
    "aux: another tree": (
        with_aux(lambda p, x: {"y": x}), (X,),
        {"has_aux": True, "aux_reduction": {"z": "mean"}}, "aux_reduction must be a tree"),
    "pmean": (
        lambda p, x: lax.pmean(loss(p, x), "data"), (X,), {}, *BY_ITSELF,
        "psum(float32[]) over ('data',)"),
    "psum": (
        lambda p, x: lax.psum(loss(p, x), "data"), (X,), {}, *BY_ITSELF, "psum(float32[])"),
    "pmax in a scan in a jit": (
        lambda p, x: jax.jit(
            lambda x: lax.scan(lambda c, _: (lax.pmax(c, "data"), ()), x, length=2)[0]
        )(loss(p, x)), (X,), {}, *BY_ITSELF, "pmax(float32[]) over ('data',)"),
    "psum over the data in a batch norm": (
        lambda p, x: loss(p, x - lax.pmean(jnp.mean(x, 0), "data")), (X,), {}, *BY_ITSELF,
        "couples examples (batch normalisation)", "psum(float32[16])"),
    "psum in an accumulated loss": (
        lambda p, x: lax.psum(loss(p, x), "data"), (X,), {"accumulate": 2}, *BY_ITSELF),
    "code for the global batch only": (
        lambda p, x: loss(p, x.reshape(16, 16)), (X,), {}, "can be traced on the global batch",
        "the size of the global batch", "plain jax.value_and_grad"),
}  # fmt: skip


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit], ids=str)
@run(GRADIENTS)
def test_value_and_grad(setups, types, jit, case):
    loss_fn, args, options, *fragments = case

    def call(s):
        grad_fn = zerojax.value_and_grad(loss_fn, s.part, **options)
        return (jax.jit(lambda *args: grad_fn(*args)) if jit else grad_fn)(s.params, *args)

    setups[types].fails(call, ValueError, *fragments)


@pytest.mark.parametrize(
    "options, fragment",
    [
        ({"accumulate": 0}, "accumulate must be at least 1, and an int, got 0"),
        ({"accumulate": -2}, "accumulate must be at least 1, and an int, got -2"),
        ({"accumulate": 2.0}, "accumulate must be at least 1, and an int, got 2.0"),
        ({"reduction": "max"}, "reduction must be 'mean', 'sum' or 'weighted', got 'max'"),
    ],
    ids=str,
)
def test_value_and_grad_options(setups, options, fragment):
    make = lambda s: zerojax.value_and_grad(loss, s.part, **options)  # noqa: E731
    setups[AxisType.Auto].fails(make, ValueError, fragment)


def test_devices_and_accumulate_are_named_on_several_axes(setups):
    grad = lambda s: zerojax.value_and_grad(loss, s.part, accumulate=3)(s.params, X)  # noqa: E731
    setups["hsdp"].fails(
        grad, ValueError, "a batch of 16 does not divide by 8 devices (data, rep) x 3 microbatches"
    )


REMEDIES = (
    "inside a Manual region over ('data',)", "Constrain with PartitionSpecs over model axes only",
    "plain jax.value_and_grad under jit with zerojax.zero",
)  # fmt: skip


def constrained(constrain):
    return lambda params, x: loss(params, constrain(x))


@jax.jit
def inner_jit(x):
    return lax.with_sharding_constraint(x, NamedSharding(AUTO, P("data"))) * 2


def logical(x):
    with nn.logical_axis_rules([("batch", "data")]):
        return nn.with_logical_constraint(x, ("batch", None))


# Each runs under plain jax.jit on the global batch, and cannot run on one device's part of it.
CONSTRAINTS = {
    "NamedSharding": (
        AUTO, lambda x: lax.with_sharding_constraint(x, NamedSharding(AUTO, P("data")))),
    "NamedSharding, in a jit": (AUTO, inner_jit),
    "NamedSharding, in a scan": (
        AUTO, lambda x: lax.scan(lambda c, _: (inner_jit(c), ()), x, length=2)[0]),
    "NamedSharding, two axes": (
        BOTH, lambda x: lax.with_sharding_constraint(
            x, NamedSharding(BOTH, P(None, ("model", "data"))))),
    "device_put": (AUTO, lambda x: jax.device_put(x, NamedSharding(AUTO, P("data")))),
    "jit with in_shardings": (
        AUTO, jax.jit(jnp.sin, in_shardings=NamedSharding(AUTO, P("data")))),
    "PartitionSpec": (AUTO, lambda x: lax.with_sharding_constraint(x, P("data"))),
    "PartitionSpec beside a model axis": (
        BOTH, lambda x: lax.with_sharding_constraint(x, P("data", "model"))),
    "flax logical axes": (AUTO, logical),
    "reshard": (EXPLICIT, lambda x: jax.sharding.reshard(x, P("data"))),
}  # fmt: skip


@pytest.mark.parametrize("call", ["eager", "jit", "jit, set_mesh"])
@run(CONSTRAINTS)
def test_a_model_that_constrains_over_the_data_axes(setups, case, call):
    mesh, constrain = case
    with jax.set_mesh(mesh):
        jax.eval_shape(constrain, X)
    key = {AUTO: AxisType.Auto, EXPLICIT: AxisType.Explicit, BOTH: "model"}[mesh]

    def run(s):
        grad_fn = zerojax.value_and_grad(constrained(constrain), s.part)
        if call == "eager":
            return grad_fn(s.params, X)
        if call == "jit":
            return jax.jit(lambda *args: grad_fn(*args))(s.params, X)
        with jax.set_mesh(mesh):
            return jax.jit(lambda *args: grad_fn(*args))(s.params, X)

    setups[key].fails(run, ValueError, *REMEDIES)


class OwnError(Exception):
    pass


def raises(error):
    def broken(params, x):
        raise error

    return broken


# A model that is broken on any mesh tells so itself; the library's words would only mislead.
BROKEN = {
    "its own exception": (raises(OwnError("no attention mask")), OwnError, "no attention mask"),
    "ValueError": (raises(ValueError("dim must be even")), ValueError, "dim must be even"),
    "KeyError": (lambda p, x: p["decoder"], KeyError, "'decoder'"),
    "shapes": (lambda p, x: jnp.mean(x @ p["c"]), TypeError, "(16,) and (8,)"),
    "a branch on a value": (
        lambda p, x: loss(p, x) if x[0, 0] > 0 else 0.0,
        jax.errors.TracerBoolConversionError, "traced array"),
    "an axis that the mesh lacks": (
        constrained(lambda x: lax.with_sharding_constraint(x, P("tp"))), ValueError, "tp"),
    "no output array": (lambda p, x: "loss", TypeError, "not a valid JAX type"),
    "too few arguments": (lambda p: 0.0, TypeError, "takes 1 positional argument"),
}  # fmt: skip


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@run(BROKEN)
def test_a_broken_model_raises_its_own_error(setups, jit, case):
    loss_fn, kind, text = case
    s = setups[AxisType.Auto]
    grad_fn = zerojax.value_and_grad(loss_fn, s.part)
    call = jax.jit(lambda *args: grad_fn(*args)) if jit else grad_fn
    with pytest.raises(kind) as caught:
        call(s.params, X)
    assert type(caught.value) is kind and text in str(caught.value)
    assert "zerojax" not in str(caught.value) and "Manual region" not in str(caught.value)


def in_shard_map(fn, mesh, axes=None, **options):
    """`fn(params, x)` inside a shard_map over some axes, traced."""

    def call(s):
        region = jax.shard_map(
            lambda params, x: fn(s, params, x), mesh=mesh, in_specs=(P(), P(axes or "data")),
            out_specs=P(), axis_names=set(axes or mesh.axis_names), **options,
        )  # fmt: skip
        jax.eval_shape(region, s.params, X)

    return call


def update(inner, *, give_params=True, **options):
    def call(s, params, x):
        tx = zerojax.zero(inner, s.part, **options)
        grads = jax.tree.map(lambda p: (p * x[0, 0]).astype(p.dtype), params)
        return tx.update(grads, tx.init(params), params if give_params else None)[0]

    return call


def init(s, params, x):
    return s.tx.init(params)


SGD = optax.sgd(1.0)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), SGD)
HALF = ("inside a jax.shard_map over ['data'], but not over the data axes ['rep']",
        "Add them to its axis_names")  # fmt: skip
UNTYPED = ("jax.shard_map(check_vma=False)", "Remove check_vma=False")
NOT_LOCAL = ("needs more than its own shard", "Call tx.update under jit")
MANUAL = {
    "value_and_grad": (
        in_shard_map(lambda s, p, x: zerojax.value_and_grad(loss, s.part)(p, x)[0], AUTO),
        AxisType.Auto, ValueError, "called inside a jax.shard_map over ['data']",
        "Call it outside, or use jax.value_and_grad and zero(local_gradients=)"),
    "init, half of the data axes": (
        in_shard_map(init, HSDP, ("data",)), "hsdp", ValueError, "zero.init: ", *HALF),
    "update, half of the data axes": (
        in_shard_map(lambda s, p, x: s.tx.update(p, s.state, p)[0], HSDP, ("data",)), "hsdp",
        ValueError, "zero.update: ", *HALF),
    "only the model axes": (
        in_shard_map(init, BOTH, ("model",)), "model", ValueError, "over ['model']",
        "the data axes ['data']"),
    "init, check_vma=False": (
        in_shard_map(init, AUTO, check_vma=False), AxisType.Auto, TypeError, "zero.init: ",
        *UNTYPED),
    "update, check_vma=False": (
        in_shard_map(lambda s, p, x: s.tx.update(p, s.state, p)[0], AUTO, check_vma=False),
        AxisType.Auto, TypeError, "zero.update: ", *UNTYPED),
    "global_norm, check_vma=False": (
        in_shard_map(lambda s, p, x: zerojax.global_norm(p), AUTO, check_vma=False),
        AxisType.Auto, TypeError, "zerojax.global_norm: ", *UNTYPED),
    "gradients that vary": (
        in_shard_map(update(SGD), AUTO), AxisType.Auto, ValueError, "varying over the data axes",
        "['a']['w']: varying over ['data']", "['c']: varying", 'local_gradients="mean"', '"sum"'),
    "an update that is not shard-local": (
        in_shard_map(update(CLIPPED, local_gradients="mean"), AUTO), AxisType.Auto, ValueError,
        *NOT_LOCAL, "reduce_sum(f32[16@data,4]): the result is no longer sharded over ['data']",
        "for clipping use zerojax.clip_by_global_norm"),
    "an update that needs params": (
        in_shard_map(
            update(optax.adamw(1.0), give_params=False, local_gradients="mean"), AUTO),
        AxisType.Auto, ValueError, NEEDS_PARAMS, "update was called without params"),
    "state of the whole array": (
        in_shard_map(
            lambda s, p, x: zerojax.zero(optax.adam(1.0), s.part).update(
                p, optax.adam(1.0).init(p), p)[0], AUTO),
        AxisType.Auto, ValueError, STATE,
        "[0].mu['a']['w']: expected shape (2, 4), got (16, 4)"),
    "params of the whole array on a model axis": (
        lambda s: in_shard_map(
            lambda _, p, x: zerojax.zero(SGD, zerojax.partition(
                HOST, BOTH, {"a": {"w": P("model"), "b": P()}, "c": P("model"), "d": P()})
            ).init(p), BOTH)(s),
        "model", ValueError, "['a']['w']: expected shape (8, 4), got (16, 4)",
        "['c']: expected shape (4,), got (8,)"),
}  # fmt: skip


@run(MANUAL)
def test_inside_shard_map(setups, case):
    call, key, kind, *fragments = case
    setups[key].fails(call, kind, *fragments)


# What looks like one of the errors above, and is right.
ALLOWED = {
    "a constant loss": (lambda p, x: 3.0, {}, 3.0),
    "a number as weight": (
        lambda p, x: (jnp.sum(x), x.shape[0]), {"reduction": "weighted"}, 16.0),
    "a NamedSharding over a model axis": (
        lambda p, x: jnp.mean(
            lax.with_sharding_constraint(x, NamedSharding(BOTH, P(None, "model")))), {}, 1.0),
    "a PartitionSpec over a model axis": (
        lambda p, x: jnp.mean(lax.with_sharding_constraint(x, P(None, "model"))), {}, 1.0),
    "a NamedSharding over nothing": (
        lambda p, x: jnp.mean(lax.with_sharding_constraint(x, NamedSharding(BOTH, P()))), {}, 1.0),
    "an exchange over the data axis": (
        lambda p, x: jnp.mean(lax.all_to_all(x, "data", 0, 0)), {}, 1.0),
}  # fmt: skip


@run(ALLOWED)
def test_allowed(setups, case):
    loss_fn, options, expected = case
    s = setups["model"]
    value, _ = zerojax.value_and_grad(loss_fn, s.part, **options)(s.params, X)
    assert value == expected


@pytest.mark.parametrize("jitted", [False, True])
def test_an_inner_transformation_that_closes_over_explicit_arrays(jitted):
    params = {"w": jnp.ones((16, 4))}
    part = zerojax.partition(params, EXPLICIT)
    tx = optax.inject_hyperparams(lambda rate: zerojax.zero(optax.adam(rate), part))(rate=0.1)
    params = part.place(params)
    with jax.set_mesh(EXPLICIT):
        state = tx.init(params)
        update = jax.jit(tx.update) if jitted else tx.update
        with pytest.raises(ValueError, match=r"(?s)must not close over arrays.*float32\[\]"):
            update(params, state, params)
        inside = zerojax.zero(optax.inject_hyperparams(optax.adam)(learning_rate=0.1), part)
        inside.update(params, inside.init(params), params)
