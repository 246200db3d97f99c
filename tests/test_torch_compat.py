"""Only `torch_compat` uses private names of torch, and they do what it says of them."""

import ast
import operator
import re
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

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
    "_make", "_fields", "_actions",  # Python's named tuples and argument parsers
}  # fmt: skip
"""Private attributes of objects that everybody reads, and that may be read anywhere."""

OF_OTHERS = {
    "_attention_backends",  # Transformer Engine
    "_apply_gate",  # the experts of transformers
    "_data",  # os.environ
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


@pytest.fixture
def no_module(monkeypatch):
    """Takes a module of torch away: its import fails."""

    def take(name):
        monkeypatch.setitem(sys.modules, name, None)

    return take


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


def test_whether_a_profiler_is_on():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert torch_compat.profiler_is_on()
    assert not torch_compat.profiler_is_on()


def test_an_operator_is_called_directly_or_as_it_is():
    x = torch.tensor([0.5])
    assert torch.equal(torch_compat.direct_call(torch.ops.aten.sin.default)(x), x.sin())
    for op in (abs, torch.ops.higher_order.cond):
        assert torch_compat.direct_call(op) is op


def test_whether_a_graph_is_kept():
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(torch_compat.graph_is_kept())
            return grad

    x = torch.ones(1, requires_grad=True)
    Look.apply(x).sum().backward(retain_graph=True)
    Look.apply(x).sum().backward()
    assert seen == [True, False] and torch_compat.graph_is_kept() is None


def test_a_transform_of_functorch_is_seen():
    def level(x):
        levels.append(torch_compat.in_functorch_transform())
        return x.sum()

    levels = []
    torch.func.grad(level)(torch.ones(1))
    assert levels == [True] and not torch_compat.in_functorch_transform()


def test_operators_are_hidden_from_modes():
    class Seen(torch_compat.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    class Asked(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    names = []
    with Seen(), Asked():
        with torch_compat.unseen():
            torch.ones(2).exp()
        assert names == []
        torch.ones(2)
        assert names == ["ones", "aten.ones.default"]


def test_fake_tensors_are_told_from_others(monkeypatch):
    with torch_compat.fake_tensor_types()[1]():
        fake = torch.ones(2)
    assert torch_compat.is_fake(fake) and not torch_compat.is_fake(torch.ones(2, device="meta"))
    monkeypatch.delitem(sys.modules, "torch._subclasses.fake_tensor")
    assert not torch_compat.is_fake(torch.ones(2))


def test_the_parts_of_a_sparse_tensor():
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    coo = torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 1.0], (2, 2))
    assert [part.tolist() for part in torch_compat.sparse_parts(coo)] == [[[0, 0], [1, 1]], [1.0, 1.0]]
    for parts in (dense.to_sparse_csr(), dense.t().to_sparse_csc()):
        assert [part.tolist() for part in torch_compat.sparse_parts(parts)] == [[0, 1, 2], [1, 0], [2.0, 3.0]]


def test_the_innermost_saved_tensor_hooks():
    def pack(tensor):
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        assert torch_compat.innermost_saved_tensor_hooks() == (pack, pack)
    assert torch_compat.innermost_saved_tensor_hooks() is None


def test_version_and_base():
    tensor = torch.zeros(4)
    view = tensor[1:]
    view.add_(1)
    assert (torch_compat.version_of(tensor), torch_compat.base_of(view) is tensor) == (1, True)
    with torch.inference_mode():
        assert torch_compat.version_of(torch.zeros(1)) is None
    assert torch_compat.base_of(tensor) is None


def test_two_objects_of_one_generator_have_one_address():
    seen = []

    class Watch(torch_compat.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(kwargs["generator"])
            return func(*args, **kwargs)

    generator = torch.Generator()
    with Watch():
        torch.rand(2, generator=generator)
    assert torch_compat.generator_address(seen[0]) == torch_compat.generator_address(generator)
    assert torch_compat.generator_address(torch.Generator()) != torch_compat.generator_address(generator)


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


# --- Modes and attention back ends ------------------------------------------------------------------------------------


def test_the_priority_of_attention_is_set_and_read():
    before = torch_compat.sdp_priority()
    other = list(reversed(before))
    torch_compat.set_sdp_priority(other)
    assert torch_compat.sdp_priority() == other
    torch_compat.set_sdp_priority(before)
    assert torch_compat.sdp_priority() == before


def test_function_modes_are_listed_and_taken_off():
    assert torch_compat.function_modes() == ()
    with torch.device("meta"):
        (mode,) = torch_compat.function_modes()
        assert mode.device == torch.device("meta")
        with torch_compat.without_function_modes():
            assert torch_compat.function_modes() == () and torch.zeros(1).device.type == "cpu"
        assert torch.zeros(1).device.type == "meta"


# --- Operators --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flex_attention", "inductor_compiled_code"])
def test_higher_order_operators_are_found(name):
    assert torch_compat.higher_order_op(name) in default_save_ops()


def test_the_list_of_the_partitioner():
    assert resolve_op("aten.mm.default") | resolve_op("aten.convolution.default") <= compute_intensive_ops()


def test_an_unknown_operator_has_a_hint():
    with pytest.raises(ValueError, match=r"Did you mean .*'aten\.softmax'"):
        resolve_op("aten.sofmax")


def test_a_list_is_multiplied_in_place():
    tensors = [torch.ones(3), torch.full((2,), 4.0)]
    torch_compat.foreach_mul(tensors, torch.tensor(0.5))
    assert [tensor.tolist() for tensor in tensors] == [[0.5] * 3, [2.0] * 2]


def test_a_tensor_of_nothing_but_its_shape():
    class Shape(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    with torch_compat.fake_tensor_types()[1]():
        made = torch_compat.shape_only(Shape, (2, 3), torch.bfloat16, torch.device("cpu"))
    assert (type(made), made.shape, made.dtype) == (Shape, (2, 3), torch.bfloat16)
    assert made.device == torch.device("cpu") and not made.requires_grad


def test_planning_names_what_it_misses(no_module):
    no_module("torch._subclasses.fake_tensor")
    with pytest.raises(ImportError, match=r"has no torch\._subclasses\.fake_tensor.* Use torch 2\.13 to 2\.15"):
        torch_compat.fake_tensor_types()


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


def compiled_around(hook, x):
    """What Dynamo compiles while autograd saves through `hook` in a frame that a graph break left to eager."""
    seen = []

    def backend(graph, inputs):
        seen.append([node.target for node in graph.graph.nodes if node.op.startswith("call")])
        return graph

    def frame(x):
        with torch.autograd.graph.saved_tensors_hooks(hook, lambda tensor: tensor):
            torch._dynamo.graph_break()
            return x.exp()

    torch.compiler.reset()
    torch.compile(frame, backend=backend)(x)
    torch.compiler.reset()
    return seen


def test_dynamo_leaves_a_marked_function_and_what_it_calls_alone():
    def called(tensor):
        return tensor + 1

    def make():
        def hook(tensor):
            return called(tensor)

        return hook

    x = torch.ones(2, requires_grad=True)
    assert compiled_around(make(), x) == [[operator.add]]
    torch.compiler.reset()
    own = types.FunctionType(
        make().__code__.replace(), globals(), closure=make().__closure__
    )  # a code object of its own
    assert compiled_around(torch_compat.left_to_python(own), x) == []


def test_forward_hooks_in_the_order_of_their_registration():
    module, hooks = nn.Linear(1, 1), [lambda *_: None, lambda *_: None]
    for hook in hooks:
        module.register_forward_hook(hook)
    assert list(torch_compat.forward_hooks(module)) == hooks


def test_a_module_is_compiled_or_not():
    module = nn.Linear(1, 1)
    assert not torch_compat.is_compiled(module)
    module.compile(backend="eager")
    assert torch_compat.is_compiled(module)


def test_async_tensor_parallelism_is_off_without_inductor(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._inductor.config", SimpleNamespace(_micro_pipeline_tp=True))
    assert torch_compat.async_tensor_parallel()
    monkeypatch.delitem(sys.modules, "torch._inductor.config")
    assert not torch_compat.async_tensor_parallel()


# --- Ranks ------------------------------------------------------------------------------------------------------------


def test_no_collective_is_under_way():
    assert torch_compat.unwaited_collectives() == 0
    with torch_compat.fake_ranks(0, 4):
        assert torch_compat.unwaited_collectives() == 0


def test_meshes():
    with torch_compat.fake_ranks(0, 4):
        mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        assert torch_compat.root_mesh(mesh["tp"]) == mesh
        assert torch_compat.flatten_mesh(mesh, "all", None).size() == 4


def test_the_fake_back_end_names_what_it_misses(no_module):
    no_module("torch.testing._internal.distributed.fake_pg")
    with pytest.raises(RuntimeError, match="has no fake process group where we know it"):
        torch_compat.fake_store()


def test_a_module_that_is_no_unit_has_no_parameter_groups():
    assert list(torch_compat.fsdp_param_groups(nn.Linear(1, 1))) == []


_seen_by_policy: list[bool] = []


def _contexts_that_ask():
    def keep_all(context, op, *args, **kwargs):
        _seen_by_policy.append(torch.compiler.is_compiling())
        return True

    return create_selective_checkpoint_contexts(keep_all)


def test_the_compilers_flag_is_set_where_the_partitioner_asks_a_policy():
    """What the contexts of compiled regions go by, and no promise of torch."""

    @torch.compile(backend="aot_eager")
    def step(x):
        return checkpoint(lambda t: t.sin().cos(), x, use_reentrant=False, context_fn=_contexts_that_ask)

    torch.compiler.reset()
    step(torch.ones(2, requires_grad=True)).sum().backward()
    torch.compiler.reset()
    assert _seen_by_policy and all(_seen_by_policy) and not torch.compiler.is_compiling()


def test_whether_a_loss_is_parallel():
    assert torch_compat.loss_is_parallel() is False
    with loss_parallel():
        assert torch_compat.loss_is_parallel() is True
        with torch_compat.under_loss_parallel(True):
            assert torch_compat.loss_is_parallel() is True
        assert torch_compat.loss_is_parallel() is True
    assert torch_compat.loss_is_parallel() is False


def test_a_loss_is_parallel_until_the_context_ends_by_an_error_too():
    with torch_compat.under_loss_parallel(False):
        assert torch_compat.loss_is_parallel() is False
    with pytest.raises(KeyError), torch_compat.under_loss_parallel(True):
        assert torch_compat.loss_is_parallel() is True
        raise KeyError
    assert torch_compat.loss_is_parallel() is False


def test_who_holds_a_tensor():
    tensor = torch.ones(2)
    before = torch_compat.storage_use_count(tensor)
    view = tensor[:1]
    assert torch_compat.storage_use_count(tensor) == before + 1 and torch_compat.use_count(view) >= 1


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


def test_whether_a_backward_runs():
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: seen.append(torch_compat.in_backward()))
    assert not torch_compat.in_backward()
    x.sum().backward()
    assert seen == [True] and not torch_compat.in_backward()


def test_switches_are_read():
    before = {kind: read() for kind, read in torch_compat.SWITCH_READERS.items()}
    kernels = ("flash", "mem_efficient", "math", "cudnn")
    try:
        for kind in kernels:
            getattr(torch.backends.cuda, f"enable_{kind}_sdp")(not before[kind])
        torch.use_deterministic_algorithms(not before["deterministic"], warn_only=not before["warn_only"])
        torch.set_float32_matmul_precision("medium")
        torch.backends.mkldnn.enabled = not before["mkldnn"]
        now = {kind: read() for kind, read in torch_compat.SWITCH_READERS.items()}
    finally:
        for kind in kernels:
            getattr(torch.backends.cuda, f"enable_{kind}_sdp")(before[kind])
        torch.use_deterministic_algorithms(before["deterministic"], warn_only=before["warn_only"])
        torch.set_float32_matmul_precision(before["matmul_precision"])
        torch.backends.mkldnn.enabled = before["mkldnn"]
    assert now.pop("matmul_precision") == "medium" != before.pop("matmul_precision")
    assert now == {kind: not value for kind, value in before.items()}


def _unit(**group):
    """What `free_last_gather` reads of an FSDP2 unit."""
    return SimpleNamespace(_get_fsdp_state=lambda: SimpleNamespace(_fsdp_param_groups=[SimpleNamespace(**group)]))


def test_the_buffer_of_the_last_gather_is_freed_behind_its_event():
    waited = []
    unit = _unit(comm_ctx=SimpleNamespace(all_gather_state=SimpleNamespace(event="copied out")),
                 _wait_all_gather_streams_on_event=waited.append)  # fmt: skip
    (group,) = torch_compat.fsdp_param_groups(unit)
    for _ in range(2):  # nothing is there the second time
        torch_compat.free_last_gather(unit)
        assert group.comm_ctx.all_gather_state is None and waited == ["copied out"]


@pytest.mark.parametrize(
    "other",
    [nn.Linear(1, 1), _unit(), _unit(comm_ctx=SimpleNamespace()), _unit(_wait_all_gather_streams_on_event=list)],
)
def test_a_buffer_of_the_last_gather_that_torch_does_not_show_is_left_alone(other):
    torch_compat.free_last_gather(other)
