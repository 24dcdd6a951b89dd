"""Counted memory: state, activations and peak are the bytes of live tensors, and counting changes no bit of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from narrowgauge.planner.built_models import of_config
from narrowgauge.planner.layouts import Layout
from narrowgauge.planner.memory import memory_terms
from narrowgauge.runs.record import Run, read_run
from narrowgauge.spec.notation import parse
from narrowgauge.trainer import counted_memory, loop, session
from narrowgauge.trainer.counted_memory import counted_allocations
from narrowgauge.trainer.session import Session
from trainer.tiny_runs import SHAPE, assert_same_run, settings

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
RECIPES = ("float32/float32", "bfloat16/naive")


@pytest.fixture(scope="module")
def runs(place: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """A run of each recipe, uncompiled, so that autograd can be asked what it keeps."""
    folder = tmp_path_factory.mktemp("counted")
    return {
        name: read_run(loop.train(settings(place, folder / str(k), recipe=name, compile=False, steps=5, batch_size=16)))
        for k, name in enumerate(RECIPES)
    }


def summary_of(run: Run) -> dict[str, Any]:
    assert run.summary is not None
    return run.summary


def kept_bytes(made: Session) -> int:
    """What autograd keeps of a forward pass besides the parameters and the tokens, each storage once: the oracle."""
    tokens = made.batch()[0]
    known = (*made.model.parameters(), *made.model.buffers(), tokens)
    own = {tensor.untyped_storage().data_ptr() for tensor in known}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        made.loss(tokens)
    return sum(kept.values())


@pytest.mark.parametrize("recipe", RECIPES)
def test_activations_are_what_autograd_keeps(runs: dict[str, Run], recipe: str) -> None:
    counted = summary_of(runs[recipe])["activation_bytes"]
    oracle = kept_bytes(session.load(runs[recipe].path))
    # What is alive besides: the loss, and the generator's state that the forward pass restores, 5,056 bytes.
    assert oracle <= counted <= oracle + 64 + 5056


@pytest.mark.parametrize("recipe", RECIPES)
def test_state_is_that_of_the_storage_and_the_peak_is_the_planned_one(runs: dict[str, Run], recipe: str) -> None:
    run, width = summary_of(runs[recipe]), 16 if recipe == "float32/float32" else 8
    assert run["state_bytes"] == width * runs[recipe].run["model"]["num_parameters"]
    planned = memory_terms(
        of_config(SHAPE, "tiny"), parse(recipe), Layout(micro_batch=16), 16, is_loss_chunked=False,
        has_overhead=False,
    )  # fmt: skip
    assert run["peak_tensor_bytes"] == pytest.approx(planned.total, rel=0.05)


def test_counting_changes_no_bit(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = {"recipe": "float16/master", "on_spike": "skip"}
    with_count = read_run(loop.train(settings(place, tmp_path / "with", **case)))
    monkeypatch.setattr(counted_memory, "COUNTED_STEPS", ())
    without = read_run(loop.train(settings(place, tmp_path / "without", **case)))
    assert summary_of(with_count)["peak_tensor_bytes"] and "peak_tensor_bytes" not in summary_of(without)
    assert_same_run(with_count, without)


def test_the_profiler_of_somebody_else_goes_on() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs:
        with counted_allocations(CPU) as found:
            torch.ones(3, dtype=torch.float32)
        torch.ones(3, dtype=torch.float32)
    assert not found.changes
    assert sum(event.count for event in theirs.key_averages() if event.key == "aten::ones") == 2
