"""What outlier features cost a trained model in int8, in bitsandbytes' form of LLM.int8() and in the paper's.

Claim: with the weights of outlier columns in 16 bits (``int8-outlier``, the paper's form) the loss stays within 0.01 nats of
bfloat16's however large the outliers are, and ``int8-row`` does not. Asked: the difference of the loss on held-out text and the
bytes of the model, for each strength of the outliers; and whether ``int8-outlier-codes`` (bitsandbytes' form, weights from int8
codes) stays as near.

A llama-1m is trained to below the bigram level, as on the board, and gets outliers that leave its function as it is: some
channels of every norm's gain are multiplied by ``s``, and the columns of the layers that read them divided by ``s``. Powers of
two change no bit of any product, so bfloat16 gives the same loss at every strength, which is checked. The channels are the same
in all layers, as in large models.

Baseline: bfloat16, without outliers. A difference is the mean over sequences, paired, with the half width of its 95 % interval
by Student's t: what is drawn are sequences, so the interval is one of this model's loss on this text, and not over trainings.
``int8-outlier`` multiplies as in training, with 16-bit weights; the others are quantized for inference. A note says how many
columns of inputs reach 6 without our help, the threshold of the paper (2208.07339).

Run: ``./dev bench int8_outliers [--out FOLDER] [--quick]``. The model is kept under ``--out``, and an interrupted training goes
on where it was. It takes about 65 seconds of a free core with AVX512, 260 with AVX2; all cells take a minute. ``--rounds`` has
no effect.
"""

from __future__ import annotations

import contextlib
import io
import math
import statistics
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _parts import add_out, out_folder
from _stdlib import stdlib_tokens
from timing import Report, Row, exit_by, parser
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.analysis.comparison.intervals import interval
from narrowgauge.matmul.gemm import EmulationNotice
from narrowgauge.runs.record import read_run
from narrowgauge.spec.notation import parse
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.data.dataset import open_data
from narrowgauge.trainer.export import export
from narrowgauge.trainer.language_model import loss_sum
from narrowgauge.trainer.loop import train

STRENGTHS = (1, 8, 32, 128)
FORMS = ("bfloat16", "int8-row", "int8-outlier-codes", "int8-outlier")
THRESHOLD = 6.0
CHANNELS, SEQUENCES, QUICK_SEQUENCES = 4, 128, 8
"""How many channels get outliers; every other one of how many sequences is tested."""
TRAINING: dict[str, Any] = {
    "model": "llama-1m", "steps": 800, "batch_size": 8, "sequence_length": 128, "lr": 3e-3, "eval_every": 200,
    "eval_sequences": 64, "gauges_every": 0, "audit_every": 0, "checkpoint_every": 200, "keep_checkpoints": 1, "compile": False,
}  # fmt: skip
QUICK = {**TRAINING, "steps": 4, "sequence_length": 32, "eval_every": 4, "checkpoint_every": 4}
READERS = {"input_layernorm": ("q_proj", "k_proj", "v_proj"), "post_attention_layernorm": ("gate_proj", "up_proj")}
"""The norms of a Llama's layer, and the linear layers that read what each gives."""


def prepare(folder: Path, plain: Path, report: Report) -> None:
    """Train or resume the model where it is not finished, export it, and say what outliers change of it."""
    options, strength = report.options, 32 if report.options.quick else STRENGTHS[-1]
    given = QUICK if options.quick else TRAINING
    data = stdlib_tokens(str(given["model"]))
    config = TrainConfig(
        recipe=parse("bfloat16/master"), data=str(data), out=str(folder), threads=options.threads, **given
    )
    with contextlib.redirect_stdout(io.StringIO()):
        train(config)
    export(folder, plain)
    tokens = torch.from_numpy(open_data(data, config.held_out, config.seed).validation(8, 128))
    off = same_function(plain, strength, tokens)
    report.note(f"outliers × {strength} change the logits in float32 by {off:.1e} of the largest")
    largest = column_magnitudes(plain, tokens)
    share = float((largest >= THRESHOLD).double().mean())
    report.note(f"{share:.1%} of input columns reach {THRESHOLD:g}; the largest is {float(largest.max()):.1f}")


