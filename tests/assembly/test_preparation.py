"""``prepare``: the one legal order, for plain modules and Hugging Face models, and a clear word
where it cannot be.
"""

import copy
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from equivalence.ways import llama
from narrowgauge.assembly.preparation import compute_scope, matrices_decay
from narrowgauge.errors import RecipeError
from narrowgauge.spec.parse import parse
from narrowgauge.spec.storages import STORAGES
from narrowgauge.transforms.scalify import scalify
from text.refusals import refused

TOKENS = torch.arange(16).reshape(2, 8)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        OrderedDict(inner=nn.Linear(6, 6), norm=nn.LayerNorm(6), head=nn.Linear(6, 3))
    )


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().float().clone() for name, p in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:Rounded")
@pytest.mark.parametrize(
    "recipe", [name if "/" in name else f"bfloat16/{name}" for name in STORAGES]
)
def test_tails_come_from_the_float32_weights(recipe):
    """As those of an optimizer that is given float32 weights, whose codes tests/optim judges."""
    model = llama()
    twin = llama()
    same_model, optimizer = ng.prepare(model, recipe)
    reference = ng.AdamW(twin.named_parameters(), storage=parse(recipe).storage.name)
    assert same_model is model
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert p.dtype is q.dtype and torch.equal(optimizer.stored(p), reference.stored(q))
        for name in ("exp_avg", "exp_avg_sq"):
            assert not optimizer.stored(p, name).any()


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [("float32", "float32"), ("bfloat16/word", "bfloat16"), ("bf16-mixed", "bfloat16"), ("fp16/stochastic", "float16"),
     ("fp16-mixed", "float16")],
)  # fmt: skip
def test_matmuls_run_in_the_recipes_compute(recipe, dtype):
    model, _ = ng.prepare(llama(), recipe)
    seen = []
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *a: seen.append(a[2].dtype))
    with compute_scope(parse(recipe), TOKENS.device):
        logits = model(input_ids=TOKENS).logits
    assert [logits.dtype, *seen] == [getattr(torch, dtype)] * 2


def test_a_prepared_model_is_traced_whole():
    model, _ = ng.prepare(llama(tie_word_embeddings=False), "bfloat16/word")
    traced = torch.compile(model, backend="eager", fullgraph=True)
    eager, traced_logits = (
        candidate(input_ids=TOKENS).logits.detach() for candidate in (model, traced)
    )
    assert torch.equal(eager, traced_logits)
    assert model.eval().generate(TOKENS[:, :3], max_new_tokens=2, pad_token_id=0).shape == (2, 5)


def test_all_parameters_are_decayed_or_those_that_are_chosen():
    _, optimizer = ng.prepare(net(), "bfloat16/word", weight_decay=0.3)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3]
    _, optimizer = ng.prepare(net(), "bfloat16/word", weight_decay=0.3, optimizer=matrices_decay)
    assert len(optimizer.param_groups) == 2
    for group in optimizer.param_groups:
        assert {p.ndim >= 2 for p in group["params"]} == {group["weight_decay"] == 0.3}


def test_any_optimizer_takes_a_recipe_with_its_own_defaults_and_options_per_parameter():
    def head_apart(named, **options):
        head = [pair for pair in named if pair[0].startswith("head")]
        rest = [pair for pair in named if not pair[0].startswith("head")]
        return ng.SGD([{"params": rest}, {"params": head, "lr": 0.5}], **options)

    model, optimizer = ng.prepare(net(), "bfloat16/word", optimizer=head_apart, momentum=0.9)
    assert type(optimizer) is ng.SGD and optimizer.reduction is None
    rest, head = optimizer.param_groups
    assert head["params"] == list(model.head.parameters())
    assert head["param_names"] == ["head.weight", "head.bias"]
    assert (rest["lr"], head["lr"]) == (torch.optim.SGD(net().parameters()).defaults["lr"], 0.5)
    assert (rest["momentum"], head["momentum"]) == (0.9, 0.9)
    with pytest.raises(TypeError, match="multiple values for keyword argument 'storage'"):
        ng.prepare(net(), "bfloat16/word", storage="exact")


