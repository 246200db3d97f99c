"""Text to pretrain on: which files, which of them are held out, and which window of text each sample of each step reads.

One token is one byte (0 to 255), or one of a tokenizer that is trained on the text. Of bytes, nothing but file sizes stays
in memory: a window is read from disk when a step uses it.

The order of the samples is a pure function of (seed, sample index), and the sample index one of (step, place in the
global batch). It does not depend on the number of ranks. So a run that resumes on another number of ranks sees the same
global batches, and no state has to be saved.
"""

from __future__ import annotations

import hashlib
import math
import os
import sysconfig
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nemo_like._util.extras import require
from nemo_like.distributed.document_numbers import since_start
from nemo_like.losses.rows import IGNORED
from nemo_like.recipes.rows import Batch, mix, shuffled

VOCABULARY = 256
"""Number of different bytes, and so of tokens."""
HELD_OUT_SHARE = 0.05
"""At most this share of the bytes is held out for evaluation."""
_PEEK = 8192  # bytes read of each file to tell text from binary and to recognise the file again
_PASSED_OVER = frozenset({"__pycache__", "site-packages", "dist-packages"})
# The standard library's own tests hold badly encoded text on purpose, and many distributions leave them out.
_STDLIB_PASSED_OVER = _PASSED_OVER | {"test", "tests"}
_STDLIB_SUFFIXES = (".py", ".txt", ".rst")


@dataclass(frozen=True)
class Piece:
    """`length` bytes of one file, from `offset` on."""

    path: Path
    offset: int
    length: int


class Corpus:
    """Pieces of files read as one string of bytes, in their order, with nothing between them."""

    def __init__(self, pieces: Sequence[Piece]):
        self.pieces = tuple(pieces)
        self._starts = []
        self.size = 0
        for piece in self.pieces:
            self._starts.append(self.size)
            self.size += piece.length

    def read(self, start: int, length: int) -> torch.Tensor:
        """The bytes from `start` on, (length,) int64.

        Raises:
            RuntimeError: a file became shorter since it was listed.
        """
        content = bytearray()
        at = bisect_right(self._starts, start) - 1
        while len(content) < length:
            piece = self.pieces[at]
            inside = start + len(content) - self._starts[at]
            wanted = min(length - len(content), piece.length - inside)
            with piece.path.open("rb") as file:
                file.seek(piece.offset + inside)
                got = file.read(wanted)
            if len(got) < wanted:
                raise RuntimeError(f"{piece.path} became shorter in mid-run; keep the data unchanged during a run.")
            content += got
            at += 1
        return torch.frombuffer(content, dtype=torch.uint8).long()

    def documents(self, start: int, length: int) -> torch.Tensor:
        """The number of the piece that each byte from `start` on is of, (length,) int64."""
        return torch.bucketize(torch.arange(start, start + length), torch.tensor(self._starts), right=True)


@dataclass(frozen=True)
class TextData:
    """A text, split by file into what is trained on and what is held out."""

    train: Corpus
    held_out: Corpus
    name: str
    """Origin of the text, for people."""
    fingerprint: str
    """Changes with any file's size or first 8 KiB, and with which are held out: recognises the data when a run resumes."""


def load_text(data: str | os.PathLike[str] | None = None) -> TextData:
    """The text at `data`, a file or a folder; None: the running Python's standard library, sources and documents.

    Of a folder, every file counts that has text in it (no NUL in its first 8 KiB), hidden ones left out, in the order
    of their names. Held out are whole files, chosen by a hash of their names, up to 5 % of the bytes; of a single
    file, its last 5 %.

    Raises:
        ValueError: nothing is there, it cannot be read, or it has no text in it.
    """
    root = Path(sysconfig.get_path("stdlib")) if data is None else Path(data)
    if not root.exists():
        hint = "give a text that exists with --data FILE or --data FOLDER"
        if data is None:
            raise ValueError(f"This Python has no standard library at {root} to read as text; {hint}.")
        raise ValueError(f"--data is {os.fspath(data)!r}, and nothing exists there; {hint}.")
    name = f"the standard library's text in {root}" if data is None else str(root)
    heads: dict[Path, bytes] = {}
    pieces: list[tuple[str, Piece]] = []
    for path in _list_files(root, stdlib=data is None):
        size, head = _peek(path)
        if size == 0 or b"\0" in head:
            continue
        relative = path.name if path == root else path.relative_to(root).as_posix()
        heads[path] = head
        pieces.append((relative, Piece(path, 0, size)))
    if not pieces:
        raise ValueError(f"--data is {str(root)!r}, which holds no text: every file is empty or binary.")
    train, held_out = _split(pieces)
    digest = hashlib.sha256()
    for part in (train, held_out):
        digest.update(f"{len(part)}\0".encode())
        for piece in part:
            digest.update(f"{piece.length}\0".encode() + heads[piece.path])
    return TextData(Corpus(train), Corpus(held_out), name, digest.hexdigest()[:16])


