"""Comparing recipes in a training loop of one's own: the loop is called once per recipe and seed, and logs what it likes.

All that a comparison needs of a run is its last validation loss; every further figure that is logged (step losses,
validations, audits, bytes per parameter) adds a curve or a column. What is written is the same run folder as the
trainer's, so every command that reads runs reads these too.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from narrowgauge.comparison.comparison import Comparison, compare_runs
from narrowgauge.comparison.labels import counted, parsed_recipe, recipe_name, run_name
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.report.write import publish, read_runs
from narrowgauge.runs.events import Event
from narrowgauge.runs.record import Run, read_run
from narrowgauge.runs.schema import Row, columns_of
from narrowgauge.runs.writer import RunWriter, require_free


class RunLog:
    """What a training function writes to; it fills in step numbers and seconds where they are not given.

    Args:
        writer: of the run folder.
    """

    def __init__(self, writer: RunWriter) -> None:
        self._writer = writer
        self._num_steps, self._tokens, self._began = 0, 0.0, time.perf_counter()
        self._since, self._trained = self._began, 0.0
        self._rates: list[float] = []
        self._num_skipped, self._val_loss = 0, None

    def step(self, row: Mapping[str, Any]) -> None:
        """Write what one optimizer step did: ``loss``, and any of ``lr``, ``grad_norm``, ``tokens`` (so far), ``edq``, …"""
        now = time.perf_counter()
        written: Row = {"step": self._num_steps + 1, "seconds": now - self._since}
        written |= {**self.found_in_step(), **_plain(row, "log.step")}
        if written.get("tokens") is not None and written["seconds"]:
            written.setdefault("tokens_per_second", (written["tokens"] - self._tokens) / written["seconds"])
            self._tokens = written["tokens"]
        self._num_steps, self._since = int(written["step"]), now
        self._trained += written["seconds"] or 0.0
        self._rates += [float(written["tokens_per_second"])] if written.get("tokens_per_second") is not None else []
        self._num_skipped += bool(written.get("skipped"))
        self._writer.step(written)

    def eval(self, row: Mapping[str, Any]) -> None:
        """Write a validation: ``val_loss``, and whatever else. Its time counts as no step's."""
        written = {"step": self._num_steps, "seconds": self._trained, **_plain(row, "log.eval")}
        self._val_loss = written.get("val_loss")
        self._writer.eval(written)
        self._since = time.perf_counter()

    def gauge(self, row: Mapping[str, Any]) -> None:
        """Write what gauges read; ``log.watch(model, optimizer)`` attaches some that do."""
        self._writer.gauge(dict(row))

    def event(self, event: Event) -> None:
        """Write a happening."""
        self._writer.event(event)

    def found_in_step(self) -> Row:
        """Figures of the last step that the training function need not give."""
        return {}

    def found(self) -> Row:
        """Figures of the whole run that the training function need not give."""
        return {}

    def release(self) -> None:
        """Let go of what the log holds on to."""

    def close(self, returned: Any, recipe: str) -> None:
        """Write the summary of a finished run."""
        given = returned if isinstance(returned, Mapping) or returned is None else {"val_loss": returned}
        told = _plain(given or {}, f"the training function of {recipe}")
        told.setdefault("val_loss", self._val_loss)
        if told["val_loss"] is None:
            raise NarrowgaugeError(
                f"the training function gave no validation loss for {recipe}.",
                'Return it, return a dict with "val_loss", or call log.eval({"val_loss": …}).',
            )
        known: Row = {"recipe": recipe, "steps": self._num_steps, "num_skipped": self._num_skipped}
        if self._rates:
            known["tokens_per_second"] = statistics.median(self._rates)
        known |= {key: figure for key, figure in self.found().items() if figure is not None}
        self._writer.summary({**known, "wall_seconds": time.perf_counter() - self._began, **told})


Log = TypeVar("Log", bound=RunLog)

_TEXT = columns_of("text", "recipe")
_COUNTS = columns_of("step", "count")


def _plain(row: Any, by: str) -> Row:
    """A row of plain figures, tensors of one number among what was given."""
    if not isinstance(row, Mapping):
        raise NarrowgaugeError(f"{by} was given {_short(row)}.", 'It takes a dict, for instance {"loss": 2.5}.')
    return {str(key): _figure(str(key), value, by) for key, value in row.items()}


def _figure(key: str, value: Any, by: str) -> Any:
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
    train_function: Callable[[str, int, Log], Any],
    recipes: Sequence[str],
    *,
    seeds: int | Sequence[int] = 1,
    out: str | Path | None = None,
    log_type: Callable[[RunWriter], Log],
) -> Comparison:
    """Compare recipes in a training loop of one's own, with any kind of log; ``ng.compare`` says the rest.

    Args:
        train_function: called as ``train_function(recipe, seed, log)``.
        recipes: what is handed to the function.
        seeds: how many, from 0 on, or which ones.
        out: a new or empty folder; ``None`` keeps nothing.
        log_type: what makes the log of a run.
    Returns:
        The comparison.
    """
    asked = _named(recipes)
    numbers = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not numbers or len(set(numbers)) < len(numbers):
        raise NarrowgaugeError(f"seeds = {seeds!r} was asked for.", "Name at least one, none twice.")
    if out is not None:
        require_free(out)
        try:
            runs = _all(train_function, asked, numbers, Path(out), log_type)
        except BaseException as error:
            _keep(error, Path(out), len(asked) * len(numbers))
            raise
        found = compare_runs(runs)
        publish(found, Path(out))
        return found
    with tempfile.TemporaryDirectory(prefix="narrowgauge-") as folder:
        return compare_runs(_all(train_function, asked, numbers, Path(folder), log_type))


def _keep(error: BaseException, out: Path, num_asked: int) -> None:
    """Publish the runs that were done before an error ended a comparison, and add to it that they are there.

    They are not taken up again: whoever mends the function that failed would compare what it was with what it is.
    """
    with suppress(NarrowgaugeError):  # the error itself says more
        runs = read_runs([out])
        num_done = sum(run.summary is not None for run in runs)
        page = publish(compare_runs(runs), out)
        if sys.version_info >= (3, 11):
            error.add_note(f"{num_done} of {counted(num_asked, 'run')} were done before that; {page} shows them.")


def _named(recipes: Sequence[str]) -> list[str]:
    asked = [recipes] if isinstance(recipes, str) else list(recipes)
    if not asked:
        raise NarrowgaugeError("no recipe was named.", 'For instance ["bfloat16/master", "bfloat16/word"].')
    folders = [run_name(recipe_name(recipe), 0).lower() for recipe in asked]
    for recipe, folder in zip(asked, folders, strict=True):
        if folders.count(folder) > 1:
            raise NarrowgaugeError(f"the recipe {recipe} was named twice.", "Name each once.")
    return asked


def _all(
    train_function: Callable[[str, int, Log], Any],
    recipes: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    log_type: Callable[[RunWriter], Log],
) -> list[Run]:
    runs = []
    for seed in seeds:
        for recipe in recipes:
            name = recipe_name(recipe)
            folder = out / run_name(name, seed)
            known = parsed_recipe(recipe)
            config = {"recipe": recipe if known is None else known.to_value(), "seed": seed}
            with RunWriter.create(folder, {"config": config}) as writer:
                log = log_type(writer)
                try:
                    log.close(train_function(recipe, seed, log), name)
                finally:
                    log.release()
            runs.append(read_run(folder))
    return runs
