"""Is lr × EDQ the right start after a change of storage? llama-8m, four cases, three rates, three seeds; not run yet.

Each case trains with a storage that loses updates at a rate and measures its EDQ. Then ``word`` trains from the same start at
that rate, at rate × EDQ and at a third of it. Every training is one ``narrowgauge train`` into its own folder. A finished one is
not repeated, so the script may be stopped and started again. It prints a row for each case: losses by rate, and the best.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from pathlib import Path

import narrowgauge as ng

CASES = ("bfloat16/naive", "bfloat16/no-master", "bfloat16/collage-light", "float16/naive")
RATES, SEEDS = (1e-4, 3e-4, 1e-3), (0, 1, 2)


def trained(folder: Path, recipe: str, lr: float, seed: int, options: list[str]) -> dict[str, float]:
    """Return the summary of a training, run now if it is not there."""
    out = folder / f"{recipe.replace('/', '-')}-{lr:.3g}-{seed}"
    if not (out / "summary.json").is_file():
        command = [sys.executable, "-m", "narrowgauge", "resume" if (out / "run.toml").is_file() else "train"]
        settings = [
            "--recipe",
            recipe,
            "--lr",
            f"{lr:.6g}",
            "--seed",
            str(seed),
            "--out",
            str(out),
            "--audit-every",
            "10",
        ]
        subprocess.run([*command, *([str(out)] if command[-1] == "resume" else settings + options)], check=True)
    return ng.read_run(out).summary or {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("options", nargs="*", help="of narrowgauge train, after --: --model llama-8m --data …")
    args = parser.parse_args()
    for recipe, lr in itertools.product(CASES, RATES):
        lossy = [trained(args.folder, recipe, lr, seed, args.options) for seed in SEEDS]
        edq = sum(row["edq"] for row in lossy) / len(lossy)
        losses = {"lossy": [row["val_loss"] for row in lossy]}
        for name, rate in (("lr", lr), ("lr × EDQ", lr * edq), ("lr × EDQ / 3", lr * edq / 3)):
            runs = [trained(args.folder, "bfloat16/word", rate, seed, args.options) for seed in SEEDS]
            losses[name] = [row["val_loss"] for row in runs]
        means = {name: sum(values) / len(values) for name, values in losses.items()}
        best = min((name for name in means if name != "lossy"), key=lambda name: means[name])
        print(
            f"{recipe} lr {lr:g} EDQ {edq:.3f}",
            *(f"{name} {mean:.4f}" for name, mean in means.items()),
            f"best: {best}",
            sep="; ",
        )


if __name__ == "__main__":
    main()
