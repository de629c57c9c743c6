"""Options of XLA that make its schedules hide communication."""

import functools
from collections.abc import Mapping
from typing import Any

import jax

from zerojax._chips import chip_named

_MODE = "COLLECTIVE_PIPELINING_MODE_"  # flags take the names of modes without it


def xla_options(chip: str, *, stage: int = 1) -> dict[str, Any]:
    """The options with which XLA hides most of ZeRO's communication behind computation.

    Chosen by what they do in the schedules of a transformer that is scanned over its layers and
    calls `zerojax.unshard` there, on 8 and on 64 H100s; `benchmarks/h100_static.py` compares them
    with XLA's defaults. They were not timed on GPUs.

    To find out what the installed XLA knows this compiles an empty program: call it after
    `jax.distributed.initialize`.

    Args:
      chip: "a100", "h100", "h200" or "b200". All get what was chosen for H100s.
      stage: of the partition.

    Returns:
      Options that the installed XLA knows, by name; the others are left out. None at stage 0. For
      a step, `jax.jit(step, donate_argnums=(0, 1), compiler_options=options)`; for
      `zerojax.compile_for(..., xla_options=)`; or as `zerojax.xla_flags` in the environment.

    Raises:
      ValueError: the chip is unknown, or the stage is not 0, 1, 2 or 3.

    References:
      Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep
      Learning Models", 2023 (scheduling starts early and dones late).

    >>> options = zerojax.xla_options("h100", stage=3)
    >>> options["xla_gpu_enable_latency_hiding_scheduler"]
    True
    >>> jax.jit(lambda x: x + 1, compiler_options=options)(1).item()
    2
    """
    chip_named(chip)
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"xla_options: stage must be 0, 1, 2 or 3, got {stage!r}.")
    if stage == 0:  # the defaults hide more of its all-reduces: on 8, 14.9 are exposed, else 30.1
        return {}
    # Milliseconds are exposed communication with jax 0.12, by the model of the audit: with the
    # other options, and without this one. On 8 a step sends for 21 at stage 1, 37 at 2, 100 at 3.
    options: dict[str, Any] = {
        # Moves starts up and dones down. Stage 1 on 8: 2.7; with neither this nor the estimate
        # below, which turns it on, nothing is hidden: 21.5.
        "xla_gpu_enable_latency_hiding_scheduler": True,
        # An estimate of times from data sheets, by which it hides less. Stage 1 on 64: 11.9, with
        # the estimate 14.8. Stage 3 on 8: 8.0, with it 12.8. But stage 2 on 8 then copies for 6 ms,
        # and holds 0.8 GB more (docs/overlap.md).
        "xla_gpu_enable_analytical_sol_latency_estimator": False,
        # How many transfers may be on their way at once. Stage 3 on 64: 28, one at a time 112.
        # Stage 1 on 8: 2.7, one at a time 4.1, four 4.6.
        "xla_gpu_experimental_parallel_collective_overlap_limit": 4 if stage == 3 else 2,
    }
    if stage == 3:
        # Pipelined, a layer's gradients are sent in the next iteration, beside its gathers. On 8:
        # 8.0, pipelined 28.7. At stage 1 nothing else is sent there, and that hides more.
        options["xla_gpu_pipeline_reduce_scatter"] = f"{_MODE}OFF"
        options["xla_gpu_enable_pipelined_reduce_scatter"] = False  # its name before jax 0.12
        # Combined, a layer's gradients wait for the last of them. On 64: 28, combined 41. A
        # threshold of a layer for gathers makes that 113.
        options["xla_gpu_reduce_scatter_combine_threshold_bytes"] = 1
    return {name: value for name, value in options.items() if _is_known(name, value)}


def xla_flags(options: Mapping[str, Any]) -> str:
    """The same options as text for the environment variable `XLA_FLAGS`, for the whole process.

    Args:
      options: from `xla_options`.

    Returns:
      Flags, with spaces between them. XLA reads them once, when jax first uses a device.

    >>> zerojax.xla_flags({"xla_gpu_enable_latency_hiding_scheduler": True})
    '--xla_gpu_enable_latency_hiding_scheduler=true'
    """
    texts = {
        name: str(value).lower() if isinstance(value, bool) else str(value).removeprefix(_MODE)
        for name, value in options.items()
    }
    return " ".join(f"--{name}={text}" for name, text in texts.items())


@functools.cache
def _is_known(name: str, value: Any) -> bool:
    """Whether the installed XLA has an option; it refuses a program with one that it has not."""
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError:
        return False
    return True
