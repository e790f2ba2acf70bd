"""Collator of conversations and texts with media."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import ProcessorMixin
from transformers.utils import logging
from transformers.utils.chat_template_utils import render_jinja_template

from ..modeling.loss import IGNORE_INDEX
from .image_sizes import without_pixels
from .media_values import BLANKS, READERS, locate, naming_libraries
from .sample_formats import FORMATS, MEDIA_COLUMNS, Chat, SampleFormat, read_sample
from .token_collator import TOKEN_FIELDS, PretokenizedCollator, is_left_out

logger = logging.get_logger(__name__)

GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")

Span = tuple[int, int]

# kind of media -> where processors have what reads it, and the name of their argument for it
_PROCESSORS = {
    "image": ("image_processor",),
    "video": ("video_processor",),
    "audio": ("audio_processor", "feature_extractor"),
}
_ARGUMENTS = {"image": "images", "video": "videos", "audio": "audio"}


class ChatCollator:
    """
    Batches conversations and texts with images, videos and audio: applies the processor's chat template, tokenises,
    and labels the assistant's answers. Prompts, padding and placeholders of media have the label -100.

    Each sample is in the first of these formats all of whose columns it has:

    - `messages`, with a `role` and a `content`: a string, or parts such as `{"type": "text", "text": ...}` and
      `{"type": "image"}`.
    - `prompt` and `completion`, two strings or two lists of messages: the whole completion is labelled.
    - `conversations` of ShareGPT and Llava, with `from` and `value`.
    - `text`, without a template: all of its tokens are labelled.

    Media are in parts (`{"type": "image", "image": ...}`) or, in their order, in the columns `images` or `image`,
    `videos` or `video`, and `audios` or `audio`. In strings `<image>`, `<video>` and `<audio>` stand for them. Images
    are of Pillow, arrays, files as bytes (`{"bytes": ...}`) or in base64 (`data:` URLs), paths or URLs.

    Answers are marked by `{% generation %}` in the template. Without such blocks, an answer is the text that the
    template adds to the preceding conversation with its generation prompt, up to the token that ends the turn. A token
    that is partly in an answer belongs to it. A completion begins at the first token that differs from those of the
    prompt alone.

    Args:
        processor ([`~transformers.ProcessorMixin`]):
            A processor with a chat template and a fast tokenizer, or such a tokenizer.
        max_length (`int`, *optional*): Longest sample in tokens.
        on_too_long (`str`, *optional*, defaults to `"raise"`):
            `"raise"`, or `"truncate"` to drop tokens at the end; truncating placeholders of media raises an error.
        messages_column (`str`, *optional*):
            The column of messages, if it has another name; samples of other formats are then refused.
        images_column (`str`, *optional*): The column of images, if it has another name.
        pad_to_multiple_of (`int`, *optional*): Pads the length up to a multiple of this.
        image_folder (`str`, *optional*): Folder of relative paths of images, videos and audio.

    Example:

    ```python
    >>> from PIL import Image
    >>> question = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which digit?"}]}
    >>> answer = {"role": "assistant", "content": [{"type": "text", "text": "Three."}]}
    >>> batch = ChatCollator(processor)([{"messages": [question, answer], "images": [Image.new("RGB", (8, 8))]}])
    >>> sorted(batch)
    ['attention_mask', 'input_ids', 'labels', 'pixel_values']
    ```
    """

    def __init__(
        self,
        processor: ProcessorMixin,
        max_length: int | None = None,
        on_too_long: Literal["raise", "truncate"] = "raise",
        messages_column: str | None = None,
        images_column: str | None = None,
        pad_to_multiple_of: int | None = None,
        image_folder: str | None = None,
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
        self.formats: Sequence[SampleFormat] = FORMATS
        if messages_column is not None:
            self.formats = (SampleFormat("messages", (messages_column,), (messages_column,)),)
        self.media_columns = MEDIA_COLUMNS if images_column is None else {**MEDIA_COLUMNS, "image": (images_column,)}
        self.image_folder = image_folder
        self._media_processors = _media_processors(processor)
        pad_token_id = self.tokenizer.pad_token_id
        self.collate = PretokenizedCollator(
            pad_token_id=0 if pad_token_id is None else pad_token_id, pad_to_multiple_of=pad_to_multiple_of
        )
        self._takes_parts = self._template_takes_parts()
        self.decodes = frozenset(["Image"])
        self._blank: frozenset[str] = frozenset()  # kinds of media of which only the size is read
        self._left_out: Collection[str] | None = ()
        self._with_media: ChatCollator | None = None

    def without_media(self, entries: Collection[str] | None = None) -> ChatCollator:
        """
        A collator of the same batches without pixels and features of sound, which decodes no media; `self` if none of
        `entries` are made of media.

        The size of a medium is read from its header, and its processor runs on a blank one of that size, so that
        placeholders and integers such as grids are the same. If that is not possible, for a medium behind a URL, a
        file of a video, or a processor that needs more than the size, it is decoded; this is logged once.

        Args:
            entries (`Collection[str]`, *optional*):
                Floating-point entries to leave out; by default all except token fields.
        """
        blank = [
            kind
            for kind, processor in self._media_processors.items()
            if entries is None or processor.model_input_names[0] in entries
        ]
        if entries is not None and not blank:
            return self
        bare = copy.copy(self)
        bare._blank = frozenset(blank)
        if "image" in blank:
            bare.processor = without_pixels(self.processor)
            bare.decodes = frozenset()
        bare._left_out = entries
        bare._with_media = self
        return bare

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """
        Args:
            samples (`Sequence[Mapping[str, Any]]`): Conversations or texts, each with any number of media.

        Returns:
            `dict[str, Tensor]`: The model's inputs, and `labels` of shape `(batch, length)`.

        Raises:
            `ValueError`: For an unknown format, media that don't match their placeholders, or a too long sample.
        """
        return self.collate([self.encode(sample, index) for index, sample in enumerate(samples)])

    def encode(
        self,
        sample: Mapping[str, Any],
        index: int = 0,  # in the batch, for error messages
    ) -> dict[str, Tensor]:
        """Encodes one sample as token fields without a batch dimension, including `labels`, and media."""
        if self._with_media is None:
            return self.encode_by_size(sample, index)
        try:
            fields = self.encode_by_size(sample, index)
            fields = {name: value for name, value in fields.items() if not is_left_out(name, value, self._left_out)}
            read = [self._media_processors[kind] for kind in self._media_processors.keys() - self._blank]
            known = {name for processor in read for name in processor.model_input_names}
            if wanted := [
                name for name, value in fields.items() if is_left_out(name, value, None) and name not in known
            ]:
                raise ValueError(f"{wanted} depend on pixels and are not left out.")
        except Exception as error:  # processors raise errors of any type
            fields = self._with_media.encode(sample, index)  # raises, too, if the sample is bad
            logger.warning_once(
                "`%s` can't process media from their sizes alone, so they are decoded where only text is needed: %s",
                type(self.processor).__name__,
                type(error).__name__,
            )
            logger.debug("No size of a medium in sample %d of a batch: %s", index, error)
        return {name: value for name, value in fields.items() if not is_left_out(name, value, self._left_out)}

    def encode_by_size(self, sample: Mapping[str, Any], index: int = 0) -> dict[str, Tensor]:
        """
        [`~ChatCollator.encode`] without a way out where a size is not known: of a collator of
        [`~ChatCollator.without_media`] there are zeros for pixels, and nothing is decoded or fetched.

        Raises `UnknownSizeError` for a medium whose size no header of a local file gives, `OSError` for an unreadable
        file.
        """
        chat = self.read(sample, index)
        media = {kind: [self.medium(kind, value) for value in values] for kind, values in chat.media.items()}
        text, spans, prompt = self.text_and_targets(chat, index)
        special = self.special_tokens(text, chat)
        options: dict[str, Any] = {"return_offsets_mapping": True, "return_tensors": "pt", **special}
        if isinstance(self.processor, ProcessorMixin):
            options |= {"return_text_replacement_offsets": True, "images": None}
            # images as those of one text: some processors cut an image that is the only one into tiles
            options |= {_ARGUMENTS[kind]: [values] if kind == "image" else values for kind, values in media.items()}
            options |= {"sampling_rate": self._rate} if "audio" in media else {}
        with naming_libraries("video") if "video" in media else nullcontext():
            encoded = dict(self.processor(text=[text], **options))
        offsets = encoded.pop("offset_mapping")[0]
        replaced = encoded.pop("text_replacement_offsets", ())
        replacements = list(replaced[0]) if len(replaced) else []
        if (num_media := sum(map(len, media.values()))) and len(replacements) != num_media:
            raise ValueError(
                f"`{type(self.processor).__name__}` does not return the positions of the {num_media} "
                f"{' and '.join(media)} parts of sample {index} of the batch. Tokenise the dataset yourself, with "
                "`labels`."
            )
        fields = {name: value[0] if name in TOKEN_FIELDS else value for name, value in encoded.items()}
        placeholder = torch.zeros_like(fields["input_ids"], dtype=torch.bool)
        for replacement in replacements:
            placeholder |= _overlap(offsets, replacement["new_span"])
        target = torch.zeros_like(placeholder)
        for span in spans:
            target |= _overlap(offsets, _shifted(span, replacements))
        if prompt is not None:
            ids = (
                self.tokenizer(_expanded(prompt, text, replacements), **special)["input_ids"]
                if chat.num_prompts
                else []
            )
            target = _after(fields, ids)
        fields["labels"] = fields["input_ids"].masked_fill(~target | placeholder, IGNORE_INDEX)
        fields = self._fit(fields, placeholder, index, list(media))
        if (fields["labels"] == IGNORE_INDEX).all():
            cut = " within `max_length`" if target.any() else ""
            roles = ", ".join(sorted({str(message.get("role")) for message in chat.messages})) or "none"
            logger.warning_once(
                "A sample has no targets%s. It adds nothing to the loss. This is logged once for all such samples.",
                f": its completion is empty{cut}"
                if prompt is not None
                else f": it has no message of the role `assistant`{cut}; its roles are {roles}",
            )
        return fields

    def _fit(
        self, fields: dict[str, Tensor], placeholder: Tensor, index: int, kinds: Sequence[str]
    ) -> dict[str, Tensor]:
        """Truncates a sample to `max_length`, or raises `ValueError`."""
        length = placeholder.shape[0]
        if self.max_length is None or length <= self.max_length:
            return fields
        num_media = int(placeholder[self.max_length :].sum())
        if self.on_too_long == "raise" or num_media:
            reason = f", and truncation would drop {num_media} {' and '.join(kinds)} tokens" if num_media else ""
            remedy = "a larger `max_length`" if num_media else "`on_too_long='truncate'` or a larger `max_length`"
            raise ValueError(
                f"Sample {index} of the batch has {length} tokens, more than `max_length={self.max_length}`{reason}. "
                f"Use {remedy}, or filter the dataset."
            )
        return {name: v[..., : self.max_length] if name in TOKEN_FIELDS else v for name, v in fields.items()}

    def special_tokens(self, text: str, chat: Chat) -> dict[str, Any]:
        """Arguments that keep the tokenizer from adding special tokens to those of the template."""
        begins = self.tokenizer.bos_token is not None and text.startswith(self.tokenizer.bos_token)
        # as `apply_chat_template` of a tokenizer does
        is_rendered = not isinstance(self.processor, ProcessorMixin) and not chat.is_text
        return {"add_special_tokens": False} if begins or is_rendered else {}

    def read(self, sample: Mapping[str, Any], index: int) -> Chat:
        """A sample with messages in the form that the template expects."""
        chat = read_sample(sample, index, tuple(self._media_processors), self.formats, self.media_columns)
        for message in chat.messages if chat.is_text or not self._takes_parts else ():
            if isinstance(parts := message.get("content"), list):
                message["content"] = "".join(
                    part.get("text") or getattr(self.processor, f"{part['type']}_token", "") for part in parts
                )
        return chat

    def medium(self, kind: str, value: Any) -> Any:
        """A medium as the processor takes it, or a blank one of its size."""
        made = (BLANKS if kind in self._blank else READERS)[kind]
        return made(locate(value, self.image_folder), self._rate)

    @property
    def _rate(self) -> int:
        return getattr(self._media_processors.get("audio"), "sampling_rate", 16_000)

    def text_and_targets(self, chat: Chat, index: int) -> tuple[str, list[Span], str | None]:
        """The text, the character spans of the assistant's answers, and the prompt of a sample that has one."""
        if chat.num_prompts is None:
            return *self._text_and_answers(chat, index), None
        prompt = chat.messages[: chat.num_prompts]
        if not chat.is_text:
            text, _ = self._render(chat.messages, **chat.options)
            return text, [], self._render(prompt, add_generation_prompt=True, **chat.options)[0] if prompt else ""
        text, end = "".join(message["content"] for message in chat.messages), self.tokenizer.eos_token or ""
        return text.removesuffix(end) + end, [], "".join(message["content"] for message in prompt)

    def _text_and_answers(self, chat: Chat, index: int) -> tuple[str, list[Span]]:
        """A conversation as text, and the character spans of the assistant's answers."""
        if GENERATION_BLOCK.search(self.template):
            return self._render(chat.messages, return_assistant_tokens_mask=True, **chat.options)
        text, _ = self._render(chat.messages, **chat.options)
        spans = []
        for turn, message in enumerate(chat.messages):
            if message.get("role") != "assistant":
                continue
            before, _ = self._render(chat.messages[:turn], add_generation_prompt=True, **chat.options)
            after, _ = self._render(chat.messages[: turn + 1], **chat.options)
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
            conversations=[messages],
            chat_template=self.template,
            **{**self.tokenizer.special_tokens_map, **options},
        )
        return texts[0], [(int(start), int(end)) for start, end in spans[0]] if spans else []

    def _template_takes_parts(self) -> bool:
        """Whether the template supports content as a list of parts: a word in a part is rendered as the word."""
        try:
            text, _ = self._render([{"role": "user", "content": [{"type": "text", "text": "probe"}]}])
        except Exception:  # templates raise errors of any type
            return False
        return "probe" in text and "'type'" not in text and '"type"' not in text


