"""One thread per process: the models here are so small that a thread pool would only make them wait for each other."""

from __future__ import annotations

import os
import tempfile

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["NEMO_LIKE_CACHE"] = tempfile.mkdtemp(prefix="nemo_like-")  # no rates that somebody measured here

import torch  # noqa: E402

from tests.selection import pytest_collection_modifyitems  # noqa: E402, F401

torch.set_num_threads(1)
