"""Compiled code is used only where it does what its function does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import narrowgauge as ng
from narrowgauge import compile
from narrowgauge.compile import Compiled, compiled, compiled_for_pattern
from narrowgauge.machine import compiler_missing
from narrowgauge.optim.kernel import CONTROL
from optim.pairs import everything, parameters
from tensors import assert_same_bits, take_steps

needs_compiler = pytest.mark.skipif(bool(compiler_missing()), reason=compiler_missing())


def flushing(function: Any) -> Any:
    """Like a function of words of bfloat16 pairs, but it writes no subnormals: a fault that common values do not show."""

    def run(*arguments: Tensor) -> Any:
        result = function(*arguments)
        for written in arguments:
            if written.dtype is torch.int32 and written.ndim:
                halves = written.view(torch.int16)
                halves.copy_(torch.where(halves & 0x7F80 == 0, 0, halves))
        return result

    return run


def scaling(function: Any) -> Any:
    """Like a function of a rule's scalars, but the scalars are too large: a fault that a first rate of 0 does not show."""

    def run(*arguments: Tensor) -> Any:
        of_rule = [x.dtype is torch.float32 and x.ndim == 1 for x in arguments]
        scaled = (
            torch.cat([x[: len(CONTROL)], 1.5 * x[len(CONTROL) :]]) if is_scaled else x
            for x, is_scaled in zip(arguments, of_rule, strict=True)
        )
        return function(*scaled)

    return run


FAULTS: dict[str, Any] = {
    "nothing is written": lambda function: lambda *arguments: torch.zeros(0),
    "subnormals are flushed": flushing,
    "scalars are scaled": scaling,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_code_that_does_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The definition runs, with the right bits, and one warning says so."""

    def wrong(function: Any, *_: object) -> Compiled:
        return Compiled(FAULTS[fault](function), None)

    monkeypatch.setattr(compile, "_compiled_code", wrong)
    monkeypatch.setattr(compile, "_COMPILED", {})
    monkeypatch.setattr(compile, "can_compile", lambda place: True)
    compile._warn_once.cache_clear()
    optimizers = [
        ng.SGD(parameters("naive", [(80, 80)]), lr=0.0, storage="naive", compile=c, momentum=0.0)
        for c in (False, True)
    ]
    take_steps(optimizers[0], range(2))
    with pytest.warns(UserWarning, match="other bits.*same bits") as told:
        take_steps(optimizers[1], range(2))
    assert len(told) == 1
    assert_same_bits(*map(everything, optimizers))


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
        x, z = torch.randn(rows, columns), torch.randn(7)
        arguments = [x, torch.randn(rows, columns) if y else None, z]
        expected, actual = (
            by_length(x, arguments[1], z.clone()),
            compiled_for_pattern(by_length, *arguments),
        )
        assert all(map(torch.equal, expected, actual))
        return [compiled(by_length, arguments)]

    short = run(50, 60, y=False)
    assert run(60, 60, y=False) == run(99, 3, y=False) == short, "equal sides are no other trace"
    long = run(100, 5, y=False)
    assert long != short and run(5000, 7, y=False) == long
    assert run(50, 60, y=True) not in (short, long) and None not in (*short, *long)
    assert all(
        torch.equal(compiled_for_pattern(of_one_length, torch.ones(n)), torch.full((n,), float(n)))
        for n in (4, 5)
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
            compile._compile_and_compare(of_one_length, [torch.ones(4)], exact=True, one_loop=False)
    error = RuntimeError("no space left")
    with pytest.warns(
        UserWarning, match=r"Cannot compile of_one_length \(RuntimeError: no space left\)"
    ):
        assert compiled(of_one_length, [torch.ones(4)]) is None
