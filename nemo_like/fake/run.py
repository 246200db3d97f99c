"""Running a model without weights, memory or a GPU: the one place that touches PyTorch's fake tensors.

`FakeTensorMode` has no public path; `FakeRun` is its only user here.

CPU fake tensors, not `meta` (attention would be decomposed) and not fake CUDA (which aborts where there is no GPU).
"""

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import nn

from nemo_like._util.forwards import Forward
from nemo_like._util.op_lookup import packet_name
from nemo_like._util.rng import random_numbers_put_back
from nemo_like._util.tensors import STANDS_FOR_CUDA, describe, is_wrapped, map_tensors, tensors_in
from nemo_like.activation_checkpointing import kv_sharing, ops
from nemo_like.fake.cuda_ops import CudaOps, autocast_of_cuda_on_cpu
from nemo_like.fake.model_copy import SMALL, call_with, packed_as, quant_state
from nemo_like.fake.outside_state import RememberedTables, context_variables_put_back
from nemo_like.fake.ranks import ranks_of
from nemo_like.fake.reasons import PLAN, Aim, named_reason
from nemo_like.torch_compat import DispatchMode, fake_parameter, fake_tensor_types, put_on_instance
from nemo_like.transformers_compat import USE_CACHE, parameter_names

FakeTensor, FakeTensorMode = fake_tensor_types()


class PlannedRouting(NamedTuple):
    """Numbers by which the rows of tokens go to experts that are split over ranks."""

    ranks: int
    # Rows that come to the experts of this rank, as a multiple of those that came to them if all got alike.
    imbalance: float
    # The share of an expert's rows that are sent: a module that is called with all rows sends those that were chosen.
    sent: float


