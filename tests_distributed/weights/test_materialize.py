"""Meta-device models get their values after sharding: the right ones, and on each rank only its shard."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from nemo_like import parallelize
from nemo_like.distributed import get_model_state
from nemo_like.distributed.mesh import build_mesh
from nemo_like.distributed.shard import shard_layers
from nemo_like.distributed.weights.materialize import materialize
from nemo_like.distributed.weights.sources import CheckpointUnreadableError, open_source
from tests.checks import assert_bitwise, backward, labelled, on_meta, seeded, update, whole
from tests.models import decoders
from tests.models.tiny import Decoder, llama, tokens
from tests_distributed.spawn import on_ranks, refused_on_ranks, run_ranks


def _meta_llama(**changes: Any) -> nn.Module:
    return on_meta(llama, **changes)


def _sharded_meta_llama(**changes: Any) -> nn.Module:
    model = _meta_llama(**changes)
    shard_layers(model, model.model.layers, build_mesh())
    return model


def _loss(model: nn.Module) -> float:
    with torch.no_grad():
        return model(**labelled(tokens())).loss.item()


@pytest.mark.parametrize("tied", [False, True])
@on_ranks(2)
def test_a_meta_llama_has_bitwise_the_eager_loss(rank: int, world_size: int, tied: bool) -> None:
    eager = seeded(llama, tie_word_embeddings=tied, seed=3)
    expected = _loss(eager)
    model = _sharded_meta_llama(tie_word_embeddings=tied)
    materialize(model, state_dict=eager.state_dict())
    held = sum(p.to_local().numel() * p.element_size() for p in model.parameters())
    share = held / sum(p.numel() * p.element_size() for p in eager.parameters())
    assert _loss(model) == expected
    assert share == 0.5  # every dimension here is even
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


@on_ranks(2)
def test_training_moves_the_materialized_parameters(rank: int, world_size: int) -> None:
    model = _sharded_meta_llama(tie_word_embeddings=True)
    materialize(model, seed=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = backward(model(input_ids=tokens(), labels=tokens()).loss)
        update(optimizer)
        losses.append(loss.item())
    everyone: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(everyone, losses)
    assert everyone == [losses] * world_size  # the same batch on all
    assert losses[2] < losses[1] < losses[0]


def _drawn(rank: int, world_size: int, seed: int | None) -> dict[str, torch.Tensor]:
    model = _sharded_meta_llama()
    torch.manual_seed(40 + rank)  # ranks that disagree must not matter
    materialize(model, seed=seed)
    return {name: whole(p).detach().clone() for name, p in model.named_parameters()}


def test_drawn_weights_do_not_depend_on_the_number_of_ranks() -> None:
    single = _meta_llama()
    materialize(single, seed=7)
    for world_size in (2, 4):
        for drawn in run_ranks(world_size, _drawn, 7):
            assert_bitwise(drawn, dict(single.named_parameters()))


def test_without_a_seed_rank_zero_draws_for_all() -> None:
    assert_bitwise(*run_ranks(2, _drawn, None))


@on_ranks(2)
def test_an_init_fn_of_the_callers(rank: int, world_size: int) -> None:
    model = on_meta(Decoder)
    shard_layers(model, model.layers, build_mesh())

    def init(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            param.fill_(0.5)

    materialize(model, init)
    tensors = whole(model.head.weight).detach(), whole(model.layers[1].up.bias).detach()
    assert all(bool((tensor == 0.5).all()) for tensor in tensors)


def test_reset_parameters_is_found() -> None:
    model = on_meta(Decoder)
    materialize(model)
    assert torch.equal(model.norm.weight, torch.ones(16))
    assert model.head.weight.abs().sum() > 0


# ------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("layout", ["dcp", "dcp-bare", "safetensors", "safetensors in parts", "torch"])
@on_ranks(2)
def test_every_kind_of_checkpoint(rank: int, world_size: int, tmp_path: Path, layout: str) -> None:
    eager = seeded(llama, seed=3)
    expected = _loss(eager)
    path, target = str(tmp_path), tmp_path / "weights.pt" if layout == "torch" else tmp_path
    if layout == "dcp":
        dcp.save({"model": eager.state_dict(), "optimizer": {"step": torch.tensor(1)}}, checkpoint_id=path)
    elif layout == "dcp-bare":
        dcp.save(eager.state_dict(), checkpoint_id=path)
    elif layout == "safetensors in parts":
        sharded = _sharded_meta_llama()
        materialize(sharded, state_dict=eager.state_dict())
        dcp.save(get_model_state(sharded), storage_writer=dcp.HuggingFaceStorageWriter(path, save_distributed=True))
    elif rank == 0 and layout == "safetensors":
        eager.save_pretrained(path, max_shard_size="30KB")
    elif rank == 0:
        torch.save(eager.state_dict(), target)
    torch.distributed.barrier()
    model = _sharded_meta_llama()
    materialize(model, checkpoint=target)
    assert _loss(model) == expected


def _damaged(rank: int, world_size: int, path: str, damage: str) -> None:
    eager = llama()
    if damage == "bytes on one rank":
        state = eager.state_dict()
        file = Path(path, f"{rank}.pt")
        torch.save(state, file)
        if rank == 1:
            file.write_bytes(file.read_bytes()[:1000])
        checkpoint: Any = file
    elif damage == "dcp shard gone":
        dcp.save(eager.state_dict(), checkpoint_id=path)
        torch.distributed.barrier()
        if rank == 0:
            next(Path(path).glob("__1_*")).unlink()
        torch.distributed.barrier()
        checkpoint = path
    else:
        checkpoint = Path(path, "nothing-here")
    model = _sharded_meta_llama()
    try:
        materialize(model, checkpoint=checkpoint)
    finally:
        assert all(p.is_meta for p in model.parameters())  # untouched


@pytest.mark.parametrize("damage", ["bytes on one rank", "dcp shard gone", "absent"])
def test_a_damaged_checkpoint_is_an_error_on_every_rank(damage: str, tmp_path: Path) -> None:
    refused_on_ranks(2, _damaged, str(tmp_path), damage, error=CheckpointUnreadableError, match=str(tmp_path))


def test_only_the_files_of_an_index_are_read(tmp_path: Path) -> None:
    eager = llama()
    eager.to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    save_file({"of.another.tool": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    model = _meta_llama()
    materialize(model, checkpoint=tmp_path)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32 and torch.equal(parameter, eager.get_parameter(name).float()), name


def test_a_file_of_scalars_and_of_nothing(tmp_path: Path) -> None:
    model = on_meta(lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(0, 2)))
    state = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(0, 2)).state_dict()
    state["0.num_batches_tracked"] += 7
    save_file(state, file := tmp_path / "one.safetensors")
    materialize(model, checkpoint=file)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(CheckpointUnreadableError, match=r"one\.safetensors cannot be read"):
        open_source(file)


# -------------------------------------------------------------------------------------------------------- wrong input


def test_names_and_shapes_are_checked_before_anything_changes() -> None:
    state = llama().state_dict()
    model = _meta_llama()
    without = {name: value for name, value in state.items() if "layers.1.mlp" not in name}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"state_dict": without}, r"lacks 3 of the model's tensors: model\.layers\.1\.mlp\.down_proj\.weight"),
        ({"state_dict": state | {"extra": torch.ones(1)}}, r"1 tensor\(s\) that the model does not have: extra"),
        (
            {"state_dict": state | {"model.norm.weight": torch.ones(5)}},
            r"model\.norm\.weight with shape \(5,\); the model's has \(32,\)",
        ),
        ({"state_dict": state, "checkpoint": "x"}, "both were given"),
    ]
    for given, message in wrong:
        with pytest.raises(ValueError, match=message):
            materialize(model, **given)
    assert all(p.is_meta for p in model.parameters())
    materialize(model, state_dict=state | {"extra": torch.ones(1)}, strict=False)
    assert _loss(model) == _loss(model)
    with pytest.raises(ValueError, match="nothing to materialize"):
        materialize(model, state_dict=state)


def test_tied_parameters_that_differ_are_refused() -> None:
    state = llama(tie_word_embeddings=True).state_dict()
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    with pytest.raises(ValueError, match=r"embed_tokens\.weight and lm_head\.weight are one tied parameter"):
        materialize(_meta_llama(tie_word_embeddings=True), state_dict=state)


def test_one_name_of_a_tied_parameter_is_enough() -> None:
    eager = llama(tie_word_embeddings=True)
    state = {name: value for name, value in eager.state_dict().items() if name != "lm_head.weight"}
    model = _meta_llama(tie_word_embeddings=True)
    materialize(model, state_dict=state)
    assert _loss(model) == _loss(eager)


class _Mystery(nn.Module):
    """Has a non-persistent buffer that nobody knows how to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("scale", torch.arange(3.0), persistent=False)


