"""What each storage and each compute costs in training quality: one small model, the same starts and batches.

Claim: word, split and exact end where master ends. A llama-1m learns the standard library's source; beta2, peak learning
rate (a usual one, and one so small that naive bfloat16 stalls), seed and storage are crossed. A seed fixes the initial
weights, the order of the batches and what is held out, so runs of one seed differ in their storage alone, and their
*paired* difference of final validation losses hides little behind the luck of a seed.

Baseline: ``master`` with the same beta2, rate and seed. The table gives, for each cell (beta2, rate), the mean difference
over seeds and the half width of its 95 % interval by Student's t with (seeds - 1) degrees of freedom. Over all cells it
gives the mean of the cells' means; cells are what was chosen and only seeds are drawn, so its variance is the sum of the
cells' own, Σ s²/n, divided by the squared number of cells, with Satterthwaite's degrees of freedom rounded down. "within
0.01" asks whether that last interval lies inside ± 0.01 nats.

``--storages`` also takes whole recipes, such as ``float8-row/states8``, and published 8-bit states, such as
``published/fp8-lm`` (``_published_training.py``); ``published`` stands for all of them.

With ``--computes`` the rows of computes are compared, over ``word``, with ``bfloat16/word`` as baseline. Claim: float8-*,
mxfp8 and int8-row end within 1 % of its loss. (Where others train at a peak rate of 1e-3, unit-scaled models take the
trainer's own for them: their rates count in other units.) A second table compares *at equal time*: both validated every so many
steps, the loss between two validations read off a straight line, and the difference given at shares of the time that the
faster of the two takes. Time is that of the training steps alone, those that compile (five times the median and more)
counted as a median one; it means something only where nothing else ran, and with ``--schedule constant``, since with
another one the faster run is also further in its schedule at the same second.

Run: ``./dev bench quality [--out FOLDER] [--storages … | --computes …] [--seeds …] [--report-only] [--quick]``. Each run
is a run folder under ``--out``; a finished one is reused, an interrupted one resumed, and the tables are made from the
folders alone. Several processes may share the folder: each claims the run that it works on. A storage whose arithmetic
was changed must be run again: remove its folders, ``FOLDER/STORAGE-*``. How many runs are missing and about how long they take
is said first, by the finished ones, or by the board's records of the same rows. A run of ``word`` takes about 50 seconds of a
core, all 348 of storages by that and the records about 5 hours, the 75 of computes 2 hours. ``--rounds`` has no effect.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import math
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _board_records import MASTER, RULES, WORD, Rules, over_word, read, runs_of, usual_seconds
from _parts import add_out, announcement, out_folder
from _published_training import NAMES, keeping, of_folder, published
from timing import Report, Row, exit_by, parser

from narrowgauge.analysis.comparison.intervals import interval
from narrowgauge.analysis.comparison.run_stats import LossCurve
from narrowgauge.errors import RecordError
from narrowgauge.matmul.gemm import EmulationNotice
from narrowgauge.runs.atomic_io import lock
from narrowgauge.runs.record import Run, read_run
from narrowgauge.spec.computes import COMPUTES
from narrowgauge.spec.computes import names as compute_names
from narrowgauge.spec.models import UNIT_LEARNING_RATE, get_model
from narrowgauge.spec.notation import parse
from narrowgauge.spec.storages import STORAGES
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.data.dataset import prepare_data
from narrowgauge.trainer.language_model import vocabulary_size
from narrowgauge.trainer.loop import resume, train

Cell = tuple[float, float]
Perform = Callable[[TrainConfig, Path, Path, str], object]
BETAS, LRS, SEEDS = (0.95, 0.999), (1e-3, 1e-4), (0, 1, 2)
QUICK: dict[str, Any] = {"steps": 6, "batch_size": 2, "sequence_length": 32, "eval_batches": 2}
_VARIED = ("recipe", "beta2", "lr", "seed", "out", "stop_after")
"""Settings in which runs of one table may differ."""


@dataclass(frozen=True)
class Baseline:
    """What a table compares with, and when it calls a row its equal.

    Args:
        name: of the storage, as :class:`Job` has it.
        bound: within which the interval of a difference must lie.
        is_relative: the bound is a share of the baseline's loss, not nats.
    """

    name: str
    bound: float = 0.01
    is_relative: bool = False

    @property
    def column(self) -> str:
        """The heading of the answers."""
        return f"within {self.bound:.0%}" if self.is_relative else f"within {self.bound:g}"


STORED, COMPUTED = Baseline(MASTER), Baseline(WORD, is_relative=True)


@dataclass(frozen=True)
class Job:
    """One training: a storage, a cell and a seed."""

    storage: str
    beta2: float
    lr: float
    seed: int

    @property
    def recipe(self) -> str:
        """A storage of another compute says so in its name."""
        if published(self.storage):
            return f"bfloat16/{STORED.name}"
        return self.storage if "/" in self.storage else f"bfloat16/{self.storage}"

    @property
    def rate(self) -> float:
        """The peak rate: the cell's, or of a unit-scaled model its own one, moved as the cell's is from the usual one."""
        is_unit = parse(self.recipe).compute.transform == "unit"
        return UNIT_LEARNING_RATE * self.lr / LRS[0] if is_unit else self.lr

    @property
    def name(self) -> str:
        """Its folder's name."""
        return f"{self.storage.replace('/', '-')}-beta{self.beta2:g}-lr{self.lr:g}-seed{self.seed}"

    def settings(self, options: argparse.Namespace) -> TrainConfig:
        """Everything the trainer is given."""
        return TrainConfig(
            model=options.model,
            recipe=parse(self.recipe),
            steps=options.steps,
            batch_size=options.batch_size,
            sequence_length=options.sequence_length,
            lr=self.rate,
            beta2=self.beta2,
            seed=self.seed,
            out=str(options.out / self.name),
            schedule=options.schedule,
            eval_every=options.eval_every,
            eval_batches=options.eval_batches,
            checkpoint_every=options.checkpoint_every,
            keep_checkpoints=1,
            compile=options.compile,
        )


