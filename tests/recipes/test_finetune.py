"""`nemo-like finetune` in one process: what it trains and writes, its memory, and what it refuses in a line."""

import json
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_like._util.live_bytes import LiveBytes
from nemo_like._util.option_fields import parse_options
from nemo_like.recipes.data import bad_sample, open_samples
from nemo_like.recipes.options import FinetuneOptions
from tests.integrations.test_trainer_memory import Limited
from tests.recipes.finetune_files import make_model, questions, write_lines

trl = pytest.importorskip("trl", reason="the extra 'finetune' is not installed")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from nemo_like.recipes import finetune  # noqa: E402


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The options with a model and samples."""
    folder = tmp_path_factory.mktemp("files")
    return {"model": make_model(folder / "model"), "data": write_lines(folder / "data.jsonl", questions())}


def _run(files: dict[str, str], output: Path, line: str = "") -> int:
    words = f"--model {files['model']} --data {files['data']} --output {output} --device cpu --precision float32"
    return finetune.main([*words.split(), "--steps", "3", "--batch-size", "4", "--log-every", "1", *line.split()])


def _history(output: Path, step: int) -> list[dict[str, Any]]:
    state = json.loads((output / f"checkpoint-{step}" / "trainer_state.json").read_text(encoding="utf-8"))
    return list(state["log_history"])


def _losses(output: Path, step: int = 3, name: str = "loss") -> list[float]:
    return [entry[name] for entry in _history(output, step) if name in entry]


def _opened(files: dict[str, str], output: Path) -> Any:
    if (output / "adapter").exists():
        base = transformers.AutoModelForCausalLM.from_pretrained(files["model"])
        return peft.PeftModel.from_pretrained(base, str(output / "adapter"))
    return transformers.AutoModelForCausalLM.from_pretrained(str(output / "model"))


@pytest.mark.parametrize("line", ["", "--lora --lora-rank 4", "--lora --lora-targets q_proj,v_proj"])
def test_modes_of_checkpointing_train_the_same_and_the_result_opens(
    files: dict[str, str], tmp_path: Path, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for ac in ("none", "full", "50%"):
        assert _run(files, tmp_path / ac, f"{line} --ac {ac} --check-memory") == 0
    kind = "adapter" if line else "model"
    assert capsys.readouterr().out.splitlines()[-1] == f"The result is in {tmp_path / '50%' / kind}."
    none, *others = (_opened(files, tmp_path / ac).state_dict() for ac in ("none", "full", "50%"))
    for other in others:
        assert all(torch.equal(other[name], tensor) for name, tensor in none.items())
    assert _losses(tmp_path / "none") == _losses(tmp_path / "full") == _losses(tmp_path / "50%")
    base = transformers.AutoModelForCausalLM.from_pretrained(files["model"]).state_dict()
    if kind == "adapter":
        changed = {name.split(".")[-4] for name, tensor in none.items() if "lora_B" in name and tensor.any()}
        every = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
        assert changed == ({"q_proj", "v_proj"} if "targets" in line else every)
    else:
        assert not any(torch.equal(base[name], none[name]) for name in base)
    assert transformers.AutoTokenizer.from_pretrained(str(tmp_path / "none" / kind)).eos_token == "<eos>"


def test_merged_weights_are_the_model_with_its_adapters(files: dict[str, str], tmp_path: Path) -> None:
    assert _run(files, tmp_path, "--lora --merge --lr 0.1") == 0
    merged = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "model"))
    ids = torch.arange(12)[None] + 20
    with torch.no_grad():
        # The sum of weight and adapter is rounded once more.
        torch.testing.assert_close(merged(ids).logits, _opened(files, tmp_path)(ids).logits, rtol=1e-4, atol=1e-5)


def test_what_is_half_stays_half(tmp_path: Path, files: dict[str, str]) -> None:
    halves = {"model": make_model(tmp_path / "model", dtype="bfloat16"), "data": files["data"]}
    assert _run(halves, tmp_path / "out", "--precision bfloat16") == 0
    assert {tensor.dtype for tensor in _opened(halves, tmp_path / "out").state_dict().values()} == {torch.bfloat16}


def test_a_resumed_run_repeats_the_uninterrupted_one(files: dict[str, str], tmp_path: Path) -> None:
    line = "--lora --lora-dropout 0.1 --grad-accum 2 --save-every 2 --keep 9"
    assert _run(files, tmp_path / "whole", f"{line} --steps 6 --resume=auto") == 0
    assert _run(files, tmp_path / "cut", f"{line} --steps 6") == 0
    for step in (4, 6):  # killed while the checkpoint of step 4 was being written
        (tmp_path / "cut" / f"checkpoint-{step}" / "trainer_state.json").unlink()
    assert _run(files, tmp_path / "cut", f"{line} --steps 6 --resume") == 0
    whole, cut = (_opened(files, tmp_path / name).state_dict() for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    assert _losses(tmp_path / "whole", 6) == _losses(tmp_path / "cut", 6) and len(_losses(tmp_path / "cut", 6)) == 6


def test_packed_rows_have_the_loss_of_their_samples(files: dict[str, str], tmp_path: Path) -> None:
    """One step on all samples: the mean over their tokens, whether each has a row or all share two."""
    line = "--steps 1 --eval-samples 0 --seq-len 128"
    assert _run(files, tmp_path / "rows", f"{line} --batch-size 40") == 0
    assert _run(files, tmp_path / "packed", f"{line} --batch-size 40 --pack") == 0
    # Sums are of another order; a token that saw its neighbours' samples would change the third digit.
    assert _losses(tmp_path / "packed", 1)[0] == pytest.approx(_losses(tmp_path / "rows", 1)[0], rel=1e-5)


def test_of_messages_the_assistants_turns_count(files: dict[str, str], tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "What is 1 and 2?"}]
    chats = [{"messages": [*asked, {"role": "assistant", "content": f"{i}."}]} for i in range(8)]
    chat = files | {"data": write_lines(tmp_path / "chat.jsonl", chats)}
    mine, every = (FinetuneOptions(**chat, train_on=word, output=str(tmp_path)) for word in ("assistant", "all"))
    data = open_samples("--data", chat["data"], finetune.FORMS)
    counted = [finetune.make_trainer(options, data, None).train_dataset[3]["labels"] for options in (mine, every)]
    tokenizer = transformers.AutoTokenizer.from_pretrained(files["model"])
    assert tokenizer.decode([token for token in counted[0] if token != -100]) == " 3.<end>"
    assert -100 not in counted[1]


def test_weights_of_four_bits_train_adapters(files: dict[str, str], tmp_path: Path) -> None:
    for ac in ("none", "selective", "50%"):
        assert _run(files, tmp_path / ac, f"--qlora --ac {ac}") == 0
    none, *others = (_opened(files, tmp_path / ac).state_dict() for ac in ("none", "selective", "50%"))
    assert all(torch.equal(none[name], other[name]) for other in others for name in none)
    assert any("lora_B" in name and tensor.any() for name, tensor in none.items())


@pytest.mark.parametrize(("adapters", "most"), [("", 6), pytest.param("--qlora", 5, marks=pytest.mark.long)])
def test_fit_chooses_what_the_memory_holds(
    files: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    adapters: str,
    most: int,
) -> None:
    peaks, train = [], finetune.Trainer.train

    def counted(trainer: Any, **how: Any) -> Any:
        with LiveBytes(trainer.model.parameters()) as counter:
            result = train(trainer, **how)
        peaks.append(counter.peak + sum(p.nbytes for p in trainer.model.parameters()))
        return result

    monkeypatch.setattr(finetune.Trainer, "train", counted)
    for name, line in (("asked", ""), ("fitted", f"--fit --fit-memory {most}MiB")):
        assert _run(files, tmp_path / name, f"{adapters} --batch-size 16 --ac none --eval-samples 0 {line}") == 0
    said = re.search(r"--fit chose --ac (\S+) --batch-size (\d+) --grad-accum (\d+)", capsys.readouterr().out)
    assert said and int(said[2]) * int(said[3]) == 16 and math.prod(map(int, said.groups()[1:])) == 16
    assert _losses(tmp_path / "fitted") == pytest.approx(_losses(tmp_path / "asked"), rel=1e-4)
    assert peaks[1] <= most * 2**20 < peaks[0]


GOOD = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
BAD_DATA = {
    '{"a": 1': "which datasets cannot read: line 1 is not JSON (Expecting ',' delimiter",
    '{"question": 1}': "1 samples with question; each must have messages, or prompt and completion, or text",
    '{"messages": [{"role": "user", "content": "a"}]}': "line 1 has no turn of the assistant",
    "": "cannot read",
    f"{GOOD}\n{GOOD}nonsense\n{GOOD}": "line 4 is not JSON (Expecting value",
    f'{GOOD}{{"messages": 3}}\n{GOOD}': "line 2 has messages '3', which is not a list of messages; each must have messages",
    f'{GOOD}{{"messages": []}}\n': "line 2 has messages '[]'",
    f'{GOOD}{{"text": "a"}}\n': "line 2 has text; each must have messages",
    f'{GOOD}{{"messages": [{{"role": "user"}}]}}\n': "line 2 has a message {'role': 'user'}, without role or content",
}


@pytest.mark.parametrize("text", BAD_DATA)
def test_bad_data_end_in_a_line(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (tmp_path / "bad.jsonl").write_text(text)
    assert _run(files | {"data": str(tmp_path / "bad.jsonl")}, tmp_path / "out") == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("[rank 0] error: --data is ") and BAD_DATA[text] in last


def test_a_bad_sample_has_its_number_in_any_file(tmp_path: Path) -> None:
    """One array in several lines has samples, and no lines; a file that datasets read is no damaged one."""
    good, bad = {"text": "a"}, {"text": 3}
    (tmp_path / "array.json").write_text(json.dumps([good, bad], indent=1))
    (tmp_path / "object.json").write_text(json.dumps(good, indent=1))
    for name, samples, message in (
        ("array.json", [good, bad], "sample 2 has text '3', which is not a list of messages; each must have text."),
        ("array.json", [], ""),
        ("object.json", [good], ""),
        ("object.json", [], "line 1 is not JSON (Expecting property name"),
    ):
        assert bad_sample(str(tmp_path / name), samples, finetune.FORMS).startswith(message)


def test_what_cannot_be_used_ends_in_a_line(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    plain = make_model(tmp_path / "plain", "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    chat = write_lines(tmp_path / "chat.jsonl", [{"messages": [{"role": "assistant", "content": "a"}]}])
    done = tmp_path / "done"
    assert _run(files, done, "--lora --steps 1") == 0
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    cases: list[tuple[dict[str, str], Path, str, str]] = [
        ({"data": "nowhere.jsonl"}, tmp_path / "a", "", "--data is 'nowhere.jsonl', and nothing exists there"),
        ({"model": str(tmp_path / "empty")}, tmp_path / "a", "", "which transformers cannot open"),
        ({"model": plain, "data": chat}, tmp_path / "a", "", "Or give --train-on all"),
        ({}, tmp_path / "a", "--lora --lora-targets nothing", "Target modules {'nothing'} not found"),
        ({}, tmp_path / "a", "--resume", "--resume finds no checkpoint"),
        ({}, tmp_path / "a", "--wandb project", "pip install wandb"),
        ({}, tmp_path / "a", "--fit --fit-memory 1MiB", "--fit: Nothing fits in 1.00MiB"),
        ({}, done, "", "has a run already. Go on with --resume"),
    ]
    for changed, output, line, message in cases:
        assert _run(files | changed, output, line) == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith("[rank 0] error: ") and message in last, last


def test_where_memory_runs_out_the_way_out_is_options(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Limited(3 * 2**20):
        assert _run(files, tmp_path, "--ac none --batch-size 16 --eval-samples 0 --check-memory") == 2
    said = capsys.readouterr().err
    assert "A step of its largest batch takes" in said and "Lower it by --ac full (" in said
    assert "--batch-size 8 --grad-accum 2" in said.replace(", ", " ")


def test_its_lines_have_speed_memory_and_time(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    start = time.perf_counter()
    assert _run(files, tmp_path, "--steps 6 --log-every 2 --eval-every 4 --batch-size 2") == 0
    seconds = time.perf_counter() - start
    form = r"step +(\d)/6  loss ([\d.]+)  lr [\d.e-]+  ([\d,]+) tokens/s  memory .* GiB  peak [\d.]+ GiB(?:  (\d+) s left)?$"
    out = capsys.readouterr().out
    lines = re.findall(form, out, re.MULTILINE)
    assert [line[0] for line in lines] == ["2", "4", "6"] and not lines[-1][3], out
    logged = [entry for entry in _history(tmp_path, 6) if "loss" in entry]
    assert [float(line[1]) for line in lines] == [round(entry["loss"], 4) for entry in logged]
    # All tokens in the whole time of the process are fewer a second.
    assert int(lines[-1][2].replace(",", "")) > logged[-1]["num_tokens"] / seconds
    assert re.search(r"^step 4: held-out loss [\d.]+ nats per token$", out, re.MULTILINE) and "train_runtime" not in out


@pytest.mark.parametrize(("precision", "numbers"), [("float32", 8), ("bfloat16", 4)])
def test_four_bits_of_an_odd_width_end_in_a_line(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], precision: str, numbers: int
) -> None:
    shape = {"vocab_size": 261, "hidden_size": 30, "intermediate_size": 67, "num_hidden_layers": 1, "head_dim": 16}
    odd = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, num_attention_heads=2))
    odd.save_pretrained(tmp_path / "odd")
    transformers.AutoTokenizer.from_pretrained(files["model"]).save_pretrained(tmp_path / "odd")
    assert _run(files | {"model": str(tmp_path / "odd")}, tmp_path / "out", f"--qlora --precision {precision}") == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"--qlora stores {numbers} weights of 4 bits" in last and "gate_proj' has 67 x 30" in last


def test_options_are_those_of_the_trainer(files: dict[str, str], tmp_path: Path) -> None:
    line = f"--model {files['model']} --data {files['data']} --output {tmp_path} --lr 0.5 --seq-len 77 --optimizer sgd"
    arguments = finetune._arguments(parse_options(FinetuneOptions, line.split()), None, True)
    assert (arguments.learning_rate, arguments.max_length, arguments.optim) == (0.5, 77, "sgd")
    assert arguments.assistant_only_loss and arguments.report_to == [] and arguments.max_steps == -1
