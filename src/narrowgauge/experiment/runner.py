"""Comparing recipes by training in each of them, from the same starts on the same batches.

A comparison is a folder: what was asked for (``compare.toml``, written before anything runs), a run folder per recipe and
seed, and in the end ``compare.json`` and ``report.html``. Runs go seed by seed, so that whatever is done at an early stop
is whole pairs. The folder alone says what is left to do: finished runs are kept, an interrupted one goes on from its
checkpoint, and a question other than the one the folder was made for is refused, unless it only adds recipes or seeds.

With a number of seconds each recipe gets as many steps as fit into them, its own warm-up and its own whole schedule. The
step time is taken in two short trainings that are thrown away, the first to warm the machine up, the second of about a
tenth of the seconds; the numbers are written down, since a comparison that goes on must not measure again.

A run that diverges and stops is a result like any other, and the comparison goes on.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import shutil
import statistics
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from narrowgauge.comparison.comparison import Comparison, compare_runs
from narrowgauge.comparison.labels import run_name
from narrowgauge.errors import NarrowgaugeError, RecordError
from narrowgauge.experiment.pace import Forecast
from narrowgauge.experiment.progress import Board, RunOnBoard
from narrowgauge.experiment.question import QUESTION_FILE, Question, ask, has_question, past
from narrowgauge.report.write import publish, runs_inside
from narrowgauge.runs.atomic_io import AGAIN, TEMPORARY, disk_errors, held_folder
from narrowgauge.runs.record import Run, is_run, read_run
from narrowgauge.spec.recipes import Recipe
from narrowgauge.trainer.config import TrainConfig

CALIBRATION_STEPS = (12, 200)
"""Fewest and most steps of the training that only measures; the first three, which compile, do not count."""
CALIBRATION_SECONDS = (1.0, 10.0)
"""How long it lasts: a tenth of a run's seconds, within these bounds."""


def compare(
    recipes: Sequence[Recipe] | None = None,
    *,
    base: TrainConfig | None = None,
    seeds: int | Sequence[int] = 1,
    out: str | Path | None = None,
    seconds: float | None = None,
    tokens: int | None = None,
    num_evals: int | None = None,
    stream: TextIO | None = None,
) -> tuple[Comparison, Path]:
    """Train in each recipe with each seed, and compare.

    Law: the same question gives the same numbers except times, stopped and gone on with or not. Nothing is trained
    before everything that can be checked has been.

    Args:
        recipes: none twice; ``None`` goes on with what ``out`` was asked for, whatever else is given.
        base: the settings of every run but recipe, seed, out and stop_after.
        seeds: how many, from 0 on, or which ones.
        out: the folder; new, empty, or this very comparison's. ``None`` takes ``comparisons/MODEL-N``.
        seconds: of training steps for each run, in place of ``base.steps``; each recipe's step is measured first.
        tokens: to train on in each run, in place of ``base.steps``.
        num_evals: validations per run, in place of ``base.eval_every``.
        stream: where progress goes; ``None`` for standard output.
    Returns:
        The comparison, and the path of its page.
    Raises:
        NarrowgaugeError: what cannot be, or the first run that fails; what is done stays done.
        KeyboardInterrupt: after Ctrl-C, with a line that says how to go on.
    """
    if recipes is None:
        out = Path(out or ".")
        question = past(out)
    else:
        question = ask(recipes, base or TrainConfig(), seeds, seconds=seconds, tokens=tokens, num_evals=num_evals)
    return answer(question, out, stream)


def answer(question: Question, out: str | Path | None = None, stream: TextIO | None = None) -> tuple[Comparison, Path]:
    """Do what a comparison was asked for; :func:`compare` says the rest.

    Args:
        question: checked.
        out: the folder; ``None`` takes the first free one.
        stream: where progress goes; ``None`` for standard output.
    Returns:
        The comparison, and the path of its page.
    """
    place = Path(out) if out is not None else free_folder(question.base.model)
    with _held(place):
        question = _with_past(question, place)
        _require_same(question, place)
        question.write(place)
        with Board(question, place, stream or sys.stdout) as board, _explained(question, place, board):
            question = _measured(question, place, board)
            _plan(question, place, board)
            runs = _train_all(question, place, board)
        found = compare_runs(runs)
        return found, publish(found, place)


