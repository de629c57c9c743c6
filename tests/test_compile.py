"""Compile-only devices, and the compiler in its own process."""

import importlib.util
import signal
import subprocess

import jax
import numpy as np
import optax
import pytest
from jax import numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from tests.conftest import make_mesh
from zerojax import _compile
from zerojax._chips import CHIPS


@pytest.mark.parametrize("missing", ["jax_cuda", "flatbuffers"])
@pytest.mark.parametrize("call", ["topology", "compile_for"])
def test_the_missing_extra_is_named_with_its_command(monkeypatch, missing, call):
    calls = {
        "topology": lambda: zerojax.topology("h100"),
        "compile_for": lambda: zerojax.compile_for(lambda x: x, 1.0, topology=jax.devices()),
    }

    def find_spec(name):
        return None if name.startswith(missing) else object()

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(ImportError, match=rf'^{call}: .*pip install "zerojax\[gpu-compile\]"$'):
        calls[call]()


@pytest.fixture
def pretend(monkeypatch):
    """The checks before the compiler are the same whether the extra is there or not."""
    monkeypatch.setattr(_compile, "_check_extra", lambda where: None)


@pytest.mark.parametrize(
    "chip, options, message",
    [
        ("h900", {}, "unknown chip 'h900': zerojax knows a100, b200, h100, h200."),
        ("h100", {"hosts": 0}, "hosts=0 and gpus_per_host=8 must be at least 1"),
        ("h100", {"gpus_per_host": 0}, "hosts=1 and gpus_per_host=0 must be at least 1"),
    ],
)
def test_a_topology_that_cannot_be(pretend, chip, options, message):
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        zerojax.topology(chip, **options)


@pytest.mark.parametrize("devices", [jax.devices(), np.array([]), ["h100"]])
def test_devices_that_are_no_topology(pretend, devices):
    with pytest.raises(ValueError, match=r"must be the devices that zerojax\.topology returned"):
        zerojax.compile_for(lambda x: x, 1.0, topology=devices)


def test_an_xla_that_has_given_up_on_gpus(pretend, monkeypatch):
    def get_topology_desc(**options):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(_compile.topologies, "get_topology_desc", get_topology_desc)
    with pytest.raises(RuntimeError, match="Set JAX_PLATFORMS=cpu in the environment"):
        zerojax.topology("h100")


def test_a_crash_is_reported_with_what_was_said_last(monkeypatch):
    stderr = (
        "I0101 starting\nF0101 12:00:00 1 kernel.cc:1] Check failed: no device\n*** stack ***\n"
    )

    def run(command, **options):
        return subprocess.CompletedProcess(command, -signal.SIGABRT, "", stderr)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(
        RuntimeError, match=r"ended with SIGABRT: F0101 .* Check failed: no device$"
    ):
        _compile._compile({}, b"")


def test_the_chips_are_in_order():
    for chip in CHIPS.values():
        assert f"device_memory_size: {chip.memory} " in chip.target_config().replace("\n", " ")
        assert 30e9 < chip.memory < 300e9 and 1e12 < chip.bandwidth < 10e12
    speeds = [CHIPS[name].flops for name in ("a100", "h100", "b200")]
    assert speeds == sorted(speeds)


# With the compiler.

gpu_compile = pytest.mark.gpu_compile


