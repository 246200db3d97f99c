"""`resolve`: whatever the caller said, as a list of `CheckpointSpec`. Nothing here changes the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from nemo_like.activation_checkpointing import kv_sharing
from nemo_like.activation_checkpointing.apply import refuse_checkpointed
from nemo_like.activation_checkpointing.plan import Plan, plan_specs
from nemo_like.activation_checkpointing.policy import FullPolicy, Policy, SelectivePolicy, named_ops_policy
from nemo_like.activation_checkpointing.spec import CheckpointSpec, How, segments_of
from nemo_like.activation_checkpointing.submodules import submodules_to_checkpoint
from nemo_like.cells import timestep_specs
from nemo_like.choice import choose_layers
from nemo_like.distributed.launch import pick_device_type
from nemo_like.job import Job
from nemo_like.layers import Layer, LayersNotFoundError, find_layers, is_frozen, select_layers
from nemo_like.log import is_rank_zero, logger, warn_once
from nemo_like.module_tree import bare, join
from nemo_like.offload import placed_on_host
from nemo_like.options import CheckpointConfig, MemoryBudget, parse_ac
from nemo_like.options.words import write_bytes
from nemo_like.profiling import MemoryProfiler


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
        found = find_layers(model, job.layers)
    except LayersNotFoundError:
        if not cells or job.layers is not None:
            raise
        return (), ()  # a recurrent model has one cell, called again and again
    return found, select_layers(found, job.ac_scope)  # a wrong scope is an error also where nothing is checkpointed


def resolve(
    model: nn.Module, job: Job, found: Sequence[Layer], chosen: Sequence[Layer], sample_input: Any = None
) -> tuple[Job, list[CheckpointSpec]]:
    """Return the job, its budget as a plan, and the regions its ``ac`` means on `model`, which is not changed.

    A profile is measured here, a budget planned for.

    Args:
        model: the bare model.
        job: on its ranks (`Job.world_size`).
        found, chosen: from `layers_for`; all of `found` are offloaded, `chosen` are checkpointed.
        sample_input: one batch, for a budget or a config that measures first.

    Raises:
        ValueError, TypeError: a budget without a sample input or one that cannot be met (`BudgetError`), a plan for another
            model, layers that share keys and values or a model that is sharded where a plan cannot, a config that does not
            fit the model.
    """
    if isinstance(job.ac, MemoryBudget):
        _check_budget(model, job.ac, sample_input)
        from nemo_like.planning.planner import plan_for  # only a budget asks the planner

        plan = plan_for(model, replace(job, layers=tuple(layer.fqn for layer in chosen)), sample_input=sample_input)
        if is_rank_zero():
            logger.info(
                f"ac={plan.budget!r}: predicted peak {write_bytes(plan.peak_bytes)} per rank, replay "
                f"{plan.replay_share:.0%} of a forward pass."
            )
        job = replace(job, ac=plan)
    if isinstance(job.ac, Plan):
        _refuse_plan_through_cache(model, job.ac)
        specs = plan_specs(model, job.ac, pick_device_type())
        _refuse_partial(job.ac, chosen)
    else:
        assert isinstance(job.ac, CheckpointConfig)
        specs = config_specs(model, chosen, job.ac, _measured_bytes(model, job.ac, sample_input))
    if job.offload.mode != "none":
        specs = placed_on_host(specs, [layer.fqn for layer in found], job.offload, compile=job.compile is not None)
    return job, specs


def _check_budget(model: nn.Module, budget: MemoryBudget, sample_input: Any) -> None:
    _refuse_plan_through_cache(model, budget)
    if sample_input is None:
        raise ValueError(
            f"ac is {budget}, a memory budget: bytes depend on batch and sequence. Pass sample_input=, what one step of "
            "one rank gives to the model, such as {'input_ids': ..., 'labels': ...}."
        )
    if (sharded := _sharded(model)) is not None:
        raise ValueError(
            f"ac is {budget}, and {sharded} is sharded by fully_shard already: a plan is traced on whole weights. Use a "
            "mode such as 'selective', or a plan that was made before that part was sharded."
        )


def config_specs(
    model: nn.Module,
    layers: Sequence[Layer],
    config: CheckpointConfig,
    saved_bytes: Mapping[str, int] | None = None,
) -> list[CheckpointSpec]:
    """The regions that a config means on the layers in scope.

    `saved_bytes`, measured activation bytes by layer name, decide what is above the config's threshold and balance
    the segments of ``"sequential"``.
    """
    if config.mode == "none":
        return []
    if config.snn_timestep_checkpoint:
        return timestep_specs(model, config)
    narrowed = choose_layers(model, layers, config, saved_bytes)
    if not narrowed:
        return []
    names = [layer.fqn for layer in narrowed]
    how = How(policy=_policy(config), use_reentrant=config.use_reentrant, preserve_rng_state=config.preserve_rng_state)
    through_cache = kv_sharing.needs_cache(model)
    if through_cache and config.mode != "submodule":
        warn_once(
            f"ac={config.mode!r} was asked for, but this model's layers share keys and values through the cache, which a "
            "replayed attention would write twice: checkpointing MLPs and norms only."
        )
        how["policy"] = FullPolicy()
    if through_cache or config.mode == "submodule":
        names = _submodule_names(narrowed, skip_attention=through_cache)
    elif config.mode == "sequential":
        return [spec for stack in _stacks(narrowed) for spec in _segments(stack, config, saved_bytes, how)]
    return [CheckpointSpec((name,), **how) for name in names]


def _stacks(layers: Sequence[Layer]) -> list[Sequence[Layer]]:
    """The layers that segments are made of: those of groups in which something trains, and those of frozen towers.

    Apart, because a frozen tower mostly saves nothing, and would take segments that the other layers need.
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


