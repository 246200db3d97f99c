"""The chunked loss is the plain one: values, gradients, every way of using a graph, and the bytes that it holds."""

import contextlib
import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from nemo_like import parallelize
from nemo_like._util.live_bytes import LiveBytes
from nemo_like.losses import chunked_cross_entropy, chunked_log_probs
from nemo_like.options import ChunkedLoss
from nemo_like.torch_compat import cast_as_weight
from tests.checks import assert_bitwise, assert_near, seeded
from tests.losses.whole_logits import D, N, V, alike, gradients, inputs, plain
from tests.models import decoders
from tests.models.blocks import Layer, Operators


def capped(linear):
    """A head that ends in an op which keeps its own result for backward."""
    return Layer(lambda head, hidden: 5 * head.linear(hidden).tanh().exp(), linear=linear)


def low_rank(linear):
    """A frozen head with two small matrices beside it that train."""
    return Layer(
        lambda head, hidden: head.base(hidden) + head.b(head.a(hidden)),
        base=linear.requires_grad_(False),
        a=nn.Linear(D, 2, bias=False),
        b=nn.Linear(2, linear.out_features, bias=False),
    )


def quantised(linear):
    """A head whose weight is kept in 8 bits, with a scale for each row that trains."""
    scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
    return Layer(
        lambda head, hidden: F.linear(hidden, head.weight.to(hidden.dtype) * head.scale),
        weight=nn.Buffer((linear.weight.detach() / scale).round().to(torch.int8)),
        scale=nn.Parameter(scale),
    )


@settings(max_examples=60, deadline=None)
@given(
    chunk=st.integers(1, 40),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    z_loss=st.sampled_from([0.0, 1e-2]),
    cap=st.sampled_from([None, 2.0]),
    scale=st.sampled_from([None, 0.25, -1.5]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    kind=st.sampled_from(["linear", "bias", "capped"]),
)
def test_options(chunk, smoothing, z_loss, cap, scale, reduction, kind):
    hidden, head, labels = inputs(bias=kind == "bias")
    head = capped(head) if kind == "capped" else head
    ours = chunked_cross_entropy(
        hidden, head, labels, chunk_tokens=chunk, reduction=reduction, label_smoothing=smoothing, z_loss=z_loss,
        logit_softcap=cap, logit_scale=scale,
    )  # fmt: skip
    theirs = plain(hidden, head, labels, smoothing=smoothing, z_loss=z_loss, cap=cap, scale=scale, reduction=reduction)
    upstream = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(2))
    alike(ours, theirs, hidden, head, upstream, atol=1e-6 if reduction == "none" else 0)


def test_double_precision_by_differences():
    hidden, head, labels = inputs(torch.float64)

    def loss(hidden, weight):
        head = lambda states: states @ weight.t()  # noqa: E731
        return chunked_cross_entropy(
            hidden, head, labels[:5], chunk_tokens=2, reduction="sum", label_smoothing=0.1, z_loss=0.1,
            logit_softcap=3.0, logit_scale=1.3, parameters=(weight,),
        )  # fmt: skip

    assert torch.autograd.gradcheck(loss, (hidden[:5].detach().requires_grad_(), head.weight), fast_mode=True)


def test_shift_and_num_items():
    hidden, head, labels = inputs(tokens=(2, 9))
    ours = chunked_cross_entropy(hidden, head, labels, shift=True, num_items=torch.tensor(40), chunk_tokens=4)
    alike(ours, plain(hidden[:, :-1], head, labels[:, 1:], num_items=40), hidden, head)


@pytest.mark.parametrize("head_of", [low_rank, capped, quantised, lambda linear: nn.Sequential(nn.LayerNorm(D), linear)])
def test_any_module_is_a_head(head_of):
    hidden, linear, labels = inputs()
    head = head_of(linear)
    ours, theirs = chunked_cross_entropy(hidden, head, labels, chunk_tokens=5), plain(hidden, head, labels)
    params = [p for p in head.parameters() if p.requires_grad]
    assert_near(*(torch.autograd.grad(loss, [hidden, *params]) for loss in (ours, theirs)))


def test_hooks_of_a_head_see_every_chunk():
    hidden, head, labels = inputs()
    seen = []
    head.register_forward_hook(lambda module, args, output: seen.append(len(output)) or output * 2)
    ours = chunked_cross_entropy(hidden, head, labels, chunk_tokens=10)
    assert seen == [1, 10, 10, 3]  # one token first, to see how wide the head is
    alike(ours, plain(hidden, head, labels), hidden, head)


