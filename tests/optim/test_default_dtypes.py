"""A default dtype is the user's to choose: no step, no kernel and no cache may depend on it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import narrowgauge as ng
from covering import whole
from narrowgauge._torch import inductor
from narrowgauge.machine.cpp_compiler import compiler_missing
from narrowgauge.optim import compilation
from narrowgauge.optim.clip import define_norm
from narrowgauge.optim.kernel import StepKernel
from narrowgauge.optim.rules.elementwise import ADAMW
from narrowgauge.spec.storages import STORAGES
from optim.pairs import SOME, Shape, build, parameters
from tensors import assert_same_bits, parameters_of, step_gradients

SOURCE = Path(ng.__file__).parent
# What makes a tensor of the default dtype, or of one that its arguments' Python types decide.
MAKERS = {
    *(
        "tensor",
        "as_tensor",
        "scalar_tensor",
        "zeros",
        "ones",
        "empty",
        "full",
        "eye",
        "arange",
        "linspace",
        "logspace",
    ),
    *("rand", "randn", "normal", "empty_strided"),
}
needs_compiler = pytest.mark.skipif(bool(compiler_missing()), reason=f"{compiler_missing()}: nothing to compile")
OTHERS = [torch.bfloat16, torch.float64]


def makers_without_dtype(source: str) -> Iterator[str]:
    """The calls in a file's text that leave the dtype of a new tensor to the process, with their lines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MAKERS:
            of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            if of_torch and not any(keyword.arg in ("dtype", None) for keyword in node.keywords):
                yield f"{node.lineno}: {ast.unparse(node)}"


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def test_every_new_tensor_is_told_its_dtype() -> None:
    found = {
        f"{path.relative_to(SOURCE)}:{call}"
        for path in sorted(SOURCE.rglob("*.py"))
        for call in makers_without_dtype(path.read_text())
    }
    assert found == set()
    assert list(makers_without_dtype("x = 1\ny = torch.zeros(3, device=d)")) == ["2: torch.zeros(3, device=d)"]


def stepped(optimizer: ng.Optimizer, slopes: list[list[Tensor]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Everything kept after steps that are taken under a default dtype."""
    with default_dtype(dtype):
        for step in slopes:
            for p, slope in zip(parameters_of(optimizer), step, strict=True):
                p.grad = slope
            optimizer.step()
        states = {f"{k} {n}": v for k, s in optimizer.state_dict()["state"].items() for n, v in s.items()}
        weights = {f"{k} weight": optimizer.stored(p) for k, p in enumerate(parameters_of(optimizer))}
    audit = {"audit": optimizer.last_audit} if optimizer.last_audit is not None else {}
    return states | weights | audit | {f"{k} seen": p.detach().clone() for k, p in enumerate(parameters_of(optimizer))}


@pytest.mark.parametrize("dtype", OTHERS)
@SOME
def test_steps_have_the_same_bits_under_any_default_dtype(rule: str, storage: str, dtype: torch.dtype) -> None:
    slopes = [step_gradients(parameters(storage), step) for step in range(3)]
    options = {"max_grad_norm": 0.5, "audit_every": 2}
    found = [
        stepped(build(rule, parameters(storage), storage, **options), slopes, each) for each in (torch.float32, dtype)
    ]
    assert_same_bits(*found)


@whole
@needs_compiler
def test_kernels_are_the_same_under_any_default_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is compiled under bfloat16 serves float32, and from the cache float64. (The smallest kernel there is.)"""
    shapes: list[Shape] = [(130, 66), (65, 68)]
    slopes = [step_gradients(parameters("naive", shapes), step) for step in range(2)]
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path))
    monkeypatch.setattr(compilation, "_KERNELS", {})

    def trained(dtype: torch.dtype, *, compile: bool) -> dict[str, Tensor]:
        optimizer = ng.SGD(parameters("naive", shapes), lr=0.01, storage="naive", audit_every=0, compile=compile)
        return stepped(optimizer, slopes, dtype)

    wanted, packages = trained(torch.float32, compile=False), []
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert_same_bits(wanted, trained(dtype, compile=True))
        packages.append({path.name for path in tmp_path.rglob("*.pt2")})
        compilation._KERNELS.clear()
    assert len(packages[0]) == 1 and packages[0] == packages[1] == packages[2]


