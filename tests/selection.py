"""Which tests a change asks for: found in the imports of the syntax trees of ``src`` and ``tests``.

``changed_tests`` serves ``./dev test --changed``. ``owed`` serves ``./dev ci``: each unit of the whole product (the tests of
a room of :data:`ROOMS`, each file of tests inside a framework) stands in ``last_whole_product.toml`` with a
checksum of the code that it proves: its modules, those of its tests that the covering part runs in part only, ``conftest``, and
all that these import; for frameworks also the versions in ``constraints.txt``. A unit whose checksum is no longer that is owed.
Checksums leave out docstrings and comments: rewording one owes nothing. The file is written by
``./dev test --all`` when it passes. It names the vector level of the machine that ran it, for the reader: a pass at one level
counts on machines of every other.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS, SOURCE = ROOT / "tests", ROOT / "src"
RECORD = TESTS / "last_whole_product.toml"
ROOMS = ("optim", "matmul", "numerics", "transforms", "gauges", "distributed")
"""Rooms of ``src/narrowgauge`` of whose tests ``./dev test`` runs a part that covers the others."""
INTEGRATIONS = "integrations"
"""All files of tests inside frameworks."""
PLUGINS = ("conftest", "tiers", "selection", "covering")
"""Modules of ``tests`` under which every test runs, with those of ``tests`` that they import (:func:`plugins`)."""


# ── the graph of imports ────────────────────────────────────────────────────────────────────────────────────────────


@functools.cache
def modules() -> dict[str, Path]:
    """Every module by the name that code imports it by; those of ``tests`` are found from that folder."""
    found = {}
    for folder in (SOURCE, TESTS):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def stub(package: str) -> dict[str, str]:
    """The module of each name that a package loads on first use: its ``__init__.pyi`` says."""
    path = modules()[package].with_suffix(".pyi")
    nodes = ast.walk(tree(path)) if path.exists() else ()
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


@functools.cache
def module_of(name: str) -> str | None:
    """The module that a dotted name comes from: ``narrowgauge.AdamW`` from that of the optimizers."""
    module, *rest = name.split(".")
    for part in rest:
        if f"{module}.{part}" in modules():
            module = f"{module}.{part}"
        else:
            home = stub(module).get(part) if module in modules() else None
            return module_of(home) if home else module if module in modules() else None
    return module if module in modules() else None


@functools.cache
def scripts() -> dict[str, list[str]]:
    """Modules of ``tests`` by their file's name, which those who start it as a process say."""
    found: dict[str, list[str]] = {}
    for name, path in modules().items():
        if TESTS in path.parents and not path.name.startswith(("test_", "__", "conftest")):
            found.setdefault(path.name, []).append(name)
    return found


DOTTED = re.compile(r"narrowgauge(\.\w+)+")


def named_in(module: str) -> Iterator[str]:
    """Every dotted name that a module imports or reads of the package; of a test also what it patches or starts by name."""
    path, nodes = modules()[module], list(ast.walk(tree(modules()[module])))
    says_names = TESTS in path.parents
    aliases: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
            aliases |= {alias.asname or alias.name for alias in node.names if alias.name == "narrowgauge"}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif says_names and isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (found.group() for found in DOTTED.finditer(node.value))
            yield from scripts().get(node.value, ())
    for node in nodes:
        if isinstance(node, ast.Attribute) and ast.unparse(node).partition(".")[0] in aliases:
            yield f"narrowgauge.{ast.unparse(node).partition('.')[2]}"


@functools.cache
def imports(module: str) -> frozenset[str]:
    """The modules of this repository that one imports itself."""
    return frozenset(filter(None, map(module_of, named_in(module)))) - {module, "narrowgauge"}


def closure(first: Iterable[str]) -> set[str]:
    """These modules and all that they import, directly or not."""
    found, left = set(), list(first)
    while left:
        if (module := left.pop()) not in found:
            found.add(module)
            left.extend(imports(module))
    return found


# ── what the whole product proves ───────────────────────────────────────────────────────────────────────────────────


