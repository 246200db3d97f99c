"""Tell from a module's structure its kind: a block, a container of siblings, or neither.

Modules are looked at inside of their wrappers, as `bare_modules` and `bare_children` yield them.
Nothing here looks for the classes of any library; the words looked for are the field's own (norm, attention, mixer).
"""

import re
from collections import Counter
from collections.abc import Iterator

from torch import nn

from nemo_like._util.module_tree import bare, bare_children
from nemo_like._util.table import grouped

_MIXER_WORDS = re.compile(r"attention|attn|mixer|mamba|ssm|rwkv|retention|recurrent", re.IGNORECASE)
_NORM_WORDS = re.compile(r"norm", re.IGNORECASE)
_NUMBERED = re.compile(r"(.*?)_?(\d+)")
# The base class from which Hugging Face models derive every block they can checkpoint, known by name alone.
_DECLARED_BASE = "GradientCheckpointingLayer"


def unadapted(module: nn.Module) -> nn.Module:
    """The module inside every adapter, which has it as ``base_layer``."""
    while (adapted := module._modules.get("base_layer")) is not None:
        module = bare(adapted)
    return module


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class of the unadapted module; FSDP2's generated ``FSDP<Name>`` class counts as ``<Name>``."""
    cls = type(unadapted(module))
    bases = cls.__bases__
    return bases[1] if len(bases) == 2 and bases[0].__name__ == "FSDPModule" else cls


def has_declared_base(module: nn.Module) -> bool:
    """Return whether a Hugging Face model itself offers to checkpoint `module`."""
    return any(base.__name__ == _DECLARED_BASE for base in type(module).__mro__)


def is_callable(module: nn.Module) -> bool:
    """Return whether `module` has a forward of its own: lists and bare ``nn.Module()`` namespaces have none."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def is_container(module: nn.Module) -> bool:
    """A module that only holds siblings: `ModuleList`, `ModuleDict`, a bare `nn.Module` with digit-named children."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return True
    return bool(module._modules) and not is_callable(module) and all(map(str.isdigit, module._modules))


def is_sequence(module: nn.Module) -> bool:
    """A container, or an `nn.Sequential`: its children are siblings."""
    return is_container(module) or isinstance(module, nn.Sequential)


def is_nested(module: nn.Module) -> bool:
    """Return whether `module` is a container of containers."""
    children = [child for _, child in bare_children(module)]
    return is_container(module) and bool(children) and all(map(is_container, children))


def has_names(module: nn.Module) -> bool:
    """Return whether `module` is a `ModuleDict` by words, such as tasks: one of which is asked for, rather than all in
    order."""
    return isinstance(module, nn.ModuleDict) and not all(map(_NUMBERED.fullmatch, module))


def parameter_count(*modules: nn.Module) -> int:
    """Elements of the distinct parameters of `modules` together; works on the meta device."""
    return sum({id(parameter): parameter.numel() for module in modules for parameter in module.parameters()}.values())


def weighted_parts(module: nn.Module) -> int:
    """Return how many modules in `module` own a matrix or a larger weight; a parametrised or adapted module counts
    once."""
    inner = unadapted(module)
    if "parametrizations" in inner._modules:
        return 1
    has_weight = any(parameter is not None and parameter.dim() >= 2 for parameter in inner._parameters.values())
    return int(has_weight) + sum(weighted_parts(child) for _, child in bare_children(inner))


def is_plain_block(module: nn.Module) -> bool:
    """May be a repeated block: made of parts, with a weight among them. No list, embedding, `Linear` or `Conv2d`."""
    return _may_be_block(module, least=1) and any(weighted_parts(c) for _, c in bare_children(unadapted(module)))


def is_strict_block(module: nn.Module) -> bool:
    """A block by its parts: two or more weights, and a normalisation or a token mixer. Experts and heads have none."""
    return _may_be_block(module, least=2) and (_holds(module, _NORM_WORDS) or _holds(module, _MIXER_WORDS))


def _may_be_block(module: nn.Module, *, least: int) -> bool:
    return is_callable(module) and "Embed" not in class_of(module).__name__ and weighted_parts(module) >= least


def _holds(module: nn.Module, words: re.Pattern[str]) -> bool:
    return any(
        words.search(name) or words.search(class_of(child).__name__) or _holds(child, words)
        for name, child in bare_children(unadapted(module))
    )


def has_mixer_outside(module: nn.Module, blocks: list[nn.Module]) -> bool:
    """Return whether `module` holds a token mixer that is in none of `blocks`."""
    return any(
        _MIXER_WORDS.search(name) or _MIXER_WORDS.search(class_of(child).__name__) or has_mixer_outside(child, blocks)
        for name, child in bare_children(module)
        if not any(child is block for block in blocks)
    )


def child_series(module: nn.Module) -> Iterator[list[nn.Module]]:
    """The series of siblings in `module` that might be repeated blocks.

    The members of a container or `nn.Sequential` are one series, and in a container of containers the members of those
    (a list of ``[attention, feed-forward]``). Otherwise children whose names differ only in a trailing number (``block1``,
    ``block2``) are one.
    """
    children = list(bare_children(module))
    if is_sequence(module):
        if is_nested(module):
            yield [inner for _, child in children for _, inner in bare_children(child)]
        elif children:
            yield [child for _, child in children]
        return
    stems = grouped(
        (match[1], child) for name, child in children if (match := _NUMBERED.fullmatch(name)) and not is_sequence(child)
    )
    yield from (members for members in stems.values() if len(members) > 1)


def blocks_in_series(parent: nn.Module, series: list[nn.Module], *, strict: bool) -> list[nn.Module]:
    """The members of `series` that are repeated blocks, in order; empty where it is not a run of blocks.

    A run repeats a class, or (one-layer models, pipeline splits) is a list of a single block. Where a class repeats in
    a list, the other members with parameters belong to it too: hybrid models mix attention, state-space and
    convolution blocks in one list. An `nn.Sequential` may also hold the embedding and the head, so only repeated
    classes count there.
    """
    looks_right = is_strict_block if strict else is_plain_block
    blocks = [child for child in series if looks_right(child)]
    repeated = {cls for cls, count in Counter(class_of(child) for child in blocks).items() if count > 1}
    if not repeated:
        return blocks if is_container(parent) and len(series) == len(blocks) == 1 else []
    if not is_container(parent):
        return [child for child in blocks if class_of(child) in repeated]
    return [child for child in series if _may_be_block(child, least=1)]


def is_list_of_experts(name: str, module: nn.Module) -> bool:
    """Return whether `module`, called `name`, is a list of experts."""
    return (
        isinstance(module, nn.ModuleList | nn.ModuleDict) and name.rpartition(".")[2] == "experts" and len(module) > 1
    )
