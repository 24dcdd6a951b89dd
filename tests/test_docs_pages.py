"""The ways into the documentation: each ends with something that ran, and what its pages say is what tables and log say."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from narrowgauge.spec.notation import parse
from narrowgauge.spec.storages import STORAGES
from optional_packages import absent_packages, reason
from script_modules import script_module

DOCS = Path(__file__).parents[1] / "docs"
DOORS = ("start.md", "integrations/overview.md", "command-line.md", "fit-and-fault.md")
PRINTING = ("start.md", "integrations/overview.md")
"""Ways in whose example prints what the page says; the others hold sessions of commands."""
SESSIONS = ("command-line.md", "fit-and-fault.md")


def text_of(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def sessions() -> ModuleType:
    return script_module("docs/sessions.py")


def test_the_home_page_leads_to_four_ways_in_by_one_picture() -> None:
    home = text_of("index.md")
    rows = re.findall(r"^\| (?!you have|---).*?\]\((\S+?)\) \|", home, re.MULTILINE)
    assert tuple(rows) == DOORS
    assert set(re.findall(r"!\[.*?\]\((.*?)\)", home)) == {
        "images/costs.svg#only-light",
        "images/costs-dark.svg#only-dark",
    }


def test_no_picture_is_drawn_for_light_pages_alone() -> None:
    for page in DOCS.rglob("*.md"):
        shown = re.findall(r"!\[.*?\]\((\S+?\.svg)#only-(light|dark)\)", page.read_text(encoding="utf-8"))
        plain = re.findall(r"!\[.*?\]\((\S+?\.svg)\)", page.read_text(encoding="utf-8"))
        assert not plain, f"{page.name} shows {plain} on light and on dark pages alike"
        light, dark = ({name for name, scheme in shown if scheme == which} for which in ("light", "dark"))
        assert dark == {name.replace(".svg", "-dark.svg") for name in light}, page.name
        for name in light:
            drawn = [
                (page.parent / name.replace(".svg", end)).read_text(encoding="utf-8") for end in (".svg", "-dark.svg")
            ]
            assert drawn[0] != drawn[1], f"{name} is as light as its twin"
            # Colours and the opacity of an area are all that the two may differ in.
            plain, other = (re.sub(r"#[0-9a-f]{3,6}\b|opacity: [\d.]+", "", each) for each in drawn)
            assert plain == other, name


@pytest.mark.filterwarnings("ignore::narrowgauge.optim.audit.UpdateLossWarning")
@pytest.mark.parametrize("page", PRINTING)
def test_the_last_example_prints_what_the_page_says(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = re.findall(r"^```python\n([^`]*)```\n\n[^\n]*prints:\n\n```text\n([^`]*)```", text_of(page), re.MULTILINE)
    assert len(found) == 1
    ((example, said),) = found
    if missing := absent_packages(example):
        pytest.skip(reason(missing))
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(compile(example, page, "exec"), {"__name__": "__main__"})
    assert [line for line in capsys.readouterr().out.splitlines() if line in said.splitlines()] == said.splitlines()


@pytest.mark.parametrize("page", SESSIONS)
def test_sessions_print_what_the_page_says(page: str, sessions: ModuleType, tmp_path: Path) -> None:
    found = sessions.sessions(DOCS / page)
    assert found and all(each.commands for each in found)
    with sessions.checkout(tmp_path):
        for each in found:
            printed = each.run()
            assert each.agrees(printed), (
                f"docs/{page} is not what is printed (python docs/sessions.py docs/{page}):\n{printed}"
            )


def test_a_session_that_prints_something_else_is_noticed(sessions: ModuleType, tmp_path: Path) -> None:
    with sessions.checkout(tmp_path):
        said = sessions.Session(True, "$ narrowgauge show value 0.1\n").run()
    exact, loose = sessions.Session(True, said), sessions.Session(False, said)
    assert exact.agrees(said) and loose.agrees(said)
    other = said.replace("0.0977 %", "0.0978 %")
    assert other != said and not exact.agrees(other) and loose.agrees(other)
    assert not loose.agrees(said.replace("bfloat16", "bfloat17x")) and not loose.agrees(f"{said}more\n")
    with pytest.raises(ValueError, match="ended with status 2"):
        sessions.Session(True, "$ narrowgauge show format none\n").run()


def test_the_decision_page_has_the_tables_bytes() -> None:
    page = text_of("choosing.md")
    rows = re.findall(r"^\| `([\w-]+)` \| (\d+) \| (\d+) GB \|", page, re.MULTILINE)
    assert [name for name, *_ in rows] == ["exact", "word", "compact", "states8"]
    for name, size, state in rows:
        assert STORAGES[name].bytes_per_param == int(size) and 10 * int(size) == int(state)
    recipes = re.findall(r"`((?:bfloat16|float16|float8-\w+)/[\w-]+)`", page)
    assert recipes and all(parse(name) for name in recipes)


def test_figures_of_the_decision_page_stand_in_the_log() -> None:
    figures = re.findall(r"\*\*([+−]?\d[^* ]*)\*\*", text_of("choosing.md"))
    log = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "log").glob("*.md"))
    missing = [
        figure for figure in figures if not re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", log) and figure != "8"
    ]
    assert len(figures) > 12 and not missing


COMMON = (
    "fp32 master weights", "8-bit Adam", "stochastic rounding", "deterministic training", "loss scaling",
    "error feedback", "AMP", "autocast", "FP8 training", "gradient accumulation", "delayed scaling", "microscaling",
    "LLM.int8()", "Kahan summation", "gradient compression", "ZeRO-3", "FSDP2", "all-reduce", "wgrad", "MFU",
    "bitwise reproducibility", "optimizer in backward",
)  # fmt: skip


def test_the_glossary_has_the_common_words_and_every_row_a_page() -> None:
    page = text_of("glossary.md")
    rows = re.findall(r"^\| (?!here|---)(.*) \|$", page, re.MULTILINE)
    elsewhere = " ".join(row.split(" | ")[2] for row in rows)
    assert all(len(row.split(" | ")) == 4 for row in rows) and len(rows) > 40
    assert not [word for word in COMMON if word not in elsewhere]
    assert all(re.search(r"\]\(\S+\.md(#\S+)?\)$", row) for row in rows)
    ours = " ".join(row.split(" | ")[0] for row in rows)
    assert {"`word`", "tail", "EDQ", "vectors", "audit"} <= set(re.split(r", | ", ours))


def test_cells_of_wide_tables_name_their_column() -> None:
    marked = script_module("docs/pages.py").on_page_content
    heads = "<thead><tr><th>a</th><th>b <code>&lt;c&gt;</code></th><th style='x'>d</th></tr></thead>"
    row = '<tr><td>1</td><td style="text-align: right;">2</td><td>3</td></tr>'
    wide = marked(f"<table>{heads}<tbody>{row}{row}</tbody></table>")
    named = '<td data-column="a">1</td><td style="text-align: right;" data-column="b &lt;c&gt;">2</td><td data-column="d">3</td>'
    assert wide == f"<table data-stacked>{heads}<tbody>{f'<tr>{named}</tr>' * 2}</tbody></table>"
    narrow = "<table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td>2</td></tr></tbody></table>"
    assert marked(narrow) == narrow
    # The style sheet and the marks are of one mind.
    assert "table[data-stacked]" in text_of("stylesheets/pages.css") and "attr(data-column)" in text_of(
        "stylesheets/pages.css"
    )
