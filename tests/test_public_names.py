"""Every public name has one import path and says, in its docstring, what a stranger needs to use it."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import textwrap
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import narrowgauge

SOURCE = Path(narrowgauge.__file__).parent


def homes_of(stub: Path) -> dict[str, str]:
    """Return the module that defines each name which a stub offers; the packages of the first one are left out."""
    package = ".".join(stub.relative_to(SOURCE.parent).parent.parts)
    nodes = [node for node in ast.parse(stub.read_text(encoding="utf-8")).body if isinstance(node, ast.ImportFrom)]
    return {alias.name: f"{package}.{node.module}" for node in nodes if node.module for alias in node.names}


OFFERED = {
    ".".join(stub.relative_to(SOURCE.parent).parent.parts): homes_of(stub)
    for stub in (SOURCE / "__init__.pyi", *sorted(SOURCE.glob("*/__init__.pyi")))
}
HOMES = OFFERED["narrowgauge"]


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


PUBLIC = [(package, name) for package, names in OFFERED.items() for name in names]


@pytest.mark.parametrize(("package", "name"), PUBLIC, ids=[f"{package}.{name}" for package, name in PUBLIC])
def test_loads_on_first_use(package: str, name: str) -> None:
    module = import_module(package)
    assert getattr(module, name) is not None
    assert name in dir(module) and name in module.__all__


def test_there_are_few_names_and_each_is_offered_once() -> None:
    names = [name for offered in OFFERED.values() for name in offered]
    assert len(HOMES) <= 40
    assert sorted(names) == sorted(set(names))
    assert {package.partition(".")[2] for package in OFFERED} - {""} <= set(dir(narrowgauge))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = narrowgauge.no_such_name


def test_each_name_is_defined_where_it_is_said_to_live() -> None:
    astray = []
    for package, offered in OFFERED.items():
        for name, home in offered.items():
            thing = getattr(import_module(package), name)
            if (inspect.isclass(thing) or inspect.isfunction(thing)) and thing.__module__ != home:
                astray.append(f"{name} is defined in {thing.__module__}, and '{home}' is said to hold it")
            if package != "narrowgauge" and not home.startswith(f"{package}."):
                astray.append(f"{package} offers {name} of another room: {home}")
    assert not astray, "\n".join(astray)


def test_only_packages_with_a_stub_hand_names_on() -> None:
    """An `__init__.py` that imported a name of its room would add a path that no stub lists.

    The public names of a framework's integration have their one path in its package.
    """
    second = []
    frameworks = set((SOURCE / "integrations").rglob("__init__.py"))
    for path in set(SOURCE.rglob("*/__init__.py")) - frameworks:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if module.startswith("narrowgauge.") and module != "narrowgauge.errors":
                second.append(f"{path.relative_to(SOURCE)}:{node.lineno}: {ast.unparse(node)}")
    assert not second, "\n".join(second)


def test_no_public_name_is_also_a_module() -> None:
    """A function named like a file beside it would be replaced by the file as soon as somebody imports that."""
    astray = []
    for package, offered in OFFERED.items():
        folder = SOURCE.joinpath(*package.split(".")[1:])
        files = {path.stem for path in folder.glob("*.py")} | {path.name for path in folder.iterdir() if path.is_dir()}
        astray += [f"{package}.{name} is also a module" for name in sorted(files & set(offered))]
    # Below a room nothing is replaced, but a reader would not know which is meant: only the home of the name itself may have it.
    homes = {name: home for offered in OFFERED.values() for name, home in offered.items()}
    for path in SOURCE.glob("*/**/*.py"):
        module = ".".join(("narrowgauge", *path.relative_to(SOURCE).with_suffix("").parts))
        if path.stem in homes and homes[path.stem] != module:
            astray.append(f"{module} is named like a public name, and not its home")
    assert not astray, "\n".join(astray)


def test_docstrings_are_complete() -> None:
    incomplete = []
    for package, name in PUBLIC:
        thing = getattr(import_module(package), name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            missing = missing_sections(thing)
            if missing:
                incomplete.append(f"the docstring of {package}.{name} lacks {', '.join(missing)}")
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
