"""Samples of a fine-tuning run: files, forms, what counts, order, packing, and what is wrong with a line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_like.recipes.encode import Encoder, check_vocabulary, load_tokenizer
from nemo_like.recipes.sample_files import open_samples
from nemo_like.recipes.sample_rows import SampleRows, SampleSet, hold_out, pack
from tests_distributed.recipes.finetune_job import make_tokenizer, questions, read_samples, write_lines

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(300)


def _answer(tokenizer: Any, sample: dict[str, Any], seq_len: int = 64) -> tuple[str, str]:
    """The whole sample, and what of it counts, as text."""
    found = Encoder(tokenizer, seq_len).encode(sample)
    counted = [token for token, counts in zip(found.tokens, found.counts, strict=True) if counts]
    return tokenizer.decode(found.tokens), tokenizer.decode(counted)


def test_what_counts_in_each_form(tokenizer: Any) -> None:
    assert _answer(tokenizer, {"text": "one two"}) == ("one two<|eos|>", "one two<|eos|>")
    assert _answer(tokenizer, {"prompt": "1 and 2?", "completion": " 3."}) == ("1 and 2? 3.<|eos|>", " 3.<|eos|>")
    chat = [("system", "Add."), ("user", "1 and 2?"), ("assistant", "3"), ("user", "3 and 3?"), ("assistant", "6")]
    messages = [{"role": role, "content": content} for role, content in chat]
    whole, counted = _answer(tokenizer, {"messages": messages})
    assert whole == tokenizer.apply_chat_template(messages, tokenize=False)
    assert counted == "3<|end|>6<|end|>"
    marked = make_tokenizer(300)  # a template that marks what the assistant writes, and drops what it thought before
    marked.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'].split('~')[-1] if not "
        "loop.last else m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}|{% endfor %}"
    )
    chat = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "a~3"}] * 2
    assert _answer(marked, {"messages": chat}) == ("1?|3|1?|a~3|", "3a~3")
    assert _answer(tokenizer, {"prompt": "1", "completion": "2 3 4 5 6 7 8 9"}, seq_len=4)[1].startswith("2 3")


BROKEN = {
    "{'a': 1}": "it is not JSON: Expecting property name",
    "[1, 2]": "it is a JSON list, not an object",
    '{"question": "1"}': "it has 'question'; it must have messages, or prompt and completion, or text",
    '{"prompt": "1"}': "'completion' is None; it must be a string",
    '{"text": 3}': "'text' is 3; it must be a string",
    '{"text": ""}': r"it has 1 token\(s\), and none to predict",
    '{"messages": []}': r"'messages' is \[\]; it must be a list of messages",
    '{"messages": [{"role": "user", "content": "hi"}]}': "no message is the assistant's",
    '{"messages": [{"content": "hi"}]}': r"message 1 is \{'content': 'hi'\}; it must have role and content",
    '{"messages": [{"role": "assistant", "content": 3}]}': "message 1: content is 3; it must be a string",
    json.dumps({"prompt": "1 " * 99, "completion": "2"}): r"no answer is left within the first 64 of its \d+ tokens",
    json.dumps({"text": "x" * 10 * 2**20}): "the line has 10,485,773 bytes, more than 4,194,304",
    '{"text": "\udcff"}': "it is not UTF-8: invalid start byte at byte 10",
    "[" * 100_000: "it is not JSON",
    '{"text": "half \\ud83d a face"}': r"it has '\\ud83d', one half of a surrogate pair, which is not a character",
    '{"prompt": "1", "completion": "2", "more": ["\\uDC00"]}': r"it has '\\udc00', one half of a surrogate pair",
    '{"messages": [{"role": "assistant", "content": "\\udc00\\ud800"}]}': r"it has '\\udc00', one half of a surrogate",
}


@pytest.mark.parametrize("line", BROKEN, ids=lambda line: line[:40])
def test_a_broken_line_is_named_and_may_be_skipped(
    line: str, tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "data.jsonl"
    good = json.dumps({"text": "a good one"})
    path.write_bytes("\n".join([good, "", line, good]).encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}, line 3: {BROKEN[line]}.*--skip-bad"):
        read_samples(path, tokenizer)
    with caplog.at_level("WARNING", "nemo_like"):
        found = read_samples(path, tokenizer, skip_bad=True)
    assert (found.index, found.skipped) == ([0, 3], 1)
    assert re.search(rf"1 of 4 samples are left out; the first is .*, line 3: {BROKEN[line]}", caplog.text)


def test_a_whole_surrogate_pair_is_a_character(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a \\ud83d\\ude00 face"}\n')
    samples = read_samples(path, tokenizer)
    assert tokenizer.decode(samples.encoded(0).tokens) == "a \U0001f600 face<|eos|>"


def test_data_is_recognised_by_its_contents_and_not_by_its_name(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra 'finetune' is not installed")
    rows, others = [{"text": f"{i} one"} for i in range(3)], [{"text": f"{i} two"} for i in range(3)]
    jsonl = [
        write_lines(tmp_path / f"{name}.jsonl", lines) for name, lines in (("a", rows), ("b", rows), ("c", others))
    ]
    saved = [tmp_path / name for name in "abc"]
    for folder, lines in zip(saved, (rows, rows, others), strict=True):
        datasets.Dataset.from_list(lines).save_to_disk(str(folder))
    for paths in (jsonl, saved):
        same, copy, other = (open_samples("--data", str(path)).fingerprint for path in paths)
        assert same == copy != other


def test_nothing_usable(tokenizer: Any, tmp_path: Path) -> None:
    for text, reason in (("", "it is empty"), ("\n\n", "it is empty"), ("{}\n", "every one is broken")):
        (tmp_path / "data.jsonl").write_text(text)
        with pytest.raises(ValueError, match=f"--data has no sample that can be used: {reason}"):
            read_samples(tmp_path / "data.jsonl", tokenizer, skip_bad=True)
    with pytest.raises(ValueError, match="nothing exists there"):
        open_samples("--data", str(tmp_path / "nowhere"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=r"a folder without any \.jsonl or \.parquet"):
        open_samples("--data", str(tmp_path / "folder"))


def test_tokenizers_that_do_not_fit(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokens up to number \d+, and 'm' has embeddings for 100"):
        check_vocabulary(tokenizer, 100, "m")
    with pytest.raises(ValueError, match="No tokenizer can be read from"):
        load_tokenizer(str(tmp_path))
    path = write_lines(
        tmp_path / "data.jsonl", [{"messages": [{"role": role, "content": "3"} for role in ("user", "assistant")]}]
    )
    bare = make_tokenizer(300)
    bare.chat_template = None
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        read_samples(path, bare, skip_bad=True)
    bare.chat_template = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(ValueError, match=r"line 1: the chat template writes what is before message 2 otherwise"):
        read_samples(path, bare)
    bare.chat_template = "{{ raise_exception('no roles here') }}"
    with pytest.raises(ValueError, match=r"line 1: the chat template refuses it: no roles here"):
        read_samples(path, bare)


def _rows(lengths: list[int], seed: int, room: int | None) -> SampleRows:
    files: Any = SimpleNamespace(fingerprint="unread")
    return SampleRows(SampleSet(files, files, list(range(len(lengths))), lengths, lengths), 2, seed, room)


def test_order_uses_every_sample_once_an_epoch_and_none_twice() -> None:
    lengths = [3, 9, 4, 7, 5, 2, 8, 6, 1, 5, 3]
    for room in (None, 10):
        order = _rows(lengths, 5, room)
        rows = [row for step in range(40) for row in order.of_step(step)]
        if room is None:
            assert all(len(row) == 1 for row in rows)
        used: list[int] = []
        for row in rows:
            assert sum(lengths[i] for i in row) <= (room or 99)
            used += row
            epoch, place = divmod(len(used), len(lengths))
            if place == 0:  # rows of two epochs never mix
                assert sorted(used[-len(lengths) :]) == list(range(len(lengths)))
        assert epoch > 3
        assert used[: len(lengths)] != used[len(lengths) : 2 * len(lengths)]
        again = _rows(lengths, 5, room)
        assert again.of_step(37) == order.of_step(37), "a step's rows do not depend on which were asked for before"
        assert _rows(lengths, 6, room).of_step(0) != order.of_step(0)


def test_packing_fills_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 200, (2000,), generator=generator).tolist()
    rows = pack(range(2000), lengths, 512)
    assert sorted(i for row in rows for i in row) == list(range(2000))
    assert sum(lengths) / (512 * len(rows)) > 0.97


def test_packed_rows_are_their_samples(tokenizer: Any, tmp_path: Path) -> None:
    samples = read_samples(write_lines(tmp_path / "data.jsonl", questions(12)), tokenizer)
    rows = SampleRows(samples, 2, 0, 64)
    batch = rows.batch(0, 0, 1)
    assert batch.inputs.shape == batch.targets.shape == (2, 64) and batch.positions is not None
    for row, members in enumerate(rows.of_step(0)):
        assert len(members) > 1
        at = 0
        for sample in members:
            alone = samples.batch([[sample]])
            end = at + samples.lengths[sample]
            assert torch.equal(batch.inputs[row, at:end], alone.inputs[0])
            assert torch.equal(batch.targets[row, at:end], alone.targets[0])
            assert batch.positions[row, at:end].tolist() == list(range(end - at))
            at = end
        assert (batch.targets[row, at:] == -100).all()
    assert int((batch.targets != -100).sum()) == rows.targets(0)
    halves = [rows.batch(0, part, 2) for part in range(2)]
    assert torch.equal(torch.cat([half.inputs for half in halves]), batch.inputs)


def test_held_out_samples_do_not_depend_on_the_seed_and_are_not_trained_on(tokenizer: Any, tmp_path: Path) -> None:
    samples = read_samples(write_lines(tmp_path / "data.jsonl", questions(40)), tokenizer)
    train, held_out = hold_out(samples, 64)
    assert held_out is not None and len(held_out) == 4
    assert sorted(train.index + held_out.index) == samples.index
    assert hold_out(samples, 2)[1].index != [] and hold_out(samples, 0) == (samples, None)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"--data has 5 sample\(s\).*Give more.*--eval-samples 0"):
        hold_out(samples.subset(range(5)), 64)


def test_the_largest_step_is_no_smaller_than_any(tokenizer: Any, tmp_path: Path) -> None:
    samples = read_samples(write_lines(tmp_path / "data.jsonl", questions(12)), tokenizer)
    rows = SampleRows(samples, 4, 0)
    largest = rows.largest(2).inputs.shape
    assert largest == (2, max(samples.lengths))
    assert all(rows.batch(step, part, 2).inputs.shape[1] <= largest[1] for step in range(9) for part in range(2))
    with pytest.raises(ValueError, match="fewer than --batch-size 13"):
        SampleRows(samples, 13, 0)


def test_folders_and_parquet(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "lines" / "deep").mkdir(parents=True)
    write_lines(tmp_path / "lines" / "b.jsonl", questions(3))
    write_lines(tmp_path / "lines" / "deep" / "a.jsonl", questions(2))
    (tmp_path / "lines" / "notes.txt").write_text("not a sample")
    files = open_samples("--data", str(tmp_path / "lines"))
    assert len(files) == 5 and files.where(3) == f"{tmp_path}/lines/deep/a.jsonl, line 1"
    wanted = read_samples(tmp_path / "lines", tokenizer)
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(questions(3) + questions(2))
    rows.save_to_disk(str(tmp_path / "saved"))
    rows.to_parquet(str(tmp_path / "data.parquet"))
    for path in ("saved", "data.parquet"):
        found = read_samples(tmp_path / path, tokenizer)
        assert (found.lengths, found.targets) == (wanted.lengths, wanted.targets)
    datasets.DatasetDict({"train": rows}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(ValueError, match="several splits: give the folder of one, train"):
        open_samples("--data", str(tmp_path / "splits"))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match=r"broken.parquet', which datasets cannot read"):
        open_samples("--data", str(tmp_path / "broken.parquet"))


def test_parquet_without_datasets_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    (tmp_path / "data.parquet").write_bytes(b"PAR1")
    with pytest.raises(ImportError, match=r"pip install datasets "):
        open_samples("--data", str(tmp_path / "data.parquet"))
