"""Write ``constraints.txt``: one version of every package that ``./dev`` installs, for each Python that is supported.

``pip`` resolves all extras once per Python, without installing anything: freely for the second oldest Python, and for the
others with the same versions where they all exist (which also keeps pip from building old ones that it only looks at). The
oldest Python, which packages leave first, is resolved freely where they do not. Where results differ, a line says for which
Pythons it is. What PyTorch pins itself (NVIDIA's libraries, Triton) is left to it, and differs by platform.

Usage: ``./dev lock``. It needs every supported Python on PATH or under pyenv, and the network.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FILE = ROOT / "constraints.txt"
EXTRAS = "test,check,docs,integrations,datasets,bench"
PLATFORM = re.compile(r"nvidia-|cuda-|triton")
HEAD = """\
# One version of every package that ./dev installs (pip install --constraint). Written by `./dev lock`; not to be edited.
"""


def pythons() -> list[str]:
    """The supported releases of Python, as ``3.10``."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', text)
    assert found, "pyproject.toml states no requires-python"
    return [f"3.{minor}" for minor in range(*map(int, found.groups()))]


def torch_of_lock() -> str:
    """The release of PyTorch that development goes on with: the second of ``TESTED_TORCH``."""
    text = (ROOT / "src/narrowgauge/spec/frameworks.py").read_text(encoding="utf-8")
    found = re.search(r'TESTED_TORCH = \("[^"]+", "([^"]+)"', text)
    assert found, "spec/frameworks.py states no TESTED_TORCH"
    return found[1]


def interpreter(release: str) -> str:
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    tried = [shutil.which(f"python{release}"), *map(str, sorted(pyenv.glob(f"versions/{release}.*/bin/python")))]
    for path in filter(None, tried):
        asked = [path, "-c", "import sys, ensurepip, venv; print('%d.%d' % sys.version_info[:2])"]
        if subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() == release:
            return path
    sys.exit(f"lock: no Python {release} with ensurepip and venv was found on PATH or under pyenv.")


def resolved(release: str, folder: Path, known: dict[str, str]) -> dict[str, str]:
    """The version of each package for one Python: the known one where all of these can be installed together."""
    own, report, constraints = folder / release, folder / f"{release}.json", folder / "constraints.txt"
    subprocess.run([interpreter(release), "-m", "venv", own], check=True)
    pip: list[str | Path] = [own / "bin" / "python", "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    subprocess.run([*pip, "pip>=25"], check=True)  # an older one downloads every wheel that it only looks at
    what: list[str | Path] = [
        "--dry-run",
        "--ignore-installed",
        "--report",
        report,
        "--constraint",
        constraints,
        f"{ROOT}[{EXTRAS}]",
    ]
    pins = "".join(f"{name}=={version}\n" for name, version in known.items())
    for text in filter(None, (pins, f"torch=={torch_of_lock()}.*\n")):
        constraints.write_text(text)
        if subprocess.run([*pip, *what], check=False).returncode == 0:
            break
    else:
        sys.exit(f"lock: pip found no versions for Python {release} (above).")
    found: list[dict[str, Any]] = [each["metadata"] for each in json.loads(report.read_text())["install"]]
    named = {re.sub(r"[-_.]+", "-", each["name"]).lower(): each["version"].partition("+")[0] for each in found}
    return {name: version for name, version in named.items() if name != "narrowgauge" and not PLATFORM.match(name)}


def lines(versions: dict[str, dict[str, str]]) -> list[str]:
    """``versions[release][name]`` as constraints."""
    result = []
    for name in sorted({name for found in versions.values() for name in found}):
        releases = defaultdict(list)
        for release, found in versions.items():
            if name in found:
                releases[found[name]].append(release)
        for version, where in releases.items():
            marker = " or ".join(f'python_version == "{release}"' for release in where)
            result.append(f"{name}=={version}" + ("" if len(releases) == 1 else f" ; {marker}"))
    return result


def main() -> None:
    oldest, second, *others = pythons()
    versions: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for release in (second, *others, oldest):
            versions[release] = resolved(release, Path(folder), versions.get(second, {}))
    versions = {release: versions[release] for release in pythons()}
    FILE.write_text(HEAD + "".join(f"{line}\n" for line in lines(versions)), encoding="utf-8")
    print(f"{FILE}: {len(set().union(*versions.values()))} packages for Python {', '.join(versions)}")


if __name__ == "__main__":
    main()
