"""Budgets for models that read more of layers than outputs: attributes, routers' logits; planned, or refused by name."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nemo_like import StepSpec, parallelize
from nemo_like.fake.run import FakeRun
from nemo_like.layers import find_layers
from nemo_like.planning import plan_for
from nemo_like.planning.model.capture import trace_model
from nemo_like.planning.model.outside import outer_memory
from tests.allocator_events import cpu_events
from tests.checks import same
from tests.models.blocks import in_turn
from tests.models.families import FAMILIES
from tests.planning.queries import bytes_between_steps, trained_under


class _Block(nn.Module):
    """An MLP with something around it, by its name in `RUNS`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.down, self.kind = nn.Linear(8, 16), nn.Linear(16, 8), kind
        self.aux: Any = [] if kind == "list" else None
        self.style: Any = None

    def plain(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return RUNS[self.kind](self, x)


def _leaves(aux: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], Tensor]:
    """The layer leaves something on itself, mostly an auxiliary loss: `aux` of itself and of its output."""

    def run(block: Any, x: Tensor) -> Tensor:
        y = block.plain(x)
        block.aux = aux(block, y)
        return y

    return run


def _inside(block: Any, x: Tensor) -> Tensor:
    h = block.up(x)
    block.up.loss = h.logsumexp(-1).mean()
    return x + block.down(torch.relu(h))


def _list(block: Any, x: Tensor) -> Tensor:
    y = block.plain(x)
    block.aux.append(y.square().mean())
    return y


def _memory(block: Any, x: Tensor) -> Tensor:
    """It keeps a state for its next pass, without a gradient."""
    x = x if block.aux is None else x + block.aux
    block.aux = x.mean(1, keepdim=True).detach()
    return block.plain(x)


def _in_place(block: Any, x: Tensor) -> Tensor:
    x += block.down(torch.relu(block.up(x.clone())))
    return x


def _view(block: Any, x: Tensor) -> Tensor:
    x.view(-1).mul_(2)
    return block.plain(x)


RUNS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "plain": _Block.plain,
    "loss": _leaves(lambda block, y: y.square().mean()),
    "loss inside": _inside,
    "pair": _leaves(lambda block, y: (y.square().mean(), y.detach().sum())),
    "new list": _leaves(lambda block, y: [y.square().mean()]),
    "sum": _leaves(lambda block, y: block.aux + y.square().mean()),  # the model sets it to 0 in front of its layers
    "buffer": _leaves(lambda block, y: y.square().mean()),
    "memory": _memory,
    "styled": lambda block, x: block.plain(x * block.style),
    "context": lambda block, x: block.plain(x + block.style["shift"]),
    "list": _list,
    "in place": _in_place,
    "relu first": lambda block, x: block.plain(nn.functional.relu(x, inplace=True)),
    "view": _view,
    "object": lambda block, x: block.plain(x * block.shared.style),  # the model puts it into what both have
    "gate": _leaves(lambda block, y: block.gate(y).square().mean()),
}
READS: dict[str, Callable[[Any], Tensor]] = {
    **dict.fromkeys(("loss", "sum", "buffer"), lambda block: block.aux),
    **dict.fromkeys(("pair", "new list"), lambda block: block.aux[0]),
    "loss inside": lambda block: block.up.loss,
}
"""The loss that the model reads of a layer."""


class _Net(nn.Module):
    def __init__(self, kind: str, reads: Callable[[Any], Tensor] | None = None) -> None:
        super().__init__()
        self.inp, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))
        self.blocks: Any = nn.ModuleList(_Block(kind) for _ in range(3))
        self.kind, self.reads = kind, reads or READS.get(kind)
        for block in self.blocks:
            if kind == "buffer":
                del block.aux
                block.register_buffer("aux", torch.zeros(()))
            block.gate = nn.Linear(8, 8) if kind == "gate" else None
            block.shared = SimpleNamespace() if kind == "object" else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            style = (self.scale * 2).exp()
            if self.kind == "sum":
                block.aux = 0.0
            if self.kind == "object":
                block.shared.style = style
            block.style = {"shift": style} if self.kind == "context" else style
        x = in_turn(self.blocks, x)
        return x if self.reads is None else x.square().mean() + sum(map(self.reads, self.blocks))


@pytest.mark.parametrize("ac", ["70%", "45%"])
@pytest.mark.parametrize("kind", [*READS, "plain", "memory", "styled", "context"])
def test_what_layers_and_the_model_set_for_each_other_is_planned(kind: str, ac: str):
    assert same(*(trained_under(each, partial(_Net, kind), (4, 8), steps=3) for each in (ac, None)))


