"""Text, tokens, windows and order of samples of the training job."""

import itertools
import math
import sysconfig
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.recipes.data import (
    END,
    Corpus,
    HeldOutText,
    TextRows,
    as_tokens,
    load_text,
    train_bpe,
    unigram_entropy,
)
from nemo_like.recipes.loop import learning_rate
from nemo_like.recipes.options import PretrainOptions


def _write(folder: Path, **files: bytes) -> Path:
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def _bytes_of(corpus: Corpus) -> bytes:
    return bytes(corpus.read(0, corpus.size).tolist())


def test_corpus_reads_across_documents():
    corpus = Corpus.from_documents([b"cdef", b"", b"gh", b"jkl"])
    whole = b"cdefghjkl"
    assert corpus.size == len(whole) and corpus.starts == [0, 4, 4, 6]
    for start in range(len(whole)):
        for length in range(1, len(whole) - start + 1):
            tokens = corpus.read(start, length)
            assert tokens.dtype == torch.int64
            assert bytes(tokens.tolist()) == whole[start : start + length]
    assert ["".join(parts) for parts in corpus.texts()] == ["cdef", "", "gh", "jkl"]


def test_folder_is_read_in_name_order_without_binaries_hidden_and_empty_files(tmp_path: Path):
    files = {f"sub__f{i:02d}_txt": bytes([97 + i]) * 50 for i in range(26)}
    _write(tmp_path, **files, picture_png=b"\x89PNG\0\0", empty_txt=b"", __pycache____x_py=b"no")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_bytes(b"no")
    text = load_text(tmp_path)
    train, held_out = _bytes_of(text.train), _bytes_of(text.held_out)
    assert sorted(train + held_out) == sorted(b"".join(files.values()))
    assert train == bytes(sorted(train)) and held_out == bytes(sorted(held_out))
    assert not set(train) & set(held_out), "a file is in one of the two, never in both"
    assert 0 < len(held_out) <= 0.05 * 26 * 50


def test_single_file_holds_out_its_end(tmp_path: Path):
    path = _write(tmp_path, a=bytes(range(97, 117)) * 5) / "a"
    text = load_text(path)
    assert _bytes_of(text.train) + _bytes_of(text.held_out) == path.read_bytes()
    assert text.held_out.size == 5


def test_two_large_files_hold_out_the_smaller(tmp_path: Path):
    text = load_text(_write(tmp_path, a=b"a" * 60, b=b"b" * 50))
    assert (_bytes_of(text.train), _bytes_of(text.held_out)) == (b"a" * 60, b"b" * 50)


def test_fingerprint_of_a_copy_under_another_name_is_the_same(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"some text")
    (tmp_path / "b.txt").write_bytes(b"some text")
    (tmp_path / "c.txt").write_bytes(b"same text")
    same, copy, other = (load_text(tmp_path / f"{name}.txt").fingerprint for name in "abc")
    assert same == copy != other


def test_fingerprint_knows_what_is_held_out_sizes_and_contents(tmp_path: Path):
    seen = {load_text(_write(tmp_path, a=b"abc", b=b"def")).fingerprint}
    assert load_text(tmp_path).fingerprint in seen
    (tmp_path / "b").rename(tmp_path / "c")
    assert load_text(tmp_path).fingerprint in seen  # a is held out, whatever the other one is called
    (tmp_path / "a").rename(tmp_path / "z")
    seen.add(load_text(tmp_path).fingerprint)
    seen.add(load_text(_write(tmp_path, c=b"dex")).fingerprint)
    seen.add(load_text(_write(tmp_path, c=b"defg")).fingerprint)
    assert len(seen) == 4


def test_default_text_is_the_standard_library_without_its_tests():
    text = load_text()
    read = bytes(text.train.tokens.tolist()) + bytes(text.held_out.tokens.tolist())
    for name, inside in (("argparse.py", True), ("pydoc_data/topics.py", True), ("test/test_argparse.py", False)):
        path = Path(sysconfig.get_path("stdlib"), name)
        assert not path.exists() or (path.read_bytes() in read) is inside
    assert text.train.size > 5_000_000 and 0.03 < text.held_out.size / text.train.size < 0.06


@pytest.mark.parametrize("kind", ["lines.jsonl", "rows.parquet", "saved"])
def test_samples_with_text_are_documents(tmp_path: Path, kind: str):
    datasets = pytest.importorskip("datasets", reason="the extra 'finetune' is not installed")
    samples = datasets.Dataset.from_dict({"text": [f"text {i}" * 9 for i in range(30)] + [""]})
    write = {"lines.jsonl": samples.to_json, "rows.parquet": samples.to_parquet, "saved": samples.save_to_disk}
    write[kind](str(tmp_path / kind))
    text = load_text(tmp_path / kind)
    found = ["".join(parts) for corpus in (text.train, text.held_out) for parts in corpus.texts()]
    assert sorted(found) == sorted(f"text {i}" * 9 for i in range(30)) and len(text.held_out.starts) == 1
    (tmp_path / "other.jsonl").write_text('{"question": "a"}\n')
    with pytest.raises(ValueError, match="1 samples with question; each must have text"):
        load_text(tmp_path / "other.jsonl")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "nowhere", r"--data is '.*nowhere', and nothing exists there; .*--data FILE"),
        (lambda folder: _write(folder, empty=b"", binary=b"\0\1"), "holds no text: every file is empty or binary"),
    ],
)
def test_unusable_data_is_an_error(tmp_path: Path, make, message: str):
    with pytest.raises(ValueError, match=message):
        load_text(make(tmp_path))


def _corpus_of(size: int) -> Corpus:
    return Corpus.from_documents([bytes(i % 251 for i in range(size))])