def _media_processors(processor: Any) -> dict[str, Any]:
    """Kind of media -> the part of a processor that reads it."""
    found = {}
    for kind, names in _PROCESSORS.items():
        parts = (getattr(processor, name, None) for name in names)
        if (part := next((part for part in parts if part is not None), None)) is not None:
            found[kind] = part
    return found


def _chat_template(processor: Any) -> str:
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


def _expanded(prompt: str, text: str, replacements: Sequence[Mapping[str, Any]]) -> str:
    """A prompt with expanded placeholders, which are those of the text that it is the beginning of."""
    common = len(os.path.commonprefix([prompt, text]))
    for replacement in reversed(replacements):
        start, end = replacement["span"]
        if end <= common:
            prompt = prompt[:start] + replacement["replacement"] + prompt[end:]
    return prompt


def _after(fields: Mapping[str, Tensor], prompt: Sequence[int]) -> Tensor:
    """Mask of the tokens from the first that is not the prompt's on, as in TRL's `completion_mask`."""
    mask = fields.get("attention_mask", torch.ones_like(fields["input_ids"])) != 0
    ids = fields["input_ids"][mask]
    length = min(len(ids), len(prompt))
    unlike = torch.nonzero(ids[:length] != torch.tensor(prompt[:length], dtype=ids.dtype))
    first = int(unlike[0]) if len(unlike) else length
    return mask & (mask.cumsum(0) > first)


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
            chat = collator.read(read(index), position)
            if chat.media.keys() - {"image"}:
                continue
            text, _, _ = collator.text_and_targets(chat, position)
            special = collator.special_tokens(text, chat)
            if (kind := bool(special)) not in settings:
                settings[kind] = _settings(processor, {"return_tensors": "pt", **special})
            images = [collator.medium("image", image) for image in chat.media.get("image", ())]
            expanded = _expand(processor, text, images, settings[kind])
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
    of_text: Any = [images] if images else None
    given, texts, _, _ = processor.prepare_inputs_layout(images=of_text, text=[text])
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
