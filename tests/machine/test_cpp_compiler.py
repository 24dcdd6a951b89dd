"""Whether PyTorch's compiler can work: asked of compilers that are missing or fail."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from narrowgauge.machine import compiler_missing

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="compilers are scripts here")


def compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> str:
    path = folder / "cxx"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    return str(path)


def test_a_compiler_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = compiler(
        tmp_path, monkeypatch, "echo 'In file included from x:'; echo 'x:1: fatal error: omp.h' >&2; exit 1"
    )
    expected = f"the C++ compiler '{path}' does not work (x:1: fatal error: omp.h)"
    assert compiler_missing() == expected
    path = compiler(tmp_path, monkeypatch, "kill -9 $$")
    assert compiler_missing() == expected, "asked once per process"
