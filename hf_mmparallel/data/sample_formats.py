"""Formats of samples: which columns each has, and how its sample becomes messages with media."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# kind of media -> the columns that may hold those of a sample, one or a list of them
MEDIA_COLUMNS = {"image": ("images", "image"), "video": ("videos", "video"), "audio": ("audios", "audio")}
# `from` of ShareGPT -> role
_ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "function", "ipython"), "tool"),
}


@dataclass(frozen=True)
class SampleFormat:
    name: str
    columns: tuple[str, ...]  # that a sample has
    turns: tuple[str, ...]  # those of them that hold its text or messages, in their order
    num_prompts: int | None = None  # how many of the turns have no loss; by default only what the assistant says has


# The first one of which a sample has all columns is its format.
FORMATS = (
    SampleFormat("messages", ("messages",), ("messages",)),
    SampleFormat("prompt and completion", ("prompt", "completion"), ("prompt", "completion"), num_prompts=1),
    SampleFormat("Llava", ("conversations", "image"), ("conversations",)),
    SampleFormat("ShareGPT", ("conversations",), ("conversations",)),
    SampleFormat("text", ("text",), ("text",), num_prompts=0),
)


@dataclass(frozen=True)
class Chat:
    # `content` is in parts, of which those of media have their type alone; texts that no template renders lack `role`
    messages: list[dict[str, Any]]
    media: dict[str, list[Any]]  # kind -> values in the order of their parts
    num_prompts: int | None  # messages without loss; `None` if only what the assistant says has loss
    options: dict[str, Any] = field(default_factory=dict)  # of the template

    @property
    def is_text(self) -> bool:
        """Whether no template renders it."""
        return any("role" not in message for message in self.messages)


def find_formats(columns: Iterable[str], formats: Sequence[SampleFormat] = FORMATS) -> list[SampleFormat]:
    """The formats of samples with some columns; the first is that of a sample that fills all of them."""
    present, found = set(columns), []
    for one in formats:
        if present.issuperset(one.columns) and not any(set(one.turns) == set(other.turns) for other in found):
            found.append(one)
    return found


def known_formats(formats: Sequence[SampleFormat] = FORMATS) -> str:
    return ", ".join(" with ".join(f"`{name}`" for name in one.columns) for one in formats)


def read_sample(
    sample: Mapping[str, Any],
    index: int,  # in the batch, for errors
    kinds: Collection[str],  # of media that the processor takes
    formats: Sequence[SampleFormat] = FORMATS,
    columns: Mapping[str, Sequence[str]] = MEDIA_COLUMNS,
) -> Chat:
    """
    Turns a sample of any format into messages and media.

    In strings, `<image>`, `<video>` and `<audio>` stand for media of the kinds that the processor takes. If there is
    no placeholder of a kind, its media come before the first message of the user, as in TRL. Raises `ValueError` for a
    sample without a known format, and for media that do not match their placeholders.
    """
    name = f"sample {index} of the batch" + (f" (`id` {sample['id']!r})" if "id" in sample else "")
    found = find_formats([column for column, value in sample.items() if value is not None], formats)
    if not found:
        raise ValueError(
            f"None of the known formats ({known_formats(formats)}) has the columns of {name}: {sorted(sample)}. "
            "Rename one, or give a `data_collator` of your own."
        )
    turns = [_turns(sample[column], f"`{column}` of {name}", found[0]) for column in found[0].turns]
    messages = [message for own in turns for message in own]
    if len({"role" in message for message in messages}) > 1:
        raise ValueError(
            f"There is text beside messages in {list(found[0].turns)} of {name}. Give strings in all, or messages."
        )
    system = sample.get("system")
    if found[0].turns == ("conversations",) and system and messages and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    given = {kind: _given(sample, kind, names, name) for kind, names in columns.items()}
    messages = _with_parts(messages, given, kinds)
    media: dict[str, list[Any]] = {kind: [] for kind in given}
    rest = {kind: iter(values) for kind, values in given.items()}
    for part in (part for message in messages for part in message.get("content") or ()):
        if (kind := _kind(part)) == "text":
            continue
        if kind not in kinds:
            raise ValueError(
                f"There is a part of the type `{part.get('type')}` in {name}, and its processor takes "
                f"{_listed(kinds)}. Use another processor, or tokenise the dataset yourself, with `labels`."
            )
        value = _medium(part, kind)
        media[kind].append(next(rest[kind], None) if value is None else value)
        part.clear()
        part["type"] = kind
    for kind, values in media.items():
        if given[kind] and kind not in kinds:
            raise ValueError(
                f"There are {kind}s in {name}, and its processor takes {_listed(kinds)}. Use another processor, or "
                "remove the column."
            )
        if any(value is None for value in values) or next(rest[kind], None) is not None:
            column = next((own for own in columns[kind] if sample.get(own) is not None), columns[kind][0])
            raise ValueError(
                f"There are {len(values)} {kind} parts in `{found[0].turns[0]}` and {len(given[kind])} {kind}s in "
                f"`{column}` of {name}. Give one part `{{'type': '{kind}'}}`, or `<{kind}>` in a string, for each."
            )
    num_prompts = found[0].num_prompts
    return Chat(
        messages,
        {kind: values for kind, values in media.items() if values},
        None if num_prompts is None else sum(len(own) for own in turns[:num_prompts]),
        _template_options(sample),
    )


def read_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A message with `role` and `content`, without what is empty; `ValueError` if nothing known says its role."""
    message = {key: value for key, value in message.items() if value is not None}
    if "role" in message:
        return message
    if "from" not in message:
        raise ValueError(
            f"A message in {where} has {sorted(message)} and no `role`. Give each message a `role` and a `content`, "
            "or `from` and `value` as in ShareGPT."
        )
    given = message.pop("from")
    if given not in _ROLES:
        raise ValueError(f"A message in {where} is `from` {given!r}. Use one of {', '.join(_ROLES)}.")
    return {"role": _ROLES[given], "content": message.pop("value", ""), **message}


