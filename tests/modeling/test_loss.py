"""The loss as a sum equals the means of transformers."""

import pytest
import torch
from transformers.trainer_pt_utils import LabelSmoother

from hf_mmparallel.modeling import check_given_loss, given_loss, token_loss
from tests import tiny

torch.set_num_threads(1)
smoothings = pytest.mark.parametrize("label_smoothing", [0.0, 0.1])


def make_case(family: str = "llama") -> tuple:
    model = tiny.FAMILIES[family]()
    batch = tiny.collate(family)(tiny.make_dataset(family, 4))
    with torch.no_grad():
        output = model(**batch)
    return model, batch["labels"], output


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_mean_over_tokens_is_the_models_loss(family):
    model, labels, output = make_case(family)
    loss, num_tokens = token_loss(model, output.logits, labels)
    assert num_tokens == (labels[:, 1:] != -100).sum()
    torch.testing.assert_close(loss / num_tokens, output.loss, rtol=1e-6, atol=0)


@smoothings
def test_sums_of_parts_add_up(label_smoothing):
    model, labels, output = make_case()
    whole, num_tokens = token_loss(model, output.logits, labels, label_smoothing)
    parts = [token_loss(model, output.logits[i : i + 1], labels[i : i + 1], label_smoothing) for i in range(4)]
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
    assert sum(count for _, count in parts) == num_tokens
    if label_smoothing:
        expected = LabelSmoother(epsilon=label_smoothing)(output, labels, shift_labels=True)
        torch.testing.assert_close(whole / num_tokens, expected)


@smoothings
def test_without_targets_the_sum_is_zero(label_smoothing):
    model, labels, output = make_case()
    logits = output.logits.clone().requires_grad_()
    loss, num_tokens = token_loss(model, logits, torch.full_like(labels, -100), label_smoothing)
    loss.backward()
    assert loss == 0 and num_tokens == 0
    assert not logits.grad.any()


@smoothings
def test_half_precision_logits_are_summed_in_float32(label_smoothing):
    model, labels, output = make_case()
    logits = output.logits.to(torch.bfloat16)
    loss, _ = token_loss(model, logits, labels, label_smoothing)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, token_loss(model, logits.float(), labels, label_smoothing)[0], rtol=0, atol=0)


def test_shifted_labels_are_taken_as_they_are():
    model, labels, output = make_case()
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    found, expected = (
        token_loss(model, output.logits, given, shifted=is_shifted)
        for given, is_shifted in ((shifted, True), (labels, False))
    )
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_a_loss_of_a_user_is_summed_and_has_to_add_up():
    model, labels, output = make_case()

    def summed(outputs, labels, num_items_in_batch):
        return model.loss_function(outputs.logits, labels, model.config.vocab_size, num_items_in_batch)

    loss, num_tokens = given_loss(summed, output.logits, labels)
    torch.testing.assert_close(loss / num_tokens, output.loss)
    check_given_loss(summed, model.config.vocab_size)
    for wrong in (
        lambda outputs, labels, num_items_in_batch: summed(outputs, labels, None),
        lambda outputs, labels, num_items_in_batch: summed(outputs, labels, num_items_in_batch) ** 2,
    ):
        with pytest.raises(ValueError, match="compute_loss_func"):
            check_given_loss(wrong, model.config.vocab_size)
