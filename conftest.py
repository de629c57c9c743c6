"""Eight CPU devices for every test and doctest."""

import importlib.metadata
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

# Before jax is imported, and for the processes that tests start. Programs run once or twice here:
# without LLVM's optimizations they compile a third faster, without fusion emitters a third more.
os.environ["JAX_PLATFORMS"] = "cpu"
flags = ["--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"]
if importlib.metadata.version("jax") < "0.11":  # later ones do not know the flag
    flags.append("--xla_cpu_use_fusion_emitters=false")
for flag in flags:
    if flag.partition("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()

import jax
import pytest
from jax import numpy as jnp

import zerojax


def pytest_configure(config: pytest.Config) -> None:
    if cache := getattr(config, "cache", None):  # compiling is most of the tests' work
        jax.config.update("jax_compilation_cache_dir", str(cache.mkdir("jax")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        # Or the text of a compiled program may show the names and lines of an equal one.
        jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    if jax.device_count() != 8:
        raise pytest.UsageError(
            f"the tests need 8 CPU devices and jax found {jax.device_count()}: "
            f"unset XLA_FLAGS (it is {os.environ['XLA_FLAGS']!r})"
        )


@pytest.fixture(autouse=True, scope="session")
def _doctest_names(doctest_namespace: dict[str, object]) -> None:
    doctest_namespace.update(jax=jax, jnp=jnp, zerojax=zerojax)


MAPS = Path("/proc/self/maps")
finished = itertools.count(1)


@pytest.fixture(autouse=True)
def _few_memory_maps() -> Iterator[None]:
    """Lets go of old programs: XLA maps memory for each, and crashes at Linux's 65,530 maps."""
    yield
    if next(finished) % 10 == 0 and MAPS.exists() and MAPS.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
