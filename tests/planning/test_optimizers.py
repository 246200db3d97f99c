"""What optimizers hold, against the tensors that they really make."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nemo_like import Job, StepSpec
from nemo_like._util.live_bytes import LiveBytes
from nemo_like.options.optimizers import TrainedParameter, optimizer_memory
from nemo_like.planning.answers.rank import peak_of
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.query import PlanQuery
from tests.planning.queries import reserved

SHAPES = [(64, 64), (512, 64), (7,), (300, 200), (16, 2, 5)]
MATRICES = [shape for shape in SHAPES if len(shape) == 2]


def _described(params, *, in_layer=True):
    return [TrainedParameter(tuple(p.shape), p.numel(), p.element_size(), in_layer) for p in params]


def _measured(make, shapes, dtype):
    """State of the optimizer that `make` makes, and the most that its second step holds beyond that; bytes of tensors."""
    params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    optimizer = make(params)
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    with LiveBytes() as meter:
        optimizer.step()
    entries = [t for entry in optimizer.state.values() for t in entry.values()]
    return params, sum(t.nbytes for t in entries if isinstance(t, torch.Tensor)), meter.peak


MAKERS = {
    "adamw-loop": lambda params: torch.optim.AdamW(params, foreach=False),
    "adamw-foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "adamw-fused": lambda params: torch.optim.AdamW(params, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, foreach=False),
    "sgd-momentum": lambda params: torch.optim.SGD(params, momentum=0.9, foreach=False),
    "muon": torch.optim.Muon,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MAKERS)
def test_states_and_temporaries_are_those_of_the_real_step(name, dtype):
    shapes = MATRICES if name == "muon" else SHAPES
    params, state, step = _measured(MAKERS[name], shapes, dtype)
    found = optimizer_memory(_described(params), name, device="cpu")
    assert (found.state, found.step) == (state, step)


def test_muon_leaves_to_adamw_what_is_no_matrix_of_a_layer():
    inside, outside = torch.zeros(32, 48), torch.zeros(100, 32)
    params = [*_described([outside], in_layer=False), *_described([inside, torch.zeros(48)])]
    found = optimizer_memory(params, "muon", device="cuda")
    assert found.states == ((12800, 12800), (6144,), (192, 192))
    # The update, two iterates and two products of the shorter side; AdamW's roots of all else come to 12,992.
    assert found.step == 6144 + 2 * 3072 + 2 * 2048


@pytest.mark.parametrize(("elements", "states"), [
    (4095, (16380, 16380)), (4096, (4096, 4096, 64, 64)), (5000, (5000, 5000, 80, 80)),
])  # fmt: skip
def test_eight_bit_states_come_in_blocks(elements, states):
    found = optimizer_memory([TrainedParameter((elements,), elements, 4)], "adamw-8bit", device="cpu")
    assert found.states == (states,) and found.step == 0


def test_eight_bit_states_are_those_of_bitsandbytes():
    optim = pytest.importorskip("bitsandbytes.optim")
    for elements in (4095, 4096, 5000):
        param = torch.nn.Parameter(torch.zeros(elements))
        param.grad = torch.zeros(elements)
        optimizer = optim.AdamW8bit([param])
        optimizer.init_state(optimizer.param_groups[0], param, 0, 0)
        made = [optimizer.state[param].get(name) for name in ("state1", "state2", "absmax1", "absmax2")]
        found = optimizer_memory(_described([param]), "adamw-8bit", device="cpu")
        assert found.state == sum(t.nbytes for t in made if t is not None)


def test_bfloat16_states_of_float32_parameters():
    assert optimizer_memory([TrainedParameter((10, 10), 100, 4)], "adamw-bf16", device="cpu").states == ((200, 200),)


def _query(job, device="h100-80gb"):
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, vocab_size=256, use_cache=False,
            )
        )  # fmt: skip
    ids = torch.zeros(1, 32, dtype=torch.long)
    return PlanQuery.of(model.train(), {"input_ids": ids, "labels": ids}, job.change(gpu=resolve_device(device)))


@pytest.mark.parametrize("ranks", [1, 4])
def test_on_cuda_torch_steps_all_parameters_at_once_sharded_ones_too(ranks):
    from torch.distributed.tensor import DTensor
    from torch.optim import optimizer

    assert DTensor in vars(optimizer).get("_foreach_supported_types", [DTensor])  # where this torch says so
    at_once, in_turn = (
        _query(Job.of(world_size=ranks), device).stages[0].optimizer.passes[0] for device in ("h100-80gb", "cpu")
    )
    assert at_once.together and not at_once.alone
    assert in_turn.alone and not in_turn.together


def test_an_average_of_the_weights_is_one_more_copy():
    setup = Job.of(world_size=4, precision="bf16")
    plain, averaged = _query(setup), _query(replace(setup, step=StepSpec(ema=True)))
    choices = plain.uniform("full")
    before, after = peak_of(plain, choices), peak_of(averaged, choices)
    assert after.parts["averaged weights"] == after.parts["parameters"] == after.total - before.total
    assert after.held == before.held
    assert reserved(averaged, choices).tensors == after.total
    with pytest.raises(TypeError, match=r"StepSpec\.ema is 'yes'"):
        StepSpec(ema="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["adamw-8bit", "adamw-bf16", "muon"])
def test_the_replay_has_the_same_step(name):
    query = _query(Job.of(step=StepSpec(optimizer=name)))
    choices = query.uniform("none")
    assert reserved(query, choices).tensors == peak_of(query, choices).total
