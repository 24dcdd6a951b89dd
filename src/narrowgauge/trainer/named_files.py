"""What settings name on the disk: a model folder, data, a tokenizer, a run folder. Nothing is read here beyond what says whether
it can be used.
"""

from __future__ import annotations

from pathlib import Path

from narrowgauge.errors import DataError
from narrowgauge.spec.models import MODELS, get_model, refuse_own_code


def known_model(name: str) -> str:
    """The full name of a preset, or the path of a model folder."""
    path = Path(name).expanduser()
    if name.strip().lower() in MODELS or not (path.exists() or "/" in name or "\\" in name):
        return get_model(name).name
    if not path.exists():
        raise DataError(
            f"the model folder {name} does not exist.", "Name a preset (narrowgauge show models) or a folder."
        )
    if path.is_dir() and not (path / "config.json").is_file():
        raise DataError(f"the model folder {name} holds no config.json.", "Name a Hugging Face model folder.")
    refuse_own_code(path)
    return str(path)


def free_folder(model: str, recipe: str) -> str:
    """``runs/MODEL-RECIPE-N`` with the first free N."""
    stem = Path(model).name.removesuffix(".json") if model not in MODELS else model
    stem = f"{stem}-{recipe.replace('/', '-')}"
    number = 1
    while (Path("runs") / f"{stem}-{number}").exists():
        number += 1
    return str(Path("runs") / f"{stem}-{number}")


def left_by_a_kill(folder: Path) -> tuple[str, ...]:
    """Names allowed in the folder of a new run: leftovers of a command killed before the run existed, and complete data."""
    # Imported here: the command line makes flags of settings and does not need it.
    from narrowgauge.runs.writer import leftovers

    return (*leftovers(folder), *(("data",) if (folder / "data" / "data.json").is_file() else ()))
