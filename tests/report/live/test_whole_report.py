"""The sections of the whole record: those of the report, each by itself, in its order."""

from __future__ import annotations

import json
import re
from pathlib import Path

from narrowgauge.analysis.comparison.comparison import compare_runs
from narrowgauge.report.live.live_page import LivePage
from narrowgauge.report.live.whole_report import whole_report
from narrowgauge.report.publishing import read_runs, title_of
from narrowgauge.report.runs_page import SECTIONS, render
from report.conftest import gauge_row
from report.live.growing_runs import begin, write_steps


def two_runs(folder: Path) -> list[Path]:
    for recipe in ("word", "master"):
        with begin(folder / recipe, f"bfloat16/{recipe}") as writer:
            write_steps(writer, 1, 20)
            writer.gauge(gauge_row(10))
    return [folder / "master", folder / "word"]


def test_sections_are_those_of_the_report_and_each_is_one_element(tmp_path: Path) -> None:
    paths = two_runs(tmp_path)
    made = whole_report(paths, [tmp_path])["sections"]
    found = compare_runs(read_runs([tmp_path]))
    page = render(found, title_of(found))
    nav, *names = made
    assert nav == "nav" and names == [name for name in SECTIONS if name in made]
    for name in names:
        assert made[name].startswith(f'<section id="{name}" ') and made[name].endswith("</section>")
        assert made[name].count("<section ") == 1 and made[name] in page
    assert re.findall(r'<section id="([^"]+)"', page) == names
    assert re.findall('href="#([^"]+)"', made["nav"]) == ["now", *names]
    assert {"layers", "ranges"} <= set(names) and "ranks" not in names


def test_a_page_opens_with_headings_where_sections_are_still_to_come(tmp_path: Path) -> None:
    paths = two_runs(tmp_path)
    page = LivePage([tmp_path])
    while page.poll() or not page.is_read:
        pass
    first = page.document()
    for name in ("diagnosis", "costs", "memory", "price", "layers", "history", "environment"):
        (section,) = re.findall(rf'<section id="{name}".*?</section>', first, re.DOTALL)
        assert f">{SECTIONS[name].heading}</h2>" in section and "is being read for this section" in section
    assert "is being read for this section" not in re.findall(r'<section id="loss".*?</section>', first, re.DOTALL)[0]
    page.whole = whole_report(paths, [tmp_path])
    later = page.document()
    assert page.whole["sections"]["costs"] in later and "is being read for this section" not in later
    page.update()
    # The state of the runs stays first: a section that is not in the order is removed from the page.
    order = json.loads(page._parts["order"][1])
    assert order[:2] == ["now", "nav"] and order[2:] == list(page.whole["sections"])[1:]
