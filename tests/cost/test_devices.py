"""Devices: found by name, recognised as drivers report them, described in a file, and their links."""

from dataclasses import asdict, replace

import pytest

from hf_mmparallel.cost import device_from, device_table, find_device, recognize_device
from hf_mmparallel.cost.device_table import device_of

GIB = 2**30
# What `torch.cuda.get_device_properties` reports: name, GiB of memory, multiprocessors -> the device, its GiB.
REPORTED = [
    ("NVIDIA H100 80GB HBM3", 79.11, 132, "h100"), ("NVIDIA H100 80GB HBM2e", 79.11, 132, "h100"),
    ("NVIDIA H100 PCIe", 79.18, 114, "h100-pcie"), ("NVIDIA H100 NVL", 93.1, 132, "h100-nvl"),
    ("NVIDIA H200", 139.8, 132, "h200"), ("NVIDIA H200 NVL", 139.8, 132, "h200-nvl"),
    ("NVIDIA H20", 95.0, 78, "h20"), ("NVIDIA H20", 139.8, 78, "h20-3e"),
    ("NVIDIA H20-3e", 139.8, 78, "h20-3e"), ("NVIDIA H800", 79.35, 132, "h800"),
    ("NVIDIA H800 PCIe", 79.11, 114, "h800-pcie"), ("NVIDIA GH200 480GB", 94.5, 132, "gh200"),
    ("NVIDIA A100-SXM4-80GB", 79.15, 108, "a100"), ("A100-SXM4-80GB", 79.15, 108, "a100"),
    ("NVIDIA A100-SXM4-40GB", 39.39, 108, "a100-sxm-40gb"), ("NVIDIA A100 80GB PCIe", 79.14, 108, "a100-pcie-80gb"),
    ("NVIDIA A100-PCIE-40GB", 39.39, 108, "a100-pcie-40gb"), ("NVIDIA A800-SXM4-80GB", 79.32, 108, "a800"),
    ("NVIDIA A800 80GB PCIe", 79.32, 108, "a800-pcie"), ("NVIDIA A30", 23.5, 56, "a30"),
    ("NVIDIA B200", 178.35, 148, "b200"), ("NVIDIA GB200", 184.31, 152, "gb200"),
    ("NVIDIA B300 SXM6 AC", 267.69, 148, "b300"), ("NVIDIA GB300", 276.5, 152, "gb300"),
    ("NVIDIA L40S", 44.39, 142, "l40s"), ("NVIDIA L40", 44.39, 142, "l40"),
    ("NVIDIA L4", 22.03, 58, "l4"), ("NVIDIA A10", 22.06, 72, "a10"),
    ("NVIDIA A10G", 22.06, 80, "a10g"), ("NVIDIA A40", 44.42, 84, "a40"),
    ("NVIDIA RTX A6000", 47.54, 84, "a6000"), ("NVIDIA RTX 6000 Ada Generation", 47.4, 142, "rtx-6000-ada"),
    ("NVIDIA GeForce RTX 3090", 23.68, 82, "rtx-3090"), ("NVIDIA GeForce RTX 4090", 23.53, 128, "rtx-4090"),
    ("NVIDIA GeForce RTX 5090", 31.36, 170, "rtx-5090"), ("Tesla V100-SXM2-16GB", 15.77, 80, "v100-sxm2-16gb"),
    ("Tesla V100-SXM2-32GB", 31.73, 80, "v100-sxm2-32gb"), ("Tesla V100-SXM3-32GB", 31.73, 80, "v100-sxm2-32gb"),
    ("Tesla V100-PCIE-16GB", 15.77, 80, "v100-pcie-16gb"), ("Tesla V100-PCIE-32GB", 31.73, 80, "v100-pcie-32gb"),
    ("Tesla T4", 14.75, 40, "t4"), ("AMD Instinct MI250X/MI250", 63.98, 104, "mi250"),
    ("AMD Instinct MI250X / MI250", 63.98, 110, "mi250x"), ("AMD Instinct MI300X", 191.98, 304, "mi300x"),
    ("AMD Instinct MI300X VF", 191.69, 304, "mi300x"), ("AMD Instinct MI325X", 255.98, 304, "mi325x"),
    ("NVIDIA GeForce RTX 4090", 47.99, 128, "rtx-4090"),  # with more memory soldered on
]  # fmt: skip
UNKNOWN = [
    "NVIDIA RTX A1000 Laptop GPU", "NVIDIA RTX A4000", "NVIDIA RTX A400", "NVIDIA RTX 4000 Ada Generation",
    "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA GeForce RTX 5090 D", "Quadro RTX 6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "NVIDIA H100 64GB HBM3", "NVIDIA H200 NVL Max", "NVIDIA A100X", "NVIDIA A100-SXM-64GB", "GRID A100X-40C",
    "NVIDIA A2", "NVIDIA A16", "NVIDIA L20", "NVIDIA L2", "NVIDIA GB10", "NVIDIA CMP 170HX",
    "Tesla V100-FHHL-16GB", "AMD Radeon Graphics", "AMD Instinct MI210", "AMD Instinct MI300A", "Orin", "",
]  # fmt: skip


