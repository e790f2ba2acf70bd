"""Reads of inputs in host memory: what a forward computes stays what it was, on a device that counts its waits."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks import counted_device
from hf_mmparallel.modeling.host_values import KnownOnHost, send_known
from tests.distributed import run_distributed

IDS = torch.tensor([[5, 1, 1, 7, 0, 0], [1, 3, 1, 1, 2, 0]])
GRID = torch.tensor([[1, 2, 3], [2, 1, 2]])


def positions(ids: Tensor, grid: Tensor, features: Tensor) -> Tensor:
    """As models find positions: loops over samples and images, masks, sizes that follow from values."""
    result = torch.zeros_like(ids)
    for row, own in enumerate(ids):
        kept = own[own != 0]
        places = torch.arange(kept.max() + len(kept), device=ids.device)[: len(kept)]
        result[row, own != 0] = places
    ends = torch.repeat_interleave(grid[:, 1] * grid[:, 2], grid[:, 0]).cumsum(0)
    for t, h, w in grid.tolist():
        result[0, :1] += t * h * w
    return result + ends.sum()


def placeholders(ids: Tensor, grid: Tensor, features: Tensor) -> Tensor:
    """Features at placeholders, if their number is right; `masked_scatter` needs no number."""
    if (ids == 1).sum() != len(features):
        raise ValueError("other numbers")
    embedded = ids[..., None].float().expand(*ids.shape, 2).clone()
    embedded[ids == 1] = features
    return embedded


def scattered(ids: Tensor, grid: Tensor, features: Tensor) -> Tensor:
    """The gradients of features that are scattered to the rows of placeholders."""
    values = features.clone().requires_grad_()
    embedded = ids[..., None].float().expand(*ids.shape, 2).clone().requires_grad_()
    message = f"{(ids == 1).sum()} rows"
    result = embedded.masked_scatter((ids == 1).unsqueeze(-1).to(embedded.device), values)
    (result * torch.arange(2.0, 14.0, device=ids.device).view(6, 2)).sum().backward()
    assert message == f"{len(features)} rows" and values.grad is not None and embedded.grad is not None
    return torch.cat([result.flatten(0, 1).detach(), values.grad, embedded.grad.flatten(0, 1)])


def changed(ids: Tensor, grid: Tensor, features: Tensor) -> Tensor:
    """Inputs that are changed in place, by what the host knows, and then by what it does not."""
    ids[0] += 1
    assert ids.tolist()[0][0] == 6
    known = ids[1, :2]
    known += grid[0, 0]
    assert ids[1].tolist()[:2] == [2, 4]
    return ids


def changed_unseen(ids: Tensor, grid: Tensor, features: Tensor) -> Tensor:
    """A view that is changed by values which only the device has: reads are its, and wait."""
    view = ids[0]
    view += features[0].long()[0]
    assert ids[0, 0].item() == 5 + int(features[0].long()[0])
    return ids


def padded(ids: Tensor, grid: Tensor, features: Tensor) -> Tensor:
    """Branches on masks, with numbers that become floating and whole again."""
    mask = ids != 0
    assert torch.arange(ids.max()).device.type == "cpu" and torch.tensor([ids[0, 0]]).tolist() == [5]
    assert torch.tensor([len(ids)], device=ids.device).item() == 2
    scaled = (torch.arange(6, device=ids.device) * 1.0).long() + grid[0].prod()
    if not mask.all() and bool(mask[:, 0].all()) and scaled.tolist()[-1] == 11:
        return torch.where(mask, ids, -1)
    raise AssertionError("the branch of another input")


FORWARDS: dict[Callable, int] = {
    **dict.fromkeys((positions, placeholders, scattered, changed, padded), 0),
    changed_unseen: 2,
}
"""Forward -> its waits when the host knows its inputs."""


def waits_of_forwards() -> list[tuple[str, int, int, bool, bool]]:
    """Waits with known values and without, whether the result is that of the CPU, and whether the batch is whole."""
    rows = []
    with counted_device.use_device() as device:
        for forward in FORWARDS:
            features = torch.arange(2 * int((IDS == 1).sum())).view(-1, 2).float()
            want = forward(IDS.clone(), GRID.clone(), features.clone())
            batch = {"ids": IDS.clone(), "grid": GRID.clone()}
            found, is_equal = [], True
            for known in (True, False):
                sent = send_known(batch, device) if known else {k: v.to(device) for k, v in batch.items()}
                inputs = (sent["ids"], sent["grid"], features.to(device))
                counted_device.COUNTS.clear()
                if known:
                    with KnownOnHost(device):
                        result = forward(*inputs)
                else:
                    result = forward(*inputs)
                found.append(sum(counted_device.COUNTS.waits.values()))
                assert result.device == device
                is_equal = is_equal and torch.equal(result.cpu(), want)
            whole = torch.equal(batch["ids"], IDS) and torch.equal(batch["grid"], GRID)
            rows.append((forward.__name__, *found, is_equal, whole))
    return rows


@pytest.mark.distributed
def test_values_that_the_host_knows_are_read_there():
    [rows] = run_distributed(waits_of_forwards, 1)
    assert [name for name, *_ in rows] == [forward.__name__ for forward in FORWARDS]
    for (name, known, unknown, is_equal, whole), waits in zip(rows, FORWARDS.values(), strict=True):
        assert (name, known, is_equal, whole) == (name, waits, True, True)
        assert unknown > waits or name == "changed_unseen", name
