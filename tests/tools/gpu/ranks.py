"""Check 8: attention of a split sequence, without the other ranks. Check 9: FSDP2 with one rank."""

from __future__ import annotations

import functools
import itertools
import traceback
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from nemo_like import apply_activation_checkpointing
from nemo_like.bench.measured_step import compare_gradients, gradients_of, step_loss
from nemo_like.distributed.context import methods
from nemo_like.distributed.shard import shard_layers
from nemo_like.layers import find_layers
from nemo_like.torch_compat import TorchDispatchMode
from tests.models.blocks import LlamaBlock, Operators, Stack
from tests.tools.gpu.driver import Run
from tests.tools.gpu.machine import Machine

RANKS = 8
WAITS = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "_unique2", "masked_select", "bincount")


def sequences(run: Run) -> None:
    """Run the attention of the first and of the last of eight ranks beside that of the whole sequence; then packed rows."""
    machine = Machine(run.cpu)
    for tokens in machine.pick((16_384, 32_768, 65_536), (256,)):
        with run.guarded(f"{tokens} tokens"):
            _one_length(run, machine, tokens)
        machine.settle()
    _packed(run, machine)


def _one_length(run: Run, machine: Machine, tokens: int) -> None:
    heads, kv_heads, width = machine.pick((32, 8, 128), (4, 2, 16))
    torch.manual_seed(0)
    query = machine.normal(1, heads, tokens, width, grad=True)
    key, value = (machine.normal(1, kv_heads, tokens, width) for _ in range(2))

    def whole() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    expected = whole()
    grad = torch.randn_like(expected)
    (of_query,) = torch.autograd.grad(expected, query, grad, retain_graph=True)
    forward = machine.ms(whole, 3, 1) / RANKS
    backward = machine.ms(lambda: torch.autograd.grad(expected, query, grad, retain_graph=True), 3, 1) / RANKS
    query, expected, half = query.detach(), expected.detach(), tokens // (2 * RANKS)
    states = torch.stack([key, value]).unflatten(3, (2 * RANKS, half))  # (2, B, KV heads, chunks, half, D)

    def part(tensor: Tensor, rank: int) -> Tensor:
        chunks = tensor.unflatten(2, (2 * RANKS, half))
        return torch.cat([chunks[:, :, rank], chunks[:, :, -1 - rank]], 2)

    for method, rank in itertools.product(("all_gather", "ring"), (0, RANKS - 1)):
        q, k, v, o, g = (part(tensor, rank) for tensor in (query, key, value, expected, grad))
        how = (width**-0.5, method, rank, RANKS, "")
        with _alone(states, rank) as begin, torch.no_grad():

            def attend(args: Any = (q, k, v, *how), begin: Callable[[], None] = begin) -> Any:
                begin()
                return methods.causal_attention._init_fn(*args)

            with Operators() as ran:
                out, total = attend()
            error = ((out - o).float().norm() / o.float().norm()).item()
            kernels = sorted({op.__name__.partition(".")[0][1:] for op in ran.ops if "attention" in op.__name__})

            def back(args: Any = (g, q, k, v, out, total, *how), begin: Callable[[], None] = begin) -> Any:
                begin()
                return methods.causal_attention_backward._init_fn(*args)

            wanted = part(of_query, rank)
            of_error = ((back()[0] - wanted).float().norm() / wanted.float().norm()).item()
            peak = machine.peaks(back)[0] if machine.is_cuda else None
            times = machine.ms(attend, 3, 1), machine.ms(back, 3, 1)
        # Two roundings to bfloat16 of the same number differ by less than this.
        ok = max(error, of_error) <= torch.finfo(machine.dtype).eps
        name = f"{method}, rank {rank} of {RANKS}, {tokens} tokens"
        run.row(f"{name}: forward ms", forward, times[0], ok=ok, error=error, kernels=" ".join(kernels))
        run.row(f"{name}: backward ms", backward, times[1], ok=ok, error=of_error, peak=peak)


