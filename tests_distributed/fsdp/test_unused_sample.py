"""A tower that trains, and a rank without an image: with an unused sample nobody waits, and the gradients are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nemo_like import DDP, parallelize
from nemo_like.distributed import with_unused_sample
from tests.checks import gradients_of, step
from tests.models.families import FAMILIES
from tests_distributed.spawn import on_ranks

TEXT = 12  # tokens of text behind each image in `families.with_image`
UNUSED = DDP(find_unused_parameters=True)  # CLIP's last norm, in LLaVA


def _batches(name: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What the two ranks train on (two rows with images; two rows of text), and a blank sample."""
    with_images = dict(FAMILIES[name].inputs())
    ids = with_images["input_ids"]
    text = ids[:, -TEXT:].flip(0)
    blank: dict[str, Any] = {"input_ids": ids[:1, :-TEXT]}
    for key, value in with_images.items():
        if key not in ("input_ids", "labels"):
            half = value[: len(value) // 2]
            blank[key] = torch.zeros_like(half) if half.is_floating_point() else half
    if "mm_token_type_ids" in blank:
        blank["mm_token_type_ids"] = blank["mm_token_type_ids"][:, :-TEXT]
    return with_images, {"input_ids": text, "labels": text.clone()}, blank


@pytest.mark.few(2)
@pytest.mark.parametrize(("ac", "strategy"), [("none", "fsdp2"), ("full", "fsdp2"), ("selective", UNUSED)])
@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "smolvlm"])
@on_ranks(2, timeout=150)
def test_gradients_are_those_of_the_union_on_one_rank(
    rank: int, world_size: int, name: str, ac: str, strategy: str | DDP
) -> None:
    with_images, text, blank = _batches(name)
    reference = FAMILIES[name].build().eval()
    losses = [reference(**with_images).loss, reference(**text).loss]
    (sum(losses) / 2).backward()  # type: ignore[union-attr]
    trained = gradients_of(reference)
    assert any("vision" in n or "visual" in n for n in trained)
    model = parallelize(FAMILIES[name].build().eval(), strategy, ac)
    found = step(model, **(with_images if rank == 0 else with_unused_sample(text, blank)))
    assert found["loss"].item() == pytest.approx(losses[rank].item(), rel=1e-6)
    for parameter, grad in trained.items():
        mine = found[f"module.{parameter}" if isinstance(strategy, DDP) else parameter]
        # One rank adds two losses before it divides, two ranks divide each: the last bits may differ.
        torch.testing.assert_close(mine, grad, rtol=1e-4, atol=1e-6)


def test_what_is_appended_where() -> None:
    batch = {
        "input_ids": torch.tensor([[5, 6, 7], [8, 0, 0]]),
        "labels": torch.tensor([[5, 6, 7], [8, -100, -100]]),
        "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]]),
        "position_ids": torch.tensor([[0, 1, 0], [0, 0, 0]]),
        "token_type_ids": torch.zeros(2, 3, dtype=torch.long),
    }
    sample = {
        "input_ids": torch.tensor([[9, 9]]),
        "token_type_ids": torch.tensor([[1, 1]]),
        "pixel_values": torch.ones(1, 3, 2, 2),
    }
    more = with_unused_sample(batch, sample, pad_token_id=3)
    assert more["input_ids"].tolist() == [[5, 6, 7, 9, 9], [8, 0, 0, 3, 3]]
    assert more["labels"].tolist() == [[5, 6, 7, -100, -100], [8, -100, -100, -100, -100]]
    assert more["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]
    assert more["position_ids"].tolist() == [[0, 1, 0, 0, 1], [0, 0, 0, 0, 0]]
    assert more["token_type_ids"].tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]
    assert more["pixel_values"] is sample["pixel_values"] and batch["input_ids"].shape == (2, 3)


def test_what_cannot_be_appended_is_named() -> None:
    ids, sample = (
        torch.ones(2, 3, dtype=torch.long),
        {"input_ids": torch.ones(1, 2), "pixel_values": torch.ones(1, 3, 2, 2)},
    )
    for batch, match in (
        ({"labels": ids}, r"input_ids are None in the batch and \(1, 2\)"),
        ({"input_ids": ids, "pixel_values": torch.ones(2, 3, 2, 2)}, "has pixel_values itself"),
        ({"input_ids": ids, "token_type_ids": ids}, "token_type_ids.*nothing to append"),
    ):
        with pytest.raises(ValueError, match=match):
            with_unused_sample(batch, sample)
