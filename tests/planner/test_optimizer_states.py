"""States of other optimizers are what the optimizers keep."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.planner.estimate import Estimate as Job
from narrowgauge.planner.layouts import Layout
from narrowgauge.planner.machine import cluster_of
from narrowgauge.planner.model import decoder, read_model
from narrowgauge.planner.state import on_stage, state_of
from narrowgauge.spec.notation import parse
from narrowgauge.spec.storages import STORAGES
from optim.scenarios import OPTIMIZERS

LLAMA = read_model("llama-8b")
ROWS = 512
COLS = 256


def state_bytes(optimizer: Optimizer, weight: torch.nn.Parameter) -> float:
    """Bytes that an optimizer keeps beside a weight, after a step."""
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    state = optimizer.state_of(weight)
    return float(sum(tensor.untyped_storage().nbytes() for tensor in state.tensors()))


LOW_RANK = ("galore", "gradnorm_lorp")
WIDE = product(
    ("adamw", "adam", "lion", "muon", "adafactor", *LOW_RANK), ("word", "master", "split")
)
NARROW = product(("adamw", "adam", "lion", "adafactor", *LOW_RANK), ("exact", "compact", "states8"))
CASES = [
    *WIDE,
    ("muon", "exact"),
    *(case for case in NARROW if case[0] not in LOW_RANK or case[1] == "states8"),
]


@pytest.mark.parametrize(("name", "storage"), CASES)
def test_states_are_those_that_the_optimizer_keeps(name: str, storage: str) -> None:
    shapes = [(COLS, COLS)] * 4 + [
        (ROWS, COLS),
        (COLS, ROWS),
        (COLS,),
        (COLS,),
    ]  # attention, up, down, norms
    weights = []
    for shape in shapes:
        weights.append(torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)))
    counted = sum(
        state_bytes(OPTIMIZERS[name]([weight], lr=1e-3, storage=storage), weight)
        for weight in weights
    )
    sizes: dict[str, Any] = {
        "hidden_size": COLS,
        "intermediate_size": ROWS,
        "vocab_size": 1,
        "is_gated": False,
    }
    layers = state_of(
        decoder("one", num_layers=1, num_heads=1, **sizes), STORAGES[storage], name
    ).layers
    assert layers.optimizer + layers.whole == pytest.approx(counted, rel=0.01)
    assert (layers.whole > 0.1 * counted) == (name in LOW_RANK)  # no number of ranks shards it


def test_muon_leaves_embedding_and_head_to_adamw() -> None:
    muon = state_of(LLAMA, STORAGES["master"], "muon")
    adamw = state_of(LLAMA, STORAGES["master"])
    assert muon.embedding == adamw.embedding and muon.head == adamw.head
    assert muon.layers.optimizer == pytest.approx(8 / 12 * adamw.layers.optimizer, rel=1e-3)


@pytest.mark.parametrize("name", ["adamw", "adam", "lion", "muon", "adafactor", "galore"])
@pytest.mark.parametrize("storage", ["word", "master", "naive"])
def test_states_of_vectors_are_those_that_the_optimizer_keeps(name: str, storage: str) -> None:
    vector = torch.nn.Parameter(torch.zeros(COLS, dtype=torch.bfloat16))
    counted = state_bytes(OPTIMIZERS[name]([vector], lr=1e-3, storage=storage), vector)
    sizes: dict[str, int] = {"num_layers": 1, "hidden_size": COLS, "num_heads": 1, "vocab_size": 1}
    plain, normed = (
        state_of(
            decoder("one", **sizes, head_norms=norms), STORAGES[storage], name
        ).layers.optimizer
        for norms in ("none", "head")
    )
    assert normed - plain == 2 * counted


def test_a_tied_head_has_no_state_of_its_own() -> None:
    sizes: dict[str, int] = {
        "num_layers": 1,
        "hidden_size": COLS,
        "num_heads": 1,
        "vocab_size": ROWS,
    }
    tied, untied = (
        state_of(decoder("one", **sizes, tie_embeddings=tie), STORAGES["word"])
        for tie in (True, False)
    )
    assert untied.embedding == tied.embedding
    assert untied.head.weights - tied.head.weights == 2 * ROWS * COLS
    assert untied.head.optimizer > tied.head.optimizer
    # On the last stage it exists too.
    shapes = (decoder("one", **sizes, tie_embeddings=tie) for tie in (True, False))
    layout = Layout(pipeline=2, zero=0)
    cluster = cluster_of("H100-SXM", 2)
    tied_last, last = (
        on_stage(Job(a, parse("bfloat16/word"), layout, cluster, 64), 0.5, 1)[1] for a in shapes
    )
    assert tied_last == last
