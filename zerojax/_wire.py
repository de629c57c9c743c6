"""What crosses the wire between the data-parallel devices of a Manual region, in which dtypes."""

import dataclasses
from typing import Any

import jax
from jax import numpy as jnp

from zerojax import _collectives
from zerojax._leaf_plan import LeafPlan
from zerojax._partition import Partition


@dataclasses.dataclass(frozen=True)
class Wire:
    """How weights reach each device and gradients leave it. In a Manual region.

    Attributes:
      part: the partition.
      average: whether the gradients of the devices are averaged, or summed.
      compute_dtype: dtype of floating weights in the model; `None` leaves them as they are.
      reduce_dtype: dtype in which gradients are reduced; `None` leaves them as they are.
    """

    part: Partition
    average: bool
    compute_dtype: Any = None
    reduce_dtype: Any = None

    def dtype(self, leaf: LeafPlan) -> Any:
        """The dtype in which the model sees a weight."""
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return self.compute_dtype if self.compute_dtype and floating else leaf.dtype

    def cast(self, leaf: LeafPlan, x: jax.Array) -> jax.Array:
        """A weight in the dtype in which the model sees it."""
        dtype = self.dtype(leaf)
        return x if x.dtype == dtype else x.astype(dtype)

    def weight(self, leaf: LeafPlan, x: jax.Array) -> jax.Array:
        """A whole weight, or a slice of it along leading dims, from what this device holds."""
        x = self.cast(leaf, x)  # before the gather, which then moves fewer bytes
        if self.part.stage < 3 or not leaf.shard_axes:
            return x
        view = _collectives.split_view(self.part, leaf)
        leaf = leaf.trailing(x.ndim - len(view.shape) + len(leaf.shape))
        return _collectives.gather(leaf, _collectives.split_view(self.part, leaf), x)

    def gradient(self, leaf: LeafPlan, g: jax.Array) -> jax.Array:
        """This device's shard of the reduced gradient of a weight, or of a slice of it."""
        leaf = leaf.trailing(g.ndim)
        devices = self.part.data_size
        if devices == 1:
            return g
        dtype = self.reduce_dtype or g.dtype
        if self.average:
            # Before the sum, which in 16 bits could overflow where the mean would not.
            g = g.astype(jnp.promote_types(g.dtype, dtype)) / devices
        view = _collectives.split_view(self.part, leaf)
        rest = _collectives.unsharded_axes(self.part, leaf)
        return _collectives.scatter(leaf, view, g.astype(dtype), rest)
