"""A rule of your own, kept in any storage: AdEMAMix (2409.03137), an AdamW with a second, very slow
momentum.

A rule is two functions. One turns a group's options and the number of the step into numbers, the
other turns a weight, its gradient and its states into the change and the new states. How they are
stored is not its business.

Run with: python examples/own_rule.py
"""

import torch

import narrowgauge as ng
from narrowgauge.numerics.rounding import sqrt
from narrowgauge.optim import Rule


def scalars(group, step):
    (beta1, beta2, beta3), lr = group["betas"], group["lr"]
    return (
        1 - beta1,
        1 - beta2,
        1 - beta3,
        -lr / (1 - beta1**step),
        -lr * group["alpha"],
        (1 - beta2**step) ** -0.5,
    )


def update(weight, gradient, fast, slow, square, s):
    fast = fast + (gradient - fast) * s["one_minus_beta1"]
    slow = slow + (gradient - slow) * s["one_minus_beta3"]
    square = square + (gradient * gradient - square) * s["one_minus_beta2"]
    momentum = fast * s["fast_rate"] + slow * s["slow_rate"]
    return momentum / (sqrt(square) * s["correction"] + 1e-8), fast, slow, square


STATES = (
    "exp_avg",
    "exp_avg_slow",
    "exp_avg_sq",
)  # the last is never negative, and takes the code for second moments
NUMBERS = (
    "one_minus_beta1",
    "one_minus_beta2",
    "one_minus_beta3",
    "fast_rate",
    "slow_rate",
    "correction",
)
ADEMAMIX = Rule("ademamix", STATES, NUMBERS, scalars, update, monotone=True)
OPTIONS = {"lr": 2e-3, "betas": (0.9, 0.999, 0.9999), "alpha": 5.0}


def train(storage, steps=200):
    """A small network in that storage: its last loss, and bytes per parameter."""
    torch.manual_seed(0)
    inputs = torch.randn(512, 32)
    targets = torch.sin(inputs @ torch.randn(32, 8))
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Linear(128, 8))
    model = model.to(getattr(torch, ng.spec.STORAGES[storage].visible))
    optimizer = ng.Optimizer(model.parameters(), ADEMAMIX, OPTIONS, storage=storage)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(
            model(inputs.to(model[0].weight.dtype)).float(), targets
        )
        loss.backward()
        optimizer.step()
    return loss.item(), optimizer.bytes_per_param()


if __name__ == "__main__":
    for storage in ("float32", "exact", "word", "compact", "states8"):
        loss, size = train(storage)
        print(
            f"{storage:8} {size:4.1f} bytes per parameter, three states among them; loss {loss:.4f}"
        )
