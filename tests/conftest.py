"""What several test files need: float64, meshes by name, and a count of compilations."""

import contextlib
import math

import jax
import jax.monitoring
import pytest
from jax.sharding import AxisType

MESHES = {
    "mesh1": ((1,), ("data",)),
    "mesh8": ((8,), ("data",)),
    "mesh4x2": ((4, 2), ("data", "model")),
    "mesh2x4": ((2, 4), ("replica", "data")),
}


def make_mesh(name: str, axis_type: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    """A mesh of the table above, on as many of the eight devices as it needs."""
    sizes, names = MESHES[name]
    types = (axis_type,) * len(names)
    return jax.make_mesh(sizes, names, axis_types=types, devices=jax.devices()[: math.prod(sizes)])


@pytest.fixture
def x64():
    """Float64 for one test: what must be equal is then equal to 1e-12."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@contextlib.contextmanager
def compilations():
    """Collects the names of the functions that XLA compiles inside the block."""
    names = []

    def listen(event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(str(kwargs.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