@pytest.mark.parametrize(("name", "gib", "units", "expected"), REPORTED)
def test_reported_devices_are_recognized_with_their_own_memory(name, gib, units, expected):
    device, listed = recognize_device(name, int(gib * GIB), units), find_device(expected)
    assert device is not None and device == replace(listed, memory_gib=device.memory_gib)
    assert device.memory_gib == pytest.approx(gib, abs=1e-6)
    assert gib == 47.99 or listed.memory_gib == pytest.approx(gib, rel=0.01)


def test_numbers_between_those_of_the_table():
    assert recognize_device("NVIDIA H20", 120 * GIB, 78) == replace(find_device("h20"), memory_gib=120)
    few = recognize_device("NVIDIA GB300", 276 * GIB, 148)  # a few multiprocessors less are no part
    assert few == replace(find_device("gb300"), memory_gib=276)


@pytest.mark.parametrize("name", UNKNOWN)
def test_devices_of_another_name_are_unknown(name):
    assert recognize_device(name, 40 * GIB, 108) is None


def test_every_device_of_the_table_is_among_those_that_drivers_report():
    assert {key for *_, key in REPORTED} == set(device_table()) - {"cpu"}


@pytest.mark.parametrize(
    ("name", "gib", "units", "whole"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4.75, 14, "a100-sxm-40gb"),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 39.25, 42, "a100"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb+me", 9.5, 16, "h100"),
        ("AMD Instinct MI300X", 23.98, 38, "mi300x"),  # one of eight partitions
        ("NVIDIA H100 80GB HBM3 MIG 7g.80gb", 79, 132, "h100"),  # all of it, but for its links
    ],
)
def test_a_part_has_its_share(name, gib, units, whole):
    part, device = recognize_device(name, int(gib * GIB), units), find_device(whole)
    assert part is not None and device.multiprocessors is not None and device.memory_gib is not None
    for dtype in ("bfloat16", "float16", "tf32", "float32"):
        share = part.computing_in(dtype).peak_tflops / device.computing_in(dtype).peak_tflops
        assert share == pytest.approx(units / device.multiprocessors)
    assert part.memory_gib == pytest.approx(gib, abs=1e-6)
    assert part.memory_gb_per_s == pytest.approx(device.memory_gb_per_s * gib / device.memory_gib, rel=1e-6)
    assert part.link_gb_per_s < device.link_gb_per_s and part.link_gb_per_s == 16  # through the host
    assert whole in part.name and str(units) in part.name


