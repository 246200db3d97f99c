"""Predicted peaks of steps as people write them, against the CPU allocator's events: FSDP2, DDP and one device."""

from typing import Any

import pytest
import torch
from torch import nn

from nemo_like import FSDP2, ChunkedLoss, Job, StepSpec, parallelize
from nemo_like.distributed.gradients import clip_grad_norm_, set_gradient_sync
from nemo_like.losses.model_loss import chunked_in_evaluation
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.planner import describe
from nemo_like.planning.predictions.rank import peak_of
from nemo_like.planning.query import PlanQuery
from tests.checks import seeded, update
from tests_distributed.allocated import step_peak_bytes
from tests_distributed.spawn import on_ranks

transformers = pytest.importorskip("transformers")

VOCAB = 512


def _model(layers: int, vocabulary: int = VOCAB) -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=48, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=vocabulary, max_position_embeddings=64, use_cache=False,
        )
    ).train()  # fmt: skip


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())


def _outside(output) -> torch.Tensor:
    return _cross_entropy(output.logits, torch.zeros(output.logits.shape[:2], dtype=torch.long))


SPECS = {
    "default": StepSpec(),
    "dropped": StepSpec(keeps_output=False),
    "outside": StepSpec(loss_fn=_outside),
    "outside, unsaid": StepSpec(),
    "accumulated": StepSpec(microbatches=4),
    "summed in the last": StepSpec(microbatches=2, sync="last", keeps_output=False),
    "summed in the last of four": StepSpec(microbatches=4, sync="last"),
    "summed in the last, zeroed": StepSpec(microbatches=2, sync="last", zero_grad="zero"),
    "zeroed": StepSpec(zero_grad="zero", optimizer="sgd", keeps_output=False),
    "sgd": StepSpec(optimizer="sgd"),
    "momentum": StepSpec(optimizer="sgd-momentum"),
    "loop": StepSpec(optimizer="adamw-loop"),
    "foreach": StepSpec(optimizer="adamw-foreach"),
    "fused": StepSpec(optimizer="adamw-fused"),
    "averaged": StepSpec(ema=True, keeps_output=False),
    "muon": StepSpec(optimizer="muon", microbatches=2),
}


class _Both(torch.optim.Optimizer):
    """Muon for the matrices of layers, AdamW for all else."""

    def __init__(self, model: nn.Module) -> None:
        named = list(model.named_parameters())
        matrices = [p for name, p in named if ".layers." in name and p.dim() == 2]
        rest = [p for name, p in named if not (".layers." in name and p.dim() == 2)]
        self.parts = torch.optim.Muon(matrices, lr=1e-4), torch.optim.AdamW(rest, lr=1e-4)
        super().__init__([p for _, p in named], {})

    def step(self, closure=None) -> None:
        for part in self.parts:
            part.step()
            self.state.update(part.state)


