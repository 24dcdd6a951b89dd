"""Count shapes that hide how code works: what is too large to read at once, what outlives a call,
and modules that import each other in a circle.
"""

from __future__ import annotations

import ast
import functools
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "narrowgauge"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
CACHES = {"cache", "lru_cache", "cached_property"}
MUTABLE = {"dict", "list", "set", "defaultdict", "Counter", "OrderedDict", "WeakSet"}
MUTABLE |= {"WeakKeyDictionary", "WeakValueDictionary", "WeakTensorKeyDictionary"}

# The most that the source may hold of each. Lower a ceiling whenever a change allows it.
CEILINGS = {
    "functions above 400 nodes": 24,
    "functions with more than 8 parameters": 9,
    "classes above 1,500 nodes": 5,
    "files above 3,500 nodes": 2,
    "registries at module level": 5,
    "caches": 59,
    "modules in a circle": 0,
}


@functools.cache
def syntax_trees() -> dict[str, ast.Module]:
    """Return the syntax tree of each module, by its path inside the package."""
    trees = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).with_suffix("").as_posix()
        trees[name] = ast.parse(path.read_text(encoding="utf-8"))
    return trees


def size(tree: ast.AST) -> int:
    return sum(1 for _ in ast.walk(tree))


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for module, tree in syntax_trees().items():
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS):
                yield f"{module}:{node.lineno} {node.name}", node


def large_functions() -> list[str]:
    return [name for name, node in functions() if size(node) > 400]


def functions_of_many_parameters() -> list[str]:
    names = []
    for name, node in functions():
        arguments = node.args
        count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
        if count > 8:
            names.append(name)
    return names


def large_classes() -> list[str]:
    names = []
    for module, tree in syntax_trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and size(node) > 1500:
                names.append(f"{module}:{node.lineno} {node.name}")
    return names


def large_files() -> list[str]:
    return [module for module, tree in syntax_trees().items() if size(tree) > 3500]


def is_empty_container(value: ast.expr | None) -> bool:
    """Return whether an expression makes a container that only later code can fill."""
    if isinstance(value, ast.Dict):
        return not value.keys
    if isinstance(value, ast.List):
        return not value.elts
    if isinstance(value, ast.Call):
        called = value.func
        if isinstance(called, ast.Subscript):
            called = called.value
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        return name in MUTABLE and not value.args
    return False


def registries() -> list[str]:
    """Name module-level containers that begin empty: they hold what calls leave behind."""
    names = []
    for module, tree in syntax_trees().items():
        for node in tree.body:
            is_assignment = isinstance(node, ast.Assign | ast.AnnAssign)
            if is_assignment and is_empty_container(node.value):
                names.append(f"{module}:{node.lineno}")
    return names


def caches() -> list[str]:
    names = []
    for name, node in functions():
        for decorator in node.decorator_list:
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            if CACHES & {getattr(called, "attr", ""), getattr(called, "id", "")}:
                names.append(name)
    return names


def imports_of(tree: ast.Module, modules: set[str]) -> set[str]:
    """Return the modules of the package that a module imports, also inside its functions."""
    targets = set()
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            targets.add(name.removeprefix("narrowgauge.").replace(".", "/"))
    return targets & modules


def modules_in_circles() -> list[str]:
    """Name modules that import each other, until taking one away leaves no circle."""
    trees = syntax_trees()
    graph = {}
    for module, tree in trees.items():
        graph[module] = imports_of(tree, set(trees)) - {module}
    names = []
    while True:
        try:
            tuple(graphlib.TopologicalSorter(graph).static_order())
        except graphlib.CycleError as error:
            circle = error.args[1]
            names.append(" -> ".join(reversed(circle)))
            graph.pop(circle[0])
            for targets in graph.values():
                targets.discard(circle[0])
        else:
            return names


MEASURES = {
    "functions above 400 nodes": large_functions,
    "functions with more than 8 parameters": functions_of_many_parameters,
    "classes above 1,500 nodes": large_classes,
    "files above 3,500 nodes": large_files,
    "registries at module level": registries,
    "caches": caches,
    "modules in a circle": modules_in_circles,
}


@pytest.mark.parametrize("shape", CEILINGS)
def test_no_shape_is_above_its_ceiling(shape: str) -> None:
    places = MEASURES[shape]()
    assert len(places) <= CEILINGS[shape], "\n".join(places)
