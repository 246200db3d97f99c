"""The save-op set: what is in it, how operators are named, and that the decision is logged."""

import logging

import pytest
import torch

from nemo_like import log
from nemo_like.activation_checkpointing import policy as policies
from nemo_like.activation_checkpointing import save_ops

aten = torch.ops.aten


def test_every_family_that_this_build_has_is_in_the_default_set():
    ops = save_ops.default_save_ops()
    families = {
        "PyTorch's own": [aten.mm.default, aten.addmm.default, aten.bmm.default, aten.convolution.default],
        "SDPA": [
            aten._scaled_dot_product_flash_attention.default,
            aten._scaled_dot_product_efficient_attention.default,
            aten._scaled_dot_product_cudnn_attention.default,
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            aten._scaled_dot_product_fused_attention_overrideable.default,
        ],
        "scaled and grouped matmuls": [aten._scaled_mm.default, aten._grouped_mm.default, aten._scaled_grouped_mm.default],
        "leaf linear": [aten.linear.default],
        "routing and scales": [aten.topk.default, aten.max.default],
        "collectives": [
            torch.ops._c10d_functional.reduce_scatter_tensor.default,
            torch.ops._c10d_functional.all_to_all_single.default,
        ],
    }
    for family, members in families.items():
        assert set(members) <= ops, family
    names = {getattr(op, "_name", str(op)) for op in ops if isinstance(op, torch._ops.HigherOrderOperator)}
    assert names == {"flex_attention", "inductor_compiled_code"}


def test_the_set_holds_overloads_only_and_nothing_that_writes_or_is_a_view():
    # Known failure 19: a packet in a list of overloads never matches anything.
    for op in save_ops.default_save_ops():
        assert isinstance(op, torch._ops.OpOverload | torch._ops.HigherOrderOperator), op
        assert save_ops.can_be_tracked(op), op


def test_operators_of_packages_imported_later_are_found():
    library = torch.library.Library("deepep", "DEF")
    try:
        assert save_ops.find_op("deepep.dispatch.default") is None
        library.define("dispatch(Tensor x) -> Tensor")
        assert torch.ops.deepep.dispatch.default in save_ops.default_save_ops()
    finally:
        library._destroy()


def test_reduce_scatter_is_left_to_async_tensor_parallel(monkeypatch):
    # Known failure 19, second half.
    import torch._inductor.config as config

    reduce_scatter = torch.ops._c10d_functional.reduce_scatter_tensor.default
    assert reduce_scatter in save_ops.default_save_ops()
    monkeypatch.setattr(config, "_micro_pipeline_tp", True)
    assert reduce_scatter not in save_ops.default_save_ops()


def test_without_pytorchs_private_list_ours_is_used(monkeypatch):
    import torch._functorch.partitioners as partitioners

    save_ops.compute_intensive_ops.cache_clear()
    monkeypatch.delattr(partitioners, "get_default_op_list")
    try:
        assert {aten.mm.default, aten.addmm.default, aten.convolution.default} <= save_ops.compute_intensive_ops()
    finally:
        save_ops.compute_intensive_ops.cache_clear()


@pytest.mark.parametrize("name", ["torch.ops.aten.mm.default", "aten.mm.default", "aten::mm.default"])
def test_names_of_overloads(name):
    assert save_ops.resolve_op(name) == {aten.mm.default}


def test_a_packet_stands_for_all_its_overloads():
    wanted = {aten.topk.default, aten.topk.values}
    assert save_ops.resolve_op("aten.topk") == wanted and save_ops.resolve_op(aten.topk) == wanted


@pytest.mark.parametrize(
    "name", ["aten.nm.default", "mm", "torch.ops.nothing.here.default", "__import__('os')", "", "a b.c"]
)
def test_unknown_names_raise_with_the_value(name):
    with pytest.raises(ValueError, match="is no operator of this torch"):
        save_ops.resolve_op(name)


def test_a_close_name_is_suggested():
    with pytest.raises(ValueError, match=r"Did you mean 'aten\.topk"):
        save_ops.resolve_op("aten.tpok.default")


def test_what_is_no_operator_is_a_type_error():
    with pytest.raises(TypeError, match="is no operator"):
        save_ops.resolve_op(3)


def test_views_in_place_forms_and_metadata_are_never_tracked():
    never = (
        aten.view.default, aten.t.default, aten.detach.default, aten.transpose.int, aten.add_.Tensor, aten.mm.out,
        aten._unsafe_view.default, torch.ops._c10d_functional.wait_tensor.default,
    )  # fmt: skip
    for op in never:
        assert not save_ops.can_be_tracked(op), op
    for op in (aten.mm.default, aten.add.Tensor, aten._to_copy.default, aten.native_dropout.default):
        assert save_ops.can_be_tracked(op), op


def test_device_to_host_copies():
    device, host = torch.empty(1, device="meta"), torch.empty(1)
    assert save_ops.is_device_to_host_copy(aten._to_copy.default, (device,), {"device": torch.device("cpu")})
    assert not save_ops.is_device_to_host_copy(aten._to_copy.default, (host,), {"device": torch.device("cpu")})
    assert not save_ops.is_device_to_host_copy(aten._to_copy.default, (device,), {"dtype": torch.float16})


def test_decisions_are_logged_once_per_operator(caplog):
    log.forget_announcements()
    policies.log_decisions(True)
    try:
        decide = policies.SelectivePolicy().start()
        with caplog.at_level(logging.INFO, logger="nemo_like"):
            for index in range(3):
                for op in (aten.mm.default, aten.topk.default, aten.add.Tensor):
                    decide(op, index)
    finally:
        policies.log_decisions(False)
        log.forget_announcements()
    assert [record.getMessage().rsplit(": ", 2)[1:] for record in caplog.records] == [
        ["aten.mm.default", "ALTERNATE"],
        ["aten.topk.default", "SAVE"],
        ["aten.add.Tensor", "RECOMPUTE"],
    ]
