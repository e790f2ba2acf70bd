"""Samples that can't be read: who finds them, what is said of them, and that the others are read as ever."""

import errno
import pickle

import pytest
from datasets import Dataset, Features, Image, Value
from torch.utils.data import Subset

from hf_mmparallel.data import ChatCollator
from hf_mmparallel.data.bad_samples import BadSample, BadSampleError, stored_row
from hf_mmparallel.data.global_batches import GlobalBatch
from hf_mmparallel.data.media import readers
from hf_mmparallel.data.step_batch import StepBatch, UnreadableBatch
from hf_mmparallel.data.step_dataset import Reader
from hf_mmparallel.data.streams import StreamWindow
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, SampleSizes, resolve_plan

from .conversations import broken, conversation, image_file, llava_json, stored, without_decoding
from .planned import SPEC, planned_dataset
from .processors import PROCESSORS

PLAN = resolve_plan(SPEC, {"vision": ModulePlugin(dp_size=2), LANGUAGE_MODEL: ModulePlugin(dp_size=2, pp_size=2)})


class Files:
    """Samples in files, of which some can't be opened and some can't be collated."""

    def __init__(self, closed=(), odd=()):
        self.closed = closed
        self.odd = odd

    def __getitem__(self, index):
        if index in self.closed:
            raise OSError(errno.EACCES, "Permission denied", f"charts/{index}.png")
        return {"index": index, "odd": index in self.odd, "messages": [{"path": f"charts/{index}.png"}]}


def collate(samples):
    if any(sample["odd"] for sample in samples):
        raise KeyError("images")
    return {"index": [sample["index"] for sample in samples]}


def make(rank, dataset, sizes=None, **settings):
    return planned_dataset(PLAN, rank, dataset, collate, sizes=sizes, **settings)


DRAW = GlobalBatch(tuple(range(20, 32)), 1, 24)


def bad_of(batch):
    return {batch.global_batch.samples[batch_index]: (bad.index, bad.file) for batch_index, bad in batch.bad.items()}


def test_a_rank_notes_the_samples_that_it_cannot_read_and_says_which_files_they_are():
    dataset = Files(closed=(21, 27, 30))
    found = [make(rank, dataset).__getitems__(DRAW) for rank in range(PLAN.world_size)]
    assert [sorted(bad_of(batch)) for batch in found] == [[21, 27], [30], [21, 27], [21, 27], [30], [30]]
    assert all(isinstance(batch, UnreadableBatch) and batch.global_batch is DRAW for batch in found)
    bad = found[0].bad[1]
    assert (bad.index, bad.file) == (21, "charts/21.png")
    error = pickle.loads(pickle.dumps(bad)).error()
    assert isinstance(error, BadSampleError) and isinstance(error, ValueError)
    assert str(error).startswith("Sample 21 (charts/21.png) can't be read: PermissionError: [Errno 13] ")
    assert "__getitem__" in str(error.__cause__)


def test_of_a_corrupt_image_the_ranks_of_the_language_model_read_the_header_only():
    collator = ChatCollator(PROCESSORS["qwen2_vl"]())
    inputs = {"vision": frozenset(["pixel_values", "image_grid_thw"])}
    images = [without_decoding(image_file((40, 30))) for _ in range(4)]
    images[2] = {"bytes": broken(images[2]["bytes"]), "path": "charts/2.png"}
    dataset = stored([{**conversation([(40, 30)]), "images": [image]} for image in images])
    for source in (dataset, StreamWindow(dataset.to_iterable_dataset())):
        found = []
        for rank in range(PLAN.world_size):
            steps = make(rank, source)
            steps.readers = readers(source, collator, SPEC, inputs)
            steps.window = source if isinstance(source, StreamWindow) else None
            found.append(steps.__getitems__(GlobalBatch((0, 1, 2, 3), 0, 4)))
        assert [bad_of(batch) for batch in found] == [{}, {2: (2, "charts/2.png")}, *[{}] * 4]  # rank 1 has an encoder
        read = [batch for batch in found if isinstance(batch, StepBatch)]
        assert 2 in [index for batch in read for key in batch.batches for index in batch.step.chunks[key[:3]][key[3]]]


def test_an_image_that_can_not_be_fetched_is_a_bad_sample_of_every_rank_that_needs_its_size():
    url = "http://localhost:1/2.png"
    rows = [
        {**llava_json(conversation([(40, 30)])), "image": without_decoding(image_file((40, 30)))} for _ in range(4)
    ]
    rows[2]["image"] = url
    inputs = {"vision": frozenset(["pixel_values", "image_grid_thw"])}
    found = []
    for rank in range(PLAN.world_size):
        steps = make(rank, rows)
        steps.readers = readers(rows, ChatCollator(PROCESSORS["qwen2_vl"]()), SPEC, inputs)
        found.append(steps.__getitems__(GlobalBatch((0, 1, 2, 3), 0, 4)))
    bad = [bad_of(batch) for batch in found]
    assert {2: (2, url)} in bad and all(own in ({}, {2: (2, url)}) for own in bad)


