"""Options to split, cast and place a model: FSDP2, tensor parallelism, precision, offloading."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nemo_like._util.words import a_or_an, check_fields, check_word, parse_dtype, setting
from nemo_like.options.flag import flagged
from nemo_like.options.pipelining import Axis, parse_loss_mean

if TYPE_CHECKING:  # imported where a dtype or a policy is read
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

STRATEGIES: tuple[str, ...] = ("fsdp2", "ddp", "single")
FROZEN_SHARDING: tuple[str, ...] = ("root", "replicate", "per_layer")
MXFP8: tuple[str, ...] = ("mxfp8", "mxfp8-emulated")
FLOAT8: tuple[str, ...] = ("fp8", "fp8-rowwise", "fp8-gather", *MXFP8)
ENDS: tuple[str, ...] = ("apart", "root")
# Kinds of device to train on, the first one that is visible first, and the back ends of a process group there.
BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "cpu": "gloo"}
OFFLOADS: tuple[str, ...] = ("none", "boundary", "saved", "all")
EXPERT_CALLS: tuple[str, ...] = ("routed", "every")


# Words for `FSDP2.reshard_after_forward`.
RESHARD: dict[str, bool | int | None] = {"default": None, "yes": True, "no": False}


def read_reshard(word: object) -> bool | int | None:
    """Return the value of `FSDP2.reshard_after_forward` that `word` means.

    Raises:
        ValueError: neither a word of `RESHARD` nor a number.
    """
    if isinstance(word, bool | int | None):
        return word
    if word in RESHARD:
        return RESHARD[str(word)]
    if isinstance(word, str) and word.isdigit():
        return int(word)
    raise ValueError(f"--reshard-after-forward is {word!r}; it must be {', '.join(RESHARD)}, or a number of ranks.")


def reshard_word(value: bool | int | None) -> str:
    """Return the word of ``--reshard-after-forward`` for this value of `FSDP2.reshard_after_forward`."""
    return next((word for word, known in RESHARD.items() if known is value), str(value))


@dataclass(frozen=True)
class FSDP2:
    """FSDP2 with its own options. Usable as ``strategy=`` of `nemo_like.parallelize`; ``"fsdp2"`` means the defaults.

    >>> FSDP2(reshard_after_forward=False).forward_prefetch
    1
    """

    reshard_after_forward: bool | int | None = flagged(
        None,
        "plan pins pretrain finetune",
        default="default",
        searched=(None, False),
        column="reshard",
        values="default | yes | no | ranks",
        read=read_reshard,
        write=reshard_word,
    )
    """Free the gathered parameters after forward and gather them again in backward. None: layers do, except the last,
    which backward needs at once; tail and root do not. True / False: all / none. A number: layers stay sharded over
    that many ranks in between (a divisor of the shard axis)."""
    forward_prefetch: int = flagged(1, name="prefetch", kind=int, least=0, unit="whole number of units")
    """Number of following units that each unit gathers ahead in forward; 0: FSDP's implicit prefetch."""
    backward_prefetch: int = setting(1, least=0, unit="whole number of units")
    """The same for backward."""
    cpu_offload: bool = flagged(
        False, "plan pins pretrain", "memory", kind=bool, stages=False, moves=True, searched=(False, True)
    )
    """Keep parameter shards, gradients and optimizer state in CPU memory."""
    frozen_sharding: str = setting("root", choices=FROZEN_SHARDING)
    """Frozen layers of a vision or audio encoder that a rank without such an input skips (with `shard_layers` and layers
    without groups, all that are frozen next to layers that train). ``root``: gathered with the root on every rank, so that
    none waits. ``replicate``: whole on every rank. ``per_layer``: like any layer, least memory; refused as soon as one rank
    runs the encoder and another does not."""

    ends: str = setting("apart", choices=ENDS)
    """Units of the modules around the layers. ``apart``: the embedding has one, the last norm and the head another.
    ``root``: all are one unit, gathered from the beginning of a step to its end, as in a loop that calls `fully_shard`
    for the layers and then for the model."""

    on_one_rank: bool = flagged(False, "plan pretrain", kind=bool)
    """Shard on one rank too, as torchtitan does. Parameters are cast to the dtype to compute in, a unit at a time, in the
    place of a whole model under autocast, which keeps more for backward. A process group of one rank is made."""
    timeout_seconds: float | None = setting(None, above=0, unit="number of seconds")
    """Seconds that a collective may wait for the other ranks, where `parallelize` makes the process group itself; one
    that exists keeps its own. None: torch's default."""

    def __post_init__(self) -> None:
        check_fields(self)
        reshard = self.reshard_after_forward
        if reshard is not None and not isinstance(reshard, int):
            raise TypeError(f"reshard_after_forward is {reshard!r}; it must be None, a bool or a number of ranks.")
        if not isinstance(reshard, bool | None) and reshard < 2:
            raise ValueError(f"reshard_after_forward is {reshard!r}; as a number of ranks it must be at least 2.")


