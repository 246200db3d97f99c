"""`resolve`: whatever the caller wrote, as a list of `CheckpointSpec`. Nothing here changes the model."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from nemo_like._util.log import is_rank_zero, logger, say_once, warn_once
from nemo_like._util.module_tree import bare_modules, bare_name, glob_to_regex, join, registered
from nemo_like._util.words import write_bytes
from nemo_like.activation_checkpointing import kv_sharing
from nemo_like.activation_checkpointing.apply import refuse_checkpointed
from nemo_like.activation_checkpointing.names import NamedPolicy, check_lists, regions_of
from nemo_like.activation_checkpointing.plan import Plan, plan_specs
from nemo_like.activation_checkpointing.policy import FullPolicy, Policy
from nemo_like.activation_checkpointing.spec import (
    CheckpointSpec,
    How,
    chunks_of_calls,
    policy_of,
    segments_of,
    submodule_lists,
)
from nemo_like.distributed.context import check_context_parallel
from nemo_like.distributed.expert.split_experts import Experts, check_experts
from nemo_like.distributed.launch import local_device, pick_device_type
from nemo_like.distributed.pipeline.cut import STAGE_MARK, call_of
from nemo_like.distributed.tensor.apply import check_packed_weights
from nemo_like.job import Job
from nemo_like.layers import Layer, LayersNotFoundError, find_layers, is_frozen, select_layers
from nemo_like.layers.groups import group_of
from nemo_like.losses.model_loss import check_head
from nemo_like.offload import place_decisions, placed_on_host
from nemo_like.options import CheckpointConfig, MemoryBudget, NamedList, NamedLists, did_you_mean, parse_ac
from nemo_like.profiling import MemoryProfiler
from nemo_like.profiling.profile_report import MB


def layers_for(model: nn.Module, job: Job) -> tuple[tuple[Layer, ...], tuple[Layer, ...]]:
    """Return every repeated layer of `model`, and those that are in the job's scope.

    Frozen layers are among them: whether a gradient flows through one is known when it is called.

    Raises:
        ValueError: no layers, an unknown scope or one that selects nothing, a model that is checkpointed.
    """
    ac = job.ac
    refuse_checkpointed(model, replays=not (isinstance(ac, CheckpointConfig) and (not ac.enabled or ac.mode == "none")))
    if isinstance(ac, CheckpointConfig) and not ac.enabled and ac not in (CheckpointConfig(), parse_ac("none")):
        warn_once(
            "A CheckpointConfig with settings was given, but its field enabled is False, the default: nothing is "
            "checkpointed. Set enabled=True."
        )
    cells = isinstance(ac, CheckpointConfig) and ac.enabled and ac.snn_timestep_checkpoint
    try:
        layers_found = find_layers(model, job.layers)
    except LayersNotFoundError:
        if not cells or job.layers is not None:
            raise
        return (), ()  # a recurrent model has one cell, called again and again
    # A wrong scope is an error also where nothing is checkpointed.
    return layers_found, select_layers(layers_found, job.ac_scope)


def place_of(job: Job, mesh: DeviceMesh | None) -> torch.device:
    """Return the device of this rank."""
    return local_device(None if mesh is None else mesh.device_type) if job.device is None else job.device


def check_axes(
    model: nn.Module, job: Job, mesh: DeviceMesh | None, layers: Sequence[Layer], sample_input: object
) -> tuple[Experts, ...]:
    """Check that the axes of `job` can divide `model`, a whole one or a stage, and return the experts to split.

    Args:
        mesh: the ranks; None: one that trains by itself.
        layers: from `layers_for`.
        sample_input: one batch; a split copy of a whole model is run on it.

    Raises:
        ValueError: they cannot, or the model has no head for a chunked loss.
    """
    experts: tuple[Experts, ...] = ()
    if job.loss is not None:
        check_head(model)
    if job.tp.asynchronous and (place := place_of(job, mesh)).type != "cuda":
        raise ValueError(
            f"TensorParallel.asynchronous is True on {place.type!r}: matmuls with collectives inside run on GPUs that "
            "NVLink joins. Use asynchronous=False here."
        )
    if mesh is not None and job.fsdp is not None and job.ep.size > 1:
        experts = check_experts(model, mesh, job.ep, may_lack=job.pp.size == 1)
    whole = [expert.fqn for expert in experts]
    if mesh is not None and job.fsdp is not None and job.tp.size > 1:
        check_packed_weights(model, mesh, job.tp.plan, whole, job.fsdp)
    if job.cp.size > 1:
        check_context_parallel(model, job.cp, layers, call_of(model))
    if (job.cp.size > 1 or job.tp.size > 1) and not hasattr(model, STAGE_MARK):  # stages are cut from a tried model
        from nemo_like.distributed.first_rank import try_split  # which no other job needs

        try_split(model, job, layers, whole, sample_input)
    return experts


def resolve(
    model: nn.Module, job: Job, layers: Sequence[Layer], chosen: Sequence[Layer], sample_input: object = None
) -> tuple[Job, list[CheckpointSpec]]:
    """Return the job, its budget as a plan, and the regions its ``ac`` means on `model`, which is not changed.

    A profile is measured here, a budget planned for.

    Args:
        model: the original model.
        job: on its ranks (`Job.world_size`).
        layers, chosen: from `layers_for`; all of `layers` are offloaded, `chosen` are checkpointed.
        sample_input: one batch, for a budget or a config that measures first.

    Raises:
        ValueError, TypeError: a budget without a sample input or one that cannot be met (`BudgetError`); a plan for another
            model; a plan where layers share keys and values or the model is sharded, and a plan cannot be used; a config
            that does not fit the model.
    """
    # Graphs in the making have few names; a plan finds the others.
    planned = MemoryBudget if job.compile is None or sample_input is None else MemoryBudget | NamedLists
    if isinstance(job.ac, planned):
        _check_budget(model, job.ac, sample_input)
        from nemo_like.planning.planner import plan_for  # only a budget uses the planner

        plan = plan_for(model, replace(job, layers=tuple(layer.fqn for layer in chosen)), sample_input=sample_input)
        if is_rank_zero():
            logger.info(
                f"ac={plan.budget!r}: predicted peak {write_bytes(plan.peak_bytes)} per rank, recompute "
                f"{plan.recompute_share:.0%} of a forward pass."
            )
        job = replace(job, ac=plan)
    if isinstance(job.ac, NamedLists):
        _refuse_plan_through_cache(model, job.ac)
        specs = named_specs(chosen, job.ac, job.compile, part=hasattr(model, STAGE_MARK))
    elif isinstance(job.ac, Plan):
        _refuse_plan_through_cache(model, job.ac)
        specs = plan_specs(model, job.ac, pick_device_type())
        _refuse_partial(job.ac, chosen)
    else:
        assert isinstance(job.ac, CheckpointConfig)
        specs = config_specs(model, chosen, job.ac, _measured_bytes(model, job.ac, sample_input))
    names = [layer.fqn for layer in layers]
    specs = place_decisions(specs, names)
    return job, specs if job.offload.mode == "none" else placed_on_host(specs, names, job.offload)


def _check_budget(model: nn.Module, budget: MemoryBudget | NamedLists, sample_input: object) -> None:
    _refuse_plan_through_cache(model, budget)
    if sample_input is None:
        raise ValueError(
            f"ac is {budget}, a memory budget: bytes depend on batch and sequence. Pass sample_input=, the model's "
            "arguments in one step of one rank, such as {'input_ids': ..., 'labels': ...}."
        )
    if (sharded := _sharded(model)) is not None:
        raise ValueError(
            f"ac is {budget}, and {sharded or 'the model'} is sharded by fully_shard already: a plan is traced on whole "
            "weights. Use a mode such as 'selective', or a plan that was made before that part was sharded."
        )


def config_specs(
    model: nn.Module,
    layers: Sequence[Layer],
    config: CheckpointConfig,
    saved_bytes: Mapping[str, int] | None = None,
) -> list[CheckpointSpec]:
    """The regions that a config means on the layers in scope.

    `saved_bytes`, measured activation bytes by layer name, decide which layers are above the config's threshold and
    balance the segments of ``"sequential"``.
    """
    if config.mode == "none":
        return []
    if config.snn_timestep_checkpoint:
        return timestep_specs(model, config)
    narrowed = choose_layers(model, layers, config, saved_bytes)
    if not narrowed:
        return []
    names = [layer.fqn for layer in narrowed]
    how = How(
        policy=policy_of(config), use_reentrant=config.use_reentrant, preserve_rng_state=config.preserve_rng_state
    )
    through_cache = kv_sharing.needs_cache(model)
    if through_cache and config.mode != "submodule":
        warn_once(
            f"ac={config.mode!r} was asked for, but this model's layers share keys and values through the cache, which a "
            "recomputed attention would write twice: checkpointing MLPs and norms only."
        )
        how["policy"] = FullPolicy()
    if through_cache or config.mode == "submodule":
        modules = {layer.fqn: layer.module for layer in narrowed}
        names = [name for _, _, name in _regions(modules, submodule_lists(modules, skip_attention=through_cache))]
    elif config.mode == "sequential":
        return [spec for stack in _stacks(narrowed) for spec in _segments(stack, config, saved_bytes, how)]
    return [CheckpointSpec((name,), **how) for name in names]


def named_specs(
    layers: Sequence[Layer], lists: NamedLists, compiler: str | None, *, part: bool = False
) -> list[CheckpointSpec]:
    """The regions that lists of names mean on the layers in scope, each by the first list that has it.

    `part`: a stage of a model whose lists were checked.

    Raises:
        ValueError: as `check_lists`.
    """
    modules = {layer.fqn: layer.module for layer in layers}
    # Dynamo compiles a layer again for each object that it meets; else each region has one, which learns of it.
    policies: dict[tuple[NamedList, str], Policy] = {}
    specs = list[CheckpointSpec]()
    for names, fqn, region in _regions(modules, lists, compiler, part=part):
        key = names, "" if compiler else region
        if key not in policies:
            policies[key] = NamedPolicy(names, compiled=compiler is not None) if names.names else FullPolicy()
        specs.append(CheckpointSpec((region,), policies[key], layer=fqn))
    return specs


def _regions(
    layers: Mapping[str, nn.Module], lists: NamedLists, compiler: str | None = None, *, part: bool = False
) -> Iterator[tuple[NamedList, str, str]]:
    """Yield each region with its list and the name of its layer; a module that several layers have is one region."""
    seen: set[nn.Module] = set()
    for names, fqns in check_lists(layers, lists, compiler, part=part).items():
        for fqn in fqns:
            inside = dict(bare_modules(layers[fqn]))
            for path in regions_of(names, layers[fqn]):
                if inside[path] not in seen:
                    seen.add(inside[path])
                    yield names, fqn, join(fqn, path) if path else fqn


def _stacks(layers: Sequence[Layer]) -> list[Sequence[Layer]]:
    """The layers that segments are made of: those of groups in which something trains, and those of frozen encoders.

    Apart, because a frozen encoder mostly saves nothing, and would take segments that the other layers need.
    """
    training = {layer.group for layer in layers if not is_frozen(layer.module)}
    stacks = [[layer for layer in layers if (layer.group in training) is trains] for trains in (True, False)]
    return [stack for stack in stacks if stack]


def _segments(
    layers: Sequence[Layer], config: CheckpointConfig, saved_bytes: Mapping[str, int] | None, how: How
) -> list[CheckpointSpec]:
    names = [layer.fqn for layer in layers]
    count = config.sequential_segments
    if count is not None and all(is_frozen(layer.module) for layer in layers):
        count = min(count, len(names))  # it was asked for with the layers that train in mind
    weights = None if saved_bytes is None else [saved_bytes.get(name, 0) for name in names]
    return segments_of(names, count, weights, **how)


def _refuse_plan_through_cache(model: nn.Module, asked: MemoryBudget | NamedLists | Plan) -> None:
    if kv_sharing.needs_cache(model):
        what = "ac is a plan" if isinstance(asked, Plan) else f"ac is {asked}"
        raise ValueError(
            f"{what}, but this model's layers share keys and values through the cache, which recomputation would write "
            "twice, so whole layers can't follow a plan. Use ac='submodule'."
        )


def _refuse_partial(plan: Plan, chosen: Sequence[Layer]) -> None:
    """Raise ValueError where layers in scope are not in the plan: they would keep all that they save."""
    planned = {layer.fqn for layer in plan.layers}
    missing = [layer.fqn for layer in chosen if layer.fqn not in planned]
    if missing:
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        raise ValueError(
            f"The plan has {len(planned)} layers, and this model has {', '.join(missing[:4])}{more} besides, which did not"
            " run with the sample input of the plan, or are new. Make the plan with a sample that goes through all layers, "
            "or pass layers= with the planned ones to leave the others alone. Where chance decides how many layers run, use "
            "a mode, such as 'selective'."
        )


def _sharded(model: nn.Module) -> str | None:
    return next((name for name, module in model.named_modules() if isinstance(module, FSDPModule)), None)


def _measured_bytes(model: nn.Module, config: CheckpointConfig, sample_input: object) -> dict[str, int] | None:
    """Activation bytes by layer name, where the config requests a measurement and there is an input for it."""
    wanted = config.profile_before_apply or config.mode == "sequential"
    if config.mode == "none" or not wanted or sample_input is None:
        return None
    if any(parameter.is_meta for parameter in model.parameters()):
        warn_once(
            "A measurement of each layer was asked for, but the model is on the meta device and cannot run: all layers "
            "count alike. Pass a model with weights, or no sample_input."
        )
        return None
    if (sharded := _sharded(model)) is not None:
        warn_once(
            f"A measurement of each layer was asked for, but {sharded} is sharded already, and the model cannot run before "
            "the rest of it is: all layers count alike."
        )
        return None
    report = MemoryProfiler(model).profile(sample_input, config.profile_num_runs)
    return {row.name: row.activation_bytes for row in report}


# Modules that are called once a timestep: which of a model's they are, as regions of several calls.


def timestep_specs(model: nn.Module, config: CheckpointConfig) -> list[CheckpointSpec]:
    """The regions that the ``snn_*`` fields mean, in the model's order.

    They are of the cells that the model's own code calls once a timestep: the modules of `layer_classes`, or matched by
    `include_patterns`, or PyTorch's own (`nn.LSTMCell` and so on).

    Raises:
        ValueError: there is no such module; the message states how to name it.
    """
    modules = [(name, module) for name, module in bare_modules(model) if name]
    if config.layer_classes is not None:
        cells = [layer.fqn for layer in layers_of_classes(model, config.layer_classes)]
    elif config.include_patterns:
        cells = [layer.fqn for layer in find_layers(model, config.include_patterns)]
    else:
        cells = [name for name, module in modules if isinstance(module, nn.RNNCellBase)]
    if isinstance(model, nn.RNNCellBase):
        raise ValueError(
            f"The model is the {type(model).__name__} itself, which cannot be wrapped in place: hand in the module that "
            "calls it once a timestep, or use nemo_like.checkpoint_timesteps."
        )
    if not cells:
        raise ValueError(
            f"CheckpointConfig.snn_timestep_checkpoint is True, and the {type(model).__name__} has no nn.RNNCellBase. "
            "Name the class of the module that is called in each timestep in layer_classes: "
            f"{', '.join(class_names(model)[:12])}."
        )
    return chunks_of_calls([name for name, _ in modules if name in cells], config.snn_chunk_size)


# Which of a model's layers a `CheckpointConfig` means: by class, by name pattern, by measured bytes.


def choose_layers(
    model: nn.Module,
    candidates: Iterable[Layer],
    config: CheckpointConfig,
    saved_bytes: Mapping[str, int] | None = None,
) -> tuple[Layer, ...]:
    """The layers that `config` wants checkpointed, in the model's order.

    `config.layer_classes` replaces the candidates by the modules of these classes in or among them. Then a layer is
    in if an include pattern matches its name. It is out if an exclude pattern matches it or a module that contains it.
    Otherwise it is in if it saves more than `config.memory_threshold_mb`, or if nothing was measured.

    Args:
        model: the model that holds them; not changed.
        candidates: the layers in scope.
        config: its patterns are globs over the names of the original model: ``*`` within a dotted segment, ``**`` across.
        saved_bytes: measured activation bytes by layer name; None: not measured.

    Raises:
        ValueError: a class or pattern matches nothing; the message names the field and the names there are.
    """
    layers = tuple(candidates)
    if config.layer_classes is not None:
        layers = _of_classes_within(model, layers, config.layer_classes)
    modules = [name for name, _ in bare_modules(model) if name]
    included = _matching("include_patterns", config.include_patterns, [layer.fqn for layer in layers])
    excluded = _matching("exclude_patterns", config.exclude_patterns, modules)
    measured = config.profile_before_apply and saved_bytes is not None
    if config.profile_before_apply and saved_bytes is None:
        warn_once(
            "CheckpointConfig.profile_before_apply requests a measurement, but there is neither a profile nor a sample "
            "input: memory_threshold_mb is not used, and every layer that no pattern excludes is checkpointed. Pass a "
            "profile, or set profile_before_apply=False."
        )
    chosen = tuple(
        layer
        for layer in layers
        if layer.fqn in included
        or (
            not _is_within(layer.fqn, excluded)
            and (not measured or (saved_bytes or {}).get(layer.fqn, 0) > config.memory_threshold_mb * MB)
        )
    )
    if not chosen:
        say_once(_nothing_chosen(layers, config, saved_bytes if measured else None))
    return chosen


def layers_of_classes(model: nn.Module, classes: Sequence[str]) -> tuple[Layer, ...]:
    """The modules of `model` whose class has one of these names; of nested ones the outermost."""
    layers: list[Layer] = []
    for name, module in bare_modules(model):
        inside_another = any(name.startswith(f"{layer.fqn}.") for layer in layers)
        if name and type(module).__name__ in classes and not inside_another:
            layers.append(Layer(name, registered(model, name), group_of(model, name)))
    return tuple(layers)


def class_names(model: nn.Module) -> list[str]:
    """The class names of the modules in `model`, those that occur most often first."""
    counts = Counter(type(module).__name__ for name, module in bare_modules(model) if name)
    return [kind for kind, _ in counts.most_common()]


def _of_classes_within(model: nn.Module, scope: Sequence[Layer], classes: Sequence[str]) -> tuple[Layer, ...]:
    matches = layers_of_classes(model, classes)
    names = {layer.fqn for layer in scope}
    within = tuple(match for match in matches if _is_within(match.fqn, names))
    if not within:
        known = class_names(model)
        why = "only outside the layers in scope" if matches else "nowhere in the model"
        raise ValueError(
            f"CheckpointConfig.layer_classes is {list(classes)}, and such modules are {why}, which has "
            f"{', '.join(known[:12])}.{did_you_mean(classes[0], known) if classes else ''}"
        )
    return within


def _matching(field: str, patterns: Sequence[str], names: Sequence[str]) -> set[str]:
    """The `names` that a pattern matches; every pattern must match one."""
    matched: set[str] = set()
    for pattern in patterns:
        regex = glob_to_regex(bare_name(pattern))
        hits = {name for name in names if regex.fullmatch(name)}
        if not hits:
            shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
            raise ValueError(
                f"CheckpointConfig.{field} holds {pattern!r}, which matches no layer; '*' stays within one dotted "
                f"segment, '**' crosses them. There are: {shown}.{did_you_mean(pattern, names)}"
            )
        matched |= hits
    return matched


def _is_within(name: str, modules: set[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _nothing_chosen(layers: Sequence[Layer], config: CheckpointConfig, saved: Mapping[str, int] | None) -> str:
    if saved is None:
        return f"CheckpointConfig.exclude_patterns leaves none of the {len(layers)} layers to checkpoint."
    largest = max((saved.get(layer.fqn, 0) for layer in layers), default=0)
    return (
        f"No layer saves more than memory_threshold_mb={config.memory_threshold_mb:g} MB (the largest: "
        f"{largest / MB:.3f} MB), so nothing is checkpointed."
    )
