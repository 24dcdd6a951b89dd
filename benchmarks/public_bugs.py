"""What the diagnosis and the audit of steps say of bugs that others had, and of loops in which nothing is wrong.

The rows of ``_public_bugs.py``, ``_public_bugs_of_steps.py``, ``_public_bugs_unseen.py``, ``_public_bugs_later.py`` and
``_public_bugs_third.py`` cite a public thread each, and the words that count as right for it were written before anything was
diagnosed. A third of the first two files, by the checksum of the name, are for tuning: rules may be mended with those alone; rows
that were there while rules were mended are a part of their own, and so are the third, the fourth and the fifth file, whose rows
no rule had been mended with when they were run first. Each is looked at in three ways:

- *audit*: the findings of the audit of every fifth step, with what a careful user declares.
- *two runs*: the reason why the run differs from the same loop without the bug.
- *rows*: the causes that the rows of the run alone give.

A finding that is younger than a row and says what the row plants was added to its right words when it came to be, after the
first run of the row's part; docs/log/diagnosis.md names such words, and has the figures of each part's first run.

*First*: what is said first is right; *three*: one of the first three is; *located*: a note says that a piece departs, without a
cause; *silent*: nothing is said; *wrong*: a cause, an error or a warning comes first that is not right, which counts most.

Claim: none of its own (docs/log/diagnosis.md has the figures). Baseline: the loop without a bug.
Run: ``./dev bench public_bugs [--parts tuning,aside,seen,unseen,later,third,healthy,healthy-kinds,healthy-third]
[--keep FOLDER] [--quick]``.
No times are compared, so ``--rounds`` has no effect.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from _injected_runs import SHAPE, prepare
from _public_bugs_later import LATER
from _public_bugs_of_steps import BUGS
from _public_bugs_third import THIRD
from _public_bugs_unseen import UNSEEN
from _public_healthy import HEALTHY
from _public_healthy_kinds import KINDS, Adjust
from _public_healthy_third import MORE_KINDS
from _public_loop import Bug, Setting, audit_of, made
from timing import Report, Row, nothing, parser

import narrowgauge as ng
from narrowgauge.runs.record import Run
from narrowgauge.trainer.data.dataset import Dataset, prepare_data

ROWS = (*BUGS, *UNSEEN, *LATER, *THIRD)
PARTS = ("tuning", "aside", "seen", "unseen", "later", "third", "healthy", "healthy-kinds", "healthy-third")


def nothing_planted(loop: object) -> None:
    """No bug."""
    nothing()


SOUND: dict[str, dict[str, tuple[Setting, Adjust]]] = {
    "healthy": {name: (setting, nothing_planted) for name, setting in HEALTHY.items()},
    "healthy-kinds": KINDS,
    "healthy-third": MORE_KINDS,
}
WAYS = ("audit", "two runs", "rows")
ANSWERS = ("first", "located", "silent", "wrong")
EDGES = (0.0, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 1.01)
"""Of the bins of the probabilities that are given."""


def part_of(bug: Bug) -> str:
    """The part of a row."""
    return bug.part or ("tuning" if zlib.crc32(bug.name.encode()) % 3 == 0 else "aside")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    flags = parser(__doc__, rounds=1)
    flags.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="where runs stay (default: a folder that is removed)"
    )
    flags.add_argument("--parts", default=",".join(PARTS), help="of the rows, joined by commas")
    options = flags.parse_args(arguments)
    report = Report("public bugs", options)
    torch.set_num_threads(1)
    asked = options.parts.split(",")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        prepare(folder / "place")
        runs = _Runs(folder)
        for part in asked:
            if part in SOUND:
                _emit_healthy(report, runs, part, list(SOUND[part])[: 3 if options.quick else None])
            else:
                _emit_part(
                    report, runs, part, [row for row in ROWS if part_of(row) == part][: 3 if options.quick else None]
                )
    return report.end()


class _Runs:
    """Makes each run once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def data(self) -> Dataset:
        """The text, as tokens."""
        size = SHAPE["vocab_size"]
        assert isinstance(size, int)
        return prepare_data(
            str(self.folder / "place" / "text"), self.folder / "data", vocab_size=size, held_out=0.05, seed=0
        )

    def of(self, bug: Bug) -> tuple[Run, Path]:
        """The run with a bug."""
        return made(self.folder / bug.name, bug.setting, self.data, bug.plant), self.folder / bug.name

    def sound(self, setting: Setting) -> tuple[Run, Path]:
        """The run of a setting without one; the first row that has it names it."""
        first = next((row.name for row in ROWS if row.setting == setting), "") or next(
            name for name, each in HEALTHY.items() if each == setting
        )
        return self.healthy(first, setting, nothing_planted)

    def healthy(self, name: str, setting: Setting, adjust: Adjust) -> tuple[Run, Path]:
        """A run in which nothing is wrong."""
        folder = self.folder / f"sound {name}".replace(" ", "-").replace(",", "")
        return made(folder, setting, self.data, adjust), folder


