"""Text to pretrain on: which documents, which of them are held out, and which window of text each sample reads.

One token is one byte (0 to 255), or one of a tokenizer that is trained on the text. The tokens stay in memory.

The order of the samples is a pure function of (seed, sample index), and the sample index one of (step, place in the
global batch). It does not depend on the number of ranks. So a run that resumes on another number of ranks sees the same
global batches, and no state has to be saved.
"""

import hashlib
import itertools
import json
import math
import os
import sysconfig
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch

from nemo_like._util.device_work import send
from nemo_like._util.extras import require
from nemo_like._util.shuffled import mix, shuffled

VOCABULARY = 256  # different bytes, and so tokens
HELD_OUT_SHARE = 0.05  # of the bytes, at most, is held out for evaluation
END = "<|endoftext|>"  # the token after each document, with a tokenizer
_TRAINED_ON = 64 * 2**20  # bytes: more text hardly changes which pairs are frequent
_PART = 1 << 16  # characters that are encoded at once, up to the next end of a line
_PASSED_OVER = {"__pycache__", "site-packages", "dist-packages"}
# The standard library's own tests hold badly encoded text on purpose, and many distributions leave them out.
_STDLIB_PASSED_OVER = _PASSED_OVER | {"test", "tests"}
_STDLIB_SUFFIXES = (".py", ".txt", ".rst")


class Corpus:
    """Documents read as one string of tokens, in their order, with nothing between them."""

    def __init__(self, tokens: torch.Tensor, starts: Sequence[int]):
        self.tokens, self.starts, self.size = tokens, list(starts), len(tokens)

    @classmethod
    def from_documents(cls, documents: Sequence[bytes]) -> Self:
        """The bytes of documents."""
        joined = bytearray().join(documents)
        tokens = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.zeros(0, dtype=torch.uint8)
        return cls(tokens, list(itertools.accumulate(map(len, documents), initial=0))[:-1])

    def read(self, start: int, length: int) -> torch.Tensor:
        """The tokens from `start` on, (length,) int64."""
        return self.tokens[start : start + length].long()

    def texts(self) -> Iterator[Iterator[str]]:
        """Each document of bytes as text in parts that end with a line, whatever is not UTF-8 replaced."""
        for start, end in zip(self.starts, [*self.starts[1:], self.size]):
            yield _parts(self.tokens[start:end].numpy().tobytes().decode("utf-8", errors="replace"))


@dataclass(frozen=True)
class TextData:
    """A text, split by document into a part to train on and a part that is held out."""

    train: Corpus
    held_out: Corpus
    name: str  # Origin of the text, for people.
    # Changes with the contents, and with which are held out: recognises the data when a run resumes.
    fingerprint: str


def load_text(data: str | os.PathLike[str] | None = None) -> TextData:
    """The text at `data`; None: the running Python's standard library, sources and documents.

    That is a file, or a folder of which every file counts that has text in it (no NUL in its first 8 KiB), hidden ones left
    out, in the order of their names; or samples with a column ``text`` (`open_samples`). Held out are whole documents,
    chosen by a hash of their names, up to 5 % of the bytes; of a single file, its last 5 %.

    Raises:
        ValueError: nothing is there, it cannot be read, or it has no text in it.
    """
    root = Path(sysconfig.get_path("stdlib")) if data is None else Path(data)
    if not root.exists():
        raise ValueError(f"--data is {str(root)!r}, and nothing exists there; give a text with --data FILE or FOLDER.")
    name = f"the standard library's text in {root}" if data is None else str(root)
    if root.suffix in (".jsonl", ".parquet") or (root / "state.json").exists():
        rows = enumerate(open_samples("--data", str(root), [{"text"}])["text"])
        documents = [(str(number), row.encode()) for number, row in rows]
    else:
        try:
            documents = list(_read_files(root, stdlib=data is None))
        except OSError as error:
            raise ValueError(f"The training text cannot be read: {error}.") from error
    documents = [(name, content) for name, content in documents if content]
    if not documents:
        raise ValueError(f"--data is {str(root)!r}, which holds no text: every file is empty or binary.")
    train, held_out = _split(documents)
    digest = hashlib.sha256()
    for part in (train, held_out):
        digest.update(f"{len(part)}\0".encode())
        for content in part:
            digest.update(f"{len(content)}\0".encode() + content)
    return TextData(Corpus.from_documents(train), Corpus.from_documents(held_out), name, digest.hexdigest()[:16])


