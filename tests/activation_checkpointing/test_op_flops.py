"""FLOP rules: each attention kernel against the formula by hand, and every rule against PyTorch's where that has one."""

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from nemo_like._util.op_lookup import find_op
from nemo_like.activation_checkpointing import ops as table

aten = torch.ops.aten
B, H, KV, S, T, D, V = 2, 6, 3, 5, 7, 8, 4
DENSE = 2 * B * H * S * T * (D + V)
PACKED_Q, PACKED_K = (2, 5, 1), (3, 4, 6)  # lengths of three sequences
PACKED = 2 * H * sum(q * k for q, k in zip(PACKED_Q, PACKED_K)) * (D + V)

# Of packages that are not installed here; their schemas as they register them, shortened behind the last argument read.
FOREIGN = {
    "flash_attn": (
        "_flash_attn_forward(Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, bool causal) -> Tensor",
        "_flash_attn_varlen_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
        "int max_seqlen_q, int max_seqlen_k, float dropout_p, float softmax_scale, bool causal) -> Tensor",
    ),
    "flash_attn_3": (
        "_flash_attn_forward(Tensor q, Tensor k, Tensor v, Tensor? k_new=None, Tensor? v_new=None, Tensor? qv=None, "
        "Tensor? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, "
        "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
        "bool causal=False) -> Tensor",
        "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new=None, Tensor? v_new=None, Tensor? q_v=None, Tensor? out=None, "
        "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, "
        "Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, bool is_causal=False) -> Tensor",
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _foreign_operators():
    import torch.nn.attention.varlen  # registers torch_attn

    with contextlib.ExitStack() as stack:
        for namespace, schemas in FOREIGN.items():
            library = torch.library.Library(namespace, "FRAGMENT")
            stack.callback(library._destroy)
            for schema in schemas:
                name = schema.split("(")[0]
                if find_op(f"{namespace}.{name}") is None:
                    library.define(schema)
        yield


def heads_first(heads=H, tokens=S, width=D):
    return torch.empty(B, heads, tokens, width, device="meta")


def tokens_first(heads=H, tokens=S, width=D):
    return torch.empty(B, tokens, heads, width, device="meta")


def packed(heads, lengths, width):
    return torch.empty(sum(lengths), heads, width, device="meta")


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def qkv(make):
    return make(), make(KV, T, D), make(KV, T, V)


def packed_qkv():
    return packed(H, PACKED_Q, D), packed(KV, PACKED_K, D), packed(KV, PACKED_K, V)


NAMED_OFFSETS = {
    "cu_seqlens_q": offsets(PACKED_Q),
    "cu_seqlens_k": offsets(PACKED_K),
    "max_seqlen_q": 5,
    "max_seqlen_k": 6,
}
CU = (offsets(PACKED_Q), offsets(PACKED_K))
LONGEST = (max(PACKED_Q), max(PACKED_K))
# operator → (arguments behind query, key and value, keywords, those of the same call with a causal mask)
DENSE_CALLS = {
    "aten._scaled_dot_product_cudnn_attention": (heads_first, (None, True), {}, {"is_causal": True}),
    "aten._scaled_dot_product_efficient_attention": (heads_first, (None, True), {}, {"is_causal": True}),
    "aten._scaled_dot_product_flash_attention": (heads_first, (), {}, {"is_causal": True}),
    "aten._scaled_dot_product_flash_attention_for_cpu": (heads_first, (0.0,), {}, {"is_causal": True}),
    "aten._scaled_dot_product_fused_attention_overrideable": (heads_first, (), {}, {"is_causal": True}),
    "aten._scaled_dot_product_attention_math_for_mps": (heads_first, (), {}, {"is_causal": True}),
    "aten._cudnn_attention_forward": (heads_first, (None, None, None, S, T, True), {}, {"is_causal": True}),
    "aten._flash_attention_forward": (
        tokens_first, (None, None, S, T, 0.0), {"is_causal": False, "return_debug_mask": False}, {"is_causal": True},
    ),
    "aten._efficient_attention_forward": (
        tokens_first, (None, None, None, S, T, 0.0), {"custom_mask_type": 0}, {"custom_mask_type": 1},
    ),
    "flash_attn._flash_attn_forward": (tokens_first, (0.0, 1.0), {"causal": False}, {"causal": True}),
    "flash_attn_3._flash_attn_forward": (tokens_first, (), {}, {"causal": True}),
    "flash_attn_3.fwd": (tokens_first, (), {}, {"is_causal": True}),
    "flex_attention": (heads_first, (None, None, 1.0, {}), {}, None),
}  # fmt: skip
PACKED_CALLS = {
    "torch_attn._varlen_attn": ((*CU, *LONGEST), {}),
    "flash_attn._flash_attn_varlen_forward": ((*CU, *LONGEST, 0.0, 1.0, False), {}),
    "aten._flash_attention_forward": ((*CU, *LONGEST, 0.0, False, False), {}),
    "aten._cudnn_attention_forward": ((None, *CU, *LONGEST, True), {}),
    "flash_attn_3._flash_attn_forward": ((), NAMED_OFFSETS),
    "flash_attn_3.fwd": ((), NAMED_OFFSETS),
}  # fmt: skip


def test_every_attention_kernel_of_the_table_is_tried_here():
    rows = {name.removesuffix(".default") for name, row in table._ROWS.items() if row.attention}
    assert rows == DENSE_CALLS.keys() | PACKED_CALLS.keys() and len(rows) == 15


@pytest.mark.parametrize("name", DENSE_CALLS)
def test_dense_attention(name):
    make, rest, kwargs, causal = DENSE_CALLS[name]
    op, args = find_op(name), (*qkv(make), *rest)
    assert table.flops(op, args, kwargs, None) == table.kernel_flops(op, args, kwargs, None) == DENSE
    if causal is not None:
        assert table.flops(op, args, kwargs | causal, None) == DENSE
        assert table.kernel_flops(op, args, kwargs | causal, None) == DENSE // 2


@pytest.mark.parametrize("name", PACKED_CALLS)
def test_packed_attention(name):
    rest, kwargs = PACKED_CALLS[name]
    assert table.flops(find_op(name), (*packed_qkv(), *rest), kwargs, None) == PACKED


def test_packed_efficient_attention_has_a_leading_one():
    args = (*(t[None] for t in packed_qkv()), None, *CU, *LONGEST, 0.0, 0)
    assert table.flops(aten._efficient_attention_forward.default, args, {}, None) == PACKED


def test_without_the_offsets_values_every_sequence_counts_as_the_longest():
    unknown = tuple(t.to("meta") for t in CU)
    args = (*packed_qkv(), *unknown, *LONGEST, 0.0, False, False)
    expected = 2 * H * len(PACKED_Q) * LONGEST[0] * LONGEST[1] * (D + V)
    assert table.flops(aten._flash_attention_forward.default, args, {}, None) == expected


def test_matrix_products_by_hand():
    def meta(*shape):
        return torch.empty(*shape, device="meta")

    cases = {
        "aten.mm": ((meta(3, 5), meta(5, 7)), 2 * 3 * 5 * 7),
        "aten.addmm": ((meta(7), meta(3, 5), meta(5, 7)), 2 * 3 * 5 * 7),
        "aten.linear": ((meta(2, 3, 5), meta(7, 5), meta(7)), 2 * 2 * 3 * 5 * 7),
        "aten._scaled_mm": ((meta(3, 5), meta(5, 7), meta(1), meta(1)), 2 * 3 * 5 * 7),
        "aten._scaled_mm_v2": ((meta(3, 5), meta(5, 7)), 2 * 3 * 5 * 7),
        "aten._grouped_mm": ((meta(10, 5), meta(4, 5, 7)), 2 * 10 * 5 * 7),
        "aten._scaled_grouped_mm": ((meta(4, 3, 5), meta(4, 5, 7)), 2 * 4 * 3 * 5 * 7),
        "aten._scaled_grouped_mm_v2": ((meta(3, 20), meta(20, 7)), 2 * 3 * 20 * 7),
    }
    cut_columns = (meta(4, 3, 5), meta(5, 28))
    assert table.flops(aten._grouped_mm.default, cut_columns, {}, None) == 2 * 3 * 5 * 28
    for name, (args, expected) in cases.items():
        assert table.flops(find_op(name), args, {}, meta(3, 7)) == expected, name
    for op in (aten.add.Tensor, aten.view.default, aten.topk.default):
        assert table.flops(op, (meta(3), meta(3)), {}, meta(3)) == 0


def counted_by_torch(op, args, kwargs):
    with FlopCounterMode(display=False) as counter:
        out = op(*args, **kwargs)
    return counter.get_total_flops(), out


sizes = st.integers(1, 9)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(("mm", "addmm", "bmm", "baddbmm", "convolution", "sdpa", "efficient", "varlen")),
    st.lists(sizes, min_size=6, max_size=6),
)
def test_rules_agree_with_torch(which, numbers):
    b, h, s, t, d, v = numbers

    def meta(*shape):
        return torch.empty(*shape, device="meta")

    calls = {
        "mm": (aten.mm.default, (meta(b, h), meta(h, s))),
        "addmm": (aten.addmm.default, (meta(s), meta(b, h), meta(h, s))),
        "bmm": (aten.bmm.default, (meta(b, h, s), meta(b, s, t))),
        "baddbmm": (aten.baddbmm.default, (meta(b, h, t), meta(b, h, s), meta(b, s, t))),
        "convolution": (
            aten.convolution.default,
            (meta(b, h, s + 2, t + 2), meta(d, h, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
        ),
        "sdpa": (aten._scaled_dot_product_flash_attention.default, (meta(b, h, s, d), meta(b, h, t, d), meta(b, h, t, d))),
        "efficient": (
            aten._scaled_dot_product_efficient_attention.default,
            (meta(b, h, s, d), meta(b, h, t, d), meta(b, h, t, v), None, True),
        ),
        "varlen": (
            aten._flash_attention_forward.default,
            (meta(s + t, h, d), meta(s + t, h, d), meta(s + t, h, d), offsets((s, t)), offsets((s, t)), max(s, t),
             max(s, t), 0.0, False, False),
        ),
    }  # fmt: skip
    op, args = calls[which]
    if which == "varlen":  # no kernel for it on any device here: the formula alone
        from torch.utils.flop_counter import flop_registry

        expected, out = flop_registry[op.overloadpacket](*args, out_val=None), None
    else:
        expected, out = counted_by_torch(op, args, {})
    assert table.flops(op, args, {}, out) == expected > 0


def test_the_dense_flash_kernel_is_not_read_as_heads_first():
    """PyTorch's registry takes its (B, S, H, D) for (B, H, S, D); SDPA of the same sizes says what is right."""
    q = tokens_first()
    args = (q, q, q, None, None, S, S, 0.0, False, False)
    other = heads_first()
    expected = table.flops(aten._scaled_dot_product_flash_attention.default, (other, other, other), {}, None)
    assert table.flops(aten._flash_attention_forward.default, args, {}, None) == expected == 4 * B * H * S * S * D
