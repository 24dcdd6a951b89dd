"""The compiled kernel is the definition: the same bits, one compilation, whatever the shape."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import narrowgauge as ng
from covering import whole
from narrowgauge._torch import aligned, inductor
from narrowgauge.machine.cpp_compiler import compiler_missing
from narrowgauge.optim import compilation, kernel
from narrowgauge.optim.compilation import Compiled, Definition
from narrowgauge.optim.kernel import StepKernel, Work, num_scales, row_peaks
from narrowgauge.optim.rules.elementwise import ADAMW
from narrowgauge.spec.storages import STORAGES, Storage
from optim.scenarios import REPRESENTATIVES, kept, parameters, row_of, storage_error
from tensors import assert_same_bits, step_gradients, take_steps

needs_compiler = pytest.mark.skipif(bool(compiler_missing()), reason=f"{compiler_missing()}: nothing to compare with")

# Each compilation takes some ten seconds, so these stand for all: words of two lanes and of four, with and without scales
# by row, the audit in both; two parts in float32 and in the arithmetic of expansions; float16 with a tail. Expansions are made of
# the roundings of their format alone, so those of float16 follow from the two last rows. Vectors of the first are kept by
# `master`, in a bucket.
COVERING = {
    "word": {"audit_every": 10, "max_grad_norm": 1.0},
    "compact": {"audit_every": 10},
    "kahan": {"audit_every": 0},
    "float16/split": {"audit_every": 0},
    "collage-plus": {"audit_every": 10},
}


@needs_compiler
@pytest.mark.parametrize("storage", [name if name == "word" else pytest.param(name, marks=whole) for name in COVERING])
def test_eager_and_compiled_have_the_same_bits(storage: str) -> None:
    # Large, odd, and one that is audited in turns; a vector, which joins a bucket.
    shapes = [(130, 66), (65, 67), (300, 300), *([(5,)] if storage == "word" else [])]
    results = []
    for compile in (False, True):
        params = parameters(storage, shapes)
        options = {"lr": 1e-3, "weight_decay": 0.1, "compile": compile, **COVERING[storage]}
        optimizer = ng.AdamW(params, **options, storage=storage)
        take_steps(optimizer, range(40), scale=0.01)
        results.append(kept(optimizer))
        if optimizer.grad_norm is not None:
            results[-1]["norm"] = optimizer.grad_norm.reshape(1)
        if optimizer.audit_every:
            readings = ng.audit(optimizer)
            assert readings[""].num_audits == 4
            results[-1]["lost"] = torch.tensor([readings["param 0"].lost_fraction])
    assert_same_bits(*results)


@needs_compiler
@pytest.mark.parametrize("audited", [False, True])
def test_a_skipped_step_of_a_compiled_kernel_changes_nothing(audited: bool) -> None:
    """Whose loop does not look at the flag on a CPU."""
    kernel = StepKernel(ADAMW, STORAGES["word"], compile=True)
    words = [torch.arange(1000, dtype=torch.int32) * 4099 + k for k in range(4)]
    before = [word.clone() for word in words]
    for skip, same in ((1.0, True), (0.0, False)):
        values = torch.tensor([1.0, skip, 0.1, 0.05, -1e-3, 1.0, 1e-8, -1e-4])
        for run in (kernel.run, lambda work, *rest, **_: kernel.run_each([work], *rest)):
            run(Work(words), values, torch.tensor(5, dtype=torch.int32), audited=audited)
        assert all(torch.equal(*pair) for pair in zip(words, before, strict=True)) is same


@needs_compiler
def test_two_hundred_shapes_and_many_steps_compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    real = compilation._load_or_compile
    monkeypatch.setattr(compilation, "_KERNELS", {})
    monkeypatch.setattr(
        compilation, "_load_or_compile", lambda name, definition: asked.append(name) or real(name, definition)
    )
    shapes: list[tuple[int, ...]] = [(n,) if n % 3 else (n // 3, 3) for n in range(150)]
    shapes += [(n, 97) for n in range(41, 91)]
    params = parameters("word", shapes)
    optimizer = ng.AdamW(
        [{"params": [p for p in params if p.ndim > 1]}, {"params": [p for p in params if p.ndim < 2]}],
        storage="word",
        compile=True,
        max_grad_norm=1.0,
        audit_every=2,
    )
    take_steps(optimizer, range(4), scale=0.01)
    # word and (for vectors) master, each plain and audited, and the two passes of the norm.
    assert len(asked) == len(set(asked)) <= 6


@pytest.mark.parametrize("storage", REPRESENTATIVES)
@pytest.mark.parametrize("shape", [(70, 64), (7, 5)])
def test_odd_places_and_layouts_have_the_same_bits(storage: str, shape: tuple[int, int]) -> None:
    """A parameter at an odd offset, a transposed gradient, a transposed parameter: the same numbers, the same bits."""
    plain = ng.AdamW(parameters(storage, [shape]), storage=storage, compile=False)
    odd, crossed = parameters(storage, [shape, shape])
    crossed = torch.nn.Parameter(odd.detach().t().contiguous().t())
    base = torch.zeros(odd.numel() + 1, dtype=odd.dtype)
    base[1:] = odd.detach().reshape(-1)
    odd = torch.nn.Parameter(base[1:].view(shape))
    others = [ng.AdamW([p], storage=storage, compile=False) for p in (odd, crossed)]
    (reference,) = plain.param_groups[0]["params"]
    for step in range(6):
        (gradient,) = step_gradients([reference], step, 1e-2)
        reference.grad, odd.grad, crossed.grad = gradient, gradient.clone(), gradient.t().contiguous().t()
        for optimizer in (plain, *others):
            optimizer.step()
    for optimizer in others:
        assert_same_bits(kept(plain), kept(optimizer))


@pytest.mark.parametrize("storage", REPRESENTATIVES)
def test_more_dims_strides_and_pieces_have_the_same_bits(monkeypatch: pytest.MonkeyPatch, storage: str) -> None:
    """Odd rows in odd places, stepped in pieces of 64 words, against the same numbers as one small matrix."""
    shape = (3, 7, 9)
    plain = ng.AdamW(parameters(storage, [shape]), storage=storage, compile=False)
    (reference,) = plain.param_groups[0]["params"]
    crossed = torch.nn.Parameter(reference.detach().transpose(0, 2).contiguous().transpose(0, 2))
    spread = torch.nn.Parameter(torch.stack([reference.detach()] * 2, -1)[..., 0])
    flat = torch.nn.Parameter(reference.detach().clone().view(21, 9))
    others = [ng.AdamW([p], storage=storage, compile=False) for p in (crossed, spread, flat)]
    for step in range(6):
        (gradient,) = step_gradients([reference], step, 1e-2)
        reference.grad, crossed.grad = gradient, gradient.clone()
        spread.grad, flat.grad = gradient.transpose(0, 1).contiguous().transpose(0, 1), gradient.view(21, 9)
        monkeypatch.setattr("narrowgauge.optim.step.PIECE_WORDS", 1 << 16)
        monkeypatch.setattr("narrowgauge.optim.state.BUCKET_WORDS", 1 << 16)
        plain.step()
        monkeypatch.setattr("narrowgauge.optim.step.PIECE_WORDS", 16)
        monkeypatch.setattr("narrowgauge.optim.state.BUCKET_WORDS", 16)
        for optimizer in others:
            optimizer.step()
    for optimizer in others:
        found = {name: value.view(shape) for name, value in kept(optimizer).items()}
        assert_same_bits(kept(plain), found)
    assert not crossed.is_contiguous() and not spread.is_contiguous()


@pytest.mark.parametrize("storage", ["word", "compact", "states8", "collage-plus"])
def test_a_chunk_boundary_changes_nothing(monkeypatch: pytest.MonkeyPatch, storage: str) -> None:
    results = []
    for chunk in (1 << 15, 1000, 30):
        monkeypatch.setattr("narrowgauge.numerics.summation.CHUNK", chunk)
        optimizer = ng.AdamW(parameters(storage, [(30, 31), (20, 22)]), storage=storage, compile=False)
        take_steps(optimizer, range(12), scale=0.01)
        results.append(kept(optimizer))
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[0], results[2])


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (16, 64)])
def test_row_peaks_are_the_largest_magnitudes(shape: tuple[int, int]) -> None:
    values = torch.randn(shape[0], 2 * shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(row_peaks(values.view(torch.int32)), values.abs().amax(1).float())
    values[0, 1] = float("-inf")
    assert row_peaks(values.view(torch.int32))[0] == float("inf")
    values[0, 0] = float("nan")
    assert row_peaks(values.view(torch.int32))[0].isnan()


def test_a_kernel_takes_two_multipliers_for_each_code_and_part_of_the_rows() -> None:
    found = {name: num_scales(STORAGES[name]) for name in REPRESENTATIVES}
    by_rows = {
        "compact": 8,
        "states8": 4,
        "float32-states8": 8,
        "scalify-float16/scaled16": 4,
        "weight8": 6,
        "float8/collage-plus": 6,
    }
    assert found == {name: by_rows.get(name, 0) for name in REPRESENTATIVES}
    assert num_scales(row_of("tail8+bfloat16+float32")) == 0


@pytest.mark.parametrize(
    "storage",
    [
        STORAGES["compact"],
        row_of("tail8+bfloat16+float32"),
        row_of("bfloat16-pair+e4m3-row+e8m15"),
        row_of("tail16+float32+e5m3-row"),
    ],
    ids=lambda row: row.name,
)
def test_composed_rows_are_stepped_as_their_codes_say(storage: Storage) -> None:
    """Against `float32` from the same start: 60 steps, no error is larger than two of the coarsest code."""
    shapes = [(6, 10), (7, 5)]
    optimizers = [
        ng.AdamW(parameters(row, shapes), lr=1e-2, storage=row, compile=False) for row in (STORAGES["float32"], storage)
    ]
    for optimizer in optimizers:
        take_steps(optimizer, range(60), scale=0.01)
    exact, found = map(kept, optimizers)
    limit = 2 * max(storage_error(storage, role) for role in ("weight", "exp_avg", "exp_avg_sq"))
    for name, value in found.items():
        assert value.shape == exact[name].shape
        if not name.endswith("visible"):
            error = float((value - exact[name]).norm() / exact[name].norm())
            assert error < limit, name


def test_without_a_compiler_the_definition_runs_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(compilation, "_KERNELS", {})
    monkeypatch.setattr(compilation, "source_key", lambda: "never compiled")
    compilation._warn_once.cache_clear()
    optimizer = ng.AdamW(parameters("word", [(80, 80)]), storage="word", compile=True)
    with pytest.warns(UserWarning, match="no C\\+\\+ compiler"):
        take_steps(optimizer, range(2), scale=0.01)
    eager = ng.AdamW(parameters("word", [(80, 80)]), storage="word", compile=False)
    take_steps(eager, range(2), scale=0.01)
    assert_same_bits(kept(optimizer), kept(eager))


@pytest.mark.parametrize("storage", ["word", "compact"])
def test_the_write_of_a_matrix_rule_is_defined_once(monkeypatch: pytest.MonkeyPatch, storage: str) -> None:
    """Not for each step or chunk; the chunks change nothing."""
    results, defined, real = [], [], kernel.make_step
    monkeypatch.setattr(kernel, "make_step", lambda *args, **options: defined.append(args) or real(*args, **options))
    for chunk in (1 << 15, 40):
        monkeypatch.setattr("narrowgauge.numerics.summation.CHUNK", chunk)
        optimizer = ng.Muon(parameters(storage, [(30, 62), (20, 22)]), storage=storage, audit_every=2)
        take_steps(optimizer, range(4), scale=0.01)
        results.append(kept(optimizer))
    assert_same_bits(*results)
    assert len(defined) == 4  # plain and audited, in each optimizer


# ── where words begin, on a GPU ─────────────────────────────────────────────────────────────────────────────────────────

WIDE = [(66, 66), (5, 98), (34, 33)]


def like_inductor(definition: Definition) -> Compiled:
    """What its code for a GPU does: arguments that are not aligned are replaced by clones, also where it writes."""

    def run(arguments: list[Tensor]) -> list[Tensor]:
        given = [a if a.data_ptr() % 16 == 0 else a.clone() for a in arguments]
        arguments.clear()
        return [definition.function(*given)]

    return run


@pytest.mark.parametrize("storage", REPRESENTATIVES)
@pytest.mark.parametrize("audit_every", [0, 2])
def test_steps_of_misaligned_words_are_written_back(
    storage: str, audit_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters that begin at odd words of a flat buffer, and planes whose second tensor does: as if compiled for a GPU."""
    for module in (aligned, kernel):
        monkeypatch.setattr(module, "is_aligned", lambda tensor: tensor.data_ptr() % 16 == 0)
    monkeypatch.setattr(StepKernel, "compile_audit_elsewhere", lambda *_: None)
    monkeypatch.setattr("narrowgauge.optim.state.SMALL", 0)  # none is copied into a bucket
    runs = []
    for kind in ("eager", "guarded", "bare"):
        made: dict[str, Compiled] = {}

        def compiled(
            name: str, _: object, define: Callable[[], Definition], kind: str = kind, made: Any = made
        ) -> Compiled:
            if name not in made:
                run = like_inductor(define())
                made[name] = aligned.on_aligned(run) if kind == "guarded" else run
            return cast(Compiled, made[name])

        monkeypatch.setattr(kernel, "compiled", compiled)
        params = [torch.nn.Parameter(at_an_odd_word(p.detach())) for p in parameters(storage, WIDE)]
        optimizer = ng.AdamW(params, lr=1e-2, storage=storage, audit_every=audit_every, compile=kind != "eager")
        take_steps(optimizer, range(4))
        runs.append(kept(optimizer))
    eager, guarded, bare = runs
    assert_same_bits(guarded, eager)
    assert any(not torch.equal(eager[name], bare[name]) for name in eager)  # what this guards against


