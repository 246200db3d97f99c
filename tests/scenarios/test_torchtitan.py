"""Scenarios by role, written anew from the *cases* of torchtitan's tests: `tests/unit_tests/test_activation_checkpoint.py`
(FLOPs, bytes and gradients of each mode), its successor in `gpu/` (which parts run again), `cpu/test_activation_storage.py`
(checkpointed layers whose inputs wait on the host) and `cpu/test_deepep_activation_checkpoint.py` (a dispatch that must
not run twice).

Left out: their check of options that one of their back ends lacks (`preserve_rng_state` of remat; ours has it), storage
pinned by a hook of the caller (we have no such call), prefetching of one pipeline stage (no pipelines here).
Different on purpose: an output that no replay can reach is not held, so `selective` holds 1 unit where they measure 3, and
recomputing the last matmul costs nothing where replay stops early.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from nemo_like import CheckpointConfig, OffloadConfig, SelectivePolicy, apply_activation_checkpointing
from nemo_like._util.live_bytes import LiveBytes
from nemo_like.activation_checkpointing import (
    DecisionTable,
    FullPolicy,
    Policy,
    apply_full_layer_checkpointing_to_layers,
    apply_selective_checkpointing_to_layers,
)
from nemo_like.activation_checkpointing.engine import RegionError, set_early_stop
from nemo_like.activation_checkpointing.policy import HOST, RECOMPUTE, SAVE, SKIP
from nemo_like.offload import apply_offloading
from nemo_like.offload.backends import Backend
from tests.checks import assert_bitwise
from tests.models.blocks import checkpoint_region, gradients
from tests.models.tiny import Decoder, tokens

WIDTH = 64
MATRIX = WIDTH * WIDTH * 4  # bytes of one activation, WIDTH rows


class Toy(nn.Module):
    """A router's gate, a query and an output of double width, as a block of a model. (rows, WIDTH) to a scalar."""

    def __init__(self) -> None:
        super().__init__()
        linear = lambda out: nn.Linear(WIDTH, out, bias=False)  # noqa: E731
        self.router, self.query, self.output = linear(WIDTH), linear(WIDTH), linear(2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.query(self.router(x))).sum()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"0": Toy()})

    def forward(self, x: Tensor) -> Tensor:
        return self.layers["0"](x)


def table(*decisions: Any) -> DecisionTable:
    return DecisionTable({"aten.mm.default": decisions})


# policy; FLOPs of backward where replay runs to the end, and where it stops early; matrices held.
# In units of one (WIDTH, WIDTH) matmul: forward is 1 + 1 + 2, backward twice that.
CASES: dict[str, tuple[Policy | None, int, int, int]] = {
    "none": (None, 8, 8, 2),
    "selective": (SelectivePolicy(), 9, 9, 1),
    "router again": (table(RECOMPUTE, RECOMPUTE, SAVE), 10, 10, 0),
    "output again": (table(SAVE, RECOMPUTE, RECOMPUTE), 11, 9, 1),
    "full": (FullPolicy(), 12, 10, 0),
}
each_case = pytest.mark.parametrize("case", CASES)


def checkpointed(policy: Policy | None, model: nn.Module) -> nn.Module:
    layers = list(model.layers.values())
    if isinstance(policy, FullPolicy):
        apply_full_layer_checkpointing_to_layers(model, layers)
    elif policy is not None:
        apply_selective_checkpointing_to_layers(model, layers, has_kv_sharing=False, policy=policy)
    return model


@pytest.mark.parametrize("early_stop", [False, True])
@each_case
def test_flops_of_backward(case: str, early_stop: bool) -> None:
    policy, to_the_end, stopped, _ = CASES[case]
    model = checkpointed(policy, Model())
    with set_early_stop(early_stop):
        for _ in range(2):
            out = model(torch.randn(WIDTH, WIDTH, requires_grad=True))
            with FlopCounterMode(display=False) as counter:
                out.backward()
    assert counter.get_total_flops() == (stopped if early_stop else to_the_end) * 2 * WIDTH**3


