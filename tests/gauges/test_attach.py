"""Gauges on a model: what they read is there, what they watch is not changed, and a fault is read where it was put."""

from __future__ import annotations

import gc
import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.gauges import tensor_metrics
from narrowgauge.gauges.attach import _OPEN, GaugeNotice, Gauges, attach_gauges
from narrowgauge.gauges.moment_shadow import StateReader
from narrowgauge.gauges.sampling import SAMPLING
from narrowgauge.runs.schema import metric_of

BF16 = torch.bfloat16


class Block(nn.Module):
    """Two linear layers with something between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(x)))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def made(recipe: str = "bfloat16/word", **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return ng.prepare(Small(), recipe, lr=1e-3, audit_every=options.pop("audit_every", 2), **options)


def trained(model: nn.Module, optimizer: Any, steps: int, size: float = 1.0, forward: Any = None) -> list[float]:
    losses = []
    generator = torch.Generator().manual_seed(1)
    run = model if forward is None else forward
    for _ in range(steps):
        x = size * torch.randn(4, 16, 32, generator=generator)
        loss = run(x.to(next(model.parameters()).dtype)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def read(recipe: str, steps: int = 2, **options: Any) -> tuple[dict[str, Any], Gauges]:
    model, optimizer = made(recipe)
    gauges = attach_gauges(model, optimizer, every=2)
    trained(model, optimizer, steps, **options)
    assert gauges.last is not None
    return gauges.last, gauges


def test_readings_are_those_of_the_tensors() -> None:
    model, optimizer = made()
    seen: dict[str, Tensor] = {}
    model.blocks[1].down.register_forward_pre_hook(lambda m, args: seen.update(x=args[0].detach()))
    gauges = attach_gauges(model, optimizer, every=1)
    weight = model.blocks[1].down.weight.detach().clone()
    trained(model, optimizer, 1)
    row = gauges.last
    assert row is not None and row["step"] == 1
    assert metric_of(row, "tensors", "input:blocks.1.down", "amax") == pytest.approx(
        seen["x"].abs().max().item(), rel=1e-3
    )
    rms = weight.float().square().mean().sqrt().item()
    assert metric_of(row, "tensors", "weight:blocks.1.down.weight", "rms") == pytest.approx(rms, rel=2**-8)
    assert metric_of(row, "tensors", "input:blocks.1.down", "nonfinite") == 0
    # Three inputs of 32 features and two of 64, of 64 tokens each; every third value counts, and hardly one is zero.
    counted = 3 * -(-64 * 32 // tensor_metrics.COUNTED) + 2 * -(-64 * 64 // tensor_metrics.COUNTED)
    assert 0 <= counted - sum(row["histograms"]["input"]) <= 4
    assert set(row["updates"]) == {name for name, _ in model.named_parameters()}


def test_only_sampled_steps_are_read() -> None:
    rows: list[dict[str, Any]] = []
    model, optimizer = made()
    attach_gauges(model, optimizer, every=3, on_row=rows.append)
    trained(model, optimizer, 7)
    assert [row["step"] for row in rows] == [3, 6]


def test_one_transfer_for_a_sampled_step_and_none_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[int] = []
    true_fetch = tensor_metrics.Packed.fetch

    def fetch(self: tensor_metrics.Packed) -> dict[str, Tensor]:
        fetched.append(len(self.parts))
        return true_fetch(self)

    monkeypatch.setattr(tensor_metrics.Packed, "fetch", fetch)
    model, optimizer = made()
    attach_gauges(model, optimizer, every=4)
    trained(model, optimizer, 8)
    assert len(fetched) == 2


@pytest.mark.parametrize(
    "recipe", ["bfloat16/word", "float32", "bfloat16/float32", "int8-row/word", "float8-delayed/word"]
)
def test_watched_and_not_watched_are_the_same_run(recipe: str) -> None:
    results = []
    for every in (0, 1):
        model, optimizer = made(recipe)
        if every:
            attach_gauges(model, optimizer, every=every)
        losses = trained(model, optimizer, 4)
        results.append((losses, [optimizer.stored(p) for p in model.parameters()]))
    assert results[0][0] == results[1][0]
    assert all(map(torch.equal, results[0][1], results[1][1]))


def test_compiled_too() -> None:
    """Forward and backward are marked from inside the graph, and the graph computes what it did."""
    results, rows = [], []
    for every in (0, 2):
        torch.compiler.reset()  # what was compiled of this class before gauges were ever attached goes on without them
        model, optimizer = made()
        if every:
            attach_gauges(model, optimizer, every=every, on_row=rows.append)
        losses = trained(model, optimizer, 4, forward=torch.compile(model, fullgraph=True))
        results.append((losses, [optimizer.stored(p) for p in model.parameters()]))
    assert results[0][0] == results[1][0] and all(map(torch.equal, results[0][1], results[1][1]))
    assert [row["step"] for row in rows] == [2, 4]
    eager, _ = read("bfloat16/word")
    assert rows[0]["tensors"].keys() == eager["tensors"].keys()
    for key, values in eager["tensors"].items():
        assert rows[0]["tensors"][key][0] == pytest.approx(values[0], rel=0.05)


def test_checkpointed_activations_are_marked_once() -> None:
    from torch.utils.checkpoint import checkpoint

    def forward(x: Tensor) -> Tensor:
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return model.head(x)

    plain, _ = read("bfloat16/word")
    model, optimizer = made()
    gauges = attach_gauges(model, optimizer, every=2)
    trained(model, optimizer, 2, forward=forward)
    assert gauges.last is not None and gauges.last["tensors"] == plain["tensors"]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_any_module_and_any_optimizer(kind: Any) -> None:
    torch.manual_seed(0)
    model = Small()
    optimizer = kind(model.parameters(), lr=1e-3)
    gauges = attach_gauges(model, optimizer, every=2)
    trained(model, optimizer, 4)
    row = gauges.last
    assert row is not None and metric_of(row, "updates", "head.weight", "edq") is None
    assert 0 < (metric_of(row, "updates", "head.weight", "update_to_weight") or 0) < 1
    if kind is torch.optim.AdamW:
        assert metric_of(row, "moments", "head.weight", "bias") == pytest.approx(1.0, rel=1e-5)
        assert (metric_of(row, "updates", "head.weight", "update_to_ulp") or 0) > 0


def test_what_a_cast_loses_is_read_from_its_own_scale() -> None:
    row, _ = read("float8-row/word")
    sqnr = metric_of(row, "tensors", "input:blocks.0.up", "sqnr_db")
    assert sqnr is not None and 28 < sqnr < 36  # e4m3 scaled by row: 31.5 for normal values
    assert metric_of(row, "tensors", "input:blocks.0.up", "overflow") == 0.0
    plain, _ = read("bfloat16/word")
    assert metric_of(plain, "tensors", "input:blocks.0.up", "sqnr_db") is None


def test_block_scales_of_a_microscaling_row() -> None:
    row, _ = read("mxfp8/word")
    lowest, median, highest = row["block_scales"]["input:blocks.0.up"]
    assert lowest <= median <= highest and -20 < median < 5


def test_the_dead_and_the_scaled_layer_are_told_apart() -> None:
    model, optimizer = made()
    with torch.no_grad():
        model.blocks[0].down.weight.zero_()
        model.blocks[0].down.bias.zero_()
        model.blocks[1].up.weight.mul_(2.0**12)
    gauges = attach_gauges(model, optimizer, every=1)
    trained(model, optimizer, 1)
    row = gauges.last
    assert row is not None
    assert metric_of(row, "tensors", "weight:blocks.0.down.weight", "amax") == 0.0
    ratio = metric_of(row, "tensors", "weight:blocks.1.up.weight", "rms") / metric_of(  # type: ignore[operator]
        row, "tensors", "weight:blocks.0.up.weight", "rms"
    )
    assert ratio == pytest.approx(2.0**12, rel=0.1)


def test_bad_values_are_counted() -> None:
    model, optimizer = made()
    with torch.no_grad():
        model.blocks[1].up.weight[0, 0], model.blocks[1].up.weight[0, 1] = math.nan, math.inf
    gauges = attach_gauges(model, optimizer, every=1)
    trained(model, optimizer, 1)
    assert gauges.last is not None
    assert metric_of(gauges.last, "tensors", "weight:blocks.1.up.weight", "nonfinite") == 2
    assert metric_of(gauges.last, "tensors", "input:blocks.0.up", "nonfinite") == 0


@pytest.mark.parametrize(
    ("storage", "freezes"), [("naive", True), ("collage-plus", False), ("word", False), ("master", False)]
)
def test_second_moments_that_freeze_are_seen(storage: str, freezes: bool) -> None:
    """Gradients fall to a tenth; at beta2 0.999 a bfloat16 second moment stays where it was."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(16, 32).bfloat16())
    model = nn.ParameterDict({"w": weight})
    optimizer = ng.AdamW(model.named_parameters(), lr=1e-4, betas=(0.9, 0.999), storage=storage, audit_every=0)
    gauges = attach_gauges(model, optimizer, every=100)
    gradient = torch.randn(16, 32).bfloat16()
    for step in range(300):
        weight.grad = gradient * (1.0 if step < 100 else 0.1)
        optimizer.step()
    row = gauges.last
    assert row is not None
    bias, frozen = metric_of(row, "moments", "w", "bias"), metric_of(row, "moments", "w", "frozen_fraction")
    assert bias is not None and frozen is not None
    if freezes:
        assert frozen > 0.9 and abs(bias - 1) > 0.05
    else:
        assert frozen < 0.5 and bias == pytest.approx(1.0, abs=0.05)


