"""Run a function on real gloo ranks, cheaply: `run_ranks(world_size, fn, *args)`.

    from tests_distributed.spawn import run_ranks

    def _sum(rank, world_size, extra):          # module level: it is found again by its name
        total = torch.tensor([rank + extra])
        dist.all_reduce(total)                  # the gloo group is there already
        return total.item()

    def test_sum():
        assert run_ranks(2, _sum, 10) == [21, 21]

What a test can rely on:

- `fn(rank, world_size, *args)` runs once per rank, in its own process, with torchrun's variables (``RANK``,
  ``LOCAL_RANK``, ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``), one thread, and the seed 0.
  ``init_group=False`` leaves the process group to `fn` (for code that builds it from the environment).
- Results come back as a list by rank. Arguments and results go through pickle; plain tensors may, DTensors may not.
- The exception of the rank that failed first (one that only lost its connection to another rank comes last, because
  the other rank's end is noticed later) is raised here with its own type, and with that rank's traceback and output
  as a note, so that ``pytest.raises(ValueError, match=...)`` works. ``return_exceptions=True`` waits for every
  rank instead and returns each one's exception in its place: for "a clear error on *every* rank".
- A rank that native code alone killed (a segmentation fault in a thread of gloo's, or glibc's finding that the heap is
  broken, each seen once in some 100,000 calls) is started again with the others, once and with a warning: this package
  has no native code, and what it broke by calling would break again.
- After `timeout` seconds every rank left is killed and `RanksTimedOutError` shows where each one was standing.
- ``env={"NAME": "value"}`` adds variables (None removes one).
- A test that is nothing but the work of its ranks stands under `on_ranks`:

    @pytest.mark.parametrize("extra", [10])
    @on_ranks(2)
    def test_sum(rank, world_size, extra):

How: the first call starts one *server* with a fresh interpreter that imports torch and the slow modules once, and trains
a small model, which fills torch's caches; each rank is a fork of it (some 20 ms instead of 5 s of imports). Forking from
pytest itself would be simpler and wrong: its threads, its OpenMP pool and its autograd device threads (on a CUDA machine)
do not survive a fork. The server never has a second thread; it checks. A test module is imported in the server, not in
each rank, so keep module level free of side effects.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import inspect
import os
import pickle
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

DEFAULT_TIMEOUT = 60.0
"""Seconds a call may take."""
GRACE = 3.0
"""Seconds that the other ranks get to end by themselves after one has failed."""

# Imported once by the server, because they are slow; one that is missing is skipped.
PRELOAD = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.tensor.debug",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "torch._dynamo",
    "torch.testing._internal.distributed.fake_pg",
    "torch.nn.parallel",
    "torch.optim",
    "nemo_like",
    "transformers.models.llama.modeling_llama",
    "peft",
    "nemo_like.recipes.pretrain",
)


class RanksTimedOutError(TimeoutError):
    """Some rank had not returned in time; the message has every such rank's stack."""


