"""What compiling a mask launches and waits for, with the search in torch and in one kernel."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hf_mmparallel.kernels.bitfield_attention import BitfieldMask, encode_words, interval_kernels, intervals
from hf_mmparallel.kernels.bitfield_attention.mask_plan import compile_mask
from tests.deep_cases import deep


class _Launches(TorchDispatchMode):
    """Counts the operations that would start a kernel: all but views and empty tensors."""

    num: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += not func.is_view and func.overloadpacket is not torch.ops.aten.empty
        return func(*args, **(kwargs or {}))


def _packed_spans(length: int) -> Tensor:
    """Samples of 1024 tokens with two images each, and padding at the end."""
    place = torch.arange(length)[None]
    at = place % 1024
    span = ((at >= 20) & (at < 420)).long() + 2 * ((at >= 500) & (at < 900)).long()
    segment = torch.where(place < length - 64, place // 1024 + 1, 0)
    return encode_words(segment, torch.where(segment > 0, span, 0))


@pytest.mark.parametrize("kernel, most", [(False, 128), deep(True, 94)])
def test_launches_and_waits_of_a_packed_row(monkeypatch: pytest.MonkeyPatch, kernel: bool, most: int):
    """On a GPU it is they that take the time. With as many more as the limit allows, change the limit knowingly."""
    mask = BitfieldMask.from_words(_packed_spans(8192))
    waits: list[str] = []
    for name in ("tolist", "item", "__bool__", "__int__", "cpu"):
        read = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, read=read, name=name: (waits.append(name), read(self))[1])
    launches = _Launches()
    search, searches = interval_kernels.search_bounds, []

    def search_once(*arguments: Any) -> Tensor:
        launches.num += 1
        num_waits = len(waits)
        with _disable_current_modes():  # the interpreter itself calls torch
            searches.append(search(*arguments))
        del waits[num_waits:]
        return searches[-1]

    monkeypatch.setattr(intervals, "_has_kernel", lambda tensor: kernel)
    monkeypatch.setattr(interval_kernels, "search_bounds", search_once)
    with launches:
        plan = compile_mask(mask, 4096, num_heads=32, num_programs=4)
    assert plan.interval and plan.split is None
    assert len(searches) == kernel
    assert waits == ["tolist", "tolist"]
    assert most - 5 <= launches.num <= most
