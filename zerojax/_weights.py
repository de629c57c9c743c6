"""Weights as one safetensors file: read into their shards, written from a checkpoint."""

import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import NamedSharding

from zerojax._leaf_plan import LeafPlan
from zerojax._partition import Partition
from zerojax._specs import is_inexact, raise_all
from zerojax._tables import progress

# Names of dtypes in the format, https://github.com/huggingface/safetensors#format
DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32",
    "int32": "I32", "uint64": "U64", "int64": "I64", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "bfloat16": "BF16", "float16": "F16", "float32": "F32",
    "float64": "F64", "complex64": "C64",
}  # fmt: skip


def load_safetensors(
    path: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    part: Partition,
    *,
    rename: Callable[[str], str] | None = None,
    ignore: Collection[str] = (),
) -> Any:
    """Places pretrained weights leaf by leaf.

    The host needs memory for about one leaf at a time, the devices for their shards. Floating
    weights are cast to the dtypes of the plan.

    Args:
      path: the file, or the files that together hold the weights.
      part: the plan.
      rename: from a parameter's name, its keys joined by dots as in `layers.0.up`, to its name in
        the file. Two parameters may have the same.
      ignore: names in the file that no parameter needs.

    Returns:
      The parameters, as `part.place` gives them.

    Raises:
      ValueError: names are missing from the file, it has others, a shape differs, or a dtype is
        floating on one side only.

    >>> import numpy as np, pathlib, tempfile
    >>> from safetensors.numpy import save_file
    >>> part = zerojax.partition({"w": jnp.ones((16, 3))}, jax.make_mesh((8,), ("data",)), stage=3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "model.safetensors")
    ...     save_file({"model.w": np.ones((16, 3), np.float32)}, file)
    ...     params = zerojax.checkpoint.load_safetensors(file, part, rename="model.{}".format)
    >>> params["w"].addressable_shards[0].data.shape
    (2, 3)
    """
    from safetensors import safe_open

    paths = [path] if isinstance(path, str | os.PathLike) else list(path)
    files = {}
    for each in paths:
        with safe_open(each, framework="numpy") as file:
            files |= dict.fromkeys(file.keys(), each)
    tree = part.treedef.unflatten(part.leaves)
    names = [
        (rename or str)(jax.tree_util.keystr(path, simple=True, separator="."))
        for path, _ in jax.tree.leaves_with_path(tree)
    ]
    problems = []
    for leaf, name in zip(part.leaves, names, strict=True):
        if name not in files:
            problems.append(f"  {leaf.path}: the file has no {name!r}")
            continue
        with safe_open(files[name], framework="numpy") as file:
            there = file.get_slice(name)
            shape, dtype = tuple(there.get_shape()), there.get_dtype()
        floating = dtype[0] in "FB" and dtype != "BOOL"
        if shape != leaf.shape or floating != is_inexact(leaf.dtype):
            came = f"{dtype}{list(shape)}"
            problems.append(
                f"  {leaf.path}: expected {leaf.dtype}{list(leaf.shape)}, {name!r} is {came}"
            )
    extra = sorted(files.keys() - {*names} - {*ignore})
    problems += [f"  {name!r}: no parameter has this name" for name in extra]
    raise_all(
        f"load_safetensors: the weights in {', '.join(map(str, paths))} are not those of this "
        "partition. Pass rename=, from a parameter's name to the file's, and ignore=",
        problems,
    )
    placed = []
    pairs = list(zip(part.leaves, names, strict=True))
    for leaf, name in progress(pairs, "placing weights"):
        with safe_open(files[name], framework="numpy") as file:
            sharding = NamedSharding(part.mesh, part.param_spec(leaf))
            placed.append(_read(file, name, leaf, part.param_shape(leaf), sharding))
    return part.treedef.unflatten(placed)


def _read(
    file: Any, name: str, leaf: LeafPlan, stored: tuple[int, ...], sharding: NamedSharding
) -> jax.Array:
    """An array of a file, of which each device gets its block, padded where the plan says so."""
    devices = defaultdict(list)
    for device, index in sharding.addressable_devices_indices_map(stored).items():
        bounds = (x.indices(n)[:2] for x, n in zip(index or (), stored, strict=True))
        devices[tuple(bounds)].append(device)
    arrays = []
    for bounds, same in devices.items():
        block = np.zeros([b - a for a, b in bounds], leaf.dtype)
        there = [slice(a, min(b, n)) for (a, b), n in zip(bounds, leaf.shape, strict=True)]
        if not there:
            block[()] = file.get_tensor(name)
        elif all(x.start < x.stop for x in there):
            block[tuple(slice(x.stop - x.start) for x in there)] = file.get_slice(name)[*there]
        arrays += jax.block_until_ready([jax.device_put(block, device) for device in same])
    return jax.make_array_from_single_device_arrays(stored, sharding, arrays)


