"""Optimizers on the parameters of one rank: what runs, what runs on local shards, what is refused."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import Adafactor

from hf_mmparallel.modeling.unowned import local
from hf_mmparallel.plan import Cut, ParameterShards, SyncGroup
from hf_mmparallel.runtime.optimizer_checkpoint import load_optimizer, save_optimizer
from hf_mmparallel.runtime.optimizer_slices import OptimizerSlices
from hf_mmparallel.runtime.optimizers import PossibleCuts, prepare_optimizer
from hf_mmparallel.runtime.sharded_model import ShardedModel
from hf_mmparallel.runtime.writes import Writes
from hf_mmparallel.world import World
from tests.distributed import run_distributed

NAMES = ("rows", "columns", "bias")


class Plain(torch.optim.Optimizer):
    """Signs of momentum, by a kernel that knows plain tensors only."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    if isinstance(parameter, DTensor):
                        raise NotImplementedError("no sharding strategy registered")
                    self.update(index, parameter, group["lr"], self.state[parameter])

    def update(self, index: int, parameter: torch.Tensor, lr: float, state: dict[str, Any]) -> None:
        momentum = state.setdefault("momentum", torch.zeros_like(parameter, dtype=torch.float32))
        momentum.lerp_(parameter.grad.float(), 0.5)
        parameter.sub_(torch.sign(momentum), alpha=lr)


class ByNorm(Plain):
    def update(self, index: int, parameter: torch.Tensor, lr: float, state: dict[str, Any]) -> None:
        parameter.sub_(parameter.grad / parameter.grad.norm(), alpha=lr)


class ByPlace(Plain):
    def update(self, index: int, parameter: torch.Tensor, lr: float, state: dict[str, Any]) -> None:
        parameter.sub_(parameter.grad, alpha=lr * 0.9**index)


