"""Libraries of C++: found again where they lie, whatever compiler is here."""

import pytest
import torch

from narrowgauge.torch_support import cpp
from narrowgauge.torch_support.cpp import CompilerError

TEXT = 'extern "C" int answer() { return 42; }'


def answer() -> int:
    cpp.build.cache_clear()
    return int(cpp.build(TEXT).answer())


def test_a_library_is_built_once_and_again_if_it_is_damaged(monkeypatch, tmp_path):
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path))
    assert answer() == 42
    (library,) = tmp_path.glob("*.so")
    half = tmp_path / "half"
    half.write_bytes(library.read_bytes()[:100])
    half.replace(library)  # the loaded file stays as it is
    assert answer() == 42
    built = library.stat().st_mtime_ns
    for other in ("clang++-of-nobody", "ccache g++"):
        monkeypatch.setenv("CXX", other)
        assert answer() == 42
    assert library.stat().st_mtime_ns == built
    monkeypatch.setenv("CXX", "clang++-of-nobody -Os")  # other flags are another library
    with pytest.raises(CompilerError):
        answer()
    monkeypatch.undo()
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path))
    with pytest.raises(CompilerError):
        cpp.build("int answer() {")
    assert [file.name for file in tmp_path.iterdir() if file.suffix != ".so"] == []


def test_flags_that_a_compiler_refuses_are_left_out(monkeypatch, tmp_path):
    """As g++ for ARM does those of x86, where PyTorch calls the instructions the default ones."""
    compiler = tmp_path / "g++"
    compiler.write_text('#!/bin/sh\ncase "$*" in *-march=*|*-mno-*) exit 1;; esac\n')
    compiler.chmod(0o755)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    command = cpp._command(str(compiler))
    assert "-fopenmp" in command and not any(
        flag.startswith(("-march", "-mno")) for flag in command
    )
