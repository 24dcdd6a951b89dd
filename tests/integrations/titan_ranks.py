"""What each rank of a torchtitan run does; importing it loads nothing of torchtitan, whose libraries start threads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


def resume_on_rank(rank: int, folder: str, recipe: str) -> tuple[list[float], dict[str, torch.Tensor], dict[str, Any]]:
    """The losses of a recorded run on two ranks that continues from the checkpoint in a folder, its weights and states."""
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    os.environ["WORLD_SIZE"], os.environ["MASTER_PORT"] = "2", "29500"  # of a group that is there already
    from integrations.titan_on_cpu import configured, in_groups, train
    from narrowgauge.integrations.torchtitan import with_recipe, with_record

    config = with_record(with_recipe(configured(Path(folder), in_groups(), ranks=2), recipe, audit_every=1))
    config.checkpoint.enable = True
    found = train(config)
    return found.losses, found.weights, found.states
