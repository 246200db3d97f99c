"""`plan_for`: from a model, a budget and a sample input to a plan."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Unpack

import torch
from torch import nn

from nemo_like._util.extras import MissingExtraError, require
from nemo_like._util.log import warn_once
from nemo_like._util.module_tree import bare, check_model
from nemo_like._util.tensors import describe, tensors_in
from nemo_like.activation_checkpointing.apply import apply_specs
from nemo_like.activation_checkpointing.engine.handles import RegionError, Transfer
from nemo_like.activation_checkpointing.engine.module_state import copied_in_forward
from nemo_like.activation_checkpointing.kv_sharing import has_kv_sharing, shares_states_explicitly
from nemo_like.activation_checkpointing.plan import BudgetError, Plan, plan_specs
from nemo_like.activation_checkpointing.policy import Decision, DecisionTable, FullPolicy, Policy, SelectivePolicy
from nemo_like.activation_checkpointing.spec import KeepRouting
from nemo_like.distributed.context import cut_for_planning
from nemo_like.distributed.context.parts import MasksOfAllLayers
from nemo_like.distributed.expert import Experts
from nemo_like.distributed.expert.find_experts import EACH, find_experts
from nemo_like.distributed.expert.split_experts import has_experts
from nemo_like.distributed.first_rank import first_rank
from nemo_like.distributed.launch import pick_device_type, world_size
from nemo_like.distributed.pipeline.cut import STAGE_MARK, call_of
from nemo_like.fake.model_copy import model_copy
from nemo_like.job import AllKeywords, Job, as_code
from nemo_like.layers import find
from nemo_like.losses.model_loss import check_head, find_head, say_whole_logits
from nemo_like.options import (
    FSDP2,
    ChunkedLoss,
    ExpertParallel,
    MemoryBudget,
    Precision,
    parse_ac,
)
from nemo_like.options.optimizers import OptimizerMemory, optimizer_memory
from nemo_like.planning import solver, within_budget
from nemo_like.planning.block import BlockProblem, Choice
from nemo_like.planning.block_memory import block_memory
from nemo_like.planning.capture import trace_model
from nemo_like.planning.devices import device_of
from nemo_like.planning.float8 import check_float8_plan, convert, of_layers
from nemo_like.planning.halves_memory import halves_memory
from nemo_like.planning.kinds import ModelTrace
from nemo_like.planning.known_blocks import KnownBlocks
from nemo_like.planning.meter import measured_seconds
from nemo_like.planning.outer import OuterMemory, outer_memory
from nemo_like.planning.plan_of_choices import plan_of
from nemo_like.planning.planned_routing import routing_of
from nemo_like.planning.program.loop import peak_of
from nemo_like.planning.program.readers import Peak, StepPoint
from nemo_like.planning.program.records import BlockEvents
from nemo_like.planning.program.step import Around, LayerCall
from nemo_like.planning.reserved import Reserved, StepLogs, replay
from nemo_like.planning.seconds import BlockSeconds, planned_seconds
from nemo_like.planning.sharding import (
    ParameterForms,
    Sharding,
    same_on_all_ranks,
    sharding_of,
    units_for,
)
from nemo_like.planning.stack import ChoiceGroup, Stack
from nemo_like.planning.step_time import exposed_seconds
from nemo_like.precision import effective_matmuls
from nemo_like.torch_compat import under_loss_parallel

MODES = ("none", "full", "selective")
"""Modes that are planned without a budget: those that `Planner.uniform` takes."""
RNG_STATE = torch.get_rng_state().numel()
"""Bytes of the state of the CPU's generator."""


