"""The table of operators: facts about each, for policies, the engine, the tracers and the cost model.

A new attention kernel, collective or allocation is one line in `_ROWS`; a file that defines an operator may `declare` its
facts there. Everything else reads `facts(op)`. Rows of operators that only some builds of torch or some packages have do no
harm where they are absent.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from nemo_like._util.log import say_once
from nemo_like._util.op_lookup import Op, argument, argument_positions, find_op, packet_name, resolve_op
from nemo_like._util.tensors import STANDS_FOR_CUDA, tensors_in
from nemo_like.torch_compat import PARTITIONER_COMPUTE_INTENSIVE_OPS, async_tensor_parallel

# FLOP rules of operators, by the shapes of their arguments; a multiply-add is two.
#
# There are rules of our own only where PyTorch's registry (`torch.utils.flop_counter`) has none or reads the shapes of a
# layout wrongly; for all else the registry's is used.

# ``(op, args, kwargs, output)`` → FLOPs.
FlopRule = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], int]

_OFFSETS_Q = ("cum_seq_q", "cu_seqlens_q", "cu_seq_q")
_OFFSETS_K = ("cum_seq_k", "cu_seqlens_k", "cu_seq_k")
_LONGEST_Q = ("max_q", "max_seqlen_q")
_LONGEST_K = ("max_k", "max_seqlen_k")


def rule_of_torch(op: object) -> FlopRule | None:
    """PyTorch's own formula for `op`, as a rule; None where it has none."""
    formula = flop_registry.get(getattr(op, "overloadpacket", op))
    if formula is None:
        return None
    return lambda op, args, kwargs, out: int(formula(*args, **kwargs, out_val=out))


