"""Compare recipes: ``ng.compare`` in a loop of your own, ``narrowgauge compare`` with the built-in
trainer.

A comparison is a folder. It holds a run folder for each recipe and seed, and at the end
``compare.json`` and ``report.html``. Runs go seed by seed, so complete pairs exist whenever a
comparison stops. A run that diverges is a result like any other. The same ``narrowgauge compare``
continues a stopped comparison. Recipes and seeds may be added.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from narrowgauge.errors import NarrowgaugeError, RecipeError, require_package
from narrowgauge.measuring.comparison import Comparison, compare_runs
from narrowgauge.measuring.labels import recipe_name, run_name
from narrowgauge.report.page import learned
from narrowgauge.report.publishing import publish, read_runs
from narrowgauge.runs.finding import counted, duration, told
from narrowgauge.runs.places import require_comparison, require_free
from narrowgauge.runs.record import Run, read_run
from narrowgauge.runs.writer import RunWriter, plain
from narrowgauge.spec.recipes import Recipe
from narrowgauge.trainer.entry import enter
from narrowgauge.trainer.settings import Settings

if TYPE_CHECKING:
    from narrowgauge.measuring.recorder import RunRecorder


def planned(recipes: Sequence[Any], seeds: int | Sequence[int]) -> dict[str, tuple[Any, int]]:
    """Return each recipe and seed under the name of the run's folder, seed by seed.

    Args:
        seeds: how many, counted from 0, or the seeds themselves.
    """
    numbers = range(seeds) if isinstance(seeds, int) else seeds
    plan = {}
    for seed in numbers:
        for recipe in recipes:
            plan[run_name(recipe_name(recipe), seed)] = (recipe, seed)
    if not plan or len(plan) < len(numbers) * len(recipes):
        raise RecipeError(
            f"Cannot compare {told(map(recipe_name, recipes)) or 'no recipe'} with seeds = {seeds}.",
            "Name at least one of each, and none twice.",
        )
    return plan


# ── in a loop of your own ─────────────────────────────────────────────────────────────────────────


def compare(
    train_function: Callable[[str, int, Log], Any],
    recipes: Sequence[str],
    *,
    seeds: int | Sequence[int] = 1,
    out: str | Path | None = None,
) -> Comparison:
    """Compare recipes in your own training loop.

    Runs of one seed are paired, so let only the seed decide the initial weights and the batches. A
    comparison needs just the last validation loss of each run. Every other logged metric adds a
    curve or a column.

    Args:
        train_function: called as ``train_function(recipe, seed, log)``. It trains once and returns
            the last validation loss, or a dict of summary metrics (``val_loss``,
            ``bytes_per_param``, ``tokens_per_second``, ``step_memory_bytes``, ``edq``, ``noise``,
            ``lost_fraction``), or nothing if it called ``log.eval({"val_loss": …})``.
            ``log.step({"loss": …})`` logs a step, ``log.eval`` a validation; ``log.watch(model,
            optimizer)`` adds gauges and the audit.
        recipes: the function's arguments: names of recipes or any other names.
        seeds: how many, from 0 on, or a sequence of seeds.
        out: a folder without these runs, for them, ``compare.json`` and ``report.html``; ``None``
            keeps nothing. If the function raises, the finished runs stay there for ``narrowgauge
            report``.

    Returns:
        The comparison: ``rows``, a ``verdict`` in sentences, ``differences`` from the ``baseline``.
    Raises:
        NarrowgaugeError: no recipe or seed, duplicates, a function without a loss, or a row with
            values that are not numbers.
        RecordError: ``out`` holds one of the runs, or a file that would be overwritten.
    Example:
        >>> def train_function(recipe, seed, log):
        ...     log.step({"loss": 2.5})
        ...     return 1.5 + seed / 10
        >>> comparison = compare(train_function, ["bfloat16/master", "bfloat16/word"], seeds=2)
        >>> [(row["recipe"], row["num_seeds"]) for row in comparison.rows]
        [('bfloat16/master', 2), ('bfloat16/word', 2)]
    """
    from narrowgauge.distributed.ranks import all_ranks

    plan = planned(recipes, seeds)
    ranks = all_ranks()

    def require_new() -> None:
        if out is not None:
            require_package("plotly")  # for the page; not after hours of training
            require_comparison(Path(out), plan)
            for name in plan:
                require_free(Path(out) / name)

    ranks.of_first(require_new)
    with tempfile.TemporaryDirectory(prefix="narrowgauge-") as temporary:
        place = Path(out or temporary)
        runs = []
        for name, (recipe, seed) in plan.items():
            runs.append(_record(train_function, recipe, seed, place / name))
    comparison = compare_runs(runs)
    if out is not None and ranks.is_first:
        publish(comparison, runs, Path(out))
    return comparison


class Log:
    """The record of one run of :func:`compare`: plain rows, or those of a watched loop."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.folder = folder
        self.val_loss: Any = None
        self._config = config
        self._recorder: RunRecorder | None = None
        self._rows: list[tuple[str, dict[str, Any]]] = []
        self._steps = 0
        self._tokens = 0
        self._began = time.perf_counter()

    def watch(self, model: Any, optimizer: Any, *, every: int = 20) -> None:
        """Record the loop as :class:`narrowgauge.RunRecorder` does, with its audit and gauges.

        Args:
            every: steps between samples of the gauges; 0 for none.
        """
        from narrowgauge.measuring.recorder import RunRecorder

        self._recorder = RunRecorder(
            self.folder, model, optimizer, settings=self._config, gauges_every=every
        )

    def step(self, columns: Mapping[str, Any]) -> None:
        """Log an optimizer step: ``loss``, ``tokens`` so far, and any other number."""
        named = _named(columns, "step")
        tokens = named.pop("tokens", None)
        if tokens is not None:
            tokens -= self._tokens
            self._tokens += tokens
        if self._recorder is not None:
            return self._recorder.step(tokens=tokens, **named)
        self._steps += 1
        seconds = time.perf_counter() - self._began
        self._began += seconds
        row = {"step": self._steps, "seconds": seconds, **named}
        if tokens is not None:
            row |= {"tokens": self._tokens, "tokens_per_second": tokens / seconds}
        return self._rows.append(("steps", row))

    def eval(self, columns: Mapping[str, Any]) -> None:
        """Log a validation: ``val_loss``, and any other number."""
        named = _named(columns, "eval")
        self.val_loss = named.pop("val_loss", None)
        if self._recorder is not None:
            return self._recorder.evaluate(self.val_loss, **named)
        now = time.perf_counter()
        row = {
            "step": self._steps,
            "seconds": now - self._began,
            "val_loss": self.val_loss,
            **named,
        }
        self._began = now
        return self._rows.append(("evals", row))

    def close(self, finished: bool, metrics: Mapping[str, Any]) -> None:
        """Write the rows, and the summary of a finished run."""
        from narrowgauge.distributed.ranks import all_ranks

        if self._recorder is not None:
            return self._recorder.close(finished, **metrics)
        return all_ranks().of_first(lambda: self._write(finished, metrics))

    def _write(self, finished: bool, metrics: Mapping[str, Any]) -> None:
        from narrowgauge.measuring.step_row import summary_of

        with RunWriter.create(self.folder, {"config": self._config}) as writer:
            for kind, row in self._rows:
                writer.append(kind, row)
            if finished:
                summary = {"recipe": self._config["recipe"], "steps": self._steps}
                writer.summary({**summary, **summary_of(read_run(self.folder)), **metrics})


