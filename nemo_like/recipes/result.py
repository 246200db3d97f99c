"""Write what a fine-tuning run leaves: adapters in peft's format, or a folder that `from_pretrained` opens.

A folder is written under another name, synced and then renamed: one of the final name is complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like._util.extras import require
from nemo_like._util.module_tree import bare, base_model
from nemo_like.distributed import get_model_state
from nemo_like.distributed.weights.slots import find_slots, show_shards
from nemo_like.distributed.weights.state_dict import whole_on_first
from nemo_like.recipes.agree import Ranks
from nemo_like.recipes.checkpoint import CheckpointError


def save_adapter(model: nn.Module, folder: Path, ranks: Ranks) -> None:
    """Write the adapters, and nothing of the frozen weights, where `peft.PeftModel.from_pretrained` reads. A collective."""
    state = whole_trained(model)

    def write(target: Path) -> None:
        inner: Any = bare(model)
        inner.save_pretrained(str(target), state_dict=state, save_embedding_layers=False)

    _replace(folder, write, ranks)


def save_model(
    model: nn.Module,
    folder: Path,
    ranks: Ranks,
    tokenizer: Any,
    dtype: torch.dtype | None,
    state: dict[str, Tensor] | None = None,
) -> None:
    """Write the whole model, as `dtype` (None: as it is trained), and the tokenizer, if there is one. A collective.

    `state`: its weights, on rank 0, where they are others than `model` has (a pipeline's).
    """
    state = get_model_state(model, full=True) if state is None else state

    def write(target: Path) -> None:
        cast = {name: _cast(tensor, dtype) for name, tensor in state.items()}
        inner: Any = base_model(model)
        if dtype is not None:
            inner.config.dtype = dtype
        inner.config.use_cache = True  # what training switched off
        try:
            inner.save_pretrained(str(target), state_dict=cast)
        finally:
            inner.config.use_cache = False
        if tokenizer is not None:
            tokenizer.save_pretrained(str(target))

    _replace(folder, write, ranks)


def merge_adapter(
    base: str, adapter: Path, folder: Path, ranks: Ranks, tokenizer: Any, *, trust_remote_code: bool = False
) -> None:
    """Write the model at `base` with the adapters at `adapter` added to its weights. On rank 0, in host memory."""
    transformers = require("transformers", "finetune", "to merge adapters")
    peft = require("peft", "finetune", "to merge adapters")

    def write(target: Path) -> None:
        whole = transformers.AutoModelForCausalLM.from_pretrained(
            base, local_files_only=True, dtype="auto", trust_remote_code=trust_remote_code
        )
        merged = peft.PeftModel.from_pretrained(whole, str(adapter)).merge_and_unload()
        merged.save_pretrained(str(target))
        tokenizer.save_pretrained(str(target))

    _replace(folder, write, ranks)


def whole_trained(model: nn.Module) -> dict[str, Tensor]:
    """Return what trains, whole, in host memory, on rank 0 only; gathered one tensor at a time. A collective."""
    state: dict[str, Tensor] = {}
    inner = bare(model)
    show_shards(inner)
    for slot in find_slots(inner):
        if slot.is_parameter and slot.tensor.requires_grad:
            whole = whole_on_first(slot.tensor.detach())
            if whole is not None:
                state |= dict.fromkeys(slot.names, whole)
    return state


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def _replace(folder: Path, write: Callable[[Path], None], ranks: Ranks) -> None:
    """On rank 0: have `write` fill a new folder, then give it the name `folder`."""
    with ranks.together(f"writing {folder}"):
        if ranks.rank:
            return
        target, old = (folder.with_name(f".{word}-{folder.name}") for word in ("writing", "old"))
        try:
            if old.exists() and not folder.exists():  # killed between the two renamings
                old.rename(folder)
            for rest in (target, old):
                shutil.rmtree(rest, ignore_errors=True)
            target.mkdir(parents=True)
            write(target)
            for path in target.rglob("*"):
                if path.is_file():
                    with path.open("rb") as file:
                        os.fsync(file.fileno())
            if folder.exists():
                folder.rename(old)
            target.rename(folder)
            shutil.rmtree(old, ignore_errors=True)
        except Exception as error:  # safetensors, transformers and the file system each have errors of their own
            shutil.rmtree(target, ignore_errors=True)
            raise CheckpointError(
                f"Writing {folder} failed: {type(error).__name__}: {error}. What was there before is untouched; the "
                "checkpoints are complete: free space or give another --output, and run again with --resume."
            ) from error
