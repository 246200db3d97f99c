"""The table of operators: what it says of each and their names; FLOP rules against formulas by hand and PyTorch's."""

import contextlib
import logging
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.attention.varlen  # registers torch_attn
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from nemo_like._util.op_lookup import find_op, resolve_op
from nemo_like.activation_checkpointing import ops as table
from nemo_like.activation_checkpointing import policy as policies
from nemo_like.layers import find_layers
from nemo_like.options import CheckpointConfig
from nemo_like.resolve import config_specs
from tests.models.decoders import PlainDecoder
from tests.said import said

aten = torch.ops.aten


def test_the_set_holds_overloads_only_and_nothing_that_writes_or_is_a_view():
    # Known failure 19: a packet in a list of overloads never matches anything.
    for op in table.default_save_ops():
        assert isinstance(op, torch._ops.OpOverload | torch._ops.HigherOrderOperator), op
        assert table.facts(op).tracked, op


@pytest.mark.parametrize(("package", "kernel"), [("deepep", "dispatch"), ("flash_attn_3", "fwd")])
def test_operators_of_packages_imported_later_are_found(package, kernel):
    before = table.default_save_ops()
    if find_op(f"{package}.{kernel}.default") is not None:
        pytest.skip(f"{package} is installed")
    library = torch.library.Library(package, "DEF")
    try:
        library.define(f"{kernel}(Tensor q, Tensor k, Tensor v) -> Tensor")
        assert {str(op) for op in table.default_save_ops() - before} == {f"{package}.{kernel}.default"}
    finally:
        library._destroy()
    assert table.default_save_ops() == before


def test_reduce_scatter_is_left_to_async_tensor_parallel(monkeypatch):
    reduce_scatter = torch.ops._c10d_functional.reduce_scatter_tensor.default
    assert reduce_scatter in table.default_save_ops()
    monkeypatch.setitem(sys.modules, "torch._inductor.config", SimpleNamespace(_micro_pipeline_tp=True))
    assert reduce_scatter not in table.default_save_ops()


@pytest.mark.parametrize(
    ("names", "op"),
    [
        (("torch.ops.aten.mm.default", "aten.mm.default", "aten::mm.default"), aten.mm.default),
        (
            ("flex_attention", "higher_order.flex_attention", "torch.ops.higher_order.flex_attention"),
            torch.ops.higher_order.flex_attention,
        ),
    ],
)
def test_names_of_operators(names, op):
    assert [resolve_op(name) for name in names] == [{op}] * 3


def test_a_packet_stands_for_all_its_overloads():
    found = set(resolve_op("aten.max"))
    assert found == set(resolve_op(aten.max)) == set(resolve_op("aten::max"))
    assert found >= {aten.max.default, aten.max.dim, aten.max.other}
    assert all(op.overloadpacket is aten.max for op in found)


def test_a_packet_leaves_out_what_writes_and_what_takes_no_tensor():
    assert resolve_op("aten.topk") == {aten.topk.default}  # topk.values is an out= form
    assert aten.add.Tensor in resolve_op("aten.add") and aten.add.int not in resolve_op("aten.add")
    assert resolve_op("aten.add_") == {aten.add_.Tensor, aten.add_.Scalar}  # nothing else there: a policy refuses it


def test_a_packet_means_the_same_in_a_config_and_in_a_policy():
    config = CheckpointConfig(enabled=True, ops_to_save=["aten.mm", "aten.max"], profile_before_apply=False)
    by_config = config_specs(model := PlainDecoder(), find_layers(model), config)[0].policy
    by_hand = policies.SelectivePolicy(every_nth_matmul=None, save_ops=("aten.mm", "aten.max"))
    assert set(by_config.tracked_ops()) == set(by_hand.tracked_ops()) == resolve_op("aten.mm") | resolve_op("aten.max")
    assert {aten.mm.default, aten.max.dim} <= set(by_config.tracked_ops())


