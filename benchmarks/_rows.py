"""The optimizers that a training may have, by the name of its row.

==================================  =================================================================
row                                 optimizer
==================================  =================================================================
``word``, ``float8-row/word``       ours, over bfloat16 weights (``float32/float32``: float32 ones)
``galore/word rank=32``             our GaLore, with options; embedding and head keep AdamW
``autocast``                        ``torch.optim.AdamW`` over float32 weights, under autocast
``autocast exp_avg_sq=e5m2``        the same, where a tensor is rounded after each step
``torch AdamW bfloat16``            a peer of ``_peers.py``, over bfloat16 weights
``published/coat``                  published states by their formula (``_published_states.py``)
==================================  =================================================================

Words after a row: ``random`` draws the low bits that the bfloat16 weights lack; ``turned`` turns the
lowest bfloat16 bit of one weight before the run, which shows how far two equal runs end apart; ``lora`` or
``dora`` before it trains adapters of rank 16 alone, and ``dora galore/word rank=4`` is GradNormLoRP
(2412.19616) as its authors' scripts run it; ``decay=0`` is the weight decay of matrices; ``sums=nearest`` keeps
sums of gradients in e5m2, to nearest, with a scale a tensor, as FP8-LM does (2310.18313).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from _peers import PEERS, bytes_held
from _published_states import FORMULAS, RoundedAdamW, rounded_states
from torch import nn

import narrowgauge as ng
from narrowgauge.numerics.rounding import round_nearest
from narrowgauge.optim import GaLore
from narrowgauge.spec.formats import get_format

PEERS_BY_NAME = {peer.name: peer for peer in PEERS}


@dataclass(frozen=True)
class Row:
    """A row's name in parts: ``lora float8-row/word random rank=32``."""

    name: str
    adapters: str
    is_random: bool
    is_turned: bool
    options: dict[str, str] = field(default_factory=dict)


def row_of(text: str):
    """Split the name of a row."""
    words = text.split()
    adapters = words.pop(0) if words[0] in ("lora", "dora") else ""
    options = dict(word.split("=") for word in words if "=" in word)
    flags = ("random", "turned")
    name = " ".join(word for word in words if "=" not in word and word not in flags)
    return Row(name, adapters, "random" in words, "turned" in words, options)


# ── sums of micro-batches ─────────────────────────────────────────────────────────────────────────


class Float8Sums:
    """Sums of micro-batches in e5m2, to nearest, with a power of two for each tensor."""

    def __init__(self, parameters) -> None:
        self.parameters = list(parameters)
        self.sums = {}

    @torch.no_grad()
    def add(self) -> None:
        """Add the gradients of a micro-batch, and take them."""
        e5m2 = get_format("float8_e5m2")
        for p in self.parameters:
            total = p.grad.float() + self.sums.get(p, 0.0)
            _, exponent = torch.frexp(total.abs().max())
            scale = torch.ldexp(torch.tensor(1.0), exponent - 15)
            self.sums[p] = round_nearest(total / scale, e5m2) * scale
            p.grad = None

    def give(self) -> None:
        """Put the sums where the optimizer reads them."""
        for p, total in self.sums.items():
            p.grad = total.to(p.dtype)
        self.sums.clear()


# ── an optimizer over a model ─────────────────────────────────────────────────────────────────────


def groups_of(named, decay: float, outer=()):
    """Return the parameters that train in groups: matrices decay, vectors do not. Those with a name
    of ``outer`` keep AdamW beside another rule.
    """
    groups = {}
    for name, p in named:
        if p.requires_grad:
            is_outer = any(part in name for part in outer)
            options = {"params": [], "weight_decay": decay if p.ndim > 1 else 0.0}
            if is_outer:
                options["rule"] = "adamw"
            groups.setdefault((p.ndim > 1, is_outer), options)["params"].append((name, p))
    return [*groups.values()]


def unnamed(groups):
    """Return groups of parameters without names, as older optimizers take them."""
    return [{**group, "params": [p for _, p in group["params"]]} for group in groups]


def give_adapters(model: nn.Module, kind: str, seed: int) -> None:
    """Add LoRA or DoRA adapters of rank 16 to all linear layers, and freeze the rest."""
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(seed)
    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", use_dora=kind == "dora")
    inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


@torch.no_grad()
def turn_a_bit(model: nn.Module) -> None:
    """Turn the lowest bit that bfloat16 has of one weight of the first attention layer."""
    for name, parameter in model.named_parameters():
        if "q_proj" in name:
            parameter.view(torch.int32)[0, 0] ^= 1 << 16
            return


def recipe_of(row) -> str:
    """Return the recipe of a row of ours, which names its storage, its rule or its compute too."""
    rule, _, storage = row.name.partition("/")
    if rule == "galore" or not storage:
        return f"bfloat16/{storage or rule}"
    return row.name


def ours(row, model: nn.Module, seed: int, options) -> torch.optim.Optimizer:
    """Give the model the layers of a recipe, and return our optimizer."""
    recipe = recipe_of(row)
    decay = options.pop("weight_decay")
    kind = ng.AdamW
    outer = ()
    if row.name.startswith("galore/"):
        kind = GaLore
        outer = ("embed_tokens", "lm_head")  # Jordan et al. 2024
        for name, value in row.options.items():
            options[name] = float(value) if name == "scale" else int(value)

    def grouped(named, **others) -> ng.Optimizer:
        return kind(groups_of(named, decay, outer), **others)

    options |= {"seed": seed, "low_bits": "random" if row.is_random else "zero"}
    _, optimizer = ng.prepare(model, recipe, optimizer=grouped, **options)
    return optimizer


def prepared(text: str, model: nn.Module, seed: int, options) -> torch.optim.Optimizer:
    """Give the model the dtypes and layers of a row, and return its optimizer.

    Args:
        options: ``lr``, ``betas``, ``weight_decay`` of matrices, and ``max_grad_norm``.
    """
    row = row_of(text)
    if row.is_turned:
        turn_a_bit(model)
    if row.adapters:
        give_adapters(model, row.adapters, seed)
    others = {"lr": options["lr"], "betas": options["betas"], "eps": 1e-8}
    decay = float(row.options.pop("decay", options["weight_decay"]))
    if row.name in PEERS_BY_NAME or row.name in FORMULAS:
        ng.cast_parameters(model, torch.bfloat16)
    groups = unnamed(groups_of(model.named_parameters(), decay))
    if row.name == "autocast":
        return RoundedAdamW(groups, rounded_states(row.options), **others)
    if row.name in FORMULAS:
        return RoundedAdamW(groups, FORMULAS[row.name], **others)
    if row.name in PEERS_BY_NAME:
        return PEERS_BY_NAME[row.name].make(groups, **others)
    return ours(row, model, seed, {**options, "eps": 1e-8, "weight_decay": decay})


def bytes_per_param(optimizer: torch.optim.Optimizer) -> float:
    """Return the bytes of weight, gradient and states for each parameter."""
    if isinstance(optimizer, RoundedAdamW):
        return optimizer.row.bytes_per_param
    if isinstance(optimizer, ng.Optimizer):
        return float(optimizer.bytes_per_param())
    return bytes_held(optimizer)
