"""Whether PyTorch's compiler can work: asked of compilers that are missing, fail, or lack headers, and of folders."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from narrowgauge._torch.inductor import remove_torn_files
from narrowgauge.machine import cpp_compiler
from narrowgauge.machine.cpp_compiler import (
    compiled_folder,
    compiler_missing,
    compiler_name,
    gpu_compiler_missing,
    is_torn,
    model_compiler_missing,
    switched_off,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="compilers are scripts here")
needs_compiler = pytest.mark.skipif(shutil.which(compiler_name()) is None, reason="no C++ compiler is on PATH")


def compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> str:
    path = folder / "cxx"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    return str(path)


def test_a_compiler_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    assert compiler_missing() == model_compiler_missing() == f"no C++ compiler ('{tmp_path / 'none'}') is on PATH"
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiler_missing() == f"no C++ compiler ('{compiler_name()}') is on PATH"


def test_a_kernel_for_a_gpu_needs_triton_and_a_c_compiler_and_no_toolkit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = cpp_compiler.find_spec
    monkeypatch.setattr(cpp_compiler, "find_spec", lambda name: None if name == "triton" else real(name))
    assert gpu_compiler_missing().startswith("Triton is not installed")
    monkeypatch.setattr(cpp_compiler, "find_spec", lambda name: "found")
    monkeypatch.setenv("CC", str(tmp_path / "none"))
    assert gpu_compiler_missing().startswith(f"no C compiler ('{tmp_path / 'none'}') is on PATH")
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_compiler_missing().startswith("no C compiler ('gcc' or 'clang') is on PATH")
    (tmp_path / "clang").write_text("#!/bin/sh\n")
    (tmp_path / "clang").chmod(0o755)
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(cpp_compiler.sysconfig, "get_path", lambda name: str(tmp_path))
    assert gpu_compiler_missing() == ""
    (tmp_path / "Python.h").unlink()
    assert gpu_compiler_missing() == f"the headers of Python are not installed ({tmp_path / 'Python.h'})"


def test_a_compiler_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = compiler(
        tmp_path, monkeypatch, "echo 'In file included from x:'; echo 'x:1: fatal error: omp.h' >&2; exit 1"
    )
    expected = f"the C++ compiler '{path}' does not work (x:1: fatal error: omp.h)"
    assert compiler_missing() == model_compiler_missing() == expected
    path = compiler(tmp_path, monkeypatch, "kill -9 $$")
    assert compiler_missing() == expected, "asked once per process"


@needs_compiler
def test_without_headers_of_python_no_model_is_compiled_and_kernels_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = shutil.which(compiler_name())
    headless = 'source=$(cat)\ncase "$source" in *Python.h*) echo "error: Python.h" >&2; exit 1;; esac'
    path = compiler(tmp_path, monkeypatch, f'{headless}\necho "$source" | {real} "$@"')
    assert compiler_missing() == ""
    assert model_compiler_missing() == f"the C++ compiler '{path}' cannot make modules of Python (error: Python.h)"


@needs_compiler
def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert compiled_folder() == tmp_path / "file" / "cache"
    assert model_compiler_missing().startswith(
        f"PyTorch's compiler cannot write to {compiled_folder()} (Not a directory"
    )
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    assert model_compiler_missing() == "" and not os.listdir(tmp_path / "cache")


@pytest.mark.parametrize("name", ["TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"])
def test_a_variable_that_switches_it_off(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    assert switched_off() == model_compiler_missing() == f"{name}=1 switches PyTorch's compiler off"


@pytest.mark.skipif(sys.platform != "linux", reason="ELF is the format of Linux")
def test_compiled_code_that_lacks_its_end_is_torn(tmp_path: Path) -> None:
    whole = Path(sys.executable).resolve().read_bytes()
    file = tmp_path / "a.so"
    for length in (0, 4, 63, 64, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        assert is_torn(file), length
    file.write_bytes(bytes(len(whole)))
    assert is_torn(file), "zeros"
    file.write_bytes(whole)
    assert not is_torn(file)


@pytest.mark.skipif(sys.platform != "linux", reason="ELF is the format of Linux")
def test_torn_files_are_removed_and_whole_ones_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = Path(sys.executable).resolve().read_bytes()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for folder in ("locks", "ab"):
        (tmp_path / folder).mkdir()
    names = ("torn.so", "torn.main.so", "whole.so", "torn.cpp")
    for name in names:
        (tmp_path / "ab" / name).write_bytes(whole if name == "whole.so" else whole[:1000])
    remove_torn_files.__wrapped__()
    assert sorted(os.listdir(tmp_path / "ab")) == ["torn.cpp", "whole.so"]


def test_the_folder_is_that_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert str(compiled_folder()) == default_cache_dir()
