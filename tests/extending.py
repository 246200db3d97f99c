"""The changes of docs/reference/how-it-works/extending.md as toys: the edits of each, and a check of what they do.

    python -m tests.extending

runs the checks in the package that is found first, and prints a JSON object: the error of each change, or null.
"""

import functools
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import sdpa_flop_count

DOCS = "docs/reference/how-it-works/extending.md"


class Edit(NamedTuple):
    """Lines that are put into a file of the package."""

    file: str
    before: str  # Text that they are put in front of; empty: a new file, or the end.
    lines: str


_H100 = json.loads((Path(__file__).parents[1] / "nemo_like/planning/devices.json").read_text(encoding="utf-8"))[
    "h100-80gb"
]
_BRIER = """
from nemo_like.losses.cross_entropy import ChunkedCall, reduced
from nemo_like.options import ChunkedLoss


class BrierRows:
    def __init__(self, labels):
        self.labels, self.counts = labels, labels >= 0

    def check(self, vocabulary):
        pass

    def step(self, logits, rows, vocabulary, weights, apart):
        share = logits.softmax(-1)
        off = share.scatter_add(1, self.labels[rows, None], -share.new_ones(len(share), 1))
        losses = off.square().sum(-1)
        if weights is not None:
            logits.copy_(2 * weights[:, None] * share * (off - (off * share).sum(-1, keepdim=True)))
        return losses, None


def brier_score(hidden, head, labels):
    rows = BrierRows(labels)
    return reduced(ChunkedCall(head, rows, ChunkedLoss(chunk_tokens=3), head), hidden, rows.counts.sum())
"""
_TRAINER = '''
from nemo_like import parallelize


class CheckpointedTrainer:
    """Put before a trainer whose `build` returns its model."""

    def build(self):
        return parallelize(super().build(), ac="full", strategy="single")
'''

EDITS: dict[str, tuple[Edit, ...]] = {
    "an operator to keep": (
        Edit(
            "activation_checkpointing/ops.py",
            '    "aten._scaled_dot_product_cudnn_',
            '    "toy.twice.default": OpFacts(saved=True),\n',
        ),
    ),
    "an attention kernel": (
        Edit(
            "activation_checkpointing/ops.py",
            '    "aten._scaled_dot_product_cudnn_',
            '    "toy.attention.default": _SDPA,\n',
        ),
    ),
    "a method of context parallel": (
        Edit(
            "options/parallel.py",
            '    "ring": ContextFacts(',
            '    "toy": ContextFacts(gathers_again=True, is_searched=lambda heads, ranks: True),\n',
        ),
        Edit("distributed/context/methods.py", "METHODS: dict", 'class Toy(GatherKeys):\n    word = "toy"\n\n\n'),
        Edit("distributed/context/methods.py", "Ring(), Ulysses())}", "Toy(), "),
    ),
    "a pipeline schedule": (
        Edit(
            "options/pipelining.py",
            '        Schedule("gpipe"',
            '        Schedule("toy", "ScheduleGPipe", (1,), in_flight=lambda ranks, each, per_rank: each),\n',
        ),
    ),
    "an optimizer": (
        Edit(
            "options/optimizers.py",
            '        OptimizerFacts(\n            "adamw",',
            '        OptimizerFacts("toy", _of_states(lambda p: ()), passes=3.0),\n',
        ),
    ),
    "a GPU to plan for": (
        Edit("planning/devices.json", '"a100-80gb": {', f'"toy": {json.dumps(_H100 | {"match": []})},\n  '),
    ),
    "a loss": (
        Edit("losses/toy.py", "", _BRIER),
        Edit("losses/__init__.py", "\n__all__", "from nemo_like.losses.toy import brier_score\n"),
    ),
    "a mode": (
        Edit("options/checkpointing.py", '"sequential")\n', '"alternate", '),
        Edit(
            "resolve.py",
            "    names = [layer.fqn for layer in narrowed]\n",
            '    narrowed = narrowed[::2] if config.mode == "alternate" else narrowed\n',
        ),
    ),
    "a trainer": (Edit("integrations/toy.py", "", _TRAINER),),
    "a flag of `plan`": (
        Edit(
            "options/step.py",
            "    ema: bool = flagged(",
            '    toy: int = flagged(3, "plan fit", "training", kind=int, least=1)\n    """Toys of a step."""\n',
        ),
    ),
    "a family whose layers are found wrongly": (Edit("layers/structure.py", "attention|attn|mixer", "toyer|"),),
    "a part in the byte report": (
        Edit("activation_checkpointing/plan.py", '    OPTIMIZER_STATE = "optimizer state"\n', '    TOY = "toys"\n'),
        Edit(
            "planning/predictions/rank.py",
            "        make(stage.part.traced.table_bytes",
            "        make(1 << 20, Part.TOY)\n",
        ),
    ),
}


