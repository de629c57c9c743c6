"""flax.nnx: a model and its `nnx.Optimizer`, born in their shards.

All else is plain nnx. `zerojax.partition` takes `nnx.state(model, nnx.Param)` and reads what
`nnx.with_partitioning` declares; `nnx.Optimizer` takes `zerojax.zero(...)` as it takes any
transformation, and its state is 1/N of its size from construction on.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

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

    Needed where a model does not fit on one device, and good where its state does not; otherwise
    create them as usual and call `nnx.update(model, part.place(nnx.state(model, nnx.Param)))`.

    At stage 3 the model holds shards, padded where `print(part)` says so. Compute with it inside of
    `zerojax.value_and_grad`, or after `nnx.update(model, part.gather(nnx.state(model, nnx.Param)))`.

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
    with jax.set_mesh(part.mesh):  # flax reads sharding metadata there
        model = nnx.eval_shape(make_model)

    def make(which: int) -> Any:
        with nnx.use_eager_sharding(False):  # made in shards, not first in the model's specs
            return nnx.as_pure(nnx.state(make_model(), wrt, ...)[which])

    params, opt_state = restored or init(lambda: make(0), tx, part)()
    shardings = nnx.as_pure(nnx.get_named_sharding(nnx.state(model, wrt, ...)[1], part.mesh))
    nnx.update(model, params)
    nnx.update(model, jax.jit(lambda: make(1), out_shardings=shardings)())
    ready = optax.GradientTransformation(lambda _: opt_state, tx.update)
    optimizer = nnx.Optimizer(model, ready, wrt=wrt)
    optimizer.tx = tx
    # Flax leaves the counter on one device, and the second step would compile anew.
    everywhere = NamedSharding(part.mesh, P())
    optimizer.step.set_value(jax.device_put(np.uint32(step), everywhere))
    return model, optimizer
