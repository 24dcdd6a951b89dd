"""Which linear layers stay wide, and why: by where they stand in the model
(:mod:`narrowgauge.torch_support.model_parts`), not by their names.

* **outside the blocks**: heads, input projections, embeddings of time. Their errors go straight
  into the loss, or into every block. DeepSeek-V3 and NVIDIA's recipes keep them wide.
* **router**: scores experts, or gates a shared one. Near ties, an error chooses another expert.
* **adapter**: a layer inside an adapter of PEFT. Its inner side is a few columns, so a narrow product costs more than it saves.
* **last block**: of the model's blocks, the last share that a compute's ``keep_last`` names.
"""

from torch import nn

from narrowgauge.errors import warn_caller
from narrowgauge.matmul import experts
from narrowgauge.matmul.linear import is_linear
from narrowgauge.torch_support.model_parts import parts


def multiplied(model: nn.Module) -> dict[str, nn.Module]:
    """Return a model's linear layers, and the owners of its experts' projections, by the names of
    the layers and of the projections.
    """
    layers = {name: module for name, module in model.named_modules() if is_linear(module)}
    return layers | experts.projections(model)


def roles_of(model: nn.Module, keep_last: float = 0.0, *, warns: bool = False) -> dict[str, str]:
    """Return the role of each layer that stays wide, by name.

    Args:
        keep_last: the fraction of the blocks, at the end, that stays wide.
        warns: whether to warn of a model without blocks: all its layers are narrow.
    Example:
        >>> class Gpt(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.body = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2))
        ...         self.out = nn.Linear(8, 100)
        >>> roles_of(Gpt())
        {'out': 'outside the blocks'}
    """
    model_parts = parts(model)
    blocks = model_parts.blocks
    roles: dict[nn.Module, str] = {}
    if blocks and keep_last:
        for block in blocks[-max(1, round(keep_last * len(blocks))) :]:
            roles |= dict.fromkeys(block.modules(), "last block")
    roles |= dict.fromkeys(model_parts.adapters, "adapter")
    roles |= dict.fromkeys(model_parts.routers, "router")
    inside = model_parts.inside
    layers = multiplied(model)
    if warns and not inside and layers:
        warn_caller(
            f"Nothing says which modules of this {type(model).__name__} are its blocks, so all of "
            "its linear layers are narrow, the last one too. Name those to keep with keep=.",
        )
    by_name = {}
    for name, module in layers.items():
        is_outside = bool(inside) and module not in inside
        if module in roles or is_outside:
            by_name[name] = roles.get(module, "outside the blocks")
    return by_name
