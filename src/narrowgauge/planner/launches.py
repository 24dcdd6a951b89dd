"""Launches: explain why one job is slower than another.

A launch file has the arguments of :func:`narrowgauge.planner.plan.plan`, and maybe a measured time::

    model = "llama-8b"
    recipes = "bfloat16/word"
    chip = "H100-SXM"
    chips = 64
    interconnect_gbit_per_second = 3200
    sequence_length = 8192
    layout = "fsdp2,micro_batches=2"
    step_seconds = 3.9
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from narrowgauge.errors import DataError, NarrowgaugeError
from narrowgauge.planner.clusters import CLUSTER_KEYS, read_table
from narrowgauge.planner.jobs import Job
from narrowgauge.planner.plan import plan
from narrowgauge.planner.step_time import UNSTEADY_GROUP
from narrowgauge.planner.terms import changes
from narrowgauge.planner.units import duration_text
from narrowgauge.spec.tables import Row, Table, number_columns, text_columns

_KEYS: dict[str, str | float] = {"model": "llama-8b", "recipes": "bfloat16/word", "layout": "fsdp2", "sequence_length": 4096,
         "tokens_per_step": 4e6, "optimizer": "adamw", "step_seconds": 3.9, **CLUSTER_KEYS}  # fmt: skip
_EXPLAINED = 0.8
"""Fraction of a measured difference from which the terms explain it."""
_LEAST_SHARE = 0.002  # of a step: smaller changes of a term are not shown


def read_launch(path: str | Path) -> dict[str, Any]:
    """Read the settings of a launch from a TOML file."""
    path = Path(path).expanduser()
    settings = read_table(path, "launch", _KEYS, ("model", "recipes", "chip", "chips"))
    if not 0 < settings.get("step_seconds", 1) < math.inf:
        raise DataError(
            f"{path} has step_seconds = {settings['step_seconds']}.", "Write seconds above zero."
        )
    return settings


def compare_launches(before: dict[str, Any], after: dict[str, Any]) -> Row:
    """Compare the settings of two launches of one job, for the later tokens per step.

    Checkpoints do not count, since measured steps leave them out. Settings without effect are left out.

    Returns:
        Lists of rows. ``steps``: the seconds of the modelled step and, if both were measured, of the measured one. Measured
        slowdown beyond the model comes from software, machine, ranks or data. ``terms``: of the modelled step, the largest
        change first. ``settings``: the largest effect first. Alone a setting adds ``seconds``, None if it cannot change alone.
    """
    old, new = _job(before), _job(after)
    tokens = new.tokens_per_step

    def seconds(job: Job) -> float:
        return job.step.without(UNSTEADY_GROUP).total * tokens / job.tokens_per_step

    scale = tokens / old.tokens_per_step
    steps: list[Row] = [{"step": "modelled", "before": seconds(old), "after": seconds(new)}]
    if "step_seconds" in before and "step_seconds" in after:
        steps.append(
            {
                "step": "measured",
                "before": scale * before["step_seconds"],
                "after": after["step_seconds"],
            }
        )
    settings: list[Row] = []
    for name in dict.fromkeys([*before, *after]):
        changed = {
            key: value
            for key, value in {**before, name: after.get(name)}.items()
            if value is not None
        }
        try:
            added = seconds(_job(changed)) - seconds(old)
        except NarrowgaugeError:
            added = None
        if added != 0:
            settings.append(
                {
                    "setting": name,
                    "before": before.get(name),
                    "after": after.get(name),
                    "seconds": added,
                }
            )
    settings.sort(key=lambda row: -abs(row["seconds"] or 0.0))
    terms = changes(old.step.without(UNSTEADY_GROUP), new.step.without(UNSTEADY_GROUP), scale)
    return {"tokens_per_step": tokens, "steps": steps, "terms": terms, "settings": settings}


def _job(settings: dict[str, Any]) -> Job:
    return plan(**{name: value for name, value in settings.items() if name != "step_seconds"}).best


def sentences_of(comparison: Row) -> list[str]:
    """Say how much of the measured difference the terms explain, and what to measure next."""
    slower = {row["step"]: row["after"] - row["before"] for row in comparison["steps"]}
    if not slower.get("measured"):
        return [
            "Both launches need step_seconds to say how much of a difference the terms explain."
        ]
    share = slower["modelled"] / slower["measured"]
    lines = [
        f"The terms explain {slower['modelled']:+.3g} s of {slower['measured']:+.3g} s ({share:.0%})."
    ]
    if not _EXPLAINED < share < 2 - _EXPLAINED:
        lines.append(
            "The rest is software, machine, ranks or data. Measure next: a trace of one step of each launch (torch.profiler), "
            "and narrowgauge profile on the machine of each."
        )
    return lines


def tables_of(comparison: Row) -> list[Table]:
    """Return the slowdown of a step, the changes of its terms, and the effect of each setting alone, as tables."""
    least = _LEAST_SHARE * comparison["steps"][0]["after"]
    terms = [row for row in comparison["terms"] if abs(row["after"] - row["before"]) > least]
    times = number_columns(
        before=lambda row: duration_text(row["before"]),
        after=lambda row: duration_text(row["after"]),
        difference=lambda row: f"{row['after'] - row['before']:+.3g} s",
    )
    share = number_columns(share=lambda row: f"{row['after'] / row['before'] - 1:+.1%}")
    alone = number_columns(
        alone=lambda row: "not alone" if row["seconds"] is None else f"{row['seconds']:+.3g} s"
    )
    settings = text_columns(setting="setting", before="before", after="after")
    names, formula = text_columns(group="group", term="name"), text_columns(formula="formula")
    title = f"A step of {comparison['tokens_per_step']:,} tokens"
    return [
        Table((*text_columns(step="step"), *times, *share), comparison["steps"], title),
        Table((*names, *times, *formula), terms, "Terms of the modelled step"),
        Table((*settings, *alone), comparison["settings"], "What each setting does alone"),
    ]
