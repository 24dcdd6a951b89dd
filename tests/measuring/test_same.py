"""Two models that should be one: what differs is named with its place and number, and equal ones
are silent.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

import narrowgauge as ng
from narrowgauge.cli.main import main
from narrowgauge.errors import RecordError
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


def merged_twice(model: Any) -> None:
    layer = model.model.layers[1].self_attn.v_proj
    up = layer.lora_B["default"].weight
    layer.base_layer.weight.data += 2.0 * up.data @ layer.lora_A["default"].weight.data


def untied(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def float8(model: Any) -> None:
    ng.swap_linears(model, "float8-row")


def one_head(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    attention.q_proj.weight.data[8:16] *= 1.5  # of four heads of 8 values


ATTENTION = "model.layers.1.self_attn.o_proj, input"
CASES: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "norm": (narrow_norm, "model.layers.1.input_layernorm", "other-outputs"),
    "rotary": (narrow_rotary, "model.rotary_emb", "other-outputs"),
    "scale": (other_scale, ATTENTION, "other-outputs"),
    "twice": (merged_twice, "model.layers.1.self_attn.v_proj", "adapter-times"),
    "float8": (float8, "model.layers.0.self_attn.q_proj", "other-outputs"),
    "head": (one_head, "model.layers.1.self_attn.q_proj", "other-outputs"),
}
"""What the second model changes; the place that is named, and by which reading."""
NARROW = {
    "rotary": "other-weights",
    "scale": "other-outputs",
    "twice": "adapter-times",
    "float8": "other-outputs",
}
"""What names the place of a case where all is bfloat16."""


def trainer_for(case: str, dtype: torch.dtype) -> Any:
    return adapted(dtype) if case == "twice" else model_of(dtype)


@exhaustive(
    ("case", "dtype"),
    [*((case, torch.float32) for case in CASES), *((case, torch.bfloat16) for case in NARROW)],
)
def test_the_place_of_a_difference_is_named_with_its_number(case: str, dtype: torch.dtype) -> None:
    change, place, kind = CASES[case]
    trainer = trainer_for(case, dtype)
    server = copy.deepcopy(trainer)
    server = change(server) or server
    result = ng.same(trainer, server, TOKENS)
    if dtype is torch.bfloat16:
        kind = NARROW[case]
    reading = next(r for r in result if r.what == kind)
    assert reading.tensor.startswith(place), result
    assert reading.value is not None and reading.bound is not None
    assert abs(reading.value) > reading.bound
    is_in_rounding = case == "rotary" and dtype is torch.bfloat16
    assert is_in_rounding != ("other-outputs" in [r.what for r in result]), result
    assert all(p.grad is None for p in trainer.parameters()) and trainer.training


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


def padded(model: Any, is_masked: bool = True) -> Callable[[Tensor], Tensor]:
    def run(tokens: Tensor) -> Tensor:
        padding = tokens.new_zeros(len(tokens), PADDING)
        mask = torch.cat([padding, torch.ones_like(tokens)], 1)
        inputs = torch.cat([padding, tokens], 1)
        return model(inputs, attention_mask=mask if is_masked else None).logits[:, PADDING:]

    return run


def eager(model: Any) -> Any:
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    return twin


WAYS: dict[str, Callable[[Any], Any]] = {
    "a copy": copy.deepcopy,
    "a cache of keys and values": with_cache,
    "padding on the left": padded,
    "eager attention": eager,
}


@exhaustive(
    ("way", "dtype"), [(way, dtype) for way in WAYS for dtype in (torch.float32, torch.bfloat16)]
)
def test_another_way_to_the_same_result_is_of_rounding(way: str, dtype: torch.dtype) -> None:
    trainer = model_of(dtype).eval()
    result = ng.same(trainer, WAYS[way](trainer), TOKENS)
    assert result.ok, result
    assert way != "a copy" or (result.lines[-1] == "The bits are equal." and not result.unseen)
    assert "larger than rounding" in result.looked_at or "bits are equal" in result.lines[-1]


def test_padding_that_is_seen_moves_log_probabilities() -> None:
    trainer = model_of().eval()
    result = ng.same(trainer, padded(trainer, is_masked=False), TOKENS)
    (reading,) = result
    assert (reading.what, reading.stage) == ("other-log-probabilities", "loss")
    assert any("in another shape" in reason for reason in result.unseen.values())


class Clock(nn.Module):
    """A layer on the sine of a large angle."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dtype = dtype
        self.layer = nn.Linear(16, 8, dtype=torch.bfloat16)

    def forward(self, sigma: Tensor) -> Tensor:
        time = (sigma.to(self.dtype) * 1000).float()
        angle = time * torch.exp(-torch.arange(16) * 0.6)
        return self.layer(angle.sin().bfloat16())


