"""Compare recipes: ``ng.compare`` in a loop of your own, ``narrowgauge compare`` with the built-in trainer.

A comparison is a folder. It holds a run folder for each recipe and seed, and at the end ``compare.json`` and ``report.html``.
Runs go seed by seed, so complete pairs exist whenever a comparison stops. A run that diverges is a result like any other.

The same ``narrowgauge compare`` continues a stopped comparison. Finished runs stay. An interrupted run resumes from its
checkpoint. Recipes and seeds may be added.
"""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from narrowgauge.analysis.comparison.comparison import Comparison, compare_runs
from narrowgauge.analysis.comparison.labels import parsed_recipe, recipe_name, run_name
from narrowgauge.analysis.comparison.run_stats import divergence
from narrowgauge.errors import NarrowgaugeError, RecipeError, RecordError, require_package
from narrowgauge.report.publishing import publish, read_runs
from narrowgauge.runs.finding import counted, duration
from narrowgauge.runs.record import Run, is_run, read_run
from narrowgauge.runs.writer import RunWriter, require_free
from narrowgauge.spec.recipes import Recipe
from narrowgauge.trainer.config import TrainConfig, first_free
from narrowgauge.trainer.console import Console
from narrowgauge.trainer.resume_checks import changed_settings

if TYPE_CHECKING:
    from narrowgauge.gauges.recording.record import Record


# ── recipes and seeds ─────────────────────────────────────────────────────────────────────────────────────────────────


def seed_numbers(seeds: int | Sequence[int]) -> tuple[int, ...]:
    """Return seeds from their number, counted from 0, or from the seeds themselves."""
    numbers = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
    if not numbers or len(set(numbers)) < len(numbers):
        raise NarrowgaugeError(f"seeds = {seeds!r} was requested.", "Request at least one, none twice.")
    return numbers


def require_distinct(recipes: Sequence[Any]) -> None:
    """Refuse an empty list of recipes, and two recipes with one name. Their runs would share a folder."""
    if not recipes:
        raise RecipeError("no recipe was named.", "For instance bfloat16/master,bfloat16/word.")
    folders: set[str] = set()
    for label in map(recipe_name, recipes):
        if (folder := run_name(label, 0).lower()) in folders:
            raise RecipeError(
                f"two of the recipes are called {label}.",
                'Name each once, or give each a name of its own: name = "…" in its file.',
            )
        folders.add(folder)


# ── in a loop of your own ───────────────────────────────────────────────────────────────────────────────────────────


def compare(
    train_function: Callable[[str, int, Record], Any],
    recipes: Sequence[str],
    *,
    seeds: int | Sequence[int] = 1,
    out: str | Path | None = None,
) -> Comparison:
    """Compare recipes in your own training loop.

    Runs of one seed are paired, so let only the seed decide the initial weights and the batches. A comparison needs just the
    last validation loss of each run. Every other logged metric adds a curve or a column.

    Args:
        train_function: called as ``train_function(recipe, seed, log)``. It trains once and returns the last validation
            loss, or a dict of summary metrics (``val_loss``, ``bytes_per_param``, ``tokens_per_second``,
            ``step_memory_bytes``, ``edq``, ``noise``, ``lost_fraction``), or nothing if it called
            ``log.eval({"val_loss": …})``. ``log.step({"loss": …})`` logs a step, ``log.eval`` a validation;
            ``log.watch(model, optimizer)`` adds gauges and the audit.
        recipes: the function's arguments: names of recipes or any other names.
        seeds: how many, from 0 on, or a sequence of seeds.
        out: a new or empty folder for the runs, ``compare.json`` and ``report.html``; ``None`` keeps nothing. If the function
            raises, the finished runs stay there for ``narrowgauge report``.

    Returns:
        The comparison: ``rows``, a ``verdict`` in sentences, ``differences`` from the ``baseline``.

    Raises:
        NarrowgaugeError: no recipe or seed, duplicates, a function without a loss, or a row with values that are not numbers.
        RecordError: ``out`` is not empty.

    Example:
        >>> def train_function(recipe, seed, log):
        ...     for step in range(1, 4):
        ...         log.step({"loss": 3 - step / 2})
        ...     wide = recipe == "bfloat16/master"
        ...     return {"val_loss": 1.5 + seed / 10 - 0.002 * seed * wide, "bytes_per_param": 16 if wide else 8}
        >>> comparison = compare(train_function, ["bfloat16/master", "bfloat16/word"], seeds=2)
        >>> [(row["recipe"], row["num_seeds"]) for row in comparison.rows]
        [('bfloat16/master', 2), ('bfloat16/word', 2)]
        >>> comparison.baseline
        'bfloat16/master'
    """
    names = [recipes] if isinstance(recipes, str) else list(recipes)
    require_distinct([parsed_recipe(recipe) or recipe for recipe in names])
    labels, numbers = [recipe_name(recipe) for recipe in names], seed_numbers(seeds)
    from narrowgauge.distributed.ranks import all_ranks

    if out is not None:
        require_package("plotly")  # for the page; not after hours of training
        all_ranks().of_first(lambda: require_free(out))
    runs = []
    with tempfile.TemporaryDirectory(prefix="narrowgauge-") as temporary:
        for seed in numbers:
            for name, label in zip(names, labels, strict=True):
                folder = Path(out or temporary) / run_name(label, seed)
                runs.append(_record(train_function, name, seed, folder))
    comparison = compare_runs(runs)
    if out is not None and all_ranks().is_first:
        publish(comparison, Path(out))
    return comparison