def _policy(config: CheckpointConfig) -> Policy:
    """What the config keeps inside a region."""
    if config.policy is not None:
        return config.policy
    if config.mode != "selective":
        return FullPolicy()
    if config.ops_to_save is None:
        return SelectivePolicy()
    return named_ops_policy(config.ops_to_save)


def _submodule_names(layers: Sequence[Layer], *, skip_attention: bool) -> list[str]:
    """Norms, attentions and MLPs of the layers, each module once; layers without any are left out (said once).

    Raises:
        ValueError: no layer has any.
    """
    inside = {layer: submodules_to_checkpoint(layer.module) for layer in layers}
    without = [type(bare(layer.module)).__name__ for layer, names in inside.items() if not names]
    if len(without) == len(layers):
        raise ValueError(
            f"A {without[0]} has no MLP, attention or norm sub-module to checkpoint; use ac='full' or 'selective', which "
            "replay whole layers."
        )
    if without:
        warn_once(
            f"ac='submodule' was asked for; {', '.join(dict.fromkeys(without))} has no MLP, attention or norm sub-module "
            "and keeps its activations."
        )
    names: dict[nn.Module, str] = {}
    for layer in layers:
        for name in submodules_to_checkpoint(layer.module, skip_attention=skip_attention):
            names.setdefault(bare(layer.module).get_submodule(name), join(layer.fqn, name))
    return list(names.values())


def _refuse_plan_through_cache(model: nn.Module, asked: MemoryBudget | Plan) -> None:
    if kv_sharing.needs_cache(model):
        what = f"ac is {asked}" if isinstance(asked, MemoryBudget) else "ac is a plan"
        raise ValueError(
            f"{what}, but this model's layers share keys and values through the cache, which a replay would write "
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
    """The name of a module that ``fully_shard`` was called on, if there is one."""
    return next((name for name, module in model.named_modules() if isinstance(module, FSDPModule)), None)


def _measured_bytes(model: nn.Module, config: CheckpointConfig, sample_input: Any) -> dict[str, int] | None:
    """Activation bytes by layer name, where the config asks for a measurement and there is an input for it."""
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
