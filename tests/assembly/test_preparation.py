"""``prepare``: the one legal order, for plain modules and Hugging Face models, and a clear word where it cannot be."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import narrowgauge as ng
from narrowgauge.assembly import preparation
from narrowgauge.matmul.scopes import compute_scope
from narrowgauge.matmul.swapping import linears_of
from narrowgauge.spec.notation import parse, parse_table, representative_names
from narrowgauge.spec.recipes import Override, Recipe
from narrowgauge.spec.storages import STORAGES
from narrowgauge.spec.sums import REDUCTIONS

RECIPES = representative_names()


class Block(nn.Module):
    """A matrix, a vector and a head, with a keyword argument and a tuple as result."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor, *, scale: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        y = self.norm(self.inner(x) * scale)
        return y, {"again": y}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = Block()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y, more = self.block(x, scale=torch.ones((), dtype=x.dtype))
        logits: Tensor = self.head(y + more["again"])
        return logits


def tiny_llama(*, tied: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=tied,
        )
    )  # fmt: skip


def tokens() -> Tensor:
    return torch.arange(16).reshape(2, 8) % 40


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().float().clone() for name, p in model.named_parameters()}


def same(one: Tensor, other: Tensor) -> bool:
    """Equal dtype, shape and values, NaN like NaN."""
    return one.dtype is other.dtype and torch.equal(torch.nan_to_num(one, nan=7.0), torch.nan_to_num(other, nan=7.0))


# Unit scaling draws weights of its own, and only for models whose architecture it knows.
@pytest.mark.parametrize("recipe", [name for name in RECIPES if parse(name).compute.transform != "unit"])
@pytest.mark.parametrize("make", [Net, tiny_llama], ids=["module", "llama"])
def test_tails_come_from_the_float32_weights(recipe: str, make: Any) -> None:
    model = make()
    before = values(model)
    same_model, optimizer = ng.prepare(model, recipe)
    storage = parse(recipe).storage
    assert same_model is model
    for name, p in model.named_parameters():
        stored = optimizer.stored(p)
        row = STORAGES[storage.vectors] if storage.vectors and p.ndim < 2 else storage
        assert p.dtype is getattr(torch, row.visible)
        # Half a unit of the last place that is kept; a window's and float16's own spacing ends somewhere.
        each = row.weight.mantissa_bits + 1
        kept = each * row.weight.parts - 1
        smallest = 2.0 ** -(22 if row.weight.parts > 1 else 18) if row.weight.scaled else 2.0**-100
        if row.visible == "float16":
            smallest = 2.0**-38 if row.beside and row.weight.parts == 1 else 2.0**-25
        error = (stored - before[name]).abs()
        assert (error <= (before[name].abs() * 2.0 ** -(kept + 1)).clamp(min=smallest)).all()
        assert kept < 23 or row.visible == "float16" or same(stored, before[name].to(stored.dtype))
        seen = {"float16": 2.0**-11, "float32": 0.0}.get(row.visible, 2.0**-each if row.weight.scaled else 2.0**-8)
        least = 2.0**-18 if row.weight.scaled else 2.0**-25
        assert (p.detach().float() - stored).abs().le((seen * stored.abs()).clamp(min=least)).all()
        assert not optimizer.stored(p, "exp_avg").any() and not optimizer.stored(p, "exp_avg_sq").any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_learns_a_tiny_llama(recipe: str) -> None:
    model, optimizer = ng.prepare(tiny_llama(), recipe, lr=0.5 if parse(recipe).compute.transform == "unit" else 1e-2)
    losses = []
    for _ in range(8):
        loss = model(input_ids=tokens(), labels=tokens()).loss
        (optimizer.loss_scaler.scale(loss) if optimizer.loss_scaler else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [("float32", "float32"), ("bfloat16/word", "bfloat16"), ("bf16-mixed", "bfloat16"), ("fp16-throughout", "float16"),
     ("fp16-mixed", "float16")],
)  # fmt: skip
def test_matmuls_run_in_the_recipes_compute(recipe: str, dtype: str) -> None:
    model, _ = ng.prepare(tiny_llama(), recipe)
    seen: list[torch.dtype] = []
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *a: seen.append(a[2].dtype))
    logits = model(input_ids=tokens()).logits
    assert [logits.dtype, *seen] == [getattr(torch, dtype)] * 2
    assert not torch.is_autocast_enabled("cpu")


