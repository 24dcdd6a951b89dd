"""Healthy loops that people train in low precision, as rows: a linear layer, a model and a loss, from what is run in 2026.

A row names its casts and its objective. ``ng.check`` must accuse none of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng

WORDS, WIDTH, ROWS, LENGTH = 64, 32, 8, 13
B16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
Loss = Callable[[nn.Module, Any], Tensor]


def tokens() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, WORDS, (ROWS, LENGTH + 1), generator=generator)


# ── linear layers with casts of their own ─────────────────────────────────────────────────────────


def straight(x: Tensor, values: Tensor) -> Tensor:
    """Return values with the gradient of ``x``."""
    return x + (values - x).detach()


def scaled(x: Tensor, largest: Tensor, dtype: torch.dtype) -> Tensor:
    scale = torch.finfo(dtype).max / largest.clamp_min(1e-12).float()
    return ((x.float() * scale).to(dtype).float() / scale).to(x.dtype)


def float8_tensor(x: Tensor) -> Tensor:
    return straight(x, scaled(x, x.detach().abs().amax(), E4M3))


def float8_row(x: Tensor) -> Tensor:
    return straight(x, scaled(x, x.detach().abs().amax(-1, keepdim=True), E4M3))


def mx_blocks(x: Tensor) -> Tensor:
    blocks = x.detach().float().unflatten(-1, (-1, 16))
    largest = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-12)
    scale = torch.exp2((448 / largest).log2().floor())
    return straight(x, ((blocks * scale).to(E4M3).float() / scale).flatten(-2).to(x.dtype))


def int8_row(x: Tensor) -> Tensor:
    scale = x.detach().abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
    return straight(x, (x / scale).round().clamp(-127, 127) * scale)


def int4_groups(x: Tensor) -> Tensor:
    groups = x.unflatten(-1, (-1, 16))
    low, high = groups.detach().aminmax(dim=-1, keepdim=True)
    scale = (high - low).clamp_min(1e-6) / 15
    zero = (-low / scale).round()
    codes = ((groups / scale).round() + zero).clamp(0, 15)
    return straight(x, ((codes - zero) * scale).flatten(-2))


def ternary(x: Tensor) -> Tensor:
    scale = x.detach().abs().mean().clamp_min(1e-6)
    return straight(x, (x / scale).round().clamp(-1, 1) * scale)


def packed_bits(x: Tensor) -> Tensor:
    largest = x.detach().abs().amax().float().clamp_min(1e-12)
    stored = (x.detach().float() * 448 / largest).to(E4M3).view(torch.uint8).clone()
    return straight(x, (stored.view(E4M3).float() * largest / 448).to(x.dtype))


def as_is(x: Tensor) -> Tensor:
    return x


def casting(activations: Callable[[Tensor], Tensor], weights: Callable[[Tensor], Tensor]) -> Any:
    """Return a class of linear layers with casts of their operands."""

    class Casting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(activations(x), weights(self.weight), self.bias)

    return Casting


class Hybrid(torch.autograd.Function):
    """E4M3 forward and E5M2 gradients, as Transformer Engine's hybrid recipe."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x8, weight8 = (scaled(t, t.abs().amax(), E4M3) for t in (x, weight))
        ctx.save_for_backward(x8, weight8)
        return x8 @ weight8.t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x8, weight8 = ctx.saved_tensors
        g8 = scaled(g, g.abs().amax(), E5M2)
        return g8 @ weight8, g8.flatten(0, -2).t() @ x8.flatten(0, -2)


class HybridLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Hybrid.apply(x, self.weight) + self.bias


class Delayed(nn.Linear):
    """Scales of the largest magnitudes of earlier steps."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("history", torch.full((4,), 8.0))

    def forward(self, x: Tensor) -> Tensor:
        largest = self.history.amax().clone()
        if self.training:
            with torch.no_grad():
                self.history.copy_(self.history.roll(1))
                self.history[0] = x.detach().abs().amax().float()
        return F.linear(straight(x, scaled(x, largest, E4M3)), self.weight, self.bias)


class Learned(nn.Linear):
    """A learned step size for int8 weights (LSQ)."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.step = nn.Parameter(self.weight.detach().abs().amax() / 100)

    def forward(self, x: Tensor) -> Tensor:
        ratio = (self.weight / self.step).clamp(-127, 127)
        return F.linear(x, straight(ratio, ratio.round()) * self.step, self.bias)


