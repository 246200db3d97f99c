"""What is promised of SelectiveCheckpointer and ActivationCheckpointTransform, with counted bytes."""

import copy
import json
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from nemo_like._util.live_bytes import LiveBytes
from nemo_like.activation_checkpointing import is_checkpointed
from nemo_like.activation_checkpointing.kv_sharing import disable_cache
from nemo_like.legacy import ActivationCheckpointTransform, SelectiveCheckpointer
from nemo_like.models import resolve_model
from nemo_like.options import CheckpointConfig
from nemo_like.parallelizer import apply_activation_checkpointing
from nemo_like.profiling import MemoryProfiler
from tests.checks import assert_bitwise, same, seeded
from tests.models.blocks import Layer, Stack


class Mlp(nn.Module):
    def __init__(self, dim: int, wide: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, wide), nn.Linear(wide, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, dim: int, wide: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(dim), Mlp(dim, wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def stack(*wide: int, dim: int = 16) -> Stack:
    torch.manual_seed(0)
    return Stack([Block(dim, w) for w in wide], head=nn.Linear(dim, 4))


def config(**fields) -> CheckpointConfig:
    return CheckpointConfig(**{"enabled": True, "strategy": "full", "profile_before_apply": False} | fields)


def chosen(fields: CheckpointConfig, model: nn.Module, *given: Any, **options: Any) -> list[str]:
    """Checkpoint `model`; return the names of the layers that are."""
    checkpointer = SelectiveCheckpointer(fields)
    assert checkpointer.apply(model, *given, **options) is model
    return checkpointer.get_checkpointed_layers()


def train_step(model: nn.Module, sample: dict | torch.Tensor) -> tuple[int, dict[str, torch.Tensor]]:
    """The peak of live activation bytes in a step, and the gradients."""
    tensors = list(sample.values()) if isinstance(sample, dict) else [sample]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    state = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    with LiveBytes([*state, *tensors]) as meter:
        loss = model(**sample).loss if isinstance(sample, dict) else model(sample).sum()
        loss.backward()
        del loss
        peak = meter.take_peak()
    return peak, {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", ["full", "selective", "sequential"])
def test_peak_is_at_least_30_percent_lower_and_gradients_are_equal(strategy, dtype):
    source = resolve_model("llama-tiny")
    plain = seeded(source.build, dtype=dtype)
    plain.config.use_cache = False
    checkpointed = copy.deepcopy(plain)
    assert chosen(config(strategy=strategy), checkpointed) == [f"model.layers.{index}" for index in range(4)]
    sample = source.sample_input(2, 64)
    (peak, wanted), (lower, got) = train_step(plain, sample), train_step(checkpointed, sample)
    assert_bitwise(got, wanted)
    assert lower <= 0.7 * peak, (lower, peak)


def test_submodules_too_have_equal_gradients():
    plain = stack(32, 64)
    checkpointed = copy.deepcopy(plain)
    SelectiveCheckpointer(config(strategy="submodule")).apply(checkpointed)
    x = torch.randn(8, 16)
    (peak, wanted), (lower, got) = train_step(plain, x), train_step(checkpointed, x)
    assert lower < peak and same(got, wanted)


@pytest.mark.parametrize("share", [0.9, 0.6, 0.0])
def test_recommended_layers_applied_meet_the_budget_as_predicted(share):
    plain = stack(256, 64, 512, 128, 384, dim=16)
    x = torch.randn(64, 16)
    profiler = MemoryProfiler(plain, "cpu")
    report = profiler.profile(x, num_runs=1)
    lowest = report.predict_peak_bytes(report.call_names)
    budget = (lowest + share * (report.peak_bytes - lowest)) / 1e6
    names = profiler.recommend_layers(budget)
    assert names
    checkpointed = copy.deepcopy(plain)
    SelectiveCheckpointer(config(include_patterns=names, exclude_patterns=["layers.*"])).apply(checkpointed)
    measured, _ = train_step(checkpointed, x)
    predicted = report.predict_peak_bytes(names)
    assert abs(measured - predicted) <= 0.02 * measured
    assert predicted <= budget * 1e6


@pytest.mark.parametrize("preset", ["llama-tiny", "mixtral"])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_predictions_hold_for_transformers(preset, share, tmp_path):
    if preset == "mixtral":
        fields = {"model_type": "mixtral", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
        fields |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "num_local_experts": 4}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        preset = str(tmp_path)
    source = resolve_model(preset)
    model = seeded(source.build)
    disable_cache(model)
    sample = source.sample_input(2, 64)
    profiler = MemoryProfiler(model, "cpu")
    report = profiler.profile(sample, num_runs=2)
    lowest = report.predict_peak_bytes(report.call_names)
    names = profiler.recommend_layers((lowest + share * (report.peak_bytes - lowest)) / 1e6 + 1e-6)
    SelectiveCheckpointer(config(include_patterns=names, exclude_patterns=["model.layers.*"])).apply(model)
    measured, _ = train_step(model, sample)
    assert abs(measured - report.predict_peak_bytes(names)) <= 0.02 * measured


def test_the_profile_chooses_layers_above_the_threshold():
    plain = stack(32, 512, 32, 256)
    x = torch.randn(64, 16)
    profiler = MemoryProfiler(plain, "cpu")
    report = profiler.profile(x, num_runs=1)
    threshold = (report["layers.3"].activation_bytes + report["layers.0"].activation_bytes) / 2e6
    wanted = ["layers.1", "layers.3"]
    profiled = config(profile_before_apply=True, memory_threshold_mb=threshold)
    assert chosen(profiled, copy.deepcopy(plain), report) == wanted
    assert chosen(profiled, copy.deepcopy(plain), sample_input=x) == wanted
    checkpointer = SelectiveCheckpointer(profiled, profiler)
    model = checkpointer.apply(plain)
    assert checkpointer.get_checkpointed_layers() == wanted
    assert [is_checkpointed(layer) for layer in model.layers] == [False, True, False, True]
    # Patterns come before the measurement, include before exclude.
    patterns = {"include_patterns": ["layers.0"], "exclude_patterns": ["layers.[01]"]}
    fields = config(profile_before_apply=True, memory_threshold_mb=threshold, **patterns)
    assert chosen(fields, stack(32, 512, 32, 256), report) == ["layers.0", "layers.3"]


def test_without_a_profile_all_layers_are_taken_and_that_is_said_once(logs):
    for _ in range(2):
        assert chosen(config(profile_before_apply=True), stack(32, 32)) == ["layers.0", "layers.1"]
    assert sum("profile_before_apply" in record.message for record in logs.records) == 1


def test_a_threshold_above_everything_leaves_the_model_alone(logs):
    plain = stack(32, 64)
    logs.set_level("INFO", "nemo_like")
    assert chosen(config(profile_before_apply=True, memory_threshold_mb=50.0), plain, sample_input=torch.randn(4, 16)) == []
    assert not any(is_checkpointed(module) for module in plain.modules())
    assert "memory_threshold_mb=50 MB" in logs.text


def test_segments_are_balanced_by_measured_bytes():
    plain = stack(32, 32, 32, 512)
    x = torch.randn(64, 16)
    by_count, by_bytes = copy.deepcopy(plain), copy.deepcopy(plain)
    fields = {"strategy": "sequential", "sequential_segments": 2}
    SelectiveCheckpointer(config(**fields)).apply(by_count)
    SelectiveCheckpointer(config(**fields, profile_before_apply=True, memory_threshold_mb=0)).apply(
        by_bytes, sample_input=x
    )
    segments = [[id(getattr(layer.forward, "_segment", layer)) for layer in model.layers] for model in (by_count, by_bytes)]
    assert [ids.count(ids[0]) for ids in segments] == [2, 3]
    (_, wanted), (more, got), (less, other) = (train_step(model, x) for model in (plain, by_count, by_bytes))
    assert less < more
    assert_bitwise([got, other], [wanted, wanted])


def test_disabled_changes_nothing(logs):
    model = stack(32, 32)
    apply_activation_checkpointing(model, CheckpointConfig())
    assert not logs.messages
    for _ in range(2):  # a strategy without `enabled` is no doubt forgotten: said once
        apply_activation_checkpointing(model, CheckpointConfig(strategy="full"))
    assert len(logs.messages) == 1 and "Set enabled=True" in logs.messages[0]
    for off in (CheckpointConfig(), config(enabled=False, strategy="full")):
        assert chosen(off, model) == []
        assert ActivationCheckpointTransform(off).apply(model) is model
    assert all(type(layer) is Block for layer in model.layers)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"exclude_patterns": ["blocks.*"]}, "exclude_patterns holds 'blocks"),
        ({"include_patterns": ["layers.9"]}, r"include_patterns holds 'layers\.9'.*Did you mean 'layers\.\d'"),
        ({"include_patterns": ["head"]}, "include_patterns holds 'head'"),
        ({"layer_classes": ["Blok"]}, "layer_classes is.*Block"),
    ],
)
def test_what_matches_nothing_is_an_error_and_changes_nothing(fields, says):
    model = stack(32, 32)
    with pytest.raises(ValueError, match=says):
        SelectiveCheckpointer(config(**fields)).apply(model)
    with pytest.raises(ValueError, match=says):
        apply_activation_checkpointing(model, config(**fields))
    assert all(type(layer) is Block for layer in model.layers)


