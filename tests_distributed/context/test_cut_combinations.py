"""Context parallelism with everything else: chunked loss, LoRA, tensor parallelism, replicas, offload, compile, ..."""

import copy
import importlib.util
import shutil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor.parallel import loss_parallel

from nemo_like import parallelize
from nemo_like.distributed import build_mesh, set_gradient_sync, shard_sequence, unshard_sequence
from nemo_like.options import TensorParallel
from tests.models.adapted import with_lora
from tests.models.fit_models import llama
from tests_distributed.context.cut_models import LENGTH, batch, build, differences, gradients, off, off_loss, step
from tests_distributed.spawn import on_ranks, refused_on_ranks

ONE_AT_A_TIME: tuple[dict[str, Any], ...] = (
    {"loss": "chunked"},
    {"loss": "chunked", "ac": "full"},
    {"offload": "saved"},
    {"offload": "all", "ac": "none"},
    {"offload": "boundary", "ac": "full"},
    {"ac": "sequential"},
    {"ac": "50%"},
)
COMPILED = tuple({"compile": "aot_eager", "ac": ac} for ac in ("none", "selective"))
BY_INDUCTOR = tuple({"compile": True, "ac": ac} for ac in ("selective", "full"))
NO_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on the CPU")


@pytest.mark.parametrize(
    ("world_size", "name", "cases"),
    [
        (2, "llama", ONE_AT_A_TIME[1::2]),
        pytest.param(2, "llama", ONE_AT_A_TIME[::2], marks=pytest.mark.long),
        pytest.param(2, "gpt_oss", ONE_AT_A_TIME, marks=pytest.mark.long),
        (2, "mixtral", ({"ep": 2, "ac": "full"},)),
        pytest.param(4, "llama", ({"dp_replicate": 2}, {"tp": 2}, {"cp": 2}), marks=pytest.mark.long),
        pytest.param(2, "llama", COMPILED, marks=pytest.mark.long),
        pytest.param(2, "llama", BY_INDUCTOR, marks=[pytest.mark.long, NO_COMPILER]),
    ],
)
@on_ranks(timeout=400)
def test_with_other_options(rank: int, world_size: int, name: str, cases: tuple[dict[str, Any], ...]) -> None:
    whole, inputs = build(name), batch(name)
    expected = step(copy.deepcopy(whole), inputs)
    for options in cases:
        model = parallelize(copy.deepcopy(whole), **({"cp": 2, "sample_input": inputs} | options))
        assert off(step(model, inputs), expected) == [], options


@on_ranks(2)
def test_in_lower_precision(rank: int, world_size: int) -> None:
    """In bfloat16, parts and wholes differ by its rounding."""
    whole, inputs = build("llama"), batch("llama")
    loss, _ = step(copy.deepcopy(whole), inputs)
    found, _ = step(parallelize(whole, cp=2, precision="bf16", loss="chunked"), inputs)
    assert abs(found - loss) < 1e-2 * loss


@pytest.mark.few(1)
@on_ranks(4, timeout=150)
def test_the_loss_of_split_logits_is_summed_over_parts_of_sequences(rank: int, world_size: int) -> None:
    """The loss stays split by vocabulary."""
    whole, inputs = llama(1), {"input_ids": torch.randint(512, (2, 16))}
    inputs["labels"] = inputs["input_ids"]
    expected = step(copy.deepcopy(whole), inputs)
    tp = TensorParallel(2, sequence_parallel=True, loss_parallel=True)
    with loss_parallel():
        found = step(parallelize(whole, ac="full", tp=tp, cp=2, device="cpu"), inputs)
    assert off(found, expected) == []


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")
@pytest.mark.few(1)
@pytest.mark.parametrize("modes", [("selective",), ("none", "full", "submodule")])
@on_ranks(2, timeout=120)
def test_with_lora(rank: int, world_size: int, modes: tuple[str, ...]) -> None:
    whole, inputs = with_lora(build("llama"), ["q_proj", "v_proj"]), batch("llama")
    expected = step(copy.deepcopy(whole), inputs)
    assert expected[1] and all("lora" in name for name in expected[1])
    for ac in modes:
        assert off(step(parallelize(copy.deepcopy(whole), ac=ac, cp=2), inputs), expected) == [], ac


