"""The published methods that the board's page lists: the rows in which each runs here as published, and ours beside them.

A row of the board takes its figures from the records. A low-rank rule or a compressed gradient is none, since it needs other
settings than the board's: its figures stand in the log, and a test holds them against it.

Claim and baseline: none of its own. Run: ``./dev docs`` makes the page.
"""

from __future__ import annotations

from dataclasses import dataclass

from _board_costs import NOT_RUN, claim_of
from _board_records import RULES

from narrowgauge.analysis.comparison.intervals import MINUS, PairedDifference


@dataclass(frozen=True)
class Logged:
    """Something that was measured by other settings than the board's.

    Args:
        row: as the page prints it.
        page, section: of the log: the name of the page and the heading above the table.
        line: how the table's line begins there.
        size: a figure of that line; ``size_of`` says what it counts.
        loss: less the baseline's, with half its 95 % interval, as the line has it; empty where it was not measured.
        cause: why a loss is not the method's own.
    """

    row: str
    page: str
    section: str
    line: str
    size: str
    size_of: str
    baseline: str = ""
    loss: str = ""
    cause: str = ""

    @property
    def verdict(self) -> str:
        """In a word, by the board's rule."""
        if not self.loss:
            return NOT_RUN
        mean, half = (float(number.replace(MINUS, "-")) for number in self.loss.split(" ± "))
        difference = PairedDifference(self.row, mean, half, num_pairs=3)
        claim = claim_of(difference, self.baseline, RULES.resolve) or "not distinguishable"
        return f"{claim}; {self.cause}" if self.cause else claim


@dataclass(frozen=True)
class Method:
    """A published method.

    Args:
        source: papers, with year and arXiv number.
        published: rows that do what the source does: of the board by name, of the log as :class:`Logged`.
        ours: rows that this project has in their place.
        against: rows that the source compares itself with.
        more: where to read on, in Markdown.
    """

    name: str
    source: str
    published: tuple[str | Logged, ...]
    ours: tuple[str | Logged, ...]
    against: tuple[str, ...] = ()
    more: str = ""

    @property
    def rows(self) -> tuple[str | Logged, ...]:
        return *self.against, *self.published, *self.ours


_RULES_LOG, _CODES_LOG = (
    "2026-11-23 · update rules by name, three seeds",
    "2026-11-23 · low-rank rules in the storage's codes",
)
_SENT_LOG = "Quality: `benchmarks/compressed_gradients.py`"
_ADAMW = "adamw/word, best of three rates"
_SMALLER_RATE = "by a smaller rate"


def _low_rank(row: str, line: str, size: str, loss: str, cause: str = "") -> Logged:
    return Logged(row, "storages", _RULES_LOG, line, size, "of states", _ADAMW, loss, cause=cause)


def _float32_states(row: str) -> Logged:
    return Logged(row, "storages", _CODES_LOG, "| `float32` |", "3.0", "of states")


def _sent(row: str, size: str, loss: str) -> Logged:
    return Logged(row, "ranks", _SENT_LOG, f"| {row} |", size, "of float32's, sent", "float32 sums", loss)


METHODS = (
    Method(
        "Mixed precision",
        "Micikevicius et al. 2018 (1710.03740), with float16; Kalamkar et al. 2019 (1905.12322), with bfloat16",
        ("float16/float32", "float16/master", "float32", "master"),
        ("float16/split", "word"),
        against=("float32/float32",),
        more="[stored values](ideas/stored-values.md)",
    ),
    Method(
        "LLM.int8()",
        "Dettmers et al. 2022 (2208.07339)",
        ("int8-outlier/word", "int8-outlier-codes/word"),
        ("int8-row/word",),
        more="where features stand out, the published forms are the better ones: "
        "[log](log/matmuls.md#2026-11-23-llmint8-in-both-of-its-forms)",
    ),
    Method(
        "FP8 end to end",
        "matmuls: Micikevicius et al. 2022 (2209.05433); states: Peng et al. 2023, FP8-LM (2310.18313), "
        "Fishman et al. 2025 (2409.12517), Xi et al. 2025, COAT (2410.19313)",
        ("float8-tensor-e5m2/word", "published/fp8-lm", "published/fp8-moments", "published/coat"),
        ("float8-row/states8",),
        more="1,500 steps of llama-8m: [log](log/storages.md#2026-11-24-llama-8m-over-two-float8-computes-three-seeds)",
    ),
    Method(
        "Collage",
        "Yu et al. 2024 (2405.03637)",
        ("collage-light", "collage-plus", "float8/collage-plus"),
        ("split", "word"),
        more="[its claims](ideas/range-of-storages.md#what-collage-claims-and-what-it-comes-to-here)",
    ),
    Method(
        "Scalify",
        "Balança et al. 2024 (2407.17353)",
        ("scalify/word", "scalify-float16/scaled16"),
        ("scalify-float16/word",),
        more="[scaled models](ideas/scaled-models.md#scalify)",
    ),
    Method(
        "GaLore",
        "Zhao et al. 2024 (2403.03507)",
        (_float32_states("galore/float32"),),
        (
            _low_rank("galore/states8", "| `galore`/`states8` |", "0.72", "−0.186 ± 0.230"),
            _low_rank(
                "galore/states8, two-sided",
                "| `galore`, two-sided/`states8` |",
                "0.54",
                "−0.351 ± 0.161",
                _SMALLER_RATE,
            ),
        ),
        more="[log](log/storages.md#2026-11-23-update-rules-by-name-three-seeds)",
    ),
    Method(
        "GradNormLoRP",
        "Huang et al. 2025 (2412.19616)",
        (_float32_states("gradnorm_lorp/float32"),),
        (_low_rank("gradnorm_lorp/states8", "| `gradnorm_lorp`/`states8` |", "0.77", "−0.362 ± 0.116", _SMALLER_RATE),),
        more="[log](log/storages.md#2026-11-23-update-rules-by-name-three-seeds)",
    ),
    Method(
        "Distributed low precision",
        "1911.07384, by its abstract: float16 and no float32 copy; gradients: ZeRO++ (2306.10209), QSGD (1610.02132)",
        ("float16-throughout/naive",),
        ("word", _sent("compressed8", "0.259", "−0.0002 ± 0.0012"), _sent("compressed4", "0.142", "+0.0025 ± 0.0269")),
        more="[log](log/ranks.md#quality-benchmarkscompressed_gradientspy)",
    ),
)
"""In the order of their sources."""
