"""Match the modules of a model with tensor-parallel styles, and check that its sizes and adapters allow them. Changes
nothing."""

import copy
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel
from torch.nn.utils import parametrize

from nemo_like._util.code import names_in
from nemo_like._util.forwards import Forward
from nemo_like._util.log import warn_once
from nemo_like._util.module_tree import base_model, glob_to_regex
from nemo_like._util.words import a_or_an
from nemo_like.distributed.weights.tensor_locations import describe_strided, find_slots, is_strided
from nemo_like.options import did_you_mean
from nemo_like.transformers_compat import PARALLEL_STYLES, text_config

# Names of attention modules for their numbers of heads.
_HEADS = (
    "num_heads",
    "n_heads",
    "n_head",
    "heads",
    "num_attention_heads",
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
)


@dataclass(frozen=True)
class Rule:
    """One module or parameter of the model and its style."""

    fqn: str
    style: ParallelStyle
    style_name: str  # The name in the plan; the class name where the plan holds an object.
    module: nn.Module
    parameter: str | None = None  # Set where the rule names a single parameter of `module`.
    adapted: str | None = None  # The name of the LoRA layer that `module` is in, where it is in one.

    @property
    def place(self) -> str:
        """The name of the module that the model around it calls."""
        return self.adapted or self.fqn


def resolve_plan(
    model: nn.Module, plan: Mapping[str, str | ParallelStyle] | None, tp_size: int, whole: Collection[str] = ()
) -> list[Rule]:
    """The rules for `model`, checked.

    Args:
        model: the whole model; nothing in it is wrapped yet.
        plan: FQN pattern (``*`` within one dotted segment) to style or style name; None: the model's own ``tp_plan``,
            else its config's ``base_model_tp_plan``. Names are those without PEFT's wrapping, or with it.
        tp_size: ranks of the tensor-parallel axis.
        whole: names of modules in which no rule holds.

    Raises:
        ValueError: there is no plan; a style is unknown; a pattern of the caller's plan matches nothing; a size or a
            number of heads is not divisible by `tp_size`; tied weights that the plan would untie; adapters that cannot
            be cut with their linears.
        TypeError: the plan is not a mapping, or holds something that is not a style.
    """
    is_default = plan is None
    wanted = _own_plan(model) if is_default else plan
    if not isinstance(wanted, Mapping):
        raise TypeError(f"plan is {a_or_an(wanted)}; it must map FQN patterns to styles or their names.")
    if not wanted:
        raise ValueError(
            f"This {type(model).__name__} brings no tensor-parallel plan (tp_plan, config.base_model_tp_plan). Give "
            f"one: tp=TensorParallel({tp_size}, plan={{'layers.*.q_proj': 'colwise', 'layers.*.o_proj': 'rowwise', ...}})."
        )
    plain = plain_names(model)
    named = [(fqn, plain(fqn), module) for fqn, module in model.named_modules()]  # once for all patterns
    rules = [r for pattern, style in wanted.items() for r in _rules(model, named, plain, pattern, style, is_default)]
    if not rules:
        raise ValueError(
            f"The tensor-parallel plan matches nothing in this {type(model).__name__}: {', '.join(wanted)}."
        )
    named_twice = {rule.fqn: rule for rule in rules}  # a later pattern refines an earlier one
    left = tuple(f"{name}." for name in whole)
    rules = [rule for rule in rules if named_twice[rule.fqn] is rule and not f"{rule.fqn}.".startswith(left)]
    check_tuners(model)
    rules = [each for rule in rules for each in _with_adapters(model, rule)]
    rules = _with_tied_partners(model, rules)
    for rule in rules:
        _check_computed(rule)
        _check_sizes(model, rule, tp_size)
    # Parameters first: a module's own style then sees which of them are cut already.
    return sorted(rules, key=lambda rule: rule.parameter is None)