@pytest.mark.parametrize("frozen", ["head", "trunk", "both"])
def test_frozen_parts(frozen):
    hidden, head, labels = inputs()
    head.requires_grad_(frozen == "trunk")
    hidden = hidden.detach().requires_grad_(frozen == "head")
    ours, theirs = chunked_cross_entropy(hidden, head, labels, chunk_tokens=5), plain(hidden, head, labels)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    leaf = {"head": hidden, "trunk": head.weight}.get(frozen)
    assert ours.requires_grad == (leaf is not None)
    if leaf is not None:
        assert_near(torch.autograd.grad(ours, leaf), torch.autograd.grad(theirs, leaf))


def test_tied_weight_gets_both_gradients():
    embedding = nn.Embedding(V, D)
    head = nn.Linear(D, V, bias=False)
    head.weight = embedding.weight
    hidden, labels = embedding(torch.arange(V)), torch.arange(V).roll(1)
    losses = chunked_cross_entropy(hidden, head, labels, chunk_tokens=7), plain(hidden, head, labels)
    assert_near(*(torch.autograd.grad(loss, embedding.weight, retain_graph=True) for loss in losses))


def test_several_backwards_and_accumulation():
    hidden, head, labels = inputs()
    loss = chunked_cross_entropy(hidden, head, labels, chunk_tokens=5)
    once, again, scaled = (gradients_kept(loss, hidden, head, upstream) for upstream in (1.0, 1.0, -4.0))
    assert_bitwise(again, once)
    assert_bitwise(scaled, [-4 * gradient for gradient in once])
    (loss / 2).backward(retain_graph=True)
    head.weight.grad.mul_(2)  # the graph's own copy must not move with it
    loss.backward()
    torch.testing.assert_close(head.weight.grad, 2 * once[1])
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def gradients_kept(loss, hidden, head, upstream):
    found = torch.autograd.grad(loss, [hidden, head.weight], torch.tensor(upstream), retain_graph=True)
    return [gradient.clone() for gradient in found]


def test_one_of_several_terms():
    hidden, head, labels = inputs()
    losses = chunked_cross_entropy(hidden, head, labels, chunk_tokens=5), plain(hidden, head, labels)
    alike(*(3 * loss + head(hidden).square().mean() + hidden.sum() for loss in losses), hidden, head)


def test_second_derivatives_are_refused():
    hidden, head, labels = inputs()
    loss = chunked_cross_entropy(hidden, head, labels, chunk_tokens=5)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_evaluation_makes_no_gradients():
    hidden, head, labels = inputs()
    with torch.no_grad():
        loss = chunked_cross_entropy(hidden, head, labels, chunk_tokens=5)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, plain(hidden, head, labels).detach(), rtol=1e-6, atol=0)


def test_no_token_counts():
    hidden, head, labels = inputs()
    labels = torch.full_like(labels, -100)
    ours, theirs = chunked_cross_entropy(hidden, head, labels, chunk_tokens=5), F.cross_entropy(head(hidden), labels)
    assert ours.isnan() and theirs.isnan()
    assert all(not gradient.any() for gradient in gradients(ours, hidden, head) + gradients(theirs, hidden, head))


def test_a_token_that_does_not_count_may_be_infinite():
    hidden, head, labels = inputs()
    with torch.no_grad():
        hidden[3] = float("inf")  # labels[3] is ignored
    loss = chunked_cross_entropy(hidden, head, labels, chunk_tokens=5)
    assert loss.isfinite()
    (gradient,) = torch.autograd.grad(loss, hidden)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("tokens", [512, 4096])
def test_bfloat16_is_no_worse_than_whole_logits(tokens):
    hidden, head, labels = inputs(torch.bfloat16, 1000, (tokens,))
    exact_head, exact = copy.deepcopy(head).float(), hidden.detach().float().requires_grad_()
    reference = plain(exact, exact_head, labels)
    right = gradients(reference, exact, exact_head)
    whole = plain(hidden, head, labels)
    for chunk in (tokens // 8, tokens // 64):
        ours = chunked_cross_entropy(hidden, head, labels, chunk_tokens=chunk)
        assert ours.dtype == torch.float32
        assert abs(ours - reference) <= abs(whole - reference) + 1e-6 * reference
        theirs = gradients(plain(hidden, head, labels), hidden, head)
        for one, other, best in zip(gradients(ours, hidden, head), theirs, right, strict=True):
            assert (one - best).norm() <= 1.001 * (other - best).norm()


def test_autocast_computes_in_its_dtype():
    hidden, head, labels = inputs(vocabulary=300, tokens=(64,))
    found = []
    for loss in (lambda *a: chunked_cross_entropy(*a, chunk_tokens=16), plain):
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(hidden, head, labels)
        found.append((value, gradients(value, hidden, head)))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=0)
    assert_near(found[0][1], found[1][1], 1e-2)
    assert head.weight.dtype == torch.float32


