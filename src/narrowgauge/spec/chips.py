"""Chips: memory, bandwidth, links, and matmul throughput by format.

Vendors publish throughput for dense or "structured sparse" products, per chip or per board of two.
They publish link rates in one direction or both. In ``data/chips.toml`` every peak is dense and per
chip. Every link rate is in one direction.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from narrowgauge.errors import ChipError
from narrowgauge.spec.formats import get_format
from narrowgauge.spec.require import require_number, unknown
from narrowgauge.spec.toml import load_rows

NUMBERS = ("memory_gb", "bandwidth_gb_per_second", "host_gb_per_second", "network_gbit_per_second",
           "host_memory_gb", "host_updates_per_second")  # fmt: skip
"""Fields that are above zero."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Chip:
    """One accelerator.

    Attributes:
        name, vendor, architecture: as in the vendor's data sheet.
        source: origin of the values.
        memory_gb: memory as sold, in GiB: the vendors' gigabytes are 2^30 bytes.
        reachable_mib: memory that the driver reports, if it is more than 3 % below ``memory_gb``.
        bandwidth_gb_per_second: of that memory, 10^9 bytes per second.
        peak_tflops: dense operations (two per multiply-add), in 10^12 per second, by operand
            format. Formats without native matmul or published value are missing.
        link, link_gb_per_second: the link between chips, and its rate in one direction to all peers
            together; None if not published, 0 without a link.
        peer_gb_per_second: to a single peer; None if one peer can get the whole rate.
        host_gb_per_second: of the link to the host, in one direction.
        peers: chips that the link joins; None for all of a node. Other pairs communicate through
            the host.
        network_gbit_per_second: usual network between nodes, per chip and direction. The default is
            a network card on a PCIe slot: 8 chips share one port of 200.
        chips_per_node: in usual nodes of this chip.
        host_memory_gb: memory of a host for each chip; 2 TB for the eight of a DGX A100, H100 or
            B200 (NVIDIA's data sheets).
        host_updates_per_second: parameters that the processors of a node step in a second, where a
            program offloads states (ZeRO-Offload, arXiv 2101.06840, table 4).
        device: the name that its driver reports, if known.
    """

    name: str
    vendor: str
    architecture: str
    memory_gb: float
    bandwidth_gb_per_second: float
    peak_tflops: Mapping[str, float]
    link: str
    host_gb_per_second: float
    source: str
    reachable_mib: int | None = None
    link_gb_per_second: float | None = None
    peer_gb_per_second: float | None = None
    peers: int | None = None
    network_gbit_per_second: float = 25
    chips_per_node: int = 8
    host_memory_gb: float = 256
    host_updates_per_second: float = 4e9
    device: str = ""

    def __post_init__(self) -> None:
        for name in NUMBERS:
            require_number(name, getattr(self, name), is_open=True)
        require_number("link_gb_per_second", self.link_gb_per_second or 0)
        require_number("chips_per_node", self.chips_per_node, 1, is_whole=True)
        for format, rate in self.peak_tflops.items():
            require_number(f"the rate of {get_format(format).name}", rate, is_open=True)
        if not {"bfloat16", "float16", "float32"} & {*self.peak_tflops}:
            raise ChipError(
                f"Cannot use a chip {self.name!r} without a rate in peak_tflops.",
                "Name one: {'bfloat16': 989}.",
            )

    @property
    def target(self) -> str:
        """Return its name in compilers and :mod:`narrowgauge.spec.matmul_kernels`, such as ``sm90``."""
        return self.architecture.rpartition(" ")[2]

    @property
    def memory_bytes(self) -> int:
        """Return the memory in bytes. Drivers report up to 3 % less."""
        if self.reachable_mib:
            return self.reachable_mib << 20
        return int(self.memory_gb * 2**30)

    @property
    def peak_flops(self) -> float:
        """Return the operations per second of dense 16-bit matmuls, of float32's without those: the
        100 % of an MFU.
        """
        format = next(filter(self.peak_tflops.get, ("bfloat16", "float16", "float32")))
        return 1e12 * self.peak_tflops[format]

    def rate_format(self, format: str) -> str:
        """Return the format whose printed rate applies when the chip multiplies ``format``."""
        return "float8_e4m3fn" if format == "float8_e5m2" else format


CHIPS = load_rows(Chip, "chips")


def get_chip(name: str) -> Chip:
    """Return the chip of that name, ignoring case and separators.

    An unambiguous beginning is enough, if it ends with a word of the name, or before a word's
    number: H100-SXM is H100-SXM5-80GB; L40 is no L40S, A10 no A100.

    Raises:
        ChipError: no chip has that name, or several begin with it.
    """
    plain = filter(str.isalnum, name.lower())
    begun = re.compile("[^a-z0-9]*".join(plain) + r"((?<=[a-z0-9])\b|(?<=[a-z])(?=\d))", re.ASCII)
    matches = [chip for chip in CHIPS if begun.match(chip.lower())]
    if len(matches) == 1:
        return CHIPS[matches[0]]
    if matches:
        raise ChipError(
            f"Cannot choose a chip for {name!r}: {', '.join(matches)} begin with it.",
            "Name one of them.",
        )
    raise unknown("chip", name, CHIPS, ChipError)
