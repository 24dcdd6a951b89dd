"""The optimizer's kernels for a GPU, proved from their machine code: their PTX leaves the bits of the definition on a CPU.

Each instruction has one result; a plain step spills nothing, and reads and writes memory once, 16 bytes at a time. Weights and
gradients are infinities and NaNs of every kind, too, of which words are compared to the bit; only in tensors of floats, which
are not stored, the NaN of a CPU and that of CUDA are one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from covering import whole
from cuda.definitions import definition_of
from cuda.device import CHIPS
from cuda.launch import Launch, emulated
from cuda.lowering import Lowered, TritonKernel, lowered
from cuda.machine import Program, Refused
from narrowgauge._torch import aligned, many_tensors
from narrowgauge._torch.many_tensors import SPANS, ManyTensors
from narrowgauge.numerics.edge_values import same_numbers
from narrowgauge.optim import accumulation, clip, codec, kernel, row_bounds
from narrowgauge.optim.compilation import Definition
from narrowgauge.optim.kernel import COMPILED, WIDE
from narrowgauge.optim.rules.elementwise import RULES
from narrowgauge.spec.storages import STORAGES
from optional_packages import needs_triton
from tensors import bits

pytestmark = needs_triton
CPU, CHIP = torch.device("cpu"), "sm_90"
WORDS = (1 << 13) + 48
"""Of an example: several blocks, of which the last is not full."""
FEW = (
    ("adamw", "word", "wide"),
    ("adamw", "word", "audited wide"),
    ("adamw", "compact", "wide"),
    ("lion", "kahan", ""),
    ("sgd", "float16/split", "wide"),
    ("plain sgd", "stochastic", ""),
)
"""Steps that are proved on each push."""
MAX_SPILLS = 88
"""Bytes for which a thread of an audit, a norm or an odd length may lack registers; compact's at odd lengths lacks most."""
OTHERS = (
    "norm bfloat16",
    "norm float32",
    "accumulate bfloat16-stochastic",
    "accumulate kahan",
    "row peaks",
    "bounds adamw compact",
)


def steps() -> list[tuple[str, str, str]]:
    """The few; AdamW on every storage; every rule on the default one; audits and odd lengths where planes lie otherwise."""
    compiled = [name for name, row in STORAGES.items() if row.arithmetic in COMPILED]
    others = [(rule, "word", "wide") for rule in RULES]
    others += [("adamw", storage, how) for storage in ("master", "compact", "states8") for how in ("", "audited wide")]
    return list(dict.fromkeys([*FEW, *(("adamw", storage, "wide") for storage in compiled), *others]))


