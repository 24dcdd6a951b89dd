"""Regression: two launches of a job, which term of the step became slower, by how much, and which setting did it.

Both launches are modelled, and their terms compared. Every setting that differs is then applied to the first launch alone,
which shows its own effect, whatever else changed. Where both were measured, the difference that the model explains stands
beside the measured one. What is left over comes from something outside the settings: other software, another machine, other
data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.planner.formatting import duration_text
from narrowgauge.planner.inputs.clusters import Nodes
from narrowgauge.planner.inputs.efficiency import Shares
from narrowgauge.planner.inputs.jobs import Job
from narrowgauge.planner.inputs.layouts import Layout
from narrowgauge.planner.measured.launches import LaunchedJob, planned_step
from narrowgauge.planner.terms import Change, Terms, changes

_AXES = ("data", "shard", "zero", "tensor", "pipeline", "interleave", "context", "expert", "expert_tensor")
_LEAST = 0.002
"""Of a step: a smaller change of a term is not worth a sentence."""


@dataclass(frozen=True, slots=True)
class Effect:
    """A setting that differs between two launches.

    ``seconds`` is what a step of the first launch grows by with this setting alone; None where it cannot be applied alone.
    """

    name: str
    before: str
    after: str
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Regression:
    """Two launches with their modelled steps, and the effect of each setting that differs, the largest first."""

    before: LaunchedJob
    after: LaunchedJob
    before_step: Terms
    after_step: Terms
    effects: tuple[Effect, ...]

    @property
    def scale(self) -> float:
        """Tokens of a step after over those before: times before are multiplied by it."""
        return self.after.job.tokens_per_step / self.before.job.tokens_per_step

    @property
    def changes(self) -> tuple[Change, ...]:
        """Of each modelled term, the largest first, for the tokens of a step after."""
        return changes(self.before_step, self.after_step, self.scale)

    @property
    def explained(self) -> float:
        """Seconds by which the modelled step grew."""
        return self.after_step.total - self.scale * self.before_step.total

    @property
    def measured_changes(self) -> tuple[Change, ...] | None:
        """Of each measured part; None unless both launches were measured."""
        if self.before.measured is None or self.after.measured is None:
            return None
        return changes(self.before.measured, self.after.measured, self.scale)

    @property
    def seen(self) -> float | None:
        """Seconds by which the measured step grew; None unless both launches were measured."""
        found = self.measured_changes
        return None if found is None else sum(change.difference for change in found)


def compare_launches(before: LaunchedJob, after: LaunchedJob, shares: Shares | None = None) -> Regression:
    """Compare two launches of the same job: their steps, and what each setting that differs does alone."""
    if before.name == after.name:
        before, after = replace(before, name=f"{before.name} (before)"), replace(after, name=f"{after.name} (after)")
    old, new = (planned_step(launch.job, shares) for launch in (before, after))
    effects = [
        Effect(name, was, now, _alone(moved, before.job, old, shares))
        for name, was, now, moved in _differing(before.job, after.job)
    ]
    effects.sort(key=lambda effect: -abs(effect.seconds or 0.0))
    return Regression(before, after, old, new, tuple(effects))


def _alone(moved: Job | None, before: Job, old: Terms, shares: Shares | None) -> float | None:
    """Seconds by which a step of the first job's tokens grows; None where the setting cannot be applied alone."""
    if moved is None:
        return None
    try:
        return planned_step(moved, shares).total * before.tokens_per_step / moved.tokens_per_step - old.total
    except NarrowgaugeError:  # the setting needs another one that changed too
        return None


def _differing(before: Job, after: Job) -> Iterator[tuple[str, str, str, Job | None]]:
    """Settings that differ: name, both values, and the first job with the second one's."""
    if before.architecture != after.architecture:
        moved = replace(before, architecture=after.architecture)
        yield "model", before.architecture.name, after.architecture.name, moved
    if before.recipe != after.recipe:
        yield "recipe", before.recipe.title, after.recipe.title, replace(before, recipe=after.recipe)
    if before.sequence_length != after.sequence_length:
        moved = replace(before, sequence_length=after.sequence_length)
        yield "sequence_length", str(before.sequence_length), str(after.sequence_length), moved
    yield from _differing_layouts(before, after)
    yield from _differing_clusters(before, after)


def _differing_layouts(before: Job, after: Job) -> Iterator[tuple[str, str, str, Job | None]]:
    old, new = before.layout, after.layout
    axes = [name for name in _AXES if getattr(old, name) != getattr(new, name)]
    if axes:
        # Axes multiply to the number of chips, so they change together, and with the chips if these changed.
        moved = replace(before, layout=replace(old, **{name: getattr(new, name) for name in _AXES}))
        was, now = _said(old, axes), _said(new, axes)
        if old.num_ranks != new.num_ranks:
            moved = replace(moved, cluster=after.cluster)
            was, now = f"{was} on {before.cluster}", f"{now} on {after.cluster}"
        yield "parallelism", was, now, moved
    for field in dataclasses.fields(Layout):
        was, now = getattr(old, field.name), getattr(new, field.name)
        if field.name not in _AXES and was != now:
            yield field.name, str(was), str(now), replace(before, layout=replace(old, **{field.name: now}))


def _said(layout: Layout, axes: list[str]) -> str:
    return ", ".join(f"{name} {getattr(layout, name)}" for name in axes)


