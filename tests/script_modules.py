"""Scripts of folders that are no packages, as modules."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


def script_module(place: str) -> ModuleType:
    """``FOLDER/NAME.py`` of the repository as a module that others can name: pickles and
    dataclasses do.
    """
    file = ROOT / place
    spec = importlib.util.spec_from_file_location(file.stem, file)
    sys.modules[file.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def benchmark_module(name: str) -> ModuleType:
    """``benchmarks/NAME.py``, which may import others from its own folder."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
