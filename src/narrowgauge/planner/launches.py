"""Launches: read started jobs from a settings file or a run folder, and explain why one is slower than another.

A launch file has the settings of ``narrowgauge train`` that affect the step time, and the machine of the job::

    model = "llama-8b"
    recipe = "bfloat16/word"
    batch_size = 64
    sequence_length = 8192

    [cluster]                 # or cluster = "cluster.toml"
    chip = "H100-SXM"
    chips = 64
    interconnect_gbit_per_second = 3200

    [layout]                  # for layouts that train does not run; it also sets the batch
    shard = 64
    micro_batches = 1

    [measured]
    step_seconds = 3.9        # or tokens_per_second

Other settings of a training run may appear there. They are ignored.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from narrowgauge.errors import ChipError, DataError, NarrowgaugeError, RecordError
from narrowgauge.planner.clusters import Cluster, cluster_in, cluster_of, read_cluster, read_table
from narrowgauge.planner.jobs import Job
from narrowgauge.planner.layouts import Layout, read_layout
from narrowgauge.planner.model import read_model
from narrowgauge.planner.plan_tables import changes_table
from narrowgauge.planner.scaling_laws import MeasuredTime
from narrowgauge.planner.step_time import step_terms
from narrowgauge.planner.terms import Change, Terms, changes
from narrowgauge.planner.units import duration_text
from narrowgauge.runs.finding import counted
from narrowgauge.runs.record import Run, read_run
from narrowgauge.spec.chips import Chip
from narrowgauge.spec.notation import parse
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.tables import Row, Table, number_columns, text_columns

Settings = Mapping[str, Any]


LEAST_STEPS = 6
"""Minimum number of steps of a run. The first two compile and are left out."""
_WARM_UP = 2


@dataclass(frozen=True, slots=True)
class Launch:
    """Describe a started job; ``measured`` is the seconds of a step, None if unknown."""

    name: str
    job: Job
    measured: float | None = None


def read_launch(path: str | Path, chip: Chip | None = None) -> Launch:
    """Read a launch from a TOML file or a run folder. ``chip`` is the default chip, as for run folders."""
    path = Path(path).expanduser()
    where = str(path)
    if path.is_dir():
        run = read_run(path)
        if chip is None:
            raise ChipError(f"the run {path} does not say on which chip of the table it ran.", "Add --chip NAME.")
        ranks = ranks_of(run)
        layout, cluster = layout_of(run.config, ranks, where), cluster_of(chip, ranks, ranks)
        return Launch(path.name, _job(run.config, layout, cluster, where), step_seconds(run))
    table = read_table(path, "launch", "It is a TOML file of settings, or a run folder.")
    fixed = _layout(table["layout"]) if "layout" in table else None
    cluster = _cluster(table, path, chip, fixed)
    job = _job(table, fixed or layout_of(table, cluster.num_chips, where), cluster, where)
    return Launch(path.name, job, _measured(table.get("measured"), job, path))


def ranks_of(run: Run) -> int:
    return int(run.run.get("machine", {}).get("ranks", 1))


def step_seconds(run: Run) -> float:
    """Return the median seconds of a run's steps. Raise for fewer than ``LEAST_STEPS`` steps."""
    timed = [float(row["seconds"]) for row in run.steps if row.get("seconds")]
    if len(timed) < LEAST_STEPS:
        raise RecordError(
            f"the time of {run.path} was requested, which has {len(timed)} timed steps; {LEAST_STEPS} are needed.",
            "Train a few steps more: narrowgauge resume.",
        )
    return statistics.median(timed[_WARM_UP:])


def measured_times(runs: Sequence[Run]) -> tuple[MeasuredTime, ...]:
    """Return step times of runs with one model, recipe and tokens per step on different numbers of ranks."""
    for key in ("model", "recipe", "sequence_length"):
        values = {str(run.config.get(key)) for run in runs}
        if len(values) > 1:
            raise RecordError(
                f"runs of one job were requested, and these differ in {key}: {', '.join(sorted(values))}.",
                "Name runs that differ in the number of ranks only.",
            )
    if len({ranks_of(run) for run in runs}) < 2:
        raise RecordError(f"all of these runs have {counted(ranks_of(runs[0]), 'rank')}.", "Add one on more ranks.")
    batch = int(runs[0].config["batch_size"])
    return tuple(MeasuredTime(ranks_of(run), step_seconds(run) * batch / int(run.config["batch_size"])) for run in runs)