@contextlib.contextmanager
def _held(place: Path) -> Iterator[None]:
    """Make the folder and hold it for this process; leave nothing of it where no run came about."""
    with disk_errors(place):
        if place.exists() and not place.is_dir():
            raise RecordError(f"Cannot compare in {place}: it is a file.", "Choose another --out.")
        absent = [folder for folder in (place, *place.parents) if not folder.exists()]
        asked_before = (place / QUESTION_FILE).exists()
        place.mkdir(parents=True, exist_ok=True)
    with held_folder(place) as is_held:
        if not is_held:
            raise RecordError(
                f"Cannot compare in {place}: another process is doing that.", "Wait until it ends, or stop it."
            )
        try:
            yield
        except (NarrowgaugeError, OSError):
            if not asked_before and (place / QUESTION_FILE).exists() and not runs_inside(place):
                _clear(Question.read(place), place)
                (place / QUESTION_FILE).unlink()
            for folder in absent:
                with contextlib.suppress(OSError):
                    folder.rmdir()
            raise


@contextlib.contextmanager
def _explained(question: Question, place: Path, board: Board) -> Iterator[None]:
    """Say how to go on after Ctrl-C, and where nobody takes what is printed."""
    go_on = f"Go on with: narrowgauge compare --out {place}"

    def done() -> str:
        folders = [Path(str(question.config(*pair, place).out)) for pair in question.pairs()]
        return f"{sum(map(ended, folders))} of {len(folders)} runs are done."

    try:
        yield
    except KeyboardInterrupt as interruption:
        raise type(interruption)(f"{done()} {go_on}") from None
    except OSError as error:
        if error is not board.refused:
            raise
        told = f"the comparison stopped where its output was not taken ({error.strerror}): {done()}"
        raise RecordError(told, go_on) from error


