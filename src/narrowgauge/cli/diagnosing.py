"""The commands of a diagnosis: ``diagnose`` a run, and ``show causes``.

What they print is made in :mod:`narrowgauge.analysis.diagnosis`, which needs no PyTorch and is loaded once a command runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from narrowgauge.cli import flags
from narrowgauge.errors import NarrowgaugeError, RecordError
from narrowgauge.runs.archive import zip_file_of
from narrowgauge.runs.foreign_logs import is_log, log_names
from narrowgauge.runs.record import Run, is_run, read_run
from narrowgauge.spec import tables

if TYPE_CHECKING:
    from narrowgauge.analysis.diagnosis.diagnosis import Diagnosis
    from narrowgauge.analysis.diagnosis.pairs.two_runs import TwoRuns
    from narrowgauge.analysis.diagnosis.replay_findings import ReplayedStep


@click.command("diagnose", short_help="Name the cause of what a run shows.")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("other", metavar="[OTHER]", required=False, type=click.Path(path_type=Path))
@flags.json_object
@click.option("--html", "page", metavar="FILE", type=click.Path(path_type=Path), help="Also write one page.")
@click.option(
    "--replay",
    "step",
    metavar="STEP",
    type=int,
    help="Also compute this step of RUN again: as it was, in float32, and with each rounding left out alone.",
)
@click.option(
    "--exact",
    is_flag=True,
    help="With OTHER: compute both again around the first step that differs (needs PyTorch and the data).",
)
@click.option(
    "--perturbations",
    type=click.IntRange(0),
    default=3,
    show_default=True,
    metavar="N",
    help="With --exact: repeat that step N times with weights changed by one ulp of float32: how far rounding reaches.",
)
def diagnose_command(
    run: Path, other: Path | None, as_json: bool, page: Path | None, step: int | None, exact: bool, perturbations: int
) -> None:
    """Name the cause of what the record of RUN shows: evidence, confidence, what else it could be, and what to measure next.

    With OTHER, a run that should have been equal: where the two first differ, and why.

    RUN is a run folder, finished or not, one in a zip file of report --pack, or the log of another framework, as for report.
    """
    from narrowgauge.analysis.diagnosis import diagnosis

    if exact and other is None:
        raise click.UsageError("--exact compares two runs, and one was named.", click.get_current_context())
    if other is not None and step is not None:
        raise click.UsageError("--replay repeats a step of one run, and two were named.", click.get_current_context())
    record = _record(run)
    if other is None:
        found = diagnosis.diagnose(record, replay=None if step is None else _replayed(record.path, step))
        _print(found, as_json)
        if page is not None:
            from narrowgauge.report.diagnosis_page import render_diagnosis

            _write(render_diagnosis(found, record), page, as_json)
        return
    second = _record(other)
    both = _compared_exactly(record, second, perturbations) if exact else diagnosis.diagnose(record, second)
    _print(both, as_json)
    if page is not None:
        from narrowgauge.report.diagnosis_page import render_two

        _write(render_two(both, record, second), page, as_json)


def _record(path: Path) -> Run:
    """The run that a path names, or the only one in a folder or zip file."""
    if path.is_file() and path.suffix != ".zip" and not is_log(path):
        raise RecordError(
            f"No run in {path}: the file is no log that can be read.", f"Name a run folder, or a {log_names()}."
        )
    if not is_run(path) and not is_log(path) and (path.is_dir() or zip_file_of(path) == path):
        from narrowgauge.report.publishing import runs_inside

        inside = runs_inside(path)
        if len(inside) > 1:
            names = ", ".join(place.name for place in inside[:6]) + (", …" if len(inside) > 6 else "")
            raise RecordError(
                f"One run was asked about, and {path} holds {len(inside)}: {names}.",
                f"Name one: narrowgauge diagnose {inside[0]}; narrowgauge report {path} has the findings of all.",
            )
        path = inside[0] if inside else path
    return read_run(path)


def _compared_exactly(run: Run, other: Run, perturbations: int) -> TwoRuns:
    from narrowgauge.trainer.replays.two_replays import compare_exactly

    with StepBar() as bar:
        return compare_exactly(run.path, other.path, num_replays=perturbations, say=bar.say, progress=bar.show)


def _replayed(run: Path, step: int) -> ReplayedStep:
    from narrowgauge.trainer.resume_checks import require_replayable

    require_replayable(run, step)
    try:
        from narrowgauge.trainer.replays.step_replay import replay_step
    except ModuleNotFoundError as error:
        advice = "pip install narrowgauge installs it."
        raise NarrowgaugeError(f"--replay computes a step, and {error.name} is not installed.", advice) from error
    with StepBar() as bar:
        return replay_step(run, step, say=bar.say, progress=bar.show)


class StepBar:
    """What a replay says, on standard error; on a terminal with a bar of the steps that it repeats."""

    def __enter__(self) -> StepBar:
        # Imported here: most diagnoses replay nothing.
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        from narrowgauge.trainer.console import PipedConsole

        console = PipedConsole(stderr=True, highlight=False)
        self._bar = Progress(
            BarColumn(40), MofNCompleteColumn(), TimeRemainingColumn(), console=console, transient=True
        )
        self._is_shown = console.is_terminal and not console.is_dumb_terminal
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_shown:  # otherwise it prints an empty line
            self._bar.stop()

    def say(self, line: str) -> None:
        """Print a sentence, above the bar."""
        self._bar.console.print(line, markup=False, soft_wrap=True)

    def show(self, done: int, total: int) -> None:
        """Show how many steps of a stretch are done."""
        if not self._is_shown:
            return
        if not self._bar.task_ids:
            self._bar.start()
            self._bar.add_task("", total=total)
        (task,) = self._bar.task_ids
        if done == 1:
            self._bar.reset(task, total=total)
        self._bar.update(task, completed=done)


def _write(text: str, page: Path, as_json: bool) -> None:
    from narrowgauge.report.page import write_page

    click.echo(write_page(text, page), err=as_json)


def _print(found: Diagnosis | TwoRuns, as_json: bool) -> None:
    if as_json:
        tables.write_object(found.to_dict())
    else:
        click.echo(found.text())


@click.command("causes", short_help="Causes that diagnose names, with their signs.")
@flags.json_list
def causes_command(as_json: bool) -> None:
    """Causes that diagnose names: what each does to a run, the signs that it predicts, and what to do."""
    from narrowgauge.analysis.diagnosis import causes

    if as_json:
        tables.write_json(causes.cause_rows())
    else:
        tables.write(causes.cause_table())
