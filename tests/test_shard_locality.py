"""Inside a Manual region `zero` accepts an optimizer exactly when shards alone give the whole.

The oracle is naive: optax on each shard of random arrays, with its own state, and the results
joined. The last gradient is not finite in one place, which some transformations look for.
"""

import functools

import jax
import numpy as np
import optax
import pytest
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P
from trees import (
    EXTRA,
    LOOPS,
    STEPS,
    compare,
    loss,
    make_few,
    optimizers,
    train,
    transformations,
)

import zerojax

# Two shards show what eight do, at a quarter of the time.
SHARDS = 2
LAYOUTS = {  # shape of the parameter, and the dim that is sharded
    "rows": ((8, 6), 0),
    "columns": ((8, 6), 1),
    "stack": ((3, 8, 5), 1),
    "vector": ((8,), 0),
    "large": ((256, 128), 0),  # also a shard is so large that adafactor factors its moments
}
# Updates that know the number of rows, from which no type tells a shard's.
FAN_IN = {
    "fan-in, number": lambda u, p: u / p.shape[0],
    "fan-in, constant": lambda u, p: u * np.full((1,) * p.ndim, 1 / p.shape[0]),
    "fan-in, loop": lambda u, p: jax.lax.fori_loop(0, p.shape[0], lambda _, x: 0.9 * x, u),
}
OPTIMIZERS = (
    {name: make for name, make in optimizers().items() if name != "dpsgd"}
    | transformations("matrix")
    | {name: functools.partial(optax.stateless_with_tree_map, f) for name, f in FAN_IN.items()}
)
# Right on shards by its own doing, which naive optax is not.
OURS = "zerojax.clip_by_global_norm"


def objective(params, targets):
    """A loss that is not the sum of its shards'."""
    return loss(params, targets) + sum(jnp.sum(x) for x in jax.tree.leaves(params)) ** 3


@functools.cache
def make(name):
    return OPTIMIZERS[name]()


def start(layout):
    """Parameters, and what is subtracted from them in each step for a gradient."""
    shape, _ = LAYOUTS[layout]
    rng = np.random.default_rng(0)
    params, *targets = (rng.normal(size=shape) for _ in range(1 + STEPS))
    targets[-1][(1,) * len(shape)] = np.nan
    return params, targets


def shards_give_the_whole(name, layout):
    _, dim = LAYOUTS[layout]

    def steps(params, *targets):
        return train(
            name, make(name), {"matrix": params}, [{"matrix": t} for t in targets],
            jit=name in LOOPS, values=[3.0, 2.0, 1.0], objective=objective,
        )  # fmt: skip

    params, targets = start(layout)
    arrays = [params, *targets]
    parts = zip(*(np.split(x, SHARDS, dim) for x in arrays), strict=True)
    for whole, *shards in zip(steps(*arrays), *(steps(*part) for part in parts), strict=True):
        leaves = zip(*map(jax.tree.leaves, (whole, *shards)), strict=True)
        if not all(is_joined(a, b) for a, *b in leaves):
            return False
    return True


def is_joined(whole, shards):
    """Whether shards, or equal copies on each, are the whole."""
    whole, *shards = map(as_numbers, (whole, *shards))
    dims = [i for i, (a, b) in enumerate(zip(whole.shape, shards[0].shape, strict=True)) if a != b]
    joined = [np.concatenate(shards, *dims)] if dims else shards
    return all(np.allclose(whole, x, rtol=1e-9, atol=1e-12, equal_nan=True) for x in joined)


def as_numbers(x):
    key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if key else x)


def refusal(name, layout):
    """The text of the error, empty if `zero` accepts."""
    _, dim = LAYOUTS[layout]
    params, targets = start(layout)
    params, grads = {"matrix": params}, {"matrix": targets[0]}
    mesh = jax.make_mesh((SHARDS,), ("data",), devices=jax.devices()[:SHARDS])
    part = zerojax.partition(params, mesh, shard_dim=lambda *_: dim)
    tx = zerojax.zero(make(name), part)
    state = zerojax.abstract_state(tx, part)
    specs = jax.tree.map(lambda x: x.sharding.spec, state)

    def update(grads, state, params):
        function = functools.partial(objective, targets=grads)
        extra = {"value": 3.0, "grad": grads, "value_fn": function, "obj_fn": function}
        names = EXTRA.get(name, ["value", "grad", "value_fn"])
        return tx.update(grads, state, params, **{key: extra[key] for key in names})

    region = jax.shard_map(update, mesh=mesh, in_specs=(P(), specs, P()), out_specs=(P(), specs))
    try:
        jax.eval_shape(region, grads, state, params)
    except ValueError as error:
        return str(error)
    return ""


