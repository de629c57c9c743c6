"""A tiny model with every kind of leaf, and its loss on one device."""

import jax
import numpy as np
import optax
from jax import numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax

# Tied (`embed` is used twice), stacked over layers, sharded over `model` on different dims, padded
# on eight devices (`head`), too small to shard, empty, scalar, integer, unused.
SPECS = {
    "embed": P(),
    "layers": {"up": P(None, None, "model"), "bias": P(None, "model"), "down": P(None, "model")},
    "head": P(),
    "column": P("model"),
    "small": P(),
    "scale": P(),
    "empty": P(),
    "one": P(),
    "unused": P(),
    "ids": P(),
}
SCAN_DIMS = {**dict.fromkeys(SPECS, 0), "layers": 1}


def make_params(dtype=np.float64):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(size=shape).astype(dtype)

    return {
        "embed": normal(16, 8),
        "layers": {"up": normal(2, 8, 16) / 3, "bias": normal(2, 16), "down": normal(2, 16, 8) / 4},
        "head": normal(13, 5),
        "column": normal(16),
        "small": normal(5),
        "scale": normal(),
        "empty": normal(0, 4),
        "one": normal(1),
        "unused": normal(8, 3),
        "ids": np.arange(4),
    }


def make_batch(size=32):
    rng = np.random.default_rng(1)
    return rng.integers(0, 16, size=(size, 3)), rng.normal(size=(size, 5))


def row_parallel(x, weights):
    """A product over a dim that `model` may shard; Explicit axes want to be told the result's."""
    sharding = jax.typeof(weights).sharding
    out = NamedSharding(sharding.mesh, P()) if "model" in sharding.spec else None
    return jnp.einsum("...i,ij->...j", x, weights, out_sharding=out)


def per_example(params, tokens, targets, unshard=lambda weights: weights):
    """The losses of the examples; knows nothing of devices, but may call `unshard` by layer."""
    x = unshard(params["embed"])[tokens]

    def layer(x, weights):
        weights, column = unshard(weights), unshard(params["column"])
        hidden = jnp.tanh(x @ weights["up"] + weights["bias"] + column)
        return x + unshard(params["scale"]) * row_parallel(hidden, weights["down"]), None

    if unshard is zerojax.unshard:
        layer = jax.checkpoint(layer, policy=zerojax.regather)
    x, _ = jax.lax.scan(layer, x, params["layers"])

    # A carry that starts as zeros is refused where types are checked.
    def recur(carry, step):
        return jnp.tanh(carry + step), None

    state, _ = jax.lax.scan(recur, jnp.zeros(x[:, 0].shape, x.dtype), x.swapaxes(0, 1))
    features = (state @ unshard(params["embed"]).T)[:, :13]
    out = features @ unshard(params["head"]) + unshard(params["small"]) * unshard(params["one"])
    return jnp.mean((out - targets) ** 2, -1)


def loss_fn(params, tokens, targets):
    return jnp.mean(per_example(params, tokens, targets))


def layered_loss_fn(params, tokens, targets):
    """The same function, which gathers and reduces its weights layer by layer."""
    return jnp.mean(per_example(params, tokens, targets, zerojax.unshard))


def reference(loss, params, *args):
    """Loss and gradients on one device; integer leaves get zeros."""
    flat, treedef = jax.tree.flatten(jax.tree.map(jnp.asarray, params))
    floating = [jnp.issubdtype(x.dtype, jnp.inexact) for x in flat]

    def on_floating(some):
        some = iter(some)
        leaves = [next(some) if f else x for f, x in zip(floating, flat, strict=True)]
        return loss(treedef.unflatten(leaves), *args)

    value, grads = jax.value_and_grad(on_floating)(
        [x for f, x in zip(floating, flat, strict=True) if f]
    )
    grads = iter(grads)
    return value, treedef.unflatten(
        [next(grads) if f else jnp.zeros_like(x) for f, x in zip(floating, flat, strict=True)]
    )


def train(loss, tx, params, steps, *args):
    """Plain optax on one device: the parameters, and loss and gradient norm of some steps."""
    params, metrics = jax.tree.map(jnp.asarray, params), []
    keep = jax.tree.map(lambda x: bool(jnp.issubdtype(x.dtype, jnp.inexact)), params)
    tx = optax.masked(tx, keep)
    state = tx.init(params)
    for _ in range(steps):
        value, grads = reference(loss, params, *args)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        metrics.append((float(value), float(optax.tree.norm(grads))))
    return params, metrics
