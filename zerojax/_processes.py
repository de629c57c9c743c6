"""Values that each process holds for itself, and the arrays of all processes made of them."""

import zlib
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax._specs import raise_all


def to_global(x: Any, sharding: NamedSharding) -> jax.Array:
    """A global array from one, or from a value that each process holds for itself.

    For the latter `jax.device_put` would send the values of all processes to every device, to
    compare them (in which nan differs from nan), and refuses committed arrays.
    """
    if not is_local(x, sharding.mesh):
        return jax.device_put(x, sharding)
    x = x if _is_key(x) else np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def check_equal(tree: Any, mesh: Mesh | AbstractMesh) -> None:
    """Raises if a value that each process holds for itself is not the same in all of them."""
    leaves = jax.tree.leaves_with_path(tree)
    local = {jax.tree_util.keystr(path): x for path, x in leaves if is_local(x, mesh)}
    if not local:
        return
    sums = np.array([_checksum(x) for x in local.values()], np.uint32)
    rows = jax.make_array_from_callback(  # for each device those of its process
        (mesh.size, len(sums)), NamedSharding(mesh, P(mesh.axis_names)), lambda _: sums[None]
    )
    differs = np.asarray(jax.jit(_differs, out_shardings=NamedSharding(mesh, P()))(rows))
    raise_all(
        "these values are not the same in every process, as they must be if they stand for a whole "
        "array. Make them from the same seed or file, or a global array of each process's part: "
        "jax.make_array_from_process_local_data",
        [f"  {path}" for path, differ in zip(local, differs, strict=True) if differ],
    )


def check_global(args: Any, mesh: Mesh | AbstractMesh) -> None:
    """Raises if an array in the arguments of a jitted step is held by each process for itself.

    `jax.jit` would take it for the whole array, and drop what belongs to the others' devices.
    """
    raise_all(
        "in several processes arrays must be global: jax.jit takes from what a process holds for "
        "itself only its own devices' part of a whole. Make one of each process's part with "
        "jax.make_array_from_process_local_data, or with jax.device_put(x, NamedSharding(mesh, "
        "PartitionSpec())) of what is the same in all",
        [
            f"  args{jax.tree_util.keystr(path)}: {x.dtype}{list(x.shape)}"
            for path, x in jax.tree.leaves_with_path(args)
            if np.ndim(x) and is_local(x, mesh)
        ],
    )


def to_host(x: Any) -> np.ndarray:
    """The whole of an array or scalar, in every process."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        assert isinstance(x.sharding, NamedSharding)
        x = jax.device_put(x, NamedSharding(x.sharding.mesh, P()))
    return np.asarray(x)


def is_local(x: Any, mesh: Mesh | AbstractMesh) -> bool:
    """Whether each process holds a value for itself, on a mesh of several."""
    if isinstance(x, Tracer) or isinstance(mesh, AbstractMesh) or not mesh.is_multi_process:
        return False
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _checksum(x: Any) -> int:
    x = np.ascontiguousarray(jax.random.key_data(x) if _is_key(x) else x)
    return zlib.crc32(x.reshape(-1).view(np.uint8))


def _differs(rows: jax.Array) -> jax.Array:
    return rows.max(0) != rows.min(0)
