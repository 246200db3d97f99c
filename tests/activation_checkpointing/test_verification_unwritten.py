"""Verification passes over what kernels allocate and never write, or write in part: it differs without a consequence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from nemo_like.activation_checkpointing.engine import verification
from nemo_like.activation_checkpointing.policy import FullPolicy, Policy, SelectivePolicy
from tests.checks import assert_bitwise
from tests.models.blocks import checkpoint_region, gradients, region

FULL = FullPolicy()


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_LIKE_VERIFY", "1")


def _saved(dtype: torch.dtype, *shape: int, device: str = "cuda") -> verification.SavedTensor:
    saved = verification.SavedTensor(torch.empty(shape, dtype=dtype, device="meta"), torch.empty(3))
    saved.device = torch.device(device)
    return saved


def test_outputs_that_kernels_of_accelerators_leave_unwritten_are_not_compared() -> None:
    queries = _saved(torch.bfloat16, 2, 8, 100, 64)
    turned = _saved(torch.bfloat16, 2, 100, 8, 64)
    whole = _saved(torch.bfloat16, 2, 8, 128, 64)
    sums = _saved(torch.float32, 2, 8, 128)
    unwritten = verification.unwritten
    assert unwritten(sums, [queries, sums]) and unwritten(sums, [turned, sums])
    assert not unwritten(sums, [whole, sums]) and not unwritten(sums, [sums])
    assert not unwritten(_saved(torch.float32, 2, 8, 128, device="cpu"), [queries])
    assert not unwritten(_saved(torch.bfloat16, 2, 8, 128), [queries])
    for seed in (_saved(torch.int64), _saved(torch.uint64, 2)):
        assert unwritten(seed, [])
        seed.device = torch.device("cpu")
        assert not unwritten(seed, [])
    assert unwritten(_saved(torch.uint8, 4096), []) and not unwritten(_saved(torch.uint8, 2, 8), [])
    assert not unwritten(_saved(torch.int64, 3), []) and not unwritten(_saved(torch.bool, 2), [])


def test_kernels_that_leave_memory_unwritten_are_told_from_others() -> None:
    lengths = torch.tensor([3, 2])

    def paths(x: Tensor) -> Tensor:
        loss = nn.functional.ctc_loss(
            x.log_softmax(-1), torch.tensor([[1, 2], [3, 0]]), torch.tensor([5, 4]), lengths - 1
        )
        return loss + nn.functional.rrelu(x).sum()

    for _ in range(5):
        loss = checkpoint_region(paths, torch.randn(5, 2, 6, requires_grad=True), policy=FULL)
        for numel in (20, 50, 60, 100, 250):
            torch.full((numel,), torch.nan)  # other memory for the replay to find
        loss.backward()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    layer = kind(8, 8, 2, dropout=0.5, batch_first=True)
    x = torch.randn(2, 5, 8)
    call = lambda t: layer(t)[0]  # noqa: E731
    assert_bitwise(gradients(region(call, FULL), layer, x), gradients(call, layer, x))


class RandomRelu(nn.Module):
    """Ends with an operator that writes what it saves after it has saved it; `behind` comes after that, and is dropped."""

    def __init__(self, behind: bool) -> None:
        super().__init__()
        self.up, self.behind = nn.Linear(8, 8), behind

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.rrelu(self.up(x), training=True)
        if self.behind:
            (self.up(y).exp() * y).sum()
        return y


@pytest.mark.parametrize("behind", [False, True], ids=["last", "last that is used"])
@pytest.mark.parametrize("policy", [FULL, SelectivePolicy()], ids=["full", "selective"])
def test_an_operator_that_writes_what_it_saved_runs_to_its_end(policy: Policy, behind: bool) -> None:
    torch.manual_seed(0)
    layer, x = RandomRelu(behind), torch.randn(4, 8)
    for seed in range(3):
        wanted = gradients(layer, layer, x, seed=seed)
        torch.full((4, 8), torch.nan)  # in the memory that the recompute is given
        assert_bitwise(gradients(region(layer, policy), layer, x, seed=seed), wanted)