@each_case
def test_bytes_held_between_forward_and_backward(case: str) -> None:
    policy, *_, matrices = CASES[case]
    model, x = checkpointed(policy, Model()), torch.randn(WIDTH, WIDTH, requires_grad=True)
    model(x).backward()  # the gradients are there from here on
    with LiveBytes() as live:
        out = model(x)
        assert live.live - out.untyped_storage().nbytes() == matrices * MATRIX


@each_case
def test_output_and_gradients_are_those_of_the_bare_model(case: str) -> None:
    torch.manual_seed(42)
    bare = Model()
    model, x = checkpointed(CASES[case][0], copy.deepcopy(bare)), torch.randn(8, WIDTH)
    assert_bitwise(gradients(model, model, x), gradients(bare, bare, x))


# --------------------------------------------------------------------------------------------- which parts run again
class CountReads(TorchDispatchMode):
    """How many matrix products have each of `weights` as their second operand."""

    def __init__(self, *weights: Tensor) -> None:
        super().__init__()
        self.counts = {weight.data_ptr(): 0 for weight in weights}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default and args[1].data_ptr() in self.counts:
            self.counts[args[1].data_ptr()] += 1
        return func(*args, **(kwargs or {}))


class Experts(nn.Module):
    """Two routed matmuls and a shared one. (rows, 32) to a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.shared = (nn.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(self.first(x).relu()) + self.shared(x)).tanh().sum()


@pytest.mark.parametrize(
    ("policy", "again"),
    [
        (FullPolicy(), (1, 1, 1)),
        (SelectivePolicy(every_nth_matmul=None), (0, 0, 0)),
        (table(RECOMPUTE, SAVE, SAVE), (1, 0, 0)),
        (table(SAVE, RECOMPUTE, SAVE), (0, 1, 0)),
    ],
    ids=["full", "all kept", "the first routed one again", "the second again"],
)
def test_only_what_the_policy_drops_runs_again(policy: Policy, again: tuple[int, ...]) -> None:
    block = Experts()
    out = checkpoint_region(block, torch.randn(8, 32, requires_grad=True), policy=policy)
    with CountReads(*(m.weight for m in (block.first, block.second, block.shared))) as reads:
        out.backward()
    # Each weight is read once for the gradient of its matmul's input, and once more where the matmul runs again.
    assert tuple(count - 1 for count in reads.counts.values()) == again


@pytest.mark.parametrize(
    ("exclude", "include", "calls"),
    [((), (), [2, 2, 2]), (("*",), ("layers.1",), [1, 2, 1]), (("layers.0",), (), [1, 2, 2])],
)
def test_the_pattern_that_asks_for_replay_beats_the_one_that_forbids_it(
    exclude: tuple[str, ...], include: tuple[str, ...], calls: list[int]
) -> None:
    model, counts = Decoder(), Counter()
    for number, layer in enumerate(model.layers):
        forward = layer.up.forward
        # Not a hook, which a recomputation leaves out.
        layer.up.forward = lambda x, number=number, forward=forward: (counts.update([number]), forward(x))[1]
    config = CheckpointConfig(
        enabled=True, strategy="full", exclude_patterns=exclude, include_patterns=include, profile_before_apply=False
    )
    apply_activation_checkpointing(model, config)
    model(tokens()).backward()
    assert [counts[number] for number in range(3)] == calls


@pytest.mark.parametrize(
    "fields",
    [
        {"strategy": "full", "ops_to_save": ["aten.mm.default"]},
        {"strategy": "full", "policy": SelectivePolicy()},
        {"strategy": "selective", "policy": SelectivePolicy(), "ops_to_save": ["aten.mm.default"]},
        {"strategy": "full", "include_patterns": ["layers.*"], "exclude_patterns": ["layers.*"]},
        {"strategy": "full", "sequential_segments": 2},
    ],
)
def test_a_mode_refuses_the_options_of_another(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="CheckpointConfig"):
        CheckpointConfig(enabled=True, **fields)


# --------------------------------------------------------------------------------- what must not run twice (a dispatch)
ORDER = [0]


@torch.library.custom_op("nemo_like_scenarios::dispatch", mutates_args=())
def dispatch(rows: Tensor) -> Tensor:
    """Rows in the order in which they arrive: another one each time, unless ORDER stands still."""
    ORDER[0] += ORDER[0] > 0
    return rows.roll(ORDER[0], 0)


def _order(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.order = ORDER[0]


dispatch.register_autograd(lambda ctx, grad: grad.roll(-ctx.order, 0), setup_context=_order)
KEPT, OTHER = "nemo_like_scenarios.dispatch.default", "aten.mm.default"
POLICIES: dict[str, Policy] = {
    "full": FullPolicy(),
    "the matmul alone is kept": SelectivePolicy(every_nth_matmul=None, save_ops=(OTHER,)),
    "the dispatch alone is kept": SelectivePolicy(save_ops=(KEPT,)),
    "added to the default": SelectivePolicy(extra=(KEPT,)),
    "kept on the host": DecisionTable({KEPT: [HOST]}),
}


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("case", POLICIES)
def test_a_dispatch_that_differs_in_replay_is_kept_or_an_error(
    case: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEMO_LIKE_VERIFY", "1")
    experts = nn.Linear(8, 8, bias=False)
    block: Callable[[Tensor], Tensor] = lambda t: experts(dispatch(t)).tanh()  # noqa: E731
    x = torch.randn(6, 8)

    def run(form: Callable[[Tensor], Tensor]) -> list[Tensor]:
        ORDER[0] = 0 if deterministic else 1
        return gradients(form, experts, x)

    form = lambda t: checkpoint_region(block, t, policy=POLICIES[case], name="moe")  # noqa: E731
    if deterministic or "dispatch" in case or "added" in case or "host" in case:
        assert_bitwise(run(form), run(block))
    else:
        with pytest.raises(RegionError, match="moe"):
            run(form)


@pytest.mark.parametrize("decision", [RECOMPUTE, SKIP])
def test_a_plan_may_not_replay_what_the_table_of_operators_pins(decision: Any) -> None:
    with pytest.raises(ValueError, match="must not run twice"):
        DecisionTable({"aten.topk.default": [decision]})
    assert torch.ops.aten.topk.default in DecisionTable({OTHER: [SAVE]}).tracked_ops()  # kept without being listed
    assert torch.ops.aten.topk.default in SelectivePolicy().tracked_ops()


# ------------------------------------------------------------------------- inputs of checkpointed layers on the host
ROWS, DIM = 32, 64
ONE_INPUT = ROWS * DIM * 8


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(DIM, DIM, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.w(x)) + x


@pytest.mark.parametrize(
    ("settings", "moved"),
    [({}, 2), ({"prefetch": 0}, 2), ({"host_budget_bytes": 0}, 0), ({"min_bytes": 1 << 20}, 0), ({"mode": "none"}, 0)],
    ids=["prefetched", "on demand", "no host memory left", "too small to move", "off"],
)
def test_inputs_of_checkpointed_layers_wait_on_the_host(settings: dict[str, Any], moved: int) -> None:
    torch.manual_seed(0)
    bare = nn.Sequential(*(Residual() for _ in range(3)))
    model, x = copy.deepcopy(bare), torch.randn(ROWS, DIM, dtype=torch.float64)
    layers = list(model)
    apply_full_layer_checkpointing_to_layers(model, layers)
    config = OffloadConfig(**({"mode": "boundary", "min_bytes": 0, "pin_memory": False} | settings))
    offloader = apply_offloading(model, layers, config, backend=Backend())
    assert_bitwise(gradients(model, model, x), gradients(bare, bare, x))
    # The last layer's input stays, because backward starts with it.
    assert offloader.stats.moved_bytes == moved * ONE_INPUT
    assert offloader.collect().host_live_bytes == 0
