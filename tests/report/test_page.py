"""The page: its figures on made-up runs, and that it says of a run what was run and what is wrong."""

import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any
from xml.dom import minidom

import numpy as np
import pytest

from narrowgauge.measuring.diagnose.comparison import compare_runs
from narrowgauge.measuring.diagnose.diagnose import Diagnosis
from narrowgauge.report.figures import Line, axis_range, thinned, ticks
from narrowgauge.report.page import differences, lines_of, render, with_means
from narrowgauge.runs.record import Run

EVIL = "<script>document.title = 'broken'</script>&\"'"


def make_run(
    recipe: str = "bfloat16/word",
    seed: int = 0,
    steps: int = 100,
    *,
    loss: Callable[[int], float] = lambda step: 2.0 + 5.0 * math.exp(-step / 30),
    tables: dict[str, Any] | None = None,
    is_finished: bool = True,
    **more: Any,
) -> Run:
    rows = []
    evals = []
    for step in range(1, steps + 1):
        rows.append({"step": step, "loss": loss(step), "seconds": 0.5, **more})
        if step * 5 % steps == 0:
            evals.append({"step": step, "val_loss": loss(step) + 0.1})
    summary = {"recipe": recipe, "val_loss": loss(steps) + 0.1, "bytes_per_param": 8.0}
    config = {"recipe": recipe, "seed": seed, "steps": steps, "model": "llama-1m"}
    folder = Path(f"{recipe.replace('/', '-')}-seed{seed}")
    content = {"config": config, **(tables or {})}
    end = summary if is_finished else None
    return Run(folder, content, rows, evals, [], end)


def page_of(*runs: Run) -> str:
    return render(compare_runs(runs), runs)


def line(values: list[float], **more: Any) -> Line:
    options = {"label": "a", "colour": "#000", "seed": 0, **more}
    return Line(steps=np.arange(1.0, len(values) + 1), values=np.array(values), **options)


# ── figures ───────────────────────────────────────────────────────────────────────────────────────


def test_differences_are_paired_by_seed_and_averaged():
    """Seeds lie a whole nat apart; each pair differs by a quarter."""
    runs = []
    for recipe, more, seeds in (("bfloat16/master", 0.0, 2), ("bfloat16/word", 0.25, 3)):
        for seed in range(seeds):
            start = 3.0 + seed + more
            runs.append(make_run(recipe, seed, loss=lambda step, start=start: start + step % 2))
    for column in ("loss", "val_loss"):
        apart = differences(lines_of(runs)[column], "bfloat16/master")
        assert [(one.label, one.seed) for one in apart] == [
            ("bfloat16/word", seed) for seed in (0, 1)
        ]
        *seeds_drawn, mean = with_means(apart)
        assert len(seeds_drawn) == 2 and mean.is_main
        for one in (*seeds_drawn, mean):
            assert one.values == pytest.approx([0.25] * len(one.values))


def test_no_axis_makes_a_trend_of_noise_or_is_flattened_by_a_spike():
    assert axis_range(np.array([*range(100), 1e6]))[1] < 1000
    assert axis_range(np.array([1.0, 2.0, 3.0, 4.0, 1000.0])) == pytest.approx((0.25, 16.75))
    assert axis_range(np.array([0.9996, 1.0003]), (0.0, 1.1)) == pytest.approx((-0.055, 1.155))
    for values in ([2.0] * 3, [0.0], [math.nan], [math.inf, -math.inf], []):
        low, high = axis_range(np.array(values), (0.0,))
        assert low < high and len(ticks(low, high)) >= 2


def test_a_long_line_is_drawn_by_means_and_keeps_its_last_step():
    thin = thinned(line([2.0 + step % 2 for step in range(1, 10_002)]), 20)
    assert len(thin.steps) == 500 and thin.steps[-1] == 10_001
    assert thin.values == pytest.approx([2.5] * 500)


ODD = {
    "one step": {"steps": 1}, "no step": {"steps": 0, "is_finished": False}, "constant": {"loss": lambda step: 2.0},
    "a text for a number": {"lr": "fast", "grad_norm": None},
    "nothing": {"lr": 0.0, "grad_norm": 0.0, "edq": 0.0, "tokens_per_second": 0.0},
    "not a number": {"loss": lambda step: math.nan}, "gaps": {"loss": lambda step: math.nan if step % 9 == 0 else 2.0},
    "infinite": {"loss": lambda step: math.inf if step > 50 else 2.0}, "unfinished": {"is_finished": False},
    "tiny": {"loss": lambda step: 1e-9 * step, "lr": 1e-12}, "huge": {"loss": lambda step: 10.0 ** (step / 3)},
    "markup": {"recipe": EVIL, "tables": {"model": {"class": EVIL}, "start": {"commit": EVIL}}},
    "settings of another kind": {"tables": {"model": {"num_parameters": "many"}, "data": {}, "start": {"time": 3}}},
}  # fmt: skip


