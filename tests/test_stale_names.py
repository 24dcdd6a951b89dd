"""A name in double backticks exists: prose does not outlive the code that it speaks of."""

import ast
import re
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


def parts(path: Path):
    """Return the words of a module's code, and its docstrings and comments."""
    text = path.read_text(encoding="utf-8")
    prose = re.findall("#.*", text)
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            prose.append(str(node.value.value))
            node.value = ast.Constant(None)
    return {path.stem, *re.findall(r"\w+", ast.unparse(tree))}, prose


def test_names_that_prose_mentions_exist():
    known = {*dir(torch), *dir(torch.nn), *dir(torch.Tensor), *dir(torch.optim)}
    for path in (*SOURCE.rglob("*.toml"), *SOURCE.rglob("*.h")):
        known |= {path.stem, *re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    for path in (ROOT / "benchmarks").glob("*.py"):
        known |= parts(path)[0]
    modules = {path: parts(path) for path in SOURCE.rglob("*.py")}
    known.update(*(words for words, _ in modules.values()))
    used = set()
    stale = []
    for path, (_, prose) in modules.items():
        for match in re.finditer(r"``([^\W\d][\w.²]*)(?:\([^`]*\))?``", "\n".join(prose)):
            for word in match[1].split("."):
                if word in ELSEWHERE:
                    used.add(word)
                elif word and word not in known:
                    stale.append(f"{path.relative_to(SOURCE)}: {match[0]}")
    assert not stale, "\n".join(stale)
    assert used == ELSEWHERE, f"no longer said: {sorted(ELSEWHERE - used)}"
