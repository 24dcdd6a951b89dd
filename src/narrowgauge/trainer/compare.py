"""Compare recipes: ``ng.compare`` in a loop of your own, ``narrowgauge compare`` with the built-in
trainer.

A comparison is a folder. It holds a run folder for each recipe and seed, and at the end
``compare.json`` and ``report.html``. Runs go seed by seed, so complete pairs exist whenever a
comparison stops. A run that diverges is a result like any other. The same ``narrowgauge compare``
continues a stopped comparison. Recipes and seeds may be added.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from narrowgauge.errors import NarrowgaugeError, RecipeError, require_package
from narrowgauge.measuring.comparison import Comparison, compare_runs
from narrowgauge.measuring.labels import recipe_name, run_name
from narrowgauge.report.page import learned
from narrowgauge.report.publishing import publish
from narrowgauge.runs.finding import counted, duration
from narrowgauge.runs.places import require_comparison, require_free
from narrowgauge.runs.record import Run, read_run
from narrowgauge.runs.writer import RunWriter, plain
from narrowgauge.spec.recipes import Recipe
from narrowgauge.trainer.checkpoints import newest, notes_of
from narrowgauge.trainer.loop import Entry, enter, train_entry
from narrowgauge.trainer.settings import OF_A_RUN, Settings, first_free

if TYPE_CHECKING:
    from narrowgauge.measuring.recorder import RunRecorder


def planned(recipes: Sequence[Any], seeds: int | Sequence[int]) -> list[tuple[Any, int, str]]:
    """Return each recipe and seed with the name of the run's folder, seed by seed.

    Refuse none, and one that comes twice.

    Args:
        seeds: how many, counted from 0, or the seeds themselves.
    """
    numbers = range(seeds) if isinstance(seeds, int) else seeds
    if isinstance(recipes, str):
        recipes = [recipes]
    if not recipes:
        raise RecipeError("no recipe was named.", "For instance bfloat16/master,bfloat16/word.")
    if not numbers or len(set(numbers)) < len(numbers):
        raise NarrowgaugeError(
            f"Cannot compare with seeds = {seeds!r}.", "Name at least one, none twice."
        )
    plan: dict[str, tuple[Any, int, str]] = {}
    for seed in numbers:
        for recipe in recipes:
            label = recipe_name(recipe)
            folder = run_name(label, seed)
            if folder.lower() in plan:
                raise RecipeError(
                    f"two of the recipes are called {label}.",
                    'Name each once, or give each a name of its own: name = "…" in its file.',
                )
            plan[folder.lower()] = (recipe, seed, folder)
    return list(plan.values())


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
        out: a new or empty folder for the runs, ``compare.json`` and ``report.html``; ``None``
            keeps nothing. If the function raises, the finished runs stay there for ``narrowgauge
            report``.

    Returns:
        The comparison: ``rows``, a ``verdict`` in sentences, ``differences`` from the ``baseline``.
    Raises:
        NarrowgaugeError: no recipe or seed, duplicates, a function without a loss, or a row with
            values that are not numbers.
        RecordError: ``out`` is not empty.
    Example:
        >>> def train_function(recipe, seed, log):
        ...     log.step({"loss": 2.5})
        ...     return 1.5 + seed / 10
        >>> comparison = compare(train_function, ["bfloat16/master", "bfloat16/word"], seeds=2)
        >>> [(row["recipe"], row["num_seeds"]) for row in comparison.rows]
        [('bfloat16/master', 2), ('bfloat16/word', 2)]
    """
    plan = planned(recipes, seeds)
    from narrowgauge.distributed.ranks import all_ranks

    if out is not None:
        require_package("plotly")  # for the page; not after hours of training
        names = [name for _, _, name in plan]
        all_ranks().of_first(lambda: require_new(Path(out), names))
    with tempfile.TemporaryDirectory(prefix="narrowgauge-") as temporary:
        place = Path(out or temporary)
        runs = [_record(train_function, recipe, seed, place / name) for recipe, seed, name in plan]
    comparison = compare_runs(runs)
    if out is not None and all_ranks().is_first:
        publish(comparison, runs, Path(out))
    return comparison


