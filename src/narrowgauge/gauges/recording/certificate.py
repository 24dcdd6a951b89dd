"""The certificate of a checkpoint: hashes of every state of a loop, compared after a resume, causes first."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from narrowgauge.checks.resume import PLAIN, generator_entries, states_of
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.distributed.sharding import fingerprints_whole_and_own
from narrowgauge.numerics.dtensor import is_sharded
from narrowgauge.runs.schema import Row

_PATTERNS = {
    "weights": r"^weights\|", "batch": r"^batch\||loader|sampler", "generators": r"generator|\brng|\bseed\b",
    "rate": r"schedul|\blr\b|_lr\b", "scaler": r"scale", "step counter": r"\bstep\b|step_count",
    "masters": r"master|tail|low_bits", "states": "",
}  # fmt: skip
"""What a state is, by the first pattern that its name ``OBJECT|KIND|NAME`` has."""
_CAUSES = ("rate", "step counter", "scaler", "generators", "batch", "states", "masters", "weights")
"""The order of differences: an earlier one changes the later ones."""


class Certificate:
    """Write hashes of a loop's states beside a checkpoint, and compare the loop with them after the load.

    Args:
        model: its state_dict is the weights.
        optimizer: with all its states and settings.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._objects, self._undrawn = {"weights": model, "optimizer": optimizer}, generator_entries()

    def write(self, path: str | Path, objects: Mapping[str, Any]) -> None:
        """Write ``PATH.certificate.json``. All ranks make the call."""
        states = self._states(objects)
        # A generator that the loop does not draw from changes nothing.
        undrawn = [name for name, entry in self._undrawn.items() if states[name]["bits"] == entry["bits"]]
        if all_ranks().is_first:
            file_of(path).write_text(json.dumps({name: x for name, x in states.items() if name not in undrawn}))

    def differences(self, path: str | Path, objects: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield each kind of state that is not as it was saved and a sentence about it, causes first."""
        file = file_of(path)
        saved: Row | None = all_ranks().of_first(lambda: json.loads(file.read_text()) if file.is_file() else None)
        if saved is None:
            yield "", f"nothing was compared with the checkpoint, because {file} is gone"
            return
        now, kinds = self._states(objects), dict[tuple[int, str], list[str]]()
        for name in (name for name in saved if name.partition("|")[0] in {*self._objects, *objects, "generators"}):
            cause = next(cause for cause, pattern in _PATTERNS.items() if re.search(pattern, name))
            kinds.setdefault((_CAUSES.index(cause), name.split("|")[1]), []).append(name)
        absent = {"bits": "", "shown": "nothing"}
        for (place, kind), names in sorted(kinds.items(), key=lambda item: item[0][0]):
            # A value that is None is set by the next step.
            pairs = [(name, saved[name], now.get(name, absent)) for name in names]
            if other := [pair for pair in pairs if pair[1]["bits"] != pair[2]["bits"] and pair[2]["shown"] != "None"]:
                name, before, after = other[0]
                part, more = name.split("|", 2)[2], f"; {len(other)} of {len(names)} differ" if len(names) > 1 else ""
                label = f"{kind} {part}".strip()
                yield kind, f"{_CAUSES[place]}: {label} was {before['shown']} when saved, and is {after['shown']}{more}"

    def _states(self, objects: Mapping[str, Any]) -> dict[str, Row]:
        objects = {k: x.get_state() if isinstance(x, torch.Generator) else x for k, x in objects.items()}
        named = {**self._objects, **objects}.items()
        states = {f"{key}|{kind}|{name}": x for key, value in named for kind, name, x in states_of(key, value)}
        tensors = {name: x for name, x in states.items() if isinstance(x, Tensor)}
        bits, _ = fingerprints_whole_and_own(tensors)
        plain = {name: repr(x) for name, x in states.items() if isinstance(x, (*PLAIN, list))}
        entries = {name: {"bits": text, "shown": text[:60]} for name, text in plain.items()}
        for name, tensor in tensors.items():
            dtype, total = str(tensor.dtype).removeprefix("torch."), cast(Any, tensor.detach().double().square().sum())
            norm = math.sqrt(float(total.full_tensor() if is_sharded(total) else total))
            shown = f"{dtype} of norm {norm:.6g} and hash {bits[name] % 65536:04x}" if tensor.numel() > 1 else ""
            entries[name] = {"bits": f"{dtype} {bits[name]}", "shown": shown or f"{dtype} {tensor.sum().item():g}"}
        return entries | {name: {"bits": x["bits"], "shown": x["shown"]} for name, x in generator_entries().items()}


def file_of(path: str | Path) -> Path:
    """Return the file of a checkpoint's certificate."""
    return Path(f"{Path(path)}.certificate.json")
