"""What a live page shows, in parts: each has a version, and a browser gets those that are newer than what it has.

Three kinds of parts differ in what they cost. The state of the runs and the events are small tables. Figures over steps are
drawn by the report's own functions from thinned lines. All else needs the whole record, and comes from another process
(:mod:`~narrowgauge.report.live.whole_report`). The page itself is the report's, with the last two missing until they come.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from narrowgauge.analysis.comparison.comparison import Comparison, compare_runs
from narrowgauge.report.figures.history_figures import ROUTINE, event_strip, gradient_norm, loss_scale, skipped
from narrowgauge.report.figures.loss_figures import difference, training_loss, validation_loss
from narrowgauge.report.figures.storage_figures import lost_decay, unchanged_weights
from narrowgauge.report.figures.traces import Figure
from narrowgauge.report.live.earlier_runs import EarlierRuns, finished_beside
from narrowgauge.report.live.live_run import ABSENT, LiveRun, State, runs_in, writers
from narrowgauge.report.live.thinned_groups import LINE_POINTS, ThinnedGroup, Window
from narrowgauge.report.page import document, spec_of, template
from narrowgauge.report.publishing import title_of
from narrowgauge.report.recipe_groups import groups_of, run_names
from narrowgauge.report.runs_page import HEADINGS, RunFindings, event_words, page_words, sections_of, whole_page
from narrowgauge.runs.finding import duration
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import STEP, Row

FIGURES: tuple[Callable[[Sequence[Any]], Figure | None], ...] = (
    training_loss, validation_loss, gradient_norm, loss_scale, skipped, unchanged_weights, lost_decay,
)  # fmt: skip
"""The figures over steps, which are drawn anew with every row; beside them the difference from the baseline."""

LIVE_NAMES = frozenset({
    "training-loss", "validation-loss", "difference", "grad-norm", "loss-scale", "skipped", "unchanged-weights", "lost-decay",
})  # fmt: skip
"""The figures that :data:`FIGURES` draw."""
LOSSES = ("training-loss", "validation-loss", "difference")
_WHOLE = (
    "verdict",
    "diagnosis",
    "costs",
    "memory",
    "price",
    "layers",
    "ranges",
    "storage",
    "history",
    "ranks",
    "environment",
)
"""The sections that need the whole record."""
_READING = "The whole record is being read for this section."


@dataclass(frozen=True)
class NowRow:
    """A run in the table of what the runs are doing, in words."""

    name: str
    state: State
    num_findings: int
    progress: str
    share: float | None
    left: str
    loss: str
    speed: str
    last_row_at: float | None
    notes: Sequence[str] = ()


def finding_rows(run: LiveRun) -> list[Row]:
    """The events of a run that need attention."""
    return [event for event in run.events if str(event.get("kind", "")) not in ROUTINE]


class LivePage:
    """The page of runs in folders that are being written, or will be.

    Invariant: nothing is written, and no lock is taken.

    Args:
        paths: run folders, or folders that hold some; they need not exist yet.
        clock: seconds since the epoch.
        has_writer: whether a process of this machine is writing each run.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        clock: Callable[[], float] = time.time,
        has_writer: Callable[[list[Path]], Mapping[Path, bool | None]] = writers,
    ) -> None:
        self.paths = list(paths)
        self.runs: dict[Path, LiveRun] = {}
        self.beside: dict[Path, LiveRun] = {}
        """Finished runs of the same comparison, which the page shows as a band alone."""
        self.version = 0
        self.generation = 0
        """Grows when the page must be loaded anew: a run or a recipe came or went."""
        self.whole: dict[str, Any] = {}
        self._clock, self._has_writer = clock, has_writer
        self._states: dict[Path, State] = {}
        self._parts: dict[str, tuple[int, str]] = {}
        self._written: dict[str, str] = {}
        self._written_of: object = None
        self._found: Comparison | None = None
        self._groups: list[ThinnedGroup] = []
        self._grouped_by: list[object] = []
        self._grouped_paths: list[Path] = []

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def poll(self) -> bool:
        """Read what is new in the run folders; returns whether anything is."""
        there = runs_in(self.paths)
        changed = set(there) != set(self.runs)
        self.runs = {path: self.runs.get(path) or LiveRun(path) for path in there}
        self.beside = {path: self.beside.get(path) or LiveRun(path) for path in finished_beside(there)}
        for run in (*self.runs.values(), *self.beside.values()):
            changed |= run.poll()
        now, writing = self._clock(), self._has_writer(there)
        states = {path: run.state(now, writing[path]) for path, run in self.runs.items()}
        changed |= states != self._states
        self._states = states
        return changed

    @property
    def states(self) -> Mapping[Path, State]:
        return self._states

    @property
    def is_read(self) -> bool:
        """Whether all rows that are there have been read."""
        return all(run.is_read for run in (*self.runs.values(), *self.beside.values()))

    @property
    def num_rows(self) -> int:
        return sum(run.num_steps for run in self.runs.values())

    # ── drawing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def update(self) -> None:
        """Make the parts anew that changed."""
        self._group()
        drawn = self._drawn()
        losses = [figure for figure in drawn if figure.name in LOSSES]
        strip = self._strip
        parts: dict[str, Any] = {
            "section:now": _section("now.html.j2", live=self._rows()),
            "section:loss": _section("loss.html.j2", figures={"loss": losses}, headings=HEADINGS),
            "section:events": _section("events.html.j2", **event_words(self.named), headings=HEADINGS),
        }
        parts |= {f"figure:{name}": spec for name, spec in _specs(drawn).items()}
        parts |= {"strip": strip} if strip else {}
        self._set({**self._whole_parts(), **{name: _json(value) for name, value in parts.items()}})

    def _whole_parts(self) -> dict[str, str]:
        """The parts of the last whole record, some megabytes, which are written out once."""
        if self._written_of is not self.whole:
            sections, figures = self.whole.get("sections", {}), self.whole.get("figures", {})
            parts = {f"section:{name}": html for name, html in sections.items()}
            parts |= {f"whole:{name}": spec for name, spec in figures.items() if name not in LIVE_NAMES}
            parts |= {"gauges": self.whole["gauges"], "order": ["now", *sections]} if sections else {}
            self._written = {name: _json(value) for name, value in parts.items()}
            self._written_of = self.whole
        return self._written

    def _set(self, parts: Mapping[str, str]) -> None:
        changed = {name for name, text in parts.items() if self._parts.get(name, (0, ""))[1] != text}
        self.version += bool(changed)
        self._parts = {
            name: (self.version, text) if name in changed else self._parts[name] for name, text in parts.items()
        }

    def news(self, since: int) -> str:
        """The parts that are newer than a version, as a JSON object."""
        parts = ",".join(f"{_json(name)}:{text}" for name, (at, text) in self._parts.items() if at > since)
        return f'{{"clock":{self._clock():.3f},"generation":{self.generation},"parts":{{{parts}}}}}'

    def document(self) -> str:
        """The page as it is opened: what has been read so far, and a line in place of what needs the whole record."""
        self._group()
        if self._found is None:
            return self._numbered(_waiting(self.paths))
        words = page_words(self._found, self._groups, title_of(self._found), RunFindings([], []))
        made, known = sections_of(words), self.whole.get("sections", {})
        sections = {
            name: html if name not in _WHOLE else Markup(known.get(name) or _pending(name, self.trouble))
            for name, html in made.items()
        }
        return self._numbered(whole_page(words, sections, self._rows()))

    def _numbered(self, page: str) -> str:
        return page.replace("<html ", f'<html data-generation="{self.generation}" ', 1)

    @property
    def trouble(self) -> str:
        """Why there are no sections of the whole record."""
        return str(self.whole.get("trouble", ""))

    def figures(self, window: Window) -> dict[str, Row]:
        """The figures over a range of steps, by name."""
        self._group()
        return _specs(self._drawn(window))

    def _drawn(self, window: Window | None = None) -> list[Figure]:
        """The figures over steps, with the first signs that the diagnosis found last."""
        if self._found is None:
            return []
        groups = [replace(group, window=window) for group in self._groups]
        apart = difference(groups, self._found.baseline)
        drawn = [one for one in (*(make(groups) for make in FIGURES), apart) if one is not None]
        earlier = EarlierRuns.of(self.runs, self.beside.values())
        drawn = drawn if earlier is None else earlier.under(drawn, groups, window)
        marks = self.whole.get("marks", {})
        return [replace(one, data=[*one.data, *marks.get(one.name, [])]) for one in drawn]

    def _group(self) -> None:
        """The recipes of the runs, again where a run came, went, ended or was given other settings."""
        by: list[object] = [(path, run.settings, run.summary) for path, run in self.runs.items()]
        if by == self._grouped_by:
            return
        runs = [live.run for live in self.runs.values() if live.settings.get("config") is not None]
        names = [group.label for group in self._groups], self._grouped_paths
        self._found = compare_runs(runs) if runs else None
        groups = groups_of(self._found) if self._found is not None else []
        num_points = max(120, LINE_POINTS * 8 // max(8, len(runs)))
        self._groups = [
            ThinnedGroup(
                one.label, one.index, one.stats, tuple(self.runs[run.path] for run in one.runs), None, num_points
            )
            for one in groups
        ]
        self._grouped_by, self._grouped_paths = by, list(self.runs)
        self.generation += names != ([group.label for group in self._groups], self._grouped_paths)

    # ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def named(self) -> list[tuple[Run, str]]:
        """The runs in the order of the page, each with its name there."""
        return run_names(self._groups)

    @property
    def _strip(self) -> Row | None:
        strip = event_strip(self.named)
        return strip and {**strip, "data": [*strip["data"], *self.whole.get("signs", [])]}

    def _rows(self) -> list[NowRow]:
        return [self._row(self.runs[run.path], name) for run, name in self.named]

    def _row(self, run: LiveRun, name: str) -> NowRow:
        state = self._states.get(run.path) or run.state(self._clock(), None)
        notes = [note for note in (state.said, run.trouble) if note]
        notes += [] if run.is_read else ["its record is being read"]
        notes += [f"{run.num_damaged} damaged lines; narrowgauge report names them"] if run.num_damaged else []
        of = f" of {state.steps:,}" if state.steps else ""
        return NowRow(
            name, state, len(finding_rows(run)), f"{state.step:,}{of}",
            min(1.0, state.step / state.steps) if state.steps else None,
            "–" if state.seconds_left is None else duration(state.seconds_left),
            _last(run, "loss"), _last(run, "tokens_per_second"), run.last_row_at, notes,
        )  # fmt: skip


def _last(run: LiveRun, name: str) -> str:
    found = run.column(name)[-1:]
    return (
        "–"
        if not len(found) or found[0] == ABSENT
        else "not finite"
        if found[0] != found[0]
        else STEP[name].show(found[0])
    )


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _specs(figures: Iterable[Figure]) -> dict[str, Row]:
    return {figure.name: {**spec_of(figure), "how": figure.how} for figure in figures}


def _section(template_name: str, /, **words: Any) -> str:
    return template(template_name).render(**words).strip()


def _pending(name: str, trouble: str) -> str:
    """A section with its heading and one line."""
    return _section("pending.html.j2", name=name, headings=HEADINGS, text=trouble or _READING)


def _waiting(paths: Iterable[Path]) -> str:
    """The page before there is a run."""
    return document("waiting.html.j2", [], title="Waiting for a run", paths=[str(path) for path in paths], live=())
