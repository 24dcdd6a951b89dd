"""A figure is saved from the page by a button: complete in itself, without a request to anywhere."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path

from narrowgauge.runs.record import Run
from report.live.driven_browser import tab
from report.made_pages import page_of

MakeRun = Callable[..., Run]


def test_every_figure_has_named_buttons_that_save_it(make_run: MakeRun) -> None:
    page = page_of([make_run("bfloat16/word"), make_run("bfloat16/master")])
    figures = re.findall(r'<figure id="([^"]+)"', page)
    assert len(figures) >= 4
    for name in figures:
        for kind in ("svg", "png"):
            (button,) = re.findall(rf'<button type="button" data-save="{kind}" data-figure="{name}"[^>]*>', page)
            assert f'aria-label="Save as {kind.upper()}"' in button


def test_a_saved_figure_has_its_title_a_legend_and_what_is_shown(tmp_path: Path, make_run: MakeRun) -> None:
    file = tmp_path / "page.html"
    runs = [make_run(recipe, seed) for recipe in ("bfloat16/word", "bfloat16/master") for seed in (0, 1)]
    file.write_text(page_of(runs, "A & B"), encoding="utf-8")
    with tab(tmp_path) as page:
        page.open(file.as_uri(), width=1200, dark=True)
        page.until("Number(document.documentElement.dataset.drawn) > 0")
        drawing = page.saved("[data-save='svg'][data-figure='training-loss']", tmp_path)
        text = drawing.read_text(encoding="utf-8")
        image = page.saved("[data-save='png'][data-figure='training-loss']", tmp_path)
        width = page.see("document.querySelector(\"[data-plot='training-loss']\").clientWidth")
        card = page.see("getComputedStyle(document.querySelector('.card')).backgroundColor")
        page.see("document.querySelector(\"[data-group='0']\").click()")
        page.until("document.querySelectorAll('#training-loss .scatterlayer .trace').length === 2")
        alone = page.saved("[data-save='svg'][data-figure='training-loss']", tmp_path)
        assert page.said == []
        assert all(address.startswith(("file:", "data:", "blob:")) for address in page.requested)
    assert drawing.name == "a-b-training-loss.svg" and text.startswith("<svg")
    assert "http" not in re.sub(r'xmlns[^ ]*="[^"]*"', "", text)
    assert ">Training loss</text>" in text and card in text
    # Each recipe once in the legend, though its band and its other view are traces too.
    assert sorted(re.findall(r">(bfloat16/[a-z]+)<", text)) == ["bfloat16/master", "bfloat16/word"]
    content = image.read_bytes()
    assert content.startswith(b"\x89PNG") and struct.unpack(">I", content[16:20]) == (2 * width,)
    # Of one recipe there is no legend.
    assert "bfloat16/" not in alone.read_text(encoding="utf-8")
