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
from zerojax._processes import to_host


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
      ValueError: something differs; names it, with the likely cause and the remedy. Or the loss
        communicates by itself (`manual_axes`).

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
    if options.get("manual_axes"):
        raise ValueError(
            "check: a loss that communicates over manual_axes runs in no other way, so there is "
            "nothing to compare it with. Check the same model without them, or on one device."
        )
    params = part.place(params)
    batch_specs = options.get("batch_specs")
    has_aux, reduction = options.get("has_aux", False), options.get("reduction", "mean")
    grad_fn = value_and_grad(loss_fn, part, **options)
    value, grads = grad_fn(params, *args)
    loss = value[0] if has_aux else value
    params, grads = part.gather(params), jax.tree.leaves(grads)
    trained, wire = grad_fn.options.trained, grad_fn.options.wire

    def on_batch(weights: dict[int, Any], flat: list[Any], args: Any, arg_specs: Any) -> Any:
        leaves = [
            wire.cast(leaf, weights.get(i, x))
            for i, (leaf, x) in enumerate(zip(part.leaves, flat, strict=True))
        ]
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
        args, arg_specs = treedef.unflatten(flat), treedef.unflatten(specs)
        weights = {i: leaves[i] for i in trained}
        return jax.value_and_grad(on_batch)(weights, leaves, args, arg_specs)

    global_loss, global_grads = run_globally(
        run, part.mesh, params, args,
        out_specs=(P(), {i: part.leaves[i].model_spec for i in trained}),
    )  # fmt: skip
    dtypes = [loss.dtype, *(x.dtype for x in grads), *map(wire.dtype, part.leaves)]
    widest = max(jnp.finfo(dtype).eps for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact))
    tolerance = float(np.sqrt(np.float64(widest)))
    pairs = {part.leaves[i].path: (grads[i], global_grads[i]) for i in trained}
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
    """The norm of a difference, in float64 on the host; `a` may be padded."""
    a, b = (to_host(x).astype(np.complex128) for x in (a, b))
    a = a[tuple(map(slice, b.shape))] if b.ndim else a
    return float(np.linalg.norm((a - b).ravel()))
