"""Numbers of tokens in the layers of an encoder, measured at the entry of its first layer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import nnls
from transformers import PreTrainedModel
from transformers.utils import logging

from .._portable import on_grid
from ..modeling.spec import module_parts
from ..plan import ModelSpec
from .global_batches import GlobalBatch
from .sample_sizes import SizeSource
from .size_measures import TokenMeasure
from .size_sources import LayerTokens, StreamSizes, evenly_spaced, measurable
from .skeleton import entered_shape, make_skeleton
from .token_collator import TOKEN_FIELDS

logger = logging.get_logger(__name__)

NUM_CANDIDATES = 512
NUM_STREAMED = 64
NUM_PROBES = 4
PROPORTIONAL = 0.01  # largest relative error with which tokens count as proportional to rows


def measure_layers(
    model: PreTrainedModel,  # the whole model on any device (`meta` too), or what a rank keeps of it; not changed
    spec: ModelSpec,
    dataset: Any,  # the training dataset, or the `StreamWindow` of a stream, of which the first samples are looked at
    collator: Callable[[list], Mapping[str, Any]],
    source: SizeSource | None,  # of `size_source` for the dataset
) -> dict[str, LayerTokens]:
    """
    Finds out what the layers of each encoder see of the rows of its features, for [`~DatasetSizes.with_layers`].

    Runs each encoder up to its first layer, on the CPU and without its weights, on up to four samples with media of
    different sizes, which may fail to be read on some ranks: measure on one. Encoders that could not be measured are
    left out, for which a row is one token; the result is empty where sizes are given by the user.
    """
    if source is None or not source.counts_rows:
        return {}
    if isinstance(source, StreamSizes):
        dataset = copy.copy(dataset)  # a window of its own on the first samples
        source, few = source.of_window(dataset), dataset.fetch(GlobalBatch(tuple(range(NUM_STREAMED)))).samples
    else:
        few = evenly_spaced(len(source), NUM_CANDIDATES)
    candidates = np.array(measurable(source, few), dtype=np.int64)
    rows = source(candidates).tokens if len(candidates) else {}
    skeleton, found = None, {}
    for name in spec.encoders:
        sizes, first = np.unique(rows.get(name, []), return_index=True)
        chosen = first[sizes > 0]
        if not len(chosen):
            continue
        probes = np.unique(np.linspace(0, len(chosen) - 1, NUM_PROBES).astype(np.int64))
        try:
            skeleton = skeleton or make_skeleton(model, [part.stack for part in spec.modules.values()])
            probe = _Probe(skeleton, name, TokenMeasure.of(spec), collator)
            found[name] = probe.fit(dataset, candidates[chosen[probes]].tolist())
        except Exception as error:  # whatever a dataset, a collator or a model's code raises
            logger.warning(
                f"The number of tokens in the layers of `{name}` can't be measured ({error!r}); each feature token "
                "counts as one token."
            )
    return found


@dataclass
class _Probe:
    """Runs samples into one encoder of a skeleton."""

    skeleton: Any
    module: str
    tokens: TokenMeasure
    collator: Callable[[list], Mapping[str, Any]]

    def fit(self, dataset: Any, indices: list[int]) -> LayerTokens:
        """Tokens by rows alone, if they are proportional, else by rows and items; of the samples that can be read."""
        samples, seen = self.readable(dataset, indices)
        counts = [(sum(np.prod(s[:-1]) for s in shapes), sum(rows), len(rows)) for rows, shapes in seen]
        tokens, rows, items = np.array(counts, dtype=float).T
        per_row, per_item = tokens.sum() / rows.sum(), 0.0
        if (np.abs(per_row * rows - tokens) > PROPORTIONAL * tokens).any():
            per_row, per_item = on_grid(nnls(np.stack([rows, items], axis=1), tokens)[0])
        return LayerTokens(float(per_row), float(per_item), self.sequence(samples[0], [s for _, s in seen]))

    def readable(self, dataset: Any, indices: list[int]) -> tuple[list[Any], list[tuple[list[int], list[Any]]]]:
        """Samples and their [`shapes`]. Raises what the last one raises if there is none."""
        samples, seen, failure = [], [], None
        for index in indices:
            try:
                sample = dataset[index]
                seen.append(self.shapes([sample]))
                samples.append(sample)
            except Exception as error:  # the loader reports it later
                failure = error
        if failure is not None and not seen:
            raise failure
        return samples, seen

    def sequence(self, sample: Any, seen: list[list[tuple[int, ...]]]) -> int | None:
        # collators may modify samples
        _, twice = self.shapes([dict(sample) if isinstance(sample, Mapping) else sample for _ in range(2)])
        lengths = {shape[-2] for shapes in (*seen, twice) for shape in shapes}
        return lengths.pop() if len(lengths) == 1 else None

    def shapes(self, samples: list[Any]) -> tuple[list[int], list[tuple[int, ...]]]:
        """Rows of the items of the first sample, and the shapes of what enters the first layer for each modality."""
        batch = self.collator(samples)
        first = {name: value[0] if name in TOKEN_FIELDS else value for name, value in batch.items()}
        part = module_parts(self.skeleton)[self.module]
        shapes = []
        for modality in part.features:
            names = part.input_names(modality)
            inputs = {name: batch[name] for name in names if batch.get(name) is not None}
            if names[0] in inputs and len(inputs[names[0]]):
                shapes.append(entered_shape(self.skeleton, self.module, modality, inputs))
        return self.tokens(first)[self.module], shapes
