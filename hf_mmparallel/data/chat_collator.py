"""Collator of conversations with images."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import ProcessorMixin
from transformers.utils import logging
from transformers.utils.chat_template_utils import render_jinja_template

from ..modeling.loss import IGNORE_INDEX
from .image_shapes import blank_array, without_pixels
from .image_sizes import decode_image, image_size
from .token_collator import TOKEN_FIELDS, PretokenizedCollator, is_left_out, require_column

logger = logging.get_logger(__name__)

GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")

Span = tuple[int, int]


class ChatCollator:
    """
    Batches conversations with images: applies the processor's chat template, tokenises, and labels the assistant's
    answers. Prompts, padding and image placeholders have the label -100.

    Answers are marked by `{% generation %}` in the template. Without such blocks, an answer is the text that the
    template adds to the preceding conversation with its generation prompt, up to the token that ends the turn. A token
    that is partly in an answer belongs to it.

    Args:
        processor ([`~transformers.ProcessorMixin`]):
            A processor with a chat template, a fast tokenizer and an image processor.
        max_length (`int`, *optional*): Longest sample in tokens.
        on_too_long (`str`, *optional*, defaults to `"raise"`):
            `"raise"`, or `"truncate"` to drop tokens at the end; truncating image placeholders raises an error.
        messages_column (`str`, *optional*, defaults to `"messages"`):
            Messages with a `role` and a `content`: a string, or parts `{"type": "text", "text": ...}` and
            `{"type": "image"}`.
        images_column (`str`, *optional*, defaults to `"images"`):
            The image or images of a sample, in the order of the parts; not needed if the parts contain their images.
        pad_to_multiple_of (`int`, *optional*): Pads the length up to a multiple of this.

    Example:

    ```python
    >>> collator = ChatCollator(AutoProcessor.from_pretrained("llava-hf/llava-1.5-7b-hf"))
    >>> collator([{"messages": messages, "images": [image]}]).keys()
    dict_keys(['input_ids', 'attention_mask', 'pixel_values', 'labels'])
    ```
    """

    def __init__(
        self,
        processor: ProcessorMixin,
        max_length: int | None = None,
        on_too_long: Literal["raise", "truncate"] = "raise",
        messages_column: str = "messages",
        images_column: str = "images",
        pad_to_multiple_of: int | None = None,
    ):
        if on_too_long not in ("raise", "truncate"):
            raise ValueError(f"`on_too_long={on_too_long!r}` is not known. Use 'raise' or 'truncate'.")
        self.processor = processor
        self.tokenizer: Any = getattr(processor, "tokenizer", processor)
        if not getattr(self.tokenizer, "is_fast", False):
            raise ValueError(
                f"`{type(self.tokenizer).__name__}` does not return the positions of its tokens in the text, so "
                "answers can't be told from prompts. Use a fast tokenizer."
            )
        self.template = _chat_template(processor)
        self.max_length = max_length
        self.on_too_long = on_too_long
        self.messages_column = messages_column
        self.images_column = images_column
        pad_token_id = self.tokenizer.pad_token_id
        self.collate = PretokenizedCollator(
            pad_token_id=0 if pad_token_id is None else pad_token_id, pad_to_multiple_of=pad_to_multiple_of
        )
        self._takes_parts = self._template_takes_parts()
        self.decodes = frozenset(["Image"])
        self._left_out: Collection[str] | None = ()
        self._with_media: ChatCollator | None = None

    def without_media(self, entries: Collection[str] | None = None) -> ChatCollator:
        """
        A collator of the same batches without pixels, which decodes no image; `self` if pixels are not among
        `entries`.

        The size of an image is read from its header, and the image processor runs on a blank image of that size, so
        that placeholders and integers such as grids are the same. If that is not possible, for an image behind a URL
        or a processor that needs more than the size, the image is decoded; this is logged once.

        Args:
            entries (`Collection[str]`, *optional*):
                Floating-point entries to leave out; by default all except token fields.
        """
        image_processor = getattr(self.processor, "image_processor", None)
        if entries is not None and image_processor is not None and image_processor.model_input_names[0] not in entries:
            return self
        bare = copy.copy(self)
        bare.processor = without_pixels(self.processor)
        bare.decodes = frozenset()
        bare._left_out = entries
        bare._with_media = self
        return bare

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """
        Args:
            samples (`Sequence[Mapping[str, Any]]`): Conversations, each with any number of images.

        Returns:
            `dict[str, Tensor]`: The model's inputs, and `labels` of shape `(batch, length)`.

        Raises:
            `ValueError`: For a missing column, images that don't match their placeholders, or a too long sample.
        """
        return self.collate([self.encode(sample, index) for index, sample in enumerate(samples)])

    def encode(
        self,
        sample: Mapping[str, Any],
        index: int = 0,  # in the batch, for error messages
    ) -> dict[str, Tensor]:
        """Encodes one sample as token fields without a batch dimension, including `labels`, and media."""
        if self._with_media is None:
            return self._encode(sample, index, decode_image)
        try:
            fields = self.encode_by_size(sample, index)
            fields = {name: value for name, value in fields.items() if not is_left_out(name, value, self._left_out)}
            if wanted := [name for name, value in fields.items() if is_left_out(name, value, None)]:
                raise ValueError(f"{wanted} depend on pixels and are not left out.")
        except Exception as error:  # processors raise errors of any type
            fields = self._with_media.encode(sample, index)  # raises, too, if the sample is bad
            logger.warning_once(
                "`%s` can't process an image from its size alone, so images are decoded where only text is needed: %s",
                type(self.processor).__name__,
                type(error).__name__,
            )
            logger.debug("No size of an image in sample %d of a batch: %s", index, error)
        return {name: value for name, value in fields.items() if not is_left_out(name, value, self._left_out)}

    def encode_by_size(self, sample: Mapping[str, Any], index: int = 0) -> dict[str, Tensor]:
        """
        [`~ChatCollator.encode`] for [`~ChatCollator.without_media`]: zeros for pixels, no image is decoded or fetched.

        Raises `UnknownSizeError` for an image whose size no header of a local file gives, `OSError` for an unreadable
        file.
        """
        return self._encode(sample, index, blank_image)

    def _encode(self, sample: Mapping[str, Any], index: int, read: Callable[[Any], Any]) -> dict[str, Tensor]:
        """Encodes one sample, with images read by `read`."""
        require_column(sample, self.messages_column)
        messages, images = self.messages_and_images(sample, index)
        images = [read(image) for image in images]
        text, spans = self.text_and_answers(messages, index)
        options = self.text_options(text)
        if isinstance(self.processor, ProcessorMixin):
            options["return_text_replacement_offsets"] = True
            options["images"] = images or None
        encoded = dict(self.processor(text=[text], **options))
        offsets = encoded.pop("offset_mapping")[0]
        replaced = encoded.pop("text_replacement_offsets", ())
        replacements = list(replaced[0]) if len(replaced) else []
        if images and len(replacements) != len(images):
            raise ValueError(
                f"`{type(self.processor).__name__}` does not return the positions of the {len(images)} images of "
                f"sample {index} of the batch. Tokenise the dataset yourself, with `labels`."
            )
        fields = {name: value[0] if name in TOKEN_FIELDS else value for name, value in encoded.items()}
        placeholder = torch.zeros_like(fields["input_ids"], dtype=torch.bool)
        for replacement in replacements:
            placeholder |= _overlap(offsets, replacement["new_span"])
        answer = torch.zeros_like(placeholder)
        for span in spans:
            answer |= _overlap(offsets, _shifted(span, replacements))
        fields["labels"] = fields["input_ids"].masked_fill(~answer | placeholder, IGNORE_INDEX)
        fields = self._fit(fields, placeholder, index)
        if (fields["labels"] == IGNORE_INDEX).all():
            logger.warning_once(
                "A conversation has no targets: it has no message of the role `assistant`%s; its roles are %s. It "
                "adds nothing to the loss. This is logged once for all such conversations.",
                " within `max_length`" if spans else "",
                ", ".join(sorted({str(message.get("role")) for message in messages})) or "none",
            )
        return fields

    def _fit(self, fields: dict[str, Tensor], placeholder: Tensor, index: int) -> dict[str, Tensor]:
        """Truncates a sample to `max_length`, or raises `ValueError`."""
        length = placeholder.shape[0]
        if self.max_length is None or length <= self.max_length:
            return fields
        num_media = int(placeholder[self.max_length :].sum())
        if self.on_too_long == "raise" or num_media:
            reason = f", and truncation would drop {num_media} image tokens" if num_media else ""
            remedy = "a larger `max_length`" if num_media else "`on_too_long='truncate'` or a larger `max_length`"
            raise ValueError(
                f"Sample {index} of the batch has {length} tokens, more than `max_length={self.max_length}`{reason}. "
                f"Use {remedy}, or filter the dataset."
            )
        return {name: v[..., : self.max_length] if name in TOKEN_FIELDS else v for name, v in fields.items()}

    def text_options(self, text: str) -> dict[str, Any]:
        """Keyword arguments of the processor for a rendered text."""
        begins = self.tokenizer.bos_token is not None and text.startswith(self.tokenizer.bos_token)
        special = {"add_special_tokens": False} if begins else {}
        return {"return_offsets_mapping": True, "return_tensors": "pt", **special}

    def messages_and_images(self, sample: Mapping[str, Any], index: int) -> tuple[list[dict], list[Any]]:
        """Messages in the form that the template expects, and the images in the order of their parts."""
        given = sample.get(self.images_column)
        given = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
        rest, images, messages = iter(given), [], []
        for message in sample[self.messages_column]:
            message = {key: value for key, value in message.items() if value is not None}
            require_role(message, f"sample {index} of the batch")
            content = message.get("content")
            if isinstance(content, str) and self._takes_parts:
                message["content"] = [{"type": "text", "text": content}]
            elif isinstance(content, (list, tuple)):
                parts = []
                for part in content:
                    part = {key: value for key, value in part.items() if value is not None}
                    if part.get("type") == "image":
                        image = next((part[key] for key in ("image", "url", "path") if key in part), None)
                        images.append(next(rest, None) if image is None else image)
                        part = {"type": "image"}
                    elif part.get("type") != "text":
                        raise ValueError(
                            f"Sample {index} of the batch has a content part of type `{part.get('type')}`; only "
                            "'text' and 'image' are supported. Tokenise the dataset yourself, with `labels`."
                        )
                    parts.append(part)
                message["content"] = parts if self._takes_parts else "".join(part.get("text", "") for part in parts)
            messages.append(message)
        num_left = len(list(rest))
        if num_left or any(image is None for image in images):
            raise ValueError(
                f"Sample {index} of the batch has {len(images)} image parts in `{self.messages_column}` and "
                f"{len(given)} images in `{self.images_column}`. Give one part `{{'type': 'image'}}` for each image."
            )
        return messages, images

    def text_and_answers(self, messages: list[dict], index: int) -> tuple[str, list[Span]]:
        """The conversation as text, and the character spans of the assistant's answers."""
        if GENERATION_BLOCK.search(self.template):
            return self._render(messages, return_assistant_tokens_mask=True)
        text, _ = self._render(messages)
        spans = []
        for turn, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before, _ = self._render(messages[:turn], add_generation_prompt=True)
            after, _ = self._render(messages[: turn + 1])
            if not (text.startswith(before) and text.startswith(after) and len(before) <= len(after)):
                raise ValueError(
                    f"The chat template renders turn {turn} of sample {index} of the batch differently if more turns "
                    "follow, so the answer can't be told from the prompt. Mark answers in the template with "
                    "`{% generation %}`."
                )
            spans.append((len(before), self._end_of_turn(text, len(before), len(after))))
        return text, spans

    def _end_of_turn(self, text: str, start: int, end: int) -> int:
        """End of a turn, without white space after its last special token."""
        trimmed = text[start:end].rstrip()
        return start + len(trimmed) if trimmed.endswith(tuple(self.tokenizer.all_special_tokens)) else end

    def _render(self, messages: list[dict], **options: Any) -> tuple[str, list[Span]]:
        """The rendered text, and the spans of its generation blocks."""
        texts, spans = render_jinja_template(
            conversations=[messages], chat_template=self.template, **self.tokenizer.special_tokens_map, **options
        )
        return texts[0], [(int(start), int(end)) for start, end in spans[0]] if spans else []

    def _template_takes_parts(self) -> bool:
        """Whether the template supports content as a list of parts: a word in a part is rendered as the word."""
        try:
            text, _ = self._render([{"role": "user", "content": [{"type": "text", "text": "probe"}]}])
        except Exception:  # templates raise errors of any type
            return False
        return "probe" in text and "'type'" not in text and '"type"' not in text


