"""Per-layer compilation: one small graph per repeated layer, compiled once and reused for all of them."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from nemo_like._util.forwards import Forward, Place
from nemo_like._util.log import warn_once
from nemo_like._util.module_tree import bare
from nemo_like.activation_checkpointing.checkpointed import SELECTIVE_AC_WRAPPER_FLAG, is_checkpointed, regions_in
from nemo_like.activation_checkpointing.kv_sharing import shares_states_explicitly
from nemo_like.layers import find_layers
from nemo_like.options import parse_compile
from nemo_like.torch_compat import compiled_call


class Compiled(Forward):
    """A module whose forward is one graph; hooks of the module, FSDP2's among them, run outside of it.

    A copy of the module runs eagerly, as after `nn.Module.compile`.
    """

    word = "compiled"
    graph: Callable[..., Any] | None = None

    def __init__(self, module: nn.Module, place: Place) -> None:
        super().__init__(module)
        self.place = place  # type: ignore[misc]  # around the module's region, or inside of it

    def compile(self, backend: str, recomputes: Iterable[nn.Module] = ()) -> None:
        """Compile the rest of the chain; `recomputes`: modules in it, if it has regions that Dynamo traces."""
        following: Any = self.next
        self._compiled = self.inner
        function = following.__call__ if isinstance(following, Forward) else following
        self.graph = compiled_call(function, type(self.module).__name__, backend, list(recomputes))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph; or the chain eagerly, if others have put something inside since."""
        return (self.call if self.graph is None or self.inner is not self._compiled else self.graph)(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"graph": None}


def compile_layers(model: nn.Module, backend: str = "inductor", layers: Iterable[nn.Module] | None = None) -> None:
    """Compile each repeated layer of `model` in place; no name changes (no ``_orig_mod``).

    A layer that selective checkpointing recomputes whole is compiled with its region, so that the partitioner reads the
    recompute tags. Any other whole-layer region is compiled inside: its recomputation runs the compiled layer again. A layer
    whose sub-modules are checkpointed is one graph: compiled piece by piece, gradients of the residual stream would be
    summed in another order. ``"eager"`` has no partitioner, so there every region is compiled inside.

    Args:
        model: changed in place.
        backend: ``"inductor"``, ``"aot_eager"`` (PyTorch's kernels, compiled autograd graph) or ``"eager"``.
        layers: the layers; None: found by `nemo_like.layers.find_layers`.

    Raises:
        ValueError: an unknown backend, or a model without repeated layers.
    """
    resolved = parse_compile(backend)
    if resolved is None:
        return
    chosen = [layer.module for layer in find_layers(model)] if layers is None else list(layers)
    for layer in chosen:
        regions = regions_in(layer)
        if resolved == "eager" or (is_checkpointed(layer) and not getattr(layer, SELECTIVE_AC_WRAPPER_FLAG, False)):
            for module in [region.module for region in regions] or [layer]:
                Compiled(module, Place.COMPILED).put().compile(resolved)
            continue
        # A value that leaves such a region through the dictionary of shared keys and values, and not as an output, is cut
        # from the graph: silently wrong gradients of Gemma 3n with torch 2.13 (``tests/test_compile.py``).
        if regions and shares_states_explicitly([bare(layer)]):
            warn_once(
                f"compile={backend!r} was asked for, but {type(bare(layer)).__name__} hands keys and "
                "values to other layers from inside a checkpointed region, whose gradient torch.compile loses: these "
                "layers run eagerly. ac='full' compiles them."
            )
            continue
        # Regions with different inputs (masked or not, several dtypes) recompile instead of giving up on the graph.
        Compiled(layer, Place.COMPILED_WITH_REGION).put().compile(resolved, layer.modules() if regions else ())
