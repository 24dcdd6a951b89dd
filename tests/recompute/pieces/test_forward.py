"""The forward pass, by what its outputs depend on."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from narrowgauge.recompute.departures import unchecked
from narrowgauge.recompute.piece_results import DEPARTS, EQUAL
from narrowgauge.recompute.step_watcher import StepWatcher
from recompute.audited_loop import LENGTH, VOCABULARY, WIDTH, Loop, next_token


@pytest.mark.parametrize("settings", [{}, {"autocast": True}, {"dtype": torch.bfloat16}, {"dropout": 0.3}])
def test_a_healthy_model_is_equal(settings: dict[str, Any]) -> None:
    loop = Loop(**settings).run(2)
    forward = [each for each in loop.results[2] if each.piece == "forward"]
    assert [each.status for each in forward] == [EQUAL], forward
    assert all(module.training for module in loop.model.modules()), "the mode was not put back"


def leaky(loop: Loop) -> None:
    loop.model.blocks[1].is_causal = False


def shifted(loop: Loop) -> None:
    loop.model.blocks[0].norm2.register_forward_hook(lambda m, args, output: output + 0.01 * output.roll(-1, 1))


def mixed(loop: Loop) -> None:
    loop.model.norm.register_forward_hook(lambda m, args, output: output - output.mean(0, keepdim=True))


def blind(loop: Loop) -> None:
    for block in loop.model.blocks:
        block.out.register_forward_hook(lambda m, args, output: output * 0.0)  # type: ignore[union-attr, operator]


class Unordered(nn.Module):
    """Attends to all tokens before, whose order nothing tells."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(48, 16), nn.Linear(16, 48)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(tokens).cumsum(1))
        return logits


def unordered(loop: Loop) -> None:
    model = Unordered()
    loop.optimizer.param_groups[0]["params"] = list(model.parameters())
    assert loop.watcher is not None
    loop.watcher.remove()
    loop.model = model  # type: ignore[assignment]
    loop.watcher = type(loop.watcher)(model, loop.optimizer, 2, loop.keep)


