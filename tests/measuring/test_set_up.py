"""Every kind of the static check reads what it says in a set-up that is wrong, and nothing in one
that is right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng
from narrowgauge.measuring.kinds import KINDS
from narrowgauge.measuring.reading import Readings
from narrowgauge.measuring.set_up import set_up_of, spread

pytestmark = pytest.mark.filterwarnings("ignore")

TOKENS = torch.randint(0, 32, (6, 9), generator=torch.Generator().manual_seed(0))


def language_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Embedding(32, 16), nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32)
    )


def loss_of(model: nn.Module) -> Tensor:
    logits = model(TOKENS[:, :-1])
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), TOKENS[:, 1:].flatten())


def flat(model: nn.Module) -> nn.Parameter:
    return nn.Parameter(torch.cat([p.detach().flatten() for p in model.parameters()]))


def torch_adamw(
    dtype: torch.dtype = torch.bfloat16, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = language_model().to(dtype)
    return model, torch.optim.AdamW(model.parameters(), **{"lr": 1e-3, **options})


def whats(check: Readings) -> list[str]:
    return [reading.what for reading in check]


class Rotated(nn.Module):
    """A weight beside rotary frequencies, a mask, small integers and a batch norm's statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.randn(4, 4)), nn.BatchNorm1d(4)
        self.norm.running_mean = torch.randn(4)
        self.register_buffer("inv_freq", 5e5 ** (-torch.arange(32) / 32), persistent=False)
        self.register_buffer("mask", torch.full((4, 4), torch.finfo(torch.bfloat16).min).triu(1))
        self.register_buffer("position", torch.arange(256.0))


def check_rotated(cast: Callable[[nn.Module], nn.Module]) -> Readings:
    torch.manual_seed(0)
    model = cast(Rotated())
    return ng.check(model, ng.AdamW(model.parameters(), storage="word"))


# ── every kind ────────────────────────────────────────────────────────────────────────────────────


def nonfinite_weights() -> Readings:
    model, optimizer = torch_adamw(torch.float32)
    model[1].weight.data[0, 0], model[4].weight.data[0, 0] = float("nan"), float("-inf")
    mask = nn.Parameter(torch.full((2, 2), float("-inf")), requires_grad=False)
    model[3].register_parameter("mask", mask)
    check = ng.check(model, optimizer)
    assert [r.value for r in check] == [2]
    return check


def rounded_buffers() -> Readings:
    check = check_rotated(lambda model: model.bfloat16())
    assert [(r.tensor, r.value) for r in check] == [("inv_freq", 1)]
    return check


def untied() -> Readings:
    model = nn.ModuleDict(
        {"embedding": nn.Embedding(32, 16), "head": nn.Linear(16, 32, bias=False)}
    )
    model["head"].weight = model["embedding"].weight
    assert not len(ng.check(model, torch.optim.AdamW(model.parameters())))
    model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)
    return ng.check(model, torch.optim.AdamW(model.parameters()))


def no_gradient() -> Readings:
    model, optimizer = torch_adamw(torch.float32)
    loss_of(model[:4]).backward()
    return ng.check(model, optimizer)


def stepped_by_adamw(*of: Callable[[nn.Module], nn.Module]) -> Readings:
    model = language_model()
    return ng.check(model, torch.optim.AdamW([p for part in of for p in part(model).parameters()]))


PROVOKED: dict[str, Callable[[], Readings]] = {
    "missing-parameters": lambda: stepped_by_adamw(lambda model: model[:2]),
    "parameters-twice": lambda: stepped_by_adamw(lambda model: model, lambda model: model[4]),
    "nonfinite": nonfinite_weights,
    "rounded-buffers": rounded_buffers,
    "stored-share": lambda: ng.check(*torch_adamw(lr=1e-5, weight_decay=0.1)),
    "truncated-setting": lambda: ng.check(*torch_adamw(torch.float16, lr=0.1, eps=1e-8)),
    "untied": untied,
    "no-gradient": no_gradient,
}


