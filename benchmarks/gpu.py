"""The checks and benchmarks on CUDA: first that every bit is right, then how fast it is.

Claim: the kernels compiled for a GPU give the same bits as the definition run eagerly on a CPU, for every storage; the
stall case reads the same; and a step moves its bytes at nearly the rate of a plain copy. Bytes per element: the visible
weight read and written, the gradient read, every state read and written (``word`` 14, a float32 AdamW 28). Cases: a
llama-1b's tensors, and 300 small ones. Every cast of the table of computes gives the CPU's bits too, along both dimensions;
every product, native or emulated, is within its stated bound of the float64 product of its operands; every row trains; and a
training that gauges watch has the bits of one that they do not; so has one on two ranks, beside one on one.
How fast the narrow layers and whole steps must be is stated in ``narrow_linear.py`` and ``narrow_training.py``.

Baseline: ``torch.optim.AdamW(fused=True)`` in float32 for the ratio, and a device-to-device copy of 1 GiB (read and
written) for the share of the bandwidth; bfloat16, compiled, for layers and whole steps.

Run: ``./dev gpu [--sections …] [--quick]``. A failed check ends with status 1 and nothing is timed; without a GPU, status 2.
Sections: storages, casts, products, training, gauges, ranks are checked; steps, layers, models are timed. Each takes minutes.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import gpu_ranks
import narrow_linear
import narrow_training
import torch
from optimizer_step import OPTIONS, Case, fused, model_shapes, ours, small_shapes
from peers import reason
from quality import over_word
from stall import Stall
from stall import ours as stall_trainee
from timing import Contender, Report, Row, measure, parser
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.errors import ChipError
from narrowgauge.gauges.attach import Gauges
from narrowgauge.matmul.gemm import EmulationNotice, is_native, multiply, operand_dtype
from narrowgauge.matmul.operand import PAIRS, Operand, block_values, cast_matrix, random_words
from narrowgauge.numerics import fusion
from narrowgauge.spec.computes import COMPUTES, Cast, Compute
from narrowgauge.spec.models import get_model
from narrowgauge.spec.notation import parse
from narrowgauge.spec.storages import STORAGES, VISIBLE, Storage
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.data.dataset import Dataset, prepare_data
from narrowgauge.trainer.session import build
from narrowgauge.trainer.step import train_step

SHAPES = ((130, 66), (65, 67), (5, 1), (300, 300), (1, 1), (512, 1024))
"""Even and odd lengths, one element, in a bucket and alone, and one that is audited in turns."""
STALL_BOUNDS = {
    **dict.fromkeys(("float32", "master", "exact"), (0.0, 0.002)),
    "split": (0.0, 0.01),
    "word": (0.0, 0.10),
    "split8": (0.0, 0.12),
    **dict.fromkeys(("compact", "float32-states8"), (0.0, 0.15)),
    **dict.fromkeys(("kahan", "collage-light", "collage-plus"), (0.0, 0.08)),
    **dict.fromkeys(("float8/collage-light", "float8/collage-plus"), (0.5, 1.0)),
    **dict.fromkeys(("float16/master", "float16/split"), (0.0, 0.01)),
    **dict.fromkeys(("naive", "no-master"), (0.9, 1.0)),
    **dict.fromkeys(("stochastic", "states8"), (0.9, 2.0)),
}
"""Between which errors of the stall case a storage must lie: those that lose updates must be seen to lose them."""
COPY_BYTES = 1 << 30
BASELINE = "torch fused float32"


def require_device() -> None:
    """Stop where there is no GPU.

    Raises:
        ChipError: no CUDA device is here.
    """
    if not torch.cuda.is_available():
        raise ChipError(
            f"./dev gpu needs a CUDA device, and PyTorch {torch.__version__} finds none here.",
            "./dev test and ./dev bench check and measure the CPU.",
        )


def bytes_moved(storage: Storage) -> float:
    """Bytes that one step must move per element."""
    visible = VISIBLE[storage.visible][0] / 8
    return 3 * visible + 2 * (storage.bytes_per_param - 2 * visible)


def _trained(storage: str, device: str, steps: int) -> dict[str, Tensor]:
    """Everything that is kept after some steps with clipping and audit, on the CPU as int32 bits."""
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, STORAGES[storage].visible)

    def drawn(shape: tuple[int, ...], scale: float) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).bfloat16().to(device, dtype)

    parameters = [nn.Parameter(drawn(shape, 0.02)) for shape in SHAPES]
    optimizer = ng.AdamW(
        parameters, **OPTIONS, storage=storage, max_grad_norm=1.0, audit_every=5, compile=device != "cpu"
    )
    for _ in range(steps):
        for parameter, shape in zip(parameters, SHAPES, strict=True):
            parameter.grad = drawn(shape, 1e-2)
        optimizer.step()
    kept = {f"{k} visible": p.detach().float() for k, p in enumerate(parameters)}
    for k, parameter in enumerate(parameters):
        kept |= {f"{k} {name}": optimizer.stored(parameter, name) for name in ("weight", "exp_avg", "exp_avg_sq")}
    if optimizer.grad_norm is not None:
        kept["norm"] = optimizer.grad_norm.detach().float().reshape(1)
    return {name: value.cpu().contiguous().view(torch.int32) for name, value in kept.items()}


def bits_row(storage: str, steps: int) -> Row:
    """How many of the kept values differ between the eager CPU and the compiled GPU."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        expected, found = _trained(storage, "cpu", steps), _trained(storage, "cuda", steps)
    uncompiled = [str(w.message) for w in caught if "uncompiled" in str(w.message)]
    differing = {name: int((expected[name] != value).sum()) for name, value in found.items()}
    worst = max(differing, key=lambda name: differing[name])
    return {
        "storage": storage,
        "values": sum(value.numel() for value in found.values()),
        "differing": sum(differing.values()),
        "worst": worst if differing[worst] else "",
        "compiled": uncompiled[0][:60] if uncompiled else "yes",
        "passes": "yes" if not uncompiled and not differing[worst] else "NO",
    }


