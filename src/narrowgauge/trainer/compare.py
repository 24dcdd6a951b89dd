"""Compare recipes: ``ng.compare`` in a loop of your own, ``narrowgauge compare`` with the built-in trainer.

A comparison is a folder. It holds a run folder for each recipe and seed, and at the end ``compare.json`` and ``report.html``.
Runs go seed by seed, so complete pairs exist whenever a comparison stops. A run that diverges is a result like any other. The
same ``narrowgauge compare`` continues a stopped comparison. Recipes and seeds may be added.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from narrowgauge.analysis.comparison.classification import divergence
from narrowgauge.analysis.comparison.comparison import Comparison, compare_runs
from narrowgauge.analysis.comparison.labels import parsed_recipe, recipe_name, run_name
from narrowgauge.errors import NarrowgaugeError, RecipeError, require_package
from narrowgauge.report.publishing import publish, read_runs
from narrowgauge.runs.finding import counted, duration
from narrowgauge.runs.record import Run, read_run
from narrowgauge.runs.writer import RunWriter, require_free
from narrowgauge.spec.recipes import Recipe
from narrowgauge.trainer.config import TrainConfig, first_free
from narrowgauge.trainer.console import Console
from narrowgauge.trainer.resume_checks import is_over, other_settings, run_to_continue

if TYPE_CHECKING:
    from narrowgauge.gauges.recording.record import Record


def planned(recipes: Sequence[Any], seeds: int | Sequence[int]) -> list[tuple[Any, int, str]]:
    """Return each recipe and seed with the name of the run's folder, seed by seed. Refuse none, and one that comes twice.

    Args:
        seeds: how many, counted from 0, or the seeds themselves.
    """
    numbers, labels = (
        range(seeds) if isinstance(seeds, int) else seeds,
        [recipe_name(recipe) for recipe in recipes],
    )
    folders = [run_name(label, 0).lower() for label in labels]
    if not recipes:
        raise RecipeError("no recipe was named.", "For instance bfloat16/master,bfloat16/word.")
    if not numbers or len(set(numbers)) < len(numbers):
        raise NarrowgaugeError(
            f"Cannot compare with seeds = {seeds!r}.", "Name at least one, none twice."
        )
    for place, folder in enumerate(folders):
        if folder in folders[:place]:
            raise RecipeError(
                f"two of the recipes are called {labels[place]}.",
                'Name each once, or give each a name of its own: name = "…" in its file.',
            )
    return [
        (r, seed, run_name(label, seed))
        for seed in numbers
        for r, label in zip(recipes, labels, strict=True)
    ]


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
        ...     log.step({"loss": 2.5})
        ...     return 1.5 + seed / 10
        >>> comparison = compare(train_function, ["bfloat16/master", "bfloat16/word"], seeds=2)
        >>> [(row["recipe"], row["num_seeds"]) for row in comparison.rows]
        [('bfloat16/master', 2), ('bfloat16/word', 2)]
    """
    plan = planned([recipes] if isinstance(recipes, str) else list(recipes), seeds)
    from narrowgauge.distributed.ranks import all_ranks

    if out is not None:
        require_package("plotly")  # for the page; not after hours of training
        all_ranks().of_first(lambda: require_free(out))
    with tempfile.TemporaryDirectory(prefix="narrowgauge-") as temporary:
        place = Path(out or temporary)
        runs = [_record(train_function, recipe, seed, place / name) for recipe, seed, name in plan]
    comparison = compare_runs(runs)
    if out is not None and all_ranks().is_first:
        publish(comparison, Path(out))
    return comparison


def _record(
    train_function: Callable[[str, int, Record], Any], recipe: str, seed: int, folder: Path
) -> Run:
    from narrowgauge.gauges.recording.record import Record, numbers
    from narrowgauge.gauges.recording.run_recorder import warn

    parsed, label = parsed_recipe(recipe), recipe_name(recipe)
    config = {"recipe": recipe if parsed is None else parsed.to_value(), "seed": seed}
    with Record(lambda: RunWriter.create(folder, {"config": config}), parsed, warn) as record:
        try:
            returned = train_function(recipe, seed, record)
            metrics = (
                returned
                if isinstance(returned, Mapping) or returned is None
                else {"val_loss": returned}
            )
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