def test_autocast_leaves_weights_gradients_and_norms_wide() -> None:
    model, _ = ng.prepare(tiny_llama(), "bfloat16/float32")
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters() if p.grad is not None}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_deep_copy_under_autocast_computes_with_its_own_weights() -> None:
    model, _ = ng.prepare(Net(), "bfloat16/float32")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    x = torch.ones(2, 6)
    assert not model(x).any()
    assert twin(x).any() and twin(x).dtype is torch.bfloat16


def test_a_pickled_model_under_autocast_computes_as_before() -> None:
    model, _ = ng.prepare(Net(), "bfloat16/float32")
    again = pickle.loads(pickle.dumps(model))
    x = torch.ones(2, 6)
    assert same(again(x).detach(), model(x).detach()) and again(x).dtype is torch.bfloat16


@pytest.mark.parametrize("storage", ["float32", "word"])
def test_a_prepared_model_is_traced_whole(storage: str) -> None:
    recipe = Recipe(parse("bfloat16/word").compute, STORAGES[storage], keep=("lm_head", "model.layers.*.self_attn"))
    model, _ = ng.prepare(tiny_llama(tied=False), recipe)
    traced = torch.compile(model, backend="eager", fullgraph=True)
    one, other = (each(input_ids=tokens()).logits.detach() for each in (model, traced))
    assert same(one, other)
    assert model.eval().generate(tokens()[:, :3], max_new_tokens=2, pad_token_id=0).shape == (2, 5)


@pytest.mark.parametrize("keep", ["head", "block", "block.inner", "*.norm", "hea*"])
def test_kept_modules_stay_float32_inside(keep: str) -> None:
    recipe = Recipe(parse("bfloat16/word").compute, STORAGES["word"], keep=(keep,))
    model = Net()
    before = values(model)
    model, optimizer = ng.prepare(model, recipe)
    inside: dict[str, torch.dtype] = {}
    for name in ("block.inner", "block.norm", "head"):
        model.get_submodule(name).register_forward_pre_hook(lambda _, a, n=name: inside.update({n: a[0].dtype}))
    assert model(torch.ones(2, 6, dtype=torch.bfloat16)).dtype is torch.bfloat16
    for name, p in model.named_parameters():
        kept = recipe.keeps(name)
        assert p.dtype is (torch.float32 if kept else torch.bfloat16)
        assert optimizer.stored(p).dtype is torch.float32
        if kept:
            assert same(p.detach(), before[name]) and same(optimizer.stored(p), before[name])
    assert any(recipe.keeps(name) for name in before)
    model(torch.ones(2, 6, dtype=torch.bfloat16)).float().sum().backward()
    optimizer.step()
    for name, dtype in inside.items():
        assert (dtype is torch.float32) == recipe.keeps(name)


def test_kept_modules_stay_float32_under_autocast_too() -> None:
    recipe = Recipe(parse("bfloat16/float32").compute, STORAGES["float32"], keep=("head",))
    model, _ = ng.prepare(Net(), recipe)
    seen: list[torch.dtype] = []
    model.block.inner.register_forward_hook(lambda *a: seen.append(a[2].dtype))
    assert model(torch.ones(2, 6)).dtype is torch.float32
    assert seen == [torch.bfloat16]


def test_kept_modules_of_narrow_models_give_the_computes_format_back() -> None:
    """A compute of float16 over bfloat16 weights: what flows between the layers is float16."""
    model, _ = ng.prepare(Net(), Recipe(parse("float16/word").compute, STORAGES["word"], keep=("block",)))
    assert model.block.inner.weight.dtype is torch.float32 and model.head.weight.dtype is torch.bfloat16
    assert model.block(torch.ones(2, 6), scale=torch.ones(()))[0].dtype is torch.float16
    assert model(torch.ones(2, 6, dtype=torch.bfloat16)).dtype is torch.float16


