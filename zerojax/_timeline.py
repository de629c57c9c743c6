"""How long a step takes, by a model with two streams: one computes, one communicates."""

import dataclasses
from collections.abc import Mapping

from zerojax._chips import chip_named
from zerojax._hlo import Computation, Module
from zerojax._hlo_collectives import Collective, is_asynchronous, started_by
from zerojax._hlo_cost import Costs

Segment = tuple[str, float, float]  # what, from when, for how long; seconds


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Rates of one device, sustained rather than peak.

    Attributes:
      flops: operations of matrix products per second.
      bandwidth: bytes of memory per second.
      near: bytes per second, and seconds for each collective, within a host.
      far: the same where a group of devices spans hosts.
      gpus_per_host: the number of devices that are near each other.
    """

    flops: float = 600e12
    bandwidth: float = 2.8e12
    near: tuple[float, float] = (320e9, 20e-6)
    far: tuple[float, float] = (200e9, 50e-6)
    gpus_per_host: int = 8

    def seconds(self, collective: Collective) -> float:
        """How long a collective takes, alone."""
        if not collective.bytes:
            return 0.0
        hosts = (len({i // self.gpus_per_host for i in group}) for group in collective.groups)
        rate, latency = self.far if max(hosts) > 1 else self.near
        return latency + collective.bytes / rate


H100 = CostModel()


def cost_model(chip: str) -> CostModel:
    """The rates of a chip: those fixed for an H100, in proportion to what the data sheets say.

    An H100 is modelled with 600 TFLOP/s in bfloat16, 2.8 TB/s of memory, 320 GB/s and 20 us for
    each collective within 8 GPUs, 200 GB/s and 50 us beyond, where the network is the same for all.

    >>> cost_model("h200").bandwidth > cost_model("h100").bandwidth
    True
    """
    this, h100 = chip_named(chip), chip_named("h100")
    rate, latency = H100.near
    return dataclasses.replace(
        H100,
        flops=H100.flops * (this.flops / h100.flops),
        bandwidth=H100.bandwidth * (this.bandwidth / h100.bandwidth),
        near=(rate * (this.link / h100.link), latency),
    )


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A modelled step; all times in seconds.

    Attributes:
      step: from the first instruction to the end of both streams.
      compute: when the compute stream is busy.
      communication: when the other is.
      exposed: when the compute stream waits for the other.
      segments: what each stream does when; those of the compute stream are called `"compute"`.
    """

    step: float
    compute: float
    communication: float
    exposed: float
    segments: tuple[Segment, ...] = dataclasses.field(repr=False)


def simulate(
    module: Module,
    costs: Costs,
    collectives: Mapping[tuple[str, str], Collective],
    model: CostModel,
) -> Timeline:
    """Runs a schedule: the compute stream in order, each collective when it is started.

    An instruction takes `max(flops / rate, bytes / bandwidth)` on the compute stream. A collective
    begins when it is started and the one before is over; its done, or itself if it is synchronous,
    makes the compute stream wait for its end. The two do not slow each other down. Loops run as
    often as they do in the program, those of unknown length once.

    Args:
      module: the program.
      costs: of its instructions.
      collectives: its collectives, by computation and name.
      model: the rates.

    Returns:
      The times, and the segments of both streams.
    """
    compiled: dict[str, list[tuple]] = {}

    def steps(computation: Computation) -> list[tuple]:
        """A computation as few operations: ("run", seconds), ("start"...), ("done"...), loops."""
        if computation.name in compiled:
            return compiled[computation.name]
        ops: list[tuple] = []
        for instruction in computation:
            collective = collectives.get((computation.name, instruction.name))
            if collective:
                ops.append(("start", instruction.name, collective.kind, model.seconds(collective)))
                if not is_asynchronous(instruction):
                    ops.append(("done", instruction.name))
            elif instruction.opcode.endswith("-done"):
                ops.append(("done", started_by(computation, instruction)))
            elif instruction.opcode in ("while", "call", "conditional"):
                for inner, times in module.runs(computation, instruction):
                    ops.append(("loop", steps(inner), 1 if times is None else times))
            else:
                work = costs.instruction(computation, instruction)
                seconds = max(work.flops / model.flops, work.bytes / model.bandwidth)
                if seconds and ops and ops[-1][0] == "run":
                    ops[-1] = ("run", ops[-1][1] + seconds)
                elif seconds:
                    ops.append(("run", seconds))
        compiled[computation.name] = ops
        return ops

    now = free = compute = communication = 0.0  # `free`: when the communication stream is
    ends: dict[str, float] = {}
    segments: list[Segment] = []

    def run(ops: list[tuple]) -> None:
        nonlocal now, free, compute, communication
        for op in ops:
            if op[0] == "run":
                segments.append(("compute", now, op[1]))
                now, compute = now + op[1], compute + op[1]
            elif op[0] == "start":
                begin = max(now, free)
                segments.append((op[2], begin, op[3]))
                ends[op[1]] = free = begin + op[3]
                communication += op[3]
            elif op[0] == "done":
                now = max(now, ends.pop(op[1], now))
            else:
                for _ in range(op[2]):
                    run(op[1])

    run(steps(module.computations[module.entry]))
    step = max(now, free)
    return Timeline(step, compute, communication, step - compute, tuple(segments))
