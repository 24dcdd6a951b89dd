"""Two models that should be one: what differs is named with its place and number, and equal ones
are silent.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

import narrowgauge as ng
from tables import exhaustive

PADDING = 5


def model_of(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    model = Qwen2ForCausalLM(Qwen2Config(**{**sizes, **heads, **options}))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 2:
                p.mul_(4.0)
            elif "bias" in name:
                p.normal_(0.0, 0.3)
    return ng.cast_parameters(model, dtype)


TOKENS = torch.randint(0, 61, (8, 16), generator=torch.Generator().manual_seed(1))


class NarrowNorm(nn.Module):
    """A norm whose mean and products are bfloat16, where the trainer's are float32."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight

    def forward(self, x: Tensor) -> Tensor:
        narrow = x.bfloat16()
        scale = torch.rsqrt(narrow.square().mean(-1, keepdim=True) + 1e-6)
        return (self.weight.bfloat16() * (narrow * scale)).to(x.dtype)


class Lora(nn.Module):
    """A linear layer with an adapter, with the attributes of PEFT's."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        rows, columns = base.weight.shape
        dtype = base.weight.dtype
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(columns, 2, bias=False, dtype=dtype)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, rows, bias=False, dtype=dtype)})
        self.scaling = {"default": 2.0}
        self.active_adapters = ["default"]
        self.merged_adapters: list[str] = []

    def get_base_layer(self) -> Any:
        return self.base_layer

    def forward(self, x: Tensor) -> Tensor:
        y = self.base_layer(x)
        if self.merged_adapters:
            return y
        return y + 2.0 * self.lora_B["default"](self.lora_A["default"](x))


def adapted(dtype: torch.dtype) -> Any:
    model = model_of(dtype)
    attention = model.model.layers[1].self_attn
    attention.v_proj = Lora(attention.v_proj)
    return model


# ── what a server may do ──────────────────────────────────────────────────────────────────────────


def narrow_norm(model: Any) -> None:
    model.model.layers[1].input_layernorm = NarrowNorm(model.model.layers[1].input_layernorm)


def narrow_rotary(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.bfloat16()


def other_scale(model: Any) -> None:
    model.model.layers[1].self_attn.scaling *= 1.5


def window(model: Any) -> Any:
    windowed = model_of(sliding_window=6, use_sliding_window=True, max_window_layers=1)
    windowed.load_state_dict(model.state_dict())
    return windowed


def no_bias(model: Any) -> None:
    model.model.layers[1].self_attn.k_proj.bias = None


def merged_twice(model: Any) -> None:
    layer = model.model.layers[1].self_attn.v_proj
    up = layer.lora_B["default"].weight
    layer.base_layer.weight.data += 2.0 * up.data @ layer.lora_A["default"].weight.data


def one_step_old(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()


def untied(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def float8(model: Any) -> None:
    ng.swap_linears(model, "float8-row")


def nvfp4(model: Any) -> None:
    ng.swap_linears(model, "nvfp4")


def one_head(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    attention.q_proj.weight.data[8:16] *= 1.5  # of four heads of 8 values


ATTENTION = "model.layers.1.self_attn, before o_proj"
CASES: dict[str, tuple[Callable[[Any], Any], str, str, str]] = {
    "norm": (narrow_norm, "model.layers.1.input_layernorm", "other-outputs", "at all positions"),
    "rotary": (narrow_rotary, "model.rotary_emb", "other-outputs", "from position 1 on"),
    "scale": (other_scale, ATTENTION, "other-outputs", "from position 1 on"),
    "window": (window, ATTENTION, "other-outputs", "from position 6 on"),
    "bias": (no_bias, "model.layers.1.self_attn.k_proj", "other-outputs", "at all positions"),
    "twice": (merged_twice, "model.layers.1.self_attn.v_proj", "adapter-times", "+1.0"),
    "old": (one_step_old, "model.embed_tokens", "other-outputs", "at all positions"),
    "float8": (float8, "model.layers.0.self_attn.q_proj", "other-outputs", "at all positions"),
    "nvfp4": (nvfp4, "model.layers.0.self_attn.q_proj", "other-outputs", "at all positions"),
    "head": (one_head, "model.layers.1.self_attn.q_proj", "other-outputs", "in head 1 of 4"),
}
"""What a server changes; the place that is named, by which reading, and what it says."""
NARROW: dict[str, tuple[str, str]] = {
    "rotary": ("other-weights", "no larger than rounding"),
    "scale": ("other-outputs", "has a place"),
    "twice": ("adapter-times", "has a place"),
    "float8": ("other-outputs", "has a place"),
}
"""What names the place of a case where all is bfloat16, and the sentence about it."""


def trainer_for(case: str, dtype: torch.dtype) -> Any:
    return adapted(dtype) if case == "twice" else model_of(dtype)


@exhaustive(
    ("case", "dtype"),
    [*((case, torch.float32) for case in CASES), *((case, torch.bfloat16) for case in NARROW)],
)
def test_the_place_of_a_difference_is_named_with_its_number(case: str, dtype: torch.dtype) -> None:
    change, place, kind, words = CASES[case]
    trainer = trainer_for(case, dtype)
    server = copy.deepcopy(trainer)
    server = change(server) or server
    result = ng.same(trainer, server, TOKENS)
    sentence = "has a place"
    if dtype is torch.bfloat16:
        kind, sentence = NARROW[case]
    reading = next(r for r in result if r.what == kind)
    assert reading.tensor.startswith(place), result
    assert reading.value is not None and reading.bound is not None
    assert abs(reading.value) > reading.bound
    assert words in reading.advice or kind == "other-weights"
    assert sentence in result.lines[-1]
    assert all(p.grad is None for p in trainer.parameters()) and trainer.training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_models_are_silent(dtype: torch.dtype) -> None:
    trainer = model_of(dtype)
    result = ng.same(trainer, copy.deepcopy(trainer), {"input_ids": TOKENS})
    assert len(result) == 0 and not result.unseen
    assert result.lines[-1] == "The bits are equal."


def in_one(model: Any) -> Callable[[Tensor], Tensor]:
    return lambda tokens: torch.cat([model(row[None]).logits for row in tokens])


def with_cache(model: Any) -> Callable[[Tensor], Tensor]:
    def run(tokens: Tensor) -> Tensor:
        cache = None
        logits = []
        for column in tokens.split(1, 1):
            output = model(column, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            logits.append(output.logits)
        return torch.cat(logits, 1)

    return run


def padded(model: Any, is_left: bool, is_masked: bool = True) -> Callable[[Tensor], Tensor]:
    def run(tokens: Tensor) -> Tensor:
        padding = tokens.new_zeros(len(tokens), PADDING)
        mask = torch.cat([padding, torch.ones_like(tokens)], 1)
        inputs = torch.cat([padding, tokens], 1)
        if not is_left:
            mask = mask.flip(1)
            inputs = torch.cat([tokens, padding], 1)
        logits = model(inputs, attention_mask=mask if is_masked else None).logits
        return logits[:, PADDING:] if is_left else logits[:, :-PADDING]

    return run


def eager(model: Any) -> Any:
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    return twin


WAYS: dict[str, Callable[[Any], Any]] = {
    "sequences one by one": in_one,
    "a cache of keys and values": with_cache,
    "padding on the left": lambda model: padded(model, True),
    "padding on the right": lambda model: padded(model, False),
    "eager attention": eager,
}


@exhaustive(
    ("way", "dtype"), [(way, dtype) for way in WAYS for dtype in (torch.float32, torch.bfloat16)]
)
def test_another_way_to_the_same_result_is_of_rounding(way: str, dtype: torch.dtype) -> None:
    trainer = model_of(dtype).eval()
    result = ng.same(trainer, WAYS[way](trainer), TOKENS)
    assert result.ok, result
    assert "no larger than rounding" in result.lines[-1] or "bits are equal" in result.lines[-1]


def test_padding_that_is_seen_has_a_place() -> None:
    trainer = model_of().eval()
    result = ng.same(trainer, padded(trainer, True, is_masked=False), TOKENS)
    assert result[0].tensor.startswith("model.layers.0.self_attn, before o_proj")
    assert {r.what for r in result} == {"other-outputs"}


class Masked(nn.Module):
    """Scores beside a mask of infinities."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Linear(8, 8)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.values(x)
        mask = torch.full((4, 4), -torch.inf).triu(1)
        return (self.scale * (y @ y.mT) + mask).softmax(-1) @ y


