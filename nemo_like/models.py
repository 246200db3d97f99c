"""Read the models that `--model` may name: a preset, a ``config.json`` or its folder, or ``module:function``.

Nothing is downloaded, and weights are random: the commands and the recipe need shapes. Presets are the published
shapes of the model families; transformers (extra ``hf``) builds them and is imported when a model is built.
"""

import importlib
import inspect
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from nemo_like._util.extras import require
from nemo_like._util.log import warn_once
from nemo_like._util.tensors import map_tensors, tensors_in
from nemo_like._util.words import a_or_an
from nemo_like.presets import PRESETS, unknown_model
from nemo_like.transformers_compat import text_config


@dataclass(frozen=True)
class ModelSource:
    """A model that can be built on any device, `meta` included, and the input that a training step gives it."""

    name: str  # Name that the caller wrote.
    config: Any  # Its transformers config, or None for a ``module:function``.
    # Builds it on the current default device; a ``module:function`` may return a pair of it and a sample input.
    factory: Callable[[], Any]
    # Sample input that ``module:function`` returned; None: it returned the model alone, or was not called yet.
    sample: Any = None

    def build(self, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> nn.Module:
        """The model in training mode, with random weights, on `device`, with parameters of `dtype` (default: float32)."""
        return self.built(device, dtype)[0]

    def built(self, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> tuple[nn.Module, Self]:
        """`build`, and this source with the sample input of a ``module:function``'s model, and its config where it is
        one of transformers."""
        with torch.device(device):
            result = self._call_factory()
        model, sample = result if isinstance(result, tuple) else (result, None)
        model = (model if dtype is None else model.to(dtype)).train()
        config = getattr(model, "config", None) if hasattr(model, "main_input_name") else None
        return model, replace(self, sample=sample, config=config if self.config is None else self.config)

    def sample_of(self, sequences: int) -> Any:
        """The sample input with so many sequences: the first sizes that are equal to its first tensor's are the batch."""
        tensors = tensors_in(self.sample)
        batch = tensors[0].shape[0] if tensors and tensors[0].dim() else 1

        def one(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.dim() or tensor.shape[0] != batch:
                return tensor
            if tensor.is_meta:
                return tensor.new_empty((sequences, *tensor.shape[1:]))
            return tensor[torch.arange(sequences) % batch]

        return map_tensors(one, self.sample)

    def _call_factory(self) -> Any:
        if self.config is None:
            return self.factory()  # the caller's own code raises its own errors
        try:
            return self.factory()
        except (
            ValueError,
            TypeError,
            RuntimeError,
            AttributeError,
            LookupError,
            AssertionError,
            ArithmeticError,
        ) as error:
            raise ValueError(f"transformers cannot build {self.name!r} from its config: {error}") from error

    @property
    def vocab_size(self) -> int | None:
        """Return the number of token ids; None where the model does not state it."""
        return getattr(text_config(self.config), "vocab_size", None)

    def sample_input(
        self, batch_size: int, seq_len: int, device: str | torch.device = "cpu", *, predicted: bool = False
    ) -> dict[str, torch.Tensor]:
        """Token ids, (batch_size, seq_len) int64, as ``input_ids`` and, shifted by the model itself, as ``labels``.

        `predicted`: the step is not run, so that rotary embeddings take any length (`check_positions`).
        """
        if self.vocab_size is None:
            raise ValueError(f"Model {self.name!r} states no vocab_size, so no token input can be made up for it.")
        check_positions(self.config, "--seq-len", seq_len, self.name if predicted else "")
        ids = torch.randint(self.vocab_size, (batch_size, seq_len), generator=torch.Generator().manual_seed(0)).to(
            device
        )
        return {"input_ids": ids, "labels": ids.clone()}


def resolve_model(spec: str) -> ModelSource:
    """The model that `spec` names: a preset of `PRESETS`, a path to a ``config.json`` or its folder, or ``module:function``.

    Raises:
        ValueError: it names none of these; the message lists the known names.
        MissingExtraError: transformers is needed and not installed.
    """
    if spec in PRESETS:
        return _from_mapping(spec, PRESETS[spec])
    path = Path(spec)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"Model {spec!r} is a folder without a config.json, which describes the model.")
        path = path / "config.json"
    if path.is_file():
        values = read_config(path)
        if "auto_map" in values:
            warn_once(
                f"{spec} has auto_map, code of its own (trust_remote_code), which is not run: this is transformers' "
                f"class of model_type {values['model_type']!r}. For its own class give --model module:function."
            )
        return _from_mapping(spec, values)
    if ":" in spec and os.sep not in spec:
        return ModelSource(spec, None, _import_factory(spec))
    raise unknown_model(spec)


def most_positions(config: object) -> int | None:
    """Return the tokens of the longest sequence that a model of `config` takes; None: the config does not state it."""
    text = text_config(config)
    positions = getattr(text, "max_position_embeddings", None)
    if isinstance(positions, bool) or not isinstance(positions, int) or positions < 1:
        return None
    rope = getattr(text, "rope_parameters", None) or {}
    ropes = [rope, *(part for part in rope.values() if isinstance(part, Mapping))]  # one for each kind of layer
    # Scaled (YaRN and others): the config has the length before it, the factor, or both.
    scaled = [(part.get("factor") or 1) * (part.get("original_max_position_embeddings") or positions) for part in ropes]
    return int(max(positions, *scaled))


def class_taken(model: nn.Module) -> str:
    """Return words for a class of transformers in the place of one that the config names; else none."""
    named = getattr(getattr(model, "config", None), "auto_map", None)
    if not named or not type(model).__module__.startswith("transformers."):
        return ""
    return f", as transformers' {type(model).__name__} without the code of its auto_map,"


def check_positions(config: object, option: str, tokens: int, predicted: str = "") -> None:
    """Raise ValueError where sequences of `tokens` tokens, as `option` requires, are longer than a model of `config` takes.

    Without a word in `config` on its positions, nothing is checked.

    Args:
        predicted: name of a model whose step is predicted and not run. Rotary embeddings then take any length: they have no
            weights, so bytes and seconds are right. A warning names it once.
    """
    most = most_positions(config)
    if most is not None and tokens > most:
        rotates = ("rope_parameters", "rope_theta", "rope_scaling")  # rotary embeddings, which have no weights
        if predicted and any(getattr(text_config(config), name, None) for name in rotates):
            warn_once(
                f"{tokens:,} tokens are more than the {most:,} positions of {predicted}: predicted as with a longer rotary "
                "embedding. Training needs its rope_scaling: give a config with that."
            )
            return
        raise ValueError(
            f"{option} requires sequences of {tokens} tokens, and the model has positions for {most} "
            "(max_position_embeddings of its config). Give fewer, or a config with more."
        )


def text_batch(sequences: int, tokens: int) -> dict[str, torch.Tensor]:
    """Return token ids and labels, both (sequences, tokens) of zeros: a planner reads their shape alone."""
    ids = torch.zeros(sequences, tokens, dtype=torch.long)
    return {"input_ids": ids, "labels": ids.clone()}


def read_config(path: Path) -> dict[str, Any]:
    """Return the contents of a ``config.json``.

    Raises:
        ValueError: it is not JSON, has no ``model_type``, or a number that no model has.
    """
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # of text that is not UTF-8, too
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(loaded, dict) or "model_type" not in loaded:
        raise ValueError(f"{path} has no 'model_type', so transformers cannot tell which model it describes.")
    for name, value in _numbers("", loaded):
        problem = _problem(name, value)
        if problem is not None:
            raise ValueError(f"{path}: {name} is {value!r}, {problem}. Correct the number in that file.")
    return loaded


_MODULES = re.compile(r"(n_layer|layers|blocks|experts|depths?|num_labels)$")
_COUNTS = re.compile(
    r"(heads?|hidden_sizes?|intermediate_size|vocab_size|d_model|n_embd|hidden_dim|head_dim|embed_dims?)$"
)
_BOUNDS = re.compile(r"(limit|min|max|clip|clamp)$")
# Most layers (experts, blocks, labels) of a config: each is built, in about 1 ms. Published models have far fewer.
_MOST_MODULES = 100_000


def _numbers(name: str, value: object) -> Iterator[tuple[str, float]]:
    """Yield each number in `value`, with the name of the innermost field that holds it."""
    if isinstance(value, dict | list):
        inside = value.items() if isinstance(value, dict) else ((name, inner) for inner in value)
        for field, inner in inside:
            yield from _numbers(field, inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value


def _problem(name: str, value: float) -> str | None:
    """Return why no model has `value` in the field `name`, or None."""
    if value != value or (math.isinf(value) and not _BOUNDS.search(name)):  # Mamba's time_step_limit ends in Infinity
        return "which is not a finite number"
    modules = _MODULES.search(name) is not None
    if value > _MOST_MODULES and modules:
        return f"above {_MOST_MODULES:,}, and each of them would be built"
    if value > 2**31 and _COUNTS.search(name):
        return "above 2**31, and no kernel takes tensors that are so long"
    # A list of layers, or of one to select, may count from the end.
    counted = _COUNTS.search(name) or (modules and re.search(r"num|^n_|coder|depth", name))
    return "and cannot be negative" if value < 0 and counted else None


def _from_mapping(name: str, values: Mapping[str, Any]) -> ModelSource:
    transformers = require("transformers", "hf", f"to build the model {name!r}")
    kind = values["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        raise ValueError(f"Model {name!r} has model_type {kind!r}, unknown to transformers {transformers.__version__}.")
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict(dict(values))
    except Exception as error:  # each config class has validators of its own, with errors of their own
        reason = str(error).strip().splitlines()[-1].strip()
        raise ValueError(f"Model {name!r}: its config is not a {kind} that can be built. {reason}") from error
    return source_of(name, config)


def source_of(name: str, config: Any) -> ModelSource:
    """The model that a transformers `config` describes, called `name` in errors."""
    transformers = require("transformers", "hf", f"to build the model {name!r}")
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        # Where a release keeps it among the settings of generation: shifting the labels needs it too.
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    auto = _auto_class(transformers, config)
    return ModelSource(name, config, lambda: auto.from_config(config))


def _auto_class(transformers: Any, config: Any) -> Any:
    """The class that trains the whole model that `config` describes: not the decoder of an encoder-decoder alone, nor
    the language model of one with other encoders."""
    kinds = {
        "SPEECH_SEQ_2_SEQ": "AutoModelForSpeechSeq2Seq",
        "SEQ_TO_SEQ_CAUSAL_LM": "AutoModelForSeq2SeqLM",
        "MULTIMODAL_LM": "AutoModelForMultimodalLM",
        "IMAGE_TEXT_TO_TEXT": "AutoModelForImageTextToText",
        "CAUSAL_LM": "AutoModelForCausalLM",
    }
    parts = getattr(config, "sub_configs", None) or {}
    if not getattr(config, "is_encoder_decoder", False) and not set(parts) - {"text_config"}:
        kinds = {"CAUSAL_LM": kinds["CAUSAL_LM"]} | kinds
    mappings = ((auto, getattr(transformers, f"MODEL_FOR_{kind}_MAPPING", {})) for kind, auto in kinds.items())
    return getattr(transformers, next((auto for auto, known in mappings if type(config) in known), "AutoModel"))


def _import_factory(spec: str) -> Callable[[], Any]:
    module_name, _, attribute = spec.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"Model {spec!r} cannot be imported: {error}. Is its module on PYTHONPATH?") from error
    if not callable(factory):
        raise ValueError(f"Model {spec!r} is {a_or_an(factory)}; it must be a function that returns the model.")

    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise ValueError(
            f"Model {spec!r} is called without arguments, and it takes some: {error}. Name a function that returns the "
            "model by itself."
        ) from error
    except ValueError:
        pass  # a builtin, whose arguments are not known

    def build() -> Any:
        result = factory()
        model = result[0] if isinstance(result, tuple) and len(result) == 2 else result
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"Model {spec!r} returned {a_or_an(model)}; it must return a torch.nn.Module, or one with a sample input: "
                "(model, sample)."
            )
        return result

    return build
