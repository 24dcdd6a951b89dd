"""Two models that should be one: what differs is named with its place and number, and equal ones
are silent.
"""

import copy
import json
import math
from functools import partial
from operator import attrgetter
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from transformers import Qwen2Config, Qwen2ForCausalLM

import narrowgauge as ng
from narrowgauge.cli.main import main
from narrowgauge.measuring.same.same import distance
from tables import exhaustive
from tensors import gaussian, random_tokens
from text.refusals import refused

FLOAT32 = torch.float32
BFLOAT16 = torch.bfloat16
TOKENS = random_tokens(8, 16, 61, seed=1)


def model_of(dtype: torch.dtype = FLOAT32, **options: Any) -> Any:
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
    return ng.cast_parameters(model, dtype).eval()


# ── the outputs of two models ─────────────────────────────────────────────────────────────────────


LAYER = "model.layers.1"
EDITS = {
    "eps": (f"{LAYER}.input_layernorm", "variance_epsilon", 1e5, "other-outputs", f"{LAYER}.input_layernorm"),
    "rotary": ("model.rotary_emb", "inv_freq", BFLOAT16, "other-weights", "model.rotary_emb.inv_freq"),
    "scale": (f"{LAYER}.self_attn", "scaling", 1.5, "other-outputs", f"{LAYER}.self_attn.o_proj, input"),
    "weight": (f"{LAYER}.self_attn.q_proj.weight", "data", 1.5, "other-outputs", f"{LAYER}.self_attn.q_proj"),
}  # fmt: skip
"""What the second model changes: a module, its attribute, and a factor or format; then the reading
and the place that is named.
"""


def edited(model: Any, place: str, name: str, change: Any) -> Any:
    twin = copy.deepcopy(model)
    value = getattr(attrgetter(place)(twin), name)
    value = value.to(change) if isinstance(change, torch.dtype) else value * change
    setattr(attrgetter(place)(twin), name, value)
    return twin


@exhaustive(("case", "dtype"), [(case, dtype) for case in EDITS for dtype in (FLOAT32, BFLOAT16)])
def test_the_place_of_a_difference_is_named_with_its_number(case, dtype):
    *edit, kind, place = EDITS[case]
    trainer = model_of(dtype).train()
    result = ng.same(trainer, edited(trainer, *edit), TOKENS)
    reading = next(r for r in result if r.what == kind)
    assert reading.tensor.startswith(place) and reading.excess > 1, result
    is_in_rounding = case == "rotary" and dtype is BFLOAT16
    assert is_in_rounding != ("other-outputs" in [r.what for r in result]), result
    assert all(p.grad is None for p in trainer.parameters()) and trainer.training