class Planner:
    """One traced model on one device: answers for any number of budgets and modes without tracing again."""

    def __init__(self, model: nn.Module, sample_input: Any, job: Job, *, known: KnownBlocks | None = None) -> None:
        """Trace `model` for `job`; see `plan_for`. `known`: what planners of the model's other parts find, and this one's
        from now on."""
        self._again = lambda other: Planner(model, sample_input, other)
        self.job, self.device, self.host_memory = job, device_of(job), int(job.search.host_memory)
        self.known = KnownBlocks() if known is None else known
        dtype, lower = job.param_dtype, None
        if job.fsdp is None:
            dtype, lower = None, None if dtype is torch.float32 else dtype
        # A DTensor cannot be stood in for by a placeholder.
        self.skip = (_can_skip() if job.search.skip is None else job.search.skip) and job.tp.size == 1
        if job.layers is not None and not hasattr(model, STAGE_MARK):
            # Of the copy, then.
            job = self.job = replace(job, layers=tuple(layer.fqn for layer in find.find_layers(model, job.layers)))
        model = self.model = self.whole = model_copy(model)
        check_float8_plan(job, self.device)
        self.experts: tuple[Experts, ...] = ()
        # A stage of a pipeline may be one without experts.
        ep = ExpertParallel() if hasattr(model, STAGE_MARK) and not has_experts(model, job.ep.plan) else job.ep
        if job.tp.size * ep.size > 1:
            _refuse_lists(model, ep)
            self.model, self.experts = first_rank(model, job.tp, ep)
        if job.loss is not None:
            check_head(self.model)
        self.layers, self.chosen = _found_and_chosen(self.model, job.layers)
        convert(self.layers, job, self.device)
        if has_kv_sharing(model) and not shares_states_explicitly(bare(layer.module) for layer in self.layers):
            raise ValueError(
                f"{type(model).__name__} shares keys and values between layers through its cache, which a replay of "
                "whole layers would write twice, so no plan can be made. Use ac='submodule'."
            )
        self._masks: MasksOfAllLayers | None = None
        with contextlib.ExitStack() as cut:
            if job.cp.size > 1:
                parts = cut.enter_context(cut_for_planning(self.model, job.cp, self.layers, call_of(self.model)))
                self._masks = parts.masks
            self._trace(sample_input, dtype, lower, job.search.measure)
            self._cut = cut.pop_all()  # the memory of blocks is found later, on the same model
        self.host = self.host_memory // len(self.traced.calls) if job.search.host else 0
        """Host bytes that one layer call may take."""

        if self.not_run:
            warn_once(
                f"{self.idle_layers()} did not run with the sample input: the plan and its peak say nothing of them. Give a "
                "sample_input that goes through them, such as pictures or sound beside the text."
            )

    def _trace(self, sample_input: Any, dtype: torch.dtype | None, lower: torch.dtype | None, measure: bool) -> None:
        device = self.device
        given = tuple(tensors_in(sample_input))
        self.sample = describe(given, {})
        self.input_bytes = sum(tensor.numel() * tensor.element_size() for tensor in given)
        """What the model is called with (token ids and labels), which peaks leave out."""
        at_hand = pick_device_type()
        if measure and at_hand != device.kind:
            raise ValueError(
                f"Operators can't be measured for {device.name} ({device.kind}): this process has {at_hand} only, which "
                "runs others. Leave measuring out (measure=False; no --measure), or plan for the device at hand."
            )
        with under_loss_parallel(self._splits_loss):
            self.traced: ModelTrace = trace_model(
                self.model,
                self.layers,
                sample_input,
                dtype=dtype,
                autocast=lower,
                cuda=device.cuda,
                routing=routing_of(self.whole, self.job),
            )
        rates = of_layers(device, self.job)
        self.problems = [
            BlockProblem(trace, rates, measured_seconds(kind, at_hand, autocast=lower) if measure else None)
            for kind, trace in zip(self.traced.kinds, self.traced.traces())
        ]
        self.runs: dict[Any, Any] = {}
        """Of `nemo_like.planning.seconds.layer_runs`."""
        self._numbers: dict[int, int] = {}
        self.outers: dict[tuple[bool, bool], OuterMemory] = {}
        self._proved: dict[tuple[int, Choice], Choice] = {}
        self._known_forms: dict[tuple[bool, int], ParameterForms] = {}
        self._optimizers: dict[tuple[int, str], tuple[Sharding, OptimizerMemory]] = {}

    def __enter__(self) -> Planner:
        return self

    def __exit__(self, *exception: object) -> None:
        """Under ``cp``, the model is as it was again; the planner answers no longer."""
        self._cut.close()

    @cached_property
    def not_run(self) -> tuple[find.Layer, ...]:
        """The layers that the sample input did not go through: the tower of another kind of input, as a rule."""
        ran = {id(call.module) for call in self.traced.calls}
        return tuple(layer for layer in self.layers if id(bare(layer.module)) not in ran)

    @property
    def matmuls(self) -> str | None:
        """What the layers' linears multiply in: weights that are not sharded are not gathered, either."""
        return effective_matmuls(self.job.precision, sharded=self.job.fsdp is not None)

    def idle_layers(self) -> str:
        """`not_run` in words; empty where all layers ran."""
        counts = Counter((layer.group, type(bare(layer.module)).__name__) for layer in self.not_run)
        return ", ".join(f"{count} x {name} ({group})" for (group, name), count in counts.items())

    # --- choices --------------------------------------------------------------------------------------------------

    @cached_property
    def blocks(self) -> list[BlockSeconds]:
        """The seconds of each kind of layer."""
        return [BlockSeconds.of(problem) for problem in self.problems]

    @cached_property
    def frontiers(self) -> list[tuple[Choice, ...]]:
        """Each kind's best choices, ascending in held bytes."""
        return [p.frontier(skip=self.skip, host=self.host) for p in self.problems]

    @cached_property
    def stack(self) -> Stack:
        """Layers that may make the same choices (of one kind, and all in scope or none), and their best mixes."""
        return Stack(self.choice_groups(lambda kind: self.frontiers[kind]))

    def choice_groups(self, choices: Callable[[int], tuple[Choice, ...]]) -> tuple[ChoiceGroup, ...]:
        """The layers by what they may choose; `choices`: of a kind in scope, ascending in held bytes."""
        groups: dict[tuple[int, bool], dict[int, list[int]]] = {}
        for position, call in enumerate(self.traced.calls):
            group = groups.setdefault((call.kind, call.fqn in self.chosen), {})
            group.setdefault(id(call.module), []).append(position)
        return tuple(
            ChoiceGroup(
                kind, choices(kind) if chosen else (self.problems[kind].none(),), tuple(map(tuple, group.values()))
            )
            for (kind, chosen), group in groups.items()
        )

    def uniform(self, mode: str) -> list[Choice]:
        """``none``, ``full`` or ``selective`` for every layer."""
        makers: dict[str, Callable[[BlockProblem], Choice]] = {
            "none": BlockProblem.none,
            "full": BlockProblem.full,
            "selective": self._selective,
        }
        per_kind = [makers[mode](problem) for problem in self.problems]
        none = [problem.none() for problem in self.problems]
        return [(per_kind if call.fqn in self.chosen else none)[call.kind] for call in self.traced.calls]

    def _selective(self, problem: BlockProblem) -> Choice:
        if not problem.trace.saves_something:
            return problem.none()
        policy = SelectivePolicy()
        tracked, decide = policy.tracked_ops(), policy.start()
        words = []
        for k, record in enumerate(problem.records):
            word = decide(record.op, record.nth) if record.op in tracked else Decision.RECOMPUTE
            words.append("save" if word is Decision.SAVE and k < problem.reachable else "recompute")
        return as_choice(problem, tuple(words), "selective")

    # --- memory ---------------------------------------------------------------------------------------------------

    def policy(self, kind: int, choice: Choice) -> Policy | None:
        """The policy that carries out `choice`, with the ops as they were traced."""
        if not choice.decisions:
            return None
        if choice.is_full:
            return KeepRouting(FullPolicy()) if "save" in choice.decisions else FullPolicy()
        return DecisionTable.from_json(self.problems[kind].rows(choice))

    def memory(self, kind: int, choice: Choice, accumulate: bool = False, *, received: bool = False) -> BlockEvents:
        """What the block needs while it runs under `choice`; the engine runs it on fake tensors. `accumulate`, `received`:
        as for `block_memory`."""
        key = (self.block_number(kind), choice, accumulate, received)
        if key not in self.known.whole:
            self.known.whole[key] = block_memory(
                self.traced.kinds[kind],
                self.policy(kind, choice),
                self.traced.run,
                self.outer().used[kind],
                accumulate=accumulate,
                layouts=self.outer().layouts[kind],
                received=received,
                apart=[each.module for each in self.experts],
            )
        return self.known.whole[key]

    def block_number(self, kind: int) -> int:
        """The number of such blocks among those that are `known`."""
        if kind not in self._numbers:
            self._numbers[kind] = self.known.number(kind, self.traced.kinds[kind], self.outer())
        return self._numbers[kind]

    def proved(self, kind: int, choice: Choice) -> Choice:
        """`choice`, or where the engine refuses it, the same one without its skips (said once)."""
        if (kind, choice) not in self._proved:
            self._proved[kind, choice] = self._prove(kind, choice)
        return self._proved[kind, choice]

    def _prove(self, kind: int, choice: Choice) -> Choice:
        try:
            self.memory(kind, choice)
            return choice
        except (RegionError, RuntimeError) as error:
            if "skip" not in choice.decisions:
                raise
            warn_once(
                f"{self.problems[kind].trace.name}: a plan that skips ops does not replay on this block "
                f"({str(error).splitlines()[0]}); it replays them instead."
            )
            words = tuple("recompute" if word == "skip" else word for word in choice.decisions)
            return as_choice(self.problems[kind], words, choice.label)

    def outer(self, accumulate: bool = False, choices: Sequence[Choice] | None = None) -> OuterMemory:
        """The model around its layers.

        accumulate: where backward adds to gradients that are there. choices: how the layers run; None: as regions, which
            hold all that they are called with. Where only some do, the others are counted so, too.
        """
        regions = choices is None or any(choice.decisions for choice in choices)
        regions |= all(kind.kept_at == kind.shared_at for kind in self.traced.kinds)
        if (accumulate, regions) not in self.outers:
            made = outer_memory(
                self.model,
                self.layers,
                self.traced,
                self.job.step,
                self.job.loss,
                accumulate=accumulate,
                device=self.device,
                regions=regions,
                split_loss=self._splits_loss,
            )
            for reason in made.whole_logits:
                say_whole_logits(self.whole, reason)
            self.outers[accumulate, regions] = made
        return self.outers[accumulate, regions]

    def with_chunks(
        self, loss: ChunkedLoss, known: dict[tuple[bool, bool], OuterMemory] | None = None
    ) -> Planner | None:
        """This planner for a loss in chunks, with nothing traced again; None where the logits would be whole anyway.
        `known`: what is around the layers with such a loss, where that was found before; what is found is put there."""
        if find_head(self.model) is None:
            return None
        other = copy.copy(self)
        other.job, other.runs = replace(self.job, loss=loss), {}
        other.outers = {} if known is None else known
        if (False, True) not in other.outers:
            other.outers[False, True] = outer_memory(
                self.model, self.layers, self.traced, self.job.step, loss, device=self.device
            )
        return None if other.outers[False, True].whole_logits else other

    def under(self, job: Job) -> Planner | None:
        """Return this planner for a `job` that differs in what no layer's trace depends on: a loss in chunks, offloading,
        options of FSDP2, the loop, its optimizer, the allocator. None where its loss cannot be chunked."""
        base = self if job.loss == self.job.loss else self.with_chunks(job.loss or ChunkedLoss())
        if base is None:
            return None
        other = copy.copy(base)
        other.job, other.runs = job, {}
        if job.step.keeps_output != self.job.step.keeps_output:
            other.outers = {}
        other.__dict__.pop("sharding", None)
        return other

    def again(self, job: Job) -> Planner:
        """Return a planner for the same model and sample under another `job`, traced anew."""
        return self._again(job)

    def on_ranks(self, ranks: int) -> Planner:
        """Return this planner for another number of ranks to shard over (two or more), with nothing traced again."""
        other = copy.copy(self)
        other.job, other.runs = self.job.on(dp_shard=ranks), {}
        other.__dict__.pop("sharding", None)
        return other

    @cached_property
    def casts(self) -> bool:
        """Whether it computes in another dtype than parameters are stored in."""
        dtype = self.job.param_dtype
        return dtype is not None and any(p.dtype != dtype for p in self.model.parameters() if p.requires_grad)

    @cached_property
    def sharding(self) -> Sharding:
        """Its FSDP2 units on one rank."""
        job = self.job
        precision = Precision() if job.fsdp is None else job.precision
        alone = job.fsdp is not None and job.tp.size * job.dp_replicate > 1
        return sharding_of(
            self.model,
            self.layers,
            shard_ranks=job.shard_ranks,
            precision=precision,
            fsdp=job.fsdp or FSDP2(),
            trained=self.trained,
            experts=self.experts,
            expert_ranks=job.shard_ranks * job.tp.size // job.ep.size,
            gloo=self.device.kind == "cpu",
            alone=alone,
            forms=self._forms(),
            replicas=job.dp_replicate,
            # Of a CPU, host memory is its own.
            host=job.fsdp is not None and job.fsdp.cpu_offload and self.device.kind != "cpu",
        )

    def _forms(self) -> ParameterForms:
        """Found once for all copies of this planner."""
        whole = self.job.shard_ranks == 1
        key = (whole, id(self.trained))
        if key not in self._known_forms:
            plan = units_for(self.model, self.layers, whole=whole, experts=self.experts)
            self._known_forms[key] = ParameterForms(self.model, self.layers, plan, self.trained, self.experts)
        return self._known_forms[key]

    @property
    def _splits_loss(self) -> bool:
        return self.job.tp.loss_parallel and self.job.tp.size > 1

    @cached_property
    def trained(self) -> frozenset[int]:
        """Ids of the model's parameters that get a gradient in a step: others have no optimizer state."""
        named = dict(self.model.named_parameters(remove_duplicate=False))
        key = tuple((name, p.requires_grad) for name, p in named.items())
        if key not in self.known.trained:
            self.known.trained[key] = self._names_of_trained()
        return frozenset(id(named[name]) for name in self.known.trained[key])

    def _names_of_trained(self) -> frozenset[str]:
        ids = {id(module): name for name, module in self.model.named_modules()}
        found = set(self.outer().trained)
        for i, call in enumerate(self.traced.calls):
            if i not in self.outer().idle:
                memory = self.memory(call.kind, self.problems[call.kind].none())
                found |= {f"{ids[id(call.module)]}.{name}" for name in memory.param_grads}
        named = dict(self.model.named_parameters(remove_duplicate=False))
        return frozenset(name for name in found if name in named)

    def peak(self, choices: Sequence[Choice]) -> Peak:
        """Predicted peak per rank of a whole step with these choices."""
        return peak_of(self, choices)

    def points(self, choices: Sequence[Choice]) -> list[StepPoint]:
        """The stretches of the step in which `peak` is, in order."""
        points: list[StepPoint] = []
        peak_of(self, choices, points)
        return points

    def moved(self, choices: Sequence[Choice]) -> list[int]:
        """Of what each call holds, the bytes that ``offload=`` moves to the host: of regions, and of all layers but the
        last. What is kept of a layer that is no region is counted as staying, also with ``"all"``."""
        inputs = (self.problems[call.kind].trace.input_bytes for call in self.traced.calls)
        return [size * moves + sum(others) for size, (moves, others) in zip(inputs, self._copies(choices))]

    def _copies(self, choices: Sequence[Choice]) -> list[tuple[bool, tuple[int, ...]]]:
        """Of each call, whether its inputs are moved to the host, and the bytes of what else is, in the order in which it is
        copied."""
        offload, last = self.job.offload, self.traced.calls[-1].fqn
        if offload.mode == "none":
            return [(False, ())] * len(choices)
        left = float("inf") if offload.host_budget_bytes is None else offload.host_budget_bytes
        found = []
        for call, choice in zip(self.traced.calls, choices):
            problem = self.problems[call.kind]
            sizes = [problem.trace.input_bytes]
            if offload.mode != "boundary":
                sizes += [r.bytes for r, word in zip(problem.records, choice.decisions) if word == "save"]
            moves = choice.decisions and call.fqn != last
            going = []
            for at, size in enumerate(sizes if moves else ()):
                if offload.min_bytes <= size <= left:
                    left -= size
                    going.append((at, size))
            found.append((any(at == 0 for at, _ in going), tuple(size for at, size in going if at)))
        return found

    def step_seconds(self, choices: Sequence[Choice]) -> float:
        """Seconds of a whole step with these choices; see `nemo_like.planning.seconds`."""
        return planned_seconds(self, choices).total

    def exposed(self, choices: Sequence[Choice]) -> list[float]:
        """Of each call, the seconds of the copies that ``offload=`` makes and computing does not hide."""
        return [
            exposed_seconds(moved, self.problems[call.kind].forward_seconds, self.device)
            for call, moved in zip(self.traced.calls, self.moved(choices))
        ]

    def reserved(self, choices: Sequence[Choice]) -> Reserved | None:
        """What CUDA's caching allocator reserves for such steps; None: another one runs (the CPU's)."""
        if self.device.cuda is None:
            return None
        return replay(StepLogs.of(self, choices), self.device, self.job.allocator)

    def staying(self, received: bool) -> list[bool]:
        """Of each layer call, whether the gradient of what it returns comes into a buffer that stays; `received`: as for
        `layer_calls`."""
        return [False] * (len(self.traced.calls) - 1) + [received]

    def layer_calls(
        self, choices: Sequence[Choice], accumulates: bool, *, received: bool = False, halves: bool | None = None
    ) -> list[LayerCall]:
        """What each layer call allocates and frees, and what it keeps.

        Args:
            choices: one for each.
            accumulates: backward adds to gradients that are there.
            received: the gradient of what the last one returns comes from a pipeline's next stage, into a buffer that stays.
            halves: its schedule cuts backward in two, and recomputes once (True) or twice (False); None: it does not.
        """
        sharding = self.sharding
        units = dict(zip(sharding.modules, sharding.units))
        known: dict[Any, LayerCall] = {}
        made = []
        every = zip(self.traced.calls, choices, self._copies(choices), self.staying(received))
        for call, choice, copies, stays in every:
            unit, experts = units.get(id(call.module)), sharding.experts.get(id(call.module))
            key = (call.kind, id(choice), id(unit), id(experts), copies, stays)
            if key not in known:
                trace, region = self.problems[call.kind].trace, bool(choice.decisions)
                # On the CPU, a region that draws random numbers keeps the generator's state among its tensors.
                state = RNG_STATE if trace.draws and self.device.kind == "cpu" else 0
                if halves is None:
                    events = self.memory(call.kind, choice, accumulates, received=stays)
                else:
                    events = self.halves(call.kind, choice, accumulates, once=halves, received=stays)
                weights = () if experts is None else call.module.named_parameters()
                own = frozenset(name for name, p in weights if id(p) in self.expert_weights)
                known[key] = LayerCall(
                    events,
                    unit,
                    experts,
                    None if region else trace.kept_inputs,
                    own,
                    state + trace.state_bytes if region else 0,
                    copied_in_forward(call.module) if region else 0,
                    *copies,
                )
            made.append(known[key])
        return made

    def halves(self, kind: int, choice: Choice, accumulate: bool, *, once: bool, received: bool) -> BlockEvents:
        """`memory` where a pipeline's schedule cuts backward in two; `once`: it recomputes once for both."""
        known = self.known.halves
        key = (self.block_number(kind), choice, accumulate, once, received)
        if key not in known:
            known[key] = halves_memory(
                self.traced.kinds[kind],
                self.policy(kind, choice),
                self.traced.run,
                self.outer().used[kind],
                accumulate=accumulate,
                once=once,
                received=received,
            )
        return known[key]

    @cached_property
    def expert_weights(self) -> frozenset[int]:
        """Ids of the parameters of experts that are units of their own."""
        return frozenset(id(weight) for each in self.experts for weight in each.weights)

    def around(self, choices: Sequence[Choice], accumulates: bool, *, halves: bool = False) -> Around:
        """What is around the layers; `halves`: backward is cut in two."""
        outer = self.outer(accumulates, choices)
        if halves:
            known = self.__dict__.setdefault("outer_halves", {})
            if accumulates not in known:
                known[accumulates] = outer_memory(
                    self.model,
                    self.layers,
                    self.traced,
                    self.job.step,
                    self.job.loss,
                    accumulate=accumulates,
                    halves=True,
                )
            outer = known[accumulates]
        return Around(outer.events, outer.idle, outer.dropped, outer.in_chunks, halves)

    def leaves(self, kind: int) -> int:
        """What a block holds whatever is kept of it: tensors that it makes and asks a gradient of, which the graph keeps."""
        full = self.problems[kind].full()
        routing = full.held_bytes - self.problems[kind].trace.input_bytes
        return self.memory(kind, full).held - routing if full.decisions else 0

    @property
    def remembered(self) -> int:
        """Bytes of what stays from step to step and is no state: tables of the model's functions, masks of ``cp``."""
        return self.traced.run.tables.bytes + (0 if self._masks is None else self._masks.bytes)

    @cached_property
    def names_of_parameters(self) -> dict[str, int]:
        """Ids of the model's parameters."""
        return {name: id(p) for name, p in self.model.named_parameters()}

    @property
    def state_on_host(self) -> int:
        """Bytes of parameters, gradients, optimizer state and averaged weights that one rank has in host memory."""
        sharding, step = self.sharding, self.job.step
        shards = sum(unit.host_shard for unit in sharding.all)
        state = optimizer_memory(sharding.trained_on_host, step.optimizer, device="cpu").state
        return shards * (2 if step.ema else 1) + sum(unit.host_grad for unit in sharding.all) + state

    @property
    def optimizer(self) -> OptimizerMemory:
        """What the optimizer holds on this rank's device."""
        key = (id(self.sharding), self.job.step.optimizer)
        if key not in self._optimizers:
            memory = optimizer_memory(self.sharding.trained, self.job.step.optimizer, device=self.device.kind)
            self._optimizers[key] = self.sharding, memory  # told apart by id, so it must live
        return self._optimizers[key][1]

    # --- plans ----------------------------------------------------------------------------------------------------

    def plan(self, budget: MemoryBudget, asked: str = "") -> Plan:
        """The fastest plan within `budget`.

        Raises:
            BudgetError: none fits.
        """
        asked = asked or str(budget)
        choices, gap = self.choose(budget, asked)
        return self.describe(choices, asked, gap)

    def choose(self, budget: MemoryBudget, asked: str) -> tuple[list[Choice], float]:
        """The choices of the fastest plan within `budget`, one per call; and the gap that is proven for them, seconds.

        Raises:
            BudgetError: none fits; it names the budget as it was `asked` for.
        """
        stack, mix = self.fastest(budget, asked)
        return self.proved_all(stack.assignment(mix)), stack.gap(mix)

    def fastest(self, budget: MemoryBudget, asked: str = "") -> tuple[Stack, solver.Mix]:
        """`within_budget.fastest`: not run by the engine yet."""
        return within_budget.fastest(self, budget, asked)

    def held(self, choices: Sequence[Choice]) -> int:
        """Bytes that all layers hold at the end of forward, with what they share."""
        return sum(choice.held_bytes for choice in choices) + self.traced.shared_bytes

    def proved_all(self, choices: Sequence[Choice]) -> list[Choice]:
        return [self.proved(call.kind, choice) for call, choice in zip(self.traced.calls, choices)]

    def describe(self, choices: Sequence[Choice], asked: str, gap: float = 0.0, *, reserved: int | None = None) -> Plan:
        """Choices for all calls as a `Plan`; see `plan_of_choices.plan_of`."""
        return plan_of(self, choices, asked, gap, reserved)