def _job(table: Settings, layout: Layout, cluster: Cluster, where: str) -> Job:
    recipe = parse(_required(table, "recipe", where), where)
    model = read_model(str(_required(table, "model", where)))
    return Job(model, recipe, layout, cluster, _count(table, "sequence_length", where))


def layout_of(table: Settings, num_ranks: int, where: str) -> Layout:
    """Return the layout of ``narrowgauge train`` for these settings and ranks.

    With unequal numbers of micro-batches, all ranks wait for the largest number. ``where`` names the settings in messages.

    Example:
        >>> table = {"batch_size": 16, "gradient_accumulation_steps": 8, "replicas": 2}
        >>> layout = layout_of(table, 4, "here")
        >>> layout.data, layout.shard, layout.micro_batch, layout.micro_batches
        (2, 2, 2, 2)
    """
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
        offload="all" if table.get("offload") else "none",
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


def _layout(table: Any) -> Layout:
    if not isinstance(table, dict):
        raise DataError(f"[layout] is {table!r}.", "For instance [layout] with shard = 8 and micro_batches = 4.")
    return Layout(**read_layout(table))


def _cluster(table: Settings, path: Path, chip: Chip | None, layout: Layout | None) -> Cluster:
    cluster = table.get("cluster")
    if isinstance(cluster, str):
        return read_cluster(path.parent / Path(cluster).expanduser())
    if cluster is None and chip is not None:
        return cluster_of(chip, layout.num_ranks if layout else 1)
    if not isinstance(cluster, dict) or not {"chip", "chips"} <= cluster.keys():
        raise ChipError(f"{path} does not say where it runs.", 'Add [cluster] with chip = "H100-SXM" and chips = 8.')
    return cluster_in(path, {**cluster, "chips": _count(cluster, "chips", f"{path}, [cluster]")})


def _measured(table: Any, job: Job, path: Path) -> float | None:
    if table is None:
        return None
    entries: list[tuple[str, Any]] = list(table.items()) if isinstance(table, dict) else []
    (key, value), *more = entries or [("", None)]
    if more or key not in ("step_seconds", "tokens_per_second") or type(value) not in (int, float) or not value > 0:
        raise DataError(f"{path}: [measured] is {table!r}.", "Write step_seconds or tokens_per_second, above zero.")
    return float(value) if key == "step_seconds" else job.tokens_per_step / value


# ── regression: two launches, which term of the step became slower, and which setting did it ──────────────────────────────

_AXES = ("data", "shard", "zero", "tensor", "pipeline", "interleave", "context", "expert")
_LEAST = 0.002
"""Fraction of a step below which a change of a term is not shown."""


@dataclass(frozen=True, slots=True)
class Effect:
    """Describe a setting that differs between two launches; alone it adds ``seconds``, None if it cannot change alone."""

    name: str
    before: str
    after: str
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Regression:
    """Hold two launches with modelled steps, and the effect of each differing setting, the largest first."""

    before: Launch
    after: Launch
    before_step: Terms
    after_step: Terms
    effects: tuple[Effect, ...]

    @property
    def scale(self) -> float:
        """Return the ratio of tokens per step, after over before. Times before are multiplied by it."""
        return self.after.job.tokens_per_step / self.before.job.tokens_per_step

    @property
    def changes(self) -> tuple[Change, ...]:
        """Return the change of each modelled term, the largest first, for the later tokens per step."""
        return changes(self.before_step, self.after_step, self.scale)

    @property
    def explained(self) -> float:
        """Return the seconds by which the modelled step grew."""
        return self.after_step.total - self.scale * self.before_step.total

    @property
    def measured(self) -> float | None:
        """Return the seconds by which the measured step grew; None unless both launches were measured."""
        if self.before.measured is None or self.after.measured is None:
            return None
        return self.after.measured - self.scale * self.before.measured

    def tables(self) -> list[Table]:
        """Return the slowdown of a step, the changes of its terms, and the effect of each setting alone.

        Measured slowdown beyond the model comes from software, machine, ranks or data.
        """
        steps = [_step_row("modelled", self.scale * self.before_step.total, self.after_step.total)]
        if self.before.measured is not None and self.after.measured is not None:
            steps.append(_step_row("measured", self.scale * self.before.measured, self.after.measured))
        numbers = number_columns(before="before", after="after", difference="difference", share="share")
        title = f"A step of {self.after.job.tokens_per_step:,} tokens: {self.before.name}, {self.after.name}"
        alone = number_columns(alone=lambda e: "not alone" if e.seconds is None else f"{e.seconds:+.3g} s")
        columns = (*text_columns(setting="name", before="before", after="after"), *alone)
        return [
            Table((*text_columns(step="name"), *numbers), steps, title),
            changes_table(self.changes, "Terms of the modelled step", _LEAST * self.after_step.total),
            Table(columns, list(self.effects), "What each setting does alone"),
        ]

    def row(self) -> Row:
        """Return plain values, for JSON."""
        return {
            "before": {"name": self.before.name, "seconds": self.scale * self.before_step.total},
            "after": {"name": self.after.name, "seconds": self.after_step.total},
            "tokens": self.after.job.tokens_per_step,
            "terms": [
                {"group": c.group, "name": c.name, "before": c.before, "after": c.after, "difference": c.difference}
                for c in self.changes
            ],
            "settings": [dataclasses.asdict(effect) for effect in self.effects],
            "explained_seconds": self.explained,
            "measured_seconds": self.measured,
        }


