"""Integer arithmetic is compiled to single instructions, and keeps its bits."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from covering import whole
from narrowgauge._torch import inductor
from narrowgauge._torch.inductor import compile_ahead, load_ahead, trace
from narrowgauge.machine.cpp_compiler import compiler_missing
from narrowgauge.optim import compilation

LIMITS = [0, 1, -1, 2**31 - 1, -(2**31), 0x7F800000, 0x7F7FFFFF, 0x00800000, 1 << 15, -(1 << 16)]


def shifts(x: Tensor, out: Tensor) -> Tensor:
    """Every kind of shift and mask a code uses, some counts that are none, and casts of bits both ways."""
    left = (x << 1) ^ (x << 15) ^ (x << 31)
    right = (x >> 1) ^ (x >> 15) ^ (x >> 31)
    logical = ((x >> 15) & 0x1FFFF) ^ ((x >> 16) & 0xFFFF) ^ ((x >> 1) & 0x7FFFFFFF)
    masked = ((x >> 15) & 0xFFFF) ^ ((x >> 8) & 0xFF) ^ ((left >> 4) & -1)
    beyond = (x << 32) ^ (x >> 40)
    doubled = ((x & 0x3FFFFFFF).view(torch.float32) * 2.0).view(torch.int32)
    out.copy_(left ^ right * 3 ^ logical * 5 ^ masked * 7 ^ beyond * 11 ^ doubled)
    return x.new_zeros(0)


@whole
@pytest.mark.skipif(bool(compiler_missing()), reason=f"{compiler_missing()}: nothing is compiled here")
def test_shifts_masks_and_casts_keep_their_bits(tmp_path: Path) -> None:
    path = tmp_path / "shifts.pt2"
    example = torch.arange(64, dtype=torch.int32)
    compile_ahead(trace(shifts, (example, example.clone()), [(0,), (0,)]), path)
    random = torch.randint(-(2**31), 2**31, (1013,), generator=torch.Generator().manual_seed(0))
    words = torch.cat([torch.tensor(LIMITS), random]).to(torch.int32)
    found, wanted = torch.zeros_like(words), torch.zeros_like(words)
    load_ahead(path)([words, found])
    shifts(words, wanted)
    assert torch.equal(found, wanted)
    if inductor._level() is not None:
        with zipfile.ZipFile(path) as package:
            (name,) = (name for name in package.namelist() if name.endswith(".kernel.cpp"))
            text = package.read(name).decode()
        assert "bit_cast" not in text  # each of which would go through an array
        assert [text.count(f"_{kind}_epi32") > 2 for kind in ("slli", "srai", "srli")] == [True] * 3


def test_inductor_is_left_as_it_was() -> None:
    from torch._inductor.codegen.cpp import CppVecOverrides

    before = dict(vars(CppVecOverrides))
    with inductor._few_instructions():
        assert vars(CppVecOverrides)["bitwise_and"] is not before["bitwise_and"]
    assert {name: vars(CppVecOverrides)[name] for name in before} == before


# ── a release of PyTorch that renames what we use of its compiler ───────────────────────────────────────────────────


def test_an_option_that_a_release_does_not_have_is_left_out() -> None:
    asked = {
        "realize_opcount_threshold": 1,
        "cpp.vec_isa_ok": True,
        "cpp.no_such": 1,
        "no_such.option": 1,
        "no_such": 1,
    }
    assert list(inductor.known_options(asked)) == ["realize_opcount_threshold", "cpp.vec_isa_ok"]
    for options in (inductor._ONE_LOOP, inductor._TRUST_COMPILER, inductor._GPU_KERNEL):
        assert inductor.known_options(options) == options  # this release has them all


def test_casts_run_uncompiled_where_a_release_lacks_an_option_of_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of the optimizer is compared with its definition; a compiled cast is not."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(inductor._AS_EAGER, "no_such", True)
    with pytest.warns(UserWarning, match=r"lacks the option no_such .* uncompiled"):
        assert inductor.compile_any_shape(shifts, "shifts") is shifts  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["aoti_compile_and_package", "cpu_vec_isa.valid_vec_isa_list", "codegen.cpp.CppVecOverrides"]
)
def test_a_name_that_a_release_does_not_have_leaves_the_definition_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    import torch._inductor.codegen.cpp

    monkeypatch.setattr(inductor, "_level", lambda: inductor._LEVELS["AVX2"])
    monkeypatch.delattr(f"torch._inductor.{name}")
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path))
    monkeypatch.setattr(compilation, "compiler_missing", lambda: "")
    compilation._warn_once.cache_clear()
    example = [torch.arange(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)]
    with pytest.warns(UserWarning, match=f"lacks what narrowgauge uses of its compiler: .*{name.rpartition('.')[2]}"):
        assert compilation._load_or_compile("shifts", compilation.Definition(shifts, example, [(0,), (0,)])) is None
