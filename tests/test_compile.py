"""Compiled code is used only where it does what its function does."""

from typing import Any

import pytest
import torch
from torch import Tensor

from narrowgauge.torch_support import compile
from narrowgauge.torch_support.compile import Compiled, compiled


def flushing(function: Any) -> Any:
    """Like a function, but it returns no subnormals: a fault that common values do not show."""

    def run(*arguments: Tensor) -> Any:
        result = function(*arguments)
        return torch.where(result.abs() < torch.finfo(result.dtype).tiny, 0.0, result)

    return run


def halved(x: Tensor) -> Tensor:
    return x / 2


FAULTS = {
    "another result": lambda function: lambda *arguments: function(*arguments) + 1,
    "subnormals are flushed": flushing,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_code_that_does_something_else_is_not_used(fault):
    """The function runs, with the right bits, and one warning says so."""
    call = Compiled(halved)
    call.run = FAULTS[fault](halved)
    x = torch.randn(40, 80)
    with pytest.warns(
        UserWarning, match=r"differ in halved: result 0\[\d.*of \d+ differ"
    ) as caught:
        results = [call(x) for _ in range(2)]
    assert len(caught) == 1
    assert all(torch.equal(result, x / 2) for result in results)


@pytest.mark.parametrize("missing", [0, 1])
def test_what_is_large_enough_is_compiled(monkeypatch, missing):
    monkeypatch.setattr(compile, "compiled", lambda _: lambda *arguments: "compiled")
    result = compile.call_compiled(compile.COMPILE_ELEMENTS - missing, halved, torch.ones(3))
    assert isinstance(result, str) == (missing == 0)


def by_length(x: Tensor, y: Tensor | None, z: Tensor) -> tuple[Tensor, Tensor]:
    """Branch on a length; the compiled code of one branch must not serve the other."""
    sums = x + (2 if x.shape[0] < 100 else 3)
    z.copy_(z * 2)
    return (sums if y is None else sums * y), x.amax(1)


def of_equal_widths(x: Tensor, y: Tensor) -> Tensor:
    """Take a width that is shortened only where its half is not."""
    return x.view(len(x), 2, -1).sum(1) + y


def test_one_function_serves_all_sizes():
    call = compiled(by_length)
    assert compiled(by_length) is call
    for rows, columns, has_y in ((50, 60, False), (5000, 7, False), (99, 3, True)):
        x = torch.randn(rows, columns)
        y = torch.randn(rows, columns) if has_y else None
        z = torch.randn(7)
        expected_z = z.clone()
        expected = by_length(x, y, expected_z)
        assert all(map(torch.equal, call(x, y, z), expected))
        assert torch.equal(z, expected_z)


def test_sides_that_belong_together_are_compared_whole():
    call = Compiled(of_equal_widths)
    call.run = of_equal_widths
    assert call.is_equal((torch.randn(4, 1000), torch.randn(4, 500)))


def test_a_compiler_that_fails_is_not_used_but_a_lack_of_memory_is_raised():
    def failing(*_):
        raise error

    call = Compiled(halved)
    call.run = failing
    for error in (MemoryError("here"), torch.OutOfMemoryError("there")):
        with pytest.raises(type(error)):
            call(torch.ones(4))
    error = RuntimeError("no space left")
    with pytest.warns(UserWarning, match=r"Cannot run halved \(RuntimeError: no space left\)"):
        assert torch.equal(call(torch.ones(4)), torch.full((4,), 0.5))
