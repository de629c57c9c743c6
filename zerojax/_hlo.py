"""Scheduled HLO text as computations and instructions, as compiled programs print it."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

_HEADER = re.compile(r"^(ENTRY )?%?([\w.-]+)(?: \(.*)? \{$")
_NAME = re.compile(r"^(ROOT )?%?([\w.-]+) = ")
_OPCODE = re.compile(r" *([a-z][a-z0-9-]*)\(")
_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,<= ]*)\]")
_OPERAND = re.compile(r"%?([\w.-]+)$")
_COMMENT = re.compile(r"/\*.*?\*/")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.-]+)"
    r"|\b(?:branch_computations|called_computations|calls)=\{([^}]*)\}"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_STEP = re.compile(r'"known_init_step":\{"init":"-?\d+","step":"(\d+)"')
_INDUCTION = re.compile(r'"known_induction_variable":\{"tuple_index":"(\d+)"')

COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute", "collective-broadcast",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Array:
    """The type of one array: `dtype` as HLO spells it (`"bf16"`), `shape` in elements."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Its size, rounded up to whole bytes; 0 for tokens and opaque values."""
        bits = re.search(r"\d+", self.dtype)
        width = 8 if self.dtype == "pred" else int(bits[0]) if bits else 0
        return -(-self.elements * width // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: its name, without the percent sign.
      opcode: such as `"fusion"` or `"all-gather-start"`.
      results: the arrays of its type, tuples flattened.
      operands: the names of its operands.
      literal: what stands between its parentheses: a constant's value, a parameter's number.
      attributes: the text behind them.
      called: the computations that it names, in the order of the text.
    """

    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    literal: str
    attributes: str
    called: tuple[str, ...]

    def called_as(self, key: str) -> str:
        """The computation that one attribute names, such as a loop's `body`."""
        match = re.search(rf"\b{key}=%?([\w.-]+)", self.attributes)
        return match[1] if match else ""

    def dims(self, key: str) -> tuple[int, ...]:
        """An attribute that lists dims, such as `lhs_contracting_dims={1}`."""
        match = re.search(rf"\b{key}=\{{([\d,]*)\}}", self.attributes)
        return integers(match[1]) if match else ()


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions in the order in which they are scheduled, by name; `root` gives the result."""

    name: str
    instructions: dict[str, Instruction]
    root: str

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    def arrays(self, operand: str) -> tuple[Array, ...]:
        """The arrays of an operand."""
        found = self.instructions.get(operand)
        return found.results if found else ()

    def source(self, name: str) -> Instruction | None:
        """The instruction behind copies, bitcasts and elements of tuples."""
        found = self.instructions.get(name)
        while found and found.operands and found.opcode in ("copy", "bitcast", "get-tuple-element"):
            inner = self.instructions.get(found.operands[0])
            if found.opcode == "get-tuple-element":
                if inner is None or inner.opcode != "tuple":
                    return found
                index = re.search(r"\bindex=(\d+)", found.attributes)
                inner = self.instructions.get(inner.operands[int(index[1])]) if index else None
            found = inner
        return found


@dataclasses.dataclass(frozen=True)
class Module:
    """A scheduled program: its computations by name, the entry's name, the number of devices."""

    computations: dict[str, Computation]
    entry: str
    devices: int

    def root(self, name: str) -> Instruction:
        """The instruction that gives a computation's result."""
        computation = self.computations[name]
        return computation.instructions[computation.root]

    def wrapped(self, instruction: Instruction) -> Instruction:
        """What a generic `async-start` runs: the root of the computation that it calls."""
        if instruction.opcode == "async-start" and instruction.called:
            return self.root(instruction.called[0])
        return instruction

    def collective(self, instruction: Instruction) -> str:
        """The kind of collective that an instruction starts, or runs; empty for others."""
        kind = self.wrapped(instruction).opcode.removesuffix("-start")
        return kind if kind in COLLECTIVES else ""

    def runs(
        self, caller: Computation, instruction: Instruction
    ) -> list[tuple[Computation, int | None]]:
        """The computations that an instruction runs, and how often; `None` where unknown.

        Of a conditional these are all branches, as if each ran. What is applied to every element
        of an array (a reduction's sum) is left out.
        """
        if instruction.opcode == "while":
            body = self.computations[instruction.called_as("body")]
            return [(body, self.trips(caller, instruction))]
        if instruction.opcode in ("fusion", "fusion-start", "call", "conditional", "async-start"):
            return [(self.computations[name], 1) for name in instruction.called]
        return []

    def trips(self, caller: Computation, loop: Instruction) -> int | None:
        """How often the body of a while loop runs, or `None` if the text does not say.

        XLA notes `known_trip_count`, but drops it where it has peeled or rotated a loop. Then the
        loop's condition is read: `i < N` for a constant `N`, which the condition may have fused,
        counted from the constant that the loop starts with (0 if that is not one) in the noted
        step (1 if none is).
        """
        if match := _TRIPS.search(loop.attributes):
            return int(match[1])
        limit = self._limit(loop.called_as("condition"))
        if limit is None:
            return None
        index = _INDUCTION.search(loop.attributes)
        initial = caller.source(loop.operands[0])
        first = 0
        if initial and initial.opcode == "tuple":
            start = caller.source(initial.operands[int(index[1]) if index else 0])
            first = _integer(start) or 0
        step = _STEP.search(loop.attributes)
        return max(0, -(-(limit - first) // int(step[1] if step else 1)))

    def _limit(self, name: str) -> int | None:
        """The constant that a loop's condition compares with, through fusions."""
        computation = self.computations.get(name)
        if computation is None:
            return None
        root = computation.instructions[computation.root]
        if root.opcode == "fusion":
            inner = self._limit(root.called[0])
            if inner is not None:
                return inner
            constants = [_integer(computation.source(operand)) for operand in root.operands]
            fused = self.root(root.called[0])
            less = fused.opcode == "compare" and "direction=LT" in fused.attributes
            return next((n for n in constants if n is not None), None) if less else None
        if root.opcode != "compare" or "direction=LT" not in root.attributes:
            return None
        return _integer(computation.source(root.operands[1]))


def parse(text: str) -> Module:
    """Reads the text of a compiled program: `compiled.as_text()`.

    Args:
      text: an `HloModule` in text form, with or without percent signs.

    Returns:
      The program, its instructions in the order of the text. That is the schedule if XLA says
      `is_scheduled=true`.

    Raises:
      ValueError: the text is not an HLO module.

    >>> module = parse('''HloModule double, is_scheduled=true
    ... ENTRY main {
    ...   x = f32[8]{0} parameter(0)
    ...   ROOT y = f32[8]{0} add(x, x)
    ... }''')
    >>> print(module.root("main").opcode, *module.root("main").results)
    add f32[8]
    """
    head = text.lstrip()[:200]
    if not head.startswith("HloModule"):
        raise ValueError(
            "this is not HLO: the text of a compiled program (compiled.as_text()) begins with "
            f"'HloModule', and this with {head[:40]!r}."
        )
    computations: dict[str, Computation] = {}
    entry = name = None
    instructions: dict[str, Instruction] = {}
    root = ""
    for line in text.splitlines():
        line = line.strip()
        if name is None:
            if match := _HEADER.match(line):
                name, instructions, root = match[2], {}, ""
                entry = name if match[1] else entry
        elif line == "}":
            computations[name] = Computation(
                name, instructions, root or next(reversed([*instructions]))
            )
            name = None
        elif match := _NAME.match(line):
            instruction = _instruction(match[2], line[match.end() :])
            instructions[instruction.name] = instruction
            root = instruction.name if match[1] else root
    if entry is None or entry not in computations:
        raise ValueError("this HLO module has no ENTRY computation: is the file cut off?")
    partitions, replicas = (
        int(match[1]) if (match := re.search(rf"{key}=(\d+)", text.split("\n", 1)[0])) else 1
        for key in ("num_partitions", "replica_count")
    )
    return Module(computations, entry, partitions * replicas)


def integers(text: str) -> tuple[int, ...]:
    """The integers of a comma-separated list."""
    return tuple(int(n) for n in text.split(",") if n.strip())


def _instruction(name: str, text: str) -> Instruction:
    """An instruction from what stands behind its equals sign."""
    text = _COMMENT.sub("", text)
    end = _closing(text, 0) if text.startswith("(") else text.find(" ")
    match = _OPCODE.match(text, end)
    if match is None:
        raise ValueError(f"cannot read the HLO instruction {name!r}: {text[:80]!r}.")
    stop = _closing(text, match.end() - 1)
    literal, attributes = text[match.end() : stop - 1], text[stop:]
    operands = ()
    if match[1] not in ("constant", "parameter", "iota"):
        operands = tuple(m[1] for part in _split(literal) if (m := _OPERAND.search(part)))
    called = []
    # Not in metadata or a backend's JSON, where a name could look like an attribute.
    for one, several in _CALLED.findall(attributes.partition(", metadata={")[0]):
        called += [one] if one else [n.strip().lstrip("%") for n in several.split(",")]
    return Instruction(
        name, match[1], _arrays(text[:end]), operands, literal, attributes, tuple(called)
    )


@functools.lru_cache(maxsize=4096)
def _arrays(text: str) -> tuple[Array, ...]:
    return tuple(
        Array(dtype, integers(re.sub("[<= ]", "", dims))) for dtype, dims in _ARRAY.findall(text)
    )


def _closing(text: str, start: int) -> int:
    """The index behind the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    raise ValueError(f"this line of HLO is cut off: {text[:80]!r}.")


def _split(text: str) -> list[str]:
    """Operands at the commas outside of brackets: `f32[2,3]{1,0} %a, (s32[]) %b`."""
    return re.split(r",\s*(?![^\[{(]*[\]})])", text.strip()) if text.strip() else []


def _integer(instruction: Instruction | None) -> int | None:
    """The value of an integer constant."""
    if instruction and instruction.opcode == "constant":
        return int(instruction.literal) if re.fullmatch(r"-?\d+", instruction.literal) else None
    return None
