"""The case studies: runs that are stored in the repository, their diagnosis as text, and its page, generated at each build.

``docs/case-studies/NAME.zip`` holds the records of a study's runs, which ``narrowgauge diagnose`` opens. MkDocs calls
:func:`on_files`, which adds the pages to the site. By hand::

    python docs/case_studies.py train FOLDER [NAME…]   train the runs again, into FOLDER/RUN: some minutes each
    python docs/case_studies.py take FOLDER [NAME…]    store the records of the runs in FOLDER
    python docs/case_studies.py write FOLDER           every page, as FOLDER/NAME.html
    python docs/case_studies.py tell docs              the answers as this version gives them, into case-studies.md

A study's first runs are what somebody saw, and the page is on them; the last one is the run with the remedy. Most runs are
plain ``narrowgauge train``; the one with a bug multiplies a gradient behind the trainer's back, as a mistaken hook would.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

import narrowgauge

STUDIES_AT = Path(__file__).parent / "case-studies"
_SHAPE = STUDIES_AT / "tiny"
_USUAL: dict[str, Any] = {"sequence_length": 64, "checkpoint_every": 0, "log_every": 50, "threads": 1}
BUG_AT, BUG_IN = 6, "model.layers.0.mlp.down_proj.weight"
"""The step from which the gradient of one weight is 1.01 times what it is, and the weight."""


@dataclass(frozen=True)
class Study:
    """Runs that belong together.

    Args:
        title: of its page.
        runs: by name: the settings of each, besides the usual ones.
        shown: the run, or the two, that the page is on.
        cause: to be mended.
        buggy: the runs with the bug.
    """

    title: str
    runs: dict[str, dict[str, Any]]
    shown: tuple[str, ...]
    cause: str
    buggy: frozenset[str] = field(default_factory=frozenset)


_COUNTED: dict[str, Any] = {"recipe": "bfloat16/word", "steps": 10, "eval_every": 0, "fingerprints_every": 1}
_FLOAT16: dict[str, Any] = {"recipe": "float16/word", "steps": 200, "schedule": "constant"}
STUDIES = {
    "lost-updates": Study(
        "A loss that stops falling",
        {
            "naive": {"recipe": "bfloat16/naive", "lr": 1e-4, "steps": 300},
            "word": {"recipe": "bfloat16/word", "lr": 1e-4, "steps": 300},
        },
        ("naive",),
        "lost-updates",
    ),
    "overflow": Study(
        "NaN in float16",
        {"rate-0.1": {**_FLOAT16, "lr": 0.1}, "rate-0.01": {**_FLOAT16, "lr": 0.01}},
        ("rate-0.1",),
        "learning-rate-too-high",
    ),
    "scaled-gradient": Study(
        "Two runs that should be equal",
        {"before": _COUNTED, "after": _COUNTED, "mended": _COUNTED},
        ("before", "after"),
        "bug",
        frozenset({"after"}),
    ),
}  # fmt: skip


def page(name: str, folder: Path = STUDIES_AT) -> str:
    """The HTML of one page.

    Args:
        name: a key of :data:`STUDIES`.
        folder: of its zip file.
    """
    from narrowgauge.analysis.diagnosis.pairs.two_runs import TwoRuns
    from narrowgauge.report.diagnosis_page import render_diagnosis, render_two

    runs = [narrowgauge.read_run(path) for path in shown_runs(name, folder)]
    found = narrowgauge.diagnose(*runs)
    return render_two(found, *runs) if isinstance(found, TwoRuns) else render_diagnosis(found, *runs)


def shown_runs(name: str, folder: Path = STUDIES_AT) -> list[Path]:
    """The runs that a page is on."""
    return [folder / f"{name}.zip" / name / run for run in STUDIES[name].shown]


def on_files(files: Any, config: Any) -> Any:
    """Add the pages to the site, so that links to them are checked as all others are; MkDocs calls this."""
    from mkdocs.structure.files import File

    for name in STUDIES:
        files.append(File.generated(config, f"case-studies/{name}.html", content=page(name)))
    return files


# ── making them ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def train(folder: Path, names: Sequence[str]) -> None:
    """Train the runs of studies."""
    from narrowgauge.trainer import loop
    from narrowgauge.trainer.config import TrainConfig

    for name in names:
        study = STUDIES[name]
        for run, settings in study.runs.items():
            out = str(folder / name / run)
            config = TrainConfig.from_dict({**_USUAL, "model": str(_SHAPE), "out": out, **settings})
            whole = loop.train_step
            if run in study.buggy:
                loop.train_step = _with_bug(whole)
            try:
                loop.train(config)
            finally:
                loop.train_step = whole


def _with_bug(whole: Any) -> Any:
    def step(session: Any, *arguments: Any) -> Any:
        if session.step + 1 == BUG_AT:
            session.model.get_parameter(BUG_IN).register_hook(lambda grad: grad * 1.01)
        return whole(session, *arguments)

    return step


def take(folder: Path, name: str) -> Path:
    """Store the records of a study's runs: what a diagnosis reads, without data, weights and the paths of this machine."""
    from narrowgauge.report.publishing import pack, without_paths

    with tempfile.TemporaryDirectory() as temporary:
        for run in STUDIES[name].runs:
            source, copy = folder / name / run, Path(temporary, name, run)
            copy.mkdir(parents=True)
            settings = narrowgauge.read_run(source).run
            (copy / "run.toml").write_text(tomli_w.dumps(without_paths(settings, run)), encoding="utf-8")
            for file in ("evals.jsonl", "events.jsonl"):
                shutil.copyfile(source / file, copy / file)
            summary = json.loads((source / "summary.json").read_text())
            (copy / "summary.json").write_text(json.dumps(summary | {"model": Path(summary["model"]).name}))
            for file in ("steps", "gauges", "fingerprints"):
                rows = [json.loads(line) for line in (source / f"{file}.jsonl").read_text().splitlines()]
                kept = (
                    [_thin(row) for row in rows] if file != "fingerprints" else [row for row in rows if _is_near(row)]
                )
                lines = [json.dumps(row, separators=(",", ":")) for row in kept]
                (copy / f"{file}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        return pack([Path(temporary, name)], STUDIES_AT / f"{name}.zip")


_DROPPED = frozenset({"crc32", "settings", "histograms", "tokens_per_second", "peak_memory_bytes"})
_WHOLE = frozenset({"loss", "lr", "grad_norm"})
"""Columns that are compared digit by digit; of others six digits are stored."""


def _thin(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value if key in _WHOLE else _shortened(value) for key, value in row.items() if key not in _DROPPED}


def _is_near(row: dict[str, Any]) -> bool:
    """Whether a row of fingerprints is of a step beside the bug's: hashes cannot be compressed."""
    row.pop("crc32", None)
    return abs(row["step"] - BUG_AT) <= 1


def _shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shortened(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_shortened(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def tell(markdown: str) -> str:
    """The text of the page, with the answers as this version gives them."""
    for name in STUDIES:
        said = narrowgauge.diagnose(*shown_runs(name)).text()
        block = re.compile(rf"(<!-- diagnosis: {name} -->\n```text\n).*?```", re.DOTALL)
        markdown = block.sub(lambda found, said=said: f"{found[1]}{said}\n```", markdown)  # type: ignore[misc]
    return markdown


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, store, write pages or answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["train", "take", "write", "tell"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", choices=[[], *STUDIES], help="studies (default all)")
    asked = parser.parse_args(arguments)
    names = asked.names or list(STUDIES)
    if asked.command == "train":
        train(asked.folder, names)
        return 0
    asked.folder.mkdir(parents=True, exist_ok=True)
    if asked.command == "tell":
        file = asked.folder / "case-studies.md"
        file.write_text(tell(file.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    for name in names:
        if asked.command == "take":
            print(take(asked.folder, name))
        else:
            file = asked.folder / f"{name}.html"
            file.write_text(page(name), encoding="utf-8")
            print(os.path.relpath(file))
    return 0


if __name__ == "__main__":
    sys.exit(main())
