"""Every public name has one import path and says, in its docstring, what a stranger needs to use it."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import narrowgauge

SOURCE = Path(narrowgauge.__file__).parent
HOMES: dict[str, str] = narrowgauge._HOMES


def section(title: str, docstring: str) -> bool:
    return re.search(rf"^\s*{title}:", docstring, re.MULTILINE) is not None


def parameters(thing: Any) -> list[str]:
    try:
        found = inspect.signature(thing).parameters
    except (TypeError, ValueError):
        return []
    return [name for name in found if name not in ("self", "cls")]


def raises(function: Any) -> bool:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return any(isinstance(node, ast.Raise) for node in ast.walk(tree))


def returns_something(function: Any) -> bool:
    return inspect.signature(function).return_annotation not in (None, "None", inspect.Signature.empty)


def missing_sections(thing: Any) -> list[str]:
    """What the docstring of a function or class leaves out, in words."""
    # Not inspect.getdoc: it would lend a class the docstring of its parent.
    docstring = (thing.__doc__ or "").strip()
    if not docstring:
        return ["a docstring"]
    missing = []
    if not docstring.splitlines()[0].endswith("."):
        missing.append("a one-line summary that ends with a period")
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return missing
    if parameters(thing) and not (section("Args", docstring) or section("Attributes", docstring)):
        missing.append("'Args:'")
    unnamed = [name for name in parameters(thing) if not re.search(rf"\b{name}\b", docstring)]
    if unnamed:
        missing.append(f"a word on {', '.join(unnamed)}")
    if inspect.isfunction(thing):
        if returns_something(thing) and not section("Returns", docstring):
            missing.append("'Returns:'")
        if raises(thing) and not section("Raises", docstring):
            missing.append("'Raises:'")
        if ">>>" not in docstring and "Example" not in docstring:
            missing.append("an 'Example:' that runs")
    return missing


@pytest.mark.parametrize("name", narrowgauge.__all__)
def test_loads_on_first_use(name: str) -> None:
    assert getattr(narrowgauge, name) is not None
    assert name in dir(narrowgauge)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = narrowgauge.no_such_name


def test_each_name_is_defined_where_it_is_said_to_live() -> None:
    astray = []
    for name, home in HOMES.items():
        thing = getattr(narrowgauge, name)
        if (inspect.isclass(thing) or inspect.isfunction(thing)) and thing.__module__ != f"narrowgauge.{home}":
            astray.append(f"{name} is defined in {thing.__module__}, and 'narrowgauge.{home}' is said to hold it")
    assert not astray, "\n".join(astray)


def test_no_folder_offers_a_second_path() -> None:
    """Only the package itself hands names on: an `__init__.py` deeper down that re-exports one would add a path.

    ``_torch/__init__.py`` is a module itself: it defines what the other names of PyTorch are reached by. The public names of a
    framework's integration have their one path in its package.
    """
    second = []
    frameworks = set((SOURCE / "integrations").rglob("__init__.py"))
    for path in set(SOURCE.rglob("*/__init__.py")) - {SOURCE / "_torch" / "__init__.py"} - frameworks:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Import, ast.ImportFrom)) and "__future__" not in ast.unparse(node):
                second.append(f"{path.relative_to(SOURCE)}:{node.lineno}: {ast.unparse(node)}")
    assert not second, "\n".join(second)


def test_no_public_name_is_also_a_module() -> None:
    """A function named like its file would be replaced by the file as soon as somebody imports that."""
    files = {path.stem for path in SOURCE.glob("*.py")} | {path.name for path in SOURCE.iterdir() if path.is_dir()}
    assert not files & set(HOMES)
    # Below a room nothing is replaced, but a reader would not know which is meant: only the home of the name itself may have it.
    below = {path.relative_to(SOURCE).with_suffix("") for path in SOURCE.glob("*/**/*.py") if path.stem in HOMES}
    astray = [str(path) for path in below if HOMES[path.name] != ".".join(path.parts)]
    assert not astray, f"named like a public name, and not its home: {', '.join(astray)}"


def test_type_checkers_are_told_the_same_paths() -> None:
    tree = ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))
    told = {
        alias.name: (node.module or "").removeprefix("narrowgauge.")
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert told == HOMES


def test_docstrings_are_complete() -> None:
    incomplete = []
    for name in HOMES:
        thing = getattr(narrowgauge, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            missing = missing_sections(thing)
            if missing:
                incomplete.append(f"the docstring of narrowgauge.{name} lacks {', '.join(missing)}")
    assert not incomplete, "\n".join(incomplete)


def test_the_package_loads_nothing_before_it_is_asked() -> None:
    code = "import sys, narrowgauge; print([name for name in sys.modules if name.startswith('narrowgauge.')])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def documented(number: int) -> int:
    """Double a number.

    Args:
        number: any integer.

    Returns:
        Twice as much.

    Raises:
        ValueError: never.

    Example:
        >>> documented(2)
        4
    """
    if number != number:
        raise ValueError
    return 2 * number


def bare(number: int) -> int:
    """Double it"""
    if number != number:
        raise ValueError
    return 2 * number


def test_the_rule_itself_can_fail() -> None:
    assert missing_sections(documented) == []
    assert len(missing_sections(bare)) == 6