def edit(package: Path) -> None:
    """Make all changes in a copy of the package."""
    for change in EDITS.values():
        for file, before, lines in change:
            path = package / file
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            assert text.count(before) == 1 or not before, f"{file} has {text.count(before)} of {before!r}"
            path.write_text(text.replace(before, lines + before) if before else lines, encoding="utf-8")


# --- checks: by another library, by a count of calls, or by the object that a toy is a copy of ------------------------


def check_operator() -> None:
    assert _calls("twice", lambda x: torch.ops.toy.twice(x)) == [6, 3]


def check_kernel() -> None:
    heads = lambda x: x.view(1, 2, 4, -1)  # noqa: E731
    assert _calls("attention", lambda x: torch.ops.toy.attention(*[heads(x)] * 3).view_as(x)) == [6, 3]
    from nemo_like.activation_checkpointing.ops import facts

    given, rule = [torch.randn(1, 2, 4, 8) for _ in range(3)], facts(torch.ops.toy.attention.default).flops
    shapes = [tensor.shape for tensor in given]
    assert rule is not None
    assert rule(torch.ops.toy.attention.default, tuple(given), {}, given[0]) == sdpa_flop_count(*shapes)


def _calls(name: str, run: Callable[[torch.Tensor], torch.Tensor]) -> list[int]:
    """Return how often an operator ran in a step of three layers under ``ac="full"`` and ``"selective"``."""
    from nemo_like import parallelize

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up = nn.LayerNorm(16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + run(self.up(self.norm(x))).tanh()

    counts = []
    for mode in ("full", "selective"):
        COUNTS[name] = 0
        model = parallelize(nn.Sequential(*(Block() for _ in range(3))), strategy="single", ac=mode)
        model(torch.randn(4, 16)).sum().backward()
        counts.append(COUNTS[name])
    return counts


COUNTS: dict[str, int] = {}


def _define(name: str, arguments: str, run: Callable[..., torch.Tensor]) -> None:
    def counted(*args: torch.Tensor) -> torch.Tensor:
        COUNTS[name] += 1
        return run(*args)

    op = torch.library.custom_op(f"toy::{name}", counted, mutates_args=(), schema=f"({arguments}) -> Tensor")
    op.register_fake(lambda *args: torch.empty_like(args[0]))
    op.register_autograd(lambda ctx, grad: tuple(grad for _ in arguments.split(",")))


def check_context() -> None:
    from nemo_like import ContextParallel

    assert _step(cp=ContextParallel(2, "toy")) == _step(cp=ContextParallel(2, "all_gather"))


def check_schedule() -> None:
    from nemo_like import PipelineParallel

    assert _step(pp=PipelineParallel(2, "toy", 2)) == _step(pp=PipelineParallel(2, "gpipe", 2))


def check_optimizer() -> None:
    assert _step(optimizer="toy") == _step(optimizer="sgd") != _step()


def check_device() -> None:
    assert _step(gpu="toy") == _step()


@functools.cache
def _step(**asked: Any) -> tuple[dict[str, int], float]:
    """Return the bytes of each part at the peak of a planned step, and its seconds."""
    from nemo_like import Job
    from nemo_like.planning.account import account_of
    from nemo_like.planning.query import PlanQuery
    from tests.models.families import FAMILIES

    ids = torch.arange(64).view(1, 64) % 48
    job = Job.of(**{"gpu": "h100-80gb", "ac": "full", "world_size": 4} | asked)
    query = PlanQuery.from_model(FAMILIES["llama"].build(), {"input_ids": ids, "labels": ids}, job)
    account = account_of(query, query.uniform("full"))
    return account.parts, account.step.total


def check_loss() -> None:
    brier_score: Any = importlib.import_module("nemo_like.losses").__dict__["brier_score"]
    torch.manual_seed(0)
    hidden, head, labels = torch.randn(8, 4, requires_grad=True), nn.Linear(4, 5), torch.randint(5, (8,))
    whole = (head(hidden).softmax(-1) - F.one_hot(labels, 5)).square().sum(-1).mean()
    ours = brier_score(hidden, head, labels)
    torch.testing.assert_close(ours, whole)
    torch.testing.assert_close(*(torch.autograd.grad(loss, [hidden, *head.parameters()]) for loss in (ours, whole)))


def check_mode() -> None:
    from nemo_like import parallelize

    assert _recomputed(parallelize(_model(), ac="alternate", strategy="single")) == 2


def check_trainer() -> None:
    class Plain:
        def build(self) -> nn.Module:
            return _model()

    mixin: Any = importlib.import_module("nemo_like.integrations.toy").__dict__["CheckpointedTrainer"]
    assert _recomputed(type("Trainer", (mixin, Plain), {})().build()) == 4


class Counted(nn.GELU):
    runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counted.runs += 1
        return super().forward(x)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), Counted(), nn.Linear(8, 8)) for _ in range(4))
    )


