"""How causes get into a running session: strikes for the table of ``injections.py``, beside those of ``faults.py``.

Each follows a published description of its cause (named in the table) and not what a diagnosis looks for. A strike is called
before every step from its own on, so what grows or comes in bursts is a function of the steps since; what is wrapped once
stays.

Claim: none of its own; ``diagnosis.py`` measures. Baseline: the undisturbed run. Run: ``./dev bench diagnosis``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import faults
import torch
from faults import Strike, once, scale_gradients, wrap_forward
from torch import Tensor

from narrowgauge.trainer.session import Session

ATTENTION, MLP, DOWN = (f"{faults.LAYER}.{part}" for part in ("self_attn", "mlp", "mlp.down_proj"))
FIRST_MLP, VALUES_OUT = "model.layers.0.mlp", f"{ATTENTION}.o_proj"


def several(*strikes: Strike) -> Strike:
    """All of them, in order."""

    def strike(session: Session, since: int) -> None:
        for each in strikes:
            each(session, since)

    return strike


# ── what a module takes and gives ────────────────────────────────────────────────────────────────────────────────────────


def output_of(module: str, change: Callable[[Any, int], Any]) -> Strike:
    """``change(output, steps since)`` instead of what a module gives, in training only."""

    def begin(session: Session) -> None:
        began = session.step

        def changed(output: Any) -> Any:
            return change(output, session.step - began) if torch.is_grad_enabled() else output

        wrap_forward(session.model.get_submodule(module), changed)

    return once(begin)


def input_of(module: str, change: Callable[[Tensor, int], Tensor]) -> Strike:
    """``change(input, steps since)`` instead of what a module takes."""

    def begin(session: Session) -> None:
        began = session.step

        def enter(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (change(args[0], session.step - began), *args[1:])

        session.model.get_submodule(module).register_forward_pre_hook(enter)

    return once(begin)


def growing_channel(factor: float, every: int = 1) -> Strike:
    """One channel of the residual stream that grows by a factor a step; with ``every``, in one token of so many."""

    def grow(output: Tensor, since: int) -> Tensor:
        gain = torch.ones_like(output)
        gain[:, ::every, 3] = factor**since
        return output * gain

    return output_of(MLP, grow)


def rare_huge_channel(factor: float, period: int) -> Strike:
    """One channel of the residual stream times a factor, in the first token of every so many batches."""

    def burst(output: Tensor, since: int) -> Tensor:
        if since % period:
            return output
        gain = torch.ones_like(output)
        gain[:, 0, 3] = factor
        return output * gain

    return output_of(MLP, burst)


def growing_feature(factor: float, every: int = 1) -> Strike:
    """One feature of what enters down_proj that grows by a factor a step from the rms of all; in one token of ``every``."""

    def grow(x: Tensor, since: int) -> Tensor:
        y = x.clone()
        y[..., ::every, 0] = x.detach().square().mean().sqrt() * factor**since
        return y

    return input_of(DOWN, grow)


def massive_channel(times: float) -> Strike:
    """A channel that is so many times the rms of all at the first token, the same for every input."""

    def add(output: Tensor, since: int) -> Tensor:
        y = output.clone()
        y[:, 0, 5] = times * output.detach().float().square().mean().sqrt().to(output.dtype)
        return y

    return output_of(FIRST_MLP, add)


def surges(factor: float, period: int = 12, length: int = 2) -> Strike:
    """What enters down_proj times a factor, for a few steps of every ``period``."""
    return input_of(DOWN, lambda x, since: x * factor if since % period < length else x)


def gain(factor: float) -> Strike:
    """What the first MLP gives times a factor, from now on."""
    return output_of(FIRST_MLP, lambda output, since: output * factor)


def biased_attention(share: float) -> Strike:
    """Attention outputs that are all rounded the same way, by a share of their magnitude."""
    return input_of(VALUES_OUT, lambda x, since: x - share * x.abs())


def narrow_rotary(to: torch.dtype) -> Strike:
    """Sines and cosines of the positions cast to a narrow format on their way in."""
    return output_of("model.rotary_emb", lambda pair, since: tuple(part.to(to).to(part.dtype) for part in pair))


def spread_blocks(factor: float) -> Strike:
    """Every 32nd feature of what enters down_proj times a factor, and its weights divided by it: the same function, and blocks
    whose values lie that far apart."""

    def begin(session: Session) -> None:
        with torch.no_grad():
            session.model.get_parameter(f"{DOWN}.weight")[:, ::32] /= factor

    def widen(x: Tensor, since: int) -> Tensor:
        y = x.clone()
        y[..., ::32] = x[..., ::32] * factor
        return y

    return several(once(begin), input_of(DOWN, widen))


def silent_module(*modules: str) -> Strike:
    """Modules whose output is zero from now on."""
    return several(*(output_of(module, lambda output, since: output * 0.0) for module in modules))


# ── weights and gradients ────────────────────────────────────────────────────────────────────────────────────────────────


def growing_by_updates(names: Sequence[str], factor: float) -> Strike:
    """Weights whose gradients point against themselves, so that every update makes them larger, ``factor`` learning rates a
    step: what normalized queries and keys would not let happen."""

    def begin(session: Session) -> None:
        found = [session.model.get_parameter(name) for name in names]
        for group in list(session.optimizer.param_groups):
            of = [any(p is each for each in found) for p in group["params"]]
            parts = {key: group[key] for key in ("params", "param_names") if key in group}
            own = {key: [p for p, ours in zip(part, of, strict=True) if ours] for key, part in parts.items()}
            group.update(
                {key: [p for p, ours in zip(part, of, strict=True) if not ours] for key, part in parts.items()}
            )
            if any(of):
                session.optimizer.param_groups.append({**group, **own, "lr_factor": factor})
        for parameter in found:
            parameter.register_hook(lambda gradient, p=parameter: _against(gradient, p.detach()))

    return once(begin)


def _against(gradient: Tensor, weight: Tensor) -> Tensor:
    """A gradient, and three times its own rms against the weight."""
    return gradient - 3.0 * gradient.float().norm().to(gradient) * weight / weight.float().norm().to(weight)


def scaled_gradients(factor: float, growth: float = 1.0) -> Strike:
    """All gradients times a factor that grows by another one a step."""
    return once(lambda session: scale_gradients(session, factor, growth))


def gradients_of(pattern: str, factor: float, period: int = 1, length: int = 1) -> Strike:
    """Gradients of the parameters whose names contain a word times a factor, in ``length`` of every ``period`` steps."""

    def begin(session: Session) -> None:
        began = session.step

        def change(gradient: Tensor) -> Tensor:
            return gradient * factor if (session.step - began) % period < length else gradient

        found = [p for name, p in session.model.named_parameters() if pattern in name]
        assert found, pattern
        for parameter in found:
            parameter.register_hook(change)

    return once(begin)


def drifting_logits(shift: float) -> Strike:
    """Logits that all move by the same amount a step: the loss does not see it."""
    seen: list[Tensor] = []

    def strike(session: Session, since: int) -> None:
        head = session.model.get_submodule("lm_head")
        if since == 0:
            head.register_forward_pre_hook(lambda _, args: seen.__setitem__(slice(None), [args[0].detach()]))
            return
        mean = seen[0].float().reshape(-1, seen[0].shape[-1]).mean(0)
        with torch.no_grad():
            head.weight.add_((shift * mean / mean.square().sum()).to(head.weight.dtype))

    return strike


def flipped(strike: Callable[[Session], None], period: int) -> Strike:
    """A bit that flips again every so many steps."""
    return lambda session, since: strike(session) if since % period == 0 else None


def small_loss_scale(scale: float) -> Strike:
    """A loss scale that much too small, from now on."""
    return once(faults.set_loss_scale(scale))


def unscaled_gradients(to: str, factor: float = 1.0) -> Strike:
    """Narrow layers whose gradients enter without a scale; ``factor`` makes them smaller still."""
    strike = once(faults.go_on_in(faults.unscaled(to)))
    return several(strike, once(lambda session: scale_gradients(session, factor))) if factor != 1.0 else strike
