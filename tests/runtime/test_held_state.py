"""What a rank holds between two plans, how it is cut, and what it frees before it lays the model out anew."""

import pytest
import torch
from torch import nn

from hf_mmparallel.plan import StorageSettings
from hf_mmparallel.runtime import held_state
from hf_mmparallel.runtime.held_state import (
    HeldParameter,
    Transfer,
    exchange,
    give_to_optimizer,
    held_parameters,
    let_go,
    restore_state,
)
from hf_mmparallel.runtime.optimizer_slices import Region
from hf_mmparallel.runtime.optimizers import prepare_optimizer
from hf_mmparallel.runtime.updated_copies import MASTER
from hf_mmparallel.world import World
from tests.distributed import run_distributed


def _stepped() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 6)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([model.weight])
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_what_is_not_held_is_freed():
    model, optimizer = _stepped()
    weight = model.weight.detach().clone()
    held = held_parameters(model, optimizer)
    moment = held["weight"].state["exp_avg"].clone()
    let_go(model, optimizer, held)
    assert model.weight.numel() == model.bias.numel() == 0 and not optimizer.state
    assert torch.equal(held["weight"].values, weight) and torch.equal(held["weight"].state["exp_avg"], moment)
    assert held["weight"].on_host == {"step", "exp_avg", "exp_avg_sq"}


def test_copies_in_float32_go_on_with_all_their_digits():
    model = nn.Linear(4, 6, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())

    def prepare(model: nn.Module) -> None:
        prepare_optimizer(
            optimizer, True, World(), None, dict.fromkeys(model.parameters(), StorageSettings(master_weights=True))
        )

    prepare(model)
    for parameter in model.parameters():
        parameter.grad_dtype, parameter.grad = torch.float32, torch.rand(parameter.shape)
    optimizer.step()
    held = held_parameters(model, optimizer)
    let_go(model, optimizer, held)
    new = nn.Linear(4, 6, device="meta")
    for name, part in held.items():
        setattr(new, name, nn.Parameter(part.values))
    give_to_optimizer(optimizer, new, held)
    prepare(new)
    restore_state(optimizer, new, held)
    for name, part in held_parameters(new, optimizer).items():
        assert part.state.keys() == held[name].state.keys() >= {MASTER, "exp_avg"}
        assert all(torch.equal(value, held[name].state[key]) for key, value in part.state.items())
        assert not torch.equal(part.state[MASTER], part.values.float())


def test_what_the_optimizer_has_or_copies_itself_does_not_come_to_the_device():
    values = torch.ones(2)
    state = {"step": torch.tensor(1.0), "exp_avg": values, MASTER: values, "plain": 3}
    moved = HeldParameter(values, 0, state, frozenset({"step"})).to("meta")
    assert (moved.values.device.type, moved.state["exp_avg"].device.type) == ("meta", "meta")
    assert moved.state["step"].device.type == moved.state[MASTER].device.type == "cpu"
    assert moved.state["plain"] == 3 and moved.on_host == {"step"}


def _cut_on_rank() -> tuple[dict[str, HeldParameter], int, int]:
    """Rows of two blocks come from rank 0, columns of eight experts from rank 1; with the most bytes on their way."""
    values = torch.arange(24.0).view(6, 4)
    experts = torch.arange(160.0).view(8, 2, 10)
    weight = HeldParameter(values, 0, {"exp_avg": 2 * values, "step": torch.tensor(3.0)})
    held = {"weight": weight, "experts": HeldParameter(experts, 1, {"exp_avg": -experts})}
    rows, columns = Region(0, 1, 3, 3, 2), Region(2, 5, 10, 10)
    transfers = [
        Transfer("weight", 0, 0, Region(0, 2, 4, 6), Region(0, 0, 2, 3)),
        Transfer("weight", 0, 1, rows, None),
        Transfer("experts", 1, 0, columns, None),
    ]
    most = 0
    make_room = held_state._Window._make_room

    def watched(window: held_state._Window, num_bytes: int) -> None:
        nonlocal most
        make_room(window, num_bytes)
        most = max(most, window._num_bytes)

    held_state._Window._make_room, held_state.COPY_WINDOW_BYTES = watched, 320  # type: ignore[method-assign]
    received, num_bytes = exchange(held, transfers, World())
    return received, num_bytes, most


@pytest.mark.distributed
def test_parts_are_cut_when_they_are_sent_and_joined_where_they_come():
    (first, num_bytes, most), (second, *_) = run_distributed(_cut_on_rank, 2)
    values, experts = torch.arange(24.0).view(6, 4), torch.arange(160.0).view(8, 2, 10)
    assert num_bytes == 4 * (2 * 16 + 1 + 2 * 80), "what a rank keeps is not sent"
    assert most <= 320 < 2 * 4 * 80, "a few rows are on their way at a time"
    assert first["weight"].values.shape == (3, 4) and float(first["weight"].state["step"]) == 3.0
    assert torch.equal(first["weight"].values[:2], values[2:4])
    assert torch.equal(first["weight"].state["exp_avg"][:2], 2 * values[2:4])
    assert torch.equal(second["weight"].values, values[[1, 2, 4, 5]])
    assert torch.equal(first["experts"].values, experts[:, :, 5:])
    assert torch.equal(first["experts"].state["exp_avg"], -experts[:, :, 5:]) and first["experts"].group == 1
