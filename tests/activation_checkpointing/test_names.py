"""Lists of names: gradients equal those of no checkpointing, exactly the named tensors are kept, and wrong names are errors.

The judge of gradients is the model without checkpointing; that of kept bytes is autograd itself, whose saved tensors are
counted by hooks outside of everything.
"""

import copy
import logging
import pickle

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import nemo_like
from nemo_like import parallelize
from nemo_like._util.forwards import step_of
from nemo_like.activation_checkpointing.checkpointed import Checkpointed, is_checkpointed
from nemo_like.activation_checkpointing.engine import region
from nemo_like.activation_checkpointing.names import matches_layer, regions_of
from nemo_like.models import resolve_model
from nemo_like.options import NamedList, NamedLists, parse_ac
from tests.models.blocks import in_turn
from tests.models.families import FAMILIES

LISTS = (
    {"save": ["attention", "**"]},
    {"save": ["matmuls", "experts", "statistics"], "offload": ["attention"]},
    {"save": ["attention", "attention.q", "attention.k", "attention.v", "residual"]},
    {"recompute": ["*"]},
    {"save": ["**.input"]},
)
SOME = ("llama", "gpt2", "t5", "mixtral", "deepseek_v3", "mamba2", "vit", "timm_style")


def kept_outputs(monkeypatch):
    """Return a list that gets, for each region call, the shapes of the tensors that it keeps at the end of its forward."""
    kept = []
    drop = region.Region.drop_unreachable

    def note(self):
        drop(self)
        kept.append([(str(e.op), e.decision.value, e.label) for e in self.kept if e.decision.value in ("save", "host")])

    monkeypatch.setattr(region.Region, "drop_unreachable", note)
    return kept


def gradients(family, ac, steps=3, **how):
    model = parallelize(family.build(), "single", ac=ac, precision=None, **how)
    each = []
    for _ in range(steps):  # the first call learns, the second leaves out, the third is as the second
        model.zero_grad()
        loss = family.step(model)
        loss.backward()
        each.append((loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]))
    return each


def equal(one, other):
    return all(
        torch.equal(loss, before) and len(grads) == len(old) and all(map(torch.equal, grads, old))
        for (loss, grads), (before, old) in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SOME else pytest.mark.long) for n in FAMILIES])
def test_gradients_are_those_of_no_checkpointing(name):
    family = FAMILIES[name]
    without = gradients(family, "none")
    for ac in LISTS:
        assert equal(gradients(family, ac), without), (name, ac)


LLAMA = FAMILIES["llama"]


def kept_by(monkeypatch, ac, family=LLAMA, **how):
    """Return, for the first layer, the names and places of the outputs that each of two forwards keeps."""
    kept = kept_outputs(monkeypatch)
    model = parallelize(family.build(), "single", ac=ac, precision=None, **how)
    found = []
    for _ in range(2):
        kept.clear()
        family.step(model).backward()
        found.append([(label or op, place) for op, place, label in kept[0]] if kept else [])
    return found


@pytest.mark.parametrize(
    ("ac", "labels"),
    [
        (
            {"save": ["self_attn.q_proj"], "offload": ["mlp.up_proj"]},
            [("self_attn.q_proj", "save"), ("mlp.up_proj", "host")],
        ),
        ({"save": ["self_attn.*_proj"]}, [(f"self_attn.{x}_proj", "save") for x in "qkvo"]),
        ({"save": ["self_attn"]}, [("self_attn", "save")]),
        ({"save": ["mlp.down_proj.input"]}, [("mlp.down_proj.input", "save")]),
        ({"save": ["mlp.*"], "recompute": ["mlp"]}, [(f"mlp.{x}", "save") for x in ("gate_proj", "act_fn", "up_proj")]),
        ({"save": []}, []),
    ],
)
def test_exactly_the_named_outputs_are_kept(monkeypatch, ac, labels):
    first, second = kept_by(monkeypatch, ac)
    assert first == second == labels or (ac.get("recompute") and first == second)
    assert sorted(first) == sorted(labels)


def test_what_nothing_reads_is_left_out_from_the_second_call_on():
    """Where queries, keys and the residual are kept, three projections are not read: so many fewer run again."""
    ran = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ran.append(str(func))
            return func(*args, **(kwargs or {}))

    ac = {"save": ["attention", "attention.q", "attention.k", "attention.v", "residual"]}
    model = parallelize(LLAMA.build(), "single", ac=ac, precision=None)
    products = []
    for _ in range(3):
        loss = LLAMA.step(model)
        ran.clear()
        with Count():
            loss.backward()
        products.append(ran.count("aten.mm.default"))
    layers = LLAMA.layers["language"]
    assert products[0] - products[1] == 3 * layers and products[1] == products[2]  # the value is its projection's own output


