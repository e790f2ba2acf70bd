"""The loss of logits that never exist whole equals that of whole ones."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_mmparallel.modeling import lazy_logits, token_loss, whole_logits
from hf_mmparallel.modeling.lazy_logits import LazyLogits, return_lazy_logits
from hf_mmparallel.modeling.parallel_linear import use_plain_tensors
from tests import tiny
from tests.distributed import run_distributed

torch.set_num_threads(1)
BATCH, LENGTH, HIDDEN, WORDS = 3, 7, 8, 30
CHUNK = 4 * WORDS  # of four tokens: 21 are five chunks and a smaller one
Made = tuple[Tensor, list[Tensor | None]]  # loss; gradients of hidden states, weight and bias
Model = Callable[[Tensor], Tensor]  # what a model makes of the logits of its head


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(lazy_logits, "MAX_LOGITS", CHUNK)
    yield


def make_head(dtype: torch.dtype = torch.float64, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(HIDDEN, WORDS, bias=bias, dtype=torch.float64).to(dtype)


def make_inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Hidden states and targets, a third of which are ignored."""
    generator = torch.Generator().manual_seed(1)
    hidden = 3 * torch.randn(BATCH, LENGTH, HIDDEN, generator=generator, dtype=torch.float64)
    targets = torch.randint(WORDS, (BATCH, LENGTH), generator=generator)
    return hidden.to(dtype).requires_grad_(), targets.masked_fill(torch.rand(targets.shape) < 1 / 3, -100)


def compute(head: nn.Linear, hidden: Tensor, loss_of: Callable[[Tensor], Tensor], factor: float = 1.0) -> Made:
    loss, inputs = loss_of(head(hidden)), (hidden, head.weight, head.bias)
    trained = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    found = iter(torch.autograd.grad(factor * loss, trained, allow_unused=True))
    return loss.detach(), [None if tensor is None or not tensor.requires_grad else next(found) for tensor in inputs]


def lazily(head: nn.Linear) -> nn.Linear:
    """The same head with lazy logits."""
    lazy = nn.Linear(HIDDEN, WORDS, bias=head.bias is not None, dtype=head.weight.dtype)
    lazy.load_state_dict(head.state_dict())
    return_lazy_logits(lazy)
    return lazy


