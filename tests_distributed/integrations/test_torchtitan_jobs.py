"""A debug model of torchtitan's, parallelized by its own function on two ranks, with our policies in its config.

Its attention is replaced by torchtitan's own module around `scaled_dot_product_attention`: of those that its language
models offer, none has a backward on the CPU. torchtitan wants other versions than we do, so that `.ci/hosts` runs this.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from nemo_like.activation_checkpointing import is_checkpointed
from tests.checks import backward, on_meta, update
from tests_distributed.spawn import on_ranks

pytest.importorskip("torchtitan", reason="torchtitan is in an environment of its own: bash .ci/hosts")

MODES = ("full", "selective", "submodule", "sequential")


def _trained(ac: Any, compiled: bool) -> tuple[list[float], list[torch.Tensor], int]:
    """Losses and weights of three steps of AdamW with torchtitan's clipping, and the number of regions."""
    import torchtitan.distributed.parallel_dims as parallel_dims
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed.utils import clip_grad_norm_
    from torchtitan.models.common import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry


    parallel_dims.device_type = "cpu"  # it knows accelerators alone
    spec = model_registry("debugmodel")
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = on_meta(spec.model.build)
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    dims = parallel_dims.ParallelDims.from_config(parallelism, world_size=2)
    model = spec.parallelize_fn(
        model, parallel_dims=dims, training=TrainingConfig(mixed_precision_param="bfloat16", seq_len=32),
        parallelism=parallelism, compile_config=CompileConfig(enable=compiled, backend="aot_eager"), ac_config=ac,
        dump_folder="",
    )  # fmt: skip
    for module in model.modules():  # torchtitan sets factors of its own, which gloo cannot multiply by as it reduces
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    losses = []
    for step in range(3):
        ids = torch.randint(2048, (2, 32), generator=torch.Generator().manual_seed(2 * step + torch.distributed.get_rank()))
        loss = backward(torch.nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten()))
        losses += [loss.item(), clip_grad_norm_(list(model.parameters()), 1.0).item()]
        update(optimizer)
    regions = sum(is_checkpointed(module) for module in model.modules())
    return losses, [p.to_local().detach().clone() for p in model.parameters()], regions


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@on_ranks(2, timeout=280)
def test_its_debug_model_trains_to_the_same_weights(rank: int, world_size: int, compiled: bool) -> None:
    from torch._dynamo.utils import counters

    from nemo_like.integrations.torchtitan import activation_checkpoint

    losses, weights, _ = _trained(None, compiled)
    assert losses[-2] < losses[0]
    ids = {"tokens": torch.zeros(2, 32, dtype=torch.long)}
    modes = ("full", "selective") if compiled else (*MODES, "50%")
    for ac in [activation_checkpoint(mode, sample_input=ids) for mode in modes]:
        torch._dynamo.reset()
        counters.clear()
        found, actual, regions = _trained(ac, compiled)
        assert found == losses, ac
        assert all(torch.equal(a, b) for a, b in zip(actual, weights, strict=True)), ac
        assert regions > 0, ac
        assert not compiled or counters["stats"]["unique_graphs"] == 1, (ac, counters["stats"])
    bad = activation_checkpoint("full")
    bad.preserve_rng_state = False
    with pytest.raises(ValueError, match="preserve_rng_state=False"):
        _trained(bad, compiled)


def test_its_command_line_takes_a_config_with_our_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    import torchtitan.models.llama3.config_registry as registry
    from torchtitan.config.manager import ConfigManager

    from nemo_like.integrations.torchtitan import activation_checkpoint

    def ours() -> Any:
        config = registry.llama3_debugmodel()
        config.activation_checkpoint = activation_checkpoint("full")
        return config

    monkeypatch.setattr(registry, "ours", ours, raising=False)
    config = ConfigManager().parse_args(["--module", "llama3", "--config", "ours", "--training.steps", "3"])
    assert config.training.steps == 3
    assert config.activation_checkpoint.ac == "full"
    assert config.to_dict()["activation_checkpoint"]["ac"] == "full"
