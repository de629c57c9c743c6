"""The fixed tree of parameters, every optimizer that optax has, and a training of one with it.

The plan of the tree is written down by hand, for eight devices on one axis. Sizes of sharded dims
differ from each other and from those of the other dims, so that a mix-up shows.
"""

import functools
import inspect
import math
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import optax.contrib
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

import zerojax
from tests.conftest import make_mesh

DEVICES = 8
STEPS = 3
TIGHT = 1e-12
# 16-bit leaves: XLA keeps more bits inside a fusion and rounds to 8 between them, and fuses
# differently on shards. A few such roundings, of 2**-9 each, separate two runs.
SIXTEEN = 8 * 2.0**-9


class Norm(NamedTuple):
    scale: Any
    shift: Any


class Leaf(NamedTuple):
    """A row of the table below."""

    shape: tuple[int, ...]
    spec: P = P()
    stored: tuple[int, ...] | None = None  # where it is padded
    reason: str = ""
    dtype: Any = np.float64


FEWER = "{} elements are fewer than 8 shards"
LEAVES = {
    "['matrix']": Leaf((24, 16), P("data", None)),  # the larger of two dims that divide
    "['stack']": Leaf((3, 5, 40), P(None, None, "data")),
    # Tied: the same array object at two places, two leaves from the first update on, in optax as
    # here. (One leaf that the loss uses twice is one leaf to an optimizer; `models.py` has that.)
    "['tied']['embed']": Leaf((6, 64), P(None, "data")),
    "['tied']['head']": Leaf((6, 64), P(None, "data")),
    "['bias']": Leaf((32,), P("data")),
    "['scalar']": Leaf((), reason="scalar"),
    "['one']": Leaf((1,), reason=FEWER.format(1)),
    "['empty']": Leaf((0, 4), reason=FEWER.format(0)),
    "['odd']": Leaf((13, 5), P("data", None), (16, 5), "padded, no dim divides: dim 0: 13 to 16"),
    "['vocab']": Leaf((50257, 8), P(None, "data")),  # the only dim that divides, though small
    "['half']": Leaf((48, 2), P("data", None), dtype=jnp.bfloat16),
    "['ids']": Leaf((56,), reason="no gradient: int32", dtype=np.int32),
    "['norm'].scale": Leaf((72,), P("data")),
    "['norm'].shift": Leaf((7,), reason=FEWER.format(7)),
    # Twelve, so that "[10]" and "[11]" would be sorted before "[2]" as strings.
    **{f"['layers'][{i}]": Leaf((8 * i + 8,), P("data")) for i in range(12)},
}
SMALL = ["matrix", "stack", "bias", "scalar", "empty", "odd", "half", "ids"]


def make_tree(seed: int = 0) -> dict[str, Any]:
    """The tree of `LEAVES`, with a `None` and an empty dict, which are no leaves."""
    rng = np.random.default_rng(seed)

    def leaf(path: str) -> np.ndarray:
        shape, dtype = LEAVES[path].shape, LEAVES[path].dtype
        if np.issubdtype(dtype, np.integer):
            return np.arange(math.prod(shape), dtype=dtype).reshape(shape)
        return rng.normal(size=shape).astype(dtype)

    tree = {name: leaf(f"['{name}']") for name in [*SMALL, "one", "vocab"]}
    embed = leaf("['tied']['embed']")
    return tree | {
        "tied": {"embed": embed, "head": embed},
        "none": None,
        "nothing": {},
        "norm": Norm(leaf("['norm'].scale"), leaf("['norm'].shift")),
        "layers": [leaf(f"['layers'][{i}]") for i in range(12)],
    }


def make_few(names: Iterable[str], without: Iterable[str] = ()) -> dict[str, Any]:
    """Some entries of the tree."""
    return {key: x for key, x in make_tree().items() if key in names and key not in without}


