"""The compiled kernel is the definition: the same bits, one compilation, whatever the shape."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import narrowgauge as ng
from narrowgauge.optim import multi_tensor
from narrowgauge.torch_support import compile, cpp
from narrowgauge.torch_support.machine import compiler_missing
from optim.pairs import everything, parameters
from tensors import assert_same_bits, set_gradients, take_steps

needs_compiler = pytest.mark.skipif(
    bool(compiler_missing()), reason=f"{compiler_missing()}: nothing to compare with"
)


@needs_compiler
def test_eager_and_compiled_have_the_same_bits_where_steps_are_audited() -> None:
    """Also of a step that is skipped.

    Plain kernels: tests/equivalence, and the second moments of test_claims.
    """
    results: list[dict[str, torch.Tensor]] = []
    lost: list[float] = []
    for is_compiled in (False, True):
        params = parameters("word", [(130, 66), (65, 67), (5,)])
        options = {
            "lr": 1e-3,
            "momentum": 0.0,
            "weight_decay": 0.1,
            "audit_every": 1,
            "max_grad_norm": 1.0,
        }
        optimizer = ng.SGD(params, **options, storage="word", compile=is_compiled)
        for step in range(8):
            set_gradients(params, step, 0.01)
            if step == 3:
                params[1].grad[3, 2] = torch.inf  # type: ignore[index]
            optimizer.step()
        readings = ng.audit(optimizer)
        assert optimizer.num_skipped == 1
        assert optimizer.grad_norm is not None
        assert readings.total is not None
        results.append({**everything(optimizer), "norm": optimizer.grad_norm.reshape(1)})
        lost.append(readings["param 0"].lost_fraction)
    assert_same_bits(*results)
    assert lost[1] == pytest.approx(lost[0], rel=0.2), "a printed step audits some programs"


@pytest.mark.parametrize("storage", ["word", "compact"])
def test_a_chunk_boundary_changes_nothing(monkeypatch: pytest.MonkeyPatch, storage: str) -> None:
    results = []
    for chunk in (1 << 15, 1000, 30):
        monkeypatch.setattr("narrowgauge.numerics.chunks.CHUNK", chunk)
        optimizer = ng.AdamW(
            parameters(storage, [(30, 31), (20, 22)]), storage=storage, compile=False
        )
        take_steps(optimizer, range(12), scale=0.01)
        results.append(everything(optimizer))
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[0], results[2])


def test_without_a_compiler_the_definition_runs_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path))  # a library that is there is loaded
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(cpp, "_libraries", {})
    monkeypatch.setattr(multi_tensor, "_reasons", {})
    compile._warn_once.cache_clear()
    optimizer = ng.AdamW(parameters("word", [(80, 80)]), storage="word", compile=True)
    with pytest.warns(UserWarning, match="no C\\+\\+ compiler"):
        take_steps(optimizer, range(2), scale=0.01)
    eager = ng.AdamW(parameters("word", [(80, 80)]), storage="word", compile=False)
    take_steps(eager, range(2), scale=0.01)
    assert_same_bits(everything(optimizer), everything(eager))
