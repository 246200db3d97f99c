"""The loss of whole logits that the chunked one is compared with."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.checks import assert_near

D, V, N = 16, 50, 23


def inputs(dtype=torch.float32, vocabulary=V, tokens=(N,), bias=False):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(*tokens, D, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, tokens, generator=generator)
    labels.view(-1)[3::7] = -100
    torch.manual_seed(1)
    return hidden, nn.Linear(D, vocabulary, bias=bias, dtype=dtype), labels


def plain(hidden, head, labels, *, smoothing=0.0, z_loss=0.0, cap=None, scale=None, reduction="mean", num_items=None):
    logits = head(hidden).float()
    logits = logits if scale is None else logits * scale
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    logits, labels = logits.flatten(0, -2), labels.flatten()
    counts = labels != -100
    losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    losses = losses + z_loss * torch.where(counts, logits.logsumexp(-1).square(), 0)
    if reduction == "none":
        return losses
    return losses.sum() / (1 if reduction == "sum" else counts.sum() if num_items is None else num_items)


def gradients(loss, hidden, head, upstream=None):
    return [gradient.float() for gradient in torch.autograd.grad(loss, [hidden, *head.parameters()], upstream)]


def alike(ours, theirs, hidden, head, upstream=None, atol=0.0):
    """The loss in chunks and that of whole logits, with their gradients."""
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=atol)
    assert_near(gradients(ours, hidden, head, upstream), gradients(theirs, hidden, head, upstream))
