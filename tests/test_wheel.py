"""
What a user gets: from the built wheel, in an empty environment and an empty folder, those who start, tune and plan run
what their pages have; `test_page_code.py` runs all pages.

What the pages leave to the reader is small and stands here: the names that a block does not define, `trainer.train()`
after a block that ends with the Trainer, and the configuration of a model that a command names. Beside that,
`examples` is a copy of ours, a Hub id is that of a tiny model in the Hub's cache, accelerate's default configuration
has four processes on the CPU, and TRL's arguments, which ask for bfloat16 on a GPU, have `use_cpu=True`.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
BUILT = ("CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.cfg")
EXTRAS = "attention,demo,peft,trl"

TINY = """
import tiny

dataset, collator, name = tiny.make_dataset("llava", 16), tiny.collate("llava"), "llava"
"""
DIGITS = """
import sys

sys.path.insert(0, "examples")
from digits import DigitQuestions, build_llava, build_processor
from transformers import set_seed

set_seed(0)  # the same model on all ranks
processor = build_processor(patch_size=8)
model = build_llava(processor, hidden_size=32)
dataset = DigitQuestions(processor, "train", 64)
"""
DEEP = """
model.config.text_config.num_hidden_layers = 32
model = type(model)(model.config)
"""
CHAT = """
from peft import LoraConfig
from sft_digits import TEMPLATE, conversations
from transformers import AutoModelForImageTextToText

processor.chat_template, dataset = TEMPLATE, conversations(32)
peft_config = LoraConfig(target_modules=["q_proj", "v_proj"])
"""
ON_CPU = """
from functools import partial

import hf_mmparallel
import trl

trl.SFTConfig = partial(trl.SFTConfig, use_cpu=True)
hf_mmparallel.MultimodalSFTConfig = partial(hf_mmparallel.MultimodalSFTConfig, use_cpu=True)
"""
MODELS = """
import tiny
from pathlib import Path
from transformers import Qwen2_5_VLConfig, Qwen3Config, Qwen3ForCausalLM

tiny.FAMILIES["llava"]().save_pretrained("llava")

processor.chat_template = TEMPLATE
qwen3 = Qwen3ForCausalLM(Qwen3Config(**{**tiny.HEADS, "vocab_size": len(processor.tokenizer)}))
for name, *saved in (
    ("Qwen/Qwen3-0.6B", qwen3, processor.tokenizer),  # first: saved with a processor it names that
    ("Qwen/Qwen2.5-VL-3B-Instruct", model, processor),
):
    folder = Path("hub", "hub", f"models--{name.replace('/', '--')}")
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    for one in saved:
        one.save_pretrained(folder / "snapshots" / ("0" * 40))

text = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "vocab_size": 152064}
heads = {"num_attention_heads": 28, "num_key_value_heads": 4}
vision = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584, "window_size": 112}
Qwen2_5_VLConfig(text_config=text | heads, vision_config=vision, dtype="bfloat16").save_pretrained("qwen2.5-vl-7b")
"""


@dataclass(frozen=True)
class User:
    """An environment, and the folder in which a user works."""

    python: Path
    folder: Path

    def run(self, command: str) -> None:
        """Runs lines of a shell, all of which have to succeed."""
        own = {"PATH": f"{self.python.parent}:{os.environ['PATH']}", "HF_HOME": str(self.folder / "hub")}
        settings = {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "DS_BUILD_OPS": "0"}
        environment = {name: os.environ[name] for name in ("HOME", "TMPDIR") if name in os.environ}
        done = subprocess.run(
            ["bash", "-ec", command],
            env=environment | own | settings,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}"

    def train(self, *code: str, command: str = "python train.py") -> None:
        """Runs a script of pieces of code."""
        (self.folder / "train.py").write_text("\n".join(code))
        self.run(command)


def block(page: str, language: str, part: str) -> str:
    """The block of a page that has this in it; of a diff the code after it."""
    found = re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    (code,) = [code for code in found if part in code]
    return re.sub(r"^[+ ]|^-.*\n", "", code, flags=re.MULTILINE) if language == "diff" else code


def start(user: User) -> None:
    example = "from hf_mmparallel import MultimodalParallelTrainer"
    launch = block("README.md", "bash", "--num_processes 5 ").partition("#")[0]
    user.train(DIGITS, DEEP, block("README.md", "diff", example), command=launch)


def tune(user: User) -> None:
    page = "docs/trl.md"
    user.train(DIGITS, ON_CPU, CHAT, block(page, "diff", "SFTTrainer"))
    user.run(block(page, "bash", "sft_digits.py"))
    laid_out = block(page, "python", "peft_config")
    user.train(DIGITS, ON_CPU, CHAT, laid_out, "trainer.train()", command=block(page, "bash", "train.py"))


def plan(user: User) -> None:
    user.run(block("docs/planner.md", "bash", "--output plan.yaml"))
    assert (user.folder / "plan.yaml").exists() and (user.folder / "plan.html").exists()


USERS: tuple[Callable[[User], None], ...] = (start, tune, plan)


def _install(folder: Path) -> Path:
    """Makes an environment of the wheel, on the tested versions, with those of torch that the index has."""
    for name in BUILT:
        (folder / "source").mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / "source")
    shutil.copytree(ROOT / "hf_mmparallel", folder / "source" / "hf_mmparallel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, folder / "source"], check=True)
    (wheel,) = folder.glob("*.whl")
    python = _environment(folder / "environment")
    pins = ["--constraint", ROOT / "constraints" / "tested.txt"]
    install = [*pip, "--python", python, "install", "--no-compile", "--progress-bar", "off", *pins]
    subprocess.run([*install, f"{wheel}[{EXTRAS}]"], check=True)
    return python


def _environment(folder: Path) -> Path:
    """The Python of a new environment."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder / "bin" / "python"


def _packages(python: Path) -> Path:
    """The folder of an environment's packages."""
    (folder,) = python.parents[1].glob("lib/python*/site-packages")
    return folder


def _folder(path: Path) -> Path:
    """A folder with our examples, and nothing else but what the docstring above says."""
    shutil.copytree(ROOT / "examples", path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "tests" / "tiny.py", path)
    (path / "hub" / "accelerate").mkdir(parents=True)
    shutil.copy(
        path / "examples" / "accelerate_configs" / "one_host_4cpu.yaml",
        path / "hub" / "accelerate" / "default_config.yaml",
    )
    return path


def _only(names: list[str], installed: Path, folder: Path) -> Path:
    """An environment in which some installed distributions and what they require are all there is."""
    found = {_normalized(one.metadata["Name"]): one for one in metadata.distributions(path=[str(installed)])}
    python, needed = _environment(folder), {}
    while names:
        name = _normalized(names.pop())
        if name in found and name not in needed:
            needed[name] = found[name]
            requirements = map(Requirement, found[name].requires or ())
            names += [one.name for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})]
    for part in {file.parts[0] for one in needed.values() for file in one.files or ()} - {".."}:
        (_packages(python) / part).symlink_to(installed / part)
    return python


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_first_pages_run_from_the_wheel(tmp_path: Path) -> None:
    python = _install(tmp_path)
    user = User(python, _folder(tmp_path / "work"))
    user.train(DIGITS, CHAT, MODELS)
    failed = {}
    for first_minutes in USERS:
        try:
            first_minutes(user)
        except AssertionError as error:
            failed[first_minutes.__name__] = str(error)
    assert not failed, "\n".join(failed.values())

    installed = _packages(python)
    bare = _only(["torch", "triton", "transformers"], installed, tmp_path / "bare")
    for part in installed.glob("hf_mmparallel*"):
        (_packages(bare) / part.name).symlink_to(part)
    packed = block("docs/packing.md", "python", "loss.backward()")
    User(bare, user.folder).train(TINY, packed)
    with pytest.raises(AssertionError, match="No module named 'accelerate'"):
        User(bare, user.folder).run("python -c 'import accelerate'")
