"""The plan of one leaf: which of its dims is sharded over which mesh axes, and why."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from zerojax._specs import Axes, Spec, axes_size, is_inexact, to_spec


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """Where one parameter, and everything of its shape, is sharded.

    Attributes:
      path: key path of the leaf, as `jax.tree_util.keystr` prints it.
      shape: the *natural* shape, the user's.
      dtype: dtype of the parameter.
      model: per dim, the model axes that the user's spec puts there.
      shard: per dim, the data axes that ZeRO adds behind them, the last of `shard_axes` first.
      stored: the shape that is sharded: `shape`, padded where no dim divides.
      reason: why the leaf stays whole, or is padded; empty when neither.
      scan_dims: how many leading dims the model scans over.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    model: Spec
    shard: Spec
    stored: tuple[int, ...]
    reason: str = ""
    scan_dims: int = 0

    @property
    def model_spec(self) -> P:
        """The user's PartitionSpec."""
        return to_spec(self.model)

    @property
    def shard_spec(self) -> P:
        """The PartitionSpec of optimizer state and reduced gradients."""
        return to_spec(tuple(m + s for m, s in zip(self.model, self.shard, strict=True)))

    @property
    def model_axes(self) -> Axes:
        """The mesh axes that the user's own spec uses."""
        return sum(self.model, ())

    @property
    def shard_axes(self) -> Axes:
        """The data axes over which ZeRO shards this leaf; empty if it stays whole."""
        return sum(self.shard, ())

    @property
    def padded(self) -> bool:
        """Whether the stored shape differs from the natural one."""
        return self.stored != self.shape

    @property
    def trainable(self) -> bool:
        """Whether the leaf can have a gradient: integers, bools and PRNG keys cannot."""
        return is_inexact(self.dtype)

    def trailing(self, ndim: int) -> "LeafPlan":
        """The plan of a slice along leading dims, or with new leading dims, of `ndim` dims."""
        new, kept = (1,) * (ndim - len(self.shape)), slice(max(len(self.shape) - ndim, 0), None)
        return dataclasses.replace(
            self,
            shape=new + self.shape[kept],
            stored=new + self.stored[kept],
            model=((),) * len(new) + self.model[kept],
            shard=((),) * len(new) + self.shard[kept],
            scan_dims=max(self.scan_dims + ndim - len(self.shape), 0),
        )

    def row(self, mesh: Mesh | AbstractMesh) -> dict[str, Any]:
        """The leaf's line of the table that `print(part)` shows; bytes are per device."""

        def bytes_in(shape: tuple[int, ...], axes: Axes) -> int:
            return math.prod(shape) // axes_size(mesh, axes) * self.dtype.itemsize

        return {
            "path": self.path,
            "shape": list(self.shape),
            "dtype": str(self.dtype),
            "model_spec": _text(self.model_spec),
            "shard_spec": _text(self.shard_spec),
            "bytes_whole": bytes_in(self.shape, self.model_axes),
            "bytes_shard": bytes_in(self.stored, self.model_axes + self.shard_axes),
            "reason": self.reason,
        }


def _text(spec: P) -> str:
    """A spec without the dims behind the last sharded one."""
    sharded = [dim for dim, axes in enumerate(spec) if axes is not None]
    return repr(P(*spec[: sharded[-1] + 1])) if sharded else "P()"


def plan_dims(
    shape: tuple[int, ...],
    model: Spec,
    scan_dims: int,
    override: int | None,
    skip: str,
    *,
    sizes: dict[str, int],
    shard_axes: Axes,
    pad: bool,
    stage: int,
) -> tuple[Spec, tuple[int, ...], str]:
    """Per dim the shard axes, the stored shape, and the reason why whole or padded."""
    whole = ((),) * len(shape)
    used = sum(model, ())
    free = tuple(a for a in shard_axes if a not in used)
    axes = tuple(a for a in free if sizes[a] > 1)
    shards = math.prod(sizes[a] for a in axes)
    # Padding a dim that a model axis shards would interleave the padding; such a dim must divide.
    local = [n // math.prod(sizes[a] for a in m) for n, m in zip(shape, model, strict=True)]
    candidates = range(scan_dims, len(shape))
    if override is not None:
        if not 0 <= override < len(shape):
            raise ValueError(f"shard_dim gave dim {override} for shape {shape}.")
        candidates = [override]

    def search(pad: bool) -> tuple[int, ...] | None:
        """The dim of each axis, by the order that `partition` documents."""
        best, best_key = None, None
        for dims in itertools.product(candidates, repeat=len(axes)):
            stored, fits = _stored(shape, model, dims, axes, sizes)
            if not fits or (not pad and stored != shape):
                continue
            distinct = set(dims)
            key = (
                math.prod(stored),
                sum(bool(model[d]) for d in distinct),
                len(distinct),
                -max(local[d] for d in distinct),
                dims,
            )
            if best_key is None or key < best_key:
                best, best_key = dims, key
        return best

    dims = None
    if stage == 0:
        reason = "stage 0 shards no state"
    elif skip:
        reason = skip
    elif not free:
        reason = f"its own spec already uses {shard_axes}"
    elif not axes:
        reason = f"one device on {free}"
    elif not shape:
        reason = "scalar"
    elif math.prod(local) < shards:
        reason = f"{math.prod(local)} elements are fewer than {shards} shards"
    elif not candidates:
        reason = f"every dim is scanned over (scan_dims={scan_dims})"
    elif (dims := search(pad)) is None:
        reason = f"no dim divides by {shards}" + (
            ", and padding would split a model axis's shards" if pad else ", and pad=False"
        )
        if override is not None and pad:
            raise ValueError(f"shard_dim gave dim {override} of {shape}, but {reason}.")
    else:
        reason = ""
    if dims is None:
        return whole, shape, reason
    stored, _ = _stored(shape, model, dims, axes, sizes)
    # The last axis is the major one: reduced first, it leaves contiguous blocks to those before it.
    pairs = list(zip(axes, dims, strict=True))[::-1]
    shard = tuple(tuple(axis for axis, dim in pairs if dim == i) for i in range(len(shape)))
    if stored != shape:
        sizes_by_dim = enumerate(zip(shape, stored, strict=True))
        grown = [f"dim {dim}: {n} to {s}" for dim, (n, s) in sizes_by_dim if n != s]
        why = "no dim divides" if override is None else "shard_dim chose it"
        reason = f"padded, {why}: " + ", ".join(grown)
    return shard, stored, reason


def _stored(
    shape: tuple[int, ...], model: Spec, dims: Sequence[int], axes: Axes, sizes: dict[str, int]
) -> tuple[tuple[int, ...], bool]:
    """The padded shape, and whether padding leaves the dims of model axes alone."""
    factors = [1] * len(shape)
    for dim, axis in zip(dims, axes, strict=True):
        factors[dim] *= sizes[axis]
    stored, fits = list(shape), True
    for dim in set(dims):
        block = factors[dim] * math.prod(sizes[a] for a in model[dim])
        stored[dim] = -(-shape[dim] // block) * block
        fits &= stored[dim] == shape[dim] or not model[dim]
    return tuple(stored), fits
