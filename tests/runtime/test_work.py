"""What a step computes on is counted as the cost model counts it: by hand, on the samples themselves."""

import pytest
import torch

from hf_mmparallel.arrange import contiguous_step
from hf_mmparallel.cost import training_flops
from hf_mmparallel.data.context_tokens import WORDS
from hf_mmparallel.kernels.bitfield_attention.builders import causal_words, segments_of_lengths
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.plan import LANGUAGE_MODEL, MultimodalParallelPlugin, plan_for_model
from hf_mmparallel.runtime.work import ModuleWork, language_work
from hf_mmparallel.trainer.metrics_callback import RankWindow, flops_utilisation, total_work
from tests import tiny
from tests.runtime.loopback import run_loopback

SIZE = 6
WINDOW = (32 // 8) ** 2  # patches of a window of tiny Qwen2.5-VL: 32 pixels of 8 a side


def qwen_by_hand(samples):
    """Four patches make a token; two layers of four attend to whole images, the others inside windows."""
    grids = [grid for sample in samples for grid in sample.get("image_grid_thw", torch.zeros(0, 3)).tolist()]
    patches = [int(t * h * w) for t, h, w in grids]
    windows = []
    for _, height, width in grids:
        rows = [min(4, height - start) for start in range(0, int(height), 4)]
        columns = [min(4, width - start) for start in range(0, int(width), 4)]
        windows += [row * column for row in rows for column in columns]
    assert max(windows) <= WINDOW and len(windows) > len(patches)
    return sum(patches), (sum(n**2 for n in patches) + sum(n**2 for n in windows)) / 2


def gemma3_by_hand(samples):
    images = sum(len(sample.get("pixel_values", ())) for sample in samples)
    return images * 4, images * 4**2


def language_by_hand(model, lengths):
    """Squares of whole samples, and in the sliding layers of Gemma3 twice the pairs within the window."""
    config = model.config.get_text_config()
    squares = 0
    for kind in getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers:
        window = config.sliding_window if kind == "sliding_attention" else max(lengths)
        pairs = (sum(min(place, window) for place in range(1, length + 1)) for length in lengths)
        squares += sum(2 * own - min(length, window) for own, length in zip(pairs, lengths, strict=True))
    return squares / config.num_hidden_layers


def work_of(model, samples, family, world_size, parallel):
    """What all ranks counted in a step of microbatches of three samples, which are padded."""
    spec = build_model_spec(model)
    plan = plan_for_model(parallel, spec, world_size)
    step = contiguous_step(plan, range(len(samples)), 3)
    outcome = run_loopback(model, plan, step, samples, tiny.collate(family))
    return total_work(result.record.work for result in outcome.results)


@pytest.mark.parametrize(
    ("family", "pp_size", "checkpointing"),
    [("qwen2_5_vl", 2, True), ("gemma3", 1, False)],
)
def test_patches_before_the_merge_and_tokens_without_padding(family, pp_size, checkpointing):
    model, samples = tiny.FAMILIES[family]().train(), tiny.make_dataset(family, SIZE)
    vision = {"pp_size": pp_size, "activation_checkpointing": checkpointing}
    parallel = MultimodalParallelPlugin({"vision": vision, LANGUAGE_MODEL: {"pp_size": pp_size}})
    found = work_of(model, samples, family, 2 * pp_size, parallel)
    patches, squares = (gemma3_by_hand if family == "gemma3" else qwen_by_hand)(samples)
    assert (found["vision"].tokens, found["vision"].squares) == (patches, pytest.approx(squares))
    lengths = [len(sample["input_ids"]) for sample in samples]
    assert len(set(lengths)) > 1, "nothing is padded"
    assert found[LANGUAGE_MODEL] == ModuleWork(sum(lengths), pytest.approx(language_by_hand(model, lengths)))


def test_tokens_that_ranks_share_count_once():
    model, samples = tiny.FAMILIES["llava"]().train(), tiny.make_dataset("llava", SIZE)
    parallel = MultimodalParallelPlugin({LANGUAGE_MODEL: {"cp_size": 2, "cp_block": 8}})
    found = work_of(model, samples, "llava", 3, parallel)
    lengths = [len(sample["input_ids"]) for sample in samples]
    assert found[LANGUAGE_MODEL] == ModuleWork(sum(lengths), sum(length**2 for length in lengths))


def test_packed_rows_and_rows_without_a_mask():
    words = causal_words(segments_of_lengths([3, 5], total=10))
    tokens, squares = language_work({"input_ids": torch.zeros(1, 10).long(), WORDS: words})
    assert (int(tokens), int(squares)) == (8, 34)
    assert language_work({"input_ids": torch.zeros(2, 4).long()}) == (8, 32)


def test_utilisation_is_what_the_samples_take_over_the_peak_of_all_ranks():
    model = tiny.FAMILIES["qwen2_5_vl"]()
    model.model.visual.requires_grad_(False)
    spec = build_model_spec(model)
    windows = [
        RankWindow(900, 1000, 1, {}, {"vision": ModuleWork(64, 1024), LANGUAGE_MODEL: ModuleWork(16, 256)}),
        RankWindow(900, 2000, 1, {}, {LANGUAGE_MODEL: ModuleWork(16, 256)}),
    ]
    vision, language = (training_flops(spec, name) for name in ("vision", LANGUAGE_MODEL))
    flops = 64 * vision[0] + 1024 * vision[1] + 32 * language[0] + 512 * language[1]
    assert flops_utilisation(spec, windows, peak_tflops=3.0) == pytest.approx(flops / (3e12 * 2 * 2.0))
