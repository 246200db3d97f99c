"""Only `torch_compat` uses private names of torch, and they do what it says of them."""

import ast
import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import nemo_like
from nemo_like import torch_compat
from nemo_like._util.op_lookup import resolve_op
from nemo_like.activation_checkpointing.ops import compute_intensive_ops, default_save_ops
from nemo_like.activation_checkpointing.policy import RECOMPUTE, SAVE, TorchPolicy

pytestmark = pytest.mark.compat

PACKAGE = Path(nemo_like.__file__).parent

OF_OBJECTS = {
    "_modules", "_parameters", "_buffers", "_non_persistent_buffers_set", "_forward_pre_hooks",  # nn.Module
    "_version", "_cdata",  # a tensor, a storage
    "_schema", "_overloadpacket",  # an operator
    "_apply",  # a `ParallelStyle` of ours: the method that PyTorch asks a style for
    "_make", "_fields", "_replace", "_actions",  # Python's named tuples and argument parsers
}  # fmt: skip
"""Private attributes of objects that everybody reads, and that may be read anywhere."""

OF_OTHERS = {
    "_attention_backends",  # Transformer Engine
    "_apply_gate",  # the experts of transformers
    "_data",  # os.environ
    "_to_mxfp8_then_scaled_mm",  # torchao
    "_init_weights", "_reset_parameters", "_no_split_modules",  # models
    "_attn_implementation", "_relative_position_bucket",  # those of transformers
    "_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module",  # parts of names that are cleaned
}  # fmt: skip


def _chain(node):
    """``torch.a._b`` as a list of names; empty for anything but a plain chain."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def _is_private(name):
    return name.startswith("_") and not name.startswith("__")


def private_names(source):
    """(line, name) of every private name of torch, or of an object that may be torch's, in `source`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from ((node.lineno, name) for name in names if _is_private(name))
        elif isinstance(node, ast.Import):
            parts = [part for alias in node.names if alias.name.startswith("torch.") for part in alias.name.split(".")]
            yield from ((node.lineno, part) for part in parts if _is_private(part))
        elif isinstance(node, ast.Attribute) and _is_private(node.attr):
            chain = _chain(node)
            ours = getattr(getattr(node.value, "func", None), "id", "") == "super"
            operator = ours or "ops" in chain[:2]  # torch.ops.aten._grouped_mm: the name of an operator
            if chain[:1] not in (["self"], ["cls"]) and not operator and node.attr not in OF_OBJECTS:
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            if _is_private(name) and name not in OF_OBJECTS | OF_OTHERS:
                yield node.lineno, name
        elif isinstance(node, ast.Constant) and re.fullmatch(r"torch(\.\w+)*\._\w+(\.\w+)*", str(node.value)):
            yield node.lineno, node.value  # for importlib, or sys.modules


def test_no_other_file_uses_a_private_name_of_torch():
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "torch_compat.py"
        for line, name in private_names(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from torch._C import x", "_C"),
        ("from torch.nn import _reduction", "_reduction"),
        ("import torch._dynamo.config", "_dynamo"),
        ("torch._C._autograd.f()", "_C"),
        ("getattr(torch, '_foreach_mul_')", "_foreach_mul_"),
        ("hasattr(mesh, '_flatten')", "_flatten"),
        ("param._unsharded_param", "_unsharded_param"),
        ("importlib.import_module('torch._functorch.config')", "torch._functorch.config"),
    ],
)
def test_the_search_sees_every_way_to_a_private_name(source, name):
    assert name in [found for _, found in private_names(source)]


def test_the_search_passes_public_names_and_operators():
    source = "from torch.fx import a\ntorch.ops.aten._grouped_mm.default\nself._mine\nmodule._modules\nt._version"
    assert list(private_names(source)) == []


# --- Autograd ---------------------------------------------------------------------------------------------------------


def test_a_saved_tensor_is_the_tensor_itself_and_is_checked():
    tensor = torch.arange(3.0)
    unpack = torch_compat.save_tensor(tensor)
    assert torch.equal(unpack(), torch.arange(3.0))
    assert unpack().data_ptr() == tensor.data_ptr()
    tensor.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        unpack()


def test_a_saved_tensor_goes_through_hooks():
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: packed.append(t.clone()) or len(packed), lambda i: packed[i - 1]
    ):
        unpack = torch_compat.save_tensor(torch.ones(2))
    assert len(packed) == 1 and unpack() is packed[0]


