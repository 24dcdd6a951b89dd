"""Conversion: exact where it can be, counted where not, for every kind of source; what cannot be told is refused.

Files of other libraries are made here: those of torch by torch, those of bitsandbytes by a writer from the published
block-wise formula, whose values a slow oracle reads back.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import narrowgauge as ng
from checkpoints.conversion.unpickling import Trap
from narrowgauge.checkpoints.conversion import folders
from narrowgauge.checkpoints.conversion.conversion_report import compare, largest_of
from narrowgauge.checkpoints.saving import load_checkpoint
from narrowgauge.cli.main import main
from narrowgauge.errors import DataError, NarrowgaugeError, RecipeError, RecordError
from narrowgauge.runs.record import read_run
from narrowgauge.spec.notation import parse_table
from narrowgauge.spec.storages import BFLOAT16, MOMENT12, SECOND12, STORAGES
from narrowgauge.trainer import language_model, loop
from tensors import assert_same_bits
from trainer.tiny_runs import SHAPE, lasting, settings

STATES = ("exp_avg", "exp_avg_sq")


class Tied(nn.Module):
    """An embedding that is also the head, a block, a norm, and a buffer of integers."""

    positions: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, 20)
        self.first = nn.Linear(20, 20)
        self.second = nn.Linear(20, 20)
        self.norm = nn.LayerNorm(20)
        self.head = nn.Linear(20, 24, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.arange(5))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        result: Tensor = self.head(self.norm(hidden + self.second(self.first(hidden).tanh())))
        return result


def made(seed: int = 0) -> Tied:
    torch.manual_seed(seed)
    return Tied()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, first: int = 0) -> None:
    for step in range(first, first + steps):
        draw = torch.Generator().manual_seed(step)
        tokens, targets = torch.randint(24, (2, 4, 6), generator=draw)
        loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())
        scaler = getattr(optimizer, "loss_scaler", None)
        (loss if scaler is None else scaler.scale(loss)).backward()
        optimizer.step()
        optimizer.zero_grad()


def prepared(recipe: str, seed: int = 0) -> tuple[nn.Module, ng.AdamW]:
    # At the scale that a scaler begins with, every step of these few would overflow and be skipped.
    scaler = {"loss_scaler": ng.LossScaler(8.0)} if recipe.startswith("float16") else {}
    return ng.prepare(made(seed), recipe, lr=1e-2, betas=(0.9, 0.999), compile=False, audit_every=0, **scaler)


def trained(recipe: str) -> tuple[nn.Module, ng.AdamW]:
    model, optimizer = prepared(recipe)
    train(model, optimizer)
    return model, optimizer


def saved(place: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Path:
    content = {"model": model.state_dict(), **({} if optimizer is None else {"optimizer": optimizer.state_dict()})}
    torch.save(content, place)
    return place


def adamw(model: nn.Module, *, named: bool = True) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.named_parameters() if named else model.parameters(), lr=1e-2)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    (checkpoint,) = (folder / "checkpoints").iterdir()
    return load_checkpoint(checkpoint)[0]


def values_of(folder: Path, recipe: str) -> dict[str, dict[str, Tensor]]:
    """What a converted folder holds, as float32."""
    model, optimizer = prepared(recipe, seed=9)
    ng.restore(folder, model, optimizer)
    kinds = ("weight", *STATES)
    return {name: {k: optimizer.stored(p, k) for k in kinds} for p, name in optimizer.parameter_names().items()}


def call(*words: Any) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words], prog_name="narrowgauge")


# ── between our own storages ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("recipe", "through"),
    [
        ("bfloat16/master", "bfloat16/exact"),
        ("bfloat16/exact", "bfloat16/float32"),
        ("bfloat16/exact", "float32/float32"),
        ("bfloat16/word", "bfloat16/exact"),
        ("bfloat16/word", "bfloat16/float32"),
        ("bfloat16/naive", "bfloat16/split"),
        ("bfloat16/split", "bfloat16/master"),
        ("bfloat16/split8", "bfloat16/exact"),
    ],
)
def test_there_and_back_is_the_same_in_every_bit(recipe: str, through: str, tmp_path: Path) -> None:
    model, optimizer = trained(recipe)
    at_first = ng.convert(saved(tmp_path / "a.pt", model, optimizer), recipe, tmp_path / "a")
    there = ng.convert(tmp_path / "a", through, tmp_path / "b")
    back = ng.convert(tmp_path / "b", recipe, tmp_path / "c")
    for report in (at_first, there, back):
        assert [kept.exact_share for kept in report.kept] == [1.0, 1.0, 1.0], report
    before, after = tensors_of(tmp_path / "a"), tensors_of(tmp_path / "c")
    assert_same_bits(before, after)
    names = optimizer.parameter_names()
    kept = {f"optimizer.{names[p]}.{k}": v for p, entry in optimizer.states().items() for k, v in entry.items()}
    assert_same_bits({k: v for k, v in before.items() if k.startswith("optimizer.")}, kept)
    assert there.step == 3 and (there.origin, there.recipe) == (recipe, through)


@pytest.mark.parametrize("recipe", ["bfloat16/compact", "bfloat16/states8", "float16/split"])
def test_scales_may_change_but_no_value_does(recipe: str, tmp_path: Path) -> None:
    ng.convert(saved(tmp_path / "a.pt", *trained(recipe)), recipe, tmp_path / "a")
    there = ng.convert(tmp_path / "a", "bfloat16/exact", tmp_path / "b")
    back = ng.convert(tmp_path / "b", recipe, tmp_path / "c")
    assert [kept.exact_share for kept in (*there.kept, *back.kept)] == [1.0] * 6
    before, after = values_of(tmp_path / "a", recipe), values_of(tmp_path / "c", recipe)
    for name, values in before.items():
        assert_same_bits(values, after[name])


def recipe_of(storage: str) -> str:
    """The storage under a compute that takes it."""
    return storage if "/" in storage else f"{'float32' if storage == 'float32' else 'bfloat16'}/{storage}"


# A compute with a transform takes transformers' models only; its storage's codes are tried under another one.
_KEPT = [name for name, row in STORAGES.items() if row.arithmetic != "float64"]
_TRIED = [recipe_of(name) for name in _KEPT if not name.startswith("scalify")]


@pytest.mark.parametrize("recipe", [recipe_of(name) for name in STORAGES if name not in _KEPT])
def test_float64_is_refused(recipe: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="carries weights and states as float32"):
        ng.convert(tmp_path, recipe, tmp_path / "b")


@pytest.mark.parametrize("recipe", ["bfloat16/master", "float16/master"])
def test_float64_in_an_override_is_refused(recipe: str, tmp_path: Path) -> None:
    table = {"recipe": recipe, "override": [{"pattern": "*norm*", "storage": "master64"}]}
    with pytest.raises(RecipeError, match="with override' stores float64 and was requested of a conversion"):
        ng.convert(saved(tmp_path / "a.pt", *trained(recipe)), parse_table(table), tmp_path / "b")


@pytest.mark.parametrize("recipe", ["bfloat16/master64", "float64/float64"])
def test_a_state_in_float64_is_refused(recipe: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "a.pt", *trained(recipe))
    with pytest.raises(RecipeError, match="which stores float64, and a conversion carries float32") as caught:
        ng.convert(source, "bfloat16/master", tmp_path / "b")
    assert "export RUN OUT --dtype float32" in str(caught.value)


@pytest.mark.parametrize("recipe", [*_TRIED, "bfloat16/tail8+float16-row+float16-row-held"])
def test_the_same_storage_keeps_its_very_words(recipe: str, tmp_path: Path) -> None:
    model, optimizer = trained(recipe)
    ng.convert(saved(tmp_path / "a.pt", model, optimizer), recipe, tmp_path / "a")
    again, other = prepared(recipe, seed=5)
    assert ng.restore(tmp_path / "a", again, other) == 3
    train(model, optimizer, first=3)
    train(again, other, first=3)
    names, others = optimizer.parameter_names(), {n: p for p, n in other.parameter_names().items()}
    for parameter, entry in optimizer.states().items():
        twin = others[names[parameter]]
        assert_same_bits({**entry, "seen": parameter.detach()}, {**other.states()[twin], "seen": twin.detach()})


def test_what_a_storage_cannot_hold_is_cut_without_bias_and_counted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(512, 512, bias=False)
    optimizer = adamw(model)
    model.weight.grad = torch.randn(512, 512)
    optimizer.step()
    exact = optimizer.state[model.weight]
    report = ng.convert(saved(tmp_path / "a.pt", model, optimizer), "bfloat16/word", tmp_path / "a")
    model, word = ng.prepare(nn.Linear(512, 512, bias=False), "bfloat16/word", compile=False)
    ng.restore(tmp_path / "a", model, word)
    (parameter,) = model.parameters()
    for kept in report.kept[1:]:
        value, held = exact[kept.kind].double(), word.stored(parameter, kept.kind).double()
        errors = (held / value - 1).abs()
        # 5 mantissa bits: spacings of 2^-5 at most, and an average of zero to within five standard errors.
        assert errors.max() < 2.0**-5 and kept.max_relative_error == pytest.approx(float(errors.max()), rel=1e-9)
        assert kept.rms_relative_error == pytest.approx(float(errors.square().mean().sqrt()), rel=1e-6)
        assert abs(float((held / value - 1).mean())) < 5 * kept.rms_relative_error / 512
        assert kept.num_exact == int((held == value).sum()) < kept.num_values == 512 * 512
    weight = report.kept[0]
    assert 2.0**-18 < weight.max_relative_error <= 2.0**-16  # to the nearest of 16 mantissa bits


def test_equal_sources_give_equal_bytes(tmp_path: Path) -> None:
    source = saved(tmp_path / "a.pt", *trained("bfloat16/exact"))
    for name in "xy":
        ng.convert(source, "bfloat16/compact", tmp_path / name)
    one, other = (next((tmp_path / name).rglob("tensors.safetensors")).read_bytes() for name in "xy")
    assert one == other


def test_overrides_and_kept_modules_have_their_own_storage(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        'recipe = "bfloat16/word"\nkeep = ["second"]\n[[override]]\npattern = "first.*"\nstorage = "split"\n'
    )
    report = ng.convert(saved(tmp_path / "a.pt", *trained("bfloat16/exact")), recipe, tmp_path / "a")
    tensors = tensors_of(tmp_path / "a")
    assert tensors["model.second.weight"].dtype == torch.float32
    assert {"optimizer.first.weight.tail", "optimizer.embedding.weight.packed"} <= tensors.keys()
    # The folder says its recipe in full, so it can be a source itself.
    again = ng.convert(tmp_path / "a", recipe, tmp_path / "b")
    assert again.recipe == report.recipe and all(kept.exact_share == 1.0 for kept in again.kept)
    assert_same_bits(tensors_of(tmp_path / "b"), tensors)


# ── runs ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(SHAPE))
    (folder / "text").mkdir()
    for number in range(6):
        (folder / "text" / f"{number}.txt").write_text(f"the quick brown fox {number} jumps over " * 40)
    return folder


@pytest.fixture(scope="module")
def exact_run(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "exact"
    return loop.train(settings(place, out, recipe="bfloat16/exact", steps=6, keep_checkpoints=9))


def figures(row: dict[str, Any] | None) -> dict[str, Any]:
    assert row is not None
    return {k: v for k, v in lasting(row).items() if k not in ("recipe", "bytes_per_param", "state_bytes")}


@pytest.mark.parametrize("at", [2, 4, 6])
def test_a_converted_run_goes_on_with_the_same_bits(at: int, exact_run: Path, tmp_path: Path) -> None:
    report = ng.convert(exact_run / "checkpoints" / f"step-{at:08d}", "bfloat16/master", tmp_path / "master")
    assert report.step == at and all(kept.exact_share == 1.0 for kept in report.kept)
    before = read_run(tmp_path / "master")
    assert before.summary is None and [row["step"] for row in before.steps] == list(range(1, at + 1))
    assert before.config["recipe"] == "bfloat16/master" and before.config["out"] == str(tmp_path / "master")
    loop.resume(tmp_path / "master")
    run, whole = read_run(tmp_path / "master"), read_run(exact_run)
    assert [lasting(row) for row in run.steps] == [lasting(row) for row in whole.steps]
    assert [lasting(row) for row in run.evals] == [lasting(row) for row in whole.evals]
    assert figures(run.summary) == figures(whole.summary)
    notes = [event["message"] for event in run.events if event["kind"] == "note"]
    assert notes[0].startswith("converted from bfloat16/exact to bfloat16/master") and str(exact_run) in notes[0]


def test_a_run_means_its_newest_checkpoint_and_shares_its_tokens(exact_run: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in exact_run.rglob("*") if path.is_file()}
    report = ng.convert(exact_run, "bfloat16/word", tmp_path / "word")
    assert report.step == 6
    for name in ("train.bin", "valid.bin", "tokenizer.json"):
        assert os.path.samefile(exact_run / "data" / name, tmp_path / "word" / "data" / name)
    # The loss at the end is of the new storage, not of the one before.
    assert [row["step"] for row in read_run(tmp_path / "word").evals] == [3]
    loop.resume(tmp_path / "word")
    assert [row["step"] for row in read_run(tmp_path / "word").evals] == [3, 6]
    assert {path: path.read_bytes() for path in exact_run.rglob("*") if path.is_file()} == before
    assert read_run(tmp_path / "word").summary is not None


def test_readings_of_another_storage_are_not_taken_over(exact_run: Path, tmp_path: Path) -> None:
    source = load_checkpoint(exact_run / "checkpoints" / "step-00000006")[0]
    audited = {key for key in source if key.startswith("audit.")}
    ng.convert(exact_run, "bfloat16/word", tmp_path / "word")
    kept = {key for key in tensors_of(tmp_path / "word") if key.startswith("audit.")}
    # Vectors are `master` in both.
    assert kept == {key for key in audited if source[f"model.{key.removeprefix('audit.')}"].ndim < 2} != audited


def test_where_links_cannot_be_tokens_are_copied(
    exact_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    ng.convert(exact_run, "bfloat16/word", tmp_path / "word")
    copied = tmp_path / "word" / "data" / "train.bin"
    assert copied.read_bytes() == (exact_run / "data" / "train.bin").read_bytes()
    assert not os.path.samefile(exact_run / "data" / "train.bin", copied)


# ── other libraries ─────────────────────────────────────────────────────────────────────────────────────────────────────


def by_decay(model: nn.Module) -> torch.optim.AdamW:
    parameters = list(model.parameters())
    groups = [[p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]]
    return torch.optim.AdamW(
        [{"params": group, "weight_decay": d} for group, d in zip(groups, (0.1, 0.0), strict=True)]
    )


@pytest.mark.parametrize("ordered", [adamw, lambda model: adamw(model, named=False), by_decay])
def test_states_of_torch_keep_every_bit(ordered: Callable[[nn.Module], torch.optim.AdamW], tmp_path: Path) -> None:
    model = made()
    optimizer = ordered(model)
    train(model, optimizer)
    report = ng.convert(saved(tmp_path / "a.pt", model, optimizer), "bfloat16/exact", tmp_path / "a")
    assert (report.origin, report.step) == ("torch.optim", 3)
    assert [(kept.kind, kept.exact_share) for kept in report.kept] == [(k, 1.0) for k in ("weight", *STATES)]
    found = values_of(tmp_path / "a", "bfloat16/exact")
    assert found.keys() == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name]["weight"], parameter.detach()), name
        for kind in STATES:
            assert torch.equal(found[name][kind], optimizer.state[parameter][kind]), name
    assert torch.equal(tensors_of(tmp_path / "a")["model.positions"], model.positions)


def test_weights_and_state_may_lie_apart(tmp_path: Path) -> None:
    model = made()
    optimizer = adamw(model)
    train(model, optimizer)
    ng.convert(saved(tmp_path / "a.pt", model, optimizer), "bfloat16/word", tmp_path / "a")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    ng.convert(tmp_path / "weights.pt", "bfloat16/word", tmp_path / "b", tmp_path / "state.pt")
    assert_same_bits(tensors_of(tmp_path / "a"), tensors_of(tmp_path / "b"))


def test_a_state_keyed_by_names_is_read_as_one_of_numbers(tmp_path: Path) -> None:
    """As ``torch.distributed.checkpoint.state_dict`` gives it."""
    model = made()
    optimizer = adamw(model)
    train(model, optimizer)
    ng.convert(saved(tmp_path / "a.pt", model, optimizer), "bfloat16/word", tmp_path / "a")
    numbered = optimizer.state_dict()
    names = numbered["param_groups"][0].pop("param_names")
    named = {name: numbered["state"][place] for place, name in enumerate(names)}
    group = {**numbered["param_groups"][0], "params": names}
    torch.save(
        {"model_state_dict": model.state_dict(), "optimizer_state_dict": {"state": named, "param_groups": [group]}},
        tmp_path / "b.pt",
    )
    ng.convert(tmp_path / "b.pt", "bfloat16/word", tmp_path / "b")
    assert_same_bits(tensors_of(tmp_path / "a"), tensors_of(tmp_path / "b"))


def test_a_parameter_that_has_not_stepped_has_no_moments_yet(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = adamw(model)
    model[0](torch.ones(4)).sum().backward()
    optimizer.step()
    report = ng.convert(saved(tmp_path / "a.pt", model, optimizer), "bfloat16/exact", tmp_path / "a")
    assert [kept.num_values for kept in report.kept] == [40, 20, 20]
    tensors = tensors_of(tmp_path / "a")
    assert (tensors["optimizer.0.weight.step"], tensors["optimizer.1.weight.step"]) == (1.0, 0.0)


def test_a_tied_weight_that_was_saved_twice_counts_once(tmp_path: Path) -> None:
    model = made()
    optimizer = adamw(model)
    train(model, optimizer)
    content = {"model": {k: v.clone() for k, v in model.state_dict().items()}, "optimizer": optimizer.state_dict()}
    torch.save(content, tmp_path / "a.pt")
    ng.convert(tmp_path / "a.pt", "bfloat16/word", tmp_path / "a")
    assert "model.head.weight" not in tensors_of(tmp_path / "a")
    content["model"]["head.weight"][0, 0] += 1
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(DataError, match=r"no state of 'head\.weight'"):
        ng.convert(tmp_path / "a.pt", "bfloat16/word", tmp_path / "b")


def test_equal_constants_are_no_tied_weights(tmp_path: Path) -> None:
    content = state_of(made())
    content["model"]["frozen"] = torch.ones(20)  # as the norm's gain began
    content["optimizer"]["state"].clear()
    content["model"]["norm.weight"] = torch.ones(20)
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(DataError, match="no state of 'frozen'"):
        ng.convert(tmp_path / "a.pt", "bfloat16/word", tmp_path / "a")


def blockwise(values: Tensor, table: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of the published formula: each block of neighbours over its largest, to the nearest in the map."""
    flat = values.flatten()
    padded = nn.functional.pad(flat, (0, -len(flat) % size)).view(-1, size)
    scales = padded.abs().amax(1)
    codes = (padded / scales[:, None]).flatten()[: len(flat), None].sub(table).abs().argmin(1)
    return codes.to(torch.uint8).view(values.shape), scales


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("size", [256, 2048])
def test_states_of_bitsandbytes_are_their_published_values(nested: bool, size: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = {"big": torch.randn(70, 90), "small": torch.randn(7)}
    tables = {1: torch.linspace(-1, 1, 256), 2: torch.linspace(0, 1, 256) ** 2}
    parts: dict[str, Tensor] = {}
    for k, table in tables.items():
        moment = torch.randn(70, 90).abs() if k == 2 else torch.randn(70, 90)
        parts[f"state{k}"], parts[f"absmax{k}"] = blockwise(moment, table, size)
        parts[f"qmap{k}"] = table
    plain = {"state1": torch.randn(7), "state2": torch.rand(7)}
    entries = [{"step": 5, **({"__bnb_optimizer_quant_state__": e} if nested else e)} for e in (parts, plain)]
    group = {"params": [0, 1], "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "alpha": 0.0, "t_beta3": None}
    state = {"state": dict(enumerate(entries)), "param_groups": [group]}
    torch.save({"model": weights, "optimizer": state}, tmp_path / "a.pt")
    report = ng.convert(tmp_path / "a.pt", "bfloat16/exact", tmp_path / "a")
    assert (report.origin, report.step) == ("bitsandbytes", 5)
    assert all(kept.exact_share == 1.0 for kept in report.kept)
    tensors = tensors_of(tmp_path / "a")
    for k, kind in enumerate(STATES, 1):
        codes, table = parts[f"state{k}"].numpy().ravel(), parts[f"qmap{k}"].numpy()
        slow = [table[code] * np.float32(parts[f"absmax{k}"][place // size]) for place, code in enumerate(codes)]
        assert tensors[f"optimizer.big.{kind}"].flatten().tolist() == [float(value) for value in slow]
        assert torch.equal(tensors[f"optimizer.small.{kind}"], plain[f"state{k}"])


def hugging_face(folder: Path, *, layers: int = 11) -> tuple[nn.Module, Path]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "num_hidden_layers": layers}))
    model.save_pretrained(folder, max_shard_size="20KB")
    return model, folder


def test_hugging_face_weights_are_read_from_all_their_files(tmp_path: Path) -> None:
    model, folder = hugging_face(tmp_path / "hf")
    assert (folder / "model.safetensors.index.json").is_file()
    report = ng.convert(folder, "bfloat16/word", tmp_path / "a")
    assert (report.origin, report.step, [kept.kind for kept in report.kept]) == ("weights", 0, ["weight"])
    again, optimizer = ng.prepare(type(model)(model.config), "bfloat16/word", compile=False)
    assert ng.restore(tmp_path / "a", again, optimizer) == 0
    named = dict(model.named_parameters())
    straight = ng.prepare(model, "bfloat16/word", compile=False)[1]
    for name, parameter in again.named_parameters():
        assert torch.equal(optimizer.stored(parameter), straight.stored(named[name])), name


def test_a_trainer_checkpoint_is_matched_by_the_order_of_its_model(tmp_path: Path) -> None:
    """A safetensors file sorts names, so that layer 10 comes before layer 2: only the model knows its order."""
    model, folder = hugging_face(tmp_path / "hf")
    optimizer = by_decay(model)
    model(torch.arange(8)[None]).logits.sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    with pytest.raises(DataError, match=r"contains an optimizer\.pt"):
        ng.convert(folder, "bfloat16/exact", tmp_path / "a")
    ng.convert(folder, "bfloat16/exact", tmp_path / "a", folder / "optimizer.pt")
    tensors = tensors_of(tmp_path / "a")
    for name, parameter in model.named_parameters():
        assert torch.equal(tensors[f"optimizer.{name}.exp_avg"], optimizer.state[parameter]["exp_avg"]), name
    (folder / "config.json").unlink()
    with pytest.raises(DataError, match="without names"):
        ng.convert(folder, "bfloat16/exact", tmp_path / "b", folder / "optimizer.pt")


# ── the report ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_report_counts_what_it_says() -> None:
    values = torch.tensor([1.0, 1.0, 2.0, 4.0, 0.0, -0.0, math.nan, math.inf, 1e-30, 3e38])
    kept = torch.tensor([1.0, 1.5, 1.0, 4.0, 0.0, 0.0, math.nan, math.inf, 0.0, math.inf])
    found = compare("weight", [(values, kept, BFLOAT16, None)])
    # Exact: 1, 4, 0, NaN and infinity; -0 has lost its sign. Measured: 1, 1, 2, 4, 1e-30.
    assert (found.num_values, found.num_exact, found.num_zeroed, found.num_saturated) == (10, 5, 1, 1)
    assert found.max_relative_error == 1.0
    assert found.rms_relative_error == pytest.approx(math.sqrt((0.25 + 0.25 + 1.0) / 5))
    twice = compare("weight", [(values, kept, BFLOAT16, None)] * 2)
    assert (twice.num_exact, twice.rms_relative_error) == (10, pytest.approx(found.rms_relative_error))
    assert compare("weight", []).exact_share == 1.0


def test_the_largest_of_a_code_is_what_it_saturates_at(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    state = {"step": torch.tensor(1.0), "exp_avg": torch.tensor([[1e6, -1e6], [1e-30, 1.0]])}
    state["exp_avg_sq"] = torch.tensor([[1e12, 1e-38], [0.0, 1.0]])
    group = {"params": [0], "betas": (0.9, 0.999), "eps": 1e-8}
    content = {"model": {"w": weight.data}, "optimizer": {"state": {0: state}, "param_groups": [group]}}
    torch.save(content, tmp_path / "a.pt")
    report = ng.convert(tmp_path / "a.pt", "bfloat16/word", tmp_path / "a")
    model = nn.Module()
    model.w = weight
    optimizer = ng.prepare(model, "bfloat16/word", compile=False)[1]
    ng.restore(tmp_path / "a", model, optimizer)
    limit, second = largest_of(MOMENT12), largest_of(SECOND12)
    assert optimizer.stored(weight, "exp_avg").tolist() == [[limit, -limit], [0.0, 1.0]]
    assert optimizer.stored(weight, "exp_avg_sq")[0, 0] == second
    assert optimizer.stored(weight, "exp_avg_sq")[0, 1] > 0  # held, not zeroed
    _, first, squares = report.kept
    assert (first.num_saturated, first.num_zeroed) == (2, 1)
    assert (squares.num_saturated, squares.num_zeroed) == (1, 0)


def test_a_weight_that_the_model_cannot_see_counts_as_saturated(tmp_path: Path) -> None:
    torch.save({"w": torch.tensor([[1e5, 1.0], [2.0, 3.0]])}, tmp_path / "a.pt")
    (kept,) = ng.convert(tmp_path / "a.pt", "float16/master", tmp_path / "a").kept
    assert (kept.num_exact, kept.num_saturated) == (4, 1)


# ── restoring ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_restoring_refuses_another_model_and_changes_nothing(tmp_path: Path) -> None:
    ng.convert(saved(tmp_path / "a.pt", *trained("bfloat16/word")), "bfloat16/word", tmp_path / "a")
    model, optimizer = prepared("bfloat16/word", seed=3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    wide, wide_optimizer = prepared("bfloat16/float32")
    for other, steps, error, says in (
        (ng.prepare(nn.Linear(3, 3), "bfloat16/word")[0], optimizer, RecordError, "'bias' is in Linear but not in"),
        (wide, wide_optimizer, RecordError, r"torch\.bfloat16 of shape .* torch\.float32"),
        (model, prepared("bfloat16/split")[1], RecipeError, "needs 'tail'"),
    ):
        with pytest.raises(error, match=says):
            ng.restore(tmp_path / "a", other, steps)
    assert_same_bits(dict(model.state_dict()), before)
    with pytest.raises(RecordError, match="contains no checkpoint"):
        ng.restore(tmp_path, model, optimizer)


# ── what is refused, and what it leaves ─────────────────────────────────────────────────────────────────────────────────


def state_of(model: nn.Module, **changes: Any) -> dict[str, Any]:
    optimizer = adamw(model)
    train(model, optimizer, steps=1)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **changes}


def amsgrad() -> dict[str, Any]:
    model = made()
    optimizer = torch.optim.AdamW(model.named_parameters(), amsgrad=True)
    train(model, optimizer, steps=1)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def of_optimizer(make: Callable[[nn.Module], torch.optim.Optimizer], *, narrow: bool = False) -> dict[str, Any]:
    model = made().bfloat16() if narrow else made()
    optimizer = make(model)
    train(model, optimizer, steps=1)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def without(name: str) -> dict[str, Any]:
    content = state_of(made())
    return {**content, "model": {k: v for k, v in content["model"].items() if k != name}}


def reshaped() -> dict[str, Any]:
    content = state_of(made())
    content["optimizer"]["state"][1]["exp_avg_sq"] = torch.zeros(3)
    return content


def shuffled() -> dict[str, Any]:
    model = made()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": parameters[:3]}, {"params": parameters[3:]}])
    train(model, optimizer, steps=1)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def odd_blocks() -> dict[str, Any]:
    parts = {f"{key}{k}": torch.zeros(n) for k in "12" for key, n in (("qmap", 256), ("absmax", 3))}
    codes = {f"state{k}": torch.zeros(20, 20, dtype=torch.uint8) for k in "12"}
    group = {"params": ["w"], "betas": (0.9, 0.9), "eps": 0.0}
    return {
        "model": {"w": torch.zeros(20, 20)},
        "optimizer": {"state": {"w": {"step": 1, **parts, **codes}}, "param_groups": [group]},
    }


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a weight is missing": (lambda: without("first.weight"), "a state of 'first.weight', which is not among"),
    "a state is missing": (
        lambda: {**(c := state_of(made())), "model": {**c["model"], "extra": torch.randn(3)}},
        "no state of 'extra'",
    ),
    "another shape": (reshaped, "a.pt has shape (3,)"),
    "amsgrad": (amsgrad, "contains 'max_exp_avg_sq'"),
    "momentum": (lambda: of_optimizer(lambda m: torch.optim.SGD(m.parameters(), 0.1)), "other than AdamW"),
    "our lion": (lambda: of_optimizer(lambda m: ng.Lion(m.named_parameters()), narrow=True), "other than AdamW"),
    "our muon": (lambda: of_optimizer(lambda m: ng.Muon(m.named_parameters()), narrow=True), "other than AdamW"),
    "adamax": (lambda: of_optimizer(lambda m: torch.optim.Adamax(m.named_parameters())), "contains 'exp_inf'"),
    "groups that cannot be told": (shuffled, "7 parameters without names"),
    "blocks of no known size": (odd_blocks, "has 3 scales for 400 values"),
    "no state at all": (lambda: {"model": {"w": torch.zeros(2, 2)}, "optimizer": {"lr": 1}}, "no optimizer state"),
    "no tensors": (lambda: {"model": {"w": 3}}, "a.pt is a int, not a tensor"),
    "no weights": (lambda: {"model": {}}, "contains no weights"),
    "a list": (lambda: [torch.zeros(2)], "contains a list"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_told_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    make, says = REFUSED[case]
    torch.save(make(), tmp_path / "a.pt")
    refused = call("convert", tmp_path / "a.pt", "--recipe", "bfloat16/word", "--out", tmp_path / "deep" / "out")
    assert (refused.exit_code, refused.stdout, refused.stderr.count("\n")) == (2, "", 1), refused.exception
    assert says in refused.stderr and "Error: " in refused.stderr
    assert os.listdir(tmp_path) == ["a.pt"]


# ── what Lightning and Accelerate write ────────────────────────────────────────────────────────────────────────────────


def lightning_file(place: Path, model: nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> Path:
    """A checkpoint as Lightning 2.6 lays it out."""
    content = {
        "epoch": 0, "global_step": 3, "pytorch-lightning_version": "2.6.6",
        "state_dict": {f"model.{name}": value for name, value in model.state_dict().items()},
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 1}}}}, "callbacks": {},
        "optimizer_states": [optimizer.state_dict()], "lr_schedulers": [{"T_max": 10}], "hyper_parameters": {"lr": 1e-2},
    }  # fmt: skip
    torch.save({**content, **more}, place)
    return place


def accelerate_folder(place: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, safe: bool) -> Path:
    """A folder as ``save_state`` of Accelerate 1.15 lays it out; safetensors leave the second name of a tied weight out."""
    place.mkdir()
    if safe:
        kept = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
        save_file(kept, place / "model.safetensors")
    else:
        torch.save(model.state_dict(), place / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), place / "optimizer.bin")
    torch.save({"last_epoch": 3}, place / "scheduler.bin")
    (place / "random_states_0.pkl").write_bytes(b"")
    return place


