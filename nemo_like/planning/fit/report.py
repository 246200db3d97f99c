"""A fit's answers for people: the table of the best, bytes and seconds of one of them, and the command."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from nemo_like._util.words import write_bytes
from nemo_like.flags import reshard_word
from nemo_like.options import PipelineParallel, StepSpec
from nemo_like.planning.fit.candidate import Candidate, precision_word
from nemo_like.planning.fit.explained import Row
from nemo_like.planning.fit.fitting import FitReport
from nemo_like.planning.verdict import ALLOCATED, RESERVED

_HEAD = (
    "#", "dp_replicate x dp_shard", "tp", "cp", "ep", "pp", "micro-batch x times", "precision", "optimizer",
    "ac", "loss", "offload", "reshard", "cpu_offload",
    "peak GiB", "reserved", "ms", "tokens/s/GPU", "MFU",
)  # fmt: skip


def table(report: FitReport) -> str:
    """The configurations as text, best first; axes that none of them uses are left out."""
    lines = [_HEAD, *(_line(n, candidate) for n, candidate in enumerate(report.candidates, 1))]
    bare = {
        "tp": "1",
        "cp": "1",
        "ep": "1",
        "pp": "1",
        "offload": "none",
        "reshard": "default",
        "reserved": "",
        "cpu_offload": "no",
    }
    # Of what is the same everywhere unless several were asked for, the report's first line speaks.
    same = {name for name in ("precision", "optimizer") if len({line[_HEAD.index(name)] for line in lines[1:]}) <= 1}
    kept = [
        i for i, name in enumerate(_HEAD) if name not in same and any(line[i] != bare.get(name) for line in lines[1:])
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEAD))]
    return "\n".join("  ".join(line[i].rjust(widths[i]) for i in kept).rstrip() for line in lines)


def judged(report: FitReport) -> str:
    """What a configuration had to fit in the limit with, in a sentence."""
    known = {candidate.need.by for candidate in report.candidates}
    words = [_JUDGED[by] for by in _JUDGED if by in known]
    return f"A configuration fits if {', and '.join(words)} within {report.question.limit / 2**30:.2f} GiB."


_JUDGED = {
    RESERVED: "what our model of CUDA's caching allocator reserves (of a pipeline, on the rank where that is most) is",
    ALLOCATED: "what tensors take is",
}


def _line(number: int, candidate: Candidate) -> tuple[str, ...]:
    conf = candidate.conf
    stages = str(conf.pp) if conf.pp == 1 else f"{conf.pp} {conf.schedule}"
    reserved = "" if candidate.reserved is None else f"{candidate.reserved / 2**30:.2f}"
    reshard = reshard_word(conf.reshard)
    return (
        str(number), f"{conf.dp_replicate} x {conf.dp_shard}", str(conf.tp), str(conf.cp), str(conf.ep), stages,
        f"{conf.micro_batch} x {conf.grad_accum}", precision_word(conf.job.precision), conf.job.step.optimizer,
        candidate.ac, "model" if conf.job.loss is None else "chunked", conf.job.offload.mode, reshard,
        "yes" if conf.cpu_offload else "no",
        f"{candidate.peak_bytes / 2**30:.2f}", reserved, f"{1000 * candidate.step_seconds:,.1f}",
        f"{candidate.tokens_per_second_per_gpu:,.0f}", f"{candidate.mfu:.1%}",
    )  # fmt: skip


def explanation(candidate: Candidate) -> str:
    """Where each byte and each millisecond of one configuration comes from: parts, the largest first, and what they are made
    of. The parts add up to the peak and to the step, and the lines below a part to it."""
    account = candidate.account
    rows = ((), ()) if account is None else (account.bytes, account.seconds)
    lines = [f"Peak: {write_bytes(candidate.peak_bytes)}, {candidate.peak.at}"]
    lines += _parts(candidate.peak.parts, rows[0], _size)
    lines.append(f"Beside it, among what must fit:\n  {_size(candidate.need.inputs)}  step's input")
    if account is not None and account.ranks:
        lines.append("Peak of each rank of the pipeline:")
        lines += [
            f"  {_size(rank.total)}  rank {number}, {_stages(rank.stages)}: {rank.at}"
            for number, rank in enumerate(account.ranks)
        ]
    lines.append(f"Step: {1000 * candidate.step_seconds:,.2f} ms")
    return "\n".join(lines + _parts(candidate.seconds.parts, rows[1], _milliseconds))


def _parts(totals: Mapping[str, float], rows: Sequence[Row], word: Callable[[float], str]) -> list[str]:
    lines = []
    for part, total in sorted(totals.items(), key=lambda item: -item[1]):
        lines.append(f"  {word(total)}  {part}")
        for row in (row for row in rows if row.part == part and row.what):
            hidden = f" (and {word(row.hidden).strip()} that computing hides)" if row.hidden else ""
            lines.append(f"    {word(row.amount)}  {row.what}{hidden}")
    return lines


def _size(size: float) -> str:
    return f"{write_bytes(round(size)):>11}"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:9,.3f} ms"


def _stages(numbers: Sequence[int]) -> str:
    return f"stage{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def recipe(report: FitReport, candidate: Candidate) -> str:
    """The command that trains so."""
    conf, job = candidate.conf, candidate.job
    said = {
        "--model": report.model, "--seq-len": report.question.seq_len, "--batch-size": conf.sequences,
        "--grad-accum": conf.grad_accum, "--ac": candidate.ac,
        "--precision": precision_word(job.precision),
    }  # fmt: skip
    axes = {"--dp-replicate": conf.dp_replicate, "--tp": conf.tp, "--cp": conf.cp, "--ep": conf.ep, "--pp": conf.pp}
    said |= {name: size for name, size in axes.items() if size > 1}
    if conf.pp > 1:
        said["--pp-schedule"] = conf.schedule or PipelineParallel.schedule
    if job.loss is not None:
        said["--loss"] = "chunked"
    if job.offload.mode != "none":
        said["--offload"] = job.offload.mode
    if conf.reshard is not None:
        said["--reshard-after-forward"] = "yes" if conf.reshard else "no"
    options = [f"{name} {value}" for name, value in said.items()] + ["--cpu-offload"] * conf.cpu_offload
    hosts = -(-conf.gpus // report.question.device.gpus_per_host)
    start = f"torchrun --nnodes {hosts} --nproc-per-node {min(conf.gpus, report.question.device.gpus_per_host)} -m "
    begin = "python -m " if conf.gpus == 1 else start
    optimizer = job.step.optimizer
    note = "" if optimizer == StepSpec.optimizer else f"  # it trains with AdamW, not {optimizer}"
    return f"{begin}nemo_like.recipes.pretrain {' '.join(options)}{note}"