def test_kept_attention_of_a_llama_runs() -> None:
    recipe = Recipe(parse("bfloat16/word").compute, STORAGES["word"], keep=("model.layers.*.self_attn", "lm_head"))
    model, optimizer = ng.prepare(tiny_llama(tied=False), recipe)
    loss = model(input_ids=tokens(), labels=tokens()).loss
    loss.backward()
    optimizer.step()
    assert model.lm_head.weight.dtype is torch.float32 and model.model.embed_tokens.weight.dtype is torch.bfloat16
    assert torch.isfinite(loss)


def test_overrides_choose_another_storage() -> None:
    word = parse("bfloat16/word")
    recipe = Recipe(word.compute, word.storage, overrides=(Override("head.*", STORAGES["exact"]),))
    model, optimizer = ng.prepare(Net(), recipe)
    rows = {n: g["storage"] for g in optimizer.param_groups for n in g["param_names"]}
    assert rows["head.weight"] == "exact" and rows["block.inner.weight"] == "word"
    assert same(optimizer.stored(model.head.weight), Net().head.weight.detach())


def test_a_toml_recipe_says_the_same(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'recipe = "bf16/word"\nkeep = ["block.norm"]\n[[override]]\npattern = "head.*"\nstorage = "split"\n'
    )
    model, optimizer = ng.prepare(Net(), file)
    rows = {n: g["storage"] for g in optimizer.param_groups for n in g["param_names"]}
    assert rows == {
        "block.inner.weight": "word", "block.inner.bias": "word", "block.norm.weight": "float32",
        "block.norm.bias": "float32", "head.weight": "split", "head.bias": "split",
    }  # fmt: skip
    assert model.block.norm.weight.dtype is torch.float32


@pytest.mark.parametrize("recipe", ["float32", "bfloat16/float32", "bfloat16/word", "float8-row/word"])
def test_the_defaults_are_those_of_torchs_adamw(recipe: str) -> None:
    theirs = torch.optim.AdamW(Net().parameters()).param_groups
    _, optimizer = ng.prepare(Net(), recipe)
    (group,), (wanted,) = optimizer.param_groups, theirs
    assert optimizer.max_grad_norm is None
    for name in ("lr", "betas", "eps", "weight_decay"):
        assert group[name] == wanted[name], name


def test_a_float32_recipe_takes_the_steps_of_torchs_adamw() -> None:
    """Weights decay, gradients are large and none is clipped: other betas, decay or clipping would part in the first digits."""

    def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
        for step in range(20):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)) * 10
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    model, other = Net(), Net()
    other.load_state_dict(model.state_dict())
    theirs = trained(other, torch.optim.AdamW(other.parameters(), lr=1e-2, weight_decay=0.5))
    ours = trained(*ng.prepare(model, "float32/float32", lr=1e-2, weight_decay=0.5))
    assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_all_parameters_are_decayed_or_those_that_are_chosen() -> None:
    _, optimizer = ng.prepare(Net(), "bfloat16/word", weight_decay=0.3)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3]
    _, optimizer = ng.prepare(Net(), "bfloat16/word", weight_decay=0.3, decays=lambda name, p: p.ndim >= 2)
    assert len(optimizer.param_groups) == 2
    for group in optimizer.param_groups:
        assert {p.ndim >= 2 for p in group["params"]} == {group["weight_decay"] == 0.3}


def test_any_optimizer_takes_a_recipe_with_its_own_defaults_and_options_per_parameter() -> None:
    _, optimizer = ng.prepare(Net(), "bfloat16/word", optimizer=ng.SGD, momentum=0.9, options_of=of_the_head)
    assert type(optimizer) is ng.SGD and optimizer.reduction is None
    found = {name: group for group in optimizer.param_groups for name in group["param_names"]}
    plain = torch.optim.SGD(Net().parameters()).param_groups[0]
    assert {name: group["lr"] for name, group in found.items() if name.startswith("block.inner")} == dict.fromkeys(
        ("block.inner.weight", "block.inner.bias"), plain["lr"]
    )
    assert found["head.weight"]["lr"] == 0.5 and found["head.weight"]["momentum"] == 0.9
    assert {group["weight_decay"] for group in optimizer.param_groups} == {plain["weight_decay"]}
    with pytest.raises(ng.RecipeError, match="storage 'exact' was requested beside recipe"):
        ng.prepare(Net(), "bfloat16/word", storage="exact")


