"""What one rank holds where FSDP2 is there and shards nothing, and where tensor parallelism splits an input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nemo_like import Job
from nemo_like.options import FSDP2, StepSpec
from nemo_like.planning import Planner
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.tensor_twin import check_tensor_budget, has_known_rules, tensor_twin

pytest.importorskip("transformers")


def _model(name: str = "Llama", **more: Any) -> Any:
    import transformers

    config = getattr(transformers, f"{name}Config")(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, use_cache=False, **more,
    )  # fmt: skip
    return getattr(transformers, f"{name}ForCausalLM")(config).train()


def _planner(**setup: Any) -> Planner:
    ids = torch.zeros(2, 16, dtype=torch.long)
    made = Job.of(step=StepSpec(keeps_output=False), **setup)
    return Planner(_model(), {"input_ids": ids, "labels": ids}, made.change(gpu=resolve_device("cpu")))


def test_replicas_reduce_also_where_nothing_is_sharded() -> None:
    alone, replicas = _planner(), _planner(dp_replicate=2, world_size=2)
    assert not alone.sharding.on and replicas.sharding.on
    none = [planner.peak(planner.uniform("full")).parts for planner in (alone, replicas)]
    assert "reduce buffers" not in none[0] and none[1]["reduce buffers"] > 0
    assert not _planner(
        dp_replicate=2, world_size=2, strategy="ddp"
    ).sharding.on  # nobody shards: a single device, or DDP


def test_one_rank_gathers_into_no_buffer() -> None:
    """FSDP2 copies parameter by parameter there: nothing is fetched ahead."""
    one, two = _planner(dp_replicate=2, world_size=2), _planner(world_size=2)
    assert {unit.flat for unit in one.sharding.all} == {0}
    assert all(unit.flat == unit.gathered for unit in two.sharding.all)
    sizes = {id(p): p.numel() * 4 for p in one.model.parameters()}
    layer = sum(sizes[id(p)] for p in one.model.model.layers[0].parameters())
    for fsdp in (FSDP2(), FSDP2(forward_prefetch=1)):
        planner = _planner(dp_replicate=2, world_size=2, strategy=fsdp)
        peak = planner.peak(planner.uniform("full"))
        assert "backward of layer" in peak.at and peak.parts["gathered layers"] == layer


def test_an_input_that_is_split_has_memory_of_its_own_and_a_whole_gradient() -> None:
    twin = tensor_twin(_model("Olmo3", sliding_window=8), 2)
    shape = (3, 16, 32)
    with FakeTensorMode():
        layer = torch.nn.Linear(16, 32, bias=False)
        layer.forward = twin.model.layers[0].self_attn.o_proj.forward
        twin.model.layers[0].self_attn.o_proj.weight = layer.weight
        x = torch.empty(shape, requires_grad=True)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            out = layer(x)
        kept = [t for t in saved if t is not layer.weight and t.untyped_storage().nbytes() == x.numel() * 2]
        assert len(kept) == 1, [t.shape for t in saved]
        assert torch.autograd.grad(out.sum(), x)[0].shape == shape


def test_experts_that_tensor_parallelism_splits_have_their_share_and_no_plan() -> None:
    """Each expert's weights are cut inside; no plan is made, as transformers' sums over ranks are no traced operators."""
    model = _model("GraniteMoe", num_local_experts=4, num_experts_per_tok=2)
    twin = tensor_twin(model, 2)
    shapes = {name: tuple(p.shape) for name, p in model.model.layers[0].named_parameters() if p.dim() == 3}
    local = {name: tuple(p.shape) for name, p in twin.model.layers[0].named_parameters() if p.dim() == 3}
    assert len(shapes) == 2, shapes
    for name, (count, out, width) in shapes.items():
        assert local[name] == ((count, out // 2, width) if "gate_up" in name else (count, out, width // 2))
    assert not has_known_rules(model, 2)
    with pytest.raises(ValueError, match=r"no plan is made\. Use a mode"):
        check_tensor_budget(model, Job.of(ac="50%", tp=2))
