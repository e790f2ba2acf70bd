"""
Words of the masks with which models are trained, int64 `[batch, length]`, one function per family of masks.

Rows are described token by token, by integers `[batch, length]`: `segment` is the sample of each token, from 1, 0 for
padding; `image` is the image of a token, counted from 1 in each sample or in the row, 0 for none. Images are
distinguished by their numbers, so that two adjacent images remain two; [`image_index`] counts them from the grids that
a processor returns.

A fully causal model, such as Llava, Qwen2-VL or InternVL, uses [`causal_words`] for all kinds of tokens. A sliding
window is a setting of the layer and not in the words. Values that exceed a field of the word raise an error. Masks
that words cannot express, such as a window in both directions (`|i - j| <= w`), have no function here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .words import ALL_KINDS, KIND_BITS, KIND_SHIFT, MAX_SEGMENTS, SEES_SHIFT, Kind, decode_words, encode_words

_NAMED_KINDS = len(Kind)


def segments_of_lengths(lengths: Sequence[int], total: int | None = None) -> Tensor:
    """
    Returns the segments of consecutive samples, int64 `[1, total]`, from 1, 0 for padding.

    Args:
        lengths (`Sequence[int]`): Tokens of each sample.
        total (`int`, *optional*): Tokens of the row; tokens after the samples are padding.

    Raises:
        `ValueError`: If the samples do not fit, or a row has too many for a word.
    """
    tokens = sum(lengths)
    total = tokens if total is None else total
    if tokens > total or min(lengths, default=0) < 0:
        raise ValueError(f"Samples of {list(lengths)} tokens do not fit a row of {total}. Make `total` larger.")
    segment = torch.zeros(1, total, dtype=torch.int64)
    segment[0, :tokens] = torch.arange(1, len(lengths) + 1).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    return segment


def image_index(is_image: Tensor, tokens_per_image: Sequence[int]) -> Tensor:
    """
    Returns the image of each token, int64 like `is_image`, counted over the row from 1; 0 for other tokens.

    Args:
        is_image (`torch.Tensor` of shape `[length]` or `[1, length]`): bool, true for image tokens.
        tokens_per_image (`Sequence[int]`): Tokens of each image, from the processor's grids.

    Raises:
        `ValueError`: If the number of image tokens differs from that of the images.
    """
    counted = int(is_image.sum())
    if counted != sum(tokens_per_image):
        raise ValueError(
            f"The row has {counted} image tokens; its images have {sum(tokens_per_image)} ({list(tokens_per_image)}). "
            "Pass the grids of the images of this row, after the model's merging of patches."
        )
    sizes = torch.tensor(tokens_per_image, dtype=torch.int64, device=is_image.device)
    index = torch.zeros_like(is_image, dtype=torch.int64)
    index[is_image] = torch.arange(1, len(sizes) + 1, device=is_image.device).repeat_interleave(sizes)
    return index


def causal_words(segment: Tensor) -> Tensor:
    """
    Returns words with which each token sees its sample up to itself: language models, also of images.

    Args:
        segment (`torch.Tensor` of shape `[batch, length]`): The sample of each token, 0 for padding.
    """
    return encode_words(segment)


def image_span_words(segment: Tensor, image: Tensor) -> Tensor:
    """
    Returns words with which tokens see earlier ones, and those of an image each other both ways: Gemma3.

    Args:
        segment (`torch.Tensor` of shape `[batch, length]`): The sample of each token, 0 for padding.
        image (`torch.Tensor` of shape `[batch, length]`): The image of each token, 0 for none.
    """
    return encode_words(segment, span=image, kinds=_kinds_of(image))


def prefix_words(segment: Tensor, in_prefix: Tensor) -> Tensor:
    """
    Returns words with which a prefix's tokens see each other both ways, and others earlier tokens: PaliGemma.

    Args:
        segment (`torch.Tensor` of shape `[batch, length]`): The sample of each token, 0 for padding.
        in_prefix (`torch.Tensor` of shape `[batch, length]`): bool, true for the image and the prompt.
    """
    return encode_words(segment, span=in_prefix.long())


def embedded_words(segment: Tensor, group: Tensor) -> Tensor:
    """
    Returns words with which a group's tokens see only this group, in both directions, and text sees all earlier
    tokens.

    These are the papers' encoder outputs embedded in text. With one group per modality, all images of a sample see
    each other across the text between them, which leaves holes in their visible keys; with one group per image there
    are no holes. Several samples in a row are the papers' multimodal packing.

    Args:
        segment (`torch.Tensor` of shape `[batch, length]`): The sample of each token, 0 for padding.
        group (`torch.Tensor` of shape `[batch, length]`): The modality or the image of each token, 0 for text.
    """
    return encode_words(segment, span=group, kinds=_kinds_of(group), causal=group == 0)


def prepended_words(encoder_lengths: Sequence[int], text_length: int) -> Tensor:
    """Returns words `[1, length]` of encoder outputs that each see only themselves, and causal text; in tokens."""
    group = segments_of_lengths(encoder_lengths, sum(encoder_lengths) + text_length)
    return embedded_words(torch.ones_like(group), group)


def bidirectional_words(lengths: Sequence[int], total: int | None = None) -> Tensor:
    """
    Returns words `[1, total]` of samples with bidirectional attention: images or sounds in one row of an encoder.

    Windows of an encoder, as in Qwen2.5-VL, are such samples as well: `lengths`, in tokens, are then the differences
    of `cu_window_seqlens`, with the tokens in the order of the windows. Tokens after the samples are padding.
    """
    return encode_words(segments_of_lengths(lengths, total), causal=False, sees_all=True)


def chunked_words(words: Tensor, chunk: int) -> Tensor:
    """
    Returns words of layers whose tokens see no further back than their chunk, as some layers of Llama 4.

    Chunks are counted from the start of each sample, and each has a segment. The other layers use `words`.

    Args:
        words (`torch.Tensor` of shape `[batch, length]`): int64, the tokens of each sample consecutive.
        chunk (`int`): Tokens of a chunk.

    Raises:
        `ValueError`: If the tokens of a sample are not consecutive, or there are more chunks than a word can number.
    """
    if chunk < 1:
        raise ValueError(f"`chunk={chunk}` must be at least 1: it is the number of tokens that see each other.")
    segment = decode_words(words).segment
    starts = torch.ones_like(segment, dtype=torch.bool)
    starts[:, 1:] = segment[:, 1:] != segment[:, :-1]
    for row, start in zip(segment, starts, strict=True):
        pieces = row[start & (row > 0)]
        if len(pieces.unique()) < len(pieces):
            raise ValueError(
                "A sample of these words is in several pieces, so chunks cannot be counted from its start. Make the "
                "words of chunked layers before rows are permuted."
            )
    numbered = _number_of_chunk(segment, chunk)
    if numbered.numel() and int(numbered.max()) > MAX_SEGMENTS:
        raise ValueError(
            f"The row has {int(numbered.max())} chunks of {chunk} tokens; a word numbers up to {MAX_SEGMENTS}. Use "
            "shorter rows."
        )
    return in_chunks(words, chunk)


def in_chunks(words: Tensor, chunk: int) -> Tensor:
    """Returns [`chunked_words`] without looking at values, which would wait for a device."""
    segment = decode_words(words).segment
    return torch.where(segment > 0, (words & ~MAX_SEGMENTS) | _number_of_chunk(segment, chunk), 0)


def _number_of_chunk(segment: Tensor, chunk: int) -> Tensor:
    """The number, from 1 in each row, of the chunk of each token."""
    starts = torch.ones_like(segment, dtype=torch.bool)
    starts[:, 1:] = segment[:, 1:] != segment[:, :-1]
    at = torch.arange(segment.shape[1], device=segment.device).expand_as(segment)
    place = at - torch.where(starts, at, 0).cummax(dim=1).values
    return torch.cumsum((place % chunk == 0) & (segment > 0), dim=1)


def noised_words(words: Tensor, noised: Tensor) -> Tensor:
    """
    Hides images that are being generated from all tokens except their own, as in models that predict noise.

    The noised tokens still see the other tokens that `words` lets them see.

    Args:
        words (`torch.Tensor` of shape `[batch, length]`): int64.
        noised (`torch.Tensor` of shape `[batch, length]`): The noised image of each token, from 1; 0 for none.

    Raises:
        `ValueError`: If there are more noised images than a word has free kinds.
    """
    free = KIND_BITS - _NAMED_KINDS
    most = int(noised.max()) if noised.numel() else 0
    if most > free:
        raise ValueError(f"{most} noised images are numbered in one row; a word has {free} free kinds. Pack fewer.")
    plain = (1 << _NAMED_KINDS) - 1
    own = torch.where(noised > 0, 1 << (_NAMED_KINDS + noised - 1), 0)
    kinds = torch.where(noised > 0, own, decode_words(words).kinds)
    cleared = words & ~((ALL_KINDS << KIND_SHIFT) | (ALL_KINDS << SEES_SHIFT))
    return torch.where(words != 0, cleared | (kinds << KIND_SHIFT) | ((plain | own) << SEES_SHIFT), 0)


def _kinds_of(image: Tensor) -> Tensor:
    return torch.where(image > 0, int(Kind.IMAGE), int(Kind.TEXT))