def _clear(question: Question, out: Path) -> None:
    """Remove the tokens that were put where runs of a question never began."""
    for recipe, seed in question.pairs():
        folder = out / run_name(recipe.title, seed)
        for left in (folder / "data", *folder.glob(f"{TEMPORARY}*")):
            shutil.rmtree(left, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.rmdir()


def _with_past(question: Question, out: Path) -> Question:
    """The question, with what an earlier command measured for it; refuse a folder that holds anything else."""
    if has_question(out):
        before = Question.read(out)
        try:
            return question.grown_from(before, out)
        except RecordError:
            if runs_inside(out):
                raise
        # Nothing was done for it: the mistake in it can be put right.
        _clear(before, out)
        return question
    if found := sorted(os.listdir(out)):
        raise RecordError(
            f"Cannot compare in {out}: the folder is not empty (it holds {found[0]}) and is no comparison's.",
            "Choose another --out.",
        )
    return question


def _require_same(question: Question, out: Path) -> None:
    """Refuse a run in the folder that was asked for otherwise."""
    for recipe, seed in question.pairs():
        config = question.config(recipe, seed, out)
        folder = Path(str(config.out))
        if not is_run(folder):
            continue
        there = read_run(folder).config
        for key, wanted in config.to_dict().items():
            if key != "out" and key in there and there[key] != wanted:
                raise RecordError(
                    f"{folder} holds a run with {key} = {there[key]!r}, and this comparison takes {wanted!r}.",
                    "Move that folder away, or choose another --out.",
                )


def _measured(question: Question, out: Path, board: Board) -> Question:
    """With a number of seconds, the steps that fit into them: measured once, and written down."""
    missing = [recipe for recipe in question.recipes if recipe.title not in question.measured]
    if question.seconds is None or not missing:
        return question
    place = out / f"{TEMPORARY}calibration"
    shutil.rmtree(place, ignore_errors=True)
    try:
        for recipe in missing:
            name = recipe.title
            seconds, is_compiled = _step_seconds(question, recipe, place, board)
            steps = max(1, int(question.seconds / seconds))
            board.note(f"{name}: {seconds:.3g} s per step, so {steps} steps for {question.seconds:g} s of training")
            question = replace(question, measured={**question.measured, name: (steps, is_compiled)})
            question.write(out)
            _share_data(Path(str(question.config(recipe, question.seeds[0], out).out)), [place / "first"])
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return question


def _step_seconds(question: Question, recipe: Recipe, place: Path, board: Board) -> tuple[float, bool]:
    """The seconds of a recipe's step below ``place``, and whether it was compiled.

    The mean, since steps that are audited or sampled cost more than a median one; a step of five times the median and
    more compiles, and counts as a median one, as it does in the verdict.
    """
    assert question.seconds is not None
    board.note(f"measuring the steps of {recipe.title}")
    (fewest, most), (shortest, longest) = CALIBRATION_STEPS, CALIBRATION_SECONDS
    # The first training of a process is slower than those that follow, and of every recipe the first steps are.
    rough = _typical(_calibration(question, recipe, place / "first", fewest, place, board))
    lasting = min(max(question.seconds / 10, shortest), longest)
    run = _calibration(question, recipe, place / "second", min(max(int(lasting / rough), fewest), most), place, board)
    return _typical(run), bool(run.config.get("compile", False))


def _calibration(question: Question, recipe: Recipe, out: Path, steps: int, place: Path, board: Board) -> Run:
    config = replace(
        question.config(recipe, question.seeds[0], out),
        steps=steps,
        warmup_steps=0,
        eval_every=0,
        eval_batches=1,
        checkpoint_every=0,
        on_spike="report",
    )
    folder = Path(str(config.out))
    _perform(config, folder, [place / "first", place.parent], board)
    return read_run(folder)


def _typical(run: Run) -> float:
    seconds = [float(row["seconds"]) for row in run.steps[3:]]
    median = statistics.median(seconds)
    return statistics.fmean(s if s < 5 * median else median for s in seconds)


def _plan(question: Question, out: Path, board: Board) -> None:
    """Say how long the runs that are left will take, by a step measured here."""
    configs = [question.config(*pair, out) for pair in question.pairs()]
    left = [config for config in configs if not ended(Path(str(config.out)))]
    expected: dict[str, Forecast] = {}
    if question.seconds is not None:
        expected = {name: Forecast(question.seconds / steps) for name, (steps, _) in question.measured.items()}
    elif left:
        # Here, since torch takes seconds to load and the board says so.
        from narrowgauge.experiment.forecast import forecast

        board.told("measuring a step of each recipe")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the runs themselves will say it
            expected = forecast(list({config.recipe.title: config for config in left}.values()))
    board.plan([(config.recipe.title, config.steps, config not in left) for config in configs], expected)


def _train_all(question: Question, out: Path, board: Board) -> list[Run]:
    """Do what is not done; all runs, in the order of the question."""
    runs = []
    for number, (recipe, seed) in enumerate(question.pairs()):
        config = question.config(recipe, seed, out)
        folder = Path(str(config.out))
        if not ended(folder):
            board.begin(number)
            _perform(config, folder, [out], board)
        run = read_run(folder)
        board.end(number, run)
        runs.append(run)
    return runs


def ended(folder: Path) -> bool:
    """Whether a run is there and will not go on: it is finished, or it diverged for good."""
    if not is_run(folder):
        return False
    run = read_run(folder)
    return run.summary is not None or any(event.get("kind") == "divergence" for event in run.events)


def _perform(config: TrainConfig, folder: Path, lenders: Sequence[Path], board: Board) -> None:
    """Train, or go on where a stopped process left off, with the run's own lines on the board."""
    # Here, since torch takes seconds to load and a mistake in the question is told before.
    from narrowgauge.trainer import loop, recovery

    _fresh_start()
    with contextlib.redirect_stdout(board.latest), contextlib.redirect_stderr(board.notes):
        try:
            screen = RunOnBoard(board, config.steps)
            if is_run(folder):
                loop.resume(folder, screen=screen)
            else:
                _share_data(folder, lenders)
                loop.train(config, lent=True, screen=screen)
        except recovery.DivergenceError:
            pass  # the run folder says so
        except NarrowgaugeError as error:
            raise type(error)(f"{folder.name}: {error.message}", error.advice) from error


def _fresh_start() -> None:
    """Let no run pay for those before it: their memory and its peak, their compiled graphs."""
    import torch

    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if platform.libc_ver()[0] == "glibc":
        # Freed memory goes back to the system; then the kernel forgets the process's peak (proc(5), clear_refs).
        ctypes.CDLL(None).malloc_trim(0)
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def _share_data(folder: Path, lenders: Sequence[Path]) -> None:
    """Give a run the tokens that another of its seed has prepared: linked, not copied, where the disk can."""
    if (folder / "data").exists():
        return
    for left in folder.glob(f"{TEMPORARY}*"):
        shutil.rmtree(left, ignore_errors=True)
    seed = folder.name.rpartition("-")[2]
    found = (file.parent for place in lenders for file in sorted(place.glob(f"*-{seed}/data/data.json")))
    if (data := next(found, None)) is None:
        return
    with disk_errors(folder, AGAIN):
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f"{TEMPORARY}data"
        shutil.copytree(data, temporary, copy_function=_link)
        os.rename(temporary, folder / "data")


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def free_folder(model: str) -> Path:
    """``comparisons/MODEL-N`` with the first N that is free."""
    stem, number = Path(model).name.removesuffix(".json"), 1
    while (Path("comparisons") / f"{stem}-{number}").exists():
        number += 1
    return Path("comparisons") / f"{stem}-{number}"