def _step_row(name: str, before: float, after: float) -> Row:
    return {"name": name, "before": duration_text(before), "after": duration_text(after),
            "difference": f"{after - before:+.3g} s", "share": f"{after / before - 1:+.1%}"}  # fmt: skip


def compare_launches(before: Launch, after: Launch) -> Regression:
    """Compare two launches of one job: their steps, and the effect of each differing setting alone."""
    if before.name == after.name:
        before, after = replace(before, name=f"{before.name} (before)"), replace(after, name=f"{after.name} (after)")
    old, new = _planned(before.job), _planned(after.job)
    effects = []
    for name, was, now, job in _differences(before.job, after.job):
        try:
            seconds = (
                _planned(job).total * before.job.tokens_per_step / job.tokens_per_step - old.total if job else None
            )
        except NarrowgaugeError:  # the setting needs another changed setting
            seconds = None
        effects.append(Effect(name, _text(was), _text(now), seconds))
    effects.sort(key=lambda effect: -abs(effect.seconds or 0.0))
    return Regression(before, after, old, new, tuple(effects))


def _planned(job: Job) -> Terms:
    """Return the planned step without checkpoints and failures, which measured steps leave out."""
    return step_terms(job).without("checkpoints", "faults")


def _differences(before: Job, after: Job) -> Iterator[tuple[str, Any, Any, Job | None]]:
    """Yield differing settings: name, both values, and the first job with the second value, or None if invalid."""
    for name in ("architecture", "recipe", "sequence_length"):
        was, now = getattr(before, name), getattr(after, name)
        if was != now:
            yield "model" if name == "architecture" else name, was, now, replace(before, **{name: now})
    old, new = before.layout, after.layout
    axes = {name: getattr(new, name) for name in _AXES}
    if any(getattr(old, name) != size for name, size in axes.items()):
        # Axes multiply to the number of chips. So they change together, and with the chips if these changed.
        is_same_size = old.num_ranks == new.num_ranks
        job = replace(before, layout=replace(old, **axes), cluster=before.cluster if is_same_size else after.cluster)
        differing = [name for name, size in axes.items() if getattr(old, name) != size]
        was, now = (", ".join(f"{name} {getattr(layout, name)}" for name in differing) for layout in (old, new))
        yield (
            "parallelism",
            *((was, now) if is_same_size else (f"{was} on {before.cluster}", f"{now} on {after.cluster}")),
            job,
        )
    for name, was, now in _fields(old, new, _AXES):
        yield name, was, now, replace(before, layout=replace(old, **{name: now}))
    a, b = before.cluster, after.cluster
    if len(a.groups) != 1 or len(b.groups) != 1:
        if a != b:
            yield "cluster", str(a), str(b), replace(before, cluster=b)
        return
    [was], [now] = a.groups, b.groups
    # A layout with another number of ranks also changes the chips.
    skipped = ("count", "dollars_per_hour", *(["chips"] if old.num_ranks != new.num_ranks else []))
    for name, first, second in _fields(was, now, skipped):
        nodes = replace(was, **{name: second})
        if name == "chips":  # the same chips in nodes of another size
            nodes = replace(nodes, count=was.num_chips // second)
        is_possible = nodes.num_chips == was.num_chips
        job = replace(before, cluster=replace(a, groups=(nodes,)))
        yield "chips of a node" if name == "chips" else name, first, second, job if is_possible else None
    for name, first, second in _fields(a, b, ("groups", "name")):
        yield name, first, second, replace(before, cluster=replace(a, **{name: second}))


def _fields(before: Any, after: Any, skipped: Sequence[str]) -> Iterator[tuple[str, Any, Any]]:
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