def undivided(sizes: Mapping[str, int], ranks: int, of_ranks: str) -> str | None:
    """Return the message on axes whose product does not divide `ranks`, which it calls `of_ranks`; None where it does.

    >>> undivided({"tp": 3}, 2, "the 2 ranks")
    'tp=3 does not divide the 2 ranks. Use tp=1 or tp=2.'
    """
    used = math.prod(sizes.values())
    if ranks % used == 0:
        return None
    if len(sizes) > 1:
        axes = " x ".join(f"{name}={size}" for name, size in sizes.items())
        return f"{axes} is {used}, which does not divide {of_ranks}. Change the sizes, or the number of ranks."
    (name,) = sizes
    *fewer, most = (f"{name}={size}" for size in range(1, ranks + 1) if ranks % size == 0)
    return f"{name}={used} does not divide {of_ranks}. Use {', '.join(fewer)}{' or ' if fewer else ''}{most}."


def unit_reshards(fsdp: FSDP2, kind: str, *, is_last: bool = False) -> bool | int:
    """Return ``reshard_after_forward`` of torch's `fully_shard` for a unit.

    Args:
        kind: ``layer``, ``embedding``, ``tail``, ``root``, ``dtype`` (`nemo_like.distributed.units`) or ``experts``.
        is_last: it is the last layer, which backward needs at once.
    """
    value = fsdp.reshard_after_forward
    if kind == "dtype":
        return False  # a few norms: kept gathered, so that a recomputation which passes them gathers nothing
    if isinstance(value, bool):
        return value
    if kind == "layer" and not is_last:
        return True if value is None else value
    return kind in ("embedding", "experts")


def ranks_between(fsdp: FSDP2) -> int:
    """Ranks that layers are sharded over between forward and backward, where these are fewer than all; else 0."""
    return 0 if isinstance(fsdp.reshard_after_forward, bool | None) else fsdp.reshard_after_forward


def in_stage(fsdp: FSDP2) -> FSDP2:
    """Return the options in a stage of a pipeline, whose layers by default stay gathered for a whole step."""
    return replace(fsdp, reshard_after_forward=False) if fsdp.reshard_after_forward is None else fsdp


def moves_state(fsdp: FSDP2, device: str) -> bool:
    """Return whether shards, gradients and optimizer state are in memory that this kind of device does not share."""
    return fsdp.cpu_offload and device != "cpu"


def lighter(fsdp: FSDP2, device: str) -> Iterator[FSDP2]:
    """Yield `fsdp` with one change that lowers the bytes that a rank needs on this kind of device."""
    if fsdp.reshard_after_forward is False:
        yield replace(fsdp, reshard_after_forward=None)
    if max(fsdp.forward_prefetch, fsdp.backward_prefetch) > 1:
        yield replace(fsdp, forward_prefetch=1, backward_prefetch=1)
    if not fsdp.cpu_offload and device != "cpu":
        yield replace(fsdp, cpu_offload=True)


def undivided_shards(fsdp: FSDP2, ranks: int) -> str | None:
    """Return the message on a number of ranks to reshard over that does not divide `ranks`; None where it does."""
    between = ranks_between(fsdp)
    if not between or (between < ranks and ranks % between == 0):
        return None
    divisors = ", ".join(str(n) for n in range(2, ranks) if ranks % n == 0)
    return (
        f"reshard_after_forward is {between}; as a number of ranks it must divide the shard axis of {ranks} ranks "
        f"({divisors or 'no number between does'}). True: sharded over all of them after forward; False: not."
    )


