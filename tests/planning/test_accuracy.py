"""A report states the errors of jobs of its kind. Judge: the table of published steps, whose page has the same numbers."""

from typing import Any

import pytest
import torch
from torch import nn

from nemo_like import Job
from nemo_like.planning.accuracy import DENSE, LONG, accuracy_words, kind_of
from nemo_like.planning.predict import predict
from tests.models.decoders import build

SHORT, LONG_ROW = torch.zeros(1, 8, dtype=torch.long), torch.empty(1, LONG, dtype=torch.long, device="meta")


def frozen(model: nn.Module) -> nn.Module:
    next(model.parameters()).requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("name", "job", "sample", "kind"),
    [
        ("llama", {}, {"input_ids": SHORT}, DENSE),
        ("llama", {}, {"input_ids": LONG_ROW}, "long sequences"),
        ("llama", {}, LONG, "long sequences"),
        ("llama", {"pp": 2, "world_size": 2}, {"input_ids": SHORT}, "pipelines"),
        ("mixtral", {"pp": 2, "world_size": 2}, {"input_ids": LONG_ROW}, "mixtures"),
        ("plain", {}, {"x": SHORT}, DENSE),
    ],
)
def test_the_kind_of_a_job_is_the_one_that_is_predicted_worst(
    name: str, job: dict[str, Any], sample: Any, kind: str
) -> None:
    assert kind_of(build(name), Job.of(**job), sample) == kind
    assert f"speeds of {kind} within" in accuracy_words(kind)
    if kind == DENSE:
        assert kind_of(frozen(build(name)), Job.of(**job), sample) == "LoRA"


def test_a_report_ends_with_the_errors_of_its_kind() -> None:
    assert accuracy_words("mixtures") in predict("mixtral-tiny", seq_len=64).text()
