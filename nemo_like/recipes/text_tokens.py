"""Text as tokens of a tokenizer that is trained on it, in place of bytes: byte-pair encoding, by `tokenizers`.

The whole text is encoded before training, by every rank, and kept in memory, 4 bytes a token.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from typing import Any

import torch

from nemo_like._util.extras import require
from nemo_like.recipes.data import Corpus, TextData

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
        ValueError: `vocab_size` has no room for the 256 bytes and the end token.
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
    made = tokenizers.Tokenizer.from_str(tokenizer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, pad_token=END)


def _encoded(corpus: Corpus, bpe: Any) -> TokenCorpus:
    tokens, starts = array("i"), []
    end = bpe.token_to_id(END)
    for document in _documents(corpus):
        starts.append(len(tokens))
        for found in bpe.encode_batch(list(document), add_special_tokens=False):
            tokens.extend(found.ids)
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
