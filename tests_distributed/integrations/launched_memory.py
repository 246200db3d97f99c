"""What test_trainer_memory_fsdp.py starts with `accelerate launch`: trainers under FSDP2, their plans and their memory.

accelerate offers FSDP on accelerators alone. Its own code is what runs here; only the kind of job that it has found is
renamed before it chooses.
"""

import json
import os
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import torch
from accelerate.state import AcceleratorState, DistributedType, PartialState
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from nemo_like._util.live_bytes import LiveBytes
from nemo_like.distributed.launch import shutdown
from nemo_like.integrations.transformers import plan_trainer
from nemo_like.torch_compat import local_part
from tests.integrations.test_trainer_memory import EVALUATION, LENGTHS, PACKED, job_of, made_trainer, wide

EVALUATED = EVALUATION | {"evaluated": [400] * 48}
# Jobs of docs/how-to/trainers.md on two ranks.
JOBS: dict[str, dict[str, dict[str, Any]]] = {
    "fsdp": {"trainer": {}, "trainer evaluation": EVALUATED, "sft": {}, "dpo": {}, "reward": {}},
    "ddp": {
        "trainer": {},
        "trainer accumulating": {"gradient_accumulation_steps": 2},
        "trainer evaluation": EVALUATED,
        "sft packed": PACKED,
    },
}


def rename() -> None:
    """Have accelerate offer FSDP2 here."""
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def compared(sharding: str, folder: Path) -> dict[str, tuple[int, int]]:
    """Return the planned and the counted bytes of each job. The weights are made again on a rank's device, and counted."""
    results = {}
    for name, options in JOBS[sharding].items():
        how: dict[str, Any] = {"ready": rename} if sharding == "fsdp" else {"ddp_backend": "gloo"}
        AcceleratorState._reset_state()
        trainer, planned = job_of(name, folder, **how | options)
        with Counted() as counter:
            trainer.train()
        results[name] = planned, counter.peak
    return results


def trainer_of(kind: str, folder: Path, **options: Any) -> Any:
    """Return a trainer of a model of four layers, as one of two ranks."""
    AcceleratorState._reset_state()
    trainer = made_trainer(kind, folder, [length * 6 for length in LENGTHS], wide, rename, max_grad_norm=0.5, **options)
    assert trainer.accelerator.is_fsdp2
    return trainer


class Counted(LiveBytes):
    """Counts also what FSDP2 frees and allocates again through `UntypedStorage.resize_`."""

    def __enter__(self) -> Self:
        resize = self._resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result, number = resize(storage, size), self.numbers.get(storage)
            if number and number > 0 and size != self.sizes.get(number, 0):
                self.changed(number, size)
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign,assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)


def trained(trainer: Any) -> dict[str, Any]:
    """Return digests of the whole weights, the losses, and the most bytes that this rank had."""
    with Counted() as counter:
        trainer.train()
    weights = sum(local_part(p).nbytes for p in trainer.model.parameters())
    whole = get_model_state_dict(trainer.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return dict(
        counted=counter.peak,
        weights=weights,
        losses=[entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        digests={
            name: sha256(value.contiguous().view(torch.uint8).numpy()).hexdigest() for name, value in whole.items()
        },
    )


def main(folder: Path, sharding: str) -> None:
    """Train each kind without a check, with one, and within a budget."""
    results: dict[str, Any] = {"jobs": compared(sharding, folder)}
    for kind in () if sharding == "ddp" else ("trainer", "sft", "dpo"):
        plain = trained(trainer_of(kind, folder, check_memory=False))
        trainer = trainer_of(kind, folder, check_memory=True)
        rows = plan_trainer(trainer, what_if=False).rows
        planned = {row.ac: row.plan.peak_bytes for row in rows}
        checked = trained(trainer)
        budget = (planned["none"] + planned["full"]) // 2
        within = trained(trainer_of(kind, folder, check_memory=True, ac=f"{budget}B"))
        results[kind] = dict(plain=plain, checked=checked, planned=planned, budget=budget, within=within)
    if sharding == "fsdp":
        trainer = trainer_of("trainer", folder, check_memory=True, ac="50%", cp=2)
        rows = {row.ac: row.plan.peak_bytes for row in plan_trainer(trainer, what_if=False).rows}
        results["cp"] = dict(planned=rows["50%"], counted=trained(trainer)["counted"])
    if os.environ["RANK"] == "0":
        (folder / f"{sharding}.json").write_text(json.dumps(results), encoding="utf-8")
    shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