@pytest.mark.parametrize("chosen", [{"rule": "sgd"}, {"optimizer": ng.SGD}], ids=["by name", "by class"])
def test_an_option_that_an_optimizer_lacks_is_refused_before_the_model_is_changed(chosen: dict[str, Any]) -> None:
    net = Net()
    with pytest.raises(ng.RecipeError, match=r"betas = .* was requested of SGD, which has no such option"):
        ng.prepare(net, "bfloat16/word", betas=(0.9, 0.9), **chosen)
    assert {p.dtype for p in net.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"storage": "exact"}, "options_of gave a storage for 'block.inner.weight'"),
        ({"params": []}, "options_of gave params"),
        ({"learning_rate": 0.1}, "options_of gave 'learning_rate' .* AdamW does not have"),
        (None, "options_of gave None .* must give a dict"),
    ],
)
def test_options_of_a_parameter_that_nothing_would_read_are_refused(options: Any, said: str) -> None:
    with pytest.raises(ng.RecipeError, match=said):
        ng.prepare(Net(), "bfloat16/word", options_of=lambda name: options)


def test_options_of_parameters_are_grouped_where_they_are_equal() -> None:
    _, optimizer = ng.prepare(Net(), "bfloat16/word", options_of=lambda name: {"betas": [0.9, 0.95]})
    assert [group["betas"] for group in optimizer.param_groups] == [[0.9, 0.95]]


class Named(ng.SGD):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)


def test_whatever_makes_an_optimizer_of_ours_is_taken_and_nothing_else() -> None:
    _, optimizer = ng.prepare(Net(), "bfloat16/word", optimizer=Named)
    assert type(optimizer) is Named and optimizer.param_groups[0]["weight_decay"] == 0
    _, made = ng.prepare(Net(), "bfloat16/word", optimizer=lambda ps, **k: ng.AdamW(ps, **k), lr=0.5)
    assert (made.param_groups[0]["lr"], made.param_groups[0]["weight_decay"]) == (0.5, 0.01)
    wrong: Any
    for wrong in (torch.optim.AdamW, made, lambda ps, **k: None):
        with pytest.raises(ng.RecipeError, match="no optimizer of narrowgauge"):
            ng.prepare(Net(), "bfloat16/word", optimizer=wrong)


def of_the_head(name: str) -> dict[str, float]:
    return {"lr": 0.5} if name.startswith("head") else {}


@pytest.mark.parametrize(
    ("recipe", "beta2", "said"),
    [
        ("bfloat16/naive", 0.9983, "beta2 = 0.9983 .* 'naive' .* 7 mantissa bits .* storage 'word'"),
        ("bfloat16/kahan", 0.9983, "'kahan'"),
        ("bfloat16/stochastic", 0.9983, "'stochastic'"),
        ("unit/word", 0.95, "multiplies the learning rate .* by a factor"),
    ],
)
def test_what_differs_from_torch_is_said_once(
    recipe: str, beta2: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "_SAID", set())
    with pytest.warns(preparation.DifferenceNotice, match=said):
        ng.prepare(tiny_llama(), recipe, betas=(0.9, beta2))
    with warnings.catch_warnings():
        warnings.simplefilter("error", preparation.DifferenceNotice)
        ng.prepare(tiny_llama(), recipe, betas=(0.9, beta2))  # once
        for other in ("float32", "bfloat16/word", "bfloat16/collage-plus", "bfloat16/states8"):
            ng.prepare(Net(), other)
        ng.prepare(Net(), "bfloat16/naive", betas=(0.9, 0.95))


def keeping(*patterns: str) -> Recipe:
    return Recipe(parse("bfloat16/word").compute, STORAGES["word"], keep=patterns)


