"""The layers of a model through which gradients flow."""

from __future__ import annotations

from ..plan import ModelSpec


def data_gradients(spec: ModelSpec) -> dict[str, tuple[bool, ...]]:
    """Module -> for each layer from -1 to `num_layers`, whether the gradient of its input is needed."""
    needed: dict[str, tuple[bool, ...]] = {}
    has_gradient: dict[str, bool] = {}
    for name, module in spec.modules.items():
        # the gradient is needed if anything before the layer is trainable, in its module or in a producer whose
        # features enter at or before the layer (Cornstarch, section 4.3)
        enters = [min(edge.layers) for edge in spec.edges if edge.target == name and has_gradient[edge.source]]
        before, flags = False, []
        for index in range(-1, module.num_layers + 1):
            before = before or any(layer <= index for layer in enters)
            flags.append(before)
            before = before or any(use.parameter.trainable for use in spec.uses.get((name, index), ()))
        needed[name], has_gradient[name] = tuple(flags), before
    return needed


def first_backward(spec: ModelSpec, module: str) -> int:
    """The first layer of a module with a backward, which all layers after it have, too; `num_layers` if none has."""
    num_layers, needed = spec.modules[module].num_layers, data_gradients(spec)[module]
    return next(
        (
            layer
            for layer in range(num_layers)
            if needed[1 + layer] or any(use.parameter.trainable for use in spec.uses.get((module, layer), ()))
        ),
        num_layers,
    )
