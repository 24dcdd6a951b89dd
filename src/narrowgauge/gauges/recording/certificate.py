"""The certificate of a checkpoint: hashes of every state of a loop, compared after a resume, causes
first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading
from narrowgauge.checks.resume import Entry, differences, generators, snapshot
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.runs.atomic_io import load_json, read_bytes, write_whole


class Certificate:
    """Write hashes of a loop's states beside a checkpoint, and compare the loop with them after the
    load.

    Args:
        model: its state_dict is the weights.
        optimizer: with all its states and settings.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._objects = {"weights": model, "optimizer": optimizer}
        self._undrawn = generators()

    def write(self, path: str | Path, objects: Mapping[str, Any]) -> None:
        """Write ``PATH.certificate.json``. All ranks make the call."""
        entries = self._entries(objects)
        for name, entry in self._undrawn.items():
            # A generator that the loop does not draw from changes nothing.
            if entries.get(name) == entry:
                del entries[name]
        if all_ranks().is_first:
            write_whole(_file(path), json.dumps(entries).encode())

    def differences(self, path: str | Path, objects: Mapping[str, Any]) -> list[Reading]:
        """Return a reading for each kind of state that is not as it was saved, causes first."""
        file = _file(path)
        written = all_ranks().of_first(lambda: read_bytes(file))
        if written is None:
            message = f"Nothing was compared with the checkpoint, because {file} is gone."
            return [KINDS["not-restored"].reading(message=message)]
        saved: dict[str, Entry] = load_json(written)
        now = self._entries(objects)
        names = {*self._objects, *objects, "generators"}
        before = {}
        for name, entry in saved.items():
            # A value that is None is set by the next step.
            is_unset = name in now and now[name]["shown"] == "None"
            if name.partition("|")[0] in names and not is_unset:
                before[name] = entry
        readings = []
        for reading in differences(before, now, "after the load", "", []):
            readings.append(replace(reading, advice=f"{reading.tensor}: {reading.advice}"))
        return readings

    def _entries(self, objects: Mapping[str, Any]) -> dict[str, Entry]:
        return snapshot({**self._objects, **objects}, {}) | generators()


def _file(path: str | Path) -> Path:
    return Path(f"{Path(path)}.certificate.json")
