"""A session: a model, its optimizer and its data at some step. Build, save and load it.

Its state is a function of its settings and its checkpoint. The seed gives the initial weights and
the order of the data, (seed, step) the random bits of rounding. So a restored session continues
with the bits of an uninterrupted one.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh

from narrowgauge.assembly.preparation import matrices_decay, prepare
from narrowgauge.checkpoints.saving import Checkpoint, Saver, latest_checkpoint
from narrowgauge.checkpoints.state_tensors import load_states, state_tensors
from narrowgauge.distributed.exchanges import all_gather
from narrowgauge.distributed.job import require_same
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.distributed.reduction import GradientReduction
from narrowgauge.distributed.replica_verification import verify_replicas
from narrowgauge.distributed.sharding import fingerprint_whole
from narrowgauge.errors import DataError, RecordError
from narrowgauge.matmul.gemm import EmulationNotice, describe_matmuls
from narrowgauge.matmul.scopes import compute_scope
from narrowgauge.matmul.swapping import linears_of
from narrowgauge.numerics.dtensor import is_sharded
from narrowgauge.optim.loading import kept_tensors
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.runs.atomic_io import disk_errors, load_json, read_bytes, sync
from narrowgauge.runs.record import count_rows
from narrowgauge.spec.models import weights_file
from narrowgauge.trainer import language_model
from narrowgauge.trainer.config import TrainConfig, require_positions
from narrowgauge.trainer.data.dataset import Dataset, open_data
from narrowgauge.trainer.door import no_good_checkpoint, run_of_trainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class MicroBatch(NamedTuple):
    """One round of a rank in a step.

    Micro-batch m holds the same sequences for any number of ranks, and runs on rank m % ranks.

    A rank that has none left repeats its first and contributes nothing, since every rank takes part
    in every exchange.
    """

    number: int  # in the step, over all ranks
    is_absent: bool = False  # the rank has no micro-batch left and repeats this one
    is_last: bool = False  # the last round of the step


def micro_batches_of_rank(num_micro_batches: int, rank: int = 0, size: int = 1) -> list[MicroBatch]:
    """Return the rounds of one rank, in a step with at least one micro-batch for each rank.

    Example:
        >>> [(part.number, part.is_absent) for part in micro_batches_of_rank(5, rank=2, size=3)]
        [(2, False), (2, True)]
    """
    parts = [MicroBatch(number) for number in range(rank, num_micro_batches, size)]
    if len(parts) * size < num_micro_batches:  # another rank has one more
        parts.append(MicroBatch(rank, is_absent=True))
    parts[-1] = parts[-1]._replace(is_last=True)
    return parts


def sum_in_order(shares: Sequence[Tensor], num_micro_batches: int, size: int = 1) -> Tensor:
    """Sum the 0-d ``shares`` of all ranks' rounds in the order of the micro-batches: the same bits
    for any number of ranks.
    """
    table = torch.stack([share.detach() for share in shares])
    if size > 1:
        gathered = torch.empty(size * len(shares), dtype=table.dtype, device=table.device)
        all_gather(gathered, table)
        # Round by round, each by rank: the order of the micro-batches.
        table = gathered.view(size, -1).t().reshape(-1)
    total = table[0]
    for share in table[1:num_micro_batches].unbind():
        total = total + share
    return total


@dataclass
class Session:
    """A run in memory.

    Args:
        reduction: sums the gradients of micro-batches over ranks; ``None`` for one process with
            nothing to sum.
        step: optimizer steps done.
        sequences: sequences read by these steps, whatever their batch sizes were.
        tokens: that this rank has trained on in the last step.
        loader_seconds: how long the slowest rank waited for them.
    """

    config: TrainConfig
    folder: Path
    data: Dataset
    model: PreTrainedModel
    optimizer: Optimizer
    reduction: GradientReduction | None = None
    step: int = 0
    sequences: int = 0
    tokens: Tensor | None = None
    loader_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.here = all_ranks()
        device = self.model.device.type
        self.scaler = GradScaler(device) if self.optimizer.scales_loss else None
        self.saver = Saver(self.folder, self.here.apart())
        self.linears = linears_of(self.model)
        parts = self.config.gradient_accumulation_steps
        self.micro_batches = micro_batches_of_rank(parts, self.here.rank, self.here.size)

    def loss(self, tokens: Tensor) -> Tensor:
        """Return the summed cross entropy of some sequences."""
        with compute_scope(self.config.recipe, tokens.device):
            return language_model.loss_sum(self.model, tokens)

    def batch(self) -> list[Tensor]:
        """Return this rank's micro-batches of the next step: int64 ``[micro_batch_size,
        sequence_length + 1]`` each.
        """
        c = self.config
        batch = []
        began = time.perf_counter_ns()
        for part in self.micro_batches:
            first = self.sequences + part.number * c.micro_batch_size
            tokens = self.data.batch(first, c.micro_batch_size, c.sequence_length, c.seed)
            batch.append(torch.from_numpy(tokens))
        self.loader_seconds = self.here.largest(time.perf_counter_ns() - began) / 1e9
        num_present = sum(not part.is_absent for part in self.micro_batches)
        self.tokens = torch.cat(batch[:num_present])
        return [tokens.to(self.model.device) for tokens in batch]

    def end_step(self) -> None:
        """Count a step and its sequences: the next batch is the one after them."""
        self.step += 1
        self.sequences += self.config.batch_size

    def weights_fingerprint(self) -> str:
        """Return a 64-bit fingerprint of the stored weights, as 16 hexadecimal digits."""
        return fingerprint_whole(
            {name: self.optimizer.stored(p) for name, p in self.model.named_parameters()}
        )

    def bytes_per_param(self) -> float:
        """Return the bytes of weights, gradients, optimizer states and sums of micro-batches per
        parameter of this rank.
        """
        total = self.optimizer.bytes_per_param()
        if self.reduction is not None:
            total += self.reduction.bytes_per_param()
        return total

    def save(self) -> None:
        """Write a checkpoint, after the rows before it; the previous one stays until it is
        complete.

        On ranks, all call it at the same step, and compare what they hold. It holds all that the
        run goes on from, ``run.toml`` too.

        Raises:
            CorruptionError: ranks differ; on all of them.
        """
        if self.here.size > 1:
            verify_replicas(kept_tensors(self.optimizer), self.step)
        run = ""
        rows = {}
        if self.here.is_first:
            run = (read_bytes(self.folder / "run.toml") or b"").decode()
            rows = count_rows(self.folder)
            for file in self.folder.glob("*.jsonl"):
                with disk_errors(file):
                    sync(file)
        tensors = state_tensors(self.model.named_parameters(), self.optimizer)
        state = {
            "step": self.step, "sequences": self.sequences, "num_skipped": self.optimizer.num_skipped,
            "run": run, "rows": rows,
        }  # fmt: skip
        if self.scaler is not None:
            state["loss_scaler"] = self.scaler.state_dict()
        self.saver.save(self.step, tensors, state, self.config.keep_checkpoints)

    def load(self, checkpoint: Checkpoint) -> None:
        """Load a good checkpoint.

        Raises:
            RecordError: it is of another model.
        """
        path = checkpoint.path
        state = checkpoint.state()
        named = self.model.named_parameters()
        self.saver.ranks.together(
            lambda: load_states(path, named, self.optimizer, self.config.model)
        )
        self.optimizer.num_skipped = state["num_skipped"]
        if self.scaler is not None and "loss_scaler" in state:
            self.scaler.load_state_dict(state["loss_scaler"])
        self.step = self.saver.resumed_from = state["step"]
        self.sequences = state["sequences"]


def build(config: TrainConfig, folder: Path, data: Dataset) -> Session:
    """Build a session at step 0, with the settings filled in for the model."""
    _require_tokenizer(config, data)
    model = language_model.build(config.model, vocab_size=data.vocab_size, seed=config.seed)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    require_positions(config, positions or config.sequence_length)
    config = config.filled(model.num_parameters())
    assert config.lr is not None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    nn.Module.to(model, device)
    size = all_ranks().size
    mesh = None
    if size > 1:
        axis = "replicate" if config.shard == "none" else "shard"
        mesh = init_device_mesh(device.type, (size,), mesh_dim_names=(axis,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EmulationNotice)  # a note of the run
        _, optimizer = prepare(
            model, config.recipe, lr=config.lr, **config.optimizer_options, groups=matrices_decay,
            max_grad_norm=config.max_grad_norm, seed=config.seed, audit_every=config.audit_every,
            mesh=mesh, shard=config.shard, average=False,
        )  # fmt: skip
    assert isinstance(optimizer, Optimizer)
    # One process sums its micro-batches alone, unless the result must not depend on their order.
    is_order_invariant = config.recipe.reduction.order_invariant
    reduction = optimizer.reduction if size > 1 or is_order_invariant else None
    has_several = config.gradient_accumulation_steps > size
    if has_several and not is_order_invariant and config.accumulation_dtype == "float32":
        for parameter in model.parameters():
            if parameter.dtype.itemsize == 2 and not is_sharded(parameter):
                parameter.grad_dtype = torch.float32  # autograd sums in it
        if reduction is not None:
            reduction.sums_in_float32 = True
    return Session(config, folder, data, model, optimizer, reduction)


def emulated(session: Session) -> list[str]:
    """Return a note on each compute whose matmuls are emulated on this device."""
    notes = []
    for row in session.config.recipe.computes:
        note = describe_matmuls(row, session.model.device)
        if session.linears is not None and row.name != row.dtype and "emulated" in note:
            notes.append(note)
    return notes


def _require_tokenizer(config: TrainConfig, data: Dataset) -> None:
    """Refuse weights that belong to another tokenizer than the tokens, where both are known."""
    file = Path(config.model) / "tokenizer.json"
    data_file = data.tokenizer_path
    if data_file is None or not file.is_file() or weights_file(file.parent) is None:
        return
    first, second = (load_json(path.read_bytes())["model"]["vocab"] for path in (file, data_file))
    if first != second:
        raise DataError(
            f"Cannot train the weights in {config.model} because the tokens in {config.data} have "
            "another vocabulary.",
            f"Make them again: narrowgauge tokenize TEXT OUT --tokenizer {config.model}.",
        )


def data_of(session: Session) -> dict[str, Any]:
    """Return the table ``data`` of ``run.toml``."""
    data = session.data
    return {
        "folder": str(data.folder), "held_out": session.config.held_out,
        "fingerprint": data.fingerprint, "tokens": data.num_tokens, "vocab_size": data.vocab_size,
        "end_of_text": data.end_of_text, "unigram_loss": data.unigram_loss(),
    }  # fmt: skip


# ── data and checkpoints on the disk ──────────────────────────────────────────────────────────────


def open_on_ranks(config: TrainConfig) -> Dataset:
    """Open the data of the settings on every rank."""
    ranks = all_ranks()
    data = ranks.together(lambda: open_data(str(config.data), config.held_out))
    data.require(config.sequence_length)
    require_same({"tokens": data.fingerprint})
    return data


def load(folder: str | Path) -> Session:
    """Load a run folder's session at its newest good checkpoint, for export or sampling.

    It has no gauges and no data.
    """
    folder = Path(folder)
    run = run_of_trainer(folder)
    config = TrainConfig.from_dict(run.config, str(folder / "run.toml"))
    checkpoint, damaged = latest_checkpoint(folder, all_ranks())
    if checkpoint is None:
        raise RecordError(
            f"Cannot load {folder} because {no_good_checkpoint(damaged)}.",
            "Restore its checkpoints.",
        )
    recorded = run.run["data"]
    none = np.zeros(0, dtype=np.uint16)
    data = Dataset(none, none, recorded["vocab_size"], recorded["end_of_text"])
    session = build(config, folder, data)
    session.load(checkpoint)
    return session