def on(mesh, shape, spec, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


@gpu_compile
def test_topologies():
    devices = zerojax.topology("h100", hosts=2, gpus_per_host=4)
    assert devices.shape == (8,) and [d.process_index for d in devices] == [0] * 4 + [1] * 4
    assert {d.device_kind for d in devices} == {CHIPS["h100"].device_name}
    for chip in CHIPS:
        assert zerojax.topology(chip, gpus_per_host=2)[1].device_kind == CHIPS[chip].device_name


@gpu_compile
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_training_step_for_h100s(axis_type):
    devices = zerojax.topology("h100", hosts=2, gpus_per_host=4)
    mesh = Mesh(devices.reshape(4, 2), ("data", "model"), axis_types=(axis_type,) * 2)
    params = {"w": jax.ShapeDtypeStruct((256, 512), np.float32)}
    part = zerojax.partition(params, mesh, {"w": P(None, "model")})
    tx = zerojax.zero(optax.adam(1e-3), part)

    def loss_fn(params, x):
        return jnp.mean(jnp.square(x @ params["w"]).astype(np.float32))

    step = zerojax.train_step(
        zerojax.value_and_grad(loss_fn, part, accumulate=2, compute_dtype=jnp.bfloat16), tx, part
    )
    arguments = (
        {"w": on(mesh, (256, 512), P(None, "model"))},
        zerojax.abstract_state(tx, part),
        on(mesh, (64, 256), P("data"), jnp.bfloat16),
    )
    program = zerojax.compile_for(step, *arguments, topology=devices)
    assert (program.chip, program.devices, program.fits) == ("h100", 8, True)
    size = 256 * 512 * 4 // 2  # of the parameter on a device
    state = 2 * size // 4 + 4
    memory = program.memory_analysis()
    assert memory.argument_size_in_bytes == size + state + 16 * 256 * 2
    assert memory.alias_size_in_bytes == size + state  # donated, as train_step does
    # Forward, and the gradient of the weights; 16 examples in two microbatches.
    assert program.flops == 2 * (2 * 16 * 256 * 256)
    report = zerojax.audit(program, mesh)
    report.check(zerojax.expected_communication(part, accumulate=2))
    for kind in ("reduce-scatter", "all-gather"):
        assert report.bytes(kind, "data") == size * 3 // 4
    assert any(c.asynchronous for c in report.collectives)


@gpu_compile
def test_a_plain_function_on_one_device_and_a_permuted_mesh():
    devices = zerojax.topology("a100", gpus_per_host=4)
    x = jax.ShapeDtypeStruct((128, 128), jnp.bfloat16)
    program = zerojax.compile_for(lambda x: x @ x, x, topology=devices)
    assert (program.devices, program.flops) == (1, 2 * 128**3)
    mesh = Mesh(devices[[3, 1, 2, 0]].reshape(2, 2), ("a", "b"))
    shapes = on(mesh, (128, 128), P("a", None)), on(mesh, (128,), P("b"))
    gather = jax.jit(lambda x, y: x + y, out_shardings=NamedSharding(mesh, P("a")))
    (c,) = zerojax.audit(zerojax.compile_for(gather, *shapes, topology=devices), mesh).collectives
    assert (c.kind, c.axes) == ("all-gather", ("b",))


@gpu_compile
def test_faults_of_the_compiler_are_errors_here(monkeypatch):
    devices = zerojax.topology("h100", gpus_per_host=2)
    x = jax.ShapeDtypeStruct((8,), np.float32)
    with pytest.raises(RuntimeError, match=r"XLA refused the program: .*'xla_no_such_option'"):
        zerojax.compile_for(jnp.sin, x, topology=devices, xla_options={"xla_no_such_option": 1})
    monkeypatch.setattr(_compile, "_XLA_FLAGS", "--xla_no_such_flag=1")  # XLA ends the process
    with pytest.raises(RuntimeError, match=r"the compiler's process .*--xla_no_such_flag"):
        zerojax.compile_for(jnp.sin, x, topology=devices)


@gpu_compile
def test_arguments_elsewhere():
    devices = zerojax.topology("h100")
    here, there = make_mesh("mesh8"), Mesh(devices, ("data",))
    x, y = on(here, (8,), P("data")), on(there, (8,), P("data"))
    for args in ((x,), (x, y)):
        with pytest.raises(ValueError, match=r"NamedShardings on one jax\.sharding\.Mesh over the"):
            zerojax.compile_for(lambda *xs: xs[0], *args, topology=devices)