def test_the_samples_that_a_collator_cannot_take_are_found_one_by_one():
    batch = make(0, Files(odd=(20, 22))).__getitems__(DRAW)
    assert bad_of(batch) == {20: (20, "charts/20.png"), 22: (22, "charts/22.png")}
    assert str(batch.bad[0]).endswith("KeyError: 'images'.")


def test_a_collator_that_only_fails_for_several_samples_together_is_no_bad_sample():
    def fails_together(samples):
        if len(samples) > 1:
            raise RuntimeError("together")
        return collate(samples)

    dataset = make(0, Files())
    dataset.readers = Reader(Files(), fails_together)
    with pytest.raises(RuntimeError, match="together"):
        dataset.__getitems__(DRAW)


def test_a_library_that_is_missing_is_no_bad_sample():
    class Undecodable(Files):
        def __getitem__(self, index):
            raise ImportError("torchcodec")

    def undecoded(samples):
        raise ImportError("torchcodec")

    for samples, collator in ((Undecodable(), collate), (Files(), undecoded)):
        dataset = make(0, samples)
        dataset.readers = Reader(samples, collator)
        with pytest.raises(ImportError, match="torchcodec"):
            dataset.__getitems__(DRAW)


def test_a_draw_without_its_bad_samples_is_planned_and_read_like_any_other():
    dataset = make(2, Files(closed=(21,)))
    first = dataset.__getitems__(DRAW)
    rest = DRAW.without(first.bad)
    assert rest.samples == (20, *range(22, 32)) and (rest.epoch, rest.position) == (1, 24)
    batch = dataset.__getitems__(rest)
    assert not batch.bad and batch.step.samples == rest.samples and batch.step.epoch == 1
    assert batch.batches == make(2, Files()).__getitems__(rest).batches


def failing_sizes(indices):
    if 23 in indices:
        raise ValueError("no header")
    return SampleSizes.uniform({"vision": 4, LANGUAGE_MODEL: 9}, len(indices))


def test_a_sample_whose_size_cannot_be_told_is_bad_before_anything_is_read():
    dataset = make(0, [Files()[index] for index in range(40)], failing_sizes)
    batch = dataset.__getitems__(DRAW)
    assert bad_of(batch) == {23: (23, "charts/23.png")} and isinstance(batch, UnreadableBatch)
    rest = dataset.__getitems__(DRAW.without(batch.bad))
    assert not rest.bad and 23 not in rest.step.samples
    with pytest.raises(KeyError, match="none"):  # a planner that fails for another reason says so
        make(0, Files(), failing_sizes, arrangement="none").__getitems__(GlobalBatch((1, 2)))
    none = make(0, Files(), sizes=lambda indices: failing_sizes([23, *indices]))
    assert len(none.__getitems__(DRAW).bad) == len(DRAW.samples)


def test_files_are_found_in_rows_that_are_not_decoded(tmp_path):
    (tmp_path / "2.png").write_bytes(b"no image")
    rows = {"text": ["a", "b"], "image": [{"bytes": b"no image", "path": "1.png"}, str(tmp_path / "2.png")]}
    dataset = Dataset.from_dict(rows, features=Features({"text": Value("string"), "image": Image()}))
    for index, name in enumerate(("1.png", str(tmp_path / "2.png"))):
        with pytest.raises(Exception, match="cannot identify") as caught:
            dataset[index]
        row = stored_row(Subset(dataset, [1, 0]), 1 - index)
        assert BadSample.of(index, caught.value, row).file == name


def caused() -> RuntimeError:
    error = RuntimeError("decoding")
    error.__cause__ = FileNotFoundError(errno.ENOENT, "No such file", "none/a.png")
    return error


@pytest.mark.parametrize(
    ("row", "file"),
    [
        (None, None),
        ({"path": "", "text": "a.png"}, None),
        ({"image": "data:image/png;base64,abc"}, None),
        ({"images": ["a.png", "b.png"], "audio": {"path": "c.wav"}, "video": "d.mp4"}, "a.png, b.png, c.wav, ..."),
        ({"messages": [{"content": [{"type": "image", "url": "https://x/y.png"}]}]}, "https://x/y.png"),
    ],
)
def test_names_of_files_in_a_row_unless_a_cause_has_one(row, file):
    assert BadSample.of(0, ValueError("no"), row).file == file
    bad = BadSample.of(3, caused(), row)
    assert bad.file == "none/a.png" and bad.reason == "RuntimeError: decoding"
