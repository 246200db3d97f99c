"""ChunkedLoss: what it accepts, and how many tokens a chunk has."""

import pytest

from nemo_like.options import ChunkedLoss


def test_words():
    assert ChunkedLoss.of("chunked") == ChunkedLoss() == ChunkedLoss.of("Chunked")
    assert ChunkedLoss.of("model") is None
    assert ChunkedLoss.of(ChunkedLoss(7)) == ChunkedLoss(7)


def test_tokens_of_a_chunk():
    assert ChunkedLoss().tokens(128 * 1024 * 4) == 512
    assert ChunkedLoss(chunk_tokens=100).tokens(1) == 100
    assert ChunkedLoss(chunk_bytes=1000).tokens(300) == 3
    assert ChunkedLoss(chunk_bytes=1).tokens(300) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(chunk_tokens=0), "chunk_tokens is 0"),
        (dict(chunk_tokens=True), "chunk_tokens is True"),
        (dict(chunk_bytes="1 parsec"), "chunk_bytes is '1 parsec', which is not a number of bytes"),
        (dict(chunk_bytes=0), "at least one byte"),
        (dict(chunk_bytes=1.5), "chunk_bytes is 1.5"),
        (dict(grads_in_float32=1), "grads_in_float32 is 1"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        ChunkedLoss(**arguments)


@pytest.mark.parametrize("loss", ["chunky", 3, None])
def test_unknown_words(loss):
    with pytest.raises((ValueError, TypeError), match="loss is"):
        ChunkedLoss.of(loss)