class Labelled(nn.Module):
    """A layer whose code names a tensor."""

    def __init__(self, label="gate"):
        super().__init__()
        self.up, self.down, self.label = nn.Linear(8, 16), nn.Linear(16, 8), label

    def forward(self, x):
        return x + self.down(nemo_like.name(self.up(x).sigmoid(), self.label).tanh())


class Stacked(nn.Module):
    def __init__(self, label="gate"):
        super().__init__()
        self.layers = nn.ModuleList(Labelled(label) for _ in range(3))

    def forward(self, x):
        return in_turn(self.layers, x)


def test_a_label_in_the_models_code_is_a_name(monkeypatch):
    kept = kept_outputs(monkeypatch)
    model = parallelize(Stacked(), "single", ac={"save": ["gate"]})
    model(torch.randn(2, 8, requires_grad=True)).sum().backward()
    assert kept == [[("aten.sigmoid.default", "save", "gate")]] * 3
    assert nemo_like.name(torch.ones(1), "gate").item() == 1  # outside of a layer it does nothing


def test_a_label_that_no_tensor_had_is_an_error_at_the_end_of_the_first_forward():
    model = parallelize(Stacked("other"), "single", ac={"save": ["gate"]})
    with torch.no_grad():
        model(torch.randn(2, 8))
    with pytest.raises(ValueError, match=r"ac has the name 'gate', and no tensor had it in the first forward"):
        model(torch.randn(2, 8))


def test_a_name_that_keeps_nothing_is_said_once(caplog):
    model = parallelize(LLAMA.build(), "single", ac={"save": ["mlp.down_proj", "attention"]}, precision=None)
    with caplog.at_level(logging.INFO, logger="nemo_like"):
        for _ in range(2):
            LLAMA.step(model).backward()
    assert [r.getMessage().count("'mlp.down_proj', and that keeps nothing") for r in caplog.records].count(1) == 1


@pytest.mark.parametrize(
    ("ac", "how", "words"),
    [
        ({"save": ["self_attn.q_porj"]}, {}, "'self_attn.q_porj', which these layers do not have.*'self_attn.q_proj'"),
        ({"save": ["mlp"], "offload": ["mlp"]}, {}, "'mlp' in two of save, offload and recompute"),
        ({"save": ["self_attn.q_proj"], "recompute": ["mlp"]}, {}, "'self_attn.q_proj', which is in no module of recompute"),
        ({"recompute": ["attention"]}, {}, "'attention', which these layers do not have"),
        ({"offload": ["attention"]}, {"compile": "aot_eager"}, "offload=.'attention'. and compile is 'aot_eager'"),
        ({"save": ["self_attn"]}, {"compile": "aot_eager"}, "'self_attn' and compile is 'aot_eager'.*sample_input"),
        ({"save": ["mlp.up_proj"]}, {"compile": "eager"}, "'mlp.up_proj' and compile is 'eager'"),
        ([{"layers": "model.layers.9", "save": []}, {"save": []}], {}, "layers=.'model.layers.9'.*no layer is left"),
        ([{"save": []}, {"save": ["attention"]}], {}, "no layer is left for it"),
        ({"save": ["attention"], "keep": []}, {}, "ac has 'keep'; lists have save, offload, recompute, layers"),
        ([{"save": [], "budget": "50%"}, {"save": []}], {}, "budget next to several lists"),
        ({"recompute": ["mlp"], "budget": "50%"}, {}, "budget with layers or recompute"),
        ({"save": ["attention"], "budget": "50%"}, {}, "sample_input"),
        ('{"save": ["attention"', {}, "which is not JSON"),
    ],
)
def test_wrong_lists_are_errors_before_anything_is_changed(ac, how, words):
    model = LLAMA.build()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match=f"(?s){words}"):
        parallelize(model, "single", ac=ac, **how)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_lists_of_wrong_kinds_are_errors():
    for ac in ({"save": 3}, [3], {"save": [""]}):
        with pytest.raises(TypeError, match="list"):
            parse_ac(ac)


def test_the_first_list_that_has_a_layer_counts(monkeypatch):
    kept = kept_outputs(monkeypatch)
    ac = [{"layers": ["model.layers.[0-0]"], "save": ["attention"]}, {"recompute": []}]
    model = parallelize(LLAMA.build(), "single", ac=ac, precision=None)
    LLAMA.step(model).backward()
    assert [[place for _, place, _ in each] for each in kept] == [["save"]]
    assert matches_layer("h.[9-12]", "h.10") and not matches_layer("h.[9-12]", "h.13")
    assert matches_layer("model.**.[ab]", "model.x.y.a")


