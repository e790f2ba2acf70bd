"""
Every multimodal and causal model of the installed transformers, tiny and random, against one process: a table of
families and of ways to lay a model out, in `docs/models.md`.

Each family is a process of its own with limits of memory and time, each check a fork of it, so that a rank that dies
by a signal is a row of the table, too. What is done is stored, so that a run can be ended and continued.

```bash
python benchmarks/model_support.py                    # all families that have no result of these checks yet
python benchmarks/model_support.py --families llava   # some of them, anew
```
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common
import shrunk_models
import torch
import torch.distributed as dist
import transformers
from shrunk_batches import Samples, make_samples
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hf_mmparallel.arrange import contiguous_step
from hf_mmparallel.data import PackingCollator
from hf_mmparallel.data.bad_samples import BadSample
from hf_mmparallel.data.step_batch import StepBatch
from hf_mmparallel.data.step_dataset import Reader, StepDataset
from hf_mmparallel.modeling import build_model_spec, is_unowned
from hf_mmparallel.modeling.adapter import add_adapters
from hf_mmparallel.modeling.loading import build_on_meta, load_layers
from hf_mmparallel.plan import LANGUAGE_MODEL, ModelSpec, ModulePlugin, resolve_plan
from hf_mmparallel.runtime.engine import EngineOptions, ParallelEngine
from hf_mmparallel.schedule import build_program
from hf_mmparallel.trainer.start_checks import check_model
from hf_mmparallel.world import World

PACKAGE = str(Path(sys.modules["hf_mmparallel"].__file__ or "").parent)
SAMPLES, MICROBATCH = 4, 2
FAMILY_S, CHECK_S, MEMORY_GIB = 150, 25, 5
TOLERANCE = 1e-4
"""Of the norm of all gradients, and of a loss."""
EQUAL, REFUSED, CRASH, WRONG, NOT_BUILT, ABSENT = "equal", "refused", "crash", "wrong", "not built", "no such part"

Gradients = Mapping[str, Tensor]


@dataclass(frozen=True)
class Found:
    """The outcome of a check."""

    status: str
    text: str = ""  # the sentence of a refusal, the message of a crash, the difference of wrong numbers
    where: str = ""  # the line that raised it

    def stored(self) -> dict[str, str]:
        """What a result keeps."""
        return {name: value[:400] for name, value in asdict(self).items() if value}


class Different(Exception):
    """Numbers are not those of one process."""


@dataclass(frozen=True)
class Case:
    """A model, its samples, and what one process computes of them."""

    model: PreTrainedModel
    samples: Samples
    loss: float  # mean over target tokens
    gradients: Gradients

    @classmethod
    def of(cls, model: PreTrainedModel, samples: Samples) -> Case:
        rows = [samples.rows[start : start + MICROBATCH] for start in range(0, SAMPLES, MICROBATCH)]
        batches = [samples.collate(of_microbatch) for of_microbatch in rows]
        result = cls(model, samples, *trained(model, batches))
        with torch.no_grad():  # a model may keep what it computed, which can't be copied with its graph
            model(**batches[0], use_cache=False)
        return result

    @functools.cached_property
    def spec(self) -> ModelSpec:
        return build_model_spec(self.model)

    @functools.cached_property
    def mixes_samples(self) -> str:
        """What is wrong with the model itself, if the loss of a batch is not that of its samples."""
        loss, _ = trained(self.model, [self.samples.collate(self.samples.rows)])
        if abs(loss - self.loss) <= 10 * TOLERANCE * self.loss:
            return ""
        return f"the model itself mixes the samples of a batch: loss {loss:.6g} in one batch, {self.loss:.6g} in two"

    def compare(self, loss: float, gradients: Gradients) -> None:
        """Raises [`Different`] unless loss and gradients are those of one process."""
        if not abs(loss - self.loss) <= TOLERANCE * abs(self.loss):
            raise Different(f"loss {loss:.6g} instead of {self.loss:.6g}")
        norm = sum(float(g.double().square().sum()) for g in self.gradients.values()) ** 0.5
        worst, total = ("", 0.0), 0.0
        for name, expected in self.gradients.items():
            found = gradients.get(name)
            expected = expected.double()
            difference = float((expected if found is None else found.double() - expected).norm())
            total += difference**2
            worst = max(worst, (name, difference), key=lambda pair: pair[1])
            if not difference <= 1e-2 * float(expected.norm()) + TOLERANCE * norm:
                raise Different(f"the gradient of `{name}` differs by {difference / float(expected.norm()):.1e} of it")
        if not total**0.5 <= TOLERANCE * norm:
            raise Different(f"gradients differ by {total**0.5 / norm:.1e}, most in `{worst[0]}`")


def trained(model: PreTrainedModel, batches: Sequence[Mapping[str, Tensor]]) -> tuple[float, Gradients]:
    """The model's own mean loss over the target tokens of some microbatches, and its gradients."""
    model.zero_grad()
    counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
    total = 0.0
    for batch, count in zip(batches, counts, strict=True):
        loss = model(**batch, use_cache=False).loss * (count / sum(counts))
        loss.backward()
        total += float(loss.detach())
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# Checks. Each gets a case, and returns nothing if all is equal.