@dataclass(frozen=True)
class DDP:
    """`DistributedDataParallel` with its own options. Usable as ``strategy=``; ``"ddp"`` means the defaults.

    >>> DDP(find_unused_parameters=True).bucket_cap_mb is None
    True
    """

    find_unused_parameters: bool = False
    """Some parameters get no gradient in some steps (a branch that is not taken, on any rank). Without it such a step
    ends in torch's "Expected to have finished reduction"; with it each step walks the graph once more."""
    bucket_cap_mb: float | None = setting(None, above=0, unit="number of MiB")
    """MiB of gradients that are reduced in one piece. None: torch's default (25)."""
    gradient_as_bucket_view: bool = True
    """Gradients are views of the buckets that are reduced. False, as in torch and accelerate: each is in memory twice."""
    timeout_seconds: float | None = setting(None, above=0, unit="number of seconds")
    """As in `FSDP2`."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Single:
    """Every rank trains a whole model by itself. ``strategy="single"`` means this."""


def parse_strategy(strategy: object) -> FSDP2 | DDP | Single:
    """Return the object for ``strategy=``: itself, or the defaults of the word ``fsdp2``, ``ddp`` or ``single``.

    Raises:
        ValueError: an unknown word.
        TypeError: neither a word nor an `FSDP2`, `DDP` or `Single`.
    """
    if isinstance(strategy, FSDP2 | DDP | Single):
        return strategy
    if not isinstance(strategy, str):
        raise TypeError(
            f"strategy is {strategy!r}; it must be one of {', '.join(STRATEGIES)}, or an FSDP2(...) or DDP(...)."
        )
    return {"fsdp2": FSDP2, "ddp": DDP, "single": Single}[check_word("strategy", strategy, STRATEGIES)]()


@dataclass(frozen=True)
class TensorParallel(Axis):
    """Split each large weight over `size` ranks. ``tp=2`` means the defaults.

    >>> TensorParallel.of(2)
    TensorParallel(size=2, plan=None, sequence_parallel=False, loss_parallel=False, asynchronous=False)
    """

    size: int = flagged(
        1, "plan pins pretrain", name="tp", kind=int, least=1, unit="whole number of ranks", called="tp"
    )
    """Ranks that share a layer's matmuls; must divide the number of ranks."""
    plan: Mapping[str, Any] | None = None
    """Module name pattern to `ParallelStyle` or its name; None: the model's own plan."""
    sequence_parallel: bool = flagged(False, "plan pins", kind=bool)
    """Norms and residuals are split along the sequence too. Attention and MLP see the whole sequence; so does a layer with
    matrices next to them. Refused: plans that cut nothing in the layers (gpt-oss), and layers that
    fail on a part of a sequence (Gemma 3n, Qwen4-exp, Higgs Audio v2)."""
    loss_parallel: bool = flagged(False, "plan pins", kind=bool)
    """The logits stay split by vocabulary. Forward and backward go under
    `torch.distributed.tensor.parallel.loss_parallel`."""
    asynchronous: bool = flagged(False, "plan", name="async_tp", kind=bool)
    """Each gather and each reduce-scatter of sequences runs in pieces, overlapped with the matmul that reads or makes its
    data (Inductor's ``_micro_pipeline_tp``, over symmetric memory). It needs `sequence_parallel`, ``compile="inductor"`` and
    GPUs that NVLink joins. Such a step has not run here; its seconds are predicted."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.plan is not None and not isinstance(self.plan, Mapping):
            raise TypeError(f"TensorParallel.plan is {self.plan!r}; it must map name patterns to styles.")
        if self.asynchronous and not self.sequence_parallel:
            raise ValueError(
                "TensorParallel.asynchronous is True without sequence_parallel, and it overlaps gathers and "
                "reduce-scatters of sequences with matmuls. Set sequence_parallel=True too."
            )

    @property
    def sequence_ranks(self) -> int:
        """Ranks each of which has a part of a sequence between attention and MLP."""
        return self.size if self.sequence_parallel else 1


@dataclass(frozen=True)
class ContextFacts:
    """Facts about a method of context parallelism. Its code is an object in `nemo_like.distributed.context.methods`."""

    rotation: str | None = None
    """Torch's word for it, in ``set_rotate_method`` and in settings of others; None: torch has none such."""
    peers: Callable[[int], int] = lambda ranks: 0
    """(ranks): to so many of them a rank sends one by one; 0: it gathers and reduces."""
    gathers_again: bool = False
    """Keys and values go to the other ranks once more in backward."""
    is_searched: Callable[[int, int], bool] = lambda heads, ranks: False
    """(heads of keys and values, 0: not known; ranks that share them): `nemo_like.planning.fit` looks at it where no
    method is pinned."""


