"""Launches: jobs as they were started, read from a file of settings or from the folder of a run, and where their steps went.

A launch file has the settings of ``narrowgauge train`` that decide how long a step takes, and says where the job runs::

    model = "llama-8b"
    recipe = "bfloat16/word"
    batch_size = 64
    sequence_length = 8192

    [cluster]                 # or cluster = "cluster.toml"
    chip = "H100-SXM"
    chips = 64
    interconnect_gbit_per_second = 3200

    [layout]                  # for layouts that train does not run; it then decides the batch as well
    shard = 64
    micro_batches = 1

    [measured]
    step_seconds = 3.9        # or tokens_per_second

Other settings of a training run may stand there too and are not read.

A run on several ranks records how long its ranks were in collectives on average, and how long the others waited there for the
slowest one. So a measured step splits into computing, sending and waiting without a guess. Steps whose update was not applied,
and those that a rollback undid, are added to the steps that count: what they cost is the price of numerics and of faults. Two
runs of the same work on different numbers of ranks then say what was lost: each part of the larger one, less what it should have
been had all work been divided.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from narrowgauge.errors import ChipError, DataError, RecordError
from narrowgauge.planner.formatting import duration_text
from narrowgauge.planner.inputs.clusters import Cluster, cluster_in, cluster_of, read_cluster, read_table
from narrowgauge.planner.inputs.efficiency import Shares
from narrowgauge.planner.inputs.jobs import Job
from narrowgauge.planner.inputs.layouts import Layout
from narrowgauge.planner.inputs.model_configs import read_architecture
from narrowgauge.planner.measured.least_squares import SIGMAS
from narrowgauge.planner.measured.scaling_law import MeasuredTime, bottlenecks_of
from narrowgauge.planner.terms import Change, Term, Terms, changes
from narrowgauge.planner.time.step_time import step_terms
from narrowgauge.runs.finding import counted
from narrowgauge.runs.record import Run, read_run
from narrowgauge.spec.chips import Chip
from narrowgauge.spec.notation import parse_value

Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LaunchedJob:
    """A job as it was started, and where it was measured the seconds of a step by part."""

    name: str
    job: Job
    measured: Terms | None = None


def planned_step(job: Job, shares: Shares | None, *, has_intervals: bool = True) -> Terms:
    """A step as planned, without what a measured step leaves out: checkpoints and failures."""
    step = step_terms(dataclasses.replace(job, shares=shares), has_intervals=has_intervals)
    return step.without("checkpoints", "faults")


def read_launch(path: str | Path, chip: Chip | None = None) -> LaunchedJob:
    """Read a launch from a TOML file or a run folder; ``chip`` runs it where the launch does not say, as run folders do not."""
    path = Path(path).expanduser()
    if path.is_dir():
        return _of_run(path, chip)
    table = read_table(path, "launch", "It is a TOML file of settings, or a run folder.")
    measured = _measured(table, path)
    cluster = _cluster(table, path, chip)
    own = table.get("layout")
    layout = _layout(own, path) if own is not None else layout_of(table, cluster.num_chips, str(path))
    launch = _launch(path.name, table, layout, cluster, str(path))
    if isinstance(measured, float):
        measured = _measured_terms(launch.job.tokens_per_step / measured, path)
    return dataclasses.replace(launch, measured=measured)


def _of_run(path: Path, chip: Chip | None) -> LaunchedJob:
    run = read_run(path)
    measured: MeasuredStep = measured_step(run)
    if chip is None:
        raise ChipError(
            f"the run {path} does not say on which chip of the table it ran.", "Add --chip NAME, or --chip here."
        )
    ranks = measured.num_ranks
    launch = _launch(
        path.name, run.config, layout_of(run.config, ranks, str(path)), cluster_of(chip, ranks, ranks), str(path)
    )
    inside = Terms(tuple(term for term in measured.terms if term.group != "outside"))
    return dataclasses.replace(launch, measured=inside)


def _launch(name: str, table: Settings, layout: Layout, cluster: Cluster, where: str) -> LaunchedJob:
    recipe = parse_value(_required(table, "recipe", where), where)
    architecture = read_architecture(str(_required(table, "model", where)))
    return LaunchedJob(name, Job(architecture, recipe, layout, cluster, _whole(table, "sequence_length", where)))


def layout_of(table: Settings, num_ranks: int, where: str) -> Layout:
    """How ``narrowgauge train`` spreads a job of these settings over ranks.

    With unequal numbers of micro-batches, ranks wait for those with the most. ``where`` the settings stand is for messages.

    Example:
        >>> table = {"batch_size": 16, "gradient_accumulation_steps": 8, "replicas": 2}
        >>> layout = layout_of(table, 4, "here")
        >>> layout.data, layout.shard, layout.micro_batch, layout.micro_batches
        (2, 2, 2, 2)
    """
    batch, pieces = (
        _whole(table, "batch_size", where),
        _whole(table, "gradient_accumulation_steps", where, default=num_ranks),
    )
    replicas = _whole(table, "replicas", where, default=1)
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
        raise DataError(
            f"{where} does not say its {key}.", "A launch needs model, recipe, batch_size, sequence_length."
        )
    return table[key]


def _whole(table: Settings, key: str, where: str, default: int | None = None) -> int:
    value = default if default is not None and table.get(key) is None else _required(table, key, where)
    if type(value) is not int or value < 1:
        raise DataError(f"{where}: {key} = {value!r} is not a whole number above zero.", f"Write {key} = 8.")
    return value


def _layout(table: Any, path: Path) -> Layout:
    known = {field.name: field for field in dataclasses.fields(Layout)}
    if not isinstance(table, dict) or (unknown := sorted(table.keys() - known.keys())):
        found = f"the key {unknown[0]!r}" if isinstance(table, dict) else f"{table!r}"
        raise DataError(f"{path}: [layout] has {found}.", f"Known: {', '.join(known)}.")
    for name, value in table.items():
        if type(value) is not type(known[name].default):
            raise DataError(
                f"{path}: [layout] has {name} = {value!r}.", f"For instance {name} = {known[name].default!r}."
            )
    return Layout(**table)


def _cluster(table: Settings, path: Path, chip: Chip | None) -> Cluster:
    given = table.get("cluster")
    if isinstance(given, str):
        return read_cluster(path.parent / Path(given).expanduser())
    if given is None and chip is not None:
        layout = table.get("layout")
        return cluster_of(chip, _layout(layout, path).num_ranks if layout is not None else 1)
    if not isinstance(given, dict) or not {"chip", "chips"} <= given.keys():
        raise ChipError(f"{path} does not say where it runs.", 'Add [cluster] with chip = "H100-SXM" and chips = 8.')
    return cluster_in(path, {**given, "chips": _whole(given, "chips", f"{path}, [cluster]")})


def _measured(table: Settings, path: Path) -> Terms | float | None:
    """The measured step; a float is tokens per second."""
    given = table.get("measured")
    if given is None:
        return None
    if isinstance(given, dict) and len(given) == 1:
        [(key, value)] = given.items()
        if key in ("step_seconds", "tokens_per_second") and type(value) in (int, float) and value > 0:
            return float(value) if key == "tokens_per_second" else _measured_terms(float(value), path)
    raise DataError(f"{path}: [measured] is {given!r}.", "Write step_seconds or tokens_per_second, above zero.")


def _measured_terms(seconds: float, path: Path) -> Terms:
    return Terms((Term("step", "measured step", seconds, f"[measured] of {path.name}", str(path)),))


# ── attribution: where the steps of measured runs went, and what of it more ranks did not divide ──────────────────────────

LEAST_STEPS = 6
"""Steps that a run must have: the first two compile, and a quarter at either end is left out."""
_WARM_UP = 2
_LATE = 0.5
"""Share of the steps from which on a rank that was the last to arrive is named."""
_WORDS = {
    "computing": "computing",
    "sending": "sending",
    "waiting": "waiting for the slowest rank",
    "void": "steps whose update was not applied",
    "undone": "steps that a rollback undid",
    "outside": "outside steps: evaluations, checkpoints, data",
}
"""Where the time of a step goes: its own work, and its share of work that was lost."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """What an average step of a run took, without its first steps and its extremes.

    Args:
        tokens: of a step, all ranks together.
        terms: seconds: computing, sending, waiting, the step's share of steps that were lost, and of what was outside steps.
        late: the rank that was most often the last to arrive, in which share of the steps, and how late; None where not recorded.
    """

    name: str
    num_ranks: int
    tokens: int
    terms: Terms
    late: tuple[int, float, float] | None = None

    @property
    def seconds(self) -> float:
        """Of a step, without what is outside steps."""
        return sum(term.value for term in self.terms if term.group != "outside")


def measured_step(run: Run) -> MeasuredStep:
    """Where the time of a run's average step went; a run with fewer than ``LEAST_STEPS`` steps is refused."""
    rows = [row for row in run.steps if row.get("seconds")]
    if len(rows) < LEAST_STEPS:
        raise RecordError(
            f"the time of {run.path} was requested, which has {len(rows)} timed steps; {LEAST_STEPS} are needed.",
            "Train a few steps more: narrowgauge resume.",
        )
    num_ranks = int(run.run.get("machine", {}).get("ranks", 1))
    timed = sorted(rows[_WARM_UP:], key=lambda row: float(row["seconds"]))
    quarter = len(timed) // 4
    middle = timed[quarter : len(timed) - quarter]
    inside = [float(row.get("communication_seconds") or 0.0) for row in middle]
    # The mean of the waits of all ranks: the slowest, which the column leaves out, does not wait.
    waits = [float(row.get("wait_seconds") or 0.0) * (num_ranks - 1) / num_ranks for row in middle]
    parts = {
        "computing": [float(row["seconds"]) - c for row, c in zip(middle, inside, strict=True)],
        "sending": [c - w for c, w in zip(inside, waits, strict=True)],
        "waiting": waits,
    }
    terms = [_term(group, values, run) for group, values in parts.items() if group == "computing" or num_ranks > 1]
    terms += [*_lost_steps(run, sum(term.value for term in terms)), *_outside(run)]
    tokens = int(run.config["batch_size"]) * int(run.config["sequence_length"])
    return MeasuredStep(run.path.name, num_ranks, tokens, Terms(tuple(terms)), _latest(run, num_ranks))


