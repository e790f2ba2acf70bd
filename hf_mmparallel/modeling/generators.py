"""
Generators of a composed model: modules behind the language model with a loss of their own.

A generator starts from hidden states of the language model at its placeholders, `num_tokens` of them for each item (an
image, a clip), which its projector brings to its own width. A diffusion model predicts noise that was added to the
item's latents, with the rows as its condition; a transformer of codes predicts the codes of the item at its rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from .features import forward_arguments, meta_forward
from .loss import IGNORE_INDEX
from .multimodal_backbone import MLPProjector, keep_weights
from .multimodal_config import GeneratorSettings, MultimodalConfig

# Widths of the condition in configs of diffusion models, the first that there is.
_CONDITION_WIDTHS = ("encoder_hid_dim", "caption_channels", "joint_attention_dim", "cross_attention_dim")


class Generator(nn.Module):
    """A module behind the language model: `projector`, `tower` and what follows, with the loss of some items."""

    targets: str  # suffix of the batch entry with the targets, after the generator's name
    optional: tuple[str, ...] = ()  # suffixes of further entries, which a batch may lack
    is_chain = True  # whether the tower's blocks are one list, each of which starts from the output of the one before

    def __init__(self, name: str, settings: GeneratorSettings, tower: nn.Module, width: int, text_config: Any):
        super().__init__()
        self.name, self.settings, self.width = name, settings, width
        hidden_size = text_config.hidden_size
        self.projector: nn.Module = (
            nn.Linear(hidden_size, width)
            if settings.projector == "linear"
            else MLPProjector(hidden_size, width, text_config_act(text_config))
        )
        self.tower = tower

    @property
    def entries(self) -> tuple[str, ...]:
        """The batch entries that it reads, that of the targets first."""
        return tuple(f"{self.name}_{suffix}" for suffix in (self.targets, *self.optional))

    @property
    def placeholders(self) -> tuple[str, int, int]:
        """The batch entry of its targets, the id of their placeholder, and placeholders of a target."""
        return self.entries[0], self.settings.token_id, self.settings.num_tokens

    def num_targets(self, inputs: Mapping[str, Any]) -> int:
        """Counts what the loss is summed over in a batch, without reading it on a device."""
        raise NotImplementedError

    def row_shares(self) -> dict[str, float]:
        """How often a row is multiplied with each matrix of the tower, where that is not once."""
        return {}

    def blank_targets(self, num_items: int) -> Tensor | None:
        """Targets of so many items, without values; `None` where the tower's config does not say their size."""
        raise NotImplementedError

    def loss(self, rows: Tensor, **inputs: Any) -> Tensor:
        """
        Returns the loss summed over all targets of a batch, float32.

        Args:
            rows (`torch.Tensor` of shape `(items * num_tokens, hidden_size)`): Hidden states at the placeholders.
            inputs: The generator's entries of the batch.
        """
        raise NotImplementedError

    def condition(self, rows: Tensor) -> Tensor:
        """Projects the rows of whole items: `(items, num_tokens, width)`."""
        num_tokens = self.settings.num_tokens
        if rows.shape[0] % num_tokens:
            raise ValueError(
                f"The batch has {rows.shape[0]} placeholders of generator `{self.name}` (id "
                f"{self.settings.token_id}), which is no multiple of `num_tokens={num_tokens}`. Tokenize each item "
                f"with {num_tokens} of them."
            )
        parameter = next(self.projector.parameters())
        return self.projector(rows.to(parameter.dtype)).view(-1, num_tokens, self.width)

    def items(self, rows: Tensor, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Returns the condition of the items, and their targets; raises `ValueError` unless they are as many."""
        targets, entry = inputs.get(self.entries[0]), self.entries[0]
        count = 0 if targets is None else len(targets)
        if count * self.settings.num_tokens != rows.shape[0]:
            raise ValueError(
                f"The batch has {rows.shape[0]} placeholders of generator `{self.name}` (id "
                f"{self.settings.token_id}), but `{entry}` has {count} items of `num_tokens="
                f"{self.settings.num_tokens}`. Give one target for each item, and {self.settings.num_tokens} "
                "placeholders for each target."
            )
        return self.condition(rows), targets


def text_config_act(config: Any) -> str:
    return getattr(config, "hidden_act", None) or getattr(config, "activation_function", None) or "gelu"


class CodeGenerator(Generator):
    """
    A transformer over the rows of an item, and a head that predicts their codes (image tokens, audio codes).

    The batch entry `<name>_codes` has int64 codes `(items, num_tokens)`, or `(items, num_tokens, num_codebooks)`; -100
    is no target. Row `i` predicts the codes of row `i`.
    """

    targets = "codes"

    def __init__(self, name: str, settings: GeneratorSettings, tower: PreTrainedModel, text_config: Any):
        super().__init__(name, settings, tower, tower.config.hidden_size, text_config)
        if settings.num_codes is None:
            raise ValueError(
                f"Generator `{name}` is a `{type(tower).__name__}`, which predicts codes, but the size of their "
                f"codebook is not given. Set `num_codes` in its `generator_settings`."
            )
        self.head = nn.Linear(self.width, settings.num_codes * settings.num_codebooks, bias=False)
        tower.get_input_embeddings().requires_grad_(False)  # it starts from rows
        self._options = {"use_cache": False} if "use_cache" in forward_arguments(tower) else {}

    def num_targets(self, inputs: Mapping[str, Any]) -> int:
        codes = inputs.get(self.entries[0])
        return 0 if codes is None else int((codes != IGNORE_INDEX).sum())

    def blank_targets(self, num_items: int) -> Tensor | None:
        return torch.zeros(num_items, self.settings.num_tokens, self.settings.num_codebooks, dtype=torch.int64)

    def logits(self, condition: Tensor) -> Tensor:
        hidden = self.tower(inputs_embeds=condition, **self._options).last_hidden_state
        return self.head(hidden).unflatten(-1, (self.settings.num_codebooks, -1))

    def loss(self, rows: Tensor, **inputs: Any) -> Tensor:
        condition, codes = self.items(rows, inputs)
        if codes is None or not len(codes):
            return rows.float().sum() * 0.0
        logits = self.logits(condition)
        if codes.numel() != logits.shape[:-1].numel():
            raise ValueError(
                f"`{self.entries[0]}` has codes of shape {tuple(codes.shape)} for items of "
                f"{self.settings.num_tokens} rows and {self.settings.num_codebooks} codebooks. Give "
                "`(items, num_tokens, num_codebooks)`, or `(items, num_tokens)` for one codebook."
            )
        return nn.functional.cross_entropy(
            logits.float().flatten(0, -2), codes.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
        )

    @torch.no_grad()
    def generate(self, rows: Tensor) -> Tensor:
        """The most probable codes of some items, `(items, num_tokens, num_codebooks)`."""
        return self.logits(self.condition(rows)).argmax(-1)


class DiffusionGenerator(Generator):
    """
    A diffusion model of diffusers that attends to the rows of an item, and its noise scheduler.

    The batch entry `<name>_latents` has the items' latents or pixels `(items, channels, height, width)`. Noise and
    time step of an item are drawn with its seed in `<name>_seeds`, int64 `(items,)`, so that every layout draws the
    same; without them with torch's generator. The loss is the squared error of the scheduler's prediction type.
    """

    targets, optional, is_chain = "latents", ("seeds",), False

    def __init__(self, name: str, settings: GeneratorSettings, tower: nn.Module, text_config: Any):
        super().__init__(name, settings, tower, condition_width(name, tower), text_config)
        parameters = list(inspect.signature(tower.forward).parameters)
        self._sample_argument = parameters[0]
        self.scheduler = scheduler_of(settings.scheduler)

    def num_targets(self, inputs: Mapping[str, Any]) -> int:
        latents = inputs.get(self.entries[0])
        return 0 if latents is None else latents.numel()

    def blank_targets(self, num_items: int) -> Tensor | None:
        config: Any = self.tower.config
        size, channels = config.get("sample_size"), config.get("in_channels")
        if size is None or channels is None:
            return None
        return torch.zeros(num_items, channels, *((size, size) if isinstance(size, int) else size))

    def predict(self, noisy: Tensor, steps: Tensor, condition: Tensor) -> Tensor:
        """Runs the model on noisy latents `(items, ...)` at time steps `(items,)`."""
        dtype = next(self.tower.parameters()).dtype
        inputs = {self._sample_argument: noisy.to(dtype), "encoder_hidden_states": condition.to(dtype)}
        output = self.tower(timestep=steps, **inputs, return_dict=False)[0]
        return output[:, : noisy.shape[1]]  # without a predicted variance

    def draw(self, latents: Tensor, seeds: Tensor | None) -> tuple[Tensor, Tensor]:
        """Draws noise like the latents, and a number in `[0, 1)` for each item; by its seed if there are seeds."""
        if seeds is None:
            return torch.randn_like(latents), torch.rand(len(latents), device=latents.device)
        noise, times = [], []
        for seed in seeds.tolist():
            generator = torch.Generator().manual_seed(seed)  # the host's is the same for every device
            times.append(torch.rand((), generator=generator))
            noise.append(torch.randn(latents.shape[1:], generator=generator))
        return torch.stack(noise).to(latents), torch.stack(times).to(latents.device)

    def loss(self, rows: Tensor, **inputs: Any) -> Tensor:
        condition, latents = self.items(rows, inputs)
        if latents is None or not len(latents):
            return rows.float().sum() * 0.0
        latents = latents.float()
        noise, times = self.draw(latents, inputs.get(self.entries[1]))
        count = self.scheduler.config.num_train_timesteps
        if is_flow(self.scheduler):
            sigma = times.view(-1, *[1] * (latents.dim() - 1))
            noisy, wanted, steps = (1 - sigma) * latents + sigma * noise, noise - latents, times * count
        else:
            steps = (times * count).long()
            noisy = self.scheduler.add_noise(latents, noise, steps)
            wanted = self._wanted(latents, noise, steps)
        return (self.predict(noisy, steps, condition).float() - wanted).square().sum()

    def _wanted(self, latents: Tensor, noise: Tensor, steps: Tensor) -> Tensor:
        kind = self.scheduler.config.prediction_type
        if kind == "v_prediction":
            return self.scheduler.get_velocity(latents, noise, steps)
        return latents if kind == "sample" else noise

    @torch.no_grad()
    def generate(self, rows: Tensor, shape: tuple[int, ...], num_steps: int = 50, seed: int = 0) -> Tensor:
        """Samples latents `(items, *shape)`, with the scheduler that training uses."""
        condition = self.condition(rows)
        generator = torch.Generator().manual_seed(seed)
        latents = torch.randn((len(condition), *shape), generator=generator).to(rows.device)
        self.scheduler.set_timesteps(num_steps, device=rows.device)
        for step in self.scheduler.timesteps:
            output = self.predict(latents, step.expand(len(latents)), condition).float()
            extra = {} if is_flow(self.scheduler) else {"generator": generator}
            latents = self.scheduler.step(output, step, latents, **extra).prev_sample
        return latents

    def row_shares(self) -> dict[str, float]:
        """
        How often a row is multiplied with each matrix of the tower, counted in a forward without weights for an item
        of the size in the tower's config; empty if it has none. Attention is counted with the matrices around it.
        """
        tower: Any = self.tower
        latents = self.blank_targets(1)
        if latents is None:
            return {}
        condition = torch.empty(1, self.settings.num_tokens, self.width, device="meta", dtype=tower.dtype)
        inputs = {self._sample_argument: latents.to("meta", tower.dtype), "encoder_hidden_states": condition}
        with FlopCounterMode(display=False) as counter:
            meta_forward(tower, timestep=torch.zeros(1, device="meta"), **inputs, return_dict=False)
        counted = {name: sum(own.values()) for name, own in counter.get_flop_counts().items()}
        root, modules = type(tower).__name__, list(tower.named_modules())
        of_module = {name: counted.get(f"{root}.{name}" if name else root, 0) for name, _ in modules}
        matrices = {name: parameter.numel() for name, parameter in tower.named_parameters() if parameter.dim() > 1}
        flops = {name: float(of_module[name.rpartition(".")[0]]) * name.endswith(".weight") for name in matrices}
        for name, _ in reversed(modules):  # what is inside of a module before it
            inside = [matrix for matrix in flops if not name or matrix.startswith(f"{name}.")]
            held = sum(flops[matrix] for matrix in inside)
            if held and of_module[name] > held:
                flops.update({matrix: flops[matrix] * of_module[name] / held for matrix in inside})
        return {name: value / (2 * matrices[name] * self.settings.num_tokens) for name, value in flops.items()}

    def compute_buffers(self, module: nn.Module) -> None:
        """Computes buffers of a module that checkpoints don't have, such as positions of patches, anew."""
        name = next((name for name, part in self.tower.named_modules() if part is module), None)
        if name is not None and module._non_persistent_buffers_set:
            tower: Any = self.tower
            fresh = type(tower).from_config(tower.config).get_submodule(name)
            for key in module._non_persistent_buffers_set:
                module.get_buffer(key).copy_(fresh.get_buffer(key))


TARGETS = (CodeGenerator.targets, DiffusionGenerator.targets)


def is_flow(scheduler: Any) -> bool:
    """Whether a scheduler goes straight from latents to noise (flow matching)."""
    return "FlowMatch" in type(scheduler).__name__


def scheduler_of(config: Mapping[str, Any]) -> Any:
    """The noise scheduler of a configuration, by default DDPM's."""
    import diffusers

    values = {"_class_name": "DDPMScheduler", **config}
    with torch.device("cpu"):  # its tables have values also where the model is built without weights
        return getattr(diffusers, values["_class_name"]).from_config(values)


def condition_width(name: str, tower: nn.Module) -> int:
    """The width of the states that a diffusion model attends to; raises `ValueError` for one that attends to none."""
    config: Any = tower.config
    parameters = inspect.signature(tower.forward).parameters
    width = next((config[key] for key in _CONDITION_WIDTHS if isinstance(config.get(key), int)), None)
    if width is None or not {"encoder_hidden_states", "timestep"} <= parameters.keys():
        raise ValueError(
            f"Generator `{name}` is a `{type(tower).__name__}`, whose forward has no `encoder_hidden_states` to "
            "attend to. Use a model such as `UNet2DConditionModel` or `PixArtTransformer2DModel`."
        )
    known = {next(iter(parameters)), "encoder_hidden_states", "timestep"}
    needed = [key for key, p in parameters.items() if p.default is p.empty and key not in known]
    if needed:
        raise ValueError(
            f"Generator `{name}` is a `{type(tower).__name__}`, whose forward also needs `{needed[0]}`, which hidden "
            "states of a language model don't give. Use a model such as `UNet2DConditionModel`."
        )
    return width


def load_tower(name: str, value: Any, dtype: torch.dtype | None) -> nn.Module:
    """A generator's tower from a model, a config of transformers, or an id or folder of either library."""
    options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    if isinstance(value, PreTrainedConfig):
        value = AutoModel.from_config(value, **options)
    elif isinstance(value, (str, bytes)):
        value = _load_folder(str(value), dtype, options)
    if isinstance(value, PreTrainedModel):
        return value.base_model
    if not hasattr(value, "config") or not isinstance(value, nn.Module):
        raise ValueError(
            f"Generator `{name}` is a `{type(value).__name__}`, which has no loss that is known. Use a diffusion "
            "model of diffusers, or a transformer of transformers that predicts codes."
        )
    return value


def _load_folder(value: str, dtype: torch.dtype | None, options: dict[str, Any]) -> nn.Module:
    try:
        return AutoModel.from_pretrained(value, **options)
    except (ValueError, OSError):  # no config of transformers
        from diffusers.models.auto_model import AutoModel as DiffusersModel

        loaded: Any = DiffusersModel.from_pretrained(value, torch_dtype=dtype)
        return loaded


def build_generator(config: MultimodalConfig, name: str, tower: Any = None) -> Generator:
    settings, tower_config = config.generator_setting(name), config.generator_configs[name]
    if isinstance(tower_config, PreTrainedConfig):
        return CodeGenerator(name, settings, tower or AutoModel.from_config(tower_config), config.text_config)
    if tower is None:
        import diffusers

        tower = getattr(diffusers, settings.model_class).from_config(tower_config)
        if not any(parameter.is_meta for parameter in tower.parameters()):
            keep_weights(tower)  # as diffusers initialises them
    return DiffusionGenerator(name, settings, tower, config.text_config)