def trained_elsewhere(*, named: bool = False) -> tuple[Tied, torch.optim.AdamW]:
    model = made()
    optimizer = adamw(model, named=named)
    train(model, optimizer)
    return model, optimizer


def assert_all_there(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Weights and moments are those of the float32 training, under the model's own names."""
    found = values_of(folder, "bfloat16/exact")
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name]["weight"], parameter.detach())
        for kind in STATES:
            assert torch.equal(found[name][kind], optimizer.state[parameter][kind])


def test_a_checkpoint_of_lightning_is_read_and_what_is_left_out_is_told(tmp_path: Path) -> None:
    model, optimizer = trained_elsewhere()
    source = lightning_file(tmp_path / "last.ckpt", model, optimizer)
    report = ng.convert(source, "bfloat16/exact", tmp_path / "out")
    assert (report.origin, report.step) == ("torch.optim", 3)
    others = {
        "epoch",
        "global_step",
        "pytorch-lightning_version",
        "loops",
        "callbacks",
        "lr_schedulers",
        "hyper_parameters",
    }
    assert set(report.left_out) == others | {"lr, betas, eps, weight_decay of the optimizer"}
    assert json.loads((tmp_path / "out" / "conversion.json").read_text())["left_out"] == list(report.left_out)
    assert "\nleft out: epoch; global_step; " in report.table().plain()
    assert_all_there(tmp_path / "out", model, optimizer)


