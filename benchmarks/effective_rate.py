"""Is lr × EDQ the right start after a change of storage? Cases that lose updates, three rates, three seeds.

Each case trains with a storage that loses updates at a rate and measures its EDQ. Then ``word`` trains from the same start at
that rate and at rate × EDQ. Every training is one ``narrowgauge train`` into its own folder. A finished one is not repeated,
so the script may be stopped and started again, and several may share a folder if their recipes differ. It prints for each
case the mean losses, and the paired difference of the two starts ± half its 95 % interval.

Run: ``./dev bench effective_rate FOLDER --recipes bfloat16/naive --model llama-1m --steps 400 --sequence-length 128``
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev

import narrowgauge as ng
from narrowgauge.spec.significance import student_t

CASES = ("bfloat16/naive", "bfloat16/nearest8", "bfloat16/stochastic", "float16/naive")
WORD = "bfloat16/word"
RATES, SEEDS = (3e-4, 1e-3, 3e-3), (0, 1, 2)


def trained(folder: Path, recipe: str, lr: float, seed: int, options: list[str]) -> ng.Run:
    """Return the record of a training, run now if it is not there."""
    out = folder / f"{recipe.replace('/', '-')}-{lr:.3g}-{seed}"
    if not (out / "summary.json").is_file():
        command = ["train", "--recipe", recipe, "--lr", f"{lr:.6g}", "--seed", str(seed), "--out", str(out), *options]
        if (out / "run.toml").is_file():
            command = ["resume", str(out)]
        subprocess.run([sys.executable, "-m", "narrowgauge", *command], check=True)
    return ng.read_run(out)


def losses(runs: list[ng.Run]) -> list[float]:
    return [(run.summary or {})["val_loss"] for run in runs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recipes", nargs="+", default=CASES, help="the cases (default: all)")
    parser.add_argument("--rates", nargs="+", type=float, default=RATES, help="peak learning rates")
    args, options = parser.parse_known_args()  # the rest are options of narrowgauge train
    for recipe, lr in itertools.product(args.recipes, args.rates):
        lossy, plain = ([trained(args.folder, name, lr, seed, options) for seed in SEEDS] for name in (recipe, WORD))
        # As diagnose says it: the mean over audited steps.
        edq = fmean(fmean(row["edq"] for row in run.steps if row.get("edq") is not None) for run in lossy)
        advised = losses([trained(args.folder, WORD, lr * edq, seed, options) for seed in SEEDS])
        gains = [ours - theirs for ours, theirs in zip(advised, losses(plain), strict=True)]
        print(
            f"{recipe} at lr {lr:g}: {fmean(losses(lossy)):.4f}, EDQ {edq:.3f}; {WORD} at lr {fmean(losses(plain)):.4f}, "
            f"at lr × EDQ {fmean(advised):.4f}: {fmean(gains):+.4f} ± {student_t(2) * stdev(gains) / 3**0.5:.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
