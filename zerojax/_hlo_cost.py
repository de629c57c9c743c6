"""What the instructions of a scheduled program compute and move, on one device."""

import dataclasses
import math
import re

from zerojax._hlo import Array, Computation, Instruction, Module

# They move nothing themselves: they name, wait, or run other computations.
_FREE = frozenset(
    """parameter constant tuple get-tuple-element bitcast while call conditional after-all
    partition-id replica-id opt-barrier domain add-dependency rng-get-and-update-state""".split()
)
_READS_A_PART = ("dynamic-slice", "slice", "gather")
_SCHEDULING = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_MATMULS = ("__cublas$", "__triton_gemm", "__onednn$matmul", "__cutlass$gemm")


@dataclasses.dataclass(frozen=True)
class Work:
    """Floating-point operations of matrix products and convolutions, and bytes of memory moved."""

    flops: int = 0
    bytes: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, times: int) -> "Work":
        return Work(self.flops * times, self.bytes * times)


class Costs:
    """The work of a program's instructions, with the trips of the loops in them."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._known: dict[str, Work] = {}

    def computation(self, computation: Computation) -> Work:
        """The work of all instructions of a computation, once."""
        if computation.name not in self._known:
            works = (self.instruction(computation, i) for i in computation)
            self._known[computation.name] = sum(works, Work())
        return self._known[computation.name]

    def instruction(self, computation: Computation, instruction: Instruction) -> Work:
        """The work of one instruction; a collective has none, nor has a copy to or from the host.

        A product of `m x k` and `k x n` counts as `2 m k n` operations, wherever it stands: alone,
        in a fusion, in a Triton kernel or in a call of cuBLAS. Inside a fusion nothing is written
        to memory; the fusion reads its operands, or the slices that it takes of them, and writes
        its results, or the slices that it updates.
        """
        opcode = instruction.opcode
        if opcode.endswith("-done") or opcode in ("copy-start", "send", "recv"):
            return Work()
        if self._module.collective(instruction):
            return Work()
        flops = product_flops(computation, instruction)
        runs = self._module.runs(computation, instruction)
        inner = sum((self.computation(c) * (1 if n is None else n) for c, n in runs), Work())
        if opcode in ("fusion", "fusion-start"):
            return Work(inner.flops, self._fusion_bytes(computation, instruction, runs[0][0]))
        if opcode in _FREE or opcode == "async-start":
            return inner
        return Work(flops, _bytes(computation, instruction))

    def _fusion_bytes(self, caller: Computation, fusion: Instruction, inside: Computation) -> int:
        users: dict[str, list[Instruction]] = {}
        for instruction in inside:
            for operand in instruction.operands:
                users.setdefault(operand, []).append(instruction)
        total = 0
        for instruction in inside:
            if instruction.opcode == "parameter":
                whole = _size(caller.arrays(fusion.operands[int(instruction.literal)]))
                total += min(whole, _read(inside, users, instruction.name, whole))
        root = inside.instructions[inside.root]
        results = root.operands if root.opcode == "tuple" else (inside.root,)
        return total + sum(_written(inside, name) for name in results)


def product_flops(computation: Computation, instruction: Instruction) -> int:
    """Operations of one matrix product or convolution; 0 for everything else.

    Of convolutions only the `convolution` instruction is counted, without padding or dilation.
    """
    opcode, results = instruction.opcode, instruction.results
    if opcode in ("dot", "scaled-dot"):
        contracted = instruction.dims("lhs_contracting_dims")
    elif opcode == "convolution":
        kernel = computation.arrays(instruction.operands[1])[0]
        labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.attributes)
        outputs = kernel.shape[labels[1].index("o")] if labels else 1
        return 2 * results[0].elements * kernel.elements // max(outputs, 1)
    elif opcode == "custom-call":
        target = _TARGET.search(instruction.attributes)
        if target is None or not target[1].startswith(_MATMULS):
            return 0
        dims = _SCHEDULING.search(instruction.attributes)
        contracted = tuple(int(n) for n in re.findall(r"\d+", dims[1])) if dims else (-1,)
    else:
        return 0
    (left, *_) = computation.arrays(instruction.operands[0])
    return 2 * results[0].elements * math.prod(left.shape[dim] for dim in contracted)


def _bytes(computation: Computation, instruction: Instruction) -> int:
    """Bytes that an instruction outside of a fusion reads and writes."""
    opcode = instruction.opcode
    if opcode in _READS_A_PART:
        return 2 * _size(instruction.results)
    if opcode == "dynamic-update-slice":
        return 2 * _size(computation.arrays(instruction.operands[1]))
    read = sum(_size(computation.arrays(operand)) for operand in instruction.operands)
    return read + _size(instruction.results)


def _read(
    inside: Computation, users: dict[str, list[Instruction]], operand: str, whole: int
) -> int:
    """Bytes that the instructions of a fusion read of one operand, at most all of it each."""
    total = 0
    for user in users.get(operand, []):
        first = user.operands[0] == operand
        if user.opcode in _READS_A_PART and first:
            total += _size(user.results)
        elif user.opcode == "dynamic-update-slice" and first:
            pass  # written in place
        elif user.opcode in ("bitcast", "convert", "copy", "reshape"):
            total += min(whole, _read(inside, users, user.name, whole))
        else:
            return whole
    return total


def _written(inside: Computation, name: str) -> int:
    """Bytes that a fusion writes for one of its results."""
    result = inside.source(name)
    if result is not None and result.opcode == "dynamic-update-slice":
        return _size(inside.arrays(result.operands[1]))
    return _size(inside.arrays(name))


def _size(arrays: tuple[Array, ...]) -> int:
    return sum(array.bytes for array in arrays)
