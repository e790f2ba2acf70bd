"""
The load-balancing loss of a mixture of experts (Fedus et al. 2021, Switch Transformer, equations 4 to 6) over a whole
batch that layers, tokens and microbatches divide.

With `c_e` of the choices and the summed probability `s_e` of expert `e`, over all layers and tokens, it is
`E * sum_e (c_e / R) * (s_e / R)`. Choices have no gradient: once those of the whole batch are known, the gradient of
the probabilities is `E * c_e / R^2` for each token, which a router adds in its backward.

Axes: R rows (tokens of all layers), E experts, K experts of a token.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .spec import LOAD_BALANCING_LOSS, has_router_loss, num_experts_of, router_coefficient


class RouterLoss:
    """
    The routers of some layers of a model, which record where tokens go and have the gradient of the loss while
    `output_router_logits` and `router_aux_loss_coef` of the configuration say that the loss counts.
    """

    def __init__(self, model: PreTrainedModel, layers: Iterable[nn.Module], device: torch.device):
        self._config: Any = model.config.get_text_config()
        self.num_experts = num_experts_of(self._config)
        self._device = device
        self._sums: Tensor | None = None  # of the forward that runs
        self._is_real_R: Tensor | None = None
        self._weights_E: Tensor | None = None
        for router, index in _routers(model, layers):
            router.register_forward_hook(partial(self._after_router, index))

    @classmethod
    def of_model(cls, model: PreTrainedModel, layers: Iterable[nn.Module], device: torch.device) -> RouterLoss | None:
        """Returns those of a model whose forward may add such a loss, otherwise `None`."""
        return cls(model, layers, device) if hasattr(_module_of(model), LOAD_BALANCING_LOSS) else None

    @property
    def coefficient(self) -> float:
        """The factor of the loss, 0 if it does not count."""
        return router_coefficient(self._config) or 0.0

    def no_sums(self) -> Tensor:
        """Sums of no rows: choices, probabilities of each expert, and rows, float64 `[2 E + 1]`."""
        return torch.zeros(2 * self.num_experts + 1, dtype=torch.float64, device=self._device)

    @contextmanager
    def recording(self, sums: Tensor, is_real_R: Tensor | None) -> Iterator[None]:
        """Forwards in this context add to sums, over the rows that are no padding."""
        self._sums, self._is_real_R = sums, is_real_R
        try:
            yield
        finally:
            self._sums = self._is_real_R = None

    def of(self, sums: Tensor) -> Tensor:
        """Returns the loss, a float64 scalar, of the sums of a batch, without its factor."""
        chosen_E, probabilities_E, rows = sums.split([self.num_experts, self.num_experts, 1])
        return self.num_experts * (chosen_E @ probabilities_E) / rows.squeeze().clamp(min=1) ** 2

    def weigh(self, sums: Tensor, factor: float) -> None:
        """Sets the gradient of the backwards that follow, `factor` times that of the loss with these sums."""
        rows = sums[-1].clamp(min=1)
        self._weights_E = (factor * self.coefficient * self.num_experts * sums[: self.num_experts] / rows**2).float()

    def _after_router(self, index: int, router: nn.Module, args: Any, output: Any) -> Any:
        if not self.coefficient:
            return output
        logits_RE = output[index].reshape(-1, self.num_experts)
        if self._sums is not None:  # no recomputed forward
            self._sums += _row_sums(logits_RE.detach(), self._config.num_experts_per_tok, self._is_real_R)
        if not logits_RE.requires_grad:
            return output
        # what the experts are weighed with has a way to the loss, the logits may have none
        carrier = next(i for i, v in enumerate(output) if i != index and torch.is_tensor(v) and v.requires_grad)
        carried = _AddGradient.apply(output[carrier], logits_RE, self, self._is_real_R)
        return (*output[:carrier], carried, *output[carrier + 1 :])

    def gradient(self, logits_RE: Tensor, is_real_R: Tensor | None) -> Tensor:
        assert self._weights_E is not None
        with torch.enable_grad():
            logits_RE = logits_RE.detach().requires_grad_()
            loss_R = logits_RE.softmax(-1, dtype=torch.float32) @ self._weights_E
            loss = loss_R.sum() if is_real_R is None else loss_R @ is_real_R
            return torch.autograd.grad(loss, logits_RE)[0]


class _AddGradient(torch.autograd.Function):
    """Passes a tensor on, and adds the gradient of the loss to the logits in the backward."""

    @staticmethod
    def forward(ctx: Any, carried: Tensor, logits_RE: Tensor, loss: RouterLoss, is_real_R: Tensor | None) -> Tensor:
        ctx.save_for_backward(logits_RE)
        ctx.loss, ctx.is_real_R = loss, is_real_R
        return carried.view_as(carried)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (logits_RE,) = ctx.saved_tensors
        return gradient, ctx.loss.gradient(logits_RE, ctx.is_real_R), None, None


def _row_sums(logits_RE: Tensor, num_chosen: int, is_real_R: Tensor | None) -> Tensor:
    probabilities_RE = logits_RE.softmax(-1, dtype=torch.float32)
    chosen_RK = probabilities_RE.topk(num_chosen, dim=-1).indices
    is_real_R = logits_RE.new_ones(len(logits_RE), dtype=torch.float32) if is_real_R is None else is_real_R
    chosen_E = torch.zeros(logits_RE.shape[1], device=logits_RE.device)
    chosen_E.index_add_(0, chosen_RK.flatten(), is_real_R.repeat_interleave(num_chosen))
    return torch.cat([chosen_E, is_real_R @ probabilities_RE, is_real_R.sum()[None]]).double()


def _routers(model: PreTrainedModel, layers: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, int]]:
    """The modules of layers whose logits transformers records, and the index of these in their output."""
    recorders = [
        recorder
        for part in model.modules()
        if isinstance(part, PreTrainedModel)
        for recorder in [(part._can_record_outputs or {}).get("router_logits")]
        if recorder is not None
    ]
    kinds = {recorder.target_class: recorder.index for recorder in recorders}
    for layer in layers:
        yield from ((module, kinds[type(module)]) for module in layer.modules() if type(module) in kinds)


def _module_of(model: PreTrainedModel) -> Any:
    return sys.modules[type(model).__module__]


def check_router_loss(model: PreTrainedModel, compiles: bool = False) -> None:
    """Raises `ValueError` if the load-balancing loss of a model is none that a plan can add up."""
    if not has_router_loss(model):
        return
    name, config = type(model).__name__, model.config.get_text_config()
    if compiles:
        raise ValueError(
            f"`torch_compile=True` can't be used with `output_router_logits=True` of `{name}`: the loss over the "
            "experts' load takes the logits out of compiled layers. Leave one of them out."
        )
    drawn = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(6, 4, generator=drawn) for _ in range(2))
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    sums = torch.stack([_row_sums(of_layer, 2, mask.flatten().float()) for of_layer in logits]).sum(0)
    wanted = float(4 * (sums[:4] @ sums[4:8]) / sums[8] ** 2)
    try:
        found = float(getattr(_module_of(model), LOAD_BALANCING_LOSS)(logits, 4, 2, mask))
    except (TypeError, RuntimeError, ValueError):  # it has other arguments
        found = math.nan
    is_known = router_coefficient(config) is not None and num_experts_of(config) > 0
    if not is_known or not math.isclose(wanted, found, rel_tol=1e-5):
        raise ValueError(
            f"`output_router_logits=True` of `{name}` adds a loss over the experts' load that is not the one of "
            f"`router_aux_loss_coef` in other models ({found:.6g} rather than {wanted:.6g} for random "
            "logits), which a plan adds up. Set it to `False`."
        )
