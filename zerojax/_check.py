"""Does a loss mean the same on parts of a batch as on the whole of it?"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

from zerojax._batch import plan_batch
from zerojax._contexts import as_typed, constrain, run_globally
from zerojax._gradients import value_and_grad
from zerojax._partition import Partition


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """What `check` compared.

    Attributes:
      loss: the loss of `value_and_grad`, split over devices and microbatches.
      global_loss: the loss of the same function on the global batch.
      errors: by key path, with "loss" first: the norm of the difference relative to that of the
        global value.
      tolerance: the largest relative error that rounding explains, the root of the dtype's epsilon.
    """

    loss: float
    global_loss: float
    errors: dict[str, float]
    tolerance: float

    def __repr__(self) -> str:
        width = max(map(len, self.errors))
        rows = [
            f"  {path:<{width}}  {error:9.2e}{'' if error <= self.tolerance else '  differs'}"
            for path, error in self.errors.items()
        ]
        head = f"loss {self.loss:.8g} on parts of the batch, {self.global_loss:.8g} on the whole"
        return "\n".join([head, f"relative error (tolerance {self.tolerance:.1e}):", *rows])


def check(
    loss_fn: Callable[..., Any], part: Partition, params: Any, *args: Any, **options: Any
) -> CheckReport:
    """Compares loss and gradients of `value_and_grad` with those of the global batch.

    Run it once, on a real batch, before a long training. Dropout is drawn anew on each device, so
    pass a deterministic loss.

    Args:
      loss_fn: as for `value_and_grad`.
      part: the plan for `params`.
      params: the parameters.
      *args: further arguments of `loss_fn`; a batch that one device can differentiate.
      **options: those of `value_and_grad` that the training uses.

    Returns:
      A printable `CheckReport`, if everything agrees up to rounding.

    Raises:
      ValueError: something differs; names it, with the likely cause and the remedy.

    >>> part = zerojax.partition({"w": jnp.ones((4, 2))}, jax.make_mesh((8,), ("data",)))
    >>> x = jnp.arange(64.0).reshape(16, 4)
    >>> zerojax.check(lambda p, x: jnp.mean(x @ p["w"]), part, {"w": jnp.ones((4, 2))}, x)
    loss 126 on parts of the batch, 126 on the whole
    relative error (tolerance 3.5e-04):
      loss    0.00e+00
      ['w']   0.00e+00
    >>> zerojax.check(lambda p, x: jnp.var(x @ p["w"]), part, {"w": jnp.ones((4, 2))}, x)
    Traceback (most recent call last):
    ValueError: check: the loss means something else on parts of the batch...
    """
    params = part.place(params)
    batch_specs = options.get("batch_specs")
    has_aux, reduction = options.get("has_aux", False), options.get("reduction", "mean")
    value, grads = value_and_grad(loss_fn, part, **options)(params, *args)
    loss = value[0] if has_aux else value

    def on_batch(trainable: list[Any], flat: list[Any], args: Any, arg_specs: Any) -> Any:
        every = iter(trainable)
        pairs = zip(part.leaves, flat, strict=True)
        leaves = [next(every) if leaf.trainable else x for leaf, x in pairs]
        specs = (part.model_specs, *arg_specs)
        typed_loss = as_typed(loss_fn, part.mesh, part.model_axes, specs)
        out = typed_loss(part.treedef.unflatten(leaves), *args)
        out = out[0] if has_aux else out
        return out[0] / out[1] if reduction == "weighted" else out

    def run(params: Any, args: Any) -> Any:
        specs = plan_batch(part, args, batch_specs, 1).specs
        flat, treedef = jax.tree.flatten(args)
        flat = [constrain(part.mesh, x, spec) for x, spec in zip(flat, specs, strict=True)]
        leaves = jax.tree.leaves(params)
        trainable = [x for leaf, x in zip(part.leaves, leaves, strict=True) if leaf.trainable]
        args, arg_specs = treedef.unflatten(flat), treedef.unflatten(specs)
        return jax.value_and_grad(on_batch)(trainable, leaves, args, arg_specs)

    trainable = [leaf for leaf in part.leaves if leaf.trainable]
    global_loss, global_grads = run_globally(
        run, part.mesh, params, args,
        out_specs=(P(), [leaf.model_spec for leaf in trainable]),
    )  # fmt: skip
    grads = [
        g for leaf, g in zip(part.leaves, jax.tree.leaves(grads), strict=True) if leaf.trainable
    ]
    widest = max([jnp.finfo(x.dtype).eps for x in [loss, *grads]])
    tolerance = float(np.sqrt(np.float64(widest)))
    pairs = {leaf.path: pair for leaf, *pair in zip(trainable, grads, global_grads, strict=True)}
    total = np.sqrt(sum(_norm(b) ** 2 for _, b in pairs.values()))
    errors = {"loss": _norm(loss, global_loss) / max(_norm(global_loss), tolerance)}
    for path, (a, b) in pairs.items():
        # What is rounding noise beside the whole gradient is no difference.
        floor = max(tolerance * total, float(np.finfo(np.float64).tiny))
        errors[path] = _norm(a, b) / max(_norm(b), floor)
    report = CheckReport(float(loss), float(global_loss), errors, tolerance)
    if all(error <= tolerance for error in errors.values()):
        return report
    raise ValueError(
        "check: the loss means something else on parts of the batch than on the whole of it.\n"
        f"{report}\n{_likely_cause(report, part, args, options)}"
    )


def _likely_cause(report: CheckReport, part: Partition, args: Any, options: Any) -> str:
    """What most probably makes the difference, and the remedy."""
    parts = part.data_size * options.get("accumulate", 1)
    dtypes = [jnp.result_type(x) for x in jax.tree.leaves(args)]
    if any(jnp.issubdtype(dtype, jax.dtypes.prng_key) for dtype in dtypes):
        return (
            "Likely cause: random numbers. PRNG keys are folded with the device's index, so that "
            "dropout differs between devices. Check a deterministic loss."
        )
    for factor, have, want in [(parts, "sum", "sum"), (1 / parts, "mean", "mean")]:
        if np.isclose(report.loss * factor, report.global_loss, rtol=report.tolerance):
            return (
                f"Likely cause: the loss is a {have} over examples. Pass "
                f'reduction="{want}" to value_and_grad.'
            )
    return (
        "Likely cause: the loss is no mean over examples. A mean over unequal masks (padding "
        'tokens): return (loss_sum, weight) and pass reduction="weighted". A loss that couples '
        "examples (batch normalisation in training, contrastive losses, expert balancing): use "
        "plain jax.value_and_grad under jit with zerojax.zero, which sees the global batch."
    )


def _norm(a: Any, b: Any = 0.0) -> float:
    """The norm of a difference, in float64 on the host."""
    a, b = (np.asarray(x).astype(np.complex128) for x in (a, b))
    return float(np.linalg.norm((a - b).ravel()))