def hide_integers(tree: Any) -> Any:
    """What an optimizer inside `zero` sees: integer leaves are hidden as `optax.masked` does."""
    return jax.tree.map(
        lambda x: x if jnp.issubdtype(x.dtype, jnp.inexact) else optax.MaskedNode(), tree
    )


def random_like(tree: Any, seed: int) -> Any:
    """A tree of random numbers, such as gradients; zeros for an integer leaf."""
    rng = np.random.default_rng(seed)

    def leaf(x: Any) -> np.ndarray:
        values = rng.normal(size=x.shape) * jnp.issubdtype(x.dtype, jnp.inexact)
        return values.astype(x.dtype)

    return jax.tree.map(leaf, tree)


def loss(params: Any, targets: Any) -> Any:
    """A loss whose gradient is `params - targets`, for optimizers that call or read it."""

    def half_square(p: Any, t: Any) -> Any:
        return jnp.sum(jnp.square(p.astype(jnp.float64) - t.astype(jnp.float64))) / 2

    return jax.tree.reduce(jnp.add, jax.tree.map(half_square, params, targets))


# What an optimizer must be given besides a learning rate.
ARGUMENTS = {
    "dpsgd": {"l2_norm_clip": 1.0, "noise_multiplier": 0.1, "seed": 0},
    "noisy_sgd": {"key": 0},
    "schedule_free": {"base_optimizer": optax.sgd(0.1, momentum=0.9)},
}
# The extra arguments that are not those of a line search, which refuses one that it does not know.
EXTRA = {"sophia": ["obj_fn"], "sam": []}
# Compiled as a whole also by the tests that run plain optax step by step: loops and conditionals
# compile anew at every eager call.
LOOPS = {
    "apply_if_finite", "conditionally_mask", "conditionally_transform", "galore", "lbfgs",
    "MultiSteps", "MultiSteps, skipping", "muon", "reduce_on_plateau", "sophia",
}  # fmt: skip
# Leaves that plain optax cannot take.
REFUSED = {
    "galore": {"none": AttributeError},
    "muon": {"empty": ZeroDivisionError},
    "sm3": {"scalar": IndexError, "empty": ValueError},
    "sophia": {"half": TypeError},
}
# Leaves that cost more compilation than they show. A 16-bit leaf makes these four start their
# estimate of the step size in 16 bits and go on in 64, so that plain optax compiles anew too (dog
# and dowg do the same and keep it); a line search compiles for as long as six other optimizers.
LEFT_OUT = {
    **dict.fromkeys(["dadapt_adamw", "momo", "momo_adam", "prodigy"], ("half",)),
    "lbfgs": ("stack", "bias", "half", "scalar", "empty"),
}


def optimizers() -> dict[str, Callable[[], optax.GradientTransformation]]:
    """Everything in optax and optax.contrib that takes a learning rate, found by looking."""
    found = {}
    for module in (optax, optax.contrib):
        for name in dir(module):
            make = getattr(module, name)
            if name.startswith("_") or not isinstance(make, types.FunctionType | functools.partial):
                continue
            if "learning_rate" in inspect.signature(make).parameters:
                arguments = {"learning_rate": 0.1} | ARGUMENTS.get(name, {})
                found[name] = functools.partial(make, **arguments)
    return found