def define(
    recipes: Sequence[Recipe], settings: Mapping[str, Any], *, seeds: int = 1
) -> list[TrainConfig]:
    """Return the checked settings of each run of a comparison, seed by seed. ``out`` is the name of the run's folder.

    ``settings`` are fields of ``TrainConfig`` that all runs share.
    """
    require_package("plotly")
    plan, base = planned(recipes, seeds), TrainConfig(**settings).validated()
    for recipe in recipes:
        replace(base, recipe=recipe).validated()
    return [replace(base, recipe=recipe, seed=seed, out=name) for recipe, seed, name in plan]


def run_comparison(
    configs: Sequence[TrainConfig], out: str | Path | None = None, stream: TextIO | None = None
) -> tuple[Comparison, Path]:
    """Make the unfinished runs of a comparison, compare them, and write the page.

    The same settings give the same numbers except times, resumed or not. Finished runs of the folder that were not requested
    are compared, too, if they differ in recipe and seed alone.

    Args:
        configs: from :func:`define`.
        out: the folder: new, or with runs of the same settings. ``None`` takes ``comparisons/MODEL-N``, the first free N.
        stream: for a line per run; ``None`` for standard output.
    Returns:
        The comparison and the path of the page.
    Raises:
        NarrowgaugeError: a run exists with other settings, or a run failed. Finished runs stay.
        KeyboardInterrupt: after Ctrl-C, with a line that says how to resume.
    """
    folder = (
        Path(out)
        if out is not None
        else first_free(Path("comparisons") / Path(configs[0].model).name)
    )
    configs = [replace(config, out=str(folder / str(config.out))) for config in configs]
    present = [run_to_continue(config) for config in configs]
    if (
        configs[0].lr is None
    ):  # it follows from the model's size; a comparison continues with its rate
        lr = next((run.config.get("lr") for run in present if run is not None), None)
        configs = [replace(config, lr=lr) for config in configs]

    def say(line: str) -> None:
        print(line, file=stream, flush=True)

    say(f"{counted(len(configs), 'run')} in {folder}")
    runs: list[Run] = []
    for number, (config, run) in enumerate(zip(configs, present, strict=True), 1):
        began, is_new = time.monotonic(), run is None or not is_over(run)
        try:
            run = _trained(config, stream) if run is None or is_new else run
        except KeyboardInterrupt as interruption:
            raise type(interruption)(
                f"{len(runs)} of {len(configs)} runs are done. Give the same command with --out {folder} to continue."
            ) from None
        runs.append(run)
        loss = f"validation loss {run.summary['val_loss']:.4f}" if run.summary else ""
        result = f"diverged ({reason})" if (reason := divergence(run)) else loss
        took = duration(time.monotonic() - began) if is_new else "earlier"
        say(f"{number}/{len(configs)}  {config.recipe.title}, seed {config.seed}  {result}  {took}")
    if (unigram_loss := runs[0].run["data"].get("unigram_loss")) is not None:
        say(f"Token frequencies alone have a loss of {unigram_loss:.4f}.")
    requested = {run.path for run in runs}
    for run in read_runs([folder], say):
        is_other = run.path not in requested and not run.is_foreign and is_over(run)
        if is_other and {name for name, _, _ in other_settings(run, configs[0])} <= {
            "recipe",
            "seed",
        }:
            runs.append(run)
    comparison = compare_runs(runs)
    return comparison, publish(comparison, folder)


def _trained(config: TrainConfig, stream: TextIO | None) -> Run:
    """Train a run, or continue one that was stopped. A divergence is a result like any other."""
    # Imported late: PyTorch takes seconds to load, and a wrong definition is reported before.
    import torch

    from narrowgauge.distributed.job import threads_of
    from narrowgauge.trainer import loop

    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    folder = Path(str(config.out))
    try:
        with (
            threads_of(config.threads, config.recipe.reduction.order_invariant),
            suppress(loop.DivergenceError),
        ):
            loop.train(config, console=Console(config.steps, 0, stream))
    except NarrowgaugeError as error:
        error.message = f"{folder.name}: {error.message}"
        raise
    return read_run(folder)
