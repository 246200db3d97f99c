"""The repeated layers of a model: found, grouped by modality, and selected by scope. Needs torch alone."""

from nemo_like.layers.find import Layer, LayersNotFoundError, find_layers, is_frozen, layer_groups, select_layers
from nemo_like.layers.groups import GROUPS

__all__ = ["GROUPS", "Layer", "LayersNotFoundError", "find_layers", "is_frozen", "layer_groups", "select_layers"]
