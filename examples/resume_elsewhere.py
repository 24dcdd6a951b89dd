"""A run that begins on two ranks and goes on somewhere else: on one process, and on three ranks,
with the same bits.

The reduction ``reproducible`` adds gradients exactly, so the sum does not depend on how many ranks
there are; a checkpoint holds what each rank held, and any number of ranks reads it. The
fingerprints below are of all weights, to the last bit.

    python examples/resume_elsewhere.py
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from narrowgauge.runs.record import read_run

SHAPE = {
    "model_type": "llama", "vocab_size": 280, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32, "tie_word_embeddings": True,
}  # fmt: skip
# Six micro-batches a step: three for each of two ranks, two for each of three, all for one.
SETTINGS = {
    "recipe": "bfloat16/word/reproducible", "steps": 6, "batch-size": 6, "gradient-accumulation-steps": 6,
    "sequence-length": 16, "eval-sequences": 1, "held-out": 0.2, "gauges-every": 0,
}  # fmt: skip


def write_text(folder: Path) -> None:
    """A little text and the shape of a little model."""
    draw = random.Random(0)
    for name in ("model", "text"):
        (folder / name).mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(SHAPE))
    for number in range(6):
        words = draw.choices(["def", "return", "import", "self", "None", "the", "fox"], k=200)
        (folder / "text" / f"{number}.txt").write_text(" ".join(words))


def narrowgauge(*words: object, ranks: int = 1) -> None:
    """One command, as you would type it, on some ranks of torchrun."""
    launcher = ["-m", "narrowgauge"]
    if ranks > 1:
        launcher = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            *launcher,
        ]
    print("$ python", *launcher, *words, flush=True)
    subprocess.run(
        [sys.executable, *launcher, *map(str, words)], check=True, stdout=subprocess.DEVNULL
    )


def main() -> None:
    """Train, stop, go on elsewhere, and compare."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder)
        narrowgauge("tokenize", folder / "text", folder / "tokens")
        settings = {"model": folder / "model", "data": folder / "tokens", **SETTINGS}
        flags = [word for flag, value in settings.items() for word in (f"--{flag}", value)]
        narrowgauge("train", *flags, "--out", folder / "run", "--stop-after", 3, ranks=2)
        fingerprints = {}
        for ranks in (1, 3):
            copy = folder / f"on {ranks}"
            shutil.copytree(folder / "run", copy)
            narrowgauge("resume", copy, ranks=ranks)
            fingerprints[ranks] = (read_run(copy).summary or {})["weights_fingerprint"]
        for ranks, fingerprint in fingerprints.items():
            print(f"two ranks, then {ranks}: {fingerprint}")


if __name__ == "__main__":
    main()