def _recomputed(model: nn.Module) -> int:
    """Return how many layers ran twice in a step, whose gradients are those of a step without checkpointing."""
    plain, x, counts = _model(), torch.randn(3, 8), []
    for each in (plain, model):
        before = Counted.runs
        each(x).square().sum().backward()
        counts.append(Counted.runs - before)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True))
    return counts[1] - counts[0]


def check_flag() -> None:
    from nemo_like import Job
    from nemo_like.cli import make_parser
    from nemo_like.commands.step_options import asked_job
    from nemo_like.flags import changed_flags

    parser: Any = make_parser("plan")
    assert "toys of a step" in parser.command.format_help()
    job = asked_job(parser.parse_args(["plan", "--model", "llama-tiny", "--gpus", "1", "--toy", "5"]))
    assert changed_flags(Job(), job)["toy"] == 5


def check_family() -> None:
    from nemo_like.layers import find_layers

    def block(word: str) -> nn.Module:
        made = nn.Sequential()
        for name in (word, "out"):
            made.add_module(name, nn.Linear(4, 4))
        return made

    model = nn.Module()
    model.first = nn.ModuleList(block("norm") for _ in range(2))
    model.second = nn.ModuleList(block("toyer") for _ in range(2))
    model.forward = lambda x: x
    assert len(find_layers(model)) == 4


def check_part() -> None:
    assert _step()[0]["toys"] == 1 << 20


CHECKS: tuple[Callable[[], None], ...] = (
    check_operator,
    check_kernel,
    check_context,
    check_schedule,
    check_optimizer,
    check_device,
    check_loss,
    check_mode,
    check_trainer,
    check_flag,
    check_family,
    check_part,
)  # in the order of `EDITS`


def results() -> Iterator[tuple[str, str | None]]:
    for name, check in zip(EDITS, CHECKS, strict=True):
        try:
            check()
        except Exception as error:  # noqa: BLE001  # reported by the test of this change
            yield name, f"{type(error).__name__}: {error}"
        else:
            yield name, None


if __name__ == "__main__":
    _define("twice", "Tensor x", lambda x: 2 * x)
    _define("attention", "Tensor q, Tensor k, Tensor v", lambda q, k, v: F.scaled_dot_product_attention(q, k, v))
    out = sys.stdout
    with redirect_stdout(sys.stderr):
        found = dict(results())
    print(json.dumps(found), file=out)