def cached(model: Any, tokens: Tensor) -> Any:
    """Run token by token, with a cache of keys and values."""
    cache = None
    logits = []
    for column in tokens.split(1, 1):
        output = model(column, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits.append(output.logits)
    return torch.cat(logits, 1)


def padded(model: Any, tokens: Tensor, is_masked: bool = True) -> Any:
    """Run with five tokens of padding on the left."""
    padding = tokens.new_zeros(len(tokens), 5)
    mask = torch.cat([padding, torch.ones_like(tokens)], 1)
    inputs = torch.cat([padding, tokens], 1)
    return model(inputs, attention_mask=mask if is_masked else None).logits[:, 5:]


def eager(model: Any, tokens: Tensor) -> Any:
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    return twin(tokens).logits


WAYS = {"a cache": cached, "padding on the left": padded, "eager attention": eager}


@exhaustive(("way", "dtype"), [(way, dtype) for way in WAYS for dtype in (FLOAT32, BFLOAT16)])
def test_another_way_to_the_same_result_is_of_rounding(way, dtype):
    trainer = model_of(dtype, num_hidden_layers=1)
    result = ng.same(trainer, partial(WAYS[way], trainer), TOKENS[:, :6])
    assert result.ok, result
    assert "larger than rounding" in result.looked_at


def test_a_copy_has_equal_bits_and_a_narrower_server_is_of_rounding():
    trainer = model_of()
    equal = "In evaluation mode, the bits are equal."
    for server in (copy.deepcopy(trainer), torch.compile(copy.deepcopy(trainer))):
        result = ng.same(trainer, server, {"input_ids": TOKENS, "attention_mask": None})
        assert result.ok and result.lines[-1] == equal and not result.unseen
        result = ng.same(server.train(), trainer, TOKENS)
        assert [*result.unseen] == ["the first in training mode, as it was passed"]
        assert result.lines[-1] == equal
    server = model_of(BFLOAT16)
    mask = torch.ones_like(TOKENS)
    mask[:, 9:] = 0
    result = ng.same(trainer, server, {"input_ids": TOKENS, "attention_mask": mask})
    assert result.ok and "log probabilities of 64 tokens" in str(result)
    *edit, _, place = EDITS["scale"]
    assert ng.same(trainer, edited(server, *edit), TOKENS)[0].tensor.startswith(place)


def test_padding_that_is_seen_moves_log_probabilities():
    trainer = model_of()
    result = ng.same(trainer, partial(padded, trainer, is_masked=False), TOKENS)
    (reading,) = result
    assert (reading.what, reading.stage) == ("other-outputs", "loss")
    assert any("in another shape" in reason for reason in result.unseen.values())
    for part in (slice(0, 4), (0, 0)):  # fewer sequences, or no logits of tokens
        with refused("another number of outputs"):
            ng.same(trainer, lambda tokens, part=part: trainer(tokens).logits[part], TOKENS)


class Clock(nn.Module):
    """A layer on the sine of a large angle."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dtype = dtype
        self.layer = nn.Linear(16, 8, dtype=BFLOAT16)

    def forward(self, sigma: Tensor) -> Any:
        time = (sigma.to(self.dtype) * 1000).float()
        angle = time * torch.exp(-torch.arange(16) * 0.6)
        return self.layer(angle.sin().bfloat16())


def test_a_place_with_unusual_rounding_sets_no_bound():
    sigma = torch.rand(32, 1, generator=torch.Generator().manual_seed(0))
    result = ng.same(Clock(BFLOAT16), Clock(FLOAT32), sigma)
    assert result[0].tensor == "layer, input" and result[0].value > 0.3 > result[0].bound


def test_a_distance_is_relative_to_the_row_and_knows_infinities():
    """For small rows it is relative to a thousandth of the mean length."""
    x = torch.tensor([[3.0, 4.0, -math.inf], [30.0, 40.0, 0.0], [1e-6, 0.0, 0.0]])
    y = x * torch.tensor([[1.0], [1.4], [2.0]])
    assert distance([x], [x.clone()]) == 0.0 and distance([x], [y]) == pytest.approx(0.4)
    y[0, 2] = 0.0
    assert distance([x], [y]) == math.inf


def test_a_model_that_draws_in_evaluation_is_not_called_equal_to_itself():
    def noisy(tokens):
        return torch.randn(*tokens.shape, 61)

    own = torch.Generator()

    def noisy_by_its_own(tokens):
        return torch.randn(*tokens.shape, 61, generator=own)

    class Dropping(nn.Module):
        def forward(self, tokens):
            return nn.functional.dropout(tokens[..., None].expand(-1, -1, 61).float(), 0.5, True)

    for model in (noisy, noisy_by_its_own, Dropping()):
        for pair in ((model, model), (model_of(), model), (model, model_of())):
            result = ng.same(*pair, TOKENS)
            assert "draws random numbers" in str(result.unseen), result
            assert "In evaluation mode, the bits are equal." not in result.lines, result


# ── two sets of weights ───────────────────────────────────────────────────────────────────────────

ONES = torch.ones(4)
MATRIX = gaussian(4, 4, seed=0)
STATES = {
    "equal": (MATRIX, {}, "weights: 0.00% of 20 values differ; 2 of 2 tensors are equal"),
    "a factor": (3 * MATRIX, {"other-weights": ("proj", 1)}, "proj         16      16       2       3"),
    "narrower": (MATRIX.bfloat16(), {}, "1 tensor: float32 → bfloat16"),
    "a NaN": (MATRIX / MATRIX.triu(), {"other-weights": ("proj", 1), "nonfinite": ("proj", 6)}, "1 of 2 tensors are equal"),
    "missing": (None, {"other-weights": ("proj", 1)}, "only in the first, or in another shape: proj"),
    "another shape": (MATRIX.view(2, 8), {"other-weights": ("proj", 1)}, "only in the second, or in another shape: proj"),
}  # fmt: skip
"""The second model's matrix, the readings, and a line."""


@pytest.mark.parametrize("case", STATES)
def test_two_state_dicts_are_compared_without_a_model(case):
    matrix, expected, words = STATES[case]
    before = {"norm": ONES, "proj": MATRIX}
    after = {"norm": ONES} if matrix is None else {"norm": ONES, "proj": matrix}
    for pair in ((before, after), (after, before)):
        result = ng.same(*pair)
        readings = {reading.what: (reading.tensor, reading.value) for reading in result}
        assert result.ok == (not expected) and json.dumps(result.to_dict())
        if pair[0] is before:
            assert readings == expected and words in str(result), str(result)


def test_rows_hold_exact_counts_whatever_the_chunks(monkeypatch):
    before = torch.arange(100.0)
    after = torch.arange(100.0)
    after[[3, 98]] = 7.0
    after[50] = before[50] = math.nan
    for size in (1 << 17, 7):
        monkeypatch.setattr("narrowgauge.measuring.same.weights.CHUNK", size)
        (row,) = ng.same({"a": before}, {"a": after}).rows
        assert (row["differ"], row["nonfinite"], row["values"]) == (2, 1, 100)
    for dtype in (torch.float8_e4m3fn, torch.float16, torch.int8, torch.uint8, torch.bool):
        (row,) = ng.same({"a": ONES.to(dtype)}, {"a": torch.zeros(4).to(dtype)}).rows
        assert row["differ"] == 4 and row["change"] == 1


WEIGHT = gaussian(64, 64, seed=3)
LARGEST = WEIGHT.abs()
F8 = torch.float8_e4m3fn
SCALES = {
    "one": (F8, "w_scale", LARGEST.amax().view(1) / 448),
    "rows": (torch.int8, "w_scale", LARGEST.amax(1) / 127),
    "blocks": (F8, "w_scale_inv", LARGEST.view(2, 32, 2, 32).amax((1, 3)) / 448),
    "exponents": (F8, "w_scale", (LARGEST.view(64, 2, 32).amax(2) / 448).log2().ceil().exp2()),
}  # fmt: skip
"""Codes, and their scales as files hold them, by the form of these."""


def coded(form: str, factor: float = 1.0) -> dict[str, Tensor]:
    """Return codes of the weight, and the scales beside them, times a factor."""
    dtype, name, scale = SCALES[form]
    whole = scale.view(-1, 1) if form == "rows" else scale.view(-1, scale.shape[-1])
    for dim in (0, 1):
        whole = whole.repeat_interleave(64 // whole.shape[dim], dim)
    values = WEIGHT / whole
    codes = values.round().to(dtype) if dtype is torch.int8 else values.to(dtype)
    stored = factor * scale
    if form == "exponents":
        stored = (stored.log2() + 127).to(torch.uint8)
    return {"w": codes, name: stored}


@pytest.mark.parametrize("form", SCALES)
def test_codes_are_compared_at_their_scales(form):
    plain = {"w": WEIGHT}
    for pair in ((plain, coded(form)), (coded(form), plain), (coded(form), coded(form))):
        assert not len(ng.same(*pair)), ng.same(*pair)
    wrong = coded(form, 2.0)
    for pair, factor in (((plain, wrong), 2.0), ((wrong, plain), 0.5), ((coded(form), wrong), 2.0)):
        result = ng.same(*pair)
        assert [r.what for r in result] == ["other-weights"], result
        assert result.rows[0]["factor"] == pytest.approx(factor, rel=0.02)
    if form != "exponents":  # half a gap explains nothing between codes
        assert ng.same(coded(form), coded(form, 1.01)).rows[0]["differ"] > 4000


@pytest.mark.parametrize("program", ["narrowgauge", "torchao"])
def test_codes_of_a_server_are_compared_at_their_scales(program):
    model = model_of()
    server = copy.deepcopy(model)
    layer = server.model.layers[1].mlp.up_proj
    if program == "torchao":
        torchao = pytest.importorskip("torchao.quantization")
        torchao.quantize_(server, torchao.Int8WeightOnlyConfig())
        scale = layer.weight.scale
    else:
        ng.quantize_for_inference(server, "float8-row")
        scale = layer.weight_scales
    for pair in ((model, server), (server, model), (model, server.state_dict())):
        result = ng.same(*pair)
        names = {row["name"] for row in result.rows if row["codes"]}
        assert not len(result) and f"{LAYER}.mlp.up_proj.weight" in names, result
    scale.mul_(2)
    result = ng.same(model, server)
    assert [r.tensor for r in result] == [f"{LAYER}.mlp.up_proj.weight"], result
    assert result.rows[0]["factor"] == pytest.approx(2.0, rel=0.02)
    with refused("codes beside values"):
        ng.same(model.state_dict(), server, TOKENS)


class Halved(nn.Module):
    """An RMS norm whose squares are summed in bfloat16, or as they should be."""

    is_right = True

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if self.is_right else x
        total = sum((part * part for part in wide.split(1, -1)), torch.zeros_like(wide[..., :1]))
        return (wide * torch.rsqrt(total / 512 + 1e-6)).to(x.dtype)


def test_a_fault_sets_no_bound_whichever_side_it_is_on():
    torch.manual_seed(0)
    trainer = nn.Sequential(nn.Embedding(61, 512), Halved(), nn.Linear(512, 61)).bfloat16()
    server = copy.deepcopy(trainer)
    server[1].is_right = False
    for pair in ((trainer, server), (server, trainer)):
        assert ng.same(*pair, TOKENS)[0].tensor == "1"


class Cached(nn.Module):
    """Values that pass through 8 bits, with a scale or without."""

    scale = 0.0

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale * x.abs().amax() / 448 if self.scale else torch.ones(())
        return (x / scale).to(F8).to(x.dtype) * scale


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_a_right_cast_of_one_side_is_of_rounding_and_a_cast_without_its_scale_is_not(
    dtype,
):
    torch.manual_seed(0)
    trainer = nn.Sequential(nn.Embedding(61, 32), nn.Identity(), nn.Linear(32, 61)).to(dtype)
    with torch.no_grad():
        trainer[0].weight.mul_(1e-3)
    server = copy.deepcopy(trainer)
    server[1] = Cached()
    for pair in ((trainer, server), (server, trainer)):
        server[1].scale = 1.0
        assert not len(ng.same(*pair, TOKENS))
        server[1].scale = 0.0
        assert ng.same(*pair, TOKENS)[0].tensor.startswith("1")


def test_a_server_without_modules_is_compared_by_its_outputs():
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50))
    table, weight, bias = (p.detach().clone() for p in model.parameters())

    def server(tokens, factor):
        return nn.functional.linear(table[tokens], factor * weight, bias)

    tokens = torch.arange(16).view(2, 8)
    assert ng.same(model, lambda x: server(x, 1.0), tokens).ok
    assert [r.what for r in ng.same(model, lambda x: server(x, 1.01), tokens)] == ["other-outputs"]


