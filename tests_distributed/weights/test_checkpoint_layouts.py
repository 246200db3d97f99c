"""What one layout writes, torch's DCP reads onto every other: weights, optimizer moments, and the next losses."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from nemo_like import materialize, parallelize
from nemo_like.distributed import get_model_state, get_optimizer_state, set_model_state, set_optimizer_state
from nemo_like.distributed.mesh import build_mesh
from nemo_like.distributed.tensor.plan import InstalledStyle, installed_styles
from nemo_like.distributed.weights.tensor_locations import in_boxes
from nemo_like.options import FSDP2, PipelineParallel, TensorParallel
from nemo_like.recipes.checkpoint import gather_state
from tests.checks import assert_bitwise, backward, labelled, on_meta, seeded, whole
from tests.models.blocks import Layer
from tests_distributed.small_model import WIDTH, SmallModel
from tests_distributed.spawn import on_ranks, run_ranks

transformers = pytest.importorskip("transformers")

TWO, FOUR = ("fsdp2", "tp", "zbv"), ("tp x fsdp2", "zbv x fsdp2")
"""Layouts of two ranks, and of four."""


def _config(name: str) -> Any:
    common = dict(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    if name == "mixtral":
        return transformers.MixtralConfig(**common, num_local_experts=4, num_experts_per_tok=2)
    if name == "qwen2_moe":
        return transformers.Qwen2MoeConfig(
            **common, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=16,
            tie_word_embeddings=True,
        )  # fmt: skip
    if name == "llama4":
        return transformers.Llama4TextConfig(
            **common, head_dim=8, intermediate_size_mlp=40, num_local_experts=4, interleave_moe_layer_step=1,
        )  # fmt: skip
    if name.startswith("phi3"):
        return transformers.Phi3Config(**common)
    return transformers.LlamaConfig(**common, tie_word_embeddings=True)


PLANS = {
    "phi3-packed": {
        "model.layers.*.mlp.gate_up_proj": "packed_colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
        "lm_head": "colwise_gather_output",
    }
}


def _batch() -> dict[str, torch.Tensor]:
    return labelled(torch.randint(1, 64, (4, 8), generator=torch.Generator().manual_seed(1)))


def _bare(name: str, seed: int) -> nn.Module:
    model = seeded(transformers.AutoModelForCausalLM.from_config, _config(name), seed=seed).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


class Run:
    """A model in a layout with its optimizer; the model of `Run.state` is what a rank holds, as one module."""

    def __init__(self, name: str, layout: str, seed: int) -> None:
        model, self.step = _bare(name, seed), None
        tensor = TensorParallel(2, plan=PLANS.get(name))
        if layout == "one":
            self.model = self.whole = parallelize(model, "single", "none")
        elif layout == "fsdp2":
            self.model = self.whole = parallelize(model, ac="none", device="cpu")
        elif layout.startswith(("zbv", "1f1b")):
            sample = {key: value[:2] for key, value in _batch().items()}
            stages = PipelineParallel(2, layout.split()[0], microbatches=2)
            self.whole = parallelize(model, ac="none", pp=stages, sample_input=sample, device="cpu")
            self.model = self.whole.module
        else:
            self.model = self.whole = parallelize(model, ac="none", tp=tensor, device="cpu")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def loss(self) -> float:
        """Train one step."""
        self.whole.zero_grad()
        staged = hasattr(self.whole, "step")
        loss = self.whole.step(**_batch()) if staged else backward(self.whole(**_batch()).loss)
        self.optimizer.step()
        return float(loss.detach())

    def known_moments(self) -> None:
        for parameter in self.model.parameters():
            self.optimizer.state[parameter] = _moments(parameter.detach())

    def state(self) -> dict[str, Any]:
        return {"model": get_model_state(self.model), "optimizer": get_optimizer_state(self.model, self.optimizer)}

    def load(self, state: dict[str, Any]) -> None:
        set_model_state(self.model, state["model"])
        set_optimizer_state(self.model, self.optimizer, state["optimizer"])


def _write(rank: int, world_size: int, name: str, folder: str, layouts: tuple[str, ...]) -> dict[str, Any]:
    found = {}
    for layout in layouts:
        run = Run(name, layout, seed=0)
        run.known_moments()
        dcp.save(run.state(), checkpoint_id=f"{folder}/{layout}")
        found[layout] = [run.loss() for _ in range(2)]
    return found


def _read(rank: int, world_size: int, name: str, folder: str, layouts: tuple[str, ...]) -> dict[str, list[float]]:
    truth = dict(_bare(name, seed=0).named_parameters())
    found = {}
    for layout in layouts:
        run = Run(name, layout, seed=1)
        for written in (*TWO, *FOUR):
            what = f"{written} read as {layout}"
            state = run.state()
            dcp.load(state, checkpoint_id=f"{folder}/{written}")
            run.load(state)
            _check_whole(run, truth, what)
            found[what] = [run.loss() for _ in range(2)]
        moments = {"state": {name: _moments(weight.detach()) for name, weight in truth.items()}}
        moments["param_groups"] = run.state()["optimizer"]["param_groups"]
        set_model_state(run.model, truth, strict=False)
        set_optimizer_state(run.model, run.optimizer, moments if rank == 0 else {}, full=True)
        _check_whole(run, truth, f"whole read as {layout}")
    return found


def _moments(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A function of the weight of the same place."""
    return {"step": torch.tensor(3.0), "exp_avg": weight * 0.5, "exp_avg_sq": weight * weight}


