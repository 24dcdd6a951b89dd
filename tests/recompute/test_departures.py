"""The table of departures: a row that no test plants and expects is a row that nobody has seen come true.

What a test expects is read from the syntax of the tests of this folder, so that a name in a comment, in a docstring, in the
values of a plant or in a test of what is *not* said does not count:

- in a table of cases (a dict that a test is parametrized with): what is in its rows, outside of calls and values;
- in the rows of a ``parametrize`` itself: what is in a column called so (``CAUSES``);
- in an ``assert``: what is compared by ``==`` or ``in``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from narrowgauge.recompute.departures import DEPARTURES, PIECES

CAUSES = {"cause", "causes", "names"}
_PLACES = (ast.Tuple, ast.List, ast.Set, ast.IfExp, ast.BoolOp)
"""What may stand around a name that is expected; not a call or a function, whose strings are arguments."""


def strings(node: ast.AST) -> Iterator[str]:
    """The strings of an expression that are values of it, and not arguments, conditions or subtrahends."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.BinOp) and not isinstance(node.op, ast.Sub):
        yield from strings(node.left)
        yield from strings(node.right)
    elif isinstance(node, _PLACES):
        for each in ast.iter_child_nodes(node):
            if not (isinstance(node, ast.IfExp) and each is node.test):
                yield from strings(each)


def of_assertion(node: ast.AST) -> Iterator[str]:
    """The strings to which something is compared, where the comparison must hold."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        for side, operator in zip(sides[1:], node.ops, strict=True):
            if isinstance(operator, ast.Eq):
                yield from strings(side)
            elif isinstance(operator, ast.In):
                yield from strings(node.left)
    elif isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
        for each in node.values:
            yield from of_assertion(each)


def of_columns(names: ast.expr, rows: ast.expr) -> Iterator[str]:
    """The strings in those columns of a parametrization that hold what is expected."""
    columns = list(strings(names))
    for row in rows.elts if isinstance(rows, ast.List) else []:
        for column, value in zip(columns, getattr(row, "elts", []), strict=False):
            if column in CAUSES:
                yield from strings(value)


def of_tables(tree: ast.Module) -> Iterator[str]:
    """The strings in the rows of the tables with which tests are parametrized."""
    decorators = [each for node in tree.body if isinstance(node, ast.FunctionDef) for each in node.decorator_list]
    cases = [
        each for each in decorators if isinstance(each, ast.Call) and ast.unparse(each.func).endswith("parametrize")
    ]
    for each in cases:
        yield from of_columns(*each.args)
    used = {node.id for each in cases for node in ast.walk(each) if isinstance(node, ast.Name)}
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if (
            isinstance(target, ast.Name)
            and target.id in used
            and isinstance(table := getattr(node, "value", None), ast.Dict)
        ):
            for row in table.values:
                yield from strings(row)


def expected(source: str) -> set[str]:
    """What the tests of a file expect."""
    tree = ast.parse(source)
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    asserted = [each for test in tests for each in ast.walk(test) if isinstance(each, ast.Assert)]
    return {*of_tables(tree), *(found for each in asserted for found in of_assertion(each.test))}


def test_each_departure_is_expected_by_a_test() -> None:
    files = [path for path in Path(__file__).parent.rglob("test_*.py") if path != Path(__file__)]
    named = set().union(*(expected(path.read_text("utf-8")) for path in files))
    assert not DEPARTURES.keys() - named, "rows of the table without a test that expects them"


def test_the_rows_of_the_table_name_their_pieces() -> None:
    for name, row in DEPARTURES.items():
        assert row.name == name and row.pieces and set(row.pieces) <= PIECES.keys()
        assert row.message and row.advice


@pytest.mark.parametrize(
    ("source", "is_expected"),
    [
        ('assert loop.names() == {"rate"}', True),
        ('assert loop.names() == ({"rate"} if departs else set())', True),
        ('assert [(each.name, each.where) for each in found] == [("rate", "head")] * number', True),
        ('assert found and "rate" in loop.names()', True),
        ('# assert loop.names() == {"rate"}', False),
        ('"""rate"""', False),
        ('assert "rate" not in loop.names()', False),
        ('assert not loop.names() - {"rate"}', False),
        ('assert loop.names() <= {"rate", "decay"}', False),
        ('assert not (loop.names() == {"rate"})', False),
        ('assert loop.names() == plant("rate")', False),
        ('assert [each for each in found if each.cause == "rate"]', False),
        ('found = [each for each in loop.names() if each == "rate"]', False),
    ],
)
def test_a_name_counts_only_where_it_is_expected(source: str, is_expected: bool) -> None:
    assert ("rate" in expected(f"def test_it():\n    {source}\n    pass\n")) is is_expected


@pytest.mark.parametrize(
    ("names", "is_expected"), [('("of", "cause")', True), ('("of", "given")', False), ('"cause"', False)]
)
def test_a_name_in_a_column_counts_only_where_the_column_is_called_so(names: str, is_expected: bool) -> None:
    source = f'@pytest.mark.parametrize({names}, [(plant("decay"), "rate")])\ndef test_it(): pass\n'
    assert expected(source) == ({"rate"} if is_expected else set())


@pytest.mark.parametrize(
    ("row", "is_expected"),
    [
        ('(plant, "rate", {"factor": 2.0})', True),
        ('(plant, {"rate"})', True),
        ('(plant, "decay", {"of": "rate"})', False),
        ('(plant("rate"), "decay")', False),
        ('(lambda loop: "rate", "decay")', False),
    ],
)
@pytest.mark.parametrize("is_used", [True, False])
def test_a_name_in_a_table_counts_only_in_a_row_of_one_that_is_used(row: str, is_expected: bool, is_used: bool) -> None:
    use = "FAULTS" if is_used else "OTHERS"
    source = f'FAULTS: dict = {{"rate": {row}}}\n\n@pytest.mark.parametrize("name", {use})\ndef test_it(name): pass\n'
    assert ("rate" in expected(source)) is (is_expected and is_used)