def plan_for(
    model: nn.Module, job: Job | None = None, *, sample_input: Any = None, **asked: Unpack[AllKeywords]
) -> Plan:
    """Find the fastest way to run `model`'s layers within a memory budget, with its predicted peak.

    Runs no kernel and needs no GPU. Where a process group is up, rank 0 plans and the others receive its plan, so that all
    ranks run the same one.

    Args:
        model: bare: not sharded, compiled or checkpointed. On any device, `meta` included. Not changed.
        job: the job, whose ``ac`` is the budget. Or
        asked: the keywords of `Job.of`, such as ``ac="40GiB", world_size=8, gpu="h100-80gb"``. Where the job has layers that
            are some of those that would be found, the others are left without checkpointing, and count in the peak.
        sample_input: what one step of one rank gives to `model` (keywords, positions, or one tensor); with ``cp``, whole
            sequences; with ``pp``, one micro-batch.

    Returns:
        The plan; for a pipeline that of all stages.

    Raises:
        BudgetError: (a ValueError) no plan fits, with the smallest budget that one does.
        ValueError: no budget, no sample input, an unknown device, no head for a chunked loss, a model that cannot be traced
            or cut. TypeError: an unknown keyword, or keywords together with a job.
        MissingExtraError: ``PlanSearch(skip=True)`` and scipy is not installed.

    >>> plan_for(model, ac="40GiB", world_size=8, gpu="h100-80gb", sample_input=batch)  # doctest: +SKIP
    """
    check_model(model)
    made = asked_job(job, asked, sample_input)
    if made.pp.size > 1:
        from nemo_like.planning.stage_plans import plan_pipeline

        return plan_pipeline(model, made, sample_input=sample_input)
    budget = made.ac
    assert isinstance(budget, MemoryBudget)

    def make() -> Plan:
        with Planner(model, sample_input, made) as planner:
            return planner.plan(budget)

    return same_on_all_ranks(make)


