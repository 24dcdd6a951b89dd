"""A watch changes no bit of a loop, lives to its end and accuses no healthy one, for every optimizer
class of the libraries that are installed, and for ours in each storage.
"""

import inspect
import warnings
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import narrowgauge as ng
from narrowgauge.measuring.watch.hooks import RunNotice
from tables import exhaustive

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]
LIBRARIES = {
    "torch.optim": (), "optimi": (), "torchao.optim": (),
    "bitsandbytes.optim": ("AdamW", "AdamW8bit", "Lion8bit", "AdEMAMix8bit"),
    "heavyball": ("AdamW", "SOAP", "Muon", "SFAdamW"),
}  # fmt: skip
"""Modules, and the classes that stand for all others, which share their code."""
OPTIONS = {
    "Adafactor": {"lr": 1e-2}, "SGD": {"lr": 0.05}, "Rprop": {"lr": 1e-3}, "ASGD": {"lr": 1e-3},
    "Muon": {"lr": 1e-2}, "LBFGS": {"lr": 0.1},
}  # fmt: skip
NOT_ALONE = {
    "Optimizer": "the base class", "SparseAdam": "dense gradients are refused", "CPUOffloadOptimizer": "it needs a GPU",
}  # fmt: skip


class Model(nn.Module):
    """A byte model whose parameters are matrices and vectors."""

    def __init__(self, only_matrices: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 16)
        self.norm = nn.LayerNorm(16, elementwise_affine=not only_matrices)
        self.layer = nn.Linear(16, 16, bias=not only_matrices)
        self.head = nn.Linear(16, 32, bias=False)

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        return self.head(x + F.gelu(self.layer(self.norm(x))))


def classes_of(library: str):
    """Return the optimizers of a library by name; none if it is not installed."""
    try:
        module = import_module(library)
    except ImportError:
        return {}
    classes = {}
    for name, kind in vars(module).items():
        is_class = inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)
        is_case = name in (LIBRARIES[library] or vars(module)) and name not in NOT_ALONE
        if is_class and is_case:
            classes[f"{library}.{name}"] = partial(kind, **OPTIONS.get(name, {"lr": 1e-3}))
    return classes


FLOAT32 = torch.float32
CASES = {}
for library in LIBRARIES:
    CASES |= {name: (make, FLOAT32) for name, make in classes_of(library).items()}
for name, option in (
    ("optimi.AdamW", {"kahan_sum": True}), ("torchao.optim._AdamW", {"bf16_stochastic_round": True}),
    ("torchao.optim.AdamW4bit", {"bf16_stochastic_round": True}),
):  # fmt: skip
    if name in CASES:
        CASES[f"{name}, bfloat16"] = partial(CASES[name][0], **option), torch.bfloat16
# The suite of equivalence records a loop of ours in each storage.
for kind in (ng.AdamW, ng.Adam, ng.Lion, ng.SGD, ng.Muon):
    CASES[f"ng.{kind.__name__}"] = partial(kind, lr=1e-3, storage="word", compile=False), FLOAT32


def trained(case: str, watched: bool):
    """Return the weights after a loop, and what the watch said."""
    make, dtype = CASES[case]
    model = Model(only_matrices=case in ("torch.optim.Muon", "ng.Muon")).to(dtype)
    optimizer = make(model.parameters())
    watch = ng.watch(model, optimizer) if watched else None
    steps = 10 if case == "torch.optim.LBFGS" else 40
    torch.manual_seed(1)  # of random roundings
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            starts = torch.randint(0, 32, (8, 1), generator=torch.Generator().manual_seed(step))
            tokens = (starts + 3 * torch.arange(9)) % 32

            def closure() -> Tensor:
                optimizer.zero_grad()
                logits = model(tokens[:, :-1]).float().flatten(0, 1)  # noqa: B023
                loss = F.cross_entropy(logits, tokens[:, 1:].flatten())  # noqa: B023
                loss.backward()
                return loss

            if isinstance(optimizer, torch.optim.LBFGS):
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
    if watch is not None:
        watch.close()
        assert watch.num_steps == steps
        assert not any("from step" in reason for reason in watch.meter.unseen.values())
    told = [str(warning.message) for warning in caught if warning.category is RunNotice]
    return [p.detach() for p in model.parameters()], told


@exhaustive("case", CASES)
def test_a_watched_loop_has_the_bits_of_a_plain_one_and_no_healthy_one_is_accused(
    case,
):
    with torch.compiler.set_stance("force_eager"):
        try:
            plain, _ = trained(case, watched=False)
        except RuntimeError:  # the class has no kernel here
            return
        watched, told = trained(case, watched=True)
    assert told == []
    for before, after in zip(plain, watched, strict=True):
        assert torch.equal(before, after)
