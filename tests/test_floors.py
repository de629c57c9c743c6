"""How the library is laid out: floors, of which imports go down only, and files of one thought."""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "zerojax"
PATHS = [*sorted(PACKAGE.glob("*.py")), *sorted(PACKAGE.glob("integrations/*.py"))]
FILES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PATHS}

FLOORS = {
    "_hlo": 0,
    "_hlo_groups": 0,
    "_hlo_cost": 0,
    "_hlo_collectives": 0,
    "_tables": 0,
    "_synthetic": 0,
    "_memory_report": 0,
    "_chips": 0,
    "_compile_worker": 0,
    "_specs": 0,
    "_boxes": 0,
    "_leaf_plan": 0,
    "_partition": 0,
    "_planner": 0,
    "_contexts": 0,
    "_processes": 0,
    "_shard": 0,
    "_batch": 1,
    "_loss": 1,
    "_sharding_types": 1,
    "_collectives": 1,
    "_shard_locality": 1,
    "_shard_uses": 1,
    "_master": 1,
    "_compile": 1,
    "_timeline": 1,
    "_xla_options": 1,
    "_manual": 2,
    "_loss_scale": 2,
    "_wire": 2,
    "_unshard": 2,
    "_zero": 2,
    "_expected": 3,
    "_audit": 3,
    "_memory": 3,
    "_formulation": 3,
    "_microbatches": 3,
    "_gradients": 3,
    "_check": 3,
    "_weights": 3,
    "_train": 4,
    "checkpoint": 4,
    "integrations.__init__": 4,
    "integrations.linen": 4,
    "integrations.nnx": 4,
    "__init__": 5,
    "__main__": 5,
}
TOP_LEVEL = {"jax", "numpy", "optax", "zerojax"} | sys.stdlib_module_names
OPTIONAL = ["flax", "matplotlib", "orbax", "rich", "safetensors"]
MAX_LINES = 400

each_file = pytest.mark.parametrize("name", FILES)


def parse(name: str) -> ast.Module:
    return ast.parse(FILES[name].read_text())


def imported_names(node: ast.AST) -> Iterator[str]:
    """What an import statement names, dotted: `from a.b import c` names `a.b.c`."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        parent = ".".join(["zerojax"] * bool(node.level) + [node.module] * bool(node.module))
        yield from (f"{parent}.{alias.name}" for alias in node.names)


def own_imports(tree: ast.AST) -> set[str]:
    """The modules of zerojax that a tree imports, anywhere; the package itself is `__init__`."""
    names = {name for node in ast.walk(tree) for name in imported_names(node)}
    paths = [name.split(".")[1:] for name in names if name.split(".")[0] == "zerojax"]
    prefixes = [(".".join(path[:2]), ".".join(path[:1]), "__init__") for path in paths]
    return {next(name for name in names if name in FILES) for names in prefixes}


def outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported."""
    yield node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from outside_functions(child)


@each_file
def test_every_module_has_a_floor_and_imports_only_from_its_own_and_below(name: str) -> None:
    assert name in FLOORS, f"add zerojax/{name}.py to FLOORS in {__file__}: where does it belong?"
    above = {other for other in own_imports(parse(name)) if FLOORS.get(other, 0) > FLOORS[name]}
    assert not above, f"{name} is on floor {FLOORS[name]} and imports {sorted(above)} from above"


def test_imports_have_no_cycles() -> None:
    graph = {name: own_imports(parse(name)) for name in FILES}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


@each_file
def test_only_jax_numpy_and_optax_at_import(name: str) -> None:
    names = {n for node in outside_functions(parse(name)) for n in imported_names(node)}
    allowed = TOP_LEVEL | ({"flax"} if name.startswith("integrations.") else set())
    optional = {n for n in names if n.split(".")[0] not in allowed}
    assert not optional, f"{name}: import {sorted(optional)} in the functions that need it"


@each_file
def test_only_public_jax(name: str) -> None:
    nodes = list(ast.walk(parse(name)))
    imports = {n for node in nodes for n in imported_names(node) if "_src" in n.split(".")}
    attributes = [node.lineno for node in nodes if getattr(node, "attr", None) == "_src"]
    assert not imports, f"{name} imports {sorted(imports)}"
    assert not attributes, f"{name} uses jax._src in lines {attributes}"


@each_file
def test_readable_in_one_sitting(name: str) -> None:
    lines = len(FILES[name].read_text().splitlines())
    assert lines <= MAX_LINES, f"zerojax/{name}.py has {lines} lines: split it"


def test_import_needs_no_optional_dependency() -> None:
    code = f"import sys, zerojax; print(*(m for m in {OPTIONAL} if m in sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == []
