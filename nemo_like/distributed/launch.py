"""The process group: made from the launcher's environment, ended in the right order.

Why the order matters. A gloo job aborts now and then at interpreter exit, all its work done ("terminate called without
an active exception", SIGABRT). By the debugger's stack, gloo's own threads (``pt_gloo_runloop``) wake
whoever waits for a collective first and drop the collective's tensors afterwards, for which they need the GIL where a
tensor was seen by Python. If the main thread begins to end the interpreter while one of them waits for the GIL, CPython
ends that thread with ``pthread_exit``. That unwinds through a C++ destructor that may not throw, and C++ calls
``std::terminate``. ``destroy_process_group`` joins gloo's threads only where nothing refers to the group any more; a model
under DDP or FSDP2 does. So `shutdown` comes last on every rank, and waits until those threads are idle; and
`init_distributed` registers the same for the interpreter's exit, where handlers still run before that point. The test
(`tests_distributed/test_launch.py`) makes gloo's threads slow and the main thread greedy: without the wait 4 of 4
ranks abort, with it none; and 60 of 60 two-rank torchrun jobs with FSDP2 and DDP ended with exit code 0.
"""

import atexit
import glob
import os
import resource
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nemo_like._util.device_work import TRIED, check_kind
from nemo_like._util.log import say_once, warn_once
from nemo_like.options.memory import ALLOCATOR_VARIABLES
from nemo_like.options.parallel import BACKENDS

# Accelerators of torch that are never picked: Intel's, Apple's, Huawei's, Intel's Gaudi, Cambricon's, Moore Threads'.
_OTHERS = ("xpu", "mps", "npu", "hpu", "mlu", "musa")
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def world_size() -> int:
    """Ranks of this job: the process group's, else the launcher's ``WORLD_SIZE``, else 1. Starts nothing."""
    started = dist.is_available() and dist.is_initialized()
    return dist.get_world_size() if started else _environment_number("WORLD_SIZE", 1)


def rank() -> int:
    """This process's number among `world_size` ranks: the process group's, else ``RANK``, else 0. Starts nothing."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else _environment_number("RANK", 0)


def local_rank() -> int:
    """This process's number on its node (``LOCAL_RANK``), 0 without a launcher."""
    return _environment_number("LOCAL_RANK", 0)


def local_world_size() -> int:
    """Ranks on this node (``LOCAL_WORLD_SIZE``); all of them without a launcher that sets it."""
    return _environment_number("LOCAL_WORLD_SIZE", world_size())


def pick_device_type() -> str:
    """``"cuda"`` (NVIDIA's or AMD's) where such a device is visible, else ``"cpu"``; another accelerator is named once."""
    kind = next(kind for kind in BACKENDS if kind == "cpu" or _device_count(kind))
    if kind == "cpu":
        visible = torch.accelerator.current_accelerator(check_available=True)  # of a kind that no list has, too
        others = (*_OTHERS, *([visible.type] if visible else ()))
        if (other := next(filter(_device_count, others), None)) is not None:
            say_once(f"torch sees {other.upper()} here, and training was tried on {TRIED} alone: this is the CPU.")
    return kind


def check_places(model: nn.Module) -> None:
    """Raise ValueError where parameters are on an accelerator that is not picked: the model would leave it for the CPU."""
    places = {p.device.type for p in model.parameters()} - {*BACKENDS, "meta"}
    if places:
        kind = min(places)
        raise ValueError(
            f"Parameters are on {kind!r}, device is left out, and training was tried on {TRIED} alone: the model would "
            f"move to {pick_device_type()!r}. Move it there first, with model.to({pick_device_type()!r})."
        )


def current_device(kind: str) -> torch.device:
    """The device of that kind that this process works on, with its number; it initialises the device."""
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def local_device(device_type: str | None = None) -> torch.device:
    """The device of this rank: ``cuda:LOCAL_RANK`` or ``cpu``.

    Raises:
        ValueError: `device_type` is neither, or this node has no CUDA device of that number.
    """
    device_type = device_type or pick_device_type()
    if device_type == "cpu":
        return torch.device("cpu")
    if device_type not in BACKENDS:
        raise ValueError(f"device_type is {device_type!r}; it must be one of {', '.join(map(repr, BACKENDS))}.")
    name, count = device_type.upper(), _device_count(device_type)
    if not count:
        raise ValueError(
            f"device_type is {device_type!r}, and torch sees no {name} device here. Leave it out to run on the CPU, or "
            f"install a build of torch for {name}."
        )
    if local_rank() >= count:
        raise ValueError(
            f"LOCAL_RANK is {local_rank()} but this node has {count} {name} device(s): "
            f"start at most {count} processes per node (torchrun --nproc-per-node {count})."
        )
    return torch.device(device_type, local_rank())


def checked_device(device: str | torch.device) -> torch.device:
    """The device that ``device=`` names, once it is sure that a model can train there.

    Raises:
        ValueError: no device is written like that, or this machine has none of the kind or number.
    """
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device is {device!r}; write it like 'cpu', 'cuda' or 'cuda:1'.") from error
    if place.type == "meta":
        raise ValueError(
            "device is 'meta', which holds no weights: a model cannot train there. Build the model on the meta device, "
            "leave device out, and call nemo_like.distributed.materialize afterwards."
        )
    if place.type != "cpu":
        count = _device_count(place.type)
        if count:
            check_kind(place.type)
        if (place.index or 0) >= count:
            raise ValueError(
                f"device is {str(device)!r}, and torch sees {count} {place.type.upper()} device(s) here. Leave device out "
                f"to take the device at hand, or install a build of torch for {place.type.upper()}."
            )
    return place


def _device_count(device_type: str) -> int:
    """Devices of that type that this process can use; 0 where this torch was built without it."""
    module = getattr(torch, device_type, None)
    if module is None or not getattr(module, "is_available", lambda: False)():
        return 0
    return module.device_count() if hasattr(module, "device_count") else 1


def init_distributed(
    device_type: str | None = None, *, timeout: timedelta | None = None, one_rank: bool = False
) -> torch.device:
    """Join the launcher's job, and return this rank's device; the CUDA device is made the current one.

    Without a launcher, or with one rank, no process group is made. One that exists already is left as it is.
    Back ends: NCCL for CUDA tensors and gloo for CPU tensors (object collectives, asynchronous checkpoints) on CUDA;
    gloo alone on CPU.

    Args:
        device_type: ``"cuda"`` or ``"cpu"``; None: CUDA where there is any.
        timeout: how long a collective may wait for the other ranks before the job fails; None: torch's default.
        one_rank: make a process group for one rank too.

    Raises:
        RuntimeError: ``WORLD_SIZE`` is above 1 and another variable of the launcher is missing.
        ValueError: a variable is not a number, or there is no CUDA device for this rank.
    """
    device = local_device(device_type)
    accelerated = device.type != "cpu"
    if accelerated:
        torch.get_device_module(device).set_device(device)
    if dist.is_initialized() or (world_size() == 1 and not one_rank):
        return device
    alone: dict[str, Any] = {}
    if world_size() == 1:  # no launcher is needed
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    needed = () if alone else _LAUNCHER_VARIABLES + (("LOCAL_RANK",) if accelerated else ())
    missing = [name for name in needed if name not in os.environ]
    if missing:
        raise RuntimeError(
            f"WORLD_SIZE is {world_size()} but {', '.join(missing)} not set. Start the job with torchrun, or "
            "call torch.distributed.init_process_group yourself first."
        )
    allow_open_files(world_size())
    dist.init_process_group(BACKENDS[device.type], timeout=timeout, device_id=device if accelerated else None, **alone)
    atexit.register(_leave, patience=_PATIENCE)
    return device


# Open files of a process itself, with a model's shards; and its sockets to each other rank: gloo connects every pair of
# ranks in the default group, and in those of the axes, of agreement and of checkpoints.
_FILES, _FILES_PER_RANK = 512, 4


def allow_open_files(ranks: int) -> None:
    """Raise this process's limit of open files to that of a job of so many ranks, as far as the system lets it."""
    needed = _FILES + _FILES_PER_RANK * ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, most = (needed if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, most), hard))
    if most < needed:
        warn_once(
            f"This process may open {most:,} files, and a job of {ranks:,} ranks opens up to about {needed:,}: gloo "
            f"connects each pair of ranks several times. If it fails with 'Too many open files', raise the hard limit "
            f"before the launcher starts: `ulimit -Hn {needed}`, LimitNOFILE= of a service, or --ulimit nofile={needed} "
            "of a container."
        )


def shutdown() -> None:
    """End the process group, if there is one: the last thing that every rank does.

    Waits for the other ranks first, so that none leaves while another still talks to it; not when an exception is on
    its way (``finally: shutdown()``), because a rank that failed must not wait for ranks that wait for it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    if sys.exc_info()[0] is not None:
        _leave(patience=_PATIENCE)
    else:
        dist.barrier()
        dist.destroy_process_group()
        _wait_for_gloo(_PATIENCE)


# Seconds that a rank which failed, or forgot `shutdown`, waits for its own collectives in flight before it leaves.
_PATIENCE = 10.0


def _leave(patience: float) -> None:
    """Destroy the process group without asking the others; give up after `patience` seconds."""
    if dist.is_initialized():
        thread = threading.Thread(target=dist.destroy_process_group, name="nemo_like_leave", daemon=True)
        thread.start()
        thread.join(patience)
    _wait_for_gloo(patience)


_PAUSE = 0.02  # Seconds; four times as long as CPython lets a thread wait for the GIL before it takes it from another.


def _wait_for_gloo(patience: float) -> None:
    """Return once gloo's threads are gone, or were asleep without a break while the GIL was free; or after `patience`."""
    before: dict[str, str] = {}
    until = time.monotonic() + patience
    while time.monotonic() < until:
        now = _gloo_threads()
        if not now or (now == before and all("State:\tS" in status for status in now.values())):
            return
        before = now
        time.sleep(_PAUSE)


def _gloo_threads() -> dict[str, str]:
    """Return the kernel's report of each of gloo's threads (state, how often it was switched); empty without Linux."""
    threads: dict[str, str] = {}
    for path in glob.glob("/proc/self/task/*/status"):
        try:
            with open(path) as file:
                status = file.read()
        except OSError:
            continue  # it has just ended
        if status.startswith("Name:\tpt_gloo"):
            threads[path] = "".join(
                line for line in status.splitlines(True) if line.startswith(("State", "volun", "nonvol"))
            )
    return threads


def _environment_number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    number = int(text) if text.strip().isdecimal() else -1
    if number < 0 or (name == "WORLD_SIZE" and number < 1):
        raise ValueError(f"The environment variable {name} is {text!r}; it must be a whole number set by the launcher.")
    return number


def let_segments_grow(device_type: str) -> None:
    """Set ``PYTORCH_ALLOC_CONF`` for a CUDA device where it is unset, before the first allocation reads it."""
    if device_type == "cuda" and not os.environ.keys() & {*ALLOCATOR_VARIABLES}:
        os.environ[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"
        say_once(
            "PYTORCH_ALLOC_CONF is unset, so this job sets expandable_segments:True, with which less memory is lost between "
            "blocks. To keep PyTorch's default, set PYTORCH_ALLOC_CONF=expandable_segments:False."
        )
