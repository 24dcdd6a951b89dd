"""Libraries of printed C++: built once, whoever asks, and not again where they lie."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from narrowgauge.torch_support import cpp
from narrowgauge.torch_support.cpp import CompilerError
from narrowgauge.torch_support.machine import compiler_missing, compiler_name
from narrowgauge.torch_support.proof import prove

pytestmark = pytest.mark.skipif(bool(compiler_missing()), reason=compiler_missing())
TEXT = 'extern "C" int answer() { return 42; }'


def answer(_: int = 0) -> int:
    cpp._libraries.clear()
    return int(cpp.build(TEXT).answer())


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache. The compiler notes each library that it builds in ``calls``."""
    compiler = tmp_path / "compiler"
    notes = f'case "$*" in *-fsyntax-only*) ;; *) echo built >> {tmp_path}/calls ;; esac'
    compiler.write_text(f'#!/bin/sh\n{notes}\nexec {compiler_name()} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path / "cache"))
    return tmp_path


def num_builds(folder: Path) -> int:
    return len((folder / "calls").read_text().split())


def test_processes_build_once_between_them(built: Path) -> None:
    with multiprocessing.get_context("fork").Pool(3) as pool:
        assert pool.map(answer, range(3), chunksize=1) == [42, 42, 42]
    assert num_builds(built) == 1


def test_a_library_is_loaded_whatever_compiler_is_here(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answer() == 42
    for other in ("clang++-of-nobody", "ccache g++"):
        monkeypatch.setenv("CXX", other)
        assert answer() == 42
    monkeypatch.setenv("CXX", "clang++-of-nobody -Os")  # other flags are another library
    with pytest.raises(CompilerError, match="no C\\+\\+ compiler"):
        answer()
    assert num_builds(built) == 1


def test_what_a_killed_build_leaves_is_removed(built: Path) -> None:
    answer()
    (library,) = (built / "cache").glob("*.so")
    for suffix in (".0123.cpp", ".0123.so", ".0123.part"):
        library.with_suffix(suffix).touch()
    os.replace(library, library.with_suffix(".gone"))
    assert answer() == 42
    assert not list((built / "cache").glob("*.0123.*"))


def test_a_compiler_that_fails_is_not_asked_again() -> None:
    def refuse() -> bool:
        raise CompilerError("no")

    def fill() -> bool:
        raise OSError("no space left")

    with pytest.warns(UserWarning, match="about 25 times slower"):
        assert prove("a step", "C++", refuse).is_final
    with pytest.warns(UserWarning, match="no space left"):
        assert not prove("a step", "C++", fill).is_final


def test_a_damaged_library_is_built_again(built: Path) -> None:
    answer()
    (library,) = (built / "cache").glob("*.so")
    half = built / "half"
    half.write_bytes(library.read_bytes()[:100])
    half.replace(library)  # the loaded file stays as it is
    assert answer() == 42 and num_builds(built) == 2
    with pytest.raises(RuntimeError, match="error"):
        cpp.build("int answer() {")
    suffixes = {file.suffix for file in (built / "cache").iterdir()}
    assert suffixes == {".so", ".cpp", ".sha256", ".lock"}