def _record(train_function: Callable[[str, int, Record], Any], recipe: str, seed: int, folder: Path) -> Run:
    """Call a training function, record its run in a folder, and return the run on every rank."""
    from narrowgauge.gauges.recording.record import Record, numbers
    from narrowgauge.gauges.recording.run_recorder import warn

    parsed, label = parsed_recipe(recipe), recipe_name(recipe)
    config = {"recipe": recipe if parsed is None else parsed.to_value(), "seed": seed}
    with Record(lambda: RunWriter.create(folder, {"config": config}), parsed, warn) as record:
        try:
            returned = train_function(recipe, seed, record)
            metrics = returned if isinstance(returned, Mapping) or returned is None else {"val_loss": returned}
            metrics = numbers(metrics or {}, f"the training function of {label}")
            summary = {**record.summary(recipe=label), **metrics}
            if not isinstance(summary.get("val_loss"), int | float):
                raise NarrowgaugeError(
                    f"the training function gave no validation loss for {label}, val_loss is {summary.get('val_loss')!r}.",
                    'Return it, return a dict with "val_loss", or call log.eval({"val_loss": …}).',
                )
        except BaseException:
            record.stop()
            raise
        record.finish(summary)
    return record.here.of_first(lambda: read_run(record.folder))


# ── with the built-in trainer ───────────────────────────────────────────────────────────────────────────────────────


def define(recipes: Sequence[Recipe], settings: Mapping[str, Any], *, seeds: int = 1) -> list[TrainConfig]:
    """Return the checked settings of each run of a comparison, seed by seed. ``out`` is the name of the run's folder.

    Args:
        settings: fields of ``TrainConfig`` that all runs share.

    Raises:
        NarrowgaugeError: a setting is invalid.
    """
    require_package("plotly")
    base = TrainConfig(**settings)
    checked = base.validated()
    base = replace(base, model=checked.model, data=checked.data)
    require_distinct(recipes)
    numbers = seed_numbers(seeds)
    for recipe in recipes:
        replace(base, recipe=recipe).validated()
    return [
        replace(base, recipe=recipe, seed=seed, out=run_name(recipe.title, seed))
        for seed in numbers
        for recipe in recipes
    ]


def _changed(run: Run, config: TrainConfig) -> list[tuple[str, str, str]]:
    """Return the settings of an existing run that differ from the requested ones. Ignore settings that rules filled in."""
    settings, recorded = config.filled().to_dict(), run.config
    recorded = {name: value for name, value in recorded.items() if name in settings}
    return [change for change in changed_settings(recorded, settings) if change[0] != "threads"]


def _others(folder: Path, configs: Sequence[TrainConfig], say: Callable[[str], object]) -> list[Run]:
    """Return the finished runs of a folder that were not requested now and have the same settings but for recipe and seed."""
    requested = {Path(str(config.out)) for config in configs}
    runs = [
        run for run in read_runs([folder], say) if run.path not in requested and not run.is_foreign and _is_over(run)
    ]
    return [run for run in runs if {name for name, _, _ in _changed(run, configs[0])} <= {"recipe", "seed"}]


