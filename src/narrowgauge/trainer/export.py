"""Export a run as a Hugging Face folder, through ``save_pretrained``: the model as trained and
evaluated.
"""

import functools
import warnings
from pathlib import Path

from narrowgauge.runs.paths import new_folder
from narrowgauge.runs.text import join_names
from narrowgauge.trainer import checkpoints
from narrowgauge.trainer.tokens import load_tokenizer


def export(folder: Path, out: Path) -> Path:
    """Write the model of a run's newest good checkpoint as a Hugging Face folder, complete or
    absent. Warn if newer ones are damaged.

    ``AutoModelForCausalLM`` and ``AutoTokenizer.from_pretrained(out)`` load it. The weights have
    the bits that the model sees. A run on tokens without a tokenizer exports only the model.

    Raises:
        RecordError: the run has no good checkpoint, ``out`` is not empty, or the disk is full.
    """
    checkpoint, damaged = checkpoints.require(folder)
    if damaged:
        words = f"{join_names(damaged)} is damaged: {out} has the weights of {checkpoint.name}."
        warnings.warn(words, stacklevel=2)
    with new_folder(out) as temporary:
        # Imported late: PyTorch takes seconds to load, and a wrong folder is reported before.
        import torch

        from narrowgauge.torch_support.model_parts import weights_of
        from narrowgauge.trainer.train import load

        run = load(checkpoint)
        model = run.model
        tables = (model.config, model.generation_config)
        for table in tables:
            table.use_cache = True
        data = Path(run.settings.data)
        if (data / "tokenizer.json").is_file():
            tokenizer = load_tokenizer(data)
            tokenizer.save_pretrained(temporary)
            for table in tables:
                table.bos_token_id = table.eos_token_id = tokenizer.eos_token_id
        model.save_pretrained(temporary)
        # Loading casts all weights to the declared dtype: take one that changes no value.
        dtypes = set[torch.dtype]()
        for module in model.modules():
            dtypes.update(weight.dtype for weight in weights_of(module).values())
        model.config.dtype = functools.reduce(torch.promote_types, dtypes)
        model.config.save_pretrained(temporary)
    return out
