"""Tiny models of transformers, from ``zoo.toml``, and layouts of other code bases."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomllib
import torch
import transformers
from torch import Tensor, nn

transformers.logging.set_verbosity_error()
TABLE = tomllib.loads(Path(__file__).with_name("zoo.toml").read_text())
MODELS = TABLE["models"]
UNRUN = (
    "CLIP", "Siglip", "Idefics3", "RecGemma", "Kosmos2", "Idefics", "Whisper turbo", "Blip2", "Musicgen decoder",
    "Qwen2 classifier", "RWKV",
)  # fmt: skip
"""Classes that take other inputs than :func:`inputs_of` has, or that change a tensor in place, so that
their backward pass fails.
"""


def build(name: str) -> nn.Module:
    row = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, row["config"])(**_options(row["options"]))
    model = getattr(transformers, row["model"])(config)
    return model


def _options(row: dict[str, Any]) -> dict[str, Any]:
    options = {}
    for key, value in row.items():
        if key == "base":
            options |= TABLE["base"]
        elif isinstance(value, dict):
            options[key] = _options(value)
        elif key != "class":
            options[key] = value
    if "class" in row:
        options["model_type"] = getattr(transformers, row["class"]).model_type
    return options


def inputs_of(name: str) -> dict[str, Tensor]:
    """Return a batch that the model's forward takes, with labels."""
    torch.manual_seed(3)
    tokens = torch.randint(3, 128, (2, 12))
    pixels = torch.randn(2, 3, 32, 32)
    match MODELS[name].get("inputs", "text"):
        case "features":
            return {"input_features": torch.randn(2, 16, 32), "labels": tokens}
        case "pixels":
            return {"pixel_values": pixels, "labels": torch.tensor([1, 3])}
        case "wave":
            return {"input_values": torch.randn(2, 800), "labels": torch.randint(1, 31, (2, 6))}
        case "images":
            places = torch.full((2, 16), 5)
            return {
                "input_ids": torch.cat([places, tokens], 1),
                "pixel_values": pixels,
                "labels": torch.cat([torch.full_like(places, -100), tokens], 1),
            }
    return {"input_ids": tokens, "labels": tokens}


# ── layouts of other code bases ───────────────────────────────────────────────────────────────────


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 128), nn.Linear(128, 64)


def lm(embed: int = 128, width: int = 64, **children: nn.Module) -> nn.Module:
    """Return a model of an embedding, children, and a head ``out``."""
    model = nn.Module()
    model.embed = nn.Embedding(embed, width)
    for name, child in children.items():
        model.add_module(name, child)
    model.out = nn.Linear(width, embed)
    return model


def blocks(count: int = 4) -> nn.ModuleList:
    return nn.ModuleList(Block() for _ in range(count))


def nano_gpt(is_tied: bool) -> nn.Module:
    """Return nanoGPT's layout: unlike parts in a ``ModuleDict``, more positions than tokens."""
    model = nn.Module()
    model.transformer = nn.ModuleDict(
        {"wte": nn.Embedding(128, 64), "wpe": nn.Embedding(256, 64), "h": blocks()}
    )
    model.lm_head = nn.Linear(64, 128, bias=False)
    if is_tied:
        model.lm_head.weight = model.transformer["wte"].weight
    return model


class GroupedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Parameter(torch.randn(8, 96, 64)) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(8, 64, 96))


class Biased(nn.Module):
    """Stacked weights, and a stacked bias of three dims."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = (nn.Parameter(torch.randn(4, *s)) for s in ((64, 96), (96, 64)))
        self.b1 = nn.Parameter(torch.randn(4, 1, 96))


def mixture(experts: nn.Module, router: nn.Module) -> nn.Module:
    block = nn.Module()
    block.experts, block.router = experts, router
    return block


def titan(wrap: Callable[[nn.Module], nn.Module] = lambda block: block) -> nn.Module:
    """Return torchtitan's layout: blocks in a ``ModuleDict``, the router below a module."""
    layers = nn.ModuleDict()
    for index in range(4):
        block = Block()
        router = nn.Module()
        router.gate = nn.Linear(64, 8, bias=False)
        block.moe = mixture(GroupedExperts(), router)
        layers[str(index)] = wrap(block)
    return lm(layers=layers)
