"""The two functions around an optimizer: sharded initialisation and the training step."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax import numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from zerojax._boxes import pure
from zerojax._collectives import norm_of_shards
from zerojax._contexts import constrain, run_globally, to_stored
from zerojax._gradients import GradientFunction
from zerojax._loss_scale import check_floor, find_loss_scale
from zerojax._master import round_wider
from zerojax._partition import Partition, check_tree
from zerojax._processes import check_global
from zerojax._zero import abstract_state


def init(
    init_fn: Callable[..., Any], tx: optax.GradientTransformation, part: Partition
) -> Callable[..., tuple[Any, Any]]:
    """Creates parameters and optimizer state in their shards, under one jit.

    For parameters that exist already, such as pretrained ones, pass the identity: a transformation
    *around* `zero` (`optax.MultiSteps`) has state of its own, which `jax.jit(tx.init)` would leave
    wherever XLA likes.

    Args:
      init_fn: `(*args) -> params`, such as a flax module's `init`. It may make leaves in a wider
        floating dtype than planned: they are rounded, and masters keep the unrounded values.
      tx: a transformation that contains `zerojax.zero`.
      part: the plan, made from `jax.eval_shape(init_fn, *args)`.

    Returns:
      `(*args) -> (params, opt_state)`. No device ever holds more of the state than its shards.

    Raises:
      ValueError: when called, if `init_fn` makes another tree than `part` was made for.

    >>> import optax
    >>> init_fn = lambda rng: {"w": jax.random.normal(rng, (16, 4))}
    >>> rng = jax.random.key(0)
    >>> mesh = jax.make_mesh((8,), ("data",))
    >>> part = zerojax.partition(jax.eval_shape(init_fn, rng), mesh)
    >>> tx = zerojax.zero(optax.adam(0.1), part)
    >>> params, opt_state = zerojax.init(init_fn, tx, part)(rng)
    >>> opt_state[0].nu["w"].addressable_shards[0].data.shape
    (2, 4)
    """

    def run(*args: Any) -> tuple[Any, Any]:
        made = pure(init_fn(*args))
        check_tree(part, round_wider(part, made), "init", natural=True)
        # Made in shards and then gathered: each device makes 1/N, and needs no more memory for it.
        made = part.map(
            lambda leaf, x: to_stored(part.mesh, x, part.param_shape(leaf), leaf.shard_spec), made
        )
        params = _constrain(part, round_wider(part, made), part.param_specs)
        # What stands around `zero` makes its state in the dtypes that it sees.
        opt_state = jax.tree.map(
            lambda like, x: jnp.asarray(x, like.dtype), abstract_state(tx, part), tx.init(made)
        )
        return params, _constrain(part, opt_state, _state_specs(tx, part))

    def call(*args: Any) -> tuple[Any, Any]:
        specs = (part.param_specs, _state_specs(tx, part))
        return run_globally(run, part.mesh, *args, out_specs=specs)

    return call


@dataclasses.dataclass(frozen=True, eq=False)
class TrainStep:
    """What `train_step` returns: call it with `(params, opt_state, *args)`.

    Attributes:
      jitted: the step as `jax.jit` made it.
      mesh: the mesh of the partition.
    """

    jitted: Any
    mesh: Mesh | AbstractMesh

    def __call__(self, params: Any, opt_state: Any, *args: Any) -> Any:
        check_global(args, self.mesh)
        check_floor(opt_state)
        return self.jitted(params, opt_state, *args)

    def lower(self, *args: Any) -> Any:
        """The lowered step, for arrays or `jax.ShapeDtypeStruct`s."""
        return self.jitted.lower(*args)

    def trace(self, *args: Any) -> Any:
        """The traced step; with this jax, and `compile_for`, see that it is jitted and donates."""
        return self.jitted.trace(*args)


def train_step(
    grad_fn: Callable[..., Any], tx: optax.GradientTransformation, part: Partition
) -> TrainStep:
    """The whole training step: gradients, their norm, the update; jitted, with donated buffers.

    Args:
      grad_fn: from `zerojax.value_and_grad` or `jax.value_and_grad`.
      tx: a transformation that contains `zerojax.zero`. It is passed the loss and the gradients
        as the extra arguments `value` and `grad`.
      part: the plan.

    Returns:
      The jitted `step(params, opt_state, *args) -> (params, opt_state, metrics)`. It donates
      `params` and `opt_state`. `metrics` has the scalars "loss" and "grad_norm" (of the whole
      gradient, before any clipping), and "aux" if `grad_fn` returns it; with
      `zerojax.dynamic_loss_scale` also "loss_scale" and "skipped" as `opt_state` now holds them.

    Raises:
      ValueError: `grad_fn` was made for another partition; or, when called, `opt_state` holds more
        than one loss scale, or in several processes an array of the batch is not global.
      TypeError: when called: `opt_state` holds a loss scale, and `grad_fn` cannot scale its loss.
      FloatingPointError: when called: the loss scale reached its floor in an earlier step.

    >>> import optax
    >>> part = zerojax.partition({"w": jnp.zeros(16)}, jax.make_mesh((8,), ("data",)))
    >>> grad_fn = zerojax.value_and_grad(lambda p, x: jnp.mean((x - p["w"]) ** 2), part)
    >>> tx = zerojax.zero(optax.sgd(8.0), part)
    >>> params = part.place({"w": jnp.zeros(16)})
    >>> step = zerojax.train_step(grad_fn, tx, part)
    >>> params, opt_state, metrics = step(params, tx.init(params), jnp.ones((8, 16)))
    >>> float(params["w"][0]), float(metrics["loss"]), float(metrics["grad_norm"])
    (1.0, 1.0, 0.5)
    """
    tx = optax.with_extra_args_support(tx)
    ours = grad_fn if isinstance(grad_fn, GradientFunction) else None
    if ours and ours.part is not part:
        raise ValueError(
            "train_step: grad_fn was made with another partition. Pass the same one to "
            "value_and_grad, zero and train_step."
        )

    def gradients(params: Any, opt_state: Any, *args: Any) -> Any:
        state = find_loss_scale(opt_state)
        if state and not ours:
            raise TypeError(
                "train_step: the optimizer is wrapped in dynamic_loss_scale, and only a grad_fn "
                f"from zerojax.value_and_grad can scale its loss; got {grad_fn!r}."
            )
        result = pure(grad_fn(params, *args, **({"loss_scale": state.scale} if state else {})))
        pair = isinstance(result, tuple) and len(result) == 2
        if not pair or jax.tree.structure(result[1]) != part.treedef:
            raise TypeError(
                "train_step: grad_fn must return (value, gradients), as jax.value_and_grad does:\n"
                f"  gradients expected: {part.treedef}\n  got: {jax.tree.structure(result)}\n"
                "Wrap the loss in zerojax.value_and_grad."
            )
        value, grads = result
        leaves = [
            g if leaf.trainable else jnp.zeros(leaf.shape, leaf.dtype)  # not float0
            for leaf, g in zip(part.leaves, jax.tree.leaves(grads), strict=True)
        ]
        return value, part.treedef.unflatten(leaves)

    def apply(params: Any, opt_state: Any, value: Any, grads: Any) -> Any:
        loss, *aux = value if isinstance(value, tuple) else (value,)
        metrics = {"loss": loss, "grad_norm": norm_of_shards(part, grads)}
        metrics |= {"aux": aux[0]} if aux else {}
        updates, opt_state = tx.update(grads, opt_state, params, value=loss, grad=grads)
        if state := find_loss_scale(opt_state):
            metrics |= {"loss_scale": state.scale, "skipped": state.skipped}
        params = _constrain(part, optax.apply_updates(params, updates), part.param_specs)
        return params, _constrain(part, opt_state, _state_specs(tx, part)), metrics

    def run(params: Any, opt_state: Any, args: Any) -> Any:
        return apply(params, opt_state, *gradients(params, opt_state, *args))

    def step(params: Any, opt_state: Any, *args: Any) -> Any:
        params = part.treedef.unflatten(check_tree(part, params, "train_step"))
        metrics = {"loss": P(), "grad_norm": P()}
        if find_loss_scale(opt_state):
            metrics |= {"loss_scale": P(), "skipped": P()}
        specs = (part.param_specs, _state_specs(tx, part), metrics)
        if ours:  # one region: an uneven shard need not be gathered before the update
            if ours.aux_specs is not None:
                metrics["aux"] = ours.aux_specs
            return run_globally(run, part.mesh, params, opt_state, args, out_specs=specs)
        # Outside of the region: the loss sees the mesh's own axis types.
        value, grads = gradients(params, opt_state, *args)
        value, aux = value if isinstance(value, tuple) else (value, None)
        params, opt_state, metrics = run_globally(
            apply, part.mesh, params, opt_state, value, grads, out_specs=specs
        )
        return params, opt_state, metrics | ({} if aux is None else {"aux": aux})

    # All that is held is passed, or `MemoryReport.compare` would miss what the step does not read.
    jitted = jax.jit(step, donate_argnums=(0, 1), keep_unused=True)
    return TrainStep(jitted, part.mesh)


def _state_specs(tx: optax.GradientTransformation, part: Partition) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding.spec, abstract_state(tx, part))


def _constrain(part: Partition, tree: Any, specs: Any) -> Any:
    return jax.tree.map(lambda spec, x: constrain(part.mesh, x, spec), specs, tree)
