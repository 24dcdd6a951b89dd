"""Every public name has one import path and a docstring."""

import ast
import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import narrowgauge

SOURCE = Path(narrowgauge.__file__).parent


def homes_of(stub: Path) -> dict[str, str]:
    """Return the module that defines each name which a stub offers; the packages of the first one
    are left out.
    """
    package = ".".join(stub.relative_to(SOURCE.parent).parent.parts)
    homes = {}
    for node in ast.parse(stub.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                homes[alias.name] = f"{package}.{node.module}"
    return homes


OFFERED = {
    ".".join(stub.relative_to(SOURCE.parent).parent.parts): homes_of(stub)
    for stub in (SOURCE / "__init__.pyi", *sorted(SOURCE.glob("*/__init__.pyi")))
}


def test_there_are_few_names_and_each_is_offered_once():
    names = []
    for offered in OFFERED.values():
        names.extend(offered)
    assert len(OFFERED["narrowgauge"]) <= 33
    assert sorted(names) == sorted(set(names))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = narrowgauge.no_such_name


@pytest.mark.parametrize("package", OFFERED)
def test_each_name_loads_on_first_use_from_its_home_with_a_docstring(package):
    module = import_module(package)
    folder = SOURCE.joinpath(*package.split(".")[1:])
    for name, home in OFFERED[package].items():
        thing = getattr(module, name)
        assert name in dir(module) and name in module.__all__
        # A function named like a file beside it would be replaced by the file as soon as somebody
        # imports that.
        assert not (folder / name).exists() and not (folder / f"{name}.py").exists()
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert thing.__module__ == home and home.startswith(f"{package}.")
            # inspect.getdoc would lend a class the docstring of its parent.
            assert thing.__doc__ and thing.__doc__.partition("\n\n")[0].rstrip().endswith(".")


def test_the_package_loads_nothing_before_it_is_asked():
    code = "import sys, narrowgauge; print([name for name in sys.modules if name.startswith('narrowgauge.')])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