class _alone:
    """Collectives of one rank that bring what the other ranks would send, from the keys and values of all.

    Gradients that other ranks would send are missing, so that only those of queries are right.
    """

    def __init__(self, states: Tensor, rank: int) -> None:
        self.states, self.rank, self.calls = states, rank, itertools.count()
        done = SimpleNamespace(wait=lambda: None)
        self.patches: list[Any] = [
            mock.patch.object(dist, "all_gather_into_tensor", lambda got, *_, **__: self.gather(got, done)),
            mock.patch.object(dist, "reduce_scatter_tensor", lambda *_, **__: done),
            mock.patch.object(methods, "find_group", lambda group: None),
            mock.patch.object(methods, "_exchange", lambda sent, group: (self.exchange(sent), [])),
        ]

    def __enter__(self) -> Callable[[], None]:
        for patch in self.patches:
            patch.start()
        return self.begin

    def __exit__(self, *error: object) -> None:
        for patch in self.patches:
            patch.stop()

    def begin(self) -> None:
        self.calls = itertools.count()

    def gather(self, got: Tensor, done: Any) -> Any:
        """Fill `got` (tokens, 2, B, heads, D) with the chunks from the front, or every second time from the back."""
        chunks = self.states.permute(3, 4, 0, 1, 2, 5)
        got.copy_((chunks[RANKS:].flip(0) if next(self.calls) % 2 else chunks[:RANKS]).flatten(0, 1))
        return done

    def exchange(self, sent: Tensor) -> Tensor:
        if sent.dtype != self.states.dtype:  # sums of gradients
            return torch.zeros_like(sent)
        of = (self.rank - next(self.calls) - 1) % RANKS
        return torch.cat([self.states[:, :, :, of], self.states[:, :, :, -1 - of]], 3)


