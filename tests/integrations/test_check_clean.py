"""A check of correct set-ups finds nothing, changes no bit of them, and leaves no hook; findings print and raise."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

import narrowgauge as ng
from narrowgauge.integrations.check.set_up import optimizers_of, storage_of
from narrowgauge.runs.events import on_event
from narrowgauge.runs.finding import told

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore:.*cannot.*:UserWarning")

TOKENS = torch.randint(0, 32, (8, 9), generator=torch.Generator().manual_seed(0))


class LanguageModel(nn.Module):
    """Embedding, two layers and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.up = nn.Embedding(32, 16), nn.LayerNorm(16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(nn.functional.gelu(self.up(self.norm(self.embed(tokens)))))


def loss_of(model: nn.Module, tokens: Tensor = TOKENS) -> Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def prepared(recipe: str = "bfloat16/word", **options: Any) -> tuple[nn.Module, ng.AdamW]:
    return ng.prepare(LanguageModel(), recipe, compile=False, **options)


def steps_of(
    model: nn.Module, optimizer: Any, steps: int = 4, schedule: Any = None, micro_batches: int = 2
) -> list[Tensor]:
    """Train as examples/own_loop.py does; returns losses, then weights."""
    losses = []
    for _ in range(steps):
        for part in TOKENS.chunk(micro_batches):
            loss = loss_of(model, part) / micro_batches
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
    return [*losses, *(p.detach().clone() for p in model.parameters())]


def assert_clean(found: ng.Findings) -> None:
    assert not list(found), str(found)
    assert found.ok and found.require() is found


def num_hooks(model: nn.Module, optimizer: Any) -> int:
    modules = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())
    steps = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
    tensors = sum(len(p._backward_hooks or ()) + len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
    return modules + steps + tensors


# ── correct loops of one's own ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "recipe", ["bfloat16/word", "bfloat16/split", "bfloat16/float32", "float32/float32", "float8-row/compact"]
)
def test_a_prepared_model_in_a_loop_of_ones_own_is_clean(recipe: str) -> None:
    model, optimizer = prepared(recipe)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    with ng.check(model, optimizer) as watched:
        assert_clean(watched)
        steps_of(model, optimizer, schedule=schedule)
    assert_clean(watched)


