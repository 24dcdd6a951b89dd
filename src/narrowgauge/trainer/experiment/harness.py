"""Comparing recipes in your own training loop: a function of yours is called once per recipe and seed, and logs to a run folder.

A comparison needs only the last validation loss of a run. Every further metric that is logged (step losses, validations, audits,
bytes per parameter) adds a curve or a column. The run folders are those of the trainer, so every command that reads runs reads
them too.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from narrowgauge.analysis.comparison.comparison import Comparison, compare_runs, require_resolvable
from narrowgauge.analysis.comparison.labels import parsed_recipe, recipe_name
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.gauges.attach import Gauges
from narrowgauge.gauges.recording.run_recorder import LoopRecord, Notices
from narrowgauge.gauges.recording.run_reporter import Reporter
from narrowgauge.runs.events import Event
from narrowgauge.runs.finding import counted
from narrowgauge.runs.record import Run, is_run, read_run
from narrowgauge.runs.schema import Row, columns_of
from narrowgauge.runs.writer import RunWriter, require_free
from narrowgauge.trainer.experiment.planned_runs import (
    PlannedRun,
    compare_and_publish,
    hold,
    make_runs,
    plan_runs,
    require_distinct,
    seed_numbers,
)


class RunLog:
    """The log of a run, to which a training function writes; it adds step numbers and seconds where they are not given.

    Rows are made as those of :class:`narrowgauge.RunRecorder`: the detectors read them, and what they find is an event and a
    warning.
    """

    def __init__(self, record: LoopRecord) -> None:
        self._record = record

    def step(self, row: Mapping[str, Any]) -> None:
        """Log an optimizer step: ``loss``, and any of ``lr``, ``grad_norm``, ``tokens`` (so far), ``edq``, …

        After :meth:`watch`, columns of the optimizer are added; so call it before the schedule's step.
        """
        self._record.step(_numbers(row, "log.step"))

    def eval(self, row: Mapping[str, Any]) -> None:
        """Log a validation: ``val_loss``, and any other metric. Its time is not counted as that of a step."""
        self._record.evaluate(_numbers(row, "log.eval"))

    def gauge(self, row: Mapping[str, Any]) -> None:
        """Log a row of gauges; ``log.watch(model, optimizer)`` does so by itself."""
        self._record.reporter.gauge(dict(row))

    def event(self, event: Event) -> None:
        """Log an event."""
        self._record.reporter.event(event)

    def watch(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, every: int = 20) -> Gauges | None:
        """Record the gauges of a model, and columns of its optimizer in each step, until the run ends.

        The gauges' rows go to ``gauges.jsonl``; the learning rate, skipped steps and the audit to the row of the ``log.step``
        that follows; those of the whole run and the bytes per parameter to the summary, unless you give them.

        Args:
            model: before it is compiled, as for :func:`ng.attach_gauges`.
            optimizer: ours, which is audited, or torch's, which is not.
            every: steps from one sample of the gauges to the next; 0 for none.
        Returns:
            The gauges, if there are any.
        """
        return self._record.watch(model, optimizer, every).gauges

    def close(self, returned: Any, recipe: str) -> None:
        """Write the summary of a finished run from what the training function returned."""
        given = returned if isinstance(returned, Mapping) or returned is None else {"val_loss": returned}
        metrics = _numbers(given or {}, f"the training function of {recipe}")
        summary = {**self._record.summary(recipe=recipe), **metrics}
        if summary.get("val_loss") is None:
            raise NarrowgaugeError(
                f"the training function gave no validation loss for {recipe}.",
                'Return it, return a dict with "val_loss", or call log.eval({"val_loss": …}).',
            )
        self._record.close(lambda: summary)

    def abandon(self) -> None:
        """End the log of a run that did not finish."""
        self._record.close(None)


_TEXT = columns_of("text", "recipe")
_COUNTS = columns_of("step", "count")


def _numbers(row: Any, by: str) -> Row:
    """A row of plain numbers; it may hold tensors of one number."""
    if not isinstance(row, Mapping):
        raise NarrowgaugeError(f"{by} was given {_short(row)}.", 'It takes a dict, for instance {"loss": 2.5}.')
    return {str(key): _number(str(key), value, by) for key, value in row.items()}


def _number(key: str, value: Any, by: str) -> Any:
    if value is None or isinstance(value, bool | int | float):
        if key in _COUNTS and not isinstance(value, int):
            raise NarrowgaugeError(f"{by} was given {key} = {_short(value)}.", "It is a whole number.")
        return value
    if isinstance(value, str) and key in _TEXT:
        return value
    try:
        number = float(value) if not isinstance(value, str) else None
    except (TypeError, ValueError, RuntimeError):
        number = None
    if number is None:
        raise NarrowgaugeError(
            f"{by} gave {key} = {_short(value)}, which is no number.", "Give numbers, or leave it out."
        )
    return int(number) if key in _COUNTS else number


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def compare(
    train_function: Callable[[str, int, RunLog], Any],
    recipes: Sequence[str],
    *,
    seeds: int | Sequence[int] = 1,
    out: str | Path | None = None,
    resolve: float | None = None,
) -> Comparison:
    """Compare recipes in your own training loop.

    Note: runs of one seed are paired, so let the seed alone decide the initial weights and the batches. Runs go seed by seed,
    each seed with all recipes.

    Args:
        train_function: called as ``train_function(recipe, seed, log)``. It trains once and returns the last validation
            loss, or a dict of summary metrics (``val_loss``, ``bytes_per_param``, ``tokens_per_second``,
            ``peak_memory_bytes``, ``edq``, ``noise``, ``lost_fraction``), or nothing if it called
            ``log.eval({"val_loss": …})``. ``log.step({"loss": …})`` logs a step, ``log.eval`` a validation;
            ``log.watch(model, optimizer)`` adds gauges and the audit.
        recipes: what is passed to the function, names of recipes or any others.
        seeds: how many, from 0 on, or which ones.
        out: a new or empty folder for the runs, ``compare.json`` and ``report.html``, which hold the finished runs also
            where the function raises; ``None`` keeps nothing.
        resolve: as for :func:`compare_runs`.

    Returns:
        The comparison: ``rows``, a ``verdict`` in sentences, ``differences`` from the ``baseline``.

    Raises:
        NarrowgaugeError: no recipe or seed, one named twice, a function that gives no loss, or a row that does not hold numbers.
        RecipeError: ``resolve`` is not above 0 and finite.
        RecordError: ``out`` is not empty, or another process compares there.

    Example:
        >>> def train_function(recipe, seed, log):
        ...     for step in range(1, 4):
        ...         log.step({"loss": 3 - step / 2})
        ...     wide = recipe == "bfloat16/master"
        ...     return {"val_loss": 1.5 + seed / 10 - 0.002 * seed * wide, "bytes_per_param": 16 if wide else 8}
        >>> found = compare(train_function, ["bfloat16/master", "bfloat16/word"], seeds=2)
        >>> [(row["recipe"], row["num_seeds"]) for row in found.rows]
        [('bfloat16/master', 2), ('bfloat16/word', 2)]
        >>> found.baseline
        'bfloat16/master'
    """
    require_resolvable(resolve)
    given = [recipes] if isinstance(recipes, str) else list(recipes)
    require_distinct([parsed_recipe(recipe) or recipe for recipe in given])
    labels, numbers = [recipe_name(recipe) for recipe in given], seed_numbers(seeds)

    def run_all(folder: Path) -> list[Run]:
        runs = plan_runs(labels, numbers, folder)
        with _partial_page(runs, folder) if out is not None else nullcontext():
            return make_runs(runs, lambda index: _make_run(train_function, given[index % len(given)], runs[index]))

    if out is None:
        with tempfile.TemporaryDirectory(prefix="narrowgauge-") as folder:
            return compare_runs(run_all(Path(folder)), resolve=resolve)
    require_free(out)
    with hold(Path(out)):
        return compare_and_publish(run_all(Path(out)), Path(out), resolve)[0]


def _make_run(train_function: Callable[[str, int, RunLog], Any], recipe: str, planned: PlannedRun) -> None:
    known = parsed_recipe(recipe)
    config = {"recipe": recipe if known is None else known.to_value(), "seed": planned.seed}
    with RunWriter.create(planned.folder, {"config": config}) as writer:
        reporter = Reporter(writer, Notices(), known, settings=config, is_audited=False)
        log = RunLog(LoopRecord(reporter, all_ranks()))
        try:
            log.close(train_function(recipe, planned.seed, log), planned.label)
        except BaseException:
            log.abandon()
            raise


@contextmanager
def _partial_page(runs: Sequence[PlannedRun], out: Path) -> Iterator[None]:
    """On an error, publish the finished runs, and add a note to the error that names the page.

    Such a comparison is never resumed: once the function is corrected, its runs would be compared with those of before.
    """
    try:
        yield
    except BaseException as error:
        with suppress(NarrowgaugeError):  # the error itself is more important
            found = [read_run(planned.folder) for planned in runs if is_run(planned.folder)]
            if found:
                _, page = compare_and_publish(found, out)
                num_done = sum(run.summary is not None for run in found)
                if sys.version_info >= (3, 11):
                    error.add_note(
                        f"{num_done} of {counted(len(runs), 'run')} were done before that; {page} shows them."
                    )
        raise
