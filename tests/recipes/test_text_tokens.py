"""Text as tokens of a tokenizer that was trained on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_like.recipes.text import END, TextRows, as_tokens, for_transformers, load_text, train_bpe

pytest.importorskip("tokenizers")
pytest.importorskip("transformers")


def test_tokens_are_the_text_and_training_repeats_itself(tmp_path: Path) -> None:
    texts = {f"{i}.txt": f"file {i}: ".encode() + b"the same line again\n" * (9 + i) for i in range(5)}
    texts["4.txt"] += b"\xff not UTF-8"
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
    text = load_text(tmp_path)
    tokenizer = train_bpe(text.train, 300)
    assert train_bpe(text.train, 300) == tokenizer
    tokens = as_tokens(text, tokenizer)
    assert tokens.fingerprint != text.fingerprint
    decode = for_transformers(tokenizer).decode
    for corpus, pieces in ((tokens.train, text.train.pieces), (tokens.held_out, text.held_out.pieces)):
        whole = [texts[piece.path.name].decode(errors="replace") for piece in pieces]
        assert decode(corpus.read(0, corpus.size)) == "".join(one + END for one in whole)
        documents = corpus.documents(0, corpus.size)
        for number, one in enumerate(whole):  # each with its end token
            assert decode(corpus.read(0, corpus.size)[documents == number + 1]) == one + END
    assert tokens.train.size < text.train.size / 3
    assert TextRows(tokens.train, 8, 2, 0).batch(0).inputs.shape == (2, 8)
    with pytest.raises(ValueError, match="--vocab-size is 256; a byte-level tokenizer has 256 bytes"):
        train_bpe(text.train, 256)
