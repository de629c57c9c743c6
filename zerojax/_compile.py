"""GPU programs without a GPU: devices to plan on, and a compiler in a process of its own."""

import dataclasses
import functools
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.export
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax._chips import CHIPS, Chip, chip_named
from zerojax._hlo import parse
from zerojax._hlo_cost import Costs

# Without a device XLA cannot measure kernels; and that kernel's launch asks for one, and aborts.
_XLA_FLAGS = "--xla_gpu_autotune_level=0 --xla_gpu_unsupported_use_all_reduce_one_shot_kernel=false"
_PIP = 'pip install "zerojax[gpu-compile]"'


class MemoryStats(NamedTuple):
    """Bytes on each device, named as jax names them in `compiled.memory_analysis()`."""

    argument_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int
    temp_size_in_bytes: int
    generated_code_size_in_bytes: int


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A program that was compiled for a chip that need not be there.

    Attributes:
      text: the scheduled HLO, as `compiled.as_text()` gives it.
      memory: bytes on each device.
      chip: the chip's name, such as `"h100"`.
      devices: the number of devices.
    """

    text: str = dataclasses.field(repr=False)
    memory: MemoryStats
    chip: str
    devices: int

    def as_text(self) -> str:
        """The scheduled HLO."""
        return self.text

    def memory_analysis(self) -> MemoryStats:
        """Bytes on each device."""
        return self.memory

    @functools.cached_property
    def flops(self) -> int:
        """Operations of matrix products on each device, loops multiplied; one step."""
        module = parse(self.text)
        return Costs(module).computation(module.computations[module.entry]).flops

    @property
    def peak_bytes(self) -> int:
        """Bytes that a step needs on each device; a donated argument and its output count once."""
        memory = self.memory
        outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
        return memory.argument_size_in_bytes + outputs + memory.temp_size_in_bytes

    @property
    def fits(self) -> bool:
        """Whether that is less than the chip's memory."""
        return self.peak_bytes <= CHIPS[self.chip].memory


def topology(chip: str, *, hosts: int = 1, gpus_per_host: int = 8) -> np.ndarray:
    """Devices of a GPU cluster that is not there, to make a mesh of and to compile for.

    Needs the `gpu-compile` extra, and no GPU, driver or CUDA toolkit.

    Args:
      chip: "a100", "h100", "h200" or "b200".
      hosts: the number of hosts.
      gpus_per_host: the number of GPUs in each.

    Returns:
      The `hosts * gpus_per_host` devices, host by host, as a numpy array of one dim: for
      `jax.make_mesh(..., devices=devices)`, or reshaped for `jax.sharding.Mesh`.

    Raises:
      ValueError: the chip is unknown, or a number is not positive.
      ImportError: the extra is missing.
      RuntimeError: jax looked for GPUs before and was told that there can be none.

    >>> devices = zerojax.topology("h100", hosts=2)
    >>> mesh = jax.make_mesh((16,), ("data",), devices=devices)
    """
    found = chip_named(chip)
    if min(hosts, gpus_per_host) < 1:
        raise ValueError(
            f"topology: hosts={hosts} and gpus_per_host={gpus_per_host} must be at least 1."
        )
    _check_extra("topology")
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # read when the plugin starts
    try:
        described = topologies.get_topology_desc(
            platform="cuda", **_description(found, hosts, gpus_per_host)
        )
    except NotImplementedError as error:
        raise RuntimeError(
            "topology: jax found no CUDA driver and gave up on GPUs before zerojax could say that "
            "none are needed. Set JAX_PLATFORMS=cpu in the environment, or call zerojax.topology "
            "before anything that uses a device."
        ) from error
    return np.array(described.devices)


