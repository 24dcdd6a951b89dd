"""Launches: read jobs from settings files, and explain why one is slower than another.

A launch file has the settings of ``narrowgauge train`` that affect the step time, and the machine of the job::

    model = "llama-8b"
    recipe = "bfloat16/word"
    batch_size = 64
    sequence_length = 8192

    [cluster]
    chip = "H100-SXM"
    chips = 64
    interconnect_gbit_per_second = 3200

    [measured]
    step_seconds = 3.9

Other settings of a training run may appear there. They are ignored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from narrowgauge.errors import DataError, NarrowgaugeError
from narrowgauge.planner.clusters import cluster_in, read_table
from narrowgauge.planner.jobs import Job
from narrowgauge.planner.layouts import Layout
from narrowgauge.planner.model import read_model
from narrowgauge.planner.plan_tables import changes_table
from narrowgauge.planner.step_time import UNSTEADY_GROUP
from narrowgauge.planner.terms import Change, Terms, changes
from narrowgauge.planner.units import duration_text
from narrowgauge.runs.finding import counted
from narrowgauge.spec.notation import parse
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.tables import Row, Table, number_columns, text_columns

Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Launch:
    """Describe a started job; ``measured`` is the seconds of a step, None if unknown."""

    name: str
    job: Job
    measured: float | None = None


def read_launch(path: str | Path) -> Launch:
    """Read a launch from a TOML file."""
    path = Path(path).expanduser()
    table = read_table(path, "launch", "It is a TOML file of settings with a table [cluster].")
    cluster, measured = (table.get(name, {}) for name in ("cluster", "measured"))
    if not isinstance(cluster, dict) or not isinstance(measured, dict):
        raise DataError(f"{path}: [cluster] or [measured] is no table.", "Write [cluster] with chip and chips below.")
    seconds = measured.get("step_seconds")
    if seconds is not None and (type(seconds) not in (int, float) or not seconds > 0):
        raise DataError(f"{path}: step_seconds = {seconds!r} is no time.", "Write seconds above zero.")
    machine = cluster_in(path, cluster)
    recipe, model = (_required(table, key, str(path)) for key in ("recipe", "model"))
    layout, length = layout_of(table, machine.chips, str(path)), _count(table, "sequence_length", str(path))
    return Launch(path.name, Job(read_model(str(model)), parse(recipe), layout, machine, length), seconds)


def layout_of(table: Settings, num_ranks: int, where: str) -> Layout:
    """Return the layout of ``narrowgauge train`` for these settings and ranks.

    With unequal numbers of micro-batches, all ranks wait for the largest number. ``where`` names the settings in messages.

    Example:
        >>> table = {"batch_size": 16, "gradient_accumulation_steps": 8, "replicas": 2}
        >>> layout = layout_of(table, 4, "here")
        >>> layout.data, layout.shard, layout.micro_batch, layout.micro_batches
        (2, 2, 2, 2)
    """
    if table.get("offload"):
        raise DataError(f"{where}: with offload the state moves between host and device.", "Plan it without.")
    batch = _count(table, "batch_size", where)
    pieces = _count(table, "gradient_accumulation_steps", where, default=num_ranks)
    replicas = _count(table, "replicas", where, default=1)
    if batch % pieces or num_ranks % replicas or pieces < num_ranks:
        raise DataError(
            f"{where}: a batch of {batch} sequences in {pieces} micro-batches does not suit {num_ranks} ranks in "
            f"{counted(replicas, 'replica')}.",
            "Each micro-batch has as many sequences, and each rank one micro-batch or more.",
        )
    is_sharded = num_ranks > 1 and table.get("shard", "full") == "full"
    return Layout(
        data=replicas if is_sharded else num_ranks,
        shard=num_ranks // replicas if is_sharded else 1,
        zero=3 if is_sharded else 0,
        micro_batch=batch // pieces,
        micro_batches=-(-pieces // num_ranks),
        recompute="full" if table.get("activation_checkpointing") else "none",
        accumulation_dtype=str(table.get("accumulation_dtype") or "float32"),
    )


def _required(table: Settings, key: str, where: str) -> Any:
    if table.get(key) is None:
        advice = "A launch needs model, recipe, batch_size, sequence_length."
        raise DataError(f"{where} does not say its {key}.", advice)
    return table[key]


def _count(table: Settings, key: str, where: str, default: int | None = None) -> int:
    value = default if default is not None and table.get(key) is None else _required(table, key, where)
    if type(value) is not int or value < 1:
        raise DataError(f"{where}: {key} = {value!r} is not a whole number above zero.", f"Write {key} = 8.")
    return value


# ── regression: two launches, which term of the step became slower, and which setting did it ──────────────────────────────

_LEAST = 0.002
"""Fraction of a step below which a change of a term is not shown."""


@dataclass(frozen=True, slots=True)
class Regression:
    """Hold two launches of one job, for the later tokens per step.

    Args:
        steps: rows of the modelled step and, if both were measured, the measured one: seconds before and after. Measured
            slowdown beyond the model comes from software, machine, ranks or data.
        changes: of each modelled term, the largest first.
        effects: rows of the differing settings, the largest effect first. Alone a setting adds ``seconds``, None if it cannot
            change alone.
    """

    title: str
    steps: list[Row]
    changes: tuple[Change, ...]
    effects: list[Row]

    def tables(self) -> list[Table]:
        """Return the slowdown of a step, the changes of its terms, and the effect of each setting alone."""
        steps = number_columns(
            before=lambda row: duration_text(row["before"]),
            after=lambda row: duration_text(row["after"]),
            difference=lambda row: f"{row['after'] - row['before']:+.3g} s",
            share=lambda row: f"{row['after'] / row['before'] - 1:+.1%}",
        )
        alone = number_columns(alone=lambda row: "not alone" if row["seconds"] is None else f"{row['seconds']:+.3g} s")
        settings = text_columns(setting="setting", before="before", after="after")
        return [
            Table((*text_columns(step="step"), *steps), self.steps, self.title),
            changes_table(self.changes, "Terms of the modelled step", _LEAST * self.steps[0]["after"]),
            Table((*settings, *alone), self.effects, "What each setting does alone"),
        ]

    def row(self) -> Row:
        """Return plain values, for JSON."""
        return {
            "steps": self.steps,
            "terms": [dataclasses.asdict(change) for change in self.changes],
            "settings": self.effects,
        }


def compare_launches(before: Launch, after: Launch) -> Regression:
    """Compare two launches of one job: their steps, and the effect of each differing setting alone."""
    old, new = _steady(before.job), _steady(after.job)
    tokens = after.job.tokens_per_step
    scale = tokens / before.job.tokens_per_step
    steps = [{"step": "modelled", "before": scale * old.total, "after": new.total}]
    if before.measured is not None and after.measured is not None:
        steps.append({"step": "measured", "before": scale * before.measured, "after": after.measured})
    effects: list[Row] = [
        {"setting": name, "before": _text(was), "after": _text(now), "seconds": _alone(before.job, changed)}
        for name, was, now, changed in _differences(before.job, after.job)
    ]
    effects.sort(key=lambda row: -abs(row["seconds"] or 0.0))
    return Regression(
        f"A step of {tokens:,} tokens: {before.name}, {after.name}", steps, changes(old, new, scale), effects
    )


def _steady(job: Job) -> Terms:
    """Return the planned step without checkpoints, which measured steps leave out."""
    return job.step.without(UNSTEADY_GROUP)


def _alone(before: Job, fields: Mapping[str, Any]) -> float | None:
    """Return the seconds that changed fields add to a step; None if they need another changed setting."""
    try:
        job = replace(before, **{
            name: replace(getattr(before, name), **value) if isinstance(value, dict) else value
            for name, value in fields.items()
        })  # fmt: skip
        return _steady(job).total * before.tokens_per_step / job.tokens_per_step - _steady(before).total
    except NarrowgaugeError:
        return None


def _differences(before: Job, after: Job) -> Iterator[tuple[str, Any, Any, dict[str, Any]]]:
    """Yield differing settings: name, both values, and the fields of the job to change, or of its layout or cluster."""
    for name in ("architecture", "recipe", "sequence_length"):
        was, now = getattr(before, name), getattr(after, name)
        if was != now:
            yield "model" if name == "architecture" else name, was, now, {name: now}
    # Axes multiply to the number of chips. So they change together, and with the chips if these changed.
    old, new, axes = before.layout, after.layout, ("data", "shard", "zero")
    differing = [name for name in axes if getattr(old, name) != getattr(new, name)]
    has_other_size = before.hardware.chips != after.hardware.chips
    if differing or has_other_size:
        was, now = (
            f"{', '.join(f'{name} {getattr(job.layout, name)}' for name in differing)} on {job.hardware.chips} chips"
            for job in (before, after)
        )
        sizes = {name: getattr(after.hardware, name) for name in ("chips", "chips_per_node")} if has_other_size else {}
        yield "parallelism", was, now, {"layout": {name: getattr(new, name) for name in axes}, "cluster": sizes}
    for name, was, now in _fields(old, new, axes):
        yield name, was, now, {"layout": {name: now}}
    skipped = ("chips", "dollars_per_hour", "name", *(["chips_per_node"] if has_other_size else []))
    for name, was, now in _fields(before.hardware, after.hardware, skipped):
        yield name, was, now, {"cluster": {name: now}}


def _fields(before: Any, after: Any, skipped: tuple[str, ...]) -> Iterator[tuple[str, Any, Any]]:
    for field in dataclasses.fields(before):
        was, now = getattr(before, field.name), getattr(after, field.name)
        if field.name not in skipped and was != now:
            yield field.name, was, now


def _text(value: Any) -> str:
    if value is None:
        return "as printed"
    if isinstance(value, float):
        return f"{value:g}"
    return value.title if isinstance(value, Recipe) else str(getattr(value, "name", value))