def _check_computed(rule: Rule) -> None:
    """Raise where a weight that `rule` cuts is computed from others in each forward, by torch.nn.utils."""
    for name, module in rule.module.named_modules():
        kinds = [
            type(hook).__name__
            for hook in module._forward_pre_hooks.values()
            if any(base.__module__.startswith("torch.nn.utils.") for base in type(hook).__mro__)
        ]
        if parametrize.is_parametrized(module) and not kinds:
            of_names: Any = module.parametrizations
            kinds = [type(each).__name__ for of_name in of_names.values() for each in of_name]
        if kinds:
            raise ValueError(
                f"{'.'.join(part for part in (rule.fqn, name) if part)!r} computes its weight in each forward "
                f"({', '.join(kinds)}), and the tensor-parallel plan cuts it: a part of it cannot be computed alone. Take "
                "it out of the plan (TensorParallel(plan=...)), or make it a plain weight first "
                "(torch.nn.utils.parametrize.remove_parametrizations, remove_weight_norm, prune.remove)."
            )


def _own_plan(adapted: nn.Module) -> Mapping[str, str]:
    model: Any = base_model(adapted)
    plan = getattr(model, "tp_plan", None)
    if isinstance(plan, Mapping) and plan:
        return plan
    base_plan = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    prefix = getattr(model, "base_model_prefix", "")
    prefix = f"{prefix}." if prefix and isinstance(getattr(model, prefix, None), nn.Module) else ""
    return {f"{prefix}{pattern}": style for pattern, style in base_plan.items()}


def _rules(
    model: nn.Module,
    named: Sequence[tuple[str, str, nn.Module]],
    plain: Callable[[str], str],
    pattern: str,
    style: object,
    is_default: bool,
) -> list[Rule]:
    """Return the rules of one pattern; `named`: each module with its name, and that without PEFT's; `plain`: makes these."""
    if not isinstance(style, str | ParallelStyle):
        raise TypeError(f"The style of {pattern!r} is {style!r}; it must be a ParallelStyle or the name of one.")
    name = style if isinstance(style, str) else type(style).__name__
    config = text_config(getattr(model, "config", None))
    known = make_style(style, config) if isinstance(style, str) else style
    if known is None:
        raise ValueError(
            f"The tensor-parallel style {name!r} (of {pattern!r}) is unknown; known are {', '.join(known_styles())}."
            + did_you_mean(name, known_styles())
        )
    regex = glob_to_regex(pattern)
    rules = []
    for fqn, bare_name, module in named:
        if regex.fullmatch(fqn) or (not fqn.endswith(".base_layer") and regex.fullmatch(bare_name)):
            rules.append(Rule(fqn, known, name, module))
        for parameter in module._parameters:
            full = f"{fqn}.{parameter}" if fqn else parameter
            if (regex.fullmatch(full) or regex.fullmatch(plain(full))) and module._parameters[parameter] is not None:
                # A bare parameter (fused experts, attention sinks): only transformers' styles can cut one by itself.
                of_one = known if isinstance(known, InstalledStyle) else installed_style(name, config)
                if of_one is None:
                    raise ValueError(
                        f"The plan gives the single parameter {full!r} the style {name!r}, which here applies to whole "
                        f"modules; name {fqn!r} instead."
                    )
                rules.append(Rule(full, of_one, name, module, parameter))
    if not rules and not is_default:
        raise ValueError(
            f"The plan's pattern {pattern!r} matches no module and no parameter of this {type(model).__name__}."
        )
    if not rules:
        warn_once(
            f"The tensor-parallel plan of {type(model).__name__} has {pattern!r}, which this instance lacks: left out."
        )
    return rules


