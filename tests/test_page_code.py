"""
The pages run from top to bottom: Python as it stands, and the commands of `hf-mmparallel` that end by themselves.

A page runs in a folder in which the models, data sets and logs that it names are small ones, ids on the Hub too: a
folder is preferred to the Hub. Names that a page takes from the reader's script are in `NAMES`.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow
import pyarrow.parquet
import pytest
import torch
import torch.distributed as dist
import vlm_configs
from datasets import Dataset
from PIL import Image
from torch.nn.functional import cross_entropy
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLConfig,
    SiglipVisionConfig,
    SiglipVisionModel,
    WhisperConfig,
    WhisperModel,
)

from hf_mmparallel.cli.main import main
from hf_mmparallel.cost import find_device
from hf_mmparallel.cost.run_log import module_digests
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.modeling.loading import build_on_meta
from tests import any_to_any, tiny
from tests.data import processors
from tests.data.conversations import conversation
from tests.distributed import run_distributed
from tests.markdown import PAGES, ROOT, blocks, commands
from tests.planning.measured_steps import SCALES, corrected, counted, write_log

TEXT = {**tiny.TEXT, "num_hidden_layers": 32, "hidden_size": 32, "intermediate_size": 32}


def _llava(num_layers: int = 4) -> LlavaForConditionalGeneration:
    """A small Llava whose images are those of `processors.llava`."""
    words = processors.llava().tokenizer
    vision = CLIPVisionConfig(**{**tiny.VISION, "image_size": 8, "patch_size": 4})
    text = LlamaConfig(**{**TEXT, "num_hidden_layers": num_layers, "vocab_size": len(words), "pad_token_id": 0})
    ids = {"image_token_id": words.image_token_id, "vision_feature_select_strategy": "full"}
    torch.manual_seed(0)
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, **ids))


# What a page names -> how to make a small one of it at this path.


def _whole_llava(path: Path) -> None:
    _llava().save_pretrained(path)
    processors.llava().save_pretrained(path)


def _language_model(path: Path) -> None:
    config = LlamaConfig(**{**tiny.TEXT, "vocab_size": 128258, "hidden_size": 16, "intermediate_size": 16})
    type(tiny.FAMILIES["llama"]())(config).save_pretrained(path)
    processors.tokenizer().save_pretrained(path)


def _whisper(path: Path) -> None:
    sizes = {"d_model": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 64}
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    WhisperModel(
        WhisperConfig(**sizes, **layers, **ids, suppress_tokens=[], begin_suppress_tokens=[])
    ).save_pretrained(path)


def _qwen_config(path: Path) -> None:
    vision = {"hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584, "depth": 32, "num_heads": 16}
    text = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    rotary = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    text |= {"num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False, "rope_parameters": rotary}
    Qwen2_5_VLConfig(
        vision_config=vision, text_config=text, dtype="bfloat16", tie_word_embeddings=False
    ).save_pretrained(path)


_LENGTHS = pyarrow.table({"input_ids": [[1] * (20 + 10 * (i % 4)) for i in range(64)]})
_EVENTS = "0,add,n0\n0,add,n1\n0,add,n2\n0,add,n3\n600000,remove,n3\n900000,add,n3\n3600000,remove,n2\n"


def _run_log(path: Path) -> None:
    modules = module_digests(build_model_spec(build_on_meta("my-vlm")))
    write_log(path, counted(), corrected(counted(), SCALES), modules=modules, device="h100")


def _pictures(path: Path) -> None:
    path.mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(path / "1.png")


FILES: dict[str, Callable[[Path], Any]] = {
    "google/siglip-base-patch16-224": lambda path: SiglipVisionModel(
        SiglipVisionConfig(**tiny.SIGLIP)
    ).save_pretrained(path),
    "openai/whisper-small": _whisper,
    "meta-llama/Llama-3.2-1B-Instruct": _language_model,
    "Qwen/Qwen3-0.6B": _language_model,
    "stabilityai/stable-diffusion-2-1": lambda path: any_to_any.unet().save_pretrained(path / "unet"),
    "llava-hf/llava-1.5-7b-hf": _whole_llava,
    "Qwen/Qwen2.5-VL-3B-Instruct": _whole_llava,  # no video processor without torchvision
    "LLaVA-Pretrain/images": _pictures,
    "my-vlm": lambda path: tiny.FAMILIES["llava"]().config.save_pretrained(path),
    "qwen2.5-vl-7b": _qwen_config,
    "Qwen/Qwen3-VL-30B-A3B-Instruct": lambda path: vlm_configs.config_of("Qwen3-VL-30B-A3B").save_pretrained(path),
    "train.parquet": lambda path: pyarrow.parquet.write_table(_LENGTHS, path),
    "failures.csv": lambda path: path.write_text(_EVENTS),
    "out/trainer_log.jsonl": _run_log,
}


# What a page takes from the reader's script.


def _saved_gemma(**names: Any) -> dict[str, Any]:
    tiny.FAMILIES["gemma3"]().save_pretrained("gemma3")
    return {"name": "gemma3", **names}


def _of_bitfield_attention() -> dict[str, Any]:
    ids = torch.randint(1, 90, (1, 8))
    data = [{"input_ids": list(range(1, 8 + index % 3))} for index in range(8)]
    return _saved_gemma(tokenizer=processors.tokenizer(), dataset=data, input_ids=ids, labels=ids)


def _of_packing() -> dict[str, Any]:
    rows = tiny.make_dataset("gemma3", 16, max_items=0)
    data = Dataset.from_list([{key: value.tolist() for key, value in row.items()} for row in rows])
    return _saved_gemma(dataset=data, collator=tiny.collate("gemma3"))


def _of_context_parallelism() -> dict[str, Any]:
    from hf_mmparallel.kernels.bitfield_attention import encode_words

    segment = torch.ones(1, 512, dtype=torch.long)
    ids = torch.arange(512)[None] % 90
    model = tiny.FAMILIES["llama"]()
    model.set_attn_implementation("bitfield")
    names = {"words": encode_words(segment), "input_ids": ids, "position_ids": torch.arange(512)[None]}
    names |= {"targets": ids.roll(-1), "num_targets": 512, "model": model, "cross_entropy": cross_entropy}
    return {**names, "rank": dist.get_rank(), "num_ranks": 2, "group": dist.group.WORLD, "all_reduce": dist.all_reduce}


def _of_training(num_layers: int = 4) -> dict[str, Any]:
    return {
        "model": _llava(num_layers),
        "dataset": Dataset.from_list([conversation([(8, 8)], seed=index) for index in range(64)]),
        "processor": processors.llava(),
        "peft_config": None,
    }


NAMES: dict[str, Callable[[], dict[str, Any]]] = {
    "docs/bitfield_attention.md": _of_bitfield_attention,
    "docs/packing.md": _of_packing,
    "docs/context_parallelism.md": _of_context_parallelism,
    "docs/trl.md": _of_training,
    "docs/profile.md": lambda: {"spec": build_model_spec(build_on_meta("my-vlm"))},
    "README.md": lambda: _of_training(num_layers=32),
}
ON_RANKS = {"docs/context_parallelism.md": 2, "docs/trl.md": 4, "README.md": 5}
ELSEWHERE = ("CONTRIBUTING.md", "docs/own_loop.md", "docs/profile.md", "docs/upstream.md", "examples/README.md")
"""By `test_contributing.py`, `examples/test_own_loop_example.py`, `test_docs.py`, and tests of their own below."""
WITH_CODE = [str(page.relative_to(ROOT)) for page in PAGES if blocks(page, "python", "diff")]
WITH_COMMANDS = [
    "README.md",
    *(f"docs/{name}.md" for name in ("calibration", "failures", "planner", "profile", "qwen")),
]
ON_ANY_MACHINE = {"--device cuda": "--device cpu --lengths 64,128,256 --max-seconds 1"}
LAUNCHED = "Membership.from_environment()"  # in code that only runs under `hf-mmparallel launch`


def _make_files(page: Path) -> None:
    """Makes the files of the page in this folder."""
    text = page.read_text()
    for name, make in FILES.items():
        if name in text:
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            make(Path(name))


def _run_code(page: Path, folder: Path) -> dict[str, Any]:
    """Runs the Python of a page in a folder; returns its names, with the losses of a Trainer that the page makes."""
    bf16 = mock.patch("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)  # TRL's default
    with chdir(folder), bf16, mock.patch.dict(os.environ, ACCELERATE_USE_CPU="true"):
        names = NAMES.get(str(page.relative_to(ROOT)), dict)()
        for block in blocks(page, "python", "diff"):
            if LAUNCHED not in block.text:
                exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), names)
    return names


def _run_on_rank(page: str, folder: Path) -> None:
    torch.set_num_threads(1)
    _run_code(ROOT / page, folder)


@pytest.mark.parametrize("page", [page for page in WITH_CODE if page not in (*ELSEWHERE, *ON_RANKS)])
def test_code_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _make_files(ROOT / page)
    names = _run_code(ROOT / page, tmp_path)
    if "trainer" in names:
        names["trainer"].train()
        assert names["trainer"].state.global_step > 0


@pytest.mark.distributed
@pytest.mark.deep
@pytest.mark.parametrize("page", ON_RANKS)
def test_code_for_several_ranks_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _make_files(ROOT / page)
    run_distributed(_run_on_rank, ON_RANKS[page], page, tmp_path, timeout=280)


def _commands(page: str) -> list[tuple[str, str]]:
    """The commands of `hf-mmparallel` on a page that end by themselves, with what the page has them print."""
    found: list[tuple[str, str]] = []
    for block in blocks(ROOT / page, "bash", "text"):
        if block.comment == "printed: by the command above":
            found[-1] = (found[-1][0], block.text)
        elif block.language == "bash":
            lines = commands(block.text).items()
            found += [(line, "") for line, words in lines if words[0] == "hf-mmparallel" and words[1] != "launch"]
    return found


@pytest.mark.timeout(900)
@pytest.mark.deep
@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_commands_run_and_print_what_is_shown(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "docs/images").mkdir(parents=True)
    _make_files(ROOT / page)
    for line, shown in _commands(page):
        for given, used in ON_ANY_MACHINE.items():
            line = line.replace(given, used)
        ((_, words),) = commands(line).items()
        printed = StringIO()
        with redirect_stdout(printed):
            assert main(words[1:]) == 0, line
        said = printed.getvalue().split()
        for row in shown.splitlines():
            assert " ".join(row.split()) in " ".join(said), row
    if page == "docs/profile.md":
        assert _run_code(ROOT / page, tmp_path)["costs"].device.memory_gib == find_device("h100").memory_gib


def test_every_command_is_run_by_a_test():
    assert [page for page in map(str, (p.relative_to(ROOT) for p in PAGES)) if _commands(page)] == sorted(
        WITH_COMMANDS
    )


def _run_script(folder: Path, code: str, *launcher: str) -> str:
    """What a script of the reader prints."""
    (folder / "script.py").write_text(code)
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, *launcher, "script.py"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.distributed
@pytest.mark.deep
@pytest.mark.parametrize("block", blocks(ROOT / "docs/sharding.md", "bash"), ids=["zero", "host", "deepspeed", "even"])
def test_short_trainings_run(block, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    command = ["bash", "-euc", block.text]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0 and "train_runtime" in done.stdout, done.stdout + done.stderr


BEFORE_MEMBERSHIP = """
import gc, os, signal
from datetime import timedelta
import torch
from hf_mmparallel.world.world import leave_groups
from tests.world.survivor_script import init_group

