"""Stages of a pipeline in plans: what a trace says of a cut, gradients of what was sent on, and what ranks reserve.

The gradient of what a stage sent on comes into a buffer that stays: nothing is added into it in place, and it is there as
long as the last layer's backward runs.
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nemo_like import Job
from nemo_like.activation_checkpointing.engine import run_region
from nemo_like.distributed.pipeline.cut import StageParts, cut, deal, slices
from nemo_like.distributed.pipeline.stage_parts import check_stages, stage_parts
from nemo_like.layers import find_layers
from nemo_like.options import PipelineParallel, StepSpec
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.model.traced import TracedPart
from nemo_like.planning.planner import describe
from nemo_like.planning.predictions.rank import RankSteps, fullest_peaks
from nemo_like.planning.predictions.reserved import StepLogs, replay, reserved_on
from nemo_like.planning.query import PlanQuery
from nemo_like.planning.trace.layer_memory import backward_of_inputs, block_memory
from nemo_like.planning.trace.records import BlockEvents
from tests.allocator_events import cpu_events
from tests.models.blocks import Layer, RouterBlock, Stack, in_turn, mean_square
from tests.models.families import FAMILIES
from tests.models.nano_gpt import NanoGPT
from tests.models.tiny import Block, labelled, llama, tokens
from tests.planning.queries import Text, part_of
from tests.tools.benchmarks.torchtitan_step import KeepsOutputs


def _parts(model: nn.Module) -> StageParts:
    return stage_parts(model, find_layers(model), {"x": tokens()})


def test_a_llama() -> None:
    model = llama()
    parts = stage_parts(model, find_layers(model), {"input_ids": tokens(), "labels": tokens()})
    assert parts.layers == ("model.layers.0", "model.layers.1", "model.layers.2")
    assert parts.before == {"model.embed_tokens.weight"}
    assert parts.after == {"model.norm.weight", "lm_head.weight"}
    assert (parts.tied, parts.forms, parts.hidden_width) == ((), (None, None, None), (32,))
    # 4 x 12 tokens: q, k, v, o of width 32, three matrices of 32 x 64; attention 2 x 12 pairs; multiply-adds are two.
    linears = 2 * 48 * (4 * 32 * 32 + 3 * 32 * 64)
    assert parts.layer_flops == (linears + 4 * 2 * 12 * 12 * 32 * 2,) * 3
    assert (parts.flops_before, parts.flops_after) == (0, 2 * 48 * 32 * 64)


def test_tied_weights_and_positions_in_a_parameter() -> None:
    model = NanoGPT()
    parts = stage_parts(model, find_layers(model), {"input_ids": tokens(), "labels": tokens()})
    assert parts.before == {"wte.weight", "wpe", "lm_head.weight"}  # the two names of one tensor
    assert parts.after == {"wte.weight", "ln_f.weight", "ln_f.bias", "lm_head.weight"}
    assert parts.tied == ("wte.weight",)


def _odd(run: Callable[..., Tensor]) -> Any:
    """Four layers, run by `run`."""
    return Stack((Block() for _ in range(4)), start=nn.Embedding(64, 16), head=nn.Linear(16, 64), run=run)


def _long_skip(layers: nn.ModuleList, x: Tensor) -> Tensor:
    first = layers[0](x)
    return in_turn(list(layers)[1:], first) + first


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (
            lambda layers, first: functools.reduce(lambda x, layer: layer(x + first), layers, first),
            "layers.0 uses a tensor from|layers.1 is not called with|the code after layers.0 uses a tensor",
        ),
        (
            Layer(
                lambda scaled, layers, x: functools.reduce(lambda x, layer: layer(x) * scaled.scale, layers, x),
                scale=nn.Parameter(torch.ones(16)),
            ),
            "layers.1 is not called with the output of layers.0, and nothing else",
        ),
        (
            lambda layers, x: in_turn(reversed(layers), x),
            "layers.3 is called in the code before the layers, and not once, in its place",
        ),
        (_long_skip, "the code after layers.3 uses a tensor from layers.0"),
        (lambda layers, x: layers[0](x), "the forward pass ends in the code after layers.0"),
    ],
    ids=["with first", "scaled", "backwards", "long skip", "early exit"],
)
def test_what_goes_past_the_hidden_states_is_refused(run: Callable[..., Tensor], reason: str) -> None:
    with pytest.raises(ValueError, match=f"pp cannot cut Stack into stages: .*({reason})"):
        _parts(_odd(run))


def test_layers_are_dealt_out_so_that_the_dearest_stage_costs_least() -> None:
    assert deal((1.0,) * 6, 3) == (2, 2, 2)
    assert deal((1.0,) * 6, 3, first=1.0, last=1.0) == (2, 3, 1) or deal((1.0,) * 6, 3, first=1.0, last=1.0) == (
        1,
        3,
        2,
    )
    assert deal((1.0, 1.0, 1.0, 9.0), 2) == (3, 1)
    assert deal((1.0,) * 7, 4, last=3.0) == (2, 2, 2, 1)
    assert [piece.layers for piece in slices([2, 1])] == [range(2), range(2, 3)]
    with pytest.raises(ValueError, match="2 layers cannot be divided over 3 stages"):
        deal((1.0, 1.0), 3)


def test_a_tower_is_refused_with_the_shapes_that_differ() -> None:
    model = FAMILIES["vit"].build()
    reason = r"returns hidden states of shape \(2, 17, 32\) for a sample of 2 rows and 3 tokens"
    with pytest.raises(ValueError, match=reason):
        stage_parts(model, find_layers(model), dict(FAMILIES["vit"].inputs()))


def test_a_list_of_experts_is_refused_without_a_word_of_budgets() -> None:
    model = _odd(in_turn)
    model.layers = nn.ModuleList(RouterBlock() for _ in range(4))
    with pytest.raises(
        ValueError, match=r"Stack cannot be cut into stages by pp: .*'layers\.0\.experts' is a list"
    ) as error:
        _parts(model)
    assert "budget" not in str(error.value) and "strategy='fsdp2' with tp, cp or ep" in str(error.value)


def _asks(layers: Any, x: Tensor, fails: bool = False) -> Tensor:
    """Reads of each layer what kind it is, and of the first one the shape of a weight."""
    assert layers[0].norm.eps == 1e-5 and layers[0].up.weight.shape == (32, 16)
    for index, layer in enumerate(layers):
        assert layer.kind == index
        if fails:
            x = x + 0 * next(layer.parameters()).sum()
        x = layer(x)
    return x


def _asking() -> Any:
    model = _odd(_asks)
    for index, layer in enumerate(model.layers):
        layer.kind = index
    return model


def test_absent_layers_answer_for_those_that_they_stand_for() -> None:
    model = _asking()
    parts = _parts(model)
    stages = slices([2, 2])
    check_stages(model, parts, stages, {"x": tokens()})
    tree, _ = cut(model, parts, stages[1], torch.device("cpu"))
    absent = tree.layers[0]  # type: ignore[index, union-attr]
    assert absent.kind == 0 and not list(absent.parameters()) and not absent.state_dict()
    assert not hasattr(absent, "nothing_of_that_name")


def test_a_stage_that_fails_without_the_others_layers_is_refused() -> None:
    model = _asking()
    parts = _parts(model)
    model.run = functools.partial(_asks, fails=True)
    with pytest.raises(ValueError, match="pp cannot cut Stack into stages: stage 0 of 2 fails without the layers"):
        check_stages(model, parts, slices([2, 2]), {"x": tokens()})


WIDTH, WIDE, ROWS = 32, 256, 512
HIDDEN = 4 * WIDTH * ROWS


def scaled(layer: Any, x: Tensor) -> Tensor:  # (ROWS, WIDTH) -> the same
    """Granite's residuals: the gradient of the output goes into a product and to the next sum, to no weight. Most is alive
    behind that sum, in the wide part. Scaled by -1, for which no number is made a tensor."""
    x = x - layer.two(torch.tanh(layer.one(x)))
    return x - layer.small(x)


def both_scaled(layer: Any, x: Tensor) -> Tensor:  # (ROWS, WIDTH) -> the same
    """MiniMax's: nothing needs the gradient of the output when the products have their own."""
    x = -x - layer.two(torch.tanh(layer.one(x)))
    return -x - layer.small(x)


