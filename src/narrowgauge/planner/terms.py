"""Terms: each addend of a plan, with its formula and its source.

Memory and time are sums of terms, and ``--explain`` prints every term.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple


class Term(NamedTuple):
    """Describe one addend, in bytes or seconds.

    Args:
        group: its group, such as ``"optimizer"``; a key of a plan's JSON.
        formula, numbers: a template and its numbers, since a search writes none: ``"{:,}
            parameters × {:g} B / {} ranks"``.
    """

    group: str
    name: str
    value: float
    formula: str
    numbers: tuple[Any, ...] = ()

    @property
    def text(self) -> str:
        """Return the formula with its numbers."""
        return self.formula.format(*self.numbers)

    @property
    def source(self) -> str:
        """Return the publication of the group."""
        return SOURCES[self.group]


def term(group: str, name: str, value: float, formula: str, *numbers: Any) -> Term:
    """Return an addend."""
    return Term(group, name, value, formula, numbers)


SOURCES = {
    **dict.fromkeys(
        ("weights", "gradients"),
        "Rajbhandari et al., ZeRO, arXiv 1910.02054, section 5; sums as Megatron-LM's buffers, Micikevicius et al. 2018",
    ),
    "optimizer": "bytes of the storage; Rajbhandari et al., ZeRO, arXiv 1910.02054, section 5",
    "activations": "Korthikanti et al., arXiv 2205.05198, section 4; as in layers that run (planner/activations.py)",
    "logits": "compiled: logits and their gradient; eager: 16-bit and float32 logits, log-softmax and its gradient",
    "buffers": "torch FSDP2: the layer in use and the next; torchtitan's stages gather weights once a step; bitsandbytes",
    "overhead": "commonly observed: CUDA contexts, NCCL's channels, cuBLAS's workspace; no publication",
    "matmuls": "roofline, measured fraction of the peak",
    "casts": "roofline, measured fraction of the bandwidth",
    "attention": "arXiv 2307.08691, 2407.08608",
    "elementwise": "bytes moved by the program's kernels",
    "loss": "bytes moved by the program's loss",
    "gaps": "what a program reaches of its kernels' sum on a chip; Megatron-Bridge's mixtures",
    "communication": "a ring",
    "bubble": "arXiv 2104.04473",
    "waiting": "an assumption; Sinha et al., SC 2022",
    "checkpoints": "an assumption",
}  # fmt: skip
"""Publications of each group of a memory or a step."""


@dataclass(frozen=True)
class Terms:
    """Hold a sum and its addends."""

    addends: tuple[Term, ...]

    def __iter__(self) -> Iterator[Term]:
        return iter(self.addends)

    def without(self, *groups: str) -> Terms:
        """Return the addends of all other groups."""
        return Terms(tuple(term for term in self.addends if term.group not in groups))

    def of(self, *names: str) -> float:
        """Return the sum of the addends with these names."""
        return float(sum(term.value for term in self.addends if term.name in names))

    @cached_property
    def total(self) -> float:
        return float(sum(term.value for term in self.addends))

    @property
    def groups(self) -> dict[str, float]:
        """Sum each group, in the order in which groups first appear."""
        sums: dict[str, float] = {}
        for term in self.addends:
            sums[term.group] = sums.get(term.group, 0.0) + term.value
        return sums

    @property
    def largest_group(self) -> str:
        groups = self.groups
        return max(groups, key=groups.__getitem__)
