"""The live page: rendered again when its runs grow, and served to this machine's browser alone."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.report import live
from narrowgauge.report.live import LivePage
from narrowgauge.report.publishing import report
from narrowgauge.runs.writer import RunWriter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(live, "time", clock)
    return clock


def write_run(folder: Path, losses: list[float]) -> None:
    with RunWriter.create(
        folder, {"config": {"recipe": "bfloat16/word", "model": "llama-1m", "steps": 9, "seed": 0}}
    ) as writer:
        for step, loss in enumerate(losses, 1):
            writer.append("steps", {"step": step, "loss": loss})


def test_a_grown_run_is_rendered(
    tmp_path: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def render(paths: object) -> bytes:
        clock.now += 3.0  # as long as it takes
        return (tmp_path / "run" / "steps.jsonl").read_bytes()

    monkeypatch.setattr(live, "rendered", render)
    page = LivePage([tmp_path])
    assert not page.poll() and page.current[0] == 0
    write_run(tmp_path / "run", [5.0])
    assert page.poll() and page.current == (1, (tmp_path / "run" / "steps.jsonl").read_bytes())
    clock.now += 100.0
    assert not page.poll(), "nothing has grown"
    with (tmp_path / "run" / "steps.jsonl").open("ab") as file:
        file.write(b"{}\n")
        file.flush()
        assert page.poll() and page.current[0] == 2
        file.write(b"{}\n")
    assert not page.poll(), "a rendering of three seconds rests for thirty"
    clock.now += 30.0
    assert page.poll() and page.current[0] == 3 and page.current[1].endswith(b"{}\n{}\n")


def test_a_run_is_rendered_whole(tmp_path: Path) -> None:
    write_run(tmp_path, [5.0, 4.5, 4.0])
    page = live.rendered([tmp_path]).decode()
    assert "unfinished" in page and 'id="training-loss"' in page
    assert "connect-src &#39;self&#39;" in page or "connect-src 'self'" in page
    with pytest.raises(NarrowgaugeError, match="No run in"):
        live.rendered([tmp_path / "nothing"])


def test_a_log_of_another_framework_is_watched_and_reported_beside_it(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "trainer_state.json"
    log.parent.mkdir()
    log.write_text(
        json.dumps({"log_history": [{"step": step, "loss": 3.0 - step} for step in (1, 2)]})
    )
    assert LivePage([log.parent]).poll()
    assert report([log]) == log.parent / "report.html"


def test_a_request_names_this_machine_once() -> None:
    assert live.is_here(["LOCALHOST:80"]) and not live.is_here(["localhost", "localhost"])
    assert not live.is_here(["localhost:evil"])