@functools.cache
def framework_files() -> frozenset[Path]:
    """The test files that need a framework: they call ``pytest.importorskip``."""
    folder = TESTS / INTEGRATIONS
    return frozenset(path for path in folder.glob("test_*.py") if "importorskip(" in path.read_text(encoding="utf-8"))


def units() -> dict[str, list[str]]:
    """What ``--whole`` names, with the modules that it proves: a room with its covering tests, or a file inside a framework.

    A room's other tests are no part of it, since every run of the tests takes them whole.
    """
    names = {path: name for name, path in modules().items()}
    rooms = {
        room: [
            "conftest",
            *(name for name in modules() if name.startswith(f"narrowgauge.{room}.")),
            *(name for name in modules() if name.startswith(f"{room}.") and "covering" in closure([name])),
        ]
        for room in ROOMS
    }
    return rooms | {
        f"{INTEGRATIONS}/{path.name}": ["conftest", f"{INTEGRATIONS}.conftest", names[path]]
        for path in sorted(framework_files())
    }


@functools.cache
def written(module: str) -> bytes:
    """A module's lines of code: without docstrings, comments of their own line and empty lines."""
    path, kept_as_it_is, left_out = modules()[module], set[int](), set[int]()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.Constant | ast.JoinedStr):
            kept_as_it_is.update(range(node.lineno + 1, (node.end_lineno or node.lineno) + 1))
    lines = [
        line.rstrip()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if number not in left_out
        if number in kept_as_it_is or (line.strip() and not line.lstrip().startswith("#"))
    ]
    return hashlib.sha256("\n".join(lines).encode()).digest()


def checksum(first: Iterable[str], versions: str = "") -> str:
    found = hashlib.sha256(versions.encode())
    for module in sorted(closure(first)):
        found.update(module.encode() + b"\0" + written(module))
    return found.hexdigest()[:16]


def constraints() -> str:
    return (ROOT / "constraints.txt").read_text(encoding="utf-8")


def torch_of_constraints() -> str:
    found = re.search(r"^torch==(\S+)", constraints(), re.MULTILINE)
    assert found, "constraints.txt names no PyTorch"
    return found[1]


def checksums() -> dict[str, str]:
    return {unit: checksum(first, "" if unit in ROOMS else constraints()) for unit, first in units().items()}


def recorded() -> dict[str, str]:
    """The file as a flat table; its few lines need no library, and so no Python newer than 3.10."""
    if not RECORD.exists():
        return {}
    pairs = re.findall(r'^"?([^"\s=]+)"? = "(.*)"$', RECORD.read_text(encoding="utf-8"), re.MULTILINE)
    return dict(pairs)


def owed() -> tuple[list[str], str]:
    """The units whose code is not that of the last whole product that passed; and a sentence that says so."""
    record = recorded()
    last = (
        f"the last whole product (commit {record.get('commit')}, {record.get('date')}, PyTorch {record.get('torch')})"
    )
    if not record:
        return [*ROOMS, INTEGRATIONS], f"the whole product is owed: there is no {RECORD.relative_to(ROOT)}"
    if record["torch"].partition("+")[0] != torch_of_constraints():
        return [
            *ROOMS,
            INTEGRATIONS,
        ], f"the whole product is owed: {last} ran with another PyTorch than constraints.txt names"
    found = [unit for unit, code in checksums().items() if record.get(unit) != code]
    if not found:
        return [], f"the covering part suffices: {last} proved the code of {', '.join(ROOMS)} and the frameworks' tests"
    frameworks = [unit for unit in units() if unit not in ROOMS]
    if set(frameworks) <= set(found):
        found = [*(unit for unit in found if unit in ROOMS), INTEGRATIONS]
    return found, f"the whole product of {', '.join(found)} is owed: what it proves changed since {last}"


def record_whole_product(proved: dict[str, str]) -> None:
    import torch

    commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    lines = [
        "# The last whole product of the tests that passed, written by `./dev test --all`; not to be edited.",
        "# `./dev ci` runs the whole product of each unit whose code (with all that it imports) has another checksum.",
        f'commit = "{commit.stdout.strip() or "unknown"}"',
        f'date = "{datetime.now(timezone.utc):%Y-%m-%d}"',
        f'machine = "{platform.system()} {platform.machine()}"',
        f'vectors = "{torch.backends.cpu.get_cpu_capability()}"',
        f'python = "{platform.python_version()}"',
        f'torch = "{torch.__version__}"',
        "",
        "[units]",
        *(f'"{unit}" = "{code}"' for unit, code in proved.items()),
    ]
    RECORD.write_text("\n".join(lines) + "\n", encoding="utf-8")