def test_a_place_with_unusual_rounding_sets_no_bound() -> None:
    sigma = torch.rand(32, 1, generator=torch.Generator().manual_seed(0))
    narrow = Clock(torch.bfloat16)
    place = "layer, input"
    result = ng.same(narrow, Clock(torch.float32), sigma)
    assert result[0].tensor == place and result[0].value > 0.3 > result[0].bound
    assert any(line.startswith(place) and "more than usual" in line for line in result.lines)
    assert ng.same(narrow, copy.deepcopy(narrow), sigma).lines[-1] == "The bits are equal."


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
    assert not len(told) and any("tied on one side alone: " in x for x in told.lines), told
    weights = model_of().state_dict()
    weights["lm_head.weight"] = 3 * weights["lm_head.weight"]
    weights["lm_head.weight_scale"] = weights.pop("model.norm.weight")
    result = ng.same(model_of(), weights)
    assert [r.what for r in result] == ["other-weights", "one-sided-tensors"]
    assert result.rows[0]["name"] == "lm_head.weight"
    assert result.rows[0]["factor"] == pytest.approx(3)
    assert "only in the first: model.norm.weight" in result.lines
    assert "only in the second: lm_head.weight_scale" in result.lines


def test_a_merged_server_holds_the_adapters_once() -> None:
    trainer = adapted(torch.bfloat16)
    server = copy.deepcopy(trainer)
    layer = server.model.layers[1].self_attn.v_proj
    product = 2.0 * layer.lora_B["default"].weight.float() @ layer.lora_A["default"].weight.float()
    with torch.no_grad():
        layer.base_layer.weight.add_(product.bfloat16())  # rounds twice
    layer.merged_adapters.append("default")
    assert ng.same(trainer, server, TOKENS).ok
    plain = model_of(torch.bfloat16)
    (missing,) = [r for r in ng.same(trainer, plain) if r.what == "adapter-times"]
    assert missing.value == pytest.approx(-1, abs=1e-3)


def test_what_cannot_be_compared_is_refused() -> None:
    trainer = model_of()
    with pytest.raises(ng.errors.DataError, match="gives another number"):
        ng.same(trainer, lambda tokens: trainer(tokens[:4]).logits, TOKENS)


def test_a_model_that_draws_in_evaluation_is_not_called_equal_to_itself() -> None:
    def noisy(tokens: Tensor) -> Tensor:
        logits: Tensor = model_of()(tokens).logits
        return logits + 0.3 * torch.randn_like(logits)

    result = ng.same(noisy, noisy, TOKENS)
    assert "draws random numbers" in result.unseen["outputs and log probabilities"], result
    assert "The bits are equal." not in result.lines, result


# ── two sets of weights ───────────────────────────────────────────────────────────────────────────


def weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "norm.weight": torch.ones(4),
        "proj.weight": torch.randn(4, 4),
        "proj.bias": torch.zeros(4),
    }


def trained(**values: Any) -> dict[str, Tensor]:
    after = {name: value + 0.5 for name, value in weights().items()}
    for key, value in values.items():
        after[key.replace("_", ".")] = value
    return {name: value for name, value in after.items() if value is not None}


