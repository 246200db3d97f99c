"""Frozen layers in the flow of gradients, and budgets whose ranks get batches of different kinds, under FSDP2."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from nemo_like import parallelize
from tests.checks import assert_bitwise, whole
from tests.models.decoders import VOCAB, WIDTH, PlainDecoder, build
from tests_distributed.spawn import on_ranks

MODES = ("none", "full", "selective", "submodule", "sequential")


class Prompted(nn.Module):
    """Prompt tuning: trained vectors before the tokens, and a decoder in which nothing trains."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = PlainDecoder(dropout=0.0).requires_grad_(False)
        self.prompt = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:  # (B, T) -> ()
        x = torch.cat([self.prompt.expand(len(ids), -1, -1), self.decoder.embed(ids)], dim=1)
        for block in self.decoder.blocks:
            x = block(x)
        return self.decoder.head(self.decoder.norm(x)).square().mean()


def _ids() -> Tensor:
    return torch.randint(VOCAB, (4, 16), generator=torch.Generator().manual_seed(1))


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
@on_ranks(2)
def test_prompt_tuning(rank: int, world_size: int, strategy: str) -> None:
    torch.manual_seed(0)
    reference = Prompted()
    reference(_ids()).backward()
    first = None
    for mode in MODES:
        torch.manual_seed(0)
        model = parallelize(Prompted(), strategy, mode, device="cpu")
        for _ in range(2):
            model.zero_grad()
            model(_ids().chunk(2)[rank]).backward()
        (found,) = [whole(param.grad) for param in model.parameters() if param.requires_grad]
        first = found if first is None else first
        torch.testing.assert_close(found, reference.prompt.grad, rtol=1e-5, atol=1e-9)
        assert torch.equal(found, first), mode


@pytest.mark.few(1)
@pytest.mark.parametrize("budget", ["30%", "70%"])
@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
@on_ranks(2)
def test_ranks_with_batches_of_different_kinds_follow_one_plan(
    rank: int, world_size: int, strategy: str, budget: str
) -> None:
    """In each step one rank has padding, and the other has none: only one of them fits its plan."""
    sample = {"input_ids": _ids()[:2], "labels": _ids()[:2]}
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, -5:] = 0
    gradients: dict[str, list[Tensor]] = {}
    for ac in ("none", budget):
        model = parallelize(build("llama"), strategy, ac, sample_input=sample, device="cpu")
        for step in range(3):
            model.zero_grad()
            more = {"attention_mask": mask} if step % 2 == rank else {}
            torch.manual_seed(step + 10 * rank)
            model(**sample, **more, use_cache=False).loss.backward()
            gradients.setdefault(ac, []).extend(whole(param.grad) for param in model.parameters())
    assert_bitwise(list(gradients.values()), [gradients["none"]] * 2)
