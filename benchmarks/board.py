"""Measure what each storage, compute and optimizer costs in validation loss, on models that
learned.

Claim: every row has its cost written down, with an interval and the number of seeds, by runs that
anybody can repeat. A run is a line of ``benchmarks/board.jsonl``, from which ``docs/evidence.py``
makes the tables. Seeds fix initial weights, batches and held-out text, so runs of one seed are
compared in pairs. The learning rate falls to 1e-6: the last updates are small and decide what is lost.

Baseline: ``master`` with the same learning rate, beta2 and seed; ``word`` for a compute over
``word``; ``float32/float32`` for 16 bits. A cell (a learning rate and a beta2) is not shown if its
baseline ends above the unigram level less 1 nat. Three rows are controls, which must lose.

Run: ``./dev bench board`` with one of

- ``--add all`` or ``--add ROW …``: train what has no record, with ``--cell 1e-3,0.999`` in one cell alone. Rows are storages,
  recipes (``float8-row/word``), peers of ``peers.py`` (``"optimi AdamW Kahan"``) and published states (``published/coat``).
  Several processes may share the file. A stopped run resumes from its last checkpoint, or starts again with a peer. A run takes
  about 65 seconds of a quiet core with AVX512, 4 to 6 minutes with AVX2.

``--quick`` trains two rows for six steps in a temporary folder. ``--model llama-8m`` trains the
larger model.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import itertools
import json
import math
import platform
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import torch
from _others_training import FORMULAS, PEERS, cut, formula_bytes, peer_optimizer, peer_step
from _published_states import CONTROLS
from _stdlib import stdlib_tokens
from _timing import exit_by
from peers import bytes_held, peer_version

from narrowgauge.checkpoints.saving import latest_checkpoint
from narrowgauge.distributed.sharding import fingerprint_whole
from narrowgauge.errors import RecordError
from narrowgauge.matmul.gemm import EmulationNotice
from narrowgauge.numerics.metrics import UPDATE_SUMS, update_metrics
from narrowgauge.spec.notation import parse
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.data.dataset import Dataset, open_data
from narrowgauge.trainer.session import build
from narrowgauge.trainer.step import evaluate, train_step

FILE = Path(__file__).with_name("board.jsonl")

MASTER = "master"
WORD = "word"
NO_DECAY = "master without decay"
"""Shows what a peer gains whose weight decay rounds to nothing on bfloat16 weights."""
ONCE = "exact"
"""Has the bits of ``master``: one run proves it."""
STORAGES = (
    MASTER, WORD, "naive", "compact", "states8", "split", "kahan", "collage-light", "collage-plus", "stochastic", "no-master",
    "float32", ONCE,
)  # fmt: skip
COMPUTES = (
    "int8-row/word", "int8-outlier-codes/word", "float8-row/word",
    "float8-tensor/word", "float8-block/word", "mxfp8/word",
    "nvfp4/word", "mxfp4/word",
    "scalify/word", "scalify-float16/word", "scalify-float16/scaled16",
)  # fmt: skip
FULL = "float32/float32"
SIXTEEN_BITS = ("float32", "float16/float32", "naive", "float16/naive")
"""float32 weights with matmuls in bfloat16 and in float16, and 16 bits throughout."""
OTHERS = (
    NO_DECAY, "torch AdamW bfloat16", "torchao AdamW8bit", "torchao AdamW8bit stochastic", "bitsandbytes AdamW8bit",
    "optimi AdamW Kahan", "heavyball AdamW ecc", *CONTROLS, "published/coat", "published/fp8-lm", "published/flashoptim",
)  # fmt: skip
ROWS = (*STORAGES, *COMPUTES, FULL, *SIXTEEN_BITS, *OTHERS)

CHECKPOINT_EVERY = 200

Cell = tuple[float, float]
"""A peak learning rate and a beta2."""


@dataclass(frozen=True)
class Setting:
    """What all runs of one model share: the usual learning rate, to where it falls, and sizes."""

    model: str
    steps: int
    lr: float
    batch_size: int = 8
    sequence_length: int = 128
    final_lr: float = 1e-6
    eval_sequences: int = 512

    @property
    def cells(self) -> list[Cell]:
        return list(itertools.product((round(self.lr / 3, 6), self.lr), (0.95, 0.999)))


SETTINGS = {
    setting.model: setting
    for setting in (Setting("llama-1m", 800, 3e-3), Setting("llama-8m", 1500, 1e-3))
}


@dataclass(frozen=True)
class Job:
    """One training."""

    setting: Setting
    row: str
    cell: Cell
    seed: int
    data: str | None = None

    @property
    def name(self) -> str:
        row, (lr, beta2) = self.row.replace("/", "-").replace(" ", "-"), self.cell
        return f"{self.setting.model}-{self.setting.steps}-{row}-lr{lr:g}-beta{beta2:g}-seed{self.seed}"

    @property
    def config(self) -> TrainConfig:
        """The trainer's settings.

        A peer steps the model of ``naive``; published states replace those of ``master``.
        """
        sizes, (lr, beta2) = dict(vars(self.setting)), self.cell
        stand_in = "naive"
        if self.row not in PEERS:
            stand_in = MASTER if self.row in (NO_DECAY, *FORMULAS) else self.row
        recipe = parse(stand_in if "/" in stand_in else f"bfloat16/{stand_in}")
        sizes |= {
            "lr": lr,
            "min_lr_ratio": sizes.pop("final_lr") / lr,
            "beta2": beta2,
            "seed": self.seed,
        }
        if self.row == NO_DECAY:
            sizes["weight_decay"] = 0.0
        config = TrainConfig(
            **sizes,
            recipe=recipe,
            data=self.data,
            keep_checkpoints=1,
            gauges_every=0,
            threads=1,
        )
        return config.filled()


@dataclass(frozen=True)
class Record:
    """A finished run: a line of the file.

    Args:
        package: and version of a peer; empty for ours.
        val_loss: in nats per token; ``None`` if it is not finite.
        unigram, bigram: losses of token frequencies and of bigrams of the training text on the same
            held-out text.
        bytes_per_param: weight, gradient and states, counted from live tensors.
        edq: of the audits of the whole run, in which the large early updates decide; ``None`` for a
            peer and published states.
        late_edq: of the audits of the last quarter.
        weights: fingerprint of the stored weights at the end.
        vectors: vector instructions of the processor, or the name of the GPU; bits differ between
            them.
    """

    row: str
    recipe: str
    package: str
    model: str
    steps: int
    batch_size: int
    sequence_length: int
    final_lr: float
    lr: float
    beta2: float
    seed: int
    val_loss: float | None
    unigram: float
    bigram: float
    bytes_per_param: float
    edq: float | None
    weights: str
    narrowgauge: str
    torch: str
    python: str
    vectors: str
    date: str
    late_edq: float | None = None

    @property
    def cell(self) -> Cell:
        return self.lr, self.beta2

    @property
    def key(self) -> tuple[str, Cell, int, str, str, float]:
        """Identify the run.

        Runs are paired only if vectors and torch are equal, since others round differently, and if
        they were judged on one text, which its unigram loss tells.
        """
        return self.row, self.cell, self.seed, self.vectors, self.torch, round(self.unigram, 6)


def records_of(setting: Setting, file: Path = FILE) -> list[Record]:
    """Return the records of a setting."""
    try:
        if file.is_file():
            lines = file.read_text().splitlines()
        else:
            lines = []
        records = [Record(**json.loads(line)) for line in lines]
    except (ValueError, TypeError) as error:
        raise RecordError(
            f"Cannot read {file.name} because a line is no record: {error}.", "Restore it."
        ) from None
    same = ("model", "steps", "batch_size", "sequence_length", "final_lr")
    matching = []
    for record in records:
        if all(getattr(record, name) == getattr(setting, name) for name in same):
            matching.append(record)
    return matching


def append(record: Record, setting: Setting, file: Path = FILE) -> None:
    """Append a record unless another process has appended the same run."""
    with file.open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        if record.key not in {run.key for run in records_of(setting, file)}:
            stream.write(json.dumps(dataclasses.asdict(record)) + "\n")


def vectors() -> str:
    """Return what decides the bits of a run beside torch: the GPU, or the vector instructions of
    the processor.
    """
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return torch.backends.cpu.get_cpu_capability()


# ── training ──────────────────────────────────────────────────────────────────────────────────────


def levels(data: Dataset, setting: Setting) -> tuple[float, float]:
    """Return the unigram and bigram losses of the validation batches, in nats per token.

    Counts are those of the training text. A bigram after n occurrences of its first token is
    interpolated with the unigram by n / (n + 50).
    """
    size = data.vocab_size
    tokens = np.asarray(data.train[np.arange(data.num_tokens)], dtype=np.int64)
    sequences = data.validation(setting.eval_sequences, setting.sequence_length)
    first = sequences[:, :-1].ravel()
    second = sequences[:, 1:].ravel()
    count = np.bincount(tokens, minlength=size)
    unigram = (count + 1) / (len(tokens) + size)
    pairs, pair_count = np.unique(tokens[:-1] * size + tokens[1:], return_counts=True)
    places = np.searchsorted(pairs, first * size + second).clip(max=len(pairs) - 1)
    together = np.where(pairs[places] == first * size + second, pair_count[places], 0)
    bigram = (together + 50 * unigram[second]) / (count[first] + 50)
    return float(-np.log(unigram[second]).mean()), float(-np.log(bigram).mean())


def data_of(job: Job) -> Dataset:
    """Open the tokens of a run; all runs of a setting are judged on the same."""
    return open_data(job.data or stdlib_tokens(job.setting.model), job.config.held_out)


def trained(job: Job, out: Path) -> Record:
    """Train to the end, from the last checkpoint if there is one, and return the record."""
    config = job.config
    folder = out / job.name
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    data = data_of(job)
    session = build(config, folder, data)
    edq = None
    late_edq = None
    peer = PEERS.get(job.row)
    formula = FORMULAS.get(job.row)
    if peer is not None:
        optimizer = peer_optimizer(peer, session)
        while session.step < config.steps:
            peer_step(session, optimizer)
        weights = fingerprint_whole(
            {name: weight.detach() for name, weight in session.model.named_parameters()}
        )
        size = bytes_held(optimizer)
    else:
        checkpoint, _ = latest_checkpoint(folder)
        if checkpoint is not None:
            session.load(checkpoint)
        audits = torch.zeros(
            2, len(UPDATE_SUMS), dtype=torch.float64
        )  # early, late; since the last checkpoint that was loaded
        while session.step < config.steps:
            train_step(session)
            if session.optimizer.last_audit is not None:
                audits[int(4 * session.step > 3 * config.steps)] += session.optimizer.last_audit.to(
                    "cpu", torch.float64
                )
            if formula is not None:
                cut(formula, session.optimizer)
            if session.step % CHECKPOINT_EVERY == 0 and session.step < config.steps:
                session.save()
        weights = session.weights_fingerprint()
        size = session.optimizer.bytes_per_param()
        if formula is None:
            edq, late_edq = (
                float(update_metrics(sums)["edq"]) for sums in (audits.sum(0), audits[1])
            )
        else:  # the audit is of the step before the states were replaced
            size = formula_bytes(formula, session.optimizer)
    loss, (unigram, bigram) = evaluate(session), levels(data, job.setting)
    setting = {}
    for name, value in vars(job.setting).items():
        if name not in ("lr", "eval_sequences"):
            setting[name] = value
    return Record(
        **setting,
        row=job.row,
        recipe=config.recipe.name,
        package=f"{peer.package} {peer_version(peer.package)}" if peer else "",
        lr=job.cell[0],
        beta2=job.cell[1],
        seed=job.seed,
        val_loss=loss if math.isfinite(loss) else None,
        unigram=unigram,
        bigram=bigram,
        bytes_per_param=size,
        edq=edq if edq is not None and math.isfinite(edq) else None,
        late_edq=late_edq if late_edq is not None and math.isfinite(late_edq) else None,
        weights=weights,
        narrowgauge=peer_version("narrowgauge"),
        torch=torch.__version__,
        python=platform.python_version(),
        vectors=vectors(),
        date=datetime.now(timezone.utc).date().isoformat(),
    )


def jobs(setting: Setting, rows: Sequence[str], seeds: int, data: str | None = None) -> list[Job]:
    """Return the runs of these rows: one cell after another, in each one seed after another."""
    crossed = itertools.product(setting.cells, range(seeds), dict.fromkeys(rows))
    selected = []
    for cell, seed, row in crossed:
        if row != ONCE or (cell, seed) == (setting.cells[0], 0):
            selected.append(Job(setting, row, cell, seed, data))
    return selected


@contextmanager
def claimed(place: Path) -> Iterator[bool]:
    """Lock a run for this process; the lock ends with the process."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_locked = True
        except BlockingIOError:
            is_locked = False
        yield is_locked


