"""Say under which conditions a figure was measured: what its record holds beside the figure.

A run writes the kind of its processor, the versions that decide its bits, its date, and for its own
row and each baseline the digests of what they compute with today: golden steps and layers of
``tests/golden_steps.py``, which are computed anew, the version of a package, or the text of a file.
So ``docs/evidence.py`` pairs two runs only where they agree, and knows which runs have the bits of
today.
"""

from __future__ import annotations

import hashlib
import json
import sys
from datetime import datetime, timezone
from functools import cache
from pathlib import Path

import torch
from _rows import FORMULAS, PEERS_BY_NAME, row_of
from _timing import load

from narrowgauge.torch_support.machine import installed_version

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests"))

import golden_steps  # noqa: E402
from processors import machine_key, processor_kind  # noqa: E402

BASELINES = ("master", "word", "float32/float32")


def named(row: str):
    """Return what the bits of a row's step hold on, as ``docs/evidence.py`` names it."""
    parts = row_of(row)
    if parts.name == "autocast":
        return ["package: torch"]
    if parts.name in PEERS_BY_NAME:
        return [f"package: {PEERS_BY_NAME[parts.name].package}"]
    if parts.name in FORMULAS:
        return ["text: benchmarks/_published_states.py"]
    compute, _, storage = parts.name.rpartition("/")
    rule = "adamw"
    if compute == "galore":
        rule = compute
        compute = ""
    section = "steps" if rule == "adamw" else f"steps on {machine_key()}"  # it multiplies matrices
    step = f"{rule} {storage}"
    pairs = golden_steps.pairs()
    for kind in (f"{compute}/{storage}", f"{storage} random" if parts.is_random else ""):
        if (rule, kind) in pairs:
            step = f"{rule} {kind}"
    names = [f"{section}: {step}"]
    if compute in golden_steps.computes():
        names.append(f"linear layers: {compute}")
    return names


@cache
def digest(name: str) -> str:
    """Return a digest as it is in this process."""
    section, _, row = name.rpartition(": ")
    if section.startswith("steps"):
        rule, _, storage = row.partition(" ")
        return " ".join(golden_steps.steps(rule, storage).split()[:2])
    if section == "linear layers":
        return golden_steps.linear(golden_steps.computes()[row])
    if section == "package":
        return (installed_version(row) or "missing").partition("+")[0]
    return hashlib.sha256((ROOT / row).read_bytes()).hexdigest()[:16]


def digests(row: str, baselines=BASELINES):
    """Return the digests of a row and of the rows that it may be compared with, by row."""
    rows = {}
    for name in (row, *baselines):
        rows[name] = {part: digest(part) for part in named(name)}
    return rows


def conditions():
    """Return what decides the bits of a run beside its row and its text, and the date."""
    processor = processor_kind()
    if torch.cuda.is_available():
        processor = torch.cuda.get_device_name()
    return {
        "torch": torch.__version__,
        "transformers": installed_version("transformers"),
        "processor": processor,
        "threads": torch.get_num_threads(),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def keep(file: Path, rows, **shared) -> None:
    """Append times of our step to a file of records, under their conditions."""
    optim = ROOT / "src/narrowgauge/optim/step"
    held = {}
    for path in (optim / "launch.py", *sorted((optim / "cpp").glob("*.h"))):
        name = f"text: {path.relative_to(ROOT).as_posix()}"
        held[name] = digest(name)
    with file.open("a", encoding="utf-8") as stream:
        for row in rows:
            record = {"load": load(), **conditions(), **shared, **row}
            for name, value in record.items():
                if isinstance(value, float):
                    record[name] = float(f"{value:.4g}")
            stream.write(json.dumps(record | {"digests": {row["row"]: held}}) + "\n")


def keep_newest(file: Path, rows) -> None:
    """Write rows into a file of records, over those of the same names, under today's conditions."""
    file.touch()
    records = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        records[record["row"]] = record
    for row in rows:
        records[row["row"]] = row | conditions()
    text = "".join(json.dumps(record) + "\n" for record in records.values())
    file.write_text(text, encoding="utf-8")