def stall_row(storage: str, case: Stall) -> Row:
    """The stall case on the GPU, compiled."""
    trainee, optimizer = stall_trainee(case, storage, "cuda", compile=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ng.optim.UpdateLossWarning)
        error = case.error(trainee)
    low, high = STALL_BOUNDS[storage]
    reading = ng.audit(optimizer)["weight"]
    return {
        "storage": storage,
        "error": error,
        "must be": f"{low} … {high}",
        "EDQ": reading.edq,
        "passes": "yes" if low <= error <= high else "NO",
    }


def check_storages(quick: bool) -> dict[str, list[Row]]:
    """Every storage: its bits, and the stall case."""
    case = Stall.make(256, 400)
    return {
        "bits: eager CPU against compiled CUDA": [bits_row(storage, 10 if quick else 50) for storage in STORAGES],
        "the stall case on CUDA": [stall_row(storage, case) for storage in STORAGES],
    }


def distinct_casts() -> dict[Cast, str]:
    """Every cast of the table of computes that has arithmetic of its own, with the place that it is first found in."""
    found: dict[Cast, str] = {}
    for row in COMPUTES.values():
        for name, cast in row.casts.items():
            if not cast.is_wide or cast.format == "tfloat32":
                found.setdefault(cast, f"{row.name} {name}")
    return found


def ordinary(rows: int, columns: int) -> Tensor:
    """Values of all sizes in bfloat16, subnormal ones among them."""
    generator = torch.Generator().manual_seed(rows * columns)
    sizes = torch.randint(-14, 6, (rows, columns), generator=generator).float().exp2()
    values = torch.randn(rows, columns, generator=generator) * sizes
    values[:, 0] *= 1e-39
    return values.bfloat16()


def special(rows: int, columns: int) -> Tensor:
    """The same with a row and a column of zeros, an infinity and a NaN."""
    values = ordinary(rows, columns)
    values[1], values[:, 2] = 0, 0
    values[3, 5], values[40, 70] = torch.inf, torch.nan
    return values


STATE = torch.tensor([12_345, 3, 7, 99], dtype=torch.int32)
"""Of a layer: seed of the step, step, first sequence, number."""


def cast_bits(cast: Cast, dim: int, x: Tensor, device: str, compile: bool) -> list[Tensor]:
    """Codes and scale of a cast, on the CPU as float32 (which holds each exactly); codes under a scale of NaN may be any.

    Of a cast in blocks, the values both as they are emulated and from the codes and scales that a kernel takes.
    """
    if cast.is_wide:
        dtype = torch.float32
    else:
        dtype = torch.bfloat16 if cast.block is not None else getattr(torch, cast.format)
    x, state = x.to(device), STATE.to(device)
    finite = x.float().nan_to_num(0, 0, 0)
    amax = finite.abs().amax().view(1, 1) / 2 if cast.scaling == "delayed" else None
    fold = finite.abs().amax(dim, keepdim=True) + 1 if cast.format == "int8" else None
    least = 0 if compile else sys.maxsize
    with patch.object(fusion, "COMPILE_ELEMENTS", least):
        words = random_words(cast, x, dim, state, 0, 1)
        made = [cast_matrix(x, cast, dim, dtype, words=words, fold=fold, amax=amax)]
        if cast.block is not None and cast.element.bits in (8, 4):
            narrow = PAIRS if cast.element.bits == 4 else getattr(torch, cast.format)
            coded = cast_matrix(x, cast, dim, narrow, words=words, amax=amax)
            made.append(Operand(block_values(coded, dim), coded.outer))
    found = []
    for data, outer, _ in made:
        values, scale = data.float().cpu(), None if outer is None else outer.float().cpu()
        found += [values] if scale is None else [torch.where(scale.isnan(), torch.nan, values), scale]
    return found


