"""What a device is to a plan: its peaks, its memory, and its links to others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

PEAK_OF_DTYPE = {
    "bfloat16": "bf16_tflops",
    "float16": "fp16_tflops",
    "tf32": "tf32_tflops",
    "float32": "fp32_tflops",
}
"""What matrix products are computed in -> the field of [`Hardware`] with the peak."""


@dataclass(frozen=True)
class Hardware:
    """
    One device, and the links to others of its kind. Peaks are those of dense matrix products, in 10^12 operations a
    second; GB are 10^9 bytes and GiB 2^30 bytes.

    Args:
        name (`str`): As in the table of devices.
        bf16_tflops (`float`): Peak of bfloat16 products.
        fp16_tflops (`float`): Peak of float16 products that are added up in float32.
        tf32_tflops (`float`): Peak of float32 products that are rounded to TF32, which torch does where it is asked to
            (`torch.set_float32_matmul_precision("high")`, `TrainingArguments(tf32=True)`), not by default.
        fp32_tflops (`float`): Peak of float32 products in full precision, torch's default.
        memory_gib (`float`, *optional*): Memory as the device reports it; `None` where it is the host's.
        memory_gb_per_s (`float`): Peak rate between the device and its memory.
        link_gb_per_s (`float`): To the other devices of a node, one way, in collectives (bus bandwidth of a ring).
        node_size (`int`): Devices of a node, or of what is linked as one.
        node_link_gb_per_s (`float`): One network card of a node, one way.
        network_cards (`int`): Network cards of a node.
        multiprocessors (`int`, *optional*): Streaming multiprocessors or compute units of the whole device; a part of
            it, such as a MIG instance, has a share of them.
        link_latency_us (`float`, *optional*, defaults to 5): Of a message inside a node, in microseconds.
        node_link_latency_us (`float`, *optional*, defaults to 12): Of a message between nodes, in microseconds.
        message_gb_per_s (`float`, *optional*): From one device of a node to another; `None` for that of collectives.
        node_message_gb_per_s (`float`, *optional*):
            From a device of one node to one of another; `None` for its share of the network cards.
        collective_latency_us (`float`, *optional*):
            Of one step of a collective inside a node, in microseconds; `None` for that of a message.
        node_collective_latency_us (`float`, *optional*): The same of a collective over several nodes.
        launch_us (`float`, *optional*, defaults to 8): Time of the host to start one kernel in eager mode.
        matmul_efficiency (`float`, *optional*, defaults to 0.76): Share of the peak that matrix products reach.
        attention_efficiency (`float`, *optional*, defaults to 0.25): Share of the peak that attention reaches in flash
            kernels, which `"sdpa"` uses without a mask.
        masked_attention_share (`float`, *optional*, defaults to 1): Of that, what `"sdpa"` reaches under a dense
            mask, which its flash kernel does not take.
        block_attention_share (`float`, *optional*, defaults to 0.86): Of that, what kernels reach that read their mask
            for each block of tokens: `"bitfield"`, `"flex_attention"`.
        memory_efficiency (`float`, *optional*, defaults to 0.72): Share of the memory's rate that kernels reach.
        overlap_efficiency (`float`, *optional*, defaults to 0.6): Share of its speed that a device computes with while
            a collective runs beside it, whose kernels take multiprocessors and memory's rate.
        dtype (`str`, *optional*, defaults to `"bfloat16"`): What is computed in, a key of [`PEAK_OF_DTYPE`].
        aliases (`tuple[str, ...]`, *optional*): Other names, among them those that drivers report.
        source (`str`, *optional*): Where the numbers come from.
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
    aliases: tuple[str, ...] = ()
    source: str = ""

    def computing_in(self, dtype: str) -> Hardware:
        """The same device with products in another dtype, a key of [`PEAK_OF_DTYPE`]."""
        return replace(self, dtype=dtype)

    @property
    def peak_tflops(self) -> float:
        """Peak of matrix products in `dtype`."""
        return getattr(self, PEAK_OF_DTYPE[self.dtype])

    @property
    def flops_per_ms(self) -> float:
        """Operations of matrix products that training reaches in a millisecond."""
        return self.peak_tflops * 1e9 * self.matmul_efficiency

    def attention_flops_per_ms(self, attention: str) -> float:
        """Operations that an attention function without a dense mask reaches in a millisecond."""
        is_block = any(kind in attention for kind in ("bitfield", "flex"))
        share = self.block_attention_share if is_block else 1.0
        return self.peak_tflops * 1e9 * self.attention_efficiency * share

    @property
    def memory_bytes_per_ms(self) -> float:
        """Bytes between the device and its memory in a millisecond."""
        return self.memory_gb_per_s * 1e6 * self.memory_efficiency

    @property
    def network_gb_per_s(self) -> float:
        """A device's share of its node's network cards, one way."""
        return self.node_link_gb_per_s * self.network_cards / self.node_size

    def link_bytes_per_ms(self, ranks: Iterable[int]) -> float:
        """
        Per-rank bandwidth in bytes/ms of a collective (the bus bandwidth of a ring) over `ranks`; nodes hold
        consecutive ranks. Between nodes a group has the shares that its members of a node have of the network cards
        together, and the node with the fewest members decides; other groups of the node are assumed to talk as well.
        """
        members = Counter(rank // self.node_size for rank in ranks)
        if len(members) <= 1:
            return self.link_gb_per_s * 1e6
        return min(self.link_gb_per_s, self.network_gb_per_s * min(members.values())) * 1e6

    def message_bytes_per_ms(self, ranks: Iterable[int]) -> float:
        """
        Bytes/ms from one rank to another, where each of several ranks sends to one of its own; `ranks` are those of
        both sides.
        """
        if self._is_one_node(ranks):
            return 1e6 * (self.link_gb_per_s if self.message_gb_per_s is None else self.message_gb_per_s)
        if self.node_message_gb_per_s is not None:
            return 1e6 * self.node_message_gb_per_s
        return 1e6 * min(self.link_gb_per_s, self.network_gb_per_s)

    def latency_us(self, ranks: Iterable[int]) -> float:
        """Microseconds until the first byte of a message between any of `ranks` arrives, at most."""
        return self.link_latency_us if self._is_one_node(ranks) else self.node_link_latency_us

    def step_latency_us(self, ranks: Iterable[int]) -> float:
        """Microseconds of one step of a collective over `ranks`, of which a tree has `log2(n)`."""
        members = list(ranks)
        found = self.collective_latency_us if self._is_one_node(members) else self.node_collective_latency_us
        return self.latency_us(members) if found is None else found

    def _is_one_node(self, ranks: Iterable[int]) -> bool:
        return len({rank // self.node_size for rank in ranks}) <= 1
