"""The model of a fine-tuning run: built on the meta device, with what trains chosen, then filled, each rank its shards."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like._util.extras import require
from nemo_like._util.module_tree import glob_to_regex
from nemo_like.distributed.weights.materialize import materialize
from nemo_like.distributed.weights.slots import bare_name, find_slots
from nemo_like.distributed.weights.sources import LayeredSource, Source, StateDictSource, open_source
from nemo_like.models import ModelSource, read_config, resolve_model
from nemo_like.options import parse_dtype
from nemo_like.recipes.options import FinetuneOptions
from nemo_like.recipes.quantised import FourBitSource, packed_weights, quantise_layers

_PEFT = "base_model.model."  # what peft puts before the names of the model it wraps
_ADAPTERS = ("lora_A", "lora_B")


def find_model(options: FinetuneOptions) -> ModelSource:
    """The model in the folder ``--model``, not built yet.

    Raises:
        ValueError: it is not a folder of a causal language model with safetensors, or requires code that was not trusted.
    """
    folder = Path(options.model)
    if not folder.is_dir():
        raise ValueError(
            f"--model is {options.model!r}, which is not a folder. Give one with config.json and safetensors."
        )
    for pattern, what in (("config.json", "config.json"), ("*.safetensors", "safetensors file")):
        if not any(folder.glob(pattern)):
            raise ValueError(f"--model is {options.model!r}, a folder without any {what}.")
    transformers = require("transformers", "finetune", "to build the model")
    config = read_config(folder / "config.json")
    if "auto_map" not in config or config["model_type"] in transformers.CONFIG_MAPPING:
        return resolve_model(options.model)
    if not options.trust_remote_code:
        raise ValueError(
            f"--model {options.model!r} brings Python code of its own ({', '.join(sorted(config['auto_map']))}), which is "
            "not run. Read it, and pass --trust-remote-code if you trust it."
        )
    settings: dict[str, Any] = {"trust_remote_code": True}
    made = transformers.AutoConfig.from_pretrained(options.model, local_files_only=True, **settings)
    return ModelSource(options.model, made, lambda: transformers.AutoModelForCausalLM.from_config(made, **settings))


def build_on_meta(source: ModelSource, options: FinetuneOptions) -> nn.Module:
    """The model on the meta device, with adapters where they were asked for, and `requires_grad` where something trains.

    What trains is float32; what is frozen has the dtype to compute in.

    Raises:
        ValueError: nothing trains, or a target of the adapters is not in the model.
        MissingExtraError: adapters need peft.
    """
    model = source.build("meta", torch.float32)
    config: Any = getattr(model, "config", None)
    if hasattr(config, "use_cache"):
        config.use_cache = False  # a cache of keys and values is of no use in training
    if options.lora:
        model = _with_adapters(model, options)
    elif options.train is not None:
        _train_only(model, options.train)
    frozen = parse_dtype("--precision", options.compute)
    assert frozen is not None
    for slot in find_slots(model):
        if slot.is_parameter and not slot.tensor.requires_grad and slot.tensor.is_floating_point():
            slot.put(slot.tensor.detach().to(frozen))
    if options.qlora:
        quantise_layers(model, frozen)
    return model.train()


def _with_adapters(model: nn.Module, options: FinetuneOptions) -> nn.Module:
    peft = require("peft", "finetune", "for --lora")
    targets: Any = options.lora_targets
    setattr(model, "name_or_path", options.model)  # noqa: B010 - peft writes it with the adapters
    if targets != "all-linear":
        targets = [name.strip() for name in targets.split(",") if name.strip()]
    config = peft.LoraConfig(
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
        base_model_name_or_path=options.model,
    )
    try:
        return peft.get_peft_model(model, config)
    except ValueError as error:
        linears = sorted({n.rsplit(".", 1)[-1] for n, m in model.named_modules() if isinstance(m, nn.Linear)})
        raise ValueError(
            f"--lora-targets is {options.lora_targets!r}: {error} The model's linears end with {', '.join(linears)}."
        ) from error


def _train_only(model: nn.Module, globs: str) -> None:
    patterns = {glob: glob_to_regex(glob) for glob in (part.strip() for part in globs.split(",")) if glob}
    unused = set(patterns)
    for slot in find_slots(model):
        if not slot.is_parameter:
            continue
        matched = {glob for glob, regex in patterns.items() if any(regex.fullmatch(name) for name in slot.names)}
        slot.tensor.requires_grad_(bool(matched))
        unused -= matched
    if unused:
        some = ", ".join([slot.name for slot in find_slots(model) if slot.is_parameter][:4])
        raise ValueError(
            f"--train {sorted(unused)[0]!r} matches no parameter; names are such as {some} (** crosses dots, * does not)."
        )


def fill(model: nn.Module, options: FinetuneOptions) -> None:
    """Give the sharded `model` its weights in place, each rank its shards, and new adapters. A collective.

    Raises:
        ValueError: the folder's tensors have other names or shapes than the model.
        CheckpointUnreadableError: a file is damaged.
    """
    base: Source = open_source(options.model)
    if options.qlora:
        packed = packed_weights(model)
        base = FourBitSource(
            base,
            {
                stored: kept
                for name, kept in packed.items()
                if (stored := _stored_name(bare_name(name), base.shapes)) is not None
            },
        )
    names = [name for slot in find_slots(model) for name in slot.names]
    adapters = StateDictSource(_new_adapters(model, options.seed), "new adapters")
    source = LayeredSource([(base, _names_of(base.shapes)), (adapters, lambda name: name)], names)
    used = {_stored_name(name, base.shapes) for name in source.shapes}
    left = sorted(set(base.shapes) - used)
    if left:
        logging.getLogger("nemo_like").info(
            "%s has %d tensor(s) that the model does not have, such as %s: they are left out.",
            options.model,
            len(left),
            left[0],
        )
    materialize(model, checkpoint=source, strict=False)


def _names_of(shapes: object) -> Callable[[str], str | None]:
    return lambda name: _stored_name(name, shapes)


def _stored_name(name: str, shapes: Any) -> str | None:
    """The name in the folder of what the model calls `name`."""
    if any(f".{adapter}." in name for adapter in _ADAPTERS):
        return None
    plain = name.removeprefix(_PEFT).replace(".base_layer.", ".")
    if plain in shapes:
        return plain
    without = plain.split(".", 1)[-1]  # a folder of the model without its head
    return without if without in shapes else None


def _new_adapters(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Return what peft begins with, drawn alike on every rank: A uniform as `nn.Linear` does, B zero."""
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}
    for slot in find_slots(model):
        if ".lora_A." in slot.name:
            state[slot.name] = torch.empty(slot.tensor.shape)
            nn.init.kaiming_uniform_(state[slot.name], a=math.sqrt(5), generator=generator)
        elif ".lora_B." in slot.name:
            state[slot.name] = torch.zeros(slot.tensor.shape)
    return state


def folder_fingerprint(folder: str) -> str:
    """Changes with the name or size of any safetensors file, or with its table of contents."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder).glob("*.safetensors")):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(4096))
    return digest.hexdigest()[:16]
