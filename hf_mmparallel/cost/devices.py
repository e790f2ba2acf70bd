"""Hardware description of a device: compute peaks, memory, and links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

# compute dtype of matrix products -> the field of `Hardware` with the peak
PEAK_OF_DTYPE = {
    "bfloat16": "bf16_tflops",
    "float16": "fp16_tflops",
    "tf32": "tf32_tflops",
    "float32": "fp32_tflops",
}


@dataclass(frozen=True)
class Hardware:
    """
    One device and its links to others of its kind. Peaks are those of dense matrix products, in 10^12 operations a
    second; GB are 10^9 bytes and GiB 2^30 bytes.

    Args:
        name (`str`): Name in the device table.
        bf16_tflops (`float`): Peak of bfloat16 products.
        fp16_tflops (`float`): Peak of float16 products with float32 accumulation.
        tf32_tflops (`float`): Peak of float32 products rounded to TF32, which torch uses on request
            (`torch.set_float32_matmul_precision("high")`, `TrainingArguments(tf32=True)`), not by default.
        fp32_tflops (`float`): Peak of float32 products in full precision, torch's default.
        memory_gib (`float`, *optional*): Memory as the device reports it; `None` if it uses the host's memory.
        memory_gb_per_s (`float`): Peak memory bandwidth.
        link_gb_per_s (`float`): Bandwidth to other devices of the node, one way, in collectives (bus bandwidth of a
            ring).
        node_size (`int`): Number of devices in a node (or NVLink domain).
        node_link_gb_per_s (`float`): Bandwidth of one network card of a node, one way.
        network_cards (`int`): Number of network cards of a node.
        host_link_gb_per_s (`float`, *optional*): Bandwidth between a device and host memory, one way.
        host_memory_gib (`float`, *optional*): Memory of the host of a node; `None` if it is unknown.
        host_memory_gb_per_s (`float`, *optional*): Peak bandwidth of that memory, which the devices of a node share.
        multiprocessors (`int`, *optional*): Streaming multiprocessors or compute units of the whole device; a
            partition, such as a MIG instance, has a share of them.
        link_latency_us (`float`, *optional*, defaults to 5): Latency of a message inside a node, in microseconds.
        node_link_latency_us (`float`, *optional*, defaults to 12): Latency of a message between nodes, in
            microseconds.
        message_gb_per_s (`float`, *optional*):
            Point-to-point bandwidth inside a node; `None` for the bandwidth of collectives.
        node_message_gb_per_s (`float`, *optional*):
            Point-to-point bandwidth between nodes; `None` for the device's share of the network cards.
        collective_latency_us (`float`, *optional*):
            Latency of one step of a collective inside a node, in microseconds; `None` for that of a message.
        node_collective_latency_us (`float`, *optional*): Latency of one step of a collective over several nodes.
        launch_us (`float`, *optional*, defaults to 8): Host time to launch one kernel in eager mode.
        matmul_efficiency (`float`, *optional*, defaults to 0.76): Share of the peak that matrix products reach.
        attention_efficiency (`float`, *optional*, defaults to 0.25): Share of the peak that flash attention kernels
            reach (those `"sdpa"` uses without a mask).
        masked_attention_share (`float`, *optional*, defaults to 1): Speed of `"sdpa"` with a dense mask, which flash
            kernels do not support, relative to flash attention.
        block_attention_share (`float`, *optional*, defaults to 0.86): Speed of kernels that read a block mask
            (`"bitfield"`, `"flex_attention"`), relative to flash attention.
        memory_efficiency (`float`, *optional*, defaults to 0.72): Share of the memory bandwidth that kernels reach.
        overlap_efficiency (`float`, *optional*, defaults to 0.6): Relative compute speed while a collective runs
            concurrently, whose kernels occupy multiprocessors and memory bandwidth.
        dtype (`str`, *optional*, defaults to `"bfloat16"`): Compute dtype, a key of [`PEAK_OF_DTYPE`].
        float8_speedup (`float`, *optional*, defaults to 1): Speed of float8 products relative to 16-bit ones; 1 for a
            device without them.
        aliases (`tuple[str, ...]`, *optional*): Other names, including those that drivers report.
        source (`str`, *optional*): Source of the numbers.
    """

    name: str
    bf16_tflops: float
    fp16_tflops: float
    tf32_tflops: float
    fp32_tflops: float
    memory_gib: float | None
    memory_gb_per_s: float
    link_gb_per_s: float
    node_size: int
    node_link_gb_per_s: float
    network_cards: int
    host_link_gb_per_s: float | None = None
    host_memory_gib: float | None = None
    host_memory_gb_per_s: float | None = None
    multiprocessors: int | None = None
    link_latency_us: float = 5.0
    node_link_latency_us: float = 12.0
    message_gb_per_s: float | None = None
    node_message_gb_per_s: float | None = None
    collective_latency_us: float | None = None
    node_collective_latency_us: float | None = None
    launch_us: float = 8.0
    matmul_efficiency: float = 0.76
    attention_efficiency: float = 0.25
    masked_attention_share: float = 1.0
    block_attention_share: float = 0.86
    memory_efficiency: float = 0.72
    overlap_efficiency: float = 0.6
    dtype: str = "bfloat16"
    float8_speedup: float = 1.0
    aliases: tuple[str, ...] = ()
    source: str = ""

    def computing_in(self, dtype: str) -> Hardware:
        """The same device with another compute dtype, a key of [`PEAK_OF_DTYPE`]."""
        return replace(self, dtype=dtype)

    @property
    def peak_tflops(self) -> float:
        """Peak of matrix products in `dtype`, in 10^12 operations a second."""
        return getattr(self, PEAK_OF_DTYPE[self.dtype])

    @property
    def flops_per_ms(self) -> float:
        """FLOPs per millisecond that matrix products reach in training."""
        return self.peak_tflops * 1e9 * self.matmul_efficiency

    @property
    def float8_flops_per_ms(self) -> float:
        """The same in float8, in place of a 16-bit `dtype`."""
        return self.flops_per_ms * self.float8_speedup

    def attention_flops_per_ms(self, attention: str) -> float:
        """FLOPs per millisecond that an attention function without a dense mask reaches."""
        is_block = any(kind in attention for kind in ("bitfield", "flex"))
        share = self.block_attention_share if is_block else 1.0
        return self.peak_tflops * 1e9 * self.attention_efficiency * share

    @property
    def memory_bytes_per_ms(self) -> float:
        """Memory bandwidth that kernels reach, in bytes per millisecond."""
        return self.memory_gb_per_s * 1e6 * self.memory_efficiency

    @property
    def host_link_bytes_per_ms(self) -> float | None:
        """Bandwidth between the device and host memory, in bytes per millisecond; `None` if it is unknown."""
        return None if self.host_link_gb_per_s is None else 1e6 * self.host_link_gb_per_s

    @property
    def host_memory_bytes_per_ms(self) -> float | None:
        """Share of host memory's bandwidth that a kernel reaches, bytes/ms; `None` if it is unknown."""
        if self.host_memory_gb_per_s is None:
            return None
        return 1e6 * self.host_memory_gb_per_s * self.memory_efficiency / self.node_size

    @property
    def has_nccl(self) -> bool:
        """Whether collectives are those of NCCL or RCCL; on the CPU gloo has plain rings."""
        return self.name != "cpu"

    @property
    def network_gb_per_s(self) -> float:
        """A device's share of its node's network bandwidth, one way."""
        return self.node_link_gb_per_s * self.network_cards / self.node_size

    def link_bytes_per_ms(self, ranks: Iterable[int]) -> float:
        """Bandwidth of each rank, bytes/ms, in a collective over `ranks` (bus bandwidth of a ring)."""
        # nodes have consecutive ranks
        members = Counter(rank // self.node_size for rank in ranks)
        if len(members) <= 1:
            return self.link_gb_per_s * 1e6
        # members in one node combine their shares of the network cards, and the node with the fewest is the
        # bottleneck; its other ranks are assumed to communicate as well
        return min(self.link_gb_per_s, self.network_gb_per_s * min(members.values())) * 1e6

    def message_bytes_per_ms(self, ranks: Iterable[int]) -> float:
        """Point-to-point bandwidth, bytes/ms, when each sender of `ranks` has a receiver of its own there."""
        if self._is_one_node(ranks):
            return 1e6 * (self.link_gb_per_s if self.message_gb_per_s is None else self.message_gb_per_s)
        if self.node_message_gb_per_s is not None:
            return 1e6 * self.node_message_gb_per_s
        return 1e6 * min(self.link_gb_per_s, self.network_gb_per_s)

    def latency_us(self, ranks: Iterable[int]) -> float:
        """Maximum latency of a message between any two of `ranks`, in microseconds."""
        return self.link_latency_us if self._is_one_node(ranks) else self.node_link_latency_us

    def step_latency_us(self, ranks: Iterable[int]) -> float:
        """Latency of one step of a tree or ring over `ranks`, in microseconds; between nodes if there are several."""
        members = list(ranks)
        latency = self.collective_latency_us if self._is_one_node(members) else self.node_collective_latency_us
        return self.latency_us(members) if latency is None else latency

    def _is_one_node(self, ranks: Iterable[int]) -> bool:
        return len({rank // self.node_size for rank in ranks}) <= 1


# The optimizer's step on the CPU: what it moves, and its time.


@dataclass(frozen=True)
class HostStep:
    """What the optimizer's step of a rank on the CPU moves."""

    memory_bytes: float = 0.0  # read and written in host memory
    received_bytes: float = 0.0  # gradients that come from the device
    sent_bytes: float = 0.0  # weights that go to it


def host_step_ms(device: Hardware, step: HostStep) -> float:
    """Time of the optimizer's step on the CPU; 0 for a host whose speed is unknown."""
    link, memory = device.host_link_bytes_per_ms, device.host_memory_bytes_per_ms
    if link is None or memory is None:
        return 0.0
    # bucket by bucket gradients arrive, the CPU updates, and weights return, so the slowest of the three counts
    return max(step.memory_bytes / memory, step.received_bytes / link, step.sent_bytes / link)
