"""`parallelize(loss="chunked")` on several ranks: the loss, the gradients and the collectives of whole logits."""

from __future__ import annotations

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_like import parallelize
from nemo_like.options import FSDP2, ChunkedLoss
from tests.models.decoders import batch, build
from tests_distributed.spawn import run_ranks

CHUNKS = ChunkedLoss(chunk_tokens=5)


class Collectives(TorchDispatchMode):
    """Counts all-gathers and reduce-scatters."""

    def __enter__(self):
        self.gathers = self.scatters = 0
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().replace("_", "")
        self.gathers += "allgather" in name
        self.scatters += "reducescatter" in name
        return func(*args, **(kwargs or {}))


def undropped(name):
    """A model that trains, and whose layers drop nothing, since ranks would drop other activations than one rank."""
    model = build(name).eval()
    model.training = True
    return model


def step(model, ids):
    """Two steps of accumulation; the loss of the first."""
    losses = []
    for part in (ids, ids.flip(1)):
        loss = model(input_ids=part, labels=part).loss
        (loss / 2).backward()
        losses.append(loss.item())
    return losses[0]


def gradients(model):
    return {
        name.removeprefix("module."): p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        for name, p in model.named_parameters()
    }


def _train(rank, world_size, name, loss, arguments, tp):
    model = parallelize(undropped(name), loss=loss, **arguments)
    mine = batch(4)[2 * (rank // tp) : 2 * (rank // tp) + 2]
    with Collectives() as counted:
        first = step(model, mine)
    return first, gradients(model), (counted.gathers, counted.scatters)


def reference(name):
    model = undropped(name)
    ids = batch(4)
    return step(model, ids), gradients(model)


def check(results, name, tp=1):
    loss, grads = reference(name)
    mine = [result[0] for result in results[::tp]]
    assert sum(mine) / len(mine) == pytest.approx(loss, rel=1e-6)
    for key, gradient in grads.items():
        assert (results[0][1][key] - gradient).norm() <= 1e-5 * gradient.norm(), key


@pytest.mark.parametrize("name", ["llama", "qwen3"])  # a head in a unit with the norm; one tied, in the root's
@pytest.mark.parametrize("reshard", [None, True, False])
def test_fsdp2(name, reshard):
    arguments = dict(strategy=FSDP2(reshard_after_forward=reshard), ac="none")
    results = run_ranks(2, _train, name, CHUNKS, arguments, 1)
    check(results, name)
    plain = run_ranks(2, _train, name, "model", arguments, 1)
    assert results[0][2] == plain[0][2]


@pytest.mark.parametrize(
    "arguments",
    [dict(ac="full"), dict(strategy="ddp", ac="none"), dict(strategy=FSDP2(cpu_offload=True)), dict(compile="aot_eager")],
    ids=["full", "ddp", "offload", "compiled"],
)
def test_other_ways(arguments):
    check(run_ranks(2, _train, "llama", CHUNKS, arguments, 1), "llama")
