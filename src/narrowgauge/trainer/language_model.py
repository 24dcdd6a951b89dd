"""Language models built from a configuration and a seed, and their loss.

The models are Hugging Face classes, so a trained model is a folder that other tools can read. A preset is an entry of
``narrowgauge.spec.models``, a configuration whose weights are initialized here in float32 from the seed only, so that every
recipe starts from the same weights; nothing is downloaded. A path is a folder with a ``config.json`` and, optionally,
weights.

The loss is a *sum* over tokens, not a mean: sums of micro-batches add up to the sum of the batch, whatever their sizes,
and are divided once at the end. With a large vocabulary the logits are the largest tensor of the whole step (2,048
tokens times 128,256 entries times 4 bytes: 1 GB, and as much again for their gradient); the *chunked* loss computes them
for a few hundred tokens at a time and keeps none.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from narrowgauge._torch.inductor import remove_torn_files
from narrowgauge.checkpoints.conversion.files import UNREADABLE, require_weights
from narrowgauge.distributed.sharding import fsdp_modules
from narrowgauge.errors import DataError, suggestion
from narrowgauge.matmul.linear import has_plain_product
from narrowgauge.numerics.rounding import at_least_float32
from narrowgauge.numerics.widening import linear
from narrowgauge.planner.memory.rank_memory import CHUNK_LOGITS
from narrowgauge.planner.memory.rank_memory import LARGE_VOCABULARY as LARGE_VOCABULARY
from narrowgauge.spec.models import MODELS, WEIGHTS, Model, refuse_own_code, weights_file

if TYPE_CHECKING:  # transformers takes seconds to import: each function below imports what it needs
    from transformers import PretrainedConfig, PreTrainedModel

_MIN_CHUNK_TOKENS = 128
# Operations of some models on the logits after the head, which the chunked loss does not apply.
_AFTER_THE_HEAD = ("final_logit_softcapping", "logit_scale", "logits_scaling", "logits_scale", "lm_head_multiplier")


def build(model: str, *, vocab_size: int | None = None, seed: int, weights: Path | None = None) -> PreTrainedModel:
    """A causal language model in float32 on the CPU, in training mode, ready for ``prepare``.

    Invariant: initial weights depend on ``seed`` and the configuration only: not on the recipe, the default dtype or
    device, nor on random numbers drawn before; and the caller's generator is unchanged. Attention is
    ``scaled_dot_product_attention``, nothing is cached between tokens, and there is no dropout, whatever the
    configuration says: a resumed step must be the same step.

    Args:
        model: the name of a preset (``narrowgauge show models``), or a folder with ``config.json``. Weights in it
            (:data:`narrowgauge.spec.models.WEIGHTS`, no code in them is run) are loaded, and upcast to float32; without any they
            are initialized.
        vocab_size: number of token embeddings, instead of the preset's or the configuration's. Loaded weights keep
            their own number, which must be at least this.
        weights: the file of the weights, where :func:`require_initial_weights` has already found it.

    Raises:
        DataError: nothing has that name or path, or the folder's model or weights cannot be read or do not fit.

    Cost: 4 bytes per parameter; about 1 s per 100 million initialized parameters.

    Example:
        >>> num_parameters(build("llama-1m", seed=0))
        1016960
    """
    row = MODELS.get(model.strip().lower())
    if row is not None:
        return ready(drawn(_preset_config(row, vocab_size), seed))
    from transformers import AutoConfig

    folder = _folder(model)
    refuse_own_code(folder)
    weights = weights or require_initial_weights(model)
    try:
        if weights is not None:
            return ready(_loaded(folder, weights, vocab_size, seed))
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if vocab_size is not None:
            config.vocab_size = vocab_size
        return ready(drawn(config, seed))
    except (*UNREADABLE, ImportError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"Cannot build a causal language model from the folder {folder}: {reason}",
            "It needs a Hugging Face config.json, and either no weights or those that fit it.",
        ) from error


def require_initial_weights(model: str) -> Path | None:
    """The file of the weights that a run starts from; ``None`` where they are drawn: of a preset, or a folder without any."""
    if model.strip().lower() in MODELS:
        return None
    if (file := weights_file(_folder(model))) is not None:
        require_weights(file)
    return file


def vocabulary_size(model: str) -> int | None:
    """The size of the vocabulary that a tokenizer for the model is trained to; ``None`` where its configuration has none."""
    if model in MODELS:
        return MODELS[model].vocab_size
    from transformers import AutoConfig

    refuse_own_code(Path(model))
    try:
        shape = AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, RecursionError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        advice = "It must be one that Hugging Face transformers can read."
        raise DataError(f"the config.json in {model} cannot be read: {reason}", advice) from error
    size: int | None = getattr(shape, "vocab_size", None)
    return size


def skeleton(model: str, vocab_size: int) -> PreTrainedModel:
    """The model of :func:`build` without weights, on the meta device: its configuration, and the names of its parameters."""
    row = MODELS.get(model.strip().lower())
    if row is not None:
        return drawn(_preset_config(row, vocab_size), 0, "meta")
    from transformers import AutoConfig

    folder = _folder(model)
    refuse_own_code(folder)
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not any((folder / name).is_file() for name in WEIGHTS):
        config.vocab_size = vocab_size
    return drawn(config, 0, "meta")


def num_parameters(model: nn.Module) -> int:
    """Number of parameters; a tensor under two names (a tied embedding) counts once.

    Example:
        >>> num_parameters(nn.Linear(3, 2))
        8
    """
    return sum(parameter.numel() for parameter in model.parameters())


def loss_sum(model: PreTrainedModel, tokens: Tensor, *, chunked: bool) -> Tensor:
    """The summed cross entropy of predicting each next token.

    Invariant: exponentials, logarithms and the sum are float32 whatever the weights are, and float64 where they are. Chunked
    and unchunked agree up to the rounding of the sums, in the loss and in every gradient. Works under autocast, with bfloat16
    weights, and inside ``torch.compile(fullgraph=True)``.

    Args:
        tokens: int64 ``[batch, sequence + 1]``; inputs are all but the last of each row, targets all but the first.
        chunked: compute the logits for a few hundred tokens at a time. Forward hooks on the head, and operations on the
            logits after the head, run only if this is false; see :func:`can_chunk`.

    Returns:
        A float32 or float64 scalar in nats, summed over ``batch * sequence`` tokens.

    Cost: unchunked, ``tokens * vocabulary`` numbers four times (logits and their gradient, in the model's dtype and in
    float32); chunked, at most 128 MiB for them and, for narrow weights, the head once more in float32. Chunked in
    float32 with PyTorch >= 2.13 takes the same time (2,048 x 512 x 32,000 on two cores: 2.45 s, unchunked 2.37 s);
    otherwise the head's forward matmul runs twice (bfloat16: 1.7 s, unchunked 1.1 s).

    Example:
        >>> model = build("llama-1m", seed=0)
        >>> tokens = torch.arange(18).reshape(2, 9)
        >>> round(loss_sum(model, tokens, chunked=False).item() / 16, 1)  # near log(2048): untrained
        7.7

    Source: the chunked form is ``torch.nn.functional.linear_cross_entropy``; Hsu et al., Liger Kernel, 2024.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:].reshape(-1)
    if not chunked:
        return _whole(model(input_ids=inputs, use_cache=False).logits, targets)
    head = model.get_output_embeddings()
    hidden = _hidden(model, inputs)
    return chunked_cross_entropy(hidden, head.weight, targets, head.bias)