def assert_close(found: Made, expected: Made, **tolerance: Any) -> None:
    tolerance = tolerance or {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(found[0], expected[0], equal_nan=True, **tolerance)
    for own, other in zip(found[1], expected[1], strict=True):
        assert (own is None) == (other is None)
        if own is not None:
            torch.testing.assert_close(own, other, **tolerance)


def causal(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """As loss functions of transformers do it."""
    return functional.cross_entropy(logits.view(-1, WORDS), targets.view(-1), **options)


MODELS: dict[str, Model] = {
    "plain": lambda logits: logits,
    "softcap of Gemma": lambda logits: torch.tanh(logits / 5.0) * 5.0,
    "softcap by names": lambda logits: functional.tanh(logits.div(5.0)).mul(5),
    "scales of Cohere and Granite": lambda logits: 0.5 * logits / 3,
    "shifts": lambda logits: -(1.0 - (logits + 2) - 0.5),
    "contiguous": lambda logits: logits.contiguous().flatten(0, 1).reshape(BATCH, LENGTH, -1),
    "casts": lambda logits: logits.to(torch.float64).double().to(logits.device).to(dtype=torch.float64),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "options",
    [
        {"reduction": "sum"},
        {"reduction": "mean"},
        {"reduction": "sum", "label_smoothing": 0.1},
        {"reduction": "mean", "label_smoothing": 0.2, "ignore_index": 4},
    ],
    ids=["sum", "mean", "smoothed sum", "smoothed mean"],
)
def test_the_loss_and_its_gradients_are_those_of_whole_logits(name: str, options: dict[str, Any]):
    hidden, targets = make_inputs()
    targets = targets if options.get("ignore_index", -100) == -100 else targets.clamp(min=4)
    head, model = make_head(), MODELS[name]
    kept: list[Tensor] = []

    def loss_of(logits: Tensor) -> Tensor:
        kept.append(logits)
        return causal(model(logits), targets, **options)

    expected, found = compute(head, hidden, loss_of, 3.0), compute(lazily(head), hidden, loss_of, 3.0)
    assert_close(found, expected)
    assert not isinstance(kept[0], LazyLogits)
    assert isinstance(kept[1], LazyLogits) and kept[1]._computed is None


def test_a_cast_between_two_others_rounds():
    hidden, targets = make_inputs()
    head = make_head()
    found, expected = (
        compute(own, hidden, lambda logits: causal(logits.bfloat16().double(), targets))
        for own in (lazily(head), head)
    )
    assert_close(found, expected, rtol=0.02, atol=1e-3)
    assert found[0].dtype == torch.float64
    torch.testing.assert_close(found[0], expected[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("bias", [False, True])
def test_without_targets(reduction: str, bias: bool):
    hidden, targets = make_inputs()
    head = make_head(bias=bias)

    def loss_of(logits: Tensor) -> Tensor:
        return causal(logits, torch.full_like(targets, -100), reduction=reduction)

    assert_close(compute(lazily(head), hidden, loss_of), compute(head, hidden, loss_of))


def test_a_target_that_is_no_word_is_refused():
    hidden, targets = make_inputs()
    for word in (WORDS, -1):
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            causal(lazily(make_head())(hidden), targets.masked_fill(targets == targets.max(), word))


@pytest.mark.parametrize("in_chunks", [False, True])
def test_only_targets_get_logits(in_chunks: bool, monkeypatch: pytest.MonkeyPatch):
    """A loss of few logits computes those of all targets at once, as autograd does; also if there are no targets."""
    monkeypatch.setattr(lazy_logits, "MAX_LOGITS", (6 if in_chunks else BATCH * LENGTH) * WORDS)
    model, (hidden, _) = tiny.FAMILIES["llama"](), make_inputs(torch.float32)
    head = make_head(torch.float32)
    for num_targets in (10, 1, 0):
        labels = few_targets(num_targets)
        found, expected = (
            compute(own, hidden, lambda logits, labels=labels: token_loss(model, logits, labels)[0])
            for own in (lazily(head), head)
        )
        assert_close(found, expected, rtol=1e-5, atol=1e-6)
        lazy = lazily(head)
        with Sizes() as sizes:
            loss, count = token_loss(model, lazy(hidden), labels)
            loss.backward()
        assert count == num_targets and count.device.type == "cpu"
        most = min(num_targets, 6) if in_chunks else num_targets
        assert sizes.largest == max(most * WORDS, hidden.numel(), head.weight.numel())


def few_targets(number: int) -> Tensor:
    """Labels, of which some are targets."""
    generator = torch.Generator().manual_seed(2)
    positions = torch.randperm(BATCH * (LENGTH - 1), generator=generator)[:number]
    labels = torch.full((BATCH, LENGTH - 1), -100)
    labels.view(-1)[positions] = torch.randint(WORDS, (number,), generator=generator)
    return functional.pad(labels, (1, 0), value=3)  # the first token is none that anything predicts


@pytest.mark.parametrize("frozen", ["weight", "bias", "hidden", "all"])
def test_what_is_frozen_gets_no_gradient(frozen: str):
    hidden, targets = make_inputs()
    head = make_head()
    for name, tensor in {**dict(head.named_parameters()), "hidden": hidden}.items():
        tensor.requires_grad_(frozen not in (name, "all"))
    lazy = lazily(head)
    for name, parameter in lazy.named_parameters():
        parameter.requires_grad_(head.get_parameter(name).requires_grad)
    loss = causal(lazy(hidden), targets)
    assert loss.requires_grad == (frozen != "all") == lazy(hidden).requires_grad
    if frozen == "all":
        torch.testing.assert_close(loss, causal(head(hidden), targets), rtol=1e-12, atol=0)
    else:
        assert_close(*(compute(own, hidden, lambda logits: causal(logits, targets)) for own in (lazy, head)))


def relative_errors(found: list[Made], exact: list[Made]) -> list[float]:
    """The errors of losses and gradients, relative to their norms."""
    errors = []
    for number in range(4):
        values, wanted = (torch.stack([flat(made)[number] for made in of_all]).double() for of_all in (found, exact))
        errors.append(float((values - wanted).norm() / wanted.norm()))
    return errors


def flat(made: Made) -> list[Tensor]:
    return [made[0], *(gradient for gradient in made[1] if gradient is not None)]


@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]
)
def test_the_rounding_is_that_of_whole_logits(dtype: torch.dtype, autocast: bool, monkeypatch: pytest.MonkeyPatch):
    """Autocast multiplies float32 weights and hidden states in bfloat16."""
    monkeypatch.setattr(lazy_logits, "MAX_LOGITS", 64 * WORDS)
    head, exact_head = make_head(dtype), make_head(dtype).double()
    exact, plain, lazy = [], [], []
    for seed in range(16):
        torch.manual_seed(seed)
        hidden, targets = torch.randn(500, HIDDEN).to(dtype), torch.randint(WORDS, (500,))

        def loss_of(logits: Tensor, targets: Tensor = targets) -> Tensor:
            return causal(torch.tanh(logits / 5.0).mul(5.0).float(), targets, reduction="sum", label_smoothing=0.1)

        def exact_loss_of(logits: Tensor, targets: Tensor = targets) -> Tensor:
            return causal(torch.tanh(logits / 5.0).mul(5.0), targets, reduction="sum", label_smoothing=0.1)

        exact.append(compute(exact_head, hidden.double().requires_grad_(), exact_loss_of))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            plain.append(compute(head, hidden.requires_grad_(), loss_of))
            lazy.append(compute(lazily(head), hidden, loss_of))
    dtypes, plain_dtypes = ([tensor.dtype for tensor in flat(made)] for made in (lazy[0], plain[0]))
    assert dtypes == plain_dtypes == [torch.float32, *3 * [dtype]]
    for error, plain_error in zip(relative_errors(lazy, exact), relative_errors(plain, exact), strict=True):
        assert 0 < error <= 1.5 * plain_error


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.log_softmax(-1).square().sum(),
    "a learned scale": lambda logits: (logits * torch.full((), 2.0, dtype=torch.float64)).sum(),
    "columns": lambda logits: logits[..., :5].sum(),
    "one column": lambda logits: logits[0, 0, 3],
    "some tokens": lambda logits: logits[:, :-1].sum() + logits[1].square().sum() + logits[..., 2, :].sum(),
    "a mask": lambda logits: logits[torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % 2 == 0].exp().sum(),
    "in place": lambda logits: logits.mul_(2.0).div_(3.0).square().sum(),
    "assignment": lambda logits: _assigned(logits).sum(),
    "a loss for each token": lambda logits: functional.cross_entropy(
        logits.view(-1, WORDS), torch.arange(BATCH * LENGTH), reduction="none"
    ).sum(),
    "weights of words": lambda logits: functional.cross_entropy(
        logits.view(-1, WORDS), torch.arange(BATCH * LENGTH), torch.arange(WORDS).double()
    ),
    "words first": lambda logits: functional.cross_entropy(logits.transpose(1, 2), torch.zeros(BATCH, LENGTH).long()),
    "detached": lambda logits: logits.sum() + logits.detach().exp().sum() + logits.data.sum(),
    "joined": lambda logits: torch.cat([logits, logits.neg()]).exp().sum(),
}


def _assigned(logits: Tensor) -> Tensor:
    logits[:, 2:4] = 0.0
    return logits.exp()


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_function_gets_whole_logits(name: str):
    hidden, _ = make_inputs()
    head = make_head()
    assert_close(compute(lazily(head), hidden, OTHERS[name]), compute(head, hidden, OTHERS[name]))


def test_what_is_known_of_logits_computes_nothing():
    hidden, _ = make_inputs()
    logits, expected = lazily(make_head())(hidden), make_head()(hidden)
    for own in (logits, logits.view(-1, WORDS), logits[:, :-1].float(), logits[1], logits[0, 2:3, :], logits[..., :]):
        assert isinstance(own, LazyLogits)
    assert logits.shape == logits.size() == expected.shape and logits.size(-1) == WORDS and len(logits) == BATCH
    assert (logits.dtype, logits.device, logits.ndim) == (expected.dtype, expected.device, 3)
    assert logits.requires_grad and logits.is_floating_point() and not logits.detach().requires_grad
    assert logits._computed is None
    assert torch.equal(whole_logits(logits), expected) and whole_logits(expected) is expected
    assert whole_logits(logits) is whole_logits(logits)


def test_logits_that_were_made_without_a_graph_have_none():
    hidden, targets = make_inputs()
    head = lazily(make_head())
    with torch.no_grad():
        logits = head(hidden)
    assert not logits.requires_grad and not logits.exp().requires_grad
    logits = head(hidden)
    with torch.no_grad():
        assert not causal(logits, targets).requires_grad
        logits.isnan()
    assert logits.exp().requires_grad


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_the_loss_functions_of_models_compute_no_logits(family: str, label_smoothing: float):
    model = tiny.FAMILIES[family]()
    batch = tiny.collate(family)(tiny.make_dataset(family, 3))
    labels = batch.pop("labels")
    expected = token_loss(model, model(**batch).logits, labels, label_smoothing)
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    return_lazy_logits(head)
    logits = model(**batch).logits
    found = token_loss(model, logits, labels, label_smoothing)
    assert isinstance(logits, LazyLogits) and logits._computed is None
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


class Sizes(TorchDispatchMode):
    """Notes the elements of the largest tensor that operations have made."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage().data_ptr() for tensor in _stored((args, kwargs))}
        for tensor in _stored(result):
            if tensor.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, tensor.numel())
        return result


def _stored(values: Any) -> list[Tensor]:
    """Tensors that have a storage of their own."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor)]
    return [tensor for tensor in tensors if not tensor.is_meta and not isinstance(tensor, DTensor)]


def largest_tensor(head: nn.Linear, hidden: Tensor, targets: Tensor) -> int:
    """Elements of the largest tensor that a loss and its backward make."""
    with Sizes() as sizes:
        logits = head(hidden)
        loss = causal(logits.float(), targets, reduction="sum", label_smoothing=0.1)
        loss.backward()
    return sizes.largest


def test_no_tensor_is_larger_than_a_chunk(monkeypatch: pytest.MonkeyPatch):
    tokens = WORDS
    monkeypatch.setattr(lazy_logits, "MAX_LOGITS", 10 * WORDS)
    hidden, targets = torch.randn(tokens, HIDDEN, requires_grad=True), torch.randint(WORDS, (tokens,))
    head = make_head(torch.float32)
    assert largest_tensor(head, hidden, targets) == tokens * WORDS
    assert largest_tensor(lazily(head), hidden, targets) == 10 * WORDS


# Under tensor parallelism


def tp_head(head: nn.Linear) -> nn.Linear:
    """The head whose words all ranks share."""
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()), mesh_dim_names=("tp",))
    shared = nn.Linear(HIDDEN, WORDS, bias=head.bias is not None, dtype=head.weight.dtype)
    for name, parameter in head.named_parameters():
        shared._parameters[name] = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
    use_plain_tensors(shared, "colwise_gather_output", mesh)
    return shared


