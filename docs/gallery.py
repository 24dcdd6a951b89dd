"""The gallery: reports on runs that are stored in the repository, generated at each build of the documentation.

A page holds two megabytes of Plotly and some hundred kilobytes of figures, so only the runs are stored, one file a page:
``docs/gallery/PAGE.zip``, which ``narrowgauge report`` opens. MkDocs calls :func:`on_files`, which adds the pages to the
site. By hand::

    python docs/gallery.py write FOLDER            every page, as FOLDER/PAGE.html
    python docs/gallery.py take PAGE RUN…          add the run folders RUN… to those of a page

What is stored of a run: ``run.toml``, with names in place of paths; ``evals.jsonl``, ``events.jsonl`` and ``summary.json``
as they were; ``gauges.jsonl``, where there is one, of the first seed; of ``steps.jsonl`` the columns of :data:`DIGITS`,
shortened to so many digits. The verdict on the stored runs is that on the complete ones.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w

import narrowgauge

GALLERY = Path(__file__).parent / "gallery"

TITLES = {
    "first-minute": "What ./dev train shows: a llama-1m at a small learning rate",
    "storages": "Storages of a llama-1m at a learning rate of 1e-3",
    "storages-small-rate": "Storages of a llama-1m at a learning rate of 1e-4",
    "storages-8m": "Storages of a llama-8m at a learning rate of 3e-4",
    "computes": "Computes of a llama-1m at a learning rate of 1e-3",
}
"""The pages and their titles."""

DIGITS = {
    "step": 0, "loss": 7, "lr": 4, "grad_norm": 5, "tokens": 0, "seconds": 6, "skipped": 0, "saturated": 0, "loss_scale": 9,
    "spike": 0, "edq": 6, "noise": 4, "lost_fraction": 4, "unseen_fraction": 4,
    "imprecision_share": 4, "lost_decay": 4,
}  # fmt: skip
"""The columns of ``steps.jsonl`` that are stored, with their digits; 0 stores a value as it is."""

_AS_THEY_ARE = ("evals.jsonl", "events.jsonl", "summary.json")


def page(name: str, gallery: Path = GALLERY) -> str:
    """The HTML of one page.

    Args:
        name: a key of :data:`TITLES`.
        gallery: the folder of its zip file.
    """
    # Here: MkDocs loads this file for every command, and a page needs what the others do not.
    from narrowgauge.report.publishing import read_runs
    from narrowgauge.report.runs_page import render

    # The page names commands on these runs: as they are typed in a checkout, and without the folders of this machine.
    found = read_runs([os.path.relpath(gallery / f"{name}.zip")])
    found.sort(key=lambda run: -round((run.summary or {}).get("bytes_per_param", 0.0), 1))  # as the tables list them
    return render(narrowgauge.compare_runs(found), TITLES[name])


def on_files(files: Any, config: Any) -> Any:
    """Add the pages to the site, so that links to them are checked as all others are; MkDocs calls this."""
    from mkdocs.structure.files import File

    for name in TITLES:
        files.append(File.generated(config, f"gallery/{name}.html", content=page(name)))
    return files


def add(folders: Sequence[Path], file: Path) -> None:
    """Add thin copies of run folders to the zip file of a page."""
    from narrowgauge.report.publishing import pack
    from narrowgauge.runs.archive import files_in, read_bytes

    with tempfile.TemporaryDirectory() as temporary:
        for packed in files_in(file):
            copy = Path(temporary) / packed.relative_to(file)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(read_bytes(packed) or b"")
        for folder in folders:
            take(folder, Path(temporary, file.stem))
        pack([Path(temporary, file.stem)], file)


def take(folder: Path, runs: Path) -> Path:
    """Copy one run, thin, into a folder; the copy's path."""
    from narrowgauge.report.publishing import without_paths

    run = narrowgauge.read_run(folder)
    place = runs / f"{str(run.config['recipe']).replace('/', '-')}-seed{run.config['seed']}"
    place.mkdir(parents=True)
    (place / "run.toml").write_text(tomli_w.dumps(without_paths(run.run, place.name)), encoding="utf-8")
    lines = (json.dumps(_shortened(row), separators=(",", ":"), allow_nan=False) + "\n" for row in run.steps)
    (place / "steps.jsonl").write_text("".join(lines), encoding="utf-8")
    sampled = ("gauges.jsonl",) if run.config["seed"] == 0 else ()
    for file in (*_AS_THEY_ARE, *sampled):
        if (folder / file).exists():
            shutil.copyfile(folder / file, place / file)
    return place


def _shortened(row: dict[str, Any]) -> dict[str, Any]:
    """The columns that are kept; a step that was not skipped does not say so, and what JSON has no word for is a name."""
    kept = {key: row[key] for key in DIGITS if row.get(key) not in (None, False)}
    return {key: _rounded(value, DIGITS[key]) for key, value in kept.items()}


def _rounded(value: Any, digits: int) -> Any:
    if not isinstance(value, float) or not digits:
        return value
    short = float(f"{value:.{digits}g}")
    return short if abs(short) < float("inf") else str(short)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write pages, or add runs to one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write", help="write every page")
    write.add_argument("folder", type=Path)
    keep = commands.add_parser("take", help="add runs, thin, to those of a page")
    keep.add_argument("page", choices=TITLES)
    keep.add_argument("runs", nargs="+", type=Path)
    asked = parser.parse_args(arguments)
    if asked.command == "take":
        add(asked.runs, GALLERY / f"{asked.page}.zip")
        return 0
    asked.folder.mkdir(parents=True, exist_ok=True)
    for name in TITLES:
        file = asked.folder / f"{name}.html"
        file.write_text(page(name), encoding="utf-8")
        print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