def _term(group: str, values: Sequence[float], run: Run) -> Term:
    mean = statistics.fmean(values)
    half = SIGMAS * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    formula = f"mean of the middle {len(values)} steps"
    return Term(group, _WORDS[group], mean, formula, str(run.path), mean - half, mean + half)


def _lost_steps(run: Run, seconds: float) -> Iterator[Term]:
    """What void steps, and steps that were undone, add to each step that counts."""
    void = sum(bool(row.get("skipped") or row.get("spike")) for row in run.steps)
    undone = sum(int(event.get("batches") or 0) for event in run.events if event.get("kind") == "rollback")
    counted = max(1, len(run.steps) - void)
    for group, number in (("void", void), ("undone", undone)):
        if number:
            formula = f"{number} steps of {duration_text(seconds)} / {counted} that count"
            yield Term(group, _WORDS[group], seconds * number / counted, formula, str(run.path))


def _outside(run: Run) -> list[Term]:
    """What a finished run did between its steps, per step; nothing if it was resumed."""
    wall = (run.summary or {}).get("wall_seconds")
    if not wall or any(event.get("kind") == "resume" for event in run.events):
        return []
    seconds = [float(row["seconds"]) for row in run.steps if row.get("seconds")]
    rest = max(0.0, float(wall) - sum(seconds))
    formula = f"({duration_text(float(wall))} − {duration_text(sum(seconds))} in steps) / {len(seconds)} steps"
    return [Term("outside", _WORDS["outside"], rest / len(seconds), formula, str(run.path))]