def can_chunk(model: PreTrainedModel) -> bool:
    """Whether the chunked loss equals this model's loss: its head is a plain ``Linear``, and nothing follows it.

    Example:
        >>> can_chunk(build("llama-1m", seed=0))
        True
    """
    config = model.config.get_text_config()
    after = [getattr(config, name, None) for name in _AFTER_THE_HEAD]
    return has_plain_product(model.get_output_embeddings()) and all(value in (None, 1) for value in after)


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None) -> Tensor:
    """``cross_entropy(linear(hidden, weight, bias), targets, reduction="sum")`` without storing the logits.

    Uses PyTorch's own chunked function if the matmul is in float32. For narrow operands that function sums the losses in
    *their* dtype (measured with 2.13: the sum of 2,048 bfloat16 losses is off by 0.5 to 2.7 %), and it ignores autocast.
    In those cases, and in a PyTorch without it, a loop that recomputes the logits of each chunk in backward computes the
    same with a float32 sum.

    ``hidden`` is ``[tokens, width]``, ``weight`` ``[vocabulary, width]``, ``targets`` int64 ``[tokens]``, ``bias``
    ``[vocabulary]``; the result is a float32 scalar.

    Example:
        >>> hidden, weight = torch.ones(4, 2), torch.zeros(8, 2)
        >>> round(chunked_cross_entropy(hidden, weight, torch.arange(4)).item() / 4, 4)  # log(8)
        2.0794
    """
    size = max(_MIN_CHUNK_TOKENS, CHUNK_LOGITS // weight.shape[0])
    wide = hidden.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled(hidden.device.type)
    if wide and _NATIVE is not None:
        return _NATIVE(hidden, weight, targets, bias, size)
    return _looped(hidden, weight, targets, bias, size)


def enable_activation_checkpointing(model: PreTrainedModel) -> None:
    """Save only the input of each decoder layer for backward and recompute the rest there.

    Invariant: the gradients have the same bits in eager mode. Composes with ``torch.compile``. Has an effect in training
    mode only.

    Cost: one more forward pass of every layer; activations shrink to ``tokens * width`` numbers per layer.
    """
    if not model.supports_gradient_checkpointing:
        raise DataError(f"Activation checkpointing was requested; {type(model).__name__} does not support it.")
    # transformers 5.23 renamed the method and its argument; both take them by position.
    name = "activation_checkpointing_enable"
    enable = getattr(model, name, None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    # It hooks the embedding so that reentrant checkpoints have an input that requires a gradient; these are not reentrant.
    model.disable_input_require_grads()


def compiled_loss(model: PreTrainedModel, *, chunked: bool) -> Callable[[Tensor], Tensor]:
    """:func:`loss_sum` of this model as a function of the tokens alone, compiled.

    Each decoder layer is compiled in place, which changes no name, parameter or ``state_dict``, and so is the head with the
    loss; everything else runs eagerly. All layers share one graph, so the first step costs the same for 8 layers as for 80,
    and the steps are as fast as those of one graph for the whole model (measured: llama-8m in bfloat16, docs/log/runs.md).

    Cost: the first call compiles; so do the first with another shape (from then on shapes are dynamic) and the first
    without gradients.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    remove_torn_files()
    sharded = fsdp_modules(model)
    for module in model.modules():
        if not isinstance(module, GradientCheckpointingLayer):
            continue
        if any(module is layer for layer in sharded):
            # FSDP2 gathers in hooks around the forward, which no graph can hold.
            module.forward = torch.compile(module.forward, fullgraph=True)
        else:
            module.compile(fullgraph=True)
    if chunked or not can_chunk(model):
        return lambda tokens: loss_sum(model, tokens, chunked=chunked)
    head = model.get_output_embeddings()
    head_loss = torch.compile(lambda hidden, targets: _whole(head(hidden), targets), fullgraph=True)

    def loss(tokens: Tensor) -> Tensor:
        return head_loss(_hidden(model, tokens[:, :-1]), tokens[:, 1:].reshape(-1))

    return loss


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    """Disable transformers' progress bars while it reads or writes weights."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _whole(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(at_least_float32(logits.flatten(0, -2)), targets, reduction="sum")


def _hidden(model: PreTrainedModel, inputs: Tensor) -> Tensor:
    """The input of the head, ``[tokens, width]``."""
    return cast(Tensor, model.base_model(input_ids=inputs, use_cache=False).last_hidden_state).flatten(0, -2)


def _native() -> Callable[..., Tensor] | None:
    """PyTorch's chunked function with the arguments of :func:`_looped`, if this PyTorch has one."""
    function, options = getattr(F, "linear_cross_entropy", None), getattr(nn, "LinearCrossEntropyOptions", None)
    if function is None or options is None or "options" not in inspect.signature(function).parameters:
        return None

    def native(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, size: int) -> Tensor:
        # Its default chunk is three times slower on a CPU. A compiled graph must be retained, or it warns.
        chosen = options(batch_chunk_size=min(size, len(hidden)), allow_retain_graph=torch.compiler.is_compiling())
        return cast(Tensor, function(hidden, weight, targets, linear_bias=bias, reduction="sum", options=chosen))

    return native


_NATIVE = _native()


def _looped(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, size: int) -> Tensor:
    # With a float32 copy, autograd sums the chunks' weight gradients in float32 and rounds them once.
    weight = at_least_float32(weight)
    total = torch.zeros((), dtype=weight.dtype, device=hidden.device)
    for rows, wanted in zip(hidden.split(size), targets.split(size), strict=True):
        total = total + cast(Tensor, checkpoint(_chunk, rows, weight, bias, wanted, use_reentrant=False))
    return total


def _chunk(rows: Tensor, weight: Tensor, bias: Tensor | None, wanted: Tensor) -> Tensor:
    return _whole(linear(rows, weight.to(rows.dtype), bias), wanted)


def _preset_config(row: Model, vocab_size: int | None) -> PretrainedConfig:
    # The defaults of the classes belong to other tokenizers; export writes the correct ones.
    tokens: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    size = row.vocab_size if vocab_size is None else vocab_size
    if row.family == "gpt2":
        from transformers import GPT2Config

        return GPT2Config(
            vocab_size=size,
            n_positions=row.max_positions,
            n_embd=row.hidden_size,
            n_layer=row.num_layers,
            n_head=row.num_heads,
            n_inner=row.intermediate_size,
            layer_norm_epsilon=row.norm_epsilon,
            tie_word_embeddings=row.tie_embeddings,
            **tokens,
        )
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=size,
        hidden_size=row.hidden_size,
        intermediate_size=row.intermediate_size,
        num_hidden_layers=row.num_layers,
        num_attention_heads=row.num_heads,
        num_key_value_heads=row.num_kv_heads,
        max_position_embeddings=row.max_positions,
        rms_norm_eps=row.norm_epsilon,
        tie_word_embeddings=row.tie_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": row.rope_theta},
        **tokens,
    )


def _folder(model: str) -> Path:
    """The folder of a model; raises for a name that is neither a preset nor a folder."""
    path = Path(model).expanduser()
    if path.name == "config.json" and path.is_file():
        return path.parent
    if (path / "config.json").is_file():
        return path
    if path.is_dir():
        raise DataError(
            f"The folder {path} was given as a model; it has no config.json.", "Name the folder that contains it."
        )
    near = suggestion(model.strip().lower(), MODELS)
    raise DataError(
        f"The model {model!r} is neither a preset nor a folder with a config.json.",
        f"{near} (narrowgauge show models lists the presets.)".strip(),
    )


def _without_dropout(config: Any) -> Any:
    for name, value in vars(config).items():
        if isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
    config.use_cache = False
    return config


def drawn(config: PretrainedConfig, seed: int, device: str = "cpu") -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    config = _without_dropout(config)
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.default_generator.manual_seed(seed)
        made = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
        )
    return cast("PreTrainedModel", made)


