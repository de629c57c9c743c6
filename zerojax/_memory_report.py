"""The report of what each device holds, and how it compares with a compiled program."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from zerojax._tables import Table, in_bytes

STATE = "optimizer state"
BEFORE, AFTER = ("parameters", "master"), ("padding", "gradients", "accumulators", "gathered")
_TRANSIENT = AFTER[1:]


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """Bytes on each device, by category. Made by `zerojax.memory`.

    Categories are "parameters", "master" (the copies that `zero(master_dtype=)` keeps), each field
    of the optimizer's state under its own name ("mu", "nu", "count", "trace", "acc_grads") and
    together as "optimizer state", and "padding", the zeros in all of these. They are *persistent*:
    held between steps. In a step there are also "gradients", "accumulators" and "gathered" weights.

    Attributes:
      stages: one for each column.
      elements: the number of parameters of the model.
      devices: the number of devices.
      columns: for each stage the bytes of each category.
    """

    stages: tuple[int, ...]
    elements: int
    devices: int
    columns: tuple[dict[str, int], ...] = dataclasses.field(repr=False)

    def bytes(self, category: str, stage: int | None = None) -> int:
        """Bytes of one category on each device.

        Args:
          category: one of the above; or "persistent"; "model states", those and the gradients and
            accumulators, which is what the ZeRO paper counts; or "total".
          stage: a column; may be left out if there is just one.

        Raises:
          ValueError: the category or the stage is not in the report.
        """
        column = self._column(stage)
        sums = {
            STATE: self._fields,
            "persistent": [name for name in column if name not in _TRANSIENT],
            "model states": [name for name in column if name != "gathered"],
            "total": list(column),
        }
        if category not in sums and category not in column:
            raise ValueError(
                f"memory: no category {category!r}; there are {', '.join([*column, *sums])}."
            )
        return sum(column[name] for name in sums.get(category, [category]))

    def _column(self, stage: int | None) -> dict[str, int]:
        if stage is None and len(self.stages) == 1:
            (stage,) = self.stages
        if stage not in self.stages:
            raise ValueError(f"memory: stage must be one of {self.stages}, got {stage!r}.")
        return self.columns[self.stages.index(stage)]

    @property
    def _fields(self) -> list[str]:
        return [name for name in self.columns[0] if name not in BEFORE + AFTER]

    def rows(self) -> list[dict[str, Any]]:
        """A dict for each category, with its bytes by stage."""
        return [
            {
                "category": STATE if name in self._fields else name,
                "name": name,
                "persistent": name not in _TRANSIENT,
                "bytes": {
                    stage: column[name]
                    for stage, column in zip(self.stages, self.columns, strict=True)
                },
            }
            for name in self.columns[0]
        ]

    def to_json(self) -> str:
        """The report as a JSON document; bytes per device, by stage."""
        sums = ("persistent", "model states", "total")
        return json.dumps(
            {
                "elements": self.elements,
                "devices": self.devices,
                "stages": list(self.stages),
                "rows": self.rows(),
                "totals": {
                    name: {stage: self.bytes(name, stage) for stage in self.stages} for name in sums
                },
            }
        )

    def table(self) -> Table:
        """What `print` shows."""

        def line(text: str, amounts: Iterable[int]) -> list[str]:
            return [text, *map(in_bytes, amounts)]

        def total(name: str, text: str) -> list[str]:
            return line(text, (self.bytes(name, stage) for stage in self.stages))

        lines = {
            row["name"]: line(
                f"{STATE}: {row['name']}" if row["category"] == STATE else row["name"],
                row["bytes"].values(),
            )
            for row in self.rows()
            if any(row["bytes"].values())
        }
        held = [lines[name] for name in lines if name not in _TRANSIENT]
        more = [lines[name] for name in ("gradients", "accumulators") if name in lines]
        rows = [*held, total("persistent", "held between steps"), *more]
        if more:
            rows.append(total("model states", "with gradients"))
        if "gathered" in lines:
            rows += [lines["gathered"], total("total", "with gathered weights")]
        title = f"{self.elements:,} parameters on {self.devices:,} devices, bytes on each"
        head = ["", *(f"stage {stage}" for stage in self.stages)]
        return Table(head, rows, ["without activations"], title)

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table().html()

    def plot(self, path: str | Path) -> None:
        """Draws a stacked bar for each stage into a file.

        Args:
          path: the file; its ending says the format, such as `.png` or `.svg`.

        References:
          Rajbhandari et al., "ZeRO", 2020, figure 1.
        """
        from matplotlib.figure import Figure  # an extra, and slow to import

        figure = Figure(figsize=(7, 1 + 0.5 * len(self.stages)), layout="constrained")
        axes = figure.add_subplot()
        ends = [0.0] * len(self.stages)
        places = range(len(self.stages))
        for row in self.rows():
            widths = [n / 1e9 for n in row["bytes"].values()]
            if sum(widths) > 0.002 * sum(self.bytes("total", s) for s in self.stages) / 1e9:
                axes.barh(places, widths, left=ends, label=row["name"])
            ends = [end + width for end, width in zip(ends, widths, strict=True)]
        for place, end in zip(places, ends, strict=True):
            axes.text(end, place, f" {end:.3g} GB", va="center")
        axes.set_yticks(places, [f"stage {stage}" for stage in self.stages])
        axes.set_xlim(0, 1.2 * max(*ends, 1e-9))
        axes.invert_yaxis()
        axes.set_xlabel(f"GB on each of {self.devices:,} devices")
        figure.legend(loc="outside right upper", fontsize="small")
        figure.savefig(path)

    def compare(self, compiled: Any) -> "MemoryComparison":
        """Sets the report of one stage against what the compiler says.

        Args:
          compiled: the step, from `step.lower(...).compile()` or `zerojax.compile_for`. In one that
            you `jax.jit` yourself pass `keep_unused=True`, or arguments that it does not read (the
            placeholders in adafactor's state) are missing.

        Returns:
          The comparison; print it. Its `exact` says whether what is held between steps is, to the
          byte, what the program was given to update.

        Raises:
          ValueError: the report has several stages.
        """
        stats = compiled.memory_analysis()
        return MemoryComparison(
            self.bytes("persistent"),
            self.bytes("total") - self.bytes("persistent"),
            stats.argument_size_in_bytes,
            stats.alias_size_in_bytes,
            stats.output_size_in_bytes,
            stats.temp_size_in_bytes,
        )


@dataclasses.dataclass(frozen=True)
class MemoryComparison:
    """Bytes on each device, computed and compiled. Made by `MemoryReport.compare`.

    Attributes:
      persistent: what is held between steps, by `zerojax.memory`.
      transient: gradients, accumulators and gathered weights, by `zerojax.memory`.
      arguments: of the program.
      aliased: those that its outputs overwrite: what was donated.
      outputs: of the program, aliased or not.
      temp: what it needs beside these.
    """

    persistent: int
    transient: int
    arguments: int
    aliased: int
    outputs: int
    temp: int

    @property
    def updated(self) -> int:
        """Bytes of parameters and state: what was donated; all arguments if nothing was."""
        return self.aliased or self.arguments

    @property
    def exact(self) -> bool:
        """Whether that is what `zerojax.memory` says."""
        return self.persistent == self.updated

    def table(self) -> Table:
        """What `print` shows."""
        in_place = " in place" if self.aliased else ""
        batch = self.arguments - self.updated
        rows = [
            ["held between steps", f"{self.persistent:,}", f"{self.updated:,}",
             f"arguments that are updated{in_place}"],
            ["", "", f"{batch:,}", "other arguments: the batch"],
            ["", "", f"{self.outputs - self.aliased:,}", "other outputs: the metrics"],
            ["gradients, gathered weights", f"{self.transient:,}", f"{self.temp:,}",
             "temporary: these, activations, updates on their way"],
        ]  # fmt: skip
        differ = f"differ by {self.updated - self.persistent:+,} bytes"
        verdict = "are equal" if self.exact else differ
        head = ["bytes on each device", "zerojax.memory", "compiler", "what that is"]
        return Table(head, rows, [f"what is held between steps: both {verdict}"])

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table().html()
