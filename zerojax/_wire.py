"""What crosses the wire between the devices of a Manual region, and in which dtypes."""

import dataclasses
from typing import Any

import jax
from jax import numpy as jnp

from zerojax import _collectives
from zerojax._contexts import as_varying, varying_axes
from zerojax._leaf_plan import LeafPlan
from zerojax._partition import Partition
from zerojax._specs import Axes, widened


@dataclasses.dataclass(frozen=True)
class Wire:
    """How weights reach each device and gradients leave it. In a Manual region.

    Attributes:
      part: the partition.
      average: whether the gradients of the devices are averaged, or summed.
      compute_dtype: dtype of floating weights in the model; `None` leaves them as they are.
      reduce_dtype: dtype in which gradients are reduced; `None` leaves them as they are.
      manual_axes: model axes that are Manual too. The region then has types.
      copied: those of them over which every device has its own copy of a weight, whose gradients
        have to be summed; over the others JAX sums where a weight is used.
    """

    part: Partition
    average: bool
    compute_dtype: Any = None
    reduce_dtype: Any = None
    manual_axes: Axes = ()
    copied: Axes = ()

    @property
    def region_axes(self) -> Axes:
        """All axes that are Manual."""
        return self.part.data_axes + self.manual_axes

    def dtype(self, leaf: LeafPlan) -> Any:
        """The dtype in which the model sees a weight."""
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return self.compute_dtype if self.compute_dtype and floating else leaf.dtype

    def cast(self, leaf: LeafPlan, x: jax.Array) -> jax.Array:
        """A weight in the dtype in which the model sees it."""
        dtype = self.dtype(leaf)
        return x if x.dtype == dtype else x.astype(dtype)

    def vary(self, x: jax.Array, axes: Axes) -> jax.Array:
        """The same value, typed varying over some axes; where there are no types, as it is."""
        return as_varying(x, axes) if self.manual_axes else x

    def weight_axes(self, leaf: LeafPlan) -> Axes:
        """The axes over which a weight and its local gradient vary."""
        return self.part.data_axes + leaf.model_axes + self.copied

    def shard_axes(self, leaf: LeafPlan) -> Axes:
        """The axes over which a reduced gradient varies."""
        return leaf.shard_axes + leaf.model_axes + self.copied

    def weight(self, leaf: LeafPlan, x: jax.Array) -> jax.Array:
        """A whole weight, or a slice of it along leading dims, from what this device holds.

        Typed as this device's own: its gradients are local.
        """
        x = self.cast(leaf, x)  # before the gather, which then moves fewer bytes
        if self.part.stage == 3 and leaf.shard_axes:
            view = _collectives.split_view(self.part, leaf)
            trailing = leaf.trailing(x.ndim - len(view.shape) + len(leaf.shape))
            view = _collectives.split_view(self.part, trailing)
            x = _collectives.gather(self.part, trailing, view, x)
        return self.vary(x, self.weight_axes(leaf))

    def gradient(self, leaf: LeafPlan, g: jax.Array) -> jax.Array:
        """This device's shard of a gradient, or of a slice of one, reduced over the data axes."""
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
        return _collectives.scatter(self.part, leaf, view, g.astype(dtype), rest)

    def sum_copies(self, leaf: LeafPlan, g: jax.Array) -> jax.Array:
        """The sum of the gradients of a weight's copies; once per step, and of shards."""
        pending = varying_axes(g) - {*leaf.model_axes, *leaf.shard_axes}
        axes = [a for a in self.region_axes if a in pending]  # data axes only if of size 1
        return _collectives.total(_collectives.split_view(self.part, leaf), g, axes)

    def gradient_dtype(self, leaf: LeafPlan, *, added_up: bool) -> Any:
        """The dtype of what `gradient` returns for one local gradient, or for a sum of several."""
        local = widened(leaf.dtype) if added_up else self.dtype(leaf)
        return local if self.part.data_size == 1 else self.reduce_dtype or local

    def zeros(self, leaf: LeafPlan, dtype: Any) -> jax.Array:
        """Zeros in the type of a shard from `gradient`."""
        x = _collectives.zeros(self.part, _collectives.split_view(self.part, leaf), dtype)
        return self.vary(x, self.shard_axes(leaf))