@pytest.mark.parametrize("states", [[], None])
def test_a_lightning_file_of_weights_alone_is_weights(states: Any, tmp_path: Path) -> None:
    source = lightning_file(tmp_path / "w.ckpt", *trained_elsewhere(), optimizer_states=states)
    report = ng.convert(source, "bfloat16/word", tmp_path / "out")
    assert report.origin == "weights" and [kept.kind for kept in report.kept] == ["weight"]
    assert "lr_schedulers" in report.left_out and not any("betas" in what for what in report.left_out)


@pytest.mark.parametrize("named", [True, False])
def test_a_tied_weight_saved_under_its_other_name_has_the_optimizers(named: bool, tmp_path: Path) -> None:
    model, optimizer = trained_elsewhere(named=named)
    folder = accelerate_folder(tmp_path / "state", model, optimizer, safe=False)
    (folder / "pytorch_model.bin").unlink()
    kept = {name: value for name, value in model.state_dict().items() if name != "embedding.weight"}
    save_file(kept, folder / "model.safetensors")
    names = [] if named else [name for name, _ in model.named_parameters()]
    ng.convert(folder, "bfloat16/exact", tmp_path / "out", names=names)
    assert_all_there(tmp_path / "out", model, optimizer)


def test_of_several_optimizers_none_is_taken_for_another(tmp_path: Path) -> None:
    model, optimizer = trained_elsewhere()
    two = [optimizer.state_dict()] * 2
    source = lightning_file(tmp_path / "gan.ckpt", model, optimizer, optimizer_states=two)
    with pytest.raises(DataError, match="the states of 2 optimizers, and only one can be converted"):
        ng.convert(source, "bfloat16/word", tmp_path / "out")
    folder = accelerate_folder(tmp_path / "state", model, optimizer, safe=False)
    torch.save(optimizer.state_dict(), folder / "optimizer_1.bin")
    with pytest.raises(DataError, match="the states of several optimizers"):
        ng.convert(folder, "bfloat16/word", tmp_path / "out")


