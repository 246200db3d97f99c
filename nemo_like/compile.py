"""Per-layer compilation: one small graph per repeated layer, compiled once and reused for all of them."""

from collections.abc import Iterable

from torch import nn

from nemo_like._util.log import warn_once
from nemo_like._util.module_tree import bare, every_module
from nemo_like.activation_checkpointing.kv_sharing import shares_states_explicitly
from nemo_like.activation_checkpointing.wrapper import (
    SELECTIVE_AC_WRAPPER_FLAG,
    CheckpointWrapper,
    unwrap_checkpoint_wrapper,
)
from nemo_like.layers import find_layers
from nemo_like.offload import OffloadWrapper
from nemo_like.options import parse_compile
from nemo_like.torch_compat import compile_in_place, wrapped_module


def compile_layers(model: nn.Module, backend: str = "inductor", layers: Iterable[nn.Module] | None = None) -> None:
    """Compile each repeated layer of `model` in place with `nn.Module.compile`; no name changes (no ``_orig_mod``).

    A whole-layer selective wrapper is compiled itself, so that the partitioner reads the recompute tags. Any other
    whole-layer wrapper is compiled inside: its recomputation runs the compiled layer again. A layer whose sub-modules are
    wrapped is one graph: compiled piece by piece, gradients of the residual stream would be summed in another order.
    ``"eager"`` has no partitioner, so there every wrapper is compiled inside.

    Args:
        model: changed in place.
        backend: ``"inductor"``, ``"aot_eager"`` (PyTorch's kernels, compiled autograd graph) or ``"eager"``.
        layers: the layers, wrapped or not; None: found by `nemo_like.layers.find_layers`.

    Raises:
        ValueError: an unknown backend, or a model without repeated layers.
    """
    resolved = parse_compile(backend)
    if resolved is None:
        return
    chosen = [layer.module for layer in find_layers(model)] if layers is None else list(layers)
    for layer in chosen:
        if resolved == "eager":
            for inside in _inside_of_regions(layer):
                compile_in_place(inside, resolved)
            continue
        # Dynamo traces checkpointed regions in it.
        modules = list(every_module(_outermost(layer)))
        traced = any(isinstance(module, CheckpointWrapper) for module in modules)
        # A value that leaves such a region through the dictionary of shared keys and values, and not as an output, is cut
        # from the graph: silently wrong gradients of Gemma 3n with torch 2.13 (``tests/test_compile.py``).
        if traced and shares_states_explicitly([bare(layer)]):
            warn_once(
                f"compile={backend!r} was asked for, but {type(bare(layer)).__name__} hands keys and "
                "values to other layers from inside a checkpointed region, whose gradient torch.compile loses: these "
                "layers run eagerly. ac='full' compiles them."
            )
            continue
        # Regions with different inputs (masked or not, several dtypes) recompile instead of giving up on the graph.
        compile_in_place(_outermost(layer), resolved, recomputes=modules if traced else ())


def _inside_of_regions(layer: nn.Module) -> list[nn.Module]:
    """Return the modules of a layer that its regions recompute; the layer itself where it has none."""
    regions = (module for module in every_module(layer) if isinstance(module, CheckpointWrapper))
    return list(map(unwrap_checkpoint_wrapper, regions)) or [_outermost(layer)]


def _outermost(layer: nn.Module) -> nn.Module:
    """Return the modules of a layer to compile. One without a wrapper is compiled whole, wrapped sub-modules
    included."""
    if isinstance(layer, OffloadWrapper):  # its hooks are outside of the graph
        layer = wrapped_module(layer)
    return layer if getattr(layer, SELECTIVE_AC_WRAPPER_FLAG, False) else unwrap_checkpoint_wrapper(layer)