class FourBit(nn.Module):
    """A frozen base of 4-bit codes with a table, and an adapter, as QLoRA."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        base = nn.Linear(inputs, outputs)
        blocks = base.weight.detach().view(-1, 16)
        largest = blocks.abs().amax(1, keepdim=True)
        table = torch.linspace(-1, 1, 16)
        codes = (blocks / largest).unsqueeze(-1).sub(table).abs().argmin(-1).to(torch.uint8)
        self.register_buffer("codes", codes[:, ::2] * 16 + codes[:, 1::2])
        self.register_buffer("largest", largest)
        self.register_buffer("table", table)
        self.shape = outputs, inputs
        self.down = nn.Linear(inputs, 4, bias=False)
        self.up = nn.Linear(4, outputs, bias=False)
        nn.init.normal_(self.up.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        codes = torch.stack([self.codes // 16, self.codes % 16], -1).flatten(1)
        weight = (self.table[codes.long()] * self.largest).view(self.shape).to(x.dtype)
        return x @ weight.t() + self.up(self.down(x))


class Adapted(nn.Linear):
    """A float32 adapter beside a frozen bfloat16 base."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, dtype=B16)
        self.requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, 4, bias=False), nn.Linear(4, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.up(self.down(x))


# ── models ────────────────────────────────────────────────────────────────────────────────────────


class Attention(nn.Module):
    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.qkv, self.out = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.out(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.attention = Attention(linear)
        self.up, self.down = linear(WIDTH, 2 * WIDTH), linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        x = x + self.attention(F.layer_norm(x, (WIDTH,)), mask)
        return x + self.down(F.gelu(self.up(F.layer_norm(x, (WIDTH,)))))


class Attached(torch.autograd.Function):
    """Add a loss by its gradient alone, as Megatron's router does."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor) -> Tensor:
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        return g, torch.ones(())


class Routed(Block):
    """Two of four experts, with a balance loss that is attached."""

    def __init__(self, linear: Any) -> None:
        super().__init__(linear)
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        x = super().forward(x, mask)
        shares = self.gate(x).float().softmax(-1)
        top = shares.topk(2, -1)
        used = F.one_hot(top.indices, 4).sum(-2).float()
        x = Attached.apply(x, 0.04 * (used.mean((0, 1)) * shares.mean((0, 1))).sum())
        weights = (shares * used).to(x.dtype)
        for number, expert in enumerate(self.experts):
            x = x + weights[..., number, None] * expert(x)
        return x


class Recomputed(Block):
    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        if self.training:
            return checkpoint(super().forward, x, mask, use_reentrant=False)
        return super().forward(x, mask)


class Net(nn.Module):
    """A causal language model of one block, with a float32 residual stream or one in bfloat16."""

    def __init__(self, linear: Any = nn.Linear, block: Any = Block, *, ties: bool = False) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH + 1, WIDTH)
        self.blocks = nn.ModuleList(block(linear) for _ in range(1))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if ties:
            self.head.weight = self.embedding.weight

    def hidden(self, ids: Tensor, mask: Any = None) -> Tensor:
        x = self.embedding(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x, mask)
        return F.layer_norm(x, (WIDTH,))

    def forward(self, ids: Tensor, mask: Any = None) -> Tensor:
        return self.head(self.hidden(ids, mask))


# ── objectives ────────────────────────────────────────────────────────────────────────────────────


def next_token(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())


def autocast(loss: Loss, dtype: torch.dtype = B16) -> Loss:
    def inner(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype):
            return loss(model, batch)

    return inner


def logprobs(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids[:, :-1]).float().log_softmax(-1)
    return logits.gather(-1, ids[:, 1:, None])[..., 0]


def preferred(model: nn.Module) -> Loss:
    """Return DPO's loss beside a reference that does not train."""
    reference = ng.cast_parameters(copy.deepcopy(model).requires_grad_(False), B16)

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        with torch.no_grad():
            base = logprobs(reference, ids)
        good, bad = (logprobs(model, ids) - base).sum(-1).chunk(2)
        return -F.logsigmoid(0.1 * (good - bad)).mean()

    return loss


def chunked(model: Any, ids: Tensor) -> Tensor:
    """The loss of a few positions at a time, whose logits are recomputed."""

    def part(x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model.head(x).float(), labels, reduction="sum")

    x, labels = model.hidden(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()
    total = torch.zeros(())
    for rows, some in zip(x.chunk(4), labels.chunk(4), strict=True):
        total = total + checkpoint(part, rows, some, use_reentrant=False)
    return total / len(labels)


class FusedLoss(torch.autograd.Function):
    """A head and its loss in one function, whose gradient is computed in forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        logits = (x @ weight.t()).float()
        shares = logits.softmax(-1)
        value = F.cross_entropy(logits, labels)
        shares[torch.arange(len(labels)), labels] -= 1
        g = (shares / len(labels)).to(x.dtype)
        ctx.save_for_backward(g @ weight, g.t() @ x)
        return value

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        by_x, by_weight = ctx.saved_tensors
        return g * by_x, g * by_weight, None


def fused(model: Any, ids: Tensor) -> Tensor:
    x = model.hidden(ids[:, :-1]).flatten(0, 1)
    return FusedLoss.apply(x, model.head.weight, ids[:, 1:].flatten())


# ── the rows ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Row:
    """A loop: what makes the model, its objective, and its passes.

    Args:
        casts: dtype of the weights.
        objective: the loss; ``of`` makes it from the model, such as with a reference.
    """

    model: Callable[[], nn.Module] = Net
    objective: Loss = next_token
    of: Callable[[nn.Module], Loss] | None = None
    casts: torch.dtype | None = None
    backward: Any = None

    def check(self) -> Any:
        """Ask ``ng.check`` about the loop."""
        torch.manual_seed(0)
        model = self.model()
        if self.casts is not None:
            model = ng.cast_parameters(model, self.casts)
        loss = self.objective if self.of is None else self.of(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = (
            ng.AdamW(trained, lr=1e-3) if self.casts else torch.optim.AdamW(trained, lr=1e-3)
        )
        return ng.check(model, optimizer, batch=tokens(), loss=loss, backward=self.backward)


def net(linear: Any = nn.Linear, block: Any = Block, **options: bool) -> Callable[[], nn.Module]:
    return lambda: Net(linear, block, **options)


def in_parts(loss: Loss) -> Any:
    """Return a loop's passes over four micro-batches."""

    def backward(model: nn.Module, batch: Any) -> None:
        for part in batch.chunk(4):
            (loss(model, part) / 4).backward()

    return backward


def summed_in_float32(model: nn.Module, ids: Tensor) -> None:
    """Float32 sums beside bfloat16 gradients, as gradient buffers keep."""
    sums = {p: torch.zeros_like(p, dtype=torch.float32) for p in model.parameters()}

    def add(p: Tensor) -> None:
        sums[p] += p.grad
        p.grad = None

    handles = [p.register_post_accumulate_grad_hook(add) for p in model.parameters()]
    in_parts(next_token)(model, ids)
    for handle in handles:
        handle.remove()
    for p, total in sums.items():
        p.grad = total.to(p.dtype)


E4 = casting(float8_row, float8_row)
LOOPS: dict[str, Row] = {
    "bfloat16 weights": Row(casts=B16),
    "bfloat16 weights, tied": Row(net(ties=True), casts=B16),
    "bfloat16 autocast": Row(objective=autocast(next_token)),
    "bfloat16 autocast, recomputed": Row(net(block=Recomputed), autocast(next_token)),
    "bfloat16 in four micro-batches": Row(casts=B16, backward=in_parts(next_token)),
    "bfloat16 gradients summed in float32": Row(casts=B16, backward=summed_in_float32),
    "float8 a tensor, straight through": Row(net(casting(float8_tensor, float8_tensor))),
    "float8 a tensor, four micro-batches": Row(net(casting(float8_tensor, float8_tensor)), backward=in_parts(next_token)),
    "float8 a row": Row(net(E4), casts=B16),
    "float8, recomputed": Row(net(E4, Recomputed)),
    "float8 blocks with power-of-two scales": Row(net(casting(mx_blocks, mx_blocks)), casts=B16),
    "float8 forward, E5M2 gradients": Row(net(HybridLinear), casts=B16),
    "float8 with delayed scales": Row(net(Delayed)),
    "float8 bits in bytes": Row(net(casting(as_is, packed_bits)), casts=B16),
    "int8 a row": Row(net(casting(int8_row, int8_row))),
    "int4 groups of weights (QAT)": Row(net(casting(int8_row, int4_groups))),
    "ternary weights": Row(net(casting(int8_row, ternary))),
    "learned step size": Row(net(Learned)),
    "4-bit base and adapters": Row(net(FourBit), objective=autocast(next_token)),
    "float32 adapters over bfloat16, autocast": Row(net(Adapted), autocast(next_token)),
    "DPO": Row(of=preferred, casts=B16),
    "experts with an attached balance loss": Row(net(block=Routed), casts=B16),
    "loss in chunks": Row(objective=chunked, casts=B16),
    "fused head and loss": Row(objective=fused, casts=B16),
}  # fmt: skip
"""Each is healthy: what ``ng.check`` says of it beyond notes is wrong."""