def consolidate(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: Any = jnp.float32,
    rename: Callable[[str], str] | None = None,
    tied: Mapping[str, str] | None = None,
) -> list[str]:
    """Writes the weights of a checkpoint as one safetensors file, leaf by leaf.

    Needs no devices but the host, whose memory holds about one leaf at a time. The file appears
    when it is complete. Of several processes let one call it: it waits for no other, and each that
    calls it writes the whole file.

    Args:
      checkpoint: the directory of a step, or that of a `CheckpointManager`, for its latest one.
      out: the file to write.
      dtype: of floating weights; a weight that is saved in another one is taken from its master
        copy, if it has one. `None` keeps the weights as they are saved.
      rename: from a parameter's name, its keys joined by dots as in `layers.0.up`, to its name in
        the file.
      tied: further names in the file and the names there that they share the weights of, such as
        `{"lm_head.weight": "embed.weight"}`. The format has no sharing, so they are written again.

    Returns:
      The names that were written.

    Raises:
      FileNotFoundError: there is no checkpoint.
      ValueError: two weights have one name, a name in `tied` is unknown, or the format has no such
        dtype.

    >>> import pathlib, tempfile, orbax.checkpoint as ocp
    >>> with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
    ...     step, file = pathlib.Path(folder, "step"), pathlib.Path(folder, "model.safetensors")
    ...     checkpointer.save(step, {"params": {"w": jnp.ones((16, 3))}})
    ...     checkpointer.wait_until_finished()
    ...     zerojax.checkpoint.consolidate(step, file)
    ['w']
    """
    import orbax.checkpoint as ocp

    directory = item_directory(checkpoint)
    saved = saved_arrays(directory)
    params = [name[1:] for name in saved if name[0] == "params"]
    dotted = [(rename or str)(".".join(name)) for name in params]
    tied = dict(tied or {})
    problems = [f"  {name}: {n} weights" for name, n in Counter([*dotted, *tied]).items() if n > 1]
    problems += [f"  {a}: there is no {b}" for a, b in tied.items() if b not in dotted]
    sources = dict(zip(dotted, (_source(saved, name, dtype) for name in params), strict=True))
    sources |= {name: sources.get(other) for name, other in tied.items()}
    entries = {}
    for name, source in sources.items():
        if source is not None:
            shape, own = saved[source].shape, jnp.dtype(saved[source].dtype)
            own = jnp.dtype(dtype) if dtype is not None and is_inexact(own) else own
            entries[name] = (tuple(shape), own)
            if str(own) not in DTYPES:
                problems.append(f"  {name}: safetensors has no {own}")
    raise_all(f"consolidate: {directory} cannot be written to {out}", problems)

    leaves, treedef = jax.tree.flatten(ocp.StandardCheckpointHandler().metadata(directory).tree)
    handler = ocp.PyTreeCheckpointHandler()  # a Checkpointer would wait for all processes

    def read(name: str) -> np.ndarray:
        wanted = saved[sources[name]].name
        item = [x if x.name == wanted else ocp.PLACEHOLDER for x in leaves]
        as_numpy = treedef.unflatten([ocp.RestoreArgs(restore_type=np.ndarray)] * len(leaves))
        args = ocp.args.PyTreeRestore(treedef.unflatten(item), restore_args=as_numpy)
        restored = jax.tree.leaves(handler.restore(directory, args=args))
        (value,) = (x for x in restored if x is not ocp.PLACEHOLDER)
        return value.astype(entries[name][1], copy=False)

    _write(Path(out), entries, read)
    handler.close()
    return list(entries)


def _source(saved: dict[tuple[str, ...], Any], name: tuple[str, ...], dtype: Any) -> Any:
    """Where to read a parameter: its master copy, if that has bits to add."""
    own = ("params", *name)
    if dtype is None or jnp.dtype(saved[own].dtype) == jnp.dtype(dtype):
        return own
    for other, array in saved.items():
        prefix = other[: -len(name) - 1]
        # The fields of a MasterState.
        if (
            other == (*prefix, "master", *name)
            and prefix[:1] == ("opt_state",)
            and array.shape == saved[own].shape
            and {x[len(prefix)] for x in saved if x[: len(prefix)] == prefix} == {"master", "inner"}
        ):
            return other
    return own


def _write(
    out: Path, entries: dict[str, tuple[tuple[int, ...], Any]], read: Callable[[str], np.ndarray]
) -> None:
    """Writes the format: the length of a JSON header, the header, and the arrays one by one."""
    # The widest first, so that every array is aligned.
    names = sorted(entries, key=lambda name: -entries[name][1].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        shape, dtype = entries[name]
        begin, end = end, end + int(np.prod(shape, dtype=int)) * dtype.itemsize
        header[name] = {
            "dtype": DTYPES[str(dtype)], "shape": list(shape), "data_offsets": [begin, end]
        }  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    partial = out.with_name(f"{out.name}.{jax.process_index()}.partial")
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in progress(names, f"writing {out.name}"):
            file.write(np.ascontiguousarray(read(name)).reshape(-1).view(np.uint8).data)
    partial.replace(out)


def item_directory(path: str | os.PathLike[str], step: int | None = None) -> Any:
    """The directory of a saved tree, given itself or its step, or a manager's and a step."""
    import orbax.checkpoint as ocp
    from etils import epath

    path = epath.Path(path).absolute()
    found = [] if step is not None else _items(path)
    if not found:
        steps = {
            ocp.path.step.step_from_checkpoint_name(p.name): p
            for p in ocp.path.step.checkpoint_steps_paths(path)
        }
        step = max(steps, default=None) if step is None else step
        found = _items(steps[step]) if step in steps else []
    if len(found) == 1:
        return found[0]
    which = f"step {step}" if step is not None else "a checkpoint"
    raise FileNotFoundError(
        f"expected one tree as {which} in {path}, found {[p.name for p in found]}."
    )


def _items(path: Any) -> list[Any]:
    """Orbax's checkpointers save a tree in this directory, its managers and its v1 in one below."""
    folders = [path, *path.iterdir()] if path.exists() else []
    return [folder for folder in folders if (folder / "_METADATA").exists()]


def saved_arrays(directory: Any) -> dict[tuple[str, ...], Any]:
    """Shape and dtype of each array of a checkpoint, by name."""
    import orbax.checkpoint as ocp

    tree = ocp.StandardCheckpointHandler().metadata(directory).tree
    flat = ocp.tree.to_flat_dict(tree)
    return {name: x for name, x in flat.items() if getattr(x, "shape", None) is not None}
