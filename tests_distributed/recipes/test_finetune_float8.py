"""Matmuls in float8, emulated on CPU: near bfloat16's losses, alike on two ranks, the same bits in every mode."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from nemo_like import parallelize
from nemo_like.distributed import get_model_state
from tests.models import decoders
from tests_distributed.recipes.finetune_job import make_model, questions, run_several, write_lines
from tests_distributed.spawn import on_ranks

pytest.importorskip("torchao.float8")
MODES = ("none", "full", "selective", "submodule", "sequential")


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of a small job."""
    folder = tmp_path_factory.mktemp("job")
    make_model(folder / "model", hidden_size=64, intermediate_size=128)
    write_lines(folder / "data.jsonl", questions(20))
    text = f"--model {folder / 'model'} --data {folder / 'data.jsonl'} --steps 4 --batch-size 4 --seq-len 32"
    return f"{text} --eval-samples 0 --warmup-steps 1 --lr 1e-2 --device cpu --sync-save --save-every 2".split()


@pytest.mark.long
def test_float8_trains_alike_in_every_mode(line: list[str], tmp_path: Path) -> None:
    words = ("fp8", "fp8-rowwise", "fp8-gather")
    cases = {"bf16": [*line, "--precision", "bf16"]}
    cases |= {f"{word} {ac}": [*line, "--precision", word, "--ac", ac] for word in words for ac in MODES}
    found = {name: run["losses"] for name, run in run_several(2, cases, tmp_path).items()}
    for word in words:
        plain = found[f"{word} none"]
        assert [ac for ac in MODES if found[f"{word} {ac}"] != plain] == []
        assert plain != found["bf16"] and plain[-1] < plain[0] - 0.5
        torch.testing.assert_close(torch.tensor(plain[:2]), torch.tensor(found["bf16"][:2]), rtol=0.01, atol=0)
        assert plain[-1] == pytest.approx(found["bf16"][-1], rel=0.05)
    assert len({tuple(found[f"{word} none"]) for word in words}) == 3


def test_weights_that_are_gathered_in_float8_are_saved_as_they_are(line: list[str], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    gather = [*line, "--precision", "fp8-gather"]
    short = run_several(2, {"on": [*gather, "--steps", "2"]}, tmp_path)["on"]
    assert short["losses"] != [] and (tmp_path / "on" / "model" / "model.safetensors").exists()
    more = {"on": [*gather, "--resume"]}
    resumed = run_several(2, more, tmp_path)["on"]
    assert resumed["first_step"] == 2
    alone = run_several(1, {"on": [*gather, "--steps", "5", "--resume", "--ac", "none"]}, tmp_path)["on"]
    assert alone["first_step"] == 4
    model = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "on" / "model"))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert len(short["losses"] + resumed["losses"]) == 4


class _Sent(torch.utils._python_dispatch.TorchDispatchMode):
    """Bytes that each collective of c10d gives to this rank or reduces."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[str, list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            tensor = args[0][0] if isinstance(args[0], list) else args[0]
            self.sizes.setdefault(func._schema.name.split("::")[1], []).append(tensor.nbytes)
        return func(*args, **(kwargs or {}))


def _scales(model: torch.nn.Module) -> list[float]:
    parts = [p._local_tensor for p in model.parameters() if isinstance(p, DTensor)]
    return [float(part._precomputed_scale) for part in parts if hasattr(part, "_precomputed_scale")]


@pytest.mark.few(1)
@pytest.mark.parametrize("modes", [("none", "selective"), ("none", "full")])
@on_ranks(2, timeout=120)
def test_what_is_gathered_in_float8(rank: int, world_size: int, modes: tuple[str, ...]) -> None:
    """Bytes of the gathers, collectives of scales, and gradients of every mode."""
    import torchao.float8
    import torchao.float8.fsdp_utils as gathering

    calls = []
    compute = torchao.float8.precompute_float8_dynamic_scale_for_fsdp
    torchao.float8.precompute_float8_dynamic_scale_for_fsdp = lambda model: calls.append("forward") or compute(model)

    def of_one_weight(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(
            "a gather, of forward or of backward, computed a scale by itself, in a collective of its own"
        )

    gathering.hp_tensor_to_float8_dynamic = of_one_weight
    found: dict[str, Any] = {}
    for word, ac in [(word, ac) for word in ("fp8", "fp8-gather") for ac in modes]:
        torch.manual_seed(0)
        model = parallelize(decoders.build("llama"), ac=ac, precision=word)
        ids = decoders.batch(2, 16, seed=rank)
        losses, grads, scales = [], [], []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            with _Sent() as sent:
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
            scales.append(_scales(model))
            grads.append({n: p.grad.to_local().clone() for n, p in model.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        state = get_model_state(model)
        assert {type(t.to_local()) for t in state.values() if isinstance(t, DTensor)} == {torch.Tensor}
        found[f"{word} {ac}"] = losses, grads, scales, sent.sizes
    assert calls == ["forward"] * 2 * len(modes), "once a step"
    sent = {word: found[f"{word} none"][3] for word in ("fp8", "fp8-gather")}
    layer = {word: Counter(sizes["_allgather_base_"]).most_common(1)[0][0] for word, sizes in sent.items()}
    assert layer["fp8-gather"] < 0.55 * layer["fp8"], "a byte a weight in place of two; norms stay bfloat16"
    for word in sent:
        losses, grads, scales, _ = found[f"{word} none"]
        for ac in modes:
            others = found[f"{word} {ac}"]
            assert others[0] == losses and others[2] == scales
            for one, two in zip(grads, others[1], strict=True):
                assert all(torch.equal(two[name], grad) for name, grad in one.items()), (word, ac)
    first, second = found["fp8-gather none"][2]
    assert len(first) == 3 * 7 and first != second, "new weights, new scales"