def overriding(pattern: str, storage: str) -> Recipe:
    return Recipe(parse("bfloat16/word").compute, STORAGES["word"], overrides=(Override(pattern, STORAGES[storage]),))


WRONG = [
    (Net, "bfloat16/wrod", "'wrod'", "'word'"),
    (lambda: Net().double(), "bfloat16/word", "'block.inner.weight' of Net is float64", "model.float()"),
    (lambda: Net().half(), "bfloat16/word", "'block.inner.weight' of Net is float16", "model.float()"),
    (lambda: Net().bfloat16(), "float32", "'block.inner.weight' of Net is bfloat16", "model.float()"),
    (Net, keeping("heed"), "keep pattern 'heed' matches no module of Net", "'block'"),
    (Net, overriding("heed.*", "exact"), "override pattern 'heed.*' matches no parameter of Net", "'head.bias'"),
    (Net, overriding("head.*", "float32"), "override 'head.*' stores float32", "keep"),
    (nn.ReLU, "bfloat16/word", "ReLU without parameters", ""),
    (lambda: Net().requires_grad_(False), "bfloat16/word", "Net whose 6 parameters are all frozen", "requires_grad_"),
    (lambda: WithStatistics(nn.BatchNorm1d(3)), "bfloat16/word", "'norm', a BatchNorm1d", 'keep = ["norm"]'),
    (lambda: WithStatistics(nn.BatchNorm1d(3)).bfloat16(), keeping("norm"), "statistics are bfloat16", "model.float()"),
    (
        lambda: nn.Sequential(nn.Embedding(4, 3, sparse=True)),
        "float32",
        "'0.weight' of Sequential are sparse",
        "sparse=False",
    ),
    (tiny_llama, keeping("lm_head"), "'model.embed_tokens.weight' and 'lm_head.weight'", "Keep both"),
]


@pytest.mark.parametrize(("recipe", "autocast"), [("float32/word", None), ("tf32", None), ("fp8-row/float32", "bfloat16"),
                                                  ("int8-row/word", None), ("fp16/float32", "float16")])  # fmt: skip
def test_only_float32_weights_are_cast_and_to_the_computes_own_dtype(recipe: str, autocast: str | None) -> None:
    scope = compute_scope(parse(recipe), torch.device("cpu"))
    assert (scope.fast_dtype if isinstance(scope, torch.autocast) else None) is (autocast and getattr(torch, autocast))


@pytest.mark.parametrize(("make", "recipe", "found", "advice"), WRONG)
def test_errors_say_what_where_and_what_to_do(make: Any, recipe: Any, found: str, advice: str) -> None:
    model = make()
    dtypes = [p.dtype for p in model.parameters()]
    with pytest.raises(ng.errors.RecipeError) as caught:
        ng.prepare(model, recipe)
    assert found in str(caught.value) and advice in (caught.value.advice or str(caught.value))
    assert dtypes == [p.dtype for p in model.parameters()], "nothing is changed"


def test_a_parameter_that_was_replaced_after_prepare_is_noticed() -> None:
    """The optimizer would step the old one, which never gets a gradient again; torch's does so without a word."""
    model, optimizer = ng.prepare(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), "float32")
    model[0].weight = nn.Parameter(torch.ones(4, 3))
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(ng.errors.RecipeError, match=r"'0\.weight' of the optimizer has no gradient and never gets one"):
        optimizer.step()
    model, optimizer = ng.prepare(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), "float32")
    del model[1]  # what nothing replaces is only unused
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def test_tied_embeddings_have_one_state() -> None:
    model, optimizer = ng.prepare(tiny_llama(), "bfloat16/word")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    members = [p for group in optimizer.param_groups for p in group["params"]]
    assert sum(p is model.lm_head.weight for p in members) == 1 and len(members) == len(list(model.parameters()))
    model, _ = ng.prepare(tiny_llama(), keeping("lm_head", "model.embed_tokens"))
    assert model.lm_head.weight.dtype is torch.float32
    assert torch.isfinite(model(input_ids=tokens(), labels=tokens()).loss)