SPELLINGS = {
    "H100": "h100",
    "a100": "a100",
    "A100-80GB": "a100",
    "rtx4090": "rtx-4090",
    "RTX 6000 Ada": "rtx-6000-ada",
}
SPELLINGS |= dict.fromkeys(("a100-40gb", "A100-SXM4-40GB"), "a100-sxm-40gb")
SPELLINGS |= {"NVIDIA A100-PCIE-40GB": "a100-pcie-40gb"}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_names_in_any_spelling(spelling):
    assert find_device(spelling).name == SPELLINGS[spelling]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v100", "`gpu_type=v100` may be any of .*`v100-pcie-16gb`.*`v100-sxm2-32gb`"),
        ("h100-", "may be any of `h100`, `h100-nvl`, `h100-pcie`"),
        ("mi250x/mi250", "may be any of `mi250`, `mi250x`"),
        ("h10", "not in the table of devices. Did you mean `h100`.*gpu_spec"),
        ("v100-32gb", "may be any of `v100-pcie-32gb`, `v100-sxm2-32gb`"),
        ("h100-96gb", "not in the table of devices. Did you mean `gh200`"),
        ("h100-30gb", "not in the table of devices. Known: h100"),
        ("", "not in the table of devices. Known: h100"),
    ],
)
def test_ambiguous_and_unknown_names(name, message):
    with pytest.raises(ValueError, match=message):
        find_device(name)


def test_each_dtype_has_its_own_peak():
    h100, v100 = find_device("h100"), find_device("v100-sxm2-32gb")
    assert h100.peak_tflops == 989.4 and h100.computing_in("float32").peak_tflops == 66.9
    assert h100.computing_in("tf32").flops_per_ms == pytest.approx(494.7e9 * h100.matmul_efficiency)
    assert v100.computing_in("float16").peak_tflops == 125 and v100.peak_tflops == 15.7
    for device in device_table().values():
        assert device.fp32_tflops <= device.tf32_tflops <= max(device.bf16_tflops, device.fp16_tflops), device
        assert device.source, device


@pytest.mark.parametrize(
    ("device", "ranks", "gb_per_s", "of_message"),
    [
        ("h100", range(8), 450, 450),
        ("h100", (7, 8), 50, 50),
        ("h100", (0, 1, 8, 9), 100, 50),  # a collective uses the cards of all its members
        ("h100", range(16), 400, 50),
        ("h100", range(64), 400, 50),
        ("h100", range(0, 64, 8), 50, 50),
        ("h100", (4, 5, 6, 7, 8), 50, 50),  # the node with the fewest members decides
        ("a40", (0, 4), 6.25, 6.25),  # one card of 25 GB/s for four
        ("a40", range(8), 25, 6.25),
    ],
)
def test_links_and_network_cards(device, ranks, gb_per_s, of_message):
    found = find_device(device)
    assert found.link_bytes_per_ms(ranks) == gb_per_s * 1e6 and found.message_bytes_per_ms(ranks) == of_message * 1e6
    slow = replace(found, link_gb_per_s=3)  # a network is never faster than the links of a node
    assert slow.link_bytes_per_ms(ranks) == 3e6


def test_latency_between_nodes_is_another():
    h100 = find_device("h100")
    assert h100.latency_us([0, 7]) == h100.link_latency_us < h100.latency_us([7, 8]) == h100.node_link_latency_us


OWN = """
name: my-gpu
bf16_tflops: 400
fp16_tflops: 400
tf32_tflops: 200
fp32_tflops: 50
memory_gib: 63.5
memory_gb_per_s: 1600
link_gb_per_s: 200
node_size: 4
node_link_gb_per_s: 25
network_cards: 2
"""


@pytest.fixture
def described(tmp_path):
    """The device of a file with this text."""

    def read(text: str):
        path = tmp_path / "slow-h100.yaml"
        path.write_text(text)
        return device_from("h200", str(path))

    return read


