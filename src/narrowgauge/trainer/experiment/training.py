"""Comparing recipes by training with the library's own trainer: ``narrowgauge compare``.

A comparison is a folder. It holds the definition (``compare.toml``, written before anything runs), a run folder for each recipe
and seed, and in the end ``compare.json`` and ``report.html``. The folder alone determines what is left to do: finished runs are
kept, an interrupted one is resumed from its checkpoint, and any definition other than the folder's is refused, unless it only
adds recipes or seeds.

With a number of seconds each recipe gets as many steps as fit into them, with a warm-up and a schedule of its own. The time of a
step is taken in two short trainings that are then discarded: the first warms up, the second lasts about a tenth of the
seconds. The result is stored, since a resumed comparison must not measure again.

A run that diverges and stops is a result like any other, and the comparison continues.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from narrowgauge.analysis.comparison.comparison import Comparison, compare_runs
from narrowgauge.analysis.comparison.resolution import MOST_SEEDS, largest_spread, seeds_needed, spread_of
from narrowgauge.errors import NarrowgaugeError, RecordError
from narrowgauge.report.publishing import runs_inside
from narrowgauge.runs.atomic_io import AGAIN, TEMPORARY, disk_errors
from narrowgauge.runs.finding import counted
from narrowgauge.runs.record import DEFINITION_FILE, Run, is_run, read_run
from narrowgauge.spec.recipes import Recipe
from narrowgauge.trainer.config import CHANGEABLE_ON_RESUME, TrainConfig, first_free
from narrowgauge.trainer.experiment.definition import ExperimentConfig, is_comparison
from narrowgauge.trainer.experiment.planned_runs import compare_and_publish, hold, make_runs, plan_runs
from narrowgauge.trainer.experiment.progress import Progress, RunProgress
from narrowgauge.trainer.experiment.time_left import RunEstimate, estimate_runs

if TYPE_CHECKING:
    from narrowgauge.gauges.recording.run_reporter import Screen

    Train = Callable[[TrainConfig, bool, Screen], None]
    """Makes a run in its folder, or continues it where the second argument is true."""

CALIBRATION_STEPS = (12, 200)
"""Fewest and most steps of the training that only measures; the first three, which compile, do not count."""
CALIBRATION_SECONDS = (1.0, 10.0)
"""Its duration: a tenth of a run's seconds, within these bounds."""


def run_experiment(
    config: ExperimentConfig,
    out: str | Path | None = None,
    stream: TextIO | None = None,
    train: Train | None = None,
) -> tuple[Comparison, Path]:
    """Make the runs of a comparison that have not ended, compare, and write the page; returns the path of the page too.

    Invariant: the same definition gives the same numbers except times, resumed or not.

    Args:
        out: the folder; new, empty, or of this very comparison. ``None`` takes ``comparisons/MODEL-N``.
        stream: for the progress display; ``None`` for standard output.
        train: makes a run; ``None`` in this process alone.
    Raises:
        NarrowgaugeError: the folder holds something else, or a run failed; finished runs are kept.
        KeyboardInterrupt: after Ctrl-C, with a line that says how to resume.
    """
    folder = Path(out) if out is not None else free_folder(config.base.model)
    with hold(folder), _undo(folder):
        config = _extended(config, folder)
        _require_same(config, folder)
        config.write(folder)
        with (
            Progress(config.plan(folder), folder, stream or sys.stdout) as progress,
            _how_to_resume(config, folder, progress),
        ):
            train = train or _train_alone
            config = _calibrated(config, folder, progress, train)
            _print_estimate(config, folder, progress, is_alone=train is _train_alone)
            if config.resolve is not None:
                progress.print_once(_resolution(config, config.resolve, folder))
            configs = config.of_runs(folder)
            runs = make_runs(
                config.plan(folder),
                lambda index: _make(
                    configs[index], _with_same_text(config, configs[index].seed, folder), progress, train
                ),
                progress,
            )
        return compare_and_publish(runs, folder, config.resolve)


# ── the folder ──────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def _undo(folder: Path) -> Iterator[None]:
    """Remove a definition that this command wrote where an error comes before the first run."""
    existed = is_comparison(folder)
    try:
        yield
    except (NarrowgaugeError, OSError):
        if not existed and is_comparison(folder) and not runs_inside(folder):
            _clear(ExperimentConfig.read(folder), folder)
            (folder / DEFINITION_FILE).unlink()
        raise