def _read_files(root: Path, *, stdlib: bool) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each file that has text in it."""
    passed_over = _STDLIB_PASSED_OVER if stdlib else _PASSED_OVER
    alone: list[Any] = [(root.parent, [], [root.name])]
    for folder, folders, files in os.walk(root) if root.is_dir() else alone:
        # Sorted in place: os.walk goes down in this order, and the file system's own order differs between machines.
        folders[:] = sorted(f for f in folders if f not in passed_over and not f.startswith("."))
        for file in sorted(files):
            path = Path(folder, file)
            if path != root and (file.startswith(".") or (stdlib and not file.endswith(_STDLIB_SUFFIXES))):
                continue
            content = path.read_bytes()
            if b"\0" not in content[:8192]:
                yield file if path == root else path.relative_to(root).as_posix(), content


def open_samples(option: str, path: str, forms: Sequence[set[str]]) -> Any:
    """Return the data set at `path`, by datasets: JSON lines or Parquet, a folder of such files, or one that it saved.

    Raises:
        ValueError: it cannot be read, or has the columns of none of `forms`.
    """
    datasets, place = require("datasets", "finetune", f"to read {option} {path}"), Path(path)
    if not place.exists():
        raise ValueError(f"{option} is {path!r}, and nothing exists there.")
    try:
        if (place / "state.json").exists():
            data = datasets.load_from_disk(path)
        else:
            inside = [*place.rglob("*.parquet"), *place.rglob("*.json*")]
            files = sorted(map(str, inside)) if place.is_dir() else [path]
            kind = "parquet" if files and files[0].endswith(".parquet") else "json"
            data = datasets.load_dataset(kind, data_files=files, split="train")
    except Exception as error:  # pyarrow, datasets and the file system each have errors of their own
        reason = bad_sample(path, (), forms) or " ".join(str(error.__cause__ or error).split())[:300]
        raise ValueError(f"{option} is {path!r}, which datasets cannot read: {reason}") from error
    columns = getattr(data, "column_names", [])
    if not len(data) or not any(form <= set(columns) for form in forms):
        needed = ", or ".join(" and ".join(sorted(form, reverse=True)) for form in forms)
        raise ValueError(
            f"{option} is {path!r}: {len(data)} samples with {', '.join(columns) or 'nothing'}; each must have {needed}."
        )
    return data


def bad_sample(path: str, data: Sequence[Any], forms: Sequence[set[str]], assistant: bool = False) -> str:
    """Return the place and the fault of the first sample that cannot be used, in words; empty: all can.

    Args:
        path: the file of `data`: of JSON lines the number of the line is named, else that of the sample.
        data: all samples, in the file's order; empty: they could not be read.
        assistant: conversations must have a turn of the assistant.
    """
    file, form = Path(path), None
    lines = file.suffix in (".json", ".jsonl") and file.is_file() and _has_json_lines(file, bool(data))
    with file.open(encoding="utf-8", errors="replace") if lines else nullcontext(data) as samples:
        for number, sample in enumerate(samples, 1):
            if isinstance(sample, str):
                if not sample.strip():
                    continue
                try:
                    sample = json.loads(sample)
                except ValueError as error:
                    return f"line {number} is not JSON ({error})."
            has = {name for name, value in sample.items() if value is not None} if isinstance(sample, dict) else set()
            form = form or next((form for form in forms if form <= has), None)
            fault = (
                _fault(sample, form, assistant)
                if form and form <= has
                else f"has {', '.join(sorted(has)) or 'nothing'}"
            )
            if fault:
                needed = " and ".join(sorted(form or ("messages",), reverse=True))
                return f"{'line' if lines else 'sample'} {number} {fault}; each must have {needed}."
    return ""


def _has_json_lines(file: Path, was_read: bool) -> bool:
    """Return whether a file has an object in each line, not one array or object in several; `was_read`: by `datasets`."""
    with file.open(encoding="utf-8", errors="replace") as lines:
        first = next((line.strip() for line in lines if line.strip()), "")
    return first.startswith("{") and (first.endswith("}") or not was_read)


def _fault(sample: Mapping[str, Any], form: Iterable[str], assistant: bool) -> str:
    """Return the fault of a sample that has the columns of `form`, in words; empty: none is known."""
    for name in form:
        value = sample[name]
        if isinstance(value, str) and name != "messages":
            continue
        if not isinstance(value, list) or not value:
            return f"has {name} {str(value)[:40]!r}, which is not a list of messages"
        if wrong := next((m for m in value if not isinstance(m, dict) or not m.get("role") or len(m) < 2), None):
            return f"has a message {str(wrong)[:40]}, without role or content"
        if name == "messages" and assistant and not any(message["role"] == "assistant" for message in value):
            return "has no turn of the assistant, whose turns count (--train-on all counts every token)"
    return ""


def _split(documents: Sequence[tuple[str, bytes]]) -> tuple[list[bytes], list[bytes]]:
    """Return the documents to train on and those held out; both keep the order."""
    if len(documents) == 1:
        whole = documents[0][1]
        cut = len(whole) - math.ceil(len(whole) * HELD_OUT_SHARE)
        return [whole[:cut]], [whole[cut:]]
    room = HELD_OUT_SHARE * sum(len(content) for _, content in documents)
    chosen = set[str]()
    for name, content in sorted(
        documents, key=lambda item: hashlib.sha256(item[0].encode(errors="surrogateescape")).digest()
    ):
        if len(content) <= room:
            chosen.add(name)
            room -= len(content)
    if not chosen:  # a few large files: hold out the smallest
        chosen.add(min(documents, key=lambda item: (len(item[1]), item[0]))[0])
    return [c for n, c in documents if n not in chosen], [c for n, c in documents if n in chosen]


def _parts(text: str) -> Iterator[str]:
    at = 0
    while at < len(text):
        cut = text.find("\n", at + _PART) + 1 or len(text)
        yield text[at:cut]
        at = cut


# --- a tokenizer --------------------------------------------------------------------------------------------------------


def train_bpe(corpus: Corpus, vocab_size: int) -> str:
    """A byte-level BPE tokenizer of up to `vocab_size` tokens, trained on the corpus's first 64 MiB, as JSON.

    Raises:
        ValueError: `vocab_size` is too small for the 256 bytes and the end token.
        MissingExtraError: `tokenizers` is not installed.
    """
    if vocab_size < 257:
        raise ValueError(f"--vocab-size is {vocab_size}; a byte-level tokenizer has 256 bytes and {END}: 257 or more.")
    tokenizers = require("tokenizers", "finetune", "for --tokenizer bpe")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    most = Corpus(corpus.tokens[:_TRAINED_ON], [start for start in corpus.starts if start < _TRAINED_ON])
    bpe.train_from_iterator(itertools.chain.from_iterable(most.texts()), trainer)
    return str(bpe.to_str())


def as_tokens(text: TextData, tokenizer: str) -> TextData:
    """`text` as tokens of the tokenizer with this JSON, each document followed by the end token."""
    bpe = require("tokenizers", "finetune", "for --tokenizer bpe").Tokenizer.from_str(tokenizer)

    def encoded(corpus: Corpus) -> Corpus:
        tokens, starts = array("i"), []
        for document in corpus.texts():
            starts.append(len(tokens))
            for encoding in bpe.encode_batch(list(document), add_special_tokens=False):
                tokens.extend(encoding.ids)
            tokens.append(bpe.token_to_id(END))
        return Corpus(
            torch.frombuffer(tokens, dtype=torch.int32) if tokens else torch.zeros(0, dtype=torch.int32), starts
        )

    fingerprint = hashlib.sha256(f"{text.fingerprint}{tokenizer}".encode()).hexdigest()[:16]
    return TextData(encoded(text.train), encoded(text.held_out), text.name, fingerprint)


# --- windows ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """The inputs that a model is called with, and the tokens that it is to predict."""

    inputs: torch.Tensor  # (B, T) int64.
    targets: torch.Tensor  # (B, T) int64: the token after each input.

    def with_labels(self) -> dict[str, torch.Tensor]:
        """Return the arguments by name of a model that computes its own loss."""
        return {"input_ids": self.inputs, "labels": self.targets, "shift_labels": self.targets}

    def to(self, device: torch.device) -> Self:
        """The same on `device`, as `send` has it."""
        return replace(self, inputs=send(self.inputs, device), targets=send(self.targets, device))


def read_windows(corpus: Corpus, starts: Sequence[int], seq_len: int) -> Batch:
    """Predict each token after the first of the windows that begin at `starts`."""
    tokens = torch.stack([corpus.read(start, seq_len + 1) for start in starts])
    return Batch(tokens[:, :-1], tokens[:, 1:].contiguous())


class TextRows:
    """Windows to train on, by step. Every window is used once per epoch, in an order shuffled again each epoch.

    Args:
        corpus: the text to train on.
        seq_len: tokens that the model sees per sample; a sample reads one more, the last target.
        batch_size: samples per step over all ranks and micro-batches.
        seed: of the order.

    Raises:
        ValueError: the text has fewer windows than one batch.
    """

    def __init__(self, corpus: Corpus, seq_len: int, batch_size: int, seed: int):
        self._corpus, self._seq_len, self._batch_size, self._seed = corpus, seq_len, batch_size, seed
        # Each epoch moves the windows' borders by less than one window, hence the one less.
        self.windows = (corpus.size - 1) // seq_len - 1  # per epoch
        if self.windows < batch_size:
            raise ValueError(
                f"The training text has {corpus.size} tokens, {max(0, self.windows)} windows of {seq_len}: too few for one "
                f"batch of {batch_size}. Give more text (--data), a shorter --seq-len or a smaller --global-batch."
            )

    def start_of(self, sample: int) -> int:
        """The first token's place of the sample numbered `sample` since step 0."""
        epoch, place = divmod(sample, self.windows)
        shift = mix(self._seed, epoch, 1) % self._seq_len
        return shift + self._seq_len * shuffled(place, self.windows, mix(self._seed, epoch, 2))

    def batch(self, step: int, part: int = 0, parts: int = 1) -> Batch:
        """Part `part` of `parts` equal ones of the global batch of `step`."""
        size = self._batch_size // parts
        first = step * self._batch_size + part * size
        return read_windows(self._corpus, [self.start_of(first + i) for i in range(size)], self._seq_len)