@pytest.mark.parametrize("name", PROVOKED)
def test_a_kind_reads_what_it_says_and_nothing_else(name: str) -> None:
    check = PROVOKED[name]()
    related = {"stored-share"} if name == "truncated-setting" else set()
    assert name in whats(check) and set(whats(check)) - related == {name}, check
    reading = next(reading for reading in check if reading.what == name)
    assert reading.tensor and reading.text.endswith(".") and "nan" not in reading.text
    assert reading.value is not None


def test_the_table_of_kinds_has_a_row_for_each_of_the_static_check() -> None:
    by_check = {name for name, kind in KINDS.items() if kind.by == "ng.check"}
    assert by_check == set(PROVOKED) - {"nonfinite"}
    assert all(kind.source and kind.value for kind in KINDS.values())


# ── set-ups that are right ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "recipe", ["bfloat16/word", "bfloat16/split", "float32/float32", "float8-row/compact"]
)
def test_a_prepared_model_is_clean(recipe: str) -> None:
    check = ng.check(*ng.prepare(language_model(), recipe, compile=False, max_grad_norm=1.0))
    assert check.require() is check and not len(check)


def test_parameters_that_were_cast_alone_are_clean() -> None:
    assert not check_rotated(lambda model: ng.cast_parameters(model, torch.bfloat16))
    assert not check_rotated(lambda model: ng.prepare(model, "bfloat16/word", compile=False)[0])


def test_other_libraries_that_keep_what_rounding_takes_are_clean() -> None:
    model = language_model().bfloat16()

    class Master(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    master = self.state[p].setdefault("fp32_param", p.detach().float())
                    p.data.copy_(master.sub_(group["lr"] * p.grad.float()))

    master = Master(model.parameters(), lr=1e-3)
    loss_of(model).backward()
    master.step()
    assert not whats(ng.check(model, master))
    options = {
        "kahan_sum": None,
        "bf16_stochastic_round": True,
        "param_ecc": "bf16+8",
        "master_weight_bits": 24,
    }
    for option in options.items():
        optimizer = torch.optim.SGD(
            [{"params": list(model.parameters()), **dict([option])}], lr=1e-3
        )
        assert not whats(ng.check(model, optimizer)), option
    assert "truncated-setting" not in whats(
        ng.check(*torch_adamw(torch.float16, eps=1e-8, fused=True))
    )


def test_flat_partitions_meta_models_adapters_and_optimizers_with_their_own_rate_are_clean() -> (
    None
):
    model = language_model()
    assert not whats(ng.check(model, torch.optim.AdamW([flat(model)])))
    assert not whats(ng.check(model, transformers.Adafactor(model.parameters())))
    adapted = nn.ModuleDict(
        {"base": model.bfloat16().requires_grad_(False), "adapter": nn.Linear(8, 8)}
    )
    weight, bias = adapted["adapter"].parameters()
    weight.grad = torch.ones_like(weight)
    bias.main_grad = torch.ones_like(bias)  # as Megatron keeps it
    assert not whats(ng.check(adapted, torch.optim.AdamW(adapted["adapter"].parameters())))
    with torch.device("meta"):
        assert not whats(ng.check(*torch_adamw()))


def test_masters_of_a_loops_own_stand_for_the_weights_and_have_their_names() -> None:
    model = language_model().bfloat16()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-3)
    assert not whats(ng.check(model, optimizer))
    names = [stepped.name for stepped in set_up_of(model, optimizer).stepped]
    assert names == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
def test_a_parameter_of_another_format_is_not_judged(dtype: torch.dtype) -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(8, 8).to(dtype))])
    check = ng.check(model, torch.optim.AdamW(model.parameters()))
    assert not whats(check), check


def test_a_parameter_without_dimensions_is_checked() -> None:
    model = nn.Linear(8, 8)
    model.scale = nn.Parameter(torch.tensor(2.3))
    assert ng.check(model, ng.AdamW(model.parameters())).ok


def test_a_sample_covers_every_column() -> None:
    for columns in (64, 63, 96, 1):
        size = (1 << 16) // columns * columns
        sample = spread(torch.arange(size).reshape(-1, columns))
        assert len((sample % columns).unique()) == columns