@pytest.mark.parametrize("safe", [True, False])
def test_a_folder_of_accelerate_is_read_with_its_optimizer(safe: bool, tmp_path: Path) -> None:
    # Safetensors sort their names, so there the optimizer must have been given its own.
    model, optimizer = trained_elsewhere(named=safe)
    folder = accelerate_folder(tmp_path / "state", model, optimizer, safe=safe)
    report = ng.convert(folder, "bfloat16/exact", tmp_path / "out")
    assert (report.origin, report.step) == ("torch.optim", 3)
    assert report.left_out[:2] == ("random_states_0.pkl", "scheduler.bin")
    assert_all_there(tmp_path / "out", model, optimizer)


def test_names_in_the_models_order_tell_whose_the_numbered_states_are(tmp_path: Path) -> None:
    model, optimizer = trained_elsewhere()
    folder = accelerate_folder(tmp_path / "state", model, optimizer, safe=True)
    refused = call("convert", folder, "--recipe", "bfloat16/exact", "--out", tmp_path / "out")
    assert refused.exit_code == 2 and "Give --names FILE" in refused.stderr
    (tmp_path / "names").write_text("\n".join(name for name, _ in model.named_parameters()))
    done = call(
        "convert", folder, "--recipe", "bfloat16/exact", "--out", tmp_path / "out", "--names", tmp_path / "names"
    )
    assert done.exit_code == 0, done.stderr
    assert_all_there(tmp_path / "out", model, optimizer)


