"""The compiled kernel is the definition: the same bits, one compilation, whatever the shape."""

from __future__ import annotations

import pytest
import torch

import narrowgauge as ng
from narrowgauge._torch import compiler_missing
from narrowgauge.optim import compilation
from narrowgauge.storages import STORAGES
from optim.scenarios import assert_same_bits, gradients, kept, parameters, train

needs_compiler = pytest.mark.skipif(bool(compiler_missing()), reason=f"{compiler_missing()}: nothing to compare with")


@needs_compiler
@pytest.mark.parametrize("storage", STORAGES)
def test_eager_and_compiled_have_the_same_bits(storage: str) -> None:
    # Large, odd, small (in a bucket), and one that is audited in turns.
    shapes = [(130, 66), (65, 67), (5,), (300, 300)]
    results = []
    for compile in (False, True):
        params = parameters(storage, shapes)
        options = {"lr": 1e-3, "weight_decay": 0.1, "max_grad_norm": 1.0, "compile": compile}
        optimizer = ng.AdamW(params, **options, storage=storage)
        train(optimizer, shapes, range(100))
        assert optimizer.grad_norm is not None
        results.append({**kept(optimizer), "norm": optimizer.grad_norm.reshape(1)})
        readings = ng.audit(optimizer)
        assert readings[""].num_audits == 10
        results[-1]["lost"] = torch.tensor([readings["param 0"].lost_fraction])
    assert_same_bits(*results)


@needs_compiler
def test_two_hundred_shapes_and_many_steps_compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    real = compilation.compiled
    monkeypatch.setattr(
        "narrowgauge.optim.kernels.compiled", lambda name, *rest: asked.append(name) or real(name, *rest)
    )
    monkeypatch.setattr(
        "narrowgauge.optim.clipping.compiled", lambda name, *rest: asked.append(name) or real(name, *rest)
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
    ordered = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"]]
    train(optimizer, ordered, range(4))
    # word and (for vectors) master, each plain and audited, and the two passes of the norm.
    assert len(asked) == len(set(asked)) <= 6


@pytest.mark.parametrize("storage", ["word", "split", "float32"])
def test_odd_places_and_layouts_have_the_same_bits(storage: str) -> None:
    """A parameter at an odd offset, a transposed gradient, a transposed parameter: the same numbers, the same bits."""
    shape = (70, 64)
    plain = ng.AdamW(parameters(storage, [shape]), storage=storage, compile=False)
    odd, crossed = parameters(storage, [shape, shape])
    crossed = torch.nn.Parameter(odd.detach().t().contiguous().t())
    base = torch.zeros(odd.numel() + 1, dtype=odd.dtype)
    base[1:] = odd.detach().reshape(-1)
    odd = torch.nn.Parameter(base[1:].view(shape))
    others = [ng.AdamW([p], storage=storage, compile=False) for p in (odd, crossed)]
    (reference,) = plain.param_groups[0]["params"]
    for step in range(10):
        (gradient,) = gradients([shape], step, dtype=reference.dtype)
        reference.grad, odd.grad, crossed.grad = gradient, gradient.clone(), gradient.t().contiguous().t()
        for optimizer in (plain, *others):
            optimizer.step()
    for optimizer in others:
        assert_same_bits(kept(plain), kept(optimizer))


def test_a_chunk_boundary_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for chunk in (1 << 15, 1000):
        monkeypatch.setattr("narrowgauge.optim.kernels.StepKernel.CHUNK", chunk)
        optimizer = ng.AdamW(parameters("word", [(90, 90)]), storage="word", compile=False)
        train(optimizer, [(90, 90)], range(12))
        results.append(kept(optimizer))
    assert_same_bits(*results)


def test_without_a_compiler_the_definition_runs_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(compilation, "_LOADED", {})
    monkeypatch.setattr(compilation, "source_key", lambda: "never compiled")
    compilation._warn_once.cache_clear()
    optimizer = ng.AdamW(parameters("word", [(80, 80)]), storage="word", compile=True)
    with pytest.warns(UserWarning, match="no C\\+\\+ compiler"):
        train(optimizer, [(80, 80)], range(2))
    eager = ng.AdamW(parameters("word", [(80, 80)]), storage="word", compile=False)
    train(eager, [(80, 80)], range(2))
    assert_same_bits(kept(optimizer), kept(eager))