def test_additions_and_removals():
    default = table.default_save_ops()
    policy = policies.SelectivePolicy(extra=("aten.exp", aten.tanh.default), drop=("aten.topk", aten.mm.default))
    assert set(policy.tracked_ops()) == (default | {aten.exp.default, aten.tanh.default}) - {
        aten.topk.default, aten.mm.default,
    }  # fmt: skip
    assert set(policies.SelectivePolicy(save_ops=["aten.exp"]).tracked_ops()) == {aten.exp.default}


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        *(
            (name, ValueError, "which is not an operator of this torch")
            for name in ("aten.nm.default", "mm", "torch.ops.nothing.here.default", "__import__('os')", "", "a b.c")
        ),
        ("aten.tpok.default", ValueError, r"Did you mean 'aten\.topk"),
        ("aten.topk.no_such", ValueError, r"has the overloads .*default"),
        (3, TypeError, "is not an operator"),
    ],
)
def test_what_names_no_operator_is_said(name, error, message):
    with pytest.raises(error, match=message):
        resolve_op(name)


def test_device_to_host_copies():
    device, host = torch.empty(1, device="meta"), torch.empty(1)
    assert table.is_device_to_host_copy(aten._to_copy.default, (device,), {"device": torch.device("cpu")})
    assert not table.is_device_to_host_copy(aten._to_copy.default, (host,), {"device": torch.device("cpu")})
    assert not table.is_device_to_host_copy(aten._to_copy.default, (device,), {"dtype": torch.float16})


# What the table says of each operator it names: (saved, pinned, alternates, attention, collective, free), by row name.
_EXPECTED = {
    "saved": (
        "aten.addmm aten.bmm aten.convolution aten._scaled_mm aten._scaled_mm_v2 aten._scaled_grouped_mm "
        "aten._scaled_grouped_mm_v2 aten.max"
    ),
    "saved alternates": "aten.mm aten.linear aten._grouped_mm",
    "saved attention random": (
        "aten._scaled_dot_product_cudnn_attention aten._scaled_dot_product_efficient_attention "
        "aten._scaled_dot_product_flash_attention aten._scaled_dot_product_flash_attention_for_cpu "
        "aten._scaled_dot_product_fused_attention_overrideable aten._scaled_dot_product_attention_math_for_mps "
        "aten._flash_attention_forward aten._efficient_attention_forward aten._cudnn_attention_forward"
    ),
    "saved attention": "torch_attn._varlen_attn",
    "saved pinned": "aten.topk aten._local_scalar_dense",
    "saved pinned collective": (
        "_c10d_functional.all_reduce _c10d_functional.reduce_scatter_tensor _c10d_functional.all_to_all_single"
    ),
    "collective": "_c10d_functional.all_gather_into_tensor",
    "collective free": "_c10d_functional.wait_tensor",
    "free": (
        "aten._unsafe_view aten._reshape_alias aten.empty_like aten.new_empty aten.view aten.detach aten.numel aten.t "
        "aten.transpose.int aten.empty.memory_format aten.new_empty_strided aten.empty_strided aten.split_with_sizes "
        "aten.as_strided prim.device"
    ),
    "random": "aten.native_dropout aten.rand_like",
    "mutating free random": "aten.bernoulli_.float aten.uniform_",
    "mutating free": "aten.add_.Tensor aten.mm.out aten.set_.source_Tensor",
    "": "aten.add.Tensor aten._to_copy aten.exp aten.cat",
}


@pytest.mark.parametrize(("name", "words"), [(name, w) for w, names in _EXPECTED.items() for name in names.split()])
def test_what_the_table_says(name, words):
    op = find_op(name)
    if op is None:
        pytest.skip(f"torch {torch.__version__} has no {name}")
    facts = table.facts(op)
    said = {word for word in vars(facts) if word != "flops" and getattr(facts, word)}
    assert said == set(words.split())
    assert facts.tracked is not bool({"free", "mutating"} & said)
    assert (op in table.default_save_ops()) is facts.saved


@pytest.mark.parametrize("name", ["flex_attention", "inductor_compiled_code"])
def test_higher_order_operators_are_in_the_table(name):
    facts = table.facts(find_op(name))
    assert facts.saved and facts.tracked and bool(facts.attention) is (name == "flex_attention")
    assert find_op(name) in table.default_save_ops()


def test_every_row_is_spelled_as_the_operator_calls_itself():
    for name in table._ROWS:
        op = find_op(name)
        assert op is None or str(op) == name


def test_attention_draws_only_with_dropout():
    q = torch.empty(1, 2, 3, 4, device="meta")
    flash, cpu = (
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    )
    assert not table.draws(flash, (q, q, q), {}) and table.draws(flash, (q, q, q, 0.1), {})
    assert not table.draws(cpu, (q, q, q), {"dropout_p": 0.0}) and table.draws(cpu, (q, q, q), {"dropout_p": 0.1})
    assert table.draws(aten.native_dropout.default, (q, 0.5, True), {}) and not table.draws(aten.add.Tensor, (q, q), {})