@contextlib.contextmanager
def _how_to_resume(config: ExperimentConfig, folder: Path, progress: Progress) -> Iterator[None]:
    """Say how to resume after Ctrl-C, and where the output cannot be printed."""
    command = f"Go on with: narrowgauge compare --out {folder}"

    def done() -> str:
        ended = [planned.has_ended for planned in config.plan(folder)]
        return f"{sum(ended)} of {len(ended)} runs are done."

    try:
        yield
    except KeyboardInterrupt as interruption:
        raise type(interruption)(f"{done()} {command}") from None
    except OSError as error:
        if error is not progress.print_error:
            raise
        message = f"the comparison stopped because its output could not be printed ({error.strerror}): {done()}"
        raise RecordError(message, command) from error


def _clear(config: ExperimentConfig, folder: Path) -> None:
    """Remove the tokens prepared for runs that never began."""
    for planned in config.plan(folder):
        for left in (planned.folder / "data", *planned.folder.glob(f"{TEMPORARY}*")):
            shutil.rmtree(left, ignore_errors=True)
        with contextlib.suppress(OSError):
            planned.folder.rmdir()


def _extended(config: ExperimentConfig, folder: Path) -> ExperimentConfig:
    """The definition with the measurements in its folder; refuse a folder that holds anything else."""
    if is_comparison(folder):
        before = ExperimentConfig.read(folder)
        try:
            return config.extend(before, folder)
        except RecordError:
            if runs_inside(folder):
                raise
        # No run began: a mistake in the definition may be corrected.
        _clear(before, folder)
        return config
    if found := sorted(os.listdir(folder)):
        raise RecordError(
            f"Cannot compare in {folder}: the folder is not empty (it holds {found[0]}) and is no comparison's.",
            "Choose another --out.",
        )
    return config


def _require_same(config: ExperimentConfig, out: Path) -> None:
    """Refuse a run in the folder that has other settings."""
    for wanted in config.of_runs(out):
        folder = Path(str(wanted.out))
        if not is_run(folder):
            continue
        recorded = read_run(folder).config
        for key, value in wanted.to_dict().items():
            if key not in ("out", *CHANGEABLE_ON_RESUME) and key in recorded and recorded[key] != value:
                raise RecordError(
                    f"{folder} holds a run with {key} = {recorded[key]!r}, and this comparison takes {value!r}.",
                    "Move that folder away, or choose another --out.",
                )


def free_folder(model: str) -> Path:
    """``comparisons/MODEL-N`` with the first N that is free."""
    return first_free(Path("comparisons") / Path(model).name.removesuffix(".json"))


