"""The mark of a recipe in text: a small picture of its line and its marker, as the figures draw them.

Colours repeat beyond the palette's end, so a square of colour would not do: a mark has the colour, the dash and the
marker, and is the key to every figure.
"""

from __future__ import annotations

from narrowgauge.report.traces import NUM_COLOURS, dash_of, symbol_of

_SHAPES: dict[str, str] = {
    "circle": "M9 7a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "square": "M9.4 3.4h7.2v7.2H9.4z",
    "diamond": "M13 2l5 5-5 5-5-5z",
    "cross": "M11.4 2.2h3.2v3.2h3.2v3.2h-3.2v3.2h-3.2V8.6h-3.2V5.4h3.2z",
    "triangle-up": "M13 2.3l5 8.6H8z",
    "x": "M10.8 2.5L13 4.7l2.2-2.2 2.3 2.3L15.3 7l2.2 2.2-2.3 2.3L13 9.3l-2.2 2.2-2.3-2.3L10.7 7 8.5 4.8z",
    "pentagon": "M13 2.2l4.8 3.5-1.8 5.6h-6L8.2 5.7z",
    "star": "M13 1.6l1.35 3.55 3.8.2-2.95 2.4 1 3.65L13 9.35 9.8 11.4l1-3.65-2.95-2.4 3.8-.2z",
}
_DASHES = {"solid": "", "dash": "6 3", "dot": "2 2.5", "dashdot": "6 2 2 2"}
_DOT = "M12 7a1 1 0 1 0 2 0a1 1 0 1 0-2 0z"


def swatch(place: int | None) -> str:
    """The mark of the recipe at a place of the page, as markup; without a place there is none.

    Example:
        >>> swatch(0) != swatch(8), "s0" in swatch(8)
        (True, True)
    """
    if place is None:
        return ""
    shape, _, fill = symbol_of(place).replace("-open", " open").replace("-dot", " dot").partition(" ")
    dash = f' stroke-dasharray="{dashes}"' if (dashes := _DASHES[dash_of(place)]) else ""
    line = f'<path class="line" d="M0 7h26"{dash}/>'
    body, inner = ("open", "full") if "open" in fill else ("full", "open")
    marker = f'<path class="{body}" d="{_SHAPES[shape]}"/>'
    dot = f'<path class="{inner}" d="{_DOT}"/>' if "dot" in fill else ""
    return (
        f'<svg class="swatch s{place % NUM_COLOURS}" viewBox="0 0 26 14" aria-hidden="true">{line}{marker}{dot}</svg>'
    )
