"""What the parts of a model may do differently on two ranks: equal to the original model's mean, or refused by name.

The original model of each rank takes that rank's batch, and its gradients are averaged; None is no gradient on any rank.
"""

import dataclasses
import functools
import sys
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from nemo_like import DDP, parallelize
from nemo_like.distributed.gradients import set_gradient_sync
from nemo_like.distributed.unit_calls import _names_data
from nemo_like.distributed.weights.materialize import materialize
from nemo_like.layers import find_layers
from tests.checks import assert_bitwise, gradients_of, on_meta, seeded, update, weights_of, whole
from tests.models import decoders, kv_shared, tiny
from tests.models.adapted import with_lora
from tests.models.blocks import Layer
from tests.models.tiny import Headed as Net
from tests_distributed.spawn import on_ranks

Step = Callable[[nn.Module, int], Any]


class Block(tiny.Block):
    def __init__(self, **parts: Any) -> None:
        super().__init__(8, **parts)


class Branch(Net):
    """A projector for sounds, and one for pictures, in front of the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.sound, self.picture = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, head: str = "a") -> torch.Tensor:
        return super().forward((self.sound if head == "a" else self.picture)(x))


class Adapted(Block):
    """An adapter for each language in each layer."""

    def __init__(self) -> None:
        super().__init__(adapters=nn.ModuleDict({name: nn.Linear(8, 8) for name in "abc"}))

    def forward(self, x: torch.Tensor, language: str = "a", *_: Any) -> torch.Tensor:
        return super().forward(x) + self.adapters[language](x)


def batch(step: int = 0) -> torch.Tensor:
    return torch.rand(4, 8, generator=torch.Generator().manual_seed(step + 10 * dist.get_rank()))


def gradients(model: nn.Module, mean: bool = False) -> dict[str, torch.Tensor | None]:
    """By name; `mean` over ranks, where None stays None if no rank has one."""
    found: dict[str, torch.Tensor | None] = {}
    for name, parameter in model.named_parameters():
        grad = None if parameter.grad is None else whole(parameter.grad)
        if mean:
            used = torch.tensor(float(grad is not None))
            dist.all_reduce(used)
            grad = torch.zeros_like(parameter) if grad is None else grad.clone()
            dist.all_reduce(grad)
            grad = grad / dist.get_world_size() if used else None
        found[name] = grad
    return found


def assert_equal(
    ours: dict[str, torch.Tensor | None], wanted: dict[str, torch.Tensor | None], rtol: float = 0.0
) -> None:
    for name, want in wanted.items():
        got = ours[name]
        assert (got is None) == (want is None), name
        # The sum of two ranks has one order.
        assert want is None or (got - want).norm() <= rtol * want.norm(), name


def both(build: Callable[[], nn.Module], **options: Any) -> tuple[Any, Any]:
    """The original model, and the parallelized one with the same weights."""
    return seeded(build), parallelize(seeded(build), **options)


def train(build: Callable[[], nn.Module], step: Step, ac: str, rtol: float = 0.0, **options: Any) -> None:
    original, model = both(build, ac=ac, **options)
    for number in range(2):
        for each in (original, model):
            each.zero_grad()
            step(each, number)
        assert_equal(gradients(model), gradients(original, mean=True), rtol)


@pytest.mark.parametrize(
    ("kind", "ac", "options"),
    [
        ("heads", "none", {}),
        ("branch", "full", {}),
        ("adapters", "selective", {"dp_replicate": 2}),
        ("adapters", "sequential", {}),
    ],
)
@on_ranks(2)
def test_ranks_use_different_parameters_of_a_unit(
    rank: int, world: int, kind: str, ac: str, options: dict[str, Any]
) -> None:
    build = {"heads": Net, "branch": Branch, "adapters": lambda: Net(Adapted)}[kind]
    # Head c, or adapter c, is used by no rank: no gradient, and none that weight decay would see.
    train(build, lambda m, n: m(batch(n), "ab"[rank]).square().mean().backward(), ac, **options)


@pytest.mark.parametrize("precision", [None, "bf16"])
@on_ranks(2)
def test_tasks_take_turns_in_the_micro_batches_of_a_step(rank: int, world: int, precision: str | None) -> None:
    original, model = both(lambda: Net(Adapted), ac="none", precision=precision)
    for number, task in enumerate(("ab"[rank], "ba"[rank])):
        set_gradient_sync(model, number == 1)
        model(batch(number), task).float().square().mean().backward()
        original(batch(number), task).square().mean().backward()
    ours, wanted = gradients(model), gradients(original, mean=True)
    if precision is None:
        assert_equal(ours, wanted)
    assert {n for n, g in ours.items() if g is None} == {n for n, g in wanted.items() if g is None} != set()


@on_ranks(2)
def test_a_head_that_no_rank_uses_is_not_moved(rank: int, world: int) -> None:
    """All ranks use one head, then another: an optimizer with decay moves the one that is used alone."""
    results = []
    for model in both(Net, ac="full"):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        for number in range(4):
            optimizer.zero_grad()
            model(torch.ones(2, 8), "ab"[number % 2]).square().mean().backward()
            optimizer.step()
        results.append(weights_of(model))
    assert_equal(results[1], results[0])


# --- Containers that layers are called with ---


class Skips(Block):
    def forward(self, x: torch.Tensor, skips: Any, *_: Any) -> torch.Tensor:
        y = super().forward(x)
        skips.append(y)
        return y


class State(Block):
    def forward(self, state: Any, *_: Any) -> None:  # type: ignore[override]
        state["x"] = super().forward(state["x"])


@dataclasses.dataclass
class Hidden:
    x: torch.Tensor
    sums: Any = None


class Record(Block):
    def forward(self, hidden: Any, *_: Any) -> None:  # type: ignore[override]
        hidden.x = super().forward(hidden.x)
        hidden.sums = hidden.x if hidden.sums is None else hidden.sums + hidden.x


class Cache(Block):
    def forward(self, x: torch.Tensor, cache: Any, *_: Any) -> torch.Tensor:
        cache["k"].append((self.norm(x), 1))
        return super().forward(x) + sum(key for key, _ in cache["k"])


class Pops(Block):
    def forward(self, x: torch.Tensor, skips: Any, *_: Any) -> torch.Tensor:
        return super().forward(x + skips.pop())


class Containers(Net):
    def __init__(self, kind: str) -> None:
        super().__init__(dict(skips=Skips, state=State, record=Record, plain=Record, cache=Cache, pops=Pops)[kind])
        self.kind = kind

    def forward(self, x: torch.Tensor, head: str = "a") -> torch.Tensor:
        x = self.inp(x)
        if self.kind == "state":
            state = {"x": x}
            for block in self.blocks:
                block(state)
            return self.heads[head](state["x"])
        if self.kind in ("record", "plain"):
            hidden: Any = Hidden(x) if self.kind == "record" else SimpleNamespace(x=x, sums=None)
            for block in self.blocks:
                block(hidden)
            return self.heads[head](hidden.x + hidden.sums)
        box: Any = {"skips": [], "pops": [x, 2 * x, 3 * x], "cache": defaultdict(list)}[self.kind]
        first = box[0] if self.kind == "pops" else None
        for block in self.blocks:
            x = block(x, box)
            assert not box or first is None or box[0] is first  # the caller's own tensor
        return self.heads[head](x + sum(box) if self.kind == "skips" else x)


@pytest.mark.parametrize(
    ("kind", "ac"),
    [
        ("skips", "full"),
        ("state", "none"),
        ("record", "full"),
        ("plain", "none"),
        ("plain", "full"),
        ("cache", "full"),
        ("pops", "none"),
    ],
)
@on_ranks(2)
def test_layers_change_a_container_that_they_are_called_with(rank: int, world: int, kind: str, ac: str) -> None:
    # FSDP2 puts a node of its own behind what a layer gets, so that gradients of what is used twice add up in another order.
    train(lambda: Containers(kind), lambda m, n: m(batch(n)).square().mean().backward(), ac, rtol=1e-6)


class Collects(Net):
    def forward(self, x: torch.Tensor, seen: Any = None) -> torch.Tensor:  # type: ignore[override]
        y = super().forward(x)
        seen["y"] = y
        return y


@on_ranks(2)
def test_the_callers_dict_has_what_the_model_puts_in_and_its_own_tensors(rank: int, world: int) -> None:
    model = parallelize(Collects(), ac="none", precision="bf16")
    seen: dict[str, Any] = {"x": batch()}
    before = seen["x"]
    assert model(batch(), seen) is not None
    assert seen["x"] is before and seen["x"].dtype == torch.float32
    seen["y"].float().square().mean().backward()
    assert all(p.grad is not None for p in model.heads["a"].parameters())


# --- Parameters that come, are exchanged or written ---


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a new head": lambda model: model.heads.update({"a": nn.Linear(8, 2)}),
    "a new layer": lambda model: model.blocks.append(Block()),
    "exchanged": lambda model: setattr(model.blocks[0].up, "bias", nn.Parameter(torch.zeros(16))),
    "an adapter": lambda model: model.blocks[0].add_module("adapter", nn.Linear(2, 2)),
    "around a linear": lambda model: setattr(model.blocks[1], "up", nn.Sequential(model.blocks[1].up, nn.Linear(16, 16))),
    "a factor": lambda model: model.blocks[1].down.register_parameter("factor", nn.Parameter(torch.ones(1))),
}


@pytest.mark.parametrize(
    ("change", "after", "strategy"),
    [
        ("a new head", 0, "fsdp2"),
        ("an adapter", 1, "fsdp2"),
        ("around a linear", 1, "fsdp2"),
        ("a new layer", 3, "fsdp2"),
        ("exchanged", 0, "fsdp2"),
        ("a factor", 3, "fsdp2"),
        ("exchanged", 1, DDP(find_unused_parameters=True)),
    ],
)
@on_ranks(2)
def test_a_late_parameter_is_named(rank: int, world: int, change: str, after: int, strategy: Any) -> None:
    model = parallelize(Net(), strategy, "full")
    for _ in range(after):
        model(batch()).square().mean().backward()
    CHANGES[change](model if strategy == "fsdp2" else model.module)
    with pytest.raises(RuntimeError, match=r"^[a-z0-9.]+ (came into the model, or was exchanged|is not the parameter)"):
        model(batch()).square().mean().backward()


class Written(Block):
    """A scale that the first forward sets from the data (LSQ, ActNorm), by one of three ways to write."""

    way = "copy"

    def __init__(self) -> None:
        super().__init__(scale=nn.Parameter(torch.ones(2)), ready=nn.Buffer(torch.zeros(())))

    def forward(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        if not self.ready:
            with torch.no_grad():
                value = 4 * x.abs().mean()
                if self.way == "copy":
                    self.scale.fill_(value)
                elif self.way == "data":
                    self.scale.data.fill_(value)
                else:
                    self.scale.data[1:] = value
                self.ready.fill_(1)
        return x + self.scale.sum() * super().forward(x)


@on_ranks(2)
def test_a_parameter_that_a_later_forward_writes_is_named(rank: int, world: int) -> None:
    Written.way = "copy"
    net = Net(Written)
    for block in net.blocks:
        block.ready.fill_(1)
    model = parallelize(net, ac="none")
    for _ in range(3):
        model(batch())
    model.blocks[1].ready.fill_(0)
    with pytest.raises(RuntimeError, match=r"blocks\.1\.scale was written in the forward of blocks\.1\."):
        model(batch())


@pytest.mark.parametrize(
    ("way", "ac", "words"),
    [
        ("copy", "selective", r"blocks\.0\.scale was written in the forward of blocks\.0\. FSDP2 gathers"),
        # Other rows on each rank.
        ("data", "none", r"wrote other values into its parameters on each rank \(blocks\.0\.scale here"),
    ],
)
@on_ranks(2)
def test_a_parameter_that_forward_writes_is_named(rank: int, world: int, way: str, ac: str, words: str) -> None:
    Written.way = way
    model = parallelize(Net(Written), ac=ac)
    with pytest.raises(RuntimeError, match=words):
        model(batch())


@on_ranks(2)
def test_a_write_that_no_code_names_is_refused_in_the_first_call(rank: int, world: int) -> None:
    net = Net(Block)
    net.blocks[1].up.register_forward_pre_hook(lambda module, _: module.weight.detach().numpy().fill(1.0))
    model = parallelize(net, ac="none")
    with pytest.raises(RuntimeError, match=r"blocks\.1\.up\.weight was written in the forward of blocks\.1\."):
        model(batch())


def _clamp(limit: float, module: nn.Module, *_: object) -> None:
    module.weight.data.clamp_(max=limit)  # type: ignore[union-attr, operator]


class Clamped(Block):
    """Writes through ``.data``: its scale from the third call on, by a method of a child, and by a hook."""

    def __init__(self) -> None:
        super().__init__(calls=0, scale=nn.Parameter(torch.ones(2)))
        self.up.register_forward_pre_hook(functools.partial(_clamp, 0.05))

    def forward(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        self.calls += 1
        if self.calls > 2:
            self.scale.data.mul_(0.5)
        return x + self.scale.sum() * super().forward(x)


def _four_steps(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-8)  # a larger one diverges
    same = torch.rand(4, 8, generator=torch.Generator().manual_seed(0))  # on both ranks, as one process has it
    for _ in range(4):
        model(same).square().mean().backward()
        update(optimizer)


@pytest.mark.parametrize("kind", [Clamped, Written])
@on_ranks(2)
def test_a_parameter_that_forward_writes_through_data_trains_as_in_the_original_model(
    rank: int, world: int, kind: type[Written]
) -> None:
    for way in ("data", "part"):
        Written.way = way
        plain, model = both(lambda: Net(kind), ac="none")
        _four_steps(plain)
        _four_steps(model)
        torch.testing.assert_close(weights_of(model), weights_of(plain), rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_gemma_3n_which_clamps_weights_in_forward_trains(rank: int, world: int) -> None:
    ids = torch.arange(16).view(2, 8)
    plain, other = (kv_shared.build("gemma3n") for _ in range(2))
    for net in (plain, other):
        net.config.altup_coef_clip = 0.01
        assert net.model.layers[0].altup.prediction_coefs.weight.abs().max() > 0.01
    model = parallelize(other, ac="none")
    for each in (plain, model):
        each(input_ids=ids, labels=ids).loss.backward()
    assert_bitwise(weights_of(model), weights_of(plain))
    found, wanted = gradients_of(model), gradients_of(plain)
    # The tiny original model has NaN in the gradient of its embedding, too.
    torch.testing.assert_close({name: found[name] for name in wanted}, wanted, rtol=1e-4, atol=1e-6, equal_nan=True)


@on_ranks(2)
def test_a_write_through_data_leaves_the_bits_of_other_weights_in_32_bits(rank: int, world: int) -> None:
    """A shard in float32 is gathered in bfloat16: where nothing was written, rounded values must not come back."""
    net = Net(Clamped)
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    model = parallelize(net, ac="none", precision="bf16")
    model(batch())
    limit = torch.tensor(0.05, dtype=torch.bfloat16).float()
    for name, parameter in model.named_parameters():
        wanted = torch.where((before[name].bfloat16() > limit) & name.endswith("up.weight"), limit, before[name])
        assert torch.equal(wanted, before[name]) != name.endswith("up.weight")
        assert torch.equal(parameter.full_tensor(), wanted), name  # type: ignore[operator]


@pytest.mark.parametrize(
    ("build", "compared"),
    [
        *((functools.partial(decoders.build, name), False) for name in ("llama", "gpt2", "mixtral")),
        (lambda: with_lora(decoders.build("llama"), ["q_proj"]), False),
        (lambda: kv_shared.build("gemma3n"), True),
    ],
)
def test_only_layers_that_name_data_are_compared_at_each_call(build: Callable[[], nn.Module], compared: bool) -> None:
    """The comparison waits for the device; PEFT's forward names ``.data``, but only to take a merged adapter out again."""
    assert {_names_data(layer.module.modules()) for layer in find_layers(build())} == {compared}


