"""The two functions around an optimizer: sharded initialisation and the training step."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

from zerojax._collectives import norm_of_shards
from zerojax._contexts import constrain, run_globally
from zerojax._gradients import GradientFunction
from zerojax._partition import Partition, check_tree
from zerojax._zero import abstract_state, to_params


def init(
    init_fn: Callable[..., Any], tx: optax.GradientTransformation, part: Partition
) -> Callable[..., tuple[Any, Any]]:
    """Creates parameters and optimizer state in their shards, under one jit.

    For parameters that exist already, such as pretrained ones, pass the identity: a transformation
    *around* `zero` (`optax.MultiSteps`) has state of its own, which `jax.jit(tx.init)` would leave
    wherever XLA likes.

    Args:
      init_fn: `(*args) -> params`, such as a flax module's `init`.
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
        params = init_fn(*args)
        check_tree(part, params, "init", natural=True)
        # Made in shards and then gathered: each device makes 1/N, and needs no more memory for it.
        params = part.map(functools.partial(to_params, part), params)
        return params, _constrain(part, tx.init(params), _state_specs(tx, part))

    def call(*args: Any) -> tuple[Any, Any]:
        specs = (part.param_specs, _state_specs(tx, part))
        return run_globally(run, part.mesh, *args, out_specs=specs)

    return call


def train_step(
    grad_fn: Callable[..., Any], tx: optax.GradientTransformation, part: Partition
) -> Callable[..., tuple[Any, Any, dict[str, Any]]]:
    """The whole training step: gradients, their norm, the update; jitted, with donated buffers.

    Args:
      grad_fn: from `zerojax.value_and_grad` or `jax.value_and_grad`.
      tx: a transformation that contains `zerojax.zero`. It is passed the loss and the gradients
        as the extra arguments `value` and `grad`.
      part: the plan.

    Returns:
      The jitted `step(params, opt_state, *args) -> (params, opt_state, metrics)`. It donates
      `params` and `opt_state`. `metrics` has the scalars "loss" and "grad_norm" (of the whole
      gradient, before any clipping), and "aux" if `grad_fn` returns it.

    Raises:
      ValueError: `grad_fn` was made for another partition.

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

    def gradients(params: Any, *args: Any) -> Any:
        result = grad_fn(params, *args)
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
        params = _constrain(part, optax.apply_updates(params, updates), part.param_specs)
        return params, _constrain(part, opt_state, _state_specs(tx, part)), metrics

    def run(params: Any, opt_state: Any, args: Any) -> Any:
        return apply(params, opt_state, *gradients(params, *args))

    def step(params: Any, opt_state: Any, *args: Any) -> Any:
        check_tree(part, params, "train_step")
        metrics = {"loss": P(), "grad_norm": P()}
        specs = (part.param_specs, _state_specs(tx, part), metrics)
        if ours:  # one region: an uneven shard need not be gathered before the update
            if ours.aux_specs is not None:
                metrics["aux"] = ours.aux_specs
            return run_globally(run, part.mesh, params, opt_state, args, out_specs=specs)
        value, grads = gradients(params, *args)  # the loss sees the mesh's own axis types
        value, aux = value if isinstance(value, tuple) else (value, None)
        params, opt_state, metrics = run_globally(
            apply, part.mesh, params, opt_state, value, grads, out_specs=specs
        )
        return params, opt_state, metrics | ({} if aux is None else {"aux": aux})

    return jax.jit(step, donate_argnums=(0, 1))


def _state_specs(tx: optax.GradientTransformation, part: Partition) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding.spec, abstract_state(tx, part))


def _constrain(part: Partition, tree: Any, specs: Any) -> Any:
    return jax.tree.map(lambda spec, x: constrain(part.mesh, x, spec), specs, tree)
