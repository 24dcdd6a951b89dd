"""States of other optimizers are what the optimizers keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from narrowgauge.planner.layouts import Layout
from narrowgauge.planner.model import decoder
from narrowgauge.planner.state import on_stage, state_of
from narrowgauge.spec.storages import STORAGES
from optim.scenarios import OPTIMIZERS
from planner.jobs import LLAMA, estimate

ROWS = 512
COLS = 256
LOW_RANK = ("galore", "gradnorm_lorp")
CASES = [
    (name, storage)
    for name in ("adamw", "adam", "lion", "muon", *LOW_RANK)
    for storage in ("word", "master", "split", "exact", "compact", "states8")
    if storage not in ("compact", "states8") or name not in ("muon", "gradnorm_lorp")
]
SIZES: dict[str, Any] = {"num_layers": 1, "hidden_size": COLS, "num_heads": 1, "is_gated": False}


def state_bytes(name: str, storage: str, *shape: int) -> float:
    """Bytes that an optimizer keeps beside a weight, after a step."""
    weight = torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16))
    optimizer = OPTIMIZERS[name]([weight], lr=1e-3, storage=storage, compile=False)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    tensors = optimizer.local_state(weight).tensors().values()
    return float(sum(tensor.untyped_storage().nbytes() for tensor in tensors))


@pytest.mark.parametrize(("name", "storage"), CASES)
def test_states_are_those_that_the_optimizer_keeps(name: str, storage: str) -> None:
    counted = 4 * state_bytes(name, storage, COLS, COLS)
    counted += state_bytes(name, storage, ROWS, COLS) + state_bytes(name, storage, COLS, ROWS)
    vector = state_bytes(name, storage, COLS)
    shapes = [
        decoder("one", **SIZES, intermediate_size=ROWS, vocab_size=1, head_norms=norms)
        for norms in ("none", "head")
    ]
    layers, normed = (state_of(shape, STORAGES[storage], name).layers for shape in shapes)
    assert layers.optimizer + layers.unsharded == pytest.approx(counted + 2 * vector, rel=0.01)
    assert normed.optimizer - layers.optimizer == 2 * vector
    assert (layers.unsharded > 0.1 * counted) == (name in LOW_RANK)  # no number of ranks shards it


def test_muon_leaves_embedding_and_head_to_adamw() -> None:
    muon = state_of(LLAMA, STORAGES["master"], "muon")
    adamw = state_of(LLAMA, STORAGES["master"])
    assert muon.first == adamw.first and muon.last == adamw.last
    assert muon.layers.optimizer == pytest.approx(8 / 12 * adamw.layers.optimizer, rel=1e-3)


def test_a_tied_head_has_no_state_of_its_own() -> None:
    shapes = [decoder("one", **SIZES, vocab_size=ROWS, tie_embeddings=tie) for tie in (True, False)]
    tied, untied = (state_of(shape, STORAGES["word"]) for shape in shapes)
    assert untied.first == tied.first
    assert untied.last.weights - tied.last.weights == 2 * ROWS * COLS
    assert untied.last.optimizer > tied.last.optimizer
    # On the last stage it exists too.
    jobs = [estimate(layout=Layout(pipeline=2, zero=0), model=shape) for shape in shapes]
    tied_last, last = (on_stage(job, 0.5, 1)[1] for job in jobs)
    assert tied_last == last