def test_states_whose_shapes_differ_need_no_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    optimizer = adamw(model, named=False)
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    folder = tmp_path / "state"
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    assert ng.convert(folder, "bfloat16/exact", tmp_path / "out").origin == "torch.optim"
    found = tensors_of(tmp_path / "out")
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            assert torch.equal(found[f"optimizer.{name}.exp_avg"], optimizer.state[parameter]["exp_avg"])


def test_readings_of_another_storage_are_told_to_be_left_out(exact_run: Path, tmp_path: Path) -> None:
    same, other = (ng.convert(exact_run, f"bfloat16/{name}", tmp_path / name).left_out for name in ("exact", "word"))
    assert same == () and other == ("audit sums",)


def test_shards_are_refused_with_what_joins_them(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"")
    with pytest.raises(DataError, match=r"nor weights\. python -m torch\.distributed\.checkpoint\.format_utils"):
        ng.convert(tmp_path, "bfloat16/word", tmp_path / "out")


def test_nothing_in_a_file_is_run(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.zeros(2, 2)}, "optimizer": Trap(tmp_path / "sprung")}, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(pickle.dumps(Trap(tmp_path / "sprung"), protocol=2))
    (tmp_path / "c.safetensors").write_bytes(b"not one at all")
    for name in ("a.pt", "b.pt", "c.safetensors"):
        with pytest.raises(DataError, match="cannot be read") as refused:
            ng.convert(tmp_path / name, "bfloat16/word", tmp_path / "out")
        said = str(refused.value)
        # torch's own words tell how to turn the protection off.
        assert "weights_only" not in said and "trust" not in said and "still be loaded" not in said
        assert ("whose code is not run" in said) == (name != "c.safetensors")
    assert not (tmp_path / "sprung").exists() and not (tmp_path / "out").exists()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 440473133\n"