def compile_for(
    fn: Callable[..., Any],
    *abstract_args: Any,
    topology: Sequence[Any] | np.ndarray,
    xla_options: dict[str, Any] | None = None,
) -> CompiledProgram:
    """Compiles a function for the devices of a `topology`, in a process of its own.

    The function is traced and lowered here. The compiler runs in another Python process, because a
    fault in XLA ends the process that it happens in.

    Args:
      fn: the function; if it is `jax.jit`ted, what that donates is donated here too.
      *abstract_args: its arguments, as `jax.ShapeDtypeStruct`s with `NamedSharding`s on one mesh
        over these devices. Of arrays only shape and dtype count. Without any sharding it is a
        program for one device.
      topology: what `zerojax.topology` returned.
      xla_options: options of XLA by name, for this program.

    Returns:
      The compiled text, memory statistics, and the operations of its matrix products.

    Raises:
      ValueError: the devices are not from `topology`, or the arguments not on one mesh over them.
      ImportError: the `gpu-compile` extra is missing.
      RuntimeError: the compiler refused the program, or crashed; with what it said last.

    >>> devices = zerojax.topology("h100")
    >>> x = jax.ShapeDtypeStruct((8, 1024, 1024), jnp.bfloat16)
    >>> zerojax.compile_for(lambda x: x @ x, x, topology=devices).flops
    17179869184
    """
    _check_extra("compile_for")
    devices = np.asarray(topology).reshape(-1)
    chip = _chip_of(devices)
    leaves, treedef = jax.tree.flatten(abstract_args)
    leaves = [_without_data(x) for x in leaves]
    mesh = _common_mesh(leaves, devices)
    if mesh is None:  # a program for one device
        mesh = Mesh(devices[:1], ("device",))
        one = NamedSharding(mesh, PartitionSpec())
        leaves = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one) for x in leaves]
    jitted = fn if isinstance(fn, jax.stages.Wrapped) else jax.jit(fn)
    traced = jitted.trace(*treedef.unflatten(leaves))

    def flat(*leaves: Any) -> Any:  # the other process need not know the types of the trees
        return jax.tree.leaves(jitted(*treedef.unflatten(leaves)))

    # Arguments that are not read take memory too.
    exported = jax.export.export(jax.jit(flat, keep_unused=True), platforms=["cuda"])(*leaves)
    hosts = len({device.process_index for device in devices})
    infos = jax.tree.leaves(traced.args_info)
    request = {
        "name": re.sub(r"\W", "_", getattr(fn, "__name__", "program")),
        "topology": _description(chip, hosts, len(devices) // hosts),
        "devices": np.vectorize(lambda device: device.id, otypes=[int])(mesh.devices).tolist(),
        "axis_names": mesh.axis_names,
        "arguments": [
            x.sharding and {"spec": tuple(x.sharding.spec), "memory_kind": x.sharding.memory_kind}
            for x in leaves
        ],
        "donated": [i for i, info in enumerate(infos) if info.donated],
        "xla_options": xla_options or {},
    }
    memory, text = _compile(request, bytes(exported.serialize()))
    return CompiledProgram(text, memory, chip.name, mesh.size)


def _chip_of(devices: np.ndarray) -> Chip:
    """The chip that devices of a topology are."""
    chips = {chip.device_name: chip for chip in CHIPS.values()}
    kinds = {getattr(device, "device_kind", str(device)) for device in devices}
    if len(kinds) != 1 or not kinds <= chips.keys():
        raise ValueError(
            "compile_for: topology must be the devices that zerojax.topology returned, got "
            f"{sorted(kinds)}."
        )
    return chips[kinds.pop()]


def _without_data(x: Any) -> jax.ShapeDtypeStruct:
    """An argument's shape and dtype; its sharding only if it is abstract already."""
    sharding = x.sharding if isinstance(x, jax.ShapeDtypeStruct) else None
    x = jax.eval_shape(lambda x: x, x)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _common_mesh(leaves: Sequence[jax.ShapeDtypeStruct], devices: np.ndarray) -> Mesh | None:
    """The mesh that all arguments are on which are on any."""
    shardings = [x.sharding for x in leaves if x.sharding is not None]
    meshes = {s.mesh if isinstance(s, NamedSharding) else s for s in shardings}
    ours = [m for m in meshes if isinstance(m, Mesh) and set(m.devices.flat) <= {*devices}]
    if len(meshes) > 1 or len(ours) != len(meshes):
        raise ValueError(
            "compile_for: the arguments must have NamedShardings on one jax.sharding.Mesh over the "
            "devices of the topology, and are on " + "; ".join(sorted(map(str, meshes)))
        )
    return ours[0] if ours else None


def _compile(request: dict[str, Any], program: bytes) -> tuple[MemoryStats, str]:
    """Runs the compiler in its own process, which gets the request in a folder."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "XLA_FLAGS": _XLA_FLAGS,
    }
    with tempfile.TemporaryDirectory(prefix="zerojax-") as name:
        folder = Path(name)
        (folder / "request.json").write_text(json.dumps(request))
        (folder / "program.bin").write_bytes(program)
        worker = Path(__file__).with_name("_compile_worker.py")
        result = subprocess.run(
            [sys.executable, "-P", str(worker), name],
            env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        )  # fmt: skip
        if result.returncode == 0:
            sizes = json.loads((folder / "memory.json").read_text())
            memory = MemoryStats(**{f"{k}_size_in_bytes": n for k, n in sizes.items()})
            return memory, (folder / "program.hlo").read_text()
        refused = folder / "error.txt"
        if refused.exists():
            message = refused.read_text().strip()
            raise RuntimeError(f"compile_for: XLA refused the program: {message}")
    said = [line.strip() for line in result.stderr.splitlines() if line.strip()]
    fatal = [line for line in said if re.match(r"F\d{4} ", line) or "Unknown flag" in line]
    status = result.returncode
    ended = f"ended with {signal.Signals(-status).name}" if status < 0 else f"exited with {status}"
    raise RuntimeError(
        f"compile_for: the compiler's process {ended}: {(fatal or said or ['it said nothing'])[-1]}"
    )


def _description(chip: Chip, hosts: int, gpus_per_host: int) -> dict[str, str]:
    """What jax wants to know of a topology: `topology` is slices x hosts x GPUs of each."""
    return {
        "topology_name": chip.name,
        "topology": f"1x{hosts}x{gpus_per_host}",
        "target_config": chip.target_config(),
    }


def _check_extra(where: str) -> None:
    """Raises unless jax's CUDA plugin, and what `jax.export` needs, are installed."""
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    found = any(map(importlib.util.find_spec, plugins))
    if not found or importlib.util.find_spec("flatbuffers") is None:
        raise ImportError(
            f"{where}: needs jax's CUDA compiler, but no GPU and no CUDA toolkit. Install it with: "
            f"{_PIP}"
        )
