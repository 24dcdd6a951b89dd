"""Compare six recipes by ``ng.compare`` in a fine-tune of SmolLM2-135M: what a reader of a page on
mixed precision asks first.

Claim: on a processor that multiplies bfloat16, mixed precision is faster than float32, 16 bits
throughout take less memory, and a recipe's loss says what that costs. 60 steps of 2 × 256 tokens at
2e-5, two seeds. The page has tokens a second, the counted memory of a step, and losses.

Baseline: ``float32/float32``. Run: ``./dev bench compare_smollm2 [--quick]``, on a quiet machine
with AVX512-BF16 or a GPU: elsewhere bfloat16 products are slower than float32's. It writes
``comparisons/smollm2/report.html``.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from _starts import SMOLLM2, start_of
from _timing import begin, exit_by, parser
from torch import Tensor
from torch.nn.functional import cross_entropy

import narrowgauge as ng

RECIPES = (
    "float32/float32", "bfloat16/float32", "bfloat16/naive", "bfloat16/word", "float16/split", "bfloat16/collage-plus",
)  # fmt: skip
LENGTH = 256


def loss_of(model: Any, blocks: Tensor, device: str) -> Tensor:
    """Return the mean loss of the next tokens of blocks ``[batch, length + 1]``."""
    blocks = blocks.to(device)
    return cross_entropy(model(input_ids=blocks[:, :-1]).logits.float().mT, blocks[:, 1:])


def main() -> int:
    """Compare the recipes."""
    options = parser(__doc__, rounds=1).parse_args()
    warnings.simplefilter("ignore")
    begin("compare_smollm2", options)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps = 2 if options.quick else 60
    start = start_of(SMOLLM2, 0, 2 if options.quick else 16, LENGTH)

    def train(recipe: str, seed: int, record: Any) -> None:
        model: Any = copy.deepcopy(start.model).to(device)
        model, optimizer = ng.prepare(model, recipe, lr=2e-5, max_grad_norm=1.0, seed=seed)
        draw = torch.Generator().manual_seed(seed)
        with record(model, optimizer) as recorder:
            for _ in range(steps):
                places = torch.randint(len(start.train) - LENGTH, (2, 1), generator=draw)
                loss = loss_of(model, start.train[places + torch.arange(LENGTH + 1)], device)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                recorder.step(loss, tokens=2 * LENGTH)
            with torch.no_grad():
                recorder.evaluate(loss_of(model, start.held_out, device))

    out = None if options.quick else "comparisons/smollm2"
    recipes = RECIPES[3:5] if options.quick else RECIPES
    comparison = ng.compare(train, recipes, seeds=1 if options.quick else 2, out=out)
    print(comparison.table().plain())
    print(comparison.verdict)
    return 0


if __name__ == "__main__":
    exit_by(main)
