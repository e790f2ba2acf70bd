"""
One process of a training run in which processes die at given points, and others join at given steps; started by
`hf-mmparallel launch`.

Every process that is left at the end writes what it has to `result-<id>.pt`: losses, gradient norms, weights (on rank
0), what happened, and the samples that it has trained on.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.modules["bitsandbytes"] = None  # type: ignore[assignment] # peft imports it, which takes seconds

import psutil
import torch
import torch.distributed as dist
from transformers import LlavaConfig, LlavaForConditionalGeneration, TrainerCallback

from hf_mmparallel import MultimodalParallelTrainer, MultimodalTrainingArguments, TimelineCallback
from hf_mmparallel._environment import joins_job, launch_settings
from hf_mmparallel.modeling.stages import ModuleStage
from hf_mmparallel.runtime import engine as engine_module
from hf_mmparallel.runtime.gradients import GradientSync
from hf_mmparallel.runtime.message_queues import DistributedTransport
from hf_mmparallel.runtime.sharded_model import ShardedModel
from hf_mmparallel.trainer import recovery as recovery_module
from hf_mmparallel.trainer.checkpoint_saves import CheckpointSaves
from hf_mmparallel.trainer.survival import Survival
from hf_mmparallel.world import Membership, track_activity
from hf_mmparallel.world.connections import end_gloo_connections

try:
    from benchmarks import counted_device, fake_trackers
except ImportError:  # run as a script
    import counted_device
    import fake_trackers

NUM_SAMPLES, VOCABULARY, IMAGE_TOKEN = 40, 120, 100
POINTS = (
    "loading",
    "forward",
    "send",
    "receive",
    "sum",
    "norm",
    "after_norm",
    "optimizer",
    "after_optimizer",
    "step_end",
    "evaluation",
    "checkpoint",
    "save_end",
    "copying",
    "laying_out",
    "waiting",
    "told",
)
HOST_WAYS = ("kill_host", "term_launcher")
"""Ways in which all processes of a launcher are lost."""


def make_model(num_layers: int = 4, hidden_size: int = 64, dropout: float = 0.0) -> LlavaForConditionalGeneration:
    """A tiny LLaVA, with the same weights in every process."""
    torch.manual_seed(0)
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 8,
        "attention_dropout": dropout,
        "model_type": "clip_vision_model",
    }
    text = {
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "attention_dropout": dropout,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "model_type": "llama",
    }
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN)
    return LlavaForConditionalGeneration(config)


def with_adapter(model: LlavaForConditionalGeneration) -> Any:
    """The model with LoRA on attention, also with the same weights in every process."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    targets = r".*(q_proj|v_proj)"
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False))


