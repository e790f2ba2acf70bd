"""Token ids of many conversations in one tokenizer call, to measure their sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import ProcessorMixin
from transformers.utils import logging

from .chat_collator import ChatCollator, blank_image

logger = logging.get_logger(__name__)

_UNPADDED = (None, False, True, "longest", "do_not_pad")  # with these a text by itself has no padding
_MEDIA = ["image", "video", "audio"]


@dataclass(frozen=True)
class _Text:
    """A conversation as text with expanded placeholders, and the image processor's entries for its images."""

    position: int
    text: str
    entries: Mapping[str, Any]


def encode_together(
    collator: ChatCollator,  # from `ChatCollator.without_media`
    read: Callable[[int], Mapping[str, Any]],  # index -> conversation
    indices: Sequence[int],
) -> list[dict[str, Any] | None]:
    """
    Encodes many conversations as [`~ChatCollator.encode_by_size`] does, without labels and masks.

    Returns `input_ids` (`list[int]`) and the entries of its images for each. `None` for one that can't be encoded or
    is longer than `max_length`, and for all if the processor overrides `__call__`: [`~ChatCollator.encode_by_size`]
    has to encode these.
    """
    processor: Any = collator.processor
    result: list[dict[str, Any] | None] = [None] * len(indices)
    if isinstance(processor, ProcessorMixin) and type(processor).__call__ is not ProcessorMixin.__call__:
        return result
    # Faster than one by one: arguments are checked once, and one call tokenises all texts, in the tokenizer's threads.
    settings: dict[bool, dict[str, Any]] = {}
    waiting: dict[bool, list[_Text]] = {}
    for position, index in enumerate(indices):
        try:
            messages, images = collator.messages_and_images(read(index), position)
            text, _ = collator.text_and_answers(messages, position)
            options = collator.text_options(text)
            kind = "add_special_tokens" in options
            if kind not in settings:
                settings[kind] = _settings(processor, options)
            expanded = _expand(processor, text, [blank_image(image) for image in images], settings[kind])
        except Exception as error:  # encoding it alone raises the error again
            logger.debug("Sample %d is encoded alone: %s", index, error)
            continue
        waiting.setdefault(kind, []).append(_Text(position, *expanded))
    for kind, texts in waiting.items():
        encoded = _input_ids(processor, [entry.text for entry in texts], settings[kind])
        for entry, ids in zip(texts, encoded or (), strict=encoded is not None):
            if collator.max_length is None or len(ids) <= collator.max_length:
                result[entry.position] = {"input_ids": ids, **entry.entries}
    return result


def _settings(processor: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Modality -> keyword arguments, as the processor distributes them."""
    if not isinstance(processor, ProcessorMixin):
        return {"text_kwargs": dict(options)}
    merged = processor._merge_kwargs(
        tokenizer_init_kwargs=processor.tokenizer.init_kwargs,  # pyright: ignore[reportAttributeAccessIssue]
        return_text_replacement_offsets=True,
        **options,
    )
    for name in ("return_mm_token_type_ids", "return_text_replacement_offsets"):
        merged["text_kwargs"].pop(name, None)
    return merged


def _expand(processor: Any, text: str, images: list[Any], settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Expands the placeholders of a text, and returns it with the image processor's entries."""
    if not isinstance(processor, ProcessorMixin):
        if images:
            raise ValueError("A tokenizer places no images.")
        return text, {}
    # the steps of `ProcessorMixin.__call__` before the tokenizer
    given, texts, _, _ = processor.prepare_inputs_layout(images=images or None, text=[text])
    processor.validate_inputs(images=given, text=texts)
    entries, replacements = {}, []
    if given is not None and hasattr(processor, "image_processor"):
        entries, replacements = processor._process_images(given, **settings["images_kwargs"])
    texts, placed = processor.get_text_with_replacements(texts, replacements)  # pyright: ignore[reportArgumentType]
    if images and len(placed[0] if placed else ()) != len(images):
        raise ValueError(f"{len(images)} images are not replaced one by one.")
    unused = processor.unused_input_names
    return texts[0], {name: value for name, value in entries.items() if name not in unused}


def _input_ids(processor: Any, texts: list[str], settings: Mapping[str, Any]) -> list[list[int]] | None:
    """Token ids of texts; `None` if a batch would be padded, or a text can't be tokenised."""
    options = dict(settings["text_kwargs"])
    if options.get("padding") not in _UNPADDED:
        return None
    options |= {"padding": False, "return_tensors": None, "return_offsets_mapping": False}
    try:
        encoded = getattr(processor, "tokenizer", processor)(texts, **options)
        if isinstance(processor, ProcessorMixin):
            processor._check_special_mm_tokens(texts, encoded, modalities=_MEDIA)
    except Exception as error:
        logger.debug("Samples are encoded alone: %s", error)
        return None
    return encoded["input_ids"]
