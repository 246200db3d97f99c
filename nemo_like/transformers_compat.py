"""Names inside transformers that this package knows: of arguments, attributes, functions and modules.

It imports transformers only where one of its models is at hand. Documented names (``input_ids``, ``config.use_cache``)
stay where they are used. An absent name raises an error that names it, where going on would be another way. Whoever
adds a release looks here first.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, cast

from torch import Tensor, int64, ones, zeros

TESTED = ("5.23.0", "5.24.0")  # The releases that were tested.

# --- Arguments of a model's forward -----------------------------------------------------------------------------------

# The names under which a key/value cache is passed on. 5.24 renamed the second and the last one to the first.
CACHE_ARGUMENTS = ("cache", "past_key_values", "past_key_value", "layer_past", "cache_params")
USE_CACHE = "use_cache"
LOGITS_TO_KEEP = "logits_to_keep"
# The keyword by which transformers hands shared keys and values to each layer.
SHARED_STATES = "shared_kv_states"

# --- Names in the files of models, which tell a module's features; absent where it lacks them -------------------------

# Name that the forward of attention reads where it goes through the interface.
ATTENTION_LOOKUP = "ALL_ATTENTION_FUNCTIONS"
# An attribute of Llama 4's attention, which then counts positions from its cache's length.
TEMPERATURE_TUNING = "attn_temperature_tuning"
# A function of RoBERTa and its kin: positions over the ids that are not padding.
COUNT_IDS = "create_position_ids_from_input_ids"
# An attribute of rotary embeddings: the kind, or a table of the kinds of layer types.
ROPE_TYPE = "rope_type"
GATE = "_apply_gate"  # A method of experts that a family overrides.
NO_SPLIT = "_no_split_modules"  # An attribute of models: the classes of their layers.

# --- Configurations ---------------------------------------------------------------------------------------------------

# An attribute of configurations: the name of the attention implementation.
ATTENTION = "_attn_implementation"
# The same, of this configuration alone and not of those below it.
OWN_ATTENTION = "_attn_implementation_internal"

# --- Initialisation ---------------------------------------------------------------------------------------------------

# An attribute of tensors whose values are kept.
INITIALIZED = "_is_hf_initialized"

# --- Modules ----------------------------------------------------------------------------------------------------------

# The module of the hooks that record routers' logits and attentions.
RECORDERS = "transformers.utils.output_capturing"
# Place where tensor-parallel styles are registered.
PARALLEL_STYLES = ("transformers.distributed.tensor_parallel", "ALL_PARALLEL_STYLES")


# A function in the files of models that run under FSDP the layers that LayerDrop has drawn to skip.
RUNS_DROPPED_LAYERS = "is_fsdp_managed_module"


def absent(what: str) -> RuntimeError:
    """The error for a name or feature that transformers does not have."""
    version = getattr(sys.modules.get("transformers"), "__version__", "(not imported)")
    return RuntimeError(
        f"transformers {version} {what}. nemo_like was tested with transformers {' and '.join(TESTED)}: pip install "
        f"'transformers=={TESTED[-1]}', or report this."
    )


def _inside(module: str, name: str) -> Any:
    """Return the object `name` of transformers' `module`, for a caller that has a model of transformers."""
    try:
        return getattr(importlib.import_module(f"transformers.{module}"), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise absent(f"has no {name} in transformers.{module}") from error


def model_base() -> Any:
    """The base class of transformers' models; None where transformers is not imported."""
    return None if "transformers.modeling_utils" not in sys.modules else _inside("modeling_utils", "PreTrainedModel")


def guarded_initializers() -> AbstractContextManager[None]:
    """Return a context in which torch's initializers keep the tensors that are marked as initialized."""
    guard = "guard_torch_init_functions"
    return (
        nullcontext()
        if model_base() is None
        else cast("AbstractContextManager[None]", _inside("initialization", guard)())
    )


# Each of these is called to get it:
# the mapping from the names of attention implementations to functions,
attention_functions = partial(_inside, "modeling_utils", ATTENTION_LOOKUP)
# the class by whose ``register`` an attention implementation gets a name,
attention_interface = partial(_inside, "modeling_utils", "AttentionInterface")
# the mapping from the names of attention implementations to functions that make their masks,
mask_functions = partial(_inside, "masking_utils", "ALL_MASK_ATTENTION_FUNCTIONS")
# the class by whose ``register`` a function that makes masks gets a name,
mask_interface = partial(_inside, "masking_utils", "AttentionMaskInterface")
# the module whose masks look for packed documents in positions by `FIND_DOCUMENTS`,
masking = partial(sys.modules.get, "transformers.masking_utils")
FIND_DOCUMENTS = "find_packed_sequence_indices"
# and the function of places that means a plain causal mask.
causal_mask_function = partial(_inside, "masking_utils", "causal_mask_function")


# --- Names in files ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Conversion:
    """A rule of transformers that makes tensors of a model out of tensors of a file."""

    # Calls its argument with each name in the file, and returns the tensors by their names in the model.
    convert: Callable[[Callable[[str], Tensor]], dict[str, Tensor]]
    # Of experts that are only stacked: for each, the names in the file that are concatenated along their first dim.
    parts: Sequence[Sequence[str]] = ()
    # Other names for those, several if the model has copies.
    names: Mapping[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class NamesInModel:
    """The names in a model of the tensors of a file."""

    renamed: dict[str, list[str]]  # by the name in the file
    converted: list[Conversion] = field(default_factory=list)


def names_in_model(model: Any, names: Mapping[str, list[str]], stored: Collection[str]) -> NamesInModel:
    """Return how ``from_pretrained`` names the tensors of a file of `model`'s, as `convert_and_load_state_dict_in_model`.

    Args:
        names: by transformers' own name of a tensor, its names in the model that trains.
        stored: the names in the file.
    """
    rename, order = (_inside(_LOADING, name) for name in ("rename_source_key", "dot_natural_key"))
    transforms = _inside("conversion_mapping", "get_model_conversion_mapping")(model)
    converters = [transform for transform in transforms if isinstance(transform, _inside(_LOADING, "WeightConverter"))]
    renamings = [transform for transform in transforms if transform not in converters]
    renamed: dict[str, list[str]] = {}
    sources: dict[str, list[tuple[str, str]]] = {}
    for key in sorted(stored, key=order):
        name, pattern = rename(key, renamings, converters, model.base_model_prefix, names)
        if name not in names and key in names:
            name, pattern = key, None
        if pattern is None or name not in names:
            renamed[key] = names.get(name, [key])
        else:
            sources.setdefault(name, []).append((pattern, key))

    def converter_of(name: str) -> Any:
        return deepcopy(next(converter for converter in converters if sources[name][0][0] in converter.source_patterns))

    def convert(name: str, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        converter = converter_of(name)
        for pattern, key in sources[name]:
            converter.add_tensor(name, key, pattern, read(key))
        converted = converter.convert(name, model=model, config=model.config)
        return {target: value[0] if isinstance(value, list) else value for target, value in converted.items()}

    def parts(name: str) -> Sequence[Sequence[str]]:
        converter = converter_of(name)
        first, *rest = [
            (type(operation).__name__, getattr(operation, "dim", None)) for operation in converter.operations
        ]
        if first != ("MergeModulelist", 0) or any(each != ("Concatenate", 1) for each in rest):
            return ()
        return list(
            zip(*([key for of, key in sources[name] if of == p] for p in converter.source_patterns), strict=True)
        )

    return NamesInModel(renamed, [Conversion(partial(convert, name), parts(name), names) for name in sources])


_LOADING = "core_model_loading"

# PEFT's: an attribute of its models, and the method of a layer with LoRA that sets an adapter's first values.
PEFT_CONFIG, RESET_LORA = "peft_config", "reset_lora_parameters"


def without_peft(name: str) -> str:
    """Return the original model's name for the tensor that is called `name` once PEFT has wrapped modules around it.

    >>> without_peft("layers.0.q_proj.base_layer.weight"), without_peft("lm_head.modules_to_save.default.weight")
    ('layers.0.q_proj.weight', 'lm_head.weight')
    """
    return re.sub(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)", "", name)


def rope_follows_length(module: object) -> bool:
    """Return whether `module` makes rotary embeddings whose frequencies follow the longest position of a call."""
    kinds = getattr(module, ROPE_TYPE, "")
    kinds = kinds.values() if isinstance(kinds, Mapping) else [kinds]
    return any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds)


# --- Key/value caches -------------------------------------------------------------------------------------------------


def text_config(config: Any) -> Any:
    """Return the config of a model's text part, or the config itself where that is its only part."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """The arguments that `function` takes, in order, through its decorators."""
    return tuple(inspect.signature(function).parameters)


def is_cache(value: object, name: str = "") -> bool:
    """Return whether `value`, an argument called `name`, is a key/value cache.

    The test is of its methods. Under a name that means nothing else, anything is one; ``cache`` may be a table of a
    model's own.
    """
    if value is None:
        return False
    if not isinstance(value, Tensor) and all(
        callable(getattr(type(value), method, None)) for method in ("update", "get_seq_length")
    ):
        return True
    return name in CACHE_ARGUMENTS and (name != "cache" or "Cache" in type(value).__name__)


def given_cache(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """The name of the argument by which a call brings such a cache, by position or keyword; None: it brings none.

    names: the arguments of the called forward, in order.
    """
    by_position = chain(names[: len(args)], (f"argument {index}" for index in range(len(names), len(args))))
    call = chain(zip(by_position, args), kwargs.items())
    return next((name for name, value in call if is_cache(value, name)), None)


def layers_dropped_in_vain(model: Any) -> float | None:
    """Return the ``layerdrop`` of the first part of `model` that would run each layer under FSDP; None: there is none."""
    parts = [m for m in model.modules() if hasattr(sys.modules.get(type(m).__module__), RUNS_DROPPED_LAYERS)]
    for config in (part.config for part in parts if getattr(part, "config", None) is not None):
        shares = [value for name, value in vars(config).items() if name.endswith("layerdrop") and value]
        if shares:
            return max(shares)
    return None


# A Trainer's method that its step prepares a batch with, and that which moves one to its device; TRL's attribute for
# generated ones, and its method that makes token ids of prompts.
_PREPARE, _MOVE, _BUFFERED, _TOKENIZE = "_prepare_inputs", "_prepare_input", "_buffered_inputs", "_tokenize_prompts"


def prepared_inputs(trainer: Any, batch: Any) -> Any:
    """Return a batch as the step of a `transformers.Trainer` uses it, on its device; nothing is generated."""
    return getattr(trainer, _MOVE if generates_batches(trainer) else _PREPARE)(batch)


@contextmanager
def without_generating(trainer: Any) -> Iterator[None]:
    """Have steps take the batches that they are given, also where the trainer would generate others from them."""
    if generates_batches(trainer):
        vars(trainer)[_PREPARE] = getattr(trainer, _MOVE)
    try:
        yield
    finally:
        vars(trainer).pop(_PREPARE, None)


def generated_batch(trainer: Any, rows: int, prompts: list[Any]) -> dict[str, Tensor]:
    """Return a batch as TRL's GRPOTrainer generates it: the longest of `prompts`, with completions of the greatest length.

    Raises:
        ValueError: completions have no greatest length, or the trainer is of another kind.
    """
    length = getattr(trainer.args, "max_completion_length", None)
    if length is None or not hasattr(trainer, _TOKENIZE):
        raise ValueError(
            f"{type(trainer).__name__} generates its batches, and has no max_completion_length, so no largest one is known. "
            "Set it, or pass ac_sample_input= to the trainer."
        )
    width = max(map(len, getattr(trainer, _TOKENIZE)(prompts)[0]))
    sizes = {"prompt": width, "completion": length}
    whole = {
        f"{name}_{kind}": ones((rows, size), dtype=int64) for name, size in sizes.items() for kind in ("ids", "mask")
    }
    # Read only where the trainer's settings make them.
    scored = ("old_per_token_logps", "ref_per_token_logps", "importance_sampling_ratio")
    scores = {name: zeros(rows, length) for name in scored}
    return whole | scores | {"advantages": zeros(rows), "num_items_in_batch": ones(()) * rows * length}


def kept_by_evaluation(model: Any, output: Any) -> Any:
    """Return the parts of a model's output that a Trainer's evaluation keeps for its metrics."""
    if not isinstance(output, Mapping):
        return output
    dropped = ("loss", *getattr(model.config, "keys_to_ignore_at_inference", ("cache",)))
    return [value for name, value in output.items() if name not in dropped]


def generates_batches(trainer: Any) -> bool:
    """Return whether a trainer makes its model's inputs by generating."""
    return hasattr(trainer, _BUFFERED)