def _loaded(folder: Path, weights: Path, vocab_size: int | None, seed: int) -> PreTrainedModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = _without_dropout(AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
    # The seed is for weights that the folder lacks, such as a new head.
    with torch.random.fork_rng(devices=[]), without_progress_bars():
        torch.default_generator.manual_seed(seed)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            attn_implementation="sdpa",
            local_files_only=True,
            use_safetensors="safetensors" in weights.name,
            weights_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    made, found = loaded
    drawn_ones, known = sorted(found["missing_keys"]), dict(made.named_parameters())
    if known.keys() <= set(drawn_ones):
        raise DataError(
            f"The weights in {weights} are none of those of the {type(made).__name__} in config.json, such as '{drawn_ones[0]}'.",
            "Give the config.json that belongs to them, or a folder with only config.json to start from random weights.",
        )
    if drawn_ones:
        warnings.warn(
            f"{weights} lacks {len(drawn_ones)} of the {len(known)} parameters of {type(made).__name__}, which start from random "
            f"weights: {', '.join(drawn_ones[:3])}{' …' if len(drawn_ones) > 3 else ''}.",
            stacklevel=4,
        )
    rows = len(cast(Tensor, made.get_input_embeddings().weight))
    if vocab_size is not None and vocab_size > rows:
        raise DataError(
            f"The weights in {folder} have {rows:,} token embeddings; the text has {vocab_size:,} different tokens.",
            "Use the tokenizer of these weights, or a folder with only config.json.",
        )
    return cast("PreTrainedModel", made)


def ready(model: PreTrainedModel) -> PreTrainedModel:
    return cast("PreTrainedModel", model.train())