def require_new(folder: Path, names: Sequence[str]) -> None:
    """Refuse a comparison whose folder holds one of its runs already."""
    require_comparison(folder, names)
    for name in names:
        require_free(folder / name)


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
        from narrowgauge.measuring.recorder import summary_of

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


def define(
    recipes: Sequence[Recipe],
    settings: Mapping[str, Any],
    *,
    seeds: int = 1,
    out: str | Path | None = None,
) -> list[Entry]:
    """Return each run of a comparison with its checked settings, seed by seed.

    Args:
        settings: fields of ``Settings`` that all runs share. In a folder with runs, the omitted
            ones are as in these runs.
        out: the folder: new, or with runs of the same settings. ``None`` takes
            ``comparisons/MODEL-N``, the first free N.
    Raises:
        NarrowgaugeError: an invalid setting, or one that a run in the folder has otherwise.
    """
    require_package("plotly")
    plan = planned(recipes, seeds)
    named = {name: value for name, value in settings.items() if value is not None}
    present: dict[str, Any] = {}
    if out is not None:
        require_comparison(Path(out), [name for _, _, name in plan])
        present = _settings_in(Path(out))
    shared = {**present, **named}
    base = Settings.from_dict(shared).checked()
    folder = Path(out or first_free(Path("comparisons") / Path(base.model).name))
    entries = []
    for recipe, seed, name in plan:
        of_run = {"recipe": recipe.name, "seed": seed, "out": str(folder / name)}
        entries.append(enter({**shared, **of_run}))
    return entries


def _settings_in(folder: Path) -> dict[str, Any]:
    """Return the settings that the runs in a folder share, from the first with a checkpoint."""
    for file in sorted(folder.glob("*/run.toml")):
        checkpoint, _ = newest(file.parent)
        if checkpoint is not None:
            settings = notes_of(checkpoint)["settings"]
            return {name: value for name, value in settings.items() if name not in OF_A_RUN}
    return {}


def run_comparison(
    entries: Sequence[Entry], stream: TextIO | None = None
) -> tuple[Comparison, Path]:
    """Make the unfinished runs of a comparison, compare them, and write the page.

    The same settings give the same numbers except times, however often the runs were stopped.
    Finished runs of the folder that were not requested are compared, too.

    Args:
        entries: from :func:`define`.
        stream: for a line per run; ``None`` for standard output.
    Returns:
        The comparison and the path of the page.
    Raises:
        NarrowgaugeError: a run failed. Finished runs stay.
        KeyboardInterrupt: after Ctrl-C, with a line that says how to go on.
    """
    folder = entries[0].folder.parent
    say = partial(print, file=stream, flush=True)
    say(f"{counted(len(entries), 'run')} in {folder}")
    for number, entry in enumerate(entries):
        began = time.monotonic()
        took = "earlier"
        if not entry.is_finished:
            try:
                _train(entry, stream)
            except KeyboardInterrupt as interruption:
                raise type(interruption)(
                    f"{number} of {len(entries)} runs are done. Give the same command with "
                    f"--out {folder} to continue."
                ) from None
            took = duration(time.monotonic() - began)
        loss = (read_run(entry.folder).summary or {})["val_loss"]
        name = f"{entry.settings.recipe.name}, seed {entry.settings.seed}"
        say(f"{number + 1}/{len(entries)}  {name}  validation loss {loss:.4f}  {took}")
    runs = [read_run(entry.folder) for entry in entries]
    asked = [run.path for run in runs]
    for file in sorted(folder.glob("*/summary.json")):
        if file.parent not in asked:
            runs.append(read_run(file.parent))
    comparison = compare_runs(runs)
    for words in learned(comparison, runs):
        say(words)
    return comparison, publish(comparison, runs, folder)


def _train(entry: Entry, stream: TextIO | None) -> None:
    """Train a run, or go on with one that was stopped."""
    # Imported late: PyTorch takes seconds to load, and a wrong definition is reported before.
    import torch

    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        train_entry(entry, stream=stream, is_verbose=False)
    except NarrowgaugeError as error:
        error.message = f"{entry.folder.name}: {error.message}"
        raise
