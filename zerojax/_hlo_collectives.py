"""The collectives of a scheduled program: what each sends, how often, and beside what work."""

import dataclasses
import re

from zerojax._hlo import Array, Computation, Instruction, Module
from zerojax._hlo_cost import Costs, Work
from zerojax._hlo_groups import Groups, device_groups, group_axes

_OP_NAME = re.compile(r'op_name="([^"]*)"')


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program, as one device sees it.

    Attributes:
      name: of its instruction; `place` names the computation that it stands in.
      kind: such as `"reduce-scatter"`.
      arrays: what it reduces or gathers, whole over one group; several if XLA combined them.
      axes: the mesh axes along which the devices of a group differ; empty without a mesh.
      groups: the devices that communicate with each other, or the pairs of a permute.
      trips: how often one step runs it: the product of the trips of the loops around it.
      in_loop: whether a loop surrounds it.
      asynchronous: whether other work can run between its start and its done.
      flops: operations of the matrix products scheduled between them, in one run.
      memory_bytes: bytes that work reads and writes there, in one run.
      source: the operation in the user's program, as XLA noted it.
      place: the computation that it stands in.
    """

    name: str
    kind: str
    arrays: tuple[Array, ...]
    axes: tuple[str, ...]
    groups: Groups = dataclasses.field(repr=False)
    trips: int
    in_loop: bool
    asynchronous: bool
    flops: int
    memory_bytes: int
    source: str
    place: str

    @property
    def group_size(self) -> int:
        """The number of devices that communicate with each other."""
        return max(map(len, self.groups))

    @property
    def elements(self) -> int:
        """Elements of its arrays."""
        return sum(array.elements for array in self.arrays)

    @property
    def bytes(self) -> int:
        """Bytes that a device sends in one run; see `wire_bytes`."""
        return wire_bytes(self.kind, sum(a.bytes for a in self.arrays), self.group_size)

    @property
    def total_bytes(self) -> int:
        """Bytes that a device sends in one step."""
        return self.bytes * self.trips


def wire_bytes(kind: str, whole: int, devices: int) -> int:
    """Bytes that each device sends, by the ring algorithm.

    Args:
      kind: such as `"all-gather"`.
      whole: bytes of the whole array: what all devices of a group gather, or each reduces.
      devices: the number of devices in a group, `N`.

    Returns:
      `(N-1)/N` of the array for an all-gather, a reduce-scatter and an all-to-all, twice that for
      an all-reduce, which is both; the array for a permute and a broadcast.

    References:
      Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
      MPICH", 2005, section 4.

    >>> wire_bytes("all-reduce", 800, 8)
    1400
    """
    if kind in ("collective-permute", "collective-broadcast"):
        return whole if devices > 1 else 0
    return (2 if kind == "all-reduce" else 1) * whole * (devices - 1) // devices


def find_collectives(
    module: Module, costs: Costs, axis_names: tuple[str, ...], axis_sizes: tuple[int, ...]
) -> tuple[tuple[Collective, ...], tuple[str, ...]]:
    """The collectives in the order of the schedule, and the loops whose trips are unknown."""
    found: list[Collective] = []
    unknown: list[str] = []

    def walk(computation: Computation, trips: int, in_loop: bool) -> None:
        windows = _windows(module, computation, costs)
        for instruction in computation:
            if kind := module.collective(instruction):
                groups = device_groups(module.wrapped(instruction), module.devices)
                done, work = windows.get(instruction.name, (None, Work()))
                source = _OP_NAME.search(instruction.attributes)
                asynchronous = is_asynchronous(instruction)
                work = work if asynchronous else Work()
                found.append(
                    Collective(
                        name=instruction.name,
                        kind=kind,
                        arrays=_whole(computation, instruction, done),
                        axes=group_axes(groups, axis_names, axis_sizes),
                        groups=groups,
                        trips=trips,
                        in_loop=in_loop,
                        asynchronous=asynchronous,
                        flops=work.flops,
                        memory_bytes=work.bytes,
                        source=source[1] if source else "",
                        place=computation.name,
                    )
                )
                continue
            if "fusion" in instruction.opcode:
                continue
            for inner, times in module.runs(computation, instruction):
                if times is None:
                    unknown.append(instruction.name)
                looped = in_loop or instruction.opcode == "while"
                walk(inner, trips * (1 if times is None else times), looped)

    walk(module.computations[module.entry], 1, False)
    return tuple(found), tuple(dict.fromkeys(unknown))


def is_asynchronous(instruction: Instruction) -> bool:
    """Whether an instruction only starts its work; XLA marks pairs that it runs as one."""
    return instruction.opcode.endswith("-start") and '"is_sync":true' not in instruction.attributes


def started_by(computation: Computation, done: Instruction) -> str:
    """The instruction that started what a `-done` waits for."""
    while done.opcode.endswith(("-done", "-update")) and done.operands:
        name = done.operands[0]
        if name not in computation.instructions:
            return ""
        done = computation.instructions[name]
    return done.name


def _windows(
    module: Module, computation: Computation, costs: Costs
) -> dict[str, tuple[Instruction | None, Work]]:
    """The done of each asynchronous collective, and the work scheduled before it."""
    open_: dict[str, Work] = {}
    closed: dict[str, tuple[Instruction | None, Work]] = {}
    for instruction in computation:
        if instruction.opcode.endswith("-done"):
            name = started_by(computation, instruction)
            if name in open_:
                closed[name] = (instruction, open_.pop(name))
        elif module.collective(instruction) and instruction.opcode.endswith("-start"):
            open_[instruction.name] = Work()
        elif open_:
            work = costs.instruction(computation, instruction)
            open_ = {name: before + work for name, before in open_.items()}
    return closed | {name: (None, work) for name, work in open_.items()}


def _whole(
    computation: Computation, instruction: Instruction, done: Instruction | None
) -> tuple[Array, ...]:
    """What a collective reduces or gathers: its operands or its results, whichever are larger.

    A start's own type lists both, in several ways; the result of its done does not.
    """
    operands = sum((computation.arrays(name) for name in instruction.operands), ())
    results = done.results if done else instruction.results
    if done is None and instruction.opcode.endswith("-start"):
        results = operands
    return max(operands, results, key=lambda arrays: sum(a.bytes for a in arrays))
