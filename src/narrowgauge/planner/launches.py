"""Launches: read jobs from settings files, and explain why one is slower than another.

A launch file names the job, its layout and its machine::

    model = "llama-8b"
    recipe = "bfloat16/word"
    sequence_length = 8192
    step_seconds = 3.9      # optional: measured

    [layout]
    shard = 64
    micro_batches = 2

    [cluster]
    chip = "H100-SXM"
    chips = 64
    interconnect_gbit_per_second = 3200
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.errors import DataError, NarrowgaugeError, suggestion
from narrowgauge.planner.clusters import cluster_in, read_table
from narrowgauge.planner.jobs import Job
from narrowgauge.planner.layouts import Layout, read_layout
from narrowgauge.planner.model import read_model
from narrowgauge.planner.step_time import UNSTEADY_GROUP
from narrowgauge.planner.terms import changes
from narrowgauge.planner.units import duration_text
from narrowgauge.spec.notation import parse
from narrowgauge.spec.tables import Row, Table, number_columns, text_columns

Settings = Mapping[str, Any]
_TABLES = ("layout", "cluster")
_KNOWN = ("model", "recipe", "sequence_length", *_TABLES)
_LEAST_SHARE = 0.002  # of a step: smaller changes of a term are not shown


@dataclass(frozen=True, slots=True)
class Launch:
    """Describe a started job.

    Args:
        settings: of its file, tables with a point: ``{"recipe": "bfloat16/word", "cluster.chips": 64}``.
        measured: seconds of a step; None if unknown.
    """

    name: str
    settings: Settings
    job: Job
    measured: float | None = None


def read_launch(path: str | Path) -> Launch:
    """Read a launch from a TOML file."""
    path = Path(path).expanduser()
    table = read_table(path, "launch", "It is a TOML file of a model, a recipe, a [layout] and a [cluster].")
    seconds = table.pop("step_seconds", None)
    if seconds is not None and (type(seconds) not in (int, float) or not seconds > 0):
        raise DataError(f"{path}: step_seconds = {seconds!r} is no time.", "Write seconds above zero.")
    for name in table:
        if name not in _KNOWN:
            advice = suggestion(name, _KNOWN) or f"Known: {', '.join(_KNOWN)}, step_seconds."
            raise DataError(f"{path}: no setting is named {name!r}.", advice)
    for name in _KNOWN:
        if not isinstance(table.get(name), dict if name in _TABLES else (str, int)):
            raise DataError(f"{path} does not say its {name}.", f"A launch needs {', '.join(_KNOWN)}.")
    settings = {name: table[name] for name in _KNOWN if name not in _TABLES}
    settings |= {f"{name}.{key}": value for name in _TABLES for key, value in table[name].items()}
    return Launch(path.name, settings, job_of(settings, str(path)), seconds)


def job_of(settings: Settings, where: str) -> Job:
    """Return the job of a launch's settings. ``where`` names them in messages."""
    layout, machine = (
        {key.removeprefix(f"{name}."): value for key, value in settings.items() if key.startswith(f"{name}.")}
        for name in _TABLES
    )
    cluster, axes, length = cluster_in(Path(where), machine), Layout(**read_layout(layout)), settings["sequence_length"]
    if type(length) is not int or length < 1:
        raise DataError(f"{where}: sequence_length = {length!r} is no number of tokens.", "Write 4096.")
    if axes.num_ranks != cluster.chips:
        raise DataError(f"{where}: its layout has {axes.num_ranks} ranks for {cluster.chips} chips.", "Use every chip.")
    return Job(read_model(str(settings["model"])), parse(settings["recipe"]), axes, cluster, length)


# ── regression: two launches, which term of the step became slower, and which setting did it ──────────────────────────────


@dataclass(frozen=True, slots=True)
class Regression:
    """Hold two launches of one job, for the later tokens per step.

    Args:
        steps: rows of the modelled step and, if both were measured, the measured one: seconds before and after. Measured
            slowdown beyond the model comes from software, machine, ranks or data.
        terms: rows of the modelled terms, the largest change first.
        settings: rows of the changed settings, the largest effect first. Alone a setting adds ``seconds``, None if it cannot
            change alone.
    """

    title: str
    steps: list[Row]
    terms: list[Row]
    settings: list[Row]

    def tables(self) -> list[Table]:
        """Return the slowdown of a step, the changes of its terms, and the effect of each setting alone."""
        least = _LEAST_SHARE * self.steps[0]["after"]
        terms = [row for row in self.terms if abs(row["after"] - row["before"]) > least]
        times = number_columns(
            before=lambda row: duration_text(row["before"]),
            after=lambda row: duration_text(row["after"]),
            difference=lambda row: f"{row['after'] - row['before']:+.3g} s",
        )
        share = number_columns(share=lambda row: f"{row['after'] / row['before'] - 1:+.1%}")
        formula = text_columns(formula="formula")
        alone = number_columns(alone=lambda row: "not alone" if row["seconds"] is None else f"{row['seconds']:+.3g} s")
        settings = text_columns(setting="setting", before="before", after="after")
        return [
            Table((*text_columns(step="step"), *times, *share), self.steps, self.title),
            Table((*text_columns(group="group", term="name"), *times, *formula), terms, "Terms of the modelled step"),
            Table((*settings, *alone), self.settings, "What each setting does alone"),
        ]


def compare_launches(before: Launch, after: Launch) -> Regression:
    """Compare two launches of one job: their steps, and the effect of each differing setting alone.

    Checkpoints do not count, since measured steps leave them out. Settings without effect are left out.
    """
    tokens = after.job.tokens_per_step

    def seconds(job: Job) -> float:
        return job.step.without(UNSTEADY_GROUP).total * tokens / job.tokens_per_step

    old, new = seconds(before.job), seconds(after.job)
    scale = tokens / before.job.tokens_per_step
    steps: list[Row] = [{"step": "modelled", "before": old, "after": new}]
    if before.measured is not None and after.measured is not None:
        steps.append({"step": "measured", "before": scale * before.measured, "after": after.measured})
    settings: list[Row] = []
    for name in dict.fromkeys([*before.settings, *after.settings]):
        was, now = before.settings.get(name), after.settings.get(name)
        changed = {key: value for key, value in {**before.settings, name: now}.items() if value is not None}
        try:
            added = seconds(job_of(changed, after.name)) - old
        except NarrowgaugeError:
            added = None
        if added != 0:
            settings.append({"setting": name, "before": was, "after": now, "seconds": added})
    settings.sort(key=lambda row: -abs(row["seconds"] or 0.0))
    terms = changes(*(launch.job.step.without(UNSTEADY_GROUP) for launch in (before, after)), scale)
    return Regression(f"A step of {tokens:,} tokens: {before.name}, {after.name}", steps, terms, settings)
