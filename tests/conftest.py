"""One thread per process: the models here are so small that a thread pool would only make them wait for each other."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["NEMO_LIKE_CACHE"] = "off"  # no rates that somebody measured here, no traces of another test

import pytest  # noqa: E402
import torch  # noqa: E402

from tests.said import logs  # noqa: E402, F401
from tests.selection import pytest_collection_modifyitems  # noqa: E402, F401

torch.set_num_threads(1)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Nothing that was compiled before, and nothing left behind."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def program(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run `nemo-like` with words, which must end with that code; return what it printed, as ``out`` and ``err``."""
    from nemo_like.cli import main

    def run(words: str | Sequence[str], ends: int = 0) -> Any:
        code = main(words.split() if isinstance(words, str) else [*words])
        printed = capsys.readouterr()
        assert code == ends, printed.err
        return printed

    return run


@pytest.fixture
def ending(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Call what leaves the program, as argparse does, with that code; return what it printed, as ``out`` and ``err``."""

    def run(call: Callable[..., Any], *args: Any, code: int = 2) -> Any:
        with pytest.raises(SystemExit) as ended:
            call(*args)
        assert ended.value.code == code
        return capsys.readouterr()

    return run
