"""How the arguments of a loss are split over devices and microbatches."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

from zerojax._partition import Partition
from zerojax._specs import axes_size, broadcast_prefix, from_spec, is_spec, raise_all


@dataclasses.dataclass(frozen=True)
class Batch:
    """A plan for the arguments of a loss function.

    Attributes:
      part: the partition, whose data axes split the batch.
      accumulate: number of microbatches.
      treedef: structure of the arguments.
      specs: PartitionSpec of each leaf.
    """

    part: Partition
    accumulate: int
    treedef: Any
    specs: tuple[P, ...]

    def on_device(self, leaves: list[Any], index: Any) -> tuple[list[Any], list[Any]]:
        """One device's leaves: those that all microbatches share, and those split among them.

        Shared PRNG keys are folded with the index of the device; a split leaf gets a leading dim.
        """
        pairs = zip(leaves, self.specs, strict=True)
        shared = [self._fold(x, spec, index, self.part.data_size) for x, spec in pairs]
        split = [
            x.reshape(self.accumulate, x.shape[0] // self.accumulate, *x.shape[1:])
            for x, spec in zip(leaves, self.specs, strict=True)
            if self._is_split(spec)
        ]
        return shared, split

    def microbatch(self, shared: list[Any], split: list[Any], index: Any) -> Any:
        """The arguments of one microbatch, from `on_device` and its slice of the split leaves."""
        slices = iter(split)
        return self.treedef.unflatten(
            [
                next(slices)
                if self._is_split(spec)
                else self._fold(x, spec, index, self.accumulate)
                for x, spec in zip(shared, self.specs, strict=True)
            ]
        )

    def varies(self, args: Any) -> list[bool]:
        """For each leaf of one device's arguments whether it may differ from another device's."""
        leaves = zip(jax.tree.leaves(args), self.specs, strict=True)
        return [self._is_split(spec) or _is_key(x) for x, spec in leaves]

    def _is_split(self, spec: P) -> bool:
        return not self.part.replicated(spec)

    def _fold(self, x: Any, spec: P, index: Any, count: int) -> Any:
        if count == 1 or self._is_split(spec) or not _is_key(x):
            return x
        return jnp.vectorize(lambda key: jax.random.fold_in(key, index))(x)


def check_accumulate(accumulate: Any) -> None:
    """Raises unless this is a number of microbatches."""
    if not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"accumulate must be at least 1, and an int, got {accumulate!r}.")


def plan_batch(part: Partition, args: tuple[Any, ...], batch_specs: Any, accumulate: int) -> Batch:
    """Plans the split of a loss function's arguments; see `value_and_grad`.

    Raises:
      ValueError: sizes that disagree, or do not divide by devices x microbatches.
    """
    with_paths, treedef = jax.tree.flatten_with_path(args)
    given = broadcast_prefix("batch_specs", batch_specs, args, is_spec)
    specs, sizes, problems = [], {}, []
    microbatches = f" x {accumulate} microbatches" if accumulate > 1 else ""
    for (path, x), spec in zip(with_paths, given, strict=True):
        shape, default = np.shape(x), spec is None
        name = "args" + jax.tree_util.keystr(path)
        if default:
            spec = P(part.data_axes) if shape else P()
        specs.append(spec)
        try:
            axes = from_spec(spec, len(shape))
            missing = [a for dim in axes for a in dim if a not in part.mesh.axis_names]
            if missing:
                raise ValueError(f"{spec} names {missing}; the mesh has {part.mesh.axis_names}")
        except (ValueError, TypeError) as error:
            problems.append(f"  {name}: {error}")
            continue
        if default and shape == (2,) and jnp.result_type(x) == jnp.uint32:
            problems.append(f"  {name}: looks like an old PRNG key; pass a typed jax.random.key")
        elif default and shape:
            sizes[name] = shape[0]
        elif not part.replicated(spec):
            for dim, (size, dim_axes) in enumerate(zip(shape, axes, strict=True)):
                split = accumulate if dim == 0 else 1
                if size % (axes_size(part.mesh, dim_axes) * split):
                    devices = f"{axes_size(part.mesh, dim_axes)} devices {dim_axes}"
                    problems.append(
                        f"  {name}: dim {dim} of {shape} does not divide by {devices}"
                        + (microbatches if dim == 0 else "")
                    )
    if len(set(sizes.values())) > 1:
        listed = [f"  {name}: dim 0 is {size}" for name, size in sizes.items()]
        raise_all(
            "value_and_grad: the batch arguments disagree on the size of the batch. Pass "
            "batch_specs= with PartitionSpec() for what is not per example (tables of positions, "
            "frozen weights), and PRNG keys as typed keys, jax.random.key",
            listed,
        )
    for name, size in sizes.items():
        if size == 0:
            raise ValueError(f"value_and_grad: the batch is empty: dim 0 of {name} is 0.")
        if size % (part.data_size * accumulate):
            raise ValueError(
                f"value_and_grad: a batch of {size} does not divide by {part.data_size} devices "
                f"({', '.join(part.data_axes)}) x {accumulate} microbatches (dim 0 of {name}). "
                "Pad it, drop its rest, or change accumulate."
            )
    raise_all("value_and_grad: these arguments cannot be split", problems)
    return Batch(part, accumulate, treedef, tuple(specs))


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
