"""Install another release of PyTorch for the tests, small enough for a machine without a GPU.

Where ``PIP_EXTRA_INDEX_URL`` names PyTorch's own index of builds for the CPU (200 MB), pip takes one of those. PyPI's wheel
for Linux is built for CUDA (540 MB) and asks for gigabytes of NVIDIA's libraries, of which a CPU needs not one: but the
dynamic linker wants each of them, and in it each function that PyTorch calls. So the wheel is installed without them, and
libraries of those names are written into ``torch/lib``, whose functions only return 100, CUDA's "no device": PyTorch then
finds no GPU, and computes on the CPU by the same code as ever.

Usage: ``./dev test --torch VERSION``, which runs ``python .ci/other_torch.py VERSION`` in an environment of its own. The
libraries take a C++ compiler (``g++``, or what ``CXX`` names) and binutils, a second and 400 KB.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PLATFORM = re.compile(r"nvidia-|cuda-|triton")
"""What PyTorch requires for GPUs alone."""
# The driver, libcuda.so.1, is asked for only once there is a GPU.
LIBRARY = re.compile(r"lib(cu|nccl|nv)(?!da\.so)\w*\.so\.\d+")
FUNCTION = re.compile(r"(cu|nccl|nv)\w+")
"""NVIDIA's libraries and functions, by name: all others come with PyTorch, Python or the system."""

TEXT = '"no NVIDIA library is here"'


def read(*command: object) -> str:
    return subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout


def pip_install(*what: object) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    subprocess.run([*pip, *map(str, what)], check=True)


def project() -> dict[str, Any]:
    try:
        import tomllib
    except ImportError:  # Python 3.10
        from pip._vendor import tomli as tomllib
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found


def name_of(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower()


def install(version: str) -> None:
    """PyTorch, this package and what its tests need, in the environment of this Python."""
    pip_install("--no-deps", f"torch=={version}")
    importlib.invalidate_caches()
    needs = [each for each in metadata.requires("torch") or [] if "extra ==" not in each]
    own = [*project()["dependencies"], *project()["optional-dependencies"]["test"]]
    wanted = [each for each in (*needs, *own) if name_of(each) != "torch" and not PLATFORM.match(each)]
    # What PyTorch asks for, this release may ask for in other versions than the one of constraints.txt.
    free = {"torch", *map(name_of, needs)}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder, "constraints.txt")
        constraints.write_text("".join(line for line in lines if name_of(line) not in free), encoding="utf-8")
        pip_install("--constraint", constraints, *wanted)
    pip_install("--no-deps", "--editable", ROOT)


def function(name: str) -> str:
    """The code of a function that is asked for; whoever then asks for its error's name is told."""
    is_text = name.endswith(("ErrorString", "ErrorName"))
    return f"{'const char *' if is_text else 'int '}{name}(void) {{ return {TEXT if is_text else 100}; }}\n"


def write_library(path: Path, version: str, functions: set[str]) -> None:
    """A library of functions that return 100, under a version of symbols where the linker asks for one."""
    with tempfile.TemporaryDirectory() as folder:
        code, script = Path(folder, "functions.c"), Path(folder, "versions")
        code.write_text("".join(map(function, sorted(functions))))
        script.write_text(f"{version} {{ global: *; }};\n")
        options = [f"-Wl,--version-script={script}"] if version else []
        compiler = os.environ.get("CXX", "g++")
        read(compiler, "-x", "c", "-w", "-fPIC", "-shared", f"-Wl,-soname,{path.name}", *options, "-o", path, code)


def replace_libraries(folder: Path) -> None:
    """Write those of NVIDIA's libraries that PyTorch's own, in this folder, ask for."""
    wanted: dict[str, str] = {}
    """Libraries, with the version of the symbols that are asked of each; empty for none."""
    symbols: set[str] = set()
    for library in sorted(folder.glob("*.so*")):
        wanted |= dict.fromkeys(re.findall(r"\(NEEDED\).*\[(.+)\]", read("readelf", "-dW", library)), "") | wanted
        asked = read("readelf", "-VW", library)
        wanted |= dict(re.findall(r"File: (\S+) .*\n.*Name: (\S+) +Flags", asked))
        symbols.update(line.split()[-1] for line in read("nm", "-D", "--undefined-only", library).splitlines())
    missing = {
        name: version for name, version in wanted.items() if LIBRARY.match(name) and not (folder / name).exists()
    }
    loose = {name for name in symbols if FUNCTION.fullmatch(name)}
    for name, version in missing.items():
        own = {symbol.partition("@")[0] for symbol in symbols if version and symbol.endswith(f"@{version}")}
        write_library(folder / name, version, own or loose)


def main(version: str) -> None:
    install(version)
    found = importlib.util.find_spec("torch")
    assert found and found.origin
    if sys.platform == "linux":
        replace_libraries(Path(found.origin).parent / "lib")
    subprocess.run([sys.executable, "-c", "import torch; print('PyTorch', torch.__version__)"], check=True)


if __name__ == "__main__":
    main(sys.argv[1])