def test_float16_with_its_loss_scaler_is_clean() -> None:
    model, optimizer = prepared("float16/split")
    with ng.check(model, optimizer) as watched:
        for _ in range(3):
            optimizer.loss_scaler.scale(loss_of(model)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_clean(watched)


def test_torch_over_float32_weights_is_clean_with_autocast_and_clipping() -> None:
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    average = AveragedModel(model, avg_fn=get_ema_avg_fn(0.999)).float()
    with ng.check(model, optimizer) as watched:
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
    assert_clean(watched)


def test_float16_autocast_with_a_grad_scaler_is_clean() -> None:
    model = LanguageModel()
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu", init_scale=16.0)
    with ng.check(model, optimizer) as watched:
        for _ in range(3):
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(model)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert_clean(watched)


def test_two_optimizers_each_with_its_part_are_clean() -> None:
    model = LanguageModel()
    vectors = torch.optim.SGD([p for p in model.parameters() if p.ndim < 2], lr=0.1)
    matrices = ng.AdamW([p for p in model.parameters() if p.ndim > 1], storage="float32")
    with ng.check(model, [vectors, matrices]) as watched:
        for _ in range(3):
            loss_of(model).backward()
            for optimizer in (vectors, matrices):
                optimizer.step()
                optimizer.zero_grad()
    assert_clean(watched)


def test_gradients_of_one_network_that_pass_through_another_are_no_stale_ones() -> None:
    critic, actor = nn.Linear(4, 1), nn.Linear(4, 4)
    optimizer, other = torch.optim.AdamW(critic.parameters()), torch.optim.AdamW(actor.parameters())
    batch = torch.randn(8, 4)
    with ng.check(critic, optimizer) as watched:
        for _ in range(3):
            optimizer.zero_grad()
            critic(batch).square().mean().backward()
            optimizer.step()
            other.zero_grad()
            critic(actor(batch)).mean().backward()  # leaves gradients in the critic
            other.step()
    assert_clean(watched)


def test_divided_gradients_and_refreshed_weights_are_clean() -> None:
    model, optimizer = prepared(max_grad_norm=1.0)
    with ng.check(model, optimizer) as watched:
        for step in range(4):
            for part in TOKENS[step : step + 4].chunk(2):
                loss_of(model, part).backward()
            for parameter in model.parameters():
                parameter.grad /= 2
            optimizer.step()
            optimizer.zero_grad()
            model.up.weight.data.mul_(0.5)
            optimizer.refresh()
    assert_clean(watched)


def test_an_optimizer_that_keeps_a_master_copy_or_rounds_stochastically_loses_nothing() -> None:
    model = LanguageModel().bfloat16()

    class Master(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    master = self.state[p].setdefault("fp32_param", p.detach().float())
                    p.data.copy_(master.sub_(group["lr"] * p.grad.float()))

    master = Master(model.parameters(), lr=1e-3)
    steps_of(model, master)
    assert_clean(ng.check(model, master))
    kahan = torch.optim.SGD([{"params": list(model.parameters()), "kahan_sum": None}], lr=1e-3)
    assert_clean(ng.check(model, kahan))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("library", ["TransformerEngine", "Apex"])
def test_a_fused_adam_steps_a_master_copy_except_apexs_for_bfloat16(library: str, dtype: torch.dtype) -> None:
    """Both say ``master_weights``; Apex's has ``param_groups_master``, and steps bfloat16 weights without them."""
    weight = nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    optimizer.master_weights = True
    if library == "Apex":
        optimizer.param_groups_master = [{"params": [weight.detach().float()]}]
    lost = library == "Apex" and dtype is torch.bfloat16
    kept = "master" if dtype is torch.bfloat16 else "float16/master"
    assert storage_of(optimizer, optimizer.param_groups[0], weight).name == ("naive" if lost else kept)


# ── watching changes nothing ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("ours", [True, False])
def test_watched_steps_have_the_bits_of_unwatched_ones(ours: bool) -> None:
    def made() -> tuple[nn.Module, Any]:
        if ours:
            return prepared()
        model = LanguageModel()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    model, optimizer = made()
    plain = steps_of(model, optimizer)
    model, optimizer = made()
    before, random_state = num_hooks(model, optimizer), torch.get_rng_state()
    handle = ng.check(model, optimizer, steps=3)
    assert handle.is_watching and num_hooks(model, optimizer) > before
    watched = steps_of(model, optimizer)
    assert not handle.is_watching and num_hooks(model, optimizer) == before
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(map(torch.equal, plain, watched))


def test_hooks_after_ours_stay_and_are_called() -> None:
    model, optimizer = prepared()
    calls: list[int] = []
    ng.check(model, optimizer, steps=1)
    before = num_hooks(model, optimizer)
    theirs = optimizer.register_step_post_hook(lambda *_: calls.append(1))
    steps_of(model, optimizer, steps=3)
    assert calls == [1, 1, 1] and num_hooks(model, optimizer) < before
    theirs.remove()


def test_a_watch_reports_by_a_warning_and_events() -> None:
    model, optimizer = prepared()
    events: list[ng.Event] = []
    stop = on_event(events.append)
    handle = ng.check(model, optimizer, steps=2)
    with pytest.warns(ng.integrations.SetUpWarning, match=r"watched 2 steps[\s\S]*stale-gradients"):
        for _ in range(3):
            loss_of(model).backward()
            optimizer.step()
    stop()
    assert [each.name for each in handle] == ["stale-gradients"] and not handle.ok
    assert [(e.kind, e.step, e.tensor) for e in events if "stale" in e.message] == [("warning", 2, "p.grad")]


def test_a_clean_watch_says_nothing() -> None:
    model, optimizer = prepared()
    ng.check(model, optimizer, steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ng.integrations.SetUpWarning)
        steps_of(model, optimizer)


def test_a_closure_is_watched_after_it_ran() -> None:
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    with ng.check(model, optimizer) as watched:
        for _ in range(3):
            optimizer.step(closure)
    assert_clean(watched)


def test_a_schedule_that_moves_when_grad_scaler_skips_is_found() -> None:
    model = LanguageModel()
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu", init_scale=2.0**120)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
    with ng.check(model, optimizer, scaler=scaler) as watched:
        for _ in range(3):
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(model)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            schedule.step()
    assert [(each.name, each.where) for each in watched] == [("schedule-on-skip", "LinearLR")]


# ── more of what is found ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "kind", [copy.deepcopy, lambda m: list(copy.deepcopy(m).parameters()), lambda m: copy.deepcopy(m.state_dict())]
)
def test_a_narrow_average_may_be_a_copy_tensors_or_a_state(kind: Callable[[nn.Module], Any]) -> None:
    model, optimizer = prepared()
    copied = kind(model)
    found = ng.check(model, optimizer, average=copied)
    assert [each.name for each in found] == ["narrow-average"] and "bfloat16" in found[0].message


def test_the_share_of_lost_updates_is_what_a_step_loses() -> None:
    weight = nn.Parameter(torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).bfloat16())
    model = nn.ParameterList([weight])
    optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.0, betas=(0.9, 0.95))
    found = ng.check(model, optimizer)
    said = next(each.message for each in found if each.name == "lost-updates")
    before = weight.detach().clone()
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert f"{(before == weight).float().mean().item():.0%} of the updates" in said


