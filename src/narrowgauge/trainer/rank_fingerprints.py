"""Fingerprints of a step by rank: what each rank held, sent and applied, in one number for each kind of tensor.

The fingerprint of a whole tensor says that two runs part in it, and not on which rank. So each rank also hashes its own part: the
tokens and outputs of its micro-batches, what it sent into the sum of the gradients, its part of the sum, the factor by which the
clip multiplied it, and its part of the stored weights and moments. What several ranks must hold alike is compared at once: a clip
that one rank alone leaves out shows in the step in which it happens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from narrowgauge.distributed.ranks import Ranks
from narrowgauge.distributed.replica_verification import replica_groups
from narrowgauge.errors import CorruptionError
from narrowgauge.numerics.summation import fingerprint, fingerprint_all
from narrowgauge.runs.fingerprint_rows import in_words, parted_in
from narrowgauge.runs.schema import Row

_SHOWN = 8
"""Tensors that are named where ranks part; in the next step all differ."""
_MODULUS = 1 << 64
_LEAF = 0x9E37_79B9_7F4A_7C15
"""Odd: places of what is sent one after the other lie apart."""


@dataclass(eq=False)
class RankFingerprints:
    """What one rank holds, sends and applies in a recorded step.

    Args:
        here: this process among those that train together; all call :meth:`row` alike.
    """

    here: Ranks
    factor: float | None = None
    _own: dict[str, int] = field(default_factory=dict)
    _alike: dict[str, dict[tuple[int, ...], dict[str, int]]] = field(default_factory=dict)
    _num_sent: int = 0

    def begin(self) -> None:
        """Begin a step."""
        self._own, self._alike, self._num_sent, self.factor = {}, {}, 0, None

    def sent(self, gradient: Tensor) -> None:
        """Take what this rank sends into the sum of the gradients, in the order in which it does.

        Args:
            gradient: flat, of a group of parameters.
        """
        self._num_sent += 1
        number = fingerprint(gradient, offset=self._num_sent * _LEAF % (1 << 62))
        self._own["sent"] = (self._own.get("sent", 0) + number) % _MODULUS

    def seen(self, entries: Mapping[str, Sequence[float]]) -> None:
        """Take the tokens and outputs of this rank's micro-batches."""
        for kind in dict.fromkeys(key.partition(":")[0] for key in entries):
            named = {key: int(entry[0]) for key, entry in entries.items() if key.startswith(f"{kind}:")}
            self._own[kind] = _digest(named)

    def held(self, named: Mapping[str, Tensor], own: Mapping[str, int]) -> None:
        """Take this rank's part of some tensors.

        Args:
            named: by ``KIND:NAME``; a DTensor says which other ranks hold the same part.
            own: the fingerprint of this rank's part of each.
        """
        if self.here.size == 1:
            return
        for key, tensor in named.items():
            table = self._alike.setdefault(key.partition(":")[0], {})
            for group in replica_groups(tensor):
                table.setdefault(tuple(dist.get_process_group_ranks(group)), {})[key] = own[key]
        for kind in dict.fromkeys(key.partition(":")[0] for key in named):
            self._own[kind] = _digest({key: own[key] for key in named if key.startswith(f"{kind}:")})

    def changed(self, entries: Mapping[str, int]) -> None:
        """Take the fingerprints of what changed on this rank since the last update, though nothing updated it."""
        self._own["held"] = _digest(entries) if entries else 0

    def row(self) -> Row:
        """The columns ``ranks`` and ``parted``; none of one process.

        Cost: a gather of some hundred bytes a rank; where ranks part, one of a number for each tensor.
        """
        if self.here.size == 1:
            return {}
        digests = {
            (kind, ranks): _digest(named) for kind, groups in self._alike.items() for ranks, named in groups.items()
        }
        of_all = self.here.gather((self._own, digests, self.factor))
        kinds = list(dict.fromkeys(kind for own, _, _ in of_all for kind in own))
        row: Row = {"ranks": {kind: [own.get(kind) for own, _, _ in of_all] for kind in kinds}}
        if any(factor is not None for _, _, factor in of_all):
            row["ranks"]["clip"] = [factor for _, _, factor in of_all]
        if any(_differ(key, [own for _, own, _ in of_all]) for _, found, _ in of_all for key in found):
            row["parted"] = self._parted()
        return row

    def _parted(self) -> Row:
        """The first tensors whose replicas differ, each with the number of every rank; ``None`` of a rank that has none."""
        mine: dict[tuple[str, tuple[int, ...]], int] = {}
        for groups in self._alike.values():
            mine |= {(key, ranks): number for ranks, named in groups.items() for key, number in named.items()}
        of_all = self.here.gather(mine)
        names = dict.fromkeys(place for each in of_all for place in each)
        found: Row = {}
        for key, ranks in names:
            if _differ((key, ranks), of_all):
                # Shards have groups of their own, whose numbers may differ from each other's.
                name = f"{key} of {in_words(ranks)}" if key in found else key
                found[name] = [each.get((key, ranks)) if rank in ranks else None for rank, each in enumerate(of_all)]
        return dict(list(found.items())[:_SHOWN])


def _digest(numbers: Mapping[str, int]) -> int:
    return int(fingerprint_all(numbers), 16)


def _differ(place: tuple[str, tuple[int, ...]], of_all: Sequence[Mapping[Any, int]]) -> bool:
    """Whether the ranks of a group have other numbers."""
    return len({of_all[rank].get(place) for rank in place[1]}) > 1


def require_alike(row: Row) -> None:
    """Refuse to go on where ranks hold or apply what differs and must not.

    Args:
        row: of ``fingerprints.jsonl``.
    Raises:
        CorruptionError: naming the tensor, and the rank where one is alone.
    """
    tensor, odd, said = parted_in(row)
    if tensor:
        advice = "Go back to the last checkpoint, and look at what one rank alone does to its gradients."
        check = "rest" if tensor.startswith("held:") else "replicas"
        rank, where = odd[0] if odd else None, None if tensor == "clip:factor" else tensor
        raise CorruptionError(f"{said}.", advice, rank, where, check)
