"""Text and boxes of the page's HTML. Whatever comes from a run passes through :func:`text` on its way into the markup."""

from __future__ import annotations

import html
from typing import Any


def text(value: Any) -> str:
    """Anything as text in markup.

    Example:
        >>> text('<script>"&"')
        '&lt;script&gt;&quot;&amp;&quot;'
    """
    return html.escape(str(value), quote=True)


def scroll(title: str, classes: str = "scroll") -> str:
    """A box that a keyboard can scroll; the caller closes it."""
    return f'<div class="{classes}" tabindex="0" role="region" aria-label="{text(title)}">'
