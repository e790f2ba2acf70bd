"""Processors of many families, built without the Hub: small image sizes, one tokenizer, one chat template."""

from collections.abc import Callable
from functools import cache
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast, ProcessorMixin

CONTENT = (
    "{%% for part in m['content'] %%}{%% if part['type'] == 'image' %%}%s{%% else %%}{{ part['text'] }}"
    "{%% endif %%}{%% endfor %%}"
)
TURNS = (
    "{{ bos_token }}{%% for m in messages %%}{%% if m['role'] == 'assistant' %%}ASSISTANT:\n{%% generation %%}"
    + CONTENT
    + "{{ eos_token }}{%% endgeneration %%}\n{%% else %%}{{ m['role'] | upper }}: "
    + CONTENT
    + "\n{%% endif %%}{%% endfor %%}{%% if add_generation_prompt %%}ASSISTANT:\n{%% endif %%}"
)
MARKED, MARKED_GEMMA = (TURNS % (image, image) for image in ("<image>", "<start_of_image>"))


def unmarked(template: str) -> str:
    """The template without marks of what the assistant says."""
    return template.replace("{% generation %}", "").replace("{% endgeneration %}", "")


@cache
def tokenizer(**named: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes and a few words, with special tokens by name."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=350,
        special_tokens=["<pad>", "<s>", "</s>", *named.values()],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["which digit is this USER ASSISTANT three seven"] * 3, trainer)
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special, extra_special_tokens=named)


def llava(template: str | None = MARKED) -> LlavaProcessor:
    """A processor whose images are five tokens each."""
    return LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}),
        tokenizer(image_token="<image>"),
        patch_size=4,
        vision_feature_select_strategy="full",
        num_additional_image_tokens=1,
        chat_template=template,
    )


def of_sound(name: str = "AudioFlamingo3") -> Any:
    """A processor of sound, in windows of a second."""
    template = (TURNS % (("<audio>",) * 2)).replace("== 'image'", "== 'audio'")
    extractor = transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    named = {"audio_token": "<audio>", "audio_bos_token": "<sound>", "audio_eos_token": "</sound>"}
    cls = getattr(transformers, f"{name}Processor")
    return cls(extractor, tokenizer(**named), chat_template=template, audio_token="<audio>")


def of_both() -> Any:
    """A processor of images and sound."""
    named = {f"{kind}_token": f"<{kind}>" for kind in ("image", "video", "audio")}
    ends = {f"{kind}_{end}_token": f"<{kind}_{end}>" for kind in ("vision", "audio") for end in ("bos", "eos")}
    cls = transformers.Qwen2_5OmniProcessor
    cls = type(cls.__name__, (cls,), {"check_argument_for_proper_class": lambda *_: None})
    image_processor = transformers.Qwen2VLImageProcessor(**PIXELS)  # type: ignore[arg-type]
    extractor = transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    placeholder = "{{ '<' + part['type'] + '>' }}"
    template = (TURNS % (placeholder, placeholder)).replace("== 'image'", "!= 'text'")
    return cls(image_processor, None, extractor, tokenizer(**named, **ends), chat_template=template)


def _family(
    name: str, image: dict[str, Any], token: str = "<image>", tokens: dict[str, str] | None = None, **options: Any
) -> Callable[[], ProcessorMixin]:
    """A builder of a family's processor."""
    image_class, _, name = name.rpartition("+")

    def build() -> ProcessorMixin:
        named = {"image_token": token, "video_token": "<video>", **(tokens or {})}
        # Without torchvision no video processor can be made, and the check of an argument's class fails.
        unchecked = {"check_argument_for_proper_class": lambda *_: None}
        image_processor = getattr(transformers, f"{image_class or name}ImageProcessor")(**image)
        cls = getattr(transformers, f"{name}Processor")
        defaults = {**getattr(cls, "images_kwargs", {}), **{k: v for k, v in image.items() if k in CROPS}}
        cls = type(cls.__name__, (cls,), {**unchecked, "images_kwargs": defaults})
        return cls(image_processor, tokenizer(**named), chat_template=TURNS % (token, token), **options)

    return build


CROPS = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 8,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
GEMMA_TOKENS = {"image_token": "<soft>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
PIXELS = {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 9}, "patch_size": 4, "merge_size": 2}
SQUARE = {"height": 28, "width": 28}
PINPOINTS = [[28, 56], [56, 28], [56, 56], [28, 84], [84, 28]]
CLIP_SIZES = {"size": {"shortest_edge": 28}, "crop_size": SQUARE}
TILES = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 28}}
FAKE = {"fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>"}
ROWS = {f"row_{i}_{j}": f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)}

# Family -> builder of its processor.
PROCESSORS: dict[str, Callable[[], ProcessorMixin]] = {
    "llava": _family("CLIP+Llava", CLIP_SIZES, patch_size=14, vision_feature_select_strategy="full"),
    "llava_next": _family(
        "LlavaNext",
        {**CLIP_SIZES, "image_grid_pinpoints": PINPOINTS},
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ),
    "llava_onevision": _family(
        "LlavaOnevision",
        {"size": SQUARE, "image_grid_pinpoints": PINPOINTS},
        num_image_tokens=4,
        vision_feature_select_strategy="full",
        video_processor=None,
    ),
    "qwen2_vl": _family(
        "Qwen2VL",
        PIXELS,
        tokens={"vision_start": "<|vision_start|>"},
        video_processor=None,
    ),
    "gemma3": _family("Gemma3", {"size": SQUARE}, "<start_of_image>", GEMMA_TOKENS, image_seq_length=4),
    "gemma3_crops": _family("Gemma3", {"size": SQUARE, **CROPS}, "<start_of_image>", GEMMA_TOKENS, image_seq_length=4),
    "idefics3": _family("Idefics3", TILES, tokens={**FAKE, **ROWS}, image_seq_len=4),
    "internvl": _family(
        "GotOcr2+InternVL",
        {"size": SQUARE, "crop_to_patches": True, "max_patches": 6},
        "<IMG_CONTEXT>",
        {"context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>", "end_image_token": "</img>"},
        image_seq_length=4,
        video_processor=None,
    ),
    "glm4v": _family(
        "Glm4v",
        {"size": {"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 30}, "patch_size": 4},
        video_processor=None,
    ),
}
