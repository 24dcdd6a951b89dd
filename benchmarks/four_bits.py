"""What the four-bit computes and their newer forms lose, measured on the tensors of a model in training.

Claim: none; it shows which form loses less. A llama-1m is trained for some steps in bfloat16. Then, at these weights and on the
same batches:

* each of a layer's three matmuls is computed from the casts of its input, weight and gradient. "error" is the length of the
  result's error over the length of the result, of one draw of the random bits; "of the mean" that of the mean over draws, which
  is what stays when errors average out over steps; "along" how much longer (or shorter) the mean is along the exact result: the
  shrinkage. Lengths are summed over all layers and batches. Forms that change no cast of a matmul have the row's figures.
* the whole model computes its loss and gradients. "loss" is its loss less that of bfloat16; of the gradient of all narrow layers
  the same three figures, which hold what the forward pass has changed, too.

Baseline: the exact products; bfloat16's loss and gradients. Training itself:
``./dev bench board --add nvfp4/word nvfp4+eden/word``.

Run: ``./dev bench four_bits [--out FOLDER] [--quick]``. Each row is kept under ``--out``, and an interrupted run goes on where it
was (``_parts.py``), after the training, which gives the same bits again. All rows take about 60 seconds on 2 cores.
``--rounds`` has no effect.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from _parts import Part, add_out, complete, out_folder
from timing import Report, Row, exit_by, parser
from torch import Tensor, nn

from narrowgauge.matmul.gemm import EmulationNotice
from narrowgauge.matmul.layer_matmuls import cast_to_slot, multiply_slots
from narrowgauge.matmul.operand import Keys, layer_keys
from narrowgauge.matmul.swapping import swap_linears
from narrowgauge.numerics.hashing import step_seed
from narrowgauge.spec import computes
from narrowgauge.spec.computes import COMPUTES, PLACES, SLOTS, Compute
from narrowgauge.spec.notation import get_compute, parse
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.data.dataset import prepare_data
from narrowgauge.trainer.language_model import loss_sum, vocabulary_size
from narrowgauge.trainer.session import build
from narrowgauge.trainer.step import train_step

NAMES = [name for name in (*computes.COMPUTES, *computes.VARIANTS) if name.partition("+")[0] in ("mxfp4", "nvfp4")]
SETTING: dict[str, Any] = {
    "model": "llama-1m", "batch_size": 4, "sequence_length": 128, "lr": 1e-3, "beta2": 0.95, "audit_every": 0,
    "compile": False,
}  # fmt: skip
MATMUL_SECONDS, MODEL_SECONDS = 0.07, 0.2
"""That one draw takes: of a matmul in all layers, and of the loss and gradients of a batch."""
Tensors = dict[str, Tensor]


@dataclass
class Trained:
    """The model after its steps, and what every row sees of it; it is trained for the first row that is missing.

    Args:
        steps: that it is trained.
        num_batches: of the second table.
    """

    steps: int
    num_batches: int

    @cached_property
    def _made(self) -> tuple[Any, list[Tensor]]:
        with tempfile.TemporaryDirectory() as folder:
            config = TrainConfig(recipe=parse("bfloat16/word"), steps=self.steps, out=folder, **SETTING)
            data = prepare_data(config.data, vocab_size=vocabulary_size(config.model), seed=config.seed)
            session = build(config, Path(folder), data)
            for _ in range(self.steps):
                train_step(session)
            held_out = data.valid_batches(SETTING["batch_size"], SETTING["sequence_length"], self.num_batches)
            return session.model, [torch.from_numpy(each) for each in held_out]

    @property
    def batches(self) -> list[Tensor]:
        """Held-out tokens."""
        return self._made[1]

    def fresh(self) -> Any:
        """A model of plain layers with its weights."""
        source = self._made[0]
        model = type(source)(source.config).bfloat16()
        model.load_state_dict({name: value.detach().clone() for name, value in source.state_dict().items()})
        return model

    @cached_property
    def layers(self) -> list[Tensors]:
        """Input, weight and gradient of each narrow layer."""
        return list(parts_of(self.fresh(), self.batches[0]))

    @cached_property
    def exact(self) -> list[tuple[float, Tensor]]:
        """The baseline of the second table, by batch."""
        wide = self.fresh()
        swap_linears(wide, "bfloat16")
        return [loss_and_gradients(wide, tokens) for tokens in self.batches]


def added(sums: Tensor, found: Sequence[Tensor], exact: Tensor) -> Tensor:
    """The sums of some draws of one result, added: of squares of errors of one and of the mean, along it, and of it."""
    mean = torch.stack([each.double() for each in found]).mean(0)
    exact = exact.double()
    of_one = torch.stack([(each.double() - exact).square().sum() for each in found]).mean()
    return sums + torch.stack([of_one, (mean - exact).square().sum(), (mean * exact).sum(), exact.square().sum()])


def figures(sums: Tensor) -> Row:
    """What a table shows of them."""
    of_one, of_mean, along, length = sums.tolist()
    return {
        "error": f"{(of_one / length) ** 0.5:.4f}",
        "of the mean": f"{(of_mean / length) ** 0.5:.4f}",
        "along": f"{along / length - 1:+.4f}",
    }


def product(compute: Compute, matmul: str, tensors: Tensors, draw: int) -> Tensor:
    """One matmul of a layer in a compute's casts, float32."""
    keys = Keys(torch.tensor([step_seed(0, draw), 0, 0], dtype=torch.int32), layer_keys(["layer"])[0])
    slots = [f"{matmul}.{side}" for side in ("left", "right")]
    left, right = (cast_to_slot(tensors[SLOTS[slot].tensor], compute, slot, keys=keys) for slot in slots)
    shape = tuple(tensors[SLOTS[slot].tensor].shape[1 - SLOTS[slot].dim] for slot in slots)
    return multiply_slots(left, right, compute, matmul, shape, torch.float32)  # type: ignore[arg-type]


