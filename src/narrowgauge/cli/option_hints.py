"""What an option that does not exist was meant to be: the names that other training programs give to ours.

Letters alone mislead: ``--learning-rate`` is nearer to ``--min-lr-ratio`` than to ``--lr``. Sources of the names: Hugging Face's
``TrainingArguments``, Lightning's ``Trainer``, torchtitan, nanoGPT and ``torchrun``.
"""

from __future__ import annotations

from collections.abc import Collection

from narrowgauge.errors import suggestion

_OTHERS = {
    "--lr": "learning-rate max-lr peak-lr base-lr",
    "--min-lr-ratio": "min-lr final-lr min-learning-rate",
    "--schedule": "lr-scheduler lr-scheduler-type lr-schedule scheduler lr-decay decay-lr",
    "--warmup-steps": "warmup warmup-iters warmup-ratio num-warmup-steps lr-warmup",
    "--rule": "optimizer optim optimiser optimizer-name",
    "--beta1": "adam-beta1",
    "--beta2": "adam-beta2",
    "--eps": "epsilon adam-epsilon",
    "--weight-decay": "wd decay l2",
    "--max-grad-norm": "clip grad-clip clip-grad clip-grad-norm gradient-clip gradient-clip-val max-norm clipping",
    "--recipe": "precision dtype format mixed-precision fp16 bf16 fp8 amp storage compute",
    "--recipes": "recipe precision dtype",
    "--steps": "max-steps num-steps train-steps total-steps iters max-iters iterations epochs num-epochs num-train-epochs",
    "--batch-size": "batch bs per-device-train-batch-size global-batch-size local-batch-size train-batch-size",
    "--sequence-length": "seq-len seqlen seq-length block-size context-length context max-seq-length max-length ctx",
    "--gradient-accumulation-steps": "accumulate accumulate-grad-batches grad-accum gradient-accumulation accumulation-steps "
    "micro-batches",
    "--activation-checkpointing": "gradient-checkpointing checkpoint-activations recompute",
    "--data": "dataset dataset-name train-data text train-file",
    "--model": "model-name model-name-or-path model-size config-name",
    "--out": "output output-dir out-dir save-dir run-dir logdir log-dir default-root-dir dir",
    "--eval-every": "eval-steps eval-interval val-check-interval evaluation-interval",
    "--eval-batches": "eval-iters limit-val-batches",
    "--held-out": "validation-split val-split val-fraction test-size",
    "--checkpoint-every": "save-steps save-every save-interval checkpoint-interval checkpoint-steps",
    "--keep-checkpoints": "save-total-limit save-top-k max-checkpoints",
    "--log-every": "log-interval logging-steps log-every-n-steps log-freq",
    "--log-to": "report-to logger wandb mlflow aim",
    "--seed": "random-seed manual-seed rng-seed",
    "--nproc": "gpus devices num-devices world-size nproc-per-node num-processes ranks ngpus n-gpus",
    "--threads": "num-threads cpu-threads",
    "--shard": "fsdp zero zero-stage sharding",
    "--compile": "torch-compile",
    "--chip": "gpu accelerator device hardware",
    "--chips": "gpus num-gpus num-chips devices",
}
_WITHOUT = {
    "--device": "A run takes the first GPU that PyTorch sees, else the CPU; CUDA_VISIBLE_DEVICES= hides the GPUs.",
    "--resume": "narrowgauge resume DIR continues a run.",
    "--resume-from-checkpoint": "narrowgauge resume DIR continues a run.",
}
"""Options that have no counterpart, with what there is instead."""


def hint(option: str, flags: Collection[str]) -> str:
    """Advice on an option that a command with these ``flags`` lacks; empty where nothing is near.

    >>> hint("--learning-rate", ["--lr", "--min-lr-ratio"])
    "Did you mean '--lr'?"
    """
    spelled = "--" + option.lstrip("-").replace("_", "-").lower()
    if spelled in flags:
        return f"Did you mean '{spelled}'?"
    for ours, others in _OTHERS.items():
        if ours in flags and spelled[2:] in others.split():
            return f"Did you mean '{ours}'?"
    return _WITHOUT.get(spelled) or suggestion(option, flags)