STATES: dict[str, tuple[dict[str, Tensor], str, str]] = {
    "equal": (weights(), "", ""),
    "one frozen": (trained(proj_weight=weights()["proj.weight"]), "other-weights", "proj.bias and 1 other"),
    "a NaN": (trained(proj_bias=torch.tensor([0.0, math.nan, 1, 1])), "nonfinite", "proj.bias"),
    "a tensor less": (trained(proj_bias=None), "one-sided-tensors", "proj.bias"),
    "another shape": (trained(proj_weight=torch.randn(2, 8)), "one-sided-tensors", "proj.weight"),
}  # fmt: skip


@pytest.mark.parametrize("case", STATES)
def test_two_state_dicts_are_compared_without_a_model(case: str) -> None:
    after, kind, tensor = STATES[case]
    result = ng.same(weights(), after)
    readings = {reading.what: reading.tensor for reading in result}
    assert readings.get(kind, "") == tensor and result.ok == (not kind), str(result)
    assert json.dumps(result.to_dict()) and {row["name"] for row in result.rows} <= set(weights())
    told = [line for line in result.lines if line.startswith("vectors that are exactly 1: 1, norm")]
    assert bool(told) == (case == "equal")


def test_rows_hold_exact_counts_whatever_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.arange(100.0)
    after = torch.arange(100.0)
    after[[3, 98]] = 7.0
    after[50] = before[50] = math.nan
    for size in (1 << 17, 7):
        monkeypatch.setattr("narrowgauge.measuring.weights.CHUNK", size)
        (row,) = ng.same({"a": before}, {"a": after}).rows
        assert (row["differ"], row["nonfinite"], row["values"]) == (2, 1, 100)


def test_values_are_compared_in_the_narrower_format() -> None:
    before = {"a": torch.randn(64, 64)}
    after = {"a": before["a"].bfloat16()}
    for pair in ((before, after), (after, before)):
        (row,) = ng.same(*pair).rows
        assert row["differ"] == 0 and set(row["dtype"].split(" → ")) == {"float32", "bfloat16"}
    for dtype in (torch.float8_e4m3fn, torch.float16, torch.int8, torch.uint8, torch.bool):
        zeros = torch.zeros(4, 4).to(dtype)
        (row,) = ng.same({"a": torch.ones(4, 4).to(dtype)}, {"a": zeros}).rows
        assert row["differ"] == 16


def test_folders_shards_modules_and_wrappers_name_the_same_tensors(tmp_path: Path) -> None:
    model = model_of(num_hidden_layers=1, tie_word_embeddings=True)
    for name, size in (("one", "5GB"), ("shards", "10KB")):
        model.save_pretrained(tmp_path / name, max_shard_size=size)
    sharded = tmp_path / "shards"
    assert len([*sharded.glob("*.safetensors")]) > 1
    others = (
        tmp_path / "one",
        dict(model.named_parameters()),
        model,
        torch.compile(model),
        nn.DataParallel(model),
    )
    for other in others:
        assert not len(ng.same(sharded, other)) and not len(ng.same(other, sharded)), other


def test_the_command_prints_the_table_or_json_and_refuses_what_holds_no_weights(
    tmp_path: Path,
) -> None:
    words = ["same"]
    for name, tensors in {"base": weights(), "last": trained()}.items():
        words.append(str(tmp_path / f"{name}.safetensors"))
        save_file(tensors, words[-1])
    printed = CliRunner().invoke(main, words).output
    assert "100.00% of 24 values differ; 0 of 3 tensors are equal" in printed
    assert "proj.bias" in printed
    values = json.loads(CliRunner().invoke(main, [*words, "--json"]).output)
    assert not values["ok"] and len(values["rows"]) == 3
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.safetensors").write_bytes(b"no weights")
    for path in ("empty", "absent", "broken.safetensors", ""):  # two files with the same tensors
        with pytest.raises(RecordError, match="Cannot read weights"):
            ng.same(weights(), tmp_path / path)