def _latest(run: Run, num_ranks: int) -> tuple[int, float, float] | None:
    tables = [row["ranks"] for row in run.steps if isinstance(row.get("ranks"), dict)]
    tables = [table for table in tables if len(table.get("num_last", ())) == num_ranks]
    if not tables:
        return None
    counts = [sum(table["num_last"][rank] for table in tables) for rank in range(num_ranks)]
    rank = max(range(num_ranks), key=counts.__getitem__)
    late = sum(table["num_last"][rank] * table["late_seconds"][rank] for table in tables) / max(1, counts[rank])
    return rank, counts[rank] / sum(table["num_steps"] for table in tables), late


@dataclass(frozen=True, slots=True)
class Attribution:
    """Measured runs, the fewest ranks first, and what the larger ones lost."""

    steps: tuple[MeasuredStep, ...]

    @property
    def points(self) -> tuple[MeasuredTime, ...]:
        """The seconds of a step of the first run's tokens, for :func:`narrowgauge.planner.measured.scaling_law.fit`."""
        tokens = self.steps[0].tokens
        return tuple(MeasuredTime(step.num_ranks, step.seconds * tokens / step.tokens) for step in self.steps)

    def lost(self, step: MeasuredStep) -> tuple[Change, ...]:
        """Seconds by part that a step took beyond its share of the smallest run's, the largest first."""
        first = self.steps[0]
        scale = first.num_ranks / step.num_ranks * step.tokens / first.tokens
        return changes(first.terms, step.terms, scale)