@pytest.mark.parametrize(("pattern", "left"), [("layers", []), ("*", []), ("layers.0", [1]), ("layers.0.*", [0, 1])])
def test_excluding_a_module_excludes_the_layers_in_it(pattern, left):
    model = stack(32, 32)
    apply_activation_checkpointing(model, config(strategy="full", exclude_patterns=[pattern]))
    assert [number for number, layer in enumerate(model.layers) if is_checkpointed(layer)] == left


def test_a_config_is_an_ac_argument():
    model = stack(32, 32, 32)
    apply_activation_checkpointing(model, config(strategy="selective", exclude_patterns=["layers.1"]))
    assert [is_checkpointed(layer) for layer in model.layers] == [True, False, True]
    model = stack(32, 32)
    apply_activation_checkpointing(model, config(layer_classes=["Mlp"]))
    assert [type(layer) for layer in model.layers] == [Block, Block]
    assert all(is_checkpointed(layer.mlp) for layer in model.layers)
    with pytest.raises(ValueError, match="checkpointed already"):
        SelectiveCheckpointer(config()).apply(model)


@pytest.mark.parametrize("name", ["aten.addmm", "torch.ops.aten.addmm.default"])
def test_ops_to_save_are_kept_and_only_they(name):
    plain, kept, nothing = (stack(32, 32) for _ in range(3))
    apply_activation_checkpointing(kept, config(strategy="selective", ops_to_save=[name]))
    apply_activation_checkpointing(nothing, config(strategy="selective", ops_to_save=["aten.bmm"]))
    held = {}
    for model in (kept, nothing):
        x = torch.randn(8, 16)
        with LiveBytes() as meter:
            loss = model(x).sum()
            held[model] = meter.live
        loss.backward()
    # Of each layer, the first matmul's output, (8, 32); the second one's is reached by no replay.
    assert held[kept] - held[nothing] == 2 * 8 * 32 * 4
    (_, wanted), (_, got) = train_step(plain, torch.ones(8, 16)), train_step(kept, torch.ones(8, 16))
    assert_bitwise(got, wanted)


