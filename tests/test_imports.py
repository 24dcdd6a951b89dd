"""Imports point down, and the tables and records need no PyTorch: held over the syntax trees, and once in fact.

errors ← spec ← runs ← analysis, planner ← report need no PyTorch. torch_names, spec ← numerics ← matmul, transforms, optim,
distributed (which never import each other) ← gauges ← assembly ← checks ← checkpoints ← trainer ← profiling, integrations ←
cli. Inside analysis, gauges, checkpoints and trainer some parts stand above others; what is above the gauges may write
through `runs`.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "narrowgauge"

# The beginnings of modules' paths inside the package, by layer; the longest that fits counts. A file of no layer fails the test.
LAYERS = {
    "spec": {"errors", "spec"},
    "machine": {"machine"},
    "runs": {"runs"},
    "monitor": {
        "analysis",
        "analysis.detectors",
        "analysis.alarms",
        "analysis.spikes",
        "analysis.reading",
        "analysis.kinds",
    },
    "record": {"analysis.columns", "analysis.settings"},
    "comparison": {"analysis.comparison"},
    "diagnosis": {f"analysis.{name}" for name in ("diagnose", "two_runs", "first_difference")},
    "planner": {"planner"},
    "report": {"report"},
    "torch_names": {"torch_names", "torch_hooks", "inductor", "put_back"},
    "compile": {"compile", "edge_values"},
    "numerics": {"numerics"},
    "matmul": {"matmul"},
    "transforms": {"transforms"},
    "optim": {"optim"},
    "distributed": {"distributed"},
    "checks": {"checks"},
    "probes": {"gauges.probes"},
    "gauges": {"gauges"},
    "recording": {"gauges.recording"},
    "assembly": {"assembly"},
    "checkpoints": {"checkpoints"},
    "trainer": {"trainer"},
    "profiling": {"profiling"},
    "integrations": {"integrations"},
    "cli": {"cli", "__main__"},
}

PARTS = {"matmul", "transforms", "optim", "distributed"}
LOWEST = {"spec", "machine"}
SEEN_BY_PARTS = LOWEST | {"torch_names", "compile", "numerics"}
RECORDS = LOWEST | {"runs", "record", "monitor", "comparison", "planner", "report"}
SEEN_BY_CHECKPOINTS = SEEN_BY_PARTS | {"runs", "distributed", "optim"}
SEEN_BY_GAUGES = SEEN_BY_PARTS | PARTS | {"runs", "monitor"}
SEEN_BY_RECORDING = SEEN_BY_GAUGES | {"gauges", "probes", "checks"}
SEEN_BY_TRAINER = SEEN_BY_RECORDING | RECORDS | {"recording", "assembly", "checkpoints"}
SEEN_BY_CALLERS = SEEN_BY_TRAINER | {"trainer"}
# What each layer may import besides itself.
SEES = {
    "spec": set(),
    "machine": {"spec"},
    "runs": LOWEST,
    "monitor": LOWEST | {"runs"},
    "record": LOWEST | {"runs"},
    "comparison": LOWEST | {"runs", "record"},
    "report": RECORDS | {"diagnosis"},
    "planner": LOWEST | {"runs"},
    "diagnosis": LOWEST | {"runs", "record", "monitor"},
    "torch_names": LOWEST,
    "compile": LOWEST | {"torch_names"},
    "numerics": LOWEST | {"torch_names", "compile"},
    **dict.fromkeys(PARTS, SEEN_BY_PARTS),
    "checkpoints": SEEN_BY_CHECKPOINTS,
    "probes": LOWEST | {"runs", "torch_names"},
    "checks": SEEN_BY_GAUGES | {"assembly"},
    "gauges": SEEN_BY_GAUGES,
    "recording": SEEN_BY_RECORDING,
    "assembly": SEEN_BY_GAUGES | {"gauges"},
    "trainer": SEEN_BY_TRAINER,
    **dict.fromkeys(("profiling", "integrations"), SEEN_BY_CALLERS),
    "cli": SEEN_BY_CALLERS | {"diagnosis", "profiling", "integrations"},
}

TORCH_FREE = LOWEST | {"runs", "record", "monitor", "comparison", "report", "planner", "diagnosis"}
TORCH_BOUND = {"torch", "transformers", "tokenizers", "safetensors", "datasets", "lightning"}


def module_name(path: Path) -> str:
    """``numerics.rounding`` for ``numerics/rounding.py``, and ``""`` for the package itself."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> str | None:
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        beginning = ".".join(parts[:length])
        if found := [layer for layer, beginnings in LAYERS.items() if beginning in beginnings]:
            return found[0]
    return None


