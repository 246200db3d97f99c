"""Decide which parameters are gathered together, before anything is changed.

A *unit* is made by one call of ``fully_shard``: parameters that are gathered by one all-gather and reduced by one
reduce-scatter. Each parameter belongs to exactly one unit, or to none (replicated).
"""

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from nemo_like._util.module_tree import bare_name
from nemo_like._util.table import totals
from nemo_like._util.words import a_or_an


@dataclass(eq=False)
class Unit:
    """Parameters that travel together, and the modules whose forward needs them."""

    name: str  # Fully qualified names of the modules, joined by ``+``; ``""`` is the root.
    # ``layer`` | ``tail`` | ``embedding`` | ``root`` | ``dtype`` (those of a unit that are stored in another dtype).
    kind: str
    modules: tuple[nn.Module, ...]
    params: list[nn.Parameter] = field(default_factory=list)

    @property
    def stack(self) -> str:
        """Return the name of the module that a layer is one of many in."""
        return self.name.rpartition(".")[0] if self.kind == "layer" else ""


@dataclass
class UnitPlan:
    """Every unit of a model, and the parameters left out of all of them."""

    layers: list[Unit]  # In the order of the caller's layers, shared ones once.
    tail: Unit | None
    embedding: Unit | None  # The input embedding of a model whose head is the tail, and has a weight of its own.
    root: Unit
    by_dtype: list[Unit]
    # Whole on every rank: parameters without elements or not floating point, frozen scalars, those that the caller left out.
    replicated: list[nn.Parameter]
    # Modules that the caller has sharded before: units inside these, with their own mesh, policy and parameters.
    theirs: list[nn.Module]
    top_down: bool  # Some parameter is owned by a unit outside of the module it sits in, so that owners come first.

    @property
    def units(self) -> list[Unit]:
        """In the order in which they must be applied.

        ``fully_shard`` does not look into modules that already are units, so the usual order is from the leaves to
        the root. A parameter that sits in one unit and is owned by another has to be taken by its owner before that.
        """
        ends = [unit for unit in (self.tail, self.embedding) if unit is not None]
        if self.top_down:
            return [self.root, *ends, *self.layers, *self.by_dtype]
        return [*self.layers, *ends, self.root]


def plan_units(
    model: nn.Module,
    layers: Sequence[Any],
    *,
    tail: str | Sequence[nn.Module] | None = "auto",
    frozen_sharding: str = "root",
    ends: str = "apart",
    ignored_params: Iterable[nn.Parameter] = (),
    apart: Iterable[nn.Parameter] = (),
) -> UnitPlan:
    """Give every parameter of `model` to one unit. Changes nothing; see `shard_layers` for arguments and errors."""
    names = {module: bare_name(name) for name, module in model.named_modules()}
    for holder, name in names.items():
        if getattr(holder, "sparse", False) is True and any(p.requires_grad for p in holder.parameters(recurse=False)):
            raise ValueError(
                f"{name or 'The model'!r} has sparse=True: FSDP2 cannot reduce sparse gradients. Build it with "
                "sparse=False, or use strategy='ddp'."
            )
    theirs = sharded_by_caller(model)
    inside = {module for unit in theirs for module in unit.modules()}
    groups = {m: group for m, group in _layer_groups(model, layers, names).items() if m not in inside}
    towers = _frozen_towers(groups)
    ignored = set(ignored_params)
    taken = {p for unit in theirs for p in unit.parameters()} | set(apart)
    replicated = [p for p in model.parameters() if p not in taken and (p in ignored or not _shardable(model, p))]
    if frozen_sharding != "per_layer":
        if frozen_sharding == "replicate":
            replicated = list(dict.fromkeys([*replicated, *(p for m in towers for p in m.parameters())]))
        groups = {module: group for module, group in groups.items() if module not in towers}

    layer_units = [Unit(names[module], "layer", (module,)) for module in groups]
    tail = None if ends == "root" else tail
    tail_modules = tuple(m for m in _tail(model, list(groups), tail, names) if m not in inside)
    owners = _owners(model, {m: u for u in layer_units for m in u.modules} | dict.fromkeys(tail_modules, "tail"))
    if any(len(owners[p]) > 1 for m in tail_modules for p in m.parameters()):
        owners = {p: {"root" if o == "tail" else o for o in units} for p, units in owners.items()}  # tied: no tail
        tail_modules = ()
    tail_unit = Unit("+".join(names[m] for m in tail_modules), "tail", tail_modules) if tail_modules else None
    root = Unit("", "root", (model,))
    left_out = taken | set(replicated)
    embedding, module = None, _find_embedding(tail_modules, names)
    rows = set() if module is None else {*module.parameters()}
    if module is not None and not left_out & rows and all(owners[p] == {"root"} for p in rows):
        embedding = Unit(names[module], "embedding", (module,))
        owners |= {param: {embedding} for param in rows}
    hoisted = False
    for param, units in ((param, units) for param, units in owners.items() if param not in left_out):
        # The lowest unit that holds every place where a shared parameter sits is the root: units do not nest otherwise.
        owner = next(iter(units)) if len(units) == 1 else "root"
        hoisted |= len(units) > 1 and "root" not in units
        unit = owner if isinstance(owner, Unit) else tail_unit if owner == "tail" else root
        assert unit is not None
        unit.params.append(param)
    sharded = [*layer_units, *(unit for unit in (tail_unit, embedding, root) if unit is not None)]
    by_dtype = [split for unit in sharded for split in _split(unit, names)]
    top_down = hoisted or bool(by_dtype)
    return UnitPlan(layer_units, tail_unit, embedding, root, by_dtype, replicated, theirs, top_down)


