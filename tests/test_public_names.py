"""Every public name has one import path and says, in its docstring, what a stranger needs to use
it.
"""

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
from tables import exhaustive

SOURCE = Path(narrowgauge.__file__).parent


def homes_of(stub: Path) -> dict[str, str]:
    """Return the module that defines each name which a stub offers; the packages of the first one
    are left out.
    """
    package = ".".join(stub.relative_to(SOURCE.parent).parent.parts)
    nodes = []
    for node in ast.parse(stub.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            nodes.append(node)
    homes = {}
    for node in nodes:
        if node.module:
            for alias in node.names:
                homes[alias.name] = f"{package}.{node.module}"
    return homes


OFFERED = {
    ".".join(stub.relative_to(SOURCE.parent).parent.parts): homes_of(stub)
    for stub in (SOURCE / "__init__.pyi", *sorted(SOURCE.glob("*/__init__.pyi")))
}
HOMES = OFFERED["narrowgauge"]


def missing_sections(thing: Any) -> list[str]:
    """Return what the docstring of a function or class leaves out."""
    docstring = (
        thing.__doc__ or ""
    ).strip()  # inspect.getdoc would lend a class the docstring of its parent
    if not docstring.partition("\n\n")[0].endswith("."):
        return ["a summary that ends with a period"]
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return []
    signature = inspect.signature(thing)
    sections = set(
        re.findall(r"^\s*(Args|Attributes|Returns|Raises|Example):", docstring, re.MULTILINE)
    )
    names = [name for name in signature.parameters if name not in ("self", "cls")]
    missing = []
    for name in names:
        if not re.search(rf"\b{name}\b", docstring):
            missing.append(f"a word on {name}")
    if names and not sections & {"Args", "Attributes"}:
        missing.append("'Args:'")
    if inspect.isfunction(thing):
        source = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(thing))))
        if (
            signature.return_annotation not in (None, "None", signature.empty)
            and "Returns" not in sections
        ):
            missing.append("'Returns:'")
        if any(isinstance(node, ast.Raise) for node in source) and "Raises" not in sections:
            missing.append("'Raises:'")
        if ">>>" not in docstring and "Example" not in docstring:
            missing.append("an 'Example:' that runs")
    return missing


def test_there_are_few_names_and_each_is_offered_once() -> None:
    names = []
    for offered in OFFERED.values():
        names.extend(offered)
    assert len(HOMES) <= 33
    assert sorted(names) == sorted(set(names))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = narrowgauge.no_such_name


@exhaustive(
    ("package", "name"), [(package, name) for package, names in OFFERED.items() for name in names]
)
def test_each_name_loads_on_first_use_from_its_home_with_a_complete_docstring(
    package: str, name: str
) -> None:
    module = import_module(package)
    home = OFFERED[package][name]
    thing = getattr(module, name)
    assert thing is not None and name in dir(module) and name in module.__all__
    assert package == "narrowgauge" or home.startswith(f"{package}.")
    # A function named like a file beside it would be replaced by the file as soon as somebody
    # imports that.
    folder = SOURCE.joinpath(*package.split(".")[1:])
    assert not (folder / name).exists() and not (folder / f"{name}.py").exists()
    if inspect.isclass(thing) or inspect.isfunction(thing):
        assert thing.__module__ == home
        assert missing_sections(thing) == []


def test_the_package_loads_nothing_before_it_is_asked() -> None:
    code = "import sys, narrowgauge; print([name for name in sys.modules if name.startswith('narrowgauge.')])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
