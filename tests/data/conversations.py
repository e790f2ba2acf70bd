"""Conversations about random images, in the forms that datasets have them."""

import copy
import io
import zlib
from collections.abc import Sequence
from typing import Any

import datasets
import numpy as np
import torch
from PIL import Image
from torch import Tensor

Size = tuple[int, int]
ORIENTATION = 0x112


def say(role: str, *parts: str | None) -> dict:
    """A message of text parts; None is an image."""
    content = [{"type": "image"} if part is None else {"type": "text", "text": part} for part in parts]
    return {"role": role, "content": content}


def random_image(size: Size, seed: int = 0) -> Image.Image:
    """An image of a height and a width."""
    values = np.random.default_rng((seed, *size)).integers(0, 256, (*size, 3), dtype=np.uint8)
    return Image.fromarray(values)


def conversation(sizes: Sequence[Size], seed: int = 0) -> dict:
    """A question about each image."""
    turns = [turn for _ in sizes for turn in (say("user", None, "which digit"), say("assistant", "three"))]
    turns = turns or [say("user", "which"), say("assistant", "seven")]
    return {"messages": turns, "images": [random_image(size, seed + i) for i, size in enumerate(sizes)]}


def llava_json(sample: dict) -> dict:
    """A conversation as a row of Llava's JSON has it."""
    names = {"user": "human", "assistant": "gpt"}
    turns = []
    for message in sample["messages"]:
        parts = ["<image>" if part["type"] == "image" else part["text"] for part in message["content"]]
        turns.append({"from": names.get(message["role"], message["role"]), "value": "\n".join(parts)})
    images = sample["images"]
    return {"conversations": turns, **({"image": images[0] if len(images) == 1 else images} if images else {})}


def sound(length: int) -> np.ndarray:
    """Noise."""
    return np.random.default_rng(0).standard_normal(length).astype(np.float32)


def heard(value: Any) -> dict:
    """A question about sound."""
    turns = [{"role": "user", "content": "<audio>\nwhich digit"}, {"role": "assistant", "content": "three"}]
    return {"messages": turns, "audio": value}


def image_file(size: Size, kind: str = "PNG", orientation: int | None = None) -> bytes:
    """An image as a file of some kind, with an EXIF orientation."""
    buffer = io.BytesIO()
    random_image(size).save(buffer, format=kind, **({} if orientation is None else {"exif": _exif(orientation)}))
    return buffer.getvalue()


def turned_at_the_end(size: Size, orientation: int) -> bytes:
    """A PNG whose EXIF orientation comes after its pixels."""
    data = b"eXIf" + _exif(orientation).tobytes().removeprefix(b"Exif\0\0")
    chunk = (len(data) - 4).to_bytes(4, "big") + data + zlib.crc32(data).to_bytes(4, "big")
    file = image_file(size)
    return file[:-12] + chunk + file[-12:]


def stored(rows: Sequence[dict]) -> datasets.Dataset:
    """Conversations as a table that decodes its images."""
    table = datasets.Dataset.from_list(list(rows))
    return table.cast(datasets.Features({**table.features, "images": datasets.List(datasets.Image())}))


def inside(rows: Sequence[dict]) -> datasets.Dataset:
    """Conversations as a table that decodes their images, which are inside of messages."""
    rows = copy.deepcopy(list(rows))
    for row in rows:
        images = iter(row.pop("images"))
        for part in (part for message in row["messages"] for part in message["content"]):
            part.setdefault("text", None)
            part["image"] = next(images) if part["type"] == "image" else None
    part = {"type": datasets.Value("string"), "text": datasets.Value("string"), "image": datasets.Image()}
    messages = datasets.List({"role": datasets.Value("string"), "content": datasets.List(part)})
    return datasets.Dataset.from_list(rows).cast(datasets.Features({"messages": messages}))


def left_padded(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch with its padding in front."""
    fields = {"input_ids", "labels", "attention_mask", "token_type_ids", "mm_token_type_ids"} & batch.keys()
    shifts = (batch["attention_mask"] == 0).sum(-1).tolist()
    moved = {name: [row.roll(n) for row, n in zip(batch[name], shifts, strict=True)] for name in fields}
    return {**batch, **{name: torch.stack(rows) for name, rows in moved.items()}}


def assert_same_batch(found: Any, wanted: Any, *missing: str) -> None:
    """Equal entries of equal dtypes, but for those that are missing."""
    assert dict(found).keys() == dict(wanted).keys() - set(missing)
    for name, value in found.items():
        assert value.dtype == wanted[name].dtype and torch.equal(value, wanted[name]), name


def _exif(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return exif


def broken(file: bytes) -> bytes:
    """A PNG whose header is fine and whose pixels are not."""
    start = file.index(b"IDAT") + 4
    return file[:start] + bytes(len(file) - start - 12) + file[-12:]


def without_decoding(file: bytes) -> dict:
    """A file as an undecoded column of `datasets` has it."""
    return {"bytes": file, "path": None}
