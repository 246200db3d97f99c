"""To which modality a layer belongs: language, vision, audio or other."""

from __future__ import annotations

import re

from torch import nn

from nemo_like.layers.names import bare, bare_children

GROUPS = ("language", "vision", "audio", "other")

# Words of names and classes, looked for between the root and the layer; the segment nearest to the layer decides.
_WORDS = {
    "vision": re.compile(r"vision|visual|image|(?<![a-z])img|video|pixel|(?<![a-z])vit(?![a-z])|vqmodel", re.IGNORECASE),
    "audio": re.compile(r"audio|speech|acoustic|wav2vec|whisper|(?<![a-z])codec|mel(?![a-z])|sound", re.IGNORECASE),
    "language": re.compile(r"language|text|(?<![a-z])l?lm(?![a-z])|thinker|talker", re.IGNORECASE),
}
_MODALITIES = {"image": "vision", "video": "vision", "text": "language", "audio": "audio", "time": "other"}


def group_of(root: nn.Module, fqn: str) -> str:
    """The group of the layer `fqn` of `root`.

    The nearest ancestor that says something decides: first by what a Hugging Face tower declares
    (``input_modalities``, where it is a single one), then by the words in its name and its class name. Where nothing
    says anything, a layer is ``language``: a plain decoder need not call itself one.
    """
    path: list[tuple[str, nn.Module]] = [("", root)]
    current = root
    for name in fqn.split("."):
        current = dict(bare_children(current))[name]
        path.append((name, current))
    for name, module in reversed(path):
        for verdict in (_by_words(name), _by_declaration(bare(module)), _by_words(type(bare(module)).__name__)):
            if verdict is not None:
                return verdict
    return "language"


def _by_declaration(module: nn.Module) -> str | None:
    declared = getattr(module, "input_modalities", None)
    if declared is None or not hasattr(type(module), "main_input_name"):
        return None
    groups = {_MODALITIES.get(str(word), "other") for word in ([declared] if isinstance(declared, str) else declared)}
    return groups.pop() if len(groups) == 1 else None


def _by_words(text: str) -> str | None:
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text)
    hits = [group for group, pattern in _WORDS.items() if pattern.search(spaced)]
    return hits[0] if len(hits) == 1 else None
