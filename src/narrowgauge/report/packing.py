"""How scripts and data travel inside a page: compressed, and written in letters that mean nothing to HTML.

Plotly is five megabytes of JavaScript, and compressing it takes as long as all else about a small report. It is the same
for every page, so its compressed bytes are kept with the user's other caches, and unpacked and compared before they are
used: what somebody damaged, or another version left, is made anew.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import gzip
import hashlib
import zlib
from dataclasses import dataclass

from narrowgauge.caching import cache_folder
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.runs.atomic_io import write_whole


@dataclass(frozen=True)
class Script:
    """A script inside a page.

    Args:
        packed: its source, compressed, in letters.
        digest: of its source, as a policy names it.
    """

    packed: str
    digest: str


def digest_of(script: str) -> str:
    """What a page's policy calls a script that may run.

    Example:
        >>> digest_of("")
        'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='
    """
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def packed(content: str) -> str:
    """Text, compressed, in letters.

    Example:
        >>> gzip.decompress(base64.b64decode(packed("a" * 1000))) == b"a" * 1000
        True
    """
    return _letters(_compressed(content.encode()))


@functools.cache
def plotly_script() -> Script:
    """Plotly's JavaScript.

    Raises:
        NarrowgaugeError: plotly is not installed.

    Cost: 0.2 s the first time on a machine, 0.06 s in later processes.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise NarrowgaugeError(
            "The report draws its figures with plotly, which is not installed here.", "pip install plotly"
        ) from error
    source: str = get_plotlyjs()
    return Script(_letters(_kept_compressed(source.encode())), digest_of(source))


def _kept_compressed(content: bytes) -> bytes:
    """Compressed bytes, from the cache where they are there and right; where nothing can be kept there, nothing is."""
    file = cache_folder() / "pages" / f"{hashlib.sha256(content).hexdigest()[:32]}.gz"
    with contextlib.suppress(OSError, EOFError, zlib.error):
        kept = file.read_bytes()
        if gzip.decompress(kept) == content:
            return kept
    made = _compressed(content)
    with contextlib.suppress(OSError, NarrowgaugeError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, made)
    return made


def _compressed(content: bytes) -> bytes:
    return gzip.compress(content, 9, mtime=0)


def _letters(content: bytes) -> str:
    return base64.b64encode(content).decode()
