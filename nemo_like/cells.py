"""Modules that are called once a timestep: which of a model's they are, as regions of several calls."""

from __future__ import annotations

from torch import nn

from nemo_like.activation_checkpointing.spec import CheckpointSpec, chunks_of_calls
from nemo_like.activation_checkpointing.timesteps import UnrolledCell
from nemo_like.choice import class_names, layers_of_classes
from nemo_like.layers import find_layers
from nemo_like.module_tree import bare, bare_modules
from nemo_like.options import CheckpointConfig


def timestep_specs(model: nn.Module, config: CheckpointConfig) -> list[CheckpointSpec]:
    """The regions that the ``snn_*`` fields mean, in the model's order.

    Every `UnrolledCell` gets the chunk size. Otherwise cells that the model's own code calls once a timestep: the
    modules of `layer_classes`, or matched by `include_patterns`, or PyTorch's own (`nn.LSTMCell` and so on).

    Raises:
        ValueError: there is no such module; the message says how to name it.
    """
    modules = [(name, module) for name, module in bare_modules(model) if name]
    unrolled = [name for name, module in modules if isinstance(bare(module), UnrolledCell)]
    if config.layer_classes is not None:
        cells = [layer.fqn for layer in layers_of_classes(model, config.layer_classes)]
    elif config.include_patterns:
        cells = [layer.fqn for layer in find_layers(model, config.include_patterns)]
    else:
        inside = tuple(f"{name}." for name in unrolled)
        cells = [
            name for name, module in modules if isinstance(bare(module), nn.RNNCellBase) and not name.startswith(inside)
        ]
    if isinstance(model, nn.RNNCellBase):
        raise ValueError(
            f"The model is the {type(model).__name__} itself, which cannot be wrapped in place: hand in the module that "
            "calls it once a timestep, or use nemo_like.checkpoint_timesteps."
        )
    if not cells and not unrolled:
        raise ValueError(
            f"CheckpointConfig.snn_timestep_checkpoint is True, and the {type(model).__name__} has no UnrolledCell and "
            "no nn.RNNCellBase. Name the class of the module that is called in each timestep in layer_classes: "
            f"{', '.join(class_names(model)[:12])}."
        )
    wanted = {*unrolled, *cells}
    return chunks_of_calls([name for name, _ in modules if name in wanted], config.snn_chunk_size)