STAND_INS = {
    "a pointer": (POINTER, r"it is a pointer of git-LFS: .* Run git lfs pull in its folder\."),
    "a text": (b"Not found: try again later.\n" * 9, r"it is a text that begins with 'Not found: try again later\.'"),
    "a web page": ("<!doctype html>\n<title>é</title>".encode(), r"it is a text that begins with '<!doctype html>'"),
    "zeros": (bytes(70_000), r"it holds zeros\. Its download or copy did not end"),
    "nothing": (b"", r"it is empty\."),
    "noise": (
        bytes(range(255, 0, -1)) * 40,
        r"cannot be read: .* It must be a safetensors file, or tensors that torch",
    ),
    "half a zip": (b"PK\x03\x04" + bytes(300), r"cannot be read: "),
    "no file": (None, r"it does not exist\."),
}


@pytest.mark.parametrize("what", STAND_INS)
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize("indexed", [False, True])
def test_what_stands_in_place_of_weights_is_named(what: str, name: str, indexed: bool, tmp_path: Path) -> None:
    """By the conversion, and by the trainer: one line, that names the file."""
    content, said = STAND_INS[what]
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **SHAPE}))
    file = folder / (f"part-1.{name.rpartition('.')[2]}" if indexed else name)
    if indexed:
        index = {"weight_map": {"model.embed_tokens.weight": file.name}}
        (folder / f"{name}.index.json").write_text(json.dumps(index))
    elif content is None:
        return
    if content is not None:
        file.write_bytes(content)
    readers = (
        lambda: ng.convert(folder, "bfloat16/word", tmp_path / "out"),
        lambda: language_model.build(str(folder), seed=0),
    )
    for read in readers:
        with pytest.raises(DataError, match=rf"{re.escape(str(file))} cannot be read: ") as refused:
            read()
        assert re.search(said, str(refused.value)) and "\n" not in str(refused.value)
        assert "weights_only" not in str(refused.value)


