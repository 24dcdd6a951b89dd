"""Compare recipes: ``ng.compare`` in a loop of your own, ``narrowgauge compare`` with the built-in
trainer.

A comparison is a folder. It holds a run folder for each recipe and seed, and at the end
``compare.json`` and ``report.html``. Runs go seed by seed, so complete pairs exist whenever a
comparison stops. A run that diverges is a result like any other. The same ``narrowgauge compare``
continues a stopped comparison. Recipes and seeds may be added.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.measuring.diagnose.comparison import (
    Comparison,
    compare_runs,
    recipe_name,
    run_name,
)
from narrowgauge.report.publishing import publish, read_runs
from narrowgauge.runs.paths import is_run, require_comparison, require_free
from narrowgauge.runs.record import Run, read_run
from narrowgauge.runs.text import plural
from narrowgauge.runs.writer import Record, plain
from narrowgauge.spec.recipes import Recipe
from narrowgauge.trainer.settings import Settings, find_start


def planned(recipes: Sequence[Any], seeds: int) -> dict[str, tuple[Any, int]]:
    """Return each recipe and seed under the name of the run's folder, seed by seed."""
    plan = {}
    for seed in range(seeds):
        for recipe in recipes:
            plan[run_name(recipe_name(recipe), seed)] = (recipe, seed)
    return plan


# ── in a loop of your own ─────────────────────────────────────────────────────────────────────────


def compare(
    train_function: Callable[..., Any],
    recipes: Sequence[str],
    *,
    seeds: int = 1,
    out: str | Path | None = None,
) -> Comparison:
    """Compare recipes in your own training loop.

    Runs of one seed are paired, so let only the seed decide the initial weights and the batches. A
    comparison needs just the last validation loss of each run. A record adds curves and columns.

    Args:
        train_function: called as ``train_function(recipe, seed, record)``. It trains once and
            returns the last validation loss, or a dict of summary metrics (``val_loss``,
            ``bytes_per_param``, ``tokens_per_second``, ``step_memory_bytes``, ``edq``), or nothing
            if a recorder evaluated. ``with record(model, optimizer) as recorder:`` opens a
            :class:`narrowgauge.RunRecorder` of the run, which takes its options too.
        recipes: the function's arguments: names of recipes or any other names.
        seeds: how many, from 0 on.
        out: a folder without these runs, for them, ``compare.json`` and ``report.html``; ``None``
            keeps nothing. If the function raises, the finished runs stay there for ``narrowgauge
            report``.

    Returns:
        The comparison: ``rows`` with their differences from the ``baseline``, and a ``verdict``.
    Raises:
        NarrowgaugeError: no recipe or seed, duplicates, or a function without a loss.
        RecordError: ``out`` holds one of the runs, or a file that would be overwritten.
    Example:
        >>> def train_function(recipe, seed, record):
        ...     return 1.5 + seed / 10
        >>> comparison = compare(train_function, ["bfloat16/master", "bfloat16/word"], seeds=2)
        >>> [(row["recipe"], row["num_seeds"]) for row in comparison.rows]
        [('bfloat16/master', 2), ('bfloat16/word', 2)]
    """
    from narrowgauge.distributed.ranks import all_ranks
    from narrowgauge.measuring.watch.recorder import RunRecorder

    plan = planned(recipes, seeds)
    ranks = all_ranks()
    with tempfile.TemporaryDirectory(prefix="narrowgauge-") as temporary:
        folder = Path(out or temporary)
        if out is not None:  # refused before hours of training
            ranks.of_first(lambda: require_comparison(folder, plan))
        for name in plan:
            require_free(folder / name)
        runs = []
        for name, (recipe, seed) in plan.items():
            config = {"recipe": recipe_name(recipe), "seed": seed}
            record = partial(RunRecorder, folder / name, settings=config)
            returned = train_function(recipe, seed, record)
            runs.append(ranks.of_first(partial(_finished, folder / name, config, returned)))
    comparison = compare_runs(runs)
    if out is not None and ranks.is_first:
        publish(comparison, runs, folder)
    return comparison


def _finished(folder: Path, config: dict[str, Any], returned: Any) -> Run:
    """Write what the training function returned into the summary of its run, and return the run."""
    if not is_run(folder):
        Record.create(folder, {"config": config}).close()
    metrics = {"recipe": config["recipe"], **(read_run(folder).summary or {})}
    if isinstance(returned, Mapping):
        metrics |= plain(returned)
    elif returned is not None:
        metrics["val_loss"] = plain(returned)
    if not isinstance(metrics.get("val_loss"), int | float):
        raise NarrowgaugeError(
            f"the training function gave no validation loss for {config['recipe']}, but "
            f"{returned!r:.60}.",
            'Return it, return a dict with "val_loss", or call recorder.evaluate(loss).',
        )
    with Record.open(folder) as writer:
        writer.summary(metrics)
    return read_run(folder)


# ── with the built-in trainer ─────────────────────────────────────────────────────────────────────


def compare_recipes(
    recipes: Sequence[str | Recipe],
    settings: Mapping[str, Any],
    *,
    seeds: int = 1,
    out: str | Path | None = None,
    say: Callable[[str], object] = print,
) -> tuple[Comparison, Path]:
    """Train with each recipe and seed, compare all runs in the folder, and write the page.

    The same arguments give the same numbers except times, however often the runs were stopped.

    Args:
        settings: fields of ``Settings`` that all runs share.
        out: the folder: new, or with runs to continue. ``None`` takes ``comparisons/MODEL``.
        say: takes a line per run.
    Returns:
        The comparison and the path of the page.
    Raises:
        NarrowgaugeError: an invalid setting, or one that a run in the folder has otherwise.
        KeyboardInterrupt: after Ctrl-C, once the checkpoint is saved.
    """
    folder = Path(out or Path("comparisons") / Path(Settings(**settings).model).name)
    plan = planned(recipes, seeds)
    require_comparison(folder, plan)
    starts = []
    for name, (recipe, seed) in plan.items():
        of_run = {"recipe": recipe, "seed": seed, "out": str(folder / name)}
        starts.append(find_start({**settings, **of_run}))
    # Imported late: PyTorch takes seconds to load, and a wrong setting is reported before.
    from narrowgauge.trainer.train import train

    say(f"{plural(len(starts), 'run')} in {folder}. The same command continues after a stop.")
    for number, start in enumerate(starts, 1):
        run = train(vars(start.settings), is_verbose=False)
        loss = (read_run(run).summary or {}).get("val_loss")
        words = "no validation loss" if loss is None else f"validation loss {loss:.4f}"
        earlier = "  trained earlier" if start.is_finished else ""
        say(f"{number}/{len(starts)}  {run.name}  {words}{earlier}")
    runs = read_runs([*(start.settings.folder for start in starts), folder])
    comparison = compare_runs(runs)
    return comparison, publish(comparison, runs, folder)