def _with_adapters(model: nn.Module, rule: Rule) -> Iterator[Rule]:
    """`rule`, or one for each linear of the LoRA layer that it names."""
    around = adapter_around(model, rule.fqn)
    if around is not None:
        _refuse_adapted(
            around, f"the plan gives {rule.style_name!r} to {rule.fqn!r} alone, and the adapter would stay as it is"
        )
    if not is_adapted(rule.module) or rule.style_name == "replicate":
        yield rule
        return
    check_linear(rule.fqn, rule.module)
    if rule.style_name not in COLWISE | ROWWISE:
        _refuse_adapted(
            rule.fqn,
            f"the style {rule.style_name!r} cannot be given to an adapter's factors, as "
            f"{', '.join(sorted(COLWISE | ROWWISE))} can",
        )
    for name, linear, style_name in factors(rule.fqn, rule.module, rule.style_name, rule.style_name in COLWISE):
        style = _STYLES[style_name]() if style_name else WholeFactor()
        yield Rule(name, style, style_name or "replicate", linear, adapted=rule.fqn)


def _with_tied_partners(model: nn.Module, rules: list[Rule]) -> list[Rule]:
    """Keep tied weights tied: an output head that is cut by vocabulary takes the embedding it shares with it along.

    Raises ValueError for any other parameter that a rule would cut and a module without a matching rule shares.
    """
    owners = {id(slot.tensor): [module for module, _ in slot.places] for slot in find_slots(model)}
    names = {module: fqn for fqn, module in model.named_modules()}
    by_fqn = {rule.fqn: rule for rule in rules}
    added: list[Rule] = []
    for rule in rules:
        if rule.parameter is not None or rule.style_name not in COLWISE | ROWWISE | {
            "embedding_rowwise",
            "embedding_colwise",
        }:
            continue
        for module in owners.get(id(rule.module._parameters.get("weight")), []):
            fqn = names[module]
            if fqn in by_fqn or module is rule.module:
                continue
            partner = _partner_style(rule, module)
            if partner is None:
                raise ValueError(
                    f"{rule.fqn!r} shares its weight with {fqn!r}, which the tensor-parallel plan leaves whole: give "
                    f"{fqn!r} a style that cuts the same dimension, or untie the two."
                )
            by_fqn[fqn] = Rule(fqn, _STYLES[partner](), partner, module)
            added.append(by_fqn[fqn])
    return rules + added


def _partner_style(rule: Rule, partner: nn.Module) -> str | None:
    if rule.style_name in COLWISE and isinstance(partner, nn.Embedding):
        return "embedding_rowwise"  # (V, D): the head's output features are the embedding's rows
    if rule.style_name == "embedding_rowwise" and isinstance(partner, nn.Linear):
        return "colwise_gather_output"
    return None


def _check_sizes(model: nn.Module, rule: Rule, tp_size: int) -> None:
    """Raise ValueError where `rule` cannot cut its module into `tp_size` equal parts."""
    module, style = rule.module, rule.style
    packed = rule.style_name == "packed_colwise" and rule.parameter is None
    for name, parameter in module._parameters.items() if packed else ():
        # transformers cuts a bias in one piece, and its weight projection by projection: they would not be of the same rows.
        if parameter is not None and parameter.dim() == 1:
            raise ValueError(
                f"{rule.fqn!r} has the style 'packed_colwise' and a {name}, which would be cut at other rows than its "
                "weight; give it the style 'colwise_gather_output'."
            )
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return
    if not isinstance(module, nn.Linear | nn.Embedding):
        raise ValueError(
            f"{rule.fqn!r} is {a_or_an(module)}; the style {rule.style_name!r} cuts nn.Linear and nn.Embedding."
            " Merge adapters first, or take it out of the plan."
        )
    # (out, in) of a Linear and (V, D) of an Embedding; rowwise cuts an Embedding along its rows.
    dim = int(isinstance(style, RowwiseParallel) != isinstance(module, nn.Embedding))
    size = module.weight.shape[dim]
    if size % tp_size:
        raise ValueError(
            f"{rule.fqn!r} has {size} {'input' if dim else 'output'} features, not divisible by tp={tp_size}; choose a "
            "tp size that divides them, or take the module out of the plan."
        )
    if rule.style_name in ("colwise", "ColwiseParallel") and isinstance(module, nn.Linear):
        _check_heads(model, rule, module, tp_size)