def add(selected: Sequence[Job], out: Path, file: Path = FILE) -> int:
    """Train what has no record of this processor's vectors and this torch; return the number of
    runs that failed.
    """
    failures = 0
    for row in {
        job.row: None for job in selected if job.row in PEERS and not PEERS[job.row].is_installed
    }:
        print(f"{row} is not installed: pip install {PEERS[row].package}", flush=True)
    selected = [job for job in selected if job.row not in PEERS or PEERS[job.row].is_installed]
    if not selected:
        return failures
    unigram, _ = levels(data_of(selected[0]), selected[0].setting)
    here = vectors(), torch.__version__, round(unigram, 6)
    for number, job in enumerate(selected, 1):
        with claimed(out / f"{job.name}.claim") as is_mine:
            recorded = {record.key for record in records_of(job.setting, file)}
            if not is_mine or (job.row, job.cell, job.seed, *here) in recorded:
                continue
            try:
                record = trained(job, out)
            except Exception as error:  # the other rows are still measured
                failures += 1
                print(
                    f"{number}/{len(selected)} {job.name} failed: {type(error).__name__}: {error}",
                    flush=True,
                )
                continue
            append(record, job.setting, file)
            shutil.rmtree(out / job.name, ignore_errors=True)
            print(
                f"{number}/{len(selected)} {job.name} validation loss {record.val_loss}", flush=True
            )
    return failures