def _differing_clusters(before: Job, after: Job) -> Iterator[tuple[str, str, str, Job | None]]:
    old, new = before.cluster, after.cluster
    if len(old.groups) != 1 or len(new.groups) != 1:
        if old != new:
            yield "cluster", str(old), str(new), replace(before, cluster=new)
        return
    [was], [now] = old.groups, new.groups
    # A layout of another number of ranks brings its chips along.
    with_layout = ("count", "chips") if before.layout.num_ranks != after.layout.num_ranks else ("count",)
    for field in dataclasses.fields(Nodes):
        a, b = getattr(was, field.name), getattr(now, field.name)
        if a != b and field.name not in (*with_layout, "dollars_per_hour"):
            nodes = replace(was, **{field.name: b}) if field.name != "chips" else _regrouped(was, b)
            moved = None if nodes is None else replace(before, cluster=replace(old, groups=(nodes,)))
            label = "chips of a node" if field.name == "chips" else field.name
            yield label, _value(a), _value(b), moved
    for name in ("latency_seconds", "chip_mtbf_hours"):
        if getattr(old, name) != getattr(new, name):
            moved = replace(before, cluster=replace(old, **{name: getattr(new, name)}))
            yield name, _value(getattr(old, name)), _value(getattr(new, name)), moved


def _regrouped(nodes: Nodes, chips: int) -> Nodes | None:
    """The same chips in nodes of another size."""
    total = nodes.num_chips
    return replace(nodes, chips=chips, count=total // chips) if total % chips == 0 else None


def _value(value: Any) -> str:
    if value is None:
        return "as printed"
    return f"{value:g}" if isinstance(value, float) else str(getattr(value, "name", value))


def regression_lines(found: Regression) -> list[str]:
    """The comparison in sentences: what was seen or is expected, then each term, then each setting alone."""
    said = [_headline(found)]
    total = found.after_step.total
    shown = [change for change in found.changes if abs(change.difference) > _LEAST * total]
    if not found.effects:
        said.append("The launches have the same settings, so the model has nothing to explain.")
    if shown:
        said.append("Which terms changed, by the model:")
        said += [_term_line(change) for change in shown]
    if found.effects:
        said.append("What each setting does alone:")
        said += [_effect_line(effect) for effect in found.effects]
        said += _together(found)
    return said + _measured_lines(found)


def _headline(found: Regression) -> str:
    before, after = found.before, found.after
    old, new = found.scale * found.before_step.total, found.after_step.total
    low, high = found.after_step.interval
    said = (
        f"By the model {after.name} takes {duration_text(new)} a step ({duration_text(low)} to {duration_text(high)}) where "
        f"{before.name} takes {duration_text(old)}: {_grew(found.explained, old)}."
    )
    if found.scale != 1:
        tokens = after.job.tokens_per_step
        said += f" A step has {found.scale:.3g} × the tokens, which is counted: both are for {tokens:,} tokens."
    return said


def _grew(seconds: float, of: float) -> str:
    if abs(seconds) < 0.0005 * of:
        return "no difference"
    return f"{duration_text(abs(seconds))} or {abs(seconds) / of:.1%} {'slower' if seconds > 0 else 'faster'}"


def _term_line(change: Change) -> str:
    sign = "+" if change.difference > 0 else "−"
    said = f"  {change.group}, {change.name}: {sign}{duration_text(abs(change.difference))}"
    said += f" ({duration_text(change.before)} → {duration_text(change.after)})"
    return f"{said}: {change.formula_after or 'gone'}"


def _effect_line(effect: Effect) -> str:
    said = f"  {effect.name} {effect.before} → {effect.after}: "
    if effect.seconds is None:
        return said + "not alone."
    return said + f"{'+' if effect.seconds > 0 else '−'}{duration_text(abs(effect.seconds))}."


def _together(found: Regression) -> list[str]:
    """A sentence where the effects do not add up."""
    known = [effect.seconds for effect in found.effects if effect.seconds is not None]
    alone, both = found.scale * sum(known), found.explained
    if len(known) < 2 or len(known) < len(found.effects) or abs(alone - both) < 0.1 * max(abs(alone), abs(both)):
        return []
    why = "one hides part of the other" if alone > both else "one makes the other worse"
    return [f"  Alone they add up to {duration_text(alone)}, together they are {duration_text(both)}: {why}."]


def _measured_lines(found: Regression) -> list[str]:
    seen, parts = found.seen, found.measured_changes
    if seen is None or parts is None:
        return [
            "Not both launches were measured: add [measured] to the files, or name run folders, to check the model."
        ]
    assert found.before.measured is not None
    was = found.scale * found.before.measured.total
    said = f"Measured: {_grew(seen, was)} ({duration_text(was)} → {duration_text(was + seen)})."
    left = seen - found.explained
    if abs(seen) > 0.01 * was or abs(left) > 0.01 * was:
        more = f"{duration_text(abs(left))} {'more' if left > 0 else 'less'}"
        said += f" By the settings: {_grew(found.explained, was)}. So {more} than they explain."
    lines = [said]
    if len(parts) > 1 or len(found.before.measured.addends) > 1:
        lines += [
            f"  {change.name}: {duration_text(change.before)} → {duration_text(change.after)}" for change in parts
        ]
    if abs(left) > 0.05 * was:
        lines.append("Look for other software, another machine, a late rank or other data: no setting here says it.")
    return lines


def regression_dict(found: Regression) -> dict[str, Any]:
    """The comparison as values for JSON."""
    low, high = found.after_step.interval
    return {
        "before": {"name": found.before.name, "seconds": found.scale * found.before_step.total},
        "after": {"name": found.after.name, "seconds": found.after_step.total, "low": low, "high": high},
        "tokens": found.after.job.tokens_per_step,
        "terms": [
            {"group": c.group, "name": c.name, "before": c.before, "after": c.after, "difference": c.difference}
            for c in found.changes
        ],
        "settings": [dataclasses.asdict(effect) for effect in found.effects],
        "explained_seconds": found.explained,
        "measured_seconds": found.seen,
        "sentences": regression_lines(found),
    }
