"""What binds a configuration, and the cheapest things that would help."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nemo_like.options.allocator import AllocatorConfig
from nemo_like.planning.fit.candidate import Candidate
from nemo_like.planning.fit.layouts import Layout
from nemo_like.planning.fit.question import Question
from nemo_like.planning.fit.shapes import TracedShape, Variant

MOST_GPUS = 1 << 17
_GROWING = "PYTORCH_ALLOC_CONF=expandable_segments:True"
_MEMORY = {
    "outside of layers": "head", "kept output": "head", "held activations": "activations", "running layer": "activations",
    "parameters": "parameters and optimizer", "optimizer state": "parameters and optimizer",
    "gradients": "parameters and optimizer", "optimizer step": "parameters and optimizer",
}  # fmt: skip
_NETWORK = {
    "parameter gathers": "all-gather of parameters", "gradient reductions": "reduction of gradients",
    "tensor-parallel sums": "sums of tensor parallelism", "sequence gathers": "all-gather of keys and values",
    "expert exchanges": "all-to-all of experts' rows", "pipeline sends": "sends between stages",
}  # fmt: skip


def binds(candidate: Candidate, limit: int, gpus_per_host: int) -> str:
    """What keeps it from being faster: ``memory: ...`` where it runs things again for want of memory, ``network: ...`` where
    waiting for collectives takes longer than any other extra, else ``compute``."""
    parts = candidate.seconds.parts
    sent = {name: parts[name] for name in _NETWORK if parts.get(name)}
    extra = {
        "replay": parts.get("replay", 0.0),
        "network": sum(sent.values()),
        "bubble": parts.get("pipeline bubble", 0.0),
    }
    worst = max(extra, key=lambda name: extra[name])
    if candidate.need.bytes > limit or (worst == "replay" and extra["replay"] > 0.02 * candidate.step_seconds):
        sizes: dict[str, int] = {}
        for name, size in candidate.peak.parts.items():
            group = _MEMORY.get(name, "gathered layers and their reductions")
            sizes[group] = sizes.get(group, 0) + size
        return f"memory: {max(sizes, key=lambda name: sizes[name])}"
    if worst == "network" and extra["network"] > 0.02 * candidate.step_seconds:
        between = " between hosts" if candidate.layout.gpus > gpus_per_host else ""
        return f"network: {_NETWORK[max(sent, key=lambda name: sent[name])]}{between}"
    if worst == "bubble" and extra["bubble"] > 0.02 * candidate.step_seconds:
        return "pipeline: the bubble"
    return "compute"


def ways_out(
    shape: TracedShape, candidate: Candidate, question: Question, at_length: Callable[[int], TracedShape]
) -> list[str]:
    """For a job that does not fit: single changes that make it fit, the smallest of each kind; then what lowers its peak.

    Args:
        shape, candidate: what needs least as it is.
        question: what was asked.
        at_length: the same shape for another sequence length.
    """
    limit, layout = question.limit, candidate.layout
    variant = Variant("full", candidate.loss, candidate.offload, candidate.reshard_after_forward)

    now = _needs(shape, layout, variant)
    fitting: list[str] = []
    lowering: list[str] = []

    def consider(what: str, size: int) -> None:
        if size < now:
            (fitting if size <= limit else lowering).append(f"{what}: -{(now - size) / 2**30:.2f} GiB")

    for name, changed in _variants(shape, variant):
        consider(name, _needs(shape, layout, changed))
    if question.step.optimizer == "adamw" and not shape.key.whole:
        eight_bit = shape.with_setup(step=replace(question.step, optimizer="adamw-8bit"))
        consider("an 8-bit optimizer (optimizer='adamw-8bit')", _needs(eight_bit, layout, variant))
    allocator = AllocatorConfig(expandable_segments=True)
    consider(_GROWING, _needs(shape.with_setup(allocator=allocator), layout, variant))
    one = shape.sharded() if shape.key.whole else shape
    gpus, fewer = (_more_gpus(each, layout, variant, limit) for each in (one, one.with_setup(allocator=allocator)))
    if gpus is not None:
        fitting.append(f"{gpus - question.gpus} GPUs more ({gpus} in all)")
    if fewer is not None and (gpus is None or fewer < gpus):
        fitting.append(f"{fewer - question.gpus} GPUs more ({fewer} in all) with {_GROWING}")
    length = _shorter(question, limit, layout, variant, at_length)
    if length is not None:
        fitting.append(f"sequence {length:,} instead of {question.seq_len:,}")
    return [*fitting, *(f"{words}, which is not enough alone" for words in lowering)]


def _needs(shape: TracedShape, layout: Layout, variant: Variant) -> int:
    """Bytes under ``ac="full"``."""
    choices = shape.uniform["full"]
    return shape.need(layout, variant, choices, shape.peak(layout, variant, choices)).bytes


def _variants(shape: TracedShape, variant: Variant) -> list[tuple[str, Variant]]:
    made = []
    if variant.loss == "model" and shape.chunked is not None:
        made.append(("chunk the loss", replace(variant, loss="chunked")))
    if variant.offload == "none":
        made.append(("layer inputs on the host (offload='boundary')", replace(variant, offload="boundary")))
    if variant.reshard is False:
        made.append(("free layers after forward (reshard_after_forward)", replace(variant, reshard=None)))
    return made


def _more_gpus(shape: TracedShape, layout: Layout, variant: Variant, limit: int) -> int | None:
    """The least of twice, four times ... the GPUs to shard over on which it fits; None: none up to `MOST_GPUS`."""
    times = 2
    while layout.gpus * times <= MOST_GPUS:
        more = replace(layout, dp_shard=layout.dp_shard * times)
        if _needs(shape, more, variant) <= limit:
            return more.gpus
        times *= 2
    return None


def _shorter(
    question: Question, limit: int, layout: Layout, variant: Variant, at_length: Callable[[int], TracedShape]
) -> int | None:
    """The longest of seven, six ... eighths of the sequence that fits; None: not even one eighth does."""
    low, high = 0, 8
    while high - low > 1:
        eighths = (low + high) // 2
        length = question.seq_len * eighths // 8
        try:
            shape = at_length(length)
        except ValueError:
            return None
        fits = (size := _needs(shape, layout, variant)) <= limit
        low, high = (eighths, high) if fits else (low, eighths)
        if not fits and eighths == 4 and size > 2 * limit:
            return None  # what does not depend on the sequence is too much already
    return question.seq_len * low // 8 if low else None
