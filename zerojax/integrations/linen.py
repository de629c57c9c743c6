"""flax.linen: a `TrainState` that is born in its shards, and modules that `unshard` their weights.

Nothing here is needed to train: `zerojax.partition` reads linen's boxes, and
`TrainState.create(..., tx=zerojax.zero(...))` and `apply_gradients` do the rest.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

from zerojax import _unshard
from zerojax._contexts import constrain, manual_axes, run_globally
from zerojax._partition import Partition
from zerojax._train import init
from zerojax._zero import abstract_state

State = TypeVar("State", bound=TrainState)
Module = TypeVar("Module", bound=nn.Module)


def create_train_state(
    model: nn.Module,
    tx: optax.GradientTransformation,
    part: Partition,
    state_class: type[State] = TrainState,
    **fields: Any,
) -> Callable[..., State]:
    """Creates a `TrainState` in its shards, under one jit.

    What `model.init` and `TrainState.create` make, but no device ever holds more of parameters and
    optimizer state than it keeps, and all of it is on the mesh from the start: a jitted step
    compiles once, where the `step=0` of `TrainState.create`, a Python number, costs a second time.

    Args:
      model: the module.
      tx: a transformation that contains `zerojax.zero`.
      part: the plan for the parameters, made from
        `jax.eval_shape(model.init, key, inputs)["params"]`.
      state_class: `TrainState` or a subclass. Its `create` is also given, by their names, the
        collections that `model.init` makes beside "params", such as `batch_stats`.
      **fields: further fields of the class.

    Returns:
      `(*args, **kwargs) -> state` for the arguments of `model.init`; only `args` may be arrays.
      What else has the tree of the parameters, such as an average of them, lives where they do; the
      rest is replicated.

    Raises:
      ValueError: when called, if the model has other parameters than `part` was made for.

    >>> import optax
    >>> from flax import linen as nn
    >>> from zerojax.integrations import linen
    >>> model, key, x = nn.Dense(16), jax.random.key(0), jnp.ones((8, 4))
    >>> shapes = jax.eval_shape(model.init, key, x)["params"]
    >>> part = zerojax.partition(shapes, jax.make_mesh((8,), ("data",)))
    >>> tx = zerojax.zero(optax.adam(0.1), part)
    >>> state = linen.create_train_state(model, tx, part)(key, x)
    >>> state.opt_state[0].mu["kernel"].sharding.spec
    P(None, 'data')
    """

    def call(*args: Any, **kwargs: Any) -> State:
        def create(*args: Any) -> State:
            collections = {**model.init(*args, **kwargs)}
            params, opt_state = init(lambda params: params, tx, part)(collections.pop("params"))
            state = state_class.create(
                apply_fn=model.apply, params=params, tx=tx, **collections, **fields
            )
            return state.replace(opt_state=opt_state)  # masters keep what rounding took

        def run(*args: Any) -> State:
            return jax.tree.map(lambda spec, x: constrain(part.mesh, x, spec), specs, create(*args))

        specs = jax.tree.map(
            lambda x: part.param_specs if like_params(x) else P(),
            jax.eval_shape(create, *args),
            is_leaf=like_params,
        )
        opt_specs = jax.tree.map(lambda x: x.sharding.spec, abstract_state(tx, part))
        specs = specs.replace(opt_state=opt_specs)
        return run_globally(run, part.mesh, *args, out_specs=specs)

    def like_params(x: Any) -> bool:
        return jax.tree.structure(x) == part.treedef

    return call


def unshard(module: type[Module], methods: Iterable[str] | None = None) -> type[Module]:
    """A module class whose parameters go through `zerojax.unshard` when it is called.

    A lifted transformation, as `nn.remat` is, with the names and the parameters of the class
    itself. Wrap the block that `nn.scan` repeats, and every other module that has parameters of its
    own; `zerojax.value_and_grad` then gathers and reduces block by block. In `init`, and on plain
    arrays, it changes nothing. For the layers' dim tell `zerojax.partition` about the scan:
    `scan_dims={name: int(name == "layers") for name in params}`.

    Inside `zerojax.value_and_grad` boxes are taken off: what is gathered is where they say, and
    flax would constrain it once more, which JAX refuses there on Explicit model axes.

    Args:
      module: a class of modules.
      methods: those that read parameters, if there are others than `__call__`, such as
        `("__call__", "attend")` of an `nn.Embed` that is tied.

    Returns:
      The transformed class.

    >>> from flax import linen as nn
    >>> from zerojax.integrations import linen
    >>> class Model(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         def layer(block, x):
    ...             return nn.tanh(block(x)), None
    ...         dense = nn.remat(linen.unshard(nn.Dense), policy=zerojax.regather)
    ...         layers = nn.scan(
    ...             layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=6)
    ...         return layers(dense(8, name="layers"), x)[0]
    >>> model, x = Model(), jnp.ones((16, 8))
    >>> params = model.init(jax.random.key(0), x)["params"]
    >>> params["layers"]["kernel"].shape
    (6, 8, 8)
    >>> mesh = jax.make_mesh((8,), ("data",))
    >>> part = zerojax.partition(params, mesh, stage=3, scan_dims={"layers": 1})
    >>> grad_fn = zerojax.value_and_grad(lambda p, x: jnp.mean(model.apply({"params": p}, x)), part)
    >>> loss, grads = grad_fn(part.place(params), x)
    >>> print(grad_fn)
    zerojax.value_and_grad at stage 3, by layer: weights are gathered and gradients are reduced by
    zerojax.unshard, in the backward pass
    """

    def whole(collections: Any) -> Any:
        if manual_axes():
            collections = jax.tree.map(
                lambda x: x.value if _is_box(x) else x, collections, is_leaf=_is_box
            )
        return _unshard.unshard(collections)

    # Mutable, or `init` could make no parameters.
    lifted = nn.map_variables(module, "params", whole, mutable=True, methods=methods)
    lifted.__name__ = module.__name__  # by which flax names the parameters
    return lifted


def _is_box(x: Any) -> bool:
    return isinstance(x, nn.Partitioned)