def test_devices_of_files(described, tmp_path):
    device = described(OWN)
    assert device.name == "my-gpu" and device.peak_tflops == 400 and device.memory_gib == 63.5
    assert device.network_gb_per_s == 12.5 and device.matmul_efficiency == 0.76
    like = replace(find_device("h100"), name="slow-h100", node_link_gb_per_s=12.5, aliases=())
    source = f"`{tmp_path / 'slow-h100.yaml'}`"
    assert described("like: h100\nnode_link_gb_per_s: 12.5\n") == replace(like, source=source)
    assert described("like: h100\nlaunch_us: 0").launch_us == 0
    # Network cards go with the size of a node.
    assert described("like: h100\nnode_size: 4\n").network_gb_per_s == 50
    assert described("like: h100\nnode_size: 4\nnetwork_cards: 1\n").network_gb_per_s == 12.5


@pytest.mark.parametrize("name", device_table())
@pytest.mark.parametrize("factor", [1000, 1 / 1000])
@pytest.mark.parametrize("in_full", [False, True])
def test_a_unit_wrong_by_a_thousand_is_refused_in_every_field(name, factor, in_full):
    numbers = {key: value for key, value in asdict(find_device(name)).items() if isinstance(value, int | float)}
    right = {"memory_gib": None} | numbers if in_full else {"like": name}
    device_of("gpu", right, find_device, "here")
    for field in numbers.keys() - {"node_size", "network_cards", "multiprocessors"}:
        with pytest.raises(ValueError, match=f"here: .*`{field}="):
            device_of("gpu", right | {field: numbers[field] * factor}, find_device, "here")


LIKE_H100 = {
    "bf16_tflop: 3": "has no `bf16_tflop`. Did you mean `bf16_tflops`",
    "memory_gib: 80GB": "`memory_gib=80GB` must be a number, in the unit",
    "node_size: 7.5": "`node_size=7.5` must be a whole number",
    "memory_gib: true": "must be a number",
    "aliases: x": "must be a list of names",
    "name: 5": "`name=5` must be a string",
    "bf16_tflops: 989400": "`bf16_tflops=989400` is not between .* divide by 1,000",
    "bf16_tflops: 989400000000000": r"divide by 10\^12",
    "bf16_tflops: 0.9894\ntf32_tflops: 0.4\nfp32_tflops: 0.1\nfp16_tflops: 0.9": "multiply by",
    "memory_gib: 85899345920": r"divide by 2\^30",
    "memory_gb_per_s: 3.35": "`memory_gb_per_s=3.35` is not .*multiply by 1,000",
    "link_gb_per_s: 3600": "`link_gb_per_s=3600` is faster than the memory.*8 Gb/s",
    "matmul_efficiency: 40": "`matmul_efficiency=40` is not between 0.005 and 1",
    "link_latency_us: -1": "`link_latency_us=-1` is not between",
    "fp32_tflops: 1979": "`fp32_tflops=1979` is above the 16-bit peak, 989.4",
    "link_gb_per_s: 0.45": "1,000 times below the 450 of `h100`.*multiply by 1,000.*without `like`",
}
MISTAKES = {f"like: h100\n{text}": message for text, message in LIKE_H100.items()} | {
    "like: v100": "`gpu_type=v100` may be any of",
    "bf16_tflops: 400": "has no `fp16_tflops`",
    "like: cpu\nbf16_tflops: 50": "`bf16_tflops=50` is 500 times above the 0.1 of `cpu`.*divide by 1,000",
    OWN + "message_gb_per_s: 0.2": "ratio of `message_gb_per_s=0.2` to `link_gb_per_s=200`, 0.001",
    OWN.replace("fp16_tflops: 400", "fp16_tflops: 0.4"): "ratio of `fp16_tflops=0.4` to `bf16_tflops=400`",
    OWN.replace("s: 1600", "s: 300").replace("s: 25", "s: 900"): "`node_link_gb_per_s=900` is faster",
    "- h100": "must have `key: value` lines",
    "like: [": "is not valid YAML",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes_in_files_are_sentences(described, text):
    with pytest.raises(ValueError, match=MISTAKES[text]):
        described(text)
    with pytest.raises(ValueError, match="`gpu_spec=none.yaml` can't be read: No such file"):
        device_from("h100", "none.yaml")
