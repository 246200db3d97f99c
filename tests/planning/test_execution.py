"""Plans against execution: held bytes to the byte, gradients bitwise, op sequences, on real models and a plain block."""

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from nemo_like import Job
from nemo_like._util.live_bytes import LiveBytes
from nemo_like._util.module_tree import bare
from nemo_like.activation_checkpointing.engine import run_region
from nemo_like.activation_checkpointing.policy import DecisionTable
from nemo_like.layers import find
from nemo_like.options import TensorParallel
from nemo_like.planning import devices
from nemo_like.planning.model import capture
from nemo_like.planning.predictions.seconds import Links, shown_seconds
from nemo_like.planning.roofline import gather_seconds
from nemo_like.planning.selection import solver
from nemo_like.planning.selection.layer import BlockProblem
from nemo_like.planning.trace import block
from tests.checks import seeded
from tests.models.blocks import Layer, Stack
from tests.models.tiny import labelled, tokens
from tests.planning.brute_force import at_budget
from tests.planning.queries import call_of, computing

pytestmark = pytest.mark.compat

transformers = pytest.importorskip("transformers")

BATCH, SEQ, HIDDEN = 2, 24, 32


def _plain(block, x: torch.Tensor) -> torch.Tensor:  # (B, S, D) -> (B, S, D)
    """No library's block: fused projection, dropout, in-place activation, a branch that nobody reads in backward."""
    a, b, c = block.mix(block.norm(x)).chunk(3, -1)
    x = x + block.drop(torch.tanh(a) * torch.sigmoid(b) + c)
    h = nn.functional.relu(block.up(x), inplace=True)
    return x + block.drop(block.down(h))


def _plain_block() -> nn.Module:
    up, down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
    norm, mix = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 3 * HIDDEN)
    return Layer(_plain, norm=norm, mix=mix, up=up, down=down, drop=nn.Dropout(0.1))


def _decoder(config_class: str, **more):
    config = getattr(transformers, config_class)(
        **(dict(
            hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
            num_key_value_heads=2, vocab_size=64, max_position_embeddings=64, use_cache=False,
        ) | more)
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config), labelled(tokens(BATCH, SEQ))


MODELS = {
    "llama": lambda: _decoder("LlamaConfig", attention_dropout=0.1),
    "qwen3": lambda: _decoder("Qwen3Config", attention_dropout=0.1),
    "gemma3": lambda: _decoder(
        "Gemma3TextConfig", sliding_window=8, attention_dropout=0.1, layer_types=["sliding_attention", "full_attention"]
    ),
    "mixtral": lambda: _decoder(
        "MixtralConfig", attention_dropout=0.1, num_local_experts=4, num_experts_per_tok=2,
        experts_implementation="grouped_mm",
    ),
    "gpt2": lambda: (
        transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=HIDDEN, n_layer=2, n_head=4, vocab_size=64, n_positions=64, use_cache=False)
        ),
        labelled(tokens(BATCH, SEQ)),
    ),
    "vit": lambda: (
        transformers.ViTForImageClassification(
            transformers.ViTConfig(
                hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=16,
                patch_size=4, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
            )
        ),
        {"pixel_values": torch.randn(BATCH, 3, 16, 16), "labels": torch.tensor([0, 1])},
    ),
    "plain": lambda: (
        Stack((_plain_block() for _ in range(2)), start=nn.Linear(8, HIDDEN), head=lambda x: x.float().square().mean()),
        {"x": torch.randn(BATCH, SEQ, 8)},
    ),
}  # fmt: skip


def _real_call(model, sample, layer):
    """The arguments of one layer's call in a real forward pass, as fresh leaves."""

    def leaf(t):
        return t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t

    return tree_map(leaf, call_of(layer, lambda: model(**sample)))


