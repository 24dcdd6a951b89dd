"""Imports point down, and the tables and records need no PyTorch: held over the syntax trees, and
once in fact.

errors ← spec ← runs ← analysis, planner ← report need no PyTorch. torch_names, spec ← numerics ←
matmul, transforms, optim, distributed (which never import each other) ← assembly ← measuring
← checkpoints ← trainer ← integrations ← cli. Inside measuring and
trainer some parts stand above others; what is above the gauges may write through `runs`.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "narrowgauge"

# The beginnings of modules' paths inside the package, by layer; the longest that fits counts. A
# file of no layer fails the test.
LAYERS = {
    "spec": {"errors", "spec"},
    "monitor": {
        *(f"measuring.{name}" for name in ("reading", "kinds", "step")),
    },
    "record": {"measuring.columns", "measuring.settings"},
    "comparison": {"measuring.comparison", "measuring.intervals", "measuring.labels"},
    "laws": {f"measuring.{name}laws" for name in ("", "update_", "gradient_", "loss_")},
    "diagnosis": {"measuring.diagnose", "measuring.two_runs", "measuring.first_difference"},
    "hooks": {"measuring.hooks"},
    "machine": {"torch_support.machine"},
    "torch_names": {
        *(
            f"torch_support.{name}"
            for name in ("torch_names", "torch_hooks", "inductor", "put_back")
        )
    },
    "compile": {"torch_support"},
    "own_module": {"planner.module"},
    "cli": {"cli", "__main__"},
}
ALIKE = ("runs", "planner", "report", "numerics", "matmul", "transforms", "optim", "distributed", "measuring",
         "assembly", "checkpoints", "trainer", "integrations")  # fmt: skip
"""Layers that are one package."""
LAYERS |= {name: {name} for name in ALIKE}

PARTS = {"matmul", "transforms", "optim", "distributed"}
LOWEST = {"spec", "machine"}
SEEN_BY_PARTS = LOWEST | {"torch_names", "compile", "numerics"}
RECORDS = LOWEST | {"runs", "record", "monitor", "laws", "comparison", "planner", "report"}
SEEN_BY_CHECKPOINTS = SEEN_BY_PARTS | {"runs", "distributed", "optim"}
SEEN_BY_GAUGES = SEEN_BY_PARTS | PARTS | {"runs", "monitor", "hooks"}
SEEN_BY_RECORDING = SEEN_BY_GAUGES | {"record", "laws"}
SEEN_BY_TRAINER = SEEN_BY_RECORDING | RECORDS | {"measuring", "assembly", "checkpoints"}
SEEN_BY_CALLERS = SEEN_BY_TRAINER | {"trainer"}
# What each layer may import besides itself.
SEES = {
    "spec": set(),
    "machine": {"spec"},
    "runs": LOWEST,
    "monitor": LOWEST | {"runs"},
    "record": LOWEST | {"runs"},
    "laws": LOWEST | {"runs", "record", "monitor"},
    "comparison": LOWEST | {"runs", "record"},
    "report": RECORDS | {"diagnosis"},
    # The planner imports it where a module is planned.
    "planner": LOWEST | {"runs", "own_module"},
    "own_module": LOWEST | {"planner"},
    "diagnosis": LOWEST | {"runs", "record", "monitor", "laws", "comparison"},
    "torch_names": LOWEST,
    "compile": LOWEST | {"torch_names"},
    "numerics": LOWEST | {"torch_names", "compile"},
    **dict.fromkeys(PARTS, SEEN_BY_PARTS),
    "checkpoints": SEEN_BY_CHECKPOINTS,
    "measuring": SEEN_BY_RECORDING | {"assembly", "comparison", "diagnosis"},
    "hooks": SEEN_BY_PARTS | {"distributed", "monitor"},
    "trainer": SEEN_BY_TRAINER,
    "assembly": SEEN_BY_GAUGES,
    "integrations": SEEN_BY_CALLERS,
    "cli": SEEN_BY_CALLERS | {"diagnosis", "integrations"},
}

TORCH_FREE = RECORDS | {"diagnosis"}
TORCH_BOUND = {"torch", "transformers", "tokenizers", "safetensors", "datasets", "lightning"}


def layer_of(module: str) -> str | None:
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        beginning = ".".join(parts[:length])
        if layers := [layer for layer, beginnings in LAYERS.items() if beginning in beginnings]:
            return layers[0]
    return None


@functools.cache
def imports() -> dict[str, list[tuple[int, str]]]:
    """Return the line and name of every import, also inside functions, by module below
    ``narrowgauge``.
    """
    result = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        names: list[tuple[int, str]] = []
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names += [(node.lineno, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path} imports by a relative name"
                names += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        result[module] = names
    return result


def test_imports_point_down() -> None:
    faults = []
    for module, names in imports().items():
        if not module:
            continue
        layer = layer_of(module)
        assert layer is not None, (
            f"{module} stands in no layer: give it a place in LAYERS, or move it."
        )
        for line, name in names:
            target = (
                layer_of(name.removeprefix("narrowgauge."))
                if name.startswith("narrowgauge.")
                else None
            )
            if target is not None and target != layer and target not in SEES[layer]:
                faults.append(f"{module}:{line}: {layer} may not import {target} ({name})")
    assert len(imports()) >= 10 and not faults, "\n".join(faults)


@pytest.mark.parametrize("package", ["spec", "runs", "planner", "report"])
def test_no_two_files_of_a_package_import_each_other(package: str) -> None:
    """Also inside functions: a circle is read as one file."""
    graph: dict[str, set[str]] = {}
    for module, names in imports().items():
        if module.startswith(f"{package}."):
            targets = {name.removeprefix("narrowgauge.") for _, name in names}
            targets |= {target.rpartition(".")[0] for target in targets}
            graph[module] = targets & imports().keys()
    assert len(graph) > 1 and list(graphlib.TopologicalSorter(graph).static_order())


def test_torch_stays_out_of_tables_and_records() -> None:
    faults = [
        f"{module}:{line}: {name}"
        for module, names in imports().items()
        # transformers builds a model of a config.json; the planner imports it where one is named.
        if module and layer_of(module) in TORCH_FREE and module != "planner.built_models"
        for line, name in names
        if name.split(".")[0] in TORCH_BOUND
    ]
    assert not faults, "\n".join(faults)


def test_tables_records_and_command_line_load_no_torch_in_fact() -> None:
    modules = sorted(
        module
        for module in imports()
        if layer_of(module) in TORCH_FREE | {"cli"} and module != "__main__"
    )
    lines = ["import sys", *(f"import narrowgauge.{module}" for module in modules)]
    lines.append(f"print([name for name in {sorted(TORCH_BOUND)!r} if name in sys.modules])")
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr


EXPENSIVE = (
    "accelerate",
    "datasets",
    "lightning",
    "scipy",
    "torch.distributed.checkpoint",
    "transformers",
)
"""They take 0.3 to 3 CPU-seconds each.