def _require_same(run: Run, config: TrainConfig) -> None:
    """Refuse an existing run with other settings."""
    if changed := _changed(run, config):
        name, before, now = changed[0]
        raise RecordError(
            f"Cannot compare in {run.path.parent}: {run.path.name} has {name} = {before}, and {now} was requested.",
            "Choose another --out, or the settings of the runs there.",
        )


def run_comparison(
    configs: Sequence[TrainConfig],
    out: str | Path | None = None,
    stream: TextIO | None = None,
) -> tuple[Comparison, Path]:
    """Make the unfinished runs of a comparison, compare them, and write the page.

    The same settings give the same numbers except times, resumed or not.

    Args:
        configs: from :func:`define`.
        out: the folder: new, or with runs of the same settings. ``None`` takes ``comparisons/MODEL-N``, the first free N.
        stream: for the progress display, a line per run and a bar on a terminal; ``None`` for standard output.
    Returns:
        The comparison and the path of the page.
    Raises:
        NarrowgaugeError: a run exists with other settings, or a run failed. Finished runs stay.
        KeyboardInterrupt: after Ctrl-C, with a line that says how to resume.
    """
    model = Path(configs[0].model).name
    folder = Path(out) if out is not None else first_free(Path("comparisons") / model)
    configs = [replace(config, out=str(folder / str(config.out))) for config in configs]
    existing = {config.out: read_run(str(config.out)) for config in configs if is_run(Path(str(config.out)))}
    if existing and configs[0].filled().lr is None:  # continued without naming a rate
        rate = next(iter(existing.values())).config.get("lr")
        configs = [replace(config, lr=rate) for config in configs]
    for config in configs:
        if config.out in existing:
            _require_same(existing[config.out], config)

    def say(line: str) -> None:
        print(line, file=stream, flush=True)

    say(f"{counted(len(configs), 'run')} in {folder}")
    runs: list[Run] = []
    trained: set[str] = set()
    try:
        for number, config in enumerate(configs, 1):
            name = f"{number}/{len(configs)}  {config.recipe.title}, seed {config.seed}"
            run, took = existing.get(config.out), "earlier"
            if run is None or not _is_over(run):
                began = time.monotonic()
                _train(config, Console(config.steps, 0, name, stream))
                run, spent = read_run(str(config.out)), time.monotonic() - began
                # A recipe's first run compiles; of the others only the steps take long.
                steps = config.steps * statistics.median([row.get("seconds") or 0.0 for row in run.steps] or [0.0])
                trained.add(config.recipe.title)
                num_first = len({later.recipe.title for later in configs[number:]} - trained)
                remaining = steps * (len(configs) - number) + max(0.0, spent - steps) * num_first
                took = duration(spent) + (f", about {duration(remaining)} left" if number < len(configs) else "")
            runs.append(run)
            say(f"{name}  {_result(run)}  {took}")
    except KeyboardInterrupt as interruption:
        raise type(interruption)(
            f"{len(runs)} of {len(configs)} runs are done. Give the same command with --out {folder} to continue."
        ) from None
    if (unigram_loss := runs[0].run["data"].get("unigram_loss")) is not None:
        say(f"Token frequencies alone have a loss of {unigram_loss:.4f}.")
    comparison = compare_runs([*runs, *_others(folder, configs, say)])
    return comparison, publish(comparison, folder)


def _is_over(run: Run) -> bool:
    """Return whether a run is finished, or diverged and stopped."""
    return run.summary is not None or any(event.get("kind") == "divergence" for event in run.events)


def _result(run: Run) -> str:
    if reason := divergence(run):
        return f"diverged ({reason})"
    return f"validation loss {run.summary['val_loss']:.4f}" if run.summary else ""


def _train(config: TrainConfig, console: Console) -> None:
    """Train a run, or resume one that was stopped. A divergence is a result like any other."""
    # Imported late: PyTorch takes seconds to load, and a wrong definition is reported before.
    import torch

    from narrowgauge.distributed.job import threads_of
    from narrowgauge.trainer import loop

    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    folder = Path(str(config.out))
    try:
        with threads_of(config.threads, config.recipe.reduction.order_invariant):
            if is_run(folder):
                loop.resume(folder, console=console)
            else:
                loop.train(config, console=console)
    except loop.DivergenceError:
        pass  # it is in the record
    except NarrowgaugeError as error:
        error.message = f"{folder.name}: {error.message}"
        raise
