"""The folder in which tests keep what they compiled."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kept_cache import FOLDER, close_cache, keep_newest, kept_folder, open_cache


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path / "kept"))
    for name in ("NARROWGAUGE_CACHE", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # so that they are set back
        monkeypatch.delenv(name)
    return tmp_path / "kept"


@pytest.mark.parametrize("cold", [False, True])
def test_kernels_outlive_a_session_unless_it_is_cold(kept: Path, cold: bool) -> None:
    found = []
    for _ in range(2):
        session = open_cache(cold=cold)
        assert os.environ["NARROWGAUGE_CACHE"] == str(session)
        compiled = session / "kernels" / "a.pt2", Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "b.so"
        measured = session / "arithmetic.json"
        found.append([path.exists() for path in (*compiled, measured)])
        for path in (*compiled, measured):
            path.write_bytes(b"")
        close_cache(session)
        assert not session.exists()
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
    assert found == [[False] * 3, [False] * 3 if cold else [True, True, False]]
    assert kept.exists() is not cold


def test_the_folder_is_in_the_checkout_unless_a_variable_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    folder = kept_folder()
    assert folder.relative_to(Path(__file__).parents[1]).parts == (".cache", "narrowgauge-tests")


def test_what_was_read_least_recently_goes_first(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "older", "oldest")):
        (tmp_path / name).write_bytes(b"x" * 100)
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    os.utime(tmp_path / "oldest", (2e9, 0))  # made first, and read since
    for limit, left in ((300, {"new", "older", "oldest"}), (299, {"new", "oldest"}), (100, {"oldest"})):
        keep_newest(tmp_path, limit)
        assert {path.name for path in tmp_path.iterdir()} == left