def test_autocast_of_log_probs_holds_in_backward():
    hidden, head, labels = inputs(vocabulary=300, tokens=(64,))
    with torch.autocast("cpu", torch.bfloat16):
        value = chunked_log_probs(hidden, capped(head), labels, chunk_tokens=16)
        other = -plain(hidden, capped(head), labels, reduction="none")
    assert_near(gradients(value.sum(), hidden, head), gradients(other.sum(), hidden, head), 1e-2)


def test_float16_keeps_small_gradients():
    hidden, head, labels = inputs(torch.float16, 1000, (4096,))
    exact_head, exact = copy.deepcopy(head).float(), hidden.detach().float().requires_grad_()
    right = gradients(plain(exact, exact_head, labels) * 2**16, exact, exact_head)
    ours = chunked_cross_entropy(hidden, head, labels, chunk_tokens=64) * 2**16  # as a GradScaler scales
    assert_near(gradients(ours, hidden, head), right, 2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"logit_softcap": 30.0, "label_smoothing": 0.1, "z_loss": 1e-4}])
def test_held_bytes_are_one_chunk(dtype, options):
    vocabulary, tokens, chunk = 2000, 1024, 128
    hidden, head, labels = inputs(dtype, vocabulary, (tokens,))
    peak = LiveBytes()
    with peak:
        loss = chunked_cross_entropy(hidden, head, labels, chunk_tokens=chunk, **options)
    kept = tokens * D * dtype.itemsize + vocabulary * D * 4
    assert peak.take_peak() - kept <= 1.1 * chunk * vocabulary * dtype.itemsize
    with peak:
        loss.backward()
    # float32 sums become gradients of the parameters' dtype
    assert peak.take_peak() - kept <= vocabulary * D * (0 if dtype == torch.float32 else 2) + 4096


def test_log_probs_for_a_preference_loss():
    hidden, head, labels = inputs(tokens=(2, 9))
    ours = chunked_log_probs(hidden, head, labels, chunk_tokens=4, temperature=0.7)
    logits = (head(hidden) / 0.7).log_softmax(-1)
    theirs = torch.where(labels == -100, 0, logits.gather(-1, labels.clamp_min(0)[..., None])[..., 0])
    torch.testing.assert_close(ours, theirs)
    found = [-F.logsigmoid(values[0].sum() - values[1].sum()) for values in (ours, theirs)]
    assert_near(gradients(found[0], hidden, head), gradients(found[1], hidden, head))


def test_dropout_in_a_head_draws_the_same_twice():
    hidden, linear, labels = inputs()
    head = nn.Sequential(nn.Dropout(0.5), linear)
    ours = seeded(chunked_log_probs, hidden, head, labels, chunk_tokens=N, seed=5)
    torch.rand(7)
    found = gradients(ours.sum(), hidden, head)
    torch.manual_seed(5)
    theirs = -plain(hidden, head, labels, reduction="none")
    assert_near([ours, *found], [theirs, *gradients(theirs.sum(), hidden, head)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(labels=torch.zeros(4, dtype=torch.long)), "labels has shape"),
        (dict(labels=torch.full((N,), V)), f"labels has {V}"),
        (dict(labels=torch.full((N,), -1)), "labels has -1"),
        (dict(labels=torch.zeros(N)), "whole numbers"),
        (dict(chunk_tokens=0), "chunk_tokens is 0"),
        (dict(reduction="avg"), "reduction is 'avg'"),
        (dict(reduction="sum", num_items=3), "num_items"),
        (dict(label_smoothing=2.0), "label_smoothing is 2.0"),
        (dict(z_loss=-1.0), "z_loss is -1.0"),
        (dict(logit_softcap=0.0), "logit_softcap is 0.0"),
        (dict(head=lambda hidden: hidden.sum()), r"The head made \(\)"),
        (dict(head=nn.Linear(D + 1, V)), f"hidden has {D} features per token, and the head takes {D + 1}"),
        (dict(head=nn.Linear(D, V).bfloat16()), r"hidden is torch.float32 and the head's weight torch.bfloat16"),
        (dict(head=torch.randn(V, D)), r"head is a Tensor.*parameters=\(weight,\)"),
        (dict(hidden=torch.zeros(N, dtype=torch.long)), "floating-point"),
        (dict(chunk_tokens=3, options=ChunkedLoss()), "both given"),
    ],
)
def test_bad_input(change, message):
    hidden, head, labels = inputs()
    arguments = dict(hidden=hidden, head=head, labels=labels) | change
    with pytest.raises((ValueError, TypeError), match=message):
        chunked_cross_entropy(**arguments)