class Samples(torch.utils.data.Dataset):
    """Text with no, one or two images; notes which samples are read. One of them may be bad."""

    def __init__(self, deaths: Deaths | None = None, bad: int | None = None):
        self.deaths = deaths
        self.bad = bad

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.deaths is not None:
            self.deaths.may_strike("loading")
        if index == self.bad:
            raise KeyError(f"sample {index} is broken")
        generator = torch.Generator().manual_seed(index)
        num_images, length = index % 3, 6 + index % 5
        words = torch.randint(1, 90, (length,), generator=generator)
        ids = torch.cat([torch.full((4 * num_images,), IMAGE_TOKEN), words])
        labels = ids.masked_fill(ids == IMAGE_TOKEN, -100)
        return {"input_ids": ids, "labels": labels, "images": torch.randn(num_images, 3, 16, 16, generator=generator)}


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pads samples to the right."""
    longest = max(len(sample["input_ids"]) for sample in samples)

    def padded(name: str, value: int) -> torch.Tensor:
        rows = [torch.nn.functional.pad(s[name], (0, longest - len(s[name])), value=value) for s in samples]
        return torch.stack(rows)

    ids = padded("input_ids", 0)
    batch = {"input_ids": ids, "labels": padded("labels", -100), "attention_mask": (ids != 0).long()}
    images = torch.cat([sample["images"] for sample in samples])
    return {**batch, "pixel_values": images} if len(images) else batch


class Deaths:
    """
    How and when this process dies.

    Args:
        words (`list[str]`): `member:step:point:way` for each death of any process.
        member (`int`): The number of this process.
        folder (`Path`): Gets the file `cut` when this process waits for its host to be cut off.
    """

    def __init__(self, words: list[str], member: int, folder: Path):
        rows = [word.split(":") for word in words]
        self.member = member
        self.folder = folder
        self.planned = [(int(step), point, way) for own, step, point, way in rows if int(own) == member]
        self.step = 0  # until training begins: the report at the start, too, reads samples

    def may_strike(self, point: str) -> None:
        """Ends this process if it is to die here."""
        for step, where, way in self.planned:
            mark = self.folder / f"{self.member}-{step}-{where}.struck"  # it does not strike again in a new start
            if step == self.step and where == point and not mark.exists():
                mark.touch()
                self._tell({"way": way, "at": point, "step": step, "time": time.time()})
                if way == "raise":
                    self.planned = []
                    raise ArithmeticError("made up to end this process")
                if way == "exit":
                    os._exit(1)
                if way == "cut":
                    (self.folder / "cut").touch()
                    time.sleep(1000)
                if way in ("hang", "unplug"):
                    self.planned = []
                    _wait_in_vain() if way == "hang" else end_gloo_connections()
                    return
                if way == "kill_host":
                    _kill_host()
                if way.startswith("term"):
                    self.planned = []
                    os.kill(os.getppid() if way == "term_launcher" else os.getpid(), signal.SIGTERM)
                    return
                os.kill(os.getpid(), signal.SIGKILL if way == "kill" else signal.SIGSTOP)

    def _tell(self, strike: dict[str, Any]) -> None:
        """Prints who dies: this process, or all of its host."""
        first, count = self.member, 1
        if strike["way"] in (*HOST_WAYS, "cut"):
            first, count = self.member - int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        node = (launch_settings() or {"node": 0})["node"]  # none under another launcher
        lines = [json.dumps({"dies": id, "node": node, **strike}) for id in range(first, first + count)]
        print("".join(f"{line}\n" for line in lines), end="", flush=True)  # whole, also where others print

    def before(self, owner: Any, name: str, point: str, after: bool = False) -> None:
        """Lets this process die before a function is called, or after it."""
        function: Callable = getattr(owner, name)

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not after:
                self.may_strike(point)
            result = function(*args, **kwargs)
            if after:
                self.may_strike(point)
            return result

        setattr(owner, name, wrapper)

    def install(self) -> None:
        """Puts the points of death into the package's functions."""
        self.before(ModuleStage, "__call__", "forward")
        self.before(DistributedTransport, "send", "send")
        self.before(DistributedTransport, "recv", "receive")
        self.before(GradientSync, "finish", "sum")
        self.before(engine_module, "gradient_square", "norm")
        self.before(engine_module, "norm_of_square", "after_norm")
        self.before(ShardedModel, "save", "checkpoint")
        self.before(CheckpointSaves, "finish", "save_end")
        self.before(recovery_module, "exchange", "copying")
        self.before(engine_module.ParallelEngine, "change_plan", "laying_out")
        if joins_job():
            self.before(Membership, "register", "waiting", after=True)
            self.before(recovery_module.Recovery, "wait_to_join", "told", after=True)


def _wait_in_vain() -> None:
    """Waits for a message of another rank that never comes."""
    with track_activity("waiting for nothing", waits=True):
        dist.recv(torch.zeros(1), (dist.get_rank() + 1) % dist.get_world_size(), tag=7)


def _kill_host() -> None:
    """Kills the launcher of this process with all that it has started, this process last."""
    launcher = psutil.Process(os.getppid())
    own = psutil.Process()
    for process in [launcher, *(child for child in launcher.children(recursive=True) if child != own), own]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