def _check_whole(run: Run, truth: dict[str, nn.Parameter], what: str) -> None:
    state = run.state()
    for name, own in state["model"].items():
        if name in truth:
            assert torch.equal(whole(own), truth[name]), f"{what}: {name}"
    for name, entry in state["optimizer"]["state"].items():
        for key, value in _moments(truth[name]).items():
            assert torch.equal(whole(entry[key]), value), f"{what}: {key} of {name}"


@pytest.mark.long
@pytest.mark.parametrize("name", ["mixtral", "phi3-packed", "llama-tied", "llama4", "qwen2_moe", "phi3"])
def test_every_layout_reads_what_every_layout_wrote(name: str, tmp_path: Path) -> None:
    arguments = (name, str(tmp_path))
    written = run_ranks(2, _write, *arguments, TWO)[0] | run_ranks(4, _write, *arguments, FOUR)[0]
    read = _read(0, 1, *arguments, ("one",))
    read |= run_ranks(2, _read, *arguments, TWO)[0] | run_ranks(4, _read, *arguments, FOUR)[0]
    one = Run(name, "one", seed=0)
    one.known_moments()
    losses = [one.loss() for _ in range(2)]
    for what, found in {**written, **read}.items():
        # Sums over ranks are added in another order.
        assert found == pytest.approx(losses, rel=1e-4), what


def _other_ways(rank: int, world_size: int, name: str, folder: str) -> None:
    """Copied for a save in the background; out of the model's own state dict; as one file of this rank's."""
    run = Run(name, "tp", seed=0)
    run.known_moments()
    state = run.state()
    for stager in (None, DefaultStager(StagingOptions(False, False, False, False))):
        where = f"{folder}/{'default' if stager else 'writer'}"
        dcp.async_save(state, checkpoint_id=where, async_stager=stager, process_group=dist.new_group()).result()
    dcp.save({"model": run.model.state_dict()}, checkpoint_id=f"{folder}/own")
    dcp.save(gather_state(run.model, run.optimizer)[0], checkpoint_id=f"{folder}/job")
    torch.save(state["model"], f"{folder}/rank{rank}.pt")
    truth = dict(_bare(name, seed=0).named_parameters())
    assert_bitwise(torch.load(f"{folder}/rank{rank}.pt"), truth)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.zero_()
    dcp.load({"model": run.model.state_dict()}, checkpoint_id=f"{folder}/default")  # into the model's own memory
    _check_whole(run, truth, "its own state dict")
    meta = on_meta(transformers.AutoModelForCausalLM.from_config, _config(name)).train()
    meta = parallelize(meta, ac="none", tp=2, device="cpu")
    assert_bitwise(get_model_state(materialize(meta, checkpoint=f"{folder}/default")), truth)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["mixtral", "llama4"])
def test_packed_weights_in_other_ways_into_a_checkpoint(name: str, tmp_path: Path) -> None:
    run_ranks(2, _other_ways, name, str(tmp_path))
    truth = _bare(name, seed=0).state_dict()
    moments = {key: torch.zeros_like(value) for key, value in truth.items()}
    dcp.load({"optimizer": {key: {"exp_avg": value} for key, value in moments.items()}}, checkpoint_id=tmp_path / "job")
    assert all(torch.equal(moments[key], value * 0.5) for key, value in truth.items())
    for where in ("writer", "default", "own", "job"):
        state = {"model": {name: torch.zeros_like(value) for name, value in truth.items()}}
        dcp.load(state, checkpoint_id=tmp_path / where)
        assert all(torch.equal(state["model"][key], value) for key, value in truth.items()), where
    # Each piece is written as itself, not with the memory around it.
    weights = sum(value.numel() * value.itemsize for value in truth.values())
    assert sum(file.stat().st_size for file in (tmp_path / "own").glob("*.distcp")) < 1.2 * weights + 200_000


