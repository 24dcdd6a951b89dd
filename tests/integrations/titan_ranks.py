"""What each rank of a torchtitan run does; importing it loads nothing of torchtitan, whose libraries start threads."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def resume_on_rank(rank: int, folder: str, recipe: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of a run on two ranks that continues from the checkpoint in a folder, and its weights."""
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    from integrations.titan_on_cpu import configured, train, weights_of
    from narrowgauge.integrations.torchtitan_optimizer import with_recipe

    config = with_recipe(configured(Path(folder), ranks=2), recipe)
    config.checkpoint.enable = True
    trainer, losses, _ = train(config)
    return losses, weights_of(trainer)
