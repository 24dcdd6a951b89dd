"""The live page in a real browser: rows arrive, what the reader did stays, and nothing leaves this machine."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from narrowgauge.report.live.page_server import PageServer
from narrowgauge.report.live.poll_loop import Watch
from narrowgauge.runs.events import Event
from report.conftest import gauge_row
from report.live.driven_browser import Tab, tab
from report.live.growing_runs import begin, write_steps

EVIL = "<img src=x onerror=\"document.documentElement.dataset.broken='yes'\">"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with tab(tmp_path_factory.mktemp("browser")) as made:
        yield made


class Served:
    """A folder, watched and served; the test polls."""

    def __init__(self, folder: Path) -> None:
        self.watch = Watch([folder])
        self.server = PageServer(self.watch)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    @property
    def address(self) -> str:
        return self.server.address

    def poll(self) -> None:
        while not self.watch.poll():
            pass

    def close(self) -> None:
        self.watch.end()
        self.server.close()
        self.thread.join()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path / "runs")
    yield made
    made.close()


def test_rows_events_and_sections_arrive_and_the_reader_is_not_disturbed(
    page: Tab, served: Served, tmp_path: Path
) -> None:
    with (
        begin(tmp_path / "runs" / "a", steps=1000) as writer,
        begin(tmp_path / "runs" / "b", "bfloat16/master") as other,
    ):
        write_steps(writer, 1, 100)
        write_steps(other, 1, 100)
        for step in (50, 100):
            writer.gauge(gauge_row(step))
        served.poll()
        page.open(served.address, dark=True)
        page.until("Number(document.documentElement.dataset.updates) > 0")
        plot = "document.querySelector(\"[data-plot='training-loss']\")"
        last = f"Math.max(...{plot}.data.flatMap((trace) => trace.x))"
        assert page.see(last) == 100
        assert "running" in page.see("document.getElementById('now').textContent")
        assert "100 of 1,000" in page.see("document.getElementById('now').textContent")
        page.until("/^\\d+ s ago$/.test(document.querySelector('#now time').textContent)")
        # The sections of the whole record come from a process of their own.
        served.watch.settle(60)
        page.until(
            "document.querySelector(\"[data-plot='heat']\").dataset.ready === 'yes' && document.getElementById('cost-table')"
        )
        page.until("document.querySelector(\"[data-plot='ranges-figure']\").dataset.ready === 'yes'")
        # What the reader chooses, with the keyboard too: a view, a slider's step, a range of steps.
        page.see("document.querySelector(\"[data-view='raw']\").focus()")
        page.press("Enter", 13)
        page.press(" ", 32)
        assert page.until("document.querySelector(\"[data-view='raw']\").getAttribute('aria-pressed') === 'true'")
        page.see("document.getElementById('step-choice').focus()")
        page.press("ArrowLeft", 37)
        page.until("document.getElementById('step-shown').textContent.startsWith('50 ')")
        page.drag("[data-plot='training-loss'] .nsewdrag", 0.4, 0.6)
        page.until("document.documentElement.dataset.zoomed === 'training-loss'")
        zoomed = page.see(f"{plot}.layout.xaxis.range.map(Number)")
        assert 30 < zoomed[0] < 50 < zoomed[1] < 70
        assert page.see(last) == math.floor(zoomed[1]) + 1
        # New rows, an event, and a sample.
        write_steps(writer, 101, 150)
        writer.event(Event("loss_spike", 150, EVIL, advice="Look at it."))
        writer.gauge(gauge_row(150))
        served.poll()
        page.until("document.title.startsWith('(1) ')")
        assert "150 of 1,000" in page.see("document.getElementById('now').textContent")
        assert EVIL in page.see("document.getElementById('event-table').textContent")
        grad = "document.querySelector(\"[data-plot='grad-norm']\").data"
        page.until(f"Math.max(...{grad}.flatMap((trace) => trace.x)) === 150")
        served.watch.settle(60)
        page.until("document.getElementById('step-choice').max === '2'")
        assert page.see("document.activeElement.id") == "step-choice"
        assert page.see("document.getElementById('step-shown').textContent").startswith("50 ")
        assert page.see(f"{plot}.layout.xaxis.range.map(Number)") == zoomed
        assert page.see("document.querySelector(\"[data-view='raw']\").getAttribute('aria-pressed')") == "true"
        page.double_click("[data-plot='training-loss'] .nsewdrag")
        page.until(f"{last} === 150")
        assert page.see("getComputedStyle(document.documentElement).colorScheme") == "light dark"
        dark = page.see("getComputedStyle(document.body).backgroundColor")
        page.see("document.getElementById('theme').click()")
        assert page.see("getComputedStyle(document.body).backgroundColor") != dark
    assert page.see("document.documentElement.dataset.broken ?? 'no'") == "no"
    assert page.said == []
    assert page.requested and all(address.startswith((served.address, "data:", "blob:")) for address in page.requested)


def test_it_fits_a_telephone_and_says_how_a_run_that_died_goes_on(page: Tab, served: Served, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / ("a-run-with-a-very-long-name" * 4)
    with begin(folder) as writer:
        write_steps(writer, 1, 40)
        writer.event(Event("lost", 40, "rank 1 was killed"))
    served.poll()
    page.open(served.address, width=390, height=844)
    page.until("Number(document.documentElement.dataset.updates) > 0")
    now = page.see("document.getElementById('now').textContent")
    assert "died" in now and "rank 1 was killed" in now and f"narrowgauge resume {folder}" in now
    assert page.see("document.documentElement.scrollWidth") <= 390
    right = (
        "Math.max(...[...document.querySelectorAll('table.now *')].map((cell) => cell.getBoundingClientRect().right))"
    )
    assert page.see(right) <= 390
    served.watch.settle(60)
    page.until("document.getElementById('cost-table')")
    assert page.see("document.documentElement.scrollWidth") <= 390
    assert page.said == []


def test_a_page_that_is_opened_before_there_is_a_run_begins_with_it(page: Tab, served: Served, tmp_path: Path) -> None:
    served.poll()
    page.open(served.address)
    page.until("document.querySelector('h1').textContent === 'Waiting for a run'")
    with begin(tmp_path / "runs" / "a") as writer:
        write_steps(writer, 1, 5)
        served.poll()
        page.until(
            "document.querySelector('h1').textContent.includes('bfloat16/word') && document.documentElement.dataset.updates"
        )
        assert page.see('document.querySelectorAll("#training-loss .main-svg").length') > 0
    served.server.is_closing.set()
    served.watch.end()
    page.until("document.getElementById('connection').textContent.includes('has ended')")
    assert page.said == []
