"""Every kind of the static check reads what it says in a set-up that is wrong, and nothing in one
that is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng
from narrowgauge.analysis.kinds import KINDS, Kind
from narrowgauge.analysis.reading import Reading
from narrowgauge.checks.set_up import set_up_of
from narrowgauge.checks.step_samples import spread
from narrowgauge.checks.updates import change_of
from narrowgauge.spec.significance import MIN_EDQ

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


class Rotated(nn.Module):
    """A weight beside rotary frequencies, a mask, small integers and a batch norm's statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.randn(4, 4)), nn.BatchNorm1d(4)
        self.norm.running_mean = torch.randn(4)
        self.register_buffer("inv_freq", 5e5 ** (-torch.arange(32) / 32), persistent=False)
        self.register_buffer("mask", torch.full((4, 4), torch.finfo(torch.bfloat16).min).triu(1))
        self.register_buffer("position", torch.arange(256.0))


def check_rotated(cast: Callable[[nn.Module], nn.Module]) -> ng.analysis.Readings:
    torch.manual_seed(0)
    model = cast(Rotated())
    return ng.check(model, ng.AdamW(model.parameters(), storage="word"))


# ── every kind ────────────────────────────────────────────────────────────────────────────────────


def nonfinite_weights() -> ng.analysis.Readings:
    model, optimizer = torch_adamw(torch.float32)
    model[1].weight.data[0, 0], model[4].weight.data[0, 0] = float("nan"), float("-inf")
    model[3].register_parameter(
        "mask", nn.Parameter(torch.full((2, 2), float("-inf")), requires_grad=False)
    )
    check = ng.check(model, optimizer)
    assert [r.value for r in check] == [2]
    return check


def rounded_buffers() -> ng.analysis.Readings:
    check = check_rotated(lambda model: model.bfloat16())
    assert [(r.tensor, r.value) for r in check] == [
        ("inv_freq", 1)
    ] and "buffers: 5 bfloat16; rounded: inv_freq off by" in str(check)
    return check


def untied() -> ng.analysis.Readings:
    model = nn.ModuleDict(
        {"embedding": nn.Embedding(32, 16), "head": nn.Linear(16, 32, bias=False)}
    )
    model["head"].weight = model["embedding"].weight
    assert (
        "tied: embedding.weight = head.weight"
        in ng.check(model, torch.optim.AdamW(model.parameters())).lines
    )
    model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)
    return ng.check(model, torch.optim.AdamW(model.parameters()))


def no_gradient() -> ng.analysis.Readings:
    model, optimizer = torch_adamw(torch.float32)
    loss_of(model[:4]).backward()
    return ng.check(model, optimizer)


def stepped_by_adamw(*of: Callable[[nn.Module], nn.Module]) -> ng.analysis.Readings:
    model = language_model()
    return ng.check(model, torch.optim.AdamW([p for part in of for p in part(model).parameters()]))


def sixteen_bits() -> ng.analysis.Readings:
    return ng.check(*torch_adamw(lr=1e-5, weight_decay=0.1))


NARROW = {"stands-still", "lost-updates", "frozen-moments", "lost-decay"}
PROVOKED: dict[str, tuple[Callable[[], ng.analysis.Readings], set[str]]] = {
    "missing-parameters": (lambda: stepped_by_adamw(lambda model: model[:2]), set()),
    "parameters-twice": (
        lambda: stepped_by_adamw(lambda model: model, lambda model: model[4]),
        set(),
    ),
    "nonfinite, weights": (nonfinite_weights, set()),
    "rounded-buffers": (rounded_buffers, set()),
    "stands-still": (sixteen_bits, NARROW),
    "lost-decay, predicted": (sixteen_bits, NARROW),
    "truncated-setting": (lambda: ng.check(*torch_adamw(torch.float16, lr=0.1, eps=1e-8)), NARROW),
    "untied": (untied, set()),
    "no-gradient": (no_gradient, set()),
}


def test_every_kind_of_the_check_is_provoked_and_the_table_has_a_source_for_each() -> None:
    kinds = with_cases()
    by_check = {name for name, kind in kinds.items() if kind.by == "ng.check(model, optimizer)"}
    assert set(PROVOKED) == by_check
    thresholds = [kind for kind in kinds.values() if kind.bound]
    assert len(KINDS) <= 60 and len(thresholds) <= 60
    assert all(kind.source and kind.value for kind in kinds.values())