def compute_shared(head: nn.Linear, hidden: Tensor, loss_of: Callable[[Tensor], Tensor]) -> Made:
    """The loss and whole gradients, after the gathers that only a test needs."""
    loss, found = compute(tp_head(head), hidden, loss_of)
    return loss, [own.full_tensor() if isinstance(own, DTensor) else own for own in found]


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_share_the_words_compute_the_same(world_size: int):
    made = run_distributed(compare_shared, world_size)
    assert all(values == made[0] for values in made)


def compare_shared() -> list[bytes]:
    """Compares losses with those of one process; returns their bits, and those of the gradients of hidden states."""
    lazy_logits.MAX_LOGITS = 4 * WORDS // dist.get_world_size()
    hidden, targets = make_inputs()
    bits = []
    head = make_head()
    for options in ({"reduction": "sum", "label_smoothing": 0.1}, {"reduction": "mean"}):
        for model in MODELS.values():

            def loss_of(logits: Tensor, model: Model = model, options: dict[str, Any] = options) -> Tensor:
                return causal(model(logits), targets, **options)

            found = compute_shared(head, hidden, loss_of)
            assert_close(found, compute(head, hidden, loss_of))
            bits += [tensor.numpy().tobytes() for tensor in flat(found)]
    for other in OTHERS.values():
        assert_close(compute_shared(head, hidden, other), compute(head, hidden, other))
    function = tiny.FAMILIES["llama"]()
    for num_targets in (10, 0):
        labels = few_targets(num_targets)

        def loss_of_targets(logits: Tensor, labels: Tensor = labels) -> Tensor:
            return token_loss(function, logits, labels)[0]

        found = compute_shared(head, hidden, loss_of_targets)
        assert_close(found, compute(head, hidden, loss_of_targets), rtol=1e-6, atol=1e-6)
        bits += [tensor.numpy().tobytes() for tensor in flat(found)]
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        causal(tp_head(head)(hidden), torch.full_like(targets, WORDS))
    lazy_logits.MAX_LOGITS = 2**27
    size = dist.get_world_size()
    largest = largest_tensor(tp_head(head.float()), hidden.detach().float().requires_grad_(), targets)
    # its own logits, or the four numbers of each token that every rank has of all
    assert largest == BATCH * LENGTH * max(WORDS // size, 4 * size)
    return bits