def differing(expected: Sequence[Tensor], found: Sequence[Tensor]) -> int:
    """How many values have other bits; a NaN is a NaN."""
    return sum(
        int(((a.view(torch.int32) != b.view(torch.int32)) & ~(a.isnan() & b.isnan())).sum())
        for a, b in zip(expected, found, strict=True)
    )


def cast_row(cast: Cast, where: str, device: str) -> Row:
    """How many bits of a cast differ between the eager CPU and a device, eager and compiled, along both dimensions."""
    row: Row = {"cast": str(cast), "of": where}
    for name, x in (("ordinary", ordinary(300, 520)), ("special", special(200, 300))):
        for dim in (0, 1):
            expected = cast_bits(cast, dim, x, "cpu", compile=False)
            found = [differing(expected, cast_bits(cast, dim, x, device, way)) for way in (False, True)]
            row[f"{name}, dim {dim}"] = f"{found[0]}, {found[1]}"
    row["passes"] = "NO" if any(row[key] != "0, 0" for key in row if "dim" in key) else "yes"
    return row


DIMS = {"output": (1, 1), "grad_input": (1, 0), "grad_weight": (0, 0)}
"""The dimension that each operand of a product is contracted along, as a linear layer has them."""
SIDES = (128, 192, 1024)
"""Rows, columns and contraction of the products that are checked."""


def operands_of(row: Compute, place: str, device: torch.device) -> tuple[Operand, Operand]:
    """Both operands of a product, as the operators make them."""
    product, dims, (rows, columns, terms) = row.products[place], DIMS[place], SIDES

    def made(side: Cast, dim: int, size: int, fold: Tensor | None) -> Operand:
        generator = torch.Generator().manual_seed(size)
        values = torch.randn(*((size, terms) if dim else (terms, size)), generator=generator)
        x = values.to(device, torch.bfloat16)
        words = random_words(side, x, dim, STATE.to(device), 0, 1)
        return cast_matrix(x, side, dim, operand_dtype(side, product, device), words=words, fold=fold)

    right, fold = made(product.right, dims[1], columns, None), None
    if product.right.granularity == "column":
        assert right.outer is not None
        right, fold = Operand(right.data, None), right.outer.view((1, -1) if dims[0] else (-1, 1))
    return made(product.left, dims[0], rows, fold), right


def dequantized(operand: Operand, dim: int) -> Tensor:
    """An operand as float64 ``[rows, contraction]``."""
    data = operand.data if operand.inner is None else block_values(operand, dim)
    values = data.double() * (1.0 if operand.outer is None else operand.outer.double())
    return values if dim else values.t()


def product_row(row: Compute, place: str, device: torch.device) -> Row:
    """The largest error of a product, as a share of what is allowed."""
    product, dims, dtype = row.products[place], DIMS[place], getattr(torch, row.dtype)
    left, right = operands_of(row, place, device)
    found = multiply(left, right, dims, product, dtype).double()
    a, b = dequantized(left, dims[0]), dequantized(right, dims[1])
    exact, summed = a @ b.t(), product.bound(SIDES[2]) * (a.abs() @ b.abs().t())
    # Rounded to the result's format once before the scales and once after them.
    allowed = summed + 2 * 2.0 ** -_bits(dtype) * (exact.abs() + summed) + 1e-30
    share = float(((found - exact).abs() / allowed).max())
    return {
        "row": row.name,
        "product": place,
        "native": "yes" if is_native(product, device) else "no",
        "accumulation": product.accumulation,
        "error / bound": share,
        "passes": "yes" if share <= 1 else "NO",
    }


def _bits(dtype: torch.dtype) -> int:
    """Significant bits of a format, the implicit one included."""
    return {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}[dtype]


TRAINING_STEPS = 20