def _part(forward: Callable[..., Tensor]) -> TracedPart:
    setup = Job.of(step=StepSpec(keeps_output=False))
    # Every layer makes a gradient of its input.
    start = Layer(lambda layer, x: x + layer.shift, shift=nn.Parameter(torch.zeros(WIDTH)))
    layers = (
        Layer(forward, one=nn.Linear(WIDTH, WIDE), two=nn.Linear(WIDE, WIDTH), small=nn.Linear(WIDTH, WIDTH))
        for _ in range(2)
    )
    model = Stack(layers, start=start, head=mean_square)
    return part_of(
        PlanQuery.from_model(model, {"x": torch.randn(ROWS, WIDTH)}, setup.change(gpu=resolve_device("cpu")))
    )


def _call(part: TracedPart, mode: str) -> Callable[[Tensor], Tensor]:
    """The second layer, as it runs in a step."""
    policy, layer = part.regions(0, part.uniform(mode)[1]).get(""), part.model.layers[1]
    return layer if policy is None else lambda x: run_region(layer, (x,), {}, policy=policy, preserve_rng_state=False)


def _bytes(events: BlockEvents, gradients: str) -> int:
    """Return the bytes of the gradients of a block's ``output``, ``input`` or parameters."""
    return events.bytes_of(getattr(events, gradients).values())


