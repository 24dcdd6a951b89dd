"""A session: a model, its optimizer and its data at some step. Build, save and load it.

The state of a session is a function of its settings and its checkpoint. The seed gives the initial weights and the order
of the data. (seed, step) gives the random bits of rounding. No generator state is saved. A restored session
continues with the same bits as an uninterrupted one.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh

from narrowgauge.assembly.preparation import is_matrix, prepare
from narrowgauge.checkpoints.saving import Checkpoint, Saver, latest_checkpoint
from narrowgauge.checkpoints.state_tensors import load_tensors, restore_tensors, state_tensors
from narrowgauge.distributed.ranks import ALONE, Ranks, all_ranks
from narrowgauge.distributed.reduction import GradientReduction
from narrowgauge.distributed.replica_verification import verify_replicas
from narrowgauge.distributed.sharding import fingerprint_whole, fsdp_modules, through_root
from narrowgauge.errors import DataError, RecordError
from narrowgauge.gauges.recording.fingerprints import Fingerprints
from narrowgauge.gauges.recording.provenance import describe_model, describe_process
from narrowgauge.gauges.recording.step_row import batch_checksum
from narrowgauge.matmul.gemm import EmulationNotice, describe_matmuls
from narrowgauge.matmul.linear import has_plain_product
from narrowgauge.matmul.scopes import compute_scope
from narrowgauge.matmul.swapping import NarrowLayers, linears_of
from narrowgauge.numerics.dtensor import local_of
from narrowgauge.optim.accumulation import GradientAccumulator
from narrowgauge.optim.audit import joined_over_ranks
from narrowgauge.optim.loading import kept_tensors
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.planner.model import read_model
from narrowgauge.runs.atomic_io import disk_errors
from narrowgauge.runs.record import Run
from narrowgauge.spec.chips import CHIPS
from narrowgauge.spec.models import MODELS, weights_file
from narrowgauge.trainer import language_model
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.data.dataset import Dataset, open_data, prepare_data
from narrowgauge.trainer.data.tokens import is_token_map
from narrowgauge.trainer.micro_batches import MicroBatch, micro_batches_of_rank
from narrowgauge.trainer.resume_checks import require_same_run, run_of_trainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class Session:
    """A run in memory.

    Args:
        loss: ``(tokens) -> summed cross entropy`` of the model, compiled or not.
        accumulator: sums the gradients of micro-batches, if this process has several and the reduction does not.
        linears: the model's low-precision layers, if its recipe has any.
        reduction: sums the gradients of micro-batches over ranks; ``None`` for one process with nothing to sum.
        step: optimizer steps done.
        batch_crc: checksum of the last step's tokens, of all ranks together.
        loader_seconds: how long the slowest rank waited for them.
        saved_bytes: what the counted forward pass saved for backward; ``None`` before it.
    """

    config: TrainConfig
    folder: Path
    data: Dataset
    model: PreTrainedModel
    optimizer: Optimizer
    loss: Callable[[Tensor], Tensor]
    accumulator: GradientAccumulator | None = None
    reduction: GradientReduction | None = None
    here: Ranks = ALONE
    step: int = 0
    batch_crc: str = ""
    loader_seconds: float = 0.0
    saved_bytes: int | None = None
    saver: Saver = field(init=False)
    fingerprints: Fingerprints = field(init=False)
    linears: NarrowLayers | None = field(init=False)

    def __post_init__(self) -> None:
        config, optimizer = self.config, self.optimizer
        self.saver, self.linears = Saver(self.folder, self.here.apart()), linears_of(self.model)
        self.fingerprints = Fingerprints(
            self.model, optimizer, config.fingerprints_every, self.here, sees_outputs=not config.compile
        )

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def notes(self) -> list[str]:
        """Notes on how the recipe's matmuls run on this device."""
        rows = () if self.linears is None else self.config.recipe.computes
        notes = [describe_matmuls(row, self.device) for row in rows if row.name != row.dtype]
        return [note for note in notes if "emulated" in note]

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """Return the micro-batches of a step that this rank computes, in order."""
        return micro_batches_of_rank(self.config.gradient_accumulation_steps, self.here.rank, self.here.size)

    def batch(self) -> list[Tensor]:
        """Return this rank's micro-batches of the next step: int64 ``[micro_batch_size, sequence_length + 1]`` each."""
        c, batch, sums, began = self.config, [], [], time.perf_counter()
        for part in self.micro_batches:
            rows = slice(part.number * c.micro_batch_size, (part.number + 1) * c.micro_batch_size)
            batch.append(torch.from_numpy(self.data.batch(self.step, c.batch_size, c.sequence_length, c.seed, rows)))
            if not part.is_absent:
                sums.append(batch_checksum(batch[-1].numpy()))
        of_ranks = self.here.gather((time.perf_counter() - began, sums))
        self.loader_seconds = max(seconds for seconds, _ in of_ranks)
        total = sum(int(checksum, 16) for _, sums_of_rank in of_ranks for checksum in sums_of_rank)
        self.batch_crc = f"{total % 2**64:016x}"
        return [tokens.to(self.device) for tokens in batch]

    def weights_fingerprint(self) -> str:
        """Return a 64-bit fingerprint of the stored weights, as 16 hexadecimal digits."""
        return fingerprint_whole({name: self.optimizer.stored(p) for name, p in self.model.named_parameters()})

    def verify_replicas(self) -> None:
        """Compare what several ranks hold. A difference raises CorruptionError on all of them."""
        if self.here.size > 1 and self.config.verify_every:
            verify_replicas(kept_tensors(self.optimizer), self.step)

    def bytes_per_param(self) -> float:
        """Return the bytes of weights, gradients, optimizer states and sums of micro-batches per parameter of this rank."""
        sums = (self.accumulator, self.reduction)
        return self.optimizer.bytes_per_param() + sum(part.bytes_per_param() for part in sums if part is not None)

    @contextmanager
    def count_saved(self) -> Iterator[None]:
        """Count the bytes that a forward pass saves for backward: each storage once, without parameters and buffers."""
        storages: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: Tensor) -> Tensor:
            # A DTensor or a scaled tensor has parts, and no storage.
            names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
            for part in [getattr(tensor, name) for name in names] or [tensor]:
                storage = part.untyped_storage()
                storages[storage.data_ptr()] = storage
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            storages.pop(local_of(tensor).untyped_storage().data_ptr(), None)
        self.saved_bytes = sum(storage.nbytes() for storage in storages.values())

    def memory_bytes(self) -> int:
        """Return the bytes of this rank in a step: weights, gradients, states, sums of micro-batches, and the saved ones."""
        numel = sum(local_of(p).numel() for p in self.model.parameters())
        return round(self.bytes_per_param() * numel) + (self.saved_bytes or 0)

    def peak_tokens_per_second(self) -> float | None:
        """Return the tokens per second at the peak rate of all ranks' devices, if the device and the model's shape are known."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""
        for chip in CHIPS.values():
            with suppress(DataError):
                if name and chip.device == name:
                    model = read_model(self.config.model)
                    return self.here.size * chip.peak_flops / model.flops_per_token(self.config.sequence_length)
        return None

    def save(self, rows: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint; the previous one stays until it is complete. On ranks, all call it at the same step.

        ``rows`` are the :meth:`~narrowgauge.runs.writer.RunWriter.digests` of the record, on rank 0.
        """
        tensors = state_tensors(self.model.named_parameters(), self.optimizer)
        scaler = self.optimizer.loss_scaler
        state = {
            "step": self.step,
            "num_skipped": self.optimizer.num_skipped,
            "fingerprint": self.weights_fingerprint(),
            "settings": self.config.to_dict(),
            "rows": rows,
            **({} if scaler is None else {"loss_scaler": scaler.state_dict()}),
        }
        self.saver.save(self.step, tensors, state, self.config.keep_checkpoints)

    def load(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Load a good checkpoint, and return the state in it.

        Raises:
            RecordError: it is of another model, or its weights differ from the saved ones.
        """
        state, where = checkpoint.state(), f"checkpoint {checkpoint.path.name} of {checkpoint.path.parents[1]}"

        def read() -> dict[str, Tensor]:
            with disk_errors(checkpoint.path):
                named = self.model.named_parameters()
                return load_tensors(checkpoint.path, named, self.optimizer, self.config.model)

        tensors = self.saver.ranks.together(read)
        restore_tensors(tensors, self.model.named_parameters(), self.optimizer)
        self.optimizer.num_skipped = state["num_skipped"]
        if self.optimizer.loss_scaler is not None and "loss_scaler" in state:
            self.optimizer.loss_scaler.load_state_dict(state["loss_scaler"])
        self.step = state["step"]
        if state["fingerprint"] != self.weights_fingerprint():
            raise RecordError(
                f"{where} gives weights {self.weights_fingerprint()}, and {state['fingerprint']} was saved.",
                "The checkpoint is intact, so the code of the storage has changed: resume with the version that wrote it.",
            )
        return state


def build(config: TrainConfig, folder: Path, data: Dataset) -> Session:
    """Build a session at step 0, with the settings filled in for the model."""
    model = language_model.build(config.model, vocab_size=data.vocab_size, seed=config.seed)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None:
        config.require_positions(positions)
    config = config.filled(model.num_parameters())
    config.require_compiler()
    assert config.lr is not None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    nn.Module.to(model, device)
    if config.activation_checkpointing:
        language_model.enable_activation_checkpointing(model)
    is_large = model.config.vocab_size >= language_model.LARGE_VOCABULARY
    is_chunked = is_large and language_model.ends_in_head(model)
    here = all_ranks()
    config.require_ranks(here.size)
    mesh = None
    if here.size > 1:
        axis = "replicate" if config.shard == "none" else "shard"
        mesh = init_device_mesh(device.type, (here.size,), mesh_dim_names=(axis,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EmulationNotice)  # the loop reports it as a note
        _, optimizer = prepare(
            model,
            config.recipe,
            lr=config.lr,
            **config.optimizer_options,
            decays=is_matrix,
            max_grad_norm=config.max_grad_norm,
            seed=config.seed,
            audit_every=config.audit_every,
            mesh=mesh,
            shard=config.shard,
            average=False,
        )
    is_order_invariant = config.recipe.reduction.order_invariant
    parts = len(micro_batches_of_rank(config.gradient_accumulation_steps, here.rank, here.size))
    accumulator = None
    if parts > 1 and not is_order_invariant and config.accumulation_dtype != "bfloat16":
        accumulator = GradientAccumulator(model.parameters(), dtype=getattr(torch, config.accumulation_dtype))
    # One process sums its micro-batches alone, unless the result must not depend on their order.
    reduction = optimizer.reduction if mesh is not None or is_order_invariant else None
    if reduction is not None:
        if accumulator is not None:
            reduction.accumulate_in(accumulator)
        optimizer.auditor.join = joined_over_ranks(list(optimizer.parameter_names()))
    loss = _loss(model, config, is_chunked and has_plain_product(model.get_output_embeddings()))
    return Session(config, folder, data, model, optimizer, loss, accumulator, reduction, here)


def _loss(model: PreTrainedModel, config: TrainConfig, chunked: bool) -> Callable[[Tensor], Tensor]:
    """Return the summed loss of a batch in the recipe's compute, compiled or not."""
    summed: Callable[[Tensor], Tensor]
    if config.compile:
        summed = language_model.compiled_loss(model, chunked=chunked)
    else:
        summed = partial(language_model.loss_sum, model, chunked=chunked)
    if fsdp_modules(model):
        summed = through_root(model, summed)

    def scoped(tokens: Tensor) -> Tensor:
        with compute_scope(config.recipe, tokens.device):
            return summed(tokens)

    return scoped


def describe(session: Session) -> dict[str, Any]:
    """Return the content of ``run.toml``: settings, versions, machine, data."""
    return {
        "config": session.config.to_dict(),
        **describe_process(session.device, session.here.size),
        "data": {
            "folder": str(session.data.folder),
            "held_out": session.config.held_out,
            "seed": session.config.seed,
            "fingerprint": session.data.fingerprint,
            "tokens": session.data.num_tokens,
        },
        "model": describe_model(session.model),
    }


# ── a run on the disk, at its newest good checkpoint ────────────────────────────────────────────────────────────────


def load(folder: str | Path) -> Session:
    """Load a run folder's session at its newest good checkpoint, for export or sampling. Not compiled, no gauges."""
    folder = Path(folder)
    run = run_of_trainer(folder)
    config = dataclasses.replace(TrainConfig.from_dict(run.config, str(folder / "run.toml")), compile=False)
    damaged: list[str] = []

    def report_damage(path: Path, reason: str) -> None:
        damaged.append(f"{path.name} is damaged ({reason})")

    checkpoint = latest_checkpoint(folder, report_damage, all_ranks())
    if checkpoint is None:
        raise RecordError(
            f"{folder} holds no good checkpoint{': ' + '; '.join(damaged) if damaged else ''}.",
            f"narrowgauge resume {folder} restarts it from step 0.",
        )
    session = build(config, folder, data_of_run(run, config, checkpoint))
    session.load(checkpoint)
    return session


def data_of_run(run: Run, config: TrainConfig, checkpoint: Checkpoint | None) -> Dataset:
    """Open the tokens of a run's start. If the cache has lost them, make them again from the text.

    Raises:
        RecordError: they are other tokens, or the settings are of another run than the checkpoint's.
    """
    if checkpoint is not None:
        require_same_run(run, checkpoint.state().get("settings", {}), config)
    fingerprint, recorded = run.data_fingerprint, run.run["data"]
    try:
        data = open_data(str(recorded.get("folder")), config.held_out, config.seed)
    except DataError:
        data = prepare_tokens(config)
    if data.fingerprint != fingerprint:
        raise RecordError(
            "The tokens are not those the run started with.", "Restore the text and the tokenizer of its run.toml."
        )
    return data


def prepare_tokens(config: TrainConfig) -> Dataset:
    """Prepare the tokens that the settings name. The tokenizer is the model folder's, or a BPE trained on the data."""
    folder = None if config.model in MODELS else Path(config.model)
    is_own = folder is not None and (folder / "tokenizer.json").is_file()
    if folder is not None and not is_own and weights_file(folder) and not is_token_map(Path(config.data)):
        raise DataError(
            f"{folder} holds weights and no tokenizer.json, and a new tokenizer would not fit them.",
            f"Write it: AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}').",
        )
    return prepare_data(
        config.data,
        vocab_size=language_model.vocabulary_size(config.model),
        tokenizer=config.model if is_own else None,
        held_out=config.held_out,
        seed=config.seed,
    )