def with_cases() -> dict[str, Kind]:
    kinds = dict(KINDS)
    for kind in KINDS.values():
        kinds |= {f"{kind.name}, {case}": kind.case(case) for case in kind.cases}
    return kinds


@pytest.mark.parametrize("name", PROVOKED)
def test_a_kind_reads_what_it_says_and_nothing_else(name: str) -> None:
    provoke, related = PROVOKED[name]
    kind = with_cases()[name]
    check = provoke()
    assert kind.name in whats(check) and set(whats(check)) - related <= {kind.name}, check
    reading = next(reading for reading in check if reading.what == kind.name)
    assert reading.tensor and reading.advice.endswith(".") and "{" not in reading.advice
    assert reading.severity == kind.severity and (reading.value is not None)


def whats(check: ng.analysis.Readings) -> list[str]:
    return [reading.what for reading in check]


# ── set-ups that are right ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "recipe", ["bfloat16/word", "bfloat16/split", "float32/float32", "float8-row/compact"]
)
def test_a_prepared_model_is_clean(recipe: str) -> None:
    check = ng.check(*ng.prepare(language_model(), recipe, compile=False, max_grad_norm=1.0))
    assert check.require() is check and not len(check)


def test_parameters_that_were_cast_alone_are_clean_and_the_angle_bounds_the_error_of_rounded_frequencies() -> (
    None
):
    assert not check_rotated(lambda model: ng.cast_parameters(model, torch.bfloat16))
    assert not check_rotated(lambda model: ng.prepare(model, "bfloat16/word", compile=False)[0])
    for dtype, storage in ((torch.bfloat16, "word"), (torch.float16, "float16/split")):
        model = Rotated().to(dtype)
        exact = Rotated().inv_freq
        (reading,) = ng.check(model, ng.AdamW(model.parameters(), storage=storage))
        angle = float(reading.advice.partition(" rad")[0].rpartition(" ")[2])
        assert angle / 4 < float((model.inv_freq.double() - exact).abs().max()) * 4096 <= angle


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
    from transformers import Adafactor

    model = language_model()
    assert not whats(ng.check(model, torch.optim.AdamW([flat(model)])))
    assert not whats(ng.check(model, Adafactor(model.parameters())))
    adapted = nn.ModuleDict(
        {"base": model.bfloat16().requires_grad_(False), "adapter": nn.Linear(8, 8)}
    )
    weight, bias = adapted["adapter"].parameters()
    weight.grad, bias.main_grad = (
        torch.ones_like(weight),
        torch.ones_like(bias),
    )  # as Megatron keeps it
    assert not whats(ng.check(adapted, torch.optim.AdamW(adapted["adapter"].parameters())))
    with torch.device("meta"):
        assert not whats(ng.check(*torch_adamw()))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
def test_a_parameter_of_another_format_is_named_and_not_judged(dtype: torch.dtype) -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(8, 8).to(dtype))])

    def loss(model: nn.Module, _: Any) -> Tensor:
        return model[0].to(torch.complex64).abs().sum()

    check = ng.check(model, torch.optim.AdamW(model.parameters()), batch=TOKENS, loss=loss)
    assert not whats(check) and check.unseen["updates of 0"] == str(dtype).removeprefix("torch.")
    assert ("the gradient" in check.unseen) == dtype.is_complex, check


def test_a_sample_covers_every_column() -> None:
    assert len((spread(torch.arange(1 << 16).reshape(-1, 64)) % 64).unique()) == 64