def test_the_transform_takes_the_outermost_of_nested_classes():
    plain = stack(32, 32)
    model = copy.deepcopy(plain)
    ActivationCheckpointTransform(config(layer_classes=["Mlp", "Block"])).apply(model)
    assert all(is_checkpointed(layer) for layer in model.layers)
    assert not any(is_checkpointed(layer.mlp) for layer in model.layers)
    assert model.state_dict().keys() == plain.state_dict().keys()
    (_, wanted), (_, got) = train_step(plain, torch.ones(4, 16)), train_step(model, torch.ones(4, 16))
    assert_bitwise(got, wanted)
    found_by_structure = ActivationCheckpointTransform({"enabled": True, "strategy": "full"}).apply(stack(32, 32))
    assert all(is_checkpointed(layer) for layer in found_by_structure.layers)


def test_the_transform_warns_with_the_classes_there_are(logs):
    model = stack(32, 32)
    ActivationCheckpointTransform(config(layer_classes=["LlamaDecoderLayer"])).apply(model)
    assert all(type(layer) is Block for layer in model.layers)
    assert "LlamaDecoderLayer" in logs.text and "Block" in logs.text and "Mlp" in logs.text


def test_wrapped_modules_behave_as_the_bare_ones():
    model = ActivationCheckpointTransform(config(layer_classes=["Linear"])).apply(stack(32))
    assert is_checkpointed(model.head) and model.head.out_features == 4
    assert model.head.weight is dict(model.named_parameters())["head.weight"]
    assert set(model.state_dict()) == set(stack(32).state_dict())
    model.load_state_dict(stack(32).state_dict())


def own_loop() -> nn.Module:
    def forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
        state = None
        for member in x.unbind(0):
            state = layer.cell(member, state)
        return state

    return Layer(forward, cell=nn.GRUCell(3, 6))


def test_snn_fields_checkpoint_timesteps():
    plain = nn.Sequential(OrderedDict(own=seeded(own_loop)))
    checkpointed = copy.deepcopy(plain)
    assert chosen(config(snn_timestep_checkpoint=True, snn_chunk_size=10), checkpointed) == ["own.cell"]
    x = torch.randn(100, 4, 3)
    (peak, wanted), (lower, got) = train_step(plain, x), train_step(checkpointed, x)
    assert lower < 0.4 * peak
    assert_bitwise(got, wanted)
    through_the_door = nn.Sequential(stack(32, 32), nn.Linear(4, 3), own_loop())  # the door needs repeated layers
    apply_activation_checkpointing(through_the_door, config(snn_timestep_checkpoint=True, snn_chunk_size=10))
    assert is_checkpointed(through_the_door[2].cell)
    assert type(through_the_door[0].layers[0]) is Block
    assert chosen(config(snn_timestep_checkpoint=True, layer_classes=["GRUCell"]), own_loop()) == ["cell"]
    with pytest.raises(ValueError, match="layer_classes"):
        SelectiveCheckpointer(config(snn_timestep_checkpoint=True)).apply(stack(32, 32))


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: SelectiveCheckpointer(config(), profiler="yes"), TypeError, "MemoryProfiler"),
        (lambda: SelectiveCheckpointer({"strateggy": "full"}), ValueError, "Did you mean 'strategy'"),
        (lambda: ActivationCheckpointTransform(3), TypeError, "mapping"),
    ],
)
def test_wrong_arguments(make, error, match):
    with pytest.raises(error, match=match):
        make()