def test_what_is_frozen_or_left_out_is_cut_and_left_alone():
    def weights(named, **options):
        return ng.SGD([pair for pair in named if "weight" in pair[0]], **options)

    model = net()
    model.head.requires_grad_(False)
    model, optimizer = ng.prepare(model, "bfloat16/word", optimizer=weights, lr=0.1)
    assert optimizer.param_groups[0]["param_names"] == ["inner.weight", "norm.weight"]
    model(torch.ones(2, 6, dtype=torch.bfloat16)).float().square().sum().backward()
    optimizer.step()
    for name, value in values(model).items():
        is_cut = torch.equal(value, values(net())[name].bfloat16().float())
        assert is_cut != (name in ("inner.weight", "norm.weight"))


def test_weights_on_one_memory_are_refused_before_they_are_rounded_apart():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.data = model[0].weight.data
    with refused("weights on one memory"):
        ng.prepare(model, "bfloat16/word")
    assert model[1].weight.data_ptr() == model[0].weight.data_ptr()


def test_batch_norm_computes_with_the_models_format():
    model, _ = ng.prepare(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), compile=False)
    y = model(torch.randn(4, 8).bfloat16())
    assert y.dtype is model[1].running_mean.dtype is torch.bfloat16


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": -1.0},
        {"optimizer": ng.Muon, "recipe": "float8-row/compact"},
        {"recipe": "float32/word"},
    ],
)
def test_a_refused_model_is_unchanged(wrong):
    model = net()
    before = values(model)
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(RecipeError):
        ng.prepare(model, **{"recipe": "float8-row/word", **wrong})
    assert [type(module) for module in model.modules()] == kinds
    for name, p in model.named_parameters():
        assert p.dtype is torch.float32 and torch.equal(p, before[name])


@pytest.mark.parametrize("recipe", ["float8-tensor/word", "int8-outlier-codes/word"])
def test_the_state_of_a_prepared_model_is_the_plain_models(recipe):
    """What others load has no name that they do not know."""
    assert list(ng.prepare(net(), recipe)[0].state_dict()) == list(net().state_dict())


VERBS = {
    "swap_linears": lambda model: ng.swap_linears(model, "float8-row"),
    "quantize_for_inference": ng.quantize_for_inference,
    "scalify": scalify,
    "reduce_gradients_with": ng.reduce_gradients_with,
    "cast_parameters": lambda model: ng.cast_parameters(model, torch.bfloat16),
    "prepare": lambda model: ng.prepare(model, "float8-row/word"),
    "prepare exact sums": lambda model: ng.prepare(model, "bfloat16/word/reproducible"),
    "prepare scalify": lambda model: ng.prepare(model, "scalify/word"),
}
"""The verbs that change a model in place."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("first", "second", "is_refused"),
    [
        ("swap_linears", "swap_linears", False),
        ("quantize_for_inference", "quantize_for_inference", True),
        ("scalify", "scalify", True),
        ("reduce_gradients_with", "reduce_gradients_with", True),
        ("cast_parameters", "cast_parameters", False),
        ("prepare", "prepare", False),
        ("prepare exact sums", "prepare exact sums", True),
        ("prepare scalify", "prepare scalify", True),
        ("scalify", "prepare scalify", True),
        ("quantize_for_inference", "scalify", True),
        ("reduce_gradients_with", "prepare exact sums", True),
    ],
)
def test_a_second_verb_changes_nothing_or_is_refused_in_one_line(first, second, is_refused):
    model = net()
    VERBS[first](model)
    x = torch.ones(2, 6, dtype=next(model.parameters()).dtype)
    before = copy.deepcopy(model.state_dict())
    kinds = [type(module) for module in model.modules()]
    model.eval()  # an exact sum refuses passes in training outside its block
    y = model(x)
    if is_refused:
        with refused("a second verb"):
            VERBS[second](model)
    else:
        VERBS[second](model)
    assert [type(module) for module in model.modules()] == kinds
    assert torch.equal(model(x), y)
    for name, tensor in model.state_dict().items():
        assert tensor.dtype is before[name].dtype and torch.equal(tensor, before[name])
