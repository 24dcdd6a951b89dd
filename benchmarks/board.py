"""What each format costs: an open board of trainings by fixed rules, and the records behind the page ``docs/board.md``.

Claim: every row that trains has its cost in validation loss written down, with an interval, by runs that anybody can repeat:
the rules (text, model, batches, schedule, cells, seeds) stand in ``_board_records.py``, and each finished run is a line of
``docs/board.jsonl`` with the hashes of settings and tokens and its own. A seed fixes initial weights, batches and held-out text,
so runs are compared in pairs.

Baseline: ``master`` with the same cell and seed; of another compute over ``word``, that over bfloat16.

Run: ``./dev bench board`` with one of

- ``--add ROW …``: train what is missing of these rows and of their baselines, and append the records. A row is a storage, a
  recipe (``float8-row/word``), an optimizer of ``peers.py`` (``"torch AdamW bfloat16"``) or states by published formulas
  (``published/coat``, see ``_published_training.py``). Runs lie under ``--out``; a finished one is kept, an interrupted one
  resumed, and several processes may share the folder. How many runs, and about how long they take, is said first: one takes
  about 40 seconds of a core, the 12 of a row 8 minutes and those of the slowest half an hour.
- ``--import FOLDER``: append the finished runs in a folder of ``quality.py`` or of this benchmark. Runs of other settings are
  refused.
- ``--stall``: run the stall case for every storage and installed peer that has no record of it.
- ``--check``: verify the hashes, and that all records are by the rules.
- ``--draw``: only draw ``docs/images/costs.svg`` and ``costs-dark.svg``; whatever appends records does that, too.

``--quick`` trains two rows for six steps in a temporary folder and checks the records that they give; nothing is kept.
``--rounds`` has no effect.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import platform
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import _board_records as records
import quality
import stall
import torch
from _board_costs import PEERS, PUBLISHED, baseline_of, costs, is_others
from _board_figure import FIGURES, draw
from _board_peers import TABLE, PeerJob, performing
from _board_records import FILE, RULES, Record, Rules, RunRecord, StallRecord
from _published_training import of_folder, published
from timing import Report, exit_by, parser, peer_version

from narrowgauge.analysis.comparison.run_stats import LossCurve, divergence
from narrowgauge.errors import NarrowgaugeError, RecordError
from narrowgauge.matmul.gemm import EmulationNotice
from narrowgauge.runs.finding import counted, duration
from narrowgauge.runs.record import Run, is_run, read_run
from narrowgauge.spec.storages import STORAGES
from narrowgauge.trainer.config import TrainConfig

QUICK = dataclasses.replace(RULES, betas=(0.95,), lrs=(1e-3,), seeds=(0,), steps=6, warmup_steps=1, eval_batches=2)


@dataclass(frozen=True)
class Job(quality.Job):
    """One training by the rules."""

    rules: Rules = RULES

    def settings(self, options: argparse.Namespace) -> TrainConfig:
        return dataclasses.replace(super().settings(options), **self.rules.settings)


@dataclass(frozen=True)
class OthersJob(PeerJob, Job):
    """One training by the rules whose optimizer is a peer."""


def row_named(name: str) -> str:
    """The row that a name means: a storage, others' row, or a recipe; ``RecipeError`` where it is none."""
    return name if is_others(name) else quality.row_named(name)


def job(row: str, cell: records.Cell, seed: int, rules: Rules = RULES) -> Job:
    """The training of a row."""
    return (OthersJob if row in PEERS else Job)(row, *cell, seed, rules)


def jobs(rows: Sequence[str], rules: Rules = RULES) -> list[Job]:
    """All trainings of these rows and of their baselines, so ordered that pairs are complete at any moment."""
    names = sorted(dict.fromkeys([*map(baseline_of, rows), *rows]), key=lambda row: row != baseline_of(row))
    return [job(row, cell, seed, rules) for seed in rules.seeds for cell in rules.cells for row in names]


def options_of(out: Path, rules: Rules = RULES) -> argparse.Namespace:
    """What :mod:`quality` needs besides the rules."""
    asked = {"out": out, "eval_every": 0, "checkpoint_every": 100}
    return argparse.Namespace(**{**vars(rules), **asked})


# ── records of runs and of the stall case ───────────────────────────────────────────────────────────────────────────


