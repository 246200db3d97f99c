"""To which modality a layer belongs: language, vision, audio or other."""

import inspect
import re
from collections.abc import Iterable

from torch import nn

from nemo_like._util.module_tree import bare, bare_children

GROUPS = ("language", "vision", "audio", "other")

# "Qwen3VLVisionBlock" is "Qwen3VL Vision Block".
_WORD_ENDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")

# Words of names and of class names between the root and the layer.
_WORDS = {
    "vision": re.compile(r"vision|visual|image|\bimg\b|video|pixel|\bvit\b|vqvae|vqmodel", re.IGNORECASE),
    "audio": re.compile(r"audio|speech|acoustic|wav|codec\b|\bmel\b|sound|vocoder", re.IGNORECASE),
    "language": re.compile(r"language|text|\bl?lm\b|thinker|talker", re.IGNORECASE),
}
# The inputs that a Hugging Face model declares, in its class attributes `input_modalities` and `main_input_name`.
_MODALITIES = {"image": "vision", "video": "vision", "text": "language", "audio": "audio", "time": "other"}
_MAIN_INPUTS = {
    "pixel_values": "vision",
    "pixel_values_videos": "vision",
    "input_features": "audio",
    "input_values": "audio",
    "spectrogram": "audio",
    "past_values": "other",
}
# Names of embeddings that look up no token ids: positions, times, kinds, and the parts of graphs.
_NO_TOKENS = re.compile(
    r"pos|time|step|label|class|type|rel|bias|node|edge|atom|bond|degree|freq|seg|quer", re.IGNORECASE
)
_LISTS = (nn.ModuleList, nn.Sequential)
_TOKEN_EMBEDDING = re.compile(r"embed_tokens|wte|tok(en)?_emb.*|word_embeddings|shared")


def groups_of(root: nn.Module, fqns: Iterable[str]) -> list[str]:
    """The group of each of the layers `fqns` of `root`.

    The ancestor nearest to the layer that tells something decides: by the words in its name (``vision_tower``), by
    owning a token embedding (language: this tells a speech model's text decoder from its encoder), by the inputs that a
    Hugging Face encoder declares, or by the words in its class name.

    Where nothing tells anything, the layer is ``language`` if its model takes text: the model or a part on the way has a
    `vocab_size` or an `eos_token_id` in its config, takes ``input_ids``, or embeds ids. Else it is ``vision`` in a model
    that convolves in two or three dimensions, and ``other`` in any other.
    """
    return [_nearest_verdict(path) or _default_group(root, path) for path in (_path(root, fqn) for fqn in fqns)]


def group_of(root: nn.Module, fqn: str) -> str:
    """`groups_of` for one layer."""
    return groups_of(root, [fqn])[0]


def _path(root: nn.Module, fqn: str) -> list[tuple[str, nn.Module]]:
    """Return `root` and the modules from there to `fqn`, each with its name in the one before."""
    path = [("", bare(root))]
    for name in fqn.split("."):
        path.append((name, bare(path[-1][1].get_submodule(name))))
    return path


def _nearest_verdict(path: list[tuple[str, nn.Module]]) -> str | None:
    for name, module in reversed(path):
        verdict = (
            _by_words(name.replace("_", " "))
            or ("language" if _embeds_tokens(module) else None)
            or _by_declaration(module)
            or _by_words(_WORD_ENDS.sub(" ", type(module).__name__))
        )
        if verdict:
            return verdict
    return None


def _default_group(root: nn.Module, path: list[tuple[str, nn.Module]]) -> str:
    *ancestors, layer = (module for _, module in path)
    if any(map(_takes_text, ancestors)) or _embeds_ids(ancestors, layer):
        return "language"
    return "vision" if any(isinstance(part, nn.Conv2d | nn.Conv3d) for part in root.modules()) else "other"


def _takes_text(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    has_ids = any(isinstance(getattr(config, name, None), int) for name in ("vocab_size", "eos_token_id"))
    if has_ids or getattr(module, "main_input_name", None) == "input_ids":
        return True
    try:
        return "input_ids" in inspect.signature(type(module).forward).parameters
    except (TypeError, ValueError):  # a forward that Python cannot look into
        return False


def _embeds_ids(ancestors: list[nn.Module], layer: nn.Module) -> bool:
    """Return whether a part next to the way to `layer` looks ids up in an embedding.

    The purpose of an embedding is not in its size: a byte-level vocabulary has 256 rows, and a table of positions has
    thousands. So names decide. An embedding in a part with a list of its own, as a text encoder is, belongs to that part.
    """
    on_the_way = {id(module) for module in (*ancestors, layer)}
    for ancestor in ancestors:
        for name, part in bare_children(ancestor):
            if id(part) in on_the_way:
                continue
            if isinstance(part, nn.Embedding):
                if not _NO_TOKENS.search(name):
                    return True
            elif not isinstance(ancestor, _LISTS) and not any(isinstance(m, _LISTS) for m in part.modules()):
                tables = (table for table, inner in part.named_modules() if isinstance(inner, nn.Embedding))
                if any(not _NO_TOKENS.search(f"{name}.{table}") for table in tables):
                    return True
    return False


def _embeds_tokens(module: nn.Module) -> bool:
    """Return whether `module` itself, or its child ``embeddings``, owns an embedding named as token embeddings are."""
    return any(
        (isinstance(child, nn.Embedding) and _TOKEN_EMBEDDING.fullmatch(name))
        or (name == "embeddings" and _embeds_tokens(child))
        for name, child in bare_children(module)
    )


def _by_declaration(module: nn.Module) -> str | None:
    main_input = getattr(module, "main_input_name", None)
    if main_input is None:
        return None
    declared = getattr(module, "input_modalities", ())
    words = [declared] if isinstance(declared, str) else list(declared)
    groups = {_MODALITIES.get(str(word), "other") for word in words}
    by_main_input = _MAIN_INPUTS.get(main_input) if isinstance(main_input, str) else None
    # "text" is the base class's default: it may mean nothing
    return groups.pop() if len(groups) == 1 and declared != "text" else by_main_input


def _by_words(text: str) -> str | None:
    hits = [group for group, pattern in _WORDS.items() if pattern.search(text)]
    return hits[0] if len(hits) == 1 else None