def test_the_alias_of_a_kernel_names_the_dtypes_of_its_arguments() -> None:
    wide, narrow = (torch.zeros(2, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    assert compilation.alias_of("a", [wide, wide]) != compilation.alias_of("a", [wide, narrow])


# ── a loaded kernel is held against its definition ──────────────────────────────────────────────────────────────────


def doubled(words: Tensor, output: Tensor) -> Tensor:
    output.copy_(words * 2)
    return words.float().sum()


@pytest.mark.parametrize(
    ("run", "is_right"),
    [
        (lambda args: [doubled(*args)], True),
        (lambda args: [doubled(*args) * (1 + 1e-6)], True),  # a sum in another order
        (lambda args: [doubled(*args) * 1.01], False),
        (lambda args: [args[0].float().sum()], False),  # nothing is written
        (lambda args: [doubled(args[0], args[1]).bfloat16()], False),
        (lambda args: [doubled(args[0], args[0])], False),
    ],
)
def test_a_function_agrees_with_its_definition_or_not(run: Any, is_right: bool) -> None:
    example = [compilation.normal_words(torch.bfloat16, (16,), torch.device("cpu")), torch.zeros(16, dtype=torch.int32)]
    before = [x.clone() for x in example]
    definition = compilation.Definition(doubled, example, [(0,), (0,)])
    assert compilation.agrees(run, definition, example) is is_right
    assert all(map(torch.equal, before, example))


def test_a_function_that_reads_anew_what_it_wrote_is_wrong_in_place_alone() -> None:
    """As a step of several kernels might, of which the first writes and the second reads."""

    def summed(words: Tensor, output: Tensor) -> Tensor:
        total = words.float().sum()
        output.copy_(words * 2)
        return total

    def late(arguments: list[Tensor]) -> list[Tensor]:
        return [doubled(*arguments)]

    example = [torch.arange(1, 9, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)]
    apart = compilation.Definition(summed, example, [(0,), (0,)])
    in_place = compilation.Definition(summed, example, [(0,), (0,)], outputs=(0,))
    assert compilation.agrees(late, apart, example) and not compilation.agrees(late, in_place, example)


@pytest.fixture
def compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A new cache, a compiler that only notes what it is asked for, and a process that was told nothing yet."""
    asked: list[Path] = []

    def forged(program: Any, path: Path) -> None:
        asked.append(path)
        path.write_bytes(b"code")

    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path))
    monkeypatch.setattr(compilation, "_KERNELS", {})
    monkeypatch.setattr(compilation, "trace", lambda *_: SimpleNamespace(key=lambda compiler: "0" * 24))
    monkeypatch.setattr(compilation, "compile_ahead", forged)
    monkeypatch.setattr(compilation, "compiler_missing", lambda: "")
    compilation._warn_once.cache_clear()
    return asked


def flushing(function: Any) -> Any:
    """Like a function of words of bfloat16 pairs, but it writes no subnormals: a fault that common values do not show."""

    def run(arguments: list[Tensor]) -> list[Tensor]:
        result = function(*arguments)
        for written in arguments:
            if written.dtype is torch.int32 and written.ndim:
                halves = written.view(torch.int16)
                halves.copy_(torch.where(halves & 0x7F80 == 0, 0, halves))
        return [result]

    return run


@pytest.mark.parametrize("fault", ["nothing is written", "subnormals are flushed"])
def test_a_kernel_that_does_something_else_is_not_used(
    compilations: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The definition runs, with the right bits; the process says so once, and the next does not compile it again."""
    shapes: list[Shape] = [(80, 80)]
    slopes = [step_gradients(parameters("naive", shapes), step) for step in range(2)]

    def trained(*, compile: bool) -> tuple[dict[str, Tensor], ng.Optimizer]:
        optimizer = ng.SGD(parameters("naive", shapes), storage="naive", compile=compile, audit_every=0, momentum=0.0)
        return stepped(optimizer, slopes, torch.float32), optimizer

    wanted, optimizer = trained(compile=False)
    (kernel,) = optimizer._registry.kernels.values()
    wrong = flushing(kernel._plain) if fault.startswith("sub") else lambda arguments: [torch.zeros(0)]
    monkeypatch.setattr(compilation, "load_ahead", lambda path: wrong)
    for _ in range(2):
        with pytest.warns(UserWarning, match="does not match its definition.*same bits") as told:
            for _ in range(2):
                assert_same_bits(wanted, trained(compile=True)[0])
        assert len(told) == 1
        compilation._KERNELS.clear()
        compilation._warn_once.cache_clear()
    assert len(compilations) == 1
    assert {path.suffix for path in tmp_path.glob("kernels/*.*")} == {".lock", ".refuted"}


def test_a_kernel_is_proved_on_edge_values_once(compilations: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is made; what is loaded from the cache is only tried."""
    kernel, tried = StepKernel(ADAMW, STORAGES["word"], compile=True), []
    monkeypatch.setattr(compilation, "load_ahead", lambda path: lambda arguments: [kernel._plain(*arguments)])
    real = compilation.agrees
    monkeypatch.setattr(compilation, "agrees", lambda *args, **how: tried.append(how) or real(*args, **how))
    for times in ([{}, {"sums": False}], [{}]):
        assert kernel.variant(torch.device("cpu"), False) is not None
        assert tried == times and len(compilations) == 1
        tried.clear()
        compilation._KERNELS.clear()


@needs_compiler
def test_a_real_kernel_is_right_on_edge_values(tmp_path: Path) -> None:
    """A small one; wherever a test compiles steps, they are proved, or warn that they are not."""
    definition, path = define_norm(torch.bfloat16, torch.device("cpu")), tmp_path / "kernel.pt2"
    inductor.compile_ahead(inductor.trace(definition.function, definition.example, definition.lengths), path)
    run = inductor.load_ahead(path)
    assert compilation.is_proved(run, definition)
