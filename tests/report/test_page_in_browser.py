"""The report in a real browser, from a file, without a network: it draws, answers, and lets nothing run or overflow.

The browser prints the document after its scripts (``--dump-dom``) and its console. To press
buttons without a driver the page is put into a frame of a page that presses them: a frame with ``srcdoc`` has the origin
of the page around it, so that one may look inside.
"""

from __future__ import annotations

import dataclasses
import html
import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import narrowgauge
from analysis.diagnosis.records import AT, healthy_run, raise_events
from narrowgauge.analysis.comparison.comparison import compare_runs
from narrowgauge.report.diagnosis_page import render_diagnosis
from narrowgauge.report.plan_page import render_plan
from narrowgauge.report.runs_page import render
from narrowgauge.runs.record import Run
from planner.made_plans import made_option, made_plan
from report.made_pages import page_of

MakeRun = Callable[..., Run]

EVIL = "<script>document.documentElement.dataset.broken='yes'</script>"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def browser() -> str:
    found = os.environ.get("NARROWGAUGE_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("no Chromium here (Debian: apt install chromium)")
    return found


def opened(folder: Path, source: str, fragment: str = "", width: int = 1200) -> tuple[str, list[str]]:
    """The document after its scripts, and the lines of the console."""
    file = folder / "page.html"
    file.write_text(source, encoding="utf-8")
    command = [
        browser(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr",
        f"--user-data-dir={folder / 'profile'}", f"--window-size={width},2000", "--virtual-time-budget=30000", "--dump-dom",
        f"{file.as_uri()}{fragment}",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        pytest.fail(f"the browser hung: {' '.join(command)}")
    errors = done.stderr.decode(errors="replace")
    assert done.returncode == 0, errors
    return done.stdout.decode(errors="replace"), [line for line in errors.splitlines() if ":CONSOLE" in line]


@pytest.fixture
def report(make_run: MakeRun) -> str:
    """Three runs of two recipes with gauges; a tensor, a message and a setting that would like to run."""
    counts = [0] * 40 + [1, 2, 4, 8, 16, 8, 4, 2, 1] + [0] * 63
    gauges = [
        {
            "step": step,
            "tensors": {
                f"input:{name}": [1.0, 1.0, 0, 0.01, 0.0, 30.0, 5.0, 3.0, 1.0] for name in ("layers.0.up", EVIL)
            },
            "updates": {f"{name}.weight": [0.5, 0.1, 0.1, 0.1, 0.1, 0.1] for name in ("layers.0.up", EVIL)},
            "histograms": {"weight": counts, "grad": counts[10:] + [0] * 10},
        }
        for step in (20, 40, 60)
    ]
    events = ({"kind": "warning", "step": 50, "message": EVIL, "tensor": EVIL, "advice": "read it"},)
    runs = [make_run("bfloat16/word", seed, steps=60, gauges=gauges, events=events) for seed in (0, 1)]
    runs.append(
        make_run("bfloat16/naive", steps=60, loss=lambda step: 2.5 + 5 * math.exp(-step / 30), config={"data": EVIL})
    )
    # One that is far beyond the others ends the axes of losses and of differences.
    runs.append(make_run("bfloat16/no-master", steps=60, loss=lambda step: 5.0 * step))
    return render(dataclasses.replace(compare_runs(runs, "bfloat16/word"), verdict=(EVIL,)))


def data_of(source: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', source, re.DOTALL)
    assert found is not None
    return dict(json.loads(found[1]))


def figures_of(source: str) -> int:
    return source.count('class="plot')


def test_every_figure_is_drawn_in_the_dark_without_a_word_in_the_console(tmp_path: Path, report: str) -> None:
    dom, console = opened(tmp_path, report, "#dark")
    assert console == []
    assert 'data-theme="dark"' in dom[:600]
    assert f'data-drawn="{figures_of(report)}"' in dom[:600]
    assert dom.count('data-ready="yes"') == figures_of(report) >= 9
    assert len(re.findall(r'class="main-svg"', dom)) >= figures_of(report)
    slider = re.search(r'<input[^>]*type="range"[^>]*>', dom)
    assert slider is not None and 'max="2"' in slider[0]
    assert "60 (3 of 3 sampled)" in dom
    assert "data-broken" not in dom[:600]
    assert html.escape(EVIL, quote=False) in dom


def plan_page() -> str:
    return render_plan(made_plan(made_option(), made_option("float8-row/word", memory=120e9), model=EVIL))


def postmortem() -> str:
    run = healthy_run()
    for row in run.steps:
        row["loss"] += 3.0 * (row["step"] == AT)
        row["grad_norm"] *= 30.0 ** (row["step"] == AT - 1)
    raise_events(run)
    return render_diagnosis(narrowgauge.diagnose(run), dataclasses.replace(run, path=Path(EVIL)))


@pytest.mark.parametrize(("make", "width"), [(plan_page, 390), (postmortem, 1200)])
def test_an_answer_is_drawn_without_a_word_in_the_console(tmp_path: Path, make: Callable[[], str], width: int) -> None:
    page = make()
    dom, console = opened(tmp_path, page, "#dark", width)
    assert console == [] and 'data-theme="dark"' in dom[:600] and "data-broken" not in dom[:600]
    assert f'data-drawn="{figures_of(page)}"' in dom[:600] and figures_of(page) >= 3


MEASURE = """
<!doctype html><meta charset="utf-8"><body style="margin:0">
<iframe id="frame" width="400" height="800" srcdoc="SOURCE"></iframe>
<script>
const said = [];
const frame = document.getElementById("frame");
const wait = (test, then, tries = 400) => test() ? then() : tries ? setTimeout(wait, 50, test, then, tries - 1) : end("gave up");
const end = (word) => { document.body.replaceChildren(JSON.stringify([...said, word])); };
const right = (element) => element.getBoundingClientRect().right;
const beyond = (query) => Math.max(...[...frame.contentDocument.querySelectorAll(".plot")].flatMap((plot) =>
  [...plot.querySelectorAll(query)].map((part) => Math.ceil(right(part) - right(plot) - 1))));
addEventListener("load", () => wait(() => Number(frame.contentDocument.documentElement.dataset.drawn) > 0, () => {
  said.push(beyond(".main-svg"), beyond(".legendtext"));
  frame.width = 330; // before anything can be drawn anew, as on paper
  said.push(beyond(".main-svg"));
  end("whole");
}));
</script>
"""


def test_figures_are_whole_at_400_pixels_and_where_they_are_not_drawn_anew(tmp_path: Path) -> None:
    dom, _ = opened(tmp_path, MEASURE.replace("SOURCE", html.escape(postmortem())))
    (found,) = re.findall(r"<body[^>]*>(\[.*\])</body>", dom)
    *beyond, word = json.loads(found)
    assert word == "whole" and len(beyond) == 3 and max(beyond) <= 0, found


PHONE = """
<!doctype html><meta charset="utf-8"><body style="margin:0">
<iframe id="frame" width="390" height="800" srcdoc="SOURCE"></iframe>
<script>
const wait = (test, then, tries = 400) => test() ? then() : tries ? setTimeout(wait, 50, test, then, tries - 1) : end("gave up");
const end = (word) => { document.body.replaceChildren(JSON.stringify(word)); };
addEventListener("load", () => {
  const inside = document.getElementById("frame").contentDocument;
  const all = (query) => [...inside.querySelectorAll(query)];
  wait(() => Number(inside.documentElement.dataset.drawn) > 0, () => end({
    wide: all(".scroll:has(.cards)").filter((box) => box.scrollWidth > box.clientWidth).map((box) => box.ariaLabel),
    tables: all(".cards").length,
    scrolling: all(".legend .scrollbar").filter((bar) => bar.getBoundingClientRect().height > 0).length,
    legends: all(".plot .legend").length,
    cut: all(".plot .xtitle").filter((title) => title.getBoundingClientRect().right > inside.documentElement.clientWidth).length,
  }));
});
</script>
"""


def whole_plan() -> str:
    """A plan as it is computed: its steps have nine parts, more lines of a legend than a figure is high."""
    return render_plan(narrowgauge.plan("llama-8b", recipes=["bfloat16/word"], chip="H100-SXM", chips=8))


@pytest.mark.parametrize("make", [whole_plan, postmortem])
def test_tables_are_cards_and_legends_are_whole_on_a_telephone(tmp_path: Path, make: Callable[[], str]) -> None:
    dom, _ = opened(tmp_path, PHONE.replace("SOURCE", html.escape(make())), width=500)
    (found,) = re.findall(r"<body[^>]*>(\{.*\})</body>", dom)
    said = json.loads(html.unescape(found))
    assert said["tables"] >= 2 and said["legends"] >= 2, said
    assert (said["wide"], said["scrolling"], said["cut"]) == ([], 0, 0), said


PRESS = """
<!doctype html><meta charset="utf-8"><body style="margin:0">
<iframe id="frame" width="390" height="800" srcdoc="SOURCE"></iframe>
<script>
const said = {};
const wait = (test, then, tries = 400) => test() ? then() : tries ? setTimeout(wait, 50, test, then, tries - 1) : end("gave up");
const end = (word) => { document.body.replaceChildren(JSON.stringify({ ...said, end: word })); };
addEventListener("load", () => {
  const inside = document.getElementById("frame").contentDocument;
  const root = inside.documentElement;
  const all = (query) => [...inside.querySelectorAll(query)];
  const one = (query) => inside.querySelector(query);
  const change = (query, value, kind) => { one(query).value = value; one(query).dispatchEvent(new Event(kind)); };
  wait(() => Number(root.dataset.drawn) > 0, () => {
    said.broken = root.dataset.broken ?? "no";
    said.width = [root.clientWidth, root.scrollWidth, Math.max(...all(".card").map((card) => card.scrollWidth))];
    const shown = () => one("#validation-loss").querySelectorAll(".scatterlayer .trace").length;
    const paint = () => one("#validation-loss").querySelector(".gtitle, .xtitle").style.fill;
    const look = () => [shown(), one("#ranges-figure .annotation-text").textContent, one("#heat-how").textContent, paint()];
    said.before = look();
    const ranges = (name) => one(`[data-plot='${name}']`)._fullLayout.yaxis.range.map(Number);
    for (const name of ["validation-loss", "training-loss", "difference", "strip"]) said[name] = ranges(name);
    const at = (element) => element.getBoundingClientRect();
    const box = (name, query) => one(`#${name} ${query}`).getBoundingClientRect();
    said.gap = box("heat", ".annotation-text").top - box("heat", ".xtick").bottom;
    const cells = all("#cost-table tbody tr:first-child > *");
    cells.sort((a, b) => at(a).top - at(b).top || at(a).left - at(b).left);
    said.card = cells.map((cell) => cell.dataset.title ?? "name");
    said.cut = cells.filter((cell) => at(cell).right > root.clientWidth).length;
    const size = (text) => parseFloat(getComputedStyle(text).fontSize);
    said.small = all(".plot text").filter((text) => size(text) < 11).map((text) => text.textContent);
    said.header = getComputedStyle(one("header")).backgroundColor;
    said.fades = ["nav", ".legend"].map((query) => getComputedStyle(one(query)).maskImage.startsWith("linear-gradient"));
    const labels = all("#ranges-figure .annotation-text, #strip .annotation-text");
    said.labels = labels.length;
    const edge = box("ranges-figure", ".main-svg").right;
    said.clipped = labels.filter((label) => label.getBoundingClientRect().right > edge).length;
    one("[data-group='0']").click();
    change("[data-choice='step']", 0, "input");
    change("[data-choice='format']", "bfloat16", "input");
    change("[data-choice='metric']", "lost", "change");
    one("[data-view='raw']").click();
    one("#theme").click();
    one("#cost-table thead button").click();
    one("#cost-table thead button").click();
    wait(() => shown() < said.before[0] && paint() !== said.before[3], () => {
      said.after = look();
      said.rawRange = ranges("training-loss");
      said.step = one("#step-shown").textContent;
      said.pressed = one("[data-view='raw']").getAttribute("aria-pressed");
      said.sorted = all("#cost-table tbody th").map((cell) => cell.textContent);
      const named = (button) => button.textContent.trim() || button.labels?.length || button.ariaLabel;
      said.unnamed = all("button, select, input").filter((button) => !named(button)).length;
      end("done");
    });
  });
});
</script>
"""


def test_buttons_answer_on_a_telephone_and_foreign_scripts_stay_still(tmp_path: Path, report: str) -> None:
    # Had a script come through in spite of the escaping, the page's policy would still hold it.
    smuggled = report.replace("</main>", f"{EVIL}</main>")
    dom, console = opened(tmp_path, PRESS.replace("SOURCE", html.escape(smuggled)), width=500)
    found = re.search(r"<body[^>]*>(.*)</body>", dom, re.DOTALL)
    assert found is not None
    said = json.loads(html.unescape(found[1]))
    assert said["end"] == "done", said
    assert said["broken"] == "no"
    assert all("Content Security Policy" in line for line in console) and console
    client, scrolled, widest = said["width"]
    assert scrolled <= client <= 390 and widest <= 390
    assert all(before != after for before, after in zip(said["before"], said["after"], strict=True))
    assert said["after"][0] < said["before"][0]
    assert said["step"] == "20 (1 of 3 sampled)"
    assert said["pressed"] == "true"
    assert said["sorted"][0] == "bfloat16/word", said["sorted"]
    assert said["unnamed"] == 0
    # Each row of costs is a card, what decides comes first, and nothing of it is off the screen.
    assert said["card"][:3] == ["name", "Minus bfloat16/word", "Bytes/param"] and len(said["card"]) > 4
    assert said["cut"] == 0 and said["small"] == []
    # Nothing shines through the bar that stays on top: its colour has no transparency.
    assert re.fullmatch(r"rgb\(\d+, \d+, \d+\)", said["header"]) and said["fades"] == [True, True]
    # Labels are above their lines, complete, and the title of the steps is below their ticks.
    assert said["labels"] > 10 and said["clipped"] == 0 and said["gap"] >= 0
    # A range that a figure asks for holds, with buttons for other views and without; another view shows everything.
    drawn = data_of(report)
    for name in ("validation-loss", "training-loss", "difference"):
        assert said[name] == pytest.approx(drawn["figures"][name]["layout"]["yaxis"]["range"]), name
    assert said["strip"] == drawn["strip"]["layout"]["yaxis"]["range"]
    assert said["rawRange"][1] > 100 > 2 * said["training-loss"][1]


CHOOSE = """
<!doctype html><meta charset="utf-8"><body style="margin:0">
<iframe id="frame" width="900" height="800" srcdoc="SOURCE"></iframe>
<script>
const said = [];
const end = (word) => { document.body.replaceChildren(JSON.stringify([...said, word])); };
const wait = (test, then, tries = 400) => test() ? then() : tries ? setTimeout(wait, 50, test, then, tries - 1) : end("gave up");
addEventListener("load", () => {
  const inside = document.getElementById("frame").contentDocument;
  const one = (query) => inside.querySelector(query);
  const plot = (name) => one(`[data-plot='${name}']`);
  const drawn = (name) => plot(name).data?.filter((trace) => ["bar", "heatmap"].includes(trace.type)).length;
  const look = () => said.push([
    drawn("ranges-figure"), drawn("heat"), one("#step-shown").textContent, one("#step-choice").disabled,
    plot("ranges-figure").textContent.includes("no histograms"), plot("heat").textContent.includes("no metrics"),
  ]);
  const select = one("#heat [data-choice='run']");
  const steps = [[1, () => !drawn("ranges-figure")], [2, () => drawn("ranges-figure")], [0, () => drawn("heat")]];
  const next = () => {
    look();
    if (!steps.length) return end("done");
    const [run, shown] = steps.shift();
    select.value = run;
    select.dispatchEvent(new Event("change"));
    wait(shown, next);
  };
  wait(() => Number(inside.documentElement.dataset.drawn) > 0, next);
});
</script>
"""


def test_a_run_without_gauges_of_a_kind_shows_none_of_another_run(tmp_path: Path, make_run: MakeRun) -> None:
    counts = [0] * 50 + [1] * 12 + [0] * 50
    updates = {"a.weight": [0.5, 0.1, 0.1, 0.1, 0.1, 0.1]}
    long = [{"step": step, "updates": updates, "histograms": {"weight": counts}} for step in range(1, 101)]
    runs = [
        make_run("bfloat16/word", gauges=long),
        make_run("bfloat16/master", gauges=[{"step": 5, "updates": {"a.weight": [1.0]}}]),
        make_run("bfloat16/naive", gauges=[{"step": 5, "histograms": {"weight": counts}}]),
    ]
    dom, console = opened(tmp_path, CHOOSE.replace("SOURCE", html.escape(page_of(runs))))
    assert console == []
    found = re.search(r"<body[^>]*>(.*)</body>", dom, re.DOTALL)
    assert found is not None
    first, without_histograms, without_readings, again, word = json.loads(html.unescape(found[1]))
    assert word == "done"
    assert first == again == [1, 1, "100 (60 of 60 shown, of 100 sampled)", False, False, False]
    assert without_histograms == [0, 1, "This run has no histograms.", True, True, False]
    assert without_readings == [1, 0, "5 (1 of 1 sampled)", False, False, True]


HOVER = """
<!doctype html><meta charset="utf-8"><body style="margin:0">
<iframe id="frame" width="1200" height="800" srcdoc="SOURCE"></iframe>
<script>
const end = (word) => { document.body.replaceChildren(JSON.stringify(word)); };
const wait = (test, then, tries = 400) => test() ? then() : tries ? setTimeout(wait, 50, test, then, tries - 1) : end("gave up");
addEventListener("load", () => {
  const frame = document.getElementById("frame");
  const inside = frame.contentDocument;
  const plot = inside.querySelector("[data-plot='loss-bytes']");
  const named = [];
  const next = () => {
    const curve = named.length;
    if (curve === plot.data.length) return end([named, plot.querySelectorAll(".scatterlayer .trace path.point").length]);
    frame.contentWindow.Plotly.Fx.hover(plot, [{ curveNumber: curve, pointNumber: 0 }]);
    const label = () => plot.querySelector(".hoverlayer .hovertext")?.textContent ?? "";
    wait(() => label().includes(plot.data[curve].name), () => { named.push(label()); next(); });
  };
  wait(() => Number(inside.documentElement.dataset.drawn) > 0, next);
});
</script>
"""


def test_every_point_is_drawn_and_its_hover_text_names_its_recipe(tmp_path: Path, make_run: MakeRun) -> None:
    sizes = {"master": 16.0, "exact": 14.0, "split": 12.0, "collage-plus": 12.0, "word": 8.0, "naive": 8.0}
    runs = [
        make_run(f"bfloat16/{name}", seed, bytes_per_param=size, loss=lambda step, at=3 + seed / 50: at)
        for name, size in sizes.items()
        for seed in (0, 1)
    ]
    dom, console = opened(tmp_path, HOVER.replace("SOURCE", html.escape(page_of(runs))), width=1300)
    assert console == []
    found = re.search(r"<body[^>]*>(.*)</body>", dom, re.DOTALL)
    assert found is not None
    named, points = json.loads(html.unescape(found[1]))
    assert points == len(sizes)
    for text, (name, size) in zip(named, sizes.items(), strict=True):
        assert f"bfloat16/{name}" in text and f"at {size:g} bytes per parameter, 2 seeds" in text


def test_a_run_that_has_hardly_begun_opens_in_the_light(tmp_path: Path, make_run: MakeRun) -> None:
    source = page_of([make_run(steps=3, finished=False, loss=lambda step: float("nan") if step == 2 else 2.0)])
    dom, console = opened(tmp_path, source, "#light", width=800)
    assert console == []
    assert 'data-theme="light"' in dom[:600]
    assert f'data-drawn="{figures_of(source)}"' in dom[:600]
    assert figures_of(source) > 0