class Joins:
    """
    The steps in which this process waits until others want to join.

    Args:
        words (`list[str]`): `step:number` for each launcher that joins, with the number of its processes.
        folder (`Path`): Folder of the run, in which a file says that the launcher of this place in `words` has ended.
    """

    def __init__(self, words: list[str], folder: Path):
        self.planned = [tuple(map(int, word.split(":"))) for word in words]
        self.folder = folder

    def wait(self, step: int, trainer: Any) -> None:
        """Waits in a step until the processes of all launchers that join in it wait, or their launcher has ended."""
        wanted = {place: number for place, (when, number) in enumerate(self.planned) if when == step}
        if wanted and trainer.is_world_process_zero():
            print(json.dumps({"awaits": step}), flush=True)
        while wanted and len(trainer._survival.recovery.membership.waiting) < sum(wanted.values()):
            time.sleep(0.02)
            wanted = {place: n for place, n in wanted.items() if not (self.folder / f"join-{place}.ended").exists()}


class Strikes(TrainerCallback):
    """The points of death in the Trainer's loop, and what happened."""

    trainer: Any = None

    def __init__(self, deaths: Deaths, joins: Joins):
        self.deaths = deaths
        self.joins = joins
        self.events: list[dict[str, Any]] = []
        self.num_tries = 0  # of all steps
        self.ends_s: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.deaths.step = state.global_step + 1

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.deaths.step = state.global_step + 1
        self.joins.wait(self.deaths.step, self.trainer)

    def count_tries(self) -> None:
        """Counts how often steps are begun, again included."""
        run_step = Survival.run_step

        def wrapper(survival: Survival) -> Any:
            self.num_tries += 1
            return run_step(survival)

        Survival.run_step = wrapper  # type: ignore[method-assign]

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.deaths.may_strike("optimizer")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.deaths.may_strike("after_optimizer")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends_s.append(time.time())
        self.deaths.may_strike("step_end")

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.deaths.may_strike("evaluation")

    def on_reconfigure(self, args: Any, state: Any, control: Any, event: Any = None, **kwargs: Any) -> None:
        self.events.append(vars(event))


class MovingAverage(TrainerCallback):
    """The moving average of weights, kept in the state of the optimizer, which moves with its parameters."""

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            average = optimizer.state[parameter].setdefault("average", torch.zeros_like(parameter))
            average.lerp_(parameter.detach(), 0.5)

    @staticmethod
    def of(trainer: Any) -> dict[str, torch.Tensor]:
        """Parameter -> its average, of those that this rank has whole."""
        state = trainer.optimizer.state
        found = {name: state.get(p, {}).get("average") for name, p in trainer.model.named_parameters()}
        return {name: average.clone() for name, average in found.items() if type(average) is torch.Tensor}


OWN_RATE = {"learning_rate": 2e-2, "weight_decay": 0.1}
"""Settings of an encoder with groups of the optimizer of its own, beside a whole plan."""
BEST = {"load_best_model_at_end": True, "eval_steps": 4}
"""Arguments of a run that keeps the best checkpoint: it evaluates before each save."""


