"""`parallelize(loss="chunked")` on several ranks: the loss, the gradients and the collectives of whole logits."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

from nemo_like import parallelize
from nemo_like.losses import chunked_cross_entropy, chunked_log_probs
from nemo_like.losses.model_loss import chunk_model_loss
from nemo_like.options import FSDP2, ChunkedLoss, Precision, TensorParallel
from tests.checks import assert_near, backward, gradients_of, labelled, seeded, whole
from tests.models.decoders import batch, build
from tests_distributed.counting import CountCollectives, heard
from tests_distributed.spawn import on_ranks, run_ranks

CHUNKS = ChunkedLoss(chunk_tokens=5)


def undropped(name):
    """A model that trains, and whose layers drop nothing, since ranks would drop other activations than one rank."""
    model = build(name).eval()
    model.training = True
    return model


def step(model, ids, chunked=False):
    """Two steps of accumulation; the loss of the first."""
    losses = []
    for part in (ids, ids.flip(1)):
        output = model(input_ids=part, labels=part)
        assert (output.logits is None) == chunked
        loss = output.loss
        (loss / 2).backward()
        losses.append(loss.item())
    return losses[0]


def _train(rank, world_size, name, loss, arguments, tp):
    model = parallelize(undropped(name), loss=loss, **arguments)
    mine = batch(4).chunk(world_size // tp)[rank // tp]
    with CountCollectives() as counted:
        first = step(model, mine, loss != "model")
    grads = {name.removeprefix("module."): grad for name, grad in gradients_of(model).items()}
    return first, grads, (counted.gathers, counted.counts["_reduce_scatter_base_"])


def reference(name):
    model = undropped(name)
    return step(model, batch(4)), gradients_of(model)


def check(results, name, tp=1):
    loss, grads = reference(name)
    mine = [result[0] for result in results[::tp]]
    assert sum(mine) / len(mine) == pytest.approx(loss, rel=1e-6)
    assert_near(results[0][1], grads)


def _train_both(rank, world_size, name, arguments):
    return [_train(rank, world_size, name, loss, arguments, 1) for loss in (CHUNKS, "model")]


# A head in a unit with the norm; one tied, in the root's.
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("reshard", "name"),
    [(None, "llama"), (True, "qwen3"), (False, "llama"), (None, "qwen3"), (True, "llama"), (False, "qwen3")],
)
def test_fsdp2(reshard, name):
    arguments = dict(strategy=FSDP2(reshard_after_forward=reshard), ac="none")
    results, plain = zip(*run_ranks(2, _train_both, name, arguments))
    check(results, name)
    assert results[0][2] == plain[0][2]


WAYS = {
    "full": (2, 1, dict(ac="full")),
    "ddp": (2, 1, dict(strategy="ddp", ac="none")),
    "offload": (2, 1, dict(strategy=FSDP2(cpu_offload=True))),
    "compiled": (2, 1, dict(compile="aot_eager")),
    "sequences and a vocabulary that are cut": (
        2, 2, dict(ac="none", tp=TensorParallel(2, sequence_parallel=True, loss_parallel=True))
    ),
    "replicas of shards": (4, 2, dict(ac="none", dp_replicate=2)),
    "split logits on two by two": (4, 2, dict(ac="none", tp=TensorParallel(2, loss_parallel=True))),
    "two by two": (4, 2, dict(ac="none", tp=TensorParallel(2))),
}  # fmt: skip
"""Ranks, how many of them have one batch, and arguments."""


@pytest.mark.few(6)
@pytest.mark.parametrize("way", WAYS)
def test_other_ways(way):
    ranks, alike, arguments = WAYS[way]
    check(run_ranks(ranks, _train, "llama", CHUNKS, arguments, alike, timeout=150), "llama", tp=alike)


@pytest.mark.few(1)
@pytest.mark.parametrize("split", [True, False])
@on_ranks(4, timeout=150)
def test_stages_whose_logits_stay_split_by_vocabulary(rank, world_size, split):
    """The model's own loss is a DTensor there; sums over the vocabulary go another way, so not bitwise."""
    ids, tensor, whole_model = batch(4), TensorParallel(2, loss_parallel=split), undropped("llama")
    wanted = backward(whole_model(input_ids=ids, labels=ids).loss)
    grads = gradients_of(whole_model)
    with loss_parallel() if split else nullcontext():
        sample = {"input_ids": ids[:2], "labels": ids[:2]}
        pipeline = parallelize(undropped("llama"), ac="none", tp=tensor, pp=2, sample_input=sample)
        for each in (pipeline.step, pipeline.eval_step):
            assert float(each(input_ids=ids, labels=ids)) == pytest.approx(wanted.item(), rel=1e-6)
    for name, parameter in pipeline.named_parameters():
        assert (whole(parameter.grad) - grads[name]).norm() <= 1e-5 * grads[name].norm(), name