def test_sums_in_the_dtype_of_the_head():
    hidden, head, labels = inputs(torch.bfloat16, 300, (64,))
    options = ChunkedLoss(chunk_tokens=8, grads_in_float32=False)
    peak = LiveBytes()
    with peak:
        chunked_cross_entropy(hidden, head, labels, options=options).backward()
    assert peak.live <= 300 * D * 2 + 64 * D * 2 + 64
    assert_near([head.weight.grad.float()], gradients(plain(hidden, head, labels), hidden, head)[1:], 3e-2)


def test_a_head_that_casts_float32_to_its_weight_has_the_gradients_of_the_cast():
    """As one outside of the layers does under FSDP2."""
    hidden, head, labels = inputs(torch.bfloat16)
    expected = gradients(chunked_cross_entropy(hidden, head, labels, chunk_tokens=8), hidden, head)
    wide = hidden.detach().float().requires_grad_()
    head.register_forward_pre_hook(cast_as_weight)
    found = gradients(chunked_cross_entropy(wide, head, labels, chunk_tokens=8), wide, head)
    assert_bitwise(found[1:], expected[1:])
    assert_near(
        found[:1], expected[:1], 2**-8
    )  # of float32, the target's own part is added without rounding the sum to bfloat16


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def _graphs() -> int:
    return counters["stats"]["unique_graphs"]


def _found(loss: Any, tokens: int, backend: str | None, **options: Any) -> list[torch.Tensor]:
    head, hidden = seeded(nn.Linear, 8, 50), torch.randn(tokens, 8, requires_grad=True)
    labels = torch.randint(50, (tokens,))
    labels[3] = -100
    value = loss(hidden, head, labels, options=ChunkedLoss(chunk_tokens=9, compile=backend), **options)
    return [value, *gradients(value.sum(), hidden, head)]


@pytest.mark.parametrize(
    ("loss", "options", "graphs"),
    [
        (chunked_cross_entropy, {}, 1),
        (chunked_cross_entropy, dict(label_smoothing=0.1, z_loss=0.1, logit_softcap=3.0, logit_scale=0.5), 1),
        (chunked_log_probs, {}, 2),  # losses alone in forward, with their gradient in backward
    ],
)
def test_every_chunk_runs_one_graph(loss: Any, options: dict[str, Any], graphs: int) -> None:
    for tokens in (40, 47, 90):  # the last chunk has 4, 2 and 9 tokens
        ours, eager = (_found(loss, tokens, backend, **options) for backend in ("aot_eager", None))
        torch.testing.assert_close(ours, eager, rtol=1e-6, atol=1e-7)
        assert _graphs() == graphs


def test_inductor() -> None:
    ours, eager = (_found(chunked_cross_entropy, 40, backend) for backend in ("inductor", None))
    torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-7)
    assert _graphs() == 1


def test_layers_that_are_compiled_have_compiled_chunks() -> None:
    ids, counts = decoders.batch(2, 16), []
    for loss in ("model", ChunkedLoss(chunk_tokens=5)):
        torch._dynamo.reset()
        counters.clear()
        model = parallelize(decoders.build("qwen3"), "single", "none", loss=loss, compile="aot_eager", device="cpu")
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
        counts.append(_graphs())
    assert counts[1] == counts[0] + 1


def test_a_compiled_model_does_not_unroll_the_chunks() -> None:
    model = Layer(
        lambda own, ids: chunked_cross_entropy(own.embed(ids).tanh(), own.head, ids, shift=True, chunk_tokens=9),
        embed=seeded(nn.Embedding, 50, 8),
        head=nn.Linear(8, 50),
    )
    ids = torch.randint(50, (2, 30))
    model(ids).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    torch.compile(model, backend="aot_eager")(ids).backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), expected))
    assert _graphs() <= 2  # before the loss, and after it


def test_an_accelerator_runs_few_operators_for_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head of an 8B Llama in bfloat16, chunks of 1,024 tokens, on the meta device, which no autocast knows."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    head = nn.Linear(4096, 128_256, bias=False, dtype=torch.bfloat16, device="meta")
    counts = []
    for chunks in (2, 4):
        hidden = torch.empty(chunks * 1024, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)
        labels = torch.empty(chunks * 1024, dtype=torch.long, device="meta")
        with Operators() as operators:
            chunked_cross_entropy(hidden, head, labels, chunk_tokens=1024).backward()
        counts.append(len(operators.kernels))
    assert (counts[1] - counts[0]) / 2 <= 60
