"""Options for the computation of the loss: by the model, or in chunks of tokens."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from nemo_like._util.words import check_fields, check_word, parse_bytes, setting
from nemo_like.options.flag import flagged
from nemo_like.options.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    import torch

LOSSES: tuple[str, ...] = ("model", "chunked")
COMPILE_BACKENDS = ("inductor", "aot_eager", "eager")


def parse_compile(compile: object) -> str | None:
    """The backend that ``compile=`` requests; None for no compilation.

    Raises:
        ValueError: an unknown backend.
        TypeError: neither a bool, None nor a string.
    """
    if compile is None or compile is False:
        return None
    if compile is True:
        return "inductor"
    if not isinstance(compile, str):
        raise TypeError(f"compile is {compile!r}; it must be a bool or one of {', '.join(COMPILE_BACKENDS)}.")
    return check_word("compile", compile, COMPILE_BACKENDS, "False, True ('inductor') or ")


@dataclass(frozen=True)
class ChunkedLoss:
    """Head and loss of a few tokens at a time, so that the logits of a batch never exist. ``"chunked"``: the defaults.

    >>> ChunkedLoss(chunk_tokens=1024).chunk_tokens
    1024
    """

    chunk_tokens: int | None = setting(None, least=1, unit="whole number of tokens")
    """Tokens whose logits exist at one time. None: as many as `chunk_bytes` holds."""
    chunk_bytes: int | str = "256MiB"
    """Bytes of one chunk's logits (``"256MiB"``), where `chunk_tokens` is None. A chunk of fixed size, and not a fixed
    number of chunks, keeps the peak where it is when the batch grows."""
    grads_in_float32: bool = True
    """Sum the head's gradients over the chunks in float32. False: in the parameters' dtype, which for a bfloat16 head
    saves 2 bytes per weight between forward and backward, and loses low bits of the sum with every chunk."""
    z_loss: float = setting(0.0, least=0, unit="weight")
    """Weight of ``logsumexp(logits) ** 2``, added for each token (PaLM's z-loss, Chowdhery et al. 2022, section 5)."""
    compile: str | None = setting(None, choices=COMPILE_BACKENDS)
    """Compile the code for the logits of a chunk, once for all chunks: ``"inductor"``, ``"aot_eager"`` or ``"eager"``.
    None: as the layers are compiled in `parallelize`; elsewhere not."""

    def __post_init__(self) -> None:
        check_fields(self)
        size = self.chunk_bytes
        if isinstance(size, bool) or not isinstance(size, int | str):
            raise TypeError(f"chunk_bytes is {size!r}; it must be a number of bytes or a string like '256MiB'.")
        if self.bytes < 1:
            raise ValueError(f"chunk_bytes is {size!r}; a chunk must hold at least one byte.")

    @property
    def bytes(self) -> int:
        """`chunk_bytes` as a number."""
        return parse_bytes(self.chunk_bytes, "chunk_bytes") if isinstance(self.chunk_bytes, str) else self.chunk_bytes

    def tokens(self, bytes_per_token: int) -> int:
        """Tokens of one chunk, where the logits of one take `bytes_per_token`.

        >>> ChunkedLoss(chunk_bytes="1MiB").tokens(4 * 1000)
        256
        """
        if self.chunk_tokens is not None:
            return self.chunk_tokens
        tokens = max(1, self.bytes // max(1, bytes_per_token))
        return tokens // 64 * 64 if tokens >= 64 else tokens  # matmul kernels like multiples of their tile

    @classmethod
    def of(cls, loss: str | ChunkedLoss | None) -> ChunkedLoss | None:
        """Return the meaning of ``loss=``: the object, its defaults for ``"chunked"``, None for ``"model"``.

        Raises:
            ValueError: an unknown word.
            TypeError: something else.
        """
        if loss is None or isinstance(loss, ChunkedLoss):
            return loss
        if not isinstance(loss, str):
            raise TypeError(f"loss is {loss!r}; it must be one of {', '.join(LOSSES)}, or a ChunkedLoss(...).")
        return cls() if check_word("loss", loss, LOSSES) == "chunked" else None


# The training loop's way through a step: the facts that a memory budget needs in addition to the model.

ADAMW = ("adamw", "adamw-loop", "adamw-foreach", "adamw-fused")
"""Their names of torch's AdamW."""
ZERO_GRAD: tuple[str, ...] = ("free", "zero")
SYNC: tuple[str, ...] = ("every", "last")


@dataclass(frozen=True)
class StepSpec:
    """One step of the training loop, between two updates of the weights. The defaults are those of

    ::

        out = model(**batch)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    >>> StepSpec(microbatches=4, keeps_output=False).accumulates
    True

    Clipping gradients in place takes no memory, so it has no field.

    Raises:
        ValueError: an unknown word or a number out of range.
        TypeError: a value of the wrong kind.
    """

    microbatches: int = flagged(1, "plan pins pretrain finetune", "training", name="grad_accum", kind=int, least=1)
    """Micro-batches of a step, forward and backward each. Gradients are there from the first one on."""
    sync: str = flagged("every", "plan pins", "training", choices=SYNC, stages=False)
    """Micro-batches that reduce gradients over the ranks. ``every`` one (as in a plain loop), or the ``last``
    (`nemo_like.distributed.gradients.set_gradient_sync`, DDP's ``no_sync``): each rank holds whole gradients till
    then."""
    keeps_output: bool = flagged(
        True,
        "plan fit",
        "training",
        name="drop_output",
        default=False,
        kind=bool,
        stages=False,
        note="The loop drops the model's output before backward.",
        read=operator.not_,
        write=operator.not_,
    )
    """The model's output (logits!) stays alive through backward, and until the next forward has returned, as where it
    has a name. False: the loop drops it before backward (``loss = model(**batch).loss``)."""
    zero_grad: str = flagged("free", "plan fit", "training", choices=ZERO_GRAD)
    """Gradients between steps. ``free``: gradients are None before the first forward of a step (torch's default);
    ``zero``: they stay, as zeros (``zero_grad(set_to_none=False)``)."""
    optimizer: str = flagged("adamw", "plan pretrain finetune", "training", choices=OPTIMIZERS, called="optimizer")
    """The optimizer, whose state and temporaries count. ``adamw`` (as torch builds it: with ``foreach`` on CUDA, else
    one parameter at a time), ``adamw-loop``, ``adamw-foreach``, ``adamw-fused``, ``adamw-8bit`` (states in blocks
    of 256), ``adamw-32bit`` (states in float32), ``adamw-bf16`` (states in two bytes), ``muon`` (the matrices of layers;
    AdamW for all else), ``sgd``, ``sgd-momentum``, ``rmsprop``, ``adagrad``, ``adafactor`` (of transformers), and of
    bitsandbytes ``lion``, ``ademamix``, ``rmsprop-32bit``, and their ``-8bit``."""
    loss_fn: Callable[[Any], torch.Tensor] | None = None
    """The loss of the model's output, where the loop computes it. It is called on tensors without values on the
    CPU; labels in it count by shape. None: the output's own ``loss``, or, where there is none, a cross entropy in
    float32 of its first tensor that has a gradient, shifted by one token."""
    ema: bool = flagged(False, "plan fit", "training", kind=bool)
    """The loop keeps an average of the parameters, sharded as they are: a dict of detached clones
    (`torch.optim.swa_utils.AveragedModel` fails on ranks)."""
    in_backward: bool = flagged(False, "plan fit", "training", name="optimizer_in_backward", kind=bool)
    """Each parameter is stepped in backward, as soon as its gradient is there, and the gradient is freed
    (`nemo_like.optimizer_in_backward`; torchtune's ``optimizer_in_bwd``, PyTorch's tutorial "How to save memory by fusing
    the optimizer step into the backward pass"): the gradients of all parameters are never there together. A step has one
    micro-batch then, and nothing can look at all gradients, so that they cannot be clipped by their global norm."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.in_backward and self.accumulates:
            raise ValueError(
                f"in_backward is True with microbatches={self.microbatches} and zero_grad={self.zero_grad!r}: the first "
                "backward steps with its gradients and frees them, so that none are left to add to. Use microbatches=1 and "
                "zero_grad='free', or in_backward=False."
            )
        if self.loss_fn is not None and not callable(self.loss_fn):
            raise TypeError(
                f"StepSpec.loss_fn is {self.loss_fn!r}; it must be a function of the model's output, or None."
            )

    @classmethod
    def of(cls, step: StepSpec | None, optimizer: str | None = None) -> StepSpec:
        """Return the meaning of ``step=`` and ``optimizer=`` together; None: the defaults.

        Raises:
            TypeError: `step` is something else.
            ValueError: both name an optimizer, and not the same.
        """
        if step is not None and not isinstance(step, StepSpec):
            raise TypeError(f"step is {step!r}; it must be a StepSpec(...), or None for its defaults.")
        if optimizer is None:
            return cls() if step is None else step
        if step is not None and step.optimizer not in (cls.optimizer, optimizer):
            raise ValueError(f"optimizer is {optimizer!r} and step has {step.optimizer!r}; give it once.")
        return replace(cls() if step is None else step, optimizer=optimizer)

    @property
    def accumulates(self) -> bool:
        """Return whether a backward of the step adds to gradients that are there."""
        return self.microbatches > 1 or self.zero_grad == "zero"

    @property
    def changed(self) -> dict[str, Any]:
        """The fields that are not at their defaults."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