REFUSED = {
    "list": r"blocks\.0 of _Net puts tensors with a gradient into its attribute 'aux', a list.*Set an attribute",
    "in place": r"blocks\.0 of _Net changes a tensor that it is called with in place .*x = x \+ y",
    "relu first": r"blocks\.0 of _Net changes a tensor that it is called with in place .*inplace=False",
    "view": r"blocks\.0 of _Net changes a tensor that it is called with in place",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_planned_is_refused_by_name(kind: str):
    model = _Net(kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=REFUSED[kind]) as info:
        parallelize(model, "single", "50%", sample_input=torch.rand(4, 8))
    assert "'selective'" in str(info.value) and "\n" not in str(info.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.blocks[0].style is None and not model.blocks[0].aux


def test_a_tensor_in_an_object_is_refused_with_the_cause():
    with pytest.raises(ValueError, match=r"blocks\.0 \(_Block\) cannot be planned.* does not pass as an argument"):
        parallelize(_Net("object"), "single", "50%", sample_input=torch.rand(4, 8))


def test_a_frozen_model_is_refused_with_the_cause():
    model = _Net("plain").requires_grad_(False)
    with pytest.raises(ValueError, match=r"_Net cannot be planned: no parameter trains\. Set requires_grad.*ac='none'"):
        parallelize(model, "single", "50%", sample_input=torch.rand(4, 8))
    step = StepSpec(loss_fn=lambda out: out.sum())
    with pytest.raises(ValueError, match="no parameter trains"):
        plan_for(model, ac="50%", sample_input=torch.rand(4, 8), step=step)


class _Twice(_Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x)) if self.kind != "loss" else super().forward(x) + super().forward(x)


@pytest.mark.parametrize("kind", ["plain", "loss", "styled"])
def test_layers_that_run_twice_are_of_one_kind(kind: str):
    """What a layer has left from its first call is nothing that the model sets for the second."""
    model = _Twice(kind)
    trace = trace_model(model, find_layers(model), torch.rand(4, 8))
    assert [call.kind for call in trace.calls] == [0] * 6
    assert trace.kinds[0].left == ((("", "aux"),) if kind == "loss" else ())
    assert trace.kinds[0].given == ((("", "style"),) if kind == "styled" else ())


def test_a_modulation_trains_what_it_is_made_of_where_a_layer_reads_it():
    kinds = ("styled", "context", "plain")
    planned = [plan_for(_Net(kind), ac="100%", sample_input=torch.rand(4, 8)).peak["gradients"] for kind in kinds]
    assert planned[0] == planned[1] == planned[2] + 8 * 4


@pytest.mark.parametrize("kind", ["styled", "loss"])
def test_the_peak_of_such_a_step_is_the_predicted_one(kind: str):
    sample = torch.rand(512, 8)
    step = StepSpec(loss_fn=lambda y: y.square().mean(), keeps_output=False)
    model = parallelize(_Net(kind), "single", "50%", sample_input=sample, step=step)
    plan = plan_for(_Net(kind), ac="50%", sample_input=sample, step=step)
    optimizer = torch.optim.AdamW(model.parameters())

    def one_step() -> None:
        model(sample).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    one_step()
    peak = bytes_between_steps(model, optimizer, gradients=False) + max(cpu_events(one_step))
    assert abs(peak - plan.peak_bytes) <= 0.03 * plan.peak_bytes


def test_an_auxiliary_loss_counts_in_the_gradients_of_a_plan():
    """A layer of which only the auxiliary loss comes to a weight: the weight trains, and has optimizer state."""

    nets = _Net("gate", reads=lambda block: block.aux), _Net("gate")
    planned = [plan_for(net, ac="100%", sample_input=torch.rand(4, 8)) for net in nets]
    assert planned[0].peak["gradients"] - planned[1].peak["gradients"] == 3 * (64 + 8) * 4


def build(name: str, router_loss: bool = True) -> nn.Module:
    model = FAMILIES[name].build()
    model.config.output_router_logits = router_loss
    return model


def gradients(name: str, model: nn.Module) -> list[Tensor]:
    for _ in range(2):
        model.zero_grad()
        FAMILIES[name].step(model).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "router_loss", "compile"),
    [
        ("mixtral", True, False),
        ("gpt_oss", False, "aot_eager"),
        ("gpt_oss", True, False),
        ("mixtral", True, "aot_eager"),
        ("gpt_oss", True, "aot_eager"),
    ],
)
def test_a_budget_trains_right_with_the_routers_loss_and_without(
    name: str, router_loss: bool, compile: bool | str
) -> None:
    """Compiled, too, gradients are those of eager mode: Dynamo cannot trace transformers' recorders in a region."""
    expected = gradients(name, build(name, router_loss))
    asked = {"sample_input": FAMILIES[name].inputs(), "compile": compile}
    model = parallelize(build(name, router_loss), "single", "50%", **asked)
    assert all(map(torch.equal, gradients(name, model), expected))


def test_what_the_router_keeps_for_the_loss_is_counted() -> None:
    """Every layer's logits, (24 tokens, 4 experts) in float32, wait for the loss: at the last layer's call, those before."""
    left = {}
    for router_loss in (True, False):
        model = build("mixtral", router_loss)
        layers = find_layers(model)
        events = outer_memory(model, layers, trace_model(model, layers, FAMILIES["mixtral"].inputs()))
        before = events.log[: events.calls[-1].begin]
        gone = {number for number, size in before if not size}
        left[router_loss] = sum(size for number, size in before if number not in gone)
    assert left[True] - left[False] == 24 * 4 * 4 * (len(layers) - 1)


def test_counts_of_kinds_are_planned_by_their_number() -> None:
    """The routers' loss of transformers 5.17 counts the tokens of each expert by ``bincount(..., minlength=experts)``."""
    ids = torch.tensor([3, 1, 3])
    with FakeRun() as run:
        fake = run.like(ids)
        assert (
            torch.bincount(fake, minlength=4).shape == (4,) and torch.bincount(fake, minlength=4).dtype is torch.int64
        )
        for dtype, counted in ((torch.float32, torch.float32), (torch.bfloat16, torch.float64)):
            assert torch.bincount(fake, run.like(torch.ones(3, dtype=dtype)), minlength=4).dtype is counted
        assert torch.bincount(ids).tolist() == [0, 1, 0, 2]  # small integers are really computed
        with pytest.raises(RuntimeError, match="bincount"):
            torch.bincount(fake)
