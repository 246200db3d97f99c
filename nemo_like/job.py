"""`Job`: a caller's options, read and checked once, and the same for everything that runs or predicts it.

A `Job` holds no model. `parallelize`, the planner, `fit`, the commands, the recipes and the integrations make one and hand
it on, so that two of them cannot answer two different questions. `RULES` lists the combinations that make no sense.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, Unpack

from nemo_like._util.words import check_fields, setting
from nemo_like.options import (
    AC_STRATEGIES,
    COMPILE_BACKENDS,
    DDP,
    FSDP2,
    LOSSES,
    STRATEGIES,
    CheckpointConfig,
    ChunkedLoss,
    ContextParallel,
    ExpertParallel,
    MemoryBudget,
    NamedLists,
    OffloadConfig,
    PipelineParallel,
    PlanSearch,
    Precision,
    Single,
    StepSpec,
    TensorParallel,
    did_you_mean,
    dtype_word,
    parse_ac,
    parse_compile,
    parse_strategy,
)
from nemo_like.options.flag import flagged
from nemo_like.options.memory import AllocatorConfig, allocator_here
from nemo_like.options.names import NO_NAMES
from nemo_like.options.parallel import OFFLOADS, in_stage, undivided, undivided_shards, unit_reshards

if TYPE_CHECKING:  # the help of a command reads the fields of a job, and needs no torch
    import torch
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from nemo_like.activation_checkpointing.plan import Plan
    from nemo_like.activation_checkpointing.policy import Policy

    Lists: TypeAlias = Mapping[str, Any] | Iterable[Mapping[str, Any]] | NamedLists
    Checkpointing: TypeAlias = str | bool | Lists | CheckpointConfig | MemoryBudget | Plan | Policy | None


ATTENTION_KERNELS = ("cudnn", "flash", "fa3")
Strategy: TypeAlias = str | FSDP2 | DDP | Single


class FixedKeywords(TypedDict, total=False):
    """Keywords that no search of `nemo_like.planning.fit` chooses: a field of `Job` each, as a caller may write it."""

    ac_scope: str | Iterable[str]
    layers: str | nn.Module | Iterable[str | nn.Module] | None
    step: StepSpec | None
    planned_tokens: int | None
    device: str | torch.device | None
    gpu: Any
    attention: str | None
    world_size: int | None
    allocator: AllocatorConfig | str | None
    search: PlanSearch | None


class JobKeywords(FixedKeywords, total=False):
    """Keywords that `parallelize` takes besides `strategy`, `ac` and `pp`, on which its result depends."""

    dp_replicate: int
    tp: int | TensorParallel
    cp: int | ContextParallel
    ep: int | ExpertParallel
    loss: str | ChunkedLoss | None
    precision: str | torch.dtype | Precision | MixedPrecisionPolicy | None
    compile: bool | str | None
    offload: str | OffloadConfig | None
    optimizer: str | None


class StagedKeywords(JobKeywords, total=False):
    """Keywords that `parallelize` takes besides `strategy` and `ac`."""

    pp: int | PipelineParallel


class AllKeywords(StagedKeywords, total=False):
    """Keywords that `Job.of`, `plan_for` and `fit` take."""

    strategy: Strategy
    ac: Checkpointing


@dataclass(frozen=True, kw_only=True)
class Job:
    """The request for a training job: the keywords of `nemo_like.parallelize`, each as one checked value.

    >>> job = Job.of(ac="40GiB", tp=8)
    >>> job.tp, job.change(tp=2).tp.size
    (TensorParallel(size=8, plan=None, sequence_parallel=False, loss_parallel=False, asynchronous=False), 2)
    >>> job.as_call()
    "model = parallelize(model, strategy='fsdp2', ac='40GiB', tp=8)"

    Raises:
        ValueError, TypeError: a wrong value, or two values that exclude each other (`RULES`).
    """

    strategy: FSDP2 | DDP | Single = flagged(FSDP2(), "pretrain", default="fsdp2", choices=STRATEGIES)
    """The way in which parameters are spread over the ranks. ``"fsdp2"``, ``"ddp"`` or ``"single"``. Also `FSDP2(...)`
    with its own options (resharding, prefetch, CPU offload, frozen encoders), or `DDP(...)` (unused parameters, bucket
    size). With one rank all mean ``"single"``: no process group."""
    ac: CheckpointConfig | MemoryBudget | NamedLists | Plan = flagged(
        "selective",
        "pretrain finetune",
        "memory",
        values=" | ".join(AC_STRATEGIES),
        write=lambda ac: getattr(ac, "mode", ac),
    )
    """Activation checkpointing, or a budget such as ``"40GiB"``, ``"50%"`` or ``"auto"``. ``None``/``False``/``"none"``,
    ``True``/``"full"`` (recompute whole layers), ``"selective"`` (keep the expensive ops), ``"submodule"``,
    ``"sequential"`` (recompute segments of layers). With a `sample_input`: ``"40GiB"`` (the best plan for that
    peak per rank), ``"50%"`` (of the activation bytes of ``"none"``), ``"auto"`` (this device's memory) or a
    `MemoryBudget`. Lists of names: ``{"save": ["attention"], "offload": ["mlp.up_proj"]}``, the rest of a layer being
    recomputed; ``{"recompute": ["mlp"]}``, these modules alone; several with ``"layers"``, of which the first that matches
    counts (`NamedList`). Also a `Plan`, a `CheckpointConfig`, or a policy object (`SelectivePolicy`, `TorchPolicy`)."""
    ac_scope: str | tuple[str, ...] = flagged(
        "all",
        "pretrain finetune",
        "model",
        name="scope",
        values="all | language | vision | audio, several with commas",
        read=lambda scope: tuple(scope.split(",")) if "," in scope else scope,
    )
    """The groups of layers to checkpoint. ``"all"``, ``"language"``, ``"vision"``, ``"audio"``, ``"multimodal"`` or a
    list. A frozen layer is recomputed in calls with an input that needs a gradient."""
    layers: tuple[str | nn.Module, ...] | None = None
    """Names (globs) or modules of the layers; None: found by structure."""
    dp_replicate: int = flagged(1, "plan pins pretrain", kind=int, least=1)
    """FSDP2: replicas of the sharded model (HSDP); must divide the number of ranks."""
    tp: TensorParallel = TensorParallel()
    """FSDP2: ranks that each large weight is split over (must divide the number of ranks), or `TensorParallel(...)` with
    a plan, sequence parallelism and a loss that stays split by vocabulary."""
    cp: ContextParallel = ContextParallel()
    """FSDP2: ranks that each sequence is split over, or `ContextParallel(...)` with the method. Every rank of a ``cp``
    group is called with the same whole sequences. The loss is that of the whole, the same on each. Other outputs
    are this rank's part (`nemo_like.distributed.unshard_sequence`)."""
    ep: ExpertParallel = ExpertParallel()
    """FSDP2: ranks that each layer's experts are split over, or `ExpertParallel(...)` with a plan. It must divide
    ``dp_shard x cp x tp``, and the number of experts. Tokens travel to the experts and back."""
    pp: PipelineParallel = PipelineParallel()
    """Ranks that the layers are divided among, or `PipelineParallel(...)` with schedule, micro-batches and balance. It
    needs `sample_input`, one micro-batch. A `Pipeline` is returned then, whose ``step(**batch)`` takes whole
    batches."""
    loss: ChunkedLoss | None = flagged(
        None,
        "plan pins pretrain",
        "memory",
        default="model",
        choices=LOSSES,
        write=lambda loss: "model" if loss is None else "chunked",
    )
    """Whose loss: the model's own, or head and loss of a few tokens at a time. ``"model"``, or ``"chunked"``
    (`ChunkedLoss(...)` with sizes): a cross entropy that the model computes of its head's output from ``labels``
    in training mode is computed a chunk of tokens at a time, and ``output.logits`` is None. Where the model does
    something else with the logits, they are made, and this is logged."""
    precision: Precision = Precision()
    """The dtype to compute in (``"bf16"``), ``"fp8"`` (bfloat16, with the matmuls of the layers' linears in float8, by
    torchao; also ``"fp8-rowwise"``, ``"fp8-gather"``, ``"mxfp8"``, ``"mxfp8-emulated"``), a `Precision` (also for
    reduction and outputs) or torch's `MixedPrecisionPolicy`. FSDP2 casts parameters; the other strategies use autocast."""
    compile: str | None = flagged(
        None,
        "plan pretrain",
        "training",
        default="none",
        choices=("none", *COMPILE_BACKENDS),
        read=lambda word: None if word == "none" else word,
        write=lambda backend: backend or "none",
    )
    """The backend that compiles each layer in place. ``True`` means ``"inductor"``."""
    offload: OffloadConfig = flagged(
        OffloadConfig("none"),
        "plan pins pretrain finetune",
        "memory",
        default="none",
        choices=OFFLOADS,
        moves=True,
        read=OffloadConfig.of,
        write=lambda offload: offload.mode,
    )
    """Tensors that wait in CPU memory between forward and backward. ``"boundary"`` (layer inputs), ``"saved"`` (these
    and the tensors that checkpointing keeps), ``"all"``, or an `OffloadConfig`."""
    step: StepSpec = StepSpec()
    """The training loop that a prediction counts with. A `StepSpec` has micro-batches, a loss outside of the model,
    whether the output is dropped before backward, and the optimizer. Default: ``out = model(**batch);
    out.loss.backward()``, then one step of AdamW."""
    planned_tokens: int | None = setting(None, least=1)
    """Tokens of the largest micro-batch of one rank that memory was planned for. `nemo-like fit` reports it, for jobs
    without a plan. A larger batch is trained on, and a warning is logged once."""
    device: torch.device | None = None
    """The device that the model goes to; None: this rank's accelerator if there is one, else the CPU."""
    gpu: Any = flagged(None, default="h100-80gb")
    """The device to predict for, by name or JSON file. A name of `nemo_like.planning.devices.known_devices`, a file or a
    `Device`; None: the one at hand."""
    attention: str | None = flagged(None, choices=ATTENTION_KERNELS)
    """The kernel whose speed a prediction counts attention with. ``"cudnn"``, ``"flash"`` (FlashAttention-2) or ``"fa3"``
    (FlashAttention-3), in 16 bits; None: the kernel that PyTorch picks on that GPU."""
    world_size: int | None = flagged(None, "", default=1, kind=int, least=1)
    """Ranks in all. It must be as many as there are, and is for predictions where no process group is; None: the process
    group's, else the launcher's, else 1."""
    allocator: AllocatorConfig = flagged(
        AllocatorConfig(), group="memory", name="alloc_conf", default=None, read=allocator_here
    )
    """The settings of CUDA's caching allocator that a prediction counts with, as in PYTORCH_ALLOC_CONF. Default: its
    own."""
    search: PlanSearch = PlanSearch()
    """Ways that a plan may use to stay within a budget."""
    asked: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    """The fields that the caller gave; `nemo_like.planning.fit` chooses the others."""

    def __post_init__(self) -> None:
        for name, read in _READERS.items():
            object.__setattr__(self, name, read(getattr(self, name)))
        check_fields(self, str)
        for rule in RULES:
            for problem in rule(self):
                raise ValueError(problem)

    @classmethod
    def of(cls, *positional: object, **asked: Unpack[AllKeywords]) -> Job:
        """Make the job that the keywords of `nemo_like.parallelize` ask for.

        Args:
            positional: ``strategy`` and ``ac``. A `Job` in place of ``strategy`` is returned as it is.
            asked: the fields by name, and ``optimizer``, short for ``step=StepSpec(optimizer=...)``.

        Raises:
            TypeError: an unknown name, or keywords together with a `Job`.
            ValueError, TypeError: as `Job`.
        """
        values: dict[str, Any] = dict(zip(("strategy", "ac"), positional, strict=False)) | dict(asked)
        for name in values:
            if name not in KEYWORDS:
                hint = f" Did you mean {_ELSEWHERE[name]}?" if name in _ELSEWHERE else did_you_mean(name, KEYWORDS)
                raise TypeError(
                    f"parallelize() and Job.of() have no keyword {name!r}."
                    + (hint or f" They have {', '.join(KEYWORDS)}.")
                )
        job = values.get("strategy")
        if isinstance(job, Job):
            other = next((name for name in values if name != "strategy"), None)
            if other is not None:
                raise TypeError(f"{other}= was given together with a Job; write job.change({other}=...).")
            return job
        optimizer = values.pop("optimizer", None)
        if optimizer is not None:
            values["step"] = StepSpec.of(values.get("step"), optimizer)
        return cls(**values, asked=frozenset(values))

    def __hash__(self) -> int:
        axes = (self.world_size, *_sizes(self).values(), self.ep.size, self.step.microbatches, self.step.optimizer)
        return hash((*axes, self.compile, self.loss is None, self.offload.mode))

    def change(self, **fields: Any) -> Job:
        """Return this job with other values in some fields, read and checked as `Job.of` does."""
        return replace(self, **fields, asked=self.asked | set(fields))

    # --- ranks -----------------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> int:
        """Ranks of the job; 1 where it is not known."""
        return self.world_size or 1

    @property
    def is_single(self) -> bool:
        """Return whether every rank trains by itself: one rank (but for `FSDP2.on_one_rank`), or ``strategy="single"``."""
        sharded = isinstance(self.strategy, FSDP2) and self.strategy.on_one_rank
        return isinstance(self.strategy, Single) or (self.ranks == 1 and not sharded)

    @property
    def fsdp(self) -> FSDP2 | None:
        """The options of FSDP2; None where the model stays whole on each rank."""
        return self.strategy if isinstance(self.strategy, FSDP2) and not self.is_single else None

    @property
    def offloads_state(self) -> bool:
        """True where FSDP2 keeps parameter shards, gradients and optimizer state in CPU memory."""
        return isinstance(self.strategy, FSDP2) and self.strategy.cpu_offload

    @property
    def ddp(self) -> DDP | None:
        """The options of `DistributedDataParallel`; None where it is not used."""
        return self.strategy if isinstance(self.strategy, DDP) and not self.is_single else None

    @property
    def dp_shard(self) -> int:
        """Ranks that FSDP2 shards parameters over and that see different batches; 1 without FSDP2."""
        if self.fsdp is None:
            return 1
        return self.ranks // (self.dp_replicate * self.tp.size * self.cp.size * self.pp.size)

    @property
    def shard_ranks(self) -> int:
        """Ranks that a parameter is sharded over: ``dp_shard x cp``."""
        return self.dp_shard * (self.cp.size if self.fsdp is not None else 1)

    @property
    def data_ranks(self) -> int:
        """Ranks that see different batches."""
        return self.ranks // (self.tp.size * self.cp.size * self.pp.size)

    @property
    def chunks(self) -> ChunkedLoss | None:
        """`loss` with its compiler: that of the layers, unless it has its own setting."""
        if self.loss is None or self.loss.compile is not None:
            return self.loss
        return replace(self.loss, compile=self.compile)

    @property
    def partitioner(self) -> str | None:
        """The compiler, where AOTAutograd cuts layers into a forward and a backward graph; None: they run as eager ones."""
        return None if self.compile == "eager" else self.compile

    @property
    def param_dtype(self) -> torch.dtype | None:
        """The dtype to compute in; None: that of the parameters."""
        return self.precision.dtypes["param_dtype"]

    def on(self, *, dp_shard: int, **fields: Any) -> Job:
        """Return this job, with other values in some `fields`, on as many ranks as its axes and `dp_shard` take."""
        job = replace(self, **fields, world_size=None)
        return replace(job, world_size=dp_shard * math.prod(_sizes(job).values()))

    def of_stage(self) -> Job:
        """Return the job of one pipeline stage: the same on the ranks that hold a copy of it.

        A stage's layers stay gathered through the step unless the caller asked for something else.
        """
        ranks = self.ranks // self.pp.size
        strategy = in_stage(self.strategy) if isinstance(self.strategy, FSDP2) else self.strategy
        stage = replace(self, pp=PipelineParallel(), world_size=ranks, strategy=strategy)
        return replace(stage, strategy=Single()) if stage.is_single else stage

    # --- as code ---------------------------------------------------------------------------------------------------

    def as_call(self, *, model: str = "model", sample: str | None = None, plan: str = "plan.json") -> str:
        """Return the line of Python that makes this job.

        Args:
            model, sample: names of the model and its sample input in the line.
            plan: the file that the line loads, where `ac` is a `Plan`.

        Fields that only predictions read (`gpu`, `attention`, `world_size`, `allocator`) are not in the line: the launcher
        and the environment set them where the line runs.
        """
        words = [f"{name}={text}" for name, text in self.words(plan).items()]
        if sample is not None:
            words.append(f"sample_input={sample}")
        result = model if self.pp.size == 1 else "pipeline"
        return f"{result} = parallelize({', '.join([model, *words])})"

    def words(self, plan: str = "plan.json", *, machine: bool = False) -> dict[str, str]:
        """Return `arguments` as code by keyword; an optimizer alone is a keyword of its own."""
        words: dict[str, str] = {}
        for name, value in self.arguments(machine=machine).items():
            if _is_plan(value):
                words[name] = f"Plan.load({plan!r})"
            elif name == "step" and set(value.changed) == {"optimizer"}:
                words["optimizer"] = repr(value.optimizer)
            else:
                words[name] = as_code(value, _READERS.get(name))
        return words

    def arguments(self, *, machine: bool = False) -> dict[str, Any]:
        """Return `strategy`, `ac` and the fields that differ from the defaults; `machine`: also those that only
        predictions read."""
        left_out = ("asked", *(() if machine else _OF_THE_MACHINE))
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in left_out}
        plain = vars(_default_job())
        return {name: value for name, value in values.items() if name in _ALWAYS_IN_A_CALL or value != plain[name]}

    def as_words(self) -> Iterator[tuple[str, Any, str]]:
        """Yield the name, the value and the code of every field that was asked for."""
        for f in dataclasses.fields(self):
            if f.name != "asked":
                yield f.name, getattr(self, f.name), as_code(getattr(self, f.name), _READERS.get(f.name))


