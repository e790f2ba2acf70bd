"""Training runs in which processes die and join, compared with the stock Trainer on one process."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LlavaForConditionalGeneration, TrainerCallback, TrainerState

try:
    from benchmarks.chaos_worker import (
        BEST,
        HOST_WAYS,
        OWN_RATE,
        POINTS,
        MovingAverage,
        Samples,
        arguments_of,
        collate,
        make_model,
        with_adapter,
    )
except ImportError:  # run as a script
    from chaos_worker import (
        BEST,
        HOST_WAYS,
        OWN_RATE,
        POINTS,
        MovingAverage,
        Samples,
        arguments_of,
        collate,
        make_model,
        with_adapter,
    )

ROOT = Path(__file__).resolve().parent.parent
WORKER = ROOT / "benchmarks" / "chaos_worker.py"
CONFIG = ROOT / "examples" / "accelerate_configs" / "one_host_4cpu.yaml"
TOLERANCE = 2e-5
STEPS = 12
RECOVERY = ("copying", "laying_out")
JOINING = (*RECOVERY, "told")


@dataclass(frozen=True)
class Death:
    """
    How a process dies, or its whole host.

    Args:
        member (`int`): The process.
        step (`int`): The step in which it dies, 0 before it trains; the next time that it comes to the point.
        point (`str`): One of [`POINTS`].
        way (`str`):
            `"kill"` (SIGKILL), `"stop"` (SIGSTOP), `"raise"` (an exception), `"exit"`, `"term"` (SIGTERM, on which it
            leaves), `"hang"` (it lives, and waits for a message that never comes) or `"unplug"` (it lives, and its
            connections end); of all processes of its host
            `"cut"` (it waits for the host to be cut off), `"kill_host"` (SIGKILL to these and their launcher) or
            `"term_launcher"` (SIGTERM to the launcher).
    """

    member: int
    step: int
    point: str
    way: str

    def __str__(self) -> str:
        return f"{self.member}:{self.step}:{self.point}:{self.way}"


@dataclass(frozen=True)
class Join:
    """
    How processes join.

    Args:
        step (`int`): The step in which the others wait until these want to join.
        processes (`int`, *optional*, defaults to 1): Their number; one launcher starts them.
    """

    step: int
    processes: int = 1

    def __str__(self) -> str:
        return f"{self.step}:{self.processes}"


@dataclass(frozen=True)
class Layout:
    """A layout of the tiny model, the number of its ranks, how many are lost together, and their launchers."""

    ranks: int
    modules: dict[str, Any]
    ranks_per_node: int = 1
    hosts: int = 1

    def node_of(self, member: int) -> int:
        """The node of a process."""
        return member // self.ranks_per_node

    def members_of_hosts(self, joins: Sequence[Join] = ()) -> list[range]:
        """The processes of each launcher: those of the start, and then those that join."""
        size, given = self.ranks // self.hosts, self.ranks
        members = [range(first, first + size) for first in range(0, self.ranks, size)]
        for join in joins:  # as `take_place` numbers them
            first = -(-given // join.processes) * join.processes
            members.append(range(first, first + join.processes))
            given += 2 * join.processes
        return members

    def flags_of_hosts(self) -> list[list[str]]:
        """The flags of each launcher of the start, all of them on this machine."""
        flags = ["--num_processes", str(self.ranks), "--num_machines", str(self.hosts)]
        if self.hosts > 1:
            flags += ["--main_process_ip", "127.0.0.1", "--main_process_port", str(_free_port())]
        return [[*flags, "--machine_rank", str(host)] for host in range(self.hosts)]


def _free_port() -> int:
    """A port that nobody listens at, and that the system gives to nobody who asks for any."""
    while True:
        port = random.randrange(20_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def _copies(*replicas: Sequence[tuple[int, int, Sequence[int]]]) -> dict[str, Any]:
    """A module with a replica for each list of stages: first layer, one past the last, and the tp group."""
    stages = [[{"layers": [a, b], "ranks": [list(ranks)]} for a, b, ranks in replica] for replica in replicas]
    return {"replicas": stages}


LAYOUTS = {
    "two copies": Layout(2, {"vision": {"dp_size": 2}, "language_model": {"dp_size": 2, "colocate_with": "vision"}}),
    "three copies": Layout(3, {"vision": {"dp_size": 3}, "language_model": {"dp_size": 3, "colocate_with": "vision"}}),
    "copies": Layout(4, {"vision": {"dp_size": 4}, "language_model": {"dp_size": 4, "colocate_with": "vision"}}),
    "four pairs": Layout(8, {"vision": {"dp_size": 4}, "language_model": {"dp_size": 4}}),
    "own ranks": Layout(4, {"vision": {"dp_size": 2}, "language_model": {"dp_size": 2}}),
    "pipelines": Layout(6, {"vision": {"dp_size": 2}, "language_model": {"dp_size": 2, "pp_size": 2}}),
    "pipelines in bfloat16": Layout(
        6,
        {
            "vision": {"dp_size": 2, "master_weights": True},
            "language_model": {"dp_size": 2, "pp_size": 2, "master_weights": True},
        },
    ),
    "long pipelines": Layout(8, {"vision": {"dp_size": 2}, "language_model": {"dp_size": 2, "pp_size": 3}}),
    "tensor parallel": Layout(
        8, {"vision": {"dp_size": 2, "tp_size": 2}, "language_model": {"dp_size": 2, "tp_size": 2}}, 2
    ),
    "shared state": Layout(  # of two copies on the first node, and of two, in two stages, on the others
        6,
        {
            "modules": {
                "vision": _copies(*([(0, 4, (rank,))] for rank in range(4)))
                | {"sharding": {"zero_stage": 2, "shard_size": 2}},
                "language_model": _copies(
                    *([(0, 4, (rank,))] for rank in (0, 1)),
                    *([(0, 1, (rank,)), (1, 4, (rank + 2,))] for rank in (2, 3)),
                )
                | {"sharding": {"zero_stage": 3, "shard_size": 2}},
            }
        },
        2,
    ),
    "unlike cuts": Layout(
        8,
        {
            "modules": {
                "vision": _copies([(0, 4, (0, 1))], [(0, 4, (4,))]),
                "language_model": _copies([(0, 4, (2, 3))], [(0, 1, (5,)), (1, 2, (6,)), (2, 4, (7,))]),
            }
        },
        2,
    ),
}


@dataclass
class ChaosRun:
    """
    What a run with deaths and joins left.

    Args:
        returncode (`int`): Of the first launcher; `None` if it had to be killed.
        output (`str`): What all launchers printed, one after the other.
        results (`dict[int, dict]`): By member: what those that lived to the end wrote.
        strikes (`list[dict]`): The deaths that took place, with their times; one for each process of a lost host.
        seconds (`float`): Duration.
        others (`list[int | None]`): The same as `returncode` of the other hosts, and then of those that joined.
    """

    returncode: int | None
    output: str
    results: dict[int, dict[str, Any]]
    strikes: list[dict[str, Any]]
    seconds: float
    others: list[int | None] = field(default_factory=list)

    @classmethod
    def of(
        cls, folder: Path, returncode: int | None, output: str, seconds: float, others: Sequence[int | None] = ()
    ) -> ChaosRun:
        """What is in the folder of a run, and in what was printed."""
        told = [json.loads(line) for line in output.splitlines() if line.startswith('{"dies"')]
        strikes = {}  # a process that has died before is none of those that a lost host takes with it
        for strike in sorted(told, key=lambda strike: strike["time"]):
            strikes.setdefault(strike["dies"], strike)
        results = {
            int(path.stem.partition("-")[2]): torch.load(path, weights_only=False)
            for path in folder.glob("result-*.pt")
        }
        return cls(returncode, output, results, [*strikes.values()], seconds, [*others])

    @property
    def joiners(self) -> set[int]:
        """Processes that came as far as to wait for the others to let them in."""
        return set(map(int, re.findall(r"Process (\d+) waits to join the training", self.output)))

    @property
    def events(self) -> list[dict[str, Any]]:
        """The recoveries, as the rank that is the first at the end saw them."""
        return min(self.results.values(), key=lambda result: result["rank"])["events"]


@dataclass
class Reference:
    """The run of the stock Trainer on one process."""

    logs: list[dict[str, float]] = field(default_factory=list)
    steps: list[dict[str, torch.Tensor]] = field(default_factory=list)  # the weights before each step, and at the end
    averages: dict[str, torch.Tensor] = field(default_factory=dict)
    tolerance: float = TOLERANCE

    @classmethod
    def of_run(cls, run: ChaosRun, tolerance: float = TOLERANCE) -> Reference:
        """A run under a plan, as what others are compared with."""
        first = min(run.results.values(), key=lambda result: result["rank"])
        return cls(first["logs"], [first["weights"]], {}, tolerance)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """At the end."""
        return self.steps[-1]


class _Weights(TrainerCallback):
    """The weights before each step, and at the end."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.steps.append({name: value.clone() for name, value in model.state_dict().items()})

    on_train_end = on_step_begin