def name_of(rule: str, storage: str, options: str) -> str:
    return f"step {rule.replace(' ', '_')} {storage} {options}".strip()


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a length for several blocks."""
    for module in (kernel, clip, accumulation, row_bounds):
        monkeypatch.setattr(module, "example_words", lambda device: WORDS)


def compiled(name: str, chip: str = CHIP) -> Lowered:
    return lowered(chip, name)


def difference(definition: Definition, arguments: list[Tensor], found: Lowered) -> tuple[int, list[Launch]]:
    """How many tensors a kernel leaves other than its definition does, and its launches."""
    mine, theirs = definition.in_place(arguments), definition.in_place(arguments)
    run, launches = emulated(found)
    wanted, (result,) = definition.function(*mine), run(list(theirs))
    wrong = sum(not same_numbers(one, other) for one, other in zip(mine, theirs, strict=True))
    if not wanted.is_floating_point():
        return wrong + (not torch.equal(wanted, result)), launches
    if wanted.isfinite().all():  # sums of floats are added up in another order
        torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().sum()))
    return wrong, launches


def edges_of(definition: Definition) -> list[Tensor]:
    assert definition.edges is not None
    return list(definition.edges())


@pytest.mark.parametrize(
    ("rule", "storage", "options"),
    [pytest.param(*row, id=name_of(*row)[5:], marks=() if row in FEW else whole) for row in steps()],
)
def test_no_word_of_a_step_differs(rule: str, storage: str, options: str) -> None:
    name = name_of(rule, storage, options)
    definition, found = definition_of(name, CPU), compiled(name)
    assert_instructions(name, found)
    edges = edges_of(definition)
    assert_no_number_is_missing(
        edges[: 2 * codec.num_parts(STORAGES[storage])], getattr(torch, STORAGES[storage].visible)
    )
    for arguments in (list(definition.example), edges):
        wrong, launches = difference(definition, arguments, found)
        assert wrong == 0
        assert max(launch.blocks for launch in launches) > 1
    if STORAGES[storage].arithmetic == "float32" and "audited" not in options:
        assert isinstance(emulated(found)[0], ManyTensors)
        (launch,) = launches
        parts = codec.num_parts(STORAGES[storage].keeping(RULES[rule].kept))
        written = len(definition.outputs)
        assert_read_and_written_once(launch, written + parts, written)
        if "wide" in options:
            assert_sixteen_bytes_at_a_time(launch.kernel, 2 * written + parts)


def assert_no_number_is_missing(words: list[Tensor], dtype: torch.dtype) -> None:
    """Of what weights and gradients may be: NaNs of both signs and of several payloads; of gradients both infinities, too."""
    for place, values in enumerate(word.view(dtype) for word in words):
        assert len(bits(values[values.isnan()]).unique()) == 6
        assert place < len(words) // 2 or {math.inf, -math.inf} <= set(values[values.isinf()].tolist())


@pytest.mark.parametrize(
    "name",
    [
        "write muon word wide",
        *(
            pytest.param(f"write {row} wide", marks=whole)
            for row in ("muon compact", "galore word", "adafactor stochastic")
        ),
        pytest.param("write muon word audited wide", marks=whole),
    ],
)
def test_no_word_of_what_a_matrix_rule_decided_differs(name: str) -> None:
    definition, found = definition_of(name, CPU), compiled(name)
    assert_instructions(name, found)
    for arguments in (list(definition.example), edges_of(definition)):
        wrong, launches = difference(definition, arguments, found)
        assert wrong == 0
        assert "audited" in name or len(launches) == 1


def assert_read_and_written_once(launch: Launch, num_read: int, num_written: int) -> None:
    """Of the tensors of words, as many as are meant, each of their bytes by one instruction."""
    words = [pair for pair in launch.traffic.values() if len(pair[0]) >= 2 * WORDS]
    reads, writes = ([counts[place] for counts in words if counts[place].any()] for place in (0, 1))
    assert (len(reads), len(writes)) == (num_read, num_written)
    assert all((count[: 4 * (len(count) // 4)] == 1).all() for count in [*reads, *writes])


def assert_sixteen_bytes_at_a_time(kernel: TritonKernel, num_tensors: int) -> None:
    """Of the words of each tensor; scalars, scales of rows and numbers of the table are single."""
    widths = re.findall(r"\b(?:ld|st)\.global[\w.:]*?(\.v\d)?\.b(\d+)\s", kernel.ptx)
    sizes = [int(vector[2:] or 1) * int(bits) // 8 for vector, bits in widths]
    words_of_thread = kernel.config["XBLOCK"] // (32 * kernel.num_warps)
    assert sizes.count(16) == num_tensors * words_of_thread // 4 and set(sizes) <= {4, 8, 16}


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        (name_of("adamw", "word", "wide"), (2, 515, SPANS["pointwise"] // WIDE + 3, 40)),
        (name_of("adamw", "compact", "wide"), (2, 40, 3)),
        ("norm bfloat16", (SPANS["reduction"] + 1, 2, 3)),
    ],
)
def test_many_tensors_are_taken_in_one_launch(name: str, rows: tuple[int, ...]) -> None:
    """Of other lengths each, one of them of more than a row of the table."""
    definition, (run, launches) = definition_of(name, CPU), emulated(compiled(name))
    assert isinstance(run, ManyTensors)

    def tensors(count: int) -> list[Tensor]:
        given = zip(definition.example, definition.lengths, strict=True)
        return definition.in_place([a[torch.arange(count) % len(a)] if own[:1] == (0,) else a for a, own in given])

    mine, theirs = ([tensors(count) for count in rows] for _ in range(2))
    for arguments in mine:
        definition.function(*arguments)
    run.each([list(arguments) for arguments in theirs])
    assert len(launches) == 1
    for one, other, before in zip(mine, theirs, map(tensors, rows), strict=True):
        assert all(map(torch.equal, one, other)) and not all(map(torch.equal, before, other))


@pytest.mark.parametrize("name", OTHERS)
def test_no_result_of_another_kernel_differs(name: str) -> None:
    definition, found = definition_of(name, CPU), compiled(name)
    assert_instructions(name, found)
    assert isinstance(emulated(found)[0], ManyTensors)  # one launch for all tensors
    for arguments in (list(definition.example), edges_of(definition)):
        wrong, launches = difference(definition, arguments, found)
        assert wrong == 0 and len(launches) == 1
        assert max(launch.blocks for launch in launches) > 1


@pytest.mark.parametrize("name", clip.CHAINS)
def test_no_bit_of_what_a_chain_makes_of_few_numbers_differs(name: str) -> None:
    definition, found = definition_of(name, CPU), compiled(name)
    assert_instructions(name, found)
    for arguments in (list(definition.example), edges_of(definition)):
        wrong, launches = difference(definition, arguments, found)
        assert wrong == 0 and len(launches) == 1


def assert_instructions(name: str, found: Lowered) -> None:
    """No approximation, nothing flushed or fused, float64 in norms and audits alone, and registers for everything."""
    for each in found.kernels.values():
        assert each.spills <= (0 if is_plain(name) else MAX_SPILLS)
        body = "\n".join(str(instruction) for instruction in Program.parse(each.ptx).code)
        assert not re.findall(r"\.(?:approx|full|ftz|f16x?2?|bf16x?2?)\b|\bfma\.|\bmad\.(?:rn\.)?f", body)
        assert "f64" not in body or "norm" in name or "audited" in name


def is_plain(name: str) -> bool:
    return name.startswith("step") and name.endswith(" wide") and "audited" not in name


@pytest.mark.parametrize(
    "chip", [pytest.param(chip, marks=whole) for chip in CHIPS if chip.startswith("sm_") and chip != CHIP]
)
@pytest.mark.parametrize("name", [name_of("adamw", "word", "wide"), "norm bfloat16"])
def test_the_same_bits_on_other_chips(name: str, chip: str) -> None:
    definition, found = definition_of(name, CPU), compiled(name, chip)
    assert difference(definition, list(definition.example), found)[0] == 0
    assert_instructions(name, found)


# ── it can fail ───────────────────────────────────────────────────────────────────────────────────────────────────────


def planted(found: Lowered, change: Callable[[str], str]) -> Lowered:
    """The same module with another machine code."""
    kernels = {name: replace(each, ptx=change(each.ptx)) for name, each in found.kernels.items()}
    assert any(kernels[name].ptx != found.kernels[name].ptx for name in kernels), "nothing was planted"
    return replace(found, kernels=kernels)


@pytest.mark.parametrize(
    ("pattern", "instead"),
    [
        (r"(mul\.lo\.s32 .*, )(\d{9,});", r"\g<1>2146121007;"),  # a constant of the hash
        (r"(shr\.u32 .*, )15;", r"\g<1>14;"),
        (r"add\.rn\.f32", "sub.rn.f32"),
        (r"min\.u32", "max.u32"),
        (r"(st\.global\.v4\.b32 .*)\{ (%r\d+), .*\};", r"\g<1>{ \g<2>, \g<2>, \g<2>, \g<2> };"),
    ],
)
def test_a_changed_instruction_leaves_other_words(pattern: str, instead: str) -> None:
    name = name_of("adamw", "word", "wide")
    definition = definition_of(name, CPU)
    faulty = planted(compiled(name), lambda ptx: re.sub(pattern, instead, ptx, count=1))
    assert difference(definition, list(definition.example), faulty)[0]


@pytest.mark.parametrize(
    ("name", "pattern", "instead"),
    [
        ("bounds adamw compact", r"sub\.rn\.f32", "add.rn.f32"),
        ("norm grid", r"sub\.s64", "add.s64"),
        ("norm decision", r"div\.rn\.f64", "mul.rn.f64"),
        ("norm decision", r"add\.rn\.f32", "sub.rn.f32"),
    ],
)
def test_a_changed_instruction_of_a_chain_leaves_other_numbers(name: str, pattern: str, instead: str) -> None:
    definition = definition_of(name, CPU)
    faulty = planted(compiled(name), lambda ptx: re.sub(pattern, instead, ptx, count=1))
    assert difference(definition, list(definition.example), faulty)[0]


def test_a_step_beyond_the_end_is_noticed() -> None:
    name = name_of("adamw", "word", "wide")
    definition = definition_of(name, CPU)
    faulty = planted(compiled(name), lambda ptx: ptx.replace("setp.lt.s32", "setp.le.s32"))
    with pytest.raises(AssertionError, match="memory that belongs to no tensor is touched"):
        difference(definition, list(definition.example), faulty)


def test_an_approximate_division_is_refused() -> None:
    name = name_of("adamw", "word", "wide")
    definition, found = definition_of(name, CPU), compiled(name)
    with pytest.raises(Refused, match="full"):
        difference(
            definition, list(definition.example), planted(found, lambda ptx: ptx.replace("div.rn.f32", "div.full.f32"))
        )


def at_an_odd_word(values: Tensor) -> Tensor:
    flat = torch.zeros(values.numel() + 8, dtype=values.dtype)
    begin = 1 + (-flat.data_ptr() // 4) % 4
    return flat[begin : begin + values.numel()].view(values.shape).copy_(values)


def test_words_that_are_not_aligned_are_stepped_all_the_same_and_a_bare_launch_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU ``on_aligned`` copies nothing, so it is told to look."""

    name = name_of("adamw", "word", "wide")
    definition, found = definition_of(name, CPU), compiled(name)
    mine = definition.in_place(list(definition.example))
    theirs = [
        at_an_odd_word(tensor) if tensor.ndim and tensor.dtype is torch.int32 else tensor.clone() for tensor in mine
    ]
    theirs[len(theirs) - len(definition.outputs) :] = [theirs[number] for number in definition.outputs]
    with monkeypatch.context() as patch, pytest.raises(AssertionError, match="not aligned"):
        patch.setattr(many_tensors, "on_aligned", lambda run: run)
        run = emulated(found)[0]
        run(definition.in_place(list(definition.example)))  # aligned, which tells the order of its arguments
        run(list(theirs))
    monkeypatch.setattr(aligned, "is_aligned", lambda tensor: tensor.data_ptr() % 16 == 0)
    definition.function(*mine)
    emulated(found)[0](list(theirs))
    assert all(map(same_numbers, mine, theirs))