class MyAdamW(torch.optim.AdamW):
    """A class with a step of the user's own, whose module is no known library."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Unheard(torch.optim.Optimizer):
    def step(self, closure: Any = None) -> None: ...


def test_a_class_without_a_row_is_unseen_and_one_of_the_users_own_too() -> None:
    model, _ = torch_adamw()
    result = ng.check(model, Unheard(model.parameters(), {"lr": 1e-5}))
    assert (
        not len(result)
        and "(steps of Unheard)" in str(result)
        and "updates" not in result.looked_at
    )
    optimizer = MyAdamW(model.parameters(), lr=1e-5)
    result = ng.check(model, optimizer)
    assert "stands-still" not in whats(result) and "MyAdamW is no library's" in str(result)
    loss_of(model).backward()
    optimizer.step()
    result = ng.check(model, optimizer)  # its own code may round stochastically
    assert "stands-still" not in whats(result) and "updates" not in result.looked_at


@pytest.mark.parametrize(("fused", "keeps"), [(True, True), (False, False)])
def test_a_fused_kernel_stores_the_decay_that_others_round_away(fused: bool, keeps: bool) -> None:
    torch.manual_seed(0)
    ends = []
    for decay in (0.0, 0.1):
        weight = nn.Parameter(
            (0.05 * torch.randn(64, 64, generator=torch.Generator().manual_seed(0))).bfloat16()
        )
        optimizer = torch.optim.AdamW(
            [weight], lr=1e-3, weight_decay=decay, fused=fused, betas=(0.9, 0.95)
        )
        is_read = "lost-decay" in whats(ng.check(nn.ParameterList([weight]), optimizer))
        generator = torch.Generator().manual_seed(1)
        for _ in range(100):
            weight.grad = torch.randn(64, 64, generator=generator).bfloat16()
            optimizer.step()
        ends.append(weight.detach().double())
    shrink = 1 - float((ends[0] * ends[1]).sum() / ends[0].square().sum())
    assert (shrink > 0.005) == keeps == (not is_read), shrink


def test_kahan_sums_of_torchs_kind_do_not_keep_the_decay() -> None:
    """optimi multiplies the bfloat16 weight by 1 − lr · decay; ours decays in the step."""
    model = language_model().bfloat16()
    kahan = torch.optim.AdamW(
        [{"params": list(model.parameters()), "kahan_sum": True}], lr=1e-3, weight_decay=0.1
    )
    assert whats(ng.check(model, kahan)).count("lost-decay") == 1
    for storage in ("naive", "kahan"):
        ours = ng.AdamW(
            model.parameters(), lr=1e-3, weight_decay=0.1, storage=storage, compile=False
        )
        assert "lost-decay" not in whats(ng.check(model, ours)), storage


@pytest.mark.parametrize("lr", [5e-4, 2e-3])
def test_muons_stored_share_is_predicted_by_the_shape(lr: float) -> None:
    torch.manual_seed(0)
    start = 0.02 * torch.randn(512, 512)
    gradient = torch.randn(512, 512)
    weight = nn.Parameter(start.bfloat16())
    wide = nn.Parameter(start.bfloat16().float())
    for p in (weight, wide):
        optimizer = torch.optim.Muon([p], lr=lr, weight_decay=0.0)
        predicted = next(
            (
                r.value
                for r in ng.check(nn.ParameterList([p]), optimizer)
                if r.what == "lost-updates"
            ),
            1.0,
        )
        shares = [predicted] if p is weight else shares  # noqa: F821
        p.grad = gradient.to(p.dtype)
        optimizer.step()
    change = wide.detach() - start.bfloat16().float()
    stored = weight.detach().float() - start.bfloat16().float()
    assert shares[0] == pytest.approx(
        float((change * stored).sum() / change.square().sum()), abs=0.1
    )


def test_after_the_first_step_the_rate_is_the_rate_of_now() -> None:
    model, optimizer = one_weight(torch.ones(64, 64))
    optimizer.param_groups[0]["initial_lr"] = 0.1
    assert not len(ng.check(model, optimizer))
    model[0].grad = torch.randn(64, 64).bfloat16()
    optimizer.step()
    (reading,) = [r for r in ng.check(model, optimizer) if r.what == "stands-still"]
    assert reading.value == 1e-3


def test_the_manifest_lists_kinds_adapters_and_what_is_in_no_optimizer() -> None:
    class Adapter(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.linear, self.a = linear.requires_grad_(False), nn.Parameter(torch.zeros(2, 16))

    model = nn.Sequential(
        nn.Embedding(32, 16),
        nn.LayerNorm(16),
        Adapter(nn.Linear(16, 16)),
        nn.Linear(16, 32, bias=False),
    )
    lines = ng.check(
        model, torch.optim.AdamW([*model[0].parameters(), *model[2].parameters()], lr=1e-3)
    ).lines
    rows = {line.split()[0]: line.split()[1:] for line in lines[1:7]}
    assert rows["embedding"] == ["1", "512", "float32", "yes", "0.01", "0.001", "AdamW"]
    assert rows["matrix"] == ["1", "256", "float32", "no"] and rows["head"][3:6] == [
        "in",
        "no",
        "optimizer",
    ]
    assert rows["norm"][:2] == ["2", "32"] and rows["adapter"][3] == "yes"
    (trains,) = [line for line in lines if line.startswith("trains: ")]
    assert trains.endswith(", 6% of them in adapters"), trains


# ── numbers ───────────────────────────────────────────────────────────────────────────────────────


def one_weight(value: Tensor, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    weight = nn.Parameter(value.bfloat16())
    options = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.0, **options}
    return nn.ParameterList([weight]), torch.optim.AdamW([weight], **options)


def test_each_rate_has_its_own_reading_of_the_tensors_that_it_names() -> None:
    torch.manual_seed(0)
    small, *large = (nn.Parameter(torch.randn(64, 64).bfloat16()) for _ in range(3))
    groups = [
        {"params": [p], "lr": lr} for p, lr in zip((*large, small), (3e-2, 1e-3, 5e-4), strict=True)
    ]
    check = ng.check(
        nn.ParameterList([small, *large]), torch.optim.AdamW(groups, betas=(0.9, 0.95))
    )
    lost = {r.tensor: r for r in check if r.what == "lost-updates"}
    assert lost.keys() == {"0", "2"} and all(r.excess > 1 for r in lost.values())
    assert "at lr 0.0005;" in lost["0"].advice and "at lr 0.001;" in lost["2"].advice


def test_the_rate_is_the_peak_of_a_schedule() -> None:
    model, optimizer = one_weight(torch.randn(64, 64), lr=1e-3)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=100)
    assert not len(ng.check(model, optimizer))


@pytest.mark.parametrize("lr", [3e-4, 6e-4, 2e-3])
def test_the_predicted_share_is_what_the_audit_measures(lr: float) -> None:
    """Gradients of random sign, a bfloat16 weight: the EDQ before the run beside that of 60 steps."""
    torch.manual_seed(0)
    weight = torch.randn(64, 64) * 0.5
    (predicted,) = [
        r.value for r in ng.check(*one_weight(weight, lr=lr)) if r.what == "lost-updates"
    ]
    parameter = nn.Parameter(weight.bfloat16())
    optimizer = ng.AdamW(
        [parameter], lr=lr, betas=(0.9, 0.95), weight_decay=0.0, storage="naive", compile=False
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)
        for _ in range(60):
            parameter.grad = torch.randn(64, 64).bfloat16()
            optimizer.step()
    measured = ng.audit(optimizer).total.edq
    assert measured < MIN_EDQ and abs(predicted - measured) < 0.1, (predicted, measured)


@pytest.mark.parametrize(
    ("value", "needed", "number"), [(1.0, 2.0**-9, 1), (1.5, 2.0**-8, 1), (1.0, 2.0**-9, 2)]
)
def test_a_power_of_two_moves_down_by_a_quarter_of_its_spacing(
    value: float, needed: float, number: int
) -> None:
    model = nn.ParameterList(
        [nn.Parameter(torch.full((8,), value).bfloat16()) for _ in range(number)]
    )
    check = ng.check(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    (reading,) = [r for r in check if r.what == "stands-still"]
    words = f"No step moves {number} tensor"
    assert reading.bound == needed and reading.advice.startswith(words)
    assert "stands-still" not in whats(
        ng.check(model, torch.optim.AdamW(model.parameters(), lr=1.5 * needed))
    )


@pytest.mark.parametrize(("lr", "is_swallowed"), [(0.03, False), (0.015, True)])
def test_decay_below_a_quarter_of_a_spacing_is_swallowed(lr: float, is_swallowed: bool) -> None:
    assert ("lost-decay" in whats(ng.check(*torch_adamw(lr=lr, weight_decay=0.1)))) == is_swallowed


@pytest.mark.parametrize(
    ("factor", "storage"), [(1.0, "master"), (1 + 2.0**-9, "master"), (1.1, "naive")]
)
def test_a_state_is_a_master_if_it_is_within_a_rounding_of_the_weight(
    factor: float, storage: str
) -> None:
    weight = nn.Parameter(torch.linspace(1, 2, 64).bfloat16())
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state[weight]["copy"] = factor * weight.detach().float()
    assert set_up_of(nn.ParameterList([weight]), optimizer).stepped[0].storage.name == storage


@pytest.mark.parametrize(
    ("dtype", "storage"), [(torch.float16, "float16/master"), (torch.bfloat16, "naive")]
)
def test_apex_steps_bfloat16_without_the_master_copy_that_it_makes(
    dtype: torch.dtype, storage: str
) -> None:
    model, optimizer = torch_adamw(dtype)
    optimizer.master_weights = True
    optimizer.param_groups_master = []
    assert set_up_of(model, optimizer).stepped[0].storage.name == storage


def test_the_predicted_change_is_adams_next_step() -> None:
    model, optimizer = torch_adamw(torch.float32, lr=0.01, weight_decay=0.0)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, -0.5)
        optimizer.step()
    for stepped in set_up_of(model, optimizer).trained:
        change = change_of(stepped, stepped.parameter.detach().flatten())
        assert change is not None
        torch.testing.assert_close(change, torch.full_like(change, 0.01))


def test_what_is_no_model_or_optimizer_is_refused() -> None:
    model = language_model()
    optimizer = torch.optim.SGD(model.parameters())
    for wrong in ((model, model), (model.parameters(), optimizer)):
        with pytest.raises(ng.errors.RecipeError, match="Cannot check "):
            ng.check(*wrong)
    with pytest.raises(ng.errors.RecipeError, match="batch= needs loss="):
        ng.check(model, optimizer, batch=TOKENS)


def test_a_loss_in_16_bits_is_told_by_the_check_and_at_the_first_recorded_step(
    tmp_path: Path,
) -> None:
    model = nn.Linear(8, 8).bfloat16()
    optimizer = ng.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(4, 8).bfloat16()
    for is_wide in (False, True):
        with ng.RunRecorder(tmp_path / str(is_wide), model, optimizer) as recorder:
            for _ in range(2):
                output = model(batch) + 3
                loss = (output.float() if is_wide else output).mean()
                loss.backward()
                optimizer.step()
                recorder.step(loss)
        notes = [
            event["text"]
            for event in ng.read_run(tmp_path / str(is_wide)).events
            if event["what"] == "note"
        ]
        dtype = torch.float32 if is_wide else torch.bfloat16
        readings = ng.check(
            model,
            optimizer,
            batch=batch,
            loss=lambda m, b, dtype=dtype: m(b).to(dtype).mean(),
        )
        for lines in (notes, readings.lines):
            assert sum("loss in bfloat16" in line for line in lines) == (not is_wide)


def test_what_was_looked_at_is_what_was_judged() -> None:
    """A step of SGD is as large as the gradient: without a batch it is unknown, with one it is judged."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = ng.check(model, optimizer)
    assert "updates" not in before.looked_at and "pass batch=" in str(before), before

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).float().square().mean()

    judged = ng.check(model, optimizer, batch=torch.randn(16, 32).bfloat16(), loss=loss)
    (reading,) = [r for r in judged if r.what == "lost-updates"]
    assert reading.value < 0.7 and not judged.unseen, judged
    wide = model.float()
    optimizer = torch.optim.SGD(wide.parameters(), lr=0.01)
    judged = ng.check(wide, optimizer, batch=torch.randn(16, 32), loss=loss)
    assert judged.ok and "updates of 4 tensors by SGD" in judged.looked_at, judged


