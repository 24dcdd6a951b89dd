"""The compiled kernel is the definition: the same bits, one compilation, whatever the shape."""

from __future__ import annotations

import pytest
import torch

import narrowgauge as ng
from narrowgauge import compile
from narrowgauge.machine import compiler_missing
from narrowgauge.optim.kernel import StepKernel
from narrowgauge.optim.rules.elementwise import ADAMW
from narrowgauge.spec.storages import STORAGES, Storage
from optim.scenarios import kept, parameters, row_of, storage_error
from tensors import assert_same_bits, take_steps

needs_compiler = pytest.mark.skipif(bool(compiler_missing()), reason=f"{compiler_missing()}: nothing to compare with")


@needs_compiler
def test_eager_and_compiled_have_the_same_bits() -> None:
    """Clipped and audited; tests/equivalence compiles the other storages for a small model."""
    # Large, odd, and one that is audited in turns; a vector, which joins a bucket.
    shapes = [(130, 66), (65, 67), (300, 300), (5,)]
    results = []
    for is_compiled in (False, True):
        params = parameters("word", shapes)
        options = {"lr": 1e-3, "weight_decay": 0.1, "audit_every": 10, "max_grad_norm": 1.0, "compile": is_compiled}
        optimizer = ng.AdamW(params, **options, storage="word")
        take_steps(optimizer, range(40), scale=0.01)
        results.append(kept(optimizer))
        if optimizer.grad_norm is not None:
            results[-1]["norm"] = optimizer.grad_norm.reshape(1)
        if optimizer.audit_every:
            readings = ng.audit(optimizer)
            assert readings.total is not None and readings.total.num_audits == 4
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
        kernel.run(words, values, torch.tensor(5, dtype=torch.int32), audited=audited)
        assert all(torch.equal(*pair) for pair in zip(words, before, strict=True)) is same


@pytest.mark.parametrize("storage", ["word", "compact"])
def test_a_chunk_boundary_changes_nothing(monkeypatch: pytest.MonkeyPatch, storage: str) -> None:
    results = []
    for chunk in (1 << 15, 1000, 30):
        monkeypatch.setattr("narrowgauge.numerics.chunks.CHUNK", chunk)
        optimizer = ng.AdamW(parameters(storage, [(30, 31), (20, 22)]), storage=storage, compile=False)
        take_steps(optimizer, range(12), scale=0.01)
        results.append(kept(optimizer))
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[0], results[2])


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
    monkeypatch.setattr(compile, "_COMPILED", {})
    compile._warn_once.cache_clear()
    optimizer = ng.AdamW(parameters("word", [(80, 80)]), storage="word", compile=True)
    with pytest.warns(UserWarning, match="no C\\+\\+ compiler"):
        take_steps(optimizer, range(2), scale=0.01)
    eager = ng.AdamW(parameters("word", [(80, 80)]), storage="word", compile=False)
    take_steps(eager, range(2), scale=0.01)
    assert_same_bits(kept(optimizer), kept(eager))