# ── what a change asks for ──────────────────────────────────────────────────────────────────────────────────────────


def git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.splitlines()


def base_of(name: str | None) -> str:
    """The commit that the working tree is compared with: where the branch left main, or HEAD on main itself."""
    if name:
        return git("rev-parse", "--verify", f"{name}^{{commit}}")[0]
    try:
        return git("merge-base", "HEAD", "main")[0]
    except ValueError:
        return git("rev-parse", "HEAD")[0]


def read_again() -> None:
    """Forget what was read from files, which may have changed since."""
    for found in list(globals().values()):
        if hasattr(found, "cache_clear"):
            found.cache_clear()


def changed_paths(base: str) -> list[str]:
    """Paths that differ from a commit, files that git does not know included."""
    return sorted({*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard")})


@functools.cache
def plugins() -> frozenset[str]:
    """The modules of ``tests`` under which every test runs."""
    return frozenset(name for name in closure(PLUGINS) if TESTS in modules()[name].parents)


def mirrors(module: str) -> str | None:
    """The folder of tests, or the test file, that is named after a module's room."""
    room = module.split(".")[1] if module.startswith("narrowgauge.") else ""
    return next((place for place in (f"{room}/", f"test_{room}.py") if room and (TESTS / place).exists()), None)


def changed_plugins(paths: Iterable[str]) -> bool:
    """Whether one of :func:`plugins` is among these paths, or the ``conftest.py`` of the checkout, which loads them."""
    return not {"conftest.py", *(modules()[name].relative_to(ROOT).as_posix() for name in plugins())}.isdisjoint(paths)


@functools.cache
def strings(path: Path) -> set[str]:
    return {
        node.value for node in ast.walk(tree(path)) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def changed_tests(paths: Iterable[str]) -> dict[Path, int]:
    """Test files, and modules for their doctests, with how far each stands from the change.

    0: it changed itself, or imports from ``tests`` what changed. 1: it tests the room of a changed module. 2: it imports a
    changed module itself, or names a changed file or its folder that is no module; or runs under a changed plugin, as all do,
    of which the tests of the choice itself come first.
    """
    paths = list(paths)
    names = {path: name for name, path in modules().items()}
    changed = {names[ROOT / path] for path in paths if ROOT / path in names}
    gone = {
        ".".join(Path(path).relative_to("src").with_suffix("").parts)
        for path in paths
        if path.startswith("src/") and path.endswith(".py") and not (ROOT / path).exists()
    }
    others = {path for path in paths if not path.endswith(".py") or not path.startswith(("src/", "tests/"))}
    named = {Path(path).name for path in others} | {Path(path).parts[0] for path in others if "/" in path}
    named |= {Path(path).stem for path in others if path.endswith(".py")}
    rooms = {mirrors(name) for name in changed | gone} - {None}
    under_changed = changed_plugins(paths)
    found: dict[Path, int] = {}
    for name, path in modules().items():
        if name in changed:
            found[path] = 0
        if TESTS not in path.parents or not path.name.startswith("test_"):
            continue
        place, own = path.relative_to(TESTS).as_posix(), imports(name)
        if any(each in own and not each.startswith("narrowgauge") for each in changed) or (
            place == "test_selection.py" and under_changed
        ):
            found[path] = 0
        elif any(place.startswith(room) for room in rooms if room):
            found.setdefault(path, 1)
        elif own & changed or named & strings(path) or under_changed or f"{name.partition('.')[0]}.conftest" in changed:
            found.setdefault(path, 2)
    return found


if __name__ == "__main__":
    # ./dev ci: what it owes beyond the covering part, as pytest's options; why, for the reader.
    missing, why = owed()
    print(f"dev ci: {why}", file=sys.stderr)
    print(" ".join(f"--whole {unit}" for unit in missing))