_ALWAYS_IN_A_CALL = ("strategy", "ac")
_OF_THE_MACHINE = ("gpu", "attention", "world_size", "allocator")


@functools.cache
def _default_job() -> Job:
    return Job()


def _is_plan(value: object) -> bool:
    from nemo_like.activation_checkpointing.plan import Plan

    return isinstance(value, Plan)


def _read_names(names: Any) -> Any:
    """`ac_scope` and `layers`: a list becomes a tuple, which can be compared and hashed. Others are refused later."""
    return tuple(names) if isinstance(names, Iterable) and not isinstance(names, str) else names


def _read_layers(layers: object) -> tuple[str | nn.Module, ...] | None:
    from torch import nn

    return (layers,) if isinstance(layers, str | nn.Module) else _read_names(layers)


def _read_device(device: Any) -> torch.device | None:
    import torch

    try:
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device is {device!r}; write it like 'cpu', 'cuda' or 'cuda:1'.") from error


# Functions that make the value of a field of the caller's value. A value of the right class stays as
# it is, and so does a `Plan`.
_READERS: Mapping[str, Callable[[Any], Any]] = {
    "strategy": parse_strategy,
    "ac": lambda ac: ac if _is_plan(ac) else parse_ac(ac),
    "ac_scope": _read_names,
    "layers": _read_layers,
    "tp": TensorParallel.of,
    "cp": ContextParallel.of,
    "ep": ExpertParallel.of,
    "pp": PipelineParallel.of,
    "loss": ChunkedLoss.of,
    "precision": Precision.of,
    "compile": parse_compile,
    "offload": OffloadConfig.of,
    "step": StepSpec.of,
    "device": _read_device,
    "allocator": AllocatorConfig.of,
    "search": PlanSearch.of,
}