def test_what_a_server_casts_to_integers_is_not_followed():
    torchao = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    trainer = nn.Sequential(nn.Embedding(61, 32), nn.Linear(32, 61))
    server = copy.deepcopy(trainer)
    torchao.quantize_(server, torchao.Int8DynamicActivationInt8WeightConfig())
    for pair in ((trainer, server), (server, trainer)):
        result = ng.same(*pair, TOKENS)
        assert not len(result) and "log probabilities" in result.unseen, result


def test_weights_alone_run_in_the_module_of_the_other_side(tmp_path):
    model = model_of()
    states = model.state_dict()
    other = edited(model, f"{LAYER}.self_attn.q_proj.weight", "data", 1.5)
    for name, saved in (("nested", {"model": states, "optim": {"state": ONES}}), ("flat", states)):
        save_distributed(saved, checkpoint_id=tmp_path / name, no_dist=True)
    for weights in (states, tmp_path / "nested", tmp_path / "flat"):
        result = ng.same(model, weights, TOKENS)
        assert result.lines[-1] == "In evaluation mode, the bits are equal."
        assert ng.same(weights, other, TOKENS)[-1].what == "other-outputs"
        assert not len(ng.same(weights, model))
    with refused("weights alone"):
        ng.same(model.state_dict(), model.state_dict(), TOKENS)


