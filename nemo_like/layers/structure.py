"""What a module *is*, read from its structure: a block, a stage of blocks, a container, or none of these.

Nothing here looks at model class names of any library; the words looked for are the field's own (norm, attention).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from nemo_like.layers.names import bare, bare_children

# A repeated block holds a normalisation or a token mixer; an expert, a projection or a head usually holds neither.
_BLOCK_WORDS = re.compile(r"norm|attention|attn|mixer|mamba|ssm|rwkv|retention", re.IGNORECASE)
_NUMBERED = re.compile(r"(.*?)_?(\d+)")
# Share of a module's parameters that must lie in its inner blocks for the module to be a stage and no block.
_STAGE_SHARE = 0.5


@dataclass(frozen=True)
class Child:
    """One registered child: its name under its parent, and the object (perhaps a wrapper)."""

    name: str
    module: nn.Module


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class of the bare module; FSDP2's generated ``FSDP<Name>`` class counts as ``<Name>``."""
    cls = type(bare(module))
    base = cls.__mro__[2] if len(cls.__mro__) > 2 and cls.__mro__[1].__name__ == "FSDPModule" else None
    return base if base is not None else cls


def is_container(module: nn.Module) -> bool:
    """A module that only holds others: `ModuleList`, `ModuleDict`, or a bare `nn.Module` with digit-named children."""
    inner = bare(module)
    if isinstance(inner, nn.ModuleList | nn.ModuleDict):
        return True
    names = list(inner._modules)
    return bool(names) and type(inner).forward is nn.Module.forward and all(name.isdigit() for name in names)


def parameter_count(module: nn.Module) -> int:
    """Elements of the distinct parameters of `module`; works on the meta device."""
    return sum(parameter.numel() for parameter in module.parameters())


def leaves_with_parameters(module: nn.Module) -> int:
    """How many modules inside `module` hold parameters of their own."""
    return sum(1 for inner in bare(module).modules() if next(iter(inner.parameters(recurse=False)), None) is not None)


def is_plain_block(module: nn.Module) -> bool:
    """May be a repeated block: at least two parts with parameters, and not a mere container."""
    return not is_container(module) and leaves_with_parameters(module) >= 2


def is_strict_block(module: nn.Module) -> bool:
    """A block by its parts: it also holds a normalisation, an attention or another token mixer."""
    if not is_plain_block(module):
        return False
    inner = bare(module)
    return any(_BLOCK_WORDS.search(type(part).__name__) for part in inner.modules() if part is not inner) or bool(
        _BLOCK_WORDS.search(" ".join(inner._modules))
    )


def child_series(module: nn.Module) -> Iterator[tuple[str, list[Child]]]:
    """The series of siblings that might be repeated blocks: (how the series is named, its members).

    The members of a container or `nn.Sequential` are one series, named ``""``; otherwise children whose names differ
    only in a trailing number (``block1``, ``block2``) are one, named by their common stem.
    """
    children = [Child(name, child) for name, child in bare_children(module)]
    if is_container(module) or isinstance(bare(module), nn.Sequential):
        if children:
            yield "", children
        return
    stems: dict[str, list[Child]] = {}
    for child in children:
        match = _NUMBERED.fullmatch(child.name)
        if match:
            stems.setdefault(match[1], []).append(child)
    for stem, members in stems.items():
        if len(members) > 1:
            yield stem, members


def blocks_in_series(series: list[Child], *, strict: bool, sequential: bool) -> list[Child]:
    """The members of `series` that are repeated blocks, in order; empty where it is no run of blocks.

    A run repeats a class, or (one-layer models) is a list of a single block. Where a class repeats, strict blocks of
    other classes in the same list belong to it too: hybrid models mix attention and state-space blocks in one list.
    """
    looks_right = is_strict_block if strict else is_plain_block
    blocks = [child for child in series if looks_right(child.module)]
    counts = Counter(class_of(child.module) for child in blocks)
    repeated = {cls for cls, count in counts.items() if count > 1}
    if not repeated:
        # A lone block: a list of one, whether the model has one layer or a pipeline split left one here.
        return blocks if len(series) == 1 and len(blocks) == 1 and not sequential else []
    if sequential:  # nn.Sequential(embedding, block, block, head): only what repeats
        return [child for child in blocks if class_of(child.module) in repeated]
    return [child for child in blocks if class_of(child.module) in repeated or is_strict_block(child.module)]


def inner_blocks(module: nn.Module) -> list[nn.Module]:
    """The strict, single-class runs anywhere inside `module`, outermost first, without entering the runs' members."""
    found: list[nn.Module] = []
    for _, series in child_series(module):
        blocks = blocks_in_series(series, strict=True, sequential=isinstance(bare(module), nn.Sequential))
        if len({class_of(child.module) for child in blocks}) == 1:
            found += [child.module for child in blocks]
    for _, child in bare_children(module):
        if not any(child is block for block in found):
            found += inner_blocks(child)
    return found


def is_stage(module: nn.Module) -> bool:
    """A module that is mostly a run of blocks (a Swin stage, an encoder): its blocks are the layers, not itself."""
    total = parameter_count(module)
    held = sum(parameter_count(block) for block in inner_blocks(module))
    return total > 0 and held >= _STAGE_SHARE * total