def test_frozen_parameters_are_cut_and_left_alone() -> None:
    model = Net()
    model.head.requires_grad_(False)
    expected = model.head.weight.detach().bfloat16()
    model, optimizer = ng.prepare(model, "bfloat16/word", lr=0.1)
    model(torch.ones(2, 6, dtype=torch.bfloat16)).float().sum().backward()
    optimizer.step()
    assert same(model.head.weight.detach(), expected)
    assert all(p.requires_grad for group in optimizer.param_groups for p in group["params"])


def test_a_bfloat16_model_is_taken_as_it_is() -> None:
    model = Net().bfloat16()
    before = values(model)
    model, optimizer = ng.prepare(model, keeping("block.norm"))
    for name, p in model.named_parameters():
        assert same(optimizer.stored(p), before[name])
    assert model.block.norm.weight.dtype is torch.float32
    assert model(torch.ones(2, 6, dtype=torch.bfloat16)).dtype is torch.bfloat16


class WithStatistics(nn.Module):
    """A batch norm between two layers, and its statistics in float32."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv1d(2, 3, 1), norm, nn.Conv1d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.norm(self.first(x)))
        return y


def test_a_kept_batch_norm_runs_and_its_buffers_keep_their_format() -> None:
    model, optimizer = ng.prepare(WithStatistics(nn.BatchNorm1d(3)), keeping("norm"))
    x = torch.randn(4, 2, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert model(x).dtype is torch.bfloat16
    model(x).float().square().sum().backward()
    optimizer.step()
    assert model.eval()(x).dtype is torch.bfloat16
    assert model.norm.running_mean.dtype is torch.float32 and model.norm.running_mean.any()
    assert model.norm.num_batches_tracked.dtype is torch.int64


NORMS = [
    lambda: nn.BatchNorm1d(3, track_running_stats=False),
    lambda: nn.BatchNorm1d(3, affine=False),
    lambda: nn.BatchNorm1d(3).bfloat16(),
    lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
    lambda: nn.GroupNorm(3, 3),
    lambda: nn.LayerNorm(5),
]


@pytest.mark.parametrize("norm", NORMS)
def test_norms_that_can_compute_in_bfloat16_are_taken(norm: Any) -> None:
    model, _ = ng.prepare(WithStatistics(norm()), "bfloat16/word")
    x = torch.ones(4, 2, 5, dtype=torch.bfloat16)
    assert model(x).dtype is torch.bfloat16 and model.eval()(x).dtype is torch.bfloat16


@pytest.mark.parametrize("recipe", ["float32", "bfloat16/float32"])
def test_float32_weights_suit_float32_statistics(recipe: str) -> None:
    model, _ = ng.prepare(WithStatistics(nn.BatchNorm1d(3)), recipe)
    assert torch.isfinite(model(torch.ones(4, 2, 5))).all()


def doubled(model: nn.Module) -> Any:
    """A forward of an object's own, as adapters and offloaders put there."""
    inner = type(model).forward.__get__(model)
    return lambda *given, **named: 2 * inner(*given, **named)


def test_a_forward_of_the_objects_own_is_kept_under_autocast() -> None:
    model = Net()
    model.forward = doubled(model)
    model, _ = ng.prepare(model, "bfloat16/float32")
    x = torch.ones(2, 6)
    plain, _ = ng.prepare(Net(), "bfloat16/float32")
    assert same(model(x).detach(), 2 * plain(x).detach()) and model(x).dtype is torch.bfloat16


def test_a_kept_modules_own_forward_is_kept() -> None:
    outputs = []
    for recipe in (Recipe(parse("bfloat16/float32").compute, STORAGES["float32"], keep=("head",)), keeping("head")):
        for own in (False, True):
            model = Net()
            if own:
                model.head.forward = doubled(model.head)
            model, _ = ng.prepare(model, recipe)
            x = torch.ones(2, 6, dtype=next(model.parameters()).dtype)
            outputs.append(model(x).detach())
    assert same(outputs[1], 2 * outputs[0]) and same(outputs[3], 2 * outputs[2])


