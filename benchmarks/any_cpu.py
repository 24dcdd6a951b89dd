"""Training on a CPU that does not multiply bfloat16: what narrow recipes cost beside float32 there.

Targets: ``bfloat16/word``, compiled, has at least 0.9 of the tokens per second of ``float32/float32``, and at least 10 times
those of a plain Hugging Face loop in bfloat16; ``int8-row/word`` and ``float8-row/word`` have at least 0.75 of float32's.
A llama-8m on batches of 8 × 256 tokens of the standard library's text, all in one process, each on its own model from the
same start.

Baseline: our trainer's step in ``float32/float32``, compiled. The plain loop is ``model.bfloat16()``, eager, with torch's
AdamW; it computes as PyTorch does by itself, and is measured before a model of ours exists in the process.

Run on a processor without AVX512-BF16, or let one stand for it:
``ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 ./dev bench any_cpu [--quick]``.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from timing import Contender, Report, Row, measure, parser
from training_speed import stripped

from narrowgauge.cli.main import keep_pages
from narrowgauge.machine import multiplies
from narrowgauge.spec.models import get_model
from narrowgauge.spec.notation import parse
from narrowgauge.trainer import language_model
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.data.dataset import Dataset, prepare_data
from narrowgauge.trainer.session import build

BASELINE = "float32/float32"
TARGETS = {"bfloat16/word": 0.9, "int8-row/word": 0.75, "float8-row/word": 0.75}
PLAIN = "plain bfloat16 loop"
TIMES_PLAIN = 10.0


def settings(recipe: str, quick: bool) -> TrainConfig:
    """What every recipe trains."""
    common = {"recipe": parse(recipe), "compile": True, "schedule": "constant", "warmup_steps": 0, "audit_every": 0}
    if quick:
        return TrainConfig(model="llama-1m", batch_size=2, sequence_length=64, steps=10_000, **common)
    return TrainConfig(model="llama-8m", batch_size=8, sequence_length=256, steps=10_000, **common)


def plain_seconds(config: TrainConfig, data: Dataset, steps: int) -> float:
    """The shortest step of a loop as people write it, in bfloat16 throughout."""
    model = language_model.build(config.model, vocab_size=data.vocab_size, seed=config.seed).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    best = float("inf")
    for number in range(steps):
        tokens = torch.from_numpy(data.batch(number, config.batch_size, config.sequence_length, config.seed))
        began = time.perf_counter()
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        F.cross_entropy(logits.flatten(0, -2).float(), tokens[:, 1:].reshape(-1)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        best = min(best, time.perf_counter() - began)
    return best


def main() -> int:
    """Measure and report."""
    options = parser(__doc__, rounds=7).parse_args()
    report = Report("any_cpu", options)
    keep_pages()
    if multiplies("bfloat16"):
        report.note("this processor multiplies bfloat16: the claim is about one that does not.")
    with tempfile.TemporaryDirectory() as place:
        first = settings(BASELINE, options.quick)
        data = prepare_data(first.data, vocab_size=get_model(first.model).vocab_size, seed=first.seed)
        plain = plain_seconds(first, data, 2)
        steps = {
            name: stripped(build(settings(name, options.quick), Path(place), data)) for name in (BASELINE, *TARGETS)
        }
        contenders = [Contender(name, step) for name, step in steps.items()]
        timings = measure(contenders, baseline=BASELINE, rounds=2 if options.quick else options.rounds)
    tokens = first.batch_size * first.sequence_length
    rows: list[Row] = [
        {
            "": timing.name,
            "tokens/s": tokens / timing.median,
            "of float32's": 1 / timing.ratio,
            "by best": 1 / timing.ratio_of_best,
            "target": TARGETS.get(timing.name, 1.0),
            "times the plain loop": plain / min(timing.seconds),
        }
        for timing in timings
    ]
    report.add("training steps", [*rows, {"": PLAIN, "tokens/s": tokens / plain}])
    report.note(f"bfloat16/word is to be at least {TIMES_PLAIN:g} times as fast as the plain loop (shortest times).")
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