def transformations(*leaves: str) -> dict[str, Callable[[], optax.GradientTransformation]]:
    """Wrappers around optimizers, and what optimizers are chained with, for a dict of leaves."""
    adam = functools.partial(optax.adam, 0.1)
    sgd = functools.partial(optax.sgd, 0.1, momentum=0.9)

    def only(*names: str) -> Callable[[Any], Any]:
        """A mask by path."""
        return lambda tree: jax.tree.map_with_path(lambda path, _: path[0].key in names, tree)

    def labels(tree: Any) -> Any:
        return jax.tree.map(lambda yes: "train" if yes else "freeze", only("matrix")(tree))

    def with_sgd(*before: optax.GradientTransformation) -> optax.GradientTransformation:
        return optax.chain(*before, sgd())

    odd = {name: name == "odd" for name in leaves}
    groups = {"train": adam(), "freeze": optax.set_to_zero()}
    return {
        "adafactor, factored": lambda: optax.adafactor(0.1, min_dim_size_to_factor=3),
        "adamw, decay masked by path": lambda: optax.adamw(0.1, mask=only("matrix")),
        "adaptive_grad_clip": lambda: with_sgd(optax.adaptive_grad_clip(0.01)),
        "add_noise": lambda: with_sgd(optax.add_noise(0.1, 0.5, key=0)),
        "apply_every": lambda: with_sgd(optax.apply_every(2)),
        "apply_if_finite": lambda: optax.apply_if_finite(adam(), 5),
        "centralize": lambda: with_sgd(optax.centralize()),
        "clip": lambda: with_sgd(optax.clip(0.1)),
        "clip_by_block_rms": lambda: with_sgd(optax.clip_by_block_rms(0.1)),
        "clip_by_global_norm": lambda: with_sgd(optax.clip_by_global_norm(0.1)),
        "conditionally_mask": lambda: optax.conditionally_mask(sgd(), lambda step: step % 2 == 0),
        "conditionally_transform": lambda: optax.conditionally_transform(
            sgd(), lambda step: step % 2 == 0
        ),
        "ema": lambda: optax.chain(adam(), optax.ema(0.9)),
        "flatten": lambda: optax.flatten(adam()),
        "freeze": lambda: with_sgd(optax.freeze(odd)),
        "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(0.1),
        "inject_hyperparams, array": lambda: optax.inject_hyperparams(optax.sgd)(
            jnp.asarray(0.1), momentum=0.9
        ),
        "inject_hyperparams, schedule": lambda: optax.inject_hyperparams(optax.adamw)(
            optax.linear_schedule(0.0, 0.1, 3), weight_decay=0.1
        ),
        "keep_params_nonnegative": lambda: optax.chain(sgd(), optax.keep_params_nonnegative()),
        "lars, masked by path": lambda: optax.lars(
            0.1, 0.1, weight_decay_mask=only("matrix"), trust_ratio_mask=only("odd")
        ),
        "masked": lambda: optax.masked(adam(), only("matrix")),
        "mechanize": lambda: optax.contrib.mechanize(adam()),
        "multi_transform": lambda: optax.multi_transform(groups, labels),
        "MultiSteps": lambda: optax.MultiSteps(adam(), 2).gradient_transformation(),
        "MultiSteps, skipping": lambda: optax.MultiSteps(
            adam(), 1, should_skip_update_fn=optax.skip_not_finite
        ).gradient_transformation(),
        "normalize": lambda: with_sgd(optax.contrib.normalize()),
        "normalize_by_update_norm": lambda: with_sgd(optax.normalize_by_update_norm()),
        "partition": lambda: optax.partition(groups, labels),
        "polyak_sgd": lambda: optax.polyak_sgd(0.1),
        "reduce_on_plateau": lambda: optax.chain(
            adam(), optax.contrib.reduce_on_plateau(patience=1)
        ),
        "sam": lambda: optax.contrib.sam(adam(), optax.sgd(0.05), sync_period=2),
        "scale_by_factored_rms": lambda: with_sgd(optax.scale_by_factored_rms()),
        "scale_by_param_block_norm": lambda: with_sgd(optax.scale_by_param_block_norm()),
        "scale_by_param_block_rms": lambda: with_sgd(optax.scale_by_param_block_rms()),
        "schedule_free, adam": lambda: optax.contrib.schedule_free(adam(), 0.1),
        "selective_transform": lambda: optax.selective_transform(adam(), freeze_mask=odd),
        "split_real_and_imaginary": lambda: optax.contrib.split_real_and_imaginary(adam()),
        "zero_nans": lambda: with_sgd(optax.zero_nans()),
        "zerojax.clip_by_global_norm": lambda: with_sgd(zerojax.clip_by_global_norm(0.1)),
    }


