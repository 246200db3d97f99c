"""One configuration: what to say to `nemo_like.parallelize`, and what a step then takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nemo_like.options import FSDP2, PipelineParallel, Precision, dtype_word
from nemo_like.planning.fit.explained import Account
from nemo_like.planning.fit.layouts import Layout
from nemo_like.planning.fit.need import Need
from nemo_like.planning.fit.seconds import StepSeconds
from nemo_like.planning.larger_batch import most_elements
from nemo_like.planning.peak import Peak
from nemo_like.activation_checkpointing.plan import Plan
from nemo_like.tensors import tensors_in


@dataclass(frozen=True)
class Candidate:
    """A configuration with its predicted bytes and seconds."""

    layout: Layout
    ac: str
    """``none`` | ``full`` | ``selective``, or the peak that a plan was made for (``"62.5GiB"``)."""
    loss: str
    offload: str
    reshard_after_forward: bool | None
    """None: FSDP2's default, layers but the last are freed after forward."""
    cpu_offload: bool
    """Parameters, gradients and optimizer state lie in host memory."""
    precision: Precision
    optimizer: str
    peak: Peak
    """Allocated bytes, on the rank (of a pipeline: of the stage) that needs most."""
    need: Need
    """What decides whether it fits."""
    seconds: StepSeconds
    tokens: int
    """Of all GPUs in one step."""
    model_flops: float
    """Of one step on one GPU, without what is computed again."""
    peak_flops: float
    fits: bool
    host_bytes: int = 0
    """What one rank has in host memory."""
    plan: Plan | None = field(default=None, compare=False, repr=False)
    """What each layer keeps, where `ac` is a peak."""
    account: Account | None = field(default=None, compare=False, repr=False)
    """Where its bytes and seconds come from."""
    sample: Any = field(default=None, compare=False, repr=False)
    """One microbatch, on the meta device but for small integers: what a cut into stages looks at."""

    @property
    def reserved(self) -> int | None:
        """Bytes that CUDA's caching allocator would have reserved at most; None: not known."""
        return self.need.reserved

    @property
    def peak_bytes(self) -> int:
        return self.peak.total

    @property
    def step_seconds(self) -> float:
        return self.seconds.total

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens / self.layout.gpus / self.step_seconds

    @property
    def mfu(self) -> float:
        """FLOPs that the model needs, as a share of what the device's data sheet promises."""
        return self.model_flops / self.step_seconds / self.peak_flops if self.peak_flops else 0.0

    @property
    def strategy(self) -> str | FSDP2:
        said = self._strategy
        return FSDP2(**said) if said else "fsdp2"

    @property
    def _strategy(self) -> dict[str, Any]:
        """What it says of FSDP2 that is not FSDP2's default."""
        said = {"reshard_after_forward": self.reshard_after_forward, "cpu_offload": self.cpu_offload or None}
        return {name: value for name, value in said.items() if value is not None}

    def kwargs(self) -> dict[str, Any]:
        """What to call `nemo_like.parallelize` with, beside the model; a plan as a `Plan`, which needs no sample."""
        layout = self.layout
        said: dict[str, Any] = {"strategy": self.strategy, "ac": self.ac if self.plan is None else self.plan}
        said |= {
            name: getattr(layout, name) for name in ("dp_replicate", "tp", "cp", "ep") if getattr(layout, name) > 1
        }
        if layout.pp > 1:
            said["pp"] = PipelineParallel(layout.pp, layout.schedule or "1f1b", layout.grad_accum)
            said["sample_input"] = self.sample
        if self.precision != Precision():
            said["precision"] = self.precision
        if self.plan is None and (tokens := most_elements(tensors_in(self.sample))):
            said["planned_tokens"] = tokens  # a plan knows them itself
        said |= {"loss": self.loss} if self.loss != "model" else {}
        return said | ({"offload": self.offload} if self.offload != "none" else {})

    def call(self, sample: str = "batch") -> str:
        """The line of Python that does the same; `sample`: the name of one microbatch."""
        said = {k: repr(v) for k, v in self.kwargs().items()}
        said["ac"] = repr(self.ac)
        if isinstance(self.strategy, FSDP2):
            said["strategy"] = f"FSDP2({', '.join(f'{name}={value}' for name, value in self._strategy.items())})"
        if self.layout.pp > 1:
            said["pp"] = (
                f"PipelineParallel({self.layout.pp}, {self.layout.schedule!r}, microbatches={self.layout.grad_accum})"
            )
        if "precision" in said:
            said["precision"] = repr(precision_word(self.precision))
        if self.plan is not None and self.layout.tp > 1 and self.layout.pp == 1:
            said["ac"] = "Plan.load('plan.json')"
        elif self.plan is not None or self.layout.pp > 1:
            said["sample_input"] = sample
        if self.plan is not None and self.optimizer != "adamw":
            said["optimizer"] = repr(self.optimizer)
        return f"model = parallelize(model, {', '.join(f'{k}={v}' for k, v in said.items())})"

    def as_json(self) -> dict[str, Any]:
        """In JSON values; sizes in bytes, times in seconds."""
        return {
            **vars(self.layout),
            "ac": self.ac, "loss": self.loss, "offload": self.offload,
            "reshard_after_forward": self.reshard_after_forward, "cpu_offload": self.cpu_offload,
            "precision": precision_word(self.precision), "optimizer": self.optimizer,
            "peak_bytes": self.peak_bytes, "peak_at": self.peak.at, "reserved_bytes": self.reserved,
            "needed_bytes": self.need.bytes, "input_bytes": self.need.inputs, "judged_by": self.need.by,
            "host_bytes": self.host_bytes,
            "parts": dict(self.peak.parts), "step_seconds": self.step_seconds, "seconds": dict(self.seconds.parts),
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu, "mfu": self.mfu, "fits": self.fits,
            "call": self.call(), "explained": None if self.account is None else self.account.as_json(),
        }  # fmt: skip


def precision_word(precision: Precision) -> str:
    """The shortest word for it; ``fp32`` where nothing is cast."""
    return precision.matmuls or dtype_word(precision.dtypes["param_dtype"]) or "fp32"
