"""A session: a model, its optimizer and its data at some step; building, saving and restoring it.

The state of a session is a function of its settings and of the checkpoint it was loaded from: initial weights and the order
of the data come from the seed, random bits of rounding from (seed, step). Nothing else is saved, and a restored session
continues with the same bits as one that was never interrupted.
"""

from __future__ import annotations

import ctypes
import dataclasses
import platform
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from narrowgauge.assembly.preparation import DifferenceNotice, is_matrix, outer_names, prepare
from narrowgauge.checkpoints.saving import Checkpoint, Saver, latest_checkpoint
from narrowgauge.checkpoints.state_tensors import load_tensors, require_same_model, restore_tensors, state_tensors
from narrowgauge.distributed.ranks import ALONE, Ranks, all_ranks
from narrowgauge.distributed.reduction import GradientReduction
from narrowgauge.distributed.replica_verification import Verifier
from narrowgauge.distributed.sharding import fingerprint_whole, fsdp_modules, make_mesh, through_root
from narrowgauge.errors import DataError, RankError, RecordError
from narrowgauge.gauges.attach import Gauges, attach_gauges
from narrowgauge.gauges.recording.fingerprints import Fingerprints
from narrowgauge.gauges.recording.provenance import describe_model, describe_process
from narrowgauge.gauges.recording.step_row import StepReader, WatchedOptimizer, batch_checksum
from narrowgauge.matmul.gemm import EmulationNotice, describe_matmuls
from narrowgauge.matmul.scopes import compute_scope
from narrowgauge.matmul.swapping import NarrowLayers, linears_of
from narrowgauge.numerics.metrics import UPDATE_SUMS
from narrowgauge.optim.accumulation import GradientAccumulator
from narrowgauge.optim.audit import joined_over_ranks
from narrowgauge.optim.loading import kept_tensors
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.runs.atomic_io import disk_errors
from narrowgauge.runs.record import Run, read_run
from narrowgauge.trainer import language_model
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.data.dataset import Dataset, open_data, prepare_data
from narrowgauge.trainer.micro_batches import MicroBatch, SkippedBatches, batch_index, micro_batches_of_rank
from narrowgauge.trainer.resume_checks import require_ranks

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class Session:
    """A run in memory.

    Args:
        loss: ``(tokens) -> summed cross entropy`` of the model, compiled or not.
        accumulator: sums the gradients of micro-batches, if this process has several and the reduction does not.
        linears: the model's narrow layers, if its recipe has any.
        reduction: sums the gradients of micro-batches over ranks; ``None`` for one process that has nothing to sum.
        initial_weights: the file that a new run's weights were read from; ``None`` where they were drawn.
        step, tokens: optimizer steps done, and tokens trained on.
        seconds: wall time up to the last checkpoint, with that of earlier processes.
        audit_total: the audit's sums over the whole run.
        gauges: while attached; see :meth:`watched`.
        saved_settings: the settings in the checkpoint that it was loaded from.
        batch_crc: checksum of the last step's tokens, of all ranks together.
        data_seconds: how long that step waited for them.
    """

    config: TrainConfig
    folder: Path
    data: Dataset
    model: PreTrainedModel
    optimizer: Optimizer
    loss: Callable[[Tensor], Tensor]
    accumulator: GradientAccumulator | None = None
    linears: NarrowLayers | None = None
    reduction: GradientReduction | None = None
    here: Ranks = ALONE
    initial_weights: Path | None = None
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    audit_total: Tensor = field(default_factory=lambda: torch.zeros(len(UPDATE_SUMS), dtype=torch.float64))
    gauges: Gauges | None = None
    skipped_batches: list[SkippedBatches] = field(default_factory=list)
    saved_settings: dict[str, Any] = field(default_factory=dict)
    saver: Saver = field(init=False)
    verifier: Verifier = field(init=False)
    fingerprints: Fingerprints = field(init=False)
    reader: StepReader = field(init=False)
    batch_crc: str = ""
    data_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.saver = Saver(self.folder, self.here.apart())
        self.verifier = Verifier(lambda: kept_tensors(self.optimizer), self.config.verify_every)
        every, eager = self.config.fingerprints_every, not self.config.compile
        self.reader = StepReader(WatchedOptimizer(self.model, self.optimizer))
        self.fingerprints = Fingerprints(self.model, self.optimizer, every, self.here, sees_outputs=eager)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def loss_scale(self) -> float:
        """Return the loss scale of the last step."""
        return self.reader.watched[0].scale

    @property
    def notes(self) -> list[str]:
        """Notes on how the model, and the recipe's matmuls, run on this device."""
        rows = () if self.linears is None else self.config.recipe.computes
        notes = [describe_matmuls(row, self.device) for row in rows if row.name != row.dtype]
        missing = self.config.why_uncompiled(language_model.num_parameters(self.model))
        uncompiled = [f"the model runs uncompiled, which is slower: {missing}"] if missing else []
        return [*uncompiled, *(note for note in notes if "emulated" in note)]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by name; a tied parameter appears once."""
        return self.model.named_parameters()

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """Which micro-batches of a step this rank computes, in order."""
        return micro_batches_of_rank(self.config.gradient_accumulation_steps, self.here.rank, self.here.size)

    def batch(self) -> list[Tensor]:
        """This rank's micro-batches of the next step: int64 ``[micro_batch_size, sequence_length + 1]`` for each round."""
        c = self.config
        place = batch_index(self.step, self.skipped_batches)
        numbers, size = [each.number for each in self.micro_batches], c.micro_batch_size

        def read(number: int) -> np.ndarray:
            rows = slice(number * size, (number + 1) * size)
            return self.data.batch(place, c.batch_size, c.sequence_length, c.seed, rows)

        parts = [read(number) for number in numbers]
        own = [batch_checksum(part) for part, each in zip(parts, self.micro_batches, strict=True) if not each.is_absent]
        checksums = (int(checksum, 16) for rank in self.here.gather(own) for checksum in rank)
        self.batch_crc = f"{sum(checksums) % 2**64:016x}"
        return [torch.from_numpy(part).to(self.device) for part in parts]

    def reshard(self) -> None:
        """Free what FSDP2 has gathered and no backward pass has freed, so that parameters are shards again."""
        for module in fsdp_modules(self.model):
            module.reshard()

    def set_compute(self, evaluating: bool = False) -> None:
        """Set the computes of the narrow layers for this step, or for evaluation."""
        if self.linears is None:
            return
        recipe, progress = self.config.recipe, self.step / self.config.steps
        recipe = recipe.in_evaluation if evaluating else recipe
        self.linears.set_compute(lambda name: recipe.compute_of(name, progress))

    def set_learning_rate(self) -> float:
        """Give the optimizer the learning rate of the next step, and return it."""
        rate = self.config.learning_rate(self.step + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_factor", 1.0)
        return rate

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Attach gauges as configured; must enclose the first step, whose compiled code calls them."""
        if not self.config.gauges_every:
            yield
            return
        self.gauges = attach_gauges(self.model, self.optimizer, every=self.config.gauges_every, alarms=False)
        self.gauges.step = self.step
        try:
            yield
        finally:
            self.gauges.detach()
            self.gauges = None

    def weights_fingerprint(self) -> str:
        """Return a 64-bit fingerprint of the stored weights, as 16 hexadecimal digits."""
        return fingerprint_whole({name: self.optimizer.stored(p) for name, p in self.named_parameters()})

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds: ``tensors`` by name, not copied, and ``state``, a JSON object of everything else."""
        tensors = state_tensors(self.named_parameters(), self.optimizer)
        if self.linears is not None:
            tensors |= {f"matmul.{name}": history for name, history in self.linears.histories().items()}
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "audit_total": self.audit_total.tolist(),
            "num_skipped": self.optimizer.num_skipped,
            "fingerprint": self.weights_fingerprint(),
            "settings": self.config.to_dict(),
        }
        if self.optimizer.loss_scaler is not None:
            state["loss_scaler"] = self.optimizer.loss_scaler.state_dict()
        return {"tensors": tensors, "state": state}

    def save(self) -> Path:
        """Write a checkpoint; the previous one is kept until it is complete. On ranks, all call it at the same step."""
        saved = self.state_dict()
        # The checkpoint of an interruption must not replace the one for a rollback.
        extra = self.config.on_spike == "rollback" and self.step % max(1, self.config.checkpoint_every) != 0
        return self.saver.save(self.step, saved["tensors"], saved["state"], self.config.keep_checkpoints + extra)

    def restore(self, on_damaged: Callable[[Path, str], None]) -> None:
        """Load the latest good checkpoint, or stay at step 0 if there is none."""
        self.saver.wait()
        checkpoint = latest_checkpoint(self.folder, on_damaged, self.saver.ranks)
        if checkpoint is not None:
            self.load(checkpoint)

    def load(self, checkpoint: Checkpoint) -> None:
        """Load a checkpoint that was found good; refused if it is another model's, or gives other weights than were saved."""
        state, where = checkpoint.state(), f"checkpoint {checkpoint.path.name} of {checkpoint.path.parents[1]}"

        began_with = state.get("settings", {}).get("rule", "adamw")
        if began_with != self.config.rule:
            raise RecordError(
                f"{where} holds the states of rule '{began_with}', and rule '{self.config.rule}' was requested.",
                f"Restore rule = '{began_with}' in run.toml: states of one rule mean nothing to another.",
            )

        def load_checked() -> dict[str, Tensor]:
            with disk_errors(checkpoint.path):
                require_same_model(checkpoint.path, self.named_parameters(), where, self.config.model)
                return load_tensors(checkpoint.path, self.named_parameters(), self.optimizer)

        tensors = self.saver.ranks.together(load_checked)
        self.load_state_dict({"tensors": tensors, "state": state})
        if state["fingerprint"] != self.weights_fingerprint():
            raise RecordError(
                f"{where} gives weights {self.weights_fingerprint()}, and {state['fingerprint']} was saved.",
                "The checkpoint is intact, so the code of the storage has changed: resume with the version that wrote it.",
            )
        self.saved_settings = state["settings"]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to the step at which :meth:`state_dict` returned this; its tensors must not be written to afterwards."""
        tensors, state = state_dict["tensors"], state_dict["state"]
        restore_tensors(tensors, self.named_parameters(), self.optimizer)
        self.optimizer.num_skipped = state["num_skipped"]
        if self.optimizer.loss_scaler is not None and "loss_scaler" in state:
            self.optimizer.loss_scaler.load_state_dict(state["loss_scaler"])
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        if self.gauges is not None:
            self.gauges.restart(self.step)
        if self.linears is not None:
            self.set_compute()
            histories = {key.removeprefix("matmul."): t for key, t in tensors.items() if key.startswith("matmul.")}
            self.linears.load_histories(histories)
        self.audit_total = torch.tensor(state["audit_total"], dtype=torch.float64)


def build(config: TrainConfig, folder: Path, data: Dataset, initial_weights: Path | None = None) -> Session:
    """Build a session at step 0, with the settings filled in for the model.

    ``initial_weights`` is the file of the weights to start from, where it is known already.
    """
    keep_pages()
    initial_weights = initial_weights or language_model.require_initial_weights(config.model)
    model = language_model.build(config.model, vocab_size=data.vocab_size, seed=config.seed, weights=initial_weights)
    config = config.filled(language_model.num_parameters(model))
    config.require_compiler()
    assert config.lr is not None
    outer = stepped_by_adamw(config, model)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    nn.Module.to(model, device)
    if config.activation_checkpointing:
        language_model.enable_activation_checkpointing(model)
    if config.compile or model.config.vocab_size >= language_model.LARGE_VOCABULARY:
        language_model.ends_in_head(model)  # before its layers become narrow or shards
    here = all_ranks()
    mesh = _mesh(config, here, device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EmulationNotice)  # the loop reports it as a note
        warnings.simplefilter("ignore", DifferenceNotice)  # it is for loops that change from torch.optim
        _, optimizer = prepare(
            model,
            config.recipe,
            rule=config.rule,
            lr=config.lr,
            **config.optimizer_options,
            decays=is_matrix,
            options_of=lambda name: {"rule": "adamw"} if name in outer else {},
            max_grad_norm=config.max_grad_norm,
            seed=config.seed,
            audit_every=config.audit_every,
            mesh=mesh,
            shard=config.shard,
            offload=config.offload,
            narrow_gather=config.narrow_gather,
            average=False,
        )
    optimizer.watched = next(model.get_input_embeddings().parameters())
    accumulator, parts = None, len(micro_batches_of_rank(config.gradient_accumulation_steps, here.rank, here.size))
    if parts > 1 and not config.recipe.reduction.order_invariant:
        accumulator = GradientAccumulator(
            model.parameters(), config.accumulation_dtype, config.seed, num_micro_batches=parts
        )
        accumulator.allocate()  # so that a run resumed at its end counts them too
    # One process sums its micro-batches by itself, unless their order must not count.
    reduction = optimizer.reduction if mesh is not None or config.recipe.reduction.order_invariant else None
    if reduction is not None:
        if accumulator is not None:
            reduction.accumulate_in(accumulator)
        optimizer.auditor.join = joined_over_ranks(list(optimizer.parameter_names()))
    linears = linears_of(model)
    if config.recipe.compute.transform == "unit":
        from narrowgauge.transforms.unit_scaling import fix_batch

        fix_batch(model, sequence_length=config.sequence_length, tokens=config.tokens_per_step)
    loss = _loss(model, config)
    return Session(config, folder, data, model, optimizer, loss, accumulator, linears, reduction, here, initial_weights)


def stepped_by_adamw(config: TrainConfig, model: nn.Module) -> set[str]:
    """Names of the matrices that AdamW steps although the rule is for matrices: embeddings and the output head."""
    return outer_names(model) if config.update_rule.is_matrix else set()


def _mesh(config: TrainConfig, here: Ranks, device: torch.device) -> Any:
    """Return the mesh of the ranks that train together; ``None`` for one process."""
    if here.size == 1:
        of_shards = {"offload": config.offload, "narrow_gather": config.narrow_gather, "replicas": config.replicas > 1}
        for name in (name for name, is_set in of_shards.items() if is_set):
            raise RankError(
                f"Cannot use {name} in one process, which has no shards.",
                f"Start several, --nproc 2, or leave out --{name.replace('_', '-')}.",
            )
        return None
    require_ranks(config, here.size)
    return make_mesh(here.size, device.type, sharding=config.shard, replicas=config.replicas)


def _loss(model: PreTrainedModel, config: TrainConfig) -> Callable[[Tensor], Tensor]:
    """Return the summed loss of a batch in the recipe's compute, compiled or not."""
    recipe = config.recipe
    # The chunked loss uses the head's weight and not the head: casts around a kept head would be skipped.
    large = model.config.vocab_size >= language_model.LARGE_VOCABULARY and not recipe.keep
    chunked = large and language_model.can_chunk(model)
    summed: Callable[[Tensor], Tensor]
    if config.compile:
        summed = language_model.compiled_loss(model, chunked=chunked)
    else:
        summed = partial(language_model.loss_sum, model, chunked=chunked)
    if fsdp_modules(model):
        summed = through_root(model, summed)

    def scoped(tokens: Tensor) -> Tensor:
        with compute_scope(recipe, tokens.device):
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


