"""`chunked_kl` is the KL divergence of whole logits."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nemo_like.losses import chunked_kl
from tests.losses.whole_logits import D, N, V, close, gradients, inputs


def plain(hidden, head, teacher, *, temperature=1.0, mask=None, cap=None):
    logits = head(hidden)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    log_q, log_p = ((x / temperature).log_softmax(-1) for x in (logits, teacher))
    losses = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    return losses.mean() if mask is None else losses[mask].mean()


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("with_head", [False, True])
def test_values_and_gradients(temperature, cap, with_head):
    hidden, head, labels = inputs()
    states, teacher_head, mask = torch.randn(N, 9), nn.Linear(9, V), labels >= 0
    logits = teacher_head(states).detach()
    options = dict(temperature=temperature, mask=mask)
    given = (states, dict(teacher_head=teacher_head)) if with_head else (logits, {})
    ours = chunked_kl(hidden, head, given[0], chunk_tokens=5, logit_softcap=cap, **given[1], **options)
    theirs = plain(hidden, head, logits, cap=cap, **options)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    close(gradients(ours, hidden, head), gradients(theirs, hidden, head))
    assert all(parameter.grad is None for parameter in teacher_head.parameters())


def test_a_teacher_that_excludes_tokens():
    hidden, head, _ = inputs()
    teacher = torch.randn(N, V)
    teacher[:, 7:] = float("-inf")
    ours = chunked_kl(hidden, head, teacher, chunk_tokens=5)
    assert ours.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients(ours, hidden, head))


def test_equal_distributions_are_no_distance_apart():
    hidden, head, _ = inputs()
    assert abs(chunked_kl(hidden, head, head(hidden), chunk_tokens=4)) < 1e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(teacher=torch.randn(N, V + 1)), f"teacher has {V + 1} logits"),
        (dict(teacher=torch.randn(N - 1, V)), "same tokens"),
        (dict(mask=torch.ones(N)), "mask is torch.float32"),
        (dict(temperature=0), "temperature is 0"),
        (dict(reduction="none"), "reduction is 'none'"),
    ],
)
def test_bad_input(change, message):
    hidden, head, _ = inputs()
    with pytest.raises(ValueError, match=message):
        chunked_kl(**dict(hidden=hidden, head=head, teacher=torch.randn(N, V)) | change)


def test_width_of_the_head_is_not_the_width_of_the_model():
    with pytest.raises(ValueError, match="features per token, and the head takes"):
        chunked_kl(torch.randn(N, D + 1), nn.Linear(D, V), torch.randn(N, V))
