"""What flax keeps arrays in: boxes of linen (`nn.Partitioned`) and variables of nnx (`nnx.Param`).

A tree that has some comes from a program that imported flax; nothing here imports it first.
"""

import sys
from typing import Any

import jax
from jax.sharding import PartitionSpec as P


def pure(tree: Any) -> Any:
    """A tree without nnx's variables: the arrays in them.

    `nnx.Optimizer` shows an optimizer variables at `init` and arrays at `update`. State made of
    variables would also take over their sharding, which is that of the parameters.
    """
    nnx = sys.modules.get("flax.nnx")
    return nnx.as_pure(tree) if nnx else tree


def boxed_as(tree: Any, arrays: Any) -> Any:
    """The arrays in variables as those of `tree`, where this has some and they are as many.

    `nnx.Optimizer` takes for gradients what is in variables of the kind that it updates.
    """
    same = jax.tree.structure(pure(tree)) == jax.tree.structure(arrays)
    return jax.tree.structure(tree).unflatten(jax.tree.leaves(arrays)) if same else arrays


def declared_specs(tree: Any) -> list[P | None]:
    """For each leaf the PartitionSpec that its box or variable declares, if it has one."""
    linen, nnx = sys.modules.get("flax.linen"), sys.modules.get("flax.nnx")
    kinds = tuple([linen.Partitioned] if linen else []) + tuple([nnx.Variable] if nnx else [])

    def declared(node: Any) -> P | None:
        if nnx and isinstance(node, nnx.Variable):
            return nnx.get_partition_spec(node).get_value() or None  # P(): nothing was declared
        if linen and isinstance(node, linen.LogicallyPartitioned):  # before its base
            rules = node.rules or linen.get_logical_axis_rules()
            return linen.logical_to_mesh_axes(node.names, rules) if rules else None
        return node.get_partition_spec() if isinstance(node, kinds) else None

    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kinds))
    return [declared(node) for node in nodes for _ in jax.tree.leaves(node)]