def keep_pages(mmap_threshold: int = 1 << 30, trim_threshold: int = (1 << 31) - 1) -> None:
    """Make glibc keep large freed buffers: a training step frees and allocates the same ones again.

    By default every buffer above 32 MiB is mapped and unmapped each time, and each of its pages faults again; keeping
    them makes a small model's compiled step faster. Does nothing without glibc, whose own maxima are 32 and 64 MiB.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    m_trim_threshold, m_mmap_threshold = -1, -3
    libc = ctypes.CDLL(None)
    libc.mallopt(m_mmap_threshold, mmap_threshold)
    libc.mallopt(m_trim_threshold, trim_threshold)


# ── a run on the disk, at its newest good checkpoint ────────────────────────────────────────────────────────────────


def load(folder: str | Path) -> Session:
    """Load the session of a run folder at its newest good checkpoint, for export or sampling: not compiled, without gauges."""
    run, folder = read_run(folder), Path(folder)
    config = dataclasses.replace(TrainConfig.from_dict(run.config, str(folder / "run.toml")), compile=False)
    session = build(config, folder, data_of_run(run, config))
    damaged: list[str] = []
    session.restore(lambda path, reason: damaged.append(f"{path.name} is damaged ({reason})"))
    if session.step == 0:
        raise RecordError(
            f"{folder} holds no good checkpoint{': ' + '; '.join(damaged) if damaged else ''}.",
            f"narrowgauge resume {folder} restarts it from step 0.",
        )
    return session


def data_of_run(run: Run, config: TrainConfig, stage: Callable[[str], None] = lambda what: None) -> Dataset:
    """Open the tokens that a run began with; make them again from the text where the cache has lost them."""
    fingerprint, recorded = run.data_fingerprint, run.run["data"]
    try:
        data = open_data(str(recorded.get("folder")), recorded.get("held_out", 0.0), recorded.get("seed", 0))
    except DataError:
        data = prepare_tokens(config, stage)
    data.require_same(fingerprint)
    return data


def prepare_tokens(config: TrainConfig, stage: Callable[[str], None] = lambda what: None) -> Dataset:
    """Prepare the tokens that the settings name."""
    return prepare_data(
        config.data,
        vocab_size=language_model.vocabulary_size(config.model),
        tokenizer=config.tokenizer,
        held_out=config.held_out,
        seed=config.seed,
        stage=stage,
    )