# ── times ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _calibrated(config: ExperimentConfig, out: Path, progress: Progress, train: Train) -> ExperimentConfig:
    """With a number of seconds, the definition with the steps that fit into them: measured once, and stored."""
    missing = [recipe for recipe in config.recipes if recipe.title not in config.measured]
    if config.seconds is None or not missing:
        return config
    folder, seed = out / f"{TEMPORARY}calibration", config.seeds[0]
    shutil.rmtree(folder, ignore_errors=True)
    try:
        for recipe in missing:
            name = recipe.title
            seconds, is_compiled = _step_seconds(config, recipe, folder, progress, train)
            steps = max(1, int(config.seconds / seconds))
            progress.print_once(
                f"{name}: {seconds:.3g} s per step, so {steps} steps for {config.seconds:g} s of training"
            )
            config = replace(config, measured={**config.measured, name: (steps, is_compiled)})
            config.write(out)
            run_folder = Path(str(config.of_run(recipe, seed, out).out))
            _share_data(run_folder, _with_same_text(config, seed, folder / "first"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return config


def _step_seconds(
    config: ExperimentConfig, recipe: Recipe, folder: Path, progress: Progress, train: Train
) -> tuple[float, bool]:
    """The seconds of a recipe's step, measured in runs below ``folder``, and whether it was compiled.

    They are a mean, since audited and sampled steps take longer than the median. A step of five times the median or more
    compiles, and counts as a median one, as in the verdict.
    """
    assert config.seconds is not None
    progress.print_once(f"measuring the steps of {recipe.title}")
    (fewest, most), (shortest, longest) = CALIBRATION_STEPS, CALIBRATION_SECONDS
    # The first training of a process is slower than later ones, and so are the first steps of every recipe.
    rough = _mean_seconds(_calibrate(config, recipe, folder / "first", fewest, progress, train))
    duration = min(max(config.seconds / 10, shortest), longest)
    steps = min(max(int(duration / rough), fewest), most)
    run = _calibrate(config, recipe, folder / "second", steps, progress, train)
    return _mean_seconds(run), bool(run.config.get("compile", False))


def _calibrate(
    config: ExperimentConfig, recipe: Recipe, out: Path, steps: int, progress: Progress, train: Train
) -> Run:
    seed = config.seeds[0]
    of_run = replace(
        config.of_run(recipe, seed, out),
        steps=steps,
        warmup_steps=0,
        eval_every=0,
        eval_batches=1,
        checkpoint_every=0,
        on_spike="report",
    )
    # The first training of the calibration, and the comparison's own runs.
    folders = (out.parent / "first", out.parent.parent)
    _make(of_run, [run for folder in folders for run in _with_same_text(config, seed, folder)], progress, train)
    return read_run(Path(str(of_run.out)))


def _mean_seconds(run: Run) -> float:
    seconds = [float(row["seconds"]) for row in run.steps[3:]]
    median = statistics.median(seconds)
    return statistics.fmean(s if s < 5 * median else median for s in seconds)


def _print_estimate(config: ExperimentConfig, out: Path, progress: Progress, *, is_alone: bool) -> None:
    """Print how long the remaining runs will take, by a measured step of each recipe; on ranks the runs show it."""
    configs, ended = config.of_runs(out), [planned.has_ended for planned in config.plan(out)]
    left = {of_run.recipe.title: of_run for of_run, is_done in zip(configs, ended, strict=True) if not is_done}
    estimates: dict[str, RunEstimate] = {}
    if config.seconds is not None:
        estimates = {name: RunEstimate(config.seconds / steps) for name, (steps, _) in config.measured.items()}
    elif left and is_alone:
        progress.status("measuring a step of each recipe")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the runs themselves will warn
            estimates = estimate_runs(list(left.values()), RunProgress(progress, 0))
    progress.plan(
        [(of_run.recipe.title, of_run.steps, is_done) for of_run, is_done in zip(configs, ended, strict=True)],
        estimates,
    )


def _resolution(config: ExperimentConfig, resolve: float, out: Path) -> str:
    """What the seeds of a comparison resolve: by the spread of the runs in its folder, or what that may be at most."""
    ended = [read_run(planned.folder) for planned in config.plan(out) if planned.has_ended]
    known = [one for one in compare_runs(ended).differences if one.num_pairs > 1] if ended else []
    if known:
        needed = [seeds_needed(spread_of(difference), resolve) for difference in known]
        most = None if None in needed else max(number for number in needed if number is not None)
        number = f"{counted(most, 'seed')} resolve" if most else f"more than {MOST_SEEDS} seeds would resolve"
        return f"By the spread of the {counted(known[0].num_pairs, 'seed')} there are, {number} a difference of {resolve:g}."
    at_most = largest_spread(resolve, len(config.seeds))
    return (
        f"{counted(len(config.seeds), 'seed')} resolve a difference of {resolve:g} where paired differences vary by at most "
        f"{at_most:.2g} from seed to seed (standard deviation); after them, the verdict says how many it takes."
    )


# ── a run ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _train_alone(config: TrainConfig, goes_on: bool, screen: Screen) -> None:
    # Imported here: PyTorch takes seconds to load, and a mistake in the definition is reported before.
    from narrowgauge.trainer.experiment.shared_training import train

    train(config, goes_on, screen)


def _make(config: TrainConfig, lenders: Sequence[Path], progress: Progress, train: Train) -> None:
    """Train, or resume a run that was stopped; what it prints goes to the progress display."""
    folder = Path(str(config.out))
    goes_on = is_run(folder)
    if not goes_on:
        _share_data(folder, lenders)
    with contextlib.redirect_stdout(progress.stdout), contextlib.redirect_stderr(progress.stderr):
        train(config, goes_on, RunProgress(progress, config.steps))


def _with_same_text(config: ExperimentConfig, seed: int, out: Path) -> list[Path]:
    """The folders of the runs of a seed, which read the same text."""
    return [planned.folder for planned in plan_runs([recipe.title for recipe in config.recipes], [seed], out)]


def _share_data(folder: Path, lenders: Sequence[Path]) -> None:
    """Give a run the tokens that another run of its seed has prepared: by hard links where the disk has them."""
    if (folder / "data").exists():
        return
    for left in folder.glob(f"{TEMPORARY}*"):
        shutil.rmtree(left, ignore_errors=True)
    data = next((lender / "data" for lender in lenders if (lender / "data" / "data.json").exists()), None)
    if data is None:
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