@pytest.mark.parametrize(
    "part", ["../secret.bin", "/etc/secret.bin", "sub/../../secret.bin", "..\\secret.bin", "C:\\secret.bin"]
)
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_an_index_names_nothing_outside_its_folder(part: str, name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    torch.save({"w": torch.ones(2, 2)}, tmp_path / "secret.bin")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **SHAPE}))
    (folder / f"{name}.index.json").write_text(json.dumps({"weight_map": {"w": part}}))
    readers = (
        lambda: ng.convert(folder, "bfloat16/word", tmp_path / "out"),
        lambda: language_model.build(str(folder), seed=0),
    )
    for read in readers:
        with pytest.raises(DataError, match=r"index\.json names '.*secret\.bin', which is outside its folder"):
            read()
    for strange in ({"w": 3}, {}, []):
        (folder / f"{name}.index.json").write_text(json.dumps({"weight_map": strange}))
        for read in readers:
            with pytest.raises(DataError, match=r"index\.json (cannot be read|names no file)"):
                read()


def test_damaged_occupied_and_unsuitable_are_refused(exact_run: Path, tmp_path: Path) -> None:
    source = saved(tmp_path / "a.pt", *trained("bfloat16/word"))
    ng.convert(source, "bfloat16/word", tmp_path / "a")
    (keep := tmp_path / "keep.toml").write_text('recipe = "bfloat16/word"\nkeep = ["nothing"]\n')
    (alone := tmp_path / "alone").mkdir()
    orphan = exact_run / "checkpoints" / "step-00000006"
    for file in orphan.iterdir():
        (alone / file.name).write_bytes(file.read_bytes())
    before = sorted(tmp_path.rglob("*"))
    cases: list[tuple[tuple[Any, ...], type[NarrowgaugeError], str]] = [
        ((source, "bfloat16/exact", tmp_path / "a"), RecordError, "not empty"),
        ((source, "bfloat16/nothing", tmp_path / "b"), RecipeError, "no recipe part is named 'nothing'"),
        ((source, keep, tmp_path / "b"), RecipeError, "keep pattern 'nothing' matches no module of Checkpoint"),
        ((tmp_path / "none", "bfloat16/word", tmp_path / "b"), DataError, "does not exist"),
        ((alone, "bfloat16/word", tmp_path / "b"), RecordError, "cannot find the recipe of the checkpoints"),
        ((exact_run, "bfloat16/word", tmp_path / "b", source), DataError, "Leave --optimizer out"),
        ((source, "bfloat16/word", tmp_path / "b", source), DataError, "Give one of them"),
        ((tmp_path, "bfloat16/word", tmp_path / "b"), DataError, "neither a run nor weights"),
    ]
    for words, error, says in cases:
        with pytest.raises(error, match=says):
            ng.convert(*words)
    assert sorted(tmp_path.rglob("*")) == before
    tensors = next((tmp_path / "a").rglob("tensors.safetensors"))
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(content)
    with pytest.raises(RecordError, match="does not match its checksum"):
        ng.convert(tmp_path / "a", "bfloat16/exact", tmp_path / "b")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("at", [1, 2, 4, "write_tensors", "rename"])
