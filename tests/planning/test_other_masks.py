"""A plan made from one kind of batch, and a run that brings others: padding comes and goes, packed documents too."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_like import parallelize
from nemo_like._util.log import forget_announcements
from nemo_like._util.op_lookup import find_op
from nemo_like.activation_checkpointing.engine.handles import RegionError
from nemo_like.activation_checkpointing.engine.region import Region
from nemo_like.activation_checkpointing.policy import HOST, RECOMPUTE, SAVE, SKIP, DecisionTable
from nemo_like.distributed.documents import keep_documents_apart
from nemo_like.planning import plan_for
from tests.checks import assert_bitwise, step
from tests.models.blocks import checkpoint_region
from tests.said import said

transformers = pytest.importorskip("transformers")

BATCH, SEQ, VOCAB = 2, 16, 64
_DECODER = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, head_dim=8, num_key_value_heads=2,
    vocab_size=VOCAB, max_position_embeddings=64, use_cache=False, attention_dropout=0.1,
)  # fmt: skip


def _llama(**more):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_DECODER, **more))


def _gpt2():
    sizes = dict(n_embd=32, n_layer=3, n_head=4, n_positions=64, vocab_size=VOCAB, use_cache=False)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


def _bert():
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, vocab_size=VOCAB)
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes))


MODELS = {
    "llama": _llama,
    "llama eager": lambda: _llama(attn_implementation="eager"),
    "gpt2": _gpt2,
    "bert": _bert,
}


def _batches():
    ids = torch.randint(VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(BATCH, SEQ, dtype=torch.long)
    mask[1, -5:] = 0
    packed = torch.cat([torch.arange(6), torch.arange(SEQ - 6)]).expand(BATCH, -1)
    plain = {"input_ids": ids, "labels": ids}
    return {
        "plain": plain,
        "padded": plain | {"attention_mask": mask},
        "full mask": plain | {"attention_mask": torch.ones_like(mask)},
        "packed": plain | {"position_ids": packed},
        "one document": plain | {"position_ids": torch.arange(SEQ).expand(BATCH, -1)},
        "longer": {"input_ids": ids.repeat(1, 2), "labels": ids.repeat(1, 2)},
    }


def _steps(model, batches):
    return [step(model.train(), seed=seed, **batch) for seed, batch in enumerate(batches)]


@pytest.mark.few(2)
@pytest.mark.parametrize("budget", ["35%", "70%"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("planned", ["plain", "padded", "packed"])
def test_a_run_whose_masks_change_trains_as_without_a_plan(name, planned, budget):
    torch.manual_seed(0)
    model, batches = MODELS[name](), _batches()
    if name == "bert" and planned == "packed":
        pytest.skip("BERT packs nothing")
    order = [batches[planned], *batches.values(), batches[planned]]
    # As `parallelize` trains packed documents: `tests_distributed/fsdp/test_packing.py` compares that with one by one.
    expected = _steps(keep_documents_apart(copy.deepcopy(model)), order)
    planned_model = parallelize(model, strategy="single", ac=budget, sample_input=batches[planned], device="cpu")
    assert_bitwise(_steps(planned_model, order), expected)


def test_a_batch_that_the_plan_does_not_fit_is_said_once(caplog):
    forget_announcements()
    batches = _batches()
    model = parallelize(_llama(), strategy="single", ac="70%", sample_input=batches["plain"], device="cpu")
    with caplog.at_level(logging.WARNING, "nemo_like"):
        _steps(model, [batches["plain"]])
        assert not said(caplog)
        _steps(model, [batches["padded"], batches["padded"], batches["plain"]])
    (record,) = said(caplog)
    assert record.levelno == logging.WARNING
    assert "model.layers." in record.getMessage() and "sample_input" in record.getMessage()


def _skipping_block(x, weight, mask=None):
    """A product that backward needs only where a mask is used; (T, D) to (T,)."""
    scores = x @ weight
    if mask is not None:
        scores = (scores * mask).sin()
    best = scores.relu().topk(2, dim=-1).values
    return (best.tanh() * x.sum(-1, keepdim=True)).sum(-1)


@pytest.mark.parametrize("retain", [False, True])
def test_a_replay_that_needs_what_is_skipped_begins_again_and_runs_no_pinned_operator_twice(retain):
    rows = {"aten.mm.default": (SKIP,), "aten.relu.default": (SAVE,), "aten.topk.default": (SAVE,)}
    x, weight = torch.randn(5, 4, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    calls = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    for mask in (None, torch.randn(5, 6)):
        expected = torch.autograd.grad(_skipping_block(x, weight, mask).sum(), (x, weight))
        table = DecisionTable(rows, strict=False)
        out = checkpoint_region(_skipping_block, x, weight, mask, policy=table, name="block")
        for _ in range(1 + retain):
            calls.clear()
            with Counting():
                found = torch.autograd.grad(out.sum(), (x, weight), retain_graph=retain)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
            assert "aten.topk.default" not in calls
        strict = checkpoint_region(_skipping_block, x, weight, mask, policy=DecisionTable(rows), name="block").sum()
        if mask is None:
            strict.backward()
        else:
            with pytest.raises(RegionError, match="'block': the plan skips"):
                strict.backward()


@pytest.mark.parametrize("place", [SAVE, HOST])
def test_rows_that_do_not_fit_are_computed_again_and_the_others_are_kept(place):
    table = DecisionTable({"aten.exp.default": (place,), "aten.sin.default": (place,)}, strict=False)
    x = torch.randn(4, requires_grad=True)
    decided = {}

    def block(t, times):
        for _ in range(times):
            t = t.sin()
        return t.exp().cos()

    for times in (1, 2, 0):
        expected = torch.autograd.grad(block(x, times).sum(), x)[0]
        region = Region(block, table, "block", None, early_stop=True)
        out = region.forward((x, times), {}, True)
        decided[times] = [(str(entry.op), entry.decision) for entry in region.kept]
        assert torch.equal(torch.autograd.grad(out.sum(), x)[0], expected)
    sin, exp = "aten.sin.default", "aten.exp.default"
    assert decided[1] == [(sin, place), (exp, place)]
    assert decided[2] == [(sin, RECOMPUTE), (sin, RECOMPUTE), (exp, place)]
    assert decided[0] == [(exp, place)]


def test_the_row_of_attention_counts_for_each_of_its_kernels():
    flash, efficient = (
        find_op(f"aten._scaled_dot_product_{name}.default") for name in ("flash_attention", "efficient_attention")
    )
    table = DecisionTable({flash: (SAVE, RECOMPUTE)}, strict=False)
    assert efficient in table.tracked_ops() and efficient not in DecisionTable({flash: (SAVE,)}).tracked_ops()
    decide = table.start()
    assert [decide(efficient, 0), decide(efficient, 1)] == [SAVE, RECOMPUTE]
    assert decide.finish() is None
    decide = table.start()
    assert [decide(efficient, 0), decide(flash, 0), decide(efficient, 1)] == [SAVE, RECOMPUTE, RECOMPUTE]
    assert {flash, efficient} <= decide.finish().ops


def test_a_lenient_table_survives_copying_and_pickling():
    table = DecisionTable({"aten.mm.default": (SAVE,)}, strict=False)
    for copied in (pickle.loads(pickle.dumps(table)), copy.deepcopy(table)):
        assert copied == table and not copied.strict
    assert table != DecisionTable({"aten.mm.default": (SAVE,)})


def test_layers_that_keep_the_same_share_one_policy():
    """Or Dynamo would compile each layer of a model anew, up to its limit of recompilations."""
    plan = plan_for(_llama(), ac="50%", sample_input=_batches()["plain"], gpu="cpu")
    policies = [policy for policy in plan.policies().values() if policy is not None]
    assert len(policies) == 3
    assert len({id(policy) for policy in policies}) == len(set(policies)) < 3
