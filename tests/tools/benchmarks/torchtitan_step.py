"""How torchtitan runs a step, where that differs from ours: what its own scripts and files say, and nothing measured.

- ``run_llama_train.sh`` starts the job with ``expandable_segments:True``; ``build_optimizers`` makes an AdamW that is not
  fused.
- ``apply_fsdp`` of ``parallelize_llama.py`` makes one unit of embedding, norm and head (``FSDP2(ends="root")``).
- Its selective checkpointing is ``torch.utils.checkpoint``'s: run eagerly, that keeps the outputs of all products that its
  policy names, the layer's last one too, which backward never reads (``_CachingTorchDispatchMode`` of PyTorch 2.6).
- The loss is computed of the logits by the loop, in float32, and the logits are dropped before backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from nemo_like.activation_checkpointing.ops import facts
from nemo_like.activation_checkpointing.plan import Part
from nemo_like.distributed.pipeline.schedules import RESHARD, UNSHARD, all_actions_of
from nemo_like.planning.memory_model.microbatch import LayerCall
from nemo_like.planning.predictions.rank import RankSteps, StageOfRank
from nemo_like.planning.predictions.reserved import Reserved, StepLogs, replay
from nemo_like.planning.query import Choices, PlanQuery
from nemo_like.planning.selection.layer import BlockProblem

_LAST_PRODUCT = -1
"""The number of a storage that no log of a layer has."""


class Float32Head(nn.Linear):
    """The head of its models until July 2024: ``self.output(h).float()``."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return logits in float32."""
        return super().forward(input).float()


def loop_loss(output: Any) -> torch.Tensor:
    """What their loop computes of the model's output."""
    logits = output.logits.flatten(0, 1).float()
    return nn.functional.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.long))


class _CompiledCrossEntropy(torch.autograd.Function):
    """Softmax and loss of 16-bit logits in one kernel: what is kept are the logits, and a number for each token."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits, logits.new_empty(logits.shape[:-1], dtype=torch.float32))
        return logits.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(ctx.saved_tensors[0])


def compiled_loss(output: Any) -> torch.Tensor:
    """The same where ``torch.compile`` takes it: ``build_cross_entropy_loss``, in 2025."""
    logits = output.logits
    return _CompiledCrossEntropy.apply(logits.to_local() if isinstance(logits, DTensor) else logits)


def kept_last_product(problem: BlockProblem) -> int:
    """Bytes of what their eager selective checkpointing keeps of a layer and nobody reads: the last product's output, if
    it is one of the kept ones (every other product is not)."""
    products = [k for k, op in enumerate(problem.records) if op.flops and not facts(op.op).attention]
    kept = len(products) % 2 == 1 and products[-1] >= problem.reachable
    return problem.records[products[-1]].bytes if kept else 0


def with_last_products(query: PlanQuery) -> PlanQuery:
    """Return a query in which eager selective checkpointing keeps what theirs does."""
    (stage,) = query.stages
    own = replace(stage)
    plain, more = own.layer_calls, [kept_last_product(problem) for problem in stage.part.problems]
    own.__dict__["layer_calls"] = lambda choices, accumulate, **how: [
        _with(layer, more[call.kind]) for layer, call in zip(plain(choices, accumulate, **how), stage.part.traced.calls)
    ]
    return replace(query, stages=(own,), written={})


def reserved_of_stages(query: PlanQuery, rank: int, choices: Choices) -> Reserved:
    """Return what a rank of a pipeline of that time reserves. PyTorch kept what each stage returned for a microbatch until
    the step ended (``output_chunks``, until May 2025). Of a stage, it gathered the root alone beforehand
    (``stage.submod.unshard()``)."""
    own, last = replace(query), query.stages[-1]
    own.__dict__["actions"] = tuple(
        tuple(each for each in actions if each.kind not in (UNSHARD, RESHARD)) for actions in all_actions_of(query.pp)
    )
    head, job = last.part.model.get_submodule("lm_head"), query.job
    tokens = query.hidden_bytes // head.in_features // 2 * (job.tp.size if job.tp.sequence_parallel else 1)
    kept = [query.hidden_bytes] * (len(query.stages) - 1) + [tokens * head.out_features // job.tp.size * 2]
    logs = StepLogs(own, rank, choices, kind=partial(KeepsOutputs, kept))
    return replay(logs, query.device, job.allocator)


class KeepsOutputs(RankSteps):
    """Steps in which each stage's output stays till the step ends; `kept`: the bytes that it has for a micro-batch."""

    def __init__(self, kept: Sequence[int], *how: Any) -> None:
        super().__init__(*how)
        self.kept = kept

    def forward(self, stage: StageOfRank, number: int) -> None:
        super().forward(stage, number)
        self.sent.append(self.storages.make(self.kept[stage.index], Part.KEPT_OUTPUT))


def _with(layer: LayerCall, size: int) -> LayerCall:
    """`layer` with one more storage from the end of its forward to the end of its backward."""
    if not size:
        return layer
    events = layer.events
    forward, backward = (*events.forward, (_LAST_PRODUCT, size)), (*events.backward, (_LAST_PRODUCT, 0))
    return replace(layer, events=replace(events, forward=forward, backward=backward))