def asked_job(job: Job | None, asked: Mapping[str, Any], sample_input: Any) -> Job:
    """Return the job that `plan_for` was asked about, with its number of ranks.

    Raises:
        ValueError, TypeError: as `plan_for`, for its arguments.
    """
    if job is not None and not isinstance(job, Job):
        raise TypeError(
            f"job is {job!r}; it must be a Job. A budget is given as ac=: plan_for(model, ac='40GiB', ...)."
        )
    made = Job.of(**asked) if job is None else Job.of(job, **asked)
    if made.world_size is None:
        made = replace(made, world_size=world_size())
    if not isinstance(made.ac, MemoryBudget):
        raise ValueError(f"ac is {as_code(made.ac, parse_ac)}; a plan needs a budget: ac='40GiB', '50%' or 'auto'.")
    if sample_input is None:
        raise ValueError(
            "A memory budget needs a sample input (sample_input=): activation bytes depend on batch and sequence. Give "
            "what one step of one rank gives to the model, such as {'input_ids': ..., 'labels': ...}."
        )
    return made


def _found_and_chosen(model: nn.Module, layers: Any) -> tuple[tuple[find.Layer, ...], frozenset[str]]:
    """All layers of the model, and the names of those to plan for."""
    asked = find.find_layers(model, layers)
    names = frozenset(layer.fqn for layer in asked)
    if hasattr(model, STAGE_MARK):
        return asked, names  # the others are on other stages
    try:
        found = find.find_layers(model)
    except find.LayersNotFoundError:
        return asked, names  # only the caller knows the layers
    return (found if names <= {layer.fqn for layer in found} else asked), names