def test_a_place_behind_a_mask_of_infinities_has_a_bound() -> None:
    torch.manual_seed(0)
    trainer = Masked()
    server = copy.deepcopy(trainer)
    server.scale = 1.5
    (reading,) = ng.same(trainer, server, torch.randn(2, 4, 8))
    assert (reading.what, reading.tensor) == ("other-outputs", "the model")


def test_a_narrower_server_is_of_rounding_and_a_fault_in_it_is_not() -> None:
    trainer = model_of()
    server = model_of(torch.bfloat16)
    assert ng.same(trainer, server, TOKENS).ok
    other_scale(server)
    result = ng.same(trainer, server, TOKENS)
    assert result[0].tensor == ATTENTION


def test_ties_and_factors_and_one_sided_tensors_are_named() -> None:
    tied = model_of(tie_word_embeddings=True)
    server = copy.deepcopy(tied)
    untied(server)
    told = ng.same(tied, server)
    assert not len(told) and any("tied in the trainer alone: " in x for x in told.lines), told
    weights = model_of().state_dict()
    weights["lm_head.weight"] = 3 * weights["lm_head.weight"]
    weights["lm_head.weight_scale"] = weights.pop("model.norm.weight")
    result = ng.same(model_of(), weights)
    assert [r.what for r in result] == ["other-weights", "one-sided-tensors"]
    assert "3 times the trainer's" in result[0].advice
    assert "the trainer model.norm.weight; in the server lm_head.weight_scale" in result[1].advice


