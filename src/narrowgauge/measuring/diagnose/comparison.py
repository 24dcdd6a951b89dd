"""Compare recipes: a row of metrics for each, an interval for each, and one verdict.

Runs of one seed start from the same weights and read the same batches. So their *paired* difference
of final validation losses contains little of the seed's effect, and its mean over the seeds gets an
interval by Student's t. With two seeds the half width is 12.7 standard errors, since two values
estimate their spread poorly. Each recipe is compared with one baseline, which is chosen by its cost,
never by its loss: the best of several equal recipes is the luckiest.

Diverged and unfinished runs enter no average. A recipe is as good as the baseline only if its
interval rules out a loss worse by more than 1 %. Each interval is for one recipe: of twenty harmless
recipes, expect one outside.
"""

import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from narrowgauge.errors import NarrowgaugeError, RecordError
from narrowgauge.measuring.diagnose.settings_diff import recipe_of
from narrowgauge.measuring.diagnose.update_laws import loses_updates
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import SUMMARY, number
from narrowgauge.spec.parse import parse
from narrowgauge.spec.significance import student_t
from narrowgauge.spec.tables import Row, Table, json_value

NEGLIGIBLE = 1e-3
"""Fraction of the baseline's loss: a difference whose whole interval lies within does not matter."""
ACCEPTABLE = 0.01
"""Fraction of the baseline's loss: a recipe is as good if its interval rules out a larger increase."""
BASELINE = "the baseline"
FIT = (BASELINE, "better", "within the noise")
"""Verdicts of recipes that are known to be as good as the baseline."""
_WIDTHS = {"float32": 32, "float16": 16, "bfloat16": 16}
METRICS = [column for column in SUMMARY.values() if column.over]
"""The metrics of a row, which are taken over the seeds that count."""
_OVER: dict[str, Any] = {"mean": statistics.fmean, "median": statistics.median, "max": max}


@dataclass(frozen=True)
class Comparison:
    """Hold recipes and their comparison with a baseline.

    Args:
        rows: a row per recipe: ``recipe``, ``val_loss`` (mean over the seeds that count),
            ``tokens_per_second`` (median), ``bytes_per_param``, ``step_memory_bytes``, ``edq`` (of the
            last audits), ``num_seeds``, ``difference`` from the baseline's loss with its 95 %
            ``difference_interval`` (``None`` with one pair), ``verdict``. Unknown values are ``None``.
        baseline: baseline of all comparisons; ``None`` if no run counts.
        verdict: the cheapest recipe that is as good, in a sentence.
        acceptable: excess over the baseline's loss that is a price, in nats.

    Example:
        >>> from pathlib import Path
        >>> run = Run(Path("a"), {"config": {"recipe": "float32", "seed": 0}}, summary={"val_loss": 2.0})
        >>> compare_runs([run]).rows[0]["recipe"]
        'float32/float32'
    """

    rows: list[Row]
    baseline: str | None
    verdict: str
    acceptable: float

    def table(self) -> Table:
        """Return the rows as the table of the terminal and the page."""
        columns: dict[str, Any] = {"recipe": "recipe"}
        for metric in METRICS:  # a column in which no run has a value says nothing
            if any(row[metric.name] is not None for row in self.rows):
                columns[metric.label] = metric.cell
        columns["seeds"] = "num_seeds"
        if len(self.rows) > 1:
            columns[f"minus {self.baseline}"] = shown_difference
            columns["verdict"] = "verdict"
        return Table(self.rows, columns)

    def json(self) -> bytes:
        """Return ``compare.json``: the rows, valid JSON for all values."""
        return f"{json.dumps(json_value(self.rows), indent=1)}\n".encode()


def shown_difference(row: Row) -> str:
    """Format the difference of a row with half of its interval."""
    if row["difference"] is None:
        return "–"
    text = f"{row['difference']:+.4f}"
    if row["difference_interval"] is not None:
        half = row["difference_interval"][1] - row["difference"]
        text += f"\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}{half:.4f}"
    return text


