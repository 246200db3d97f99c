"""A model, or one stage of it, traced in one local shape: its layers, their operators, and the allocations of a step.

Also adapters on frozen weights, weights in 4 bits, and matmuls in float8.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar, cast
from unittest.mock import patch

import torch
from torch import nn

from nemo_like._util.extras import require
from nemo_like._util.log import warn_once
from nemo_like._util.tensors import Place, describe, tensors_in
from nemo_like.activation_checkpointing.kv_sharing import has_kv_sharing, shares_states_explicitly
from nemo_like.activation_checkpointing.names import check_lists, regions_of
from nemo_like.activation_checkpointing.policy import DecisionTable, FullPolicy, Policy, SelectivePolicy
from nemo_like.activation_checkpointing.spec import KeepRouting
from nemo_like.distributed.context import cut_for_planning
from nemo_like.distributed.documents import in_blocks, keep_documents_apart, masks_in_blocks
from nemo_like.distributed.expert.split_experts import Experts, has_experts, refuse_lists
from nemo_like.distributed.first_rank import first_rank
from nemo_like.distributed.pipeline.cut import STAGE_MARK, StageParts, call_of, ends_of
from nemo_like.fake.model_copy import is_unquantised, model_copy
from nemo_like.job import Job
from nemo_like.layers import find
from nemo_like.losses.model_loss import find_head, say_whole_logits
from nemo_like.options import ChunkedLoss, ExpertParallel, NamedList, NamedLists, StepSpec
from nemo_like.options.names import NO_NAMES
from nemo_like.options.optimizers import UpdateInBackward
from nemo_like.planning.devices import Device, device_of
from nemo_like.planning.model.capture import routing_of, trace_model
from nemo_like.planning.model.outside import outer_memory
from nemo_like.planning.roofline import work_seconds
from nemo_like.planning.selection.layer import (
    BlockProblem,
    BlockSeconds,
    Choice,
    ChoiceGroup,
    Stack,
    decided,
)
from nemo_like.planning.sharding import ParameterForms, Sharding
from nemo_like.planning.trace.block import BlockTrace
from nemo_like.planning.trace.compiled_memory import CompiledBlock, NotCompiledError, compiled_memory, traced_block
from nemo_like.planning.trace.kinds import KindFacts, ModelFacts, ModelTrace, TracedCall, trace_kind
from nemo_like.planning.trace.layer_memory import block_memory
from nemo_like.planning.trace.records import BlockEvents, OuterEvents
from nemo_like.planning.trace.store import contents_of_integers, current_store, digest
from nemo_like.precision import check_capability, check_float8, check_four_bits, float8_linears
from nemo_like.torch_compat import under_loss_parallel

if TYPE_CHECKING:
    from nemo_like.planning.trace.compiled_pieces import Pieces

# Modes that are planned without a budget: those that `TracedPart.uniform` takes.
MODES = ("none", "full", "selective")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class TraceCache:
    """Results by the values they depend on. `nemo_like.planning.model.traced.TracedPart` reads and fills them."""

    def __init__(self) -> None:
        # Allocations of a block, by its number, its choice, and how its step runs.
        self.blocks: dict[Hashable, BlockEvents] = {}
        # A function of a policy that returns the graphs of a compiled block, or its pieces, by its number and its compiler.
        self.graphs: dict[Hashable, Callable[[Policy | None], CompiledBlock] | Pieces] = {}
        # Memory outside the layers, by the loss, and how the step runs.
        self.outside: dict[Hashable, OuterEvents] = {}
        # Names of the parameters that get a gradient in a step, by all names and which of them require gradients.
        self.trained: dict[Hashable, frozenset[str]] = {}
        # Bytes that one rank stores, by the weights and the ranks that share them.
        self.shardings: dict[Hashable, Sharding] = {}
        # Parts before, in and after the layers; or the reason why the model cannot be cut.
        self.cut: StageParts | str | None = None
        self.store = current_store()
        self._numbers: dict[Any, int] = {}

    def number(self, key: Hashable) -> int:
        """Return a number for `key`, the same for equal ones, so that long keys are compared once."""
        return self._numbers.setdefault(key, len(self._numbers))


class StepLoss(NamedTuple):
    """Settings of a step's loss, on which a trace outside the layers depends."""

    chunks: ChunkedLoss | None = None  # Chunks of the loss; None: the logits are whole.
    keeps_output: bool = True
    loss_fn: Callable[..., Any] | None = None  # Loss function of the loop; None: the model computes the loss.

    @classmethod
    def from_job(cls, job: Job) -> StepLoss:
        """Return the settings of `job`."""
        return cls(job.loss, job.step.keeps_output, job.step.loss_fn)