def record_of(run: Run, rules: Rules = RULES) -> RunRecord:
    """The record of a finished run; ``RecordError`` where its settings or its tokens are not those of the rules."""
    config, summary, machine = run.config, run.summary or {}, run.run["machine"]
    peer = run.run.get(TABLE, {})
    recipe = str(config["recipe"])
    # States by published formulas are trained over ``master``, and known by their folder's name alone.
    formulas, figures = of_folder(run.path) or (None, {})
    row = formulas or str(peer.get("name", recipe.removeprefix("bfloat16/")))
    summary = {**summary, **figures}
    try:
        cell = float(config["beta2"]), quality.nominal_lr(run.path)
    except ValueError:
        raise _refused(run, "its folder's name does not end in -betaBETA2-lrRATE-seedSEED") from None
    wanted = job(row, cell, int(config["seed"]), rules)
    if reason := records.difference(config, wanted.settings(options_of(run.path.parent, rules))):
        raise _refused(run, reason)
    step_seconds = LossCurve.of(run).step_seconds
    record = RunRecord(
        row=row,
        recipe=recipe,
        package=f"{peer['package']} {peer['version']}" if peer else "",
        rule=rules.rule,
        beta2=cell[0],
        lr=cell[1],
        seed=wanted.seed,
        val_loss=repr(float(summary["val_loss"])),
        bytes_per_param=float(summary["bytes_per_param"]),
        step_seconds=step_seconds or 0.0,
        wall_seconds=float(summary["wall_seconds"]),
        edq=_finite(summary.get("edq")),
        noise=_finite(summary.get("noise")),
        diverged=divergence(run),
        weights=str(summary["weights_fingerprint"]),
        **{name: str(run.run["versions"][name]) for name in ("narrowgauge", "torch", "python")},
        vectors=str(machine["capability"]) if machine["device"] == "cpu" else str(machine["device"]),
        threads=int(machine["num_threads"]),
        date=_day((run.path / "summary.json").stat().st_mtime),
        settings=rules.settings_hash,
        data=run.data_fingerprint,
    )
    if reason := records.refusal(record, rules):
        raise _refused(run, reason)
    return record


def _refused(run: Run, reason: str) -> RecordError:
    return RecordError(f"{run.path.name} is not by the board's rules: {reason}.")


def _finite(metric: float | None) -> float | None:
    """A metric for a record: ``None`` where a run that diverged has none, since JSON has no such numbers."""
    return metric if metric is not None and math.isfinite(metric) else None


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).date().isoformat()


def imported(folder: Path, rules: Rules = RULES) -> tuple[list[RunRecord], list[str], int]:
    """The records of a folder's finished runs, a line for each that is refused, and the number of unfinished ones."""
    found, refusals, unfinished = [], [], 0
    for place in sorted(place for place in folder.glob("*") if place.is_dir() and is_run(place)):
        run = read_run(place)
        if run.summary is None:
            unfinished += 1
            continue
        try:
            found.append(record_of(run, rules))
        except NarrowgaugeError as error:
            refusals.append(str(error))
        except KeyError as absent:
            refusals.append(f"{place.name} is not by the board's rules: it records no {absent.args[0]}.")
    return found, refusals, unfinished


def stall_settings(case: stall.Stall) -> str:
    """The hash of a stall case: its size, its steps, its constants."""
    constants = [case.start.shape[0], case.steps, stall.LR, stall.CYCLE, stall.OPTIONS]
    return hashlib.sha256(json.dumps(constants).encode()).hexdigest()[:16]


