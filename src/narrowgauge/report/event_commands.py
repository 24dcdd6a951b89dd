"""The command beside an event of a page: what mends it, or what shows more of it.

It follows from ids and fields of the event, never from its sentences. A detector whose advice names another storage or compute
gets the same training with that one; a run that ended before its last step gets its resumption; all other events that need
attention get the diagnosis.
"""

from __future__ import annotations

import shlex

from narrowgauge.analysis.comparison.labels import parsed_recipe
from narrowgauge.analysis.diagnosis.loop_terms import loop_of
from narrowgauge.analysis.monitor.detectors import DETECTORS, advice_values
from narrowgauge.report.figures.history_figures import ROUTINE
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row
from narrowgauge.spec.recipes import own_name

TRAINED = "trainer"
"""The kind of loop whose runs a command starts or resumes (:data:`narrowgauge.analysis.diagnosis.loop_terms.LOOPS`)."""
_RESUMED = frozenset({"stop", "lost"})
"""Kinds of events after which a run goes on as if nothing had been."""
_AUDIT = {"audit": ("storage",)}
"""Parts of a recipe that the advice of others than detectors is about (:data:`narrowgauge.runs.events.RAISED_BY`)."""


def command_of(run: Run, event: Row) -> str:
    """A line for a shell on one event of a run; empty where nothing is to be done.

    Example:
        >>> from pathlib import Path
        >>> run = Run(Path("runs/first"), {"config": {"recipe": "bfloat16/naive"}})
        >>> command_of(run, {"kind": "lost_updates", "detector": "audit"})
        'narrowgauge train --config runs/first/run.toml --recipe bfloat16/word'
        >>> command_of(run, {"kind": "loss_spike", "detector": "loss-spike"}), command_of(run, {"kind": "start"})
        ('narrowgauge diagnose runs/first', '')
    """
    kind, is_trained = str(event.get("kind", "")), loop_of(run) == TRAINED
    if kind in _RESUMED:
        is_open = run.summary is None and all(later.get("kind") != "resume" for later in _after(run, event))
        return resumption(run) if is_open else ""
    if kind in ROUTINE:
        return ""
    instead = _recipe_instead(run, str(event.get("detector", ""))) if is_trained else ""
    if instead:
        return f"narrowgauge train --config {shlex.quote(str(run.path / 'run.toml'))} --recipe {shlex.quote(instead)}"
    return f"narrowgauge diagnose {shlex.quote(str(run.path))}"


def resumption(run: Run) -> str:
    """The command by which a run goes on; empty where no command began it.

    Example:
        >>> from pathlib import Path
        >>> resumption(Run(Path("my runs/a"), {})), resumption(Run(Path("a"), {"recorder": {}}))
        ("narrowgauge resume 'my runs/a'", '')
    """
    return f"narrowgauge resume {shlex.quote(str(run.path))}" if loop_of(run) == TRAINED else ""


def _after(run: Run, event: Row) -> list[Row]:
    places = [place for place, other in enumerate(run.events) if other is event]
    return run.events[places[0] + 1 :] if places else []


def _recipe_instead(run: Run, detector: str) -> str:
    """The run's recipe with the part that a detector's advice names another of; empty where it is about something else."""
    row = DETECTORS.get(detector)
    parts = _AUDIT.get(detector, ()) if row is None else row.advised_parts
    recipe = parsed_recipe((run.run.get("config") or {}).get("recipe"))
    if not parts or recipe is None or not recipe.is_plain:
        return ""
    values = advice_values(None, recipe.storage, recipe.compute.name)
    # The name of a storage that belongs to a compute begins with it.
    instead = {part: values[part].rpartition("/")[2] for part in parts}
    named = {"compute": recipe.compute.name, "storage": own_name(recipe.storage)} | instead
    other = parsed_recipe("/".join([*named.values(), recipe.reduction.name]))
    return "" if other is None or other == recipe else other.name