def attribute(runs: Sequence[Run]) -> Attribution:
    """Measure where the steps of runs of one model and recipe went."""
    for key in ("model", "recipe", "sequence_length"):
        found = {str(run.config.get(key)) for run in runs}
        if len(found) > 1:
            raise RecordError(
                f"runs of one job were requested, and these differ in {key}: {', '.join(sorted(found))}.",
                "Name runs that differ in the number of ranks only.",
            )
    steps = [measured_step(run) for run in runs]
    if len({step.name for step in steps}) < len(steps):
        steps = [replace(step, name=str(run.path)) for step, run in zip(steps, runs, strict=True)]
    return Attribution(tuple(sorted(steps, key=lambda step: step.num_ranks)))


def attribution_lines(found: Attribution) -> list[str]:
    """The attribution in sentences: one per run and per lost part."""
    said = [_shares(step) for step in found.steps]
    for step in found.steps[1:]:
        if step.num_ranks > found.steps[0].num_ranks:
            said += _lost_lines(found, step)
    return said


def _shares(step: MeasuredStep) -> str:
    parts = [f"{duration_text(term.value)} {term.name}" for term in step.terms if term.group != "outside"]
    said = f"{step.name}, {counted(step.num_ranks, 'rank')}: {duration_text(step.seconds)} a step: {', '.join(parts)}."
    outside = [term.value for term in step.terms if term.group == "outside"]
    if outside and outside[0] > 0.02 * step.seconds:
        said += f" {duration_text(outside[0])} for each step are spent outside steps."
    if step.late is not None and step.num_ranks > 2 and step.late[1] >= _LATE:
        rank, share, late = step.late
        said += f" Rank {rank} is the last in {share:.0%} of the steps, {duration_text(late)} late."
    return said


def _lost_lines(found: Attribution, step: MeasuredStep) -> list[str]:
    first, lost = found.steps[0], found.lost(step)
    inside = [change for change in lost if change.group != "outside"]
    scale = first.num_ranks / step.num_ranks * step.tokens / first.tokens
    total, ideal = sum(change.difference for change in inside), first.seconds * scale
    said = (
        f"{counted(step.num_ranks, 'rank')} instead of {first.num_ranks}: {duration_text(step.seconds)} a step where "
        f"{duration_text(ideal)} would be in proportion, an efficiency of {ideal / step.seconds:.0%}."
    )
    if step.tokens != first.tokens:
        said += f" Its steps have {step.tokens / first.tokens:.3g} × the tokens, which is counted."
    return [said, *(_lost_line(change, total) for change in inside if abs(change.difference) > 0.02 * ideal)]


def _lost_line(change: Change, total: float) -> str:
    if change.difference < 0:
        return f"  {change.name}: {duration_text(-change.difference)} less than in proportion."
    share = f" ({change.difference / total:.0%} of what is lost)" if total > 0 else ""
    remedies = "; ".join(f"{cause.name}: {cause.remedy}" for cause in bottlenecks_of(change.group))
    return f"  {change.name}: {duration_text(change.difference)} more than in proportion{share}. {remedies}."


def attribution_dict(found: Attribution) -> dict[str, Any]:
    """The attribution as values for JSON."""
    return {
        "runs": [
            {
                "name": step.name,
                "ranks": step.num_ranks,
                "tokens": step.tokens,
                "step_seconds": step.seconds,
                "seconds": step.terms.groups,
                "lost_seconds": {change.group: change.difference for change in found.lost(step)},
            }
            for step in found.steps
        ],
        "sentences": attribution_lines(found),
    }
