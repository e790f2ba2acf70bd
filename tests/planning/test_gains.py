"""What single changes gain is what `--what-if` says of them."""

import pytest

from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, MultimodalParallelPlugin
from hf_mmparallel.planning.answer import Answer, Inputs, solve
from hf_mmparallel.planning.gains import gains_of
from hf_mmparallel.planning.inputs import Samples, read_model
from hf_mmparallel.planning.settings import Settings
from tests import tiny


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> Answer:
    folder = tmp_path_factory.mktemp("model")
    tiny.FAMILIES["llava"]().config.save_pretrained(folder)
    layout = {
        "vision": ModulePlugin(dp_size=2),
        LANGUAGE_MODEL: ModulePlugin(pp_size=2, tp_size=2, activation_checkpointing=True),
    }
    settings = Settings(plugin=MultimodalParallelPlugin(layout), global_batch_size=8, gpu_type="h100", seq_len=4096)
    return solve(settings, Inputs(read_model(str(folder), {}, []), Samples("all samples alike")))


def test_gains_are_those_of_what_if_the_largest_first(answer: Answer):
    gains = gains_of(answer)
    assert [gain.step_ms for gain in gains] == sorted(gain.step_ms for gain in gains)
    assert {"recomputed=false", "fused_kernels=true"} <= {gain.change for gain in gains}
    for gain in gains:
        changed = answer.settings.with_changes(gain.change)
        again = solve(changed, answer.inputs)
        assert gain.step_ms == pytest.approx(again.step_ms) and gain.step_ms < answer.step_ms


def test_a_figure_of_the_device_may_be_a_number_or_a_factor(answer: Answer):
    device = answer.settings.device
    for key, field in (("memory_gb_per_s", "memory_gb_per_s"), ("peak_tflops", "bf16_tflops")):
        doubled = answer.settings.with_changes(f"{key}=2x").device
        assert getattr(doubled, field) == 2 * getattr(device, field)
        assert getattr(answer.settings.with_changes(f"{key}=100").device, field) == 100
    for text in ("link_gb_per_s=0", "link_gb_per_s=fast", "recomputed=maybe"):
        with pytest.raises(ValueError, match="--what-if"):
            answer.settings.with_changes(text)