def test_weights_of_equal_names_in_a_checkpoint_are_all_compared(tmp_path):
    weights = {"w": torch.ones(3)}
    average = {"w": torch.zeros(3)}
    for name, model in (("one", weights), ("other", {"w": 2 * weights["w"]})):
        saved = {"model": model, "ema": average}
        save_distributed(saved, checkpoint_id=tmp_path / name, no_dist=True)
    result = ng.same(tmp_path / "one", tmp_path / "other")
    assert [(row["name"], row["differ"]) for row in result.rows] == [("w", 3), ("ema.w", 0)]
    planner = DefaultSavePlanner(flatten_state_dict=False)
    save_distributed(weights, checkpoint_id=tmp_path / "flat", no_dist=True, planner=planner)
    assert not len(ng.same(tmp_path / "flat", weights))


def test_folders_shards_modules_and_wrappers_name_the_same_tensors(tmp_path):
    model = model_of(num_hidden_layers=1, tie_word_embeddings=True)
    for name, size in (("one", "5GB"), ("shards", "10KB")):
        model.save_pretrained(tmp_path / name, max_shard_size=size)
    sharded = tmp_path / "shards"
    assert len([*sharded.glob("*.safetensors")]) > 1
    named = dict(model.named_parameters())
    for other in (tmp_path / "one", named, model, torch.compile(model), nn.DataParallel(model)):
        assert not len(ng.same(sharded, other)) and not len(ng.same(other, sharded)), other


