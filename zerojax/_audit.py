"""What a compiled program communicates: how much, over which axes, and hidden behind what."""

import dataclasses
import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from zerojax._expected import ExpectedCommunication
from zerojax._hlo import Module, parse
from zerojax._hlo_collectives import Collective, find_collectives
from zerojax._hlo_cost import Costs
from zerojax._specs import raise_all
from zerojax._tables import Table, in_bytes
from zerojax._timeline import Timeline, cost_model, simulate

_HEAD = [
    "collective",
    "arrays",
    "axes",
    "devices",
    "times",
    "bytes/device",
    "async",
    "GFLOP hidden",
]


@dataclasses.dataclass(frozen=True, eq=False)
class CommunicationReport:
    """What one device sends in one run of a program. Made by `zerojax.audit`.

    Bytes follow the ring algorithm. Of an array that is spread over `N` devices each sends
    `(N-1)/N` for an all-gather, a reduce-scatter or an all-to-all, `2(N-1)/N` for an all-reduce,
    all of it for a permute. Times are modelled, not measured: see `timeline`.

    Attributes:
      collectives: in the order of the schedule, loops once; each has its `trips`.
      devices: the number of devices of the program.
      flops: operations of matrix products on each device.
      unknown_loops: loops whose trips the program does not say; what is in them counts once.
    """

    collectives: tuple[Collective, ...]
    devices: int
    flops: int
    unknown_loops: tuple[str, ...]
    _module: Module = dataclasses.field(repr=False)
    _costs: Costs = dataclasses.field(repr=False)

    def bytes(self, kind: str | None = None, axis: str | None = None) -> int:
        """Bytes that a device sends, of one kind (`"all-gather"`) or over one axis if asked."""
        return sum(c.total_bytes for c in self._some(kind, axis))

    def hidden_bytes(self, kind: str | None = None, axis: str | None = None) -> int:
        """Those that are sent while a matrix product is computed.

        A pair of start and done counts only if one is scheduled between them.
        """
        return sum(c.total_bytes for c in self._some(kind, axis) if c.flops)

    def _some(self, kind: str | None, axis: str | None) -> Iterable[Collective]:
        for c in self.collectives:
            if kind in (None, c.kind) and (axis is None or axis in c.axes):
                yield c

    @property
    def overlap(self) -> float:
        """The share of the bytes that `hidden_bytes` counts; 1 if nothing is sent."""
        return self.hidden_bytes() / self.bytes() if self.bytes() else 1.0

    def timeline(self, chip: str = "h100") -> Timeline:
        """A modelled run, with one stream that computes and one that communicates.

        Instructions run in the order of the schedule and take
        `max(flops / rate, bytes / bandwidth)`. Collectives run one after the other beside them,
        from their start, each for a latency and its bytes over the link's rate. An H100 has
        600 TFLOP/s and 2.8 TB/s; 320 GB/s and 20 us where a group of devices is within a host of
        8, 200 GB/s and 50 us where not. Other chips are in proportion to their data sheets. This
        compares schedules; it does not predict a run.

        Args:
          chip: "a100", "h100", "h200" or "b200".
        """
        found = {(c.place, c.name): c for c in self.collectives}
        return simulate(self._module, self._costs, found, cost_model(chip))

    @functools.cached_property
    def _h100(self) -> Timeline:
        return self.timeline()

    @property
    def step_time(self) -> float:
        """Modelled seconds of one run on H100s."""
        return self._h100.step

    @property
    def communication_time(self) -> float:
        """Modelled seconds on H100s in which something is sent."""
        return self._h100.communication

    @property
    def exposed_time(self) -> float:
        """Modelled seconds on H100s in which computation waits for communication."""
        return self._h100.exposed

    def check(
        self,
        expected: ExpectedCommunication,
        *,
        tolerance: float = 0.02,
        ignore: Iterable[str] = (),
    ) -> None:
        """Raises if the program sends anything parameter-sized that the theory does not know.

        Args:
          expected: what `zerojax.expected_communication` returned.
          tolerance: the share by which the bytes of a kind may exceed the theory's.
          ignore: mesh axes to leave out. A model whose activations happen to be as large as a
            parameter, and travel over its own axis, needs this.

        Raises:
          ValueError: with a line for each collective; or the report was made without a mesh.
        """
        if not any(c.axes for c in self.collectives) and self.bytes():
            raise ValueError("check: the audit needs the mesh: zerojax.audit(compiled, part.mesh).")
        raise_all(
            "the program sends what ZeRO need not send",
            expected.unexpected(self.collectives, tolerance, ignore),
        )

    def rows(self) -> list[dict[str, Any]]:
        """A dict for each collective, as the JSON document has it."""
        return [
            {
                "name": c.name,
                "kind": c.kind,
                "arrays": [{"dtype": a.dtype, "shape": list(a.shape)} for a in c.arrays],
                "axes": list(c.axes),
                "group_size": c.group_size,
                "trips": c.trips,
                "bytes": c.bytes,
                "total_bytes": c.total_bytes,
                "async": c.asynchronous,
                "flops_hidden_behind": c.flops,
                "memory_bytes_hidden_behind": c.memory_bytes,
                "source": c.source,
            }
            for c in self.collectives
        ]

    def to_json(self) -> str:
        """The report as a JSON document; bytes per device, times in seconds."""
        return json.dumps(
            {
                "devices": self.devices,
                "bytes": self.bytes(),
                "overlap": self.overlap,
                "flops": self.flops,
                "modelled_h100": {
                    "step_time": self.step_time,
                    "communication_time": self.communication_time,
                    "exposed_time": self.exposed_time,
                },
                "unknown_loops": list(self.unknown_loops),
                "collectives": self.rows(),
            }
        )

    def plot(self, path: str | Path, chip: str = "h100") -> None:
        """Draws the modelled timeline into a file: what is computed above, what is sent below.

        Args:
          path: the file; its ending says the format, such as `.png` or `.svg`.
          chip: the chip to model.
        """
        from matplotlib.figure import Figure  # an extra, and slow to import

        timeline = self.timeline(chip)
        figure = Figure(figsize=(12, 2.6), layout="constrained")
        axes = figure.add_subplot()
        kinds = dict.fromkeys(what for what, _, _ in timeline.segments)
        for kind in kinds:
            bars = [(1e3 * s, 1e3 * t) for what, s, t in timeline.segments if what == kind]
            lane = 1 if kind == "compute" else 0
            color = "0.6" if kind == "compute" else None
            label = kind if lane == 0 else f"compute, {1e3 * timeline.compute:.3g} ms"
            color = color or f"C{[k for k in kinds if k != 'compute'].index(kind)}"
            axes.broken_barh(bars, (lane - 0.4, 0.8), color=color, label=label)
        axes.set_yticks([0, 1], ["communication", "compute"])
        axes.set_xlim(0, 1e3 * timeline.step or 1)
        axes.set_xlabel(
            f"ms, modelled on {self.devices} x {chip}: a step of {1e3 * timeline.step:.3g} ms, of "
            f"which {1e3 * timeline.exposed:.3g} ms wait for communication"
        )
        if kinds:
            figure.legend(loc="outside upper right", ncols=len(kinds), fontsize="small")
        figure.savefig(path)

    def table(self) -> Table:
        """What `print` shows."""
        rows = []
        for c in self.collectives:
            arrays = [str(a) for a in c.arrays[:2]] + ["..."] * (len(c.arrays) > 2)
            rows.append(
                [c.kind, " ".join(arrays), ",".join(c.axes) or "-", str(c.group_size),
                 str(c.trips), f"{c.total_bytes:,}", "yes" if c.asynchronous else "no",
                 f"{c.flops / 1e9:.3g}"]
            )  # fmt: skip
        return Table(_HEAD, rows, self._summary())

    def _summary(self) -> list[str]:
        sums: dict[str, int] = {}
        for c in self.collectives:
            key = f"{c.kind} over {','.join(c.axes)}" if c.axes else c.kind
            sums[key] = sums.get(key, 0) + c.total_bytes
        lines = [
            f"each of {self.devices} devices sends {in_bytes(self.bytes())}, "
            f"{self.overlap:.0%} of it while a matrix product is computed",
            *(
                f"  {key}: {in_bytes(n)}"
                for key, n in sorted(sums.items(), key=lambda x: -x[1])
                if n
            ),
            f"modelled on H100s: a step of {1e3 * self.step_time:.3g} ms, "
            f"{1e3 * self.communication_time:.3g} ms of communication, "
            f"{1e3 * self.exposed_time:.3g} ms of it exposed",
        ]
        if self.unknown_loops:
            lines.append(f"loops of unknown length, counted once: {', '.join(self.unknown_loops)}")
        return lines

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table().html()


