"""Modules that are called once a timestep: found, and checkpointed by chunks of timesteps."""

from __future__ import annotations

from torch import nn

from nemo_like.activation_checkpointing.sequential import checkpoint_cell_calls
from nemo_like.activation_checkpointing.timesteps import UnrolledCell
from nemo_like.choice import class_names, layers_of_classes
from nemo_like.layers import Layer, find_layers
from nemo_like.layers.names import bare_modules
from nemo_like.options import CheckpointConfig


def checkpoint_timestep_cells(model: nn.Module, config: CheckpointConfig) -> list[str]:
    """Checkpoint timesteps as the ``snn_*`` fields say; returns the names of the modules concerned.

    Every `UnrolledCell` gets the chunk size. Otherwise cells that the model's own code calls once a timestep: the
    modules of `layer_classes`, or matched by `include_patterns`, or PyTorch's own (`nn.LSTMCell` and so on).

    Raises:
        ValueError: there is no such module; the message says how to name it.
    """
    unrolled = [(name, module) for name, module in bare_modules(model) if isinstance(module, UnrolledCell)]
    if config.layer_classes is not None:
        cells = list(layers_of_classes(model, config.layer_classes))
    elif config.include_patterns:
        cells = list(find_layers(model, config.include_patterns))
    else:
        inside = tuple(f"{name}.".lstrip(".") for name, _ in unrolled)
        cells = [
            Layer(name, module, "other")
            for name, module in bare_modules(model)
            if name and isinstance(module, nn.RNNCellBase) and not name.startswith(inside or "\0")
        ]
    if not cells and not unrolled:
        raise ValueError(
            f"CheckpointConfig.snn_timestep_checkpoint is True, and the {type(model).__name__} has no UnrolledCell and "
            "no nn.RNNCellBase. Name the class of the module that is called in each timestep in layer_classes: "
            f"{', '.join(class_names(model)[:12])}."
        )
    if cells:
        checkpoint_cell_calls(model, [cell.module for cell in cells], config.snn_chunk_size)
    for _, module in unrolled:
        module.checkpoint = True
        module.chunk_size = config.snn_chunk_size
    names = [name for name, _ in unrolled] + [cell.fqn for cell in cells]
    return sorted(names, key=[name for name, _ in bare_modules(model)].index)
