"""A page: one HTML file, which opens from a disk without a network and can be sent by mail.

Everything is inside: tables as plain HTML, which need no script; figures as data; Plotly, compressed. A policy in the head
forbids the page to fetch anything and to run any script but the two of this package, named by their digests. Templates escape
everything that comes from a run, so the name of a tensor is never markup, and data is encoded so that nothing in it means
anything to HTML.

Plotly is five megabytes of JavaScript, and compressing it takes as long as the rest of a small report. It is the same for
every page, so its compressed bytes are cached. They are decompressed and compared before they are used, so a damaged or foreign
file is made again.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import markupsafe

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.machine.cache_folder import cache_folder
from narrowgauge.report.figures.palette import DASHES, NUM_COLOURS, dash_of, symbol_of
from narrowgauge.report.figures.traces import Figure
from narrowgauge.runs.atomic_io import AGAIN, write_whole
from narrowgauge.runs.schema import Row


class Script(NamedTuple):
    """A script inside a page: its source, compressed and encoded, and the digest by which a policy allows it."""

    packed: str
    digest: str


def digest_of(script: str) -> str:
    """The source expression of a script in a content security policy.

    Example:
        >>> digest_of("")
        'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='
    """
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def embedded(value: Any) -> str:
    """JSON that is safe inside a script element: nothing in it can end the element or begin another. A float must be finite.

    Example:
        >>> print(embedded({"a": "</script>"}))
        {"a":"\\u003c/script\\u003e"}
    """
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.translate({ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"})


def packed(value: Any) -> str:
    """JSON, compressed and encoded. A float must be finite.

    Example:
        >>> gzip.decompress(base64.b64decode(packed([1.5, None])))
        b'[1.5,null]'
    """
    return _encoded(_compressed(json.dumps(value, allow_nan=False, separators=(",", ":")).encode()))


@functools.cache
def plotly_script() -> Script:
    """Plotly's JavaScript.

    Cost: 0.2 s the first time on a machine, 0.06 s in later processes.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise NarrowgaugeError(
            "The report draws its figures with plotly, which is not installed here.", "pip install plotly"
        ) from error
    source: str = get_plotlyjs()
    return Script(_encoded(_cached_compressed(source.encode())), digest_of(source))


def _cached_compressed(content: bytes) -> bytes:
    """Compressed bytes, from the cache where they are there and intact; a cache that cannot be written is not used."""
    file = cache_folder() / "pages" / f"{hashlib.sha256(content).hexdigest()[:32]}.gz"
    with contextlib.suppress(OSError, EOFError, zlib.error):
        cached = file.read_bytes()
        if gzip.decompress(cached) == content:
            return cached
    made = _compressed(content)
    with contextlib.suppress(OSError, NarrowgaugeError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, made)
    return made


def _compressed(content: bytes) -> bytes:
    return gzip.compress(content, 9, mtime=0)


def _encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


# ── pages from templates ──────────────────────────────────────────────────────────────────────────────────────────────────


def document(
    template_name: str,
    /,
    drawn: Iterable[Figure],
    *,
    strip: Row | None = None,
    ranges: Sequence[Row] = (),
    gauges: Sequence[Row] = (),
    live: Any = None,
    **words: Any,
) -> str:
    """A page as one HTML document, which fetches nothing, or if it is live, only what is new, from where it came.

    Args:
        drawn: its figures.
        strip: the figure of events.
        ranges: of the formats of histograms.
        gauges: the samples of each run's gauges.
        live: the state of runs that are being written, for the template; ``None`` for a page that stays as it is.
        words: what the template shows.
    """
    script, plotly = asset("page.js"), plotly_script()
    live_script = "" if live is None else asset("live.js")
    data = {"figures": {figure.name: spec_of(figure) for figure in drawn}, "strip": strip, "formats": ranges}
    page = template(template_name).render(
        **words,
        strip=strip,
        live=live,
        live_script=markupsafe.Markup(live_script),
        policy=policy_of(script, live_script),
        style=markupsafe.Markup(asset("page.css")),
        script=markupsafe.Markup(script),
        data=markupsafe.Markup(embedded(data)),
        gauges=packed(gauges),
        plotly=plotly.packed,
    )
    return page.lstrip()


def policy_of(script: str, live_script: str = "") -> markupsafe.Markup:
    """The directives of a page's policy that depend on its scripts: it may run these and Plotly, and connect where it is live.

    Example:
        >>> "connect" in policy_of(""), policy_of("", "live").endswith("; connect-src 'self'")
        (False, True)
    """
    digests = [digest_of(script), *([digest_of(live_script)] if live_script else []), plotly_script().digest]
    allowed = "script-src " + " ".join(f"'{digest}'" for digest in digests)
    return markupsafe.Markup(allowed + ("; connect-src 'self'" if live_script else ""))


def spec_of(figure: Figure) -> Row:
    """A figure in the form that the page's script takes."""
    view = figure.views[0][0] if figure.views else None
    return {"data": figure.data, "layout": figure.layout | {"height": figure.height}, "view": view}


@functools.cache
def template(name: str) -> jinja2.Template:
    """A template of this package, which escapes everything."""
    return _environment().get_template(name)


@functools.cache
def _environment() -> jinja2.Environment:
    """One for all templates, so that parts which several import are compiled once."""
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
    """Text whose long names may break after a dot, a slash or an underscore, and nowhere else."""
    return markupsafe.Markup(re.sub(r"(?<=\w)([._/])(?=[A-Za-z_])", r"\1<wbr>", str(markupsafe.escape(text))))


def capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def asset(name: str) -> str:
    """A file of ``templates/``."""
    return (resources.files(__package__) / "templates" / name).read_text(encoding="utf-8").strip()


def write_page(text: str, page: Path) -> Path:
    """Write a page, replacing one that exists; returns its path."""
    write_whole(page, text.encode(), AGAIN)
    return page
