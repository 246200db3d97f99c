"""Blocks, models under a mode and the one comparison that the engine's tests share."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_like import apply_activation_checkpointing
from nemo_like._util.forwards import Forward
from nemo_like._util.tensors import tensors_in
from nemo_like.activation_checkpointing.engine import run_region
from nemo_like.activation_checkpointing.policy import Policy
from nemo_like.activation_checkpointing.transfer import Transfer

MODES = ("full", "selective", "submodule", "sequential")
"""The words for checkpointing."""


class Operators(TorchDispatchMode):
    """Operators that run, in their order, and the most bytes of a tensor that one returned."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        made = func(*args, **(kwargs or {}))
        self.most = max([self.most, *(tensor.untyped_storage().nbytes() for tensor in tensors_in(made))])
        return made

    @property
    def kernels(self) -> list[str]:
        """The names of those whose result is a tensor, and no view."""
        ops = [op for op in self.ops if op.namespace != "prim"]
        return [op.__name__ for op in ops if op._schema.is_mutable or not any(r.alias_info for r in op._schema.returns)]


class LlamaBlock(nn.Module):
    """A Llama-style block: hidden D, KV D/4, FFN 3.5 D; no dropout. (B, T, D) to (B, T, D)."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        linear = lambda a, b: nn.Linear(a, b, bias=False)  # noqa: E731
        self.q, self.k, self.v = linear(width, width), linear(width, width // 4), linear(width, width // 4)
        self.o = linear(width, width)
        self.gate, self.up = linear(width, 7 * width // 2), linear(width, 7 * width // 2)
        self.down = linear(7 * width // 2, width)
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        h = self.norm1(x)
        q, k, v = (f(h).view(b, t, -1, self.head_dim).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).reshape(b, t, d))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class DroppingBlock(nn.Module):
    """Norm and an MLP with dropout on a residual, (..., D) to the same; `bias` is added inside of it."""

    def __init__(self, dim: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        hidden = F.gelu(self.up(self.norm(x)))
        return x + self.dropout(self.down(hidden if bias is None else hidden + bias))


class RouterBlock(nn.Module):
    """A tiny mixture of experts that normalises its top-k weights in place, as Mixtral and its relatives do."""

    def __init__(self, width: int = 16, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = torch.topk(self.router(flat).softmax(-1), 2, dim=-1)  # each (tokens, 2)
        weights /= weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            out.index_add_(0, token, expert(flat[token]) * weights[token, slot, None])
        return x + out.view_as(x)


class Layer(nn.Module):
    """A module of the given parts (modules, parameters, plain values), which runs ``forward(self, ...)``."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def in_turn(layers: Iterable[nn.Module], x: Any, *given: Any) -> Any:
    """The output of layers that are called one after the other, each with what else is given."""
    for layer in layers:
        x = layer(x, *given)
    return x


class Stack(nn.Module):
    """Layers that `run` takes `x` through, `start` before and `head` behind them: modules or functions of one tensor."""

    def __init__(
        self,
        layers: Iterable[nn.Module],
        *,
        start: Callable[[Any], Any] | None = None,
        head: Callable[[Any], Any] | None = None,
        run: Callable[..., Any] = in_turn,
    ) -> None:
        super().__init__()
        self.start, self.layers, self.head, self.run = start, nn.ModuleList(layers), head, run

    def forward(self, x: Any, *given: Any) -> Any:
        x = x if self.start is None else self.start(x)
        x = self.run(self.layers, x, *given)
        return x if self.head is None else self.head(x)


def mean_square(x: Tensor) -> Tensor:
    """A scalar of an output: the loss of a `Stack`."""
    return x.square().mean()


class AttentionLayer(nn.Module):
    """`attention` behind a norm on a residual; the mode "submodule" finds both."""

    def __init__(self, attention: nn.Module, width: int = 8) -> None:
        super().__init__()
        self.self_attn, self.norm = attention, nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.self_attn(self.norm(x)).exp()


def under(ac: Any, make: Callable[[], nn.Module], **options: Any) -> Any:
    """What `make` makes from seed 0, checkpointed as `ac` says; "none": as it is."""
    torch.manual_seed(0)
    model = make()
    return model if ac == "none" else apply_activation_checkpointing(model, ac, **options)


def count_runs(modules: Iterable[tuple[Any, nn.Module]]) -> Counter[Any]:
    """Count, by name, the runs of modules' forwards from now on, those in recomputation too, where no hook is called."""
    ran: Counter[Any] = Counter()
    names = {module: name for name, module in modules}

    class Counting(Forward):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            ran.update([names[self.module]])
            return self.call(*args, **kwargs)

    for module in names:
        Counting(module).put()
    return ran


@contextmanager
def without_collector() -> Iterator[None]:
    """Inside, Python's collector of reference cycles is off."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class NotingTransfer:
    """Keeps copies, and notes the bytes of each move to the host, and less than 0 for each way back."""

    def __init__(self) -> None:
        self.moves: list[int] = []

    def to_host(self, tensor: Tensor) -> Copy:
        self.moves.append(tensor.nbytes)
        return Copy(tensor.detach().clone(), self.moves)


class Copy(NamedTuple):
    """What a `NotingTransfer` keeps."""

    value: Tensor
    moves: list[int]

    def get(self) -> Tensor:
        self.moves.append(-self.value.nbytes)
        return self.value.clone()


def gradients(fn: Callable[..., Any], module: nn.Module, *inputs: Tensor, seed: int = 0) -> list[Tensor]:
    """Output and every gradient of ``(fn(*inputs) ** 2).sum()``; inputs are copied and get gradients where floating."""
    module.zero_grad()
    torch.manual_seed(seed)
    copies = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs]
    out = fn(*(c * 1 for c in copies))
    (out**2).sum().backward()
    grads = [c.grad for c in copies] + [p.grad for p in module.parameters()]
    return [out.detach().clone()] + [g.clone() for g in grads if g is not None]


def checkpoint_region(
    fn: Callable[..., Any],
    *args: object,
    policy: Policy,
    name: str = "",
    preserve_rng_state: bool = True,
    transfer: Transfer | None = None,
    **kwargs: object,
) -> Any:
    """Run ``fn(*args, **kwargs)`` as one region."""
    return run_region(
        fn, args, kwargs, policy=policy, name=name, preserve_rng_state=preserve_rng_state, transfer=transfer
    )


def region(module: Callable[..., Any], policy: Policy, **options: Any) -> Callable[..., Any]:
    """`module` as one region under `policy`."""
    return lambda *args, **kwargs: checkpoint_region(module, *args, policy=policy, name="block", **options, **kwargs)


def train(model: nn.Module, width: int = 16, steps: int = 2) -> list[Tensor]:
    """Gradients of the last of some steps: the second one runs what the first compiled."""
    torch.manual_seed(1)
    x = torch.randn(2, 5, width)
    for _ in range(steps):
        model.zero_grad()
        model(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]
