"""Adapters of PEFT in our storages, over a base that is quantized or not."""

import copy
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from integrations.bfloat16_loop import llama, sequences
from integrations.bfloat16_loop import trained as train
from narrowgauge.matmul.inference import QuantizedLinear, quantize_for_inference
from text.refusals import refused

pytestmark = pytest.mark.frameworks


def adapted(model: nn.Module, **options: Any) -> Any:
    """LoRA adapters, the same at each call, whose second half is not zero, so that all of them have
    gradients.
    """
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False, **options
    )
    return peft.get_peft_model(model, config).train()


TOKENS = sequences(4)


def base() -> Any:
    return llama(dtype=torch.float32)


def trained(model: nn.Module, optimizer: Any) -> list[float]:
    """The losses of four steps on one batch."""
    return train(model, optimizer, [TOKENS] * 4)


@torch.no_grad()
def loss_of(model: Any) -> Tensor:
    return model(input_ids=TOKENS, labels=TOKENS).loss


def weights_of(model: nn.Module, mark: str = "lora_") -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if mark in name}


@pytest.mark.parametrize("times", [0, 1, 2])
@pytest.mark.parametrize("form", ["float32", "bfloat16", "dora"])
def test_a_server_holds_each_adapter_once(times, form):
    dtype = torch.bfloat16 if form == "bfloat16" else torch.float32
    trainer = adapted(llama(dtype=dtype), use_dora=form == "dora")
    name = "model.layers.1.self_attn.v_proj"
    product = trainer.get_submodule(f"base_model.model.{name}").get_delta_weight("default")
    server = copy.deepcopy(trainer).merge_and_unload()
    with torch.no_grad():
        server.get_submodule(name).weight.add_((times - 1) * product)
    result = ng.same(trainer, server.train(), TOKENS)
    held = {
        row["name"]: row["adapter_times"] for row in result.rows if row["adapter_times"] is not None
    }
    assert len(held) > 3 and held.pop(f"{name}.weight") == pytest.approx(times - 1, abs=2e-2)
    assert max(map(abs, held.values())) < 0.05
    assert result.ok == (times == 1), result
    told = [(r.tensor, round(r.value)) for r in result if r.what == "adapter-times"]
    assert told == [(f"{name}.weight", times - 1)] * (times != 1)


def test_adapters_that_a_merge_rounds_away_are_told():
    trainer = adapted(llama(dtype=torch.bfloat16))
    for name, p in trainer.named_parameters():
        if "lora_B" in name:
            p.data.mul_(1e-5)
    (reading,) = ng.same(trainer, copy.deepcopy(trainer).merge_and_unload())
    assert reading.what == "adapter-times" and -1.1 < reading.value < -0.5, reading


@pytest.mark.parametrize("compute", [None, "int8-row"])
def test_only_adapters_train_and_only_they_have_states(compute):
    model = adapted(base())
    before = model.get_memory_footprint()
    if compute:
        quantize_for_inference(model, compute).train()
    model, optimizer = ng.prepare(model, "bfloat16/word", lr=1e-2)
    frozen = weights_of(model, "base_layer")
    adapters = weights_of(model)
    losses = trained(model, optimizer)
    assert losses[-1] < losses[0]
    for name, value in weights_of(model, "base_layer").items():
        assert torch.equal(value, frozen[name])
    for name, value in weights_of(model).items():
        assert not torch.equal(value, adapters[name])
    owned = set()
    for names in optimizer.param_groups:
        owned.update(names["param_names"])
    assert owned == set(adapters) and len(optimizer.state_dict()["state"]) == len(adapters)
    assert {str(p.dtype) for p in adapters.values()} == {"torch.bfloat16"}
    if compute:
        # All linear layers but the head; those of the adapters are not among them.
        assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) == 14
        assert model.get_memory_footprint() < 0.55 * before


def test_adapters_are_saved_and_loaded_bit_for_bit(tmp_path):
    def new_model():
        return ng.prepare(quantize_for_inference(adapted(base())).train(), lr=1e-2)

    model, optimizer = new_model()
    trained(model, optimizer)
    model.save_pretrained(tmp_path)
    saved = copy.deepcopy(optimizer.state_dict())  # it is live, and training goes on
    assert {path.suffix for path in tmp_path.iterdir()} >= {".safetensors", ".json"}
    expected = trained(model, optimizer)
    again, resumed = new_model()
    again.load_adapter(tmp_path, "default", is_trainable=True, autocast_adapter_dtype=False)
    resumed.load_state_dict(saved)
    assert trained(again, resumed) == expected
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path)
    stored = weights_of(peft.PeftModel.from_pretrained(base(), tmp_path, is_trainable=True))
    assert weights_of(loaded).keys() == stored.keys() == weights_of(model).keys()


def test_adapters_are_merged_into_a_base_of_16_bits(tmp_path):
    model = adapted(base())
    ng.prepare(quantize_for_inference(model))
    with refused("a change of codes"):
        model.merge_adapter()
    model.save_pretrained(tmp_path)
    whole = peft.PeftModel.from_pretrained(base(), tmp_path).merge_and_unload()
    assert abs(loss_of(whole) - loss_of(model.eval())) < 0.05


def test_codes_of_another_format_are_not_loaded_as_numbers():
    def quantized(compute):
        return quantize_for_inference(nn.Sequential(nn.Linear(64, 16)), compute)

    quantized("int8-row").load_state_dict(quantized("int8-row").state_dict())
    with refused("codes of another compute"):
        quantized("int8-row").load_state_dict(quantized("float8-row").state_dict())


def test_a_module_that_is_trained_beside_adapters_stays_a_weight():
    model = quantize_for_inference(adapted(base(), modules_to_save=["o_proj"]))
    trained = [name for name, p in model.named_parameters() if p.requires_grad and "o_proj" in name]
    assert len(trained) == 2