def stock_run(
    steps: int = STEPS,
    adapter: bool = False,
    best: bool = False,
    checkpoint: Path | None = None,
    own_rate: bool = False,
) -> Reference:
    """
    The stock Trainer on this process, maybe with LoRA, with the best model at the end, from a checkpoint on, or with
    [`OWN_RATE`] of the encoder.
    """
    from transformers import Trainer, TrainingArguments

    from hf_mmparallel import MultimodalParallelTrainer

    with tempfile.TemporaryDirectory() as folder:
        given = arguments_of(Path(folder), steps) | (BEST if best else {})
        args = TrainingArguments(per_device_train_batch_size=8, **given)
        held_out = [Samples()[index] for index in range(7)]
        model, weights = make_model(), _Weights()
        callbacks = [weights, MovingAverage()]
        # transformers itself does not read the weights that it saves of models whose keys have other names on the Hub
        kind = Trainer if checkpoint is None else MultimodalParallelTrainer
        model = with_adapter(model) if adapter else model
        trainer = kind(model, args, collate, Samples(), held_out, callbacks=callbacks)
        if own_rate:
            _give_own_rate(trainer.create_optimizer(), model)
        trainer.train(None if checkpoint is None else str(checkpoint))
        return Reference(trainer.state.log_history, weights.steps, MovingAverage.of(trainer))


