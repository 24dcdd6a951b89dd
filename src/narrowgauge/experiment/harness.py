"""Comparing recipes in your own training loop: a function of yours is called once per recipe and seed, and logs to a run folder.

A comparison needs only the last validation loss of a run. Every further metric that is logged (step losses, validations, audits,
bytes per parameter) adds a curve or a column. The run folders are those of the trainer, so every command that reads runs reads
them too.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.comparison.comparison import Comparison, compare_runs
from narrowgauge.comparison.labels import counted, parsed_recipe, recipe_name
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.experiment.planned_runs import PlannedRun, plan_runs, require_distinct, seed_numbers
from narrowgauge.experiment.runner import compare_and_publish, hold, make_runs
from narrowgauge.gauges.attach import Gauges, attach_gauges
from narrowgauge.optim.audit import figures_of
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.runs.events import Event
from narrowgauge.runs.record import Run, is_run, read_run
from narrowgauge.runs.schema import Row, columns_of
from narrowgauge.runs.writer import RunWriter, require_free


class RunLog:
    """The log of a run, to which a training function writes; it adds step numbers and seconds where they are not given.

    Args:
        writer: of the run folder.
    """

    def __init__(self, writer: RunWriter) -> None:
        self._writer = writer
        self._num_steps, self._tokens, self._began = 0, 0.0, time.perf_counter()
        self._since, self._trained = self._began, 0.0
        self._rates: list[float] = []
        self._num_skipped, self._val_loss = 0, None
        self._gauges: list[Gauges] = []
        self._audits: dict[Optimizer, Tensor | None] = {}
        self._audit_sums: Tensor | None = None

    def step(self, row: Mapping[str, Any]) -> None:
        """Log an optimizer step: ``loss``, and any of ``lr``, ``grad_norm``, ``tokens`` (so far), ``edq``, …"""
        now = time.perf_counter()
        written: Row = {"step": self._num_steps + 1, "seconds": now - self._since}
        written |= {**self._audit_of_step(), **_numbers(row, "log.step")}
        if written.get("tokens") is not None and written["seconds"]:
            written.setdefault("tokens_per_second", (written["tokens"] - self._tokens) / written["seconds"])
            self._tokens = written["tokens"]
        self._num_steps, self._since = int(written["step"]), now
        self._trained += written["seconds"] or 0.0
        self._rates += [float(written["tokens_per_second"])] if written.get("tokens_per_second") is not None else []
        self._num_skipped += bool(written.get("skipped"))
        self._writer.step(written)

    def eval(self, row: Mapping[str, Any]) -> None:
        """Log a validation: ``val_loss``, and any other metric. Its time is not counted as that of a step."""
        written = {"step": self._num_steps, "seconds": self._trained, **_numbers(row, "log.eval")}
        self._val_loss = written.get("val_loss")
        self._writer.eval(written)
        self._since = time.perf_counter()

    def gauge(self, row: Mapping[str, Any]) -> None:
        """Log a row of gauges; ``log.watch(model, optimizer)`` does so by itself."""
        self._writer.gauge(dict(row))

    def event(self, event: Event) -> None:
        """Log an event."""
        self._writer.event(event)

    def watch(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, every: int = 20) -> Gauges:
        """Record the gauges of a model and the audit of its optimizer until the run ends.

        The gauges' rows go to ``gauges.jsonl``; the metrics of an audited step to the row of the ``log.step`` that follows it;
        those of the whole run and the bytes per parameter to the summary, unless you give them.

        Args:
            model: before it is compiled, as for :func:`ng.attach_gauges`.
            optimizer: ours, which is audited, or torch's, which is not.
            every: steps from one sample of the gauges to the next; 0 for none.
        Returns:
            The gauges.
        """
        gauges = attach_gauges(model, optimizer, every=every, on_row=self.gauge)
        self._gauges.append(gauges)
        if isinstance(gauges.optimizer, Optimizer):
            self._audits[gauges.optimizer] = None
        return gauges

    def _audit_of_step(self) -> Row:
        """The audit of the last step, over all watched optimizers."""
        found = [sums for optimizer in self._audits if (sums := self._new_audit(optimizer)) is not None]
        if not found:
            return {}
        step = torch.stack(found).sum(0)
        self._audit_sums = step if self._audit_sums is None else self._audit_sums + step
        return dict(figures_of(step))

    def _new_audit(self, optimizer: Optimizer) -> Tensor | None:
        """The audit of the optimizer's last step, if it was audited and not logged yet."""
        optimizer.settle()
        sums = optimizer.last_audit
        if sums is None or sums is self._audits[optimizer]:
            return None
        self._audits[optimizer] = sums
        return sums.to("cpu", torch.float64)

    def _of_run(self) -> Row:
        """The metrics of the whole run that the watched optimizers know."""
        known: Row = {} if self._audit_sums is None else dict(figures_of(self._audit_sums))
        if len(self._audits) == 1:
            known["bytes_per_param"] = next(iter(self._audits)).bytes_per_param()
        return known

    def detach(self) -> None:
        """Remove the gauges from the models."""
        for gauges in self._gauges:
            gauges.detach()
        self._gauges.clear()
        self._audits.clear()

    def close(self, returned: Any, recipe: str) -> None:
        """Write the summary of a finished run from what the training function returned."""
        given = returned if isinstance(returned, Mapping) or returned is None else {"val_loss": returned}
        metrics = _numbers(given or {}, f"the training function of {recipe}")
        metrics.setdefault("val_loss", self._val_loss)
        if metrics["val_loss"] is None:
            raise NarrowgaugeError(
                f"the training function gave no validation loss for {recipe}.",
                'Return it, return a dict with "val_loss", or call log.eval({"val_loss": …}).',
            )
        known: Row = {"recipe": recipe, "steps": self._num_steps, "num_skipped": self._num_skipped}
        if self._rates:
            known["tokens_per_second"] = statistics.median(self._rates)
        known |= {key: value for key, value in self._of_run().items() if value is not None}
        self._writer.summary({**known, "wall_seconds": time.perf_counter() - self._began, **metrics})


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

    Returns:
        The comparison: ``rows``, a ``verdict`` in sentences, ``differences`` from the ``baseline``.

    Raises:
        NarrowgaugeError: no recipe or seed, one named twice, a function that gives no loss, or a row that is not one.
        RecordError: ``out`` is not empty, or another process compares there.

    Cost: that of the function's calls.

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
    given = [recipes] if isinstance(recipes, str) else list(recipes)
    require_distinct([parsed_recipe(recipe) or recipe for recipe in given])
    labels, numbers = [recipe_name(recipe) for recipe in given], seed_numbers(seeds)

    def run_all(folder: Path) -> list[Run]:
        runs = plan_runs(labels, numbers, folder)
        with _partial_page(runs, folder) if out is not None else nullcontext():
            return make_runs(runs, lambda index: _make_run(train_function, given[index % len(given)], runs[index]))

    if out is None:
        with tempfile.TemporaryDirectory(prefix="narrowgauge-") as folder:
            return compare_runs(run_all(Path(folder)))
    require_free(out)
    with hold(Path(out)):
        return compare_and_publish(run_all(Path(out)), Path(out))[0]


def _make_run(train_function: Callable[[str, int, RunLog], Any], recipe: str, planned: PlannedRun) -> None:
    known = parsed_recipe(recipe)
    config = {"recipe": recipe if known is None else known.to_value(), "seed": planned.seed}
    with RunWriter.create(planned.folder, {"config": config}) as writer:
        log = RunLog(writer)
        try:
            log.close(train_function(recipe, planned.seed, log), planned.label)
        finally:
            log.detach()


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
