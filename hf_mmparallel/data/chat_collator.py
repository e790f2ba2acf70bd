"""Collators of multimodal samples: conversations with images, and samples that are tokenised already."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import ProcessorMixin
from transformers.utils import logging
from transformers.utils.chat_template_utils import render_jinja_template

from ..modeling.loss import IGNORE_INDEX
from .image_shapes import stand_in, without_pixels
from .image_sizes import decoded_image, image_size

logger = logging.get_logger(__name__)

TOKEN_FIELDS = (
    "input_ids",
    "attention_mask",
    "labels",
    "position_ids",
    "token_type_ids",
    "mm_token_type_ids",
    "shift_labels",
)
GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")

Span = tuple[int, int]


class PretokenizedCollator:
    """
    Batches samples of token ids, labels and media tensors.

    Fields of tokens are padded, all other arrays are concatenated along their first dimension, in which an image (or
    patch, or clip) of a sample is one entry; a sample without images leaves the field out, or has `None` or nothing in
    it. Where other dimensions differ, entries are padded with zeros at the end, as processors do it. Strings and
    single numbers are left out.

    Args:
        pad_token_id (`int`, *optional*, defaults to 0): What `input_ids` are padded with; labels get -100, the rest 0.
        padding_side (`str`, *optional*, defaults to `"right"`): `"right"` or `"left"`.
        pad_to_multiple_of (`int`, *optional*): Pads the length up to a multiple of this.
        stacked (`Collection[str]`, *optional*):
            Names of arrays that are one entry of the batch each, such as `pixel_values` of shape `[channels, height,
            width]`; they are stacked, not concatenated.
    """

    def __init__(
        self,
        pad_token_id: int = 0,
        padding_side: Literal["right", "left"] = "right",
        pad_to_multiple_of: int | None = None,
        stacked: Collection[str] = (),
    ):
        if padding_side not in ("right", "left"):
            raise ValueError(f"`padding_side={padding_side!r}` is not known. Use 'right' or 'left'.")
        if pad_to_multiple_of is not None and pad_to_multiple_of < 1:
            raise ValueError(f"`pad_to_multiple_of={pad_to_multiple_of}` is no length. Use 1 or more.")
        self.pad_token_id = pad_token_id
        self.padding_side = padding_side
        self.pad_to_multiple_of = pad_to_multiple_of
        self.stacked = frozenset(stacked)
        self.decodes: frozenset[str] = frozenset()
        self._left_out: Collection[str] | None = ()

    def without_media(self, entries: Collection[str] | None = None) -> PretokenizedCollator:
        """
        A collator of the same batches without media.

        Args:
            entries (`Collection[str]`, *optional*):
                Names of the floating-point entries to leave out; by default all but fields of tokens. Samples need
                not have them.

        Returns:
            [`PretokenizedCollator`]: The collator.
        """
        bare = copy.copy(self)
        bare._left_out = entries
        return bare

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """
        Args:
            samples (`Sequence[Mapping[str, Any]]`): Each with `input_ids`, and the same fields of tokens.

        Returns:
            `dict[str, Tensor]`: Fields of tokens of shape `(batch, length)`, `attention_mask` always among them;
            media of shape `(entries of all samples, ...)`.

        Raises:
            `ValueError`: If a sample lacks a field of tokens, or such a field is not as long as its `input_ids`.
        """
        arrays = [{name: as_array(value) for name, value in sample.items()} for sample in samples]
        arrays = [
            {
                n: array
                for n, array in sample.items()
                if array is not None and not is_left_out(n, array, self._left_out)
            }
            for sample in arrays
        ]
        for sample, given in zip(arrays, samples, strict=True):
            require_column(given, "input_ids", sample)
            sample.setdefault("attention_mask", torch.ones_like(sample["input_ids"]))
        names = dict.fromkeys(name for sample in arrays for name in sample)
        batch = {}
        for name in names:
            if name in TOKEN_FIELDS:
                batch[name] = self._pad(name, arrays)
            else:
                entries = [sample[name] for sample in arrays if name in sample]
                batch[name] = concatenate([e[None] for e in entries] if name in self.stacked else entries)
        return batch

    def _pad(self, name: str, samples: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """One field of tokens as a matrix."""
        lengths = [sample["input_ids"].shape[-1] for sample in samples]
        longest = max(lengths)
        if self.pad_to_multiple_of is not None:
            longest = -(-longest // self.pad_to_multiple_of) * self.pad_to_multiple_of
        fill = {"input_ids": self.pad_token_id, "labels": IGNORE_INDEX, "shift_labels": IGNORE_INDEX}.get(name, 0)
        rows = []
        for index, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
            if name not in sample or sample[name].shape[-1] != length:
                found = f"has {sample[name].shape[-1]}" if name in sample else "is missing"
                raise ValueError(
                    f"Sample {index} of the batch has {length} `input_ids`, but `{name}` {found}. "
                    "Give one value a token, in all samples or in none."
                )
            padding = (0, longest - length) if self.padding_side == "right" else (longest - length, 0)
            rows.append(functional.pad(sample[name], padding, value=fill))
        return torch.stack(rows, dim=1 if rows[0].dim() == 2 else 0)  # position ids may be (3, length)


class ChatCollator:
    """
    Batches conversations with images: applies the processor's chat template, tokenises, and labels what the assistant
    says. Prompts, padding and placeholders of images have the label -100.

    What the assistant says is marked by `{% generation %}` in the template. Without such marks it is what the template
    adds to the conversation before it with its generation prompt, up to the token that ends the turn. A token that
    is partly the assistant's counts as its own.

    Args:
        processor ([`~transformers.ProcessorMixin`]): With a chat template, a fast tokenizer and an image processor.
        max_length (`int`, *optional*): Longest sample in tokens.
        on_too_long (`str`, *optional*, defaults to `"raise"`):
            `"raise"`, or `"truncate"` to cut the end off; a placeholder of an image is never cut, which raises.
        messages_column (`str`, *optional*, defaults to `"messages"`):
            Messages with a `role` and a `content`: a string, or parts `{"type": "text", "text": ...}` and
            `{"type": "image"}`.
        images_column (`str`, *optional*, defaults to `"images"`):
            The images (or one) of the sample, in the order of the parts; not needed where parts hold their image.
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
                f"`{type(self.tokenizer).__name__}` does not say where its tokens are in the text, so answers can't "
                "be told from prompts. Use a fast tokenizer."
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
        A collator of the same batches without pixels, which decodes no image.

        The size of an image is read from its header, and the processor's own image processor is run on a blank image
        of that size, so that placeholders and integers such as grids are the same. Where that is not possible, for an
        image behind a URL or a processor that needs more than a size, the image is decoded after all, which is
        logged once.

        Args:
            entries (`Collection[str]`, *optional*):
                Names of the floating-point entries to leave out; by default all but fields of tokens.

        Returns:
            [`ChatCollator`]: The collator; this one if pixels are not among `entries`.
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
            samples (`Sequence[Mapping[str, Any]]`): Conversations, with any number of images each.

        Returns:
            `dict[str, Tensor]`: The model's inputs, and `labels` of shape `(batch, length)`.

        Raises:
            `ValueError`: For a missing column, images that don't match their placeholders, or a sample too long.
        """
        return self.collate([self.encode(sample, index) for index, sample in enumerate(samples)])

    def encode(self, sample: Mapping[str, Any], index: int = 0) -> dict[str, Tensor]:
        """
        One sample as inputs of the model, independent of the rest of its batch.

        Args:
            sample (`Mapping[str, Any]`): A conversation.
            index (`int`, *optional*, defaults to 0): Its place in the batch, for errors.

        Returns:
            `dict[str, Tensor]`: Fields of tokens without a batch dimension, `labels` among them, and media.
        """
        if self._with_media is None:
            return self._encode(sample, index, decoded_image)
        try:
            fields = self.encode_by_size(sample, index)
            fields = {name: value for name, value in fields.items() if not is_left_out(name, value, self._left_out)}
            if wanted := [name for name, value in fields.items() if is_left_out(name, value, None)]:
                raise ValueError(f"{wanted} are made of pixels, and read.")
        except Exception as error:  # processors raise errors of any type
            fields = self._with_media.encode(sample, index)  # if the sample is at fault, this raises, too
            logger.warning_once(
                "`%s` can't place an image from its size, so it is decoded where only text is needed: %s",
                type(self.processor).__name__,
                type(error).__name__,
            )
            logger.debug("No size of an image in sample %d of a batch: %s", index, error)
        return {name: value for name, value in fields.items() if not is_left_out(name, value, self._left_out)}

    def encode_by_size(self, sample: Mapping[str, Any], index: int = 0) -> dict[str, Tensor]:
        """
        What [`~ChatCollator.encode`] gives, with zeros in place of pixels: no image is decoded or fetched.

        Only for what [`~ChatCollator.without_media`] gives.

        Raises:
            `UnknownSizeError`: If the size of an image can't be known without more than the header of a local file.
            `OSError`: If a local file can't be read.
        """
        return self._encode(sample, index, blank_image)

    def _encode(self, sample: Mapping[str, Any], index: int, read: Callable[[Any], Any]) -> dict[str, Tensor]:
        """One sample as inputs of the model, of images as `read` reads them."""
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
                f"`{type(self.processor).__name__}` does not say where it put the {len(images)} images of sample "
                f"{index} of the batch. Tokenise the dataset yourself, with `labels`."
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
                "A conversation has no target: nothing%s in it is said by the role `assistant`; its roles are %s. It "
                "adds nothing to the loss. This is said once for all such conversations.",
                " that `max_length` leaves" if spans else "",
                ", ".join(sorted({str(message.get("role")) for message in messages})) or "none",
            )
        return fields

    def _fit(self, fields: dict[str, Tensor], placeholder: Tensor, index: int) -> dict[str, Tensor]:
        """The sample within `max_length`."""
        length = placeholder.shape[0]
        if self.max_length is None or length <= self.max_length:
            return fields
        num_media = int(placeholder[self.max_length :].sum())
        if self.on_too_long == "raise" or num_media:
            reason = f" and {num_media} image tokens among those that would be cut" if num_media else ""
            remedy = "a larger `max_length`" if num_media else "`on_too_long='truncate'` or a larger `max_length`"
            raise ValueError(
                f"Sample {index} of the batch has {length} tokens, more than `max_length={self.max_length}`{reason}. "
                f"Use {remedy}, or filter the dataset."
            )
        return {name: v[..., : self.max_length] if name in TOKEN_FIELDS else v for name, v in fields.items()}

    def text_options(self, text: str) -> dict[str, Any]:
        """What a processor is called with for a rendered text."""
        begins = self.tokenizer.bos_token is not None and text.startswith(self.tokenizer.bos_token)
        special = {"add_special_tokens": False} if begins else {}
        return {"return_offsets_mapping": True, "return_tensors": "pt", **special}

    def messages_and_images(self, sample: Mapping[str, Any], index: int) -> tuple[list[dict], list[Any]]:
        """Messages as the template takes them, and the images in the order of their parts."""
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
                        own = next((part[key] for key in ("image", "url", "path") if key in part), None)
                        images.append(next(rest, None) if own is None else own)
                        part = {"type": "image"}
                    elif part.get("type") != "text":
                        raise ValueError(
                            f"Sample {index} of the batch has a content part of type `{part.get('type')}`; only "
                            "'text' and 'image' are read. Tokenise the dataset yourself, with `labels`."
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
        """The conversation as text, and the character spans that the assistant says."""
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
                    f"The chat template writes turn {turn} of sample {index} of the batch differently when more "
                    "follows, so the answer can't be told from the prompt. Mark answers in the template with "
                    "`{% generation %}`."
                )
            spans.append((len(before), self._end_of_turn(text, len(before), len(after))))
        return text, spans

    def _end_of_turn(self, text: str, start: int, end: int) -> int:
        """Where a turn ends: white space after its last special token is not the assistant's."""
        trimmed = text[start:end].rstrip()
        return start + len(trimmed) if trimmed.endswith(tuple(self.tokenizer.all_special_tokens)) else end

    def _render(self, messages: list[dict], **options: Any) -> tuple[str, list[Span]]:
        """The template's text, and the spans of its generation blocks."""
        texts, spans = render_jinja_template(
            conversations=[messages], chat_template=self.template, **self.tokenizer.special_tokens_map, **options
        )
        return texts[0], [(int(start), int(end)) for start, end in spans[0]] if spans else []

    def _template_takes_parts(self) -> bool:
        """Whether the template reads content as a list of parts: rendering a word in a part gives just the word."""
        try:
            text, _ = self._render([{"role": "user", "content": [{"type": "text", "text": "probe"}]}])
        except Exception:  # templates raise errors of any type
            return False
        return "probe" in text and "'type'" not in text and '"type"' not in text