class RankDiedError(RuntimeError):
    """A rank's process ended without a result (killed, or aborted in native code)."""


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = DEFAULT_TIMEOUT,
    init_group: bool = True,
    env: Mapping[str, str | None] | None = None,
    return_exceptions: bool = False,
) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` on `world_size` gloo ranks; results by rank (see the module's docstring)."""
    if "<locals>" in fn.__qualname__ or "<lambda>" in fn.__qualname__ or fn.__module__ == "__main__":
        raise TypeError(f"{fn.__module__}.{fn.__qualname__} cannot be found again by name: define it at module level.")
    request = {
        "world_size": world_size,
        "module": fn.__module__,
        "qualname": fn.__qualname__,
        "args": pickle.dumps(args),
        "timeout": timeout,
        "init_group": init_group,
        "env": dict(env or {}),
        "stop_early": not return_exceptions,
        "path": sys.path,
        "cwd": os.getcwd(),
    }
    outcomes = _outcomes(request)
    if any(outcome.killed_by_native_code for outcome in outcomes):
        warnings.warn(f"native code killed a rank in {fn.__qualname__}: its ranks run again", stacklevel=2)
        outcomes = _outcomes(request)
    values = [outcome.value() for outcome in outcomes]
    if return_exceptions:
        return values
    failed = sorted((o.lost_a_peer, o.order, o.rank) for o in outcomes if o.failed)
    if failed:
        raise values[failed[0][-1]]
    return values


def refused_on_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, match: str, error: Any = ValueError, **options: Any
) -> None:
    """Expect `error`, with the pattern `match` in its message, on every rank."""
    for found in run_ranks(world_size, fn, *args, return_exceptions=True, **options):
        assert isinstance(found, error), found
        assert re.search(match, str(found)), found


def on_ranks(world_size: int | None = None, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function: it is called as `run_ranks` calls it, with the test's further arguments.

    Without a number the test's own argument ``world_size``, its second, says how many ranks there are.
    """

    def decorate(fn: Callable[..., None]) -> Callable[..., None]:
        parameters = list(inspect.signature(fn).parameters.values())

        @functools.wraps(fn)
        def test(**given: Any) -> None:
            ranks = given[parameters[1].name] if world_size is None else world_size
            run_ranks(ranks, test, *(given[parameter.name] for parameter in parameters[2:]), **options)

        test.__signature__ = inspect.Signature(parameters[1 if world_size is None else 2 :])  # type: ignore[attr-defined]
        test.on_a_rank = fn  # type: ignore[attr-defined]
        return test

    return decorate


def _outcomes(request: dict[str, Any]) -> list[_Outcome]:
    answer = _server().ask(request)
    if isinstance(answer, BaseException):
        raise answer
    return [_Outcome(**fields) for fields in answer]


_BROKEN_HEAP = ("free(): ", "malloc(): ", "realloc(): ", "double free or corruption", "corrupted size vs. prev_size")


class _Outcome:
    """What one rank left behind."""

    def __init__(self, rank: int, order: float, failed: bool, payload: bytes, text: str):
        self.rank, self.order, self.failed, self.payload, self.text = rank, order, failed, payload, text

    @property
    def killed_by_native_code(self) -> bool:
        """Whether glibc found a broken heap, or a signal came in a thread without Python frames (faulthandler calls one
        with them current)."""
        if "Fatal Python error: Aborted" in self.text:
            return self.failed and any(message in self.text for message in _BROKEN_HEAP)
        return self.failed and "Fatal Python error: Segm" in self.text and "Current thread" not in self.text

    @property
    def lost_a_peer(self) -> bool:
        """Whether gloo found a connection closed: the rank at its other end is the one that failed."""
        error = self.text.partition("--- output ---")[0]
        return "closed by peer" in error or "reset by peer" in error

    def value(self) -> Any:
        try:
            value = pickle.loads(self.payload)
        except Exception as error:  # noqa: BLE001  (an exception class that pickles and does not unpickle: keep its text)
            value = RuntimeError(f"rank {self.rank}: its result does not unpickle here ({error})")
            self.failed = True
        if self.failed:
            value.add_note(f"--- rank {self.rank} ---\n{self.text}")
        return value


# ---------------------------------------------------------------------------------------------------------- the client


class _Server:
    """The connection to the forking process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        env |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests_distributed.spawn", str(theirs.fileno())],
            pass_fds=[theirs.fileno()], env=env, cwd=Path(__file__).parents[1], stdin=subprocess.DEVNULL,
        )  # fmt: skip
        theirs.close()
        self.connection = Connection(ours.detach())

    def ask(self, request: dict[str, Any]) -> Any:
        try:
            self.connection.send_bytes(pickle.dumps(request))
            return pickle.loads(self.connection.recv_bytes())
        except BaseException:  # ctrl-C and pytest's timeout too: ranks must end, half an answer must not stay behind
            self.close()
            raise

    def close(self) -> None:
        global _the_server
        _the_server = None
        self.connection.close()  # the server sees the end of the stream, kills its ranks and leaves
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


_the_server: _Server | None = None


def _server() -> _Server:
    global _the_server
    if _the_server is None or _the_server.process.poll() is not None:
        _the_server = _Server()
        atexit.register(_the_server.close)
    return _the_server


def close_server() -> None:
    """End the server, if one was started."""
    if _the_server is not None:
        _the_server.close()


# ---------------------------------------------------------------------------------------------------------- the server


def _serve(connection: Connection) -> None:
    for name in PRELOAD:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is for pytest, which then closes the connection
    while True:
        try:
            request = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            answer: Any = _run_request(connection, request)
        except _ClientGoneError:
            return
        except BaseException as error:  # noqa: BLE001  (whatever it is belongs to the asking test)
            error.add_note("in the server of tests_distributed/spawn.py:\n" + traceback.format_exc())
            answer = error
        try:
            connection.send_bytes(pickle.dumps(answer))
        except (pickle.PicklingError, TypeError, AttributeError):
            connection.send_bytes(pickle.dumps(RuntimeError(repr(answer))))


class _ClientGoneError(Exception):
    pass


def _run_request(connection: Connection, request: dict[str, Any]) -> list[dict[str, Any]]:
    sys.path[:] = request["path"]
    os.chdir(request["cwd"])
    importlib.invalidate_caches()
    importlib.import_module(request["module"])
    threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
    if threads != 1:
        raise RuntimeError(f"importing {request['module']} left {threads} threads running: forking is not safe then.")
    folder = tempfile.mkdtemp(prefix="nemo_like_ranks_")
    ranks: dict[int, tuple[int, Connection]] = {}
    port = _free_port()
    gc.freeze()  # ranks leave alone what was imported: each collection would go through it, and copy its pages
    try:
        for rank in range(request["world_size"]):
            ours, theirs = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                ours.close()
                connection.close()
                _be_a_rank(rank, port, folder, Connection(theirs.detach()), request)
            theirs.close()
            ranks[rank] = (pid, Connection(ours.detach()))
        return _collect(connection, ranks, folder, request)
    finally:
        for pid, pipe in ranks.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pipe.close()
        shutil.rmtree(folder, ignore_errors=True)


def _collect(
    connection: Connection, ranks: Mapping[int, tuple[int, Connection]], folder: str, request: dict[str, Any]
) -> list[dict[str, Any]]:
    waiting = {pipe: rank for rank, (_, pipe) in ranks.items()}
    outcomes: dict[int, dict[str, Any]] = {}
    start = time.monotonic()
    deadline = start + request["timeout"]
    cut_short = False
    while waiting and time.monotonic() < deadline:
        for ready in wait([*waiting, connection], timeout=max(0.0, deadline - time.monotonic())):
            if ready is connection:
                raise _ClientGoneError  # the client never speaks while it waits: this is the end of its stream
            rank = waiting.pop(ready)  # type: ignore[call-overload]
            try:
                failed, payload, text = pickle.loads(ready.recv_bytes())  # type: ignore[union-attr]
            except (EOFError, OSError):
                failed, payload = True, pickle.dumps(RankDiedError(f"rank {rank} ended without a result"))
                text = _output(folder, rank)
            order = time.monotonic() - start
            outcomes[rank] = {"rank": rank, "order": order, "failed": failed, "payload": payload, "text": text}
            if failed and request["stop_early"] and not cut_short:
                cut_short = True
                deadline = min(deadline, time.monotonic() + GRACE)
    for rank in waiting.values():  # too late: where does it stand?
        with contextlib.suppress(ProcessLookupError):
            os.kill(ranks[rank][0], signal.SIGUSR1)
    if waiting:
        time.sleep(0.3)
    for rank in waiting.values():
        error = RanksTimedOutError(
            f"rank {rank} of {request['world_size']} was still running after {request['timeout']} s"
        )
        fields = {"failed": True, "payload": pickle.dumps(error), "text": _output(folder, rank)}
        outcomes[rank] = {"rank": rank, "order": float("inf"), **fields}
    return [outcomes[rank] for rank in sorted(outcomes)]


def _output(folder: str, rank: int) -> str:
    return Path(folder, f"rank{rank}.log").read_text(errors="replace")[-6000:] or "(it wrote nothing)"


def _free_port() -> int:
    """Return a port below those that the system gives to connections, which another process could be given meanwhile."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _be_a_rank(rank: int, port: int, folder: str, pipe: Connection, request: dict[str, Any]) -> None:
    """Run the function in this forked process, answer, and leave without the interpreter's long goodbye."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    log = os.open(os.path.join(folder, f"rank{rank}.log"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    faulthandler.enable()
    world_size = request["world_size"]
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    for name, value in request["env"].items():
        os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
    failed, text = False, ""
    try:
        payload = pickle.dumps(_call(rank, world_size, folder, request))
    except BaseException as error:  # noqa: BLE001  (SystemExit too: it goes back to the test)
        failed, text = True, traceback.format_exc()
        try:
            payload = pickle.dumps(error)
            pickle.loads(payload)
        except Exception:  # noqa: BLE001
            payload = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    sys.stdout.flush()
    sys.stderr.flush()
    if failed:
        text += "--- output ---\n" + _output(folder, rank)
    with contextlib.suppress(OSError):
        pipe.send_bytes(pickle.dumps((failed, payload, text)))
        if not failed:
            pipe.poll(None)  # until it is killed: a rank that serves the store of a group serves it to the last one
    os._exit(1 if failed else 0)


def _call(rank: int, world_size: int, folder: str, request: dict[str, Any]) -> Any:
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    fn: Any = sys.modules[request["module"]]
    for part in request["qualname"].split("."):
        fn = getattr(fn, part)
    fn = getattr(fn, "on_a_rank", fn)  # of a test
    if request["init_group"]:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size,
            timeout=timedelta(seconds=request["timeout"]),
        )  # fmt: skip
        dist.barrier()  # a function that fails at once would close connections that other ranks are still making
    result = fn(rank, world_size, *pickle.loads(request["args"]))
    if request["init_group"] and dist.is_initialized():
        dist.barrier()  # a rank that leaves early would break the others' last collective
        dist.destroy_process_group()
    return result


if __name__ == "__main__":
    from tests_distributed.spawn import _serve as serve  # so that pickled classes are those of the importable module

    serve(Connection(int(sys.argv[1])))