def test_written_tensors_are_found_by_position_keyword_and_in_lists():
    a, b, c = (torch.empty(2) for _ in range(3))
    assert [t is a for t in table.written_tensors(aten.add_.Tensor, (a, b), {})] == [True]
    assert [t is c for t in table.written_tensors(aten.mm.out, (a, b), {"out": c})] == [True]
    assert [id(t) for t in table.written_tensors(aten._foreach_add_.Scalar, ([a, b], 1), {})] == [id(a), id(b)]
    assert table.written_tensors(aten.add.Tensor, (a, b), {}) == []


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
    with contextlib.ExitStack() as stack:
        for namespace, schemas in FOREIGN.items():
            library = torch.library.Library(namespace, "FRAGMENT")
            stack.callback(library._destroy)
            for schema in schemas:
                if find_op(f"{namespace}.{schema.split('(')[0]}") is None:
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
    rows = {
        name.removesuffix(".default")
        for name, row in table._ROWS.items()
        if row.attention and not name.startswith("nemo_like.")  # which is made of these
    }
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


def meta(*shape):
    return torch.empty(*shape, device="meta")


def test_matrix_products_by_hand():
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
    assert table.flops(aten._grouped_mm.default, (meta(4, 3, 5), meta(5, 28)), {}, None) == 2 * 3 * 5 * 28
    for name, (args, expected) in cases.items():
        assert table.flops(find_op(name), args, {}, meta(3, 7)) == expected, name
    for op in (aten.add.Tensor, aten.view.default, aten.topk.default):
        assert table.flops(op, (meta(3), meta(3)), {}, meta(3)) == 0


sizes = st.integers(1, 9)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(("mm", "addmm", "bmm", "baddbmm", "convolution", "sdpa", "efficient", "varlen")),
    st.lists(sizes, min_size=6, max_size=6),
)
def test_rules_agree_with_torch(which, numbers):
    b, h, s, t, d, v = numbers
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
        expected, out = flop_registry[op.overloadpacket](*args, out_val=None), None
    else:
        with FlopCounterMode(display=False) as counter:
            out = op(*args)
        expected = counter.get_total_flops()
    assert table.flops(op, args, {}, out) == expected > 0


def test_the_dense_flash_kernel_is_not_read_as_heads_first():
    """PyTorch's registry takes its (B, S, H, D) for (B, H, S, D); SDPA of the same sizes says what is right."""
    q = tokens_first()
    args = (q, q, q, None, None, S, S, 0.0, False, False)
    other = heads_first()
    expected = table.flops(aten._scaled_dot_product_flash_attention.default, (other, other, other), {}, None)
    assert table.flops(aten._flash_attention_forward.default, args, {}, None) == expected == 4 * B * H * S * S * D


def test_decisions_are_logged_once_per_operator(logs, monkeypatch):
    logs.set_level("INFO", "nemo_like")
    monkeypatch.setattr(policies, "_logs_decisions", True)
    decide = policies.SelectivePolicy().start()
    for index in range(3):
        for op in (aten.mm.default, aten.topk.default, aten.add.Tensor):
            decide(op, index)
    assert [record.getMessage().rsplit(": ", 2)[1:] for record in said(logs, logging.INFO)] == [
        ["aten.mm.default", "ALTERNATE"],
        ["aten.topk.default", "SAVE"],
        ["aten.add.Tensor", "RECOMPUTE"],
    ]


def test_a_product_that_writes_into_a_tensor_moves_the_bytes_of_one_that_does_not() -> None:
    """Counted by hand: a (3, 5), b (5, 7), and c (3, 7), which `addmm_` reads and writes."""
    a, b, c = torch.empty(3, 5), torch.empty(5, 7), torch.empty(3, 7)
    for op, inputs in ((torch.ops.aten.mm.out, (a, b, c)), (torch.ops.aten.mm.default, (a, b))):
        assert table.moved_bytes(op, inputs, (c,)) == 4 * (15 + 35 + 21)
    assert table.moved_bytes(torch.ops.aten.addmm_.default, (c, a, b), (c,)) == 4 * (21 + 15 + 35 + 21)
    assert table.kernel_flops(torch.ops.aten.addmm_.default, (c, a, b), {}, c) == 2 * 3 * 5 * 7