``torch._dynamo`` is not here: PyTorch imports it with the first optimizer.
"""
ABOUT_THEM = ("checkpoints.dcp_files", "integrations", "transforms.scal")
"""Modules that subclass or change what these packages define: functions import them."""


def test_no_other_module_imports_what_takes_seconds() -> None:
    """In one process, so that a module also pays for what it imports."""
    modules = []
    for module in imports():
        if module and module != "__main__" and not module.startswith(ABOUT_THEM):
            modules.append(module)
    lines = [
        "import importlib, sys",
        f"for name in {modules}:",
        "    importlib.import_module(f'narrowgauge.{name}')",
    ]
    lines.append(
        f"    if names := [name for name in {EXPENSIVE} if name in sys.modules]: "
        f"sys.exit(f'{{name}}: {{names}}')"
    )
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


# Files that read a gradient where it lies: of leaves that are no parameters, as an object with an
# identity, or to put it back.
READ_GRADIENTS_IN_PLACE = {
    "measuring/places.py",
    "numerics/dtensor.py",
    "torch_support/put_back.py",
    "optim/parameter_formats.py",
}


def test_a_gradient_has_one_door() -> None:
    """A gradient may be a rank's part of a sum: only ``gradient_of`` reads one, others ask whether
    there is one.
    """
    offenders = set()
    for file in SOURCE.rglob("*.py"):
        text = file.read_text()
        if ".grad" not in text.replace("torch.autograd.grad", ""):
            continue
        nodes = list(ast.walk(ast.parse(text)))
        asked = set()
        for node in nodes:
            if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Is, ast.IsNot)):
                asked.add(id(node.left))
        for node in nodes:
            is_read = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
            is_grad = is_read and node.attr == "grad" and ast.unparse(node) != "torch.autograd.grad"
            if is_grad and id(node) not in asked:
                offenders.add(file.relative_to(SOURCE).as_posix())
            is_call = isinstance(node, ast.Call) and ast.unparse(node.func) == "local_of"
            assert not (is_call and ast.unparse(node.args[0]).endswith(".grad")), file
    assert offenders == READ_GRADIENTS_IN_PLACE


def test_scripts_import_names_that_exist() -> None:
    """Names that benchmarks and examples import from the package are there, which no other test of
    a benchmark that needs a GPU, a model or hours would see.
    """
    missing = []
    for folder in ("benchmarks", "examples", "docs"):
        for file in sorted((SOURCE.parents[1] / folder).glob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.ImportFrom):
                    continue
                package = node.module or ""
                if package.partition(".")[0] != "narrowgauge":
                    continue
                try:
                    module = importlib.import_module(package)
                except ModuleNotFoundError as error:  # of a framework that is not installed
                    assert "narrowgauge" not in str(error.name), file
                    continue
                for alias in node.names:
                    file_of = SOURCE.parent / package.replace(".", "/") / f"{alias.name}.py"
                    if not hasattr(module, alias.name) and not file_of.is_file():
                        missing.append(f"{file.name}: {package}.{alias.name}")
    assert not missing
