"""The report in a real browser, from a file, without a network: it draws, answers, and lets nothing
run or overflow.

The browser prints the document after its scripts (``--dump-dom``) and its console.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from narrowgauge.analysis.comparison.comparison import compare_runs
from narrowgauge.report.runs_page import render
from narrowgauge.runs.record import Run

MakeRun = Callable[..., Run]

EVIL = "<script>document.documentElement.dataset.broken='yes'</script>"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def browser() -> str:
    browser = os.environ.get("NARROWGAUGE_BROWSER") or next(
        filter(None, map(shutil.which, BROWSERS)), None
    )
    if browser is None:
        pytest.skip("no Chromium here (Debian: apt install chromium)")
    return browser


def opened(folder: Path, source: str) -> tuple[str, list[str]]:
    """The document in the dark after its scripts, and the lines of the console."""
    file = folder / "page.html"
    file.write_text(source, encoding="utf-8")
    command = [
        browser(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr",
        f"--user-data-dir={folder / 'profile'}", "--window-size=1200,2000", "--virtual-time-budget=30000", "--dump-dom",
        "--blink-settings=preferredColorScheme=0", file.as_uri(),
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        pytest.fail(f"the browser hung: {' '.join(command)}")
    errors = done.stderr.decode(errors="replace")
    assert done.returncode == 0, errors
    return done.stdout.decode(errors="replace"), [
        line for line in errors.splitlines() if ":CONSOLE" in line
    ]


@pytest.fixture
def report(make_run: MakeRun) -> str:
    """Three runs of two recipes with gauges; a tensor, a message and a setting that would like to
    run.
    """
    gauges = []
    for step in (20, 40, 60):
        gauges.append(
            {
                "step": step,
                "tensors": {
                    f"input:{name}": [1.0, 1.0, 0, 0.01, 0.0, 30.0, 5.0, 3.0, 1.0]
                    for name in ("layers.0.up", EVIL)
                },
                "updates": {
                    f"{name}.weight": [0.5, 0.1, 0.1, 0.1, 0.1, 0.1]
                    for name in ("layers.0.up", EVIL)
                },
                "histograms": {"weight": [0, 1]},
            }
        )
    events = ({"what": EVIL, "step": 50, "tensor": EVIL, "advice": EVIL},)
    runs = []
    for seed in (0, 1):
        runs.append(make_run("bfloat16/word", seed, steps=60, gauges=gauges, events=events))
    runs.append(
        make_run(
            "bfloat16/naive",
            steps=60,
            loss=lambda step: 2.5 + 5 * math.exp(-step / 30),
            config={"data": EVIL},
        )
    )
    # One that is far beyond the others ends the axes of losses and of differences.
    runs.append(make_run("bfloat16/no-master", steps=60, loss=lambda step: 5.0 * step))
    return render(compare_runs(runs))


def figures_of(source: str) -> int:
    return source.count('class="plot')


def test_every_figure_is_drawn_in_the_dark_without_a_word_in_the_console(
    tmp_path: Path, report: str
) -> None:
    shown = report.replace(
        '<details class="needs-script" data-values',
        '<details open class="needs-script" data-values',
    )
    dom, console = opened(tmp_path, shown)
    assert console == [] and "data-broken" not in dom[:600]
    assert f'data-drawn="{figures_of(report)}"' in dom[:600] and figures_of(report) >= 3
    assert dom.count('class="plot js-plotly-plot"') == figures_of(report)
    # The text of the axes has the muted colour of the dark theme.
    assert "fill: rgb(154, 163, 178)" in dom and "fill: rgb(93, 101, 114)" not in dom
    assert "&lt;script&gt;document." in dom
    # What a figure draws is a table too.
    for name, first in (
        ("training-loss", "bfloat16/word · seed 0"),
        ("heat", "layers.0.up.weight"),
    ):
        assert re.search(
            rf'data-values="{name}".*?<tbody><tr><td>{first}</td><td>\d+</td><td>[\d.]+</td>',
            dom,
            re.DOTALL,
        )
    assert not re.search(r"(?:src|href)=[\"']?https?:", report)