# Keywords of other libraries, and those to write here.
_ELSEWHERE = {
    "activation_checkpointing": "ac='selective'",
    "gradient_checkpointing": "ac='full'",
    "activation_offloading": "offload='saved'",
    "mixed_precision": "precision='bf16'",
    "tensor_parallel": "tp=2",
    "context_parallel": "cp=2",
    "pipeline_parallel": "pp=2",
    "expert_parallel": "ep=2",
}
# Keywords that `Job.of` takes.
KEYWORDS: tuple[str, ...] = (*(f.name for f in dataclasses.fields(Job) if f.name != "asked"), "optimizer")


# --- combinations that are refused -----------------------------------------------------------------------------------


def _holding(*cases: tuple[bool, str]) -> Iterator[str]:
    """Yield the messages of the cases that hold."""
    return (message for holds, message in cases if holds)


def _sizes(job: Job) -> dict[str, int]:
    """Ranks of each axis that takes ranks of its own."""
    return {"pp": job.pp.size, "dp_replicate": job.dp_replicate, "cp": job.cp.size, "tp": job.tp.size}


def _of_ranks(job: Job) -> Iterator[str]:
    """Axes that the strategy or the number of ranks does not have."""
    shards, replicas = isinstance(job.strategy, FSDP2), isinstance(job.strategy, DDP)
    for name, what in (("tp", "weights"), ("cp", "sequences"), ("ep", "experts")):
        axis = getattr(job, name)
        if axis != type(axis)() and not shards:
            yield (
                f"{name} is {axis.size}: it splits {what} over the ranks of FSDP2, and strategy "
                f"{type(job.strategy).__name__.lower()!r} keeps them whole. Use strategy='fsdp2'."
            )
    alone, staged, replicated = isinstance(job.strategy, Single), job.pp.size > 1, job.dp_replicate > 1
    yield from _holding(
        (
            staged and replicas,
            f"pp is {job.pp.size} with strategy='ddp': the replicas of a stage are made by FSDP2. Use "
            "strategy='fsdp2' with dp_replicate.",
        ),
        (
            staged and alone and job.world_size not in (None, job.pp.size),
            f"pp is {job.pp.size} with strategy='single' on {job.world_size} ranks: ranks that share a stage shard it. Use "
            "strategy='fsdp2'.",
        ),
        (
            replicated and alone,
            f"dp_replicate is {job.dp_replicate}, and strategy='single' has no replicas. Use strategy='fsdp2'.",
        ),
        (
            replicated and replicas and job.world_size not in (None, job.dp_replicate),
            f"dp_replicate is {job.dp_replicate}, but 'ddp' replicates over all {job.world_size} ranks. Use "
            "strategy='fsdp2'.",
        ),
    )
    if job.world_size is None:
        return
    for name, size in (_sizes(job) | {"ep": job.ep.size}).items():
        if size != 1 and job.world_size == 1:
            yield f"{name} is {size}, but this job has one rank. Start more with torchrun, or leave {name} out."
    sizes = {name: size for name, size in _sizes(job).items() if size > 1}
    if not replicas and (problem := undivided(sizes, job.world_size, f"the {job.world_size} ranks")):
        yield problem
    ranks = job.shard_ranks * job.tp.size
    if job.ep.size > 1 and ranks % job.ep.size:
        yield (
            f"ep is {job.ep.size}, which does not divide the {ranks} ranks that hold one copy of the model "
            "(dp_shard x cp x tp). Use a divisor, or more ranks."
        )
    for name in ("sequence_parallel", "loss_parallel"):
        if job.tp.size == 1 and getattr(job.tp, name):
            yield f"{name}=True splits tensors over the ranks of tp, and tp is 1. It needs tp=2 or more."