class FakeRun(DispatchMode):
    """Ops run on fake CPU tensors, except small ones whose values weights have no part in, which stay real.

    Models decide by values of small tensors: whether position ids restart (packed sequences), whether a padding mask,
    of integers or of ``torch.ones``, masks anything. Under a plain fake mode such a look either fails or takes the
    exporter's branch, and the block would be called with another mask than in training. Up to `SMALL` elements,
    integers and booleans (token ids, positions) and numbers made of these and of constants alone (masks) are therefore
    real here; whatever touches a weight or is large is fake. A single random number is 1: models draw one to leave out
    a layer now and then (layer drop), and the planned step runs them all.

    With `cuda`, a compute capability, the tensors are on the CPU all the same, but the operators are those that such a GPU
    would run (see `CudaOps`). Results that functions of `model` remember from call to call are the run's own
    (`tables`), and random numbers of Python, NumPy and torch that are drawn inside are drawn again outside. Context
    variables are put back, too; other changes of the model's code outside of the model stay. Where weights of `model`
    are split over a `nemo_like.fake.ranks.fake_mesh`, it is its first rank that runs.
    """

    def __init__(
        self, autocast: torch.dtype | None = None, cuda: tuple[int, int] | None = None, model: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.ranks = (None if model is None else ranks_of(model)) or nullcontext()
        self.tables = RememberedTables(model)
        self.autocast = autocast
        self.cuda = None if cuda is None else CudaOps(cuda)
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.routing: PlannedRouting | None = None  # The way of rows to experts, where these are split.
        # Storages of real tensors that a fake one was written into: their values mean nothing any more.
        self._unknown: weakref.WeakSet[Any] = weakref.WeakSet()
        self._put_back: list[ExitStack] = []

    def __enter__(self) -> Any:
        stack = ExitStack()
        self._put_back.append(stack)
        for context in (random_numbers_put_back(), context_variables_put_back(), self.ranks, self.tables):
            stack.enter_context(context)
        STANDS_FOR_CUDA.set(self.cuda is not None)  # which is put back with the others
        if self.cuda is not None:
            stack.enter_context(autocast_of_cuda_on_cpu())
            stack.enter_context(self.cuda)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._put_back.pop().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func.namespace == "prim":  # a question, as for a device
            return NotImplemented if is_wrapped(types) else func(*args, **kwargs)
        inputs = tensors_in((args, kwargs))
        check_layouts(inputs)
        if is_wrapped(types):
            return NotImplemented
        if func._schema.name in ALIASES:
            return args[0]
        if packet_name(func) == "nemo_like.route":
            return self._route(*args, **kwargs)
        written = ops.written_tensors(func, args, kwargs)
        random = ops.facts(func).random and not all(_integer(t) for t in inputs)
        if written and (random or any(isinstance(t, FakeTensor) for t in inputs)):
            self._unknown.update(t.untyped_storage() for t in written if not isinstance(t, FakeTensor))
        if any(isinstance(t, FakeTensor) for t in inputs):
            if func in _INDEXED:
                args = (args[0], _places(args[1]), *args[2:])
            with self.fake:
                if func is _LAYER_NORM and self.cuda is not None:
                    return _statistics_in_float32(*func(*args, **kwargs))
                return _RULES[func](func, *args, **kwargs) if func in _RULES else func(*args, **kwargs)
        # Real tensors with values that mean nothing: views of them share their storage, all else is fake.
        unknown = any(t.untyped_storage() in self._unknown for t in inputs)
        if (
            not unknown
            and inputs
            and all(_small(t) for t in inputs)
            and (_shaped_by_values(func) or not any("Tensor" in str(out.type) for out in func._schema.returns))
        ):
            return func(*args, **kwargs)  # a question about values, and the values are there
        if ops.facts(func).free and inputs and (unknown or not written) and not _allocates(func):
            return func(*args, **kwargs)  # a view shares an existing storage
        with self.fake:
            shaped = func(*args, **kwargs)
        if unknown:
            return written[0] if len(written) == 1 and isinstance(shaped, torch.Tensor) else shaped
        outputs = tensors_in(shaped)
        if not outputs or not all(_small(t) for t in (*inputs, *outputs)):
            return shaped
        if all(_integer(t) for t in outputs) and all(_integer(t) for t in inputs):
            return func(*args, **kwargs)
        if not inputs and func in _DRAWS:
            return torch.ones(shaped.shape, dtype=shaped.dtype) if shaped.numel() == 1 else shaped
        known = bool(inputs) or func in _CONSTANTS
        return func(*args, **kwargs) if known and not (random or _allocates(func)) else shaped

    def casting(self) -> AbstractContextManager[Any]:
        """Return the context that forward passes run in: autocast, for a model that FSDP2 does not cast; backward runs
        outside of it.

        Without autocast's cache: each block is run several times here, and must cast its weights each time.
        """
        return nullcontext() if self.autocast is None else torch.autocast("cpu", self.autocast, cache_enabled=False)

    def _route(self, chosen: torch.Tensor, experts: int, group: str) -> tuple[torch.Tensor, ...]:
        """Who sends how many rows to whom is a plan's, and real; which rows has no values."""
        assert self.routing is not None
        (tokens, choices), ranks = chosen.shape, self.routing.ranks
        table, local = planned_table(tokens, choices, experts, self.routing), experts // ranks
        sent, came, rows = (int(part.sum()) for part in table.split([ranks, ranks, local]))
        with self.fake:
            sizes = (sent, sent, tokens, rows, rows, came, local)
            return *(torch.empty(size, dtype=torch.int32) for size in sizes), table

    def like(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A fake CPU tensor with the shape, strides and `requires_grad` of `tensor`, on whatever device that is."""
        dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        with self.fake, torch.no_grad():
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")
        return empty.requires_grad_(tensor.requires_grad)

    def sample(self, value: object, dtype: torch.dtype | None = None) -> Any:
        """`value` (tensors in any nesting) for a fake run: small integers copied to the CPU, all else made fake."""

        check_layouts(tensors_in(value))

        def one(tensor: torch.Tensor) -> torch.Tensor:
            if not (_integer(tensor) and _small(tensor)):
                return self.like(tensor.detach(), dtype)
            return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor.detach().cpu().clone()

        return map_tensors(one, value)

    def state(self, module: nn.Module, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """Fake stand-ins for all parameters (in `dtype`, if given) and buffers of `module`, tied ones being one object."""
        fakes: dict[int, torch.Tensor] = {id(t): self._parameter(t, dtype) for t in module.parameters()}
        fakes |= {id(buffer): self.sample(buffer) for buffer in module.buffers() if id(buffer) not in fakes}
        named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        return {name: fakes[id(tensor)] for name, tensor in named}

    def _parameter(self, like: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        if dtype is None or not like.is_floating_point() or quant_state(like) is not None:
            dtype = like.dtype
        return packed_as(fake_parameter(self.fake, like, dtype), like, self.like)


def check_layouts(tensors: Sequence[torch.Tensor]) -> None:
    """Raise ValueError where one of `tensors` is sparse or nested: no plan is made of those."""
    odd = next((tensor for tensor in tensors if tensor.layout is not torch.strided or tensor.is_nested), None)
    if odd is not None:
        kind, instead = (
            ("nested tensors", "padded ones")
            if odd.is_nested
            else ("sparse tensors, such as gradients of nn.Embedding(sparse=True)", "dense ones (sparse=False)")
        )
        raise ValueError(
            f"No plan is made of {kind}: values decide on their bytes. Use {instead}, or a mode instead of a budget, such "
            "as 'selective'."
        )


def _rms_norm(
    func: object, input: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """CUDA's fused kernel: the CPU has none, so that PyTorch knows no shapes of it."""
    rows = (*input.shape[: input.dim() - len(shape)], *(1 for _ in shape))
    double = torch.float64 if input.dtype == torch.float64 else torch.float32
    return torch.empty(input.shape, dtype=input.dtype), torch.empty(rows, dtype=double)


def _rms_norm_backward(
    func: object,
    grad: torch.Tensor,
    input: torch.Tensor,
    shape: Sequence[int],
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    wanted: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    return tuple(
        torch.empty(t.shape, dtype=t.dtype) if t is not None and w else None for t, w in zip((input, weight), wanted)
    )


def _statistics_in_float32(out: torch.Tensor, *statistics: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """CUDA's layer norm keeps the mean and the spread of 16-bit rows in float32, the CPU's in their own type."""
    return out, *(t if t.element_size() > 2 else torch.empty_like(t, dtype=torch.float32) for t in statistics)


def _layer_norm_backward(func: Any, *args: object, **kwargs: object) -> tuple[torch.Tensor | None, ...]:
    """Kernels write the gradient of a layer norm's input in rows; PyTorch's rule takes its argument's layout."""
    of_input, *others = func(*args, **kwargs)
    rows = None if of_input is None else torch.empty_like(of_input, memory_format=torch.contiguous_format)
    return rows, *others


def _grouped_mm(func: Any, a: torch.Tensor, b: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    """PyTorch's rule for the shape of a grouped product refuses all but bfloat16, though kernels take more types."""
    if a.dtype == torch.bfloat16:
        return func(a, b, *args, **kwargs)
    alike = (torch.empty_strided(t.shape, _strides_in_bfloat16(t), dtype=torch.bfloat16) for t in (a, b))
    out = func(*alike, *args, **kwargs)
    pad = 16 // a.element_size()  # rows of the result are aligned to 16 bytes
    width = -(-out.shape[-1] // pad) * pad
    strides = (*((width * out.shape[-2],) if out.dim() == 3 else ()), width, 1)
    return torch.empty_strided(out.shape, strides, dtype=a.dtype)


def _bincount(func: Any, ids: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
    """Counts of ``minlength`` kinds, experts for example: no id is taken to be larger, which values would tell."""
    if minlength == 0:
        return func(ids, weights)
    counted = torch.int64 if weights is None else torch.float64
    dtype = torch.float32 if weights is not None and weights.dtype is torch.float32 else counted
    return torch.empty(minlength, dtype=dtype)


# In the place of PyTorch's rules for the outputs of operators, which are passed first.
_RULES: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._fused_rms_norm.default: _rms_norm,
    torch.ops.aten._fused_rms_norm_backward.default: _rms_norm_backward,
    torch.ops.aten.native_layer_norm_backward.default: _layer_norm_backward,
    torch.ops.aten._grouped_mm.default: _grouped_mm,
    torch.ops.aten.bincount.default: _bincount,
}
_LAYER_NORM = torch.ops.aten.native_layer_norm.default
# These return their argument; torch's rules for fake tensors make another one.
ALIASES = ("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd")
_INDEXED = frozenset((torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default))
_DRAWS = frozenset((torch.ops.aten.rand.default, torch.ops.aten.randn.default))
# Not `zeros`: models fill those with results.
_CONSTANTS = frozenset(
    (
        torch.ops.aten.ones.default,
        torch.ops.aten.full.default,
        torch.ops.aten.arange.default,
        torch.ops.aten.arange.start,
        torch.ops.aten.arange.start_step,
        torch.ops.aten.scalar_tensor.default,
    )
)


def _shaped_by_values(func: Any) -> bool:
    """Return whether values decide how large the result is: `nonzero`, `unique`, `bincount`."""
    return torch.Tag.dynamic_output_shape in func.tags


def _places(indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Masks whose values are known as the places they select: how many there are is a shape."""
    places: list[torch.Tensor | None] = []
    for index in indices:
        known = index is not None and index.dtype == torch.bool and not isinstance(index, FakeTensor)
        places += index.nonzero().unbind(1) if index is not None and known else [index]
    return places


def _allocates(func: object) -> bool:
    return packet_name(func).startswith(("aten.empty", "aten.new_empty"))


def _strides_in_bfloat16(tensor: torch.Tensor) -> list[int]:
    """As many bytes as those of `tensor`, between rows: kernels want multiples of 16."""
    return [stride if stride == 1 else stride * tensor.element_size() // 2 for stride in tensor.stride()]


def _integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _small(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= SMALL


@contextmanager
def cache_off(model: nn.Module) -> Iterator[None]:
    """``use_cache`` off, on the model's config and every config inside it, for as long as the context lasts.

    A training step keeps no key/value cache; a traced one must not either. Models whose layers hand keys and values on
    through the cache need it, and keep it. A config that refuses the change is left: the call gets the flag, see
    `call_flags`.
    """
    with ExitStack() as stack:
        for config in [] if kv_sharing.needs_cache(model) else list(kv_sharing.configs_of(model)):
            if getattr(config, "use_cache", None):
                with suppress(AttributeError, TypeError):
                    config.use_cache = False
                    stack.callback(setattr, config, "use_cache", True)
        yield


def call_flags(model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a training call: the sample's, and ``use_cache=False`` as checkpointed models get it."""
    names = parameter_names(model.forward)
    has_cache_flag = kwargs.get(USE_CACHE) is not None or USE_CACHE not in names or len(args) > names.index(USE_CACHE)
    return dict(kwargs) if has_cache_flag or kv_sharing.needs_cache(model) else {**kwargs, USE_CACHE: False}


def run_forward(
    model: nn.Module, state: Mapping[str, torch.Tensor], args: tuple, kwargs: Mapping[str, Any], aim: Aim = PLAN
) -> Any:
    """Call `model` with `state` in the place of its tensors; raises ValueError where that is not possible."""
    with named_reason(model, describe(args, kwargs), aim):
        return call_with(model, state, args, kwargs)


class _Traced(Forward):
    """The forward of a layer while its model is traced."""

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__(module)
        self.run = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


@contextmanager
def replaced_forwards(layers: Sequence[Any], make: Callable[[Any, Callable], Callable]) -> Iterator[None]:
    """Each layer's ``forward`` replaced by ``make(layer, forward)`` inside the context."""
    before: dict[nn.Module, Any] = {}
    try:
        for layer in layers:
            module = layer.inner
            if module not in before:
                before[module] = module.__dict__.get("forward")
                _Traced(module, make(layer, module.forward)).put()
        yield
    finally:
        for module, forward in before.items():
            put_on_instance(module, "forward", forward)


def planned_table(tokens: int, choices: int, experts: int, routing: PlannedRouting) -> torch.Tensor:
    """Return the table that `nemo_like::route` returns in a traced run, for this rank's `tokens` of `choices` experts."""
    tokens = round(tokens * routing.sent)
    sent, came = (round(tokens * ranks) for ranks in ranks_reached(choices, experts, routing))
    rows = round(tokens * choices * routing.imbalance)
    return torch.cat(
        [_spread(sent, routing.ranks), _spread(came, routing.ranks), _spread(rows, experts // routing.ranks)]
    )


def ranks_reached(choices: int, experts: int, routing: PlannedRouting) -> tuple[float, float]:
    """Return the rows that a token makes for exchanges between ranks: those sent, and those that come to the fullest rank.

    A token that takes any set of experts with the same probability leaves out a rank that has `here` of them with the
    probability that each next choice falls on one of the others; to the fullest rank come `imbalance` times as many.
    """
    here = experts // routing.ranks

    def reaches(share: float) -> float:
        return 1 - math.prod(max(0.0, 1 - share * here / (experts - taken)) for taken in range(choices))

    return routing.ranks * reaches(1.0), routing.ranks * reaches(routing.imbalance)


def _spread(rows: int, places: int) -> torch.Tensor:
    return torch.tensor([rows // places + (number < rows % places) for number in range(places)])