def arguments_of(folder: Path, steps: int) -> dict[str, Any]:
    """The arguments that a run on one process has, too."""
    return {
        "output_dir": str(folder / "run"),
        "max_steps": steps,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-3,
        "lr_scheduler_type": "cosine",
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "per_device_eval_batch_size": 4,
        "save_strategy": "steps",
        "save_steps": 4,
        "save_total_limit": 2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
        "remove_unused_columns": False,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parallel", required=True)
    parser.add_argument("--folder", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--failures", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--ranks_per_node", type=int, default=1)
    parser.add_argument("--async_save", action="store_true")
    parser.add_argument("--log_predictions", action="store_true")
    parser.add_argument("--adapter", action="store_true")
    parser.add_argument("--own_rate", action="store_true", help="a learning rate and weight decay of the encoder")
    parser.add_argument("--best", action="store_true", help="load the best checkpoint at the end")
    parser.add_argument("--average", action="store_true", help="keep a moving average of weights")
    parser.add_argument("--trackers", action="store_true", help="report to stand-ins of trackers")
    parser.add_argument("--timelines", action="store_true", help="draw the third and the fifth step")
    parser.add_argument("--bf16", action="store_true", help="weights in bfloat16, with copies in float32")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--bad", type=int, help="sample that can't be read")
    parser.add_argument("--nccl", action="store_true", help="a device whose aborted collectives end as those of NCCL")
    parser.add_argument("--join", action="append", default=[])
    parser.add_argument("--death", action="append", default=[])
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = launch_settings()
    assert settings is not None
    member = settings["id"]
    deaths = Deaths(options.death, member, options.folder)
    deaths.install()
    strikes = Strikes(deaths, Joins(options.join, options.folder))
    with contextlib.ExitStack() as stack:
        if options.nccl:
            _use_counted_device(stack, strikes)
        train(options, deaths, strikes, member)


def _use_counted_device(stack: contextlib.ExitStack, strikes: Strikes) -> None:
    """Trains on the device that counts, which has a backend beside that of the host."""
    del os.environ["ACCELERATE_USE_CPU"]  # by which accelerate would refuse another device
    counted_device.init_process_group(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://")
    stack.enter_context(counted_device.train_on_device())
    counted_device.abort_as_nccl(lambda: strikes.trainer._survival.recovery.membership.is_stale)


def train(options: argparse.Namespace, deaths: Deaths, strikes: Strikes, member: int) -> None:
    """Trains, and writes what this process has at the end."""
    callbacks: list[Any] = [strikes]
    more: dict[str, Any] = dict(BEST) if options.best else {}
    if options.trackers:
        fake_trackers.install(options.folder / f"tracked-{member}.jsonl")
        more["report_to"] = list(fake_trackers.NAMES)
    if options.average:
        callbacks.append(MovingAverage())
    if options.timelines:
        callbacks.append(TimelineCallback([3, 5]))
    if options.nccl:
        spec = options.folder / f"gpu-{member}.yaml"
        spec.write_text("name: counted\nlike: h100\n")
        more["gpu_spec"] = str(spec)
    parallel = json.loads(options.parallel)
    if options.own_rate:
        parallel = {"plan": parallel, "modules": {"vision": OWN_RATE}}
    args = MultimodalTrainingArguments(
        parallel=parallel,
        resilience={"failures": options.failures, "ranks_per_node": options.ranks_per_node},
        global_batch_size=8,
        per_device_train_batch_size=2,
        dataloader_num_workers=options.workers,
        async_save=options.async_save,
        log_predictions=options.log_predictions,
        ddp_backend="gloo",
        **(arguments_of(options.folder, options.steps) | more),
    )
    model = make_model(dropout=options.dropout)
    if options.bf16:
        model.to(torch.bfloat16)
    trainer = MultimodalParallelTrainer(
        model=with_adapter(model) if options.adapter else model,
        args=args,
        train_dataset=Samples(deaths, options.bad),
        eval_dataset=[Samples()[index] for index in range(7)],
        data_collator=collate,
        callbacks=callbacks,
    )
    strikes.trainer = trainer
    strikes.count_tries()
    trainer.train()
    whole = trainer.gather_model()
    result = {
        "logs": trainer.state.log_history,
        "weights": None if whole is None else whole.state_dict(),
        "events": strikes.events,
        "ends_s": strikes.ends_s,
        "num_tries": strikes.num_tries,
        "rank": trainer.world.rank,
        "averages": MovingAverage.of(trainer),
        "best": trainer.state.best_model_checkpoint,
    }
    torch.save(result, options.folder / f"result-{member}.pt")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
