"""`gather_model`: the weights and buffers of all ranks, without a random model in between."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests import tiny
from tests.distributed import run_distributed
from tests.trainer import runs

pytestmark = pytest.mark.distributed
VISION, LM = "vision", "language_model"
RANDOM = ("normal_", "uniform_", "bernoulli_", "trunc_normal_", "rand")


class Drawn(TorchDispatchMode):
    """Counts the values that are drawn outside the meta device."""

    def __init__(self):
        super().__init__()
        self.num_values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(word in func.__name__ for word in RANDOM) and isinstance(result, torch.Tensor) and not result.is_meta:
            self.num_values += result.numel()
        return result


def custom() -> Any:
    """A composed model with a projector of the user's own class."""
    from tests.composed import test_composed as parts

    torch.manual_seed(0)
    projector = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 24))
    return parts.compose("clip_llama", projectors=projector)[0]


def built(family: str) -> Any:
    """A model in bfloat16 but for its buffers, one of which is not what its class would compute."""
    model = custom() if family == "custom" else tiny.FAMILIES[family]()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    for name, buffer in model.named_buffers():
        if "inv_freq" in name:
            buffer.mul_(1.5)
    return model


def gathered(family: str, sizes: dict[str, Any]) -> Any:
    trainer = runs.make_trainer("llava" if family == "custom" else family, sizes, model=built(family))
    with Drawn() as drawn:
        whole = trainer.gather_model()
    return drawn.num_values, whole if whole is None else (whole.state_dict(), dict(whole.named_buffers()))


@pytest.mark.parametrize(
    "family", runs.deep_but(["llava", "qwen2_5_vl", "llama_tied", "custom"], "qwen2_5_vl", "custom")
)
def test_the_gathered_model_has_all_weights_and_buffers_and_draws_none(family: str):
    expected = built(family)
    sizes = {LM: {"pp_size": 2}} if family == "llama_tied" else {VISION: {}, LM: {"pp_size": 2}}
    num_ranks = 2 if family == "llama_tied" else 3
    num_drawn, (state, buffers) = run_distributed(gathered, num_ranks, family, sizes)[0]
    assert num_drawn == 0
    assert state.keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert state[name].dtype == tensor.dtype == torch.bfloat16 and torch.equal(state[name], tensor), name
    wanted = dict(expected.named_buffers())
    assert buffers.keys() == wanted.keys() and any("inv_freq" in name for name in wanted)
    for name, buffer in wanted.items():
        assert buffers[name].dtype == buffer.dtype and torch.equal(buffers[name], buffer), name


def generated(family: str) -> Any:
    whole: Any = runs.make_trainer(family, {VISION: {}, LM: {"tp_size": 2}}).gather_model()
    if whole is None:
        return None
    assert whole.config is not None and not whole.training
    batch = tiny.collate(family)(tiny.make_dataset(family, 2))
    batch.pop("labels")
    with torch.no_grad():
        return whole(**batch).logits, copy.deepcopy(whole).generate(**batch, max_new_tokens=2, do_sample=False)


def test_the_gathered_model_generates():
    model: Any = tiny.FAMILIES["llava"]().eval()
    batch = tiny.collate("llava")(tiny.make_dataset("llava", 2))
    batch.pop("labels")
    logits, tokens = run_distributed(generated, 3, "llava")[0]
    torch.testing.assert_close(logits, model(**batch).logits)
    assert torch.equal(tokens, model.generate(**batch, max_new_tokens=2, do_sample=False))
