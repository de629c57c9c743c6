"""A transformer of a given size, as shapes: for estimates before there is a model."""

import math
from typing import Any

import jax
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

# Tensor parallelism: weights before a nonlinearity are split by columns, those behind it by rows.
TRANSFORMER_SPECS = {
    "attention": P(None, None, "model"),
    "up": P(None, None, "model"),
    "down": P(None, "model"),
    "norms": P(),
}
_ASPECT = 128  # features per layer: between those of GPT-2 XL and GPT-3
_MULTIPLE = 128  # of which all widths are multiples


def transformer(parameters: float, dtype: Any = jnp.float32) -> dict[str, jax.ShapeDtypeStruct]:
    """The stacked layers of a transformer with about so many parameters, without embeddings.

    Its width is about 128 times its depth; the hidden width, about four times the width, is what
    brings the number within 1% (5% below a hundred million).

    Args:
      parameters: their number, at least a million.
      dtype: of all of them.

    Returns:
      Shapes whose first dim is the layer (`scan_dims=1`).

    Raises:
      ValueError: the number is too small.

    References:
      Brown et al., "Language Models are Few-Shot Learners", 2020, table 2.1 (depths and widths).

    >>> transformer(175e9, jnp.bfloat16)["up"]
    ShapeDtypeStruct(shape=(96, 12288, 49536), dtype=bfloat16)
    """
    if not 1e6 <= parameters < math.inf:
        raise ValueError(f"a transformer needs at least 1e6 parameters, got {parameters:g}.")

    def multiple(n: float) -> int:
        return _MULTIPLE * max(1, round(n / _MULTIPLE))

    layers = max(1, round((parameters / (12 * _ASPECT**2)) ** (1 / 3)))
    width = multiple(math.sqrt(parameters / (12 * layers)))
    hidden = multiple((parameters / layers - 4 * width**2) / (2 * width))
    shapes = {
        "attention": (layers, width, 4 * width),  # queries, keys, values and the output
        "up": (layers, width, hidden),
        "down": (layers, hidden, width),
        "norms": (layers, 2, width),
    }
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