def test_a_cast_within_the_watch_and_ours_after_a_cast_are_found() -> None:
    model = LanguageModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with ng.check(model, optimizer) as watched:
        steps_of(model, optimizer)
        model.bfloat16()
    assert "cast-weights" in [each.name for each in watched]
    model, ours = LanguageModel().bfloat16(), None
    ours = ng.AdamW(model.parameters())
    model.float()
    (finding,) = ng.check(model, ours)
    assert (finding.name, finding.message) == (
        "cast-weights", "the optimizer was made for bfloat16 weights, and they are float32 now.",
    )  # fmt: skip


def test_a_loss_may_be_given() -> None:
    model, optimizer = prepared()
    (finding,) = ng.check(model, optimizer, loss=model(TOKENS).mean().float())
    assert finding.name == "narrow-loss" and "bfloat16" in finding.message


# ── how it is told ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_findings_print_and_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LanguageModel().bfloat16()
    found = ng.check(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    plain = str(found)
    assert plain.startswith(
        "torch.AdamW, stores naive: lr 0.0001, betas (0.9, 0.999), weight_decay 0.01\nerror: lost-updates"
    )
    assert found[0].severity == "error" and found[-1].severity == "warning" and len(found[:2]) == 2
    with pytest.raises(ng.errors.RecipeError, match="lost-updates") as raised:
        found.require()
    assert 'storage="word"' in raised.value.advice
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "160")
    table = str(found)
    assert "what to do" in table and "lost-updates" in table and table != plain
    assert "nothing was found" in str(ng.check(*prepared()))


def test_the_options_in_use_are_told() -> None:
    model = LanguageModel().bfloat16()
    wanted = (
        "narrowgauge.AdamW, stores word and master: lr 0.001, betas (0.9, 0.999), weight_decay 0.01, max_grad_norm none"
    )
    assert list(ng.check(model, ng.AdamW(model.parameters())).set_up) == [wanted]
    assert list(ng.check(*prepared()).set_up) == [wanted]


def test_what_is_no_model_or_optimizer_is_refused() -> None:
    model = LanguageModel()
    for wrong in ((model, model), (model.parameters(), torch.optim.SGD(model.parameters()))):
        with pytest.raises(ng.errors.RecipeError, match="check was given a"):
            ng.check(*wrong)
    with pytest.raises(ng.errors.RecipeError, match="steps"):
        ng.check(model, torch.optim.SGD(model.parameters()), steps=-1)
    assert told("abcde") == "a, b, c and 2 others" and told("ab") == "a, b"
    assert len(optimizers_of((torch.optim.SGD(model.parameters()),))) == 1


# ── frameworks ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_sharded_model_is_clean(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        model, optimizer = prepared(mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
        with ng.check(model, optimizer) as watched:
            steps_of(model, optimizer)
        assert_clean(watched)
    finally:
        dist.destroy_process_group()
