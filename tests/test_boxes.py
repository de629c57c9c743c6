"""What flax's boxes and variables declare is what `partition` plans with."""

import contextlib
import functools

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax import numpy as jnp
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import zerojax

MESH = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
DATA = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
EIGHT = jax.make_mesh((8,), ("data",))
KERNEL = jax.ShapeDtypeStruct((16, 32), jnp.float32)
RULES = (("embed", None), ("mlp", "model"))
LOGICAL = functools.partial(nn.LogicallyPartitioned, KERNEL)


def variable(spec=None, rules=None) -> nnx.Param:
    metadata = {"out_sharding": spec} if spec else {}
    return nnx.Param(
        KERNEL, eager_sharding=False, **metadata, **({"sharding_rules": rules} if rules else {})
    )


@pytest.mark.parametrize(
    "box, mesh, rules, expected",
    [
        (nn.Partitioned(KERNEL, (None, "model")), MESH, (), P(None, "model")),
        (nn.Partitioned(KERNEL, ("model",)), MESH, (), P("model")),
        (LOGICAL(("embed", "mlp")), MESH, RULES, P(None, "model")),
        (LOGICAL(("mlp", "other")), MESH, RULES, P("model")),
        (LOGICAL(("embed", "mlp"), rules=RULES), MESH, (), P(None, "model")),
        (LOGICAL(("embed", "mlp")), DATA, (), P()),
        (variable((None, "model")), MESH, (), P(None, "model")),
        (variable(("embed", "mlp"), RULES), MESH, (), P(None, "model")),
        (variable(("embed", "mlp")), MESH, RULES, P(None, "model")),
        (variable(), DATA, (), P()),
    ],
)  # fmt: skip
def test_declared_specs_are_read(box, mesh, rules, expected):
    """Alone and among bare arrays, of which each keeps its own."""
    trees = {"kernel": box}, {"a": {"kernel": box}, "b": {"kernel": box}}
    for tree in trees:
        with nn.logical_axis_rules(rules) if rules else contextlib.nullcontext():
            part = zerojax.partition(tree, mesh)
        for leaf in part.leaves:
            assert P(*leaf.model_spec, *[None] * 2)[:2] == P(*expected, None, None)[:2], leaf


@pytest.mark.parametrize(
    "box, words",
    [
        (LOGICAL(("embed", "mlp")), "do not say how they are sharded"),
        (nn.Partitioned(KERNEL, (None, "tensor")), r"names \['tensor'\]; the mesh has"),
        (variable(), "do not say how they are sharded"),
        (variable(("embed", "mlp")), r"names \['embed', 'mlp'\]; the mesh has"),
    ],
)
def test_nothing_is_assumed(box, words):
    with pytest.raises(ValueError, match=words):
        zerojax.partition({"kernel": box}, MESH)


def test_what_is_declared_comes_before_where_an_array_is():
    array = jax.device_put(jnp.ones((16, 32)), jax.NamedSharding(EIGHT, P("data")))
    boxed = {"a": nn.Partitioned(array, (None, None)), "b": array}
    part = zerojax.partition(boxed, EIGHT)
    assert [leaf.model_spec for leaf in part.leaves] == [P(None, None), P("data", None)]


def test_a_bare_leaf_among_boxes_is_replicated():
    known = jax.device_put(jnp.ones((16, 32)), jax.NamedSharding(EIGHT, P("data")))
    for box in (nn.Partitioned(KERNEL, (None, "model")), variable((None, "model"))):
        part = zerojax.partition({"a": box, "b": KERNEL}, MESH)
        assert part.model_specs["b"] == P(None, None)
        boxed = {"a": nn.Partitioned(known, (None,)), "b": known}
        assert zerojax.partition(boxed, EIGHT).model_specs["b"] == P("data", None)


@pytest.mark.parametrize("stage", [1, 3])
def test_variables_and_arrays_are_one_tree(stage: int):
    """`nnx.Optimizer` calls init with variables and update with the arrays in them."""
    variables = nnx.State({"kernel": nnx.Param(jnp.ones((13, 3))), "bias": nnx.Param(jnp.ones(3))})
    arrays = nnx.as_pure(variables)
    of_variables, of_arrays = (
        zerojax.partition(tree, EIGHT, stage=stage) for tree in (variables, arrays)
    )
    assert of_variables.leaves == of_arrays.leaves
    assert of_variables.treedef == of_arrays.treedef

    part = of_variables
    tx = zerojax.zero(optax.adam(0.1), part)
    placed = part.place(variables)
    state = tx.init(jax.tree.map(nnx.Param, placed))
    assert jax.tree.structure(state) == jax.tree.structure(optax.adam(0.1).init(arrays))
    boxed = jax.tree.map(nnx.Param, placed)
    for params in (placed, boxed):
        updates, _ = tx.update(params, state, params)
        new = optax.apply_updates(placed, updates)
        np.testing.assert_allclose(part.gather(new)["kernel"], 0.9, rtol=1e-6)

    def loss_fn(params, x):
        return jnp.mean((x @ nnx.as_pure(params)["kernel"]) ** 2)

    loss, grads = zerojax.value_and_grad(loss_fn, part)(boxed, jnp.ones((8, 13)))
    step = zerojax.train_step(zerojax.value_and_grad(loss_fn, part), tx, part)
    _, _, metrics = step(boxed, state, jnp.ones((8, 13)))
    assert float(loss) == float(metrics["loss"]) == 169.0
    assert jax.tree.structure(grads) == jax.tree.structure(boxed)  # as jax.value_and_grad
