"""Names of the original model: module trees walked without their wrappers.

A wrapper (`torch.compile`, data parallel, PyTorch's checkpointing) adds one segment to every name below it. Callers write
names of the model they built, so the walks here look through wrappers and leave their segments out.
"""

import re
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from nemo_like._util.words import a_or_an

# Attribute under which a wrapper registers the module inside. The two last belong to wrappers whose attribute is the
# plain word "module", so those are told apart by class name.
_INNER_NAMES = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")
_MODULE_WRAPPERS = ("DistributedDataParallel", "DataParallel")


def check_model(model: object, name: str = "model") -> None:
    """Raise where `model`, the argument `name`, cannot be taken apart and changed.

    Raises:
        TypeError: it is not a module, or has a TorchScript one.
        ValueError: a parameter or a buffer of it has no shape yet.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name} is {a_or_an(model)}; it must be a torch.nn.Module.")
    scripted = [model] if isinstance(model, torch.jit.ScriptModule) else model.modules()
    if any(isinstance(module, torch.jit.ScriptModule) for module in scripted):
        raise TypeError(
            f"{name} {'is' if scripted == [model] else 'has'} a TorchScript module (torch.jit.script or torch.jit.trace), "
            "which cannot be taken apart. Give the nn.Module that it was made from; torch.compile takes the place of "
            "TorchScript."
        )
    unset = (key for key, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor))
    if (key := next(unset, None)) is not None:
        raise ValueError(
            f"{name} has {key!r}, whose shape is not known before the first forward (of nn.LazyLinear and the like). Call "
            "it once with a batch first, or give the layer its sizes."
        )


def inner_name(module: nn.Module) -> str | None:
    """The name under which the wrapper `module` registers its inside, or None where `module` is not a wrapper."""
    children = module._modules
    for name in _INNER_NAMES:
        if children.get(name) is not None:
            return name
    if type(module).__name__ in _MODULE_WRAPPERS and children.get("module") is not None:
        return "module"
    return None


def bare(module: nn.Module) -> nn.Module:
    """The module inside every wrapper, or the module itself."""
    while (name := inner_name(module)) is not None:
        inner = module._modules[name]
        assert inner is not None  # inner_name looked
        module = inner
    return module


def base_model(model: nn.Module) -> nn.Module:
    """The model inside every wrapper, and inside PEFT's adapters where there are some."""
    module = bare(model)
    get_base = getattr(module, "get_base_model", None)
    return get_base() if callable(get_base) else module


def bare_children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, child) of the bare module; children inside their wrappers."""
    for name, child in bare(module)._modules.items():
        if child is not None:
            yield name, bare(child)


def bare_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(FQN in the original model, module inside its wrappers) in registration order, each once under its first name."""
    seen: set[int] = set()
    stack = [("", bare(module))]
    while stack:
        name, current = stack.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield name, current
        stack.extend((join(name, key), child) for key, child in reversed(list(bare_children(current))))


def registered(model: nn.Module, fqn: str) -> nn.Module:
    """The module of this name in the original model as its parent calls it: where it is wrapped, the outermost wrapper."""
    module = model
    for name in filter(None, fqn.split(".")):
        module = bare(module).get_submodule(name)
    return module


def join(prefix: str, name: str) -> str:
    """``"a.b"`` from ``"a"`` and ``"b"``; ``"b"`` where the prefix is empty."""
    return f"{prefix}.{name}" if prefix else name


def bare_name(fqn: str) -> str:
    """`fqn` without the segments that wrappers add.

    >>> bare_name("_orig_mod.model.layers.0._checkpoint_wrapped_module.mlp")
    'model.layers.0.mlp'
    """
    return ".".join(part for part in fqn.split(".") if part not in _INNER_NAMES)


def glob_to_regex(pattern: str) -> re.Pattern[str]:
    """A glob over FQNs: ``*`` and ``?`` stay within one dotted segment, ``**`` crosses any number, ``[..]`` is a set.

    >>> bool(glob_to_regex("model.layers.*").fullmatch("model.layers.3"))
    True
    >>> bool(glob_to_regex("model.layers.*").fullmatch("model.layers.3.mlp"))
    False
    """
    tokens = re.findall(r"\*\*|\*|\?|\[[^\]]+\]|[^*?\[]+|\[", pattern)
    special = {"**": ".*", "*": "[^.]*", "?": "[^.]"}
    parts = []
    for token in tokens:
        if token in special:
            parts.append(special[token])
        elif token.startswith("[") and len(token) > 1:
            parts.append("[" + token[1:].replace("!", "^", 1) if token[1] == "!" else token)
        else:
            parts.append(re.escape(token))
    return re.compile("".join(parts))