def _of_code(job: Job) -> Iterator[str]:
    """Compilers, dtypes and budgets that cannot be combined with another option."""
    gathers_float8 = job.precision.matmuls == "fp8-gather"
    yield from _holding(
        (
            job.tp.asynchronous and job.tp.size > 1 and job.compile != "inductor",
            f"TensorParallel.asynchronous is True and compile is {job.compile!r}: only Inductor overlaps collectives "
            "with matmuls. Use compile='inductor', or asynchronous=False.",
        ),
        (
            job.compile is not None and getattr(job.ac, "use_reentrant", False),
            "CheckpointConfig.use_reentrant is True and compile is on: torch cannot compile reentrant checkpointing. Set "
            "use_reentrant=False, or compile=False.",
        ),
        (
            gathers_float8 and job.offloads_state,
            "precision is 'fp8-gather' with cpu_offload=True: shards would be cast to float8 on the host, which was not "
            "tried. Use precision='fp8'.",
        ),
        (
            gathers_float8 and job.tp.size > 1,
            f"precision is 'fp8-gather' with tp={job.tp.size}: torchao gathers no weights in float8 that tp has split. Use "
            "precision='fp8'.",
        ),
    )
    lists = job.ac.lists if isinstance(job.ac, NamedLists) else [getattr(job.ac, "fixed", NO_NAMES)]
    for names in (one.offload for one in lists if one.offload and job.compile is not None):
        yield (
            f"ac has offload={list(names)} and compile is {job.compile!r}: compiled graphs keep nothing in CPU memory. Put "
            "them into save, or use compile=None."
        )
    if isinstance(job.ac, MemoryBudget) and job.pp.size > 1 and job.offloads_state:
        yield f"ac is {job.ac} with cpu_offload=True and pp: no plan is made for that. Use a mode: ac='selective'."


