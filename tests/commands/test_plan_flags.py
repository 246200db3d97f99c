"""Flags of ``nemo-like plan`` reach the job that is planned."""

from __future__ import annotations

import torch

from nemo_like.cli import make_parser
from nemo_like.commands.plan_command import asked_job
from nemo_like.options import Precision


def _precision(flags: str) -> Precision:
    return asked_job(make_parser("plan").parse_args(["plan", "--model", "llama-tiny", *flags.split()])).precision


def test_a_dtype_to_reduce_in_counts_also_where_parameters_have_the_dtype_to_compute_in() -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    assert _precision("--dtype bf16") == Precision()
    assert _precision("--dtype bf16 --reduce-dtype float32") == Precision(bf16, fp32)
    assert _precision("--dtype bf16 --reduce-dtype bf16") == Precision(bf16, bf16)
    assert _precision("") == Precision(bf16, fp32)
    assert _precision("--reduce-dtype bf16") == Precision(bf16, bf16)
