"""Devices: found by name, recognised as drivers report them, described in a file, and their links."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from hf_mmparallel.cost import device_from, device_table, find_device, recognize_device
from hf_mmparallel.cost.device_table import device_of

GIB = 2**30
# What `torch.cuda.get_device_properties` reports: name, GiB of memory, multiprocessors -> the device, its GiB.
REPORTED = [
    ("NVIDIA H100 80GB HBM3", 79.11, 132, "h100"),
    ("NVIDIA H100 80GB HBM2e", 79.11, 132, "h100"),
    ("NVIDIA H100 PCIe", 79.18, 114, "h100-pcie"),
    ("NVIDIA H100 NVL", 93.1, 132, "h100-nvl"),
    ("NVIDIA H200", 139.8, 132, "h200"),
    ("NVIDIA H200 NVL", 139.8, 132, "h200-nvl"),
    ("NVIDIA H20", 95.0, 78, "h20"),
    ("NVIDIA H20-3e", 139.8, 78, "h20-3e"),
    ("NVIDIA H800", 79.35, 132, "h800"),
    ("NVIDIA H800 PCIe", 79.11, 114, "h800-pcie"),
    ("NVIDIA GH200 480GB", 94.5, 132, "gh200"),
    ("NVIDIA A100-SXM4-80GB", 79.15, 108, "a100"),
    ("A100-SXM4-80GB", 79.15, 108, "a100"),
    ("NVIDIA A100-SXM4-40GB", 39.39, 108, "a100-sxm-40gb"),
    ("A100-SXM4-40GB", 39.59, 108, "a100-sxm-40gb"),
    ("NVIDIA A100 80GB PCIe", 79.14, 108, "a100-pcie-80gb"),
    ("NVIDIA A100-PCIE-40GB", 39.39, 108, "a100-pcie-40gb"),
    ("NVIDIA A800-SXM4-80GB", 79.32, 108, "a800"),
    ("NVIDIA A800 80GB PCIe", 79.32, 108, "a800-pcie"),
    ("NVIDIA A30", 23.5, 56, "a30"),
    ("NVIDIA B200", 178.35, 148, "b200"),
    ("NVIDIA GB200", 184.31, 152, "gb200"),
    ("NVIDIA B300 SXM6 AC", 267.69, 148, "b300"),
    ("NVIDIA GB300", 276.5, 152, "gb300"),
    ("NVIDIA L40S", 44.39, 142, "l40s"),
    ("NVIDIA L40", 44.39, 142, "l40"),
    ("NVIDIA L4", 22.03, 58, "l4"),
    ("NVIDIA A10", 22.06, 72, "a10"),
    ("NVIDIA A10G", 22.06, 80, "a10g"),
    ("NVIDIA A40", 44.42, 84, "a40"),
    ("NVIDIA RTX A6000", 47.54, 84, "a6000"),
    ("RTX A6000", 47.54, 84, "a6000"),
    ("NVIDIA RTX 6000 Ada Generation", 47.4, 142, "rtx-6000-ada"),
    ("NVIDIA GeForce RTX 3090", 23.68, 82, "rtx-3090"),
    ("GeForce RTX 3090", 23.68, 82, "rtx-3090"),
    ("NVIDIA GeForce RTX 4090", 23.53, 128, "rtx-4090"),
    ("NVIDIA GeForce RTX 5090", 31.36, 170, "rtx-5090"),
    ("Tesla V100-SXM2-16GB", 15.77, 80, "v100-sxm2-16gb"),
    ("Tesla V100-SXM2-32GB", 31.73, 80, "v100-sxm2-32gb"),
    ("Tesla V100-SXM3-32GB", 31.73, 80, "v100-sxm2-32gb"),
    ("Tesla V100-PCIE-16GB", 15.77, 80, "v100-pcie-16gb"),
    ("Tesla V100-PCIE-32GB", 31.73, 80, "v100-pcie-32gb"),
    ("Tesla T4", 14.75, 40, "t4"),
    ("AMD Instinct MI250X/MI250", 63.98, 104, "mi250"),
    ("AMD Instinct MI250X / MI250", 63.98, 110, "mi250x"),
    ("AMD Instinct MI300X", 191.98, 304, "mi300x"),
    ("AMD Instinct MI300X VF", 191.69, 304, "mi300x"),
    ("AMD Instinct MI325X", 255.98, 304, "mi325x"),
    ("NVIDIA GeForce RTX 4090", 47.99, 128, "rtx-4090"),  # with more memory soldered on
]
UNKNOWN = [
    "NVIDIA RTX A1000 Laptop GPU",
    "NVIDIA RTX A4000",
    "NVIDIA RTX A400",
    "NVIDIA RTX 4000 Ada Generation",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA GeForce RTX 5090 D",
    "Quadro RTX 6000",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "NVIDIA H100 64GB HBM3",
    "NVIDIA H200 NVL Max",
    "NVIDIA A100X",
    "NVIDIA A100-SXM-64GB",
    "GRID A100X-40C",
    "NVIDIA A2",
    "NVIDIA A16",
    "NVIDIA L20",
    "NVIDIA L2",
    "NVIDIA GB10",
    "NVIDIA CMP 170HX",
    "Tesla V100-FHHL-16GB",
    "AMD Radeon Graphics",
    "AMD Instinct MI210",
    "AMD Instinct MI300A",
    "Orin",
    "",
]


@pytest.mark.parametrize(("name", "gib", "units", "expected"), REPORTED)
def test_reported_devices_are_recognized_with_their_own_memory(name, gib, units, expected):
    device = recognize_device(name, int(gib * GIB), units)
    assert device is not None
    assert device == replace(find_device(expected), memory_gib=device.memory_gib)
    assert device.memory_gib == pytest.approx(gib, abs=1e-6)


def test_an_h20_is_told_by_its_memory():
    """Drivers call that with 141 GB the same."""
    large = recognize_device("NVIDIA H20", int(139.8 * GIB), 78)
    assert large is not None and (large.name, large.memory_gb_per_s) == ("h20-3e", 4800)
    small = recognize_device("NVIDIA H20", int(95 * GIB), 78)
    assert small is not None and (small.name, small.memory_gb_per_s) == ("h20", 4000)
    none_fits = recognize_device("NVIDIA H20", 120 * GIB, 78)
    assert none_fits is not None and none_fits == replace(find_device("h20"), memory_gib=120)


@pytest.mark.parametrize("name", UNKNOWN)
def test_devices_of_another_name_are_unknown(name):
    assert recognize_device(name, 40 * GIB, 108) is None


def test_every_device_of_the_table_is_among_those_that_drivers_report():
    assert {key for *_, key in REPORTED} == set(device_table()) - {"cpu"}


@pytest.mark.parametrize(("name", "gib", "units", "expected"), REPORTED[:-1])
def test_memory_of_the_table_is_what_devices_report(name, gib, units, expected):
    assert find_device(expected).memory_gib == pytest.approx(gib, rel=0.01)


class TestParts:
    @pytest.mark.parametrize(
        ("name", "gib", "units", "whole"),
        [
            ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4.75, 14, "a100-sxm-40gb"),
            ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 39.25, 42, "a100"),
            ("NVIDIA H100 80GB HBM3 MIG 1g.10gb+me", 9.5, 16, "h100"),
            ("NVIDIA H100 80GB HBM3 MIG 2g.20gb", 19.6, 32, "h100"),
            ("AMD Instinct MI300X", 23.98, 38, "mi300x"),  # one of eight partitions
        ],
    )
    def test_a_part_has_its_share(self, name, gib, units, whole):
        part, device = recognize_device(name, int(gib * GIB), units), find_device(whole)
        assert part is not None and device.multiprocessors is not None and device.memory_gib is not None
        share = units / device.multiprocessors
        for dtype in ("bfloat16", "float16", "tf32", "float32"):
            peak = device.computing_in(dtype).peak_tflops
            assert part.computing_in(dtype).peak_tflops == pytest.approx(share * peak)
        assert part.memory_gib == pytest.approx(gib, abs=1e-6)
        assert part.memory_gb_per_s == pytest.approx(device.memory_gb_per_s * gib / device.memory_gib, rel=1e-6)
        assert part.link_gb_per_s < device.link_gb_per_s
        assert whole in part.name and str(units) in part.name

    def test_a_part_with_all_multiprocessors_reaches_others_through_the_host(self):
        part = recognize_device("NVIDIA H100 80GB HBM3 MIG 7g.80gb", 79 * GIB, 132)
        assert part is not None and part.bf16_tflops == find_device("h100").bf16_tflops and part.link_gb_per_s == 16


def test_a_chip_with_a_few_multiprocessors_less_is_no_part():
    assert recognize_device("NVIDIA GB300", 276 * GIB, 148) == replace(find_device("gb300"), memory_gib=276)


class TestNames:
    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("h100", "h100"),
            ("H100", "h100"),
            ("a100", "a100"),
            ("A100-80GB", "a100"),
            ("a100-40gb", "a100-sxm-40gb"),
            ("rtx4090", "rtx-4090"),
            ("RTX 6000 Ada", "rtx-6000-ada"),
            ("a6000", "a6000"),
            ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ],
    )
    def test_names_in_any_spelling(self, name, expected):
        assert find_device(name).name == expected

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("v100", r"`gpu_type=v100` may be any of .*`v100-pcie-16gb`.*`v100-sxm2-32gb`. Name one"),
            ("h100-", r"may be any of `h100`, `h100-nvl`, `h100-pcie`"),
            ("rtx", r"may be any of .*`rtx-4090`"),
            ("mi250x/mi250", r"may be any of `mi250`, `mi250x`"),
            ("h10", r"is not in the table of devices. Did you mean `h100`.*gpu_spec"),
            ("v100-32gb", r"may be any of `v100-pcie-32gb`, `v100-sxm2-32gb`"),
            ("h100-96gb", r"is not in the table of devices. Did you mean `gh200`"),
            ("h100-30gb", r"is not in the table of devices. Known: h100"),
            ("", r"is not in the table of devices. Known: h100"),
        ],
    )
    def test_ambiguous_and_unknown_names(self, name, message):
        with pytest.raises(ValueError, match=message):
            find_device(name)


class TestPeaks:
    def test_each_dtype_has_its_own(self):
        h100, v100 = find_device("h100"), find_device("v100-sxm2-32gb")
        assert h100.peak_tflops == 989.4 and h100.computing_in("float32").peak_tflops == 66.9
        assert h100.computing_in("tf32").flops_per_ms == pytest.approx(494.7e9 * h100.matmul_efficiency)
        assert v100.computing_in("float16").peak_tflops == 125 and v100.peak_tflops == 15.7

    @pytest.mark.parametrize("device", device_table().values(), ids=str)
    def test_of_the_table_are_dense_and_ordered(self, device):
        assert device.fp32_tflops <= device.tf32_tflops <= max(device.bf16_tflops, device.fp16_tflops)
        assert device.source


class TestLinks:
    def test_a_collective_over_nodes_uses_the_cards_of_all_its_members(self):
        h100 = find_device("h100")
        assert h100.link_bytes_per_ms(range(8)) == 450e6
        for members in (1, 2, 4, 8):  # of each of two nodes
            ranks = [node * 8 + rank for node in range(2) for rank in range(members)]
            assert h100.link_bytes_per_ms(ranks) == pytest.approx(min(450, 50 * members) * 1e6)
        assert h100.link_bytes_per_ms(range(64)) == 400e6
        assert h100.link_bytes_per_ms(range(0, 64, 8)) == 50e6

    def test_the_node_with_the_fewest_members_decides(self):
        assert find_device("h100").link_bytes_per_ms([4, 5, 6, 7, 8]) == 50e6

    def test_cards_are_shared_by_the_devices_of_a_node(self):
        a40 = find_device("a40")  # one card of 25 GB/s for four
        assert a40.link_bytes_per_ms([0, 4]) == 6.25e6
        assert a40.link_bytes_per_ms(range(8)) == 25e6

    def test_a_network_is_never_faster_than_the_links_of_a_node(self):
        pcie = replace(find_device("h100"), link_gb_per_s=64)
        assert pcie.link_bytes_per_ms(range(16)) == 64e6

    def test_a_message_has_the_share_of_one_device(self):
        h100 = find_device("h100")
        assert h100.message_bytes_per_ms(range(16)) == 50e6
        assert h100.message_bytes_per_ms(range(8)) == 450e6
        assert find_device("a40").message_bytes_per_ms([0, 4]) == 6.25e6

    def test_latency_between_nodes_is_another(self):
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


class TestFiles:
    def test_a_device_of_ones_own(self, tmp_path):
        path = tmp_path / "gpu.yaml"
        path.write_text(OWN)
        device = device_from("h100", str(path))
        assert device.name == "my-gpu" and device.peak_tflops == 400 and device.memory_gib == 63.5
        assert device.network_gb_per_s == 12.5 and device.matmul_efficiency == 0.76

    def test_a_device_like_another(self, tmp_path):
        path = tmp_path / "slow-h100.yaml"
        path.write_text("like: h100\nnode_link_gb_per_s: 12.5\n")
        expected = replace(
            find_device("h100"), name="slow-h100", node_link_gb_per_s=12.5, aliases=(), source=f"`{path}`"
        )
        assert device_from("h200", str(path)) == expected

    @pytest.mark.parametrize("name", device_table())
    @pytest.mark.parametrize("factor", [1000, 1 / 1000])
    @pytest.mark.parametrize("in_full", [False, True])
    def test_a_unit_wrong_by_a_thousand_is_refused_in_every_field(self, name, factor, in_full):
        numbers = {key: value for key, value in asdict(find_device(name)).items() if isinstance(value, int | float)}
        right = {"memory_gib": None} | numbers if in_full else {"like": name}
        device_of("gpu", right, find_device, "here")
        for field in numbers.keys() - {"node_size", "network_cards", "multiprocessors"}:
            with pytest.raises(ValueError, match=f"here: .*`{field}="):
                device_of("gpu", right | {field: numbers[field] * factor}, find_device, "here")

    def test_zero_leaves_launches_out(self):
        assert device_of("gpu", {"like": "h100", "launch_us": 0}, find_device, "here").launch_us == 0

    def test_network_cards_go_with_the_size_of_a_node(self, tmp_path):
        path = tmp_path / "gpu.yaml"
        path.write_text("like: h100\nnode_size: 4\n")
        assert device_from("h200", str(path)).network_gb_per_s == 50
        path.write_text("like: h100\nnode_size: 4\nnetwork_cards: 1\n")
        assert device_from("h200", str(path)).network_gb_per_s == 12.5

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("like: h100\nbf16_tflop: 3", r"has no `bf16_tflop`. Did you mean `bf16_tflops`"),
            ("like: v100", r"`gpu_type=v100` may be any of"),
            ("bf16_tflops: 400", r"has no `fp16_tflops`"),
            ("like: h100\nmemory_gib: 80GB", r"`memory_gib=80GB` must be a number, in the unit of the field's name"),
            ("like: h100\nnode_size: 7.5", r"`node_size=7.5` must be a whole number"),
            ("like: h100\nmemory_gib: true", r"must be a number"),
            ("like: h100\nbf16_tflops: null", r"must be a number"),
            ("like: h100\naliases: x", r"must be a list of names"),
            ("like: h100\nbf16_tflops: 989400", r"`bf16_tflops=989400` is not between .* divide by 1,000"),
            ("like: h100\nbf16_tflops: 989400000000000", r"divide by 10\^12"),
            ("like: h100\nbf16_tflops: 0.9894\ntf32_tflops: 0.4\nfp32_tflops: 0.1\nfp16_tflops: 0.9", r"multiply by"),
            ("like: h100\nmemory_gib: 85899345920", r"`memory_gib=85899345920` is not .*divide by 2\^30"),
            ("like: h100\nmemory_gib: 81559", r"divide by 1,000"),
            ("like: h100\nmemory_gb_per_s: 3.35", r"`memory_gb_per_s=3.35` is not .*multiply by 1,000"),
            ("like: h100\nlink_gb_per_s: 3600", r"`link_gb_per_s=3600` is faster than the memory.*8 Gb/s are 1 GB/s"),
            ("like: h100\nlink_gb_per_s: 450000", r"divide by 1,000"),
            ("like: h100\nnode_link_gb_per_s: 50000", r"divide by 1,000"),
            ("like: h100\nmatmul_efficiency: 40", r"`matmul_efficiency=40` is not between 0.005 and 1"),
            ("like: h100\nlink_latency_us: -1", r"`link_latency_us=-1` is not between"),
            ("like: h100\nfp32_tflops: 1979", r"`fp32_tflops=1979` is above the 16-bit peak, 989.4"),
            (
                "like: h100\nlink_gb_per_s: 0.45",
                r"1,000 times below the 450 of `h100`.*multiply by 1,000.*without `like`",
            ),
            ("like: h100\nfp16_tflops: 0.9894", r"`fp16_tflops=0.9894` is 1,000 times below the 989.4 of `h100`"),
            ("like: cpu\nbf16_tflops: 50", r"`bf16_tflops=50` is 500 times above the 0.1 of `cpu`.*divide by 1,000"),
            ("like: h100\nlaunch_us: 8000", r"`launch_us=8000` is not between 0.3 and 1000.*divide by 1,000"),
            ("like: h100\nlink_latency_us: 0.005", r"`link_latency_us=0.005` is not between.*multiply by 1,000"),
            (OWN + "message_gb_per_s: 0.2", r"ratio of `message_gb_per_s=0.2` to `link_gb_per_s=200`, 0.001, is not"),
            (OWN.replace("fp16_tflops: 400", "fp16_tflops: 0.4"), r"ratio of `fp16_tflops=0.4` to `bf16_tflops=400`"),
            (
                OWN.replace("_per_s: 1600", "_per_s: 300").replace("_per_s: 25", "_per_s: 900"),
                r"`node_link_gb_per_s=900` is faster",
            ),
            ("- h100", r"must have `key: value` lines"),
            ("like: [", r"is not valid YAML"),
            ("name: 5\nlike: h100", r"`name=5` must be a string"),
        ],
    )
    def test_mistakes_are_sentences(self, tmp_path, text, message):
        path = tmp_path / "gpu.yaml"
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            device_from("h100", str(path))

    def test_a_missing_file(self):
        with pytest.raises(ValueError, match=r"`gpu_spec=none.yaml` can't be read: No such file"):
            device_from("h100", "none.yaml")
