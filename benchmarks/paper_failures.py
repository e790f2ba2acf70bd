"""What Oobleck's evaluation has in print (dissertation, chapter 2), and the constants of its authors' simulator."""

from __future__ import annotations

from dataclasses import dataclass

SYSTEMS = ("Oobleck", "Varuna", "Bamboo")
EVERY_S = {"6h": 21600.0, "1h": 3600.0, "10m": 601.2}
"""Time between two losses in the traces with these names."""


@dataclass(frozen=True)
class Workload:
    """
    A row of table 2.1, with what the text does not say.

    Args:
        hidden_size, num_layers, num_heads (`int`): As the models' papers have them.
        seq_len, vocab_size (`int`): The model's own: no length is in print.
        batch (`int`): Samples of a step.
        microbatch (`int`): Samples of a microbatch under Oobleck and Varuna.
        bamboo_microbatch (`int`): The same under Bamboo; 1 where it did not run.
        simulator_batch (`int`): Samples of a step in the authors' simulator.
        save_s, restart_s (`float`): Seconds of Varuna's checkpoint and of its new start in that simulator.
        throughput (`dict[str, tuple[float, ...]]`):
            System -> samples per second at 6h, 1h and 10m (table 2.2); without those that did not run.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    seq_len: int
    vocab_size: int
    batch: int
    microbatch: int
    bamboo_microbatch: int
    simulator_batch: int
    save_s: float
    restart_s: float
    throughput: dict[str, tuple[float, ...]]


# In the simulator, a new start is the time of its own rendezvous and 10 s for all nodes.
WORKLOADS = {
    "BERT-Large": Workload(
        *(1024, 24, 16, 512, 30522),
        *(8192, 32, 4, 8192, 15.8, 86.0),
        {"Oobleck": (287.10, 286.28, 282.11), "Varuna": (260.11, 246.03, 173.52), "Bamboo": (77.04, 75.60, 69.84)},
    ),
    "GPT-2": Workload(
        *(1024, 24, 16, 1024, 50257),
        *(8192, 32, 1, 1024, 11.5, 93.0),
        {"Oobleck": (85.59, 85.42, 84.80), "Varuna": (86.51, 85.17, 76.39), "Bamboo": (17.47, 17.13, 16.01)},
    ),
    "GPT-3 Medium": Workload(
        *(1024, 24, 16, 2048, 50257),
        *(8192, 16, 1, 819, 11.2, 88.7),
        {"Oobleck": (29.30, 29.21, 28.70), "Varuna": (29.50, 28.49, 20.19)},
    ),
    "GPT-3 2.7b": Workload(
        *(2560, 32, 32, 2048, 50257),
        *(1024, 2, 1, 512, 50.0, 525.0),
        {"Oobleck": (7.29, 7.23, 6.89), "Varuna": (7.27, 6.53, 1.76)},
    ),
    "GPT-3 6.7b": Workload(
        *(4096, 32, 32, 2048, 50257),
        *(1024, 2, 1, 1024, 120.0, 711.0),
        {"Oobleck": (4.33, 4.22, 3.55), "Varuna": (4.14, 2.69, 0.26)},
    ),
}

NO_CHECKPOINT = {"BERT-Large": (275.88, 273.85, 264.16), "GPT-3 6.7b": (4.61, 4.29, 1.98)}
"""Table 2.4: Varuna whose checkpoints take no time, every 2 steps instead of 10."""

LAYERS = (24, 32, 64, 96)
PLANNING_S = {
    (8, 1): (0.28, 0.71, 9.65, 68.50),
    (8, 4): (0.41, 1.15, 11.58, 74.56),
    (8, 8): (0.54, 1.50, 20.98, 109.76),
    (16, 1): (3.37, 7.45, 66.35, 540.36),
    (16, 4): (4.56, 10.41, 108.10, 649.67),
    (16, 8): (4.90, 11.78, 176.04, 1213.63),
    (24, 1): (11.35, 30.11, 262.47, 1477.54),
    (24, 4): (14.78, 45.80, 472.53, 2153.84),
    (24, 8): (15.59, 49.25, 520.08, 3297.92),
}
"""Table 2.3: nodes and GPUs of a node -> seconds for one template, by number of layers."""
