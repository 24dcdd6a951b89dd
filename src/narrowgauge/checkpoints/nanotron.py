"""Read the weights of a nanotron checkpoint, joined over tensor-parallel ranks.

``model/…/model_weight.safetensors`` holds a whole parameter. ``…_pp-rank-0-of-1_tp-rank-1-of-2.safetensors`` holds a shard. Its
metadata list its slices of the whole. Source: nanotron at 2411b02, ``serialize/weights.py``.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from narrowgauge.errors import DataError

_FILE = re.compile(r"model_(.+?)(?:_pp-rank-\d+-of-\d+_tp-rank-\d+-of-\d+)?\.safetensors")


def read_nanotron(folder: str | Path) -> dict[str, Tensor]:
    """Return the weights of a checkpoint by name, whole, in the dtype of the files.

    Args:
        folder: a step's folder, or the one whose ``latest.txt`` names the newest step.
    Raises:
        DataError: no such checkpoint, experts in files of their own, or a missing part.
    """
    folder = Path(folder)
    if (folder / "latest.txt").is_file():
        folder = folder / (folder / "latest.txt").read_text(encoding="utf-8").strip()
    weights: dict[str, Tensor] = {}
    missing: dict[str, Tensor] = {}
    for file in sorted((folder / "model").rglob("*.safetensors")):
        match = _FILE.fullmatch(file.name)
        if match is None or "_exp-rank-" in file.name:
            raise DataError(f"{file} is no weight, or an expert's.", "Save it with expert_parallel_size 1.")
        name = ".".join((*file.parent.relative_to(folder / "model").parts, match[1]))
        try:
            with safe_open(file, framework="pt") as opened:
                part, metadata = opened.get_tensor("data"), opened.metadata() or {}
        except (OSError, SafetensorError) as error:
            raise DataError(f"Cannot read {file}: {error}.") from error
        shape = [int(size) for size in re.findall(r"\d+", metadata.get("unsharded_shape", "").replace("int64", ""))]
        if name not in weights:
            weights[name] = torch.zeros(shape or part.shape, dtype=part.dtype)
            missing[name] = torch.ones(weights[name].shape, dtype=torch.bool)
        for pair in metadata.get("local_global_slices_pairs", "#").split(";"):
            local, target = (tuple(map(_slice, side.split("|"))) if side else ... for side in pair.split("#"))
            weights[name][target] = part[local]
            missing[name][target] = False
    if not weights:
        raise DataError(f"{folder} holds no weights of nanotron.", "Name the folder that contains model/.")
    for name, mask in missing.items():
        if mask.any():
            raise DataError(f"{folder} lacks {int(mask.sum())} values of '{name}'.", "Copy the files of all ranks.")
    return weights


def _slice(text: str) -> slice:
    return slice(*(None if part == "None" else int(part) for part in text.split(",")))