def run_threads(case: Case, layout: Mapping[str, Mapping[str, Any]]) -> None:
    """A step under a layout, with a thread for each rank, compared with one process."""
    from tests.runtime.loopback import run_loopback  # which patches nothing unless it is used

    spec = case.spec
    plan = resolve_plan(spec, {name: ModulePlugin(**layout.get(name, {})) for name in spec.modules})
    step = contiguous_step(plan, range(SAMPLES), MICROBATCH)
    found = run_loopback(case.model, plan, step, case.samples.rows, case.samples.collate, spec=spec)
    count = max(found.num_targets, 1)
    case.compare(found.loss / count, {name: g / count for name, g in found.gradients.items()})


def run_engine(case: Case, layout: Mapping[str, Mapping[str, Any]], collator: Any = None) -> None:
    """A step of the engine under a layout, with all checks of a first step, on the ranks of the process group."""
    spec, world = case.spec, World()
    plan = resolve_plan(spec, {n: ModulePlugin(**layout.get(n, {})) for n in spec.modules}, world.size)
    model = copy.deepcopy(case.model)
    engine = ParallelEngine(model, spec, plan, world)
    step = contiguous_step(plan, range(SAMPLES), MICROBATCH)
    data = StepDataset(Reader(case.samples.rows, collator or case.samples.collate), engine.inputs, 0).read(step)
    totals = engine.train_step(StepBatch.of(data, build_program(plan, step, engine.sync_groups), engine.rank), 0)
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            gradients[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    case.compare(float(totals.mean_loss), gradients)


def shared(case: Case, **language_model: Any) -> dict[str, dict[str, Any]]:
    """All modules on the ranks of the language model."""
    others = {name: {"colocate_with": LANGUAGE_MODEL} for name in case.spec.encoders}
    return {**others, LANGUAGE_MODEL: language_model}


def in_encoders(case: Case, **sizes: Any) -> dict[str, dict[str, Any]]:
    """A layout of every encoder."""
    return {name: dict(sizes) for name in case.spec.encoders}


def one_process(case: Case) -> None:
    """Modules are found, and the loss that a plan sums is the model's own."""
    run_engine(case, shared(case))


def tensor_parallel(case: Case, encoders: bool) -> None:
    """Tensor parallelism of the language model, or of the encoders, on two ranks."""
    sizes = {"dp_size": 1, "tp_size": 2}
    layout = shared(case, tp_size=1, dp_size=2) if encoders else shared(case, tp_size=2)
    for name in case.spec.encoders:
        layout[name] |= sizes if encoders else {"dp_size": 2, "tp_size": 1}
    run_ranks(functools.partial(run_engine, case, layout), 2)


def with_bitfield(model: PreTrainedModel) -> PreTrainedModel:
    from tests import tiny

    return tiny.attending(copy.deepcopy(model))


def padded_bitfield(case: Case) -> None:
    """`"bitfield"` attention on padded rows."""
    words = Case.of(with_bitfield(case.model), case.samples)
    case.compare(words.loss, words.gradients)


def packed(case: Case) -> None:
    """The samples of a microbatch in one row."""
    model = with_bitfield(case.model)
    words = dataclasses.replace(case, model=model)
    run_engine(words, shared(words), PackingCollator(case.samples.collate, model))


def lora(case: Case) -> None:
    """Adapters in the language model, which has two stages; encoders are trained."""
    model = copy.deepcopy(case.model)
    try:
        add_adapters(model, case.spec, {LANGUAGE_MODEL: {"r": 4, "target_modules": "all-linear"}})
        model(**case.samples.collate(case.samples.rows))
    except Exception as error:  # of peft, or of its layers
        raise FoundByRank(Found(NOT_BUILT, f"{type(error).__name__}: {error}")) from error
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    adapted = Case.of(model, case.samples)
    run_threads(adapted, {LANGUAGE_MODEL: {"pp_size": 2}})


def frozen_tower(case: Case) -> None:
    """Encoders are frozen but for their projectors."""
    model = copy.deepcopy(case.model)
    for name in case.spec.encoders:
        for parameter in case.spec.modules[name].with_frozen("tower").parameters:
            model.get_parameter(parameter.name).requires_grad_(parameter.trainable)
    frozen = Case.of(model, case.samples)
    run_threads(frozen, {LANGUAGE_MODEL: {"pp_size": 2}})


def released_files(case: Case) -> None:
    """Files in the layout of released checkpoints, read by ranks that share matrices, experts or layers."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            case.model.save_pretrained(folder, max_shard_size="200KB")
            whole = type(case.model).from_pretrained(folder)
        except Exception as error:  # of transformers
            raise FoundByRank(Found(NOT_BUILT, f"{type(error).__name__}: {error}")) from error
        for name, parameter in whole.named_parameters():
            if not torch.equal(parameter, case.model.get_parameter(name)):
                raise FoundByRank(Found(NOT_BUILT, f"`from_pretrained` does not read `{name}` as it was saved"))
        run_ranks(functools.partial(read_parts, case, folder, whole.state_dict(keep_vars=True)), 2)


def read_parts(case: Case, folder: str, whole: Mapping[str, Tensor]) -> None:
    """Compares the weights that this rank of two reads under each layout that the model allows."""
    world, spec, refused = World(), case.spec, 0
    sizes = [{"tp_size": 2}, {"pp_size": 2}, {"dp_size": 2}]
    sizes += [{"dp_size": 2, "ep_size": 2}] if spec.language_model.num_experts else []

    def load(blank: Any, layers: Any) -> Iterator[Any]:
        try:
            yield from load_layers(blank, folder, "cpu", layers)
        except ValueError as error:
            raise Different(str(error)) from error

    for size in sizes:
        layout = shared(case, **size)
        for name in spec.encoders if "tp_size" in size else ():
            layout[name] |= size
        model = build_on_meta(folder)
        try:
            plan = resolve_plan(spec, {n: ModulePlugin(**layout[n]) for n in spec.modules}, world.size)
            ParallelEngine(model, spec, plan, world, EngineOptions(load=load))
        except ValueError:  # the model does not allow this layout
            refused += 1
            if refused == len(sizes):
                raise
            continue
        for name, tensor in model.state_dict(keep_vars=True).items():
            own = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if not is_unowned(tensor) and not torch.equal(own, whole[name]):
                raise Different(f"`{name}` is not what `from_pretrained` reads")


ONE_PROCESS = "one process"
CHECKS: dict[str, Callable[[Case], None]] = {
    ONE_PROCESS: one_process,
    "own ranks": lambda case: run_threads(case, {}),
    "pp 2": lambda case: run_threads(case, {LANGUAGE_MODEL: {"pp_size": 2}}),
    "encoder pp 2": lambda case: run_threads(case, in_encoders(case, pp_size=2)),
    "tp 2": lambda case: tensor_parallel(case, encoders=False),
    "encoder tp 2": lambda case: tensor_parallel(case, encoders=True),
    "dp 2": lambda case: run_threads(case, shared(case, dp_size=2)),
    "cp 2": lambda case: run_threads(case, {LANGUAGE_MODEL: {"cp_size": 2, "cp_block": 8}}),
    "bitfield": padded_bitfield,
    "packed": packed,
    "LoRA, pp 2": lora,
    "frozen tower": frozen_tower,
    "released files": released_files,
}
WHOLE = ("bitfield",)  # a forward of the model, without a plan
OF_ENCODERS = ("own ranks", "encoder pp 2", "encoder tp 2", "frozen tower")


# Processes


def run_ranks(function: Callable[[], None], size: int) -> None:
    """Calls a function on ranks with a gloo group; raises what the first of them raised."""
    with tempfile.TemporaryDirectory() as folder:

        def body(rank: int) -> None:
            store = FileStore(f"{folder}/store", size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
            function()

        forks = [Fork(functools.partial(body, rank), CHECK_S) for rank in range(size)]
        results = [fork.result() for fork in forks]
    bad = [found for found in results if found.status != EQUAL]
    order = (REFUSED, WRONG, CRASH)
    if bad:
        raise FoundByRank(min(bad, key=lambda found: order.index(found.status)))


class FoundByRank(Exception):
    """A rank's outcome."""

    def __init__(self, found: Found):
        super().__init__(found.text)
        self.found = found


def found_by(function: Callable[[], Any]) -> Found:
    """Calls a function and says what came of it."""
    try:
        function()
    except FoundByRank as error:
        return error.found
    except Different as error:
        return Found(WRONG, str(error))
    except BaseException as error:
        bad = next((own for own in error.args if isinstance(own, BadSample)), None)
        if bad is not None and bad.reason.startswith(f"{ValueError.__name__}: "):  # a collator's sentence
            return Found(REFUSED, " ".join(bad.reason.partition(": ")[2].split())[:600], "step_dataset.py")
        frames = traceback.extract_tb(error.__traceback__)
        place = frames[-1] if frames else None
        own = next((f for f in reversed(frames) if f.filename.startswith(PACKAGE)), None)
        said = place is not None and place.filename.startswith(PACKAGE) and isinstance(error, ValueError)
        shown = place if said or own is None else own
        where = f"{Path(shown.filename).name}:{shown.lineno}" if shown else ""
        message = " ".join(str(error).split())[:600]
        return Found(REFUSED, message, where) if said else Found(CRASH, f"{type(error).__name__}: {message}", where)
    return Found(EQUAL)


class Fork:
    """A function that runs in a fork of this process, for a limited time."""

    def __init__(self, function: Callable[[], Any], limit_s: float):
        context: Any = multiprocessing.get_context("fork")
        self.end = time.monotonic() + limit_s
        self.limit_s = limit_s
        self.received, sent = context.Pipe(duplex=False)
        self.process = context.Process(target=self._body, args=(function, sent))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.process.start()
        sent.close()

    @staticmethod
    def _body(function: Callable[[], Any], sent: Any) -> None:
        os.setsid()
        torch.set_num_threads(1)  # renews the pool of a fork before several threads would
        sent.send(found_by(function))
        sent.close()
        os._exit(0)

    def result(self) -> Found:
        """What came of the function; its processes are ended."""
        try:
            if self.received.poll(max(0.0, self.end - time.monotonic())):
                return self.received.recv()
            return Found(CRASH, f"not done after {self.limit_s:.0f} s")
        except EOFError:
            self.process.join(5)
            code = self.process.exitcode or 0
            return Found(CRASH, f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.join()


def check_family(family: str, names: Sequence[str], report: Callable[[str, Found], None]) -> None:
    """Runs the checks of one family; `report` gets each outcome."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    limit = MEMORY_GIB * 2**30
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    refused: Found | None = None
    try:
        model = shrunk_models.build(family)
    except BaseException as error:
        report("build", Found(NOT_BUILT, f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"))
        return
    refused = found_by(lambda: check_model(model))
    if refused.status == REFUSED:  # at the start, before a sample is read
        for name in names:
            report(name, refused)
        return
    try:
        samples = make_samples(model, family, SAMPLES)
        case = Case.of(model, samples)
    except BaseException as error:
        report("build", Found(NOT_BUILT, f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"))
        return
    unknown = found_by(lambda: case.spec)  # the same for all forks
    if unknown.status != EQUAL:
        for name in names:
            report(name, unknown)
        return
    first = Fork(functools.partial(_check, case, ONE_PROCESS), CHECK_S).result()
    for name in names:
        found = first if name == ONE_PROCESS else Fork(functools.partial(_check, case, name), CHECK_S + 5).result()
        if found.status == WRONG and case.mixes_samples:
            found = Found(NOT_BUILT, case.mixes_samples)
        if first.status == REFUSED and found.status in (EQUAL, WRONG) and name not in WHOLE:
            found = first  # by the checks of a first step, which threads do without
        report(name, found)


def _check(case: Case, name: str) -> None:
    if name in OF_ENCODERS and not case.spec.encoders:
        raise FoundByRank(Found(ABSENT))
    CHECKS[name](case)


def results_of(family: str, names: Sequence[str]) -> dict[str, Found]:
    """The outcomes of one family, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found"

        def report(name: str, found: Found) -> None:
            with path.open("a") as file:
                file.write(json.dumps([name, asdict(found)]) + "\n")

        outcome = Fork(functools.partial(check_family, family, names, report), FAMILY_S).result()
        lines = path.read_text().splitlines() if path.exists() else []
    found = {name: Found(**values) for name, values in map(json.loads, lines)}
    if "build" in found:
        return dict.fromkeys(names, found["build"])
    return {name: found.get(name, Found(CRASH, outcome.text or "no result")) for name in names}


def write(path: Path, stored: Mapping[str, Any]) -> None:
    """Writes the result, a line for each family, in the order of transformers."""
    lines = [f"{json.dumps(name)}: {json.dumps(stored[name])}" for name in shrunk_models.families() if name in stored]
    described = json.dumps(common.machine(common.QUICK, os.getloadavg()))[:-1]
    path.write_text(described + ',\n"families": {\n' + ",\n".join(lines) + "\n}}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", help="model types; all by default")
    parser.add_argument("--checks", nargs="*", choices=CHECKS, help="checks; all by default")
    parser.add_argument("--limit-s", type=float, default=1e9, help="no family is begun after this time")
    parser.add_argument("--out", type=Path, default=common.ROOT / "benchmarks" / "results", help="folder of the JSON")
    options = parser.parse_args()
    sys.path.insert(0, str(common.ROOT))
    torch.set_num_threads(1)
    path = options.out / "model_support.json"
    stored = json.loads(path.read_text())["families"] if path.exists() else {}
    names, start = options.checks or list(CHECKS), time.monotonic()
    families = options.families or [f for f in shrunk_models.families() if not {*names} <= {*stored.get(f, {})}]
    for family in families:
        if time.monotonic() - start > options.limit_s:
            print(f"{family} and later ones are left")
            break
        began = time.monotonic()
        found = results_of(family, names)
        stored[family] = {**stored.get(family, {}), **{name: f.stored() for name, f in found.items()}}
        counts = Counter(f.status for f in found.values())
        print(
            f"{family}: {', '.join(f'{n} {s}' for s, n in counts.items())} ({time.monotonic() - began:.1f} s)",
            flush=True,
        )
        for name, f in found.items():
            if f.status in (CRASH, WRONG, NOT_BUILT):
                print(f"    {name}: {f.status}: {f.text[:250]} [{f.where}]", flush=True)
                if f.status == NOT_BUILT:
                    break
        write(path, stored)


if __name__ == "__main__":
    main()