def _packed(run: Run, machine: Machine) -> None:
    """Measure a row of eight documents by each way to keep them apart."""
    tokens, heads, width = machine.pick((8192, 32, 128), (128, 4, 16))
    query, key, value = (machine.normal(1, heads, tokens, width, grad=True) for _ in range(3))
    at = torch.arange(tokens, device=machine.device)
    of = at // (tokens // 8)
    seen = (of[:, None] == of[None]) & (at[:, None] >= at[None])

    def bias() -> Tensor:
        return torch.zeros(tokens, tokens, dtype=machine.dtype, device=machine.device).masked_fill_(~seen, -torch.inf)

    def flex() -> Callable[[], Tensor]:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask = create_block_mask(
            lambda b, h, q, k: (of[q] == of[k]) & (q >= k), None, None, tokens, tokens, machine.device.type
        )
        compiled = torch.compile(flex_attention)
        return lambda: compiled(query, key, value, block_mask=mask)

    def varlen() -> Callable[[], Tensor]:
        from torch.nn.attention import varlen

        ends = torch.arange(0, tokens + 1, tokens // 8, dtype=torch.int32, device=machine.device)
        flat = [states[0].transpose(0, 1) for states in (query, key, value)]  # (tokens, heads, D)
        # This window is causal: any token before, none behind.
        attend: Any = varlen.varlen_attn  # its arguments differ between releases
        call = functools.partial(attend, *flat, ends, ends, tokens // 8, tokens // 8, window_size=(-1, 0))
        return lambda: call().transpose(0, 1)[None]

    def masked(mask: Tensor) -> Callable[[], Tensor]:
        return lambda: F.scaled_dot_product_attention(query, key, value, mask)

    ways: dict[str, Callable[[], Callable[[], Tensor]]] = {
        "boolean": lambda: masked(seen),
        "numbers": lambda: masked(bias()),
    }
    ways |= (
        {"flex": flex, "varlen": varlen} if machine.is_cuda else {}
    )  # which have no kernel for the CPU, or compile long
    expected = masked(seen)().detach()
    first = None
    for name, make in ways.items():
        with run.guarded(f"documents, {name}"):
            call = make()
            with torch.no_grad():
                error = ((call() - expected).float().norm() / expected.float().norm()).item()
            ms = machine.ms(lambda call=call: call().sum().backward())  # type: ignore[misc]
            first = ms if first is None else first
            ok = error <= torch.finfo(machine.dtype).eps
            run.row(f"documents, {name}: forward and backward ms", first, ms, ok=ok, error=error)


# --- FSDP2 with one rank ----------------------------------------------------------------------------------------------


class _Waits(TorchDispatchMode):
    """Counts operators whose result the host reads."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in WAITS
        return func(*args, **(kwargs or {}))


def check(run: Run) -> None:
    """Shard over one rank: gradients, the order of gathers, and the waits of the host in the third step."""
    machine = Machine(run.cpu)
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    backend = machine.pick("cpu:gloo,cuda:nccl", "gloo")
    dist.init_process_group(
        backend, store=store, rank=0, world_size=1, device_id=machine.device if machine.is_cuda else None
    )
    layers, batch = machine.pick(4, 3), machine.batch(1, machine.pick(2048, 32))
    for ac in ("none", "full", "selective"):
        with run.guarded(f"{ac}: gradients"):
            machine.same_bits(True)
            wanted = gradients_of(machine.parallelize(machine.model(layers), ac), batch)
            model = _sharded(machine, machine.model(layers).float(), ac)
            shards: dict[str, Any] = gradients_of(model, batch)
            got = {name: grad.full_tensor().to(machine.dtype) for name, grad in shards.items()}
            result = compare_gradients(wanted, got)
            run.row(f"{ac}: gradients", "bitwise", result, ok=result == "bitwise")
            machine.same_bits(False)
            if ac == "full":
                _order(run, machine, model, batch, layers)
        machine.settle()
    width, heads = machine.pick((4096, 32), (64, 4))
    plain = Stack(LlamaBlock(width, heads) for _ in range(layers)).to(machine.device)
    with run.guarded("plain blocks: waits"):
        _waits(
            run,
            machine,
            "plain blocks",
            _sharded(machine, plain, "selective"),
            machine.normal(1, machine.pick(2048, 32), width),
            0,
        )
    # transformers asks once in each forward whether positions restart.
    with run.guarded("llama: waits"):
        _waits(run, machine, "llama", _sharded(machine, machine.model(layers).float(), "selective"), batch, 1)
    with run.guarded("experts: waits"):
        _waits(run, machine, "experts", _sharded(machine, machine.model(2, "moe").float(), "selective"), batch, None)
    with run.guarded("all-to-all"):
        sent = machine.normal(machine.pick(1 << 27, 1 << 10))
        got_back = torch.empty_like(sent)
        ms = machine.ms(lambda: dist.all_to_all_single(got_back, sent))
        run.row("all-to-all of one rank, GB/s", None, sent.nbytes / 1e6 / ms, ok=torch.equal(sent, got_back))
    dist.destroy_process_group()


def _sharded(machine: Machine, model: nn.Module, ac: str) -> nn.Module:
    """Return `model` as `parallelize` makes it with several ranks; with one it would leave FSDP2 out."""
    apply_activation_checkpointing(model, ac)
    policy = MixedPrecisionPolicy(param_dtype=machine.dtype, reduce_dtype=torch.float32)
    mesh = init_device_mesh(machine.device.type, (1,), mesh_dim_names=("dp_shard",))
    shard_layers(model, find_layers(model), mesh, mp_policy=policy)
    return model


def _order(run: Run, machine: Machine, model: nn.Module, batch: Any, layers: int) -> None:
    """Count the layers whose gather begins in the forward of the unit before."""
    events = machine.trace(lambda: step_loss(model, batch).backward(), run.out / "trace.json.gz", host=True)
    names = [event.name for event in events]
    ahead = sum(
        names.index(before) < names.index(call)
        for before, call in (
            (f"FSDP::forward_prefetch for model.layers.{n}", f"FSDP::pre_forward (model.layers.{n})")
            for n in range(layers)
        )
        if before in names and call in names
    )
    run.row("layers gathered ahead", layers, ahead, ok=ahead == layers)


def _waits(run: Run, machine: Machine, name: str, model: nn.Module, batch: Any, allowed: int | None) -> None:
    """Count the waits of the third step; where none is allowed, CUDA raises at the first."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=machine.is_cuda)

    def step() -> None:
        step_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    measured: Any = 0
    if not machine.is_cuda:
        with _Waits() as waits:
            step_loss(model, batch).backward()
        measured = waits.count
    else:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if allowed == 0 else "warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                step()
            measured = sum("called a synchronizing" in str(warning.message) for warning in caught)
        except RuntimeError as error:
            traceback.print_exc()
            measured = str(error).splitlines()[0][:100]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    run.row(f"{name}: waits of the host in step 3", allowed, measured, ok=allowed is None or measured == allowed)
