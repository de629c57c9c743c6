"""Reads the collectives of a compiled program, with the trip counts of the loops around them."""

import dataclasses
import math
import re

import numpy as np

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^(?:ROOT )?%?[\w.-]+ = (.+?) ([a-z][a-z0-9-]*)\((.*)$")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_ARRAY = re.compile(r"\b(pred|bf16|[a-z]+[0-9]+)\[([0-9,]*)\]")
_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[(.*?)\]"
    r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?\s*\{(.*?)\}"
)
_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
      kind: such as "reduce-scatter".
      elements: of the whole array that it reduces or gathers, over one group.
      axes: the mesh axes along which the devices of a group differ.
      trips: how often one step runs it.
      in_loop: whether a loop surrounds it.
    """

    kind: str
    elements: int
    axes: frozenset[str]
    trips: int
    in_loop: bool


def collectives(compiled, mesh) -> list[Collective]:
    """The collectives of a compiled program on a mesh."""
    computations, name, entry = {}, None, None
    for line in compiled.as_text().splitlines():
        line = line.strip()
        if match := _COMPUTATION.match(line):
            name = match[1]
            computations[name] = []
            entry = name if line.startswith("ENTRY") else entry
        elif name and (match := _INSTRUCTION.match(line)):
            computations[name].append(match.groups())
    found = []

    def walk(name: str, trips: int, in_loop: bool) -> None:
        for type_, op, rest in computations[name]:
            kind = op.removesuffix("-start")
            if kind in _KINDS:
                shapes = [
                    math.prod(map(int, filter(None, dims.split(","))))
                    for _, dims in _ARRAY.findall(type_)
                ]
                groups = _groups(rest, mesh.size)
                elements = sum(shapes) * (groups.shape[1] if kind == "reduce-scatter" else 1)
                if op.endswith("-start") and kind == "all-gather":
                    elements = max(shapes)
                found.append(Collective(kind, elements, _axes(groups, mesh), trips, in_loop))
            inside = trips
            if op == "while":
                inside *= int(re.search(r'"known_trip_count":\{"n":"(\d+)"', rest)[1])
            called = _CALLED.findall(rest)
            for names in _BRANCHES.findall(rest):
                called += [n.strip().lstrip("%") for n in names.split(",")]
            for inner in called:
                walk(inner, inside, in_loop or op == "while")

    walk(entry, 1, False)
    return found


def _groups(text: str, devices: int) -> np.ndarray:
    """The replica groups of an instruction, a row for each group."""
    if match := re.search(r"replica_groups=\{\{(.*?)\}\}", text):
        return np.array([list(map(int, g.split(","))) for g in match[1].split("},{")])
    if match := re.search(r"source_target_pairs=\{\{(.*?)\}\}", text):
        return np.array([list(map(int, g.split(","))) for g in match[1].split("},{")])
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        return _iota(match[3], match[4]).reshape(int(match[1]), -1)
    if match := _MESH_GROUPS.search(text):
        axes = re.findall(r"'(\w+)'=(\d+)", match[1])
        names, sizes = [a for a, _ in axes], [int(n) for _, n in axes]
        ids = _iota(match[2], match[3]) if match[2] else np.arange(devices)
        inside = [names.index(a) for a in re.findall(r"'(\w+)'", match[4])]
        outside = [i for i in range(len(names)) if i not in inside]
        size = math.prod(sizes[i] for i in inside)
        return ids.reshape(sizes).transpose(outside + inside).reshape(-1, size)
    if re.search(r"replica_groups=\{\}", text):
        return np.arange(devices)[None]
    raise ValueError(f"no replica groups in {text}")


def _iota(dims: str, order: str | None) -> np.ndarray:
    """Device ids as XLA writes them: `[4,2]T(1,0)` is an iota, reshaped and transposed."""
    dims = [int(d) for d in dims.split(",")]
    ids = np.arange(math.prod(dims)).reshape(dims)
    return ids.transpose([int(d) for d in order.split(",")]) if order else ids


def _axes(groups: np.ndarray, mesh) -> frozenset[str]:
    where = np.array(np.unravel_index(groups, mesh.axis_sizes))
    differs = (where != where[:, :, :1]).any(axis=(1, 2))
    return frozenset(name for name, d in zip(mesh.axis_names, differs, strict=True) if d)
