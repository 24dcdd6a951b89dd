"""The gradient of a set-up beside float32 in one process: public faults rebuilt on two gloo ranks,
and healthy set-ups.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng
from narrowgauge.measuring.reading import Readings
from ranks import run_ranks

IGNORED = -100


class Model(nn.Module):
    """An embedding, a projection that is used twice, and a head."""

    def __init__(self, dropout: float = 0.0, is_frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.shared = (
            nn.Embedding(32, 16).requires_grad_(not is_frozen),
            nn.Linear(16, 16),
        )
        self.norm, self.dropout, self.head = (
            nn.LayerNorm(16),
            nn.Dropout(dropout),
            nn.Linear(16, 32, bias=False),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.shared(F.gelu(self.shared(self.norm(x))))
        return self.head(self.dropout(x))


def tokens_of(rank: int, part: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and labels; later micro-batches and ranks have more ignored labels."""
    generator = torch.Generator().manual_seed(10 * rank + part)
    tokens = torch.randint(0, 32, (4, 9), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[:, 2 + 2 * part :] = IGNORED if part or rank else labels[:, 2 + 2 * part :]
    return tokens[:, :-1], labels


def summed(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch[0]).float().flatten(0, 1)
    return F.cross_entropy(logits, batch[1].flatten(), ignore_index=IGNORED, reduction="sum")


def loss(model: nn.Module, batch: Any) -> Tensor:
    return summed(model, batch) / (batch[1] != IGNORED).sum()


def autocast_loss(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss(model, batch)


def check(model: nn.Module, batch: Any, backward: Any = None, loss: Any = loss) -> Readings:
    return ng.check(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        batch=batch,
        loss=loss,
        backward=backward,
    )


def read(check: Readings) -> list[tuple[str, str, float]]:
    return [(r.what, r.tensor, round(r.value, 3)) for r in check if r.stage == "gradient"]


EQUAL = [tokens_of(0)] * 2


# ── one process ───────────────────────────────────────────────────────────────────────────────────


def token_weighted(model: nn.Module, parts: Iterable[Any]) -> None:
    total = sum(int((labels != IGNORED).sum()) for _, labels in parts)
    for part in parts:
        (summed(model, part) / total).backward()


class Recomputed(Model):
    """Recomputes its middle while it trains, as transformers does."""

    def forward(self, tokens: Tensor) -> Tensor:
        def middle(x: Tensor) -> Tensor:
            return x + self.dropout(self.shared(F.gelu(self.shared(self.norm(x)))))

        x = self.embed(tokens)
        if self.training:
            return self.head(checkpoint(middle, x, use_reentrant=False))
        return self.head(middle(x))


class Routed(Model):
    """Sends each token to one of two experts: a loss that jumps where a choice flips."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embed(tokens))
        gates = self.shared(x).softmax(-1)
        chosen = gates.argmax(-1, keepdim=True)
        return self.head(x * gates.gather(-1, chosen) * (1 + chosen))


class Masked(Model):
    """Drops the projection at random while it trains, by Python's generator."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        share = random.random() if self.training else 1.0
        return self.head(x + share * self.shared(self.norm(x)))


class Carried(Model):
    """Starts from the state of the pass before, and counts its passes."""

    state = None
    passes = 0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embed(tokens)) + (0.0 if self.state is None else self.state)
        self.state = x.detach()
        self.passes = self.passes + 1
        return self.head(self.shared(x) * self.passes)


def swapped(model: nn.Module, compute: str) -> nn.Module:
    ng.swap_linears(model, compute)
    return model


def train_and_backward(model: nn.Module, batch: Any) -> None:
    model.train()
    loss(model, batch).backward()


def balanced(model: nn.Module, batch: Any) -> Tensor:
    means = model.embed(batch[0]).softmax(-1).mean((0, 1))
    return loss(model, batch) + means.square().sum()


def contrastive(model: nn.Module, batch: Any) -> Tensor:
    x = model(batch[0]).mean(1)
    y = model(batch[0].flip(1)[:, 1:]).mean(1)
    return F.cross_entropy(x @ y.T, torch.arange(len(x)))


def of_tokens(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


HEALTHY: dict[str, Callable[[], Readings]] = {
    "float32": lambda: check(Model(), tokens_of(0)),
    "autocast": lambda: check(Model(), tokens_of(0), loss=autocast_loss),
    "bfloat16 weights": lambda: check(Model().bfloat16(), tokens_of(0)),
    "equal micro-batches": lambda: check(Model(), EQUAL),
    "unequal micro-batches, weighted by their tokens": lambda: check(
        Model(), [tokens_of(0, part) for part in range(3)], token_weighted
    ),
    "dropout": lambda: check(Model(0.5), tokens_of(0)),
    "draws of Python's generator": lambda: check(Masked(), EQUAL),
    "compiled": lambda: check(torch.compile(Model(), backend="aot_eager"), tokens_of(0)),
    "our narrow layers": lambda: check(
        ng.prepare(Model(), "float8-row/word", compile=False)[0], tokens_of(0)
    ),
    "our narrow layers, float32 weights": lambda: check(
        swapped(Model(), "float8-row"), tokens_of(0)
    ),
    "our narrow layers, autocast": lambda: check(
        swapped(Model(), "float8-row"), tokens_of(0), loss=autocast_loss
    ),
    "a frozen part": lambda: check(Model(is_frozen=True), tokens_of(0)),
    "recomputed, dropout": lambda: check(Recomputed(0.5), tokens_of(0)),
    "a step that begins with train()": lambda: check(Model(0.5), tokens_of(0), train_and_backward),
    "a balance loss of each micro-batch": lambda: check(Model(), EQUAL, loss=balanced),
    "pairs within each micro-batch": lambda: check(
        Model(), [tokens_of(0), tokens_of(1)], loss=contrastive
    ),
    "a list of tensors": lambda: check(Model(), [*tokens_of(0)]),
    "micro-batches of plain tensors": lambda: check(
        Model(), [tokens_of(k)[0] for k in range(2)], loss=of_tokens
    ),
    "routed to one of two experts": lambda: check(Routed(), tokens_of(0)),
    "a state carried from pass to pass": lambda: check(Carried(), tokens_of(0)),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_gradient_has_the_structure_of_float32(name: str) -> None:
    result = HEALTHY[name]()
    assert not read(result), result
    (slope,) = [line for line in result.lines if line.startswith("slope: ")]
    assert float(slope.partition("within ")[2]) <= 1e-9, slope


# ── the slope of the loss ─────────────────────────────────────────────────────────────────────────


class GainWithoutGradient(torch.autograd.Function):
    """paiml/entrenar#257: the backward pass of a norm returns zeros for the gain."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor) -> Tensor:
        ctx.save_for_backward(x, gain)
        return x * gain

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        _, gain = ctx.saved_tensors
        return grad * gain, torch.zeros_like(gain)


class ChunkWithFirstGradient(torch.autograd.Function):
    """unslothai/unsloth#5230: every chunk of a fused loss takes the gradient of the first."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            value = F.cross_entropy(leaf.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        (gradient,) = torch.autograd.grad(value, leaf)
        ctx.save_for_backward(gradient[:2].repeat(2, 1, 1))
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0] * grad, None


class Gained(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        x = F.layer_norm(self.shared(self.embed(tokens)), (16,))
        return self.head(GainWithoutGradient.apply(x, self.norm.weight) + self.norm.bias)


class Written(Model):
    """Scales its hidden state where autograd does not see it."""

    how = "data"

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.shared(self.norm(self.embed(tokens)))
        if self.how == "data":
            x.data.mul_(1.5)
        else:
            with torch.no_grad():
                x.mul_(1.5)
        return self.head(x)


class WrittenWithoutGradient(Written):
    how = "no_grad"


def chunked(model: nn.Module, batch: Any) -> Tensor:
    return ChunkWithFirstGradient.apply(model(batch[0]), batch[1])


def penalized(model: nn.Module, batch: Any) -> Tensor:
    x = model.embed(batch[0]).detach().requires_grad_()
    (slope,) = torch.autograd.grad(model.shared(x.tanh()).square().sum(), x, retain_graph=True)
    return loss(model, batch) + slope.square().mean()


WRONG_SLOPES: dict[str, tuple[str, Callable[[], Readings]]] = {
    "a gain without gradient": ("norm.weight", lambda: check(Gained(), tokens_of(0))),
    "a write through .data": ("norm.bias and 3 others", lambda: check(Written(), tokens_of(0))),
    "a write under no_grad": (
        "norm.bias and 3 others",
        lambda: check(WrittenWithoutGradient(), tokens_of(0)),
    ),
    "a penalty without a second graph": (
        "shared.bias and 2 others",
        lambda: check(Model(), tokens_of(0), loss=penalized),
    ),
    "a fused loss that repeats a chunk": (
        "head.weight and 3 others",
        lambda: check(Model(), tokens_of(0), loss=chunked),
    ),
}


@pytest.mark.parametrize("fault", WRONG_SLOPES)
def test_a_backward_pass_that_is_not_the_slope_is_located(fault: str) -> None:
    tensor, checked = WRONG_SLOPES[fault]
    (reading,) = checked()
    assert (reading.what, reading.tensor, reading.severity) == ("slope", tensor, "error"), reading
    assert reading.excess > 10


def test_what_is_detached_is_a_constant_of_the_slope() -> None:
    def rounded(model: nn.Module, batch: Any) -> Tensor:
        x = model.embed(batch[0])
        return F.cross_entropy(
            model.head(x + (x.sign() - x).detach()).flatten(0, 1), batch[1].flatten()
        )

    result = check(Model(), tokens_of(0), loss=rounded)
    assert not [r for r in result if r.what == "slope"], result
    assert any(line.startswith("slope: ") for line in result.lines)


def test_a_tensor_with_a_hook_on_its_gradient_is_not_looked_at() -> None:
    model = Model()
    model.head.weight.register_hook(lambda gradient: 0.5 * gradient)
    result = check(model, tokens_of(0))
    assert result.ok and "the slope along head.weight" in result.unseen
    assert any("the gradient of 5 tensors says" in line for line in result.lines)


def test_tensors_that_no_module_lists_are_named_and_the_others_are_compared() -> None:
    class Listed(Model):
        def __init__(self) -> None:
            super().__init__()
            self.more, self.scales = (
                [nn.Linear(16, 16), nn.Linear(4, 4)],
                (torch.ones(16, requires_grad=True),),
            )

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(
                self.more[0](self.embed(tokens) * self.scales[0]) + self.shared(self.embed(tokens))
            )

    model = Listed()
    result = check(model, tokens_of(0))
    (missing,) = [reading for reading in result if reading.what == "missing-parameters"]
    assert (missing.tensor, missing.value) == ("more.0.weight and 2 others", 3)
    assert any(line.startswith("slope: ") for line in result.lines) and not result.unseen, result
    assert model.scales[0].grad is None and model.more[0].weight.grad is None
    optimizer = torch.optim.AdamW(
        [*model.parameters(), *model.more[0].parameters(), *model.scales], lr=1e-3
    )
    assert "missing-parameters" not in [
        r.what for r in ng.check(model, optimizer, batch=tokens_of(0), loss=loss)
    ]


# ── nothing stays ─────────────────────────────────────────────────────────────────────────────────


def test_scalers_heads_beside_the_model_counters_and_generators_are_put_back() -> None:
    class Counted(Model):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.losses, self.generator = 0, [], torch.Generator().manual_seed(1)
            self.batches, self.of_python = iter([1, 2]), random.Random(1)
            self.unlisted, self.mean, self.causal = (
                [nn.Linear(16, 16)],
                torch.zeros(2),
                torch.ones(1).expand(3),
            )

        def forward(self, tokens: Tensor) -> Tensor:
            self.calls += 1
            self.losses.append(
                self.of_python.random() + float(torch.rand(1, generator=self.generator))
            )
            self.mean += 1
            return super().forward(tokens) + self.head(self.unlisted[0](self.embed(tokens)))

    model = Counted()
    head = nn.Linear(32, 32)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def beside(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(head(model(batch[0])).flatten(0, 1), batch[1].flatten())

    def scaled(model: nn.Module, batch: Any) -> None:
        scaler.scale(beside(model, batch)).backward()

    def unscaled(model: nn.Module, batch: Any) -> None:
        scaled(model, batch)
        scaler.unscale_(optimizer)

    for backward in (None, scaled, unscaled, unscaled):
        result = ng.check(model, optimizer, batch=tokens_of(0), loss=beside, backward=backward)
        assert not read(result) and "8 tensors says" in str(result), result
        assert "batches of the model" in result.unseen
    assert all(p.grad is None for p in (*model.parameters(), *head.parameters()))
    assert model.unlisted[0].weight.grad is None and not model.mean.any()
    assert (
        model.calls == 0
        and model.losses == []
        and model.of_python.random() == random.Random(1).random()
    )
    assert torch.equal(model.generator.get_state(), torch.Generator().manual_seed(1).get_state())
    wrong = ng.check(
        model,
        optimizer,
        batch=tokens_of(0),
        loss=beside,
        backward=lambda m, b: (2 * beside(m, b)).backward(),
    )
    assert [(r.what, r.tensor) for r in wrong] == [
        ("missing-parameters", "unlisted.0.weight and 1 other"), ("gradient", ""),
    ]  # fmt: skip


def test_states_of_an_optimizer_that_steps_in_backward_are_put_back() -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train_step(model: nn.Module, batch: Any) -> None:
        loss(model, batch).backward()
        optimizer.step()

    weights = [p.detach().clone() for p in model.parameters()]
    result = ng.check(model, optimizer, batch=tokens_of(0), loss=loss, backward=train_step)
    assert [r.what for r in result] == ["step-order"] and not optimizer.state
    train_step(model, tokens_of(0))
    states = [{name: x.clone() for name, x in state.items()} for state in optimizer.state.values()]
    ng.check(model, optimizer, batch=tokens_of(0), loss=loss, backward=train_step)
    assert all(
        torch.equal(a[k], b[k])
        for a, b in zip(states, optimizer.state.values(), strict=True)
        for k in a
    )
    assert not torch.equal(weights[0], next(model.parameters()))


def test_gradients_buffers_modes_and_generators_are_put_back() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    model[0].weight.grad, before = torch.ones(4, 4), torch.get_rng_state()
    mean = model[1].running_mean.clone()
    check(
        model,
        torch.randn(6, 4, generator=torch.Generator()),
        loss=lambda model, x: model(x).square().mean(),
    )
    assert torch.equal(model[0].weight.grad, torch.ones(4, 4)) and model[0].bias.grad is None
    assert torch.equal(model[1].running_mean, mean) and torch.equal(before, torch.get_rng_state())
    assert all(module.training for module in model.modules())


def test_a_loss_without_a_backward_pass_is_refused() -> None:
    changes: list[Any] = [
        lambda x: (x, 1.0),
        lambda x: x.item(),
        lambda x: x.detach(),
        lambda x: x.expand(2),
    ]
    for change in changes:
        for backward in (None, lambda model, batch: loss(model, batch).backward()):
            with pytest.raises(ng.errors.RecipeError, match="Return the mean loss"):
                check(
                    Model(),
                    tokens_of(0),
                    backward,
                    loss=lambda *of, change=change: change(loss(*of)),
                )
    with pytest.raises(ng.errors.RecipeError, match="empty list"):
        check(Model(), [])


def scaled(factor: float, part: str = "") -> Any:
    def backward(model: nn.Module, batch: Any) -> None:
        loss(model, batch).backward()
        for name, p in model.named_parameters():
            p.grad *= factor if part in name else 1.0

    return backward


def test_a_factor_of_one_tensor_is_read_beside_another_gradient() -> None:
    def backward(model: nn.Module, batch: Any) -> None:
        scaled(0.5, "norm")(model, batch)
        model.head.weight.grad += 0.1 * torch.ones_like(model.head.weight)

    result = read(check(Model(), tokens_of(0), backward))
    assert ("gradient", "norm.weight and 1 other", 0.5) in result and len(result) == 2


def doubled(model: nn.Module, parts: list[Any]) -> None:
    """NVIDIA/Megatron-LM#6660: a buffer is added to itself after each micro-batch."""
    for part in parts:
        (loss(model, part) / len(parts)).backward()
        for p in model.parameters():
            p.grad += p.grad


def test_a_factor_is_named() -> None:
    (reading,) = check(Model(), tokens_of(0), scaled(65536.0))
    assert (reading.what, reading.value) == ("own-scale", pytest.approx(65536))
    assert reading.severity == "note" and reading.expected == 1
    (reading,) = check(Model(), tokens_of(0), scaled(0.5, "norm"))
    assert (reading.tensor, round(reading.value, 4)) == ("norm.weight and 1 other", 0.5)
    (reading,) = check(
        Model(), EQUAL, lambda model, parts: [loss(model, part).backward() for part in parts]
    )
    assert reading.value == pytest.approx(2) and reading.expected == 1


def test_micro_batches_that_count_two_to_the_n_times_are_counted() -> None:
    tokens, labels = tokens_of(0)
    parts = [(tokens.roll(k, 0) ^ k, labels.roll(k, 0) ^ k) for k in range(3)]
    result = check(Model(), parts, doubled)
    assert {r.what for r in result} == {"gradient"}
    assert "micro-batches count 8, 4, 2 times" in str(result)


def test_a_missing_micro_batch_a_mean_of_means_and_a_part_without_gradient_are_read() -> None:
    parts = [tokens_of(0, part) for part in range(3)]
    last = check(Model(), parts, lambda model, parts: (loss(model, parts[-1]) / 3).backward())
    assert {r.what for r in last} == {"gradient"}
    assert "micro-batches count" in str(last)
    # huggingface/accelerate#3877: micro-batches of unlike token counts, each its own mean.
    means = check(Model(), parts)
    assert {r.what for r in means} == {"gradient"} and "micro-batches count" in str(means)

    def split(model: nn.Module, batch: Any) -> None:  # one batch, which the loop itself splits
        for rows in (slice(3), slice(3, 4)):
            (loss(model, (batch[0][rows], batch[1][rows])) / 2).backward()

    assert len(check(Model(), parts[0], split)) == 1

    class Detached(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(
                self.embed(tokens) + self.shared(self.norm(self.embed(tokens))).detach()
            )

    result = check(Detached(), tokens_of(0))
    assert [(r.what, r.tensor, r.value) for r in result] == [
        ("no-graph", "norm.bias and 3 others", 4)
    ]

    def without_norm(model: nn.Module, batch: Any) -> None:
        loss(model, batch).backward()
        model.norm.weight.grad = None

    assert read(check(Model(), tokens_of(0), without_norm)) == [("no-gradient", "norm.weight", 1)]


def test_a_gradient_that_is_not_finite_is_read_at_its_first_tensor_in_backward() -> None:
    def overflow(model: nn.Module, batch: Any) -> None:
        loss(model, batch).backward()
        for name in ("norm", "embed"):
            getattr(model, name).weight.grad.fill_(float("inf"))

    (reading,) = check(Model(), tokens_of(0), overflow)
    assert (reading.what, reading.tensor) == ("nonfinite", "norm.weight and 1 other")
    (reading,) = check(
        Model(), tokens_of(0), loss=lambda model, batch: loss(model, batch) * float("inf")
    )
    assert reading.what == "nonfinite"


def test_a_loss_that_is_nan_is_read_where_its_gradient_is_finite() -> None:
    """As ``kl_div`` of log probabilities without ``log_target``."""

    def nan(model: nn.Module, batch: Any) -> Tensor:
        return loss(model, batch) + (loss(model, batch).detach() * -1).log()

    (reading,) = check(Model(), tokens_of(0), loss=nan)
    assert (reading.what, reading.tensor) == ("nonfinite", "the loss")


# ── two ranks ─────────────────────────────────────────────────────────────────────────────────────


def averaged(
    model: nn.Module, skip: Callable[[str], bool] = lambda name: False, divide: int = 2
) -> None:
    for name, p in model.named_parameters():
        if not skip(name):
            dist.all_reduce(p.grad)
            p.grad /= divide


def by_hand(rank: int, fault: str) -> Any:
    """A loop's own backward and reduction, with one fault."""

    def backward(model: nn.Module, batch: Any) -> None:
        if (
            fault == "tokens of this rank"
        ):  # hiyouga/LlamaFactory#7443: divided by the rank's own count, then averaged
            loss(model, batch).backward()
            return averaged(model)
        count = (batch[1] != IGNORED).sum()
        dist.all_reduce(count)
        (summed(model, batch) / count).backward()
        if (
            fault == "one use is not reduced"
        ):  # deepspeedai/DeepSpeed#8224: of a module's two uses one graph is reduced
            local = [p.grad.clone() for p in model.shared.parameters()]
            averaged(model, divide=1)
            for p, local_gradient in zip(model.shared.parameters(), local, strict=True):
                p.grad.mul_(0.5).add_(local_gradient, alpha=0.5)
        elif (
            fault == "partial sums"
        ):  # NVIDIA/Megatron-LM#7452: norms keep the partial sum of their rank
            averaged(model, lambda name: "norm" in name, divide=1)
        elif (
            fault == "averaged sums"
        ):  # NVIDIA/Megatron-LM#7165: a sum over ranks is averaged again
            averaged(model)
        else:
            averaged(model, divide=1)

    return backward


FAULTS: dict[str, list[tuple[str, str]]] = {
    "healthy": [],
    "tokens of this rank": [("gradient", "")],
    "one use is not reduced": [("ranks-unsummed", "shared.weight and 1 other")],
    "partial sums": [("ranks-unsummed", "norm.weight and 1 other")],
    "averaged sums": [("gradient", "")],
}


def two_ranks(rank: int, fault: str) -> Any:
    result = check(Model(), tokens_of(rank), by_hand(rank, fault))
    return [(r.what, r.tensor, r.value, str(result)) for r in result if r.stage == "gradient"]


@pytest.mark.parametrize("fault", FAULTS)
def test_public_faults_of_two_ranks_are_located(fault: str, tmp_path: Path) -> None:
    first, second = run_ranks(two_ranks, 2, tmp_path, fault)
    assert first == second
    assert [reading[:2] for reading in first] == FAULTS[fault], first
    if fault == "averaged sums":
        assert first[0][2] == pytest.approx(0.5)
    if fault == "tokens of this rank":
        assert "micro-batches count 0.625, 2.5 times" in first[0][3]


def wrapped(rank: int, how: str) -> Any:
    model: Any = Model()
    if how == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        for module in (model.shared, model):
            fully_shard(module, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
        if how == "ddp, float16 sums":
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

            model.register_comm_hook(None, fp16_compress_hook)
    batch = tokens_of(rank) if how == "ddp, unlike counts" else tokens_of(0)
    parts = [batch, (batch[0].flip(0), batch[1].flip(0))]
    result = check(model, parts[::-1] if rank else parts)
    return (
        [(r.what, r.tensor) for r in result],
        dict(result.unseen),
        next(x for x in result.lines if x.startswith("grad")),
    )


@pytest.mark.parametrize("how", ["ddp", "fsdp2", "ddp, float16 sums", "ddp, unlike counts"])
def test_wrapped_models_are_compared_with_one_process(how: str, tmp_path: Path) -> None:
    first, second = run_ranks(wrapped, 2, tmp_path, how)
    assert first[0] == second[0]
    assert ("not followed through shards" in first[1].values()) == (how == "fsdp2"), first
    whats = {"ddp, float16 sums": "rounding", "ddp, unlike counts": "gradient"}
    assert {kind for kind, _ in first[0]} == {*filter(None, [whats.get(how)])}, first


def averaged_twice(rank: int) -> Any:
    """DDP averages the means of the ranks, and the loop divides by their number again."""

    def backward(model: nn.Module, batch: Any) -> None:
        loss(model, batch).backward()
        for p in model.parameters():
            p.grad /= 2

    model = DistributedDataParallel(Model())
    batch = tokens_of(0)
    result = check(model, (batch[0].roll(rank, 0), batch[1].roll(rank, 0)), backward)
    return [(r.what, r.value) for r in result]


def test_a_mean_that_is_averaged_twice_is_read(tmp_path: Path) -> None:
    for readings in run_ranks(averaged_twice, 2, tmp_path):
        assert readings == [("gradient", pytest.approx(0.5))]


def counted_over_ranks(rank: int, is_inside: bool) -> Readings:
    """As transformers' loop: the sum over a rank's labels, times ranks, over the labels of all ranks."""
    tokens, labels = tokens_of(rank)
    total = (labels != IGNORED).sum()
    dist.all_reduce(total)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        count = batch[2]
        if is_inside:
            count = (batch[1] != IGNORED).sum()
            dist.all_reduce(count)
        return 2 * summed(model, batch) / count

    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return ng.check(model, optimizer, batch=(tokens, labels, total), loss=loss)


@pytest.mark.parametrize("is_inside", [False, True])
def test_a_mean_over_the_labels_of_all_ranks_is_right_and_one_process_cannot_make_it_alone(
    is_inside: bool, tmp_path: Path
) -> None:
    for result in run_ranks(counted_over_ranks, 2, tmp_path, is_inside):
        assert result.ok and not len(result), result
        reason = result.unseen.get("the gradient", "")
        assert ("calls allreduce over ranks" in reason) == is_inside
        assert any("the loss is 2 times a mean" in line for line in result.lines) != is_inside


def inside(rank: int) -> Readings:
    """The loop calls the module in DistributedDataParallel, which reduces nothing then."""
    return check(
        DistributedDataParallel(Model()),
        tokens_of(rank),
        loss=lambda model, batch: loss(model.module, batch),
    )


def test_gradients_that_are_never_reduced_are_read_without_a_plain_loss(tmp_path: Path) -> None:
    for result in run_ranks(inside, 2, tmp_path):
        assert "ranks-unsummed" in [r.what for r in result]


# ── set-ups of strangers ──────────────────────────────────────────────────────────────────────────


def mean_square(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]).float() - batch[1]).square().mean()


@pytest.mark.parametrize("compute", ["int8-row", "nvfp4"])
def test_a_factor_is_seen_where_casts_are_coarse(compute: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64)).bfloat16()
    ng.swap_linears(model, compute)
    optimizer = ng.AdamW(model.parameters())
    batch = (torch.randn(64, 32).bfloat16(), torch.randn(64, 64))
    assert ng.check(model, optimizer, batch=batch, loss=mean_square).ok
    for factor in (-1.0, 0.5, 2.0):
        check = ng.check(
            model, optimizer, batch=batch, loss=mean_square,
            backward=lambda model, batch, factor=factor: (factor * mean_square(model, batch)).backward(),
        )  # fmt: skip
        assert "gradient" in {reading.what for reading in check}


def test_a_step_in_backward_is_said_and_undone() -> None:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step_at_once(p: Tensor) -> None:
        optimizer.step()

    model.weight.register_post_accumulate_grad_hook(step_at_once)
    before = model.weight.detach().clone()
    check = ng.check(
        model, optimizer, batch=(torch.randn(8, 8), torch.randn(8, 4)), loss=mean_square
    )
    assert [reading.what for reading in check] == ["step-order"]
    assert torch.equal(model.weight, before)


def test_weights_that_are_not_finite_are_no_step() -> None:
    model = nn.Linear(8, 4)
    model.weight.data[0, 0] = torch.nan
    result = check(model, (torch.randn(8, 8), torch.randn(8, 4)), loss=mean_square)
    assert {r.what for r in result} == {"nonfinite"}


class TopOne(nn.Module):
    """Each row takes its most likely expert."""

    def __init__(self, is_normalized: bool) -> None:
        super().__init__()
        self.is_normalized = is_normalized
        self.router, self.head = nn.Linear(16, 4, bias=False), nn.Linear(16, 4)
        self.experts = nn.Parameter(torch.randn(4, 16, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        weight, place = self.router(x).softmax(-1).topk(1, -1)
        if self.is_normalized:
            weight = weight / weight.sum(-1, keepdim=True)
        y = torch.einsum("nij,nj->ni", self.experts[place[:, 0]], x)
        return self.head(torch.tanh(y) * weight)


@pytest.mark.parametrize("is_normalized", [False, True])
def test_a_router_whose_gradient_is_rounding_alone_is_read(is_normalized: bool) -> None:
    torch.manual_seed(0)
    batch = (torch.randn(64, 16), torch.randn(64, 4))
    result = check(TopOne(is_normalized), batch, loss=mean_square)
    names = [(r.what, r.tensor) for r in result]
    assert names == [("rounding-alone", "router.weight")] * is_normalized, result


def test_a_bias_before_a_norm_whose_gradient_is_rounding_alone_is_not_accused() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    batch = (torch.randn(64, 16), torch.randn(64, 4))
    assert not len(check(model, batch, loss=mean_square))


class Noted(nn.Module):
    """Keeps an auxiliary loss, and returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Output:
        h = torch.tanh(self.body(x))
        self.penalty = h.square().mean()
        return Output(self.head(h))


@dataclass
class Output:
    logits: Tensor


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass(slots=True)
class Data:
    x: Tensor
    y: Tensor


@pytest.mark.parametrize("kind", [Pair, Data])
def test_models_and_batches_of_any_class_are_compared(
    kind: Callable[[Tensor, Tensor], Any],
) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(batch.x)
        random.random(), numpy.random.rand()
        return (output.logits.float() - batch.y).square().mean() + 0.1 * model.penalty

    torch.manual_seed(0)
    model = Noted()
    parts = [kind(torch.randn(64, 32), torch.randn(64, 4)) for _ in range(2)]
    loss(model, parts[0])
    before = random.getstate(), numpy.random.get_state()[2]
    for batch in (parts[0], parts):
        readings = check(model, batch, loss=loss)
        assert readings.ok and not readings.unseen, str(readings)
    assert (random.getstate(), numpy.random.get_state()[2]) == before


def test_small_networks_whose_units_flip_are_not_accused() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return mean_square(model, batch)

    for seed in range(4):
        torch.manual_seed(seed)
        layers = nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
        model = nn.Sequential(*layers)
        batch = (torch.randn(16, 16), torch.randn(16, 4))
        assert check(model, batch, loss=loss).ok, seed


def test_gradients_that_are_not_finite_in_training_mode_alone_are_read() -> None:
    class Divided(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.dropout(self.embed(tokens))
            return self.head(self.norm(x)) + (x.abs().sqrt().sum() * 1e-3)

    result = check(Divided(0.5), tokens_of(0))
    (reading,) = [r for r in result if r.what == "nonfinite"]
    assert reading.tensor == "embed.weight" and "not finite first: " in str(result)


def test_gradients_that_a_kernel_adds_elsewhere_are_not_accused() -> None:
    model = Model()
    for p in model.parameters():
        p.main_grad = torch.zeros_like(p)
    result = check(model, tokens_of(0))
    assert not read(result) and "main_grad" in result.unseen["the gradient"]
