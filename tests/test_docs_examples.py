"""Examples of the documentation run as they stand, each alone: whoever copies one has all it needs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from narrowgauge.runs import events
from narrowgauge.runs.record import read_run
from optional_packages import absent_packages, reason

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(events, "_LISTENERS", [])
    torch.manual_seed(0)


def examples(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def run_example(page: str, number: int) -> None:
    exec(compile(examples(page)[number], f"{page}, example {number}", "exec"), {"__name__": "__main__"})


# What is run below, and looked at.
LOOKED_AT = ("compare.md", "ideas/gauges.md", "ideas/alarms.md")
EXAMPLES = [
    (page, number)
    for page in sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
    if page not in LOOKED_AT
    for number in range(len(examples(page)))
]


@pytest.mark.filterwarnings("ignore::narrowgauge.optim.audit.UpdateLossWarning")
@pytest.mark.parametrize(("page", "number"), EXAMPLES, ids=[f"{page}-{number}" for page, number in EXAMPLES])
def test_every_example_runs_alone(page: str, number: int) -> None:
    if missing := absent_packages(examples(page)[number]):
        pytest.skip(reason(missing))
    run_example(page, number)


def test_no_page_with_examples_is_overlooked() -> None:
    pages = {page for page, _ in EXAMPLES}
    assert {"start.md", "concepts.md", "ideas/rules.md", "ideas/loss-scaling.md"} <= pages
    assert all(examples(page) for page in LOOKED_AT) and len(EXAMPLES) > 15


def plain(text: str) -> str:
    return " ".join(text.split())


def test_your_own_training_loop_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(examples("compare.md")) == 2
    run_example("compare.md", 0)
    said = capsys.readouterr().out
    # By which of the two is decided by losses, which differ between processors in their last digits.
    margin = r"within (the noise|a thousandth of the baseline's loss)"
    assert re.match(rf"bfloat16/word is the cheapest {margin}: 8\.08 bytes per parameter", said), said
    assert (tmp_path / "comparisons" / "mine" / "report.html").is_file()


def test_the_log_of_another_framework_is_read() -> None:
    run_example("compare.md", 1)


def test_the_gauges_write_a_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(examples("ideas/gauges.md")) == 1
    run_example("ideas/gauges.md", 0)
    run = read_run(tmp_path / "runs" / "mine")
    assert [row["step"] for row in run.gauges] == [20, 40, 60, 80, 100] and len(run.steps) == 100
    assert capsys.readouterr().out.strip() == str(run.gauges[-1]["updates"]["0.weight"])


def test_the_first_bad_value_is_told_as_the_page_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(examples("ideas/alarms.md")) == 3
    run_example("ideas/alarms.md", 0)
    text = (DOCS / "ideas" / "alarms.md").read_text(encoding="utf-8")
    (quoted,) = re.findall(r"^It prints:\n\n((?:> .*\n)+)", text, re.MULTILINE)
    assert plain(capsys.readouterr().out) == plain(quoted.replace("> ", ""))


def test_whoever_asks_is_told_of_events(capsys: pytest.CaptureFixture[str]) -> None:
    run_example("ideas/alarms.md", 1)
    events.emit(events.Event("note", 3, "bits may differ", advice="Look."))
    assert capsys.readouterr().out == "note 3 bits may differ Look.\n"


@pytest.mark.filterwarnings("ignore::narrowgauge.optim.audit.UpdateLossWarning")
def test_rows_of_your_own_training_loop_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_example("ideas/alarms.md", 2)
    run = read_run(tmp_path / "runs" / "watched")
    assert ("lost_updates", 30) in [(event["kind"], event["step"]) for event in run.events]
    assert capsys.readouterr().out.startswith("lost_updates 30 weight stores only ") and not events._LISTENERS
