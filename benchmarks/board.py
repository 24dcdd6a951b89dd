"""Measure what each storage, compute and optimizer costs in validation loss, on models that
learned.

Claim: every row has its cost written down, with an interval and the number of seeds, by runs that
anybody can repeat. A run is a line of ``benchmarks/board.jsonl``; ``docs/board.md`` holds the
tables. Seeds fix initial weights, batches and held-out text, so runs of one seed are compared in
pairs. The learning rate falls to 1e-6: the last updates are small and decide what is lost.

Baseline: ``master`` with the same learning rate, beta2 and seed; ``word`` for a compute over
``word``; ``float32/float32`` for 16 bits. A cell (a learning rate and a beta2) is not shown if its
baseline ends above the unigram level less 1 nat. Three rows are controls, which must lose.

Run: ``./dev bench board`` with one of

- ``--add all`` or ``--add ROW …``: train what has no record, with ``--cell 1e-3,0.999`` in one cell alone. Rows are storages,
  recipes (``float8-row/word``), peers of ``peers.py`` (``"optimi AdamW Kahan"``) and published states (``published/coat``).
  Several processes may share the file. A stopped run resumes from its last checkpoint, or starts again with a peer. A run takes
  about 65 seconds of a quiet core with AVX512, 4 to 6 minutes with AVX2.
- ``--page``: write the tables of ``docs/board.md``.

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
import statistics
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
from _stdlib import stdlib_tokens
from peers import bytes_held, peer_version
from timing import exit_by

from narrowgauge.analysis.comparison.intervals import MINUS, interval
from narrowgauge.checkpoints.saving import latest_checkpoint
from narrowgauge.distributed.sharding import fingerprint_whole
from narrowgauge.errors import RecordError
from narrowgauge.matmul.gemm import EmulationNotice
from narrowgauge.numerics.metrics import UPDATE_SUMS, update_metrics
from narrowgauge.spec.notation import parse
from narrowgauge.spec.significance import student_t
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.data.dataset import Dataset, open_data
from narrowgauge.trainer.session import build
from narrowgauge.trainer.step import evaluate, train_step

FILE = Path(__file__).with_name("board.jsonl")
PAGE = Path(__file__).parents[1] / "docs" / "board.md"
MARKS = "<!-- tables: begin -->", "<!-- tables: end -->"

MASTER = "master"
WORD = "word"
NO_DECAY = "master without decay"
"""Shows what a peer gains whose weight decay rounds to nothing on bfloat16 weights."""
ONCE = "exact"
"""Has the bits of ``master``: one run proves it."""
CONTROLS = ("naive", "nearest8", "float8/collage-plus")
"""Rows that must lose: a board on which one of them does not has no power."""
STORAGES = (
    MASTER, WORD, "naive", "compact", "states8", "split", "kahan", "collage-light", "collage-plus", "stochastic", "no-master",
    "float32", ONCE, "weight8", "nearest8", "float8/collage-plus",
)  # fmt: skip
COMPUTES = (
    "int8-row/word", "int8-outlier/word", "int8-outlier-codes/word", "float8-row/word", "float8-row-wide-gw/word",
    "float8-tensor/word", "float8-tensor-e5m2/word", "float8-block/word", "float8-block-float32/word", "mxfp8/word",
    "mxfp8-ocp/word", "nvfp4/word", "nvfp4-4over6/word", "mxfp4/word", "int4-qat/word", "nvfp4-qat/word", "mxfp4-qat/word",
    "scalify/word", "scalify-float16/word", "scalify-float16/scaled16",
)  # fmt: skip
FULL = "float32/float32"
SIXTEEN_BITS = ("float32", "float16/float32", "naive", "float16/naive")
"""float32 weights with matmuls in bfloat16 and in float16, and 16 bits throughout."""
OTHERS = (
    NO_DECAY, "torch AdamW bfloat16", "torchao AdamW8bit", "torchao AdamW8bit stochastic", "bitsandbytes AdamW8bit",
    "optimi AdamW Kahan", "heavyball AdamW ecc", "published/coat", "published/fp8-lm", "published/flashoptim",
)  # fmt: skip
ROWS = (*STORAGES, *COMPUTES, FULL, *SIXTEEN_BITS, *OTHERS)

CHECKPOINT_EVERY = 200
FEW_SEEDS = 3
MARGIN = 1.0
"""In nats: how far below the unigram level the baseline of a cell must end."""

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
            compile=False,
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
    def key(self) -> tuple[str, Cell, int, str, str]:
        """Identify the run.

        Runs are paired only if vectors and torch are equal, since others round differently.
        """
        return self.row, self.cell, self.seed, self.vectors, self.torch


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


def trained(job: Job, out: Path) -> Record:
    """Train to the end, from the last checkpoint if there is one, and return the record."""
    config = job.config
    folder = out / job.name
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    data = open_data(config.data or stdlib_tokens(config.model), config.held_out)
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
        session.saver.close()
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
    here = (vectors(), torch.__version__)
    failures = 0
    for row in {
        job.row: None for job in selected if job.row in PEERS and not PEERS[job.row].is_installed
    }:
        print(f"{row} is not installed: pip install {PEERS[row].package}", flush=True)
    selected = [job for job in selected if job.row not in PEERS or PEERS[job.row].is_installed]
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


# ── the page ──────────────────────────────────────────────────────────────────────────────────────


def runs_of(records: Sequence[Record], row: str, cell: Cell) -> list[Record]:
    return [record for record in records if (record.row, record.cell) == (row, cell)]


def is_refused(records: Sequence[Record], cell: Cell) -> bool:
    """Return whether a baseline of this cell did not learn."""
    baselines = []
    for row in (MASTER, WORD):
        baselines.extend(runs_of(records, row, cell))
    return any(run.val_loss is None or run.val_loss > run.unigram - MARGIN for run in baselines)


def paired(
    records: Sequence[Record], row: str, cell: Cell, baseline: str
) -> list[tuple[Record, Record]]:
    """Return a row's runs with the baseline's of the same seed, all of the one machine that has
    most of these pairs.
    """
    baselines = {run.key[1:]: run for run in runs_of(records, baseline, cell)}
    machines: dict[tuple[str, str], list[tuple[Record, Record]]] = {}
    for run in runs_of(records, row, cell):
        if (base := baselines.get(run.key[1:])) is not None and base.val_loss is not None:
            machines.setdefault(run.key[3:], []).append((run, base))
    return max(machines.values(), key=len, default=[])


def differences(
    records: Sequence[Record], row: str, cell: Cell, baseline: str = MASTER
) -> list[float]:
    """Return a row's losses less its baseline's, one for each seed; infinite where the row
    diverged.
    """
    pairs = paired(records, row, cell, baseline)
    losses_above = []
    for run, base in pairs:
        losses_above.append((math.inf if run.val_loss is None else run.val_loss) - base.val_loss)
    return losses_above


def interval_of_cells(cells: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the mean of the cells' means and the half width of its 95 % interval; infinite if a
    cell has one seed.

    Cells are fixed, only seeds are random. So the variance is the sum of the cells' variances, Σ
    s²/n, over the squared number of cells, with Satterthwaite's degrees of freedom, rounded down.
    """
    mean = statistics.fmean(statistics.fmean(cell) for cell in cells)
    if min(len(cell) for cell in cells) < 2 or not math.isfinite(mean):
        return mean, math.inf
    shares = [statistics.variance(cell) / len(cell) for cell in cells]
    if not sum(shares):
        return mean, 0.0
    degrees = sum(shares) ** 2 / sum(
        s**2 / (len(cell) - 1) for s, cell in zip(shares, cells, strict=True)
    )
    return mean, student_t(int(degrees + 1e-9)) * math.sqrt(sum(shares)) / len(cells)