CONTEXT_METHODS: dict[str, ContextFacts] = {
    "all_gather": ContextFacts("allgather", gathers_again=True, is_searched=lambda heads, ranks: True),
    "ulysses": ContextFacts(
        peers=lambda ranks: ranks, is_searched=lambda heads, ranks: heads > 0 and heads % ranks == 0
    ),
    "ring": ContextFacts("alltoall", peers=lambda ranks: 2, gathers_again=True),
}
"""Facts by the word of `ContextParallel.method`. To add a method, add its facts here, and its code."""


@dataclass(frozen=True)
class ContextParallel(Axis):
    """Split each sequence over `size` ranks. ``cp=2`` means the defaults.

    >>> ContextParallel.of(2)
    ContextParallel(size=2, method='all_gather', loss_mean=None)
    """

    size: int = flagged(
        1, "plan pins pretrain finetune", name="cp", kind=int, least=1, unit="whole number of ranks", called="cp"
    )
    """Ranks that share one sequence; must divide the number of ranks. They shard the parameters, too."""
    method: str = flagged("all_gather", "plan pins pretrain", name="cp_method", choices=CONTEXT_METHODS)
    """The way in which queries meet the keys of other ranks. ``all_gather``: each rank gathers all keys and values, for
    any attention. ``ulysses``: an all-to-all gives each rank some heads of the whole sequence; `size` must divide the
    heads, and those of keys. ``ring``: keys and values go from rank to rank, and no rank has those of the whole
    sequence. It is for causal self-attention without a mask, bias or dropout alone."""
    loss_mean: str | Callable[[Any], Any] | None = None
    """The numbers that the model's loss is a mean over; so many each rank's part has. ``"tokens"``: labels that are not
    -100, or a sum where the batch has ``num_items_in_batch``; ``"sum"``: it is a sum; or a function of this rank's part of
    the arguments, a dict, that returns how much counts in it (padding is 0, or -100 in labels); ``"rows"``: every rank
    computes the loss on whole sequences. None: a cross entropy of labels (B, S) or of the next labels, a mean or a sum; with
    labels of another shape as ``"rows"``. The first call compares it with the loss of whole sequences."""

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(
            self, "loss_mean", parse_loss_mean("ContextParallel", self.loss_mean, "a part of the arguments")
        )

    @property
    def facts(self) -> ContextFacts:
        """Facts about the method."""
        return CONTEXT_METHODS[self.method]