def test_regions_inside_are_the_outermost_that_match():
    layer = LLAMA.build().model.layers[0]
    assert regions_of(NamedList(recompute=("**",)), layer) == [name for name, _ in layer.named_children()]
    inside = regions_of(NamedList(recompute=("*norm*", "mlp.*")), layer)
    assert inside[:3] == ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


def test_lists_go_through_words_code_and_pickle():
    for ac in ({"save": ["attention"]}, [{"layers": ["h.[0-1]"], "recompute": []}, {"offload": ["mlp.*"]}]):
        lists = parse_ac(ac)
        assert isinstance(lists, NamedLists)
        assert parse_ac(lists.mode) == parse_ac(lists.words) == pickle.loads(pickle.dumps(lists)) == lists
        call = nemo_like.Job.of(ac=ac).as_call().partition(" = ")[2]
        assert eval(call, {"parallelize": lambda model, **how: how, "model": 0})["ac"] == lists.words
    budget = parse_ac({"save": ["attention"], "budget": "60GiB"})
    assert parse_ac(budget.words) == budget and budget.fixed == NamedList(save=("attention",))


def test_a_copied_and_a_pickled_model_keep_by_name(monkeypatch):
    model = parallelize(Stacked(), "single", ac={"save": ["up"]})
    x = torch.randn(2, 8, requires_grad=True)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        kept = kept_outputs(monkeypatch)
        twin(x).sum().backward()
        assert kept == [[("aten.addmm.default", "save", "up")]] * 3


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled_layers_keep_matmuls_and_attention_by_name(backend):
    """Gradients equal those of the same backend without checkpointing, and a graph saves the named outputs alone."""
    saved = {}

    def run(ac):
        torch._dynamo.reset()
        model = parallelize(LLAMA.build(), "single", ac=ac, precision=None, compile=backend)
        params, sizes = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in params:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = LLAMA.step(model)
        loss.backward()
        saved[str(ac)] = sum(sizes.values())
        return [(loss.detach(), [p.grad for p in model.parameters()])]

    without, _ = run("none"), run(nothing := {"save": ["experts"]})  # of which a Llama has none
    rows = LLAMA.inputs()["input_ids"].numel()
    config = LLAMA.build().config
    for ac, width in (
        ({"save": ["self_attn.q_proj"]}, config.hidden_size),
        ({"save": ["mlp.gate_proj", "mlp.up_proj"]}, 2 * config.intermediate_size),
    ):
        assert equal(run(ac), without)
        assert saved[str(ac)] - saved[str(nothing)] == config.num_hidden_layers * rows * width * 4


@pytest.mark.long
@pytest.mark.parametrize("name", SOME)
def test_compiled_gradients_are_those_of_no_checkpointing(name):
    """Under Inductor those of T5 differ by a rounding, as under ``selective``: it fuses other operators there."""

    def run(ac):
        torch._dynamo.reset()
        return gradients(FAMILIES[name], ac, steps=2, compile="aot_eager")

    without = run("none")
    for ac in ({"save": ["attention", "matmuls", "experts"]}, {"save": ["attention"]}, {"recompute": ["*"]}):
        assert equal(run(ac), without), (name, ac)


def test_adapters_have_names_of_their_own():
    peft = pytest.importorskip("peft")

    def build():
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], lora_dropout=0.1)
        return peft.get_peft_model(LLAMA.build(), config).train()

    def run(ac):
        model = parallelize(build(), "single", ac=ac, precision=None)
        grads = []
        for _ in range(3):
            model.zero_grad()
            LLAMA.step(model).backward()
            grads += [p.grad for p in model.parameters() if p.grad is not None]
        return grads

    without = run("none")
    for ac in (
        {"save": ["self_attn.q_proj", "mlp.up_proj.base_layer"]},
        {"save": ["**.lora_A.default", "attention"], "offload": ["mlp.up_proj"]},
        {"recompute": ["mlp"]},
    ):
        grads = run(ac)
        assert grads and len(grads) == len(without) and all(map(torch.equal, grads, without)), ac


@pytest.mark.parametrize("ac", ["50%", {"save": ["mlp.act_fn", "attention.q"]}])
def test_a_plan_of_two_lists_compiles_two_graphs_of_a_kind(ac):
    """Also lists with names that no graph has, where a sample input shows the plan which operators these are."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = resolve_model("llama-tiny").build("cpu")  # of four layers
    batch = resolve_model("llama-tiny").sample_input(1, 16)
    layers = model.model.layers
    model = parallelize(model, "single", ac=ac, precision=None, compile="aot_eager", sample_input=batch)
    model(**batch).loss.backward()
    policies = {step_of(layer, Checkpointed).policy if is_checkpointed(layer) else None for layer in layers}
    assert len(policies) == (2 if ac == "50%" else 1)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(policies)