def test_a_declared_tie_of_two_tensors_is_named_with_its_distance() -> None:
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
    assert "declared as tied" in reading.advice and "0.5 of their length apart" in reading.advice


def test_no_reading_is_inside_its_bound_and_nothing_is_below_a_lower_limit() -> None:
    """Kinds know the side of their limit: a value of 0 at a lower limit is the worst."""
    values = (0.95, 0.5, 0.0)
    readings = ng.analysis.Readings(
        [Reading(0, "storage", "", "stands-still", x, None, 0.9, side="below") for x in values]
    )
    assert [(r.value, r.excess) for r in readings] == [(0.0, math.inf), (0.5, 1.8)]
    for kind in with_cases().values():
        inside = Reading(
            0, "start", "", kind.name, 1.0 + kind.bound / 2, 1.0, kind.bound or 1.0, side=kind.side
        )
        assert len(ng.analysis.Readings([inside])) == (kind.side == "within"), kind.name


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


class OwnAdam(torch.optim.Optimizer):
    """States in bfloat16, which a step of one's own may round at random."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("exp_avg_sq", torch.ones_like(p, dtype=torch.bfloat16))


def test_moments_of_a_class_of_ones_own_are_not_judged() -> None:
    model = nn.Linear(8, 8)
    optimizer = OwnAdam(model.parameters(), {"lr": 1e-3, "betas": (0.9, 0.999)})
    optimizer.step()
    assert ng.check(model, optimizer).ok
