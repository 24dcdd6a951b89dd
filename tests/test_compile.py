"""Compiled code is used only where it does what its function does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from narrowgauge.torch_support import compile
from narrowgauge.torch_support.compile import Compiled, compiled, compiled_for_pattern
from narrowgauge.torch_support.machine import compiler_missing

needs_compiler = pytest.mark.skipif(bool(compiler_missing()), reason=compiler_missing())


def flushing(function: Any) -> Any:
    """Like a function, but it returns no subnormals: a fault that common values do not show."""

    def run(*arguments: Tensor) -> Any:
        result = function(*arguments)
        return torch.where(result.abs() < torch.finfo(result.dtype).tiny, 0.0, result)

    return run


def halved(x: Tensor) -> Tensor:
    return x / 2


FAULTS: dict[str, Any] = {
    "another result": lambda function: lambda *arguments: function(*arguments) + 1,
    "subnormals are flushed": flushing,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_code_that_does_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The function runs, with the right bits, and one warning says so."""

    def wrong(function: Any, *_: object) -> Compiled:
        return Compiled(FAULTS[fault](function), None)

    monkeypatch.setattr(compile, "_compiled_code", wrong)
    monkeypatch.setattr(compile, "_COMPILED", {})
    monkeypatch.setattr(compile, "can_compile", lambda place: True)
    compile._warn_once.cache_clear()
    x = torch.randn(40, 80)
    with pytest.warns(UserWarning, match="other bits.*same bits") as caught:
        results = [compiled_for_pattern(halved, x) for _ in range(2)]
    assert len(caught) == 1
    assert all(torch.equal(result, x / 2) for result in results)


@pytest.mark.parametrize("missing", [0, 1])
def test_what_is_large_enough_is_compiled(monkeypatch: pytest.MonkeyPatch, missing: int) -> None:
    monkeypatch.setattr(compile, "compiled_for_pattern", lambda *arguments: "compiled")
    monkeypatch.setattr(compile, "can_compile", lambda place: True)
    result = compile.fused(compile.COMPILE_ELEMENTS - missing, halved, torch.ones(3))
    assert isinstance(result, str) == (missing == 0)


def of_one_length(x: Tensor) -> Tensor:
    """Read a length as a number, which makes the trace hold for that length alone."""
    return x * len(x)


def by_length(x: Tensor, y: Tensor | None, z: Tensor) -> tuple[Tensor, Tensor]:
    """Branch on a length; the compiled code of one branch must not serve the other."""
    sums = x + (2 if x.shape[0] < 100 else 3)
    z.copy_(z * 2)
    return (sums if y is None else sums * y), x.amax(1)


@needs_compiler
def test_code_serves_the_sizes_that_its_trace_holds_for() -> None:
    def run(rows: int, columns: int, *, y: bool) -> list[Compiled | None]:
        x = torch.randn(rows, columns)
        z = torch.randn(7)
        arguments = [x, torch.randn(rows, columns) if y else None, z]
        expected = by_length(x, arguments[1], z.clone())
        actual = compiled_for_pattern(by_length, *arguments)
        assert all(map(torch.equal, expected, actual))
        return [compiled(by_length, arguments)]

    short = run(50, 60, y=False)
    assert run(60, 60, y=False) == run(99, 3, y=False) == short, "equal sides are no other trace"
    long = run(100, 5, y=False)
    assert long != short and run(5000, 7, y=False) == long
    assert run(50, 60, y=True) not in (short, long) and None not in (*short, *long)
    for n in (4, 5):
        assert torch.equal(
            compiled_for_pattern(of_one_length, torch.ones(n)), torch.full((n,), float(n))
        )


def test_a_compiler_that_fails_is_not_used_but_a_lack_of_memory_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(*_: object) -> Compiled:
        raise error

    monkeypatch.setattr(compile, "_compiled_code", failing)
    monkeypatch.setattr(compile, "_COMPILED", {})
    monkeypatch.setattr(compile, "can_compile", lambda place: True)
    for error in (MemoryError("here"), torch.OutOfMemoryError("there")):
        with pytest.raises(type(error)):
            compile._compile_and_compare(of_one_length, [torch.ones(4)])
    error = RuntimeError("no space left")
    with pytest.warns(
        UserWarning, match=r"Cannot compile of_one_length \(RuntimeError: no space left\)"
    ):
        assert compiled(of_one_length, [torch.ones(4)]) is None
