"""Messages written from the bytes on a GPU: the causes, their order and their bytes are those bytes again."""

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest

from nemo_like.explaining.messages import _PLAIN, OutOfMemory, causes, words
from tests.explaining.test_messages import read

PUBLIC: list[dict[str, str]] = json.loads(Path(__file__).with_name("oom_classes.json").read_text(encoding="utf-8"))
GIB, TOTAL = 1 << 30, 79.19
NEW = (
    "{k} out of memory. Tried to allocate {asked:.2f} GiB. GPU 0 has a total capacity of 79.19 GiB of which {free:.2f} GiB "
    "is free. {processes}Of the allocated memory {live:.2f} GiB is allocated by PyTorch, and {unused:.2f} GiB is reserved "
    "by PyTorch but unallocated."
)
OLD = (
    "{k} out of memory. Tried to allocate {asked:.2f} GiB (GPU 0; 79.19 GiB total capacity; {live:.2f} GiB already "
    "allocated; {free:.2f} GiB free; {reserved:.2f} GiB reserved in total by PyTorch)"
)


GRID = [
    {"asked": a, "free": f, "others": o, "outside": c, "unused": u, "live": TOTAL - f - o - c - u}
    for a, f, o, c, u in itertools.product(
        (0.5, 2, 5, 12), (0.05, 0.4), (0, 0.5, 3.1, 20), (0.6, 1.2, 2.6, 6.3), (0.25, 1, 4, 9, 24)
    )
]


def _expected(case: dict[str, float], unnamed: bool) -> list[tuple[str, float]]:
    """Return the causes by the bytes on the GPU: those that are enough, the largest first, live tensors, and the others.

    unnamed: the message does not tell other processes from what this one has outside of its allocator.
    """
    reserved, named = case["live"] + case["unused"], dict[str, float]()
    if unnamed:
        if case["others"] + case["outside"] > 0.07 * TOTAL:
            named["other processes"] = case["others"] + case["outside"]
    else:
        if case["others"] > 0.3:
            named["other processes"] = case["others"]
        if case["outside"] > 2:
            named["outside of the allocator"] = case["outside"]
    if case["unused"] > 0.1 * reserved or any(case["unused"] > size for size in named.values()):
        named["fragmentation"] = case["unused"]
    ranked = sorted(named.items(), key=lambda pair: -pair[1])
    enough = [pair for pair in ranked if pair[1] >= case["asked"] - case["free"]]
    fills = case["live"] > 0.7 * TOTAL or case["live"] + case["asked"] > TOTAL or not enough
    return [*enough, *([("live tensors", case["live"])] if fills else []), *ranked[len(enough) :]]


def _written(case: dict[str, float], form: str) -> str:
    own, reserved = TOTAL - case["free"] - case["others"], case["live"] + case["unused"]
    other = f"Process 7 has {case['others']:.2f} GiB memory in use. " if case["others"] else ""
    processes = {
        "2.1": f"{other}Including non-PyTorch memory, this process has {own:.2f} GiB memory in use. ",
        "container": f"{other}Process 8 has {own:.2f} GiB memory in use. ",
        "WSL": "Including non-PyTorch memory, this process has 17179869184.00 GiB memory in use. ",
        "container 0": "Including non-PyTorch memory, this process has 0 bytes memory in use. ",
        "HIP": "",
        "old": "",
    }[form]
    text = OLD if form == "old" else NEW
    return text.format(k="HIP" if form == "HIP" else "CUDA", processes=processes, reserved=reserved, **case)


@pytest.mark.parametrize("form", ["2.1", "container", "container 0", "WSL", "HIP", "old"])
def test_causes_are_the_bytes_on_the_gpu(form: str) -> None:
    assert len(GRID) == 640
    for case in GRID:
        text = _written(case, form)
        message = read(text)
        shown = causes(message)
        expected = _expected(case, unnamed=form not in ("2.1", "container"))
        assert [each.kind for each in shown] == [kind for kind, _ in expected], text
        assert all(abs(each.size / GIB - size) < 0.03 for each, (_, size) in zip(shown, expected, strict=True)), text
        lines = words(message)
        assert len(lines) <= 1 + 2 * len(shown) and max(map(len, lines)) <= 80
        assert all(f"{each.size / GIB:.2f}GiB" in " ".join(lines) for each in shown)