def matrix_product(op: object, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> int:
    """``(M, K) x (K, N)``."""
    return 2 * math.prod(args[0].shape) * args[1].shape[-1]


def added_product(op: object, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> int:
    """``sum + (M, K) x (K, N)``, the result in another dtype than the factors."""
    return matrix_product(op, args[1:], kwargs, out)


def grouped_mm(op: object, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> int:
    """``(rows, K) x (groups, K, N)``, each row with its own group's matrix, and the other forms.

    They are ``(groups, M, K) x (groups, K, N)``, ``(M, K) x (K, N)`` with `K` cut into groups, and
    ``(groups, M, K) x (K, N)`` with `N` cut into groups.
    """
    first, second = args[0].shape, args[1].shape
    if len(first) == 3 and len(second) == 2:
        return 2 * first[1] * first[2] * second[1]
    return 2 * math.prod(first) * second[-1]


def linear(op: object, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> int:
    """``(..., K)`` times the transpose of ``(N, K)``; the bias is not counted, as in PyTorch's `addmm`."""
    return 2 * math.prod(args[0].shape) * args[1].shape[0]


def _four_bit_linear(op: object, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> int:
    """``(..., K)`` times the transpose of ``(N, K)``, which is packed and comes with its shape."""
    return 2 * math.prod(args[0].shape) * args[2][0]


def _attention(
    op: object, args: tuple[Any, ...], kwargs: dict[str, Any], out: object, *, heads: int, tokens: int
) -> int:
    """``2 B H S_q S_k (D_qk + D_v)``, where query, key and value have heads and tokens in these dims, or are
    ``(T, H, D)`` with offsets.

    `H` is the query's: a key head that several query heads share is multiplied with each.
    """
    query, key, value = args[:3]
    widths = query.shape[-1] + value.shape[-1]
    offsets_q = argument(op, args, kwargs, *_OFFSETS_Q)
    if offsets_q is None:
        return 2 * query.shape[0] * query.shape[heads] * query.shape[tokens] * key.shape[tokens] * widths
    offsets_k = argument(op, args, kwargs, *_OFFSETS_K)
    lengths_q = _lengths(offsets_q, argument(op, args, kwargs, *_LONGEST_Q))
    lengths_k = lengths_q if offsets_k is None else _lengths(offsets_k, argument(op, args, kwargs, *_LONGEST_K))
    return 2 * query.shape[-2] * sum(q * k for q, k in zip(lengths_q, lengths_k, strict=True)) * widths


def _lengths(offsets: torch.Tensor, longest: Any) -> list[int]:
    """Lengths of the sequences that `offsets` (0, ..., total) cuts; where a trace has no numbers, the longest for all."""
    if type(offsets) is torch.Tensor and offsets.device.type != "meta":
        return [int(length) for length in offsets.diff().tolist()]
    return [int(longest)] * (offsets.shape[0] - 1)


@dataclass(frozen=True)
class OpFacts:
    """Facts about one operator. `facts` makes it, from the operator's row and its schema."""

    saved: bool = False  # Saved by ``ac="selective"`` unless the user takes it out.
    # Never recomputed, whatever the policy: its second result may differ, or every rank would have to join in.
    pinned: bool = False
    alternates: bool = False  # A plain matmul, of which ``ac="selective"`` recomputes every second one.
    # A fused attention kernel, by its name in ``devices.json``: it runs at the speed that the device reaches with it, and
    # draws only with dropout. ``sdpa``: the one that `scaled_dot_product_attention` picks.
    attention: str = ""
    collective: bool = False  # Every rank has to call it, with data.
    # A collective that sends its input to other ranks, priced by the network; it may be sent again.
    exchange: bool = False
    # An allocation, a view, a question about metadata, a range of the profiler: nothing is computed.
    free: bool = False
    random: bool = False  # May draw random numbers; `draws` returns whether one call does.
    # Writes into an argument (in-place and ``out=`` forms), so that it always runs again.
    mutating: bool = False
    # ``(op, args, kwargs, output)`` → FLOPs of one call, a multiply-add being two. None: its time is its bytes.
    flops: FlopRule | None = None

    # (bytes of the input, of the output) → bytes that come from other ranks in forward. None: they are not priced.
    received: Callable[[int, int], int] | None = None
    # Arguments → bytes of whole sequences that it gathers besides its kernels, and once more in backward.
    gathered: Callable[[tuple[Any, ...]], int] | None = None
    # (arguments, output) → bytes that it takes beyond both, and gives back. None: nothing is known of it.
    scratch: Callable[[tuple[Any, ...], Any], int] | None = None
    # Bytes that casts of its inputs read and write before its kernel, as a multiple of the bytes of these inputs.
    casts: float = 0.0
    # (inputs, outputs) → bytes read and written, outputs among them. None: each input and output once.
    moved: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], int] | None = None

    @property
    def tracked(self) -> bool:
        """Return whether a decision on it has a meaning. An operator that is not tracked is never counted, saved or
        skipped."""
        return not (self.free or self.mutating)


def _whole_weight(args: tuple[Any, ...], out: torch.Tensor) -> int:
    """Return the bytes of a 4-bit weight in the dtype of its matmul, and of its scales in float32.

    bitsandbytes 0.50 makes both before the matmul (`_dequant_linear_fallback` of its CUDA kernels). Of up to 1,536 tokens it
    may run a kernel that makes neither, by the shape and the GPU: these are counted all the same.
    """
    (rows, columns), absmax, blocksize = args[2:5]
    scales = -(-rows * columns // blocksize)
    # Scales in 8 bits have fewer in `absmax`, of their own. The kernel for CUDA keeps them with and without their offset.
    nested = (2 if STANDS_FOR_CUDA.get() else 1) if absmax.numel() < scales else 0
    return rows * columns * out.element_size() + 4 * scales * nested


def _unpacked_bytes(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> int:
    """Return the bytes of a 4-bit weight and its scales, of the whole weight that is made of them, and of the output.

    The matmul itself then reads about as many, while it computes.
    """
    (rows, *packed), (out,) = inputs, outputs
    whole = rows.shape[-1] * out.shape[-1] * out.element_size()
    return sum(t.nbytes for t in (*packed, out)) + whole


_SDPA = OpFacts(saved=True, attention="flash", flops=functools.partial(_attention, heads=1, tokens=2))
_FLASH = OpFacts(saved=True, attention="flash", flops=functools.partial(_attention, heads=2, tokens=1))
_GROUPED = OpFacts(saved=True, flops=grouped_mm)
# Recomputing a collective makes every rank join in once more.
_COLLECTIVE = OpFacts(saved=True, pinned=True, collective=True)
_FREE = OpFacts(free=True)

# By overload. `_FREE_PACKETS` and `_FREE_NAMESPACES` contain operators that are free as a whole; a schema that states
# that an output aliases an input makes an operator free as well.
_ROWS: dict[str, OpFacts] = {
    "aten._scaled_dot_product_cudnn_attention.default": replace(_SDPA, attention="cudnn"),
    "aten._scaled_dot_product_efficient_attention.default": _SDPA,
    "aten._scaled_dot_product_flash_attention.default": _SDPA,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _SDPA,
    "aten._scaled_dot_product_fused_attention_overrideable.default": _SDPA,
    "aten._scaled_dot_product_attention_math_for_mps.default": _SDPA,
    "aten._cudnn_attention_forward.default": replace(_SDPA, attention="cudnn"),
    "flex_attention": _SDPA,
    "aten._flash_attention_forward.default": _FLASH,
    "aten._efficient_attention_forward.default": _FLASH,
    "torch_attn._varlen_attn.default": _FLASH,
    "flash_attn._flash_attn_forward.default": _FLASH,
    "flash_attn._flash_attn_varlen_forward.default": _FLASH,
    "flash_attn_3._flash_attn_forward.default": replace(_FLASH, attention="fa3"),
    "flash_attn_3.fwd.default": replace(_FLASH, attention="fa3"),
    # A graph that inductor has compiled is one operator here, and dear.
    "inductor_compiled_code": OpFacts(saved=True),
    "aten.mm.default": OpFacts(saved=True, alternates=True),
    "aten.linear.default": OpFacts(saved=True, alternates=True, flops=linear),
    "aten._grouped_mm.default": OpFacts(saved=True, alternates=True, flops=grouped_mm),
    "aten.addmm_.default": OpFacts(flops=added_product),
    "aten.addmm.dtype_out": OpFacts(flops=added_product),
    "aten._scaled_mm.default": OpFacts(saved=True),
    "aten._scaled_mm_v2.default": OpFacts(saved=True, flops=matrix_product),
    "aten._scaled_grouped_mm.default": _GROUPED,
    "aten._scaled_grouped_mm_v2.default": _GROUPED,
    # A linear of bitsandbytes. Its weight is made whole by a kernel of its own before the matmul, here and in backward.
    "bitsandbytes.gemm_4bit.default": OpFacts(
        saved=True, alternates=True, flops=_four_bit_linear, scratch=_whole_weight, casts=1.0, moved=_unpacked_bytes
    ),
    # topk may break ties in another order the second time, and then an expert gets other tokens.
    "aten.topk.default": OpFacts(saved=True, pinned=True),
    "aten.max.default": OpFacts(saved=True),  # the scale of a low-precision matmul: one number
    # Tensor parallelism's own sum of a row-wise linear is among the saved collectives. Its all-gather (sequence
    # parallelism) is not: keeping the gathered sequence on every rank would undo the saving of cutting it.
    "_c10d_functional.all_reduce.default": _COLLECTIVE,
    "_c10d_functional.reduce_scatter_tensor.default": _COLLECTIVE,
    "_c10d_functional.all_to_all_single.default": _COLLECTIVE,
    "deepep.dispatch.default": _COLLECTIVE,
    "deepep.combine.default": _COLLECTIVE,
    "deep_ep.dispatch.default": _COLLECTIVE,
    "deep_ep.combine.default": _COLLECTIVE,
    "hybridep.dispatch.default": _COLLECTIVE,
    "hybridep.combine.default": _COLLECTIVE,
    "hybrid_ep.dispatch.default": _COLLECTIVE,
    "hybrid_ep.combine.default": _COLLECTIVE,
    # Expert parallelism: who sends how many tokens to whom, and the tokens. These may be sent again, by all ranks alike.
    "nemo_like.route.default": OpFacts(saved=True, pinned=True, collective=True),
    "nemo_like.exchange_rows.default": OpFacts(saved=True, collective=True, exchange=True),
    # Every rank repeats the same ones in the same order, so a plan may choose to.
    "nemo_like.rows_of_all.default": OpFacts(saved=True, collective=True),
    # Reading a number of the device waits for the device, so it is not done twice.
    "aten._local_scalar_dense.default": OpFacts(saved=True, pinned=True),
    # They return their input's storage, which their schemas don't state: saving the input saves the output.
    "aten._unsafe_view.default": _FREE,
    "aten._reshape_alias.default": _FREE,
    "_c10d_functional.wait_tensor.default": _FREE,
    "_c10d_functional._wrap_tensor_autograd.default": _FREE,
}

_FREE_PACKETS = frozenset(
    (
        "aten.empty",
        "aten.empty_like",
        "aten.empty_strided",
        "aten.empty_permuted",
        "aten.new_empty",
        "aten.new_empty_strided",
        "aten.detach",
        "aten.alias",
        "aten.lift_fresh",
        "aten.size",
        "aten.sym_size",
        "aten.stride",
        "aten.sym_stride",
        "aten.numel",
        "aten.sym_numel",
        "aten.storage_offset",
        "aten.sym_storage_offset",
        "aten.dim",
        "aten.is_contiguous",
        "aten.sym_is_contiguous",
        "aten.is_strides_like_format",
        "aten.is_non_overlapping_and_dense",
    )
)
# Among them FSDP2's own copies and collectives: of its work, forward and recomputation may do different parts.
_FREE_NAMESPACES = frozenset(("profiler", "prim", "record_function", "fsdp", "c10d"))
_COLLECTIVE_NAMESPACES = frozenset(("c10d", "_c10d_functional", "_c10d_functional_autograd"))


@functools.cache
def facts(op: Op) -> OpFacts:
    """Return the facts about `op`, from the table and the operator's own schema; any operator has facts."""
    row = _ROWS.get(str(op), OpFacts())
    schema = getattr(op, "_schema", None)
    namespace = getattr(op, "namespace", "")
    aliases = schema is not None and any(ret.alias_info is not None for ret in schema.returns)
    free = row.free or aliases or packet_name(op) in _FREE_PACKETS
    return replace(
        row,
        saved=row.saved or op in compute_intensive_ops(),
        collective=row.collective or namespace in _COLLECTIVE_NAMESPACES,
        free=free or namespace in _FREE_NAMESPACES,
        random=torch.Tag.nondeterministic_seeded in getattr(op, "tags", ()),
        mutating=bool(schema is not None and schema.is_mutable) or _writes_first(op),
        flops=row.flops or rule_of_torch(op),
    )


def declare(name: str, row: OpFacts) -> None:
    """State the facts about the operator `name` (``namespace.operator.overload``), in the file that defines it."""
    _ROWS[name] = row


@functools.cache
def compute_intensive_ops() -> frozenset[Op]:
    """PyTorch's own list of expensive operators, as overloads."""
    return frozenset(op for item in PARTITIONER_COMPUTE_INTENSIVE_OPS for op in resolve_op(item))


def default_save_ops() -> frozenset[Op]:
    """All that ``ac="selective"`` keeps, before alternation.

    Looked up again at each call, because a package imported later (DeepEP, flash attention) brings new operators.
    """
    ops = compute_intensive_ops() | _present(name for name, row in _ROWS.items() if row.saved)
    if async_tensor_parallel():
        # A saved reduce-scatter can't be fused into its matmul (torchtitan#965).
        ops -= _present(("_c10d_functional.reduce_scatter_tensor.default",))
        say_once("Async tensor parallel is on: reduce-scatter is left out of the save-op set, so that it can fuse.")
    return ops


def pinned_ops() -> frozenset[Op]:
    """The operators that are never recomputed, of those that this torch and the packages imported so far have."""
    return _present(name for name, row in _ROWS.items() if row.pinned)


def routing_ops() -> frozenset[Op]:
    """The operators whose results determine which token goes where; of those that there are."""
    return _present(("aten.topk.default",)) | exchange_routing_ops()


def exchange_routing_ops() -> frozenset[Op]:
    """Return the exchange operators that determine which token goes to which rank: of experts that are on several."""
    return _present(("nemo_like.route.default",))


def attention_ops() -> frozenset[Op]:
    """The attention kernels, of those that this torch and the packages imported so far have."""
    return _present(name for name, row in _ROWS.items() if row.attention)


def named_ops(word: str) -> frozenset[Op]:
    """The operators that a word of `nemo_like.options.names.WORDS` means whoever calls them, of those that there are."""
    matmuls = ("aten.mm.default", "aten.addmm.default", "aten.linear.default", "aten._scaled_mm.default")
    names = {
        "matmuls": (*matmuls, "aten._scaled_mm_v2.default", "bitsandbytes.gemm_4bit.default"),
        "exchanges": ("nemo_like.exchange_rows.default",),
        "experts": tuple(
            f"aten._{kind}.default" for kind in ("grouped_mm", "scaled_grouped_mm", "scaled_grouped_mm_v2")
        ),
    }
    return attention_ops() if word == "attention" else _present(names.get(word, ()))


def _present(names: Iterable[str]) -> frozenset[Op]:
    return frozenset(op for op in map(find_op, names) if op is not None)


# ------------------------------------------------------------------------------------------------- one call of an op


def draws(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Return whether this call draws random numbers: attention without dropout, though tagged as random, does not."""
    if not facts(op).random:
        return False
    return "dropout_p" not in argument_positions(op) or bool(argument(op, args, kwargs, "dropout_p"))


def _writes_first(op: Op) -> bool:
    """Return whether `op` is a collective that writes into its first argument. Schemas of ``c10d`` do not state it, and
    it changes no version counter."""
    return getattr(op, "namespace", "") == "c10d" and packet_name(op).endswith("_") and "barrier" not in packet_name(op)


def written_tensors(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[torch.Tensor]:
    """The tensors that this call writes into, by the operator's schema; of a collective, its first argument."""
    if _writes_first(op):
        return tensors_in(args[0] if args else next(iter((kwargs or {}).values())))
    schema = getattr(op, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    names = (a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    return [tensor for name in names for tensor in tensors_in(argument(op, args, kwargs, name))]


def flops(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any] | None, out: object) -> int:
    """FLOPs of this call, a multiply-add being two, as PyTorch's `FlopCounterMode` counts: no mask is looked at.

    `out` is the call's output. 0 for all that is neither a matrix product, a convolution nor an attention kernel.
    """
    rule = facts(op).flops
    return 0 if rule is None else rule(op, args, kwargs or {}, out)


def kernel_flops(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any] | None, out: object) -> int:
    """FLOPs that the kernel really does: half of `flops` in causal attention, whose kernels skip the masked half."""
    count = flops(op, args, kwargs, out)
    # custom_mask_type: 0 none, 1 and 2 causal, aligned to the first or the last query.
    is_causal = facts(op).attention and argument(op, args, kwargs, "is_causal", "causal", "custom_mask_type")
    return count // 2 if is_causal else count


# Operators of which a call may be a device-to-host copy.
COPY_OPS = _present(("aten._to_copy.default", "aten.to.dtype_layout", "aten.to.device"))


def is_device_to_host_copy(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Return whether this call copies from an accelerator to the host: always saved, for recomputing it would wait
    again."""
    device = kwargs.get("device") if kwargs else None
    if device is None or not args or not isinstance(args[0], torch.Tensor):
        return False
    return torch.device(device).type == "cpu" and args[0].device.type != "cpu"


def moved_bytes(op: Op, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> int:
    """Bytes read and written by a kernel that touches each input and output once; 0 for an allocation, a view, and an
    operator in place other than a matrix product."""
    row = facts(op)
    if row.moved is not None:
        return row.moved(inputs, outputs)
    # A result that is given (``out=``) is the last input, and is not read.
    read = inputs[: -len(outputs)] if row.flops and str(op).endswith("out") else inputs
    return 0 if row.free and row.flops is None else sum(_touched(t) for t in (*read, *outputs))


def _touched(tensor: torch.Tensor) -> int:
    """Elements at distinct addresses: an expanded dim is read once."""
    distinct = math.prod(size for size, stride in zip(tensor.shape, tensor.stride()) if stride != 0)
    return distinct * tensor.element_size() if tensor.numel() else 0
