"""How many planted faults do the tests notice? One hundred, one at a time, in a copy of this checkout.

For each fault of ``_planted_faults.py`` the nearest tests run first, and the first failure ends its turn: the module's doctests
and the tests of its room that import it, the rest of its room, all others that import it, then every test. The whole product
(``--all``) is asked of what ``./dev test`` does not notice. Each turn is a fork of a process that has imported PyTorch, so that
a fault that is noticed at once costs seconds. Results are kept in ``--out``, and a second start goes on from there.

Usage: ``./dev bench mutations [--out FILE] [--only NAME ...] [--no-whole]``; hours of one processor if much goes unnoticed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
    os.environ.setdefault(_name, "1")

from _planted_faults import FAULTS, Fault  # noqa: E402

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import selection  # noqa: E402

CPU_SECONDS, WALL_SECONDS = 1800, 7200
"""What one stage of tests may take; a fault with which they never end is noticed."""


BROKEN: set[str] = set()
"""Tests that fail without any fault, on this machine today: nobody is noticed by them."""


def place_of(fault: Fault) -> Path:
    """The one file of ``src`` in which the fault's text occurs once."""
    found = [path for path in selection.SOURCE.rglob("*.py") for _ in range(path.read_text("utf-8").count(fault.old))]
    if len(found) != 1:
        places = ", ".join(str(path.relative_to(ROOT)) for path in found) or "nowhere"
        sys.exit(f"mutations: the text of {fault.name!r} occurs {len(found)} times in src ({places}), and not once.")
    return found[0]


def room_of(path: Path) -> str:
    return path.relative_to(selection.SOURCE / "narrowgauge").parts[0].removesuffix(".py")


SLOW = re.compile(r"compiler_missing|torch\.compile|compile=True|first_minute|subprocess|ranks")
"""What a test file says that compiles kernels or starts processes; the others of a stage come first."""


