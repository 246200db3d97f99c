"""The tensor-parallel styles that a plan may name, as torch's `ParallelStyle` objects.

torch has the two basic cuts; the names are those that Hugging Face models use in their plans, so that a model's own
plan works as it stands. A ``Linear`` weight is (out, in): *colwise* cuts it along dim 0 (each rank computes some output
features), *rowwise* along dim 1 (each rank sums over some input features, and the sums are reduced).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from nemo_like.distributed.strided_shards import describe_strided, is_strided
from nemo_like.transformers_compat import PARALLEL_STYLES

COLWISE = frozenset({"colwise", "colwise_gather_output", "colwise_rep"})
"""Styles that cut output features. Only plain ``colwise`` leaves each rank with its own heads."""
ROWWISE = frozenset({"rowwise", "rowwise_split_input", "rowwise_rep"})
"""Styles that cut input features."""


class Untouched(ParallelStyle):
    """Every rank keeps the whole module and computes the same with it."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return module


class SummedGradients(ParallelStyle):
    """Every rank keeps the whole parameters and uses them on its own part of the activations.

    Each rank's gradient then covers its part only (a norm of its own heads; any norm under sequence parallelism), so it
    is summed over the ranks. The sum is made where the parameter is used, inside autograd, so that it holds under
    FSDP2 too: there, hooks on the parameter never see its gradient.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        forward = module.forward

        def forward_with_summed_gradients(*args: Any, **kwargs: Any) -> Any:
            own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
            # A plain tensor may stand where a Parameter stood while forward runs; both are put back even when a replay
            # stops early.
            used: dict[str, Any] = {name: _summed(value, device_mesh) for name, value in own.items()}
            module._parameters.update(used)
            try:
                return forward(*args, **kwargs)
            finally:
                module._parameters.update(own)

        module.forward = forward_with_summed_gradients
        return module


class ReducedOutput(ParallelStyle):
    """The module's output is this rank's term of a sum: reduce it."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def reduce(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
            partial = DTensor.from_local(output, device_mesh, [Partial()], run_check=False)
            return partial.redistribute(placements=[Replicate()]).to_local()

        module.register_forward_hook(reduce)
        return module


class InstalledStyle(ParallelStyle):
    """A style that only the installed transformers knows (packed and expert weights), applied by its own code."""

    def __init__(self, name: str, style: Any, config: Any) -> None:
        self.name, self.style, self.config = name, style, config

    def shard(self, module: nn.Module, parameter: str, mesh: DeviceMesh) -> None:
        """Cut the one parameter `parameter` of `module`."""
        self.style.validate_param(module, parameter, mesh, parameter_name=parameter)
        self.style.shard_param(module, parameter, mesh)
        cut = module._parameters[parameter]
        if isinstance(cut, DTensor) and is_strided(cut):
            module.register_state_dict_post_hook(describe_strided)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in [name for name, value in module._parameters.items() if value is not None]:
            if not isinstance(module._parameters[name], DTensor):
                self.shard(module, name, device_mesh)
        if self.name == "mla_kv_a_proj" and self.config is not None:
            module.config = self.config  # its code reads the width of the rotary part there
        self.style.install_forward(module, device_mesh)
        return module


_IN_PLACE = frozenset({"add_", "sub_", "mul_", "div_"})


def own_outputs(model: nn.Module, modules: Collection[nn.Module]) -> None:
    """Give each of `modules`, which are cut, an output of its own memory where a module around it changes that in place.

    What a cut module returns is a view that autograd lets nobody change (Llama 4 adds its experts to its shared expert).
    """
    chosen = {id(module): module for module in modules}
    for around in model.modules():
        code = getattr(inspect.unwrap(type(around).forward), "__code__", None)
        if code is None or not _IN_PLACE & set(code.co_names) or id(around) in chosen:
            continue
        for module in around.modules():
            if chosen.pop(id(module), None) is not None:
                module.register_forward_hook(_copied)


def _copied(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    return output.clone() if isinstance(output, Tensor) and not isinstance(output, DTensor) else output


_STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel,
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_colwise": lambda: ColwiseParallel(output_layouts=Replicate()),
    "sequence_parallel": SequenceParallel,
    "replicate": Untouched,
    "replicated_with_grad_allreduce": SummedGradients,
    "all_reduce": ReducedOutput,
}


def known_styles() -> tuple[str, ...]:
    """Every style name a plan may use here: ours, and those of the transformers in use, if any."""
    return tuple(dict.fromkeys([*_STYLES, *installed_styles()]))


def make_style(name: str, config: Any = None) -> ParallelStyle | None:
    """The style called `name`, or None where neither we nor the installed transformers know it."""
    if name in _STYLES:
        return _STYLES[name]()
    installed = installed_styles()
    return InstalledStyle(name, installed[name], config) if name in installed else None


def installed_styles() -> Mapping[str, Any]:
    """Adapter to transformers' registry of styles, which is no documented interface: absent or changed, it is empty.

    A model with a plan has imported transformers already; this never does.
    """
    module, name = PARALLEL_STYLES
    registry: Any = getattr(sys.modules.get(module), name, {})
    wanted = ("shard_param", "install_forward", "validate_param")
    styles = {name: registry[name] for name in (registry.keys() if hasattr(registry, "keys") else ())}
    return {name: style for name, style in styles.items() if all(hasattr(style, method) for method in wanted)}


def _summed(parameter: Tensor, mesh: DeviceMesh) -> Tensor:
    """`parameter` unchanged, with a gradient that is the sum of all ranks' gradients."""
    if not parameter.requires_grad:
        return parameter
    replicated = DTensor.from_local(parameter, mesh, [Replicate()], run_check=False)
    return replicated.to_local(grad_placements=[Partial()])
