"""What test_trainer_fsdp.py starts with `accelerate launch`: several `transformers.Trainer` runs, one after the other.

    accelerate launch --config_file fsdp2.yaml launched_trainer.py FOLDER '{"name": {"mine": {...}, "arguments": {...}}}'

accelerate offers FSDP on accelerators alone. Its own code is what runs here; only the kind of job that it has found is
renamed before it chooses.
"""

import json
import os
import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.state import AcceleratorState, DistributedType, PartialState
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule

from nemo_like.distributed.launch import shutdown
from nemo_like.integrations import ActivationOffloadingMixin
from nemo_like.integrations.transformers import CheckpointingArguments, CheckpointingCallback, CheckpointingMixin
from nemo_like.options import ChunkedLoss, OffloadConfig
from tests.models import decoders
from tests_distributed.integrations.test_trainer_fsdp import rows


@dataclass
class Arguments(CheckpointingArguments, transformers.TrainingArguments):
    """What a user writes."""


class Trainer(CheckpointingMixin, ActivationOffloadingMixin, transformers.Trainer):
    """What a user writes."""


settings: dict[str, Any] = dict(
    per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4, learning_rate=1e-2, weight_decay=0.1,
    max_grad_norm=0.5, logging_steps=1, eval_strategy="steps", eval_steps=2, save_strategy="no", report_to=[],
    use_cpu=True, disable_tqdm=True, seed=5,
)  # fmt: skip
OBJECTS = {"chunks of 8": ChunkedLoss(chunk_tokens=8), "everything": OffloadConfig(mode="all", min_bytes=0)}
"""Settings that JSON cannot say."""


def run(folder: Path, mine: dict[str, Any] | None, arguments: dict[str, Any], model: str, resume: str | None) -> Any:
    """Train once: what the trainer logged, the optimizer's groups, FSDP2's units, the whole weights' digests."""
    AcceleratorState._reset_state()
    callback = (mine or {}).pop("callback", None)
    kind: Any = transformers.Trainer if not mine else Trainer
    args = Arguments(output_dir=str(folder), **(settings | arguments))
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    keywords = {name: OBJECTS.get(str(value), value) for name, value in (mine or {}).items()}
    trainer = kind(
        model=decoders.build(model), args=args, train_dataset=rows(), eval_dataset=rows(),
        callbacks=None if callback is None else [CheckpointingCallback(callback)], **keywords,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    assert trainer.accelerator.is_fsdp2
    for module in trainer.model.modules():  # evaluation leaves the last unit gathered
        if isinstance(module, FSDPModule):
            module.reshard()
    names = {id(p): name.removeprefix("_orig_mod.") for name, p in trainer.model.named_parameters()}
    whole = get_model_state_dict(trainer.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return dict(
        log=[
            {key: entry[key] for key in ("step", "loss", "grad_norm", "eval_loss") if key in entry}
            for entry in trainer.state.log_history
        ],
        groups=[[g["weight_decay"], sorted(names[id(p)] for p in g["params"])] for g in trainer.optimizer.param_groups],
        units=sorted({name for name, module in trainer.model.named_modules() if isinstance(module, FSDPModule)}),
        weights={
            name: sha256(value.contiguous().view(torch.uint8).numpy()).hexdigest() for name, value in whole.items()
        },
        best=trainer.state.best_model_checkpoint,
        moved=getattr(getattr(getattr(trainer, "activation_offload_context", None), "stats", None), "moved_bytes", 0),
    )


def main(folder: Path) -> None:
    """Run each job of `jobs.json`; an error's text is its result."""
    for name, job in json.loads((folder / "jobs.json").read_text(encoding="utf-8")).items():
        try:
            defaults = dict(mine=None, arguments={}, model="llama", resume=None)
            result = run(folder / job.pop("output", name), **(defaults | job))
        except ValueError as error:
            result = f"{type(error).__name__}: {error}"
        if os.environ["RANK"] == "0":
            (folder / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")
    shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
