"""Check 5: attention of a split sequence, without the other ranks. Check 6: the exchange of experts, and check 9: FSDP2,
both with one rank."""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.attention import SDPBackend, sdpa_kernel

from nemo_like import apply_activation_checkpointing
from nemo_like.distributed.context import methods
from nemo_like.distributed.context.sequence_ops import name_group
from nemo_like.distributed.expert.exchange import Exchange
from nemo_like.distributed.shard import shard_layers
from nemo_like.layers import find_layers
from nemo_like.profiling.measured_step import compare_gradients, gradients_of, step_loss
from nemo_like.torch_compat import grouped_mm
from tests.models.blocks import LlamaBlock, Operators, Stack
from tests.tools.gpu.driver import Run
from tests.tools.gpu.machine import Machine

RANKS = 8


def sequences(run: Run) -> None:
    """Run the attention of the first and of the last of eight ranks by each kernel, and compare it with that of the whole
    sequence; then packed rows."""
    machine = Machine(run.cpu)
    forced = machine.pick((SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION), ())
    lengths = machine.pick((16_384, 65_536), (256,))
    for tokens, kernel in [
        (lengths[0], None),
        *((lengths[0], each) for each in forced),
        *((n, None) for n in lengths[1:]),
    ]:
        name = f"{tokens} tokens, {'flash' if kernel is None else kernel.name.partition('_')[0].lower()}"
        with run.guarded(name):
            _one_length(run, machine, tokens, name, SDPBackend.FLASH_ATTENTION if kernel is None else kernel)
        machine.settle()
    _packed(run, machine)


def _one_length(run: Run, machine: Machine, tokens: int, title: str, kernel: SDPBackend) -> None:
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
        name = f"{title}, {method}, rank {rank} of {RANKS}"
        with run.guarded(name), _alone(states, rank) as begin, torch.no_grad(), sdpa_kernel(kernel):

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
            ran_by = " ".join(kernels)
            run.row(f"{name}: forward", None, times[0], "ms", ok=ok, ideal=forward, error=error, attention=ran_by)
            run.row(f"{name}: backward", None, times[1], "ms", ok=ok, ideal=backward, error=of_error, peak=peak)


class _alone:
    """Collectives of one rank that bring what the other ranks would send, from the keys and values of all.

    Gradients that other ranks would send are missing, so that only those of queries are right.
    """

    def __init__(self, states: Tensor, rank: int) -> None:
        self.states, self.rank, self.calls = states, rank, itertools.count()
        done = SimpleNamespace(wait=lambda: None)
        self.patches: list[Any] = [
            mock.patch.object(dist, "all_gather_single", lambda got, *_, **__: self.gather(got, done)),
            mock.patch.object(dist, "reduce_scatter_single", lambda *_, **__: done),
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

    def masked() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, seen)

    # The others have no kernel for the CPU, or compile long; flex compiles for 15 s, so it is the last.
    ways: dict[str, Callable[[], Callable[[], Tensor]]] = {"boolean": lambda: masked}
    ways |= {"varlen": varlen, "flex": flex} if machine.is_cuda else {}
    expected = masked().detach()
    for name, make in ways.items():
        with run.guarded(f"documents, {name}"):
            call = make()
            with torch.no_grad():
                error = ((call() - expected).float().norm() / expected.float().norm()).item()
            ms = machine.ms(lambda call=call: call().sum().backward())  # type: ignore[misc]
            ok = error <= torch.finfo(machine.dtype).eps
            run.row(f"documents, {name}: forward and backward", None, ms, "ms", ok=ok, error=error)


# --- experts and FSDP2 with one rank ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _one_rank(machine: Machine) -> Iterator[Machine]:
    """Within it there is a process group of this rank."""
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    backend, device = machine.pick(("cpu:gloo,cuda:nccl", machine.device), ("gloo", None))
    dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=device)
    yield machine
    dist.destroy_process_group()


