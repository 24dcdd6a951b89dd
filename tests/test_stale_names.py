"""A name in double backticks exists: prose does not outlive the code that it speaks of."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "narrowgauge"
ELSEWHERE = {
    # other packages', which we do not import by name
    "DeviceMesh", "configure_optimizers", "training_step", "Trainer",
    "ReduceScatter", "FSDPParam", "FSDPParamGroup", "_init_mp_dtypes", "_unsharded_param", "default_adamw",
    "ScaledBlasUtils", "ATEN_CPU_CAPABILITY",
    "G", "P", "RN", "eps²",  # of formulas
    "mix", "lowbias32",  # functions of a published hash
    "exp_avg_bits",  # joined from a moment's name
}  # fmt: skip


def tokens(path: Path) -> Iterator[tokenize.TokenInfo]:
    yield from tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)


def defined() -> set[str]:
    """Return the identifiers and short strings of the code, the keys and words of its tables, and
    PyTorch's public names.
    """
    names = {*dir(torch), *dir(torch.nn), *dir(torch.Tensor), *dir(torch.optim)}
    for path in (*SOURCE.rglob("*.py*"), *(ROOT / "benchmarks").glob("*.py")):
        if path.suffix not in (".py", ".pyi"):
            continue
        names |= {*path.relative_to(ROOT).with_suffix("").parts}
        for token in tokens(path):
            if token.type == tokenize.NAME:
                names.add(token.string)
            elif token.type == tokenize.STRING and "\n" not in token.string:
                names |= {*re.findall(r"\w+", token.string)}
    for path in (*SOURCE.rglob("*.toml"), *SOURCE.rglob("*.h")):
        names.add(path.stem)
        names |= {*re.findall(r"\w+", re.sub(r"//.*|#.*", "", path.read_text(encoding="utf-8")))}
    return names


def prose(path: Path) -> Iterator[str]:
    """Yield the docstrings and comments of a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)
    for token in tokens(path):
        if token.type == tokenize.COMMENT:
            yield token.string


def test_names_that_prose_mentions_exist() -> None:
    known = defined()
    used = set()
    stale = []
    for path in SOURCE.rglob("*.py"):
        for text in prose(path):
            for match in re.finditer(r"``([^\W\d][\w.²]*)(?:\([^`]*\))?``", text):
                for word in match[1].split("."):
                    if word in ELSEWHERE:
                        used.add(word)
                    elif word and word not in known:
                        stale.append(f"{path.relative_to(SOURCE)}: {match[0]}")
    assert not stale, "\n".join(stale)
    assert used == ELSEWHERE, f"no longer said: {sorted(ELSEWHERE - used)}"
