"""Gradients that travel in 8 bits: sums within their bound, equal on all ranks, unbiased, and as short as they say."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from torch import Tensor

import expectations
import narrowgauge as ng
from distributed.models import gradients_of
from distributed.test_reduction import KINDS, expected, found, placed, step
from narrowgauge.distributed.exchanges import EXCHANGES, ONE_RANK
from narrowgauge.spec.sums import REDUCTIONS
from ranks import run_ranks

ROWS = {name: row.share_of_amax for name, row in expectations.REDUCTIONS.items() if row.share_of_amax}
"""The largest error of an element of one rank's gradient, in the largest magnitude of the gradient."""


def every_kind(rank: int) -> dict[tuple[str, str], list[dict[str, Tensor]]]:
    """Five leaves on four ranks, in two rounds: two steps of each row and kind."""
    results: dict[tuple[str, str], list[dict[str, Tensor]]] = {}
    for name in ROWS:
        for kind in KINDS:
            model, called = placed(kind)
            reduction = ng.reduce_gradients_with(called, name, average=False)
            seen = results[name, kind] = []
            for _ in range(2):
                step(reduction, called, [rank, 4 if rank == 0 else None])
                seen.append(found(model))
                model.zero_grad()
    return results


def test_every_kind_of_model_gets_the_sum(tmp_path: Path) -> None:
    """Within the bound of each rank's rounding, and of that of the sum where it is gathered; on all ranks the same bits."""
    ranks = run_ranks(every_kind, 4, tmp_path)
    largest = {key: sum(gradients_of(leaf)[key].abs().max() for leaf in range(5)) for key in gradients_of(0)}
    for (name, kind), seen in ranks[0].items():
        for place, gradients in enumerate(seen):
            true = expected(range(5))
            assert gradients.keys() == true.keys()
            for key, value in gradients.items():
                # The largest magnitude may belong to another parameter in the same block.
                bound = ROWS[name] * max(largest.values()) * 2.5
                assert (value - true[key]).abs().max() <= bound, (name, kind, key)
                assert all(torch.equal(value, other[name, kind][place][key]) for other in ranks)
        first, second = seen[0]["head"], seen[1]["head"]
        assert not torch.equal(first, second), "two steps rounded equal gradients alike"


def test_every_place_step_and_micro_batch_has_random_bits_of_its_own() -> None:
    exchange = EXCHANGES["compressed8"](ONE_RANK, REDUCTIONS["compressed8"], True, 0)
    keys = set()
    for exchange.step, exchange.place, exchange._micro_batch, rank in itertools.product(range(3), repeat=4):
        keys |= {exchange._key(stage, rank, 1) for stage in range(2)}
    assert len(keys) == 3**4 * 2
    resumed, run = (EXCHANGES["compressed8"](ONE_RANK, REDUCTIONS["compressed8"], True, 0) for _ in range(2))
    for is_last in (False, True):
        run.add(torch.ones(2), torch.ones(2), is_last=is_last)
    resumed.step = 1
    assert run._key(0) == resumed._key(0)