def _check_heads(model: nn.Module, rule: Rule, module: nn.Linear, tp_size: int) -> None:
    """Each rank must get whole heads: a cut through a head computes another attention without any error."""
    parent = model.get_submodule(rule.place.rpartition(".")[0])
    sources = [parent, *([parent.config] if hasattr(parent, "config") and hasattr(parent, "head_dim") else [])]
    for source in sources:
        for name in _HEADS:
            heads = getattr(source, name, None)
            if isinstance(heads, int) and not isinstance(heads, bool) and heads % tp_size:
                raise ValueError(
                    f"{rule.fqn!r} belongs to an attention with {name}={heads}, not divisible by tp={tp_size}: a rank "
                    "would get part of a head. Choose a tp size that divides the numbers of heads."
                )
    head_dim = getattr(parent, "head_dim", None)
    features = module.weight.shape[0]
    if isinstance(head_dim, int) and head_dim > 0 and features % head_dim == 0 and (features // head_dim) % tp_size:
        raise ValueError(
            f"{rule.fqn!r} computes {features // head_dim} heads of {head_dim}, not divisible by tp={tp_size}: a rank "
            "would get part of a head. Choose a tp size that divides the numbers of heads."
        )


# The tensor-parallel styles that a plan may name, as torch's `ParallelStyle` objects.
#
# torch has the two basic cuts; the names are those that Hugging Face models use in their plans, so that a model's own
# plan works as it is. A ``Linear`` weight is (out, in): *colwise* cuts it along dim 0 (each rank computes some output
# features), *rowwise* along dim 1 (each rank sums over some input features, and the sums are reduced).

# Styles that cut output features. Only plain ``colwise`` leaves each rank with its own heads.
COLWISE = frozenset({"colwise", "colwise_gather_output", "colwise_rep"})
ROWWISE = frozenset({"rowwise", "rowwise_split_input", "rowwise_rep"})  # Styles that cut input features.


class Untouched(ParallelStyle):
    """Every rank keeps the whole module and computes the same with it."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return module


class _WithTensors:
    """Takes the place of `module` in its forward, with other tensors in the place of its parameters."""

    def __init__(self, module: nn.Module, tensors: dict[str, Any]) -> None:
        self.module, self.tensors = module, tensors

    def __getattr__(self, name: str) -> Any:
        if name in self.tensors:
            return self.tensors[name]
        method = getattr(type(self.module), name, None)
        # Not a bound method, which Dynamo cannot make.
        return partial(method, self) if isinstance(method, FunctionType) else getattr(self.module, name)


class _OtherTensors(Forward):
    """The forward of a module, computed with `change` of each parameter."""

    def __init__(self, module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__(module)
        self.change = change

    def __call__(self, *args: object, **kwargs: object) -> Any:
        module: Any = self.module
        parameters = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
        used: dict[str, Any] = {name: self.change(parameter) for name, parameter in parameters.items()}
        # Under compile a change of the module would leave a checkpointed layer to eager.
        if torch.compiler.is_compiling() and self.inner is None:
            return type(module).forward(_WithTensors(module, used), *args, **kwargs)
        # A plain tensor may be where a Parameter was while forward runs; both are put back even when recomputation
        # stops early.
        module._parameters.update(used)
        try:
            return self.call(*args, **kwargs)
        finally:
            module._parameters.update(parameters)


class SummedGradients(ParallelStyle):
    """Every rank keeps the whole parameters and uses them on its own part of the activations.

    Each rank's gradient then covers its part only (a norm of its own heads; any norm under sequence parallelism), so it
    is summed over the ranks. The sum is made where the parameter is used, inside autograd, so that it holds under
    FSDP2 too: there, hooks on the parameter never see its gradient.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _OtherTensors(module, partial(_summed, mesh=device_mesh)).put()
        return module


class ReducedOutput(ParallelStyle):
    """The module's output is this rank's term of a sum: reduce it."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def reduce(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
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
        style = copy.copy(self.style)
        if style.should_use_local_tensors(module):  # its own way leaves a checkpointed layer to eager under compile
            style.context_around_forward = lambda *_: nullcontext()
            _OtherTensors(module, _local).put()
        style.install_forward(module, device_mesh)
        return module


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


_IN_PLACE = frozenset({"add_", "sub_", "mul_", "div_"})


def own_outputs(model: nn.Module, modules: Collection[nn.Module]) -> None:
    """Give each of `modules`, which are cut, an output of its own memory where a module around it changes that in place.

    The output of a cut module is a view that must not change (Llama 4 adds its experts to its shared expert).
    """
    chosen = {id(module): module for module in modules}
    for around in model.modules():
        if id(around) in chosen or not _IN_PLACE & names_in(type(around).forward):
            continue
        for module in around.modules():
            if chosen.pop(id(module), None) is not None:
                module.register_forward_hook(_copied)


def _copied(_module: nn.Module, _inputs: Any, output: object) -> Any:
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


def make_style(name: str, config: object = None) -> ParallelStyle | None:
    """The style called `name`, or None where neither we nor the installed transformers know it."""
    return _STYLES[name]() if name in _STYLES else installed_style(name, config)


def installed_style(name: str, config: object) -> InstalledStyle | None:
    """The style of the installed transformers called `name`, or None."""
    style = installed_styles().get(name)
    return None if style is None else InstalledStyle(name, style, config)


def installed_styles() -> Mapping[str, Any]:
    """Adapter to transformers' registry of styles, which is not a documented interface: absent or changed, it is empty.

    A model with a plan has imported transformers already; this never does.
    """
    module, name = PARALLEL_STYLES
    registry: Any = getattr(sys.modules.get(module), name, {})
    wanted = ("shard_param", "install_forward", "validate_param", "should_use_local_tensors", "context_around_forward")
    styles = {name: registry[name] for name in (registry.keys() if hasattr(registry, "keys") else ())}
    return {name: style for name, style in styles.items() if all(hasattr(style, method) for method in wanted)}


def _summed(parameter: Tensor, mesh: DeviceMesh) -> Tensor:
    """`parameter` unchanged, with a gradient that is the sum of all ranks' gradients."""
    if not parameter.requires_grad:
        return parameter
    return DTensor.from_local(parameter, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


# PEFT's LoRA adapters on linears that a tensor-parallel plan cuts: see through their wrapping, and cut them alike.
#
# Cut by columns, ``y = W x + B A x`` has the rows of `B` where it has those of `W`, and `A` is whole. Cut by rows, `A` has
# the columns of `W`, and `B` is whole. The r numbers a token between the two are reduced by themselves. One
# reduction of `y` would do for the output, but the gradient of a whole factor would then be a sum over ranks that
# nothing makes.


_INSIDE = re.compile(r"\.base_layer(?=\.)")


class WholeFactor(ParallelStyle):
    """Every rank keeps the whole matrix `A`, whose product the ranks' parts of `B` read.

    Given a DTensor (a sequence that sequence parallelism has put together), it returns one, so that the gradient of its
    input stays the partial sum that those of cut linears are. That of `A` is summed over the ranks.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _LikeInput(module, device_mesh).put()
        return module


class _LikeInput(Forward):
    """The forward of a linear whose weight every rank of a mesh has whole: its output is a DTensor if its input is."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__(module)
        self.mesh = mesh

    def __call__(self, x: Tensor) -> Tensor:
        if not isinstance(x, DTensor):
            return self.call(x)
        weight: Any = self.module.weight
        return nn.functional.linear(x, DTensor.from_local(weight, self.mesh, [Replicate()], run_check=False))


def plain_names(model: nn.Module) -> Callable[[str], str]:
    """Return a function from a name in `model` to the name without PEFT's wrapping."""
    inside = base_model(model)
    prefix = next((f"{name}." for name, module in model.named_modules() if name and module is inside), "")
    return lambda name: _INSIDE.sub("", name.removeprefix(prefix))


def is_adapted(module: nn.Module) -> bool:
    """Return whether `module` is one that PEFT has put around another."""
    return type(module).__module__.partition(".")[0] == "peft"


def adapter_around(model: nn.Module, fqn: str) -> str | None:
    """Return the name of the adapted module that the module or parameter `fqn` is a part of, if any."""
    while fqn := fqn.rpartition(".")[0]:
        module = model.get_submodule(fqn)
        if is_adapted(module) and hasattr(module, "base_layer"):
            return fqn
    return None


def check_tuners(model: nn.Module) -> None:
    """Raise ValueError where PEFT has changed `model` by something else than LoRA."""
    configs = getattr(model, "peft_config", None)
    for name, config in configs.items() if isinstance(configs, dict) else ():
        kind = getattr(config, "peft_type", None)
        kind = str(getattr(kind, "value", kind))
        if kind != "LORA":
            raise ValueError(
                f"This {type(model).__name__} has {name!r}, tuned by {kind}, and tp knows LoRA alone: it is not known "
                "which part of the rest a rank reads. Use peft.LoraConfig, merge it first (merge_and_unload), or set "
                "tp=1."
            )


def factors(fqn: str, module: Any, style_name: str, by_columns: bool) -> Iterator[tuple[str, nn.Module, str]]:
    """The linears in the LoRA layer `module`, by name, with the names of their styles; '' is `WholeFactor`.

    `check_linear` has passed `module`.

    Args:
        fqn: the name of `module`.
        style_name: the style that the plan gives to the linear.
        by_columns: whether that cuts output features; False: input features.
    """
    yield f"{fqn}.base_layer", module.base_layer, style_name
    for name in module.lora_A:
        yield f"{fqn}.lora_A.{name}", module.lora_A[name], "" if by_columns else style_name
        yield f"{fqn}.lora_B.{name}", module.lora_B[name], style_name if by_columns else "replicate"


def check_linear(fqn: str, module: Any) -> None:
    """Raise ValueError unless `module` is plain LoRA on an unmerged `torch.nn.Linear` of floating-point weights."""
    base = getattr(module, "base_layer", None)
    pairs = [getattr(module, name, None) for name in ("lora_A", "lora_B")]
    if base is None or not all(isinstance(each, nn.ModuleDict) for each in pairs):
        _refuse_adapted(fqn, f"{type(module).__name__} is not plain LoRA")
    if not isinstance(base, nn.Linear) or not base.weight.is_floating_point():
        _refuse_adapted(
            fqn,
            f"the adapter is on {a_or_an(base)}, and only that on an nn.Linear of floating-point weights can be cut",
        )
    if kinds := sorted({type(each).__name__ for each in getattr(module, "lora_variant", {}).values()}):
        _refuse_adapted(fqn, f"{', '.join(kinds)} (DoRA or another variant) reads the whole weight")
    if len(getattr(module, "lora_magnitude_vector", None) or ()):
        _refuse_adapted(fqn, "DoRA reads the norms of the whole weight")
    if not all(isinstance(each, nn.Linear) for pair in pairs for each in pair.values()):  # type: ignore[union-attr]
        _refuse_adapted(fqn, "its factors are not nn.Linear")
    if getattr(module, "merged", False):
        _refuse_adapted(fqn, "its adapters are merged, and a part of the weight could not be unmerged")


def _refuse_adapted(fqn: str, reason: str) -> None:
    """Raise ValueError that `fqn` cannot be cut."""
    raise ValueError(
        f"The tensor-parallel plan cuts {fqn!r}, which PEFT has adapted: {reason}. Leave it out of the adapter's targets, "
        "merge the adapters (merge_and_unload), or take it out of the plan (TensorParallel(plan=...))."
    )