def _named(columns: Any, caller: str) -> dict[str, Any]:
    """Return a row of plain values; refuse what is none."""
    if not isinstance(columns, Mapping):
        raise NarrowgaugeError(
            f"{caller} was given {columns!r:.60}.", 'It takes a dict, for instance {"loss": 2.5}.'
        )
    named: dict[str, Any] = plain(columns)
    return named


def _record(
    train_function: Callable[[str, int, Log], Any], recipe: str, seed: int, folder: Path
) -> Run:
    from narrowgauge.distributed.ranks import all_ranks

    label = recipe_name(recipe)
    log = Log(folder, {"recipe": label, "seed": seed})
    try:
        metrics = train_function(recipe, seed, log)
        if not isinstance(metrics, Mapping):
            metrics = {} if metrics is None else {"val_loss": metrics}
        metrics = {"val_loss": log.val_loss, **_named(metrics, "compare")}
        loss = metrics["val_loss"]
        if not isinstance(loss, int | float):
            raise NarrowgaugeError(
                f"the training function gave no validation loss for {label}, val_loss is {loss!r}.",
                'Return it, return a dict with "val_loss", or call log.eval({"val_loss": …}).',
            )
    except BaseException:
        log.close(False, {})
        raise
    log.close(True, metrics)
    return all_ranks().of_first(lambda: read_run(folder))


# ── with the built-in trainer ─────────────────────────────────────────────────────────────────────


def compare_recipes(
    recipes: Sequence[str | Recipe],
    settings: Mapping[str, Any],
    *,
    seeds: int = 1,
    out: str | Path | None = None,
    stream: TextIO | None = None,
) -> tuple[Comparison, Path]:
    """Train with each recipe and seed, compare all runs in the folder, and write the page.

    The same arguments give the same numbers except times, however often the runs were stopped.

    Args:
        settings: fields of ``Settings`` that all runs share.
        out: the folder: new, or with runs that go on. ``None`` takes ``comparisons/MODEL``.
        stream: for a line per run; ``None`` for standard output.
    Returns:
        The comparison and the path of the page.
    Raises:
        NarrowgaugeError: an invalid setting, or one that a run in the folder has otherwise.
        KeyboardInterrupt: after Ctrl-C, with a line that says how to go on.
    """
    require_package("plotly")
    model = Path(Settings.from_dict(settings).model).name
    folder = Path(out or Path("comparisons") / model)
    plan = planned(recipes, seeds)
    require_comparison(folder, plan)
    entries = []
    for name, (recipe, seed) in plan.items():
        of_run = {"recipe": recipe, "seed": seed, "out": str(folder / name)}
        entries.append(enter({**settings, **of_run}))
    # Imported late: PyTorch takes seconds to load, and a wrong setting is reported before.
    from narrowgauge.trainer import loop

    print(f"{counted(len(entries), 'run')} in {folder}", file=stream, flush=True)
    for number, entry in enumerate(entries, 1):
        began = time.monotonic()
        try:
            loop.train(entry.settings.to_dict(), is_verbose=False)
        except KeyboardInterrupt as interruption:
            words = f"{number - 1} of {len(entries)} runs are done. The same command goes on."
            raise type(interruption)(words) from None
        took = "earlier" if entry.is_finished else duration(time.monotonic() - began)
        loss = (read_run(entry.folder).summary or {})["val_loss"]
        name = f"{entry.settings.recipe}, seed {entry.settings.seed}"
        line = f"{number}/{len(entries)}  {name}  validation loss {loss:.4f}  {took}"
        print(line, file=stream, flush=True)
    runs = read_runs([*(entry.folder for entry in entries), folder])
    comparison = compare_runs(runs)
    for words in learned(comparison, runs):
        print(words, file=stream, flush=True)
    return comparison, publish(comparison, runs, folder)
