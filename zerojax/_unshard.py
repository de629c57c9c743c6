"""`unshard`: weights gathered, and their gradients reduced, layer by layer."""

import functools
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from zerojax._collectives import pad, unpad
from zerojax._contexts import constrain, current_mesh
from zerojax._leaf_plan import LeafPlan
from zerojax._shard import Shard
from zerojax._shard_uses import REDUCED, UNSHARDED
from zerojax._specs import axes_of_type, restrict


def unshard(params: Any) -> Any:
    """The parameters of a layer, whole: call it where a model uses them.

    The identity on plain arrays, so that the same model runs on one device. Inside a loss that
    `value_and_grad` differentiates, and on `part.shards(params)`, weights are gathered here at
    stage 3, and at every stage their gradients are reduced here, in the backward pass. Call it in
    the body of the scan over layers, and put `jax.checkpoint(body)` around that body at stage 3, or
    `jax.checkpoint(body, policy=zerojax.regather)`, which keeps activations: otherwise the gathered
    weights of all layers are kept for the backward pass. (In a loop that is differentiated as a
    whole, such as a pipeline's over its ticks, JAX gathers the weights of its layers once, before
    the loop.)

    Args:
      params: a parameter, or a tree of them, as the loss received them or sliced along leading
        dims that are not sharded (`scan_dims` of `partition`).

    Returns:
      The tree with whole arrays in natural shapes.

    References:
      Rajbhandari et al., "ZeRO", 2020, section 5.3; Zhao et al., "PyTorch FSDP", 2023, section 3.

    >>> def loss_fn(params, x):
    ...     def layer(x, weights):
    ...         return jnp.tanh(x @ zerojax.unshard(weights)["w"]), None
    ...     x, _ = jax.lax.scan(jax.checkpoint(layer, policy=zerojax.regather), x, params)
    ...     return jnp.mean(x ** 2)
    >>> params = {"w": jnp.ones((4, 8, 8))}
    >>> part = zerojax.partition(params, jax.make_mesh((8,), ("data",)), stage=3, scan_dims=1)
    >>> params = part.place(params)
    >>> params["w"].sharding.spec
    P(None, 'data', None)
    >>> grad_fn = zerojax.value_and_grad(loss_fn, part)
    >>> loss, grads = grad_fn(params, jnp.ones((16, 8)))
    >>> grads["w"].sharding.spec
    P(None, 'data', None)
    """

    def one(x: Any) -> Any:
        if isinstance(x, Shard):
            plan = x.leaf, x.mesh, x.wire, None if x.slot is None else x.slot.dtype
            return _unshard(plan, x.value, x.slot, x.accumulator)
        return checkpoint_name(x, UNSHARDED) if isinstance(x, Tracer) else x

    return jax.tree.map(one, params, is_leaf=lambda x: isinstance(x, Shard))


def regather(primitive: Any, *_: Any, **params: Any) -> bool:
    """A policy for `jax.checkpoint`: keep everything for the backward pass but gathered weights.

    What only casts, slices or reshapes another value is not kept either, since of a gathered weight
    that would keep the weight. All activations are kept, as without `jax.checkpoint`. Where these
    do not fit, take `jax.checkpoint` without a policy, which keeps the inputs of a layer, or with
    one that says what to keep, such as `dots_saveable`: they keep no gathered weight either. One
    that says what not to keep goes together with this one where *both* would keep something.

    References:
      Rajbhandari et al., "ZeRO", 2020, section 7.2.2 (parameters gathered again for the backward
      pass).

    >>> layer = jax.checkpoint(lambda x, w: x @ zerojax.unshard(w), policy=zerojax.regather)
    >>> layer(jnp.ones((2, 3)), jnp.ones((3, 1))).shape
    (2, 1)
    """
    return primitive.name not in _GATHERS and params.get("name") != UNSHARDED


# All-gathers in their three forms, and what leaves the values of an array as they are.
_GATHERS = frozenset(
    """all_gather all_gather_invariant sharding_constraint reshard
    broadcast_in_dim convert_element_type copy pvary reshape slice squeeze transpose""".split()
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _unshard(plan: Any, value: jax.Array, slot: Any, accumulator: Any) -> jax.Array:
    return _forward(plan, value, slot, accumulator)[0]


def _forward(plan: Any, value: jax.Array, slot: Any, accumulator: Any) -> tuple[jax.Array, Any]:
    leaf, mesh, wire, _ = plan
    whole = wire.weight(leaf, value) if wire else _by_constraint(leaf, mesh, value)
    return whole, accumulator


def _backward(plan: Any, accumulator: Any, g: jax.Array) -> tuple[Any, Any, Any]:
    leaf, mesh, wire, dtype = plan
    if wire is None:
        return _stored_gradient(leaf, mesh, g), None, None
    if dtype is None:  # frozen
        return None, None, None
    g = checkpoint_name(g, REDUCED + leaf.path)
    if accumulator is not None:
        g = accumulator + g.astype(accumulator.dtype)
    return None, wire.gradient(leaf, g).astype(dtype), None


_unshard.defvjp(_forward, _backward)


def _by_constraint(leaf: LeafPlan, mesh: Mesh | AbstractMesh, x: jax.Array) -> jax.Array:
    """A stored array, or a slice of it along leading dims, made whole by XLA."""
    leaf = leaf.trailing(x.ndim)
    return unpad(_pin(mesh, x, leaf.model_spec), leaf)


def _stored_gradient(leaf: LeafPlan, mesh: Mesh | AbstractMesh, g: jax.Array) -> jax.Array:
    """The gradient of `_by_constraint`, reduced by XLA."""
    leaf = leaf.trailing(g.ndim)
    return _pin(mesh, pad(g, leaf), leaf.shard_spec)


def _pin(mesh: Mesh | AbstractMesh, x: jax.Array, spec: P) -> jax.Array:
    """Constrains the Auto axes of an array's sharding and reshards the Explicit ones."""
    here = current_mesh(mesh)
    if auto := axes_of_type(here, AxisType.Auto):
        x = constrain(mesh, x, restrict(spec, auto))
    if explicit := axes_of_type(here, AxisType.Explicit):
        x = reshard(x, NamedSharding(here, restrict(spec, explicit)))
    return x