def test_the_shadow_takes_clipped_gradients_and_leaves_skipped_ones() -> None:
    weight = nn.Parameter(torch.randn(4, 8))
    optimizer = ng.AdamW([("w", weight)], lr=1e-4, storage="float32", max_grad_norm=0.1, audit_every=0)
    gauges = attach_gauges(nn.ParameterDict({"w": weight}), optimizer, every=6)
    for step in range(6):
        weight.grad = torch.full((4, 8), math.nan if step == 3 else 1.0)
        optimizer.step()
    assert optimizer.num_skipped == 1 and gauges.last is not None
    assert metric_of(gauges.last, "moments", "w", "bias") == pytest.approx(1.0, rel=1e-5)


def test_patterns_choose_and_nothing_is_refused() -> None:
    model, optimizer = made()
    gauges = attach_gauges(model, optimizer, ["blocks.0.*"], every=1)
    trained(model, optimizer, 1)
    assert gauges.last is not None
    names = {key.partition(":")[2] for key in gauges.last["tensors"]}
    assert names and all(name.startswith("blocks.0.") for name in names)
    with pytest.raises(
        NarrowgaugeError, match=r"matches no module or parameter of Small. Its names look like 'blocks.0.up.weight'"
    ):
        attach_gauges(model, optimizer, "encoder.*")
    with pytest.raises(NarrowgaugeError, match="every must be an integer"):
        attach_gauges(model, optimizer, every=-1)


