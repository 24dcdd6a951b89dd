"""The report as a document: whole, small, inert. What only a browser can tell is in test_page_in_browser.py."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import hashlib
import json
import math
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.report import page
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import NUM_EXPONENTS
from report.made_pages import page_of

MakeRun = Callable[..., Run]

EVIL = '</script><script>alert("1")</script><img src=x onerror=alert(1)>&amp;'


class Document(HTMLParser):
    """Every element with its attributes, and the text outside scripts and styles."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.said: list[str] = []
        self.scripts: list[str] = []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "img", "input", "br", "wbr", "path"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag != "path":
            assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif self.open and self.open[-1] != "style":
            self.said.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.said))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def ids(self) -> list[str]:
        return [attributes["id"] for _, attributes in self.elements if attributes.get("id")]  # type: ignore[misc]


def data_of(source: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', source, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def gauges_of(source: str) -> list[dict[str, Any]]:
    found = re.search(r'<script type="text/plain" id="gauges">(.*?)</script>', source)
    assert found is not None
    return json.loads(gzip.decompress(base64.b64decode(found[1])))


@pytest.fixture
def troubled(make_run: MakeRun) -> list[Run]:
    """Two recipes; names, messages and settings that would like to be markup; gauges; a loss that broke."""
    events = (
        {"kind": "start", "step": 0, "message": EVIL},
        *({"kind": "warning", "step": 5, "message": EVIL, "tensor": EVIL, "advice": EVIL} for _ in range(2)),
    )
    gauges = [
        {
            "step": step,
            "tensors": {f"input:{EVIL}": [1.0, 1.0, 0, 0.1, 0.2, 30.0, 5.0, 3.0, 1.0]},
            "updates": {EVIL: [0.5, math.inf, 0.1, 0.1, 0.1, 0.1]},
            "histograms": {"weight": [step] * NUM_EXPONENTS},
        }
        for step in (10, 20)
    ]
    return [
        make_run("bfloat16/word", events=events, gauges=gauges, config={"data": EVIL}),
        make_run(EVIL, loss=lambda step: math.nan if step > 50 else 3.0, finished=False, config={"data": EVIL}),
    ]


def test_the_document_is_whole(troubled: list[Run]) -> None:
    document = Document(page_of(troubled, "A title", verdict=("So it is.", "And so.")))
    assert document.open == []
    assert len(set(document.ids())) == len(document.ids())
    links = [attributes["href"] for attributes in document.all("a")]
    assert {str(link)[1:] for link in links} <= set(document.ids())
    labels = {attributes.get("aria-labelledby") for attributes in document.all("section")}
    assert labels <= set(document.ids())
    assert "A title" in document.text and "So it is." in document.text and "And so." in document.text


def test_what_a_run_says_is_text_and_never_markup(troubled: list[Run]) -> None:
    source = page_of(troubled, EVIL, verdict=(EVIL,))
    document = Document(source)
    assert [attributes.get("id") for attributes in document.all("script")] == ["data", "gauges", "plotly", None]
    assert document.all("img") == []
    assert not set(document.scripts[0]) & set("<>&")
    # Title, verdict, table, messages, tensors, advice, settings: all readable as they were.
    assert document.text.count('<script>alert("1")</script>') >= 7
    # Plotly interprets tags in labels, so they are escaped there.
    for data in (data_of(source), gauges_of(source)):
        drawn = json.dumps(data)
        assert "<script" not in drawn and "<img" not in drawn
        assert "&lt;script&gt;" in drawn


def test_embedded_json_cannot_end_its_element() -> None:
    value = {"a": "</script><!--&\u2028\u2029", "b": [1.5, None]}
    said = page.embedded(value)
    assert not set(said) & set("<>&\u2028\u2029")
    assert json.loads(said) == value
    with pytest.raises(ValueError):
        page.embedded(math.nan)


def test_nothing_is_fetched_and_only_our_scripts_run(troubled: list[Run]) -> None:
    source = page_of(troubled)
    document = Document(source)
    for tag, attributes in document.elements:
        for name in ("src", "srcset", "action", "data", "poster"):
            assert name not in attributes, (tag, attributes)
        assert (attributes.get("href") or "#").startswith("#")
    assert document.all("link") == []
    style = re.search(r"<style>(.*?)</style>", source, re.DOTALL)
    assert style is not None and "url(" not in style[1] and "@import" not in style[1]
    (policy,) = (meta["content"] for meta in document.all("meta") if meta.get("http-equiv"))
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data: blob:"
    plotly = gzip.decompress(base64.b64decode(document.scripts[2]))
    digests = [
        base64.b64encode(hashlib.sha256(script).digest()).decode() for script in (document.scripts[3].encode(), plotly)
    ]
    assert rules["script-src"] == " ".join(f"'sha256-{digest}'" for digest in digests)


def test_the_cost_table_needs_no_script(make_run: MakeRun) -> None:
    known = {
        "tokens_per_second": 12345.0, "peak_memory_bytes": 3 * 2**30, "edq": 0.999, "noise": 0.25, "lost_fraction": 0.125,
    }  # fmt: skip
    runs = [make_run("bfloat16/word", seed, loss=lambda step, seed=seed: 2.1375 + seed / 80) for seed in range(3)]
    runs = [dataclasses.replace(run, summary={**(run.summary or {}), **known}) for run in runs]
    runs.append(make_run("elsewhere/made", loss=lambda step: math.nan, finished=False))
    document = Document(page_of(runs))
    for said in ("2.2500", "± 0.0125", "12,345", "3.00 GiB", "0.999", "12.5 %", "elsewhere/made", "diverged"):
        assert said in document.text
    heads = [attributes for attributes in document.all("th") if attributes.get("scope") == "col"]
    assert len(heads) >= 9
    assert document.all("caption")


def test_without_rows_the_table_is_made_from_the_runs(make_run: MakeRun) -> None:
    made = [make_run("bfloat16/word", seed, loss=lambda step, seed=seed: 3.0 + seed) for seed in (0, 1)]
    made.append(make_run("bfloat16/naive", loss=lambda step: 4.25, finished=False))
    text = Document(page_of(made)).text
    assert "3.6000" in text and "± 0.7071" in text
    assert "4.3500 so far" in text
    assert "unfinished: step 100 of 100" in text


def test_losses_at_equal_time_stand_in_a_table(make_run: MakeRun) -> None:
    def runs(recipe: str, *losses: float) -> list[Run]:
        return [make_run(recipe, seed, loss=lambda step, loss=loss: loss) for seed, loss in enumerate(losses)]

    made = [*runs("bfloat16/master", 3.0, 3.1), *runs("bfloat16/word", 3.21, 3.29), *runs(EVIL, 2.5)]
    source = page_of(made)
    found = re.search(r'<div id="equal-time".*?</table>', source, re.DOTALL)
    assert found is not None
    table = Document(found[0] + "</div></div>")
    assert "At equal time, after 50 s" in table.text and "Minus bfloat16/master" in table.text
    rows = re.findall(r"<tr>.*?</tr>", found[0], re.DOTALL)[1:]
    said = [Document(row).text.strip().replace("\N{NO-BREAK SPACE}", " ") for row in rows]
    # The lowest first; the other sort of loss is the baseline's mean plus the paired difference.
    assert said[0] == f"{EVIL}no interval, 1 seed2.6500−0.5000"
    assert said[1] == "bfloat16/masterthe baseline3.1500–"
    assert said[2] == "bfloat16/wordworse3.3500+0.2000 ± 0.1271"
    assert 'id="equal-time"' not in page_of(made[:2])


def test_every_figure_has_a_visible_sentence(troubled: list[Run]) -> None:
    source = page_of(troubled)
    cards = re.findall(r"<figure id=\"([^\"]+)\".*?</figure>", source, re.DOTALL)
    captions = re.findall(r"<figcaption id=\"([^\"]+)-how\">(.*?)</figcaption>", source, re.DOTALL)
    assert [name for name, _ in captions] == cards
    assert all(len(sentence) > 60 for _, sentence in captions)
    drawn = {*data_of(source)["figures"], "heat", "ranges-figure", "strip"}
    assert set(cards) == drawn
    assert {attributes["data-plot"] for attributes in Document(source).all("div") if "data-plot" in attributes} == drawn


def test_a_slider_runs_over_the_sampled_steps(troubled: list[Run]) -> None:
    source = page_of(troubled)
    (slider,) = Document(source).all("input")
    assert slider["type"] == "range"
    first, second = gauges_of(source)
    assert first["histogram"]["steps"] == [10, 20]
    assert second == {"heat": {}, "histogram": None}
    assert first["heat"]["edq"]["data"][0]["z"] == [[0.5, 0.5]]


def test_sections_without_data_say_why(make_run: MakeRun) -> None:
    text = Document(page_of([make_run()])).text
    # With gauges and no sampled step yet, the file exists and is empty.
    assert "gauges.jsonl of these runs is missing or holds no step" in text
    assert "No recipe here has a loss scale." in text
    assert "recorded no events" in text


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_run_that_has_hardly_begun_has_a_page(make_run: MakeRun, steps: int) -> None:
    run = make_run(steps=steps, finished=False)
    document = Document(page_of([run]))
    assert document.open == []
    assert f"unfinished: step {steps}" in document.text


def test_what_differs_between_runs_has_a_table_of_its_own(make_run: MakeRun) -> None:
    text = Document(page_of([make_run(config={"lr": 0.5}), make_run(config={"lr": 0.25})])).text
    differs, shared = text.split("What differs between the runs")[1].split("[config] of all runs")
    assert "config.lr" in differs and "0.5" in differs and "0.25" in differs
    assert "llama-1m" in shared and "config.model" not in differs


def test_the_folder_of_a_run_is_no_difference(make_run: MakeRun) -> None:
    made = [make_run(seed=seed, config={"out": f"runs/{seed}"}) for seed in (0, 1)]
    assert "config.seed" in page_of(made) and "config.out" not in page_of(made)


def test_ten_runs_of_ten_thousand_steps_fit_in_five_megabytes(make_run: MakeRun) -> None:
    kinds = ("weight", "grad", "input", "output_grad", "exp_avg", "exp_avg_sq")
    recipes = (
        "float32",
        "bfloat16/float32",
        *(f"bfloat16/{name}" for name in ("master", "exact", "split", "word", "compact", "naive", "kahan", "states8")),
    )
    runs = []
    for place, recipe in enumerate(recipes):
        gauges = [
            {
                "step": step,
                "updates": {
                    f"p{name}": [0.001 * (step * 7919 + name * 104729 + place) % 1.0, 0.3, 0.2, 0.2, 0.1, 1.0]
                    for name in range(40)
                },
                "histograms": {
                    kind: [1 + (step * bin + place) % 997 for bin in range(NUM_EXPONENTS)] for kind in kinds
                },
            }
            for step in range(100, 10_001, 100)
        ]
        # Deterministic, and as hard to compress as noise.
        loss = lambda step, place=place: 2 + (step * 2654435761 + place) % 1000003 / 1000003  # noqa: E731
        runs.append(
            make_run(recipe, steps=10_000, loss=loss, gauges=gauges, more={"loss_scale": 2.0, "skipped": False})
        )
    size = len(page_of(runs).encode())
    assert size < 5_000_000


def test_a_lone_spike_of_ten_thousand_steps_is_on_the_page(make_run: MakeRun) -> None:
    source = page_of([make_run(steps=10_000, loss=lambda step: 77.0 if step == 6789 else 2.0)])
    raw = [trace for trace in data_of(source)["figures"]["training-loss"]["data"] if trace["meta"].get("view") == "raw"]
    assert any(77.0 in trace["y"] and 6789 in trace["x"] for trace in raw)


def test_the_same_runs_give_the_same_page(troubled: list[Run]) -> None:
    assert page_of(troubled) == page_of(troubled)


def test_without_plotly_one_line_says_what_to_do(troubled: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    page.plotly_script.cache_clear()
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(NarrowgaugeError, match="plotly") as caught:
        page_of(troubled)
    assert caught.value.advice == "pip install plotly"
    assert "\n" not in str(caught.value)