class Container(torch.optim.Optimizer):
    """An optimizer of all parameters whose step calls its members', as torchtitan's."""

    def __init__(self, *members: torch.optim.Optimizer) -> None:
        self.optimizers = list(members)
        parameters = [p for member in members for p in member.param_groups[0]["params"]]
        super().__init__(parameters, {})


def test_the_members_of_a_container_have_the_rates() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    first = torch.optim.AdamW(model[0].parameters(), lr=3e-3, weight_decay=0.2)
    second = torch.optim.SGD(model[1].parameters(), lr=4e-2)
    table = "\n".join(ng.check(model, Container(first, second)).lines)
    for word in ("0.003", "0.2", "0.04", "AdamW", "SGD"):
        assert word in table
    assert "Container" not in table


def test_what_is_no_model_or_optimizer_is_refused() -> None:
    model = language_model()
    optimizer = torch.optim.SGD(model.parameters())
    for wrong in ((model, model), (model.parameters(), optimizer)):
        with pytest.raises(ng.errors.RecipeError, match="Cannot check "):
            ng.check(*wrong)
    with pytest.raises(ng.errors.RecipeError, match="batch= needs loss="):
        ng.check(model, optimizer, batch=TOKENS)


def test_a_declared_tie_of_two_tensors_is_named() -> None:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    assert "untied" not in whats(ng.check(model, optimizer))
    model.lm_head.weight = nn.Parameter(1.5 * model.lm_head.weight.detach())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    (reading,) = [r for r in ng.check(model, optimizer) if r.what == "untied"]
    assert reading.tensor == "lm_head.weight"


# ── loops of others that were accused ─────────────────────────────────────────────────────────────


class Adapted(nn.Module):
    """Adapters over a frozen base that is recomputed, whose inputs get gradients by a hook."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(32, 16).requires_grad_(False)
        self.embedding.register_forward_hook(lambda m, args, x: x.requires_grad_())
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.adapter = nn.Linear(16, 16)
        self.head = nn.Linear(16, 32)

    def block(self, x: Tensor) -> Tensor:
        return self.base(x) + self.adapter(x)

    def forward(self, ids: Tensor) -> Tensor:
        x = checkpoint(self.block, self.embedding(ids), use_reentrant=True)
        return self.head(x)


def cross_entropy(model: Any, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids)[:, :-1].mT.float(), ids[:, 1:])


class Standardized(nn.Sequential):
    """A bias before a batch norm, whose gradient is zero but for rounding."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8))


def of_classes(model: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(x)
    labels = torch.randint(0, 8, (len(x),), generator=torch.Generator().manual_seed(1))
    return nn.functional.cross_entropy(4 * logits.float(), labels)


class Masked(nn.Sequential):
    """New tokens alone train: a hook masks the gradient of the others."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Embedding(32, 16), nn.Linear(16, 32))
        new = (torch.arange(32) >= 24).float()[:, None]
        self[0].weight.register_hook(lambda gradient: gradient * new)


def scaled_by_hand(model: Any, ids: Tensor) -> None:
    (cross_entropy(model, ids) * 2.0**16).backward()


IDS = torch.randint(0, 32, (4, 12), generator=torch.Generator().manual_seed(1))
X = 2 + torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
ACCUSED_ONCE: dict[str, tuple[Any, Any, Any, Any]] = {
    "reentrant recomputation": (Adapted, IDS, cross_entropy, None),
    "a bias before a batch norm": (Standardized, X, of_classes, None),
    "a gradient that a hook masks": (Masked, IDS, cross_entropy, None),
    "a loss scale by hand": (
        lambda: nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32)), IDS, cross_entropy, scaled_by_hand,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCUSED_ONCE)
def test_a_healthy_loop_is_not_accused(name: str) -> None:
    make, batch, loss, backward = ACCUSED_ONCE[name]
    model = make()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    check = ng.check(model, optimizer, batch=batch, loss=loss, backward=backward)
    assert check.ok, check


def test_the_slope_of_recomputed_adapters_is_measured() -> None:
    model = Adapted()
    optimizer = torch.optim.AdamW([*model.adapter.parameters(), *model.head.parameters()])
    lines = ng.check(model, optimizer, batch=IDS, loss=cross_entropy).lines
    assert any("the gradient of 4 tensors says" in line for line in lines)
