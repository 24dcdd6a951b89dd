"""The page of a diagnosis: everything that a postmortem asks, of one run and of two, with the moments dated as recorded."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import narrowgauge as ng
from analysis.diagnosis.records import AT, NUM_STEPS, healthy_run, raise_events
from narrowgauge.cli.main import main
from narrowgauge.report.diagnosis_page import render_diagnosis, render_two
from narrowgauge.report.hindsight import hindsight, until
from narrowgauge.runs.record import Run
from report.test_page_in_browser import EVIL, data_of
from report.test_runs_page import Document


@pytest.fixture
def spiked() -> Run:
    """A batch of noise at one step, which the spike's detector told of."""
    run = healthy_run(gauges_every=10)
    for row in run.steps:
        row["loss"] += 3.0 * (row["step"] == AT)
    for row in run.gauges:
        row["seconds"] = 0.01
    raise_events(run)
    return changed(run, path=Path(EVIL))


def changed(run: Run, **fields: object) -> Run:
    """A copy of a record that was never on a disk, with its gauges."""
    copy = replace(run, **fields)  # type: ignore[arg-type]
    vars(copy)["gauges"] = run.gauges
    return copy


def test_a_postmortem_answers_when_what_what_else_and_since_when(spiked: Run) -> None:
    found = ng.diagnose(spiked)
    page = render_diagnosis(found, spiked)
    document = Document(page)
    headings = re.findall(r'<h2 id="[\w-]+">([^<]+)</h2>', page)
    assert headings[:7] == [
        "Verdict", "What to change", "Timeline", "The chain of events", "What else it could be", "Caught earlier", "For a ticket",
    ]  # fmt: skip
    (finding,) = found.findings
    tokens, seconds = 256 * (NUM_STEPS - AT), sum(row["seconds"] for row in spiked.steps if row["step"] > AT)
    for words in (
        f"First sign, step {AT}",
        f"first alarm while training, step {AT}",
        f"{NUM_STEPS - AT} steps, {tokens:,} tokens, {seconds:.3g} s: 49% of the run",
        "--on-spike stop would have ended the run at step 81",
        "8 samples, took 80 ms",
        finding.remedy,
        finding.alternatives[0].cause.effect,
    ):
        assert words.lower() in document.text.lower(), words
    for line in found.text().splitlines():
        assert re.sub(r"\s+", " ", line).strip() in document.text
    timeline = data_of(page)["figures"]["timeline-loss"]["data"]
    assert [trace["x"] for trace in timeline if trace.get("yaxis") == "y2"] == [[AT, AT]]
    assert EVIL not in page and 'src="http' not in page
    # Of two findings the one whose first sign came first is to be mended first.
    both = replace(found, findings=(finding, replace(finding, step=20)))
    assert "Begin with bad-data: its first sign, at step 20, came" in render_diagnosis(both, spiked)


def test_the_cause_is_named_as_soon_as_a_shorter_record_names_it(spiked: Run) -> None:
    (finding,) = ng.diagnose(spiked).findings
    when = hindsight(finding, spiked)
    assert when is not None and when.sign == AT and when.named is not None
    named = [found.cause.name for found in ng.diagnose(until(spiked, when.named)).findings]
    assert named == ["bad-data"] and AT < when.named <= AT + 3
    # Without events nobody said so at the time.
    silent = changed(spiked, events=[])
    when = hindsight(finding, silent)
    assert when is not None and when.alarm is None
    assert "no detector ran with the training" in Document(render_diagnosis(ng.diagnose(silent), silent)).text


def test_two_runs_have_a_page_with_the_place_where_they_part(spiked: Run) -> None:
    healthy = healthy_run()
    found = ng.diagnose(healthy, spiked)
    page = render_two(found, healthy, spiked)
    text = Document(page).text
    for words in (
        "The runs first differ at step 81, in the loss",
        "silent-corruption",
        "79 steps, 20,224 tokens",
        found.evidence[0][1:],
    ):
        assert words in text
    marks = [trace["x"] for trace in data_of(page)["figures"]["pair-loss"]["data"] if trace.get("yaxis") == "y2"]
    assert marks == [[AT, AT]]
    assert "Timeline" in render_two(ng.diagnose(healthy, healthy_run()), healthy, healthy_run())


def test_no_page_states_a_weight_that_was_not_calibrated(spiked: Run) -> None:
    """Causes and reasons are in the order of their weights, and nothing says by how much."""
    short = changed(spiked, steps=spiked.steps[:10], events=[])
    pages = [render_diagnosis(ng.diagnose(run), run) for run in (spiked, short)]
    pages.append(render_two(ng.diagnose(healthy_run(), spiked), healthy_run(), spiked))
    for page in pages:
        section = page[page.index('<section id="else"') :].partition("</section>")[0]
        assert "the likeliest first" in section and "%" not in Document(section).text


def test_the_command_writes_both_pages(tmp_path: Path) -> None:
    for name, last in (("one", 2.0), ("two", 2.5)):
        with ng.runs.RunWriter.create(tmp_path / name, {"config": {"recipe": "bfloat16/word"}}) as writer:
            for step in range(1, 41):
                writer.step({"step": step, "loss": last if step == 40 else 3.0, "grad_norm": 1.0})
    for words in (["one"], ["one", "two"]):
        page = tmp_path / "page.html"
        said = CliRunner().invoke(main, ["diagnose", *(str(tmp_path / word) for word in words), "--html", str(page)])
        assert said.exit_code == 0 and said.output.endswith(f"{page}\n"), said.output
        assert f"Diagnosis of {words[0]}" in page.read_text()