def shown(cells: Sequence[Sequence[float]]) -> str:
    """Return the mean difference, half its 95 % interval, and the number of seeds of a single cell
    where these are few.
    """
    seeds = min(map(len, cells), default=0)
    if not seeds or (len(cells) > 1 and seeds < FEW_SEEDS):
        return "–"
    mean, half = interval_of_cells(cells)
    if not math.isfinite(mean):
        return "diverged"
    text = f"{mean:+.4f}".replace("-", MINUS) + (f" ± {half:.4f}" if math.isfinite(half) else "")
    if seeds >= FEW_SEEDS:
        return text
    return f"{text} ({seeds} seed{'s' * (seeds > 1)})"


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    text = [header, ["---", *["---:"] * (len(header) - 1)], *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in text)


def cell_name(cell: Cell) -> str:
    return f"lr {cell[0]:g}, beta2 {cell[1]:g}"


def cost_table(
    records: Sequence[Record], rows: Sequence[str], cells: Sequence[Cell], baseline: str
) -> str:
    """Return a line for each row with a record: bytes, EDQ, the difference in each cell and over
    all; empty without one.
    """
    lines = []
    for row in rows:
        runs = []
        for cell in cells:
            for run, _ in paired(records, row, cell, baseline):
                runs.append(run)
        if not runs or row in (ONCE, baseline):
            continue
        cost = [differences(records, row, cell, baseline) for cell in cells]
        edqs = [run.late_edq for run in runs if run.late_edq is not None]
        if row in PEERS:
            name = f"{row} ({runs[-1].package})"
        else:
            name = row if row == NO_DECAY else f"`{row}`"
        edq = "–"
        if edqs:
            edq = f"{statistics.fmean(edqs):.3f}"
        figures = [shown([cell]) for cell in cost] + ([shown(cost)] if len(cells) > 1 else [])
        lines.append([name, f"{runs[-1].bytes_per_param:.2f}", edq, *figures])
    if len(cells) > 1:
        over_all = ["all cells"]
    else:
        over_all = []
    if lines:
        return table(["row", "B/param", "late EDQ", *map(cell_name, cells), *over_all], lines)
    return ""


