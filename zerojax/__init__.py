"""ZeRO for JAX: optax optimizers with sharded state."""

from zerojax import checkpoint
from zerojax._audit import CommunicationReport, audit
from zerojax._check import CheckReport, check
from zerojax._collectives import clip_by_global_norm, global_norm
from zerojax._compile import CompiledProgram, compile_for, topology
from zerojax._expected import ExpectedCommunication, expected_communication
from zerojax._gradients import GradientFunction, value_and_grad
from zerojax._leaf_plan import LeafPlan
from zerojax._loss_scale import LossScaleState, dynamic_loss_scale
from zerojax._master import MasterState
from zerojax._memory import memory
from zerojax._memory_report import MemoryComparison, MemoryReport
from zerojax._partition import Partition
from zerojax._planner import partition
from zerojax._shard import Shard
from zerojax._train import TrainStep, init, train_step
from zerojax._unshard import regather, unshard
from zerojax._xla_options import xla_flags, xla_options
from zerojax._zero import abstract_state, zero

__all__ = [
    "CheckReport",
    "CommunicationReport",
    "CompiledProgram",
    "ExpectedCommunication",
    "GradientFunction",
    "LeafPlan",
    "LossScaleState",
    "MasterState",
    "MemoryComparison",
    "MemoryReport",
    "Partition",
    "Shard",
    "TrainStep",
    "abstract_state",
    "audit",
    "check",
    "checkpoint",
    "clip_by_global_norm",
    "compile_for",
    "dynamic_loss_scale",
    "expected_communication",
    "global_norm",
    "init",
    "memory",
    "partition",
    "regather",
    "topology",
    "train_step",
    "unshard",
    "value_and_grad",
    "xla_flags",
    "xla_options",
    "zero",
]
