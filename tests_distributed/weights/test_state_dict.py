"""What one mode writes, every other mode, the original model and transformers' `from_pretrained` read."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nemo_like import parallelize
from nemo_like.activation_checkpointing.legacy import CheckpointWrapper
from nemo_like.activation_checkpointing.policy import SelectivePolicy
from nemo_like.distributed.mesh import build_mesh
from nemo_like.distributed.shard import shard_layers
from nemo_like.distributed.weights.state_dict import (
    get_model_state,
    get_optimizer_state,
    set_model_state,
    set_optimizer_state,
)
from tests.checks import assert_bitwise, same, seeded, update
from tests.models.decoders import batch, build, loss_of
from tests.models.tiny import Decoder, tokens
from tests_distributed.spawn import on_ranks, run_ranks

MODES = (
    "bare", "full", "selective", "submodule", "compiled", "fsdp", "fsdp full", "fsdp submodule", "hsdp", "ddp full",
)  # fmt: skip


def _make(mode: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model: nn.Module = seeded(Decoder, tied=True, seed=seed)
    for index, layer in enumerate(model.layers):
        if "full" in mode:
            model.layers[index] = CheckpointWrapper(layer)
        elif "selective" in mode:
            model.layers[index] = CheckpointWrapper(layer, policy=SelectivePolicy())
        elif "submodule" in mode:
            layer.norm = CheckpointWrapper(layer.norm)
        elif mode == "compiled":
            model.layers[index] = torch.compile(layer, backend="eager")  # the way that pollutes names
    if "sdp" in mode:
        shard_layers(model, list(model.layers), build_mesh(dp_replicate=2 if mode == "hsdp" else 1))
    elif "ddp" in mode:
        model = DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(tokens()).backward()
    update(optimizer)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict, dict]:
    return get_model_state(model, full=True), get_optimizer_state(model, optimizer, full=True)


@pytest.mark.few(1)
@pytest.mark.parametrize("written", ["bare", "fsdp full", "hsdp", "ddp full"])
@on_ranks(2)
def test_every_mode_reads_what_each_of_these_writes(rank: int, world_size: int, written: str) -> None:
    model, optimizer = _make(written, seed=0)
    _train(model, optimizer)
    with torch.no_grad():
        model(tokens())  # leaves the root gathered: the state must be the sharded one all the same
    weights, moments = _state(model, optimizer)
    names = set(Decoder(tied=True).state_dict())
    if rank == 0:
        assert set(weights) == names
        assert set(moments["state"]) == names - {"head.weight"} or set(moments["state"]) == names - {"embed.weight"}
    received = [weights, moments]
    torch.distributed.broadcast_object_list(received)
    weights, moments = received
    for read in MODES:
        other, its_optimizer = _make(read, seed=1)
        set_model_state(other, weights)
        set_optimizer_state(other, its_optimizer, moments, full=True)
        found = _state(other, its_optimizer)
        if rank == 0:
            assert same(found[0], weights), read
            assert same(found[1]["state"], moments["state"]), read
        _train(other, its_optimizer)  # and it goes on


@pytest.mark.parametrize("written", ["full", "selective", "submodule", "compiled"])
def test_the_modes_of_one_device_write_the_same(written: str) -> None:
    (model, optimizer), (bare, its_optimizer) = _make(written, seed=0), _make("bare", seed=0)
    _train(model, optimizer)
    _train(bare, its_optimizer)
    assert same(_state(model, optimizer), _state(bare, its_optimizer))


def test_a_whole_state_is_the_bare_models() -> None:
    model, optimizer = _make("full", seed=0)
    _train(model, optimizer)
    bare = Decoder(tied=True)
    bare.load_state_dict(get_model_state(model, full=True))  # strict
    assert torch.equal(bare(tokens()), model(tokens()))


def _write(rank: int, world_size: int, path: str) -> tuple[dict, dict]:
    model, optimizer = _make("fsdp full", seed=0)
    _train(model, optimizer)
    dcp.save({"model": get_model_state(model), "optimizer": get_optimizer_state(model, optimizer)}, checkpoint_id=path)
    return _state(model, optimizer)


def _read(rank: int, world_size: int, path: str) -> tuple[dict, dict]:
    model, optimizer = _make("fsdp submodule", seed=1)
    state = {"model": get_model_state(model), "optimizer": get_optimizer_state(model, optimizer)}
    dcp.load(state, checkpoint_id=path)
    set_model_state(model, state["model"])
    set_optimizer_state(model, optimizer, state["optimizer"])
    return _state(model, optimizer)


def test_a_sharded_checkpoint_moves_to_another_number_of_ranks(tmp_path: Any) -> None:
    written = run_ranks(2, _write, str(tmp_path))[0]
    read = run_ranks(4, _read, str(tmp_path))[0]
    assert same(read[0], written[0])
    assert same(read[1]["state"], written[1]["state"])


@on_ranks(2)
def test_a_missing_name_is_an_error_on_every_rank_and_changes_nothing(rank: int, world_size: int) -> None:
    model, _ = _make("fsdp", seed=0)
    before = {name: tensor.full_tensor().clone() for name, tensor in get_model_state(model).items()}
    state = Decoder(tied=True).state_dict()
    del state["layers.2.up.bias"]
    with pytest.raises(ValueError, match=r"lacks 1 of the model's tensors: layers\.2\.up\.bias"):
        set_model_state(model, state)
    assert_bitwise(get_model_state(model), before)


@on_ranks(2)
def test_whole_state_of_another_is_refused_where_this_rank_has_shards(rank: int, world_size: int) -> None:
    original = build("llama")
    model = parallelize(build("llama"), ac="full", device="cpu")
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (original, model)]
    for each, optimizer in zip((original, model), optimizers):
        loss_of(each, batch()).backward()
        optimizer.step()
    before = model.state_dict()
    with pytest.raises(RuntimeError, match=r"whole 'model\.embed_tokens\.weight', .*set_model_state\(model, state\)"):
        model.load_state_dict(original.state_dict())
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    with pytest.raises(RuntimeError, match=r"AdamW a whole 'exp_avg' of .*set_optimizer_state\(model, optimizer, "):
        optimizers[1].step()
    assert_bitwise(model.state_dict(), before)
    model.load_state_dict(before)
    set_optimizer_state(model, optimizers[1], get_optimizer_state(original, optimizers[0], full=True), full=True)
    optimizers[1].step()


def _save(rank: int, world_size: int, folder: str, ac: str) -> None:
    model = parallelize(build("llama"), ac=ac, device="cpu")
    for arguments in ((folder,), (folder, rank == 0, None)):
        with pytest.raises(
            RuntimeError, match=r"of LlamaForCausalLM\. Gather them .*get_model_state\(model, full=True\)"
        ):
            model.save_pretrained(*arguments)
    assert not list(Path(folder).iterdir())  # nothing was written
    state = get_model_state(model, full=True)  # a collective; whole on rank 0
    if rank == 0:
        model.save_pretrained(folder, state_dict=state)


@pytest.mark.compat
@pytest.mark.parametrize("ac", ["none", "full"])
def test_the_folder_loads_as_the_bare_model(tmp_path: Path, ac: str) -> None:
    run_ranks(2, _save, str(tmp_path), ac, timeout=100)
    bare = build("llama")
    loaded = type(bare).from_pretrained(tmp_path).state_dict()
    assert loaded.keys() == bare.state_dict().keys()
    assert all(torch.equal(loaded[name], value) for name, value in bare.state_dict().items())


def _adapters(rank: int, world_size: int, folder: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    model = parallelize(peft.get_peft_model(build("llama"), config), ac="full", device="cpu")
    with pytest.raises(RuntimeError, match=r"of PeftModelForCausalLM\..*state_dict=state"):
        model.save_pretrained(folder)
    state = get_model_state(model, full=True)
    if rank == 0:
        model.save_pretrained(folder, state_dict=state)


def test_adapters_are_saved_from_whole_weights(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    run_ranks(2, _adapters, str(tmp_path), timeout=100)
    loaded = peft.PeftModel.from_pretrained(build("llama"), tmp_path)
    assert any(name.endswith("lora_B.default.weight") and p.abs().sum() > 0 for name, p in loaded.named_parameters())