class ByOthers(torch.optim.SGD):
    """Divides by the norm over all parameters that it has."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.div_(norm)
        super().step(closure)


def values(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(4, 4, generator=generator)[: 1 if name == "bias" else 4] for name in NAMES}


def placed(value: torch.Tensor, like: Any) -> torch.Tensor:
    """The value, cut as a parameter."""
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def model_of(dtype: torch.dtype, mesh: DeviceMesh | None) -> nn.Module:
    """Two matrices, cut by rows and by columns, and a bias that is not cut."""
    model = nn.Module()
    for name, value in values(0).items():
        value = value.to(dtype)
        if mesh is not None and name != "bias":
            value = distribute_tensor(value, mesh, [Shard(NAMES.index(name))], src_data_rank=None)
            value = DTensor.from_local(value.to_local().contiguous(), mesh, value.placements, run_check=False)
        model.register_parameter(name, nn.Parameter(value))
    return model


def prepared(cls: Any, model: nn.Module, holds_all: bool = True, **settings: Any) -> Any:
    optimizer = cls(model.parameters())
    prepare_optimizer(optimizer, holds_all=holds_all, world=World(), **settings)
    return optimizer


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        for name, value in values(seed).items():
            parameter: Any = model.get_parameter(name)
            parameter.grad_dtype = torch.float32
            parameter.grad = placed(value, parameter)
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: p.detach().full_tensor() if isinstance(p, DTensor) else p.detach().clone()
        for name, p in model.named_parameters()
    }


def save(model: Any, optimizer: Any, folder: str, world: World) -> None:
    """Saves the state of parameters that two ranks share."""
    sharded = ShardedModel(model, None, None, world)  # type: ignore[arg-type]
    sharded.shards = {}
    for dim, name in enumerate(NAMES):
        copies = [(() if name == "bias" else (Cut("tp", dim, rank, 2),), (rank,)) for rank in range(2)]
        sharded.shards[name] = ParameterShards.from_copies((("m", 0, 0),), copies)
    writes = Writes(folder)
    save_optimizer(optimizer, sharded, writes, [NAMES])
    writes.finish(world)


def run_classes(folder: str) -> dict[str, Any]:
    """What becomes of each optimizer under tensor parallelism, and of runs that go on from its state."""
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
    found: dict[str, Any] = {}
    for cls in (torch.optim.AdamW, torch.optim.Adagrad, Plain, ByNorm, Adafactor):
        model = model_of(torch.bfloat16, mesh)
        try:
            optimizer = prepared(cls, model)
        except ValueError as error:
            found[cls.__name__] = str(error)
            continue
        steps(model, optimizer, range(1, 3))
        save(model, optimizer, f"{folder}/{cls.__name__}", World())
        half = full(model)
        steps(model, optimizer, range(3, 5))
        again = model_of(torch.bfloat16, mesh)
        for name, parameter in again.named_parameters():
            parameter.data.copy_(placed(half[name], parameter))
        resumed = prepared(cls, again)
        load_optimizer(resumed, again, f"{folder}/{cls.__name__}", [NAMES], World())
        steps(again, resumed, range(3, 5))
        on_shards = any(getattr(p, "sharded_parameter", None) is not None for p in optimizer.param_groups[0]["params"])
        found[cls.__name__] = (on_shards, full(model), full(again))
    return found


@pytest.mark.distributed
def test_optimizers_run_on_shards_as_on_the_whole_or_are_refused(tmp_path):
    ranks = run_distributed(run_classes, 2, str(tmp_path))
    for found in ranks:
        for cls, on_shards in ((torch.optim.AdamW, False), (torch.optim.Adagrad, False), (Plain, True)):
            model = model_of(torch.bfloat16, None)
            steps(model, prepared(cls, model), range(1, 5))
            where, straight, resumed = found[cls.__name__]
            assert where == on_shards
            for name, want in full(model).items():
                assert torch.equal(straight[name], want), (cls, name)
                assert torch.equal(resumed[name], want), (cls, name)
        assert "`tests.ByNorm`" in found["ByNorm"] and "no sharding strategy registered" in found["ByNorm"]
        assert "`transformers.Adafactor`" in found["Adafactor"] and "`tp_size`" in found["Adafactor"]
    # One process goes on from what shards have left.
    model = model_of(torch.bfloat16, None)
    optimizer = Plain(model.parameters())
    load_optimizer(optimizer, model, tmp_path / "Plain", [NAMES], World())
    assert optimizer.state[model.get_parameter("rows")]["momentum"].shape == (4, 4)


@pytest.mark.parametrize(
    "cls", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop, Adafactor]
)
def test_trying_leaves_optimizers_and_randomness_alone(cls):
    model = model_of(torch.float32, None)
    optimizer = cls(model.parameters())
    state = {p: dict(entry) for p, entry in optimizer.state.items()}
    before, random = full(model), torch.random.get_rng_state()
    prepare_optimizer(optimizer, holds_all=False, world=World())
    assert torch.equal(torch.random.get_rng_state(), random) and optimizer.state.keys() == state.keys()
    for name, want in before.items():
        assert torch.equal(model.get_parameter(name), want)
    assert dist.is_initialized() is False


def run_in_part_of_the_processes(folder: str) -> None:
    """Two of three processes train, in another order than theirs, and go on from what they saved."""
    if dist.get_rank() == 0:
        return
    world = World(processes=(2, 1))
    mesh = DeviceMesh.from_group(world.new_group(range(2)), "cpu", mesh=[2, 1], mesh_dim_names=("tp",))
    model, again = model_of(torch.float32, mesh), model_of(torch.float32, mesh)
    optimizer, resumed = (torch.optim.AdamW(m.parameters()) for m in (model, again))
    steps(model, optimizer, range(1, 3))
    save(model, optimizer, folder, world)
    load_optimizer(resumed, again, folder, [NAMES], world)
    for name, parameter in again.named_parameters():
        saved, read = optimizer.state[model.get_parameter(name)]["exp_avg"], resumed.state[parameter]["exp_avg"]
        assert torch.equal(local(read), local(saved)), name


@pytest.mark.distributed
def test_owners_are_ranks_of_the_plan_not_processes(tmp_path):
    run_distributed(run_in_part_of_the_processes, 3, str(tmp_path), timeout=60)
    model, trained = model_of(torch.float32, None), model_of(torch.float32, None)
    optimizer, expected = (torch.optim.AdamW(m.parameters()) for m in (model, trained))
    load_optimizer(optimizer, model, tmp_path, [NAMES], World())
    steps(trained, expected, range(1, 3))
    for name in NAMES:
        want = expected.state[trained.get_parameter(name)]["exp_avg"]
        torch.testing.assert_close(optimizer.state[model.get_parameter(name)]["exp_avg"], want)


class ChangesWithMode(torch.optim.SGD):
    """Changes weights in `eval()`, as schedule-free optimizers do."""

    def eval(self) -> None:
        pass


def slices_of(model: nn.Module, rank: int) -> OptimizerSlices:
    """The slices of one of two ranks, without the other."""
    names = tuple(name for name, _ in model.named_parameters())
    return OptimizerSlices([SyncGroup((0, 1), names, (), 2)], dict(model.named_parameters()), rank, {(0, 1): None})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("cls", "holds_all", "on_slices", "cause"),
    [
        (ByPlace, False, False, "`tests.ByPlace`"),
        (ByOthers, False, False, "`tests.ByOthers`"),
        (ChangesWithMode, True, True, r"`train\(\)` and `eval\(\)`"),
        (Adafactor, True, True, "update of a slice"),
        (ByPlace, True, True, "`zero_stage=0`"),
    ],
)
def test_optimizers_that_need_all_parameters_or_whole_ones_are_refused_on_parts(cls, holds_all, on_slices, cause):
    model = model_of(torch.float32, None)
    prepared(cls, model)
    with pytest.raises(ValueError, match=cause):
        prepared(cls, model, holds_all, slices=slices_of(model, 0) if on_slices else None)


def test_a_schedule_does_not_keep_an_optimizer_from_being_tried():
    model = model_of(torch.float32, None)
    optimizer = ByPlace(model.parameters())
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # lets `step` of this optimizer count
    with pytest.raises(ValueError, match="`tests.ByPlace`"):
        prepare_optimizer(optimizer, holds_all=False, world=World())


class ByRows(Plain):
    """Has a value of its state for each row, of which parts of rows update alike."""

    def update(self, index: int, parameter: torch.Tensor, lr: float, state: dict[str, Any]) -> None:
        state["rows"] = torch.zeros(len(parameter))
        super().update(index, parameter, lr, state)


@pytest.mark.parametrize(
    ("cls", "sizes", "cause"),
    [
        (ByPlace, (), "`tests.ByPlace`.*`resilience`"),
        (ByNorm, (1, 2), "`tests.ByNorm`.*`tp_size`"),
        (ByNorm, (2,), "`tests.ByNorm`.*`tp_size`"),
        (Adafactor, (1, 2), "`transformers.Adafactor`"),
        (ByRows, (1, 2), "`rows` of `matrix`"),
    ],
)
def test_optimizers_that_a_later_plan_could_not_use_are_refused_at_the_start(cls, sizes, cause):
    model = nn.Module()
    model.register_parameter("matrix", nn.Parameter(torch.randn(64, 80)))
    model.register_parameter("bias", nn.Parameter(torch.randn(64)))
    prepared(cls, model)
    with pytest.raises(ValueError, match=cause):
        prepared(cls, model, later={model.matrix: PossibleCuts("matrix", 0, sizes)} if sizes else {})


@pytest.mark.parametrize(("cls", "sizes"), [(torch.optim.AdamW, (1, 2)), (ByRows, (2,)), (Adafactor, ())])
def test_optimizers_that_later_plans_can_use_are_not_refused(cls, sizes):
    model = model_of(torch.float32, None)
    prepared(cls, model, later={model.rows: PossibleCuts("rows", 0, sizes)} if sizes else {})


def test_8_bit_state_is_refused_where_later_plans_cut_it():
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes has the 8-bit optimizers")
    # an earlier Trainer of this process gives the embedding 32 bits, by its place, in all optimizers
    bitsandbytes.optim.GlobalOptimManager.get_instance().index2config.clear()
    model = nn.Module()
    model.register_parameter("matrix", nn.Parameter(torch.randn(64, 80)))
    prepared(bitsandbytes.optim.AdamW8bit, model, later={model.matrix: PossibleCuts("matrix", 0, (2,))})
    with pytest.raises(ValueError, match="of `matrix`"):
        prepared(bitsandbytes.optim.AdamW8bit, model, later={model.matrix: PossibleCuts("matrix", 0, (1, 2))})


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adagrad])
def test_slices_read_their_share_of_the_state_of_whole_parameters(tmp_path, cls):
    model = nn.Module()
    for name, shape in (("matrix", (3, 5)), ("gate", (1,)), ("scale", ())):
        model.register_parameter(name, nn.Parameter(torch.randn(shape)))
    model.matrix.data = model.matrix.data.t().contiguous().t()  # not contiguous
    names = [name for name, _ in model.named_parameters()]
    stock = cls(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    stock.step()
    torch.save(stock.state_dict(), tmp_path / "optimizer.pt")
    key = {torch.optim.AdamW: "exp_avg", torch.optim.Adagrad: "sum"}[cls]
    shares: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    for rank in range(2):
        optimizer = prepared(cls, model, slices=slices_of(model, rank))
        load_optimizer(optimizer, model, tmp_path, [names], World())
        for name, entry in zip(names, optimizer.param_groups[0]["params"], strict=True):
            state = optimizer.state[entry]
            assert state[key].shape == entry.shape and float(state["step"]) == 1
            shares[name].append(state[key].clone())
            entry.grad = torch.ones_like(entry)
        optimizer._optimizer_step_post_hooks.clear()  # which gather from the other rank
        optimizer.step()
    for name, parameter in zip(names, stock.param_groups[0]["params"], strict=True):
        assert torch.equal(torch.cat(shares[name]), stock.state[parameter][key].reshape(-1))