DRAWN = {"one step": r"h\.1", "gaps": r"L[\d. ]+M[\d. ]+h\.1L"}
"""What a curve consists of: a mark, or parts."""


@pytest.mark.parametrize("name", ODD)
def test_every_figure_is_whole_whatever_the_record_holds(name):
    page = page_of(make_run(**ODD[name]), make_run("float32/master"))
    for svg in re.findall(r"<svg viewBox.*?</svg></figure>", page):
        minidom.parseString(svg.removesuffix("</figure>"))
        assert not re.search(r"[\d\"M] ?-?(nan|inf)[\" LMhV]", svg.partition("</desc>")[2])
    assert page.count("<figure>") >= 2 and "<script" not in page
    assert re.search(DRAWN.get(name, ""), page) and not re.search(r' d="[^M"]', page)


# ── words ─────────────────────────────────────────────────────────────────────────────────────────


def test_the_page_says_what_was_run_its_verdict_and_what_diagnose_prints():
    tables = {
        "start": {"time": "2026-11-30 12:00 UTC", "commit": "0123abc"},
        "model": {"class": "LlamaForCausalLM", "num_parameters": 1016960},
        "data": {"fingerprint": "f" * 64},
        "versions": {"narrowgauge": "0.1.0", "torch": "2.13.0"},
    }
    run = make_run(loss=lambda step: 90.0 if step == 60 else 2.0 + 1 / step, tables=tables, edq=1.0)
    page = page_of(run)
    words = re.sub("<[^>]+>", " ", page.partition("</style>")[2])
    for expected in (
        "1 run: llama-1m, bfloat16/word", "started 2026-11-30 12:00 UTC", "commit 0123abc", "1,016,960 parameters",
        f"fingerprint {'f' * 12}", "PyTorch 2.13.0", "100 steps",
        "bfloat16/word ends at a validation loss of 2.1100.",
        "nats per token", "stored share of the update",
    ):  # fmt: skip
        assert expected in words, expected
    for text in str(Diagnosis(run)).splitlines():
        assert escape(text) in page
    assert "<details open>" in page and not re.search(r"(?:src|href)=[\"']?(?:https?|//)", page)
    assert "No recipe is named. bfloat16/word: no final validation loss." in page_of(
        make_run(is_finished=False)
    )


def test_table_page_and_diagnosis_agree_on_lost_updates():
    runs = [make_run("bfloat16/master", edq=1.0), make_run("bfloat16/naive", edq=0.3)]
    for run in runs:
        run.summary["edq"] = run.steps[-1]["edq"]
    comparison = compare_runs(runs)
    told = [bool(Diagnosis(run).readings) for run in runs]
    assert (
        told == [row["verdict"] == "loses its updates" for row in comparison.rows] == [False, True]
    )
    page = render(comparison, runs)
    assert escape(comparison.verdict) in page and page.count("<details open>") == 1


# ── in a browser ──────────────────────────────────────────────────────────────────────────────────

MEASURE = """<script>onload = () => {
  const told = [...document.querySelectorAll('iframe')].map(frame => {
    const page = frame.contentDocument;
    return [page.documentElement.scrollWidth - frame.clientWidth, page.title]; });
  document.body.dataset.told = JSON.stringify(told); }</script>"""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def test_it_opens_in_a_browser_at_three_widths_without_overflow(tmp_path):
    """Fourteen recipes on one page, a tensor and a message that would like to run."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no Chromium here (Debian: apt install chromium)")
    runs = []
    for place in range(14):
        recipe = ("bfloat16", "float32", "float8-row", "int8-row")[place % 4]
        storage = ("master", "word", "naive", "exact")[place // 4]
        more = {"stalled": {EVIL: 0.3}, "edq": 1.0, "lr": 1e-3, "grad_norm": 1.0 + place / 50}
        runs.append(make_run(f"{recipe}/{storage}", **more))
    page = escape(page_of(*runs), quote=True)
    frames = ""
    for width in (390, 800, 1400):
        frames += f'<iframe width="{width}" height="900" srcdoc="{page}"></iframe>'
    file = tmp_path / "page.html"
    file.write_text(f"<!doctype html><meta charset=utf-8>{frames}{MEASURE}", encoding="utf-8")
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr",
        f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1600,2000", "--virtual-time-budget=30000", "--dump-dom",
        file.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, timeout=120, check=True)
    assert ":CONSOLE" not in done.stderr.decode()
    [told] = re.findall(r'data-told="([^"]*)"', done.stdout.decode())
    for overflow, title in json.loads(told.replace("&quot;", '"')):
        assert overflow <= 0 and title.startswith("14 runs: llama-1m")