class Clamp:
    """A hook that is an object, and a plain object that a layer holds."""

    def __call__(self, module: nn.Module, *_: object) -> None:
        self.clamp(module)

    def clamp(self, module: nn.Module) -> None:
        _clamp(0.05, module)


class Heir(Clamp):
    pass


this = sys.modules[__name__]
HOOKS: dict[str, Callable[..., None]] = {
    "partial": functools.partial(_clamp, 0.05),
    "object": Clamp(),
    "object that inherits": Heir(),
    "method of an object": Clamp().__call__,
    "of a file": lambda module, _: this._clamp(0.05, module),
    "inner": lambda module, _: [_clamp(limit, module) for limit in (0.05,)] and None,
    "closure": (lambda inner: lambda module, _: inner(0.05, module))(_clamp),
    "held object": lambda module, _: module.helper.clamp(module),
}


@pytest.mark.parametrize("way", HOOKS)
def test_a_write_through_data_is_found_behind_each_kind_of_call(way: str) -> None:
    linear = nn.Linear(4, 4)
    linear.register_forward_hook(lambda *_: None)
    assert not _names_data([linear])
    linear.register_forward_pre_hook(HOOKS[way])
    if way == "held object":
        linear.helper = Clamp()
    assert _names_data([linear])


class Scan(nn.Module):
    """One layer, called with the slices of stacked weights."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.start = Block(), nn.Linear(8, 8)
        named = {name.replace(".", "_"): p for name, p in self.block.named_parameters()}
        self.stack = nn.ParameterDict({name: nn.Parameter(torch.stack([p.detach()] * 2)) for name, p in named.items()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        names = [name for name, _ in self.block.named_parameters()]
        for index in range(2):
            x = functional_call(self.block, {n: self.stack[n.replace(".", "_")][index] for n in names}, (x,))
        return x


@on_ranks(2)
def test_functional_call_of_a_sharded_layer_is_refused(rank: int, world: int) -> None:
    model = parallelize(Scan(), ac="full", layers=["block"])
    with pytest.raises(RuntimeError, match=r"block\.norm\.weight is not the parameter.*functional_call"):
        model(batch())


# --- Marks ---


class Marked(Block):
    def __init__(self) -> None:
        super().__init__(decay=nn.Parameter(torch.zeros(8)))
        self.decay._no_weight_decay = True  # type: ignore[attr-defined]
        self.up.weight.infshape = ("width", 16)  # type: ignore[assignment]

    def forward(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        assert self.decay._no_weight_decay and self.up.weight.infshape == ("width", 16)  # type: ignore[attr-defined]
        return super().forward(x) * torch.exp(self.decay)


@pytest.mark.parametrize(
    ("options", "meta"), [({}, False), ({}, True), ({"strategy": DDP(find_unused_parameters=True)}, False)]
)
@on_ranks(2)
def test_marks_on_parameters_are_kept(rank: int, world: int, options: dict[str, Any], meta: bool) -> None:
    model = parallelize(on_meta(Net, Marked) if meta else Net(Marked), ac="none", **options)
    if meta:
        materialize(model, lambda module: [nn.init.constant_(p, 0.1) for p in module.parameters(recurse=False)])
    for _ in range(2):
        inner = model.module if hasattr(model, "module") else model
        marked = {name for name, p in inner.named_parameters() if getattr(p, "_no_weight_decay", False)}
        assert marked == {f"blocks.{index}.decay" for index in range(3)}
        assert inner.blocks[0].up.weight.infshape == ("width", 16)
        model(batch()).square().mean().backward()


# --- What parameters() gives ---


class Failing(Net):
    error: BaseException | None = None

    def forward(self, x: torch.Tensor, head: str = "a") -> torch.Tensor:
        y = super().forward(x, head)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return y


@pytest.mark.parametrize("event", ["KeyboardInterrupt", "in backward", "optimizer behind a forward", "written by data"])
@on_ranks(2)
def test_what_trains_is_what_parameters_gives(rank: int, world: int, event: str) -> None:
    results = []
    for ours, model in enumerate(both(Failing, ac="full")):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if event == "KeyboardInterrupt":
            model.error = KeyboardInterrupt()
            with pytest.raises(KeyboardInterrupt):
                model(batch())
        elif event == "in backward":
            output = model(batch())
            output.register_hook(lambda grad: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                output.sum().backward()
        elif event == "optimizer behind a forward":
            model(batch())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        elif event == "written by data":
            model(batch())
            for parameter in model.parameters():
                parameter.data.mul_(1.5)
        seen = []
        for number in range(3):
            optimizer.zero_grad()
            model(batch(number)).square().mean().backward()
            if not ours:
                for (_, p), grad in zip(model.named_parameters(), gradients(model, mean=True).values()):
                    p.grad = grad
            optimizer.step()
            with torch.no_grad():
                seen.append(model(batch(number)).sum())
        results.append(weights_of(model) | {"seen": torch.stack(seen)})
    assert_equal(results[1], results[0])


@on_ranks(2)
def test_an_optimizer_of_gathered_parameters_is_refused(rank: int, world: int) -> None:
    model = parallelize(Failing(), ac="none")
    model.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        model(batch())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # of what is still gathered
    model(batch()).sum().backward()
    with pytest.raises(RuntimeError, match=r"has replaced, 'inp\.weight' for one: it would train nothing"):
        optimizer.step()


@on_ranks(2)
def test_an_optimizer_built_before_materialize_is_refused(rank: int, world: int) -> None:
    model, other = parallelize(on_meta(Net), ac="none"), nn.Linear(2, 2)
    early = torch.optim.SGD([*other.parameters(), *model.parameters()], lr=0.1)  # of two models
    materialize(model)
    model(batch()).sum().backward()
    other(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"26 parameter\(s\) that parallelize\(\) or materialize\(\) has replaced"):
        early.step()
    torch.optim.SGD([*other.parameters(), *model.parameters()], lr=0.1).step()


# --- Calls of parts ---


@pytest.mark.parametrize("ac", ["none", "selective"])
@on_ranks(2)
def test_a_loss_of_a_feature_inside_of_a_layer(rank: int, world: int, ac: str) -> None:
    def step(model: Any, number: int) -> None:
        seen: list[torch.Tensor] = []
        handle = model.blocks[1].up.register_forward_hook(lambda _m, _i, out: seen.append(out))
        model(batch(number))
        handle.remove()
        seen[0].square().mean().backward()

    train(Net, step, ac)


@on_ranks(2)
def test_a_layer_is_called_before_the_model(rank: int, world: int) -> None:
    original, model = both(Net, ac="full")
    with torch.no_grad():
        assert torch.equal(model.blocks[1](batch()), original.blocks[1](batch()))
    for each in (original, model):
        each(batch()).square().mean().backward()
    assert_equal(gradients(model), gradients(original, mean=True))


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["bart", "t5"])
@on_ranks(2)
def test_encoder_decoders_generate_between_steps(rank: int, world: int, kind: str) -> None:
    shared = dict(vocab_size=32, d_model=16, decoder_start_token_id=0, forced_eos_token_id=None)
    if kind == "t5":
        config: Any = transformers.T5Config(d_kv=8, d_ff=16, num_layers=2, num_heads=2, **shared)
    else:
        sizes = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
        config = transformers.BartConfig(encoder_ffn_dim=16, decoder_ffn_dim=16, **sizes, **shared)
    original, model = both(lambda: transformers.AutoModelForSeq2SeqLM.from_config(config).eval(), ac="full")
    ids = torch.arange(3, 9)[None] + rank
    for _ in range(2):
        with torch.inference_mode():  # the first forward of all makes the tensors into which FSDP2 gathers
            wanted = original.generate(ids, max_new_tokens=4, do_sample=False)
            assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), wanted)
        for each in (original, model):
            each.zero_grad()
            each(input_ids=ids, labels=ids).loss.backward()
        # The gradients of the encoder's output, one a layer of the decoder, are added in another order.
        torch.testing.assert_close(gradients(model), gradients(original, mean=True), rtol=1e-5, atol=1e-8)
        assert all(isinstance(p, DTensor) for p in model.parameters())


def _fourier(layer: Any, x: torch.Tensor) -> torch.Tensor:
    modes = torch.einsum("fi,iof->fo", torch.fft.rfft(x.float(), dim=0)[:3], layer.modes)
    return torch.fft.irfft(modes, n=4, dim=0)  # in float32


class Spectral(Block):
    def forward(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        return super().forward(x) + self.fourier(self.norm(x))


def _spectral() -> nn.Module:
    return Spectral(fourier=Layer(_fourier, modes=nn.Parameter(torch.randn(8, 8, 3, dtype=torch.cfloat) / 3)))


@on_ranks(2)
def test_bfloat16_with_complex_weights_and_layers_that_return_float32(rank: int, world: int) -> None:
    original, model = both(lambda: Net(_spectral), ac="full", precision="bf16")
    for each in (original, model):
        each(batch()).float().square().mean().backward()
    ours, wanted = gradients(model), gradients(original, mean=True)
    for name in ("blocks.0.fourier.modes", "inp.weight", "heads.a.weight"):
        assert ours[name].dtype == wanted[name].dtype
        # bfloat16 has 8 bits
        assert (ours[name] - wanted[name]).norm() < 0.05 * wanted[name].norm(), name
    assert wanted["blocks.0.fourier.modes"].imag.norm() > 0


@on_ranks(2)
def test_recurrent_layers_under_sequential(rank: int, world: int) -> None:
    def recurrent() -> nn.Module:
        return Layer(lambda layer, x, *_: x + layer.rnn(x[None])[0][0], rnn=nn.LSTM(8, 8, batch_first=True))

    train(lambda: Net(recurrent), lambda m, n: m(batch(n)).square().mean().backward(), "sequential")