def with_outliers(model: Any, strength: float) -> Any:
    """The same function with some channels of every norm ``strength`` times as large; a power of two."""
    draw = torch.Generator().manual_seed(0)
    channels = torch.randperm(model.config.hidden_size, generator=draw)[:CHANNELS]
    with torch.no_grad():
        for layer in model.model.layers:
            named: dict[str, nn.Module] = dict(layer.named_modules())
            for norm, readers in READERS.items():
                named[norm].weight[channels] *= strength  # type: ignore[operator]
                for name in named:
                    if name.rpartition(".")[2] in readers:
                        named[name].weight[:, channels] /= strength  # type: ignore[index]
    return model


@torch.no_grad()
def column_magnitudes(plain: Path, tokens: Tensor) -> Tensor:
    """Return the largest magnitude of each input column of every linear layer but the head, 1-d."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    largest = []
    for layer in model.model.layers.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_pre_hook(lambda _, inputs: largest.append(inputs[0].abs().flatten(0, -2).amax(0)))
    model(tokens)
    return torch.cat(largest)


@torch.no_grad()
def losses(model: Any, sequences: Sequence[Tensor]) -> list[float]:
    """The mean loss of each sequence, in nats."""
    return [float(loss_sum(model, each)) / (each.shape[1] - 1) for each in sequences]


def measured(plain: Path, strength: float, form: str, sequences: Sequence[Tensor]) -> dict[str, Any]:
    """One cell: losses by sequence, and bytes."""
    from transformers import AutoModelForCausalLM

    model: Any = with_outliers(AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16).eval(), strength)
    if form == "int8-outlier":
        ng.swap_linears(model, form)
    elif form != "bfloat16":
        ng.quantize_for_inference(model, form)
    return {"losses": losses(model, sequences), "bytes": model.get_memory_footprint()}


def same_function(plain: Path, strength: float, tokens: Tensor) -> float:
    """The largest difference of the logits in float32 that the outliers make, in the largest logit."""
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        one, other = (
            with_outliers(AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval(), each)(tokens).logits
            for each in (1, strength)
        )
    return float((one - other).abs().max() / one.abs().max())


def rows_of(cells: dict[tuple[float, str], dict[str, Any]], strengths: Sequence[float]) -> list[Row]:
    """The table: the first cell is the baseline of all."""
    rows: list[Row] = []
    base = cells[strengths[0], "bfloat16"]["losses"]
    for strength in strengths:
        for form in FORMS:
            cell = cells[strength, form]
            loss = statistics.fmean(cell["losses"])
            mean, half = interval([a - b for a, b in zip(cell["losses"], base, strict=True)])
            rows.append({
                "outliers ×": f"{strength:g}", "form": form, "loss": f"{loss:.4f}", "difference": f"{mean:+.4f} ± {half:.4f}",
                "perplexity": f"{math.exp(loss):.1f}", "MB": f"{cell['bytes'] / 1e6:.3f}",
            })  # fmt: skip
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    flags = parser(__doc__, rounds=0)
    add_out(flags, "int8-outliers", of="run")
    options = flags.parse_args(arguments)
    warnings.simplefilter("ignore", EmulationNotice)
    report = Report("int8_outliers", options, peers=("transformers",))
    strengths, number = ((1, 32), QUICK_SEQUENCES) if options.quick else (STRENGTHS, SEQUENCES)
    with out_folder(options, "int8-outliers") as out, tempfile.TemporaryDirectory() as temporary:
        folder, plain = out / "model", Path(temporary, "plain")
        prepare(folder, plain, report)
        length = int(read_run(folder).config["sequence_length"])
        data = open_data(str(read_run(folder).config["data"]), 0.05, 0)
        tested = torch.from_numpy(data.validation(number, length)).split(1)[::2]
        cells = {(s, form): measured(plain, s, form, tested) for s in strengths for form in FORMS}
    wide = [cells[strength, "bfloat16"]["losses"] for strength in strengths]
    same = "the same bits" if all(each == wide[0] for each in wide) else "other bits"
    report.note(f"bfloat16 gives {same} at {len(wide)} strengths")
    report.add("loss on held-out text by strength of the outliers", rows_of(cells, strengths))
    return report.end()


if __name__ == "__main__":
    exit_by(main)