def _remembered(
    method: Callable[Concatenate[TracedPart, Arguments], Result],
) -> Callable[Concatenate[TracedPart, Arguments], Result]:
    """Return a method whose results each part remembers, by the arguments."""

    @functools.wraps(method)
    def remembering(part: TracedPart, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        key = (method.__name__, args, *sorted(kwargs.items()))
        if key not in part.results:
            part.results[key] = method(part, *args, **kwargs)
        return cast("Result", part.results[key])

    return remembering


class TracedPart:
    """One trace of a model, or of one stage of it, for all jobs in which a rank runs the same operators."""

    def __init__(self, model: nn.Module, sample_input: Any, job: Job, cache: TraceCache) -> None:
        """Trace a copy of `model`.

        Args:
            model: on any device; a stage of a pipeline as a model that is called with the tensors it receives.
            sample_input: the input of one micro-batch of one rank.
            job: the job whose dtypes, device, and sizes of ``tp``, ``cp`` and ``ep`` are traced.
            cache: results of other traces of the same model; those of this one are added.

        Raises:
            ValueError: a model that cannot be traced, or a job that is not planned.
        """
        dtype, lower = job.param_dtype, None
        if job.fsdp is None:
            dtype, lower = None, None if dtype is torch.float32 else dtype
        self.device: Device = device_of(job)
        self.cache, self.shape = cache, shape_of(job)
        self.loss, self._in_blocks = StepLoss.from_job(job), in_blocks.get()
        self.splits_loss = job.tp.loss_parallel and job.tp.size > 1
        self.is_stage = hasattr(model, STAGE_MARK)
        self.whole = self.model = in_four_bits(model_copy(model))
        check_four_bits(self.model, job)
        if not self.is_stage:
            keep_documents_apart(self.model)
        check_float8_plan(job, self.device)
        if job.precision.matmuls is not None:  # as `parallelize` does in the model itself: before it is cut
            modules = [layer.inner for layer in find.find_layers(self.model, job.layers)]
            float8_linears(
                modules, job.precision.matmuls, self.device.kind, sharded=job.fsdp is not None, tp=job.tp.size
            )
        self.experts: tuple[Experts, ...] = ()
        if job.ep.size > 1:
            refuse_lists(model, job.ep.size, job.ep.plan)
        # A stage of a pipeline may be one without experts.
        ep = ExpertParallel() if self.is_stage and not has_experts(model, job.ep.plan) else job.ep
        if job.tp.size * ep.size > 1:
            self.model, self.experts = first_rank(self.model, job.tp, ep, ends=ends_of(model))
        self.layers, self.chosen = _found_and_chosen(self.model, job.layers)
        if has_kv_sharing(model) and not shares_states_explicitly(layer.inner for layer in self.layers):
            raise ValueError(
                f"{type(model).__name__} shares keys and values between layers through its cache, which recomputing "
                "whole layers would write twice, so no plan can be made. Use ac='submodule'."
            )
        self._cut = contextlib.ExitStack()  # of the copy, which stays cut
        if job.cp.size > 1:
            self._cut.enter_context(cut_for_planning(self.model, job.cp, self.layers, call_of(self.model)))
        self.sample = describe(tuple(tensors_in(sample_input)), {})
        routing = routing_of(self.whole, job)
        how: dict[str, Any] = {"dtype": dtype, "autocast": lower, "cuda": self.device.cuda, "routing": routing}
        self._run = functools.partial(trace_model, self.model, self.layers, sample_input, **how)
        # All that its results depend on besides the model, for a store.
        shape = (self.device.kind, self.device.cuda, job.param_dtype, job.precision.matmuls, job.fsdp is None)
        stage = getattr(model, STAGE_MARK, None)
        place = None if stage is None else (stage.is_first, stage.is_last, stage.layers)
        named = (place, *(layer.fqn for layer in self.layers), self._in_blocks)
        self._about = (shape, job.tp, job.cp, job.ep, routing, named, self.sample, contents_of_integers(sample_input))
        self.traced = self._facts()
        rates = self.device
        if job.precision.matmuls not in (None, "mxfp8-emulated") and "float8" in rates.matmul_flops:
            # All matmuls of layers count at the rate of float8, also those of the few linears that it does not fit. Where
            # no rate of float8 is known (a CPU emulates it), they count at that of bfloat16.
            rates = replace(rates, matmul_flops={**rates.matmul_flops, "half": rates.matmul_flops["float8"]})
        self.problems = [BlockProblem(kind.trace, rates) for kind in self.traced.kinds]
        # Stages of one model differ in their layers; a whole model has the same ones however its experts are divided.
        kinds = self.traced.kinds
        alike = tuple(kinds[call.kind].key if self.is_stage else call.kind for call in self.traced.calls)
        self.results: dict[Hashable, Any] = {}  # Results of methods, by their arguments (`_remembered`).
        self._number = self.cache.number((self.shape, self.sample, self.is_stage, alike))
        if self.not_run:
            warn_once(
                f"{self.idle_layers()} did not run with the sample input: the plan and its peak do not cover them. Give a "
                "sample_input that goes through them, such as pictures or sound together with the text."
            )

    @cached_property
    def live(self) -> ModelTrace:
        """The trace itself, whose blocks can be run; it is made where a result is not kept."""
        with under_loss_parallel(self.splits_loss):
            return self._run()

    def _facts(self) -> ModelFacts:
        store, layers = self.cache.store, {layer.fqn: layer.inner for layer in self.layers}

        def facts() -> tuple[Any, ...]:
            live = self.live
            kinds = [
                KindFacts(kind.trace, kind.key if store is None else digest(kind.key), kind.shared_at)
                for kind in live.kinds
                if kind.trace is not None
            ]
            calls = [(call.fqn, call.kind) for call in live.calls]
            return calls, tuple(kinds), live.shared_bytes, live.run.tables.bytes

        calls, *others = self.stored("model", facts)
        return ModelFacts(tuple(TracedCall(fqn, layers[fqn], kind) for fqn, kind in calls), *others)

    def stored(self, key: object, make: Callable[[], Result]) -> Result:
        """Return the result of `make`, or the one that is kept under `key` for this part."""
        store = self.cache.store
        with masks_in_blocks(self._in_blocks):  # as it was when the part was made: a run may come later
            return make() if store is None else store.get(self._about, key, make)

    @cached_property
    def not_run(self) -> tuple[find.Layer, ...]:
        """The layers that the sample input did not go through: the encoder of another kind of input, as a rule."""
        ran = {call.module for call in self.traced.calls}
        return tuple(layer for layer in self.layers if layer.inner not in ran)

    def idle_layers(self) -> str:
        """Return `not_run` in words; empty where all layers ran."""
        counts = Counter((layer.group, type(layer.inner).__name__) for layer in self.not_run)
        return ", ".join(f"{count} x {name} ({group})" for (group, name), count in counts.items())

    # --- choices --------------------------------------------------------------------------------------------------

    @_remembered
    def block(self, kind: int, *, compiled: bool) -> BlockSeconds:
        """Return the seconds of a kind of layer, as it is or as a compiler fuses it."""
        return BlockSeconds.from_problem(self.problems[kind], compiled=compiled)

    @_remembered
    def stack(self, *, skip: bool, host: int, fixed: NamedList = NO_NAMES, compiled: bool = False) -> Stack:
        """Return all layers as one choice, with the best choices of each kind.

        Args:
            skip, host, fixed: as for `BlockProblem.frontier`.
            compiled: leave out the choices under which layers are not compiled, if there are others.
        """
        calls: dict[tuple[int, bool], dict[nn.Module, list[int]]] = {}
        for position, call in enumerate(self.traced.calls):
            group = calls.setdefault((call.kind, call.fqn in self.chosen), {})
            group.setdefault(call.module, []).append(position)
        groups = []
        for (kind, chosen), group in calls.items():
            problem = self.problems[kind]
            choices = problem.frontier(skip=skip, host=host, fixed=fixed) if chosen else (problem.none(),)
            if compiled:
                choices = tuple(filter(problem.compiles, choices)) or choices
            groups.append(ChoiceGroup(kind, choices, tuple(map(tuple, group.values()))))
        return Stack(tuple(groups))

    def uniform(self, mode: str) -> list[Choice]:
        """Return the choice of each layer call under ``none``, ``full`` or ``selective``."""
        if mode == "selective":
            return self.under_policy(SelectivePolicy())
        return self._each([problem.full() if mode == "full" else problem.none() for problem in self.problems])

    def under_policy(self, policy: Policy) -> list[Choice]:
        """Return the choice of each layer call under ``selective`` with a policy."""
        return self._each([decided(problem, policy, "selective") for problem in self.problems])

    def _each(self, per_kind: Sequence[Choice]) -> list[Choice]:
        """Return the choice of each layer call, of its kind where it is in scope."""
        none = [problem.none() for problem in self.problems]
        return [(per_kind if call.fqn in self.chosen else none)[call.kind] for call in self.traced.calls]

    def by_names(self, lists: NamedLists, names: Mapping[str, str], *, skip: bool, whole: bool = True) -> list[Choice]:
        """Return the choice of each layer call under lists of names.

        Args:
            lists: the lists.
            names: names of the layers in the whole model, by those in this part.
            skip: as for `BlockProblem.by_names`.
            whole: this part is the whole model; of a stage nothing is checked.

        Raises:
            ValueError: as `check_lists`.
        """
        layers = {names[layer.fqn]: layer.inner for layer in self.layers if layer.fqn in self.chosen}
        of_layer = {fqn: names for names, fqns in check_lists(layers, lists, part=not whole).items() for fqn in fqns}
        per_kind = dict[tuple[int, NamedList | None], Choice]()
        choices = []
        for call in self.traced.calls:
            key = call.kind, of_layer.get(names[call.fqn])
            if key not in per_kind:
                problem, list_of_layer = self.problems[call.kind], key[1] or NamedList(recompute=())
                inside = self.in_regions(call.kind, list_of_layer, skip=skip) if list_of_layer.recompute else None
                per_kind[key] = inside or problem.by_names(list_of_layer, skip=skip)
            choices.append(per_kind[key])
        return self.proved_all(choices)

    @_remembered
    def in_regions(self, kind: int, names: NamedList, *, skip: bool) -> Choice:
        """Return the choice of a kind of layer under a list that has modules as regions; arguments as for `by_names`."""
        problem = self.problems[kind]
        regions = regions_of(names, next(call.module for call in self.traced.calls if call.kind == kind))
        if not regions or not problem.trace.saves_something:
            return problem.none()

        def around() -> BlockTrace:
            with self.live.run, under_loss_parallel(self.splits_loss):
                return trace_kind(self.live.kinds[kind], self.live.run, problem.trace.name, regions)

        traced = self.stored(("around", self.traced.kinds[kind].key, tuple(regions)), around)
        return self.proved(kind, problem.in_regions(traced, names, skip=skip))

    def regions(self, kind: int, choice: Choice) -> dict[str, Policy]:
        """Return the policies that carry out `choice`, with the operators as they were traced, by the paths of their modules
        in the block; an empty path: the block itself. They save the tensors that wait in CPU memory: copies are counted
        apart (`LayerCall.moved`)."""
        inside = [(region.path, region.problem, region.choice) for region in choice.inside]
        every = inside or [("", self.problems[kind], choice)]
        return {path: _policy(problem, chosen) for path, problem, chosen in every if chosen.decisions}

    def proved_all(self, choices: Sequence[Choice]) -> list[Choice]:
        """Return `proved` of each layer call."""
        return [self.proved(call.kind, choice) for call, choice in zip(self.traced.calls, choices)]

    @_remembered
    def proved(self, kind: int, choice: Choice) -> Choice:
        """Return `choice`, or where the engine refuses it, the same one without its skips (logged once)."""
        try:
            self.memory(kind, choice)
            return choice
        except (RuntimeError, ValueError) as error:
            if "skip" not in choice.decisions:
                raise
            warn_once(
                f"{self.problems[kind].trace.name}: a plan that skips operators does not run on this block "
                f"({str(error).splitlines()[0]}); it recomputes them instead."
            )
            return self.problems[kind].without_skips(choice)

    def saved(self, choices: Sequence[Choice]) -> int:
        """Return the bytes that all layers save till the end of forward, with those they share."""
        return sum(choice.held_bytes for choice in choices) + self.traced.shared_bytes

    # --- memory ---------------------------------------------------------------------------------------------------

    def memory(
        self,
        kind: int,
        choice: Choice,
        accumulate: bool | UpdateInBackward = False,
        *,
        loss: StepLoss | None = None,
        received: bool = False,
        halves: bool = False,
        held: bool = False,
        compiler: str | None = None,
    ) -> BlockEvents:
        """Return the allocations of a block under `choice`, run by the engine on fake tensors.

        Args:
            kind, choice: the block, and the choice of tensors that it saves.
            accumulate, received: as for `block_memory`.
            loss: of the step; None: the traced one.
            halves: a pipeline's schedule cuts backward in two, and each half recomputes.
            held: with `halves`, as for `block_memory`.
            compiler: backend that compiles it, ``inductor`` or ``aot_eager``. Where its bytes are not known, they are
                those of an eager one, which is said once.
        """
        how = (accumulate, received, halves, held, compiler)
        key = (self.block_number(kind, loss), choice, *how)
        blocks, outside = self.cache.blocks, self.outside(loss)

        def engine(compiled: Pieces | None = None) -> BlockEvents:
            return block_memory(
                self.live.kinds[kind],
                self.regions(kind, choice),
                self.live.run,
                outside.used[kind],
                accumulate=accumulate,
                layouts=None if halves else outside.layouts[kind],
                received=received,
                apart=[expert.module for expert in self.experts],
                halves=halves,
                held=held,
                compiled=compiled,
            )

        def run() -> BlockEvents:
            compiled = compiler and self._compiled(compiler, kind, choice, loss, accumulate, received, halves, engine)
            return compiled or engine()

        if key not in blocks:
            of_kind = (self.traced.kinds[kind].key, sorted(outside.used[kind]), sorted(outside.layouts[kind].items()))
            blocks[key] = self.stored(("block", *of_kind, choice.told, *how), run)
        return blocks[key]

    def apart(self, kind: int) -> list[nn.Module]:
        """Return the modules of a kind of layer that a compiler leaves to eager code: experts that ranks share."""
        experts = {expert.module for expert in self.experts}
        call = next(call for call in self.traced.calls if call.kind == kind)
        return [module for module in call.module.modules() if module in experts]

    def _compiled(
        self,
        compiler: str,
        kind: int,
        choice: Choice,
        loss: StepLoss | None,
        accumulate: bool | UpdateInBackward,
        received: bool,
        halves: bool,
        engine: Callable[[Pieces], BlockEvents],
    ) -> BlockEvents | None:
        """Return `memory` of a compiled block; None: it is not told, which is said once.

        engine: runs the block in pieces.
        """
        block, around = self.live.kinds[kind], choice.is_full
        key = (self.block_number(kind, loss), compiler)
        graphs = self.cache.graphs
        try:
            if halves:
                raise NotCompiledError("its backward is cut in two")
            if choice.inside:
                raise NotCompiledError("its regions are modules inside of it")
            if "host" in choice.decisions:
                raise NotCompiledError("some of the tensors it saves wait in CPU memory")
            used, apart = self.outside(loss).used[kind], self.apart(kind)
            if not self.problems[kind].compiles(choice):
                raise NotCompiledError("a region that keeps some of its tensors runs eagerly around split experts")
            if key not in graphs:
                trace = functools.partial(_pieces().traced_pieces, apart=apart) if apart else traced_block
                graphs[key] = trace(block, self.live.run, used, fuses=compiler == "inductor")
            pieces: Any = graphs[key]
            if apart:
                events = engine(pieces)
                makers = {number: op for number, op in events.makers.items() if op is not _pieces().ALLOCATES}
                return replace(events, makers=makers, kept_inputs=None if around else pieces.kept_inputs)
            policy = None if around else self.regions(kind, choice).get("")
            return compiled_memory(pieces(policy), around=around, accumulate=accumulate, received=received)
        except NotCompiledError as error:
            warn_once(
                f"Compiled layers ({type(block.module).__name__}) are predicted with the bytes of eager ones: {error}."
            )
            return None

    @_remembered
    def block_number(self, kind: int, loss: StepLoss | None = None) -> int:
        """Return a number, the same for equal blocks whose outputs get equal gradients."""
        outside = self.outside(loss)
        layouts = tuple(sorted(outside.layouts[kind].items()))
        return self.cache.number((self.shape, self.traced.kinds[kind].key, outside.used[kind], layouts))

    def outside(
        self,
        loss: StepLoss | None = None,
        *,
        accumulate: bool | UpdateInBackward = False,
        choices: Sequence[Choice] | None = None,
        halves: bool = False,
    ) -> OuterEvents:
        """Return the model's allocations outside its layers.

        Args:
            loss: of the step; None: the traced one.
            accumulate: backward adds to gradients that are there.
            choices: how the layers run; None: as regions, which hold all that they are called with. Where only some of a
                kind are regions, the others are counted as such, too.
            halves: backward is cut in two.
        """
        loss = self.loss if loss is None else loss
        held = self._held(choices)
        key = (self._number, loss, accumulate, held, halves)
        if key not in self.cache.outside:
            run = functools.partial(
                outer_memory,
                self.model,
                self.layers,
                step=StepSpec(loss_fn=loss.loss_fn, keeps_output=loss.keeps_output),
                chunks=loss.chunks,
                accumulate=accumulate,
                halves=halves,
                held=held,
                split_loss=self.splits_loss,
            )
            # A stage that sends its output has a function of this package as its loss.
            ours = self.is_stage and getattr(loss.loss_fn, "__module__", "").startswith("nemo_like.")
            places = [sorted(each, key=str) for each in held]
            words = ("outside", loss[:2], "sent" if ours else loss.loss_fn, accumulate, places, halves)
            memory = self.stored(words, lambda: run(traced=self.live))
            seconds, kinds = work_seconds(memory.work, self.device)
            memory = replace(memory, seconds=seconds, kinds=kinds)
            for reason in memory.whole_logits if loss.chunks == self.loss.chunks else ():
                say_whole_logits(self.whole, reason)
            self.cache.outside[key] = memory
        return self.cache.outside[key]

    def _held(self, choices: Sequence[Choice] | None) -> tuple[frozenset[Place], ...]:
        """Return the places of the shared inputs that each kind of layer holds."""
        if choices is None:
            return tuple(frozenset(kind.shared) for kind in self.traced.kinds)
        held = [kind.kept_at for kind in self.traced.kinds]
        for call, choice in zip(self.traced.calls, choices):
            kind = self.traced.kinds[call.kind]
            if choice.decisions:
                around = choice.around
                held[call.kind] |= frozenset(kind.shared) if around is None else kind.places_of(around.kept_shared)
        return tuple(held)

    def can_chunk(self) -> bool:
        """Return whether the loss can be computed in chunks, so that the logits are never whole."""
        return (
            find_head(self.model) is not None
            and not self.outside(self.loss._replace(chunks=ChunkedLoss())).whole_logits
        )

    @cached_property
    def trained(self) -> frozenset[str]:
        """Names of the parameters that get a gradient in a step: others have no optimizer state."""
        named = dict(self.model.named_parameters(remove_duplicate=False))
        key = tuple((name, p.requires_grad) for name, p in named.items())
        if key not in self.cache.trained:
            outside = self.outside()
            names = {module: name for name, module in self.model.named_modules()}
            trained = set(outside.param_grads)
            for position in sorted(back.layer for back in outside.backs):
                call = self.traced.calls[position]
                memory = self.memory(call.kind, self.problems[call.kind].none())
                trained |= {f"{names[call.module]}.{name}" for name in memory.param_grads}
            self.cache.trained[key] = frozenset(name for name in trained if name in named)
        return self.cache.trained[key]

    @_remembered
    def forms(self, *, whole: bool, ends: str) -> tuple[ParameterForms, int]:
        """Return the parameters by the facts that decide their bytes, and a number that is equal for equal ones.

        whole: one rank has all of the model. ends: of `nemo_like.options.FSDP2`.
        """
        forms = ParameterForms(
            self.model, self.layers, whole=whole, trained=self.trained, experts=self.experts, ends=ends
        )
        return forms, self.cache.number((ends, forms.content()))

    def expert_names(self, call: TracedCall) -> frozenset[str]:
        """Return the names in a layer of the weights of experts that are an FSDP2 unit of their own."""
        weights = {weight for expert in self.experts for weight in expert.weights}
        return frozenset(name for name, p in call.module.named_parameters() if p in weights)


def _policy(problem: BlockProblem, choice: Choice) -> Policy:
    if choice.is_full:
        return KeepRouting(FullPolicy()) if "save" in choice.decisions else FullPolicy()
    on_device = {"host": "save"}
    return DecisionTable.from_json({op: [on_device.get(w, w) for w in row] for op, row in problem.rows(choice).items()})


def _pieces() -> ModuleType:
    """Return the module of layers in several graphs, which few plans need: its operators take 40 ms to register."""
    return importlib.import_module("nemo_like.planning.trace.compiled_pieces")


def shape_of(job: Job) -> Hashable:
    """Return the key of a trace, without the sizes that only divide experts: equal for jobs that share results."""
    how = (job.param_dtype, job.precision.matmuls, job.fsdp is None)
    return repr((*how, job.tp, job.cp, job.ep.imbalance)), device_of(job).name


def local_shape(job: Job) -> Hashable:
    """Return the key of a trace: equal for jobs in which a rank runs the same operators."""
    return shape_of(job), repr(job.ep)


def _found_and_chosen(model: nn.Module, layers: Any) -> tuple[tuple[find.Layer, ...], frozenset[str]]:
    """Return all layers of the model, and the names of those to plan for."""
    chosen = find.find_layers(model, layers)
    names = frozenset(layer.fqn for layer in chosen)
    if hasattr(model, STAGE_MARK):
        return chosen, names  # the others are on other stages
    try:
        every = find.find_layers(model)
    except find.LayersNotFoundError:
        return chosen, names  # only the caller knows the layers
    return (every if names <= {layer.fqn for layer in every} else chosen), names


def in_four_bits(model: nn.Module) -> nn.Module:
    """Put weights as they are in 4 bits, on the meta device, in the place of those that bitsandbytes has still to quantise.

    model: changed in place.
    """
    waiting = [module for module in model.modules() if is_unquantised(module._parameters.get("weight"))]
    if waiting:
        bitsandbytes = require("bitsandbytes", "qlora", "for weights in 4 bits")
        # bitsandbytes has one table for the scales of all weights, on the first device that it quantises on.
        with patch.dict(bitsandbytes.functional.name2qmap, clear=True):
            for module in waiting:
                weight: Any = module.weight
                how = {
                    name: getattr(weight, name)
                    for name in ("blocksize", "compress_statistics", "quant_type", "quant_storage")
                }
                data, state = bitsandbytes.functional.quantize_4bit(weight.data.to("meta"), **how)
                module.weight = type(weight)(data, quant_state=state, bnb_quantized=True, **how)
                module.quant_state = state
    return model


def _with_four_bits(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Put bitsandbytes' linears in 4 bits in the place of those that transformers loads so: all but the head.

    They are as QLoRA has them (https://arxiv.org/abs/2305.14314): NF4, with scales in 8 bits. They are stored in `dtype`,
    which FSDP2 shards, as axolotl (``axolotl/loaders/model.py``) and NeMo Automodel (``components/quantization/qlora.py``)
    have them.
    """
    require("bitsandbytes", "qlora", "for weights in 4 bits")
    transformers = require("transformers", "hf", "for weights in 4 bits")
    if not isinstance(model, transformers.PreTrainedModel):
        raise ValueError(
            f"four_bit is True, and {type(model).__name__} is not a model of transformers, which decides on the linears to "
            "quantise. Give module:function, which returns a model with linears of bitsandbytes and adapters."
        )
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype,
    )
    quantizer = transformers.quantizers.AutoHfQuantizer.from_config(config, pre_quantized=False)
    quantizer.preprocess_model(model, device_map=None)
    quantizer.postprocess_model(model)
    for param in filter(is_unquantised, model.parameters()):
        param.data = param.data.to(dtype)
    return in_four_bits(model)


def with_adapters(
    model: nn.Module, rank: int, frozen: torch.dtype | None = None, *, four_bit: bool = False
) -> nn.Module:
    """Add adapters of `rank` to all linear layers of `model` but the head, by peft; all else no longer trains.

    Args:
        model: changed in place, as peft does.
        rank: rank of the adapters, >= 1.
        frozen: dtype of frozen parameters; None: as they are.
        four_bit: the frozen linear layers have 4 bits, as in QLoRA; `model` is one of transformers on the meta device.

    Raises:
        ValueError: `rank` is below 1; `four_bit` of another model. MissingExtraError: peft or bitsandbytes is not installed.
    """
    if rank < 1:
        raise ValueError(f"The rank of the adapters is {rank}; it must be >= 1.")
    peft = require("peft", "finetune", "to put adapters into a model")
    if four_bit:
        model = _with_four_bits(model, frozen or torch.get_default_dtype())
    setattr(model, "name_or_path", getattr(model, "name_or_path", ""))  # noqa: B010 - peft reads it
    config = peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    # Of a model without memory adapters have none either: peft would draw their values on the CPU, for minutes at 405B.
    without = all(param.is_meta for param in model.parameters())
    adapted: nn.Module = peft.get_peft_model(model, config, low_cpu_mem_usage=without)
    for param in adapted.parameters():
        if frozen is not None and not param.requires_grad and param.is_floating_point():
            param.data = param.data.to(frozen)
    return adapted


def check_float8_plan(job: Job, device: Device) -> None:
    """Raise where layers multiply in float8, and no plan is made of that.

    Raises:
        ValueError: float8 together with an option that is not planned with it, or a GPU that does not multiply in it.
        MissingExtraError: torchao is not installed.
    """
    word = job.precision.matmuls
    if word is None:
        return
    if word == "fp8-gather" and job.fsdp is not None:
        raise ValueError(
            "precision is 'fp8-gather': the bytes of weights that FSDP2 gathers in float8 are not known, so no plan is "
            "made. Use precision='fp8', or a mode such as ac='selective'."
        )
    check_capability(word, device.name, device.cuda)
    check_float8(word)
