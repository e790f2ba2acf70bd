"""
Charts with their tables: the data of `train_chart_vlm.py`.

A sample shows a chart that matplotlib draws, or two, or a table as text, or a chart and its table, and asks for the
table, for a value, or for what is drawn. The size of the picture and the number of rows of the table are drawn
independently, both with heavy tails, so that samples differ widely in vision work and in text work. `python
examples/charts.py` draws a set and says how wide it is.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, Image, List, Value
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image as PILImage
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PaddleOCRVLProcessor, PreTrainedTokenizerFast, Qwen2VLImageProcessorPil

PATCH_SIZE = 14
"""Pixels of the side of a patch, in which the area of a picture is drawn."""
NUM_PATCHES = (16, 64, 400)
"""Least, median and most patches of a picture."""
NUM_ROWS = (2, 6, 50)
"""Least, median and most rows of a table."""
SPREAD = 0.9
"""Standard deviation of the logarithm of both."""
LEAST_SIDE = 42
TICKS_FROM = (140, 100)
"""Width and height in pixels from which axes have room for ticks."""
MOST_TICKS = 6
NUM_SHARDS = 8

KINDS = {"bar": "bars", "line": "line", "scatter": "points", "pie": "pie"}
COLOURS = ("red", "green", "blue", "orange", "purple", "black")
TITLES = ("sales", "rain", "visitors", "cost", "score", "share", "speed", "yield")
WORDS = (
    "apple banana cherry grape lemon mango olive peach pear plum carrot celery garlic onion pepper potato radish bean "
    "corn rice wheat oat bread butter cheese milk cream honey sugar salt tea coffee cocoa water juice soup pasta "
    "pizza salad steak bacon egg fish shrimp crab nut almond walnut mint basil thyme ginger cumin clove vanilla melon "
    "berry fig date kiwi lime"
)
NAMES = WORDS.split()

QUESTIONS = {
    "table": ("Write the table of this chart.", "What are the numbers? Answer with the whole table, row by row."),
    "drawn": ("What is drawn?", "Say what is drawn in this chart, and in which colour, in two words."),
    "rows": ("How many values are there?", "Count the values."),
    "highest": ("What is the highest value?", "Which value is higher than all others?"),
}
SHARES = {"table": 0.13, "drawn": 0.7, "rows": 0.07, "highest": 0.1}
TEXT_ONLY_SHARE = 0.1
TWO_CHARTS_SHARE = 0.1
WITH_TABLE_SHARE = 0.4
"""Of the charts whose question is another than for the table, those that have it beside them."""

SPECIAL_TOKENS = {
    "pad_token": "<|endoftext|>",
    "eos_token": "<|im_end|>",
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
    "turn_token": "<|im_start|>",
}
VOCABULARY_SIZE = 640
WHITE_SHARE = 0.8
"""About the mean of all pixels, and so what images are normalised by."""
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['role'] == 'assistant' %}{% generation %}{{- message['content'][0]['text'] + '<|im_end|>' }}"
    "{%- endgeneration %}{%- else %}{%- for part in message['content'] %}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' if part['type'] == 'image' else part['text'] }}"
    "{%- endfor %}{{- '<|im_end|>' }}{%- endif %}{{- '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

FEATURES = Features(
    {
        "images": List(Image()),
        "messages": List(
            {"role": Value("string"), "content": List({"type": Value("string"), "text": Value("string")})}
        ),
        "task": Value("string"),
    }
)


@dataclass(frozen=True)
class Chart:
    """
    A picture and its table.

    Args:
        kind (`str`): A key of [`KINDS`].
        colour (`str`): One of [`COLOURS`].
        title (`str`): What the values are of.
        labels (`tuple[str, ...]`): One for each row of the table.
        values (`tuple[int, ...]`): Between 1 and 99; the percentages of a pie.
        width (`int`): Of the picture, in pixels.
        height (`int`): Of the picture, in pixels.
    """

    kind: str
    colour: str
    title: str
    labels: tuple[str, ...]
    values: tuple[int, ...]
    width: int
    height: int

    @property
    def table(self) -> str:
        """The table as text, one row a line."""
        rows = zip(self.labels, self.values, strict=True)
        return "\n".join([f"label | {self.title}", *(f"{label} | {value}" for label, value in rows)])

    @property
    def drawn(self) -> str:
        """The content of the picture in two words."""
        return f"{self.colour} {KINDS[self.kind]}"

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Chart:
        """A chart at random."""
        kind = str(rng.choice(list(KINDS)))
        num_rows = _heavy_tailed(rng, *NUM_ROWS)
        if kind == "pie":
            values = 1 + rng.multinomial(100 - num_rows, rng.dirichlet(np.full(num_rows, 2.0)))
        elif kind == "line":
            walk = rng.uniform(0, 98) + rng.normal(0, 12, num_rows).cumsum()
            values = (99 - abs(walk % 196 - 98)).astype(int)  # thrown back at 1 and at 99
        else:
            values = rng.integers(1, 100, num_rows)
        area = _heavy_tailed(rng, *NUM_PATCHES) * PATCH_SIZE**2
        height = max(LEAST_SIDE, round(float(np.sqrt(area / np.exp(rng.normal(0.2, 0.35))))))
        return cls(
            kind=kind,
            colour=str(rng.choice(COLOURS)),
            title=str(rng.choice(TITLES)),
            labels=tuple(rng.permutation(NAMES)[:num_rows].tolist()),
            values=tuple(values.tolist()),
            width=max(LEAST_SIDE, round(area / height)),
            height=height,
        )


def _heavy_tailed(rng: np.random.Generator, least: int, median: int, most: int) -> int:
    """A number whose logarithm is normal, within bounds."""
    return int(np.clip(round(median * np.exp(rng.normal(0, SPREAD))), least, most))


@cache
def _figure() -> Figure:
    """The figure for all charts of a process, with one pixel per unit."""
    figure = Figure(dpi=72)
    FigureCanvasAgg(figure)
    return figure


def render(chart: Chart) -> bytes:
    """
    Draws a chart.

    Args:
        chart ([`Chart`]): What is drawn.

    Returns:
        `bytes`: A PNG file of `chart.width` times `chart.height` pixels.
    """
    figure = _figure()
    figure.clear()
    figure.set_size_inches((chart.width + 0.01) / figure.dpi, (chart.height + 0.01) / figure.dpi)
    ticks = chart.width >= TICKS_FROM[0] and chart.height >= TICKS_FROM[1]
    if chart.kind == "pie":
        _draw_pie(figure.add_axes((0.02, 0.02, 0.96, 0.96)), chart, ticks)
    else:
        axes = figure.add_axes((30 / chart.width, 0.18, 0.97 - 30 / chart.width, 0.68) if ticks else (0, 0, 1, 1))
        _draw_rows(axes, chart, ticks)
    if ticks:
        figure.text(0.02, 0.97, chart.title, fontsize=9, va="top")
    figure.canvas.draw()
    pixels = np.asarray(figure.canvas.buffer_rgba())[..., :3]  # pyright: ignore[reportAttributeAccessIssue]
    file = io.BytesIO()
    PILImage.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def _draw_pie(axes: Axes, chart: Chart, names: bool) -> None:
    """Wedges of one colour with white borders, clockwise from the top; with names where there are few of them."""
    names = names and len(chart.labels) <= MOST_TICKS
    axes.pie(
        chart.values,
        labels=chart.labels if names else None,
        colors=[chart.colour],
        startangle=90,
        counterclock=False,
        radius=1.0 if names else 1.2,
        textprops={"fontsize": 7},
        wedgeprops={"edgecolor": "white", "linewidth": 1},
    )


def _draw_rows(axes: Axes, chart: Chart, ticks: bool) -> None:
    """Bars, a line or points from left to right, always on a scale from 0 to 100."""
    places = np.arange(len(chart.values))
    if chart.kind == "bar":
        axes.bar(places, chart.values, color=chart.colour, width=0.7)
    else:
        style, marker = ("-", "") if chart.kind == "line" else ("", "o")
        axes.plot(places, chart.values, color=chart.colour, linestyle=style, marker=marker, markersize=4)
    axes.set_xlim(-0.6, len(places) - 0.4)
    axes.set_ylim(0, 100)
    named = places[:: -(-len(places) // MOST_TICKS)] if ticks else []
    axes.set_xticks(named, [chart.labels[place] for place in named], fontsize=6)
    axes.set_yticks([0, 50, 100] if ticks else [], ["0", "50", "100"] if ticks else [], fontsize=7)


def _answer(task: str, chart: Chart) -> str:
    """The expected answer."""
    answers = {"table": chart.table, "rows": str(len(chart.values)), "highest": str(max(chart.values))}
    return answers.get(task, chart.drawn)


def make_sample(index: int, seed: int = 0) -> dict[str, Any]:
    """
    A sample, which is a function of its index and the seed alone.

    Args:
        index (`int`): Its place in the data set.
        seed (`int`, *optional*, defaults to 0): Of the data set.

    Returns:
        `dict[str, Any]`: `images` as PNG files, `messages` with parts of text and of images, and the `task`.
    """
    rng = np.random.default_rng((seed, index))
    chart, other = Chart.draw(rng), Chart.draw(rng)
    task = str(rng.choice(list(SHARES), p=list(SHARES.values())))
    case = rng.random()
    if case < TEXT_ONLY_SHARE:
        task = str(rng.choice(["rows", "highest"]))
        charts, question, answer = [], f"{chart.table}\n{rng.choice(QUESTIONS[task])}", _answer(task, chart)
        task = f"text_{task}"
    elif case < TEXT_ONLY_SHARE + TWO_CHARTS_SHARE:
        charts, task = [chart, other], "two_charts"
        question, answer = "What is drawn in each chart?", f"{chart.drawn}, {other.drawn}"
    else:
        charts, question, answer = [chart], str(rng.choice(QUESTIONS[task])), _answer(task, chart)
        if task != "table" and rng.random() < WITH_TABLE_SHARE:
            question = f"{chart.table}\n{question}"
    pictures = [{"type": "image", "text": None} for _ in charts]
    return {
        "images": [{"bytes": render(own), "path": None} for own in charts],
        "messages": [
            {"role": "user", "content": [*pictures, {"type": "text", "text": question}]},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        ],
        "task": task,
    }


def _samples(shards: Sequence[range], seed: int) -> Iterator[dict[str, Any]]:
    """The samples of some shards."""
    for shard in shards:
        for index in shard:
            yield make_sample(index, seed)


def chart_dataset(num_samples: int, seed: int = 0, cache_dir: str | None = None, num_proc: int = 2) -> Dataset:
    """
    A set of charts, drawn once and then read from the cache of `datasets`.

    Args:
        num_samples (`int`): Number of samples; a chart takes about 15 ms.
        seed (`int`, *optional*, defaults to 0): Sets of two seeds share no chart.
        cache_dir (`str`, *optional*): Where the set is kept.
        num_proc (`int`, *optional*, defaults to 2): Processes that draw; they change nothing but the time.

    Returns:
        [`~datasets.Dataset`]: With the columns `images`, `messages` and `task`.
    """
    bounds = np.linspace(0, num_samples, min(NUM_SHARDS, num_samples) + 1).astype(int).tolist()
    shards = [range(start, end) for start, end in zip(bounds, bounds[1:], strict=False)]
    recipe = repr((num_samples, seed, Path(__file__).read_text()))
    return Dataset.from_generator(  # pyright: ignore[reportReturnType]
        _samples,
        features=FEATURES,
        cache_dir=cache_dir,  # pyright: ignore[reportArgumentType]
        gen_kwargs={"shards": shards, "seed": seed},
        num_proc=min(num_proc, len(shards)),
        fingerprint=hashlib.blake2b(recipe.encode(), digest_size=8).hexdigest(),
    )


def build_processor(dataset: Dataset) -> PaddleOCRVLProcessor:
    """
    A processor of Qwen2.5-VL's inputs: images at their own resolution, and a small tokenizer of the set's texts.

    The class is that of PaddleOCR-VL, which is Qwen's without videos; those need torchvision.

    Args:
        dataset ([`~datasets.Dataset`]): From [`chart_dataset`].

    Returns:
        [`~transformers.PaddleOCRVLProcessor`]: With a chat template that marks what the assistant says.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (part["text"] or "" for turns in dataset["messages"] for turn in turns for part in turn["content"])
    tokenizer.train_from_iterator(texts, trainer)
    own = {name: token for name, token in SPECIAL_TOKENS.items() if name not in ("pad_token", "eos_token")}
    return PaddleOCRVLProcessor(
        image_processor=Qwen2VLImageProcessorPil(
            patch_size=PATCH_SIZE,
            image_mean=[WHITE_SHARE] * 3,
            image_std=[1 - WHITE_SHARE] * 3,
            size={
                "shortest_edge": NUM_PATCHES[0] * PATCH_SIZE**2,
                "longest_edge": NUM_PATCHES[-1] * PATCH_SIZE**2,
            },
        ),
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token=SPECIAL_TOKENS["pad_token"],
            eos_token=SPECIAL_TOKENS["eos_token"],
            extra_special_tokens=own,
        ),
        chat_template=CHAT_TEMPLATE,
    )


def main() -> None:
    dataset = chart_dataset(1500)
    sizes = [[image.size for image in images] for images in dataset["images"]]
    patches = [sum(width * height / PATCH_SIZE**2 for width, height in own) for own in sizes]
    letters = [sum(len(p["text"] or "") for turn in own for p in turn["content"]) for own in dataset["messages"]]
    for name, values in (("patches of 14 pixels", patches), ("letters", letters)):
        quantiles = np.quantile(values, [0, 0.1, 0.5, 0.9, 0.99, 1]).astype(int)
        print(f"{name}: least, 10 %, half, 90 %, 99 %, most: {', '.join(map(str, quantiles))}")
    print(f"correlation of the two: {np.corrcoef(patches, letters)[0, 1]:.2f}")


if __name__ == "__main__":
    main()