def _of_stages(job: Job) -> Iterator[str]:
    """Options that the stages of a pipeline, or shards that are gathered again, do not have."""
    if job.pp.split is not None:
        unplanned = "no plan is made for those; a mode such as 'selective' is"
        for owner, is_asked, reason in (
            (f"ac is {job.ac}", isinstance(job.ac, MemoryBudget), unplanned),
            ("ac is a plan", _is_plan(job.ac), unplanned),
            (f"cp is {job.cp.size}", job.cp.size > 1, "the tensors they send are not cut along the sequence"),
        ):
            if is_asked:
                yield f"{owner} with split=, whose stages are the caller's own: {reason}. Leave one of the two out."
    fsdp = job.strategy if isinstance(job.strategy, FSDP2) else FSDP2()
    stays = not unit_reshards(in_stage(fsdp), "layer") or job.pp.size == 1 or job.world_size == job.pp.size
    if not stays and job.pp.facts.splits_backward:
        yield (
            f"strategy is {as_code(fsdp)} with the schedule {job.pp.schedule!r}, which cuts backward in two: torch picks "
            "the parameters of the second half before FSDP2 gathers them again, and their gradients would be lost. Leave "
            "the option out, or use 'interleaved_1f1b'."
        )
    is_whole = job.world_size == job.pp.size > 1  # a stage on one rank: nothing is sharded
    if job.world_size is not None and not is_whole and isinstance(job.strategy, FSDP2):
        problem = undivided_shards(job.strategy, job.shard_ranks)
        if problem is not None:
            yield problem
    if not job.step.in_backward:
        return
    for with_ in _holding(
        (job.pp.size > 1, f"pp={job.pp.size}: a stage reduces its gradients behind its last micro-batch"),
        (job.cp.size > 1, f"cp={job.cp.size}: it was not tried with parts of sequences"),
        (job.ep.size > 1, f"ep={job.ep.size}: it was not tried with experts that are split"),
        (isinstance(job.strategy, DDP), "strategy='ddp': gradients are summed over the ranks behind the hooks"),
        (job.offloads_state, "cpu_offload=True: backward would wait for steps on the host"),
    ):
        yield f"StepSpec.in_backward is True with {with_}. Leave one of the two out."


