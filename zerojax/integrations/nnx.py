"""flax.nnx: a model and its `nnx.Optimizer`, born in their shards.

All else is plain nnx. `zerojax.partition` takes a model's state and reads the sharding that
`nnx.with_partitioning` declares, and `nnx.Optimizer` takes `zerojax.zero` as any transformation:

>>> import optax
>>> from flax import nnx
>>> model = nnx.Linear(16, 4, rngs=nnx.Rngs(0))
>>> part = zerojax.partition(nnx.state(model, nnx.Param), jax.make_mesh((8,), ("data",)))
>>> nnx.update(model, part.place(nnx.state(model, nnx.Param)))
>>> optimizer = nnx.Optimizer(model, zerojax.zero(optax.adam(0.1), part), wrt=nnx.Param)
>>> optimizer.opt_state[0].mu["kernel"].sharding.spec
P('data', None)

Gradients come from `nnx.value_and_grad`, which sees the global batch, or, at every stage and
reduced once, from `zerojax.value_and_grad`:

>>> graphdef = nnx.graphdef(model)  # with more than parameters: graphdef, _, rest = nnx.split(...)
>>> loss_fn = lambda params, x: jnp.mean(nnx.merge(graphdef, params)(x) ** 2)
>>> grad_fn = zerojax.value_and_grad(loss_fn, part)
>>> @nnx.jit
... def step(model, optimizer, x):
...     loss, grads = grad_fn(nnx.state(model, nnx.Param), x)
...     optimizer.update(model, grads)
...     return loss
>>> step(model, optimizer, jnp.ones((8, 16))).shape
()

Pass it other variables as an argument, with `PartitionSpec()` in `batch_specs`, and merge them with
`copy=True`. What a model changes in them there, such as counts of random numbers, is lost: give
each step a new key, `model(x, rngs=nnx.Rngs(key))`, which is folded with the index of the device.

Modules are pytrees: layers that `nnx.vmap` stacked are gathered one by one, as
`zerojax.unshard(layer)(x)` in the body of a `jax.lax.scan` or `nnx.scan`. Rematerialise it with
`jax.checkpoint(..., policy=zerojax.regather)`: `nnx.remat` hands the weights on as results, which
`zerojax.value_and_grad` refuses, and behind which XLA may move parameters on Auto axes.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax._contexts import standing_on
from zerojax._partition import Partition
from zerojax._train import init


def create(
    make_model: Callable[[], Any],
    tx: optax.GradientTransformation,
    part: Partition,
    restored: tuple[Any, Any] | None = None,
    *,
    step: int = 0,
    wrt: Any = nnx.Param,
) -> tuple[Any, nnx.Optimizer]:
    """Creates a model and its optimizer in their shards: no device ever holds more.

    Needed where a model does not fit on one device; otherwise create it as usual and place it.

    At stage 3 the model holds shards, padded where `print(part)` says so: differentiate it with
    `zerojax.value_and_grad`, and call it with `part.gather(nnx.state(model, nnx.Param))` merged in.

    Args:
      make_model: `() -> model`, a pure function; it is traced on the mesh of the partition.
      tx: a transformation that contains `zerojax.zero`.
      part: the plan, made from `nnx.state(nnx.eval_shape(make_model), wrt)`.
      restored: `(params, opt_state)` to start from, as `zerojax.checkpoint.restore` returns them,
        in place of those that `make_model` and `tx` would make.
      step: where the optimizer's counter of steps starts.
      wrt: the variables that are trained, an nnx filter.

    Returns:
      `(model, optimizer)`. Variables that are not trained are replicated, or sharded as their
      metadata says.

    Raises:
      ValueError: `make_model` makes other variables than `part` was made for.

    >>> import optax
    >>> from flax import nnx
    >>> from zerojax.integrations.nnx import create
    >>> make_model = lambda: nnx.Linear(16, 4, rngs=nnx.Rngs(0))
    >>> params = nnx.state(nnx.eval_shape(make_model), nnx.Param)
    >>> part = zerojax.partition(params, jax.make_mesh((8,), ("data",)), stage=3)
    >>> tx = zerojax.zero(optax.adam(0.1), part)
    >>> model, optimizer = create(make_model, tx, part)
    >>> model.kernel.sharding.spec, optimizer.opt_state[0].mu["kernel"].sharding.spec
    (P('data', None), P('data', None))
    """
    with standing_on(part.mesh):  # flax wants one where sharding is declared
        model = nnx.eval_shape(make_model)

    def make(which: int) -> Any:
        with nnx.use_eager_sharding(False):  # made in shards, not first in the model's specs
            return nnx.as_pure(nnx.state(make_model(), wrt, ...)[which])

    params, opt_state = restored or init(lambda: make(0), tx, part)()
    specs = nnx.as_pure(nnx.get_partition_spec(nnx.state(model, wrt, ...)[1]))
    rest = jax.jit(lambda: make(1), out_shardings=part.shardings(specs))()
    nnx.update(model, params, rest)
    ready = optax.GradientTransformation(lambda params: opt_state, tx.update)
    optimizer = nnx.Optimizer(model, ready, wrt=wrt)
    optimizer.tx = tx
    # Flax leaves the counter on one device, and the second step would compile anew.
    everywhere = NamedSharding(part.mesh, P())
    optimizer.step.set_value(jax.device_put(np.uint32(step), everywhere))
    return model, optimizer