def require_role(message: Mapping[str, Any], where: str) -> None:
    """Raises `ValueError` for a message without a `role`."""
    if "role" not in message:
        raise ValueError(
            f"A message of {where} has {sorted(message)} and no `role`. Give each message a `role` and a `content` "
            "(in the format of LLaVA these are `from` and `value`, with the roles `human` and `gpt` for `user` and "
            "`assistant`)."
        )


def _chat_template(processor: Any) -> str:
    """The chat template of a processor or of its tokenizer."""
    for owner in (processor, getattr(processor, "tokenizer", None)):
        template = getattr(owner, "chat_template", None)
        if isinstance(template, Mapping):
            template = template.get("default")
        if template is not None:
            return template
    raise ValueError(
        f"`{type(processor).__name__}` has no chat template. Set `processor.chat_template`, or tokenise the dataset "
        "yourself, with `labels`."
    )


def _overlap(offsets: Tensor, span: Span) -> Tensor:
    """Mask of the tokens that share a character with a span."""
    return (offsets[:, 0] < span[1]) & (offsets[:, 1] > span[0])


def _shifted(span: Span, replacements: Sequence[Mapping[str, Any]]) -> Span:
    """Maps a span of the rendered text to the text with expanded placeholders."""
    gains = [(0, 0), *((r["span"][1], r["new_span"][1] - r["span"][1]) for r in replacements)]
    start, end = (char + next(gain for place, gain in reversed(gains) if place <= char) for char in span)
    return start, end


def blank_image(value: Any) -> np.ndarray:
    """A blank image of the size of another image, which is not decoded."""
    return blank_array(image_size(value))


# Token ids of many conversations in one tokenizer call, to measure their sizes.

_UNPADDED = (None, False, True, "longest", "do_not_pad")  # with these a text by itself has no padding
_MEDIA = ["image", "video", "audio"]


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
    # position, text with expanded placeholders, and the image processor's entries for its images
    waiting: dict[bool, list[tuple[int, str, dict[str, Any]]]] = {}
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
        waiting.setdefault(kind, []).append((position, *expanded))
    for kind, texts in waiting.items():
        encoded = _input_ids(processor, [text for _, text, _ in texts], settings[kind])
        for (position, _, entries), ids in zip(texts, encoded or (), strict=encoded is not None):
            if collator.max_length is None or len(ids) <= collator.max_length:
                result[position] = {"input_ids": ids, **entries}
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
