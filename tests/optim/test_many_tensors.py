"""One launch for many tensors: what is rewritten in a kernel of a GPU, and the table that it reads. Its bits: ``tests/cuda``."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from narrowgauge._torch import aligned, many_tensors
from narrowgauge._torch.many_tensors import SPANS, ManyTensors, function_of, with_table

SPAN = SPANS["pointwise"]
CODE = """
import triton
@triton_heuristics.pointwise(
    size_hints={'x': 64},
    triton_meta={
        'signature': {'in_ptr0': '*i32', 'out_ptr0': '*fp32', 'ks0': 'i64', 'xnumel': 'i32', 'XBLOCK': 'constexpr'},
        'device': Properties(cc=90),
        'configs': [{(0,): [['tt.divisibility', 16]]}],
    },
)
@triton.jit
def copy(in_ptr0, out_ptr0, ks0, xnumel, XBLOCK : tl.constexpr):
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:]
    x1 = xindex // ks0
    tl.store(out_ptr0 + (xindex), tl.load(in_ptr0 + (xindex)))
"""


def text_of(code: str) -> str:
    return f"import torch\n\ncopy = async_compile.triton('copy', '''{code}''', device_str='cuda')\n"


def test_only_the_head_of_a_kernel_is_rewritten() -> None:
    lines = [line.strip() for line in with_table(text_of(CODE)).splitlines()]
    assert lines[0] == "# takes a table: pointwise 3 copy"
    assert "def copy(table, xnumel, XBLOCK: tl.constexpr):" in lines
    for loaded in (
        f"row = table + tl.program_id(0) // ({SPAN} // XBLOCK) * 5",
        "in_ptr0 = tl.multiple_of(tl.load(row + 0).to(tl.pointer_type(tl.int32)), 16)",
        "out_ptr0 = tl.load(row + 1).to(tl.pointer_type(tl.float32))",
        "ks0 = tl.load(row + 2).to(tl.int64)",
        "xnumel = tl.load(row + 3).to(tl.int32)",
        f"xoffset = start + tl.program_id(0) % ({SPAN} // XBLOCK) * XBLOCK",
    ):
        assert loaded in lines
    end = lines.index("xindex = xoffset + tl.arange(0, XBLOCK)[:]")
    assert lines[end + 1].startswith("ks0 = ")  # each is loaded where it is first used, and takes no register before
    assert lines[end + 2] == "x1 = xindex // ks0"
    assert lines[end + 5] == "tl.store(out_ptr0 + xindex, tl.load(in_ptr0 + xindex))"
    assert "xoffset = tl.program_id(0) * XBLOCK" not in lines


@pytest.mark.parametrize(
    ("known", "other"),
    [
        ("triton_heuristics.pointwise", "triton_heuristics.template"),
        ("xoffset = tl.program_id(0) * XBLOCK", "xoffset = tl.program_id(1) * XBLOCK"),
        ("'*fp32'", "'*fp8e4nv'"),
        ("'configs': [{(0,): [['tt.divisibility', 16]]}]", "'configs': [AttrsDescriptor()]"),
        ("'configs'", "'attributes'"),
        ("'xnumel': 'i32'", "'numel': 'i32'"),
        ("triton_meta=", "meta="),
        ("@triton.jit", "@triton.jit\ndef helper(x):\n    return x\n\n@triton.jit"),
    ],
)
def test_a_kernel_of_another_form_stays_as_it_is(known: str, other: str) -> None:
    text = text_of(CODE.replace(known, other))
    assert other in text and with_table(text) == text
    assert with_table(text_of(CODE) * 2) == text_of(CODE) * 2  # which of them would take the table?


class Launches:
    """Stands for a kernel that takes a table, and for the module that launches it."""

    def __init__(self) -> None:
        self.given: list[tuple[Tensor, int]] = []
        module: Any = ModuleType("written")
        module.copy = SimpleNamespace(run=lambda table, count, *, stream: self.given.append((table, count)))

        def call(arguments: list[Tensor]) -> tuple[Tensor]:
            words, result = arguments
            arguments.clear()
            module.copy.run(words, result, 7, words.numel(), stream=0)
            return (torch.ones(1),)

        module.call = call
        run = function_of(module, with_table(text_of(CODE)))
        assert isinstance(run, ManyTensors)
        self.run = run


def pairs(*sizes: int) -> list[list[Tensor]]:
    return [[torch.zeros(size, dtype=torch.int32), torch.zeros(size)] for size in sizes]


def test_one_launch_has_a_row_for_each_span_of_each_tensor() -> None:
    launches, batch = Launches(), pairs(5, SPAN + 1)
    launches.run.each([list(arguments) for arguments in batch])
    ((table, count),) = launches.given
    rows = [[words.data_ptr(), result.data_ptr(), 7, words.numel()] for words, result in batch]
    assert table.tolist() == [[*rows[0], 0], [*rows[1], 0], [*rows[1], SPAN]]
    assert count == 3 * SPAN
    launches.run.each([list(arguments) for arguments in batch])
    assert launches.given[1][0].data_ptr() == table.data_ptr()  # nothing has moved
    moved = [batch[0], [batch[1][0], torch.zeros(SPAN + 1)]]
    launches.run.each(moved)
    assert launches.given[2][0][1:, 1].tolist() == [moved[1][1].data_ptr()] * 2
    assert launches.run(list(batch[0]))[0] == 1 and len(launches.given[3][0]) == 1


def test_more_elements_than_an_int32_counts_take_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SPANS, "pointwise", 1 << 29)
    launches = Launches()
    launches.run.each(pairs(*[2] * 7))
    assert [(len(table), count) for table, count in launches.given] == [(2, 2 << 29)] * 3 + [(1, 1 << 29)]
    assert all(table.data_ptr() % 16 == 0 for table, _ in launches.given)


def test_what_is_not_aligned_is_launched_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (aligned, many_tensors):
        monkeypatch.setattr(module, "is_aligned", lambda tensor: tensor.data_ptr() % 16 == 0)
    launches, batch = Launches(), pairs(8, 16, 8)
    odd = torch.zeros(9, dtype=torch.int32)[1:]
    launches.run.each([list(batch[0]), [odd, batch[1][1][:8]], list(batch[2])])
    assert [len(table) for table, _ in launches.given] == [1, 2]
    assert launches.given[0][0][0, 0] % 16 == 0 and launches.given[0][0][0, 0] != odd.data_ptr()


def test_a_model_of_moving_gradients_keeps_few_tables() -> None:
    launches = Launches()
    kept, stays = [pairs(4) for _ in range(2 * many_tensors.MOST_TABLES)], pairs(8)
    for batch in kept:
        launches.run.each(batch)
        launches.run.each(stays)
    assert len(launches.run._tables) == many_tensors.MOST_TABLES
    assert len({table.data_ptr() for table, _ in launches.given[1::2]}) == 1  # what is used is kept


def test_a_kernel_that_would_be_tried_on_its_tensors_is_refused() -> None:
    module: Any = ModuleType("written")
    module.call, module.copy = print, SimpleNamespace(run=print, configs=[1, 2])
    with pytest.raises(RuntimeError, match="several sizes of blocks"):
        ManyTensors(module, "pointwise", 3, "copy")


def test_a_tensor_of_unknown_origin_is_an_error_that_is_handled() -> None:
    module: Any = ModuleType("written")
    module.copy = SimpleNamespace(run=print)
    module.call = lambda arguments: module.copy.run(torch.zeros(3), 3, stream=0)
    with pytest.raises(RuntimeError, match="none of its function's arguments"):
        ManyTensors(module, "pointwise", 1, "copy")(pairs(4)[0])