def training_rows(device: torch.device) -> list[Row]:
    """Some steps of a llama-1m in every row: losses that are finite, fall, and end where bfloat16's does."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = prepare_data("stdlib", folder, vocab_size=get_model("llama-1m").vocab_size)
        for compute in ("bfloat16", *(other for other in COMPUTES if other != "bfloat16")):
            config = TrainConfig(
                model="llama-1m",
                recipe=parse(over_word(compute)),
                steps=TRAINING_STEPS,
                sequence_length=128,
                warmup_steps=2,
            )
            row: Row = {"recipe": over_word(compute)}
            try:
                session = build(config, folder, data)
                assert session.device.type == device.type
                losses = [train_step(session)["loss"] for _ in range(TRAINING_STEPS)]
            except Exception as error:  # one that fails must not keep the others from being checked
                rows.append({**row, "passes": "NO", "why": reason(error)})
                continue
            base = rows[0]["last loss"] if rows and "last loss" in rows[0] else losses[-1]
            fell, near = losses[-1] < losses[0] - 0.3, abs(losses[-1] - base) < 0.05 * base
            row |= {"first loss": losses[0], "last loss": losses[-1]}
            rows.append({**row, "passes": "yes" if fell and near else "NO"})
    return rows


WATCHED_RECIPES = ("bfloat16/word", "float8-row/word", "float8-delayed/word")
WATCHED_STEPS = 6


def watched(
    recipe: str, every: int, compile: bool, data: Dataset, folder: Path
) -> tuple[list[float], str, Gauges | None]:
    """Losses, weights and gauges of some steps, watched every so many."""
    config = TrainConfig(model="llama-1m", recipe=parse(recipe), steps=WATCHED_STEPS, sequence_length=128, warmup_steps=2,
                         gauges_every=every, compile=compile)  # fmt: skip
    session = build(config, folder, data)
    with session.watched():
        gauges = session.gauges
        losses = [train_step(session)["loss"] for _ in range(WATCHED_STEPS)]
    return losses, session.weights_fingerprint(), gauges


def gauge_rows(device: torch.device) -> list[Row]:
    """A watched training has the bits of one that is not, eager and compiled, and every kind of tensor is read."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = prepare_data("stdlib", folder, vocab_size=get_model("llama-1m").vocab_size)
        for recipe, compile in itertools.product(WATCHED_RECIPES, (False, True)):
            row: Row = {"recipe": recipe, "compiled": compile}
            try:
                plain = watched(recipe, 0, compile, data, folder)
                seen = watched(recipe, 2, compile, data, folder)
            except Exception as error:  # one that fails must not keep the others from being checked
                rows.append({**row, "passes": "NO", "why": reason(error)})
                continue
            last = seen[2].last if seen[2] is not None and seen[2].last is not None else {}
            kinds = {key.partition(":")[0] for key in last.get("tensors", ())}
            same, whole = plain[:2] == seen[:2], kinds == {"input", "output_grad", "weight", "grad"}
            row |= {"same bits": same, "tensors": len(last.get("tensors", ())), "device": device.type}
            rows.append({**row, "passes": "yes" if same and whole else "NO"})
    return rows


def checks(section: str, quick: bool, device: torch.device) -> dict[str, list[Row]]:
    """The tables of a section of checks, by title."""
    if section == "storages":
        return check_storages(quick)
    if section == "casts":
        found = list(distinct_casts().items())[: 4 if quick else None]
        title = "casts: values whose bits differ from the eager CPU's; eager, compiled"
        return {title: [cast_row(cast, where, str(device)) for cast, where in found]}
    if section == "products":
        rows = [product_row(row, place, device) for row in COMPUTES.values() for place in DIMS]
        return {f"products of {SIDES[0]} × {SIDES[1]}, {SIDES[2]} terms, against float64": rows}
    if section == "gauges":
        return {f"{WATCHED_STEPS} training steps of a llama-1m, watched and not": gauge_rows(device)}
    if section == "ranks":
        return {
            f"{gpu_ranks.STEPS} steps of {gpu_ranks.LEAVES} leaves on one rank and on two": gpu_ranks.ranks_rows(
                device.type
            )
        }
    return {f"{TRAINING_STEPS} training steps of a llama-1m": training_rows(device)}


def check(report: Report, sections: Sequence[str], quick: bool, device: torch.device) -> bool:
    """All checks of correctness that were requested; whether they pass."""
    passed = True
    for section in sections:
        for title, rows in checks(section, quick, device).items():
            report.add(title, rows)
            passed &= all(row["passes"] in ("yes", "not run") for row in rows)
    return passed


