"""Short ways to ask a `PlanQuery`, for tests."""

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nemo_like import parallelize
from nemo_like._util.live_bytes import storages_of
from nemo_like.activation_checkpointing.plan import STAYING, Plan
from nemo_like.fake.run import FakeRun
from nemo_like.options import MemoryBudget
from nemo_like.planning.memory_model.storages import Events, labels_after
from nemo_like.planning.model.traced import TracedPart
from nemo_like.planning.planner import describe
from nemo_like.planning.predictions.budget_search import choose
from nemo_like.planning.predictions.rank import later_step
from nemo_like.planning.predictions.reserved import Reserved, reserved_on
from nemo_like.planning.query import Choices, PlanQuery
from nemo_like.planning.trace.block import BlockTrace, trace_block
from tests.models.tiny import VOCAB, Decoder


class Text(Decoder):
    """A decoder that is given text as models of transformers are, without their many operators: a shape takes 0.1 s."""

    config, main_input_name = SimpleNamespace(vocab_size=VOCAB), "input_ids"

    def __init__(self, layers: int = 4, width: int = 16, tied: bool = False) -> None:
        super().__init__(layers, width, tied)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = self.head(self.norm(functools.reduce(lambda x, layer: layer(x), self.layers, self.embed(input_ids))))
        return logits if labels is None else cross_entropy(logits.flatten(0, 1), labels.flatten())


def plan_of(query: PlanQuery, budget: MemoryBudget, asked: str = "") -> Plan:
    """Return the fastest plan within a budget."""
    choices = choose(query, budget, asked)
    return describe(query, choices, asked or str(budget))


def part_of(query: PlanQuery) -> TracedPart:
    """Return the trace of the first stage; without a pipeline, of the model."""
    return query.stages[0].part


def saved(query: PlanQuery, choices: Choices) -> int:
    """Return the bytes that all layers save till the end of forward."""
    return sum(stage.part.saved(own) for stage, own in zip(query.stages, choices, strict=True))


def reserved(query: PlanQuery, choices: Choices, rank: int = 0) -> Reserved:
    """Return what CUDA's caching allocator reserves on one rank."""
    return reserved_on(query, rank, choices)


def traced_block(block: nn.Module, *args: Tensor, shared: Sequence[Tensor] = ()) -> BlockTrace:
    """Return the trace of one call of a block; `shared`: those of `args` that all blocks are called with."""
    with FakeRun() as run:
        fakes = [run.sample(arg).requires_grad_(arg.requires_grad) for arg in args]
        is_shared = [any(arg is other for other in shared) for arg in args]
        return trace_block(
            block,
            tuple(fakes),
            {},
            name=type(block).__name__,
            shared=[fake for fake, each in zip(fakes, is_shared) if each],
            run=run,
            state=run.state(block),
        )


def call_of(layer: nn.Module, run: Callable[[], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the last call of `layer` in `run`."""
    caught: list[tuple[Any, Any]] = []
    with layer.register_forward_pre_hook(lambda _, *given: caught.append(given), with_kwargs=True):
        run()
    return caught[-1]


def trained_under(ac: str | None, build: Callable[[], Any], shape: tuple[int, ...], *, steps: int) -> list[Tensor]:
    """Return the gradients and buffers of a model from a fixed seed after `steps` micro-batches of this shape.

    ac: a budget that it is planned and run within; None: the plain model.
    """
    torch.manual_seed(0)
    model = build() if ac is None else parallelize(build(), "single", ac, sample_input=torch.rand(shape))
    for seed in range(1, 1 + steps):
        torch.manual_seed(seed)
        model(torch.rand(shape)).square().mean().backward()
    return [*(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]


def computing(trace: BlockTrace) -> list[tuple[Any, Any]]:
    """Return the operators of a trace that compute something, with the shapes of what they return."""
    return [(op.op, op.shapes) for op in trace.ops if not op.view]


def bytes_between_steps(model: nn.Module, optimizer: Optimizer, *, gradients: bool) -> int:
    """Bytes that are alive when a step begins: parameters, optimizer state, gradients that stay, DDP's buckets."""
    params = list(model.parameters())
    state = [t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, torch.Tensor)]
    grads = [p.grad for p in params if p.grad is not None]
    stay = gradients or isinstance(model, DistributedDataParallel)
    storages = storages_of([*params, *state, *(grads if stay else [])])
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def held_bytes(query: PlanQuery, choices: Choices) -> int:
    """Bytes alive in one rank's later step when the model has returned, without those that stay from step to step."""
    events = later_step(query, 0, choices, Events()).log
    returned = max(at for at, event in enumerate(events) if event.where == "forward of the head") + 1
    return sum(size for label, size in labels_after(events[:returned]).items() if label.part not in STAYING)
