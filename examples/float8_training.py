"""Float8 in a training loop of plain PyTorch: one line swaps the linear layers, the optimizer is
anyone's.

The weights stay float32 and autocast makes the stream bfloat16, as in any mixed-precision loop;
what enters the matmuls of a swapped layer is float8. A step has four micro-batches, whose weights
are cast once. Where a chip does not multiply float8, the same values are multiplied in bfloat16:
nothing is gained in time, and what float8 loses can be seen.

Run with: python examples/float8_training.py
"""

import warnings

import torch

import narrowgauge as ng
from narrowgauge.matmul.gemm import describe_matmuls

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MICRO_BATCH = 128


def small_model():
    """A network that learns a sine of a random projection, and what it learns from."""
    torch.manual_seed(0)
    inputs = torch.randn(512, 64)
    targets = torch.sin(inputs @ torch.randn(64, 16) / 4)
    layers = (
        torch.nn.Linear(64, 256),
        torch.nn.GELU(),
        torch.nn.Linear(256, 256),
        torch.nn.GELU(),
        torch.nn.Linear(256, 16),
    )
    return torch.nn.Sequential(*layers).to(DEVICE), inputs.to(DEVICE), targets.to(DEVICE)


def step(model, linears, optimizer, inputs, targets):
    """One optimizer step of several micro-batches: the mean of their losses."""
    total = 0.0
    with ng.matmul.cached_weights():  # each weight is cast once for all of them
        for first in range(0, len(inputs), MICRO_BATCH):
            linears.set_first_token(
                first
            )  # stochastic rows then round as they would in one large batch
            part = slice(first, first + MICRO_BATCH)
            with torch.autocast(DEVICE.type, torch.bfloat16):
                outputs = model(inputs[part])
            loss = (
                torch.nn.functional.mse_loss(outputs.float(), targets[part])
                * MICRO_BATCH
                / len(inputs)
            )
            loss.backward()
            total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


def train(compute, steps=80):
    """The losses of a training in that compute."""
    model, inputs, targets = small_model()
    linears = ng.swap_linears(
        model, compute, keep=("4",)
    )  # the last layer, like a language model's head, stays as it is
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    linears.follow(optimizer)  # its steps alone count
    return [step(model, linears, optimizer, inputs, targets) for _ in range(steps)]


if __name__ == "__main__":
    warnings.filterwarnings("ignore", ".*emulated here")  # said below
    for compute in ("bfloat16", "float8-row", "float8-tensor"):
        losses = train(compute)
        print(f"{compute:14}  loss {losses[0]:.4f} to {losses[-1]:.4f}")
    print(describe_matmuls(ng.spec.COMPUTES["float8-row"], DEVICE))