def _list_files(root: Path, *, stdlib: bool) -> Iterator[Path]:
    if not root.is_dir():
        yield root
        return
    passed_over = _STDLIB_PASSED_OVER if stdlib else _PASSED_OVER
    for folder, folders, files in os.walk(root):
        # Sorted in place: os.walk goes down in this order, and the file system's own order differs between machines.
        folders[:] = sorted(f for f in folders if f not in passed_over and not f.startswith("."))
        for file in sorted(files):
            if not file.startswith(".") and (not stdlib or file.endswith(_STDLIB_SUFFIXES)):
                yield Path(folder, file)


def _peek(path: Path) -> tuple[int, bytes]:
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size, file.read(_PEEK)
    except OSError as error:
        raise ValueError(f"Cannot read {path} of the training text: {error}.") from error


def _split(pieces: Sequence[tuple[str, Piece]]) -> tuple[list[Piece], list[Piece]]:
    """Return what is trained on and what is held out; both keep the order of `found`."""
    if len(pieces) == 1:
        whole = pieces[0][1]
        cut = whole.length - math.ceil(whole.length * HELD_OUT_SHARE)
        return [Piece(whole.path, 0, cut)], [Piece(whole.path, cut, whole.length - cut)]
    room = HELD_OUT_SHARE * sum(piece.length for _, piece in pieces)
    chosen: set[str] = set()
    for name, piece in sorted(pieces, key=lambda item: _hash_name(item[0])):
        if piece.length <= room:
            chosen.add(name)
            room -= piece.length
    if not chosen:  # a few large files: hold out the smallest
        chosen.add(min(pieces, key=lambda item: (item[1].length, item[0]))[0])
    return [p for n, p in pieces if n not in chosen], [p for n, p in pieces if n in chosen]


def _hash_name(name: str) -> bytes:
    return hashlib.sha256(name.encode(errors="surrogateescape")).digest()


class TextRows:
    """Windows of a text, by step. Every window is used once per epoch, in an order shuffled anew each epoch.

    Args:
        corpus: what is trained on.
        seq_len: tokens that the model sees per sample; a sample reads one more, the last target.
        batch_size: samples per step over all ranks and micro-batches.
        seed: of the order.
        packed: the corpus's documents are apart, and the first token of each counts for nothing.
        fingerprint: of the text.

    Raises:
        ValueError: the text has fewer windows than one batch.
    """

    def __init__(
        self, corpus: Corpus, seq_len: int, batch_size: int, seed: int, *, packed: bool = False, fingerprint: str = ""
    ) -> None:
        self.corpus, self.fingerprint = corpus, fingerprint
        self._width, self._batch_size, self._seed, self._packed = seq_len, batch_size, seed, packed
        # Each epoch moves the windows' borders by less than one window, hence the one less.
        self.windows = (corpus.size - 1) // seq_len - 1
        """Windows per epoch."""
        if self.windows < batch_size:
            raise ValueError(
                f"The training text has {corpus.size} bytes, {max(0, self.windows)} windows of {seq_len} "
                f"tokens: too few for one batch of {batch_size}. Give more text (--data), a shorter --seq-len or "
                "a smaller --batch-size."
            )

    def start_of(self, sample: int) -> int:
        """The first token's place of the sample numbered `sample` since step 0."""
        epoch, place = divmod(sample, self.windows)
        shift = mix(self._seed, epoch, 1) % self._width
        return shift + self._width * shuffled(place, self.windows, mix(self._seed, epoch, 2))

    def batch(self, step: int, part: int = 0, parts: int = 1) -> Batch:
        """As `Rows.batch`."""
        return _windows(self.corpus, self._starts(step, part, parts), self._width, self._packed)

    def targets(self, step: int) -> int | None:
        """As `Rows.targets`."""
        return int((self._documents(step).diff() == 0).sum()) if self._packed else None

    def lengths(self, step: int) -> list[int]:
        """As `Rows.lengths`."""
        if not self._packed:
            return [self._width] * self._batch_size
        runs = (row.unique_consecutive(return_counts=True)[1].tolist() for row in self._documents(step)[:, :-1])
        return [length for row in runs for length in row]

    def _starts(self, step: int, part: int = 0, parts: int = 1) -> list[int]:
        size = self._batch_size // parts
        first = step * self._batch_size + part * size
        return [self.start_of(first + i) for i in range(size)]

    def _documents(self, step: int) -> torch.Tensor:
        """The number of each token's document, (B, T + 1)."""
        return torch.stack([self.corpus.documents(start, self._width + 1) for start in self._starts(step)])