def cell_of(text: str) -> Cell:
    lr, beta2 = text.split(",")
    return float(lr), float(beta2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument(
        "--add", nargs="+", metavar="ROW", help="train what has no record; all: every row"
    )
    flags.add_argument("--quick", action="store_true", help="two rows, six steps; nothing is kept")
    flags.add_argument("--model", choices=SETTINGS, default="llama-1m")
    flags.add_argument(
        "--cell",
        nargs="+",
        type=cell_of,
        metavar="LR,BETA2",
        help="train these cells only (1e-3,0.999)",
    )
    flags.add_argument("--seeds", type=int, default=3, help="seeds per cell (default 3)")
    flags.add_argument("--file", type=Path, default=FILE, help="the records")
    flags.add_argument("--data", help="a token map (default: the standard library's source)")
    flags.add_argument(
        "--out", type=Path, default=Path("runs/board"), help="checkpoints (default runs/board)"
    )
    options = flags.parse_args(arguments)
    warnings.simplefilter("ignore", EmulationNotice)
    setting = SETTINGS[options.model]
    if options.add and not options.quick:
        if options.add == ["all"]:
            rows = ROWS
        else:
            rows = (MASTER, *options.add)
        listed = jobs(setting, rows, options.seeds, options.data)
        return int(
            add(
                [job for job in listed if job.cell in (options.cell or setting.cells)],
                options.out,
                options.file,
            )
            > 0
        )
    with tempfile.TemporaryDirectory() as folder:
        short = dataclasses.replace(setting, steps=6, eval_sequences=16)
        listed = []
        for row in (WORD, "torch AdamW bfloat16"):
            listed.append(Job(short, row, short.cells[0], 0))
        return int(add(listed, Path(folder), Path(folder, "board.jsonl")) > 0)


if __name__ == "__main__":
    exit_by(main)