def _give_own_rate(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    """Puts the encoder and its projector into groups of their own."""
    own = {id(p) for name, p in model.named_parameters() if "vision_tower" in name or "projector" in name}
    for group, decay in zip(list(optimizer.param_groups), (OWN_RATE["weight_decay"], 0.0), strict=True):
        params = [p for p in group["params"] if id(p) in own]
        group["params"] = [p for p in group["params"] if id(p) not in own]
        settings = {"lr": OWN_RATE["learning_rate"], "weight_decay": decay}
        optimizer.add_param_group({**group, "params": params, **settings})


def checkpoint_faults(folder: Path, output: str, reference: Reference | None, adapter: bool = False) -> list[str]:
    """
    What is wrong with the checkpoints of a run: one that is missing, can't be opened, or from which the stock Trainer
    does not go on with the weights and the losses of the reference, if there is one.
    """
    found = [] if list(folder.glob("checkpoint-*")) else ["there is no checkpoint"]
    for name in dict.fromkeys(re.findall(r"is saved in `(checkpoint-\d+)`", output)):
        if not (folder / name).is_dir():
            found.append(f"`{name}` is said to be there and is not")
    for path in sorted(folder.glob("checkpoint-*")):
        if not adapter:
            LlavaForConditionalGeneration.from_pretrained(path)
        TrainerState.load_from_json(str(path / "trainer_state.json"))
        if reference is None:
            continue
        step = int(path.name.rpartition("-")[2])
        resumed = stock_run(adapter=adapter, checkpoint=path)
        compared = {"at": (resumed.steps[0], reference.steps[step])}
        if step + 1 < len(reference.steps):  # transformers does one step more than it was asked for after the last one
            compared["after"] = resumed.weights, reference.weights
            found += [f"`{path.name}`: {text}" for text in _unlike(resumed.logs, reference, ("loss", "grad_norm"))]
        for when, (own, wanted) in compared.items():
            worst = max(float((value - wanted[name]).abs().max()) for name, value in own.items())
            if not worst <= reference.tolerance:
                found.append(f"weights differ by {worst:.1e} {when} `{path.name}`")
    return found


def chaos_run(
    layout: Layout,
    deaths: Sequence[Death],
    folder: Path,
    timeout_s: float = 300,
    options: Sequence[str] = (),
    joins: Sequence[Join] = (),
    flags: Sequence[str] = (),
) -> ChaosRun:
    """
    Launches a run in which processes and hosts die, and others join.

    Args:
        layout ([`Layout`]): The layout.
        deaths (`Sequence[Death]`): Who dies.
        folder (`Path`): Empty folder of the run.
        timeout_s (`float`, *optional*, defaults to 300): Seconds after which all is killed.
        options (`Sequence[str]`, *optional*): Further options of the worker.
        joins (`Sequence[Join]`, *optional*): Who joins.
        flags (`Sequence[str]`, *optional*): Further flags of the launchers.
    """
    worker = worker_command(layout, deaths, folder, options, joins)
    start = time.monotonic()
    with contextlib.ExitStack() as stack:

        def launch(name: str, own: Sequence[str]) -> _Launcher:
            return stack.enter_context(_Launcher(folder / f"{name}.txt", [*own, *flags], worker))

        hosts = [launch(f"host-{host}", own) for host, own in enumerate(layout.flags_of_hosts())]
        later: dict[int, _Launcher] = {}
        while time.monotonic() - start < timeout_s and any(one.runs for one in (*hosts, *later.values())):
            time.sleep(0.05)
            for place, join in enumerate(joins):
                if place in later:
                    if not later[place].runs:
                        (folder / f"join-{place}.ended").touch()
                elif (address := _address_in(join.step, hosts)) is not None:
                    own = ["--join", address, "--num_processes", str(join.processes)]
                    later[place] = launch(f"join-{place}", own)
        seconds = time.monotonic() - start
    first, *others = [*hosts, *later.values()]
    text = "\n".join(one.output for one in (first, *others))
    return ChaosRun.of(folder, first.returncode, text, seconds, [one.returncode for one in others])


def _address_in(step: int, launchers: Sequence[_Launcher]) -> str | None:
    """The address at which others can join in a step; `None` until the processes wait for them."""
    output = "\n".join(one.output for one in launchers)
    found = re.search(r"more nodes join with `--join (\S+)`", output)
    return found[1] if found is not None and json.dumps({"awaits": step}) in output else None


def worker_command(
    layout: Layout,
    deaths: Sequence[Death],
    folder: Path,
    options: Sequence[str] = (),
    joins: Sequence[Join] = (),
) -> list[str]:
    """The script that a launcher starts, and its arguments; see [`chaos_run`]."""
    words = [str(WORKER), "--parallel", json.dumps(layout.modules), "--folder", str(folder), *options]
    words += ["--ranks_per_node", str(layout.ranks_per_node), "--steps", str(STEPS)]
    words += [word for death in deaths for word in ("--death", str(death))]
    return words + [word for join in joins for word in ("--join", str(join))]


class _Launcher:
    """
    A launcher of workers, killed with them at the end of a block if it still runs.

    Args:
        path (`Path`): File of what it prints.
        flags (`Sequence[str]`): Its own flags.
        worker (`Sequence[str]`): The script and its arguments.
    """

    def __init__(self, path: Path, flags: Sequence[str], worker: Sequence[str]):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        environment["GLOO_SOCKET_IFNAME"] = "lo"
        command = [sys.executable, "-m", "hf_mmparallel.cli.main", "launch", "--hang_timeout", "3"]
        command += ["--config_file", str(CONFIG), *flags, *worker]
        self._path = path
        with path.open("w") as output:
            self._process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.returncode: int | None = None

    def __enter__(self) -> _Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        """Kills the launcher and whatever it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    @property
    def runs(self) -> bool:
        """Whether it has not ended by itself yet."""
        self.returncode = self._process.poll()
        return self.returncode is None

    @property
    def output(self) -> str:
        """What it and its workers have printed so far."""
        return self._path.read_text(errors="replace")


def faults(run: ChaosRun, layout: Layout, reference: Reference) -> list[str]:
    """What is wrong with a run: a hang, a process too many or too few, another loss, norm, evaluation or weight."""
    if run.returncode is None:
        return ["it hung"]
    lost = {layout.node_of(strike["dies"]) for strike in run.strikes}
    left = {member for member in {*range(layout.ranks), *run.joiners} if layout.node_of(member) not in lost}
    found = [] if run.returncode == 0 else [f"exit code {run.returncode}"]
    killed = {strike["node"] for strike in run.strikes if strike["way"] == "kill_host"}
    for node, code in enumerate(run.others, start=1):
        if code != (-signal.SIGKILL if node in killed else 0):
            found.append(f"exit code {code} of launcher {node}" if code is not None else f"launcher {node} hung")
    if set(run.results) != left:
        found.append(f"processes {sorted(run.results)} came to the end, not {sorted(left)}")
    for member, result in run.results.items():
        for names in (("loss", "grad_norm"), ("eval_loss",)):
            found += [f"process {member}: {text}" for text in _unlike(result["logs"], reference, names)]
        for name, value in (result["weights"] or {}).items():
            difference = float((value - reference.weights[name]).abs().max())
            if difference > reference.tolerance:
                found.append(f"`{name}` differs by {difference:.1e}")
        for name, value in result["averages"].items() if reference.averages else ():
            difference = float((value - reference.averages[name]).abs().max())
            if difference > TOLERANCE:
                found.append(f"the average of `{name}` differs by {difference:.1e} on process {member}")
    if run.results and not any(result["weights"] for result in run.results.values()):
        found.append("nobody has the weights")
    return found


def _unlike(logs: list[dict[str, float]], reference: Reference, names: Sequence[str]) -> list[str]:
    """Where the numbers of a log differ."""
    mine = [[row[name] for name in names] for row in logs if names[0] in row]
    theirs = [[row[name] for name in names] for row in reference.logs if names[0] in row]
    if len(mine) != len(theirs):
        return [f"{len(mine)} rows with `{names[0]}`, not {len(theirs)}"]
    return [
        f"{dict(zip(names, got, strict=True))} in place of {want}"
        for got, want in zip(mine, theirs, strict=True)
        if any(not abs(a - b) <= reference.tolerance * (1 + abs(b)) for a, b in zip(got, want, strict=True))
    ]


def random_deaths(layout: Layout, seed: int, failures: int = 1, joins: Sequence[Join] = ()) -> list[Death]:
    """
    Deaths at random points, of as many nodes as leave `failures + 1`. Up to `failures` nodes, or hosts but for the
    first one, are lost at about the same time, of which the later ones may die in the recovery from the first
    (`copying`, `laying_out`); then none for two steps, in which the others recover. Those who join may die in it, and
    after it. A process that does not come to its point lives.
    """
    draw = random.Random(seed)
    hosts = layout.members_of_hosts(joins)
    begins = [0] * layout.hosts + [join.step for join in joins]  # step after which the processes of each host train
    nodes = {layout.node_of(member): begin for begin, host in zip(begins, hosts, strict=True) for member in host}
    singles = [[member for host in hosts for member in host if layout.node_of(member) == node] for node in nodes]
    deaths: list[Death] = []
    step = draw.randint(1, 3)
    while step <= STEPS:
        in_recovery = False
        for _ in range(draw.randint(1, failures)):
            is_host = len(hosts) > 1 and draw.random() < 0.5
            spare = sum(begin < step for begin in nodes.values()) - failures - 1
            alive = [[m for m in group if layout.node_of(m) in nodes] for group in (hosts[1:] if is_host else singles)]
            groups = [group for group in alive if _is_spared(group, layout, nodes, step, spare)]
            if not groups:
                continue
            group = draw.choice(groups)
            joins_now = nodes[layout.node_of(group[0])] == step
            points = JOINING if joins_now else RECOVERY if in_recovery else _points_in(step)
            point = draw.choice(points)
            if is_host:
                # a drained host leaves at once while it joins, and not at all if the signal comes after the last step
                may_drain = point not in JOINING and step < STEPS - 2
                way = draw.choices(HOST_WAYS, (3, 2 * may_drain))[0]
            else:
                # the second exception in a step would be one that no rank can help
                may_raise = not any(death.step == step and death.way == "raise" for death in deaths)
                way = draw.choices(("kill", "stop", "raise", "exit"), (6, 1, 2 * may_raise, 2))[0]
            own_step = step + joins_now if point != "told" else 0  # who joins after a step is in the next one
            deaths.append(Death(draw.choice(group), own_step, point, way))
            for member in group:
                nodes.pop(layout.node_of(member), None)
            in_recovery = draw.random() < 0.5
        step += draw.randint(2, 3)
    return deaths


def _is_spared(group: Sequence[int], layout: Layout, nodes: dict[int, int], step: int, spare: int) -> bool:
    """Whether processes that have not been lost can be lost in a step, in which as many nodes can be."""
    begins = {node: nodes[node] for node in map(layout.node_of, group)}
    return (
        bool(begins)
        and all(begin <= step for begin in begins.values())
        and (sum(begin < step for begin in begins.values()) <= spare)
    )


def _points_in(step: int) -> list[str]:
    """The points that a run comes to in a step: it evaluates after each third, and saves after each fourth."""
    every = {"evaluation": 3, "checkpoint": 4, "save_end": 4}
    return [point for point in POINTS if point not in (*JOINING, "waiting") and step % every.get(point, 1) == 0]
