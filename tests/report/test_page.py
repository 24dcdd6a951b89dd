"""Scripts inside a page: what is kept of them is checked before it is used, and never needed."""

from __future__ import annotations

import base64
import gzip
from pathlib import Path

import pytest

from narrowgauge.report import page

SOURCE = b"let plot = 1;" * 1000


@pytest.fixture
def compressions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """How many bytes were compressed, each time; the cache is an empty one."""
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path / "cache"))
    done: list[int] = []
    compress = page._compressed
    monkeypatch.setattr(page, "_compressed", lambda content: done.append(len(content)) or compress(content))
    return done


def kept(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "pages").glob("*"))


def test_plotly_is_compressed_once(compressions: list[int]) -> None:
    page.plotly_script.cache_clear()
    first = page.plotly_script()
    page.plotly_script.cache_clear()
    assert page.plotly_script() == first
    assert len(compressions) == 1
    assert page.digest_of(gzip.decompress(base64.b64decode(first.packed)).decode()) == first.digest


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"no gzip",
        gzip.compress(b"another script", mtime=0),
        gzip.compress(SOURCE, mtime=0)[:-9],
        gzip.compress(SOURCE, mtime=0)[:10] + b"\xff" * 50,
    ],
    ids=["empty", "no gzip", "another source", "cut short", "not deflated"],
)
def test_what_is_damaged_is_made_anew(compressions: list[int], tmp_path: Path, damage: bytes) -> None:
    right = page._cached_compressed(SOURCE)
    (file,) = kept(tmp_path)
    file.write_bytes(damage)
    assert page._cached_compressed(SOURCE) == right == file.read_bytes()
    assert len(compressions) == 2
    # Another script has a place of its own.
    page._cached_compressed(SOURCE + b"2")
    assert len(kept(tmp_path)) == 2


def test_a_cache_that_cannot_be_written_is_done_without(compressions: list[int], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder would be")
    assert gzip.decompress(page._cached_compressed(SOURCE)) == SOURCE
    assert (tmp_path / "cache").is_file()


def test_parts_of_templates_are_compiled_once_for_all() -> None:
    assert (
        len({id(page.template(name).environment) for name in ("page.html.j2", "loss.html.j2", "events.html.j2")}) == 1
    )