def stages(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Names of stages and what pytest is given, the nearest tests first; each test in one stage alone."""
    names = {file: name for name, file in selection.modules().items()}
    module, room = names[path], selection.mirrors(names[path])
    tests = {
        file: name for file, name in names.items() if selection.TESTS in file.parents and file.name.startswith("test_")
    }
    own = [file for file in tests if room and file.relative_to(selection.TESTS).as_posix().startswith(room)]
    near = [file for file in tests if module in selection.imports(tests[file])]
    ordered = [
        ("the module's", [path, *(file for file in own if file in near)]),
        ("its room's", own),
        ("its importers'", near),
        ("who reach it", [file for file in tests if module in selection.closure([tests[file]])]),
    ]
    seen: set[Path] = set()
    for name, files in ordered:
        left = [file for file in dict.fromkeys(files) if file not in seen]
        left.sort(key=lambda file: len(SLOW.findall(file.read_text("utf-8"))) if file != path else -1)
        seen |= set(left)
        if left:
            yield name, [str(file.relative_to(ROOT)) for file in left]
    yield "all others", [f"--ignore={file.relative_to(ROOT)}" for file in seen]


@contextlib.contextmanager
def planted(fault: Fault, file: Path) -> Iterator[None]:
    """The fault, in a file of the copy; compiled bytes of either text are not taken for the other's."""
    before = file.read_text("utf-8")
    try:
        file.write_text(before.replace(fault.old, fault.new), "utf-8")
        forget(file)
        yield
    finally:
        file.write_text(before, "utf-8")
        forget(file)


def forget(file: Path) -> None:
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink()


def copied(folder: Path) -> Path:
    """What git knows of this checkout, changes included, and what is new."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def fails(tree: Path, given: list[str], log: Path) -> str:
    """The first test that fails, in a fork of this process; empty if all pass."""
    log.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        try:
            run_tests(tree, given, log)
        finally:
            os._exit(70)
    status, until = None, time.monotonic() + WALL_SECONDS
    while status is None:
        done, code = os.waitpid(child, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(code)
        elif time.monotonic() > until:
            os.killpg(child, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        else:
            time.sleep(0.2)
    text = log.read_text("utf-8", "replace")
    lines = [line for line in text.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    named = [line.split(" ", 1)[1].partition(" - ")[0] for line in lines]
    if status in (0, 5):  # passed; none was collected
        return ""
    if status in (3, 4):
        raise RuntimeError(f"pytest could not run {' '.join(given)}: {text[-2000:]}")
    return named[0] if named else "the tests did not end" if status < 0 else f"pytest ended with {status}"


def run_tests(tree: Path, given: list[str], log: Path) -> None:
    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    with log.open("wb") as stream:
        for number in (1, 2):
            os.dup2(stream.fileno(), number)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree / "src")
    sys.path[:] = [str(tree / "src"), *(p for p in sys.path if not p.startswith(str(ROOT)))]
    for name in [name for name in sys.modules if name == "selection" or name.startswith("narrowgauge")]:
        del sys.modules[name]
    import pytest

    os._exit(
        int(pytest.main(["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=line", *given]))
    )


def judged(fault: Fault, tree: Path, log: Path, is_whole: bool) -> dict[str, Any]:
    """Who noticed a fault, and after how many seconds."""
    path, began = place_of(fault), time.monotonic()
    row = {"fault": fault.name, "kind": fault.kind, "room": room_of(path), "text": [fault.old, fault.new]}
    for job, options in (("default", []), *([("whole", ["--all"])] if is_whole else [])):
        for stage, given in stages(path):
            asked = [*options, *given]
            while True:
                with planted(fault, tree / path.relative_to(ROOT)):
                    found = fails(tree, [*asked, *(f"--deselect={test}" for test in sorted(BROKEN))], log)
                if not found or "::" not in found or not fails(tree, [found], log):
                    break
                BROKEN.add(found)  # without the fault, too
            if found:
                seconds = round(time.monotonic() - began)
                return {**row, "noticed": job, "stage": stage, "by": found, "seconds": seconds}
    return {**row, "noticed": "no", "stage": "", "by": "", "seconds": round(time.monotonic() - began)}


def table(rows: list[dict[str, Any]], key: str) -> str:
    lines = [
        f"| {key} | planted | by the default job | by the whole product alone | unnoticed |",
        "|---|---:|---:|---:|---:|",
    ]
    for name in [*sorted({row[key] for row in rows}), "all"]:
        mine = [row["noticed"] for row in rows if name in (row[key], "all")]
        lines.append(
            "| " + " | ".join(map(str, (name, len(mine), *map(mine.count, ("default", "whole", "no"))))) + " |"
        )
    return "\n".join(lines)


def warm_up() -> None:
    """Import here what every fork would, but for this package."""
    for name in (
        "hypothesis",
        "pytest",
        "safetensors.torch",
        "torch.distributed.checkpoint",
        "transformers.modeling_utils",
    ):
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=ROOT / "runs" / "mutations.jsonl", help="results, a line for each fault"
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these faults alone")
    parser.add_argument("--no-whole", action="store_true", help="do not ask the whole product")
    asked = parser.parse_args()
    for fault in FAULTS:
        place_of(fault)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    known = [json.loads(line) for line in asked.out.read_text("utf-8").splitlines()] if asked.out.exists() else []
    rows = {
        row["fault"]: row for row in known if [row["fault"], row["text"]] in [[f.name, [f.old, f.new]] for f in FAULTS]
    }
    os.environ.setdefault("NARROWGAUGE_CACHE", str(asked.out.parent.resolve() / "cache"))
    warm_up()
    with tempfile.TemporaryDirectory() as folder, asked.out.open("a", encoding="utf-8") as stream:
        tree = copied(Path(folder, "tree"))
        for fault in FAULTS:
            if fault.name in (asked.only or {fault.name}) and fault.name not in rows:
                row = rows[fault.name] = judged(fault, tree, Path(folder, "log"), not asked.no_whole)
                stream.write(json.dumps(row, ensure_ascii=False) + "\n")
                stream.flush()
                print(
                    f"{row['noticed']:8} {row['seconds']:5} s  {row['room']:12} {fault.name:20} {row['by']}", flush=True
                )
    found = list(rows.values())
    print(f"\n{table(found, 'room')}\n\n{table(found, 'kind')}")
    for test in sorted(BROKEN):
        print(f"fails without a fault: {test}")
    for row in found:
        if row["noticed"] == "no":
            print(f"unnoticed: {row['fault']} in {row['room']}")


if __name__ == "__main__":
    main()
