"""Which of the layers found a caller means: a modality scope."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torch import nn

from nemo_like.layers.find import Layer
from nemo_like.layers.groups import GROUPS
from nemo_like.options import did_you_mean, normalise

# "multimodal" is what multimodal users call everything that is not the language model.
_SCOPES = {"all": GROUPS, "multimodal": ("vision", "audio"), **{group: (group,) for group in GROUPS}}


def is_frozen(module: nn.Module) -> bool:
    """True where `module` has parameters and none of them trains. LoRA adapters in a frozen layer train."""
    parameters = list(module.parameters())
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


def select_layers(found: Sequence[Layer], scope: str | Iterable[str] = "all") -> tuple[Layer, ...]:
    """The layers of `found` in `scope`, in their order.

    Args:
        found: what `find_layers` returned.
        scope: ``"all"``, ``"language"``, ``"vision"``, ``"audio"``, ``"other"``, ``"multimodal"`` (vision and audio),
            or a list of these.

    Raises:
        ValueError: a scope is unknown, or nothing is left; the message says what there is.
        TypeError: `scope` is neither a string nor a list of strings.
    """
    words = _parse_scope(scope)
    wanted = {group for word in words for group in _SCOPES[word]}
    selected = [layer for layer in found if layer.group in wanted]
    if not selected:
        raise ValueError(f"scope {scope!r} selects no layer; this model has {_inventory(found)}.")
    return tuple(selected)


def _parse_scope(scope: str | Iterable[str]) -> list[str]:
    given = [scope] if isinstance(scope, str) else list(scope) if isinstance(scope, Iterable) else [scope]
    if not all(isinstance(word, str) for word in given):
        raise TypeError(f"scope is {scope!r}; it must be one of {', '.join(_SCOPES)} or a list of these.")
    for word in given:
        if normalise(word) not in _SCOPES:
            raise ValueError(
                f"scope {word!r} is unknown; it must be one of {', '.join(_SCOPES)}."
                + did_you_mean(normalise(word), list(_SCOPES))
            )
    if not given:
        raise ValueError(f"scope is empty; it must name at least one of {', '.join(_SCOPES)}.")
    return [normalise(word) for word in given]


def _inventory(found: Sequence[Layer]) -> str:
    counts = Counter(layer.group for layer in found)
    return (
        ", ".join(f"{count} {group} layer{'s' if count > 1 else ''}" for group, count in counts.items()) or "no layers"
    )
