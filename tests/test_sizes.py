"""The tree has the sizes of ``tests/sizes.toml``: none above its row, and none more than 2 % below
it, so that a cut is kept and a raise is a line that a reviewer sees.
"""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import narrowgauge
from narrowgauge.spec.toml import load_data, load_toml

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "narrowgauge"
SIZES = Path(__file__).parent / "sizes.toml"
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SLACK = 0.02


@functools.cache
def syntax_trees(folder: Path) -> list[ast.Module]:
    return [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))]


def nodes(tree: ast.AST) -> int:
    return sum(1 for _ in ast.walk(tree))


def values(table: Any) -> int:
    """Count the single values of a TOML table."""
    if isinstance(table, dict):
        return sum(map(values, table.values()))
    return sum(map(values, table)) if isinstance(table, list) else 1


def package_sizes() -> dict[str, float]:
    """Return the nodes of each package, with one for each value of its TOML files."""
    sizes = Counter[str]()
    for path in SOURCE.rglob("*"):
        package = path.relative_to(SOURCE).parts[0]
        name = package if (SOURCE / package).is_dir() else "top"
        if path.suffix == ".py":
            sizes[name] += nodes(ast.parse(path.read_text(encoding="utf-8")))
        elif path.suffix == ".toml":
            sizes[name] += values(load_toml(path.read_text(encoding="utf-8")))
    for name in ("tests", "benchmarks"):
        sizes[name] = sum(map(nodes, syntax_trees(ROOT / name)))
    return dict(sizes)


def is_number(statement: ast.stmt) -> bool:
    """Return whether a statement gives a number a name."""
    value = getattr(statement, "value", None)
    if isinstance(value, ast.UnaryOp):
        value = value.operand
    named = isinstance(statement, ast.Assign | ast.AnnAssign)
    return named and isinstance(value, ast.Constant) and type(value.value) in (int, float)


def shapes() -> dict[str, float]:
    """Count what is too large to read at once, and what a user or a reviewer must learn."""
    counts = Counter[str]()
    for tree in syntax_trees(SOURCE):
        counts["files_above_3500_nodes"] += nodes(tree) > 3500
        counts["numbers_of_modules"] += sum(map(is_number, tree.body))
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS):
                counts["functions_above_400_nodes"] += nodes(node) > 400
            elif isinstance(node, ast.ClassDef):
                counts["classes_above_1500_nodes"] += nodes(node) > 1500
    counts["public_names"] = len(narrowgauge.__all__)
    counts["kinds_of_readings"] = len(load_data("kinds", "analysis"))
    return dict(counts)


def is_packed(node: ast.AST) -> bool:
    """Return whether a line assigns two values, or is an expression for its effect."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, (ast.IfExp, ast.BoolOp, *COMPREHENSIONS))
    pairs = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)
    return pairs and isinstance(node.value, ast.Tuple)


def densities() -> dict[str, float]:
    """Count what must be unfolded before it can be stepped through, per 1,000 statements."""
    counts = Counter[str]()
    for tree in syntax_trees(SOURCE):
        for node in ast.walk(tree):
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            counts["statements"] += isinstance(node, ast.stmt) and not is_text
            counts["comprehensions"] += isinstance(node, COMPREHENSIONS)
            counts["conditionals"] += isinstance(node, ast.IfExp)
            counts["packed"] += is_packed(node)
    statements = counts.pop("statements")
    return {name: round(1000 * count / statements, 1) for name, count in counts.items()}


@pytest.mark.parametrize(
    ("group", "measure"),
    [("nodes", package_sizes), ("shape", shapes), ("density", densities)],
)
def test_sizes_are_those_of_the_table(group: str, measure: Callable[[], dict[str, float]]) -> None:
    rows = load_toml(SIZES.read_text(encoding="utf-8"))[group]
    sizes = measure()
    assert rows.keys() == sizes.keys()
    faults = []
    for name, size in sizes.items():
        if size > rows[name]:
            faults.append(f"{name} is {size}, above {rows[name]}: make it smaller")
        elif size < rows[name] * (1 - SLACK):
            faults.append(f"{name} is {size}, below {rows[name]}: lower its row in {SIZES.name}")
    assert not faults, "\n".join(faults)
