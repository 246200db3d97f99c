"""The repeated layers of a model: found, grouped by modality, and selected by scope. Needs torch alone."""

from nemo_like.layers.find import Layer, find_layers, layer_groups
from nemo_like.layers.groups import GROUPS
from nemo_like.layers.named import LayersNotFoundError
from nemo_like.layers.scope import is_frozen, select_layers

__all__ = ["GROUPS", "Layer", "LayersNotFoundError", "find_layers", "is_frozen", "layer_groups", "select_layers"]