def experts(run: Run) -> None:
    """Send rows to experts and back over a group of one rank, and compare with a loop over the experts in float64."""
    machine = Machine(run.cpu)
    tokens, width, inner, number, choices = machine.pick((4096, 2048, 768, 32, 8), (64, 32, 16, 8, 2))
    torch.manual_seed(0)
    rows, weights = machine.normal(tokens, width, grad=True), torch.rand(tokens, choices, device=machine.device)
    ups, downs = (machine.normal(number, *sizes, grad=True) for sizes in ((width, inner), (inner, width)))
    inputs, scale = (rows, ups, downs), (width * inner) ** -0.5
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    with _one_rank(machine):
        exchange = Exchange(number, name_group(dist.group.WORLD))  # type: ignore[arg-type]
        for title, used in (("all experts", number), ("half of the experts empty", number // 2)):
            chosen = torch.rand(tokens, used, device=machine.device).topk(choices, -1).indices

            def call(chosen: Tensor = chosen) -> Tensor:
                came, sent = exchange.send(rows, chosen, weights * scale)
                hidden = grouped_mm(came, ups, sent.counts, sent.ends)
                return exchange.bring_back(grouped_mm(hidden, downs, sent.counts, sent.ends), sent)

            with run.guarded(title):
                out, expected = call(), torch.zeros_like(exact[0])
                for expert, (up, down) in enumerate(zip(*exact[1:])):
                    token, choice = (chosen == expert).nonzero(as_tuple=True)
                    factor = (weights[token, choice, None] * scale).to(machine.dtype)
                    expected = expected.index_add(0, token, exact[0][token] @ up @ down * factor)
                grad = torch.randn_like(out)
                pairs = [
                    (out, expected),
                    *zip(torch.autograd.grad(out, inputs, grad), torch.autograd.grad(expected, exact, grad.double())),
                ]
                errors = [((one.double() - other).norm() / other.norm()).item() for one, other in pairs]
                # Two matmuls and a weighted sum, each rounded to bfloat16.
                ok = max(errors) <= 2 * torch.finfo(machine.dtype).eps
                run.row(f"{title}: largest error", 0.0, max(errors), ok=ok, of_out_rows_up_down=str(errors))
                with torch.no_grad():
                    came, sent = exchange.send(rows, chosen, weights)
                times: dict[str, tuple[Callable[[], Any], float]] = {
                    "forward and backward": (lambda: call().backward(grad), 0.0),  # noqa: B023
                    "route": (lambda: torch.ops.nemo_like.route(chosen, number, exchange.group), 0.0),  # noqa: B023
                    "bring_back": (lambda: exchange.bring_back(came, sent), came.nbytes + rows.nbytes),  # noqa: B023
                    "grouped_mm": (lambda: grouped_mm(came, ups, sent.counts, sent.ends), 2 * came.numel() * inner),  # noqa: B023
                }
                for name, (run_it, work) in times.items():
                    ms = machine.ms(run_it)
                    run.row(f"{title}: {name}", None, ms, "ms", G_per_second=work / 1e6 / ms)


def check(run: Run) -> None:
    """Shard over one rank: gradients, the order of gathers, and the waits of the host in the third step."""
    with _one_rank(Machine(run.cpu)) as machine:
        _fsdp2(run, machine)


def _fsdp2(run: Run, machine: Machine) -> None:
    layers, length = machine.pick((4, 2048), (3, 32))
    batch = machine.batch(1, length)
    for ac in machine.pick(("none", "full", "selective"), ("full",)):
        with run.guarded(f"{ac}: gradients"):
            machine.same_bits(True)
            wanted = gradients_of(machine.parallelize(machine.model(layers), ac), batch)
            model = _sharded(machine, machine.model(layers).float(), ac)
            shards, attention = machine.attention(lambda: gradients_of(model, batch))  # noqa: B023
            values: dict[str, Any] = {**shards}
            got = {name: grad.full_tensor().to(machine.dtype) for name, grad in values.items()}
            result = compare_gradients(wanted, got)
            run.row(f"{ac}: gradients", "bitwise", result, ok=result == "bitwise", attention=attention)
            machine.same_bits(False)
            if ac == "full":
                _order(run, machine, model, batch, layers)
        machine.settle()
    machine.same_bits(False)
    width, heads = machine.pick((4096, 32), (64, 4))
    x = machine.normal(1, machine.pick(2048, 32), width)
    # transformers asks once in each forward whether positions restart.
    cases: dict[str, tuple[Callable[[], nn.Module], Any, int | None]] = {
        "plain blocks": (lambda: Stack(LlamaBlock(width, heads) for _ in range(layers)).to(machine.device), x, 0),
        "llama": (lambda: machine.model(layers).float(), batch, 1),
        "experts": (lambda: machine.model(2, "moe").float(), batch, None),
    }
    for name, (make, sample, allowed) in cases.items():
        with run.guarded(f"{name}: waits"):
            _waits(run, machine, name, _sharded(machine, make(), "selective"), sample, allowed)


def _sharded(machine: Machine, model: nn.Module, ac: str) -> nn.Module:
    """Return `model` as `parallelize` makes it with several ranks; with one it would leave FSDP2 out."""
    apply_activation_checkpointing(model, ac)
    mesh = init_device_mesh(machine.device.type, (1,), mesh_dim_names=("dp_shard",))
    policy = MixedPrecisionPolicy(param_dtype=machine.dtype, reduce_dtype=torch.float32)
    shard_layers(model, find_layers(model), mesh, mp_policy=policy)
    return model


def _order(run: Run, machine: Machine, model: nn.Module, batch: Any, layers: int) -> None:
    """Count the layers whose gather begins in the forward of the unit before."""
    call = lambda: step_loss(model, batch).backward()  # noqa: E731
    names = [event.name for event in machine.trace(call, True, functools.partial(run.keep, "trace.json"))]
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
    if not machine.is_cuda:
        run.skip(f"{name}: waits of the host in step 3", "no GPU")  # tests_distributed/test_host_waits.py counts them
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error" if allowed == 0 else "warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
        measured = sum("called a synchronizing" in str(warning.message) for warning in caught)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    run.row(f"{name}: waits of the host in step 3", allowed, measured, ok=allowed is None or measured == allowed)
