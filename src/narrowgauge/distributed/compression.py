"""Sums of gradients that travel in 8 or 4 bits.

A ring adds what it receives and sends the sum on: were that compressed, each hop would round again. Here every rank sends each
*owner* its part of the gradient once, in records (:mod:`narrowgauge.numerics.block_codes`), and the owner adds what all
ranks sent in float32, in the order of the ranks. Its own part it has without any rounding.

Where several ranks keep the sum (replicated models, the replicas of HSDP), each owns a piece of it. The pieces are then
gathered in records too, and the owner takes the decoded values of its own piece as everybody does: all ranks hold equal bits.

    rank 0   [a0 b0]  ── b0 in records ──►  rank 1 owns b:  b0 + b1  ── in records ──►  everybody's b
    rank 1   [a1 b1]  ── a1 in records ──►  rank 0 owns a:  a0 + a1  ── in records ──►  everybody's a

Not built: *1-bit* methods (1-bit SGD, 1-bit Adam, signSGD, PowerSGD's low rank). They are biased, so each needs the error of
every step fed back into the next: a residual of the whole model on every rank, which FSDP2 just saved, and which must be
checkpointed and cannot be resharded. The same holds for error feedback under 4 bits. Nor is the method of "Distributed Low
Precision Training Without Mixed Precision" (1911.07384): of it only the abstract is at hand, which describes training in
float16 throughout; a gradient that travels in float16 is what ``native`` sends for such a model.

Source: block-scaled all-to-all with a wide local sum: ZeRO++ (2306.10209), section 4.3, and Megatron-LM's
reduce_scatter_with_fp32_accumulation; stochastic rounding without feedback: QSGD (1610.02132).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from narrowgauge.distributed.exchanges import Exchange, Parties, all_gather
from narrowgauge.numerics.block_codes import BLOCK_CODES, RECORD_VALUES
from narrowgauge.numerics.rounding import step_seed
from narrowgauge.spec.reductions import Reduction

_SENT, _GATHERED = range(2)


class CompressedSum(Exchange):
    """The sum of gradients in records of 8 or 4 bits.

    Invariant: every rank that keeps a part of the sum gets the same bits of it. A value that is not finite on any rank makes the
    sum NaN there. Random bits are a function of the seed, the step, the exchange, the micro-batch, the rank and the place.

    Cost: of float32's bytes 0.2588 (8 bits) or 0.1416 (4 bits), once for FSDP2 and twice where several ranks keep the sum; the
    records of one gradient as temporary memory.
    """

    def __init__(self, parties: Parties, row: Reduction, average: bool, seed: int) -> None:
        super().__init__(parties, row, average, seed)
        self.code = BLOCK_CODES[row.name]
        self._micro_batch = 0

    @torch.no_grad()
    def add(self, gradient: Tensor, output: Tensor, *, is_last: bool = True) -> None:
        """See :meth:`Exchange.add`; each micro-batch is summed on its own."""
        parties = self.parties
        if parties.size > 1:
            total = self._sum_owned(gradient)
            if parties.replicas > 1:
                total = self._gather(total)
            total = total[: output.numel()].view_as(output)
            gradient = total.div_(parties.size) if self.average else total
        output.copy_(gradient)
        self._micro_batch = 0 if is_last else self._micro_batch + 1
        self.step += is_last

    def discard(self) -> None:
        """Forget the micro-batches since the last step."""
        self._micro_batch = 0

    def _sum_owned(self, gradient: Tensor) -> Tensor:
        """The sum of the piece that this rank owns, float32: a replica's share of its shard, in whole records."""
        parties, rank = self.parties, dist.get_rank(self.parties.group)
        pieces = _pieces(gradient, parties)
        num_records = self.code.num_records(len(pieces[rank]))
        sent = gradient.new_empty(parties.size, num_records, self.code.record_bytes, dtype=torch.uint8)
        for owner, piece in enumerate(pieces):
            if owner != rank:
                sent[owner] = self.code.encode(piece, self._key(_SENT, rank, owner))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=parties.group)
        total = torch.zeros(len(pieces[rank]), dtype=torch.float32, device=gradient.device)
        for sender, records in enumerate(received):
            # Its own part a rank has as it is.
            total = total + pieces[rank] if sender == rank else self.code.add_decoded(total, records)
        return total

    def _gather(self, piece: Tensor) -> Tensor:
        """All pieces of this rank's shard, each as everybody decodes it."""
        group = self.parties.replica_group
        rank = dist.get_rank(self.parties.group)
        records = self.code.encode(piece, self._key(_GATHERED, rank, 0))
        gathered = records.new_empty(group.size() * len(records), self.code.record_bytes)
        all_gather(gathered, records, group)
        return self.code.decode(gathered, len(gathered) * RECORD_VALUES)

    def _key(self, stage: int, *others: int) -> int:
        """Random bits of one vector."""
        key = self.seed
        for number in (self.step, self.place, self._micro_batch, stage, *others):
            key = step_seed(key, number)
        return key


def _pieces(gradient: Tensor, parties: Parties) -> list[Tensor]:
    """The piece that each rank owns, of equal lengths in whole records: of its shard, its replica's share."""
    parts = gradient.view(parties.shards, -1)
    length = -(-parts.shape[1] // (parties.replicas * RECORD_VALUES)) * RECORD_VALUES
    shares = [parts[shard, replica * length : (replica + 1) * length] for replica, shard in parties.places]
    return [F.pad(share, (0, length - len(share))) for share in shares]
