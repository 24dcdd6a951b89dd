"""The roles for which a linear layer stays wide, from the model's parts
(:mod:`narrowgauge.torch_support.anatomy`), not from names.

* **head**: the logits of the vocabulary or of the labels. A head's errors go straight into the loss.
  DeepSeek-V3 and NVIDIA's recipes keep it wide.
* **router**: scores experts, or gates a shared one. Near ties, an error chooses another expert.
* **adapter**: a layer inside an adapter of PEFT. Its inner side is a few columns, so a narrow product costs more than it saves.
* **last block**: of the model's blocks, the last share that a compute's ``keep_last`` names.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping

from torch import nn

from narrowgauge.torch_support.anatomy import Parts, parts


def roles_of(model: nn.Module, keep_last: float = 0.0) -> dict[str, str]:
    """Return the role of each module that stays wide, by name.

    Example:
        >>> class Gpt(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embed, self.body, self.out = nn.Embedding(100, 8), nn.Linear(8, 8), nn.Linear(8, 100)
        >>> roles_of(Gpt())
        {'out': 'head'}
    """
    names = {module: name for name, module in model.named_modules()}
    roles: dict[str, str] = {}
    model_parts = parts(model)
    groups = {
        "head": model_parts.heads,
        "router": model_parts.routers,
        "adapter": model_parts.adapters,
        "last block": _last(model_parts, keep_last),
    }
    for role, modules in groups.items():
        for module in modules:
            roles.setdefault(names[module], role)
    return roles


def _last(model_parts: Parts, share: float) -> list[nn.Module]:
    """Return the modules of the last blocks, ``share`` of all."""
    if not share:
        return []
    blocks = model_parts.blocks
    if not blocks and (model_parts.heads or model_parts.runs):
        warnings.warn(
            "Cannot keep the last blocks wide because nothing says which of the model's modules "
            "are its blocks. Name those to keep with keep=.",
            stacklevel=4,
        )
    first = len(blocks) - max(1, round(share * len(blocks)))
    modules: list[nn.Module] = []
    for block in blocks[max(0, first) :]:
        modules.extend(block.modules())
    return modules


def role_of(name: str, roles: Mapping[str, str]) -> str:
    """Return the role of a layer, or of a projection of experts; empty without one."""
    if name in roles:
        return roles[name]
    owner = re.sub(r"\.[^.]+$", "", name)
    return "last block" if roles.get(owner) == "last block" else ""