def stall_records(case: stall.Stall, there: Sequence[Record]) -> list[StallRecord]:
    """Records of the storages and installed peers that have none with these vectors and this release of PyTorch."""
    about = {
        "narrowgauge": peer_version("narrowgauge"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
    }
    done = {record.place for record in there}
    rows = [
        row
        for row in (*STORAGES, *PUBLISHED, *PEERS)
        if (StallRecord.kind, row, about["vectors"], about["torch"]) not in done
    ]
    found = []
    for row in rows:
        peer, formulas = PEERS.get(row), published(row)
        if formulas is not None:
            made = stall.published_row(case, formulas)
        else:
            made = stall.our_row(case, row) if peer is None else stall.peer_row(case, peer)
        if "error" not in made:  # a peer that is not installed, or does not run here
            continue
        found.append(
            StallRecord(
                row=row,
                package="" if peer is None else f"{peer.package} {peer_version(peer.package)}",
                error=repr(float(made["error"])),
                bytes_per_param=float(made["bytes per parameter"]),
                edq=made.get("EDQ"),
                noise=made.get("noise"),
                **about,
                date=datetime.now(timezone.utc).date().isoformat(),
                settings=stall_settings(case),
            )
        )
    return found


# ── the command ─────────────────────────────────────────────────────────────────────────────────────────────────────


def missing(wanted: Sequence[Job], there: Sequence[Record]) -> list[Job]:
    """The trainings that have no record with this machine's vectors and this release of PyTorch."""
    mine = (torch.backends.cpu.get_cpu_capability(), torch.__version__)
    done = {(run.row, run.cell, run.seed) for run in records.runs_of(there) if run.arithmetic == mine}
    return [each for each in wanted if (each.storage, (each.beta2, each.lr), each.seed) not in done]


def announcement(wanted: Sequence[Job], there: Sequence[Record]) -> str:
    """How many runs there are to do, and about how long they take by the recorded times.

    Example of what it says: ``24 runs to train, about 22 minutes by the recorded times of other machines or days``.
    """
    if not wanted:
        return "nothing to train: every run is recorded"
    runs = records.runs_of(there)
    told = f"{counted(len(wanted), 'run')} to train"
    if not runs:
        return f"{told}; no run is recorded yet, so the time is not known"
    seconds = sum(records.usual_seconds(runs, each.storage) for each in wanted)
    return f"{told}, about {duration(seconds)} on one core like those of the recorded runs"


def train(wanted: Sequence[Job], out: Path, rules: Rules = RULES) -> int:
    """Train what is not finished under ``out``; the number of runs that failed."""
    options, failures = options_of(out, rules), 0
    failures += quality.train_all([each for each in wanted if each.storage not in PEERS], options)
    for row in dict.fromkeys(each.storage for each in wanted if each.storage in PEERS):
        of_row = [each for each in wanted if each.storage == row]
        failures += quality.train_all(of_row, options, performing(PEERS[row]))
    return failures


def keep(found: Sequence[Record], report: Report) -> int:
    """Append records and draw the figures; the number of contradictions."""
    added, contradictions = records.append(found)
    draw(costs(records.read()))
    for line in contradictions:
        report.note(line)
    drawn = " and ".join(file.name for file in FIGURES)
    report.note(f"{counted(len(added), 'record')} appended to docs/{FILE.name}; {drawn} drawn.")
    return len(contradictions)


def flags() -> argparse.ArgumentParser:
    """All flags."""
    made = parser(__doc__, rounds=1)
    what = made.add_mutually_exclusive_group()
    what.add_argument("--add", nargs="+", metavar="ROW", help="train what is missing of these rows, and record it")
    what.add_argument("--import", dest="folder", type=Path, metavar="FOLDER", help="record finished runs")
    what.add_argument("--stall", action="store_true", help="run and record the stall case")
    what.add_argument("--check", action="store_true", help="verify the records")
    what.add_argument("--draw", action="store_true", help="only draw the figures")
    made.add_argument("--out", type=Path, default=Path("runs/board"), help="folder of the runs (default runs/board)")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = flags().parse_args(arguments)
    if options.check:
        return check()
    report = Report("board", options)
    warnings.simplefilter("ignore", EmulationNotice)
    if options.draw:
        draw(costs(records.read()))
        return 0
    if options.quick or not (options.add or options.folder or options.stall):
        return quick(report)
    if options.stall:
        return keep(stall_records(stall.Stall.make(256, 400), records.read()), report) or report.end()
    failures, folder = 0, options.folder
    if options.add:
        folder, wanted = options.out, missing(jobs([row_named(name) for name in options.add]), records.read())
        report.note(announcement([each for each in wanted if not quality.finished(folder / each.name)], records.read()))
        failures = train(wanted, folder)
    if not folder.is_dir():
        raise RecordError(f"{folder} is no folder.", "Name the folder that holds the run folders.")
    found, refusals, unfinished = imported(folder)
    for line in refusals:
        report.note(line)
    if unfinished:
        report.note(f"{counted(unfinished, 'run')} under {folder} {'has' if unfinished == 1 else 'have'} not ended.")
    failures += len(refusals) + keep(found, report)
    return report.end() or int(failures > 0)


def check() -> int:
    """Say what is wrong with the records; 1 where anything is."""
    lines = records.lines_in()
    wrong = records.faults(lines)
    for line in wrong:
        print(f"docs/{FILE.name}, {line}")
    if not wrong:
        print(f"{counted(len(lines), 'record')}: hashes and settings are as they were written, by the rules.")
    return int(bool(wrong))


def quick(report: Report) -> int:
    """Two rows, six steps: that a run becomes a record."""
    with tempfile.TemporaryDirectory() as folder:
        failures = train(jobs(["word", "torch AdamW bfloat16"], QUICK), Path(folder), QUICK)
        found, refusals, _ = imported(Path(folder), QUICK)
    report.add(
        "records", [{"": run.row, "validation loss": run.val_loss, "B/param": run.bytes_per_param} for run in found]
    )
    for line in refusals:
        report.note(line)
    return report.end() or int(failures + len(refusals) > 0)


if __name__ == "__main__":
    exit_by(main)