def copy_bandwidth(rounds: int) -> float:
    """Bytes per second of a device-to-device copy, each byte counted as read and as written."""
    source, target = (torch.zeros(COPY_BYTES // 4, device="cuda") for _ in range(2))
    copy = Contender("copy", lambda: target.copy_(source))
    (timing,) = measure([copy], baseline="copy", rounds=rounds, wait=torch.cuda.synchronize)
    return 2 * float(COPY_BYTES) / timing.median


def speed_rows(case: Case, bandwidth: float, rounds: int) -> list[Row]:
    """Each storage timed in the same rounds as the baseline, one at a time: a GPU may hold no more."""
    rows: list[Row] = []
    for storage in STORAGES:
        pair = [
            Contender(BASELINE, fused(case.shapes, "cuda").step),
            Contender(f"ours {storage}", ours(case.shapes, storage, device="cuda").step),
        ]
        timings = measure(pair, baseline=BASELINE, rounds=rounds, warmup=3, wait=torch.cuda.synchronize)
        sizes = (bytes_moved(STORAGES["float32"]), bytes_moved(STORAGES[storage]))
        made = [
            {**t.row(), "bytes moved": size, "share of copy": size * case.num_elements / t.median / bandwidth}
            for t, size in zip(timings, sizes, strict=True)
        ]
        rows += made[bool(rows) :]
        del pair
        torch.cuda.empty_cache()
    return rows


def time_steps(report: Report, quick: bool, rounds: int) -> None:
    """Step times against the copy and torch's fused AdamW."""
    bandwidth = copy_bandwidth(rounds)
    report.note(f"a copy of {COPY_BYTES >> 20} MiB moves {bandwidth / 1e9:,.0f} GB/s, read and written")
    chosen = [
        Case("llama-8m" if quick else "llama-1b", model_shapes("llama-8m" if quick else "llama-1b")),
        Case("small tensors", small_shapes(300)),
    ]
    for case in chosen:
        report.add(f"{case.title}; ratio to {BASELINE}", speed_rows(case, bandwidth, rounds))


def time_layers(report: Report, quick: bool, rounds: int) -> None:
    """Linear layers of a model of 5 billion parameters, in every row and torchao's."""
    names = [*narrow_linear.ROWS, *narrow_linear.peer_names(report)]
    chosen, device = narrow_linear.SETS["quick" if quick else "5b"], torch.device("cuda")
    narrow_linear.emit(report, chosen, names, rounds, device)
    for line in narrow_linear.notes(names, device):
        report.note(line)


MODEL_RECIPES = ("bfloat16/word", "float8-tensor/word", "float8-delayed/word", "float8-row/word")
MODEL_PEERS = ("torchao float8 tensorwise", "torchao float8 rowwise")


def time_models(report: Report, quick: bool, rounds: int, threads: int | None) -> None:
    """Whole training steps of a llama-1b."""
    size = ("llama-1m", "2", "64") if quick else ("llama-1b", "4", "2048")
    given = ["--model", size[0], "--batch-size", size[1], "--sequence-length", size[2], "--rounds", str(rounds)]
    options = narrow_training.flags().parse_args(given + (["--quick"] if quick else []))
    options.threads = threads
    peers = MODEL_PEERS if narrow_linear.peer_names(report) else ()
    narrow_training.emit(report, [*MODEL_RECIPES, *peers], options)


CHECKED, TIMED = ("storages", "casts", "products", "training", "gauges", "ranks"), ("steps", "layers", "models")


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, then measure."""
    flags = parser(__doc__, rounds=25)
    both = (*CHECKED, *TIMED)
    flags.add_argument("--sections", nargs="+", choices=both, default=both, metavar="NAME", help=", ".join(both))
    options = flags.parse_args(arguments)
    try:
        require_device()
    except ChipError as error:
        print(f"ChipError: {error}", file=sys.stderr)
        return 2
    warnings.simplefilter("ignore", EmulationNotice)
    report, rounds = Report("gpu", options, ("torchao",)), 5 if options.quick else options.rounds
    passed = check(report, [s for s in options.sections if s in CHECKED], options.quick, torch.device("cuda"))
    if not passed:
        report.note("a check failed, so nothing was timed")
        report.end()
        return 1
    if "steps" in options.sections:
        time_steps(report, options.quick, rounds)
    if "layers" in options.sections:
        time_layers(report, options.quick, rounds)
    if "models" in options.sections:
        time_models(report, options.quick, rounds, options.threads)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
