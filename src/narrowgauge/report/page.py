"""A page: one HTML file that opens from disk without a network and can be sent by mail.

Everything is inside: tables as plain HTML without scripts, figures as data, and compressed Plotly.
A policy in the head forbids all requests. It allows only the two scripts of this package, by their
digests. Templates escape all text from a run, so the name of a tensor is never markup. Data is
encoded in base 64.
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import json
import re
from importlib import resources
from typing import Any

import jinja2
import markupsafe

from narrowgauge.errors import require_package
from narrowgauge.report.figures.palette import DASHES, NUM_COLOURS, dash_of, symbol_of
from narrowgauge.runs.schema import Row


def digest_of(script: str) -> str:
    """Return the source expression of a script in a content security policy.

    Example:
        >>> digest_of("")
        'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='
    """
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def packed(value: Any) -> str:
    """Return JSON, compressed and encoded. Floats must be finite."""
    return _encoded(
        gzip.compress(
            json.dumps(value, allow_nan=False, separators=(",", ":")).encode(), 9, mtime=0
        )
    )


@functools.cache
def plotly_script() -> tuple[str, str]:
    """Return Plotly's JavaScript: compressed and encoded, and its digest for the policy."""
    require_package("plotly")
    from plotly.offline import get_plotlyjs

    source: str = get_plotlyjs()
    # Five megabytes: the highest level takes twice as long and saves one percent.
    return _encoded(gzip.compress(source.encode(), 6, mtime=0)), digest_of(source)


def _encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


# ── pages from templates ──────────────────────────────────────────────────────────────────────────


def document(data: Row, **words: Any) -> str:
    """Return a page as one HTML document.

    It fetches nothing.

    Args:
        data: the figures, as the page's script reads them.
        words: values for the template.
    """
    script = asset("page.js")
    plotly, digest = plotly_script()
    policy = f"script-src '{digest_of(script)}' '{digest}'"
    template = environment().get_template("page.html.j2")
    page = template.render(
        **words,
        policy=markupsafe.Markup(policy),
        style=markupsafe.Markup(asset("page.css")),
        script=markupsafe.Markup(script),
        data=packed(data),
        plotly=plotly,
    )
    return page.lstrip()


@functools.cache
def environment() -> jinja2.Environment:
    """Return the environment of this package's templates.

    It escapes everything, and compiles each template once.
    """
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = _breakable
    environment.globals |= {
        "symbol_of": symbol_of,
        "dash_of": dash_of,
        "num_colours": NUM_COLOURS,
        "solid": DASHES[0],
    }
    return environment


def _breakable(text: Any) -> markupsafe.Markup:
    """Return text whose long names may break only after a dot, a slash or an underscore."""
    return markupsafe.Markup(
        re.sub(r"(?<=\w)([._/])(?=[A-Za-z_])", r"\1<wbr>", str(markupsafe.escape(text)))
    )


def asset(name: str) -> str:
    """Return a file of ``templates/``."""
    return (resources.files(__package__) / "templates" / name).read_text(encoding="utf-8").strip()
