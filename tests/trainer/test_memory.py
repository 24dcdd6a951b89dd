"""What a batch takes: what cannot fit is refused with an estimate, and an estimate is never more than is taken."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from narrowgauge.errors import ChipError
from narrowgauge.planner.memory.activations import bytes_per_token, layer_tensors
from narrowgauge.planner.memory.rank_memory import LARGE_VOCABULARY
from narrowgauge.spec.models import MODELS
from narrowgauge.spec.notation import parse
from narrowgauge.trainer import language_model, memory
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.memory import batch_bytes, require_batch, shape_of

CONFIG = TrainConfig(model="llama-8m", batch_size=64, sequence_length=256)


@pytest.mark.parametrize("name", MODELS)
def test_shapes_are_those_of_the_preset_and_of_its_config(name: str, tmp_path: Path) -> None:
    row, found = MODELS[name], shape_of(name)
    assert found is not None
    assert (found.num_layers, found.hidden_size, found.vocab_size) == (row.num_layers, row.hidden_size, row.vocab_size)
    config = language_model._preset_config(row, None)
    config.save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        read = shape_of(str(path))
        assert read is not None and read.num_parameters == found.num_parameters


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"hidden_size": 8}', '{"hidden_size": "x", "n_layer": 1, "vocab_size": 1}']
)
def test_a_folder_that_does_not_say_its_shape_is_let_through(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert shape_of(str(tmp_path)) is None and shape_of(str(tmp_path / "none")) is None
    require_batch(replace(CONFIG, model=str(tmp_path), batch_size=2**62))


def test_what_is_estimated_is_no_more_than_backward_keeps() -> None:
    """Bytes of the tensors that autograd saves in one step of an eager bfloat16 model, and the logits' own."""
    config = replace(CONFIG, batch_size=2)
    model = language_model.build("llama-8m", seed=0).bfloat16()
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        language_model.loss_sum(model, torch.zeros(2, 257, dtype=torch.int64), chunked=False)
    # Backward's first gradients come on top: of the logits, in float32 and in their own format.
    logits = 2 * 256 * MODELS["llama-8m"].vocab_size * (4 + 2)
    shape = shape_of("llama-8m")
    assert shape is not None
    assert 0.6 * sum(kept.values()) < batch_bytes(shape, config) < sum(kept.values()) + logits


@pytest.mark.parametrize("recipe", ["int8-row/word", "float8-tensor/word", "bfloat16/word", "float32/float32"])
@pytest.mark.parametrize("name", MODELS)
def test_no_batch_is_refused_that_the_planner_says_fits(name: str, recipe: str) -> None:
    config = replace(CONFIG, model=name, recipe=parse(recipe))
    shape = shape_of(name)
    assert shape is not None
    counted = bytes_per_token(layer_tensors(shape, config.recipe))
    assert counted / 2 < memory.layer_bytes(shape, config) <= counted


def test_parts_and_recomputation_take_less() -> None:
    shape = shape_of("llama-8m")
    assert shape is not None
    whole = batch_bytes(shape, CONFIG)
    assert whole > 60 / 64 * 8 * batch_bytes(shape, replace(CONFIG, gradient_accumulation_steps=8))
    assert batch_bytes(shape, replace(CONFIG, activation_checkpointing=True)) < 0.6 * whole
    assert batch_bytes(shape, replace(CONFIG, batch_size=128)) == 2 * whole
    # The chunked loss never has more logits than so many.
    large = (replace(shape, vocab_size=size) for size in (128_256, LARGE_VOCABULARY))
    assert len({batch_bytes(each, CONFIG) for each in large}) == 1


def test_a_batch_that_cannot_fit_is_refused_with_one_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda: 1 << 30)
    said = r"a batch of 64 × 256 tokens of llama-8m takes about 1\.8 GiB .* 1\.0 GiB are free here\. At most 35 such"
    with pytest.raises(ChipError, match=said):
        require_batch(CONFIG)
    require_batch(replace(CONFIG, batch_size=35))
    require_batch(replace(CONFIG, gradient_accumulation_steps=4))
    with pytest.raises(ChipError, match=r"takes about \d\.\de\+16 GiB"):
        require_batch(TrainConfig(batch_size=2**63 - 1))
    monkeypatch.setattr(memory, "free_bytes", lambda: 1 << 20)
    with pytest.raises(ChipError, match="Use a --sequence-length below 256"):
        require_batch(replace(CONFIG, batch_size=1))
    monkeypatch.setattr(memory, "free_bytes", lambda: None)  # a GPU, and nothing that knows its memory
    require_batch(CONFIG)


def test_this_machine_has_memory() -> None:
    found = memory.free_bytes()
    assert found is not None and 1 << 20 < found < 1 << 50
