"""The check of a gradient leaves no trace, and follows sums over ranks."""

import copy
import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import narrowgauge as ng
from corpus.loop import IGNORED, Model, count, loss, summed, tokens_of
from narrowgauge.measuring.check.rounding_sites import _ranked
from narrowgauge.measuring.reading import Readings
from ranks import run_ranks


def check(model: nn.Module, batch: Any, backward: Any = None, loss: Any = loss) -> Readings:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return ng.check(model, optimizer, batch=batch, loss=loss, backward=backward)


# ── nothing stays ─────────────────────────────────────────────────────────────────────────────────


class Counted(Model):
    """Counts its passes in an attribute and in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[float] = []
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls.append(random.random() + float(torch.rand(1)))
        self.mean += 1
        return super().forward(tokens)


def test_what_a_pass_changes_is_put_back():
    model = Counted()
    before = copy.deepcopy(model.state_dict())
    state = random.getstate(), torch.get_rng_state().tolist()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def unscaled(model, batch):
        scaler.scale(loss(model, batch)).backward()
        scaler.unscale_(optimizer)

    for _ in range(2):
        result = ng.check(model, optimizer, batch=tokens_of(0), loss=loss, backward=unscaled)
        assert result.ok and any(line.startswith("slope: ") for line in result.lines), result
    assert all(p.grad is None for p in model.parameters()) and scaler.get_scale() == 1024.0
    assert not model.calls and not model.mean.any()
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert state == (random.getstate(), torch.get_rng_state().tolist())


def test_the_check_calls_the_loss_as_often_as_its_page_says():
    parts = 3 * [tokens_of(0)]
    calls = []

    def counted(model, batch):
        calls.append(batch)
        return loss(model, batch)

    for batch, number in ((parts[0], 4), (parts, len(parts) + 5)):
        calls.clear()
        assert check(Model(), batch, loss=counted).ok and len(calls) == number


def test_places_are_ranked_by_what_they_do_until_one_rounding_is_left():
    sizes = {"a": 1.0, "b": 8.0, "c": 0.5, "d": 4.0}
    error = math.hypot(*sizes.values())
    shadow = SimpleNamespace(rounds=sizes, coarsest=(2.0**-9, "bfloat16"))

    def alone(places):
        return math.hypot(*(sizes[place] for place in places))

    shares = dict(_ranked(shadow, error, 1.2, alone))
    assert shares == {"b": 8.0 / error, "d": 4.0 / error} and [*shares] == ["b", "d"]


# ── two ranks ─────────────────────────────────────────────────────────────────────────────────────


def averaged(model: nn.Module, skipped: str = "none", divide: int = 2) -> None:
    for name, p in model.named_parameters():
        if skipped not in name:
            dist.all_reduce(p.grad)
            p.grad /= divide


def of_this_rank(model: nn.Module, batch: Any) -> None:
    """hiyouga/LlamaFactory#7443: divided by the rank's own count, then averaged."""
    loss(model, batch).backward()
    averaged(model)


def by_all_tokens(skipped: str = "none", divide: int = 1) -> Callable[..., None]:
    def backward(model: nn.Module, batch: Any) -> None:
        total = count(batch)
        dist.all_reduce(total)
        (summed(model, batch) / total).backward()
        averaged(model, skipped, divide)

    return backward


def halved(model: nn.Module, batch: Any) -> None:
    loss(model, batch).backward()
    for p in model.parameters():
        p.grad /= 2


def sharded() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    return fully_shard(Model(), mesh=mesh)


def in_float16() -> nn.Module:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = DistributedDataParallel(Model())
    model.register_comm_hook(None, fp16_compress_hook)
    return model


def counted_over_ranks(model: nn.Module, batch: Any) -> Tensor:
    """As transformers' loop: the sum over a rank's labels, times ranks, over the labels of all ranks."""
    return 2 * summed(model, batch) / batch[2]


def counted_inside(model: nn.Module, batch: Any) -> Tensor:
    total = count(batch)
    dist.all_reduce(total)
    return 2 * summed(model, batch) / total


def of_the_inner_module(model: nn.Module, batch: Any) -> Tensor:
    """Calls the module in DistributedDataParallel, which reduces nothing then."""
    return loss(model.module, batch)


def ddp() -> nn.Module:
    return DistributedDataParallel(Model())


RANKS = {
    "summed by hand": (Model, True, loss, by_all_tokens(), [], ""),
    "tokens of this rank": (Model, True, loss, of_this_rank, [("gradient", "norm.weight and 5 others")], "not a multiple"),
    "partial sums": (Model, True, loss, by_all_tokens("norm"), [("ranks-apart", "norm.weight and 1 other")], ""),
    "averaged sums": (Model, True, loss, by_all_tokens("none", 2), [("gradient", "embed.weight and 5 others")], "0.5 times"),
    "ddp": (ddp, False, loss, None, [], ""),
    "averaged twice": (ddp, False, loss, halved, [("gradient", "embed.weight and 5 others")], "0.5 times"),
    "unlike counts": (ddp, True, loss, None, [("gradient", "norm.weight and 5 others")], "not a multiple"),
    "float16 sums": (in_float16, False, loss, None, [("rounding", "head.weight")], ""),
    "labels of all ranks": (ddp, True, counted_over_ranks, None, [], "the loss is 2 times a mean"),
    "labels counted inside": (ddp, True, counted_inside, None, [], "calls allreduce over ranks"),
    "never reduced": (ddp, True, of_the_inner_module, None, [("ranks-apart", "embed.weight and 5 others")], ""),
    "not by the check": (Model, True, loss, None, [], "pass backward="),
    "fsdp2": (sharded, False, loss, None, [], "not followed through shards"),
}  # fmt: skip
"""Model, whether ranks have other tokens, loss, backward, readings, and words that are printed."""


def on_a_rank(rank: int):
    answers = {}
    for name, (make, is_unlike, of_batch, backward, *_) in RANKS.items():
        torch.manual_seed(0)
        model = make()
        tokens, labels = tokens_of(rank if is_unlike else 0)
        total = (labels != IGNORED).sum()
        dist.all_reduce(total)
        result = check(model, (tokens, labels, total), backward, of_batch)
        answers[name] = [(r.what, r.tensor) for r in result], str(result)
    return answers


def test_sums_over_two_ranks_are_followed(tmp_path):
    first, second = run_ranks(on_a_rank, 2, tmp_path)
    assert first == second
    assert {name: answer[0] for name, answer in first.items()} == {
        name: row[4] for name, row in RANKS.items()
    }
    for name, row in RANKS.items():
        assert row[5] in first[name][1], (name, first[name])
