"""The devices among which a collective communicates, from all notations of XLA."""

import functools
import math
import re

import numpy as np

from zerojax._hlo import Instruction, integers

Groups = tuple[tuple[int, ...], ...]

_NOTATION = re.compile(
    r"(?:replica_groups|source_target_pairs)="
    r"(mesh\[.*?\](?:, *device_ids=\(.*?\)(?=\s*\{))?\s*\{[^}]*\}"
    r"|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
    r"|\{\{.*?\}\}|\{\})"
)
_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_MESH_AXIS = re.compile(r"'?([\w.-]+)'?=(\d+)")
_USED_AXIS = re.compile(r"'?([\w.-]+)'?(?::\((\d+)\)(\d+))?(?:,|$)")


def device_groups(instruction: Instruction, devices: int) -> Groups:
    """The groups of devices of a collective: each communicates within itself.

    Four notations mean the same, here for eight devices on a mesh `data=4, model=2`:
    `{{0,2,4,6},{1,3,5,7}}`, `[2,4]<=[4,2]T(1,0)` (an iota, reshaped to `[4,2]`, transposed,
    reshaped to a row for each group), `mesh['data'=4,'model'=2] {'data'}`, and `{}` for all devices
    in one group. A collective permute has `source_target_pairs` instead.

    Args:
      instruction: a collective.
      devices: the number of devices of the program.

    Returns:
      The numbers of the devices of each group, or the pairs; devices count as in the program,
      which for jax is their place in the flattened mesh.

    Raises:
      ValueError: the instruction has none of these.
    """
    match = _NOTATION.search(instruction.attributes)
    if match is None:
        raise ValueError(
            f"the collective {instruction.name!r} has no replica groups that zerojax can read: "
            f"{instruction.attributes[:120]!r}."
        )
    return _groups(match[1], devices)


@functools.lru_cache(maxsize=256)
def _groups(text: str, devices: int) -> Groups:
    if text == "{}":
        return (tuple(range(devices)),)
    if text.startswith("{{"):
        return tuple(map(integers, text[2:-2].split("},{")))
    if text.startswith("mesh"):
        return _rows(_mesh_groups(text, devices))
    shape = integers(text[1 : text.index("]")])
    return _rows(_device_ids(text.partition("<=")[2]).reshape(shape[0], -1))


def _mesh_groups(text: str, devices: int) -> np.ndarray:
    """Groups along some axes of a mesh, `'a':(2)4` being a part of size 4 of the axis `a`."""
    mesh, _, used = text[:-1].rpartition("{")
    axes, _, ids = mesh.partition("]")
    listed = re.search(r"device_ids=\((.*)\)", ids)
    order = _device_ids(listed[1]) if listed else np.arange(devices)
    sizes = [(name, int(n)) for name, n in _MESH_AXIS.findall(axes)]
    inside = {}
    for name, before, size in _USED_AXIS.findall(used):
        inside.setdefault(name, []).append((int(before or 1), int(size or dict(sizes)[name])))
    dims, used_dims = [], []
    for name, n in sizes:
        at = 1
        for before, size in sorted(inside.get(name, [])):
            dims += [before // at, size]
            used_dims.append(len(dims) - 1)
            at = before * size
        dims.append(n // at)
    rest = [dim for dim in range(len(dims)) if dim not in used_dims]
    width = math.prod(dims[dim] for dim in used_dims)
    return order.reshape(dims).transpose(rest + used_dims).reshape(-1, width)


def _device_ids(text: str) -> np.ndarray:
    """Device numbers as `[4,2]T(1,0)`: an iota, reshaped and transposed; or one by one."""
    match = _IOTA.fullmatch(text)
    if match is None:
        return np.array(integers(text.strip("[]")))
    shape = integers(match[1])
    ids = np.arange(math.prod(shape)).reshape(shape)
    return (ids.transpose(integers(match[3])) if match[3] else ids).reshape(-1)


def _rows(groups: np.ndarray) -> Groups:
    return tuple(tuple(map(int, row)) for row in groups)


@functools.lru_cache(maxsize=256)
def group_axes(groups: Groups, names: tuple[str, ...], sizes: tuple[int, ...]) -> tuple[str, ...]:
    """The mesh axes along which the devices of a group differ, in the order of the mesh."""
    if not names:
        return ()
    differs = np.zeros(len(sizes), bool)
    for group in groups:
        where = np.array(np.unravel_index(group, sizes))
        differs |= (where != where[:, :1]).any(axis=1)
    return tuple(name for name, d in zip(names, differs, strict=True) if d)