@functools.lru_cache(maxsize=8)
def make_update(name: str, tx: optax.GradientTransformation, objective: Any, jit: bool) -> Any:
    """`update(grads, state, params, value, targets)`, with the extra arguments that `tx` knows."""
    tx = optax.with_extra_args_support(tx)

    def update(grads: Any, state: Any, params: Any, value: Any, targets: Any) -> Any:
        function = functools.partial(objective, targets=targets)
        extra = {"value": value, "grad": grads, "value_fn": function, "obj_fn": function}
        names = EXTRA.get(name, ["value", "grad", "value_fn"])
        return tx.update(grads, state, params, **{key: extra[key] for key in names})

    return jax.jit(update) if jit else update


def train(
    name: str,
    tx: optax.GradientTransformation,
    params: Any,
    all_targets: Any,
    *,
    jit: bool,
    values: Any = None,
    objective: Any = loss,
) -> Iterator[tuple[Any, Any, Any]]:
    """Yields updates, state and parameters after each step.

    Args:
      name: of the optimizer.
      tx: the optimizer.
      params: numpy or placed arrays.
      all_targets: for each step what is subtracted from `params` for a gradient.
      jit: whether the update is compiled as a whole.
      values: the loss of each step; by default that of `trees.loss`.
      objective: the function that line searches call.
    """
    state, update = tx.init(params), make_update(name, tx, objective, jit)
    for step, targets in enumerate(all_targets):
        grads = jax.tree.map(lambda p, t: jnp.asarray(np.asarray(p) - t), params, targets)
        hidden = hide_integers(targets)
        value = values[step] if values else np.float64(loss(hide_integers(params), hidden))
        updates, state = update(grads, state, params, value, hidden)
        params = optax.apply_updates(params, updates)
        yield updates, state, params


def assert_close(plain: Any, ours: Any, what: str) -> None:
    """Leaf by leaf, without the padding; leaves of 16 bits have a tolerance of their own."""
    plain, ours = (dict(jax.tree.leaves_with_path(tree)) for tree in (plain, ours))
    assert plain.keys() == ours.keys()
    for path, want in plain.items():
        got = ours[path]
        assert got.dtype == want.dtype, path
        if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
            got, want = map(jax.random.key_data, (got, want))
        got = np.asarray(got)[tuple(slice(n) for n in want.shape)].astype(np.float64)
        limit = SIXTEEN if want.dtype == jnp.bfloat16 else TIGHT
        np.testing.assert_allclose(
            got, np.asarray(want, np.float64), limit, limit, err_msg=f"{what} {path}"
        )


def compare(
    name: str,
    plain: optax.GradientTransformation,
    ours: Callable[[zerojax.Partition], optax.GradientTransformation],
    params: Any,
    poisoned: bool = False,
) -> list[tuple[Any, Any]]:
    """Three steps of plain optax on one device, and of `ours` on eight; returns the states."""
    targets = [random_like(params, seed) for seed in range(1, STEPS + 1)]
    if poisoned:
        targets[1]["odd"][4, 3] = np.nan
    part, hidden = (
        zerojax.partition(params, make_mesh("mesh8")),
        [hide_integers(t) for t in targets],
    )
    whole, placed = jax.tree.map(jnp.asarray, hide_integers(params)), part.place(params)
    states = []
    for wanted, got in zip(
        train(name, plain, whole, hidden, jit=name in LOOPS),
        train(name, ours(part), placed, targets, jit=True),
        strict=True,
    ):
        for what, a, b in zip(["update", "state", "params"], wanted, got, strict=True):
            assert_close(a, b if what == "state" else hide_integers(b), f"{what} {len(states)}")
        assert "ids" not in params or np.array_equal(got[2]["ids"], params["ids"])
        states.append((wanted[1], got[1]))
    return states