class _SequenceCut(nn.Module):
    """A model whose own plan leaves a part of the sequence with each rank when its head is called."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh, self.embed, self.head = mesh, nn.Embedding(7, 6), nn.Linear(6, 7, bias=False)
        parallelize_module(self.head, mesh, ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()))

    def forward(self, ids, labels):
        hidden = DTensor.from_local(self.embed(ids), self.mesh, [Replicate()]).redistribute(placements=[Shard(1)])
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def _hidden_in_parts(rank, world_size):
    torch.manual_seed(0)
    model = _SequenceCut(init_device_mesh("cpu", (2,)))
    ids = torch.arange(14).view(2, 7)[:, :6] % 7
    plain = model(ids, labels=ids)
    said = heard()
    assert torch.equal(chunk_model_loss(model, CHUNKS)(ids, labels=ids), plain)
    return said


def test_hidden_states_in_parts_take_whole_logits():
    assert "because its hidden states are cut over ranks" in str(run_ranks(2, _hidden_in_parts)[0])


@on_ranks(2)
def test_a_vocabulary_over_two_ranks(rank, world_size):
    """A vocabulary over both ranks, cut unevenly: 7 columns, 4 and 3."""
    whole, hidden, labels = seeded(nn.Linear, 6, 7), torch.randn(9, 6, requires_grad=True), torch.arange(9) % 7
    labels[4] = -100
    style = ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False)
    cut = parallelize_module(copy.deepcopy(whole), init_device_mesh("cpu", (2,)), style)
    found = []
    for head in (whole, cut):
        with CountCollectives() as counted:
            loss = chunked_cross_entropy(hidden, head, labels, chunk_tokens=3, label_smoothing=0.1, z_loss=0.1)
            log_probs = chunked_log_probs(hidden, head, labels, chunk_tokens=3)
        grads = torch.autograd.grad(loss + log_probs.square().sum(), [hidden, *head.parameters()])
        found.append([loss, log_probs, *(g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads)])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
    assert counted.counts["allreduce_"] == 12  # three chunks of each of the two, and two reductions for each


def _own_unit(rank, world_size, output_dtype):
    """A head in a unit of its own, used outside of any model: its parameters are gathered around all chunks."""
    head, hidden, labels = seeded(nn.Linear, 6, 40), torch.randn(9, 6, requires_grad=True), torch.arange(9)
    expected = [chunked_cross_entropy(hidden, head, labels), chunked_log_probs(hidden, head, labels).square().sum()]
    grads = torch.autograd.grad(sum(expected), [hidden, *head.parameters()])
    fully_shard(head, mp_policy=MixedPrecisionPolicy(output_dtype=output_dtype))
    with CountCollectives() as counted:
        loss = chunked_cross_entropy(hidden, head, labels, chunk_tokens=2)
        log_probs = chunked_log_probs(hidden, head, labels, chunk_tokens=2)
        assert torch.equal(loss, loss.float()) and log_probs.dtype == torch.float32
        torch.testing.assert_close(torch.stack([loss, log_probs.square().sum()]), torch.stack(expected))
        (loss + log_probs.square().sum()).backward()
    torch.testing.assert_close([hidden.grad, *gradients_of(head).values()], list(grads), rtol=1e-5, atol=1e-6)
    assert head(hidden).dtype == (output_dtype or torch.float32)
    return counted.gathers, counted.counts["_reduce_scatter_base_"]


@pytest.mark.parametrize("output_dtype", [None, torch.bfloat16])
def test_a_head_in_a_unit_of_its_own(output_dtype):
    gathers, _ = run_ranks(2, _own_unit, output_dtype)[0]
    assert gathers <= 4 * 2  # once for each loss and each backward; an all-gather is two operators


def _low_precision(rank, world_size, loss):
    model = parallelize(undropped("llama"), loss=loss, ac="none", precision=Precision("bf16", output_dtype="fp32"))
    loss = backward(model(**labelled(batch(4)[2 * rank : 2 * rank + 2])).loss)
    return loss.item(), gradients_of(model)


def test_bfloat16_is_no_further_from_float32_than_whole_logits():
    model, ids = undropped("llama"), batch(4)
    exact = backward(model(input_ids=ids, labels=ids).loss)
    distances = []
    for loss in ("model", CHUNKS):
        results = run_ranks(2, _low_precision, loss)
        far = sum((results[0][1][name] - p.grad).square().sum() for name, p in model.named_parameters()).sqrt()
        distances.append((abs(sum(r[0] for r in results) / 2 - exact.item()), far.item()))
    assert distances[1][0] <= distances[0][0] + 1e-4
    assert distances[1][1] <= 1.05 * distances[0][1]