def compare_runs(runs: Sequence[Run]) -> Comparison:
    """Compare runs by recipe and seed.

    The baseline is the most precise recipe with a finished run, a finite loss and no lost updates.
    Recipes without low-precision matmuls come first. Then more bytes per parameter, then the wider
    compute, then the order decide. Losses never decide, or the intervals would not hold (see the
    module).

    Args:
        runs: finished or not, in any order.
    Returns:
        The comparison.
    Raises:
        RecordError: a run is missing, or its record is damaged.
    Example:
        >>> from pathlib import Path
        >>> def run(recipe, seed, loss, size):
        ...     config = {"recipe": recipe, "seed": seed}
        ...     return Run(Path("a"), {"config": config}, summary={"val_loss": loss, "bytes_per_param": size})
        >>> losses = {("bfloat16/master", 0): 2.0, ("bfloat16/master", 1): 2.1}
        >>> losses |= {("bfloat16/word", 0): 2.001, ("bfloat16/word", 1): 2.0995}
        >>> sizes = {"bfloat16/master": 16.0, "bfloat16/word": 8.0}
        >>> comparison = compare_runs([run(name, seed, loss, sizes[name]) for (name, seed), loss in losses.items()])
        >>> print(comparison.verdict)
        bfloat16/word is the cheapest within the noise: 8.00 bytes per parameter, where bfloat16/master takes 16.00.
    """
    if not runs:
        raise RecordError(
            "Cannot compare because no run was named.", "Name run folders, or a comparison's."
        )
    groups = dict[str, list[Run]]()
    for run, label in zip(runs, run_labels(runs), strict=True):
        groups.setdefault(label, []).append(run)
    finished = {label: _finished(group) for label, group in groups.items()}
    rows = [_row(label, [*summaries.values()]) for label, summaries in finished.items()]
    base = max(rows, key=lambda row: _precision(row, groups[row["recipe"]][0]))
    base["verdict"] = base["verdict"] or BASELINE
    size = abs(base["val_loss"] or 0.0)
    references = finished[base["recipe"]]
    for row in rows:
        summaries = finished[row["recipe"]]
        pairs = []
        for key in summaries.keys() & references.keys():
            difference = summaries[key]["val_loss"] - references[key]["val_loss"]
            if math.isfinite(difference):
                pairs.append(difference)
        if pairs and row is not base:
            mean, half = interval(pairs)
            row["difference"] = mean
            if math.isfinite(half):
                row["difference_interval"] = [mean - half, mean + half]
        row["verdict"] = row["verdict"] or _verdict(row["difference_interval"], size)
    baseline = base["recipe"] if base["num_seeds"] else None
    return Comparison(rows, baseline, _sentence(rows, base), ACCEPTABLE * size)


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the mean of one difference per seed, and the half width of its 95 % interval; infinite
    for one seed.
    """
    mean = statistics.fmean(differences)
    size = len(differences)
    if size < 2:
        return mean, math.inf
    return mean, student_t(size - 1) * math.sqrt(statistics.variance(differences) / size)


# ── labels ────────────────────────────────────────────────────────────────────────────────────────
# Runs that differ only in their seed share a label. A label is for people: no code parses it.


def run_name(recipe: str, seed: int) -> str:
    """Return the folder name of a run within its comparison's folder."""
    name = re.sub(r"[^\w.+-]", "-", recipe.removesuffix(")").replace(" (", " "))
    return f"{name.strip('.') or 'recipe'}-seed{seed}"


def recipe_name(recipe: Any) -> str:
    """Return the label of a recipe: its full name, or the name itself if unknown."""
    try:
        return parse(recipe).name
    except NarrowgaugeError:
        return str(recipe)


def seed_of(run: Run) -> int:
    """Return the seed of a run; 0 if unrecorded."""
    return int(run.config.get("seed", 0))