@dataclass(frozen=True)
class ExpertParallel(Axis):
    """Split each layer's experts over `size` ranks, which exchange tokens. ``ep=4`` means the defaults.

    >>> ExpertParallel.of(4)
    ExpertParallel(size=4, plan=None, imbalance=None)
    """

    size: int = flagged(
        1, "plan pins pretrain", name="ep", kind=int, least=1, unit="whole number of ranks", called="ep"
    )
    """Ranks that share a layer's experts; must divide ``dp_shard x cp x tp`` and the number of experts."""
    plan: Mapping[str, str] | None = None
    """Name pattern of the modules that hold experts, in weights of ``(experts, ..., ...)``, to how they are called:
    ``routed`` (tokens (N, D), chosen experts (N, k), their weights (N, k)) or ``every`` (rows of all experts one after the
    other). None: the plan of the model's config, else by structure. Experts in a list of modules are refused."""
    imbalance: float | None = flagged(None, kind=float, least=1)
    """Rows of the fullest rank's experts that a memory budget counts with, as a multiple of those of a balanced router.
    From 1 (balanced) to `size` (one rank gets all rows), and never counted as more; None: 1.5, since a new router is
    unbalanced."""

    def __post_init__(self) -> None:
        if self.imbalance is not None:
            several = isinstance(self.size, int) and self.size > 1
            check_imbalance("ExpertParallel.imbalance", self.imbalance, self.size if several else None)
        check_fields(self)
        if self.plan is None:
            return
        if not isinstance(self.plan, Mapping) or not self.plan:
            raise TypeError(f"ExpertParallel.plan is {self.plan!r}; it must map name patterns to 'routed' or 'every'.")
        for pattern, call in self.plan.items():
            if call not in EXPERT_CALLS:
                raise ValueError(
                    f"ExpertParallel.plan has {call!r} for {pattern!r}; it must be one of {', '.join(EXPERT_CALLS)}."
                )


def check_imbalance(name: str, imbalance: Any, ranks: int | None = None) -> None:
    """Raise where `imbalance`, of the setting `name`, is not rows of the fullest rank over those of a balanced router:
    from 1 to `ranks` (None: how many share the experts is not known yet)."""
    number = isinstance(imbalance, int | float) and not isinstance(imbalance, bool)
    if number and ranks == 1 and 1 < imbalance < math.inf:
        raise ValueError(
            f"{name} is {imbalance!r}, and ep is 1: every rank has all experts, so that none gets more rows than its share. "
            "Leave it out, or use ep above 1."
        )
    if not number or not 1 <= imbalance < math.inf or (ranks is not None and imbalance > ranks):
        most = "on" if ranks is None else f"to the number of ranks that share the experts, {ranks}"
        raise ValueError(f"{name} is {imbalance!r}; it must be a number from 1 (balanced) {most}.")


@dataclass(frozen=True)
class Precision:
    """Dtypes to compute, reduce and answer in; parameters and optimizer state stay as they are.

    FSDP2 casts parameters; the other strategies use autocast. Names (``"bf16"``) become dtypes.

    >>> Precision("bf16").reduce_dtype
    torch.float32
    """

    param_dtype: torch.dtype | str | None = flagged(
        None,
        "plan pretrain",
        "training",
        name="precision",
        default="float32",
        values=f"float32 | bfloat16 | {' | '.join(FLOAT8)}",
    )
    """The dtype to compute in; None: that of the parameters."""
    reduce_dtype: torch.dtype | str | None = flagged(
        None,
        "plan fit",
        "training",
        note="The dtype to reduce gradients in (FSDP2); default: float32, and that of the parameters where --precision is "
        "their dtype.",
    )
    """The dtype to reduce gradients in (FSDP2). None: float32 where `param_dtype` is given, because gradients of many
    ranks are summed, and a 16-bit sum loses bits that a 16-bit product keeps; else that of the gradients."""
    output_dtype: torch.dtype | str | None = None
    """The dtype of the model's floating-point outputs; None: as they come."""
    cast_forward_inputs: bool = True
    """FSDP2: cast the arguments of a unit's forward to `param_dtype`."""
    matmuls: str | None = setting(None, choices=FLOAT8)
    """``"fp8"``: the layers' linears multiply in float8 with one scale per tensor; ``"fp8-rowwise"``: with one per row;
    ``"fp8-gather"``: as ``"fp8"``, and FSDP2 gathers their weights in float8, too; ``"mxfp8"``: in MXFP8, with one for 32
    values, on GPUs of compute capability 10.0 (Blackwell); ``"mxfp8-emulated"``: the same numbers, slowly, on any device
    (all by torchao, extra ``fp8``). None: as everything else."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            object.__setattr__(self, name, parse_dtype(name, getattr(self, name)))
        if self.param_dtype is not None and self.reduce_dtype is None:
            object.__setattr__(self, "reduce_dtype", parse_dtype("reduce_dtype", "float32"))
        if self.matmuls in MXFP8 and self.param_dtype != parse_dtype("param_dtype", "bfloat16"):
            raise ValueError(
                f"Precision.matmuls is {self.matmuls!r} and param_dtype is {self.param_dtype}: torchao's matmuls in MXFP8 "
                "return bfloat16. Use param_dtype='bf16'."
            )

    @classmethod
    def of(cls, precision: str | torch.dtype | Precision | MixedPrecisionPolicy | None) -> Precision:
        """Return the object for ``precision=``: a dtype to compute in (or its name), torch's policy, or the object.
        ``"fp8"``, ``"fp8-rowwise"``, ``"fp8-gather"``, ``"mxfp8"`` and ``"mxfp8-emulated"`` are bfloat16 with such matmuls.

        Raises:
            ValueError: an unknown or integer dtype.
            TypeError: something else.
        """
        if isinstance(precision, Precision | None):
            return precision or cls()
        import torch
        from torch.distributed.fsdp import MixedPrecisionPolicy

        if isinstance(precision, MixedPrecisionPolicy):
            # There, None means that gradients are reduced as they are computed.
            reduce = precision.reduce_dtype or precision.param_dtype
            return cls(precision.param_dtype, reduce, precision.output_dtype, precision.cast_forward_inputs)
        if isinstance(precision, str) and precision.lower().replace("_", "-") in FLOAT8:
            return cls(torch.bfloat16, matmuls=precision.lower().replace("_", "-"))
        if isinstance(precision, str | torch.dtype):
            return cls(parse_dtype("precision", precision, FLOAT8))
        raise TypeError(
            f"precision is {precision!r}; it must be a dtype such as 'bf16', a Precision or a MixedPrecisionPolicy."
        )

    @property
    def dtypes(self) -> dict[str, torch.dtype | None]:
        """The three by name, as dtypes."""
        return {
            name: parse_dtype(name, getattr(self, name)) for name in ("param_dtype", "reduce_dtype", "output_dtype")
        }

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """The same for `fully_shard`."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        return MixedPrecisionPolicy(**self.dtypes, cast_forward_inputs=self.cast_forward_inputs)