@functools.cache
def modules() -> dict[str, tuple[Path, ast.Module]]:
    paths = sorted(path for path in SOURCE.rglob("*.py"))
    return {module_name(path): (path, ast.parse(path.read_text(encoding="utf-8"))) for path in paths}


def names_imported(node: ast.AST, package: str) -> Iterator[str]:
    """Absolute dotted names that one import statement names; `from a import b` gives ``a.b``."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        origin = node.module or ""
        if node.level:
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            origin = ".".join([*above, origin]).rstrip(".")
        yield from (f"{origin}.{alias.name}" for alias in node.names)


def package_of(module: str, path: Path) -> str:
    dotted = f"narrowgauge.{module}".rstrip(".")
    return dotted if path.name == "__init__.py" else dotted.rpartition(".")[0]


def imports_of(module: str, path: Path, tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        for name in names_imported(node, package_of(module, path)):
            yield getattr(node, "lineno", 0), name


def statements_run_on_import(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node that runs when the module is imported: not inside functions, not for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield other
                yield from statements_run_on_import(other)
            continue
        yield node
        yield from statements_run_on_import(node)


def upward_imports(module: str, path: Path, tree: ast.AST) -> list[str]:
    layer = layer_of(module)
    assert layer is not None, f"{path} stands in no layer: give it a place in LAYERS, or move it."
    faults = []
    for line, name in imports_of(module, path, tree):
        if name == "narrowgauge" or not name.startswith("narrowgauge."):
            continue
        target = layer_of(name.removeprefix("narrowgauge."))
        if target is not None and target != layer and target not in SEES[layer]:
            faults.append(f"{path.name}:{line}: {layer} may not import {target} ({name})")
    return faults


def test_every_file_stands_in_a_layer() -> None:
    homeless = [str(path) for module, (path, _) in modules().items() if module and layer_of(module) is None]
    assert not homeless, f"no layer holds {homeless}: give each a place in LAYERS, or move it"


READERS_OF_RECIPES = {
    "analysis.comparison.labels", "analysis.first_difference",
    "analysis.settings", "analysis.alarms", "assembly.preparation",
    "cli.flags", "trainer.config",
    "planner.launches", "planner.plan",
    "gauges.recording.run_recorder",
    "integrations.torchtitan",
    "integrations.peft",
    "matmul.experts",
    "matmul.inference",
    "matmul.swapping",
}  # fmt: skip
"""Modules at an edge: public functions that accept names, flags, and readers of files. All others get values."""


def test_recipes_are_parsed_at_the_edges_alone() -> None:
    found = {
        module
        for module, (path, tree) in modules().items()
        for _, name in imports_of(module, path, tree)
        if name.startswith("narrowgauge.spec.notation") and not module.startswith("spec")
    }
    assert found == READERS_OF_RECIPES


TWINS = {
    "__init__": "the package of each folder",
    "step": "one step, of the optimizer in optim/ and of a run in trainer/",
}
"""Stems that several files may share, and why."""


def shared_stems(paths: Iterable[Path]) -> dict[str, list[str]]:
    """Stems of more than one file, each with its files."""
    found: dict[str, list[str]] = {}
    for path in paths:
        found.setdefault(path.stem, []).append(str(path))
    return {stem: sorted(files) for stem, files in found.items() if len(files) > 1}


def test_no_two_files_share_a_stem_unless_they_are_twins() -> None:
    shared = shared_stems(path.relative_to(SOURCE) for path in SOURCE.rglob("*.py"))
    strangers = [f"{', '.join(files)}: name them apart" for stem, files in shared.items() if stem not in TWINS]
    assert not strangers, "\n".join(strangers)
    assert set(shared) == set(TWINS), "a stem of TWINS is not shared any more: remove it there."
    assert shared_stems([Path("a/x.py"), Path("b/x.py"), Path("c/y.py")]) == {"x": ["a/x.py", "b/x.py"]}


def test_imports_point_down() -> None:
    found = {module: entry for module, entry in modules().items() if module}
    assert len(found) >= 10
    faults = [fault for module, (path, tree) in found.items() for fault in upward_imports(module, path, tree)]
    assert not faults, "\n".join(faults)


def test_the_package_itself_imports_nothing_when_imported() -> None:
    _, tree = modules()[""]
    names = [name for node in statements_run_on_import(tree) for name in names_imported(node, "narrowgauge")]
    assert all(name.split(".")[0] in {"__future__", "lazy_loader"} for name in names), names


def test_torch_stays_out_of_tables_and_records() -> None:
    faults = []
    for module, (path, tree) in modules().items():
        # transformers builds a model of a config.json; the planner imports it where one is named.
        if not module or layer_of(module) not in TORCH_FREE or module == "planner.built_models":
            continue
        bound = [f"{path.name}:{line}: {name}" for line, name in imports_of(module, path, tree) if needs_torch(name)]
        faults += bound
    assert not faults, "\n".join(faults)


def needs_torch(name: str) -> bool:
    return name.split(".")[0] in TORCH_BOUND


def test_the_command_line_imports_only_what_is_free_of_torch() -> None:
    path, tree = modules()["cli.main"]
    faults = []
    for node in statements_run_on_import(tree):
        for name in names_imported(node, package_of("cli.main", path)):
            layer = layer_of(name.removeprefix("narrowgauge.")) if name.startswith("narrowgauge.") else None
            if needs_torch(name) or (layer is not None and layer not in TORCH_FREE | {"cli"}):
                faults.append(f"main.py:{getattr(node, 'lineno', 0)}: {name} is loaded before it is needed")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("room", ["", "optim"])
def test_no_module_waits_for_itself(room: str) -> None:
    """Of the whole package when it is imported; of the optimizer also in functions and for type checkers."""
    found = modules()
    graph: dict[str, set[str]] = {}
    for module, (path, tree) in found.items():
        if not module.startswith(room):
            continue
        names = [
            name.removeprefix("narrowgauge.")
            for node in (ast.walk(tree) if room else statements_run_on_import(tree))
            for name in names_imported(node, package_of(module, path))
            if name.startswith("narrowgauge.")
        ]
        # `from narrowgauge.numerics import rounding` names a module, `from narrowgauge.spec.formats import Format` does not.
        targets = {name if name in found else name.rpartition(".")[0] for name in names}
        graph[module] = {target for target in targets if target and target != module}
    circle: list[str] = []
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        circle = error.args[1]
    assert not circle, f"modules import each other in a circle: {' → '.join(circle)}"


def test_tables_records_and_command_line_load_no_torch_in_fact() -> None:
    free = sorted(module for module in modules() if module and layer_of(module) in TORCH_FREE)
    cli = sorted(module for module in modules() if layer_of(module) == "cli" and module != "__main__")
    lines = ["import sys", "import narrowgauge", *(f"import narrowgauge.{module}" for module in [*free, *cli])]
    lines.append(f"print([name for name in {sorted(TORCH_BOUND)!r} if name in sys.modules])")
    result = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("module", "line", "fault"),
    [
        ("numerics.rounding", "from narrowgauge.optim.codes import encode", True),
        ("optim.kernel", "import narrowgauge.matmul.operand", True),
        ("optim.kernel", "from ..numerics import rounding", False),
        ("runs.record", "from narrowgauge.torch_names import anything", True),
        ("numerics.rounding", "from narrowgauge.runs.record import Record", True),
        ("gauges.attach", "from narrowgauge.runs.record import Record", False),
        ("assembly.preparation", "def later():\n    from narrowgauge.trainer import loop", True),
        ("spec.recipes", "from narrowgauge.spec.formats import FORMATS", False),
    ],
)
def test_the_rule_itself_can_fail(module: str, line: str, fault: bool) -> None:
    path = SOURCE / Path(*module.split(".")).with_suffix(".py")
    assert bool(upward_imports(module, path, ast.parse(line))) is fault