# ── what is said, and whether it is right ─────────────────────────────────────────────────────────────────────────────


def answer(said: Sequence[str], right: Iterable[str], is_note: bool = False) -> str:
    """The answer of one way: what is said, the first first."""
    if not said:
        return "silent"
    if said[0] in set(right):
        return "first"
    return "located" if is_note else "wrong"


def _judged(runs: _Runs, bug: Bug) -> tuple[Row, list[tuple[str, float, bool]]]:
    """The row of a bug, and the probabilities that were given with whether each was of a right word."""
    run, folder = runs.of(bug)
    found = audit_of(folder)
    names = [each["name"] for each in found]
    row: Row = {
        "": bug.name,
        "audit": answer(names, bug.audit, is_note=bool(found) and found[0]["severity"] == "note"),
        "audit says": "; ".join(f"{f['name']} ({f['where']})" if f["where"] else f["name"] for f in found[:3]),
        "audit in three": "yes" if set(names[:3]) & bug.audit else "",
    }
    both = ng.diagnose(runs.sound(bug.setting)[0], run)
    reasons = [(each.name, share) for each, share in both.reasons]
    said = [both.reason.name] if both.reason is not None else []
    row |= {
        "two runs": answer(said, bug.pair),
        "two runs say": ", ".join(said) or (f"({reasons[0][0]} {reasons[0][1]:.2f})" if reasons else "(the same)"),
        "two runs in three": "yes" if {name for name, _ in reasons[:3]} & bug.pair else "",
    }
    one = ng.diagnose(run)
    causes = [(each.cause.name, each.probability) for each in one.causes]
    named = [finding.cause.name for finding in one.findings]
    row |= {
        "rows": answer(named, bug.rows),
        "rows say": ", ".join(named) or f"({causes[0][0]} {causes[0][1]:.2f})",
        "rows in three": "yes" if {name for name, _ in causes[:3]} & bug.rows else "",
        "from": bug.source,
    }
    given = [("two runs", share, name in bug.pair) for name, share in reasons[:1]]
    given += [("rows", f.probability, f.cause.name in bug.rows) for f in one.findings]
    given += [("rows", share, name in bug.rows) for name, share in causes[:1] if not named and name not in _NO_CAUSE]
    return row, given


_NO_CAUSE = ("healthy", "unknown")


def _emit_part(report: Report, runs: _Runs, part: str, bugs: Sequence[Bug]) -> None:
    rows, given = [], []
    for each in bugs:
        row, shares = _judged(runs, each)
        rows.append(row)
        given.extend(shares)
    words: dict[str, Callable[[Bug], object]] = {
        "audit": lambda bug: bug.audit, "two runs": lambda bug: bug.pair, "rows": lambda bug: bug.rows,
    }  # fmt: skip
    report.add(f"{part}: {len(rows)} bugs of public threads", rows)
    counts: list[Row] = []
    for way in WAYS:
        answers = [row[way] for row in rows]
        counts.append(
            {
                "": way,
                "rows": len(rows),
                "have a right word": sum(bool(words[way](bug)) for bug in bugs),
                **{each: answers.count(each) for each in ANSWERS},
                "three": sum(bool(row[f"{way} in three"]) for row in rows),
            }
        )
    report.add(f"{part}: answers", counts)
    bins: list[Row] = []
    for low, high in itertools.pairwise(EDGES):
        for way in WAYS[1:]:
            here = [(share, is_right) for kind, share, is_right in given if kind == way and low <= share < high]
            if here:
                mean, right = sum(share for share, _ in here) / len(here), sum(is_right for _, is_right in here)
                bins.append({"": way, "from": low, "mean given": mean, "right": right, "of": len(here)})
    report.add(f"{part}: probabilities given, and how many were right", bins)


def _emit_healthy(report: Report, runs: _Runs, part: str, names: Sequence[str]) -> None:
    rows: list[Row] = []
    for name in names:
        setting, adjust = SOUND[part][name]
        run, folder = runs.sound(setting) if part == "healthy" else runs.healthy(name, setting, adjust)
        found = audit_of(folder)
        causes = [finding.cause.name for finding in ng.diagnose(run).findings]
        rows.append(
            {
                "": name,
                "audit names": ", ".join(f["name"] for f in found if f["severity"] != "note"),
                "notes": ", ".join(f["name"] for f in found if f["severity"] == "note"),
                "rows name": ", ".join(causes),
            }
        )
    report.add(f"{part}: {len(rows)} loops", rows)
    report.note(
        f"named: audit {sum(bool(r['audit names']) for r in rows)}, rows {sum(bool(r['rows name']) for r in rows)}"
    )


if __name__ == "__main__":
    sys.exit(main())