@dataclass(frozen=True)
class OffloadConfig:
    """Offloading of saved activations to CPU memory, within these limits."""

    mode: str = setting("saved", choices=OFFLOADS)
    """``none`` | ``boundary`` (layer inputs) | ``saved`` (the policy's tensors) | ``all`` (every activation)."""
    min_bytes: int = setting(1 << 20, least=0)
    """Smaller storages stay on the device, bytes."""
    max_inflight_bytes: int = setting(1 << 30, least=1)
    """Device bytes that copies to the host may hold at one time."""
    prefetch: int = setting(1, least=0)
    """Number of layers ahead of backward at which the way back starts."""
    pin_memory: bool = True
    """Use page-locked CPU memory, where the device has it: needed for copies that overlap with computing."""
    host_budget_bytes: int | None = setting(None, least=0)
    """Host bytes per rank (see `host_bytes`); past it, tensors stay on the device and this is logged once. None: no
    limit."""

    def __post_init__(self) -> None:
        check_fields(self)

    def host_bytes(self, nbytes: int) -> int:
        """Return the bytes of CPU memory that a copy of `nbytes` takes: PyTorch rounds pinned ones to a power of two.

        >>> OffloadConfig().host_bytes(1000), OffloadConfig(pin_memory=False).host_bytes(1000)
        (1024, 1000)
        """
        return 1 << max(nbytes - 1, 0).bit_length() if self.pin_memory else nbytes

    @classmethod
    def of(cls, offload: OffloadConfig | str | None, default: str = "none") -> OffloadConfig:
        """Return the object for ``offload=``: a config, its mode, or None (the mode `default`).

        Raises:
            ValueError: an unknown mode.
            TypeError: something else.
        """
        if isinstance(offload, str | None):
            return cls(mode=default if offload is None else offload)
        if isinstance(offload, OffloadConfig):
            return offload
        raise TypeError(
            f"offload is {offload!r}, {a_or_an(offload)}; it must be an OffloadConfig, or one of none, boundary, "
            "saved and all."
        )
