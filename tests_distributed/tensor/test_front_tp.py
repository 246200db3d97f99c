"""`parallelize(tp=...)` beside FSDP2 on four ranks: the same loss and gradients as one rank, no collective replayed."""

from __future__ import annotations

import pytest

from nemo_like import parallelize
from nemo_like.options import TensorParallel
from tests.models.decoders import batch, build, loss_of
from tests_distributed.spawn import on_ranks, run_ranks


def _gradients(rank: int, world_size: int, name: str, ac: str):
    model = parallelize(build(name).eval(), ac=ac, tp=2)
    loss = loss_of(model, batch(4)[2 * (rank // 2) : 2 * (rank // 2) + 2])  # both ranks of a tp pair see the same half
    loss.backward()
    return loss.item(), {n: p.grad.full_tensor() for n, p in model.named_parameters()}


@pytest.mark.few(1)
@pytest.mark.parametrize("ac", ["none", "full", "selective", "submodule"])
def test_llama_on_a_two_by_two_mesh(ac: str) -> None:
    reference = build("llama").eval()
    loss = loss_of(reference, batch(4))
    loss.backward()
    results = run_ranks(4, _gradients, "llama", ac, timeout=150)
    assert (results[0][0] + results[2][0]) / 2 == pytest.approx(loss.item(), rel=1e-5)
    for name, p in reference.named_parameters():
        # Relative to the gradient's norm: sums over ranks round differently from one sum.
        assert (results[0][1][name] - p.grad).norm() <= 1e-5 * p.grad.norm(), name


@on_ranks(2)
def test_bad_tensor_parallel_arguments_change_nothing(rank: int, world_size: int) -> None:
    model = build("llama")
    before = dict(model.named_modules())
    for arguments, message in (
        (dict(tp=3), "tp=3 does not divide the 2 ranks"),
        (dict(tp=TensorParallel(1, sequence_parallel=True)), "tp is 1"),
    ):
        with pytest.raises(ValueError, match=message):
            parallelize(model, **arguments)
        assert dict(model.named_modules()) == before