def run_labels(runs: Sequence[Run]) -> list[str]:
    """Return a label per run, in their order: its recipe. Runs that differ only in their seed share
    it; if one recipe ran twice with one seed, its runs show their folders.

    Example:
        >>> from pathlib import Path
        >>> run_labels([Run(Path(name), {"config": {"recipe": "bf16/word"}}) for name in ("a", "b")])
        ['bfloat16/word (a)', 'bfloat16/word (b)']
    """
    labels = []
    for run in runs:
        # A folder may carry the name of another recipe.
        recipe = run.config.get("recipe")
        labels.append(run.path.name if recipe is None else recipe_name(recipe))
    counts = Counter(zip(labels, map(seed_of, runs), strict=True))
    repeated = {label for (label, _), count in counts.items() if count > 1}
    for place, run in enumerate(runs):
        if labels[place] in repeated:
            labels[place] += f" ({run.path})"
    return labels


# ── one recipe ────────────────────────────────────────────────────────────────────────────────────


def _finished(group: Sequence[Run]) -> dict[tuple[int, str], Row]:
    """Return the summaries with a validation loss, by what pairs runs: their seed and data."""
    summaries = {}
    for run in group:
        summary = run.summary or {}
        if number(summary.get("val_loss")) is not None:
            summaries[seed_of(run), run.data_fingerprint] = summary
    return summaries


def _row(label: str, finished: Sequence[Row]) -> Row:
    summaries = [summary for summary in finished if math.isfinite(summary["val_loss"])]
    row: Row = {"recipe": label}
    for metric in METRICS:
        name = metric.name
        known = [summary[name] for summary in summaries if summary.get(name) is not None]
        row[name] = _OVER[metric.over](known) if known else None
    row |= {"num_seeds": len(summaries), "difference": None, "difference_interval": None}
    row["verdict"] = ""
    errors = [summary.get("edq_error") or 0.0 for summary in summaries]
    if len(finished) > len(summaries):
        row["verdict"] = "diverged"
    elif not summaries:
        row["verdict"] = "no final validation loss"
    elif row["edq"] is not None and loses_updates(row["edq"], statistics.median(errors)):
        row["verdict"] = "loses its updates"
    return row


def _precision(row: Row, run: Run) -> tuple[bool, bool, bool, float, int]:
    """Return what orders recipes: the baseline is the most precise one without faults."""
    recipe = recipe_of(run)
    bits = 0 if recipe is None else _WIDTHS.get(recipe.compute.name, 0)
    size = round(row["bytes_per_param"] or 0.0, 1)
    return row["num_seeds"] > 0, not row["verdict"], bits > 0, size, bits


def _verdict(limits: Sequence[float] | None, loss: float) -> str:
    """Return a recipe's verdict from the interval of its difference to the baseline's loss."""
    if limits is None:
        return "no interval"
    low, high = limits
    if low > 0 and high > NEGLIGIBLE * loss:
        return "worse"
    if high < 0 and -low > NEGLIGIBLE * loss:
        return "better"
    if high > ACCEPTABLE * loss:
        return "not distinguishable"
    return "within the noise"


def _sentence(rows: Sequence[Row], base: Row) -> str:
    """Return the sentence about the only recipe, or the cheapest that is as good as the baseline: in
    bytes per parameter, then in time. Less than a tenth of a byte is a few norm weights, no saving.
    """
    name = base["recipe"]
    if len(rows) > 1 and all(row["difference"] is None for row in rows):
        return "No two recipes have finished runs of one seed on the same data, so nothing is compared."
    if base["verdict"] != BASELINE:
        return f"No recipe is named. {name}: {base['verdict']}."
    if len(rows) == 1:
        return f"{name} ends at a validation loss of {base['val_loss']:.4f}."
    fit = [row for row in rows if row["verdict"] in FIT and row["bytes_per_param"] is not None]
    fit.sort(key=lambda row: (-(row["tokens_per_second"] or 0.0), row is not base))
    best = min(fit, key=lambda row: round(row["bytes_per_param"], 1), default=base)
    if best is base:
        return f"No smaller recipe is known to be as good as {name}."
    size = SUMMARY["bytes_per_param"].cell
    return (
        f"{best['recipe']} is the cheapest within the noise: {size(best)} bytes per parameter, "
        f"where {name} takes {size(base)}."
    )
