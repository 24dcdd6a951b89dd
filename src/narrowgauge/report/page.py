"""Scripts and data inside a page: compressed, and encoded so that nothing in them means anything to HTML.

Plotly is five megabytes of JavaScript, and compressing it takes as long as the rest of a small report. It is the same for
every page, so its compressed bytes are cached with the user's other caches. They are decompressed and compared before they
are used, so a damaged or foreign file is made again.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import gzip
import hashlib
import json
import zlib
from typing import Any, NamedTuple

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.machine.cache_folder import cache_folder
from narrowgauge.runs.atomic_io import write_whole


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
    """JSON that is safe inside a script element: nothing in it can end the element or begin another.

    Raises:
        ValueError: a float is not finite.

    Example:
        >>> print(embedded({"a": "</script>"}))
        {"a":"\\u003c/script\\u003e"}
    """
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.translate({ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"})


def packed(value: Any) -> str:
    """JSON, compressed and encoded.

    Raises:
        ValueError: a float is not finite.

    Example:
        >>> gzip.decompress(base64.b64decode(packed([1.5, None])))
        b'[1.5,null]'
    """
    return _encoded(_compressed(json.dumps(value, allow_nan=False, separators=(",", ":")).encode()))


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
