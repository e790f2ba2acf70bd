"""Media as samples have them, paths, URLs, bytes, arrays and frames: read, or blank ones of the same size."""

from __future__ import annotations

import base64
import errno
import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np
from torch import Tensor
from transformers.audio_utils import load_audio
from transformers.image_utils import load_image

from .image_sizes import UnknownSizeError, blank_array, decode_image, image_size

_SECONDS = 30.0  # for the answer to a URL
_EXACT = ("WAV", "WAVEX", "FLAC", "AIFF")  # files of sound whose header has the number of samples


# kind -> what reads its files
_LIBRARIES = {
    "image": "`pillow`",
    "audio": "`soundfile` and `soxr`, or `torchcodec`",
    "video": "`torchvision`, and for files `torchcodec`",
}


@contextmanager
def naming_libraries(kind: str) -> Iterator[None]:
    """A block that reads media of one kind, whose `ImportError`s say in one sentence what to install."""
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"No library that is installed reads this {kind}. Install {_LIBRARIES[kind]}, or give arrays."
        ) from error


def locate(
    value: Any,
    folder: str | None,  # of relative paths
) -> Any:
    if isinstance(value, (list, tuple)):  # frames of a video
        return [locate(frame, folder) for frame in value]
    if isinstance(value, Mapping) and value.get("bytes") is None and value.get("path") is not None:
        path = locate(value["path"], folder)
        return path if path.startswith(("http://", "https://")) else {**value, "path": path}
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if folder is None or not isinstance(value, str) or "://" in value or value.startswith("data:"):
        return value
    return os.path.join(folder, value)


def read_image(value: Any, rate: int | None = None) -> Any:
    return load_image(value, timeout=_SECONDS) if isinstance(value, str) else decode_image(value)


def blank_image(value: Any, rate: int | None = None) -> np.ndarray:
    """A blank image of the size of another image, which is not decoded."""
    data = _bytes_of(value)
    return blank_array(image_size(value if data is None else {"bytes": data}))


def read_audio(
    value: Any,  # an array at `rate`; a mapping with `array` and `sampling_rate`, or with `bytes`; a path or URL
    rate: int,  # samples per second
) -> np.ndarray:
    """Sound for a processor, `(samples,)` at its rate."""
    if hasattr(value, "get_all_samples"):  # decoded by `datasets`
        decoded = value.get_all_samples()
        value = {"array": decoded.data, "sampling_rate": decoded.sample_rate}
    if isinstance(value, Mapping) and value.get("array") is not None:
        sound, given = np.asarray(value["array"], dtype=np.float32), value.get("sampling_rate") or rate
        sound = sound.mean(0) if sound.ndim == 2 else sound  # channels
        if given == rate:
            return sound
        from scipy.signal import resample_poly  # takes most of a second to import

        return resample_poly(sound, rate, given).astype(np.float32)
    if isinstance(value, Mapping) and value.get("bytes") is not None:
        value = f"data:;base64,{base64.b64encode(value['bytes']).decode()}"
    value = _path_of(value)
    if not isinstance(value, str):
        return np.asarray(value)
    _check_file(value)
    with naming_libraries("audio"):
        return load_audio(value, sampling_rate=rate, timeout=_SECONDS)


def blank_audio(value: Any, rate: int) -> np.ndarray:
    """Silence as long as a sound, which is not decoded."""
    if isinstance(value, Mapping) and value.get("array") is not None:
        shape, given = np.shape(value["array"]), value.get("sampling_rate") or rate
        return np.zeros(-(-shape[-1] * rate // given), dtype=np.float32)
    if isinstance(value, (np.ndarray, Tensor, list, tuple)):
        return np.zeros(len(value), dtype=np.float32)
    data, value = _bytes_of(value), _path_of(value)
    if data is None and not (isinstance(value, str) and "://" not in value):
        raise UnknownSizeError(
            f"The length of a sound of type `{type(value).__name__}` is not known before it is read."
        )
    try:
        header = import_module("soundfile").info(value if data is None else io.BytesIO(data))
    except (ImportError, RuntimeError) as error:
        raise UnknownSizeError(f"`soundfile` can't read how long a sound is: {error}") from error
    # elsewhere the number of samples depends on what decodes and resamples them
    if header.samplerate != rate or header.format not in _EXACT:
        raise UnknownSizeError(f"A {header.format} file of {header.samplerate} Hz has to be decoded for {rate} Hz.")
    return np.zeros(header.frames, dtype=np.float32)


def read_video(value: Any, rate: int | None = None) -> Any:
    """A video for a processor, which reads files itself and chooses the frames: a path, a URL, an array, or frames."""
    value = _path_of(value)
    if isinstance(value, str):
        _check_file(value)
    if isinstance(value, (str, np.ndarray, Tensor)):
        return value
    if isinstance(value, (list, tuple)):
        return [read_image(frame) for frame in value]
    what = "in bytes" if isinstance(value, Mapping) else f"a `{type(value).__name__}`"
    raise ValueError(
        f"A video is {what}, which its processor can't read. Give a path, a URL, an array or a list of frames; a "
        "column of `datasets` needs `Video(decode=False)`, with paths."
    )


def blank_video(value: Any, rate: int | None = None) -> np.ndarray:
    """Blank frames `(frames, height, width, 3)`, as many and as large as those of a video."""
    if isinstance(value, (list, tuple)) and value:
        sizes = {image_size(frame) for frame in value}
        if len(sizes) == 1:
            return np.zeros((len(value), *sizes.pop(), 3), np.uint8)  # writable, as `torch.from_numpy` expects
    if isinstance(value, (np.ndarray, Tensor)) and value.ndim == 4:
        return np.zeros((len(value), *image_size(value[0]), 3), np.uint8)
    raise UnknownSizeError(f"The frames of a video of type `{type(value).__name__}` are not known before it is read.")


# kind -> what reads one, and what makes a blank one of its size
READERS: dict[str, Callable[[Any, Any], Any]] = {"image": read_image, "video": read_video, "audio": read_audio}
BLANKS: dict[str, Callable[[Any, Any], Any]] = {"image": blank_image, "video": blank_video, "audio": blank_audio}


def _check_file(value: str) -> None:
    """Raises `FileNotFoundError` for a path of no file: `load_audio` would take it for base64."""
    if "://" not in value and not value.startswith("data:") and not os.path.isfile(value):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), value)


def _bytes_of(value: Any) -> bytes | None:
    if isinstance(value, Mapping):
        return value.get("bytes")
    return base64.b64decode(value.split(",", 1)[1]) if isinstance(value, str) and value.startswith("data:") else None


def _path_of(value: Any) -> Any:
    """The path in a mapping that has no bytes; any other value as it is."""
    return value["path"] if isinstance(value, Mapping) and value.get("bytes") is None and "path" in value else value