def require_column(sample: Mapping[str, Any], column: str, present: Mapping[str, Any] | None = None) -> None:
    """Raises unless a sample has a column, with something in it if `present` is given."""
    if column not in (sample if present is None else present):
        raise ValueError(
            f"The dataset has no column `{column}`; it has {sorted(sample)}. Rename the one that is meant, or give "
            "a `data_collator` of your own."
        )


def require_role(message: Mapping[str, Any], where: str) -> None:
    """Raises unless a message says who speaks."""
    if "role" not in message:
        raise ValueError(
            f"A message of {where} has {sorted(message)} and no `role`. Give each message a `role` and a `content` "
            "(in the format of LLaVA these are `from` and `value`, with the roles `human` and `gpt` for `user` and "
            "`assistant`)."
        )


def as_array(value: Any) -> Tensor | None:
    """A tensor from an array or nested lists; None for what is no input: nothing, a string, a single number."""
    if value is None or isinstance(value, (str, bytes, bool, int, float, dict)):
        return None
    if isinstance(value, (list, tuple)) and len(value) and isinstance(value[0], Tensor):
        value = torch.stack(list(value))
    if not isinstance(value, Tensor):
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            return None
        value = torch.from_numpy(np.array(array, dtype=np.float32 if array.dtype == np.float64 else None))
    return value if value.dim() and value.numel() else None


