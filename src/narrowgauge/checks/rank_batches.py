"""What each rank holds of weights, gradients and batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading
from narrowgauge.checks.set_up import inner_name
from narrowgauge.checks.sites import tensors_in
from narrowgauge.checks.step_samples import evenly_spread
from narrowgauge.distributed.ranks import Ranks
from narrowgauge.numerics.dtensor import is_sharded
from narrowgauge.numerics.hashing import fingerprint


def differing_ranks(gradients: Mapping[str, Tensor], ranks: Ranks) -> dict[str, int]:
    """Return the number of ranks whose gradient has other bits than rank 0's, by tensor, without
    equal tensors.
    """
    fingerprints = {name: fingerprint(gradient) for name, gradient in gradients.items()}
    first, *other_ranks = ranks.gather(fingerprints)
    counts = Counter[str]()
    for prints in other_ranks:
        counts.update(name for name, bits in first.items() if prints.get(name) != bits)
    return counts


def weights_of_ranks(model: nn.Module, ranks: Ranks) -> list[dict[str, int]]:
    """Return a hash of a sample of each weight by name, of each rank; none where parameters are
    sharded as DTensors. All ranks make the call.
    """
    weights = {}
    if ranks.size > 1 and not any(map(is_sharded, model.parameters())):
        for name, p in model.named_parameters():
            weights[inner_name(name)] = fingerprint(evenly_spread(p))
    return ranks.gather(weights)


def has_own_batches(model: nn.Module) -> bool:
    """Return whether each rank trains on its own batch.

    Ranks that share a layer by tensor parallelism may share one.
    """
    is_fsdp = any(type(m).__name__.startswith("FSDP") for m in model.modules())
    return is_fsdp or not any(map(is_sharded, model.parameters()))


def equal_batches(model: nn.Module, of_ranks: Sequence[Any]) -> Iterator[Reading]:
    """Yield a reading where all ranks hold one batch."""
    hashes = []
    for parts in of_ranks:
        hashes.append(list(map(fingerprint, tensors_in(parts))))
    is_equal = bool(hashes[0]) and hashes.count(hashes[0]) == len(hashes) > 1
    if is_equal and has_own_batches(model):
        words = "hold the same batch: give each rank its share of the data (DistributedSampler)"
        yield KINDS["equal-batches"].case("ranks").reading("", len(hashes), 1, words=words)