@pytest.mark.parametrize("entry", PUBLIC, ids=lambda entry: entry["source"])
def test_class_of_a_public_text(entry: dict[str, str]) -> None:
    message = read(entry["text"])
    shown, lines = causes(message), words(message)
    assert shown[0].kind in entry["cause"].split("|")
    assert len(lines) <= 1 + 2 * len(shown) and max(map(len, lines)) <= 80


def test_a_message_without_the_unallocated_bytes_names_no_other_process() -> None:
    for live in (21.7, 20.5, 18.6):
        text = (
            f"CUDA out of memory. Tried to allocate 1.36 GiB. GPU 7 has a total capacity of 23.65 GiB of which 1.30 GiB is "
            f"free. Process 282836 has 22.29 GiB memory in use. Of the allocated memory {live} GiB is allocated by PyTorch."
        )
        assert causes(read(text))[0].kind == "live tensors"
        assert read(text).elsewhere_bytes == pytest.approx(0.06 * GIB, abs=0.01 * GIB)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("CUDA", ("nvidia-smi", "PYTORCH_ALLOC_CONF", "NCCL_MAX_NCHANNELS", "torch.cuda.set_device")),
        ("HIP", ("rocm-smi", "PYTORCH_HIP_ALLOC_CONF", "NCCL_MAX_NCHANNELS", "torch.cuda.set_device")),
        ("NPU", ("npu-smi", "PYTORCH_NPU_ALLOC_CONF", "HCCL_BUFFSIZE", "torch.npu.set_device")),
        ("XPU", ("xpu-smi", "PYTORCH_ALLOC_CONF", "process groups", "torch.xpu.set_device")),
        ("MUSA", ("mthreads-gmi", "PYTORCH_MUSA_ALLOC_CONF", "process groups", "torch.musa.set_device")),
    ],
)
def test_ways_out_are_those_of_the_backend(kind: str, names: tuple[str, ...]) -> None:
    case = {"asked": 1, "free": 0.1, "unused": 20, "live": 40}
    one = "Process 7 has 9.00 GiB memory in use. Including non-PyTorch memory, this process has 69.00 GiB memory in use. "
    ranks = "".join(f"Process {n} has 520.00 MiB memory in use. " for n in range(7))
    text = " ".join(line for each in (one, ranks) for line in words(read(NEW.format(k=kind, processes=each, **case))))
    assert all(name in text for name in names)
    others = {"nvidia-smi", "rocm-smi", "npu-smi", "xpu-smi", "mthreads-gmi"} - set(names)
    assert not any(name in text for name in others)


def test_private_pools_and_shared_memory_are_named() -> None:
    pools = NEW.replace("PyTorch, and", "PyTorch, with 4.00 GiB allocated in private pools (e.g., CUDA Graphs), and")
    own = "Including non-PyTorch memory, this process has 79.00 GiB memory in use. "
    shown = causes(read(pools.format(k="CUDA", asked=1, free=0.1, live=60, unused=17, processes=own)))
    assert [(each.kind, each.size) for each in shown] == [
        ("fragmentation", 17 * GIB),
        ("live tensors", 60 * GIB),
        ("private pools", 4 * GIB),
    ]
    shared = NEW.replace("79.19", "119.70").format(k="CUDA", asked=9, free=1, live=60, unused=0.1, processes="")
    assert causes(read(shared))[0].kind == "unified memory"


VLLM = "(EngineCore pid=69) ValueError: Free memory on device {}(6.90/8.00 GiB) on startup is less than desired GPU memory "


@pytest.mark.parametrize(
    ("text", "form", "kind", "size"),
    [
        (VLLM.format("cuda:1 ") + "utilization (0.9, 7.20 GiB). Decrease", "vllm", "other processes", 1.1),
        (VLLM.format("") + "utilization (0.9, 7.2 GiB). Decrease", "vllm", "other processes", 1.1),
        ("RuntimeError: CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62", "vllm wakes up", "driver", 0),
        ("ValueError: No available memory for the cache blocks. Try increasing", "vllm cache", "vLLM", 0),
        ("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)", "level zero", "driver", 0),
        ("Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES)", "level zero", "driver", 0),
        ("RuntimeError: HIP error: out of memory", "driver", "driver", 0),
    ],
)
def test_forms_of_vllm_and_drivers(text: str, form: str, kind: str, size: float) -> None:
    message = read(text)
    (cause,) = causes(message)
    assert (message.form, cause.kind, round(cause.size / GIB, 2)) == (form, kind, size)