def test_a_merged_server_holds_the_adapters_once() -> None:
    trainer = adapted(torch.bfloat16)
    server = copy.deepcopy(trainer)
    layer = server.model.layers[1].self_attn.v_proj
    product = 2.0 * layer.lora_B["default"].weight.float() @ layer.lora_A["default"].weight.float()
    with torch.no_grad():
        layer.base_layer.weight.copy_(layer.base_layer.weight.float() + product)
    layer.merged_adapters.append("default")
    assert ng.same(trainer, server, TOKENS).ok
    plain = model_of(torch.bfloat16)
    (missing,) = [r for r in ng.same(trainer, plain) if r.what == "adapter-times"]
    assert missing.value == pytest.approx(-1, abs=1e-3)


@exhaustive("storage", ["word", "exact", "split", "compact", "states8", "kahan"])
def test_an_export_has_the_bits_that_trained_and_says_what_is_beyond_them(storage: str) -> None:
    model = model_of(num_hidden_layers=1)
    optimizer = ng.AdamW(model.parameters(), lr=1e-3, storage=storage, compile=False)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    full = ng.full_weights(model, optimizer)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        assert ng.same(model, folder, TOKENS).lines[-1] == "The bits are equal."
        model.save_pretrained(folder, state_dict=dict(full))  # which it empties
        result = ng.same(model, Path(folder) / "model.safetensors")
    assert len(result) == 0
    beyond = sum(row["differ"] for row in ng.moved(model, full).rows)
    words = f"bfloat16 → float32, {beyond:,} values beyond the narrower one"
    assert beyond > 100 and any(words in line for line in result.lines), result
    assert sum(row["differ"] for row in ng.moved(full, model).rows) == 0


def test_a_folder_and_a_scaled_float8_state_dict_are_loaded(tmp_path: Path) -> None:
    trainer = model_of(torch.bfloat16)
    trainer.save_pretrained(tmp_path)
    assert ng.same(trainer, tmp_path, TOKENS).lines[-1] == "The bits are equal."
    assert ng.same(trainer, tmp_path / "model.safetensors").lines[-1].startswith("weights: 0.00%")
    weights = trainer.state_dict()
    name = "model.layers.1.mlp.up_proj.weight"
    scale = weights[name].abs().amax() / 448
    weights[name] = (weights[name] / scale).to(torch.float8_e4m3fn)
    weights[f"{name}_scale"] = scale
    result = ng.same(trainer, weights, TOKENS)
    assert "The difference has a place: model.layers.1.mlp.up_proj" in result.lines[-1]


def test_a_file_of_log_probabilities_is_compared(tmp_path: Path) -> None:
    trainer = model_of(torch.bfloat16)
    with torch.no_grad():
        logits = model_of(torch.bfloat16).float().eval()(TOKENS).logits[:, :-1].double()
    served = logits.log_softmax(-1).gather(-1, TOKENS[:, 1:, None])[..., 0]
    file = tmp_path / "served.jsonl"

    def write(values: Tensor) -> None:
        rows = zip(TOKENS.tolist(), values.tolist(), strict=True)
        lines = [json.dumps({"tokens": tokens, "logprobs": [None, *x]}) for tokens, x in rows]
        file.write_text("\n".join(lines))

    write(served)
    assert ng.same(trainer, file).ok
    write(served[:, -4:] + 0.3)
    (reading,) = ng.same(trainer, file)
    assert reading.what == "other-outputs" and reading.value == pytest.approx(0.3, rel=0.1)
    file.write_text('{"tokens": [1, 2], "logprobs": [0.1]}\n{"tokens": [1]')
    with pytest.raises(ng.errors.DataError, match="Cannot read line 2"):
        ng.same(trainer, file)


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ng.errors.RecipeError, match="there is no batch"):
        ng.same(lambda batch: batch, lambda batch: batch)
    with pytest.raises(ng.errors.RecipeError, match="trainer is not a module"):
        ng.same(lambda batch: batch, {})
    trainer = model_of()
    with pytest.raises(ng.errors.DataError, match="gives another number"):
        ng.same(trainer, lambda tokens: trainer(tokens[:4]).logits, TOKENS)


def test_a_model_that_draws_in_evaluation_is_not_called_equal_to_itself() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model_of()

        def forward(self, tokens: Tensor) -> Tensor:
            logits: Tensor = self.model(tokens).logits
            return logits + 0.3 * torch.randn_like(logits)

    model = Noisy()
    result = ng.same(model, copy.deepcopy(model), TOKENS)
    assert "draws random numbers" in result.unseen["outputs and log probabilities"], result
    assert "The bits are equal." not in result.lines, result
