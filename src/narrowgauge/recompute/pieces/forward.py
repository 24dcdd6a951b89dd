"""The forward pass, by what each output may depend on: no reference model is needed.

The model is called on a slice of the step's batch in float32, without dropout and autocast, and again with one thing changed.
Of a language model that predicts the next token is asked: an output does not change with later tokens, nor with the other
sequences of the batch, nor with the random state; it does change with the token before, and with the order of the tokens
before. With relative positions it does not change where the whole sequence is moved. Where an output changes that must not, the
first module whose output changes is named.

Each module with parameters is also called alone on what it received (:mod:`narrowgauge.recompute.pieces.single_modules`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge._torch import plain_name
from narrowgauge.recompute.capture import ForwardCall, StepCapture
from narrowgauge.recompute.inputs_and_outputs import tensors_in
from narrowgauge.recompute.passes_again import (
    chosen_parameters,
    in_mode,
    moved_by_half_a_spacing,
    outputs_again,
)
from narrowgauge.recompute.piece_results import DEPARTS, EQUAL, PieceResult, not_checked
from narrowgauge.recompute.pieces.moved_sequences import has_relative_positions, moved_sequences
from narrowgauge.recompute.pieces.single_modules import AMPLIFIES, NUDGE, check_modules, nudged
from narrowgauge.recompute.random_states import RandomStates

PIECE = "forward"
ROWS, PLACES = 3, 64
"""The slice of a batch: sequences, and tokens of each."""
_MARGIN = 8.0
_LEAST_FREQUENCIES = 4


def check_forward(step: StepCapture, model: nn.Module) -> list[PieceResult]:
    """Ask of each output what it depends on.

    Args:
        step: with its forward passes.
        model: unwrapped.

    Cost: seven forward passes over at most 3 × 64 tokens, five more over fewer where positions are relative, and each module
        four times more.
    """
    call = next((each for each in step.calls if each.sequence is not None), None)
    if call is None:
        return [not_checked(PIECE, "no output has dims (batch, sequence, vocabulary)", step.step)]
    if (sliced := _sliced(call)) is None:
        return [not_checked(PIECE, "the model takes tensors beside tokens of (batch, sequence)", step.step)]
    questions = _Questions(step, model, sliced)
    if questions.base.shape[:2] != questions.tokens.shape:
        return [not_checked(PIECE, "outputs have another shape than tokens", step.step)]
    found = [
        *questions.ask(),
        *check_modules(step, model, sliced),
        *_frequencies(step, model),
        *_cut_ties(step, model),
    ]
    departs = [each for each in found if each.status == DEPARTS]
    return departs or [PieceResult(PIECE, EQUAL, (), 0.0, questions.envelope, step=step.step)]


def _sliced(call: ForwardCall) -> ForwardCall | None:
    """The call with a few tokens of a few sequences; ``None`` if it has inputs whose dims are not theirs."""
    tokens = call.tokens
    if tokens is None or tokens.shape[1] < 4:
        return None
    beside = [t for t in tensors_in((call.args, call.kwargs)) if t.ndim and t.shape != tokens.shape]
    if not all(_is_mask(t, tokens) for t in beside):
        return None
    return _mapped(
        replace(call, autocast=None),
        lambda t: t[:ROWS, :, :PLACES, :PLACES] if _is_mask(t, tokens) else t[:ROWS, :PLACES],
    )


def _is_mask(tensor: Tensor, tokens: Tensor) -> bool:
    """Whether a tensor has the dims of a mask of attention: batch, heads, and which token sees which."""
    batch, length = tokens.shape
    return tensor.ndim == 4 and tensor.shape[0] in (1, batch) and tensor.shape[2:] == (length, length)


def _mapped(call: ForwardCall, change: Callable[[Tensor], Tensor]) -> ForwardCall:
    def of(value: Any) -> Any:
        return change(value) if isinstance(value, Tensor) and value.ndim else value

    return replace(
        call, args=tuple(map(of, call.args)), kwargs={name: of(value) for name, value in call.kwargs.items()}
    )


def _cut_ties(step: StepCapture, model: nn.Module) -> list[PieceResult]:
    """The output's weight of a model of transformers whose configuration says that it is the embedding's, and which is not."""
    of: Any = model
    is_tied = bool(getattr(getattr(of, "config", None), "tie_word_embeddings", False))
    if not is_tied or not all(hasattr(of, name) for name in ("get_input_embeddings", "get_output_embeddings")):
        return []
    given, taken = (getattr(part(), "weight", None) for part in (of.get_input_embeddings, of.get_output_embeddings))
    if given is None or taken is None or given is taken or given.shape != taken.shape:
        return []
    names = {id(p): plain_name(name) for name, p in model.named_parameters()}
    where = tuple(names[id(p)] for p in (given, taken) if id(p) in names)
    return [PieceResult(PIECE, DEPARTS, where, 1.0, 0.0, "tie-cut", step=step.step)]


def _frequencies(step: StepCapture, model: nn.Module) -> list[PieceResult]:
    """Rotary frequencies that are zero, or values of a 16-bit format, in which an angle is further off at later positions."""
    found: dict[str, list[str]] = {}  # by the format, which is none where they are zero
    for name, buffer in model.named_buffers():
        is_rotary = any(part in name.lower() for part in ("rotary", "rope", "inv_freq"))
        if not is_rotary or buffer.ndim != 1 or not buffer.is_floating_point() or len(buffer) < _LEAST_FREQUENCIES:
            continue
        values = buffer.detach().double().cpu()
        if not values.any():
            found.setdefault("", []).append(plain_name(name))
            continue
        # Powers of two are values of every format, and all that a base of 2 or 4 gives.
        is_simple = torch.frexp(values).mantissa * 16 % 1 == 0
        for narrow in (torch.bfloat16, torch.float16):
            if bool(values.equal(values.to(narrow).double())) and not bool(is_simple.all()):
                found.setdefault(str(narrow).removeprefix("torch."), []).append(plain_name(name))
                break
    return [
        PieceResult(PIECE, DEPARTS, tuple(names), 1.0, 0.0, "frequencies-narrow", {"format": narrow}, step.step)
        if narrow
        else PieceResult(PIECE, DEPARTS, tuple(names), 1.0, 0.0, "frequencies-zero", {}, step.step)
        for narrow, names in found.items()
    ]


class _Questions:
    """The model in float32 on one slice, and what changes its outputs."""

    def __init__(self, step: StepCapture, model: nn.Module, call: ForwardCall) -> None:
        self.step, self.model, self.call = step, model, call
        assert call.tokens is not None
        self.tokens = call.tokens
        self.place = next(each.sequence for each in step.calls if each.sequence is not None) or ""
        self.chosen = chosen_parameters(model, step.step)
        own = {name: p.detach() for name, p in model.named_parameters()}
        is_copied = len(self.chosen) == len(own)  # a larger model keeps its own formats
        self.parameters = {name: p.float() if is_copied and p.is_floating_point() else p for name, p in own.items()}
        with in_mode(model, False):
            self.base = self._outputs(call)
            moved = moved_by_half_a_spacing({name: self.parameters[name] for name in self.chosen})
            other = outputs_again(model, self.parameters | moved, call)[self.place]
        self.envelope = _MARGIN * float((other - self.base).abs().max()) + 1e-12

    def _outputs(self, call: ForwardCall) -> Tensor:
        with torch.no_grad():
            return outputs_again(self.model, self.parameters, call)[self.place].detach()

    def _with_tokens(self, tokens: Tensor) -> ForwardCall:
        own = self.tokens
        return _mapped(self.call, lambda t: tokens if t is own else t)

    def ask(self) -> Iterator[PieceResult]:
        with in_mode(self.model, False):
            if drawn := list(self._random_state()):
                yield from drawn  # what else it depends on is hidden by that
                return
            yield from self._later_tokens()
            yield from self._other_rows()
            yield from self._masked_tokens()
            if any(_is_mask(t, self.tokens) for t in tensors_in((self.call.args, self.call.kwargs))):
                return  # what may be seen beside that is the mask's own affair
            yield from self._before_a_border()
            if bool(self._whole_rows().any()):
                yield from self._tokens_before()
            yield from self._moved()

    def _beside(self, name: str) -> Tensor | None:
        """An input beside the tokens, of their shape, by the name that transformers gives it."""
        found = self.call.kwargs.get(name)
        return found if isinstance(found, Tensor) and found.shape == self.tokens.shape else None

    def _borders(self) -> Tensor:
        """Where a sequence begins that was packed behind another in its row: its positions begin anew."""
        positions, borders = self._beside("position_ids"), torch.zeros_like(self.tokens, dtype=torch.bool)
        if positions is not None:
            borders[:, 1:] = positions[:, 1:] < positions[:, :-1]
        return borders

    def _whole_rows(self) -> Tensor:
        """The rows without padding and borders."""
        if self._beside("attention_mask") is None:
            is_unpadded = torch.ones_like(self.tokens[:, 0], dtype=torch.bool)
        else:
            seen = self.call.seen
            is_unpadded = torch.zeros_like(self.tokens[:, 0], dtype=torch.bool) if seen is None else seen.all(1)
        return is_unpadded & ~self._borders().any(1)

    def _before_a_border(self) -> Iterator[PieceResult]:
        borders = self._borders().nonzero().tolist()
        if not borders:
            return
        row, place = borders[0]
        other = self.tokens.clone()
        other[row, :place] = self.tokens[row].roll(1 - place)[:place].flip(0)
        if other.equal(self.tokens):
            return
        call, after = self._with_tokens(other), (slice(row, row + 1), slice(place, None))
        apart = self._apart(call, after)
        if apart > self.envelope:
            yield self._result("border-ignored", apart, self._first_module(call, after))

    def _apart(self, call: ForwardCall, where: tuple[slice, slice]) -> float:
        return float((self._outputs(call)[where] - self.base[where]).abs().max())

    def _result(self, cause: str, apart: float, where: tuple[str, ...] = ()) -> PieceResult:
        return PieceResult(PIECE, DEPARTS, where, apart, self.envelope, cause, step=self.step.step)

    def _random_state(self) -> Iterator[PieceResult]:
        call = replace(self.call, random=RandomStates.others())
        everywhere = (slice(None), slice(None))
        apart = self._apart(call, everywhere)
        if apart > self.envelope:
            yield self._result("random-in-evaluation", apart, self._first_module(call, everywhere))

    def _is_narrow(self) -> bool:
        """Whether the model computes in a narrower format than float32 in any case, as where a framework casts inside it."""
        generator = torch.Generator().manual_seed(0)
        chosen = {name: p for name in self.chosen if (p := self.parameters[name]).is_floating_point()}
        others = {name: nudged(p, generator, NUDGE) for name, p in chosen.items()}
        with torch.no_grad():
            moved = outputs_again(self.model, self.parameters | others, self.call)[self.place]
        ratio = float((moved - self.base).norm() / self.base.norm().clamp_min(1e-30)) / NUDGE
        return not 0 < ratio <= AMPLIFIES

    def _moved(self) -> Iterator[PieceResult]:
        if not has_relative_positions(self.model) or self._is_narrow():
            return
        for cause, apart in moved_sequences(self.model, self.call, self._outputs):
            if apart > self.envelope:
                yield self._result(cause, apart)

    def _later_tokens(self) -> Iterator[PieceResult]:
        # Not at the half, where a row of two packed sequences has its border.
        place = self.tokens.shape[1] * 5 // 8
        other = self.tokens.clone()
        other[:, place:] = self.tokens[:, :place].flip(1)[:, : other.shape[1] - place]
        if other.equal(self.tokens):
            return
        call = self._with_tokens(other)
        early = (slice(None), slice(0, place))
        apart = self._apart(call, early)
        if apart > self.envelope:
            yield self._result("sees-future", apart, self._first_module(call, early))

    def _other_rows(self) -> Iterator[PieceResult]:
        if len(self.tokens) < 2:
            return
        alone = _mapped(self.call, lambda t: t[:1])
        apart = float((self._outputs(alone)[0] - self.base[0]).abs().max())
        if apart > self.envelope:
            yield self._result("rows-mixed", apart, self._first_module(alone, (slice(0, 1), slice(None))))

    def _masked_tokens(self) -> Iterator[PieceResult]:
        is_seen = self.call.seen
        if is_seen is None or not bool(is_seen.any()):
            return
        other = torch.where(is_seen, self.tokens, self.tokens[is_seen][-1])
        if other.equal(self.tokens):
            return
        call = self._with_tokens(other)
        apart = float((self._outputs(call)[is_seen] - self.base[is_seen]).abs().max())
        if apart > self.envelope:
            yield self._result("padding-seen", apart)

    def _tokens_before(self) -> Iterator[PieceResult]:
        last = (slice(None), slice(-1, None))
        other = self.tokens.clone()
        other[:, -2] = self.tokens[:, 0]
        if bool((other != self.tokens).any()):
            apart = self._apart(self._with_tokens(other), last)
            if apart == 0.0:
                yield self._result("past-unseen", apart)
                return
        swapped = self.tokens.clone()
        swapped[:, [0, 1]] = self.tokens[:, [1, 0]]
        if bool((swapped != self.tokens).any()):
            apart = self._apart(self._with_tokens(swapped), last)
            replaced = self.tokens.clone()
            replaced[:, :2] = self.tokens[:, -2:]
            # A model that hardly looks at tokens so early does not tell whether it looks at their order.
            is_seen = self._apart(self._with_tokens(replaced), last) > self.envelope
            if is_seen and apart <= self.envelope / _MARGIN:
                yield self._result("order-unseen", apart)

    def _first_module(self, call: ForwardCall, where: tuple[slice, slice]) -> tuple[str, ...]:
        """The first module in the order of calls whose output changes there, or of several the innermost."""
        with _module_outputs(self.model) as before:
            self._outputs(self.call)
        with _module_outputs(self.model) as after:
            self._outputs(call)
        shape = self.tokens.shape
        for name, output in before.items():
            other = after.get(name)
            if other is None or output.ndim < 3 or output.shape[1] != shape[1] or other.shape[1] != shape[1]:
                continue
            apart = float((output[where] - other[where]).abs().max())
            if apart > self.envelope * max(1.0, float(output.abs().max())):
                return (name,)
        return ()


@contextmanager
def _module_outputs(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The first output of every module by name, in the order in which they end."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            first = next(tensors_in(output), None)
            if first is not None and first.is_floating_point():
                found.setdefault(name, first.detach())

        hook.__module__ = "of the audit's own pass"  # it is not left out
        return hook

    handles = [module.register_forward_hook(keep(plain_name(name))) for name, module in model.named_modules() if name]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