_PADDING = 0.25  # As a share of a parameter: with more than that on dim 0, another dim is looked for.


def shard_dim(param: torch.Tensor, ranks: int) -> int:
    """The dim that one parameter is cut on for `ranks` ranks: 0, unless that would leave ranks with nothing but padding.

    Every rank holds equal parts, so 8 experts on dim 0 over 64 ranks take the memory of 64. Then it is the first dim that
    the ranks divide, if there is one: FSDP2 pads on dim 0 alone. A gather copies such a parameter once more than others.
    The same for a packed weight that tensor parallelism has cut on dim 0: no placement describes a part of its part.

    >>> shard_dim(torch.empty(8, 14336, 4096, device="meta"), 64)
    1
    >>> shard_dim(torch.empty(128256, 4096, device="meta"), 1024)
    0
    """
    if param.dim() < 2:
        return 0
    if isinstance(param, DTensor):
        stays = not any(
            getattr(place, "dim", None) == 0 and hasattr(place, "split_factor") for place in param.placements
        )
    else:
        stays = padded_rows(param, ranks) <= (1 + _PADDING) * param.shape[0]
    if stays:
        return 0
    return next((dim for dim in range(1, param.dim()) if param.shape[dim] and param.shape[dim] % ranks == 0), 0)


def padded_rows(param: torch.Tensor, ranks: int) -> int:
    """Return the size of dim 0 with FSDP2's padding, so that `ranks` ranks divide it."""
    return -(-param.shape[0] // ranks) * ranks


def sharded_by_caller(model: nn.Module) -> list[nn.Module]:
    """The outermost modules below `model` that ``fully_shard`` was called on.

    Raises:
        ValueError: it was called on `model` itself.
    """
    sharded: list[nn.Module] = []
    inside: set[nn.Module] = set()
    modules: dict[str, nn.Module] = dict(model.named_modules())
    for name, module in modules.items():
        if not isinstance(module, FSDPModule) or module in inside:
            continue
        if not name:
            raise ValueError(
                f"This {type(model).__name__} is sharded already: shard_layers must be called once, on a model that "
                "was not passed to fully_shard. Only parts of it may be sharded before."
            )
        sharded.append(module)
        inside.update(module.modules())
    return sharded


def _layer_groups(model: nn.Module, layers: Sequence[Any], names: dict[nn.Module, str]) -> dict[nn.Module, str]:
    """Return the layers, once each, with their groups."""
    groups: dict[nn.Module, str] = {}
    for index, layer in enumerate(layers):
        module = layer if isinstance(layer, nn.Module) else getattr(layer, "module", None)
        if not isinstance(module, nn.Module):
            raise TypeError(f"layers[{index}] is {a_or_an(layer)}; it must be a module of the model.")
        if module not in names:
            raise ValueError(f"layers[{index}], {a_or_an(module)}, is not in the model: pass modules of it.")
        if module is model:
            raise ValueError(f"layers[{index}] is the model itself; pass its repeated blocks.")
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            raise ValueError(f"layers[{index}], {names[module]!r}, is a container; pass the modules in it.")
        groups.setdefault(module, "" if isinstance(layer, nn.Module) else layer.group)
    if not groups:
        raise ValueError("There are no layers to shard; pass the model's repeated blocks.")
    for module in groups:
        for inner in module.modules():
            if inner is not module and inner in groups:
                raise ValueError(f"Layer {names[inner]!r} is inside layer {names[module]!r}; pass one of them.")
    return groups


def _frozen_towers(groups: dict[nn.Module, str]) -> list[nn.Module]:
    """Layers that hold no trainable parameter and that some rank may skip.

    A frozen layer counts when its group is vision or audio, or, without groups, when other layers
    train: the layers of a wholly frozen stack carry every batch.
    """
    frozen = [m for m in groups if _has_params(m) and not any(p.requires_grad for p in m.parameters())]
    if any(groups.values()):
        return [module for module in frozen if groups[module] in ("vision", "audio")]
    return [] if len(frozen) == len(groups) else frozen


def _has_params(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _shardable(model: nn.Module, param: nn.Parameter) -> bool:
    if param.ndim == 0 and param.requires_grad:
        name = next(name for name, p in model.named_parameters() if p is param)
        raise ValueError(
            f"Parameter {name!r} is a trainable scalar, which FSDP cannot shard: "
            "make it one-dimensional with one element, or use strategy='ddp', which has it whole on every rank."
        )
    # One without elements (no register tokens) has nothing to reduce, and FSDP2 dies of it.
    return param.ndim > 0 and param.numel() > 0 and (param.is_floating_point() or param.is_complex())


def _tail(
    model: nn.Module, layers: list[nn.Module], tail: str | Sequence[nn.Module] | None, names: dict[nn.Module, str]
) -> tuple[nn.Module, ...]:
    """The final norm and the output head, or nothing."""
    if tail is None:
        return ()
    if isinstance(tail, str):
        if tail != "auto":
            raise ValueError(f"tail is {tail!r}; it must be 'auto', None, or the modules after the last layer.")
        return _find_tail(model, layers, names)
    for module in tail:
        if module not in names:
            raise ValueError(f"tail has {a_or_an(module)} that is not in the model.")
        if any(module in layer.modules() or layer in module.modules() for layer in layers):
            raise ValueError(f"tail module {names[module]!r} overlaps a layer.")
    return tuple(tail)


def _find_tail(model: nn.Module, layers: list[nn.Module], names: dict[nn.Module, str]) -> tuple[nn.Module, ...]:
    if not layers:
        return ()
    order = {module: index for index, module in enumerate(names)}
    last = max(order[layer] for layer in layers)
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if callable(get_head) else None
    if head is None:
        # A linear layer after the blocks with one output per token of some embedding; a projector has another size.
        vocabularies = {m.num_embeddings for m in names if isinstance(m, nn.Embedding)}
        tails = [m for m in names if isinstance(m, nn.Linear) and order[m] > last and m.out_features in vocabularies]
        head = tails[0] if len(tails) == 1 else None
    inside = {m for layer in layers for m in layer.modules()}
    if not isinstance(head, nn.Module) or head not in names or head in inside or not _has_params(head):
        return ()
    parents = {stack.rpartition(".")[0] for stack in {names[layer].rpartition(".")[0] for layer in layers}}
    if len(parents) != 1:
        return (head,)  # several stacks: which one the head follows is not known here
    parent = parents.pop()
    norms = [
        m
        for m in model.get_submodule(parent).children()
        if order[m] > last and "norm" in type(m).__name__.lower() and _has_params(m)
    ]
    # Together where they can be: a unit reduces the gradients of one storage dtype.
    dtypes = {p.dtype for m in (*norms, head) for p in m.parameters() if p.requires_grad}
    return (norms[0], head) if len(norms) == 1 and len(dtypes) <= 1 else (head,)


def _find_embedding(tail: Sequence[nn.Module], names: dict[nn.Module, str]) -> nn.Module | None:
    """Return the embedding of the tokens whose scores the head computes, the last module of `tail`; None: it is not
    known."""
    rows = getattr(getattr(tail[-1], "weight", None), "shape", (0,))[0] if tail else 0
    alike = [m for m in names if isinstance(m, nn.Embedding) and rows and m.num_embeddings == rows]
    get_inputs = getattr(next(iter(names)), "get_input_embeddings", None)
    with contextlib.suppress(NotImplementedError):  # SAM's masks are as many as its last linear has outputs
        inputs = get_inputs() if get_inputs is not None else None
        alike = [m for m in alike if not isinstance(inputs, nn.Module) or m in inputs.modules()]
    if len(alike) != 1:
        return None
    # PEFT's wrapper of rows that train reads the weight in a forward of its own.
    plain = re.sub(r"(\.token_adapter\.base_layer|\.original_module)$", "", names[alike[0]])
    embedding = next(module for module, name in names.items() if name == plain)
    # A gradient takes the weight, or a norm inside, where the code does more than look rows up; then it is the root's.
    known = type(alike[0]).forward.__module__.partition(".")[0] in ("torch", "transformers", "peft")
    holders = (module for module in embedding.modules() if module._parameters)
    return embedding if known and all(isinstance(m, nn.Embedding | nn.ParameterDict) for m in holders) else None


def _owners(model: nn.Module, tops: dict[nn.Module, Any]) -> dict[nn.Parameter, set[Any]]:
    """For each parameter, the units in whose modules it is registered."""
    owners: dict[nn.Parameter, set[Any]] = {}
    seen: set[tuple[nn.Module, int]] = set()

    def visit(module: nn.Module, owner: object) -> None:
        owner = tops.get(module, owner)
        if (module, id(owner)) in seen:
            return
        seen.add((module, id(owner)))
        for param in module._parameters.values():
            if param is not None:
                owners.setdefault(param, set()).add(owner)
        for child in module.children():
            visit(child, owner)

    visit(model, "root")
    return owners


def _split(unit: Unit, names: dict[nn.Module, str]) -> Iterator[Unit]:
    """Move trainable parameters stored in another dtype than most of the unit's into units of their own.

    FSDP2 reduces the gradients of a unit in one buffer and refuses more than one dtype there (frozen ones may differ).
    """
    elements = totals((param.dtype, param.numel()) for param in unit.params if param.requires_grad)
    if len(elements) < 2:
        return
    main = max(elements, key=lambda dtype: elements[dtype])
    for dtype in [d for d in elements if d != main]:
        params = [p for p in unit.params if p.requires_grad and p.dtype == dtype]
        chosen = set(params)
        holders = [
            m for top in unit.modules for m in top.modules() if any(p in chosen for p in m.parameters(recurse=False))
        ]
        for holder in holders:
            if holder in unit.modules or isinstance(holder, nn.ParameterList | nn.ParameterDict):
                names_here = [name for name, p in holder.named_parameters(recurse=False) if p in chosen]
                way_out = (
                    "Put the complex ones into a module of their own, as a cast to a real dtype drops the imaginary part."
                    if dtype.is_complex or main.is_complex
                    else "Store it in one dtype (model.to(torch.float32)) and choose the compute dtype in the "
                    "mixed-precision policy."
                )
                raise ValueError(
                    f"{names[holder] or 'the model'!r} itself holds {', '.join(names_here)} in {dtype} while most of "
                    f"its parameters are in {main}; FSDP reduces the gradients of a unit in one dtype. {way_out}"
                )
        modules = tuple(m for m in holders if not any(m is not o and m in o.modules() for o in holders))
        unit.params = [p for p in unit.params if p not in chosen]
        yield Unit("+".join(names[m] for m in modules), "dtype", modules, params)
