"""Experts as a list of modules, as plain PyTorch models and older ones of transformers have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_like import parallelize
from nemo_like.distributed import (
    clip_grad_norm_,
    get_model_state,
    get_optimizer_state,
    materialize,
    set_model_state,
    set_optimizer_state,
)
from nemo_like.distributed.expert import find_experts
from nemo_like.distributed.expert.expert_lists import StackedExperts
from nemo_like.options import ExpertParallel
from nemo_like.planning.planner import plan_for
from tests_distributed.expert.whole_gradients import assert_close, gradients
from tests_distributed.small_model import VOCAB, WIDTH, SmallModel, tokens
from tests_distributed.spawn import run_ranks

COUNT = 4


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(WIDTH, 24, bias=False), nn.Linear(24, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, rows: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(rows * self.scale)))


class Mixture(nn.Module):
    """Calls the experts that have tokens, as older Mixtrals do; beside them one for every token, and a noisy router."""

    def __init__(self, keyed: bool) -> None:
        super().__init__()
        self.gate, self.shared, self.noise = nn.Linear(WIDTH, COUNT), Expert(), nn.Dropout(0.0)
        made = [Expert() for _ in range(COUNT)]
        self.experts: Any = nn.ModuleDict({f"e{n}": m for n, m in enumerate(made)}) if keyed else nn.ModuleList(made)
        self.register_buffer("calls", torch.zeros(()))
        self.jitter, self.keyed = 0.0, keyed

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        flat = x.flatten(0, -2)
        noisy = self.noise(flat) * (1 + self.jitter * torch.rand_like(flat))
        shared, logits = self.shared(noisy), self.gate(noisy)
        weights, chosen = logits.softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for number in chosen.unique().tolist():
            rows, places = torch.where(chosen == number)
            expert = self.experts[f"e{number}" if self.keyed else number]
            out.index_add_(0, rows, expert(flat[None, rows]).view(-1, WIDTH) * weights[rows, places, None])
        return (out + shared).view_as(x), logits


class Block(nn.Module):
    def __init__(self, keyed: bool) -> None:
        super().__init__()
        self.norm, self.mixture = nn.LayerNorm(WIDTH), Mixture(keyed)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixture(self.norm(x))[0]


class Model(SmallModel):
    def __init__(self, keyed: bool = False) -> None:
        super().__init__(lambda: Block(keyed))
        for parameter in self.parameters():
            parameter.data.mul_(2)


def wanted_of(model: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one process, those of lists stacked."""
    loss = model(ids)
    loss.backward()
    found = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}
    stacked: dict[str, Any] = {}
    for name, grad in found.items():
        around, dot, rest = name.partition(".experts.")
        _, _, own = rest.partition(".")
        if dot:
            stacked.setdefault(f"{around}.experts.{own.replace('.', '_')}", []).append(grad)
        else:
            stacked[name] = grad
    return loss.detach(), {name: torch.stack(g) if isinstance(g, list) else g for name, g in stacked.items()}