def test_a_policy_function_of_pytorch_sees_the_output():
    seen = []

    def policy(context, op, *args):
        seen.append((context.is_recompute, context.op_output is x))
        return op is torch.ops.aten.mm.default

    decide = TorchPolicy(policy).start()
    x = torch.ones(1, 1)
    assert decide(torch.ops.aten.mm.default, 0, (x, x), {}, x) == SAVE
    assert decide(torch.ops.aten.add.Tensor, 0, (x, x), {}, x) == RECOMPUTE
    assert seen == [(False, True)] * 2


# --- Operators --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flex_attention", "inductor_compiled_code"])
def test_higher_order_operators_are_found(name):
    assert torch_compat.higher_order_op(name) in default_save_ops()


def test_the_list_of_the_partitioner():
    theirs = importlib.import_module("torch._functorch.partitioners").get_default_op_list().compute_intensive_ops
    assert compute_intensive_ops() == {op for packet in theirs for op in resolve_op(packet)}


def test_an_unknown_operator_has_a_hint():
    with pytest.raises(ValueError, match=r"Did you mean .*'aten\.softmax'"):
        resolve_op("aten.sofmax")


@pytest.mark.parametrize(
    ("module", "call", "error", "words"),
    [
        (
            "torch._subclasses.fake_tensor", torch_compat.fake_tensor_types, ImportError,
            r"has no torch\._subclasses\.fake_tensor.* Use torch 2\.13 to 2\.15",
        ),
        (
            "torch.testing._internal.distributed.fake_pg", torch_compat.fake_store, RuntimeError,
            "has no fake process group where we know it",
        ),
    ],
)  # fmt: skip
def test_what_needs_a_module_that_torch_lacks_names_it(module, call, error, words, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)  # its import fails
    with pytest.raises(error, match=words):
        call()


# --- The compiler -----------------------------------------------------------------------------------------------------


def test_the_innermost_saved_tensor_hooks_stand_aside():
    seen, x = [], torch.ones(2, requires_grad=True)

    def noting(name):
        return torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(name) or t, lambda t: t)

    with noting("outer"), noting("inner"):
        with torch_compat.without_innermost_saved_tensor_hooks():
            x.exp()
        x.exp()
    assert seen == ["outer", "inner"]
    with torch_compat.without_innermost_saved_tensor_hooks():
        x.exp().sum().backward()  # there are none


def test_async_tensor_parallelism_is_off_without_inductor(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._inductor.config", SimpleNamespace(_micro_pipeline_tp=True))
    assert torch_compat.async_tensor_parallel()
    monkeypatch.delitem(sys.modules, "torch._inductor.config")
    assert not torch_compat.async_tensor_parallel()


# --- Ranks ------------------------------------------------------------------------------------------------------------


def test_a_loss_is_parallel_until_the_context_ends_by_an_error_too():
    with torch_compat.under_loss_parallel(False):
        assert torch_compat.loss_is_parallel() is False
    with pytest.raises(KeyError), torch_compat.under_loss_parallel(True):
        assert torch_compat.loss_is_parallel() is True
        raise KeyError
    assert torch_compat.loss_is_parallel() is False


def test_a_grouped_product_with_and_without_a_kernel(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    rows, weights = torch.randn(5, 8, generator=generator), torch.randn(3, 8, 4, generator=generator)
    expected = torch.cat([rows[:2] @ weights[0], rows[2:] @ weights[2]])

    def product(rows: torch.Tensor, counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = weights.clone().requires_grad_()
        out = torch_compat.grouped_mm(rows, leaf, counts, torch.tensor(counts).cumsum(0).int())
        return out, torch.autograd.grad(out.square().sum(), leaf)[0]

    out, grad = product(rows, [2, 0, 3])
    torch.testing.assert_close(out, expected)
    assert not grad[1].any()
    monkeypatch.setattr(torch_compat, "_has_grouped_kernel", lambda rows, weights: False)
    again, without = product(rows, [2, 0, 3])
    torch.testing.assert_close(again, expected)
    torch.testing.assert_close(without, grad)
    none, zero = product(rows[:0], [0, 0, 0])
    assert none.shape == (0, 4) and zero.shape == weights.shape and not zero.any()


def _unit(**group):
    """What `free_last_gather` reads of an FSDP2 unit."""
    return SimpleNamespace(_get_fsdp_state=lambda: SimpleNamespace(_fsdp_param_groups=[SimpleNamespace(**group)]))


@pytest.mark.parametrize(
    "other",
    [nn.Linear(1, 1), _unit(), _unit(comm_ctx=SimpleNamespace()), _unit(_wait_all_gather_streams_on_event=list)],
)
def test_a_buffer_of_the_last_gather_that_torch_does_not_show_is_left_alone(other):
    torch_compat.free_last_gather(other)