@on_ranks(2, timeout=120)
def test_evaluation_accumulation_outputs_and_own_loops(rank: int, world_size: int) -> None:
    """Evaluation, accumulation, a sum over items, outputs, own loops, generation: one model each."""
    whole = build("llama")
    first, second = batch("llama", 3), batch("llama", 4)

    # Accumulation over two microbatches with the trainer's number of items, and evaluation in between.
    items = torch.tensor(37.0)
    single, model = copy.deepcopy(whole), parallelize(copy.deepcopy(whole), cp=2)
    mesh = build_mesh(cp=2)
    for number, inputs in enumerate((first, second)):
        single(**inputs, num_items_in_batch=items).loss.backward()
        set_gradient_sync(model, number == 1)
        model(**inputs, num_items_in_batch=items).loss.backward()
    wrong = differences(gradients(model), gradients(single))
    single.zero_grad(), model.zero_grad()  # after an evaluation FSDP2 shows other parameters than those with gradients

    def evaluated(inputs: dict[str, Any]) -> list[str]:
        with torch.no_grad():
            return off_loss(model(**inputs).loss.item(), single(**inputs).loss.item())

    single.eval(), model.eval()
    wrong += evaluated(first)

    # Outputs are this rank's part.
    with torch.no_grad():
        given, expected = model(**first, output_hidden_states=True), single(**first, output_hidden_states=True)
    assert given.logits.shape[1] == 8  # of 13, padded to 16
    torch.testing.assert_close(unshard_sequence(given.logits, mesh, length=LENGTH), expected.logits)
    for part, states in zip(given.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(unshard_sequence(part, mesh, length=LENGTH), states)
    assert torch.equal(
        unshard_sequence(shard_sequence(first["input_ids"], mesh), mesh, length=LENGTH), first["input_ids"]
    )

    # A padded batch.
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :3], mask[1, -2:] = 0, 0
    padded = first | {"attention_mask": mask, "labels": first["input_ids"].masked_fill(mask == 0, -100)}
    explicit = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    explicit[5:, 1] = False
    wrong += evaluated(padded) + evaluated(first | {"attention_mask": explicit[None, None].expand(2, 1, -1, -1)})

    # A loop of one's own: logits of a part, labels of a part.
    single.train(), model.train()
    single(**first).loss.backward()
    ids = first["input_ids"]
    targets = F.pad(first["labels"], (0, 1), value=-100)[:, 1:]
    part = shard_sequence({"input_ids": ids, "labels": targets}, mesh)
    total = F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), part["labels"].flatten(), reduction="sum")
    (total * 2 / (targets != -100).sum()).backward()
    wrong += differences(gradients(model), gradients(single))

    # Generation runs on whole sequences.
    single.eval(), model.eval()
    prompt = first["input_ids"][:, :5]
    ours = model.generate(prompt, max_new_tokens=4, do_sample=False)
    if not torch.equal(ours, single.generate(prompt, max_new_tokens=4, do_sample=False)):
        wrong.append(f"generated {ours}")
    assert not wrong, wrong


@on_ranks(4)
def test_data_beside_sequences(rank: int, world_size: int) -> None:
    """2 x data, 2 x sequence: each group of two has a batch of its own, and gradients are their mean."""
    whole = build("llama")
    batches = [batch("llama", 3), batch("llama", 5)]
    losses, grads = zip(*(step(copy.deepcopy(whole), inputs) for inputs in batches))
    mean = {name: (grads[0][name] + grads[1][name]) / 2 for name in grads[0]}
    assert off(step(parallelize(whole, cp=2), batches[rank // 2]), (losses[rank // 2], mean)) == []


def _first_call(rank: int, world_size: int, name: str, labelled: bool) -> float:
    inputs = batch("nanogpt" if name in ("own_attention", "rotated") else name)
    return step(parallelize(build(name), cp=2), inputs if labelled else {"idx": inputs["idx"]})[0]


@pytest.mark.parametrize("name", ["own_attention", "rotated"])
def test_a_plain_model_that_cannot_be_cut_is_found_in_its_first_call(name: str) -> None:
    refused_on_ranks(2, _first_call, name, name == "own_attention", match="other outputs than whole sequences")


@on_ranks(2, env={"NEMO_LIKE_VERIFY": "1"})
def test_verification_compares_with_whole_sequences(rank: int, world_size: int) -> None:
    """It changes nothing of a model that is right, and finds a layer that is not."""
    whole, inputs = build("qwen3"), batch("qwen3")
    expected = step(copy.deepcopy(whole), inputs)
    assert off(step(parallelize(copy.deepcopy(whole), cp=2, loss="chunked"), inputs), expected) == []
    whole.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output + output.mean(1, keepdim=True))
    with pytest.raises(ValueError, match="other outputs"):
        step(parallelize(whole, cp=2), inputs)


@on_ranks(2)
def test_the_callers_embeddings_get_whole_gradients(rank: int, world_size: int) -> None:
    whole, grads = build("llama"), []
    for model in (copy.deepcopy(whole), parallelize(copy.deepcopy(whole), ac="none", cp=2)):
        embeds = torch.randn(2, LENGTH, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
        model(inputs_embeds=embeds, labels=batch("llama")["labels"]).loss.backward()
        assert embeds.grad is not None
        grads.append({"embeddings": embeds.grad})
    assert differences(grads[1], grads[0]) == []
