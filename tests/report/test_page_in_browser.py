"""The report in a real browser, from a file, without a network: it draws, answers, and lets nothing
run or overflow.

The browser prints the document after its scripts (``--dump-dom``) and its console.
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from plotly.offline import get_plotlyjs

from narrowgauge.measuring.comparison import compare_runs
from narrowgauge.report.page import render
from narrowgauge.runs.record import Run

MakeRun = Callable[..., Run]

EVIL = "<script>document.documentElement.dataset.broken='yes'</script>"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def opened(folder: Path, source: str) -> tuple[str, list[str]]:
    """The document in the dark after its scripts, and the lines of the console."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no Chromium here (Debian: apt install chromium)")
    file = folder / "page.html"
    file.write_text(source, encoding="utf-8")
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr",
        f"--user-data-dir={folder / 'profile'}", "--window-size=1200,2000", "--virtual-time-budget=30000", "--dump-dom",
        "--blink-settings=preferredColorScheme=0", file.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, timeout=120, check=True)
    console = [line for line in done.stderr.decode().splitlines() if ":CONSOLE" in line]
    return done.stdout.decode(), console


@pytest.fixture
def report(make_run: MakeRun) -> str:
    """Four runs of three recipes; a tensor and a message that would like to run."""
    events = ({"what": "stored-share", "step": 50, "tensor": EVIL, "text": EVIL},)
    runs = [make_run("bfloat16/word", seed, 60, events=events) for seed in (0, 1)]
    runs.append(
        make_run("bfloat16/naive", steps=60, loss=lambda step: 2.5 + 5 * math.exp(-step / 30))
    )
    # One that is far beyond the others ends the axes of losses and of differences.
    runs.append(make_run("bfloat16/no-master", steps=60, loss=lambda step: 5.0 * step))
    return render(compare_runs(runs), runs, f"<script>{get_plotlyjs()}</script>")


def test_every_figure_is_drawn_in_the_dark_without_a_word_in_the_console(
    tmp_path: Path, report: str
) -> None:
    dom, console = opened(tmp_path, report)
    assert console == [] and "data-broken" not in dom[:600]
    num_curves = len(re.findall(r'<div id="curve-\d"', report))
    drawn = re.findall(r'<div id="curve-\d"[^>]*js-plotly-plot', dom)
    assert num_curves == len(drawn) == 2 and dom.count('data-title="Download plot"') == 3
    assert report.count('"format": "svg"') == 3
    assert "&lt;script&gt;document." in dom
    body = report.partition("</head>")[2]
    assert not re.search(r"(?:src|href)=[\"']?https?:", body) and len(body) < 200_000
