"""What ``narrowgauge fingerprint`` measures of a machine's arithmetic, and how each difference shows in a run.

Two machines, or one machine under two settings, may both be right and differ in their last bits: they add in another order, fuse
a multiplication with an addition, or round a function's result another way. Each row names one such property. ``machine/``
measures it, under the same name; the command, the documentation and the diagnosis of two runs read the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

VECTORS = ("processor", "instruction sets", "capability", "ATEN_CPU_CAPABILITY")
LIBRARIES = ("torch", "mkl", "onednn", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS")
VERSIONS = ("torch", "mkl", "onednn", "cuda", "cudnn")
"""Settings that are versions of a library."""
ON_GPU = ("device", "cuda", "cudnn", "CUBLAS_WORKSPACE_CONFIG")
_PYTORCH = ("torch", "threads", *VECTORS, *ON_GPU)
_MATMUL = (*LIBRARIES, "threads", "processor", "instruction sets", "ATEN_CPU_CAPABILITY", *ON_GPU, "matmul precision")
_HALF = (*_MATMUL, "reduced sums of bfloat16")

_FPREV = "FPRev, arXiv 2411.00442"
_GOLDBERG = "Goldberg 1991, What every computer scientist should know about floating-point arithmetic"
_PYTORCH_NOTE = "PyTorch, Numerical accuracy"
_HANDBOOK = "Muller et al., Handbook of Floating-Point Arithmetic"


@dataclass(frozen=True, slots=True)
class Probe:
    """One property of a machine's arithmetic.

    Args:
        name: what it is called in ``run.toml`` and in every table.
        measures: what is measured.
        felt: how a difference between two machines shows in a run.
        settings: versions, variables and switches that may change it, by their names in a fingerprint.
        source: of the method.
        is_sum: whether it is an order of additions, which a number of threads may change.
        in_runs: whether a run measures it where no measurement is cached; else only ``narrowgauge fingerprint`` does.
    """

    name: str
    measures: str
    felt: str
    settings: tuple[str, ...]
    source: str
    is_sum: bool = False
    in_runs: bool = True


def _sum(name: str, measures: str, felt: str, settings: tuple[str, ...] = _PYTORCH, source: str = _FPREV) -> Probe:
    return Probe(name, measures, felt, settings, source, is_sum=True)


def _function(name: str, felt: str) -> Probe:
    return Probe(
        f"function {name}", f"{name}: largest error, hash of the bits, results that differ outside of a vector",
        felt, tuple(dict.fromkeys((*_PYTORCH, *LIBRARIES))), _HANDBOOK,
    )  # fmt: skip


_ACTIVATIONS = "activations and their gradients differ in last bits from the first step on"
_LOSS = "losses and logits differ in last bits from the first step on"
_OPTIMIZER = "updates of the optimizer differ in last bits, with equal gradients"

_ROWS = (
    # roundings: a handful of operations each
    Probe(
        "subnormals", "whether elementwise products, in one thread and in all, keep numbers below 2^-126",
        "values below 2^-126 become zero: second moments, small gradients and scaled casts differ by a value, not by a bit",
        ("subnormals set", "threads", *_PYTORCH), _GOLDBERG,
    ),
    Probe(
        "subnormals in matmuls", "whether float32 matmuls take and give numbers below 2^-126",
        "products of very small gradients become zero on one of them", _MATMUL, _GOLDBERG,
    ),
    Probe(
        "matmul inputs", "how many significant bits of float32 operands a matmul uses",
        "one multiplies in TF32 or bfloat16: matmuls differ in the 3rd or 4th digit from the first step on",
        ("matmul precision", "NVIDIA_TF32_OVERRIDE", *ON_GPU, *LIBRARIES), _PYTORCH_NOTE,
    ),
    Probe(
        "matmul accumulator", "how far sums of 4,096 ones count in bfloat16 matmuls, float32 matmuls and bfloat16 sums",
        "one adds in a narrow format: long sums lose their small terms", _HALF, _PYTORCH_NOTE,
    ),
    Probe(
        "fused multiply-add", "whether matmuls, addcmul, addcdiv and lerp round a product before they add it",
        "matmuls and optimizer updates differ in last bits, with equal order of sums", (*_MATMUL, "capability"), _HANDBOOK,
    ),
    Probe(
        "rounding to 16 bits", "ties and subnormals in float32 to bfloat16 and float16",
        "weights and activations differ by whole spacings of the narrow format", _PYTORCH, _GOLDBERG,
    ),
    # functions: thousands of values each
    _function("division", "normalized values, losses and updates differ in last bits"),
    _function("sqrt", _OPTIMIZER),
    _function("rsqrt", "outputs of RMS norms differ in last bits from the first layer on"),
    _function("exp", "softmax and losses differ in last bits from the first step on"),
    _function("log", _LOSS),
    _function("tanh", _ACTIVATIONS),
    _function("sigmoid", _ACTIVATIONS),
    _function("silu", _ACTIVATIONS),
    _function("erf", _ACTIVATIONS),
    _function("gelu", _ACTIVATIONS),
    _function("sin", "rotary embeddings differ in last bits"),
    _function("cos", "rotary embeddings differ in last bits"),
    # orders of sums
    _sum(
        "sum of rows", "order of torch.sum over the last dimension, 128 terms",
        "losses, norms of layers and gradients of biases differ in last bits",
    ),
    _sum(
        "sum of columns", "order of torch.sum over the first dimension, 64 terms",
        "gradients of biases and norm gains, and sums of micro-batches, differ in last bits",
    ),
    _sum(
        "mean of rows", "order of torch.mean over the last dimension, 64 of 1,024 terms (RMS norms)",
        "outputs of norms differ in last bits from the first layer on",
    ),
    _sum(
        "layer norm", "order of the mean in layer_norm, 64 of 1,024 terms",
        "outputs of layer norms differ in last bits from the first layer on",
    ),
    _sum(
        "softmax", "order of the sum of exponentials, 32 of 512 terms",
        "attention weights differ in last bits from the first layer on",
    ),
    _sum("log softmax", "order of the sum of exponentials, 24 of 4,096 terms", _LOSS),
    _sum(
        "linear float32", "order of x @ W.T, 64 of 1,024 terms, 256 rows",
        "outputs of linear layers differ in last bits from the first layer on", _MATMUL,
    ),
    _sum(
        "small linear float32", "order of x @ W.T, 64 terms, 16 rows",
        "outputs of small layers, of short sequences and single tokens differ in last bits", _MATMUL,
    ),
    _sum(
        "weight gradient float32", "order of grad.T @ x, 64 of 1,024 terms",
        "gradients of weights differ in last bits, with equal losses in the first step", _MATMUL,
    ),
    _sum(
        "batched matmul float32", "order of torch.bmm, 64 terms, 8 matrices",
        "scores of attention and experts differ in last bits", _MATMUL,
    ),
    _sum(
        "attention", "order of scaled_dot_product_attention over the keys, 64 of 1,024",
        "outputs of attention differ in last bits from the first layer on", _MATMUL,
    ),
    _sum(
        "linear bfloat16", "order of x @ W.T in bfloat16, 64 of 1,024 terms, 64 rows",
        "outputs of linear layers differ by a spacing of bfloat16 here and there", _HALF,
    ),
    _sum(
        "sum of a tensor", "order of torch.sum over all of 65,536 values, 16 terms, which threads share",
        "total losses and norms differ in last bits",
    ),
    Probe(
        "sums by threads", "which of these sums 1 and 2 threads add in another order",
        "the number of threads decides a run's bits on one of them alone", _PYTORCH, _FPREV, is_sum=True, in_runs=False,
    ),
)  # fmt: skip

PROBES: dict[str, Probe] = {probe.name: probe for probe in _ROWS}
"""Every probe by name, in the order in which they are measured: the quickest first."""
