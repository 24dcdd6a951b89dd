"""What is said of a refusal that needs a set-up: a test makes it, and names it here.

The calls that need none are in ``test_refusals.py``. Regular expressions hold the essential words
only, of the message and of its advice; what stands in braces is the test's.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from narrowgauge.errors import (
    ChipError,
    DataError,
    FormatError,
    NarrowgaugeError,
    RecipeError,
    RecordError,
)

REFUSALS = {
    # options and states of optimizers
    "an option of torch": (RecipeError, "Cannot obey {name} = True", "."),
    "no option": (RecipeError, "{name} has no", "mean 'storage'"),
    "compile": (RecipeError, "compile = 'yes'", ""),
    "an option": (RecipeError, "{name}", ""),
    "elements that share memory": (RecipeError, "share memory", "."),
    "parameters that share memory": (RecipeError, "another parameter has its memory", "."),
    "a rank that changed": (RecipeError, "projector", "."),
    "more than torch's names": (DataError, ", max_exp_avg_sq, step", "."),
    "no step": (DataError, "of exp_avg, exp_avg_sq[.]", "."),
    "no numbers of parameters": (DataError, "keys are not numbers", "."),
    "a state of another shape": (RecipeError, "'exp_avg' of shape", ""),
    "a momentum that came later": (RecipeError, "no 'momentum_buffer_bits'", "before the first step"),
    "another storage": (RecipeError, "no 'tail': .* in storage 'exact' needs int16", "."),
    "no memory": (RecipeError, "Holder that has no memory", "."),
    "a parameter that is passed twice": (RecipeError, "it is passed twice", "."),
    "a shape": (RecipeError, "of shape", ""),
    "a graph": (RecipeError, "graph .* would repeat .* random bits", "."),
    "an unscaled loss": (RecipeError, "", "GradScaler"),
    "a format": (RecipeError, "storage 'word' holds bfloat16", "float64"),
    "a packed state": (RecipeError, "'exp_avg' is packed", "optimizer.adopt"),
    "parameters that were replaced": (RecipeError, "took the place", "pass_states_on"),
    "other values in their place": (RecipeError, "formats or values", "mixed_precision at 'no'"),
    "a sparse gradient": (RecipeError, "sparse", "sparse=False"),
    "a parameter that was turned": (RecipeError, r"needs int32 of shape \(64, 80\)", "."),
    "a parameter in another format": (RecipeError, "no 'exp_avg': .* needs float32", "."),
    "a state without a tensor": (RecipeError, "no '{name}'", "."),
    "another window": (RecipeError, r"begin at -54.0, not at 2\^-38", "."),
    "a state of another storage": (
        RecipeError, "storage '{before}' into an optimizer of storage '{after}'", r"ng\.to_torch_state",
    ),
    "a state of another rule": (RecipeError, "Cannot adopt", ""),
    "a state that has no equal in torch": (DataError, "muon", "."),
    "a flat part": (RecipeError, "because a flat part of a model has no matrices", "FSDP2"),
    "an average of another model": (RecipeError, "steps none", "average.optimizer"),
    "a shard of parts of blocks": (RecipeError, "shard of 250 columns", "."),
    "a trainer with an optimizer": (RecipeError, "already has AdamW", "before train"),
    # layers
    "weights on one memory": (RecipeError, "another parameter has its memory", "."),
    "words that do not go together": (RecipeError, "^Cannot ", ""),
    "a layer that was replaced": (RecipeError, "replaced its forward", "."),
    "a weight that is computed": (RecipeError, "computed in every call", "."),
    "a second verb": (NarrowgaugeError, "^Cannot .* because ", ""),
    "a norm that is centred": (RecipeError, "Centred", ""),
    "a norm of T5": (RecipeError, "T5LayerNorm", ""),
    "no layer of that name": (RecipeError, "Cannot keep 'lm_haed'", r"blocks\.0\.gate"),
    "no layer is left": (RecipeError, "none is left.*{roles}", "."),
    "a swap to scalify": (RecipeError, "scalify", r"ng\.prepare"),
    "a second derivative": (RecipeError, "second derivative", "create_graph"),
    "a part of a block": (RecipeError, "layer '1' in mxfp8 because", "keep="),
    "experts by einsum": (RecipeError, "Cannot multiply 'w1' of Summed", "."),
    "experts that lie anyhow": (RecipeError, "Llama4TextExperts", r"keep=\(\"\*\.experts\""),
    "experts in a batch": (RecipeError, "Cannot multiply", r'set_experts_implementation\("grouped_mm"\)'),
    "a change of codes": (RecipeError, "Cannot change the weight", "load the base again in 16 bits"),
    "codes of another compute": (
        FormatError, r"'0\.weight_codes' was saved in torch\.float8_e4m3fn", "then load",
    ),
    "torchtitan's own optimizer": (RecipeError, "swaps no layers", "narrowgauge_adamw"),
    # sums over ranks
    "DDP": (RecipeError, "in DistributedDataParallel because", "Give the model that it wraps"),
    "experts of unequal size": (RecipeError, "a sharded parameter .* got none", "."),
    "a shard that nobody sums": (RecipeError, "Cannot sum the gradient of 'extra'", "."),
    "a sum by float32": (RecipeError, "by 'float32'", "fully_shard"),
    "running statistics": (RecipeError, "'0' has running statistics", "."),
    "gradients of an earlier step": (RecipeError, "of an earlier one are still there", "zero_grad"),
    "gradients that were cleared": (RecipeError, "cleared in backward", "Step after backward"),
    "parameters that were added": (RecipeError, "parameters were added", r"close\(\)"),
    "random numbers": (RecipeError, "a micro-batch drew random numbers", "."),
    "a forward pass outside": (RecipeError, "after a forward pass outside micro_batch", "."),
    "a backward pass outside": (RecipeError, "in a backward pass outside micro_batch", "."),
    "too many addends": (FormatError, "4097 addends exactly: 4096 fit", ""),
    # plans
    "a chip": (ChipError, "no chip is named '{name}'", ""),
    "a model without a formula": (
        DataError, "not a decoder of attention layers", "Its {size:,} parameters",
    ),
    "a next run": (NarrowgaugeError, "{name}", ""),
    "a batch that no layout takes": (NarrowgaugeError, "at once", ""),
    "no length": (DataError, "counts samples, and no tokens", "sequence_length="),
    "damaged adapters": (NarrowgaugeError, r"adapter_config\.json is damaged", ""),
    # models and tokens
    "too few embeddings": (DataError, "96 token embeddings; the text has 97", ""),
    "a model that cannot be read": (DataError, "Cannot read", ""),
    "a model that sees its targets": (DataError, "logits depend on later tokens", "causal"),
    "a folder that is there": (RecordError, "it holds {name}, which is not to be overwritten", "."),
    "no text that can be read": (DataError, "Cannot read the text in {file}", "UTF-8"),
    "no text": (DataError, "there is no text", r"\.txt"),
    "no end of a document": (DataError, "no token that ends a document", "eos_token"),
    "no tokens": (DataError, "Cannot use the tokens in", "narrowgauge tokenize TEXT OUT"),
    "tokens of another tokenizer": (DataError, "token 257 is beyond its tokenizer, which has 257", "."),
    "another rate": (RecordError, "lr was 0.003 and is 0.001", "."),
    # records
    "a damaged run": (RecordError, "damaged", ""),
    "two runs": (RecordError, "holds 2", "."),
    "a full disk": (RecordError, r"{file}.*\([\d,]+ bytes free\)", "free space"),
    "a resumed record": (RecordError, "", "go_back"),
    "no value of a column": (RecordError, "Cannot record '{name}'", "Give one number"),
    "a step below 0": (RecordError, "step -1 because", "."),
    "a closed record": (RecordError, "record is closed", "resume=True"),
    # measurements
    "another number of outputs": (DataError, "gives another number", "same tokens"),
    "codes beside values": (DataError, "takes codes", "a module on both sides"),
    "weights alone": (DataError, "no forward pass", "a module on one side"),
    "no weights": (RecordError, "Cannot read weights", r"\.safetensors"),
    "no kind": (RecipeError, "", "Did you mean 'clip-norm'"),
    "another text": (NarrowgaugeError, "its text is another, not ", "."),
}  # fmt: skip
"""The error, its message and its advice."""


@contextmanager
def expected(kind: type[NarrowgaugeError], message: str, advice: str) -> Iterator[Any]:
    """Expect an error of one line, whose message and advice have these words."""
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    assert "\n" not in str(error) and re.search(message, error.message), error
    assert re.search(advice, error.advice), error


def refused(name: str, /, **values: Any) -> Any:
    """Expect a refusal of this name."""
    kind, message, advice = REFUSALS[name]
    if values:
        message = message.format(**values)
        advice = advice.format(**values)
    return expected(kind, message, advice)