def test_the_command_prints_the_table_or_json_and_refuses_what_holds_no_weights(
    tmp_path,
):
    words = ["same"]
    for name, factor in (("base", 1.0), ("last", 1.5)):
        words.append(str(tmp_path / f"{name}.safetensors"))
        save_file({"norm": factor * ONES, "proj": factor * MATRIX}, words[-1])
    printed = CliRunner().invoke(main, words).output
    assert "100.00% of 20 values differ; 0 of 2 tensors are equal" in printed
    values = json.loads(CliRunner().invoke(main, [*words, "--json"]).output)
    assert not values["ok"] and len(values["rows"]) == 2
    (tmp_path / "empty").mkdir()
    save_distributed({"optim": {"x": ONES}}, checkpoint_id=tmp_path / "states", no_dist=True)
    for path in ("empty", "absent", "states", ""):  # two files with the same tensors
        with refused("no weights"):
            ng.same({"norm": ONES}, tmp_path / path)


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize("pattern", ["shards/*.safetensors", "dcp/*.distcp", "dcp/.metadata"])
def test_damaged_weights_are_refused_in_a_line_and_nothing_is_said_of_the_rest(
    pattern, is_there, tmp_path
):
    """A file is cut short, or missing."""
    model = model_of(num_hidden_layers=1)
    model.save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    save_distributed(model.state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    file = max(tmp_path.glob(pattern))
    assert not len(ng.same(model, file.parent))
    data = file.read_bytes()
    file.unlink()
    if is_there:
        file.write_bytes(data[:-90])
    with refused("no weights"):
        ng.same(model, file.parent)