def at_an_odd_word(values: Tensor) -> Tensor:
    """A copy that begins four bytes after a multiple of 16."""
    size = values.element_size()
    flat = torch.zeros(values.numel() + 16, dtype=values.dtype)
    begin = (4 - flat.data_ptr()) % 16 // size
    return flat[begin : begin + values.numel()].view(values.shape).copy_(values)


def test_a_tensor_is_copied_only_where_it_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    base = torch.zeros(64, dtype=torch.int32)
    odd = base[1 + (-base.data_ptr() // 4) % 4 :][:8]
    even = base[(-base.data_ptr() // 4) % 4 + 16 :][:8]
    assert aligned.is_aligned(odd)  # anything on a CPU
    seen: list[int] = []

    def run(arguments: list[Tensor]) -> list[Tensor]:
        seen.extend(a.data_ptr() for a in arguments)
        arguments[-1].fill_(7)
        return [torch.ones(1)]

    monkeypatch.setattr(aligned, "is_aligned", lambda tensor: tensor.data_ptr() % 16 == 0)
    assert aligned.on_aligned(run)([even, even]) and seen == [even.data_ptr()] * 2 and even.eq(7).all()
    assert aligned.on_aligned(run)([odd, even, odd]) and odd.eq(7).all()
    assert seen[3] == even.data_ptr() and seen[2] == seen[4] != odd.data_ptr() and seen[2] % 16 == 0
    odd.zero_()
    aligned.on_aligned(run)([even, odd])  # it was read alone
    assert not odd.any()


def test_a_package_for_a_cpu_is_called_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at each argument would double the time of a call."""

    def run(arguments: list[Tensor]) -> list[Tensor]:
        return arguments

    path, loader = tmp_path / "a.pt2", SimpleNamespace(boxed_run=run)
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda _: SimpleNamespace(loader=loader))
    zipfile.ZipFile(path, "w").close()
    assert inductor.load_ahead(path) is run
    path.write_text("def call(arguments):\n    arguments[1].add_(arguments[0])\n    return (arguments[0].sum(),)\n")
    words = torch.arange(4)
    total = torch.zeros(4, dtype=words.dtype)
    (found,) = inductor.load_ahead(path)([words, total])
    assert found == 6 and torch.equal(total, words)
    path.write_text("from torch import no_such_name\n")
    with pytest.raises(RuntimeError, match="no_such_name"):
        inductor.load_ahead(path)