@on_ranks(2)
def test_what_cannot_be_saved_or_loaded_is_refused(rank: int, world_size: int) -> None:
    pipeline = Run("llama-tied", "zbv", seed=0)
    with pytest.raises(ValueError, match="this module has the stages of one rank of a pipeline alone"):
        get_model_state(pipeline.model, full=True)
    with pytest.raises(ValueError, match="this module has the stages of one rank of a pipeline alone"):
        get_optimizer_state(pipeline.model, pipeline.optimizer, full=True)
    run = Run("llama-tied", "fsdp2", seed=0)
    state = get_optimizer_state(run.model, run.optimizer)
    names = state["param_groups"][0]["params"]
    state["param_groups"] = [{"lr": 1.0, "params": names[:3]}, {"lr": 2.0, "params": names[3:]}]
    with pytest.raises(ValueError, match="are in 2 groups with different options of the state to load"):
        set_optimizer_state(run.model, run.optimizer, state)
    state["param_groups"] = [{"lr": 1.0, "params": ["others"]}]
    with pytest.raises(ValueError, match="are in no group of the state to load"):
        set_optimizer_state(run.model, run.optimizer, state)
    assert run.optimizer.param_groups[0]["lr"] == 1e-2


def _groups(rank: int, world_size: int, folder: str, layout: str) -> Any:
    """A group that only the last stage has: its options are in the checkpoint all the same."""
    run = Run("llama-tied", layout, seed=0)
    chosen = [
        [p for n, p in run.model.named_parameters() if (n == "model.norm.weight") == last] for last in (False, True)
    ]
    rates = (0.1, 0.2) if layout == "one" else (0.3, 0.4)
    run.optimizer = torch.optim.AdamW([{"params": params, "lr": lr} for params, lr in zip(chosen, rates) if params])
    if layout != "one":
        dcp.save(run.state(), checkpoint_id=folder)
        return None
    state = run.state()
    dcp.load(state, checkpoint_id=folder)
    run.load(state)
    return [group["lr"] for group in run.optimizer.param_groups]


def test_the_param_groups_of_all_stages_are_saved(tmp_path: Path) -> None:
    run_ranks(2, _groups, str(tmp_path), "1f1b")
    assert _groups(0, 1, str(tmp_path), "one") == [0.3, 0.4]


def _every_style(rank: int, world_size: int) -> list[str]:
    """Weights whose boxes are not where the whole weight has them, or do not make up the whole of what the rank has."""
    wrong, mesh = [], build_mesh(tp=world_size, device_type="cpu")["tp"]
    for (name, style), shape in itertools.product(installed_styles().items(), [(8, 6), (7, 6), (4, 10, 6), (3, 14, 7)]):
        weight, module = torch.arange(math.prod(shape)).float().view(shape), nn.Module()
        module.weight = nn.Parameter(weight.clone())
        InstalledStyle(name, style, None).shard(module, "weight", mesh)
        cut = in_boxes(module.weight.detach())
        if not isinstance(cut, DTensor):
            continue
        boxes = {chunk.offsets: chunk.sizes for chunk in cut.__create_chunk_list__()}
        same = all(
            torch.equal(
                cut.__get_tensor_shard__(MetadataIndex("", offsets)),
                weight[tuple(slice(at, at + size) for at, size in zip(offsets, sizes))],
            )
            for offsets, sizes in boxes.items()
        )
        if not same or sum(math.prod(sizes) for sizes in boxes.values()) != cut.to_local().numel():
            wrong.append(f"{name} {shape}")
    return wrong


def test_every_installed_style_tells_which_rows_a_rank_has() -> None:
    assert run_ranks(2, _every_style) == [[], []]
    assert run_ranks(4, _every_style) == [[]] * 4


def _packed(inside: int, bias: bool = False) -> nn.Module:
    """A block with a gate and an up projection in one weight, (2 WIDTH, inside)."""
    return Layer(
        lambda block, x: torch.mul(*block.packed(block.first(x)).chunk(2, -1)),
        first=nn.Linear(WIDTH, inside),
        packed=nn.Linear(inside, 2 * WIDTH, bias=bias),
    )


def _refused_plans(rank: int, world_size: int) -> None:
    tensor = TensorParallel(2, plan={"layers.*.packed": "packed_colwise"})
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (lambda: _packed(8, bias=True), {}, "a bias, which would be cut at other rows than its weight"),
        (lambda: _packed(7), {}, "must shard its dim 1: 2 ranks must divide it"),
    ]
    if world_size == 8:
        resharded = {"strategy": FSDP2(reshard_after_forward=2)}
        cases = [(lambda: _packed(8), resharded, "none of them can be left out after forward")]
    for block, options, problem in cases:
        model = SmallModel(block)
        before = dict(model.named_parameters())
        with pytest.raises(ValueError, match=problem):
            parallelize(model, ac="none", tp=tensor, device="cpu", **options)
        assert all(before[name] is parameter for name, parameter in model.named_parameters())


def test_packed_matrices_that_fsdp2_could_not_shard_are_refused() -> None:
    run_ranks(4, _refused_plans)
    run_ranks(8, _refused_plans)  # its number of ranks must be one that divides the shards