@settings(max_examples=60, deadline=None)
@given(size=st.integers(20, 2000), seq_len=st.integers(1, 9), seed=st.integers(0, 2**40), epoch=st.integers(0, 3))
def test_every_epoch_reads_every_window_once(size: int, seq_len: int, seed: int, epoch: int):
    sampler = TextRows(Corpus(torch.zeros(size, dtype=torch.uint8), [0]), seq_len, 1, seed)
    n = sampler.windows
    starts = sorted(sampler.start_of(epoch * n + i) for i in range(n))
    assert starts == list(range(starts[0], starts[0] + n * seq_len, seq_len))
    assert starts[0] < seq_len and starts[-1] + seq_len + 1 <= size


def test_order_is_shuffled_and_depends_on_seed_and_epoch(tmp_path: Path):
    corpus = _corpus_of(10_000)
    samplers = [TextRows(corpus, 8, 4, seed) for seed in (0, 1)]
    orders = [[s.start_of(first + i) for i in range(200)] for s in samplers for first in (0, s.windows)]
    assert len({tuple(order) for order in orders}) == 4
    for order in orders:  # of a random order, half the neighbours ascend: 99 or so, standard deviation 4
        assert 75 < sum(a < b for a, b in itertools.pairwise(order)) < 125


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_global_batch_does_not_depend_on_the_number_of_ranks(tmp_path: Path, parts: int):
    sampler = TextRows(_corpus_of(3000), 16, 8, seed=5)
    for step in (0, 7, 100):
        whole, cut = sampler.batch(step), [sampler.batch(step, part, parts) for part in range(parts)]
        assert whole.inputs.shape == whole.targets.shape == (8, 16)
        assert torch.equal(whole.inputs[:, 1:], whole.targets[:, :-1])
        assert torch.equal(torch.cat([part.inputs for part in cut]), whole.inputs)
        assert torch.equal(torch.cat([part.targets for part in cut]), whole.targets)


def test_too_little_text_is_an_error(tmp_path: Path):
    corpus = _corpus_of(100)
    with pytest.raises(ValueError, match=r"100 tokens, 5 windows of 16: too few for one batch of 6.*--global-batch"):
        TextRows(corpus, 16, 6, 0)
    TextRows(corpus, 16, 5, 0)
    with pytest.raises(ValueError, match=r"100 tokens, less than one window of 100"):
        HeldOutText(corpus, 100, 1)


@given(size=st.integers(2, 500), seq_len=st.integers(1, 20), count=st.integers(1, 40))
def test_held_out_windows_are_apart_and_inside(size: int, seq_len: int, count: int):
    corpus = Corpus(torch.zeros(size, dtype=torch.uint8), [0])
    if size <= seq_len:
        with pytest.raises(ValueError, match="less than one window"):
            HeldOutText(corpus, seq_len, count)
        return
    starts = HeldOutText(corpus, seq_len, count).starts
    assert len(starts) == min(count, (size - 1) // seq_len)
    assert all(b - a >= seq_len for a, b in itertools.pairwise(starts)) and starts[-1] + seq_len + 1 <= size


def test_unigram_entropy_of_known_frequencies():
    assert unigram_entropy(torch.tensor([[7, 7], [7, 9]])) == pytest.approx(0.75 * math.log(4 / 3) + 0.25 * math.log(4))
    assert unigram_entropy(torch.arange(256)) == pytest.approx(math.log(256))
    assert unigram_entropy(torch.zeros(5, dtype=torch.int64)) == 0


def _rates(kind: str, lr: float, warmup: int, steps: int, floor: float, count: int) -> list[float]:
    options = PretrainOptions(schedule=kind, lr=lr, warmup_steps=warmup, steps=steps, lr_floor=floor)
    return [round(learning_rate(options, step), 12) for step in range(count)]


def test_schedules():
    cosine = _rates("cosine", 2.0, 4, 12, 0.1, 20)
    assert cosine[:4] == [0.5, 1.0, 1.5, 2.0] and cosine[11:] == [0.2] * 9
    assert cosine[7] == pytest.approx(2.0 * (0.1 + 0.9 / 2))  # half way down
    assert _rates("linear", 1.0, 0, 10, 0.0, 10) == [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0]
    assert _rates("constant", 1.0, 2, 5, 0.1, 6) == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_tokens_are_the_text_and_training_repeats_itself(tmp_path: Path) -> None:
    import tokenizers

    texts = {f"{i}.txt": f"file {i}: ".encode() + b"the same line again\n" * (9 + i) for i in range(5)}
    texts["4.txt"] += b"\xff not UTF-8"
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
    text = load_text(tmp_path)
    tokenizer = train_bpe(text.train, 300)
    assert train_bpe(text.train, 300) == tokenizer
    tokens = as_tokens(text, tokenizer)
    assert tokens.fingerprint != text.fingerprint
    decode = tokenizers.Tokenizer.from_str(tokenizer).decode
    for corpus, of_bytes in ((tokens.train, text.train), (tokens.held_out, text.held_out)):
        whole = ["".join(parts) for parts in of_bytes.texts()]
        ids = corpus.read(0, corpus.size).tolist()
        for start, end, one in zip(corpus.starts, [*corpus.starts[1:], corpus.size], whole, strict=True):
            assert decode(ids[start:end], skip_special_tokens=False) == one + END  # each with its end token
    assert tokens.train.size < text.train.size / 3
    assert TextRows(tokens.train, 8, 2, 0).batch(0).inputs.shape == (2, 8)
    with pytest.raises(ValueError, match="--vocab-size is 256; a byte-level tokenizer has 256 bytes"):
        train_bpe(text.train, 256)