def _optimizer(word: str, model: nn.Module) -> torch.optim.Optimizer:
    name, _, form = word.partition("-")
    if name == "muon":
        return _Both(model)
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9 if form else 0.0)
    forms = {"": {}, "loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
    return torch.optim.AdamW(model.parameters(), lr=1e-4, **forms[form])


class Loop:
    """A training loop that does what `spec` says."""

    def __init__(self, model: nn.Module, spec: StepSpec, batch: dict[str, torch.Tensor], outside: bool) -> None:
        self.model, self.spec, self.batch, self.outside = model, spec, batch, outside
        self.optimizer = _optimizer(spec.optimizer, model)
        self.kept: Any = None
        self.average = torch.optim.swa_utils.AveragedModel(model) if spec.ema else None

    def step(self) -> None:
        for turn in range(self.spec.microbatches):
            if self.spec.sync == "last":
                set_gradient_sync(self.model, turn == self.spec.microbatches - 1)
            self._loss().backward()
        clip_grad_norm_(self.model, 1.0)
        self.optimizer.step()
        if self.average is not None:
            self.average.update_parameters(self.model)
        self.optimizer.zero_grad(set_to_none=self.spec.zero_grad == "free")

    def _loss(self) -> torch.Tensor:
        ids, labels = self.batch["input_ids"], self.batch["labels"]
        out = self.model(input_ids=ids) if self.outside else self.model(**self.batch)
        if self.spec.keeps_output:
            self.kept = out
        return _cross_entropy(out.logits, labels) if self.outside else out.loss

    def peak(self) -> int:
        """Of a step after the second."""
        self.step()
        self.step()
        return step_peak_bytes(self.model, self.optimizer, self.step, self._held)

    def _held(self) -> Any:
        return self.kept, [] if self.average is None else list(self.average.parameters())


def _case(rank, world_size, strategy, ac, name, layers=3, shape=(4, 64)):
    """Where the plan has its peak, which is within 1 % of what the loop takes."""
    torch.manual_seed(rank)
    spec, outside = SPECS[name], name.startswith("outside")
    ids = torch.randint(VOCAB, shape)
    batch = {"input_ids": ids, "labels": ids}
    model = _model(layers)
    query = PlanQuery.from_model(
        model,
        {"input_ids": ids} if outside else batch,
        Job.of(strategy=strategy, world_size=world_size, step=spec, gpu=resolve_device("cpu")),
    )
    plan = describe(query, query.uniform(ac), ac)
    measured = Loop(parallelize(model, strategy, ac, device="cpu"), spec, batch, outside).peak()
    assert abs(plan.peak_bytes - measured) <= 0.01 * measured, (name, ac, plan.peak_bytes, measured, plan.peak)
    return plan.peak_at


class _Evaluating(Loop):
    """Clips as torch does, and evaluates on the same batch after each step."""

    def step(self) -> None:
        self._loss().backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        update(self.optimizer)
        self.model.eval()
        with torch.no_grad():
            self.model(**self.batch)
        self.model.train()


class _EvaluatingInChunks(_Evaluating):
    def step(self) -> None:
        with chunked_in_evaluation(self.model):
            super().step()


@pytest.mark.long
def test_an_evaluation_in_chunks_takes_no_more_than_a_step_with_a_chunked_loss():
    """8 x 64 tokens and 4,096 logits for each: with an evaluation that makes them all, the peak is another one."""
    ids, peaks = torch.randint(4096, (8, 64)), []
    batch = {"input_ids": ids, "labels": ids}
    setup = Job.of(loss=ChunkedLoss(chunk_tokens=32))
    query = PlanQuery.from_model(_model(3, 4096), batch, setup.change(gpu=resolve_device("cpu")))
    predicted = peak_of(query, query.uniform("full")).total
    for kind in (Loop, _EvaluatingInChunks, _Evaluating):
        torch.manual_seed(0)
        model = parallelize(_model(3, 4096), "single", "full", loss=setup.loss, device="cpu")
        peaks.append(kind(model, StepSpec(), batch, False).peak())
    plain, in_chunks, whole = peaks
    assert in_chunks == plain and abs(predicted - plain) <= 0.01 * plain, (predicted, peaks)
    assert whole - plain > 7 << 20, peaks  # two copies of the logits of 8 MiB, where a chunk's are not


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_evaluation_between_steps_and_parameters_that_are_stored_in_bfloat16(dtype):
    """Gradients and states are then of the parameters' dtype; whole logits of an evaluation take no more than a step's."""
    model, ids = seeded(_model, 3).to(dtype), torch.randint(VOCAB, (4, 64))
    batch = {"input_ids": ids, "labels": ids}
    query = PlanQuery.from_model(model, batch, Job.of(gpu=resolve_device("cpu")))
    predicted = peak_of(query, query.uniform("full")).total
    loop = _Evaluating(parallelize(model, "single", "full", device="cpu"), StepSpec(), batch, False)
    measured = loop.peak()
    assert abs(predicted - measured) <= 0.01 * measured, (predicted, measured)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_one_device_in_every_loop():
    for ac in ("full", "none"):
        for name in SPECS:
            _case(0, 1, "single", ac, name)


FEW = ("default", "summed in the last", "accumulated", "dropped", "outside", "foreach")
MORE = tuple(name for name in SPECS if name not in ("outside, unsaid", "sgd", "momentum", "averaged", "muon"))
LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("ranks", "strategy", "names"),
    [
        (2, FSDP2(), FEW[1:2]),
        (2, FSDP2(forward_prefetch=0, backward_prefetch=0), ("dropped",)),  # fetches one unit ahead in backward
        pytest.param(2, FSDP2(), MORE, marks=LONG),
        pytest.param(4, FSDP2(), FEW, marks=LONG),
        pytest.param(2, "ddp", ("default", "accumulated", "summed in the last", "zeroed"), marks=LONG),
        pytest.param(
            2, "ddp", ("outside", "summed in the last of four", "dropped", "loop", "foreach", "fused"), marks=LONG
        ),
    ],
)
@on_ranks(timeout=280)
def test_ranks_in_every_loop(rank, ranks, strategy, names):
    for name in names:
        _case(rank, ranks, strategy, "full", name)


@pytest.mark.long
@pytest.mark.parametrize("form", ["loop", "foreach", "fused"])
def test_the_optimizer_step_as_the_peak(form):
    """With a batch of next to nothing, AdamW's temporaries are what the step peaks at."""
    assert _case(0, 1, "single", "full", form, 6, (1, 4)) == "optimizer step" or form == "fused"
