"""Trains a flax.linen classifier of handwritten digits, with its `TrainState` sharded.

    python examples/flax_linen_train_state.py                        # on 8 virtual CPUs or GPUs
    python examples/flax_linen_train_state.py --stage 1 --steps 500
    python examples/flax_linen_train_state.py --checkpoint runs/digits --steps 100
    python examples/flax_linen_train_state.py --checkpoint runs/digits --resume --devices 4

The digits are those of scikit-learn. A run that is resumed takes the steps that one which never
stopped would have taken, on as many devices as there now are.
"""

import argparse
import contextlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import zerojax
from zerojax.integrations import linen

LAYERS, WIDTH, BATCH, SAVE_EVERY = 4, 128, 64, 50


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        hidden = nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH)(hidden), None


class Classifier(nn.Module):
    """A residual network whose weights are gathered layer by layer."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        dense = linen.unshard(nn.Dense)
        block = nn.remat(linen.unshard(Block), policy=zerojax.regather, prevent_cse=False)
        layers = nn.scan(
            block, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS
        )
        x, _ = layers(name="layers")(dense(WIDTH, name="first")(images), None)
        return dense(10, name="last")(x)


model = Classifier()


def loss_fn(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    logits = model.apply({"params": params}, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def load_data() -> tuple[Any, Any]:
    """Images (examples, 64) between 0 and 1 with their labels, to train and to test with."""
    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int32)
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def set_up(args: argparse.Namespace, images: Any) -> tuple[Any, Any, Any]:
    """The plan, the sharded optimizer, and the function that creates the state."""
    mesh = jax.make_mesh((args.devices,), ("data",), devices=jax.devices()[: args.devices])
    shapes = jax.eval_shape(model.init, jax.random.key(0), images)["params"]
    scan_dims = {name: int(name == "layers") for name in shapes}
    part = zerojax.partition(shapes, mesh, stage=args.stage, scan_dims=scan_dims)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    tx = zerojax.zero(optimizer, part)
    return part, tx, linen.create_train_state(model, tx, part)


def train(args: argparse.Namespace, manager: Any) -> list[float]:
    """Trains up to step `--steps`; the loss of each step that it took."""
    (images, labels), held_out = load_data()
    part, tx, create = set_up(args, images[:1])
    print(part)
    grad_fn = zerojax.value_and_grad(loss_fn, part)

    def step_fn(state: TrainState, *batch: jax.Array) -> tuple[TrainState, jax.Array]:
        loss, grads = grad_fn(state.params, *batch)
        return state.apply_gradients(grads=grads), loss

    if args.resume:
        params, opt_state = zerojax.checkpoint.restore(manager, None, tx, part)
        start = jax.device_put(np.int32(manager.latest_step()), NamedSharding(part.mesh, P()))
        state = TrainState(start, model.apply, params, tx, opt_state)
    else:
        state = create(jax.random.key(0), images[:1])
    train_step, losses = jax.jit(step_fn, donate_argnums=0), []
    for step in range(int(state.step), args.steps):
        chosen = np.random.default_rng(step).choice(len(images), BATCH, replace=False)
        batch = jax.device_put(
            (images[chosen], labels[chosen]), NamedSharding(part.mesh, P("data"))
        )
        state, loss = train_step(state, *batch)
        losses.append(float(loss))
        last = step + 1 == args.steps
        if last or (step + 1) % SAVE_EVERY == 0:
            print(f"step {step + 1}: loss {losses[-1]:.4f}")
            if manager:
                zerojax.checkpoint.save(manager, step + 1, state.params, state.opt_state, tx, part)
    logits = jax.jit(model.apply)({"params": part.gather(state.params)}, held_out[0])
    accuracy = np.mean(np.argmax(logits, -1) == held_out[1])
    print(f"{accuracy:.1%} of {len(logits)} digits of other people are recognised")
    return losses


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=__doc__)
    parser.formatter_class, add = argparse.RawDescriptionHelpFormatter, parser.add_argument
    add("--steps", type=int, default=300, help="the step to train up to")
    add("--stage", type=int, choices=range(4), default=3)
    add("--devices", type=int, choices=(4, 8), default=8)
    add("--checkpoint", type=Path, help=f"folder to save to, every {SAVE_EVERY} steps")
    add("--resume", action="store_true", help="from the latest step in --checkpoint")
    args = parser.parse_args(argv)
    if jax.device_count() < args.devices:
        parser.error(f"--devices {args.devices}: jax finds {jax.device_count()}")
    if args.resume and not args.checkpoint:
        parser.error("--resume: needs --checkpoint")
    folder = args.checkpoint and args.checkpoint.absolute()
    with ocp.CheckpointManager(folder) if folder else contextlib.nullcontext() as manager:
        if args.resume and manager.latest_step() is None:
            parser.error(f"--resume: there is no checkpoint in {args.checkpoint}")
        return train(args, manager)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