def test_detached_gauges_are_gone() -> None:
    model, optimizer = made()
    gauges = attach_gauges(model, optimizer, every=1)
    gauges.detach()
    trained(model, optimizer, 1)
    assert gauges.last is None


def test_outputs_are_watched_on_request_and_a_word_says_what_that_does() -> None:
    model, optimizer = made()
    with pytest.warns(GaugeNotice, match="last bits may differ"):
        gauges = attach_gauges(model, optimizer, every=1, outputs="blocks.*")
    trained(model, optimizer, 1)
    assert gauges.last is not None and "output:blocks.0" in gauges.last["tensors"]


def test_attached_gauges_raise_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", GaugeNotice)
        read("bfloat16/word")


# ── what users do ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_parameter_without_a_gradient_spoils_no_other() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(8, 8), "sometimes": nn.Linear(8, 8), "never": nn.Linear(8, 8)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    gauges = attach_gauges(model, optimizer, every=12)
    for step in range(12):
        x = torch.randn(4, 8)
        out = model["used"](x) + (model["sometimes"](x) if step % 3 == 0 else 0.0)
        out.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert gauges.last is not None and set(gauges.last["moments"]) == {"used.weight", "sometimes.weight"}
    for name in gauges.last["moments"]:
        assert metric_of(gauges.last, "moments", name, "bias") == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("kind", [ng.Lion, torch.optim.SGD])
