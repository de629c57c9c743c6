"""Trains a flax.nnx classifier of handwritten digits, with its `nnx.Optimizer` sharded.

    python examples/flax_nnx.py                                      # on 8 virtual CPUs or GPUs
    python examples/flax_nnx.py --stage 1 --steps 500
    python examples/flax_nnx.py --checkpoint runs/digits --steps 100
    python examples/flax_nnx.py --checkpoint runs/digits --resume --devices 4

The digits are those of scikit-learn. A run that is resumed takes the steps that one which never
stopped would have taken, on as many devices as there now are.
"""

import argparse
import contextlib
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import zerojax
from zerojax.integrations.nnx import create

LAYERS, WIDTH, BATCH, SAVE_EVERY = 4, 128, 64, 50


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Classifier(nnx.Module):
    """A residual network whose weights are gathered layer by layer."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(64, WIDTH, rngs=rngs)
        self.blocks = nnx.vmap(Block)(rngs.split(LAYERS))  # stacked, with a leading dim
        self.last = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        def layer(x: jax.Array, block: Block) -> tuple[jax.Array, None]:
            return zerojax.unshard(block)(x), None

        layer = jax.checkpoint(layer, policy=zerojax.regather)
        x, _ = jax.lax.scan(layer, zerojax.unshard(self.first)(images), self.blocks)
        return zerojax.unshard(self.last)(x)


def make_model() -> Classifier:
    return Classifier(nnx.Rngs(0))


def load_data() -> tuple[Any, Any]:
    """Images (examples, 64) between 0 and 1 with their labels, to train and to test with."""
    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int32)
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def set_up(args: argparse.Namespace) -> tuple[zerojax.Partition, Any]:
    """The plan, and the sharded optimizer."""
    mesh = jax.make_mesh((args.devices,), ("data",), devices=jax.devices()[: args.devices])
    params = nnx.state(nnx.eval_shape(make_model), nnx.Param)
    scan_dims = nnx.State({name: int(name == "blocks") for name in params})
    part = zerojax.partition(params, mesh, stage=args.stage, scan_dims=scan_dims)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
    return part, zerojax.zero(optimizer, part)


def train(args: argparse.Namespace, manager: Any) -> list[float]:
    """Trains up to step `--steps`; the loss of each step that it took."""
    (images, labels), held_out = load_data()
    part, tx = set_up(args)
    restored = zerojax.checkpoint.restore(manager, None, tx, part) if args.resume else None
    start = manager.latest_step() if args.resume else 0
    model, optimizer = create(make_model, tx, part, restored, step=start)
    print(part)
    graphdef = nnx.graphdef(model)

    def logits_of(params: Any, images: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, params)(images)

    def loss_fn(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        logits = logits_of(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    grad_fn = zerojax.value_and_grad(loss_fn, part)

    @functools.partial(nnx.jit, donate_argnums=(0, 1))
    def train_step(model: Classifier, optimizer: nnx.Optimizer, *batch: jax.Array) -> jax.Array:
        loss, grads = grad_fn(nnx.state(model, nnx.Param), *batch)
        optimizer.update(model, grads)
        return loss

    losses = []
    for step in range(start, args.steps):
        chosen = np.random.default_rng(step).choice(len(images), BATCH, replace=False)
        batch = jax.device_put(
            (images[chosen], labels[chosen]), NamedSharding(part.mesh, P("data"))
        )
        losses.append(float(train_step(model, optimizer, *batch)))
        last = step + 1 == args.steps
        if last or (step + 1) % SAVE_EVERY == 0:
            print(f"step {step + 1}: loss {losses[-1]:.4f}")
            if manager:
                held = nnx.state(model, nnx.Param), optimizer.opt_state
                zerojax.checkpoint.save(manager, step + 1, *held, tx, part)
    logits = jax.jit(logits_of)(part.gather(nnx.state(model, nnx.Param)), held_out[0])
    accuracy = np.mean(np.argmax(logits, -1) == held_out[1])
    print(f"{accuracy:.1%} of {len(logits)} other digits are recognised")
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
        try:
            return train(args, manager)
        except FileNotFoundError as error:
            parser.error(f"--resume: {error}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