def _refuse_lists(model: nn.Module, ep: ExpertParallel) -> None:
    experts = find_experts(model, ep.plan) if ep.size > 1 else ()
    if listed := next((each.fqn for each in experts if each.call == EACH), None):
        raise ValueError(
            f"ep is {ep.size}, and {listed!r} is a list of experts, whose block decides in Python how many rows each gets: "
            "no plan can be made. Use a mode (ac='full', 'selective'), or stack the weights of the list."
        )


def _can_skip() -> bool:
    try:
        require("scipy.optimize", "plan", "to plan with skipped ops")
    except MissingExtraError as error:
        warn_once(f"Plans are made without skipped ops: {error}")
        return False
    return True


def as_choice(problem: BlockProblem, words: tuple[str, ...], label: str) -> Choice:
    """The choice that does this with each op: ``save``, ``skip`` or ``recompute``."""
    keep = sum(1 << k for k, word in enumerate(words) if word == "save")
    skip = sum(1 << k for k, word in enumerate(words) if word == "skip")
    return replace(problem.choice(solver.Point(0, 0.0, keep, skip)), label=label)


__all__ = ["BudgetError", "Planner", "plan_for"]


# A plan put into a model by itself, for callers who own the order of the steps.


def apply_plan(
    model: nn.Module,
    plan: Plan,
    *,
    device_type: str | None = None,
    transfer: Transfer | None = None,
    compile: bool = False,
) -> nn.Module:
    """Wrap `model`'s layers as `plan` says, in place, and return it. Call it before compiling and sharding.

    As with every other mode, the model is called without a key/value cache where gradients are on.

    Args:
        model: the bare model that the plan was made for.
        plan: from `plan_for` or `Plan.load`.
        device_type: ``"cpu"`` or ``"cuda"``, where the model will run; default: CUDA if there is any. Where the plan was
            traced for the other one, that is logged.
        transfer: moves outputs that wait in host memory; default: synchronous copies.
        compile: `nemo_like.compile.compile_layers` will be called afterwards.

    Raises:
        PlanError: the plan was made for another model. TypeError: a layer is checkpointed already. The model is
            unchanged then.
    """
    specs = plan_specs(model, plan, device_type or pick_device_type(), transfer)
    apply_specs(model, specs, compile=compile)
    return model
