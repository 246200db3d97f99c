"""What ``ac=`` asks for on a given model: read and checked first, carried out later."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from nemo_like.activation_checkpointing import kv_sharing
from nemo_like.activation_checkpointing.policy import FullPolicy, Policy
from nemo_like.activation_checkpointing.regions import SELECTIVE_AC_WRAPPER_FLAG, CheckpointWrapper
from nemo_like.checkpointing import checkpoint_found, parse_checkpointing, refuse_checkpointed
from nemo_like.choice import choose_layers
from nemo_like.layers import Layer, find_layers, select_layers
from nemo_like.log import is_rank_zero, logger, warn_once
from nemo_like.options import CheckpointConfig, MemoryBudget, normalise, parse_ac
from nemo_like.planning.apply import apply_plan
from nemo_like.planning.plan import Plan
from nemo_like.planning.planner import plan_for
from nemo_like.profiling import MemoryProfiler


@dataclass(frozen=True)
class CheckpointRequest:
    """A checked ``ac=``: exactly one of `config`, `budget` and `plan` says what to do."""

    found: tuple[Layer, ...]
    """Every repeated layer of the model."""
    chosen: tuple[Layer, ...]
    """Those in scope in which something trains; all in scope where nothing is to be checkpointed."""
    sample_input: Any = None
    config: CheckpointConfig | None = None
    policy: Policy | None = None
    budget: MemoryBudget | str | None = None
    plan: Plan | None = None
    saved_bytes: dict[str, int] | None = None
    """Measured activation bytes by layer name, once settled."""

    def settle(self, model: nn.Module, planning: dict[str, Any] | None = None) -> CheckpointRequest:
        """This request with all that has to be found out by running or tracing `model`, which is not changed.

        `planning` is what `plan_for` needs to know besides. Raises what a bad sample input or budget raises.
        """
        if self.config is not None:
            return replace(self, saved_bytes=self._measured(model))
        if self.budget is None:
            return self
        names = [layer.fqn for layer in self.chosen]
        plan = plan_for(model, self.budget, self.sample_input, layers=names, **(planning or {}))
        if is_rank_zero():
            logger.info(
                f"ac={plan.budget!r}: predicted peak {plan.peak_bytes / 2**30:.2f} GiB per rank, replay "
                f"{plan.replay_share:.0%} of a forward pass."
            )
        return replace(self, plan=plan, budget=None)

    def carry_out(self, model: nn.Module, *, compile: bool = False) -> None:
        """Checkpoint `model`, the one that this settled request was made for, in place."""
        if self.config is not None:
            checkpoint_found(
                model, self.chosen, self.config, self.policy, compile=compile, saved_bytes=self.saved_bytes
            )
            return
        assert self.plan is not None, "settle() comes first"
        apply_plan(model, self.plan)
        for module in model.modules():
            if isinstance(module, CheckpointWrapper) and not isinstance(module.policy, FullPolicy):
                setattr(module, SELECTIVE_AC_WRAPPER_FLAG, True)

    def _measured(self, model: nn.Module) -> dict[str, int] | None:
        """Activation bytes by layer name, where the config asks for a measurement and there is an input for it."""
        config = self.config
        assert config is not None
        wanted = config.profile_before_apply or config.mode == "sequential"
        if config.mode == "none" or not wanted or self.sample_input is None:
            return None
        if any(parameter.is_meta for parameter in model.parameters()):
            warn_once(
                "A measurement of each layer was asked for, but the model is on the meta device and cannot run: all layers "
                "count alike. Pass a model with weights, or no sample_input."
            )
            return None
        report = MemoryProfiler(model).profile(self.sample_input, config.profile_num_runs)
        return {row.name: row.activation_bytes for row in report}


def read_checkpointing(
    model: nn.Module,
    ac: Any,
    scope: str | Iterable[str],
    layers: Iterable[str | nn.Module] | None,
    sample_input: Any,
) -> CheckpointRequest:
    """Check ``ac=`` against `model`, which is not changed.

    Raises:
        ValueError, TypeError: an unknown mode or scope, a budget without a sample input, no layers, a frozen or already
            checkpointed model, a plan for another model, layers that share keys and values where a plan can't.
    """
    refuse_checkpointed(model)
    planned = _read_plan(ac)
    config, policy = (None, None) if planned else parse_checkpointing(ac)
    found = find_layers(model, layers)
    # A wrong scope is an error also where nothing is checkpointed.
    chosen = select_layers(found, scope, drop_frozen=config is None or config.mode != "none")
    if config is not None:
        if config.mode != "none":
            choose_layers(model, chosen, config, None if sample_input is None else {})
        return CheckpointRequest(found, chosen, sample_input, config, policy)
    if kv_sharing.has_kv_sharing(model) and not kv_sharing.shares_states_explicitly(layer.module for layer in chosen):
        raise ValueError(
            f"ac is {ac!r}, but this model's layers share keys and values through the cache, which a replay would write "
            "twice, so whole layers can't follow a plan. Use ac='submodule'."
        )
    if isinstance(ac, Plan):
        ac.check(model)
        _refuse_partial(ac, chosen)
        return CheckpointRequest(found, chosen, plan=ac)
    if sample_input is None:
        raise ValueError(
            f"ac is {ac!r}, a memory budget: bytes depend on batch and sequence. Pass sample_input=, what one step of one "
            "rank gives to the model, such as {'input_ids': ..., 'labels': ...}."
        )
    return CheckpointRequest(found, chosen, sample_input, budget=ac)


def _refuse_partial(plan: Plan, chosen: tuple[Layer, ...]) -> None:
    """Raise ValueError where layers in scope are not in the plan: they would keep all that they save."""
    planned = {layer.fqn for layer in plan.layers}
    missing = [layer.fqn for layer in chosen if layer.fqn not in planned]
    if missing:
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        raise ValueError(
            f"The plan has {len(planned)} layers, and this model has {', '.join(missing[:4])}{more} besides, which nobody "
            "planned. Make the plan again for this model, or pass layers= with the planned ones to leave the others alone."
        )


def _read_plan(ac: Any) -> bool:
    """Whether `ac` is something for the planner."""
    if isinstance(ac, Plan | MemoryBudget):
        return True
    if not isinstance(ac, str):
        return False
    return normalise(ac) == "auto" or isinstance(parse_ac(ac), MemoryBudget)
