"""Images, sound and videos in the forms that samples have them: read alike, and measured without being read."""

import base64
import threading
import wave
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import ProcessorMixin
from transformers.utils import is_soundfile_available, is_torchvision_available

from hf_mmparallel.data import ChatCollator, media_values
from hf_mmparallel.data.image_sizes import UnknownSizeError
from hf_mmparallel.data.media_values import blank_audio, read_audio, read_image
from hf_mmparallel.data.size_measures import ChatMeasure, TokenMeasure
from hf_mmparallel.plan import LANGUAGE_MODEL

from .conversations import assert_same_batch, broken, heard, image_file, random_image, say, sound
from .processors import PROCESSORS, llava, of_both, of_sound

FILE = image_file((20, 9))
ASK = [{"from": "human", "value": "<image>\nwhich digit"}, {"from": "gpt", "value": "three"}]


class Answers(BaseHTTPRequestHandler):
    """One image, and nothing else."""

    def do_GET(self) -> None:
        found = self.path == "/a.png"
        self.send_response(200 if found else 404)
        self.end_headers()
        self.wfile.write(FILE if found else b"not found")

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = HTTPServer(("localhost", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://localhost:{server.server_port}"
    server.shutdown()


def test_an_image_is_the_same_from_wherever_it_is_read(url: str, tmp_path: Path, loads: list[Any]):
    (tmp_path / "a.png").write_bytes(FILE)
    collator = ChatCollator(llava(), image_folder=str(tmp_path))
    data = f"data:image/png;base64,{base64.b64encode(FILE).decode()}"
    local = ["a.png", Path("a.png"), str(tmp_path / "a.png"), {"bytes": None, "path": "a.png"}, data]
    local += [{"bytes": FILE, "path": "none.png"}, {"bytes": FILE}]
    lean = [collator.without_media().encode_by_size({"conversations": ASK, "image": value}) for value in local]
    assert not loads
    wanted = collator([{"conversations": ASK, "image": random_image((20, 9))}])
    for value in (*local, f"{url}/a.png", {"bytes": None, "path": f"{url}/a.png"}):
        assert_same_batch(collator([{"conversations": ASK, "image": value}]), wanted)
    assert all(torch.equal(own["input_ids"], wanted["input_ids"][0]) for own in lean)
    fetched = collator.without_media()([{"conversations": ASK, "image": f"{url}/a.png"}])
    assert_same_batch(fetched, wanted, "pixel_values")


def test_what_can_not_be_fetched_or_read_is_an_error_of_the_sample(url: str, tmp_path: Path):
    collator = ChatCollator(llava(), image_folder=str(tmp_path))
    (tmp_path / "broken.png").write_bytes(broken(FILE))
    for value in (f"{url}/none.png", "http://localhost:1/a.png", "none.png", "broken.png"):
        with pytest.raises(Exception, match=r"identify|refused|none\.png|broken|truncated"):
            collator([{"conversations": ASK, "image": value}])
    with pytest.raises(UnknownSizeError):
        collator.without_media().encode_by_size({"conversations": ASK, "image": f"{url}/a.png"})


SOUNDS = ("Qwen2Audio", "AudioFlamingo3")


@pytest.mark.parametrize("family", SOUNDS)
def test_sound_becomes_what_the_processor_makes_of_it(family: str):
    processor = of_sound(family)
    collator = ChatCollator(processor)
    array = sound(9000)
    for value in (array, {"array": array.tolist(), "sampling_rate": 16_000}, {"array": np.stack([array, array])}):
        batch = collator([heard(value)])
        assert processor.tokenizer.decode(batch["labels"][batch["labels"] != -100]) == "three</s>"
        messages = [say("user", "which digit"), say("assistant", "three")]
        messages[0]["content"].insert(0, {"type": "audio", "audio": array})
        wanted = processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
        assert_same_batch({name: batch[name] for name in wanted}, dict(wanted))
        assert_same_batch(collator.without_media()([heard(value)]), batch, "input_features")
        inside = collator([{"messages": messages}])
        assert_same_batch(inside, batch)
    assert collator.without_media(["pixel_values"]) is collator


def test_images_and_sounds_of_one_conversation_keep_their_order():
    processor = of_both()
    collator = ChatCollator(processor)
    images = [{"type": "image", "image": random_image(size)} for size in ((40, 30), (56, 28))]
    sounds = [{"type": "audio", "audio": sound(length)} for length in (9000, 5000)]
    messages = [say("user", "which digit"), say("assistant", "three"), say("user", "?"), say("assistant", "seven")]
    messages[0]["content"][:0] = [images[0], sounds[0]]
    messages[2]["content"] += [sounds[1], images[1]]
    options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    wanted = dict(processor.apply_chat_template(messages, return_tensors="pt", **options))
    answers = torch.as_tensor(wanted.pop("assistant_masks")).bool()
    batch = collator([{"messages": messages}])
    assert torch.equal(batch.pop("labels") != -100, answers)
    assert_same_batch(batch, wanted)
    assert batch["image_grid_thw"].shape == (2, 3) and batch["input_features"].shape[0] == 2
    lean = collator.without_media()([{"messages": messages}])
    assert torch.equal(lean["input_ids"], batch["input_ids"]) and not lean.keys() & {"pixel_values", "input_features"}


@pytest.mark.parametrize("family", SOUNDS)
@pytest.mark.parametrize("length", [500, 4001, 7000])
def test_sound_of_another_rate_is_resampled_and_as_long_as_is_measured(length: int, family: str):
    wave = np.sin(np.arange(length, dtype=np.float32) / 50)
    value = {"array": wave, "sampling_rate": 8_000}
    assert len(read_audio(value, 16_000)) == len(blank_audio(value, 16_000)) == 2 * length
    assert read_audio(value, 16_000)[::2] == pytest.approx(wave, abs=0.05)
    collator = ChatCollator(of_sound(family))
    token = collator.processor.audio_token_id
    measure = ChatMeasure(collator, TokenMeasure({"audio": (("audio", token),), LANGUAGE_MODEL: ()}))
    ids = collator([heard(value)])["input_ids"]
    wanted = {"audio": [int((ids == token).sum())], LANGUAGE_MODEL: [ids.shape[1]]}
    assert measure(heard(value)) == wanted and measure.together([heard(value)].__getitem__, [0]) == [wanted]


def sound_file(path: Path, rate: int = 16_000, channels: int = 1) -> np.ndarray:
    """Writes a WAV file of 9,000 samples, and returns them."""
    samples = np.clip(sound(9000) * 3000, -32768, 32767).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.repeat(samples, channels).tobytes())
    return samples.astype(np.float32) / 32768


def read_sounds(collator: ChatCollator, folder: Path) -> Iterator[tuple[Any, Any, np.ndarray]]:
    """Forms of a file of sound, with a dataset's row of each, and its samples."""
    from datasets import Audio, Dataset

    array = sound_file(folder / "a.wav")
    stereo = sound_file(folder / "b.wav", channels=2)
    stored = (folder / "a.wav").read_bytes()
    data = f"data:audio/wav;base64,{base64.b64encode(stored).decode()}"
    for value in ("a.wav", Path("a.wav"), {"bytes": stored, "path": None}, {"bytes": None, "path": "a.wav"}, data):
        yield value, heard(value), array
    yield "b.wav", heard("b.wav"), stereo
    rows = Dataset.from_list([heard(str(folder / "a.wav"))]).cast_column("audio", Audio(decode=False))
    yield "of `datasets`", rows[0], array


@pytest.mark.skipif(not is_soundfile_available(), reason="needs soundfile")
def test_files_of_sound_are_read_and_measured(tmp_path: Path):
    collator = ChatCollator(of_sound(), image_folder=str(tmp_path))
    for form, sample, array in read_sounds(collator, tmp_path):
        batch = collator([sample])
        assert_same_batch(batch, collator([heard(array)]))
        lean = collator.without_media().encode_by_size(sample)
        assert torch.equal(lean["input_ids"], batch["input_ids"][0]), form
    sound_file(tmp_path / "slow.wav", rate=8_000)
    slow = collator([heard("slow.wav")])
    assert slow["input_features"].shape[0] == 2  # windows of a second
    with pytest.raises(UnknownSizeError, match="8000 Hz"):
        collator.without_media().encode_by_size(heard("slow.wav"))
    assert_same_batch(collator.without_media()([heard("slow.wav")]), slow, "input_features")


def test_a_library_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def missing(*args: Any, **words: Any) -> Any:
        raise ImportError("several\nlines")

    monkeypatch.setattr(media_values, "load_audio", missing)
    collator = ChatCollator(of_sound(), image_folder=str(tmp_path))
    for _, sample, _ in read_sounds(collator, tmp_path):
        with pytest.raises(ImportError, match="`soundfile`"):
            collator([sample])
        with pytest.raises(ImportError, match="`soundfile`"):  # not a sample to leave out
            collator.without_media()([{**sample, "audio": {"bytes": b"", "path": None}}])
    watched = of_videos()
    watched.video_processor = missing  # type: ignore[attr-defined]
    (tmp_path / "a.mp4").touch()
    sample = {"conversations": [{"from": "human", "value": "<video>"}], "video": "a.mp4"}
    monkeypatch.setattr(missing, "model_input_names", (), raising=False)
    with pytest.raises(ImportError, match="`torchcodec`"):
        ChatCollator(watched, image_folder=str(tmp_path))([sample])


@pytest.mark.parametrize("column", ["audio", "video"])
def test_a_path_of_no_file_is_named(column: str, tmp_path: Path):
    collator = ChatCollator(of_sound() if column == "audio" else of_videos(), image_folder=str(tmp_path))
    asked = [{"from": "human", "value": f"<{column}>"}, {"from": "gpt", "value": "three"}]
    for reader in (collator, collator.without_media()):
        with pytest.raises(FileNotFoundError, match="none") as caught:
            reader([{"conversations": asked, column: "none.xyz"}])
        assert caught.value.filename == str(tmp_path / "none.xyz")


class Frames:
    """A video processor that treats frames as images: those of transformers need torchvision."""

    merge_size = 2
    model_input_names = ("pixel_values_videos", "video_grid_thw")

    def __init__(self, image_processor: Any):
        self.image_processor = image_processor

    def __call__(self, videos: list[Any], **options: Any) -> dict[str, Any]:
        found = [self.image_processor(list(video), return_tensors="pt") for video in videos]
        grids = [torch.tensor([len(own["image_grid_thw"]), *own["image_grid_thw"][0, 1:]]) for own in found]
        return {
            "pixel_values_videos": torch.cat([own["pixel_values"] for own in found]),
            "video_grid_thw": torch.stack(grids),
        }


def of_videos() -> ProcessorMixin:
    processor: Any = PROCESSORS["qwen2_vl"]()
    processor.video_processor = Frames(processor.image_processor)
    kind = "{% if part['type'] == 'image' %}<image>{% elif part['type'] == 'video' %}<video>"
    processor.chat_template = processor.chat_template.replace("{% if part['type'] == 'image' %}<image>", kind)
    return processor


def test_frames_of_a_video_and_images_beside_it(tmp_path: Path, loads: list[Any]):
    frames = [random_image((28, 36), seed) for seed in range(4)]
    for place, frame in enumerate(frames):
        frame.save(tmp_path / f"{place}.png")
    collator = ChatCollator(of_videos(), image_folder=str(tmp_path))
    ask = [{"from": "human", "value": "<image>\n<video>\nwhich digit"}, {"from": "gpt", "value": "three"}]
    names = [f"{place}.png" for place in range(4)]
    array = np.stack([np.asarray(frame) for frame in frames])
    batches = []
    for form in ({"video": frames}, {"videos": [names]}, {"video": array}):
        sample = {"conversations": ask, "image": frames[0], **form}
        batches.append(collator([sample]))
        lean = collator.without_media()
        assert_same_batch(lean([sample]), batches[-1], "pixel_values", "pixel_values_videos")
        assert_same_batch(collator.without_media(["pixel_values"])([sample]), batches[-1], "pixel_values")
        assert lean.encode_by_size(sample)["input_ids"].shape == batches[-1]["input_ids"].shape[1:]
    for own in batches:
        assert_same_batch(own, batches[0])
    loads.clear()
    file = {"conversations": ask, "image": {"bytes": (tmp_path / "0.png").read_bytes()}, "video": array}
    assert_same_batch(collator.without_media(["pixel_values"])([file]), batches[0], "pixel_values")
    assert not loads
    ids = batches[0]["input_ids"][0].tolist()
    count = {name: ids.count(collator.tokenizer.convert_tokens_to_ids(name)) for name in ("<image>", "<video>")}
    assert count["<video>"] == 4 * count["<image>"] > 0


@pytest.mark.skipif(not is_torchvision_available(), reason="needs torchvision")
def test_frames_are_sampled_by_a_processor_of_transformers():
    frames = [random_image((28, 36), seed) for seed in range(8)]
    processor: Any = of_videos()
    processor.video_processor = transformers.Qwen2VLVideoProcessor(min_pixels=28 * 28, max_pixels=56 * 56)
    collator = ChatCollator(processor)
    ask = [{"from": "human", "value": "<video>\nwhich digit"}, {"from": "gpt", "value": "three"}]
    batches = [collator([{"conversations": ask, "video": form}]) for form in (frames, np.stack(frames))]  # type: ignore
    grid = batches[0]["video_grid_thw"][0].tolist()
    assert_same_batch(*batches)
    assert grid[0] == 4  # two frames a patch
    assert int((batches[0]["mm_token_type_ids"] == 2).sum()) == np.prod(grid) // 4
    lean = collator.without_media()
    assert_same_batch(lean([{"conversations": ask, "video": frames}]), batches[0], "pixel_values_videos")


def test_videos_that_only_another_reader_takes_are_refused():
    sample = {"conversations": [{"from": "human", "value": "<video>"}], "video": {"bytes": b"0", "path": None}}
    with pytest.raises(ValueError, match=r"bytes.*Video\(decode=False\)"):
        ChatCollator(of_videos())([sample])


def test_an_image_that_is_read_already_is_kept():
    image = random_image((8, 8))
    assert read_image(image) is image