def _trained(rank: int, world_size: int, ep: int, tp: int) -> None:
    ids = tokens(world_size // tp)
    mine = ids[rank // tp : rank // tp + 1]
    for keyed in (False, True):
        loss, wanted = wanted_of(Model(keyed), ids)
        plain = None
        for ac in ("none", "full", "selective", "submodule", "sequential"):
            plan = {"layers.*.mixture.experts": "each"} if keyed else None
            model = parallelize(Model(keyed), ac=ac, ep=ExpertParallel(ep, plan=plan), device="cpu")
            part = model(mine)
            part.backward()
            total = part.detach().clone()
            torch.distributed.all_reduce(total)
            assert abs(total / world_size - loss) <= 1e-6 * loss
            found = gradients(model)
            assert_close(found, wanted)
            norm = clip_grad_norm_(model, 1e9)
            whole = torch.stack([grad.norm() for grad in wanted.values()]).norm()
            assert abs(norm - whole) <= 1e-5 * whole
            plain = found if plain is None else plain
            assert all(torch.equal(found[name], plain[name]) for name in plain), ac
            if ac == "none":
                assert model.layers[0].mixture.calls == 1  # though its forward ran twice
            held = sum(p.to_local().numel() for n, p in model.named_parameters() if ".experts." in n)
            assert held * world_size == sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)


@pytest.mark.few(1)
@pytest.mark.parametrize(("ranks", "ep"), [(2, 2), (4, 2), (4, 4)])
def test_lists_are_dealt_out(ranks: int, ep: int) -> None:
    run_ranks(ranks, _trained, ep, 1, timeout=120)


def _unbalanced(rank: int, world_size: int) -> None:
    """All tokens go to experts 0 and 1, which the first rank has."""

    def pulled() -> nn.Module:
        model = Model()
        for layer in model.layers:
            layer.mixture.gate.weight.data.zero_()
            layer.mixture.gate.bias.data.copy_(torch.tensor([2.0, 1.0, 0.0, 0.0]))
        return model

    ids = tokens(world_size)
    _, wanted = wanted_of(pulled(), ids)
    for ac in ("none", "full"):
        model = parallelize(pulled(), ac=ac, ep=2, device="cpu")
        model(ids[rank : rank + 1]).backward()
        found = gradients(model)
        for name, grad in wanted.items():
            assert (found[name] - grad).norm() <= 1e-5 * grad.norm().clamp(min=1e-3), name


def test_a_rank_whose_experts_get_no_token() -> None:
    run_ranks(2, _unbalanced)


class _ByToken(Mixture):
    """Each token goes to the expert of its own number; those from `COUNT` on to none."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.flatten(0, -2)
        logits = self.gate(flat)
        out = self.shared(flat) + logits.sum(-1, keepdim=True)
        ids = self.told["ids"]
        for number in sorted(set(ids.tolist()) & set(range(COUNT))):
            rows = torch.where(ids == number)[0]
            expert = self.experts[f"e{number}" if self.keyed else number]
            out.index_add_(0, rows, expert(flat[rows]))
        return out.view_as(x), logits


def _by_token(keyed: bool = False) -> nn.Module:
    class Told(Model):
        def forward(self, ids: Tensor) -> Tensor:
            self.told["ids"] = ids.flatten()
            return super().forward(ids)

    model = Told(keyed)
    model.told = {}
    for layer in model.layers:
        layer.mixture.__class__ = _ByToken
        layer.mixture.told = model.told
    return model


# Of each rank's tokens: no rank has all experts, none has expert 3, and one has no expert at all.
ROWS = [[0, 1, 9, 9], [1, 2, 8, 7], [9, 9, 9, 9], [2, 2, 2, 2]]
WHOLE: dict[str, dict[str, Any]] = {
    "one shard group": {}, "replicas": {"dp_replicate": 2}, "compiled": {"compile": "aot_eager"},
    "ddp": {"strategy": "ddp"}, "bfloat16": {"precision": "bf16"}, "split": {"ep": 2},
}  # fmt: skip


def _idle(rank: int, world_size: int) -> None:
    """Lists that are not split: an expert that gets tokens on some ranks, on none, and a rank without any."""
    ids = torch.tensor(ROWS[-world_size:])
    for said, options in WHOLE.items():
        if options.get("dp_replicate", 1) >= world_size:
            continue
        for keyed in (False, True) if said == "one shard group" else (False,):
            reference = _by_token(keyed)
            _, grads = wanted_of(reference, ids)
            if said != "split":
                grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in reference.named_parameters()}
            plain: Any = None
            for ac in ("none", "full", "selective", "submodule") if said == "one shard group" else ("none", "full"):
                plan = {"layers.*.mixture.experts": "each"}
                expert = {} if said == "ddp" else {"ep": ExpertParallel(options.get("ep", 1), plan=plan)}
                model = parallelize(_by_token(keyed), ac=ac, device="cpu", **options | expert)
                for _ in range(2):  # twice: DDP complains in the second forward
                    model.zero_grad()
                    model(ids[rank : rank + 1]).backward()
                found = {name.removeprefix("module."): grad for name, grad in gradients(model).items()}
                assert found.keys() == grads.keys(), (said, ac)
                for name, grad in grads.items():
                    near = 0.05 if said == "bfloat16" else 1e-5
                    assert (found[name] - grad).norm() <= near * grad.norm().clamp(min=1e-3), (said, ac, name)
                plain = found if plain is None else plain
                assert all(torch.equal(found[name], plain[name]) for name in plain), (said, ac)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_experts_that_are_not_split_and_get_no_token_on_some_ranks(ranks: int) -> None:
    run_ranks(ranks, _idle, timeout=120)


def _noisy(rank: int, world_size: int) -> None:
    """The two passes of a block, and its replay, draw the same numbers."""
    plain: Any = None
    for ac in ("none", "full", "selective", "submodule"):
        whole = Model()
        for layer in whole.layers:
            layer.mixture.noise.p, layer.mixture.jitter = 0.3, 0.5
        model = parallelize(whole, ac=ac, ep=2, device="cpu")
        torch.manual_seed(rank)
        model(tokens(world_size)[rank : rank + 1]).backward()
        found = gradients(model) | {"the generator's next": torch.rand(3)}
        plain = found if plain is None else plain
        assert all(torch.equal(found[name], plain[name]) for name in plain), ac


def test_noise_is_drawn_once() -> None:
    run_ranks(2, _noisy)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, rank: int, world_size: int) -> None:
    rows = 4 // world_size
    ids = torch.randint(VOCAB, (4, 6), generator=torch.Generator().manual_seed(seed))
    model(ids[rows * rank : rows * (rank + 1)]).backward()
    clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _resumed(rank: int, world_size: int, ep: int, folder: str, resume: bool, steps: tuple[int, ...]) -> dict[str, Any]:
    model = parallelize(Model(), ac="full", ep=ep, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if resume:
        _step(model, optimizer, 0, rank, world_size)  # states to load into
        state: dict[str, Any] = {"model": get_model_state(model), "optimizer": get_optimizer_state(model, optimizer)}
        dcp.load(state, checkpoint_id=folder)
        set_model_state(model, state["model"])
        set_optimizer_state(model, optimizer, state["optimizer"])
    for seed in steps:
        _step(model, optimizer, seed, rank, world_size)
    if not resume:
        saved = {"model": get_model_state(model), "optimizer": get_optimizer_state(model, optimizer)}
        dcp.save(saved, checkpoint_id=folder)
    whole = get_model_state(model, full=True)
    assert rank or whole.keys() == Model().state_dict().keys()
    moments = get_optimizer_state(model, optimizer, full=True)
    set_optimizer_state(model, optimizer, moments, full=True)
    again = get_optimizer_state(model, optimizer, full=True)
    assert rank or all(torch.equal(again["state"][n][k], v) for n, e in moments["state"].items() for k, v in e.items())
    return whole | {f"moments of {name}": e["exp_avg"] for name, e in moments["state"].items()} if rank == 0 else {}


@pytest.mark.few(1)
@pytest.mark.parametrize(("before", "after"), [((2, 2), (1, 1)), ((1, 1), (4, 4)), ((4, 2), (2, 2))])
def test_resumed_with_lists_split_otherwise(tmp_path: Path, before: tuple[int, int], after: tuple[int, int]) -> None:
    """(ranks, ep) before and after."""
    run_ranks(before[0], _resumed, before[1], str(tmp_path), False, (1, 2), timeout=90)
    resumed = run_ranks(after[0], _resumed, after[1], str(tmp_path), True, (3,), timeout=90)[0]
    through = run_ranks(1, _resumed, 1, str(tmp_path / "whole"), False, (1, 2, 3), timeout=90)[0]
    assert resumed.keys() == through.keys()
    for name, value in through.items():
        assert (resumed[name] - value).norm() <= 1e-4 * value.norm().clamp(min=1e-6), name


def _filled(rank: int, world_size: int, folder: str) -> None:
    from safetensors.torch import save_file

    bare = Model().state_dict()
    file = f"{folder}/{rank}.safetensors"
    save_file({name: value.clone() for name, value in bare.items()}, file)
    for ep in (1, 2):
        for source in ({"state_dict": bare}, {"checkpoint": file}):
            with torch.device("meta"):
                empty = Model()
            model = materialize(parallelize(empty, ep=ep, device="cpu"), **source)
            found = get_model_state(model, full=True)
            assert rank or (found.keys() == bare.keys() and all(torch.equal(found[key], bare[key]) for key in bare))
            set_model_state(model, {name: value + 1 for name, value in bare.items()})
            found = get_model_state(model, full=True)
            assert rank or all(torch.equal(found[key], bare[key] + 1) for key in bare)


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_lists_from_meta(tmp_path: Path, ranks: int) -> None:
    run_ranks(ranks, _filled, str(tmp_path))


def _adapted(targets: list[str]) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(Model(), LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    return model


def _with_adapters(rank: int, world_size: int) -> None:
    ids = tokens(world_size)
    torch.manual_seed(1)
    _, wanted = wanted_of(_adapted(["w1", "w2", "gate"]), ids)
    plain = None
    for ac in ("none", "full", "selective"):
        torch.manual_seed(1)
        model = parallelize(_adapted(["w1", "w2", "gate"]), ac=ac, ep=2, device="cpu")
        model(ids[rank : rank + 1]).backward()
        found = gradients(model)
        assert any(".experts.w1_lora_A_default_weight" in name for name in found)
        assert not any(name.endswith(("base_layer_weight", "base_layer.weight")) for name in found)
        assert_close(found, {name: wanted[name] for name in found})
        plain = found if plain is None else plain
        assert all(torch.equal(found[name], plain[name]) for name in plain), ac


def test_adapters_in_the_experts_of_a_list() -> None:
    pytest.importorskip("peft")
    run_ranks(2, _with_adapters)


class _Narrow(Expert):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, WIDTH)


class _OwnForward(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        return sum(expert(x) for expert in self)  # type: ignore[return-value]


def _buffered() -> nn.Module:
    expert = Expert()
    expert.register_buffer("seen", torch.zeros(()))
    return expert


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ([Expert, _Narrow], r"experts' are not alike: number 1, a _Narrow"),
        ([Expert, _buffered], "not alike|has a buffer, seen"),
        ([_buffered, _buffered], "has a buffer, seen"),
    ],
)
def test_lists_that_cannot_be_stacked(experts: list[Any], message: str) -> None:
    model = Model()
    model.layers[1].mixture.experts = nn.ModuleList(make() for make in experts)
    with pytest.raises(ValueError, match=message):
        find_experts(model)


class _OwnScale(nn.ModuleList):
    def __init__(self) -> None:
        super().__init__(Expert() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(WIDTH))


def test_a_list_whose_experts_share_something() -> None:
    model = Model()
    model.layers[0].mixture.experts = _OwnScale()
    with pytest.raises(ValueError, match="a list of experts, has a tensor of its own, scale"):
        find_experts(model)
    model = Model()
    experts = model.layers[1].mixture.experts
    experts[2].scale = experts[0].scale
    with pytest.raises(
        ValueError, match=r"Expert 2 of 'layers.1.mixture.experts' shares its scale with expert 0's scale"
    ):
        find_experts(model)


def test_a_list_with_a_forward_of_its_own() -> None:
    model = Model()
    model.layers[0].mixture.experts = _OwnForward(Expert() for _ in range(2))
    with pytest.raises(ValueError, match="a _OwnForward, is a list of experts with a forward of its own"):
        find_experts(model)
    with pytest.raises(ValueError, match="'each' for 'head', a Linear: it must be a list"):
        find_experts(Model(), {"head": "each"})


@pytest.mark.parametrize("ep", [1, 2])
def test_budgets_say_why_not(ep: int) -> None:
    reason = (
        r"'layers\.0\.mixture\.experts' is a list of experts, whose block decides in Python how many rows each gets"
    )
    with pytest.raises(ValueError, match=reason):
        plan_for(Model(), ac="50%", sample_input=tokens(2), ep=ep, world_size=2)


def test_what_a_stack_is_not() -> None:
    stack = StackedExperts(nn.ModuleList(Expert() for _ in range(3)))
    assert len(stack) == 3 and len(stack[1:]) == 2 and len(list(stack)) == 3
    assert sorted(stack.names) == ["scale", "w1_weight", "w2_bias", "w2_weight"]
    with pytest.raises(NotImplementedError, match="outside of its block's forward"):
        stack[-1](torch.ones(1, WIDTH))
    with pytest.raises(AttributeError, match=r"Expert 0 .* has no 'w1' here"):
        _ = stack[0].w1