def _turns(value: Any, where: str, one: SampleFormat) -> list[dict[str, Any]]:
    """A text as a message without a role, or messages with `role` and `content`."""
    takes_text, takes_messages = one.num_prompts is not None, one.num_prompts != 0
    if takes_text and isinstance(value, str):
        return [{"content": value}]
    if takes_messages and isinstance(value, (list, tuple)) and all(isinstance(message, Mapping) for message in value):
        return [read_message(message, where) for message in value]
    known = [*["a string"] * takes_text, *["a list of messages"] * takes_messages]
    raise ValueError(f"A `{type(value).__name__}` is in {where}. Give {' or '.join(known)}.")


def _given(sample: Mapping[str, Any], kind: str, columns: Sequence[str], name: str) -> list[Any]:
    filled = {column: sample[column] for column in columns if sample.get(column) is not None}
    if len(filled) > 1:
        raise ValueError(f"There are {kind}s in both {list(filled)} of {name}. Remove one of these columns.")
    for column, value in filled.items():
        # a list in `video` is the frames of one
        return list(value) if isinstance(value, (list, tuple)) and column != "video" else [value]
    return []


def _with_parts(
    messages: list[dict[str, Any]], given: Mapping[str, list[Any]], kinds: Collection[str]
) -> list[dict[str, Any]]:
    """Messages whose content is in parts, with a part for each medium if a kind of media has none."""
    result = [
        {**message, "content": _parts(message["content"], kinds)}
        if isinstance(message.get("content"), (str, list, tuple))
        else message
        for message in messages
    ]
    placed = {_kind(part) for message in result for part in message.get("content") or ()}
    lacking = [{"type": kind} for kind in kinds if kind not in placed for _ in given[kind]]
    first = next((place for place, message in enumerate(messages) if message.get("role") == "user"), None)
    if first is not None and isinstance(messages[first].get("content"), str):
        result[first]["content"][:0] = lacking
    return result


def _parts(content: Any, kinds: Collection[str]) -> list[dict[str, Any]]:
    """
    Content as parts. Of media at the start or the end of a string, the line break between them and the text is the
    template's to write.
    """
    if not isinstance(content, str):
        return [{key: value for key, value in part.items() if value is not None} for part in content]
    if kinds:
        one = f"(?:{'|'.join(f'<{kind}>' for kind in kinds)})"
        content = re.sub(rf"\A(?:{one}\n?)+", lambda run: re.sub(rf"({one})\n", r"\1", run[0]), content)
        content = re.sub(rf"(?:\n?{one})+\Z", lambda run: re.sub(rf"\n({one})", r"\1", run[0]), content)
        pieces = re.split(f"({one})", content)
        if len(pieces) > 1:
            return [
                {"type": "text", "text": piece} if place % 2 == 0 else {"type": piece[1:-1]}
                for place, piece in enumerate(pieces)
                if piece
            ]
    return [{"type": "text", "text": content}]


def _kind(part: Mapping[str, Any]) -> str:
    """What a part of a message is, also of those that OpenAI's API takes (`image_url`)."""
    return str(part.get("type")).removesuffix("_url")


def _medium(part: Mapping[str, Any], kind: str) -> Any:
    value = next((part[key] for key in (kind, f"{kind}_url", "url", "path", "base64") if key in part), None)
    return value["url"] if isinstance(value, Mapping) and "url" in value else value


def _template_options(sample: Mapping[str, Any]) -> dict[str, Any]:
    """What a sample has for its template besides messages: tools and other variables, as in TRL."""
    options = dict(sample.get("chat_template_kwargs") or {})
    if tools := sample.get("tools"):
        options["tools"] = json.loads(tools) if isinstance(tools, str) else tools
    return options


def _listed(kinds: Collection[str]) -> str:
    return " and ".join(["text", *kinds])
