"""A check of set-ups that are unusual and right: compiled, checkpointed, sparse, adapted, partitioned, on several cadences."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng

pytestmark = pytest.mark.filterwarnings("ignore")

BATCH = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8))


def square_loss(model: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    return model(BATCH.to(dtype)).float().square().mean()


def names(found: ng.Findings) -> list[str]:
    return [each.name for each in found]


def watched(
    model: nn.Module, optimizer: Any, loss: Callable[[], Tensor], steps: int = 3, **options: Any
) -> ng.Findings:
    with ng.check(model, optimizer, **options) as found:
        for _ in range(steps):
            loss().backward()
            optimizer.step()
            optimizer.zero_grad()
    return found


def test_a_float64_set_up_is_clean() -> None:
    """Float64 weights round no update away, and a policy that computes with them in 16 bits cuts no narrow storage again."""

    class FullyCast(nn.Sequential):
        mixed_precision = SimpleNamespace(param_dtype=torch.bfloat16)

    model, optimizer = ng.prepare(FullyCast(layers()), "float64/float64", lr=1e-3)
    assert names(ng.check(model, optimizer)) == []


@pytest.mark.parametrize("is_watched", [True, False])
def test_a_compiled_model_is_clean_and_is_not_compiled_again(is_watched: bool) -> None:
    compilations: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        compilations.append(1)
        return graph.forward

    torch._dynamo.reset()
    inner, optimizer = ng.prepare(layers(), "float32/float32", compile=False)
    model = torch.compile(inner, backend=backend)
    square_loss(model).backward()
    optimizer.zero_grad()
    before = len(compilations)
    handle = ng.check(model, optimizer)
    if is_watched:
        handle.__enter__()
    for _ in range(3):
        square_loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.close()
    assert not names(handle) and len(compilations) == before >= 1


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_layers_count_one_pass_a_micro_batch(use_reentrant: bool) -> None:
    model, optimizer = ng.prepare(layers(), "bfloat16/word", compile=False)

    def loss() -> Tensor:
        hidden = BATCH.bfloat16().requires_grad_()
        for layer in model:
            hidden = checkpoint(layer, hidden, use_reentrant=use_reentrant)
        return hidden.float().square().mean()

    found = ng.check(model, optimizer)
    with found:
        for _ in range(3):
            for _ in range(4):
                loss().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not names(found)


def test_optimizers_that_step_at_different_times_are_clean() -> None:
    model = layers()
    often, seldom = (
        torch.optim.AdamW(model[0].parameters()),
        torch.optim.SGD([*model[1].parameters(), *model[2].parameters()]),
    )
    with ng.check(model, [often, seldom]) as found:
        for step in range(8):
            square_loss(model).backward()
            often.step()
            often.zero_grad()
            if step % 4 == 3:
                seldom.step()
                seldom.zero_grad()
    assert not names(found)


def test_sparse_gradients_are_passed_over() -> None:
    model = nn.Embedding(32, 8, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    assert not names(watched(model, optimizer, lambda: model(torch.arange(8)).sum()))


def test_a_frozen_narrow_base_under_float32_adapters_is_a_note_at_most() -> None:
    model = layers().bfloat16().requires_grad_(False)
    adapter = nn.Linear(8, 8)
    both = nn.ModuleDict({"base": model, "adapter": adapter})
    trained = torch.optim.AdamW(adapter.parameters())
    assert not names(ng.check(both, trained))
    found = ng.check(both, torch.optim.AdamW(both.parameters()))
    assert names(found) == ["frozen-parameters"] and found.ok

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return (both["base"](BATCH) + both["adapter"](BATCH)).float().square().mean()

    assert not names(watched(both, trained, loss))


def test_an_average_left_over_from_another_run_is_none_of_this_loop() -> None:
    left_over = AveragedModel(layers().bfloat16())
    model, optimizer = ng.prepare(layers(), "bfloat16/word", compile=False)
    assert not names(watched(model, optimizer, lambda: square_loss(model, torch.bfloat16)))
    left_over.update_parameters(layers().bfloat16())
    assert not names(watched(model, optimizer, lambda: square_loss(model, torch.bfloat16)))


def test_flat_partitions_of_other_frameworks_are_not_missed_parameters() -> None:
    model = layers()
    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert not names(ng.check(model, torch.optim.AdamW([flat])))


def test_a_model_without_values_yet_is_looked_at() -> None:
    with torch.device("meta"):
        model = layers().bfloat16()
    assert not names(ng.check(model, torch.optim.AdamW(model.parameters())))


def test_tensor_rates_and_warm_up_from_zero_are_judged_by_the_rate_that_they_lead_to() -> None:
    weight = nn.Parameter(torch.ones(64, 64).bfloat16())
    model = nn.ParameterList([weight])
    optimizer = torch.optim.AdamW([weight], lr=torch.tensor(1e-4), betas=(0.9, 0.95), weight_decay=0.0)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 100))
    assert float(optimizer.param_groups[0]["lr"]) == 0.0
    found = ng.check(model, optimizer)
    assert names(found) == ["lost-updates", "rate-below-spacing"] and "100% of the updates" in found[0].message


def test_sgd_is_judged_by_its_gradients() -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(64, 64).bfloat16())])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    (unknown,) = ng.check(model, optimizer)
    assert "every update below half a spacing is rounded away" in unknown.message
    model[0].grad = torch.full_like(model[0], 1e-3)
    (lost,) = ng.check(model, optimizer)
    assert "100% of the updates of one step are rounded away, and 100% at a tenth of it" in lost.message
    model[0].grad = torch.ones_like(model[0])
    assert not names(ng.check(model, optimizer))


def test_updates_that_are_lost_at_the_end_of_a_schedule_are_told_at_its_beginning() -> None:
    weight = nn.Parameter(torch.full((64, 64), 0.1).bfloat16())
    (found,) = ng.check(
        nn.ParameterList([weight]), torch.optim.AdamW([weight], lr=1e-3, betas=(0.9, 0.95), weight_decay=0)
    )
    assert (found.name, found.severity) == ("lost-updates", "warning")
    assert "0% of the updates of one step are rounded away, and 100% at a tenth of it" in found.message


def test_our_storages_that_lose_updates_are_judged_alike() -> None:
    model = layers().bfloat16()
    found = ng.check(model, ng.AdamW(model.parameters(), lr=1e-4, storage="naive"))
    assert {"lost-updates", "rate-below-spacing", "frozen-second-moment"} <= set(names(found))
    assert "narrowgauge's AdamW" in found[0].message
    found = ng.check(model, ng.AdamW(model.parameters(), lr=1e-4, storage="stochastic"))
    assert names(found) == ["frozen-second-moment"]


def test_moments_in_fewer_bits_freeze_where_beta2_says_so() -> None:
    model = layers().bfloat16()
    for beta, expected in ((0.99, False), (0.999, True)):
        found = ng.check(model, ng.AdamW(model.parameters(), storage="kahan", betas=(0.9, beta)))
        assert ("frozen-second-moment" in names(found)) is expected


def test_codes_with_scales_of_blocks_freeze_later_and_in_any_weight() -> None:
    """As torchao's: float8_e4m3fn, and 16 levels; those of 256 levels are not judged."""

    class Codes:
        def __init__(self, codes: Tensor, num_levels: int) -> None:
            self.codes, self.qmap = codes, torch.zeros(num_levels, dtype=torch.float32)

    kinds = {
        "float8": Codes(torch.zeros(4, dtype=torch.float8_e4m3fn), 0),
        "4 bits": Codes(torch.zeros(4, dtype=torch.uint8), 16),
        "8 bits": Codes(torch.zeros(4, dtype=torch.uint8), 256),
    }
    for kind, codes in kinds.items():
        for beta, expected in ((0.95, False), (0.99, kind != "8 bits")):
            model = layers()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, beta))
            for parameter in model.parameters():
                optimizer.state[parameter] = {"exp_avg_sq": codes}
            found = [each for each in ng.check(model, optimizer) if each.name == "frozen-second-moment"]
            assert bool(found) is expected, (kind, beta)
            assert not found or ("3 mantissa bits" in found[0].message and "float32-states8" in found[0].advice)


def test_a_loss_of_autograd_backward_is_seen() -> None:
    model = layers().bfloat16()
    optimizer = ng.AdamW(model.parameters(), storage="word")
    with ng.check(model, optimizer) as found:
        torch.autograd.backward([model(BATCH.bfloat16()).square().mean()])
        optimizer.step()
    assert names(found) == ["narrow-loss"]
