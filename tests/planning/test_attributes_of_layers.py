"""Budgets for models that read more of layers than outputs: attributes, routers' logits; planned, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from tests.models.families import FAMILIES
from tests.planning.queries import bytes_between_steps

pytest.importorskip("transformers")


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.aux: Any = None
        self.style: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class _Aux(_Block):
    """An auxiliary loss that the layer leaves on itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.aux = y.square().mean()
        return y


class _AuxInside(_Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        self.up.loss = h.logsumexp(-1).mean()  # type: ignore[assignment]
        return x + self.down(torch.relu(h))


class _Pair(_Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.aux = y.square().mean(), y.detach().sum()
        return y


class _List(_Block):
    def __init__(self) -> None:
        super().__init__()
        self.aux = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.aux.append(y.square().mean())
        return y


class _NewList(_Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.aux = [y.square().mean()]
        return y


class _Sum(_Block):
    """The model sets it to 0 in front of its layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.aux = self.aux + y.square().mean()
        return y


class _Buffer(_Block):
    def __init__(self) -> None:
        super().__init__()
        del self.aux
        self.register_buffer("aux", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.aux = y.square().mean()
        return y


class _Memory(_Block):
    """It keeps a state for its next pass, without a gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.aux is not None:
            x = x + self.aux
        self.aux = x.mean(1, keepdim=True).detach()
        return super().forward(x)


class _Styled(_Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.style)


class _Context(_Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.style["shift"])


class _InPlace(_Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += self.down(torch.relu(self.up(x.clone())))
        return x


class _ReluFirst(_Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.relu(x, inplace=True))


class _View(_Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.view(-1).mul_(2)
        return super().forward(x)


class _Net(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.inp, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))
        self.blocks, self.kind = nn.ModuleList(kind() for _ in range(3)), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            style = (self.scale * 2).exp()
            if self.kind is _Sum:
                block.aux = 0.0
            block.style = {"shift": style} if self.kind is _Context else style
        for block in self.blocks:
            x = block(x)
        losses = [block.aux for block in self.blocks if self.kind in (_Aux, _Sum, _Buffer)]
        losses += [block.aux[0] for block in self.blocks if self.kind in (_Pair, _NewList)]
        losses += [block.up.loss for block in self.blocks if self.kind is _AuxInside]
        return x.square().mean() + sum(losses) if losses else x


def _grads(kind: Callable[[], nn.Module], ac: str | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model: Any = _Net(kind)
    if ac is not None:
        model = parallelize(model, "single", ac, sample_input=torch.rand(4, 8))
    for seed in (1, 2, 3):
        torch.manual_seed(seed)
        model(torch.rand(4, 8)).square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


_KINDS = (_Block, _Aux, _AuxInside, _Pair, _NewList, _Sum, _Buffer, _Memory, _Styled, _Context)


@pytest.mark.parametrize("ac", ["70%", "45%"])
@pytest.mark.parametrize("kind", _KINDS)
def test_what_layers_and_the_model_set_for_each_other_is_planned(kind: Callable[[], nn.Module], ac: str):
    assert all(map(torch.equal, _grads(kind, ac), _grads(kind, None)))


REFUSED = {
    _List: r"blocks\.0 of _Net puts tensors with a gradient into its attribute 'aux', a list.*Set an attribute",
    _InPlace: r"blocks\.0 of _Net changes a tensor that it is called with in place .*x = x \+ y",
    _ReluFirst: r"blocks\.0 of _Net changes a tensor that it is called with in place .*inplace=False",
    _View: r"blocks\.0 of _Net changes a tensor that it is called with in place",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_planned_is_refused_by_name(kind: Callable[[], nn.Module]):
    model = _Net(kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=REFUSED[kind]) as info:
        parallelize(model, "single", "50%", sample_input=torch.rand(4, 8))
    assert "'selective'" in str(info.value) and "\n" not in str(info.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.blocks[0].style is None and not model.blocks[0].aux


class _Holds(_Block):
    """It reads what the model put into an object that both have."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = SimpleNamespace()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.shared.style)


class _Puts(_Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            block.shared.style = self.scale.exp()
        return super().forward(x)


def test_a_tensor_in_an_object_is_refused_with_the_cause():
    with pytest.raises(ValueError, match=r"blocks\.0 \(_Holds\) cannot be planned.* does not pass as an argument"):
        parallelize(_Puts(_Holds), "single", "50%", sample_input=torch.rand(4, 8))


def _frozen() -> nn.Module:
    return _Net(_Block).requires_grad_(False)


def test_a_frozen_model_is_refused_with_the_cause():
    with pytest.raises(ValueError, match=r"_Net cannot be planned: no parameter trains\. Set requires_grad.*ac='none'"):
        parallelize(_frozen(), "single", "50%", sample_input=torch.rand(4, 8))
    step = StepSpec(loss_fn=lambda out: out.sum())
    with pytest.raises(ValueError, match="no parameter trains"):
        plan_for(_frozen(), ac="50%", sample_input=torch.rand(4, 8), step=step)


class _Twice(_Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x)) if self.kind is not _Aux else super().forward(x) + super().forward(x)


@pytest.mark.parametrize("kind", [_Block, _Aux, _Styled])
def test_layers_that_run_twice_are_of_one_kind(kind: Callable[[], nn.Module]):
    """What a layer has left from its first call is nothing that the model sets for the second."""
    model = _Twice(kind)
    trace = trace_model(model, find_layers(model), torch.rand(4, 8))
    assert [call.kind for call in trace.calls] == [0] * 6
    assert trace.kinds[0].left == ((("", "aux"),) if kind is _Aux else ())
    assert trace.kinds[0].given == ((("", "style"),) if kind is _Styled else ())


def test_a_modulation_trains_what_it_is_made_of_where_a_layer_reads_it():
    kinds = (_Styled, _Context, _Block)
    planned = [plan_for(_Net(kind), ac="100%", sample_input=torch.rand(4, 8)).peak["gradients"] for kind in kinds]
    assert planned[0] == planned[1] == planned[2] + 8 * 4


@pytest.mark.parametrize("kind", [_Styled, _Aux])
def test_the_peak_of_such_a_step_is_the_predicted_one(kind: Callable[[], nn.Module]):
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
    before = bytes_between_steps(model, optimizer, gradients=False)
    peak = before + max(cpu_events(one_step))
    assert abs(peak - plan.peak_bytes) <= 0.03 * plan.peak_bytes


def test_an_auxiliary_loss_counts_in_the_gradients_of_a_plan():
    """A layer of which only the auxiliary loss comes to a weight: the weight trains, and has optimizer state."""

    class _Only(_Aux):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            self.aux = self.gate(y).square().mean()
            return y

    class _Reads(_Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).square().mean() + sum(block.aux for block in self.blocks)

    planned = [plan_for(net(_Only), ac="100%", sample_input=torch.rand(4, 8)) for net in (_Reads, _Net)]
    assert planned[0].peak["gradients"] - planned[1].peak["gradients"] == 3 * (64 + 8) * 4


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


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
@pytest.mark.few(1)
@pytest.mark.parametrize("compile", [False, "aot_eager"])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_a_budget_trains_right_with_the_routers_loss(name: str, compile: bool | str) -> None:
    """Compiled, too, gradients are those of eager mode: Dynamo cannot trace transformers' recorders in a region."""
    expected = gradients(name, build(name))
    asked = {"sample_input": FAMILIES[name].inputs(), "compile": compile}
    assert all(map(torch.equal, gradients(name, parallelize(build(name), "single", "50%", **asked)), expected))


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_budget_for_gpt_oss_without_it_compiled() -> None:
    expected = gradients("gpt_oss", build("gpt_oss", False))
    asked = {"sample_input": FAMILIES["gpt_oss"].inputs(), "compile": "aot_eager"}
    model = parallelize(build("gpt_oss", False), "single", "50%", **asked)
    assert all(map(torch.equal, gradients("gpt_oss", model), expected))


def test_what_the_router_keeps_for_the_loss_is_counted() -> None:
    """Every layer's logits, (24 tokens, 4 experts) in float32, wait for the loss: at the last layer's call, those before."""
    left = {}
    for router_loss in (True, False):
        model = build("mixtral", router_loss)
        layers = find_layers(model)
        traced = trace_model(model, layers, FAMILIES["mixtral"].inputs())
        events = outer_memory(model, layers, traced)
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
