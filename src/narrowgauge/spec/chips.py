"""Chips: memory, bandwidth, and matmul throughput by format.

A training step is bounded by a chip's memory size, its memory bandwidth and its matmul throughput in the format of the
operands. Vendors publish throughput for dense or "structured sparse" products, per chip or per board of two, and link rates in
one direction or both. Here every peak is dense and per chip, and every link rate is in one direction. Peaks are the
vendor's; ``measured_tflops`` is the best published large matmul, usually 50 to 85 % of the peak. Each chip has its source and
the quality of that source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from narrowgauge.errors import ChipError, suggestion


@dataclass(frozen=True)
class Chip:
    """One accelerator.

    Attributes:
        name, vendor, architecture, form_factor: its identification.
        memory_gb: memory in the vendor's gigabytes, which are 2^30 bytes (see ``memory_bytes``).
        memory_type: HBM or GDDR generation.
        bandwidth_gb_per_second: of that memory, 10^9 bytes per second.
        peak_tflops: dense operations (two per multiply-add), in 10^12 per second, by operand format; formats without native
            matmul or published value are missing.
        link, link_gb_per_second: the link between chips and its rate in one direction, all peers together; ``None`` if
            not published, 0 without a link.
        peer_gb_per_second: in one direction, to a single peer.
        network_gbit_per_second: per chip and direction, of the networks that vendors and clouds usually put between nodes of such
            chips, 10^9 bits per second; by default a network card on a PCIe slot, of which 8 share one port of 200.
        chips_per_node: of the nodes that such chips usually come in: eight, or as many as share one link.
        host_link: to the CPU.
        evidence: ``A``: vendor page as cited by a maintained table; ``B``: third-party page or arithmetic.
        source: the pages of these values.
        mxfp8_tflops: as ``peak_tflops``, for MXFP8 with block scales applied in hardware; ``None`` without.
        measured_tflops: the best published large matmul, by format.
        watts, watts_source: the vendor's design power of the chip (TDP, board power), and who published it; ``None`` if unknown.
        notes: caveats.
    """

    name: str
    vendor: str
    architecture: str
    form_factor: str
    memory_gb: int
    memory_type: str
    bandwidth_gb_per_second: float
    peak_tflops: Mapping[str, float] = field(hash=False)
    link: str
    host_link: str
    evidence: Literal["A", "B"]
    source: str
    link_gb_per_second: float | None = None
    peer_gb_per_second: float | None = None
    network_gbit_per_second: float = 25
    chips_per_node: int = 8
    mxfp8_tflops: float | None = None
    measured_tflops: Mapping[str, float] = field(default_factory=dict, hash=False)
    watts: float | None = None
    watts_source: str = ""
    notes: str = ""

    @property
    def target(self) -> str:
        """The name by which compilers and :mod:`narrowgauge.spec.kernels` know it, such as ``sm90`` or ``gfx942``.

        Example:
            >>> get_chip("H100-SXM5").target
            'sm90'
        """
        return self.architecture.rpartition(" ")[2]

    @property
    def memory_bytes(self) -> int:
        """Memory in bytes; the vendor's GB is 2^30 bytes (drivers report 1–3 % less).

        Example:
            >>> get_chip("RTX-4090").memory_bytes // 2**30
            24
        """
        return self.memory_gb << 30

    @property
    def bandwidth_bytes_per_second(self) -> float:
        """Memory bandwidth in bytes per second."""
        return self.bandwidth_gb_per_second * 1e9


_CHIPS = (
    Chip(
        "V100-SXM2-32GB", "NVIDIA", "Volta sm70", "SXM2",
        memory_gb=32, memory_type="HBM2", bandwidth_gb_per_second=900,
        peak_tflops={"float32": 15.7, "float16": 125},
        link="NVLink2", link_gb_per_second=150, host_link="PCIe3 x16",
        network_gbit_per_second=100,
        evidence="B",
        notes="no bf16/TF32/fp8; fp16 tensor with fp32 accumulate; 16 GB variant exists",
        source=(
            "cli99/llm-analysis gpu_configs/v100-sxm-32gb.json (fp16 125; 900 GB/s; 150 GB/s); "
            "huggingface.co/RajBhope/gpu-runtime-predictor gpu_catalog.json (fp32 15.7); NVLink2 300 GB/s bidir in "
            "stas00/ml-engineering network/README.md"
        ),
    ),
    Chip(
        "A100-SXM4-40GB", "NVIDIA", "Ampere sm80", "SXM4",
        memory_gb=40, memory_type="HBM2", bandwidth_gb_per_second=1555,
        peak_tflops={"float32": 19.5, "tfloat32": 156, "float16": 312, "bfloat16": 312, "int8": 624},
        measured_tflops={"bfloat16": 271.2},
        watts=400, watts_source="hmc-tech.com/gpus/nvidia-a100-sxm-vs-nvidia-b200 (A100 SXM)",
        link="NVLink3", link_gb_per_second=300, peer_gb_per_second=300, host_link="PCIe4 x16",
        network_gbit_per_second=200,
        evidence="A",
        notes="same compute as 80 GB; measured value is for A100 SXM (80 GB)",
        source=(
            "nvidia.com/en-us/data-center/a100 via stas00/ml-engineering compute/accelerator/README.md note 4; "
            "bandwidth from cli99/llm-analysis a100-sxm-40gb.json"
        ),
    ),
    Chip(
        "A100-SXM4-80GB", "NVIDIA", "Ampere sm80", "SXM4",
        memory_gb=80, memory_type="HBM2e", bandwidth_gb_per_second=2039,
        peak_tflops={"float32": 19.5, "tfloat32": 156, "float16": 312, "bfloat16": 312, "int8": 624},
        measured_tflops={"bfloat16": 271.2},
        watts=400, watts_source="hmc-tech.com/gpus/nvidia-a100-sxm-vs-nvidia-b200",
        link="NVLink3", link_gb_per_second=300, peer_gb_per_second=300, host_link="PCIe4 x16",
        network_gbit_per_second=200,
        evidence="A",
        source=(
            "nvidia.com/en-us/data-center/a100 via stas00/ml-engineering note 4; 2039 GB/s in cli99/llm-analysis "
            "a100-sxm-80gb.json; pytorch/torchtitan torchtitan/tools/utils.py get_peak_flops (312e12)"
        ),
    ),
    Chip(
        "A800-SXM4-80GB", "NVIDIA", "Ampere sm80", "SXM4",
        memory_gb=80, memory_type="HBM2e", bandwidth_gb_per_second=2039,
        peak_tflops={"float32": 19.5, "tfloat32": 156, "float16": 312, "bfloat16": 312, "int8": 624},
        watts=400, watts_source="that of the A100: aiwiki.ai/wiki/nvidia_a800, all but NVLink unchanged",
        link="NVLink3", link_gb_per_second=200, peer_gb_per_second=200, host_link="PCIe4 x16",
        network_gbit_per_second=200,
        evidence="B",
        notes="an A100 SXM with 400 instead of 600 GB/s of NVLink in both directions",
        source="aiwiki.ai/wiki/nvidia_a800 (NVLink 400 GB/s, all else unchanged); hmc-tech.com A800 (312 bf16)",
    ),
    Chip(
        "H100-SXM5-80GB", "NVIDIA", "Hopper sm90", "SXM5",
        memory_gb=80, memory_type="HBM3", bandwidth_gb_per_second=3350,
        peak_tflops={"float32": 67, "tfloat32": 494.5, "float16": 989, "bfloat16": 989, "float8_e4m3fn": 1979, "int8": 1979},
        measured_tflops={"bfloat16": 794.5, "float8_e4m3fn": 1402.6},
        watts=700, watts_source="arXiv 2412.08602; hmc-tech.com/gpu/nvidia-gb200-vs-nvidia-h100-sxm",
        link="NVLink4", link_gb_per_second=450, peer_gb_per_second=450, host_link="PCIe5 x16",
        network_gbit_per_second=400,
        evidence="A",
        notes="MXFP8 not in hardware (TE uses fp8 tensor or block scaling)",
        source=(
            "nvidia.com/en-us/data-center/h100 via stas00/ml-engineering note 12; torchtitan get_peak_flops "
            "(989e12)"
        ),
    ),
    Chip(
        "H100-PCIe-80GB", "NVIDIA", "Hopper sm90", "PCIe",
        memory_gb=80, memory_type="HBM2e", bandwidth_gb_per_second=2000,
        peak_tflops={"float32": 51, "tfloat32": 378, "float16": 756, "bfloat16": 756, "float8_e4m3fn": 1513, "int8": 1513},
        watts=350, watts_source="hmc-tech.com/gpu/nvidia-h100-vs-nvidia-h200-sxm-vs-nvidia-gb200",
        link="NVLink4 bridge (pairs)", link_gb_per_second=300, peer_gb_per_second=300, host_link="PCIe5 x16",
        network_gbit_per_second=400,
        evidence="A",
        notes=(
            "NVLink only between bridged pairs; otherwise 63 GB/s PCIe5; memory type: ml-engineering table prints "
            "HBM3 and 2.0 TB/s; the NVIDIA part is HBM2e (unverified)"
        ),
        source=(
            "nvidia.com/en-us/data-center/h100 via stas00/ml-engineering note 12; torchtitan get_peak_flops "
            "(756e12); bridge 300 GB/s cli99/llm-analysis h100-pcie-80gb.json"
        ),
    ),
    Chip(
        "H800-SXM5-80GB", "NVIDIA", "Hopper sm90", "SXM5",
        memory_gb=80, memory_type="HBM3", bandwidth_gb_per_second=3350,
        peak_tflops={"float32": 67, "tfloat32": 494.5, "float16": 989, "bfloat16": 989, "float8_e4m3fn": 1979, "int8": 1979},
        watts=700, watts_source="that of the H100, an assumption",
        link="NVLink4", link_gb_per_second=200, peer_gb_per_second=200, host_link="PCIe5 x16",
        network_gbit_per_second=400,
        evidence="B",
        notes="an H100 SXM with 400 instead of 900 GB/s of NVLink in both directions, and less float64",
        source="DeepSeek-AI, Insights into DeepSeek-V3, arXiv 2505.09343, section 4.1; peaks of the H100",
    ),
    Chip(
        "H20-SXM5-96GB", "NVIDIA", "Hopper sm90", "SXM5",
        memory_gb=96, memory_type="HBM3", bandwidth_gb_per_second=4000,
        peak_tflops={"float32": 44, "tfloat32": 74, "float16": 148, "bfloat16": 148, "float8_e4m3fn": 296, "int8": 296},
        link="NVLink4", link_gb_per_second=450, peer_gb_per_second=450, host_link="PCIe5 x16",
        network_gbit_per_second=400,
        evidence="B",
        notes="float8 taken at the printed int8 rate, as on all Hopper chips",
        source=(
            "willitrunai.com/es/gpus/h20-96gb (4000 GB/s; fp16 148; int8 296; NVLink 900 GB/s); "
            "zangshuxian.com/new/674733024499207168 (tf32 74; fp32 44)"
        ),
    ),
    Chip(
        "H200-SXM-141GB", "NVIDIA", "Hopper sm90", "SXM5",
        memory_gb=141, memory_type="HBM3e", bandwidth_gb_per_second=4800,
        peak_tflops={"float32": 67, "tfloat32": 494.5, "float16": 989, "bfloat16": 989, "float8_e4m3fn": 1979, "int8": 1979},
        measured_tflops={"bfloat16": 794.5, "float8_e4m3fn": 1453.4},
        watts=700, watts_source="hmc-tech.com/gpu/nvidia-h100-vs-nvidia-h200-sxm-vs-nvidia-gb200",
        link="NVLink4", link_gb_per_second=450, peer_gb_per_second=450, host_link="PCIe5 x16",
        network_gbit_per_second=400,
        evidence="A",
        notes="pairwise copy measured 396 GB/s of 450; about 139 GiB usable",
        source=(
            "nvidia.com/en-us/data-center/h200 via stas00/ml-engineering note 16 and network/README.md; mlcommons "
            "inference_results_v4.1 H200 system json (141 GB; 18x NVLink4 900 GB/s bidir)"
        ),
    ),
    Chip(
        "B200-SXM-180GB", "NVIDIA", "Blackwell sm100", "SXM6",
        memory_gb=180, memory_type="HBM3e", bandwidth_gb_per_second=8000,
        peak_tflops={
            "float32": 80, "tfloat32": 1125, "float16": 2250, "bfloat16": 2250, "float8_e4m3fn": 4500,
            "float4_e2m1fn": 9000, "int8": 4500,
        },
        mxfp8_tflops=4500, measured_tflops={"bfloat16": 1745, "float8_e4m3fn": 3432.5},
        watts=1000, watts_source="hmc-tech.com/gpus/nvidia-a100-sxm-vs-nvidia-b200",
        link="NVLink5", link_gb_per_second=900, peer_gb_per_second=900, host_link="PCIe5 x16",
        network_gbit_per_second=400,
        evidence="A",
        notes=(
            "driver reports a 7680-bit bus so 7.67 TB/s and 178.35 GB total (pytorch/ao PR 4002); int8 as printed; "
            "fp4 dense (NVFP4 quoted 10000 on some pages); host link: ml-engineering says PCIe5 at accelerator"
        ),
        source=(
            "resources.nvidia.com DGX B200 datasheet via stas00/ml-engineering note 20; torchtitan get_peak_flops "
            "(2.25e15); pytorch/ao PR 4002 for bandwidth"
        ),
    ),
    Chip(
        "GB200-NVL72-per-GPU", "NVIDIA", "Blackwell sm100", "superchip",
        memory_gb=186, memory_type="HBM3e", bandwidth_gb_per_second=8000,
        peak_tflops={
            "float32": 80, "tfloat32": 1250, "float16": 2500, "bfloat16": 2500, "float8_e4m3fn": 5000,
            "float4_e2m1fn": 10000, "int8": 5000,
        },
        mxfp8_tflops=5000, measured_tflops={"bfloat16": 1822, "float8_e4m3fn": 3615.6},
        watts=1200, watts_source="tweaktown.com/news/97059 (full Blackwell: 1200 W)",
        link="NVLink5 (72-GPU domain)", link_gb_per_second=900, peer_gb_per_second=900, host_link="NVLink-C2C",
        network_gbit_per_second=400, chips_per_node=72,
        evidence="A",
        notes="per GPU; 4 GPUs per tray; 72-GPU NVLink domain",
        source=(
            "nvidia.com/en-us/data-center/gb200-nvl72 via stas00/ml-engineering note 23; 186 GB in mlcommons "
            "inference_results_v6.1 GB200 json; torchtitan get_peak_flops (2.5e15)"
        ),
    ),
    Chip(
        "B300-SXM", "NVIDIA", "Blackwell Ultra sm103", "SXM6",
        memory_gb=288, memory_type="HBM3e", bandwidth_gb_per_second=8000,
        peak_tflops={
            "float32": 80, "tfloat32": 1125, "float16": 2250, "bfloat16": 2250, "float8_e4m3fn": 4500,
            "float4_e2m1fn": 12600,
        },
        mxfp8_tflops=4500, measured_tflops={"bfloat16": 1769, "float8_e4m3fn": 3353.3},
        link="NVLink5", link_gb_per_second=900, peer_gb_per_second=900, host_link="PCIe5 x16",
        network_gbit_per_second=800,
        evidence="A",
        notes=(
            "NVFP4 printed 15000; int8 printed 4500 in the source but Blackwell Ultra int8 is far lower: "
            "unverified so left empty"
        ),
        source="resources.nvidia.com DGX B300 datasheet via stas00/ml-engineering note 21",
    ),
    Chip(
        "MI300X", "AMD", "CDNA3 gfx942", "OAM",
        memory_gb=192, memory_type="HBM3", bandwidth_gb_per_second=5300,
        peak_tflops={
            "float32": 163.4, "tfloat32": 653.7, "float16": 1300, "bfloat16": 1300, "float8_e4m3fnuz": 2610,
            "int8": 2600,
        },
        measured_tflops={"bfloat16": 668.4},
        watts=750, watts_source="meterpreter.org, AMD confirms Instinct MI300X power consumption up to 750W",
        link="xGMI full mesh", link_gb_per_second=448, peer_gb_per_second=64, host_link="PCIe5 x16",
        network_gbit_per_second=400,
        evidence="A",
        notes=(
            "vendor exact figures 1307.4 / 2614.9 (unverified); FP8 is the FNUZ variant not OCP; 64 GB/s to any "
            "one peer"
        ),
        source=(
            "amd.com MI300X page via stas00/ml-engineering note 17; torchtitan get_peak_flops (1300e12); xGMI from "
            "ml-engineering network/README.md"
        ),
    ),
    Chip(
        "MI325X", "AMD", "CDNA3 gfx942", "OAM",
        memory_gb=256, memory_type="HBM3e", bandwidth_gb_per_second=6000,
        peak_tflops={
            "float32": 163.4, "tfloat32": 653.7, "float16": 1307.4, "bfloat16": 1307.4, "float8_e4m3fnuz": 2614.9,
            "int8": 2614.9,
        },
        link="xGMI full mesh", link_gb_per_second=448, peer_gb_per_second=64, host_link="PCIe5 x16",
        network_gbit_per_second=400,
        evidence="B",
        notes="an MI300X with more and faster memory; links as there; FP8 is the FNUZ variant not OCP",
        source=(
            "awesomeagents.ai/hardware/amd-mi325x (6000 GB/s; 163.4, 653.7, 1307.4, 2614.9 dense); svethardware.cz "
            "61224 (same CDNA3 silicon; int8 2.6 POPS)"
        ),
    ),
    Chip(
        "MI355X", "AMD", "CDNA4 gfx950", "OAM",
        memory_gb=288, memory_type="HBM3e", bandwidth_gb_per_second=8000,
        peak_tflops={
            "float32": 157.3, "float16": 2500, "bfloat16": 2500, "float8_e4m3fn": 5000, "float4_e2m1fn": 10100,
            "int8": 5000,
        },
        mxfp8_tflops=5000, measured_tflops={"bfloat16": 1565},
        watts=1400, watts_source="tomshardware.com, AMD's Instinct MI355X accelerator will consume 1,400 watts",
        link="xGMI full mesh", link_gb_per_second=535.5, peer_gb_per_second=76.5, host_link="PCIe5 x16",
        network_gbit_per_second=400,
        evidence="A",
        notes=(
            "MXFP8 = OCP FP8 rate (inferred; AMD page lists fp8 5.0 PF dense, fp6/fp4 10.1 PF); TF32 not "
            "published; beware 10.1 PF fp8 quoted elsewhere is with sparsity"
        ),
        source="amd.com MI355X page via stas00/ml-engineering note 22; torchtitan get_peak_flops (2500e12)",
    ),
    Chip(
        "L4", "NVIDIA", "Ada sm89", "PCIe LP",
        memory_gb=24, memory_type="GDDR6", bandwidth_gb_per_second=300,
        peak_tflops={"float32": 30.3, "tfloat32": 60, "float16": 121, "bfloat16": 121, "float8_e4m3fn": 242.5, "int8": 242.5},
        watts=72, watts_source="store.sourcecode.com L4 page",
        link="none", link_gb_per_second=0, peer_gb_per_second=0, host_link="PCIe4 x16",
        evidence="B",
        notes=(
            "datasheet prints sparse 120/242/485; dense is half; 58 SM x 2040 MHz gives 30.3; 72 W: sustained "
            "clocks far lower"
        ),
        source=(
            "store.sourcecode.com L4 page (TF32 120 sparse; int8 485 sparse; 300 GB/s); fpsbench.com L4 (30.29 "
            "fp32); fp16 sparse 242 as on the NVIDIA L4 page (unverified) = 4x fp32"
        ),
    ),
    Chip(
        "L40S", "NVIDIA", "Ada sm89", "PCIe",
        memory_gb=48, memory_type="GDDR6", bandwidth_gb_per_second=864,
        peak_tflops={"float32": 91.6, "tfloat32": 183, "float16": 362, "bfloat16": 362, "float8_e4m3fn": 733, "int8": 733},
        watts=350, watts_source="llmbook.apartsin.com, appendix G.1",
        link="none", link_gb_per_second=0, peer_gb_per_second=0, host_link="PCIe4 x16",
        evidence="A",
        source=(
            "nvidia.com/en-us/data-center/l40s via stas00/ml-engineering note 6; torchtitan get_peak_flops "
            "(362e12)"
        ),
    ),
    Chip(
        "RTX-4090", "NVIDIA", "Ada sm89", "PCIe",
        memory_gb=24, memory_type="GDDR6X", bandwidth_gb_per_second=1008,
        peak_tflops={
            "float32": 82.6, "tfloat32": 82.6, "float16": 165.2, "bfloat16": 165.2, "float8_e4m3fn": 330.3,
            "int8": 660.6,
        },
        watts=450, watts_source="hothardware.com, NVIDIA's GeForce RTX 5090 (power of the 40 series)",
        link="none", link_gb_per_second=0, peer_gb_per_second=0, host_link="PCIe4 x16",
        evidence="B",
        notes=(
            "tensor numbers with FP32 accumulate (training); FP16 accumulate doubles them (330.3 / 660.6); no "
            "NVLink and no PCIe P2P"
        ),
        source="hmc-tech.com RTX 4090 page (FP16-32 165.2; FP8-32 330.3; BF16 165.2; TF32 82.58; 1.01 TB/s)",
    ),
    Chip(
        "RTX-5090", "NVIDIA", "Blackwell sm120", "PCIe",
        memory_gb=32, memory_type="GDDR7", bandwidth_gb_per_second=1792,
        peak_tflops={
            "float32": 104.8, "tfloat32": 104.8, "float16": 209.5, "bfloat16": 209.5, "float8_e4m3fn": 419,
            "float4_e2m1fn": 1676, "int8": 838,
        },
        link="none", link_gb_per_second=0, peer_gb_per_second=0, host_link="PCIe5 x16",
        evidence="B",
        notes=(
            "tensor numbers with FP32 accumulate; derived from printed sparse FP16-acc 838.4 / FP8 1676.8 / FP4 "
            "3352; TE lists MXFP8 unsupported and NVFP4 partial on sm120; no tcgen05"
        ),
        source=(
            "codesota.com RTX 5090 (fp16 dense 209.5; 1792 GB/s); spheron.network RTX 5090 (838.4/1676.8/3352 "
            "sparse); nvidia.github.io/TransformerEngine/support_matrix.html"
        ),
    ),
    Chip(
        "TPU-v5e", "Google", "v5e", "chip",
        memory_gb=16, memory_type="HBM2", bandwidth_gb_per_second=819,
        peak_tflops={"bfloat16": 197, "int8": 393},
        link="ICI 2D torus", link_gb_per_second=200, peer_gb_per_second=50, host_link="host",
        chips_per_node=256,
        evidence="A",
        notes=(
            "page also prints 800 GiB/s; ICI 400 GB/s bidirectional per chip over 4 ports; integer all-reduce "
            "semantics not documented there"
        ),
        source="docs.cloud.google.com/tpu/docs/v5e",
    ),
    Chip(
        "TPU-v5p", "Google", "v5p", "chip",
        memory_gb=95, memory_type="HBM2e", bandwidth_gb_per_second=2765,
        peak_tflops={"bfloat16": 459, "int8": 918},
        link="ICI 3D torus", link_gb_per_second=300, peer_gb_per_second=50, host_link="host",
        chips_per_node=8960,
        evidence="A",
        notes=(
            "4800 Gbps = 600 GB/s ICI per chip as printed; unidirectional figure assumes the printed number is "
            "bidirectional (unverified)"
        ),
        source="cloud.google.com/tpu/docs/v5p ; int8 918 via stas00/ml-engineering",
    ),
)  # fmt: skip

CHIPS: dict[str, Chip] = {chip.name: chip for chip in _CHIPS}


def get_chip(name: str) -> Chip:
    """The chip of that name, ignoring case and separators; an unambiguous prefix is enough, and H20 is not a prefix of H200.

    Raises:
        ChipError: no chip has that name, or several match the prefix.
    Example:
        >>> get_chip("h200").memory_gb
        141
        >>> get_chip("RTX4090").name
        'RTX-4090'
    """
    key, plain = name.strip().lower(), _plain(name)
    known = {_plain(chip.name): chip for chip in CHIPS.values()}
    if plain in known:
        return known[plain]
    found = [chip for spelled, chip in known.items() if plain and spelled.startswith(plain)]
    found = [chip for chip in found if chip.name.lower().startswith(f"{key}-")] or found
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(chip.name for chip in found)
        raise ChipError(
            f"chip {name!r} was requested, and {len(found)} names begin with it: {names}.", "Name one of them."
        )
    # A100-40GB leaves out a part of A100-SXM4-40GB, which letters alone would not find.
    whole = [chip.name for chip in CHIPS.values() if key and {*key.split("-")} <= {*chip.name.lower().split("-")}]
    near = suggestion(name.strip(), whole) or suggestion(name.strip().upper(), CHIPS)
    raise ChipError(f"no chip is named {name!r}.", f"{near} (narrowgauge show chips lists all.)".strip())


def _plain(name: str) -> str:
    """A name without case and separators."""
    return "".join(filter(str.isalnum, name.lower()))
