"""Wrong questions: each is refused in one line with an advice, and none is half done in silence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.planner.plan import plan
from narrowgauge.planner.program import PARTS
from narrowgauge.spec.chips import CHIPS

TOKENS = torch.zeros(8, 32, dtype=torch.int64)


def module() -> nn.Module:
    return nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 16), nn.Linear(16, 100))


def refused(**question: Any) -> str:
    """Return the line that refuses a question."""
    with pytest.raises(NarrowgaugeError) as error:
        plan(**question)
    text = str(error.value)
    assert "\n" not in text and error.value.advice, text
    return text


@pytest.mark.parametrize("chip", CHIPS)
def test_every_chip_plans_a_model_that_is_too_large(chip: str) -> None:
    """Gradients are summed only in dtypes that sums have, also on chips of float16."""
    assert plan("llama-33b", chip=chip, advise=False).best.memory.total > 0


@pytest.mark.parametrize("name", ["llama-8b", "gpt2-124m", "mixtral-8x7b"])
def test_a_part_alone_trains_or_nothing_does(name: str) -> None:
    """What trains is counted by part, and a model of which nothing trains is refused."""
    question: dict[str, Any] = {
        "model": name,
        "recipes": "bfloat16/word",
        "chip": "B200",
        "chips": 8,
    }
    present = [part for part in PARTS if part not in ("reference", "experts")]
    if "mixtral" in name:
        present = [part for part in PARTS if part not in ("reference", "mlp")]
    frozen = dict.fromkeys(present, "frozen")
    assert "nothing" in refused(**question, parts=frozen)
    for part in present:
        if part == "head" and name == "gpt2-124m":
            continue  # tied to the embeddings
        best = plan(**question, parts={**frozen, part: "trained"}).best
        assert 0 < best.trained_parameters < best.architecture.num_parameters


@pytest.mark.parametrize("part", ["attention", "mlp", "embeddings", "head", "norms"])
def test_a_frozen_part_is_no_adapter(part: str) -> None:
    question: dict[str, Any] = {"recipes": "bfloat16/word", "chip": "H100-SXM", "chips": 8}
    best = plan("llama-8b", **question, parts={part: "float32"}).best
    assert best.kind == "dense"
    assert plan("llama-8b", **question, lora=8).best.kind == "adapters"


@pytest.mark.parametrize(("model", "part"), [("llama-8b", "experts"), ("mixtral-8x7b", "mlp")])
def test_a_part_that_a_model_lacks_is_refused(model: str, part: str) -> None:
    assert part in refused(model=model, chip="H100-SXM", parts={part: "nf4"})


OF_MODULES: dict[str, dict[str, Any]] = {
    "tokens_per_step": {"tokens_per_step": 65_536},
    "sequence_length": {"sequence_length": 4096},
    "lora": {"lora": 16},
    "base": {"base": "nf4"},
    "parts": {"parts": {"head": "frozen"}},
    "recompute": {"layout": "recompute=full"},
}


@pytest.mark.parametrize("name", OF_MODULES)
def test_the_batch_of_a_module_is_its_step(name: str) -> None:
    """What would need another count of the step is refused."""
    question = {"model": module(), "batch": TOKENS, "chip": "H100-SXM", **OF_MODULES[name]}
    assert name in refused(**question)


@pytest.mark.parametrize("batch", [None, TOKENS[:0], TOKENS[:, :0], ()])
def test_a_module_needs_a_batch(batch: Any) -> None:
    assert "batch" in refused(model=module(), batch=batch, chip="H100-SXM")


def test_an_optimizer_of_vectors_has_no_storage_of_matrices() -> None:
    model = module()
    optimizer = ng.AdamW([model[1].bias], lr=1e-3, storage="float32")
    text = refused(model=model, batch=TOKENS, optimizer=optimizer, chip="H100-SXM")
    assert "matrices" in text


def test_a_named_model_has_no_batch() -> None:
    assert "batch" in refused(model="llama-8b", batch=TOKENS, chip="H100-SXM")
