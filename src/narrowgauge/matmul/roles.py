"""The roles for which a linear layer stays wide, from what the model does, not from names.

* **head**: the output embedding that the model names, a weight that an embedding shares, or the logits of the vocabulary or of
  the labels. A head's errors go straight into the loss. DeepSeek-V3 and NVIDIA's recipes keep it wide.
* **router**: a layer beside experts whose outputs are one score for each, or a single gate. Near ties, an error chooses another
  expert.
* **adapter**: a layer inside an adapter of PEFT. Its inner side is a few columns, so a narrow product costs more than it saves.
* **last block**: of the model's blocks, the last share that a compute's ``keep_last`` names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from narrowgauge.matmul.experts import is_experts
from narrowgauge.matmul.own_code import stacks_of
from narrowgauge.torch_support.torch_names import outermost_lists


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
    roles: dict[str, str] = {}
    names = {module: name for name, module in model.named_modules()}
    heads = _heads(model)
    for module, name in names.items():
        if module in heads:
            roles[name] = "head"
        for router in _routers_in(module):
            roles[names[router]] = "router"
        for attribute in getattr(module, "adapter_layer_names", ()):
            adapter = getattr(module, attribute, None)
            if isinstance(adapter, nn.Module):
                roles |= {names[part]: "adapter" for part in adapter.modules()}
    for block in _last_blocks(model, keep_last):
        for part in block.modules():
            roles.setdefault(names[part], "last block")
    return roles


def _heads(model: Any) -> set[nn.Module]:
    shared = set()
    vocabulary = 0
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            shared.add(id(module.weight))
            # A table of positions or of token types may have as many rows as a layer has outputs:
            # only the largest is the vocabulary.
            vocabulary = max(vocabulary, module.num_embeddings)
    counts = {vocabulary, getattr(getattr(model, "config", None), "num_labels", 0)}
    in_blocks: set[nn.Module] = set()
    for blocks in outermost_lists(model):
        in_blocks.update(blocks.modules())
    heads = set()
    if hasattr(model, "get_output_embeddings"):
        heads.add(model.get_output_embeddings())
        heads.discard(None)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            is_outside = module not in in_blocks and module.out_features in counts
            if is_outside or id(module._parameters.get("weight")) in shared:
                heads.add(module)
    return heads


def _routers_in(parent: nn.Module) -> list[nn.Module]:
    """Return the linear children of a mixture that score its experts."""
    counts = {1}
    for child in parent.children():
        if isinstance(child, nn.ModuleList) and len({type(member) for member in child}) == 1:
            counts.add(len(child))
        elif is_experts(child):
            counts.update(len(weights) for weights in stacks_of(child).values())
    if counts == {1}:
        return []
    routers: list[nn.Module] = []
    for child in parent.children():
        if isinstance(child, nn.Linear) and child.out_features in counts:
            routers.append(child)
    return routers


def _last_blocks(model: nn.Module, share: float) -> list[nn.Module]:
    blocks: list[nn.Module] = []
    for members in outermost_lists(model):
        if len(members) > max(1, len(blocks)):
            blocks = list(members)
    if not share or not blocks:
        return []
    return blocks[-max(1, round(share * len(blocks))) :]


def role_of(name: str, roles: Mapping[str, str]) -> str:
    """Return the role of a layer, or of a projection of experts; empty without one."""
    if name in roles:
        return roles[name]
    owner = re.sub(r"\.[^.]+$", "", name)
    return "last block" if roles.get(owner) == "last block" else ""