def test_without_second_moments_nothing_is_read_on_unsampled_steps(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    monkeypatch.setattr(
        StateReader,
        "leading",
        lambda self, parameter, name, true=StateReader.leading: reads.append(name) or true(self, parameter, name),
    )
    torch.manual_seed(0)
    model = Small()
    optimizer = kind(model.parameters(), lr=1e-3, **({"storage": "float32"} if kind is ng.Lion else {}))
    gauges = attach_gauges(model, optimizer, every=50)
    trained(model, optimizer, 2)
    after_two = len(reads)
    trained(model, optimizer, 6)
    assert len(reads) == after_two and gauges.last is None


def test_a_loaded_state_is_followed_from_there_and_its_rate_is_the_new_one() -> None:
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    gauges = attach_gauges(model, optimizer, every=4)
    trained(model, optimizer, 4)
    first = gauges.last
    state = optimizer.state_dict()
    for entry in state["state"].values():
        entry["exp_avg_sq"] = entry["exp_avg_sq"] * 100
    state["param_groups"][0]["lr"] = 1e-5
    optimizer.load_state_dict(state)
    trained(model, optimizer, 4)
    assert first is not None and gauges.last is not None
    assert metric_of(gauges.last, "moments", "head.weight", "bias") == pytest.approx(1.0, rel=1e-3)
    ratio = metric_of(gauges.last, "updates", "head.weight", "update_to_ulp") / metric_of(  # type: ignore[operator]
        first, "updates", "head.weight", "update_to_ulp"
    )
    assert ratio < 0.02  # a hundredth of the rate, and a tenth for the larger moments


def test_gauges_attached_late_know_how_many_steps_were_taken() -> None:
    torch.manual_seed(0)
    readings = []
    for late in (False, True):
        torch.manual_seed(0)
        model = Small()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        gauges = None if late else attach_gauges(model, optimizer, every=6)
        trained(model, optimizer, 5)
        gauges = gauges or attach_gauges(model, optimizer, every=1)
        trained(model, optimizer, 1)
        readings.append(metric_of(gauges.last or {}, "updates", "head.weight", "update_to_ulp"))
    assert readings[0] is not None and readings[0] == pytest.approx(readings[1])


def test_a_stale_scale_is_read_as_the_layer_used_it() -> None:
    """Inputs a thousand times larger than those before: the delayed scale cuts them off, and the gauge says so."""
    model, optimizer = made("float8-delayed/word")
    gauges = attach_gauges(model, optimizer, every=4)
    linears = ng.matmul.linears_of(model)
    assert linears is not None
    trained(model, optimizer, 3)
    trained(model, optimizer, 1, size=1000.0)
    assert gauges.last is not None and sum(linears.overflows(3)["blocks.0.up"]) > 1000
    share = metric_of(gauges.last, "tensors", "input:blocks.0.up", "overflow")
    assert share == pytest.approx(linears.overflows(3)["blocks.0.up"][0] / (64 * 32), abs=0.02)


def test_events_are_told_in_a_loop_of_ones_own() -> None:
    told: list[str] = []
    model, optimizer = made()
    attach_gauges(model, optimizer, every=1)
    stop = ng.on_event(lambda event: told.append(f"{event.kind} {event.tensor}"))
    try:
        with torch.no_grad():
            model.blocks[1].up.weight[0, 0] = math.nan
        trained(model, optimizer, 1)
    finally:
        stop()
    assert any(line.startswith("nonfinite weight:blocks.1.up.weight") for line in told)


def test_two_optimizers_are_kept_apart_and_gauges_are_not_stacked() -> None:
    torch.manual_seed(0)
    model = Small()
    one = torch.optim.SGD(model.blocks.parameters(), lr=1e-2)
    gauges = attach_gauges(model, one, every=1)
    with pytest.raises(NarrowgaugeError, match=r"already has gauges\. Call detach\(\)"):
        attach_gauges(model, one, every=1)
    trained(model, one, 1)
    assert gauges.last is not None and "head.weight" not in gauges.last["updates"]
    gauges.detach()
    attach_gauges(model, one, every=1).detach()


def test_what_is_gone_samples_no_more() -> None:
    model, optimizer = made()
    gauges = attach_gauges(model, optimizer, every=1)
    number = gauges.recorder.number
    assert number in _OPEN and SAMPLING.is_on
    gauges.detach()
    assert number not in _OPEN
    model, optimizer = made()
    gauges = attach_gauges(model, optimizer, every=1)
    number = gauges.recorder.number
    assert number in _OPEN
    del gauges, model, optimizer
    gc.collect()
    assert number not in _OPEN
    assert not attach_gauges(Small(), every=1).sampling  # nothing counts its steps


def test_sparse_gradients_are_left_out() -> None:
    model = nn.Sequential(nn.Embedding(16, 8, sparse=True))
    optimizer = torch.optim.SparseAdam(model.parameters())
    gauges = attach_gauges(model, optimizer, every=1)
    for _ in range(3):
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    assert gauges.last is not None and "grad:0.weight" not in gauges.last["tensors"]


def test_updates_of_an_embedding_are_not_those_of_its_first_token() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 128), nn.Linear(128, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    gauges = attach_gauges(model, optimizer, every=1)
    model(torch.arange(1, 64)).square().sum().backward()
    optimizer.step()
    assert gauges.last is not None and (metric_of(gauges.last, "updates", "0.weight", "update_to_weight") or 0) > 0


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "AlbertForMaskedLM", "GPT2LMHeadModel"])
def test_heads_that_the_body_does_not_feed(kind: str) -> None:
    import transformers

    shapes = {
        "vocab_size": 60,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    named = {"GPT2LMHeadModel": {"vocab_size": 60, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}}
    config = getattr(transformers, kind.partition("For")[0].removesuffix("LMHeadModel") + "Config")
    more = {"embedding_size": 8} if kind.startswith("Albert") else {}
    model = getattr(transformers, kind)(config(**(named.get(kind) or {**shapes, **more}))).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    gauges = attach_gauges(model, optimizer, every=1)
    tokens = torch.randint(0, 60, (2, 8))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    assert gauges.last is not None
    if kind != "AlbertForMaskedLM":
        assert gauges.last["logits"]["log_z"] == pytest.approx(math.log(60), abs=0.5)


def test_training_in_eval_mode_is_told_as_such() -> None:
    model, optimizer = made()
    attach_gauges(model, optimizer, every=1)
    model.eval()
    with pytest.warns(GaugeNotice, match="in eval mode, and only training is watched"):
        trained(model, optimizer, 1)
