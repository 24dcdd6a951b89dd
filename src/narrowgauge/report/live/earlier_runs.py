"""The band of earlier runs: between which losses the finished runs of the same comparison were at each step.

A loss that is growing says little by itself; beside what runs of the same settings did at that step it says whether this one
goes as well. Such runs differ in seed and recipe alone: they are those of the same comparison's folder, or else runs of the page
with otherwise equal settings. Only finished runs count, and none that diverged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from narrowgauge.analysis.comparison.run_stats import RunStats
from narrowgauge.report.figures.loss_figures import smoothed_by
from narrowgauge.report.figures.series import Series, band, json_list, outline
from narrowgauge.report.figures.traces import Figure
from narrowgauge.report.live.live_run import LiveRun, runs_in
from narrowgauge.report.live.thinned_groups import LINE_POINTS, ThinnedGroup, Window
from narrowgauge.runs.finding import counted
from narrowgauge.runs.record import DEFINITION_FILE
from narrowgauge.runs.schema import Row

_OWN = frozenset({"seed", "recipe", "out"})
"""Settings in which runs of one comparison differ."""


def finished_beside(there: Sequence[Path]) -> list[Path]:
    """Finished runs of the comparisons that run folders belong to, without these themselves."""
    comparisons = dict.fromkeys(path.parent for path in there if (path.parent / DEFINITION_FILE).is_file())
    found = [path for path in runs_in(list(comparisons)) if (path / "summary.json").is_file()]
    known = {path.resolve() for path in there}
    return [path for path in found if path.resolve() not in known]


@dataclass(frozen=True)
class EarlierRuns:
    """The finished runs that those under way belong together with, as a group whose lines are thin."""

    group: ThinnedGroup

    @classmethod
    def of(cls, runs: Mapping[Path, LiveRun], beside: Iterable[LiveRun]) -> EarlierRuns | None:
        """Those of a page's runs, and of runs ``beside`` it; ``None`` where none has finished, or none is under way."""
        under_way = {_kin(run) for run in runs.values() if run.summary is None}
        kin = [run for run in (*runs.values(), *beside) if _kin(run) in under_way]
        found = [(run, one) for run in kin if (one := RunStats.of(run.run, "")).counts]
        if not found:
            return None
        stats, live = tuple(one for _, one in found), tuple(run for run, _ in found)
        return cls(ThinnedGroup("earlier runs", -1, stats, live, None, LINE_POINTS))

    def under(self, figures: Sequence[Figure], groups: Sequence[ThinnedGroup], window: Window | None) -> list[Figure]:
        """The figures of losses with the band below their lines, and a sentence that says what it is; all others as they are.

        Args:
            groups: that the figures were drawn of, which decide how much the lines are smoothed.
        """
        group = replace(self.group, window=window)
        smooth = smoothed_by(groups)[1]
        bands = {
            "training-loss": [
                ("smoothed", group.lines("steps", "loss", smooth)),
                ("raw", group.lines("steps", "loss")),
            ],
            "validation-loss": [("", group.lines("evals", "val_loss"))],
        }
        return [self._over(figure, bands.get(figure.name, [])) for figure in figures]

    def _over(self, figure: Figure, bands: Sequence[tuple[str, Sequence[Series]]]) -> Figure:
        shapes = [(view, outline(band(lines))) for view, lines in bands]
        traces = [_trace(view, shape) for view, shape in shapes if len(shape)]
        return replace(figure, data=[*traces, *figure.data], how=figure.how + self._how) if traces else figure

    @property
    def _how(self) -> str:
        number = len(self.group.live)
        where = "between the lowest and the highest of" if number > 1 else "that of"
        return f" Grey is {where} {counted(number, 'earlier run')} of the same comparison, finished and not diverged."


def _kin(run: LiveRun) -> tuple[str, object]:
    """What is equal for runs that differ in seed and recipe alone."""
    if (run.path.parent / DEFINITION_FILE).is_file():
        return str(run.path.parent.resolve()), None
    config: Row = run.settings.get("config") or {}
    return "", repr(sorted((name, value) for name, value in config.items() if name not in _OWN))


def _trace(view: str, shape: Series) -> Row:
    return {
        "type": "scatter", "mode": "lines", "x": json_list(shape.x, 9), "y": json_list(shape.y),
        "fill": "toself", "fillcolor": "@muted/0.16", "hoverinfo": "skip",
        # Of one run the band has no width.
        "line": {"width": 1, "color": "@muted/0.45"}, "meta": {"view": view} if view else {},
    }  # fmt: skip