def concatenate(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors one after the other, with zeros where they are smaller than others in the remaining dimensions."""
    if len({tensor.dim() for tensor in tensors}) > 1:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise ValueError(
            f"Media of the samples have the shapes {shapes}. Give all the same number of dimensions, with the images "
            "of a sample along the first."
        )
    sizes = [max(tensor.shape[dim] for tensor in tensors) for dim in range(1, tensors[0].dim())]
    padded = []
    for tensor in tensors:
        missing = [size - own for size, own in zip(sizes, tensor.shape[1:], strict=True)]
        padding = [n for count in reversed(missing) for n in (0, count)]
        padded.append(functional.pad(tensor, padding) if any(padding) else tensor)
    return torch.cat(padded)


def _chat_template(processor: Any) -> str:
    """The template of a processor or of its tokenizer."""
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
    """Which tokens share a character with a span."""
    return (offsets[:, 0] < span[1]) & (offsets[:, 1] > span[0])


def _shifted(span: Span, replacements: Sequence[Mapping[str, Any]]) -> Span:
    """A span of the rendered text in the text where placeholders are repeated."""
    gains = [(0, 0), *((r["span"][1], r["new_span"][1] - r["span"][1]) for r in replacements)]
    start, end = (char + next(gain for place, gain in reversed(gains) if place <= char) for char in span)
    return start, end


def blank_image(value: Any) -> np.ndarray:
    """A blank image of the size of another, which is not decoded."""
    return stand_in(image_size(value))


def is_left_out(name: str, value: Any, entries: Collection[str] | None) -> bool:
    """Whether an entry is one of some floating-point ones, or of all but fields of tokens."""
    chosen = name not in TOKEN_FIELDS if entries is None else name in entries
    return chosen and isinstance(value, Tensor) and value.is_floating_point()