def audit(compiled: Any, mesh: Mesh | AbstractMesh | None = None) -> CommunicationReport:
    """Reads what a compiled program communicates, and how much of that its schedule hides.

    Args:
      compiled: `jax.jit(f).lower(...).compile()`, what `zerojax.compile_for` returns, or the text
        of a compiled program, from any backend. On CPU nothing overlaps.
      mesh: the mesh that the program was compiled for, to name the axes of each collective. By
        default that of the program's arguments, if it has any on a mesh.

    Returns:
      The report: print it, or see its attributes and methods.

    Raises:
      ValueError: the text is not HLO, or the mesh is of another size.

    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> mesh = jax.make_mesh((8,), ("data",))
    >>> x = jax.ShapeDtypeStruct((8, 1024), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    >>> compiled = jax.jit(lambda x: x.sum(0), out_shardings=NamedSharding(mesh, P()))
    >>> report = zerojax.audit(compiled.lower(x).compile())
    >>> report.bytes("all-reduce", axis="data")
    7168
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    if mesh is None:
        shardings = jax.tree.leaves(getattr(compiled, "input_shardings", ()))
        meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding)]
        mesh = meshes[0] if meshes else None
    module = parse(text)
    if mesh is not None and mesh.size != module.devices:
        raise ValueError(
            f"audit: the mesh has {mesh.size} devices and the program runs on {module.devices}."
        )
    costs = Costs(module)
    names = tuple(mesh.axis_names) if mesh is not None else ()
    sizes = tuple(mesh.axis_sizes) if mesh is not None else ()
    collectives, unknown = find_collectives(module, costs, names, sizes)
    flops = costs.computation(module.computations[module.entry]).flops
    return CommunicationReport(collectives, module.devices, flops, unknown, module, costs)