class HeldOutText:
    """A fixed choice of held-out windows, the same for every run and number of ranks: spread evenly, without overlap.

    Raises:
        ValueError: the text is shorter than one window.
    """

    def __init__(self, corpus: Corpus, seq_len: int, samples: int):
        windows = (corpus.size - 1) // seq_len
        if windows < 1:
            raise ValueError(
                f"The held-out text has {corpus.size} tokens, less than one window of {seq_len}. Give more text (--data), a "
                "shorter --seq-len, or --eval-samples 0."
            )
        self._corpus, self._seq_len, count = corpus, seq_len, min(samples, windows)
        self.starts = [i * windows // count * seq_len for i in range(count)]  # the first token's place of each
        self.targets = count * seq_len  # in all windows
        # Unigram entropy of the targets, nats: a model that ignores context gets no lower loss.
        self.entropy = unigram_entropy(self.batch(range(count)).targets)

    def batch(self, numbers: Sequence[int]) -> Batch:
        """The windows with these numbers."""
        return read_windows(self._corpus, [self.starts[i] for i in numbers], self._seq_len)


def unigram_entropy(tokens: torch.Tensor) -> float:
    """Entropy of the tokens' own frequencies, nats per token.

    >>> round(unigram_entropy(torch.tensor([0, 0, 1, 1])), 4)
    0.6931
    """
    counts = torch.bincount(tokens.flatten(), minlength=1).double()
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * shares.log()).sum())