def test_plain_forms_fit_on_two_lines() -> None:
    for form in _PLAIN:
        assert len(words(OutOfMemory(form))) <= 3


def test_the_message_of_cuda_malloc_async() -> None:
    text = (
        "torch.OutOfMemoryError: Allocation on device 1 would exceed allowed memory. (out of memory)\n"
        "Currently allocated     : 9.43 GiB\nRequested               : 640.00 MiB\nDevice limit            : 11.59 GiB\n"
        "Free (according to CUDA): 7.12 MiB\nPyTorch limit (set by user-supplied memory fraction)\n"
        "                        : {} GiB\n"
    )
    message = read(text.format("17179869184.00"))
    assert (message.form, message.device, message.asked_bytes) == ("cudaMallocAsync", 1, 640 << 20)
    shown = {cause.kind: round(cause.size / GIB, 2) for cause in causes(message)}
    assert shown == {"unknown": 2.15, "live tensors": 9.43}  # the pool's free blocks, the context, or others
    assert causes(read(text.format("10.00")))[0].kind == "limit set by the process"


# Logs with several messages.


def _log(*parts: Any) -> str:
    """Return a log: a number is a step, a pair is a rank that ran out of memory with so many live GiB."""
    lines = []
    for part in parts:
        if isinstance(part, tuple):
            rank, live = part
            prefix = "" if rank is None else f"[rank{rank}]: "
            text = NEW.format(k="CUDA", asked=1, free=0.1, live=live, unused=1, processes="")
            lines += [f"{prefix}Traceback (most recent call last):", f'{prefix}  File "train.py", line 31, in step']
            lines += [f"{prefix}torch.OutOfMemoryError: {text}"]
        else:
            lines += [f"INFO step {part} loss {10 / part:.3f}"] if isinstance(part, int) else [part]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("parts", "live", "rank", "ranks", "went_on"),
    [
        ([1, (None, 70), 2, 3, (None, 60)], 60, None, 0, False),
        ([1, (None, 70), 2, 3], 70, None, 0, True),
        ([1, (2, 70), (0, 71), (3, 72), (1, 73), "W0401 torch/distributed/elastic: Sending process 4"], 70, 2, 4, False),
        ([1, (0, 50), 2, (3, 70), (1, 71)], 70, 3, 2, False),
        ([(5, 50), 2, (5, 60), 3, (5, 70), (4, 71)], 70, 5, 2, False),
        ([(1, 70), "[rank0]: ncclUnhandledCudaError: Cuda failure 2 'out of memory'"], 70, 1, 2, False),
        ([(None, 70), (3, 70.5), (1, 71)], 70.5, 3, 2, False),
        ([(0, 50), 2, "RuntimeError: CUDA error: out of memory"], None, None, 0, False),
    ],
)
def test_the_message_that_ended_the_run(
    parts: list[Any], live: float | None, rank: int | None, ranks: int, went_on: bool
) -> None:
    message = read(_log(*parts))
    assert message.allocated_bytes == (None if live is None else round(live * GIB))
    assert (message.rank, message.ranks, message.went_on) == (rank, ranks, went_on)
    lines = words(message)
    assert (f"Rank {rank} failed first, of {ranks} ranks with such a message." in lines) == (ranks > 1)


@pytest.mark.parametrize(
    "line",
    [
        "INFO step 3 loss 1.2",
        "{'loss': 1.23, 'epoch': 0.1}",
        "  5%|▌         | 5/100 [00:10<03:20]",
        " iteration       12/     100 | consumed samples: 12",
        "Epoch [3/10]",
        "global_step=12",
        "2026-01-01 12:00:00 - Step: 7",
    ],
)
def test_lines_of_steps(line: str) -> None:
    assert read(_log((None, 70), line)).went_on
    traceback = ("    loss = model(x)  # step by step", "  File 'a.py', line 3, in training_step")
    assert not read(_log(line, (None, 70), *traceback)).went_on


def test_a_log_of_20_mb_takes_less_than_two_seconds() -> None:
    steps = "INFO 2026-01-01 step 12 loss 1.0 memory in use\n" * 215_000
    text = _log((1, 50)) + steps + _log((1, 55)) + steps + _log((2, 60), (1, 70))
    assert len(text) > 20_000_000
    begin = time.perf_counter()
    assert read(text).rank == 2
    assert time.perf_counter() - begin < 2
