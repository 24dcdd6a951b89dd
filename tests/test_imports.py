"""Imports point down, no modules import each other in a circle, and tables, records and the command
line need no PyTorch: held over the syntax trees, and in fact.
"""

import ast
import functools
import graphlib
import importlib
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import networkx

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "narrowgauge"
ORDER = (
    "errors", "spec", "runs", "planner", "report", "torch_support", "numerics", "matmul", "transforms", "optim",
    "distributed", "assembly", "measuring", "trainer", "integrations", "cli", "__main__",
)  # fmt: skip
"""The packages: each imports from those before it alone."""
SIDE_BY_SIDE = {"matmul", "transforms", "optim", "distributed"}
"""Packages that never import each other."""
LIGHT = ("measuring.reading", "measuring.kinds", "measuring.diagnose.")
"""Modules of a package above that need no PyTorch, so that any package may import them."""


@functools.cache
def imports():
    """Return the modules and names that each module below ``narrowgauge`` imports, also inside
    functions.
    """
    result = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        names = []
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path} imports by a relative name"
                names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        result[module] = [name.removeprefix("narrowgauge.") for name in names]
    return result


def test_imports_point_down():
    """And each exception is needed, by a package below or by another exception."""
    faults = []
    needed = set()
    for module, names in imports().items():
        package = module.partition(".")[0]
        for name in set(names) & imports().keys() if package else ():
            target = name.partition(".")[0]
            is_beside = {package, target} <= SIDE_BY_SIDE and package != target
            is_above = ORDER.index(target) > ORDER.index(package)
            if is_above or module.startswith(LIGHT):
                needed.add(name)
            if is_beside or (is_above and not name.startswith(LIGHT)):
                faults.append(f"{module} imports {name}")
    assert len(imports()) >= 10 and not faults, "\n".join(faults)
    for prefix in LIGHT:
        assert any(name.startswith(prefix) for name in needed), prefix


def room_of(module: str) -> str:
    """Return the folder of a package that holds a module, or the package."""
    is_folder = (SOURCE / module.replace(".", "/")).is_dir()
    folders = module.split(".") if is_folder else module.split(".")[:-1]
    return ".".join(folders[:2])


def test_imports_between_the_rooms_of_a_package_point_one_way():
    """A room is a folder of a package, or the files beside its folders."""
    graph = defaultdict[str, set[str]](set)
    for module, names in imports().items():
        for name in set(names) & imports().keys():
            here, there = room_of(module), room_of(name)
            if here != there and here.partition(".")[0] == there.partition(".")[0]:
                graph[here].add(there)
    assert list(graphlib.TopologicalSorter(graph).static_order())


def test_the_picture_of_the_packages_is_drawn_from_the_imports(update_golden):
    """Without an arrow where others lead to the same package."""
    graph = networkx.DiGraph()
    for module, names in imports().items():
        package = module.partition(".")[0]
        for name in set(names) & imports().keys() if package else ():
            target = name.partition(".")[0]
            if ORDER.index(target) < ORDER.index(package):
                graph.add_edge(package, target)
    graph.remove_nodes_from(["errors", "__main__"])
    arrows = [
        f"    {package} --> {target}"
        for package, target in networkx.transitive_reduction(graph).edges
    ]
    page = ROOT / "ARCHITECTURE.md"
    text = page.read_text(encoding="utf-8")
    drawn = re.sub(r"(graph TD\n)[^`]*", "\\1" + "\n".join(sorted(arrows)) + "\n", text)
    if update_golden:
        page.write_text(drawn, encoding="utf-8")
        text = drawn
    assert drawn == text, "run ./dev test -n0 --update-golden"


def test_no_two_files_import_each_other():
    """Also inside functions: a circle is read as one file."""
    graph = {}
    for module, names in imports().items():
        graph[module] = set(names) & imports().keys() - {module}
    assert list(graphlib.TopologicalSorter(graph).static_order())


def in_a_new_process(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


LOAD = """
import importlib, sys
for name in {modules}:
    importlib.import_module("narrowgauge." + name)
    if names := [name for name in {forbidden} if name in sys.modules]:
        sys.exit(name + " imports " + str(names))
"""


def test_tables_records_and_command_line_load_no_torch_in_fact():
    modules = []
    for module in imports():
        is_light = module.partition(".")[0] in ("spec", "runs", "planner", "report", "cli")
        if is_light or module.startswith(LIGHT):
            modules.append(module)
    heavy = ("torch", "transformers", "tokenizers", "safetensors", "datasets", "lightning")
    in_a_new_process(LOAD.format(modules=modules, forbidden=heavy))


EXPENSIVE = (
    "accelerate", "datasets", "lightning", "scipy", "torch.distributed.checkpoint", "transformers",
)  # fmt: skip
"""They take 0.3 to 3 CPU-seconds each.

``torch._dynamo`` is not here: PyTorch imports it with the first optimizer.
"""
ABOUT_THEM = ("integrations", "transforms.scal")
"""Modules that subclass or change what these packages define: functions import them."""


def test_no_other_module_imports_what_takes_seconds():
    """In one process, so that a module also pays for what it imports."""
    modules = []
    for module in imports():
        if module and module != "__main__" and not module.startswith(ABOUT_THEM):
            modules.append(module)
    in_a_new_process(LOAD.format(modules=modules, forbidden=EXPENSIVE))


def test_nothing_acts_at_the_interpreter_s_exit():
    """A process group ends in the context that made it."""
    assert [module for module, names in imports().items() if "atexit" in names] == []


def test_scripts_import_names_that_exist():
    """Names that benchmarks and examples import from the package are there, which no other test of
    a benchmark that needs a GPU, a model or hours would see.
    """
    missing = []
    for folder in ("benchmarks", "examples", "docs"):
        for file in sorted((SOURCE.parents[1] / folder).glob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                package = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
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