def distinct_matmuls(draws: int) -> list[tuple[str, str, int]]:
    """Each compute and matmul whose casts none before it has, and of how many draws: one where nothing is drawn."""
    found: dict[Any, tuple[str, str, int]] = {}
    for name in NAMES:
        for matmul in PLACES:
            casts = get_compute(name).products[matmul]
            number = draws if casts.left.needs_bits or casts.right.needs_bits else 1
            found.setdefault((matmul, casts), (name, matmul, number))
    return list(found.values())


def matmul_row(trained: Trained, name: str, matmul: str, draws: int) -> Row:
    """One matmul of a compute, over all layers."""
    compute, sums = get_compute(name), torch.zeros(4, dtype=torch.float64)
    for tensors in trained.layers:
        exact = product(COMPUTES["float32"], matmul, tensors, 0)
        sums = added(sums, [product(compute, matmul, tensors, draw) for draw in range(draws)], exact)
    return {"": name, "matmul": matmul, "draws": draws, **figures(sums)}


def parts_of(model: nn.Module, tokens: Tensor) -> Iterator[Tensors]:
    """Input, weight and gradient of each narrow layer, of one pass in bfloat16, in float32."""
    kept: dict[str, Tensors] = {}

    def keep(name: str, module: Any, x: Tensor, y: Tensor) -> None:
        kept[name] = {"input": x.detach().flatten(0, -2).float(), "weight": module.weight.detach().float()}
        y.register_hook(lambda grad: kept[name].update(gradient=grad.flatten(0, -2).float()))

    def hook(name: str) -> Any:
        return lambda module, given, result: keep(name, module, given[0], result)

    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}
    handles = [module.register_forward_hook(hook(name)) for name, module in linears.items()]
    loss_and_gradients(model, tokens)
    for handle in handles:
        handle.remove()
    yield from kept.values()


def loss_and_gradients(model: nn.Module, tokens: Tensor) -> tuple[float, Tensor]:
    """The mean loss of some sequences, and the gradient of all weights of linear layers but the head, in one vector."""
    model.zero_grad(set_to_none=True)
    loss = loss_sum(model, tokens, chunked=False) / (tokens.numel() - len(tokens))  # type: ignore[arg-type]
    loss.backward()
    linears = [m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]
    return float(loss), torch.cat([m.weight.grad.flatten().float() for m in linears if m.weight.grad is not None])


def model_row(trained: Trained, name: str, draws: int) -> Row:
    """The whole model in a compute: its loss at the model's weights, and its gradients."""
    model, sums, losses = trained.fresh(), torch.zeros(4, dtype=torch.float64), []
    layers = swap_linears(model, name).layers.values()
    for tokens, (loss, gradient) in zip(trained.batches, trained.exact, strict=True):
        found = []
        for draw in range(draws):
            for layer in layers:
                layer.set_step(draw, 0)
            found.append(loss_and_gradients(model, tokens))
        losses.append(found[0][0] - loss)
        sums = added(sums, [each for _, each in found], gradient)
    return {"": name, "loss": f"{sum(losses) / len(losses):+.4f}", **figures(sums)}


def parts(options: argparse.Namespace) -> tuple[list[Part], list[Part]]:
    """A part for each row of both tables."""
    trained, draws = Trained(options.steps, options.batches), max(1, options.draws // 2)
    of_matmuls = [
        Part(
            f"{matmul} of {name}",
            {"steps": options.steps, "draws": number},
            partial(matmul_row, trained, name, matmul, number),
            MATMUL_SECONDS * number,
        )
        for name, matmul, number in distinct_matmuls(options.draws)
    ]
    settings = {"steps": options.steps, "batches": options.batches, "draws": draws}
    seconds = MODEL_SECONDS * draws * options.batches
    of_models = [
        Part(f"model in {name}", settings, partial(model_row, trained, name, draws), seconds) for name in NAMES
    ]
    return of_matmuls, of_models


def flags() -> argparse.ArgumentParser:
    """All flags."""
    made = parser(__doc__, rounds=0)
    add_out(made, "four-bits")
    made.add_argument("--steps", type=int, default=100, help="steps that the model is trained first")
    made.add_argument("--draws", type=int, default=16, help="draws of the random bits")
    made.add_argument("--batches", type=int, default=3, help="batches of 4 × 128 tokens of the second table")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = flags().parse_args(arguments)
    if options.quick:
        options.steps, options.draws, options.batches = 2, 2, 1
    warnings.simplefilter("ignore", EmulationNotice)
    report = Report("four_bits", options, peers=("transformers",), markdown=True)
    of_matmuls, of_models = parts(options)
    with out_folder(options, "four-bits") as out:
        made = complete([*of_matmuls, *of_models], out, report)
    title = f"each matmul, over the layers of {SETTING['model']} after {options.steps} steps"
    report.add(title, [made[part.name] for part in of_matmuls])
    draws = max(1, options.draws // 2)
    report.add(f"the whole model, mean of {draws} draws", [made[part.name] for part in of_models])
    return report.end()


if __name__ == "__main__":
    exit_by(main)