RULES: tuple[Callable[[Job], Iterator[str]], ...] = (_of_ranks, _of_code, _of_stages)
"""Rules on options that cannot be combined, whatever the model: each yields the messages of errors."""


# --- values as code ----------------------------------------------------------------------------------------------------


def as_code(value: object, read: Callable[[Any], Any] | None = None) -> str:
    """Return the shortest Python that means `value`: a word for `read`, else its class with the fields that differ.

    >>> as_code(TensorParallel(4), TensorParallel.of), as_code(TensorParallel(4, loss_parallel=True), TensorParallel.of)
    ('4', 'TensorParallel(size=4, loss_parallel=True)')
    """
    import torch

    for word in _shorthands(value):
        try:
            if read is not None and read(word) == value:
                return repr(word)
        except (ValueError, TypeError):
            continue
    if isinstance(value, torch.dtype):
        return repr(dtype_word(value))
    if isinstance(value, torch.device):
        return repr(str(value))
    if isinstance(name := getattr(value, "name", None), str):  # a device
        return repr(name)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init]
        plain = _plain(type(value))
        always: tuple[str, ...] = ()
        if isinstance(value, PipelineParallel):  # whose other defaults follow from these two
            plain, always = PipelineParallel(value.size, value.schedule), ("size", "schedule")
        fields = [
            (name, mine) for name, mine in fields if name in always or plain is None or mine != getattr(plain, name)
        ]
        return f"{type(value).__name__}({', '.join(f'{name}={as_code(mine)}' for name, mine in fields)})"
    if callable(value):
        return getattr(value, "__qualname__", repr(value))
    if isinstance(value, tuple):
        return f"({', '.join(map(as_code, value))}{',' if len(value) == 1 else ''})"
    return repr(value)


def _shorthands(value: object) -> Iterable[Any]:
    """Words that may mean `value`."""
    if isinstance(value, CheckpointConfig):
        yield value.mode
    if isinstance(value, MemoryBudget | NamedLists):
        yield value.words
    if isinstance(value, Single | DDP | FSDP2):
        yield type(value).__name__.lower()
    if isinstance(value, ChunkedLoss):
        yield "chunked"
    if isinstance(value, OffloadConfig):
        yield value.mode
    if isinstance(value, Precision):
        yield value.matmuls
        yield dtype_word(value.dtypes["param_dtype"])
    if isinstance(size := getattr(value, "size", None), int):
        yield size


@functools.cache
def _plain(kind: type) -> Any:
    """`kind` with its defaults; None where it has fields without one."""
    try:
        return kind()
    except (TypeError, ValueError):
        return None