class _Careless(_Mystery):
    def reset_parameters(self) -> None:
        """Forgets the buffer."""


def test_a_buffer_that_nobody_computes_is_an_error() -> None:
    mystery, careless = on_meta(_Mystery), on_meta(_Careless)
    state = nn.Linear(2, 2).state_dict(prefix="linear.")
    with pytest.raises(ValueError, match="Nothing can compute scale of 'the model', a _Mystery"):
        materialize(mystery, state_dict=state)
    with pytest.raises(ValueError, match="scale was not set"):
        materialize(careless, state_dict=state)
    assert mystery.scale.is_meta and careless.linear.weight.is_meta
    materialize(mystery, lambda module: module.scale.copy_(torch.arange(3.0)), state_dict=state)
    assert torch.equal(mystery.scale, torch.arange(3.0))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: torch.ones(2), "a tensor on the meta device"),
        (lambda: [nn.Linear(2, 2)], "a list of modules on the meta"),
    ],
)
def test_a_meta_tensor_that_is_not_registered_is_an_error(make: Callable[[], Any], said: str) -> None:
    model = on_meta(nn.Linear, 2, 2)
    model.table = on_meta(make)
    with pytest.raises(ValueError, match=rf"\.table is {said}"):
        materialize(model)


@on_ranks(2, timeout=100)
def test_a_forward_before_materialize_says_so_and_can_be_made_again(rank: int, world_size: int) -> None:
    expected = decoders.loss_of(decoders.build("llama").eval(), decoders.batch()).item()
    model = parallelize(on_meta(decoders.build, "llama"), ac="full", device="cpu").eval()
    hooks = len(model._forward_pre_hooks)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"on the meta device.*call nemo_like\.distributed\.materialize"):
            decoders.loss_of(model, decoders.batch())
    materialize(model, state_dict=decoders.build("llama").state_dict())
    losses = [decoders.loss_of(model, decoders.batch()) for _ in range(2)]
    losses[1].backward()
    assert len(model._forward_pre_hooks) == hooks - 1
    assert [loss.item() for loss in losses] == [expected, expected]
