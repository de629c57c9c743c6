"""ZeRO for JAX: optax optimizers with sharded state."""

from zerojax._collectives import clip_by_global_norm, global_norm
from zerojax._gradients import value_and_grad
from zerojax._partition import LeafPlan, Partition, partition
from zerojax._zero import abstract_state, zero

__all__ = ["LeafPlan", "Partition", "abstract_state", "clip_by_global_norm", "global_norm", "partition", "value_and_grad", "zero"]
