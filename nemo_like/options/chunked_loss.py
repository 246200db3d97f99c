"""How the loss is computed: by the model, or in chunks of tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from nemo_like._util.words import check_bool, did_you_mean, normalise, parse_bytes

LOSSES: tuple[str, ...] = ("model", "chunked")
COMPILE_BACKENDS = ("inductor", "aot_eager", "eager")


def parse_compile(compile: Any) -> str | None:
    """The backend that ``compile=`` asks for; None for no compilation.

    Raises:
        ValueError: an unknown backend. TypeError: neither a bool, None nor a string.
    """
    if compile is None or compile is False:
        return None
    if compile is True:
        return "inductor"
    if not isinstance(compile, str):
        raise TypeError(f"compile is {compile!r}; it must be a bool or one of {', '.join(COMPILE_BACKENDS)}.")
    backend = normalise(compile)
    if backend not in COMPILE_BACKENDS:
        raise ValueError(
            f"compile is {compile!r}; it must be False, True ('inductor') or one of {', '.join(COMPILE_BACKENDS)}."
            + did_you_mean(backend, COMPILE_BACKENDS)
        )
    return backend


@dataclass(frozen=True)
class ChunkedLoss:
    """Head and loss of a few tokens at a time, so that the logits of a batch never exist. ``"chunked"``: the defaults.

    >>> ChunkedLoss(chunk_tokens=1024).chunk_tokens
    1024
    """

    chunk_tokens: int | None = None
    """Tokens whose logits exist at one time. None: as many as `chunk_bytes` holds."""
    chunk_bytes: int | str = "256MiB"
    """Bytes of one chunk's logits (``"256MiB"``), where `chunk_tokens` is None. A chunk of fixed size, and not a fixed
    number of chunks, keeps the peak where it is when the batch grows."""
    grads_in_float32: bool = True
    """Sum the head's gradients over the chunks in float32. False: in the parameters' dtype, which for a bfloat16 head
    saves 2 bytes per weight between forward and backward, and loses low bits of the sum with every chunk."""
    z_loss: float = 0.0
    """Weight of ``logsumexp(logits) ** 2``, added for each token (PaLM's z-loss, Chowdhery et al. 2022, section 5)."""
    compile: str | None = None
    """Compile what is done with the logits of a chunk, once for all chunks: ``"inductor"``, ``"aot_eager"`` or ``"eager"``.
    None: as the layers are compiled in `parallelize`; elsewhere not."""

    def __post_init__(self) -> None:
        tokens = self.chunk_tokens
        if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1):
            raise ValueError(f"chunk_tokens is {tokens!r}; it must be a whole number of tokens >= 1, or None.")
        size = self.chunk_bytes
        if isinstance(size, bool) or not isinstance(size, int | str):
            raise TypeError(f"chunk_bytes is {size!r}; it must be a number of bytes or a string like '256MiB'.")
        if self.bytes < 1:
            raise ValueError(f"chunk_bytes is {size!r}; a chunk must hold at least one byte.")
        check_bool("grads_in_float32", self.grads_in_float32)
        if isinstance(self.z_loss, bool) or not isinstance(self.z_loss, int | float) or not 0 <= self.z_loss < math.inf:
            raise ValueError(f"z_loss is {self.z_loss!r}; it must be a weight >= 0.")
        if self.compile is not None and self.compile not in COMPILE_BACKENDS:
            raise ValueError(f"compile is {self.compile!r}; it must be None or one of {', '.join(COMPILE_BACKENDS)}.")

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
        """What ``loss=`` means: the object, its defaults for ``"chunked"``, None for ``"model"`` (as the model does).

        Raises:
            ValueError: an unknown word. TypeError: something else.
        """
        if loss is None or isinstance(loss, ChunkedLoss):
            return loss
        if not isinstance(loss, str):
            raise TypeError(f"loss is {loss!r}; it must be one of {', '.join(LOSSES)}, or a ChunkedLoss(...).")
        word = normalise(loss)
        if word not in LOSSES:
            raise ValueError(f"loss is {loss!r}; it must be one of {', '.join(LOSSES)}." + did_you_mean(word, LOSSES))
        return cls() if word == "chunked" else None