class Calls:
    """A forward that copies and pickles go with: it knows its module by reference."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, x: Tensor) -> Tensor:
        return -type(self.module).forward(self.module, x)


def test_copies_pickles_and_traces_take_the_objects_own_forward_along() -> None:
    model = Net()
    model.forward = Calls(model)
    model, _ = ng.prepare(model, "bfloat16/float32")
    x = torch.ones(2, 6)
    expected = -ng.prepare(Net(), "bfloat16/float32")[0](x).detach()
    twins = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.compile(copy.deepcopy(model), backend="eager"),
    ]
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert not model(x).any()
    for twin in twins:
        assert same(twin(x).detach(), expected)


def test_preparing_twice_leaves_one_scope() -> None:
    model, _ = ng.prepare(Net(), "bfloat16/float32")
    model, _ = ng.prepare(model, "bfloat16/float32")
    assert model.forward.own is None


def test_anybodys_loop_continues_bit_for_bit() -> None:
    def run(steps: range, saved: dict[str, Any] | None = None) -> tuple[dict[str, Any], list[float]]:
        model, optimizer = ng.prepare(Net(), "bfloat16/word", lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k))
        parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
        for name, part in parts.items():
            if saved is not None:
                part.load_state_dict(saved[name])
        losses = []
        for k in steps:
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(k)).bfloat16()
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return copy.deepcopy({name: part.state_dict() for name, part in parts.items()}), losses

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole, losses = run(range(8))
        first, early = run(range(4))
        second, late = run(range(4, 8), first)
    assert early + late == losses
    for name, value in whole["model"].items():
        assert same(second["model"][name], value)
    for entry, other in zip(whole["optimizer"]["state"].values(), second["optimizer"]["state"].values(), strict=True):
        assert all(same(other[key], value) for key, value in entry.items())


def test_unit_scaling_redraws_the_weights_and_shares_out_the_rate() -> None:
    model, optimizer = ng.prepare(tiny_llama(), "unit/word", lr=0.5, weight_decay=0.1)
    assert model.model.layers[0].mlp.up_proj.weight.float().std().item() == pytest.approx(1.0, abs=0.15)
    factors = {group["lr_factor"] for group in optimizer.param_groups}
    assert len(factors) > 1 and max(factors) <= 1.0
    for group in optimizer.param_groups:
        assert group["lr"] == pytest.approx(0.5 * group["lr_factor"])
        # What decays a weight in a step is what 0.1 at a rate of 1e-3 would.
        assert group["weight_decay"] == 0.0 or group["lr"] * group["weight_decay"] == pytest.approx(1e-4)


def test_prepare_narrows_a_mixture_s_experts_too() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, num_local_experts=4,
        )
    )  # fmt: skip
    table = {"recipe": "int8-row/word", "override": [{"pattern": "*.experts.down_proj", "compute": "mxfp8"}]}
    _, optimizer = ng.prepare(model, parse_table(table), lr=1e-2)
    linears = linears_of(model)
    assert linears is not None
    # Where PyTorch's own bfloat16 layers are slow, those that are not narrowed are ours too.
    rows = {
        ".".join(name.split(".")[-2:]): x.compute.name
        for name, x in linears.layers.items()
        if x.compute.name != "bfloat16"
    }
    assert rows == {
        **{f"self_attn.{name}_proj": "int8-row" for name in "qkvo"},
        "experts.gate_up_proj": "int8-row",
        "experts.down_proj": "mxfp8",
    }
    tokens = torch.arange(32).view(2, 16)
    losses = []
    for _ in range(8):
        loss = model(input_ids=tokens, labels=tokens).loss.float()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5 and linears.step == 8


def test_a_reduction_that_nothing_applies_is_refused() -> None:
    mine = dataclasses.replace(REDUCTIONS["native"], name="mine")
    recipe = dataclasses.replace(parse("bfloat16/word"), reduction=mine)
    model = nn.Linear(4, 4)
    with pytest.raises(ng.errors.RecipeError, match="by 'mine', which is not implemented"):
        ng.prepare(model, recipe, lr=1e-3)
    assert model.weight.dtype is torch.float32
