"""What out-of-memory messages say: 11 public texts, other forms, and damaged ones."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_like.explaining.messages import ModelSizes, OutOfMemory, causes, read_message, readings, words

PUBLIC = {entry["source"]: entry for entry in json.loads(Path(__file__).with_name("oom_messages.json").read_text())}
GIB, MIB = 1 << 30, 1 << 20
QWEN = ModelSizes(152064, 3584, 18944, 28, 4, 128)
SIZES = {
    "llama3-8b": ModelSizes(128256, 4096, 14336, 32, 8, 128),
    "gpt-oss-20b": ModelSizes(201088, 2880, 2880, 64, 8, 64),
    "qwen2-7b": QWEN,
    "qwen2.5-vl-7b": QWEN,
}
# By source: device, then asked, total, free, this process, allocated, unallocated in GiB; the first cause and reading.
EXPECTED: dict[str, tuple[list[float | None], str, str | None]] = {
    "pytorch/torchtitan/issues/2362": ([2, 7.65, 79.19, 6.87, 72.31, 70.63, 134.28 / 1024], "live tensors", None),
    "NVIDIA-NeMo/Automodel/issues/1176": (
        [0, 3.91, 79.11, 830.56 / 1024, 78.29, 77.45, 100.91 / 1024],
        "live tensors",
        "float32 logits of 8,192 tokens",
    ),
    "NVIDIA-NeMo/Automodel/issues/3907": (
        [0, 720 / 1024, 184.31, 443.94 / 1024, None, 171.63, 2.0],
        "live tensors",
        "bfloat16 hidden states of 131,072 tokens",
    ),
    "xichen-fy/Fira/issues/3": (
        [0, 204 / 1024, 23.65, 128.06 / 1024, 23.52, 22.74, 327.43 / 1024],
        "live tensors",
        None,
    ),
    "QwenLM/Qwen3-VL/issues/1351": (
        [1, 3.73, 23.69, 2.68, 21.01, 15.65, 3.5],
        "fragmentation",
        "float32 flat state of one DeepSpeed sub-group (1e9 numbers)",
    ),
    "pytorch/pytorch/pull/99699": (
        [0, 138 / 1024, 15.9, 8.44 / 1024, 15.32, 14.12, 410.41 / 1024],
        "other processes",
        None,
    ),
    "pytorch/pytorch/issues/18853": (
        [0, 1.0, 15.9, 991.56 / 1024, None, 14.25, 607 / 1024**2],
        "live tensors",
        None,
    ),
    "pytorch/pytorch/issues/126766": (
        [None, 3725.29, None, None, None, None, None],
        "one tensor larger than the GPU",
        None,
    ),
    "pytorch/pytorch/issues/152135": ([0, 250 / 1024, 79.26, 104.75 / 1024, 79.14, 74.77, 3.87], "live tensors", None),
    "meta-llama/llama-cookbook/issues/949": (
        [2, 3.91, 14.61, 1.99, 12.62, 8.5, 3.96],
        "fragmentation",
        "float32 logits of 8,192 tokens",
    ),
    "murong-xu/CADS/issues/4": ([0, 22.78, 31.47, 12.73, 18.73, 9.08, 9.35], "one large tensor", None),
}
NUMBERS = ["asked_bytes", "total_bytes", "free_bytes", "process_bytes", "allocated_bytes", "unallocated_bytes"]
NEW = "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 80.00 GiB of which {} is free. {}"
OWN = (
    "Including non-PyTorch memory, this process has {} GiB memory in use. Of the allocated memory {} GiB is allocated by "
    "PyTorch, and {} is reserved by PyTorch but unallocated."
)


def read(text: str) -> OutOfMemory:
    message = read_message(text)
    assert message is not None
    return message


@pytest.mark.parametrize("source", EXPECTED)
def test_numbers_cause_and_reading_of_a_public_text(source: str) -> None:
    message, ((device, *numbers), cause, reading) = read(PUBLIC[source]["text"]), EXPECTED[source]
    assert [getattr(message, name) for name in NUMBERS] == [size and round(size * GIB) for size in numbers]
    assert (message.device, message.kind, causes(message)[0].kind) == (device, "CUDA", cause)
    model = PUBLIC[source]["model"]
    likely = readings(message, SIZES[model]) if model else []
    assert len(likely) <= 2 and (likely[0].words if likely else None) == reading


@pytest.mark.parametrize("source", EXPECTED)
def test_a_cut_text_has_the_numbers_that_are_left(source: str) -> None:
    text = PUBLIC[source]["text"]
    whole = read(text)
    for place in range(40):
        cut = read_message(text[: len(text) * place // 40])
        if cut is not None:
            words(cut), readings(cut, QWEN)
            for name in set(NUMBERS) - {"process_bytes"}:  # which process is this one shows at the end
                assert getattr(cut, name) in (None, getattr(whole, name))


@pytest.mark.parametrize("source", EXPECTED)
@pytest.mark.parametrize(
    "prefix",
    ["[rank2]: ", "(RayTrainWorker pid=41, ip=10.0.0.1) ", "trainer0|1:", "3: ", "\x1b[36m[default0]:\x1b[0m ", ""],
)
def test_prefixes_and_wraps_change_nothing(source: str, prefix: str) -> None:
    plain = re.sub(r"\s+", " ", re.sub(r"^(\[rank\d\]: |> )", "", PUBLIC[source]["text"])).strip()
    for columns in (31, 80):  # within words, and within numbers
        lines = [prefix + plain[place : place + columns] for place in range(0, len(plain), columns)]
        assert read("\n".join(lines)) == read(plain) == read(PUBLIC[source]["text"])


def test_older_forms_and_other_devices() -> None:
    old = (
        "{0} out of memory. Tried to allocate 2.00 GiB ({1} 3; 60.00 GiB total capacity; 50.00 GiB already allocated; "
    )
    tail = "51.00 GiB current active; 1.00 GiB free; 40.00 GiB allowed; 55.00 GiB reserved in total by PyTorch)"
    for kind, unit in (("CUDA", "GPU"), ("HIP", "GPU"), ("NPU", "NPU"), ("MUSA", "GPU")):
        message = read(old.format(kind, unit) + tail)
        assert (message.kind, message.device, message.form) == (kind, 3, "torch 1.4 to 2.0")
        assert (message.allocated_bytes, message.free_bytes, message.allowed_bytes) == (50 * GIB, GIB, 40 * GIB)
        assert (message.unallocated_bytes, message.asked_error) == (5 * GIB, 5368710)
        assert causes(message)[0].kind == "limit set by the process"
    xpu = read(
        "XPU out of memory. Tried to allocate 59.61 GiB. GPU 0 has a total capacity of 28.55 GiB of which 1 GiB is free."
    )
    assert (xpu.kind, xpu.form, causes(xpu)[0].kind) == ("XPU", "cut off", "one tensor larger than the GPU")
    mps = read("MPS backend out of memory (MPS allocated: 14.00 GiB, other allocations: 3.00 GiB, max allowed: 20.00 GiB). "
               "Tried to allocate 4.00 GiB on shared pool.")  # fmt: off
    assert (mps.form, mps.process_bytes, mps.allowed_bytes, mps.asked_bytes) == ("mps", 17 * GIB, 20 * GIB, 4 * GIB)


@pytest.mark.parametrize(
    ("text", "form", "asked"),
    [
        ("torch.AcceleratorError: CUDA error: out of memory", "driver", None),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate", "driver", None),
        ("ncclUnhandledCudaError: Last error:\nFailed to CUDA calloc async 2432 bytes", "nccl", 2432),
        ("Cuda failure 2 'out of memory'", "nccl", None),
        ("torch.OutOfMemoryError: CUDA out of memory", "cut off", None),
    ],
)
def test_memory_that_is_not_the_allocators(text: str, form: str, asked: int | None) -> None:
    message = read(text)
    assert (message.form, message.asked_bytes) == (form, asked)
    assert len(words(message)) >= 1 and (form == "cut off" or causes(message)[0].kind == form)


def test_other_texts_are_no_message() -> None:
    for text in (
        "",
        "Set the batch size to avoid CUDA out of memory errors.",
        "MemoryError",
        "> \n" * 1000,
        "CUDA out of memory" + "9" * 50_000,
    ):
        assert read_message(text) is None


@pytest.mark.parametrize(
    ("free", "rest", "kind"),
    [
        ("0.50 GiB", "".join(f"Process {n} has 520.00 MiB memory in use. " for n in range(7)) + OWN.format(75, 73, "1 GiB"),
         "other ranks' contexts"),
        ("0.50 GiB", OWN.format(79.4, 60, "1.00 GiB"), "outside of the allocator"),
        ("0.50 GiB", OWN.format(79.4, 60, "18.00 GiB"), "fragmentation"),
        ("9.50 GiB", OWN.format(70.4, 69, "1.00 GiB"), "more was free than asked"),
        ("0.00 GiB", OWN.format(95, 90, "1.00 GiB"), "system memory (Windows)"),
        ("9.50 GiB", OWN.replace(" Of", " 70.00 GiB allowed; Of").format(70.4, 69, "0 bytes"), "limit set by the process"),
    ],
)  # fmt: off
def test_classes(free: str, rest: str, kind: str) -> None:
    assert causes(read(NEW.format(free, rest)))[0].kind == kind


def test_processes_in_a_container() -> None:
    own, torchs = "Process 8 has 78.00 GiB memory in use. ", OWN.partition("in use. ")[2]
    text = NEW.format("1.00 GiB", "Process 7 has 520.00 MiB memory in use. " + own + torchs)
    message = read(text.format("70.00", "7.00 GiB"))
    assert (message.process_bytes, message.other_processes) == (78 * GIB, {7: 520 * MIB})
    beside = read(text.format("0.30", "0.10 GiB"))  # 78 GiB of another process, because torch has next to nothing
    assert (beside.process_bytes, causes(beside)[0].kind) == (None, "other processes")
    pools = read(
        text.format("70.00", "7.00 GiB").replace("Torch, and", "Torch, with 3.00 GiB allocated in private pools, and")
    )
    assert (pools.private_pool_bytes, pools.reserved_bytes) == (3 * GIB, 77 * GIB)


def test_known_tokens_choose_the_reading() -> None:
    message, llama = read(PUBLIC["NVIDIA-NeMo/Automodel/issues/1176"]["text"]), SIZES["llama3-8b"]
    by_tokens = {
        count: [r.words for r in readings(message, replace(llama, tokens=count))] for count in (8192, 4096, 3000)
    }
    assert by_tokens[8192][0] == "float32 logits of 8,192 tokens"
    assert by_tokens[4096][0] == "float32 logits of 8,192 tokens (2 times the micro-batch)"
    assert by_tokens[3000] == []
    layer = replace(message, asked_bytes=418 * MIB, asked_error=5243)
    assert readings(layer, llama)[0].tensor.startswith("weights or gradients of one layer")
    scores = replace(message, asked_bytes=4 * GIB, asked_error=5368710)
    assert any(
        r.tensor == "attention scores 1 x 32 x 8,192 x 8,192" for r in readings(scores, replace(llama, tokens=8192))
    )


def test_words_fit_and_need_no_torch() -> None:
    for entry in PUBLIC.values():
        lines = words(read(entry["text"]))
        assert max(map(len, lines)) <= 80 and len(lines) <= 1 + 2 * len(causes(read(entry["text"])))
    code = "import sys, nemo_like.explaining.messages; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