ANYWHERE = """
    adam adamw adamax adagrad amsgrad apply_every clip ema freeze inject_hyperparams lion masked
    multi_transform MultiSteps nadamw radam reduce_on_plateau rmsprop schedule_free sgd
""".split()
NOWHERE = """
    adafactor add_noise apply_if_finite clip_by_block_rms clip_by_global_norm dadapt_adamw dog
    fromage lamb lars lbfgs momo noisy_sgd normalize_by_update_norm novograd prodigy
    scale_by_param_block_norm scale_by_param_block_rms sophia zero_nans
""".split()
KNOWN = {
    **{name: dict.fromkeys(LAYOUTS, True) for name in ANYWHERE},
    **{name: dict.fromkeys(LAYOUTS, False) for name in NOWHERE},
    OURS: dict.fromkeys(LAYOUTS, True),
    **{name: {"rows": False, "columns": True, "stack": True, "vector": False} for name in FAN_IN},
    # Reduces over all dims but the last, or but the first; or has vectors to itself.
    "adaptive_grad_clip": {"rows": False, "columns": True, "stack": True, "vector": False},
    "centralize": {"rows": True, "columns": False, "stack": False, "vector": True},
    "galore": {"rows": False, "columns": False, "stack": True, "vector": True},
    "muon": {"rows": False, "columns": False, "stack": True, "vector": True},
    "sm3": {"rows": False, "columns": False, "stack": False, "vector": True},
    "scale_by_factored_rms": {"rows": True, "columns": True, "vector": True, "large": False},
}


# Where it matters how many dims there are.
LAYOUTS_DIFFER = {name for name, known in KNOWN.items() if len(set(known.values())) == 2}


def cases():
    for name in OPTIMIZERS:
        for layout in LAYOUTS:
            if layout == "large" and name not in ("adafactor", "scale_by_factored_rms"):
                continue
            full = layout in ("stack", "vector") and name not in LAYOUTS_DIFFER
            full |= layout == "columns" and name in LOOPS - LAYOUTS_DIFFER  # they compile for long
            yield pytest.param(name, layout, marks=[pytest.mark.full] if full else [])


@pytest.mark.parametrize("name, layout", list(cases()))
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # optimistic_adam
def test_accepted_exactly_when_shards_give_the_whole(x64, name, layout):
    error = refusal(name, layout)
    assert shards_give_the_whole(name, layout) == (name != OURS and not error), error
    assert KNOWN.get(name, {}).get(layout, not error) == (not error), error
    if error:
        assert "this transformation needs more than its own shard" in error
        assert "Call tx.update under jit outside of jax.shard_map" in error
        assert "zerojax.clip_by_global_norm" in error


EQUATIONS = {
    "add_noise": "an operand that varies is not sharded over 'data'",
    "adafactor": "reduce_sum(",
    "apply_if_finite": "reduce_and(bool[8@data,6]): the result is no longer sharded over ['data']",
    "clip_by_global_norm": "reduce_sum(f64[8@data,6]): the result is no longer sharded over",
    "galore": "svd",
    "lamb": "reduce_sum(f64[8@data,6])",
    "muon": "Contracting dimensions are sharded",
}


@pytest.mark.parametrize("name", EQUATIONS)
def test_refusal_names_the_equation(x64, name):
    assert EQUATIONS[name] in refusal(name, "rows")


def in_shard_map(tx, part):
    """The transformation with each update inside a Manual region, of gradients already summed."""
    specs = jax.tree.map(lambda x: x.sharding.spec, zerojax.abstract_state(tx, part))
    update = jax.shard_map(
        tx.update, mesh=part.mesh, in_specs=(P(), specs, P()), out_specs=(P(), specs)
    )
    return optax.GradientTransformation(tx.init, update)


@pytest.mark.parametrize(
    "name",
    [
        "adamw", "adan", "inject_hyperparams, schedule", "lion", "masked", "multi_transform",
        "MultiSteps", "rprop", "schedule_free", "sgd", OURS,
    ],
)  # fmt: skip
def test_accepted_equals_plain_optax_in_shard_map(x64, name):
    """On eight devices, with a padded leaf, a scalar and an integer one."""
    params = make_few(["matrix", "odd", "scalar", "ids"])
    plain = make("clip_by_global_norm" if name == OURS else name)
    compare(name, plain, lambda part: in_shard_map(zerojax.zero(make(name), part), part), params)


def test_both_sides_of_the_table():
    assert KNOWN.keys() <= OPTIMIZERS.keys()
    assert len(ANYWHERE) >= 20 and len(NOWHERE) >= 20
