"""What the diagnosis says of bugs that others had: of the record of each alone, and beside the loop without it.

The rows of ``_public_bugs.py`` cite a public thread each, and were written before anything was diagnosed. What counts first is
that nothing wrong is said: a cause that is not a right word for the bug is wrong, and silence is not.

Claim: no wrong cause in a single run, and none in a pair; how many are named is what it is (docs/log/diagnosis.md).
Baseline: the loop without a bug. Run: ``./dev bench public_bugs [--keep FOLDER] [--quick]``. No times are compared, so
``--rounds`` has no effect.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from _injected_runs import SHAPE, prepare
from _public_bugs import BUGS, bug_run
from timing import Report, Row, parser

import narrowgauge as ng
from narrowgauge.trainer.data.dataset import prepare_data

RIGHT_OF_PAIRS = ("bug", "optimizer-settings", "data-order", "missing-part", "data")
"""Reasons that are right words for a change of code, of what it reads, or of what it sets."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    flags = parser(__doc__, rounds=1)
    flags.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="where runs stay (default: a folder that is removed)"
    )
    options = flags.parse_args(arguments)
    report = Report("public bugs", options)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        prepare(folder / "place")
        _emit(report, folder, 3 if options.quick else len(BUGS))
    return report.end()


def _emit(report: Report, folder: Path, count: int) -> None:
    size = SHAPE["vocab_size"]
    assert isinstance(size, int)

    def data() -> object:
        return prepare_data(str(folder / "place" / "text"), folder / "data", vocab_size=size, held_out=0.05, seed=0)

    sound = bug_run(folder / "place", folder / "none", BUGS[0], data)  # type: ignore[arg-type]
    rows: list[Row] = []
    for bug in BUGS[:count]:
        run = bug_run(folder / "place", folder / bug.name, bug, data)  # type: ignore[arg-type]
        found = ng.diagnose(run)
        named = [finding.cause.name for finding in found.findings]
        if bug.causes == ("healthy",):
            answer, pair = "right" if not named else "wrong", ""
        else:
            answer = "named" if set(named[:1]) & set(bug.causes) else "wrong" if named else "silent"
            both = ng.diagnose(sound, run)
            reason = both.reason.name if both.reason is not None else ""
            pair = f"{'right' if reason in RIGHT_OF_PAIRS else 'wrong' if reason else 'silent'} {reason}".strip()
        rows.append(
            {
                "": bug.name,
                "one run": answer,
                "says": ", ".join(named) or found.verdict[:60],
                "of two": pair,
                "from": bug.source,
            }
        )
    report.add("bugs of public threads", rows)
    single = [row["one run"] for row in rows[1:]]
    pairs = [str(row["of two"]).partition(" ")[0] for row in rows[1:]]
    for what, answers in (("one run", single), ("two runs", pairs)):
        counts = ", ".join(f"{word} {answers.count(word)}" for word in dict.fromkeys(answers))
        report.note(f"{what}: {counts} of {len(answers)}")


if __name__ == "__main__":
    sys.exit(main())