def cast(loop: Loop) -> None:
    linear = loop.model.blocks[1].down
    linear.forward = lambda x: nn.functional.linear(  # type: ignore[union-attr, assignment]
        x.bfloat16(),
        linear.weight.bfloat16(),
        linear.bias.bfloat16(),  # type: ignore[union-attr, operator]
    ).float()


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_mask_of_packed_sequences_is_asked_about_later_tokens(is_causal: bool) -> None:
    """Each half of a row sees itself alone, before each token or all of it."""
    half = torch.arange(LENGTH) < LENGTH // 2
    sees = half[:, None] == half[None]
    sees = sees.tril() if is_causal else sees

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

        def forward(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
            x = self.embedding(tokens)[:, None]
            logits: Tensor = self.head(nn.functional.scaled_dot_product_attention(x, x, x, attention_mask)[:, 0])
            return logits

    loop = Loop(every=0)
    model = Masked()
    loop.optimizer.param_groups[0]["params"] = list(model.parameters())
    loop.watcher = StepWatcher(model, loop.optimizer, 2, loop.keep)
    loop.loss = (
        lambda tokens: next_token(  # type: ignore[method-assign]
            model(tokens[:, :-1], sees[None, None].expand(len(tokens), 1, -1, -1)), tokens
        )
        / 2
    )
    loop.run(2)
    assert loop.names() == (set() if is_causal else {"sees-future"})
    assert "forward" not in unchecked(loop.results[2])


@pytest.mark.parametrize(("base", "dtype", "names"), [
    (1e4, torch.float32, []), (1e4, torch.bfloat16, ["frequencies-narrow"]), (1e4, torch.float16, ["frequencies-narrow"]),
    (4.0, torch.bfloat16, []),
])  # fmt: skip
def test_rotary_frequencies_that_were_rounded_are_a_note(base: float, dtype: torch.dtype, names: list[str]) -> None:
    """Powers of two are values of every format."""
    loop = Loop()
    exponents = torch.arange(8, dtype=torch.float32)
    exponents = exponents / 8 if base > 4 else exponents / 2
    loop.model.blocks[0].register_buffer("inv_freq", (base**-exponents).to(dtype).float())
    loop.run(2)
    assert [each.name for each in loop.findings()] == names
    assert all(str(dtype).removeprefix("torch.") in each.message for each in loop.findings())


def test_rotary_frequencies_of_zero_are_named() -> None:
    loop = Loop()
    loop.model.blocks[1].register_buffer("inv_freq", torch.zeros(8))
    assert [(each.name, each.where) for each in loop.run(2).findings()] == [("frequencies-zero", "blocks.1.inv_freq")]


def cached(loop: Loop) -> None:
    """A layer multiplies by its first weights, and hands gradients straight through to the present ones."""
    layer = loop.model.blocks[0].up
    first = layer.weight.detach().clone()
    layer.forward = lambda x: nn.functional.linear(x, first + (layer.weight - layer.weight.detach()))  # type: ignore[method-assign]


FAULTS: dict[str, tuple[Callable[[Loop], None], str, str]] = {
    "a mask is missing": (leaky, "sees-future", "blocks.1.out"),
    "a shift along the sequence": (shifted, "sees-future", "blocks.0.norm2"),
    "a mean over the batch": (mixed, "rows-mixed", "norm"),
    "attention returns nothing": (blind, "past-unseen", ""),
    "no positions": (unordered, "order-unseen", ""),
    "one module casts": (cast, "module-cast", "blocks.1.down"),
    "a copy of weights": (cached, "weights-cached", "blocks.0.up"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_forward_pass_is_named_with_its_module(name: str) -> None:
    plant, cause, where = FAULTS[name]
    loop = Loop()
    plant(loop)
    loop.run(2)
    found = [each for each in loop.results[2] if each.piece == "forward"]
    assert [(each.cause, ", ".join(each.where)) for each in found] == [(cause, where)]


def test_a_model_that_does_not_look_at_early_tokens_says_nothing_of_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attention = nn.functional.scaled_dot_product_attention

    def local(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> torch.Tensor:
        ones = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool)
        return attention(q, k, v, attn_mask=ones.tril() & ones.triu(-3))

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", local)
    assert not Loop().run(3).findings()


def test_a_model_without_a_float32_path_is_not_checked() -> None:
    loop = Loop(dtype=torch.bfloat16, lr=1e-2)
    loop.model.norm.register_forward_hook(lambda m, args, output: output.bfloat16())
    loop.run(2)
    assert "forward" in unchecked(loop.results[2]) and not loop.findings()


class Packed(nn.Module):
    """One layer of attention that takes positions, and the borders of packed sequences from them, unless it ignores these."""

    def __init__(self, ignores_borders: bool) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.ignores_borders = ignores_borders

    def forward(self, tokens: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position(position_ids)
        of = (position_ids == 0).cumsum(1) * (0 if self.ignores_borders else 1)
        seen = (of[:, :, None] == of[:, None, :]) & torch.ones(tokens.shape[1], tokens.shape[1]).tril().bool()
        q, k, v = self.qkv(x).chunk(3, -1)
        logits: torch.Tensor = self.head(x + nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen))
        return logits


@pytest.mark.parametrize(("ignores", "packs"), [(False, True), (True, True), (True, False)])
def test_a_packed_sequence_that_sees_the_one_before_is_named(ignores: bool, packs: bool) -> None:
    loop = Loop(every=0, micro_batches=1)
    loop.model = Packed(ignores)  # type: ignore[assignment]
    loop.optimizer = torch.optim.AdamW(loop.model.parameters())
    loop.watcher = StepWatcher(loop.model, loop.optimizer, 2, loop.keep)
    positions = torch.arange(LENGTH) % (LENGTH // 2 if packs else LENGTH)

    def loss(tokens: torch.Tensor) -> torch.Tensor:
        return next_token(loop.model(tokens[:, :-1], position_ids=positions.expand(len(tokens), -1)), tokens)

    loop.loss = loss  # type: ignore[method-assign]
    assert loop.run(2).names() == ({"border-ignored"} if ignores and packs else set())


def test_padding_before_every_row_says_nothing_of_the_order() -> None:
    loop = Loop(every=0, micro_batches=1)

    class Masked(Packed):
        def forward(self, tokens: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(tokens * attention_mask, (attention_mask.cumsum(1) - 1).clamp_min(0))

    loop.model = Masked(False)  # type: ignore[assignment]
    loop.optimizer = torch.optim.AdamW(loop.model.parameters())
    loop.watcher = StepWatcher(loop.model, loop.optimizer, 2, loop.keep)
    mask = (torch.arange(LENGTH) >= 4).long()
    loop.loss = lambda tokens: next_token(
        loop.model(tokens[:, :-1], attention_mask=mask.expand(len(tokens), -1)), tokens
    )  # type: ignore[method-assign, call-arg]
    assert not {"order-unseen", "past-unseen"} & loop.run(2).names()


def test_positions_that_are_counted_from_a_mask_of_floats_are_no_cast() -> None:
    class Counted(nn.Embedding):
        def forward(self, mask: Tensor) -> Tensor:
            return super().forward(mask.cumsum(1).long() - 1)

    loop = Loop()
    loop.model.position = Counted(LENGTH, WIDTH)
    loop.optimizer.param_groups[0]["params"] = list(loop.model.parameters())

    def hook(module: nn.Module, args: Any) -> Any:
        return (torch.ones(1, len(args[0]), dtype=torch.float32),)

    loop.model.position.register_forward_pre_hook(hook)
    loop.watcher.remove()  # type: ignore[union-attr]
    loop.watcher = StepWatcher(loop.model, loop.optimizer, 2, loop.keep)
    assert "module-cast" not in loop.run(2).names()


def test_weights_that_a_configuration_ties_and_that_are_two_are_named() -> None:
    def named(is_cut: bool) -> set[str]:
        loop = Loop()
        model: Any = loop.model
        model.config = SimpleNamespace(tie_word_embeddings=True)
        model.get_input_embeddings, model.get_output_embeddings = lambda: model.embedding, lambda: model.head
        if not is_cut:
            model.head.weight = model.embedding.weight
        return loop.run(2).names()

    assert "tie-cut" in named(True) and "tie-cut" not in named(False)


class Signs(nn.Linear):
    """Weights of one bit, with gradients straight through."""

    def forward(self, x: Tensor) -> Tensor:
        signs = self.weight.sign() * self.weight.abs().mean().detach()
        return nn.functional.linear(x, self.weight + (signs - self.weight).detach())


class FromZero(nn.Module):
    """Begins as nothing, as adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.scale)


class Named(nn.Linear):
    """Takes its input by name."""

    def forward(self, *, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


class ByName(nn.Module):
    def __init__(self, layer: Named) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x=x)
        return output


@pytest.mark.parametrize("is_copy", [False, True])
def test_modules_that_take_inputs_by_name_are_asked_too(is_copy: bool) -> None:
    loop = Loop(every=0)
    layer = Named(2 * WIDTH, WIDTH)
    if is_copy:
        first = layer.weight.detach().clone()
        layer.forward = lambda x: nn.functional.linear(x, first + (layer.weight - layer.weight.detach()))  # type: ignore
    loop.model.blocks[1].down = ByName(layer)  # type: ignore[assignment]
    loop.optimizer = torch.optim.AdamW(loop.model.parameters(), lr=1e-3)
    loop.watcher = StepWatcher(loop.model, loop.optimizer, 2, loop.keep)
    loop.run(2)
    assert [each.where for each in loop.results[2] if each.cause == "weights-cached"] == [
        ("blocks.1.down.layer",)
    ] * is_copy
    assert {each.status for each in loop.results[2] if each.piece == "forward"} == {DEPARTS if is_copy else EQUAL}


def test_weights_that_are_rounded_or_begin_at_zero_are_no_copies() -> None:
    loop = Loop(every=0)
    block = loop.model.blocks[0]
    signs = Signs(WIDTH, 2 * WIDTH, bias=False)
    block.up, block.norm2 = signs, nn.Sequential(block.norm2, FromZero())  # type: ignore[assignment]
    loop.optimizer = torch.optim.AdamW(loop.model.parameters(), lr=1e-3)
    loop.watcher = StepWatcher(loop.model, loop.optimizer, 2, loop.keep)
    assert not loop.run(2).findings()