@pytest.mark.parametrize("forward", [scaled, both_scaled])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_whole_backward(forward: Callable[..., Tensor], mode: str) -> None:
    part = _part(forward)
    (choice,) = set(part.uniform(mode))
    given, received = (part.memory(0, choice, received=stays) for stays in (False, True))
    assert (_bytes(received, "output_grads"), _bytes(received, "input_grads"), received.held) == (
        HIDDEN,
        HIDDEN,
        given.held,
    )
    assert received.backward_peak == given.backward_peak + HIDDEN
    call, stays = _call(part, mode), list[Tensor]()

    def step() -> None:
        out = call(given_x)
        stays.append(torch.ones_like(out))
        stays.append(out)  # torch's stage has it until backward has ended
        out.backward(stays[0])

    for _ in range(2):  # the first step compares a replay with its forward
        given_x = torch.randn(ROWS, WIDTH, requires_grad=True)
        part.model.zero_grad()
        stays.clear()
        alive = cpu_events(step)
    assert max(alive) == received.backward_peak + HIDDEN
    assert alive[-1] == 2 * HIDDEN + _bytes(received, "input_grads") + _bytes(received, "param_grads")


@pytest.mark.parametrize("forward", [scaled, both_scaled])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_backward_in_halves(forward: Callable[..., Tensor], mode: str) -> None:
    part = _part(forward)
    (choice,) = set(part.uniform(mode))
    kind, regions, run = part.live.kinds[0], part.regions(0, choice), part.live.run
    given, received = (
        block_memory(kind, regions, run, {0}, accumulate=False, received=stays, halves=True) for stays in (False, True)
    )
    between = dict(received.until(True))
    assert sum(between[number] for number in received.output_grads.values()) == HIDDEN
    assert _bytes(received, "input_grads") == HIDDEN
    assert received.backward_peak == given.backward_peak + HIDDEN
    call, layer, stays, rest = _call(part, mode), part.model.layers[1], list[Tensor](), list[Callable[[], None]]()

    def first_half() -> None:
        out = call(given_x)
        stays.append(torch.ones_like(out))
        stays.append(out)
        rest.append(backward_of_inputs([out], stays[:1], [given_x], layer.parameters()))

    for _ in range(2):  # the first one learns what the layer draws and writes
        given_x = torch.randn(ROWS, WIDTH, requires_grad=True)
        part.model.zero_grad()
        stays.clear()
        alive = cpu_events(first_half)
        rest.pop()()
    assert max(alive) == received.backward_peak + HIDDEN
    assert alive[-1] == received.between + 2 * HIDDEN


def _query(
    schedule: str, stages: int = 2, microbatches: int = 4, tokens: int = 128, ranks: int = 2, **setup: Any
) -> PlanQuery:
    job = Job.of(
        **{"step": StepSpec(optimizer="adamw-fused"), "gpu": resolve_device("h100-80gb")} | setup,
        pp=PipelineParallel(stages, schedule, microbatches), world_size=stages * ranks,
    )  # fmt: skip
    return PlanQuery.from_model(Text(8, 64).to("meta"), labelled(torch.zeros(2, tokens, dtype=torch.long)), job)


def test_outputs_that_stay_are_counted() -> None:
    query = _query("1f1b")
    choices = query.uniform("full")
    kinds = (RankSteps, partial(KeepsOutputs, (0, 1 << 20)))
    plain, kept = (replay(StepLogs(query, 1, choices, kind=kind), query.device) for kind in kinds)
    assert 3 << 20 <= kept.tensors - plain.tensors <= 4 << 20
    assert describe(query, choices, "full").reserved_bytes == max(_reserved(query, choices).values())


def _reserved(query: PlanQuery, choices: Any) -> dict[int, int]:
    found = {rank: reserved_on(query, rank, choices) for rank in range(query.pp.size)}
    return {rank: one.reserved for rank, one in found.items()}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("schedule", "counted"), [("1f1b", [0, 1, 3]), ("interleaved_1f1b", [0, 1, 3]), ("gpipe", [0, 1, 3])]
)
def test_of_ranks_that_run_the_same_layers_none_reserves_more_than_the_one_that_is_replayed(
    schedule: str, counted: list[int]
) -> None:
    query = _query(schedule, stages=4)
    for mode in ("none", "full"):
        choices = query.uniform(mode)
        every = _reserved(query, choices)
        assert list(fullest_peaks(query, choices)) == counted
        assert len(every) == 4 and max(every.values()) == max(every[rank] for rank in counted)
    # Where each rank has choices of its own, each is replayed.
    mixed = [query.uniform(mode)[n] for n, mode in enumerate(["none", "full", "none", "full"] * 2) if n < len(choices)]
    assert list(fullest_peaks(query, mixed)) == [0, 1, 2, 3]