def _run(module, args, kwargs, table, seed=7):
    """Forward and backward of one layer; its gradients, the bytes held in between, and nothing else."""
    inputs = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
    for tensor in [*module.parameters(), *inputs]:
        tensor.grad = None
    torch.manual_seed(seed)
    with LiveBytes() as meter:
        plain = table is None
        out = module(*args, **kwargs) if plain else run_region(module, args, kwargs, policy=table, name="layer")
    outputs = [t for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor)]
    held = meter.live - sum(meter.sizes.get(number, 0) for number in set(map(meter.number, outputs)))
    roots = [t for t in outputs if t.requires_grad]
    torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
    return [t.grad for t in [*module.parameters(), *inputs] if t.requires_grad], held


def _budgets(problem, number=10):
    """Points at `number` budgets from the least to the most bytes: linear and with skips in turn."""
    ops = problem.ops()
    points, skipping = solver.closure_every(solver.without_skips(ops)), solver.closure_every(ops)
    low, high = points[0].bytes, points[-1].bytes
    for step in range(number):
        budget = low + (high - low) * step // (number - 1)
        point = at_budget(skipping if step % 2 else points, budget)
        assert point is not None and point.bytes <= budget
        yield problem.choice(point.decisions(len(ops)))


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_held_bytes_and_gradients_at_ten_budgets(name, dtype):
    model, sample = seeded(MODELS[name])
    model = model.to(dtype).train()
    sample = {k: v.to(dtype) if v.is_floating_point() else v for k, v in sample.items()}
    traced = capture.trace_model(model, find.find_layers(model), sample)
    assert len(traced.calls) == 2
    for kind in traced.kinds:
        module = bare(kind.module)
        args, kwargs = _real_call(model, sample, module)
        inputs = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        problem = BlockProblem(kind.trace, devices.resolve_device("h100-80gb"))
        expected, held = _run(module, args, kwargs, None)
        assert held == problem.none().held_bytes - kind.trace.kept_input_bytes - kind.trace.kept_output_bytes
        for choice in _budgets(problem):
            grads, held = _run(module, args, kwargs, DecisionTable.from_json(problem.rows(choice)))
            assert held == choice.held_bytes - kind.trace.input_bytes
            assert len(grads) == len(expected) and len(inputs) > 0
            for got, wanted in zip(grads, expected):
                assert (got is None) == (wanted is None)
                assert got is None or torch.equal(got, wanted)


@pytest.mark.parametrize("name", MODELS)
def test_trace_is_the_op_sequence_of_the_real_forward(name):
    model, sample = seeded(MODELS[name])
    model.train()
    for kind in capture.trace_model(model, find.find_layers(model), sample).kinds:
        args, kwargs = _real_call(model, sample, kind.module)
        real = block.record(
            lambda: kind.module(*args, **kwargs), name="real", params=list(kind.module.parameters()),  # noqa: B023
            inputs={}, shared=[],
        )  # fmt: skip
        assert computing(kind.trace) == computing(real)
        assert kind.trace.flops == real.flops > 0


def test_asynchronous_tensor_parallelism_shows_what_is_longer_and_a_piece() -> None:
    links = Links.for_job(Job.of(world_size=4, tp=4), devices.resolve_device("h100"))
    sending = gather_seconds(1 << 30, links.tensor, links.device)
    for beside, shown in ((0.0, sending), (3 * sending, sending / 4), (sending / 2, 0.625 * sending)):
        assert shown_seconds(1 << 30, beside, links) == pytest.approx(shown)


def test_asynchronous_tensor_parallelism_needs_what_it_fuses() -> None:
    with pytest.raises(ValueError, match=r"asynchronous is True without sequence_parallel.*sequence_parallel=True"):
        TensorParallel(2, asynchronous=True)
    tp = TensorParallel(2, sequence_parallel=True, asynchronous=True)
    with pytest.raises(ValueError, match=r"compile is None.*Inductor.*compile='inductor'"):
        Job.of(world_size=2, tp=tp)
    assert Job.of(world_size=2, tp=tp, compile="inductor").tp.asynchronous
