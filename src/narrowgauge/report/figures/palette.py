"""The colour, dash and marker of each recipe, the same in figures, legend and tables.

Colours are names. ``@c2`` is the third of the palette, ``@c2/0.2`` the same at 20 % opacity. The
page resolves them for its light or dark theme. The first recipes differ by colour and marker, later
ones by their dash too.
"""

from __future__ import annotations

NUM_COLOURS = 8
"""Number of palette colours. Further recipes repeat the colours with another dash."""

DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "x", "pentagon", "star")
SEQUENTIAL = [[0, "@heat0"], [0.5, "@heat1"], [1, "@heat2"]]
"""Colours of a heat map from its lowest to its highest value."""


def colour(index: int, opacity: float | None = None) -> str:
    """Return the name of a recipe's colour.

    Example:
        >>> colour(1), colour(9, 0.2)
        ('@c1', '@c1/0.2')
    """
    name = f"@c{index % NUM_COLOURS}"
    return name if opacity is None else f"{name}/{opacity}"


def dash_of(index: int) -> str:
    """Return the dash that distinguishes a recipe from others with the same colour."""
    return DASHES[index // NUM_COLOURS % len(DASHES)]


def symbol_of(index: int) -> str:
    """Return the marker that goes with a recipe's colour."""
    return SYMBOLS[index % len(SYMBOLS)]


def plain(text: str) -> str:
    """Escape text for Plotly: its labels interpret some tags and entities, its templates ``%{x}``.

    Example:
        >>> plain("<b>a</b> & %{x}")
        '&lt;b&gt;a&lt;/b&gt; &amp; %&#123;x}'
    """
    return (
        text.replace("&", "&amp;")
        .replace("<", "&lt;")
        .replace(">", "&gt;")
        .replace("%{", "%&#123;")
    )