def test_a_full_disk_leaves_nothing(at: int | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, count = saved(tmp_path / "a.pt", *trained("bfloat16/word")), 0

    def full(*_: Any) -> None:
        nonlocal count
        count += 1
        if at in (count, "write_tensors", "rename"):
            raise OSError(28, "No space left on device")

    name = at if isinstance(at, str) else "sync_file"
    monkeypatch.setattr(os if at == "rename" else folders, name, full)
    with pytest.raises(RecordError, match=r"disk is full|No space left"):
        ng.convert(source, "bfloat16/word", tmp_path / "deep" / "out")
    assert os.listdir(tmp_path) == ["a.pt"]


# ── the command ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_command_prints_the_report_and_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = saved(tmp_path / "mine.pt", *trained("bfloat16/exact"))
    done = call("convert", source, "--recipe", "bf16/word")
    assert done.exit_code == 0 and done.stderr == "", done.stderr
    title, others, heads, *rows = done.stdout.splitlines()
    assert others == "left out: lr, betas, eps, weight_decay of the optimizer"
    assert title == f"{tmp_path / 'mine-bfloat16-word'}: narrowgauge → bfloat16/word, step 3"
    assert heads.split()[0] == "kind" and [row.split()[0] for row in rows] == ["weight", *STATES]
    said = call("convert", "mine-bfloat16-word", "--recipe", "bfloat16/exact", "--out", "there", "--json")
    (found,) = json.loads(said.stdout)
    assert (found["origin"], found["recipe"], found["out"]) == ("bfloat16/word", "bfloat16/exact", "there")
    assert [row["exact_share"] for row in found["kept"]] == [1.0, 1.0, 1.0]
    kept = json.loads((tmp_path / "there" / "conversion.json").read_text())
    assert {key: kept[key] for key in found} == found
    again = call("convert", "there", "--recipe", "bfloat16/exact", "--out", "there")
    assert again.exit_code == 2 and again.stderr.startswith("RecordError: ") and again.stderr.count("\n") == 1


def test_a_safetensors_file_is_weights(tmp_path: Path) -> None:
    weights = {"a.weight": torch.randn(6, 6), "a.count": torch.tensor([3])}
    save_file(weights, tmp_path / "w.safetensors")
    report = ng.convert(tmp_path / "w.safetensors", "float32/float32", tmp_path / "a")
    assert report.kept[0].exact_share == 1.0
    file = tmp_path / "a" / "checkpoints" / "step-00000000" / "tensors.safetensors"
    assert_same_bits({k.removeprefix("model."): v for k, v in load_file(file).items() if k[:5] == "model"}, weights)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16, torch.uint32, torch.uint64])
def test_a_buffer_of_any_dtype_is_restored(dtype: torch.dtype, tmp_path: Path) -> None:
    model, fresh = nn.Linear(4, 4), nn.Linear(4, 4)
    for each, value in ((model, 1), (fresh, 0)):
        each.register_buffer("table", torch.full((3,), value, dtype=dtype))
    ng.convert(saved(tmp_path / "a.pt", model), "bfloat16/word", tmp_path / "out")
    ng.restore(tmp_path / "out", *ng.prepare(fresh, "bfloat16/word", compile=False))
    table = fresh.state_dict()["table"]
    assert (table.dtype, table.tolist()) == (dtype, [1, 1, 1])


def test_what_a_resume_takes_besides_is_named_where_it_is_left_out(tmp_path: Path) -> None:
    source = saved(tmp_path / "a.pt", *trained("float8-delayed/split"))
    ng.convert(source, "bfloat16/word", tmp_path / "out")
    left_out = json.loads((tmp_path / "out" / "conversion.json").read_text())["left_out"]
    assert any("matmul_step, amax_histories of the optimizer" in each for each in left_out)