def row_named(name: str) -> str:
    """The row that a name means: a storage, published states, or a recipe; ``RecipeError`` where it is none."""
    return name if name in (*STORAGES, *NAMES) else parse(name).name.removeprefix("bfloat16/")


def nominal_lr(folder: Path) -> float:
    """The rate of the cell that a run belongs to, from its folder's name."""
    return float(folder.name.rpartition("-seed")[0].rpartition("-lr")[2])


def jobs(options: argparse.Namespace) -> list[Job]:
    """All requested runs, so ordered that what is done at any moment is comparable: the baseline first, seed by seed."""
    names = sorted(options.storages, key=lambda name: name != options.baseline.name)
    crossed = itertools.product(options.seeds, options.betas, options.lrs, names)
    return [Job(name, beta2, lr, seed) for seed, beta2, lr, name in crossed]


def identity(pid: int) -> str:
    """A living process, identified by its number and start time; empty where there is none."""
    if Path("/proc/self/stat").exists():
        file = Path(f"/proc/{pid}/stat")
        state, *others = file.read_text().rpartition(")")[2].split() if file.exists() else "Z"
        return "" if state == "Z" else f"{pid} {others[18]}"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    return str(pid)


@contextlib.contextmanager
def guard(out: Path) -> Iterator[None]:
    """One process at a time: for the moment of a claim, and while the data are prepared."""
    out.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(out / ".guard", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        lock(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def claim(out: Path, name: str) -> Iterator[bool]:
    """Whether the run ``name`` is this process's: nobody else's, or a dead one's. It is let go in the end."""
    file = out / f"{name}.lock"
    with guard(out):
        # Under the guard nobody makes a claim between the look and the removal.
        if file.exists() and (held := file.read_text()) != identity(int(held.split()[0]) if held else 0):
            file.unlink()
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            descriptor = -1
        if descriptor >= 0:
            os.write(descriptor, identity(os.getpid()).encode())
            os.close(descriptor)
    try:
        yield descriptor >= 0
    finally:
        if descriptor >= 0:
            file.unlink(missing_ok=True)


def share_data(config: TrainConfig, folder: Path, out: Path) -> None:
    """Put a link to the seed's tokens into the run folder; they are prepared by the first run of that seed."""
    shared = out / "data" / f"{config.model}-seed{config.seed}"
    with guard(out):
        prepare_data(
            config.data, shared, vocab_size=vocabulary_size(config.model), held_out=config.held_out, seed=config.seed
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "data").symlink_to(os.path.relpath(shared / "data", folder), target_is_directory=True)


def finished(folder: Path) -> bool:
    """Whether a run is there and has ended."""
    return (folder / "run.toml").is_file() and read_run(folder).summary is not None


def perform(config: TrainConfig, folder: Path, out: Path, storage: str) -> None:
    """Train, or go on where a killed process stopped; what only a resume needs is removed in the end."""
    with contextlib.redirect_stdout(io.StringIO()), keeping(storage, folder):
        if (folder / "run.toml").is_file():
            resume(folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)  # at most what was left by a kill before the first step
            share_data(config, folder, out)
            train(config)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def require_same(config: TrainConfig, folder: Path) -> None:
    """Refuse a folder whose run was started with other settings."""
    if not (folder / "run.toml").is_file():
        return
    there, wanted = common(read_run(folder).config), common(config.filled().to_dict())
    for key in sorted(key for key in wanted if there.get(key) != wanted[key]):
        raise RecordError(
            f"{folder} holds a run with {key} = {there.get(key)!r}, and {wanted[key]!r} was requested.",
            "Choose another --out, or remove the folder.",
        )


def missing(wanted: Sequence[Job], options: argparse.Namespace, usual: Callable[[Job], float]) -> str:
    """How many runs are not finished, and about how long they take; ``usual`` gives the seconds expected of one."""
    left, took = [], []
    for job in wanted:
        if finished(options.out / job.name):
            took.append((usual(job), float((read_run(options.out / job.name).summary or {})["wall_seconds"])))
        else:
            left.append(usual(job))
    return announcement(left, took, options.out, "run")


def recorded_seconds(options: argparse.Namespace) -> Callable[[Job], float]:
    """What a run takes by the board's records of its row: in proportion to its tokens and parameters."""
    runs, size = runs_of(read()), size_of(options) / size_of(RULES)
    return lambda job: size * usual_seconds(runs, job.storage)


def size_of(options: argparse.Namespace | Rules) -> float:
    """The tokens that a run sees times the parameters that see them."""
    tokens = options.steps * options.batch_size * options.sequence_length
    return float(tokens * get_model(options.model).num_parameters)


def train_all(wanted: Sequence[Job], options: argparse.Namespace, perform: Perform = perform) -> int:
    """Do what is not done, each by ``perform(settings, folder, out, storage)``; the number of runs that failed."""
    failures = 0
    for number, job in enumerate(wanted, 1):
        config, folder = job.settings(options), options.out / job.name
        require_same(config, folder)
        if finished(folder):
            continue
        with claim(options.out, job.name) as mine:
            if not mine or finished(folder):  # somebody else's, or just ended
                continue
            began = time.perf_counter()
            try:
                perform(config, folder, options.out, job.storage)
            except Exception as error:  # a storage that fails must not keep the others from being measured
                failures += 1
                reason = (str(error).strip() or "no reason given").splitlines()[0]
                print(f"{number}/{len(wanted)}  {job.name}  FAILED: {type(error).__name__}: {reason}", flush=True)
                continue
        loss, seconds = (read_run(folder).summary or {})["val_loss"], time.perf_counter() - began
        print(f"{number}/{len(wanted)}  {job.name}  validation loss {loss:.4f}  {seconds:.1f} s", flush=True)
    return failures


@dataclass(frozen=True)
class Result:
    """What a finished run says of itself."""

    storage: str
    cell: Cell
    seed: int
    common: tuple[tuple[str, Any], ...]
    summary: Mapping[str, Any]
    run: Run


def common(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in which all runs of a table agree."""
    # A run of a version that had no other rule does not name it.
    return {key: value for key, value in sorted({"rule": "adamw", **config}.items()) if key not in _VARIED}


def results_in(out: Path) -> tuple[list[Result], int]:
    """All finished runs under a folder, and how many are there unfinished."""
    results, unfinished = [], 0
    for file in sorted(out.glob("*/run.toml")):
        run = read_run(file.parent)
        if run.summary is None:
            unfinished += 1
            continue
        c = run.config
        storage, cell = str(c["recipe"]).removeprefix("bfloat16/"), (float(c["beta2"]), nominal_lr(file.parent))
        storage, figures = of_folder(file.parent) or (storage, {})
        summary = {**run.summary, **figures}
        results.append(Result(storage, cell, int(c["seed"]), tuple(common(c).items()), summary, run))
    return results, unfinished


def paired(
    results: Sequence[Result], baseline: Baseline, *, as_shares: bool = False
) -> dict[str, dict[Cell, list[float]]]:
    """Differences from the baseline's validation loss, by storage and cell, a number per seed that both have."""
    losses = {(r.storage, r.cell, r.seed): float(r.summary["val_loss"]) for r in results}
    found: dict[str, dict[Cell, list[float]]] = {}
    for (storage, cell, seed), loss in sorted(losses.items()):
        base = losses.get((baseline.name, cell, seed))
        if base is not None and storage != baseline.name:
            found.setdefault(storage, {}).setdefault(cell, []).append((loss - base) / (base if as_shares else 1.0))
    return found


def _cell_name(cell: Cell) -> str:
    return f"beta2 {cell[0]:g}, lr {cell[1]:g}"


def _shown(mean: float, half: float) -> str:
    return f"{mean:+.4f} ± {half:.4f}" if math.isfinite(half) else f"{mean:+.4f}"


def _percent(mean: float, half: float) -> str:
    return f"{mean:+.2%} ± {half:.2%}" if math.isfinite(half) else f"{mean:+.2%}"


def _storages(results: Sequence[Result]) -> list[str]:
    """Storages that have results, in the order of the tables of storages and of computes; unknown ones last."""
    order = {name: place for place, name in enumerate((*STORAGES, *NAMES, *COMPUTES))}

    def place(name: str) -> tuple[int, str]:
        return order.get(name, order.get(name.partition("/")[0], len(order))), name

    return sorted({r.storage for r in results}, key=place)


def difference_rows(results: Sequence[Result], baseline: Baseline) -> list[Row]:
    """A row per storage: bytes, the difference from the baseline in each cell and over all of them."""
    cells = sorted({r.cell for r in results})
    differences, answered = paired(results, baseline), paired(results, baseline, as_shares=baseline.is_relative)
    rows: list[Row] = []
    for storage in _storages(results):
        mine = [r for r in results if r.storage == storage]
        row: Row = {"": storage, "B/param": f"{mine[0].summary['bytes_per_param']:.2f}"}
        row |= {_cell_name(cell): "–" for cell in cells} | {"all cells": "–", baseline.column: ""}
        found = differences.get(storage, {})
        row |= {_cell_name(cell): _shown(*interval([found[cell]])) for cell in found}
        if storage == baseline.name:
            for cell in {r.cell for r in mine}:
                row[_cell_name(cell)] = (
                    f"({statistics.fmean(r.summary['val_loss'] for r in mine if r.cell == cell):.4f})"
                )
            row["all cells"] = "(its own loss)"
        elif len(found) == len(cells):
            mean, half = interval(list(answered[storage].values()))
            row["all cells"] = _percent(mean, half) if baseline.is_relative else _shown(mean, half)
            row[baseline.column] = "yes" if abs(mean) + half <= baseline.bound else "no"
        rows.append(row)
    return rows


SHARES = (0.25, 0.5, 0.75, 1.0)


def time_rows(results: Sequence[Result], baseline: Baseline) -> list[Row]:
    """A row per storage and cell: its speed, and the differences of losses after the same seconds."""
    curves = {(r.storage, r.cell, r.seed): LossCurve.of(r.run) for r in results if len(r.run.evals) > 1}
    rows: list[Row] = []
    for storage, cell in itertools.product(_storages(results), sorted({r.cell for r in results})):
        pairs = [
            (curve, curves[baseline.name, cell, seed])
            for (name, own, seed), curve in curves.items()
            if (name, own) == (storage, cell) and (baseline.name, cell, seed) in curves
        ]
        if not pairs or storage == baseline.name:
            continue
        row: Row = {"": storage, "cell": _cell_name(cell)}
        row["times as fast"] = statistics.median(_seconds(base) / _seconds(own) for own, base in pairs)
        row["seconds"] = statistics.median(min(own.end, base.end) for own, base in pairs)
        for share in SHARES:
            found = [_apart(own, base, share) for own, base in pairs]
            known = [difference for difference in found if difference is not None]
            row[f"after {share:.0%}"] = _shown(*interval([known])) if known else "–"
        rows.append(row)
    return rows


def _seconds(curve: LossCurve) -> float:
    assert curve.step_seconds is not None  # the trainer times every step
    return curve.step_seconds


def _apart(own: LossCurve, base: LossCurve, share: float) -> float | None:
    """The difference of two losses at a share of the time that the faster one took."""
    seconds = share * min(own.end, base.end)
    mine, theirs = own.loss_at(seconds), base.loss_at(seconds)
    return None if mine is None or theirs is None else mine - theirs


def run_rows(results: Sequence[Result]) -> list[Row]:
    """What each run ended with, and the share of its updates that was kept."""
    figures = ("val_loss", "edq", "noise", "bytes_per_param", "wall_seconds")
    return [
        {
            "": r.storage,
            "beta2": r.cell[0],
            "lr": r.cell[1],
            "seed": r.seed,
            **{name: r.summary[name] for name in figures},
        }
        for r in sorted(results, key=lambda r: (r.cell, r.storage, r.seed))
    ]


def markdown(rows: Sequence[Row]) -> str:
    """Rows as a table for a page."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, ["---"] * len(names), *([str(row.get(name, "")) for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def emit(report: Report, options: argparse.Namespace) -> None:
    """Tables of everything finished under the folder, those of other settings apart."""
    results, unfinished = results_in(options.out)
    for settings in sorted({r.common for r in results}, key=repr):
        alike = [r for r in results if r.common == settings]
        stated, table = dict(settings), difference_rows(alike, options.baseline)
        title = (
            f"{stated['model']}, {stated['steps']} steps of {stated['batch_size']} × {stated['sequence_length']} tokens"
        )
        seeds, name = len({r.seed for r in alike}), options.baseline.name
        report.add(f"validation loss minus {name}'s, in nats; {title}; {seeds} seeds", table)
        if timed := time_rows(alike, options.baseline):
            report.add(f"the same at equal time; {title}, {stated['schedule']} schedule; {seeds} seeds", timed)
        if options.markdown:
            print(f"\n{markdown(table)}")
        report.tables[f"runs; {title}"] = run_rows(alike)  # for --json alone: too long to read
    if unfinished:
        report.note(f"{unfinished} runs under {options.out} have not ended.")


def flags() -> argparse.ArgumentParser:
    """All flags; sizes are those of the table in docs/log/storages.md."""
    made = parser(__doc__, rounds=1)
    add_out(made, "quality", of="runs")
    made.add_argument("--report-only", action="store_true", help="only the tables of what is there")
    what = made.add_mutually_exclusive_group()
    what.add_argument("--storages", nargs="+", metavar="NAME", help="default: all of ours")
    what.add_argument(
        "--computes", nargs="+", choices=["all", *compute_names()], metavar="NAME", help="over word, or all"
    )
    made.add_argument("--betas", nargs="+", type=float, metavar="BETA2", help="default: 0.95 0.999; computes: 0.95")
    made.add_argument(
        "--lrs", nargs="+", type=float, metavar="LR", help="peak rates; default: 1e-3 1e-4; computes: 1e-3"
    )
    made.add_argument("--seeds", nargs="+", type=int, metavar="SEED", help="default: 0 1 2")
    made.add_argument("--model", default="llama-1m")
    made.add_argument("--steps", type=int, default=300)
    made.add_argument("--schedule", default="cosine", help="of the learning rate (default cosine)")
    made.add_argument("--eval-every", type=int, help="steps between validations; default: none; computes: a tenth")
    made.add_argument("--batch-size", type=int, default=8, help="sequences per step")
    made.add_argument("--sequence-length", type=int, default=128, help="tokens per sequence")
    made.add_argument("--eval-batches", type=int, default=64, help="batches of the validation at the end")
    made.add_argument("--checkpoint-every", type=int, default=100, help="steps between checkpoints")
    made.add_argument("--compile", action="store_true", help="compile the model")
    made.add_argument("--markdown", action="store_true", help="print the table of differences as Markdown too")
    return made


def fill(options: argparse.Namespace) -> None:
    """Work out what follows from whether storages or computes are compared."""
    computes = bool(options.computes)
    options.baseline = COMPUTED if computes else STORED
    options.betas = options.betas or (BETAS[:1] if computes else BETAS)
    options.lrs = options.lrs or (LRS[:1] if computes else LRS)
    if options.eval_every is None:
        options.eval_every = max(1, options.steps // 10) if computes else 0
    if computes:
        asked = list(COMPUTES) if "all" in options.computes else options.computes
        options.storages = [COMPUTED.name, *(over_word(compute) for compute in asked if compute != "bfloat16")]
    elif not options.storages:
        options.storages = ["master", "word", "naive"] if options.quick else list(STORAGES)
    names = [each for name in options.storages for each in (NAMES if name == "published" else (name,))]
    options.storages = [row_named(name) for name in names]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = flags().parse_args(arguments)
    options.seeds = options.seeds or ((0, 1) if options.quick else SEEDS)
    if options.quick:
        vars(options).update(QUICK)
    fill(options)
    report, failures = Report("quality", options), 0
    if any(name.startswith("float16") for name in options.storages) and not torch.cuda.is_available():
        report.note("float16 matmuls are emulated on a CPU: float32 ones of the same numbers, rounded.")
    warnings.simplefilter("ignore", EmulationNotice)
    with out_folder(options, "quality-computes" if options.computes else "quality") as options.out:
        if not options.report_only:
            if not options.quick:
                report.note(missing(jobs(options), options, recorded_seconds(options)))
            failures = train_all(jobs(options), options)
        emit(report, options)
    return report.end() or int(failures > 0)


if __name__ == "__main__":
    exit_by(main)