class HeldOutText:
    """A fixed choice of held-out windows, the same for every run and number of ranks: spread evenly, without overlap.

    Raises:
        ValueError: the text is shorter than one window.
    """

    def __init__(self, corpus: Corpus, seq_len: int, samples: int, *, packed: bool = False) -> None:
        windows = (corpus.size - 1) // seq_len
        if windows < 1:
            raise ValueError(
                f"The held-out text has {corpus.size} bytes, less than one window of {seq_len} tokens. Give more text "
                "(--data), a shorter --seq-len, or --eval-samples 0."
            )
        self._corpus, self._width, self._packed = corpus, seq_len, packed
        count = min(samples, windows)
        self.starts = [i * windows // count * seq_len for i in range(count)]
        """The first token's place of each."""
        self.targets = count * seq_len
        if packed:
            self.targets = int((self.batch(range(count)).targets != IGNORED).sum())

    def __len__(self) -> int:
        return len(self.starts)

    def batch(self, numbers: Sequence[int]) -> Batch:
        """As `HeldOut.batch`."""
        return _windows(self._corpus, [self.starts[i] for i in numbers], self._width, self._packed)

    def entropy(self) -> float:
        """Unigram entropy of what is to be predicted, nats: a model that ignores context gets no lower loss."""
        starts = self.starts
        return unigram_entropy(torch.stack([self._corpus.read(start + 1, self._width) for start in starts]))


def _windows(corpus: Corpus, starts: Sequence[int], width: int, packed: bool) -> Batch:
    """Predict each token after the first of the windows that begin at `starts`."""
    tokens = torch.stack([corpus.read(start, width + 1) for start in starts])
    targets = tokens[:, 1:].contiguous()
    if not packed:
        return Batch(tokens[:, :-1], targets)
    documents = torch.stack([corpus.documents(start, width + 1) for start in starts])
    begins = documents[:, 1:] != documents[:, :-1]
    positions = since_start(torch.cat([torch.ones_like(begins[:, :1]), begins[:, :-1]], 1))
    return Batch(tokens[:, :-1], targets.masked_fill(begins, IGNORED), positions)


def unigram_entropy(tokens: torch.Tensor) -> float:
    """Entropy of the tokens' own frequencies, nats per token: no model that ignores context gets a lower loss on them.

    >>> round(unigram_entropy(torch.tensor([0, 0, 1, 1])), 4)
    0.6931
    """
    counts = torch.bincount(tokens.flatten(), minlength=1).double()
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * shares.log()).sum())


# Text as tokens of a tokenizer that is trained on it, in place of bytes: byte-pair encoding, by `tokenizers`.
#
# The whole text is encoded before training, by every rank, and kept in memory, 4 bytes a token.

END = "<|endoftext|>"
"""The token after each document."""
_TRAINED_ON = 64 * 2**20  # bytes: more text hardly changes which pairs are frequent
_PART = 1 << 16  # bytes that are encoded at once, up to the next end of a line


class TokenCorpus(Corpus):
    """Tokens of several documents as one string, in their order, each followed by the end token."""

    def __init__(self, tokens: torch.Tensor, starts: list[int]):
        super().__init__(())
        self._tokens, self._starts, self.size = tokens, starts, len(tokens)

    def read(self, start: int, length: int) -> torch.Tensor:
        """The tokens from `start` on, (length,) int64."""
        return self._tokens[start : start + length].long()


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

    def text() -> Iterator[str]:
        left = _TRAINED_ON
        for part in (part for document in _documents(corpus) for part in document):
            left -= len(part)
            yield part
            if left < 0:
                return

    bpe.train_from_iterator(text(), trainer)
    return str(bpe.to_str())


def as_tokens(text: TextData, tokenizer: str) -> TextData:
    """`text` as tokens of the tokenizer with this JSON."""
    bpe = require("tokenizers", "finetune", "for --tokenizer bpe").Tokenizer.from_str(tokenizer)
    fingerprint = hashlib.sha256(f"{text.fingerprint}{tokenizer}".encode()).hexdigest()[:16]
    return TextData(_encoded(text.train, bpe), _encoded(text.held_out, bpe), text.name, fingerprint)


def for_transformers(tokenizer: str) -> Any:
    """The tokenizer with this JSON, as `from_pretrained` gives it back once it is saved."""
    tokenizers = require("tokenizers", "finetune", "for --tokenizer bpe")
    transformers = require("transformers", "finetune", "to export a tokenizer")
    rebuilt = tokenizers.Tokenizer.from_str(tokenizer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=rebuilt, eos_token=END, pad_token=END)


def _encoded(corpus: Corpus, bpe: Any) -> TokenCorpus:
    tokens, starts = array("i"), []
    end = bpe.token_to_id(END)
    for document in _documents(corpus):
        starts.append(len(tokens))
        for encoding in bpe.encode_batch(list(document), add_special_tokens=False):
            tokens.extend(encoding.ids)
        tokens.append(end)
    return TokenCorpus(
        torch.frombuffer(tokens, dtype=torch.int32) if tokens else torch.zeros(0, dtype=torch.int32), starts
    )


def _documents(corpus: Corpus) -> Iterator[Iterator[str]]:
    """Each piece of the corpus in parts that end with a line, whatever is not UTF-8 replaced."""
    for piece in corpus.pieces:
        with piece.path.open("rb") as file:
            file.seek(piece.offset)
            raw = file.read(piece.length)
        yield _parts(raw.decode("utf-8", errors="replace"))


def _parts(text: str) -> Iterator[str]:
    at = 0
    while at < len(text):
        cut = text.find("\n", at + _PART) + 1 or len(text)
        yield text[at:cut]
        at = cut