def controls(records: Sequence[Record], cells: Sequence[Cell]) -> str:
    """Return a line for each control: whether it lost in the cell with most of its seeds."""
    lines = []
    for row in CONTROLS:
        cost = max([[], *(differences(records, row, cell) for cell in cells)], key=len)
        mean, half = interval(cost) if cost else (0.0, math.inf)
        if mean > half or mean == math.inf:
            lost = "lost"
        else:
            lost = "undecided" if math.isinf(half) else "**did not lose**"
        lines.append(f"- `{row}`: {f'{shown([cost])}, {lost}' if cost else 'no run yet'}.")
    return "\n".join(lines)


def section(records: Sequence[Record], setting: Setting) -> str:
    """Return the tables of one model."""
    recorded = [cell for cell in setting.cells if runs_of(records, MASTER, cell)]
    cells = [cell for cell in recorded if not is_refused(records, cell)]
    versions = []
    for name in ("torch", "vectors"):
        versions.append(", ".join(sorted({getattr(run, name) for run in records})))
    levels_of = []
    for cell in cells:
        runs = [run for run, _ in paired(records, MASTER, cell, MASTER)]
        means = []
        for name in ("val_loss", "bigram", "unigram"):
            means.append(statistics.fmean(getattr(run, name) for run in runs))
        levels_of.append([cell_name(cell), *(f"{mean:.3f}" for mean in means), str(len(runs))])
    masters = {run.key[1:]: run.weights for run in records if run.row == MASTER}
    proofs = [(run, masters.get(run.key[1:])) for run in records if run.row == ONCE]
    parts = [
        f"## {setting.model}, {setting.steps} steps of {setting.batch_size} × "
        f"{setting.sequence_length} tokens",
        f"{len(records)} runs, until {max(run.date for run in records)}. torch {versions[0]}; "
        f"vectors {versions[1]}.",
        *(
            f"Refused: {cell_name(cell)}; the baseline did not learn."
            for cell in recorded
            if cell not in cells
        ),
        table(["loss of", f"`{MASTER}`", "bigrams", "unigrams", "seeds"], levels_of),
        f"Controls, which must lose, in the cell with most seeds:\n\n{controls(records, cells)}",
        *(
            f"`{ONCE}` {'ends' if run.weights == weights else '**does not end**'} with the stored "
            f"weights of `{MASTER}`, "
            f"bit for bit ({cell_name(run.cell)}, seed {run.seed})."
            for run, weights in proofs
        ),
    ]
    for title, rows, baseline in (
        ("Storages", STORAGES, MASTER),
        ("Computes", COMPUTES, WORD),
        ("Sixteen bits", SIXTEEN_BITS, FULL),
        ("Others", OTHERS, MASTER),
    ):
        if costs := cost_table(records, rows, cells, baseline):
            parts += [f"### {title}, less `{baseline}`", costs]
    return "\n\n".join(parts)


def filled_page(page: str, file: Path = FILE) -> str:
    """Return the page with the tables of all records between its marks."""
    sections = [
        section(records, setting)
        for setting in SETTINGS.values()
        if (records := records_of(setting, file))
    ]
    before = page.split(MARKS[0])[0]
    after = page.split(MARKS[1])[1]
    return "\n\n".join([before + MARKS[0], *sections, MARKS[1] + after])


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
    flags.add_argument("--page", action="store_true", help="write the tables of docs/board.md")
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
    if options.page:
        PAGE.write_text(filled_page(PAGE.read_text()))
        return 0
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