step, num_steps = 0, 6

def train_step():
    global step
    if not dist.is_initialized():
        init_group(membership, timedelta(seconds=60))
    if step == 2 and membership.id == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    agreed = torch.tensor([step])
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    step = int(agreed) + 1

def destroy_groups():
    leave_groups()
    gc.collect()
"""
AFTER_MEMBERSHIP = """
dist.destroy_process_group()
print(f"done {membership.id}: step {step} of {size} ranks\\n", end="", flush=True)
"""


@pytest.mark.distributed
@pytest.mark.deep
def test_a_script_without_the_trainer_goes_on_after_a_death(tmp_path):
    (block,) = (block for block in blocks(ROOT / "docs/failures.md", "python") if LAUNCHED in block.text)
    config = str(ROOT / "examples/accelerate_configs/one_host_4cpu.yaml")
    launcher = ["-m", "hf_mmparallel.cli.main", "launch", "--config_file", config]
    printed = _run_script(tmp_path, BEFORE_MEMBERSHIP + block.code + AFTER_MEMBERSHIP, *launcher)
    assert all(f"done {member}: step 6 of 3 ranks" in printed for member in (0, 2, 3)), printed


BEFORE_NOTEBOOK = """
import functools
import accelerate
accelerate.notebook_launcher = functools.partial(accelerate.notebook_launcher, use_port={port})

def train():
    from hf_mmparallel import MultimodalTrainingArguments
    args = MultimodalTrainingArguments("out", use_cpu=True)
    print(f"rank {{args.process_index}} of {{args.world_size}}\\n", end="", flush=True)
"""


@pytest.mark.distributed
@pytest.mark.deep
def test_a_notebook_launches_two_processes(tmp_path):
    (block,) = blocks(ROOT / "examples/README.md", "python")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    printed = _run_script(tmp_path, BEFORE_NOTEBOOK.format(port=port) + block.code)
    assert {"rank 0 of 2", "rank 1 of 2"} <= set(printed.splitlines())
