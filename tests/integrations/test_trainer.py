"""Real CPU training runs of `transformers.Trainer` (and TRL's, where installed): the weights are the same, bit for bit."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nemo_like.activation_checkpointing import is_checkpointed
from nemo_like.integrations import (
    ActivationOffloadingMixin,
    NoOpManager,
    OffloadActivations,
    get_lora_act_offloading_ctx_manager,
)
from nemo_like.integrations.activation_offloading import output_head
from nemo_like.losses.model_loss import computes_in_chunks
from nemo_like.offload.backends import Backend
from nemo_like.offload.offloader import LAST_LAYER
from nemo_like.options import ChunkedLoss, MemoryBudget, OffloadConfig
from nemo_like.planning import plan_for
from tests.checks import assert_bitwise
from tests.integrations.common import QUIET, regions, tokenizer, weights
from tests.models import decoders
from tests.said import said

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

from nemo_like.integrations.transformers import (  # noqa: E402
    CheckpointingArguments,
    CheckpointingCallback,
    CheckpointingMixin,
)


@dataclass
class Arguments(CheckpointingArguments, transformers.TrainingArguments):
    """What a user writes."""


class Trainer(CheckpointingMixin, ActivationOffloadingMixin, transformers.Trainer):
    """What a user writes."""


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = decoders.batch(1, 16, seed=index)[0]
        return {"input_ids": ids, "labels": ids}


def _arguments(folder: Path, **settings: Any) -> Arguments:
    defaults = QUIET | {"per_device_train_batch_size": 2, "max_steps": 3, "logging_strategy": "no", "seed": 5}
    return Arguments(output_dir=str(folder), **(defaults | settings))


def _lora(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft", reason="LoRA needs peft")
    torch.manual_seed(2)
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "up_proj"], lora_dropout=0.1)
    return peft.get_peft_model(model, settings)


def _made(folder: Path, kind: Any = Trainer, **settings: Any) -> Any:
    """A trainer of a Llama."""
    return kind(model=decoders.build("llama"), args=_arguments(folder, **settings), train_dataset=Rows())


def _train(folder: Path, lora: bool = False, trainer: Any = None, name: str = "llama", **settings: Any) -> Any:
    """Train; `settings` with names of trainer keywords go there, the others to the arguments."""
    model = decoders.build(name)
    model = _lora(model) if lora else model
    mine = {k: settings.pop(k) for k in ("callbacks", "activation_offloading") if k in settings}
    made = (trainer or Trainer)(model=model, args=_arguments(folder, **settings), train_dataset=Rows(), **mine)
    before = weights(model)
    made.train()
    after = weights(made.model)
    assert all(not torch.equal(before[key], value) for key, value in after.items() if "lora_B" not in key)
    return made, after


_references: dict[Any, dict[str, torch.Tensor]] = {}


def _reference(folder: Path, **settings: Any) -> dict[str, torch.Tensor]:
    key = tuple(sorted(settings.items()))
    if key not in _references:
        _references[key] = _train(folder / "reference", trainer=transformers.Trainer, **settings)[1]
    return _references[key]


@pytest.mark.few(2)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("setting", [True, "boundary", OffloadConfig(mode="all", min_bytes=4096)], ids=str)
def test_offloading_changes_no_weight(tmp_path: Path, setting: Any, lora: bool) -> None:
    trainer, after = _train(tmp_path, lora, activation_offloading=setting)
    assert_bitwise(after, _reference(tmp_path, lora=lora))
    stats = trainer.activation_offload_context.collect()
    assert stats.moved_bytes > 0 or setting == "boundary" or lora
    assert stats.host_live_bytes == 0
    assert stats.kept_count[LAST_LAYER] > 0  # the head and the loss


@pytest.mark.parametrize("setting", ["saved", "all"])
def test_offloading_and_checkpointing_together(tmp_path: Path, setting: str) -> None:
    trainer, after = _train(
        tmp_path,
        ac="selective",
        activation_offloading=OffloadConfig(mode=setting, min_bytes=0),
        gradient_accumulation_steps=2,
    )
    assert_bitwise(after, _reference(tmp_path, gradient_accumulation_steps=2))
    assert regions(trainer.model) == decoders.LAYERS
    assert trainer.activation_offload_context.stats.moved_bytes > 0


@pytest.mark.few(2)
@pytest.mark.parametrize("ac", ["none", "full", "selective", "submodule", "sequential"])
def test_every_mode_of_checkpointing_changes_no_weight(tmp_path: Path, ac: str) -> None:
    trainer, after = _train(tmp_path, ac=ac)
    assert_bitwise(after, _reference(tmp_path))
    assert (regions(trainer.model) > 0) == (ac != "none")
    assert isinstance(trainer.activation_offload_context, NoOpManager)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("ac", ["full", "selective", "submodule", "sequential"])
def test_weight_decay_reaches_the_sameweights(tmp_path: Path, name: str, ac: str) -> None:
    def decayed(trainer: Any) -> list[list[str]]:
        names = {id(p): n for n, p in trainer.model.named_parameters()}
        assert [group["weight_decay"] for group in trainer.optimizer.param_groups] == [0.1, 0.0]
        return [[names[id(p)] for p in group["params"]] for group in trainer.optimizer.param_groups]

    plain, expected = _train(tmp_path / "bare", trainer=transformers.Trainer, name=name, weight_decay=0.1)
    trainer, after = _train(tmp_path, name=name, weight_decay=0.1, ac=ac)
    groups = decayed(trainer)
    assert groups == decayed(plain) and len(groups[0]) > 3 * decoders.LAYERS and groups[1]
    assert_bitwise(after, expected)


def test_checkpointing_lora_under_bf16_autocast(tmp_path: Path) -> None:
    trainer, after = _train(tmp_path, lora=True, ac="selective", bf16=True, activation_offloading=True)
    assert_bitwise(after, _reference(tmp_path, lora=True, bf16=True))
    assert regions(trainer.model) == decoders.LAYERS


@pytest.mark.few(1)
@pytest.mark.parametrize("ac", ["50%", MemoryBudget(fraction=0.5)], ids=str)
def test_a_budget_plans_for_a_batch_of_the_training_set(tmp_path: Path, ac: Any) -> None:
    class Budgeted(Trainer):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(ac=ac, **kwargs)

    trainer, after = _train(tmp_path, ac=ac) if isinstance(ac, str) else _train(tmp_path, trainer=Budgeted)
    assert_bitwise(after, _reference(tmp_path))  # the batch that was looked at shifts no random number
    assert regions(trainer.model) > 0


def test_a_budget_is_planned_under_the_trainers_autocast(tmp_path: Path) -> None:
    trainer, after = _train(tmp_path, ac="60%", bf16=True)
    assert_bitwise(after, _reference(tmp_path, bf16=True))
    sample = {name: torch.stack([tensor, tensor]) for name, tensor in Rows()[0].items()}
    plan = plan_for(decoders.build("llama"), ac="60%", sample_input=sample, gpu="cpu", precision="bf16")
    policies = [module.forward.policy for module in trainer.model.modules() if is_checkpointed(module)]
    assert policies == [each for each in plan.policies().values() if each is not None]


def test_the_callback_checkpoints_a_plain_trainer(tmp_path: Path) -> None:
    trainer, after = _train(tmp_path, trainer=transformers.Trainer, callbacks=[CheckpointingCallback("full")])
    assert_bitwise(after, _reference(tmp_path))
    assert regions(trainer.model) == decoders.LAYERS


def test_model_init_is_checkpointed_by_the_mixin_and_refused_by_the_callback(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return decoders.build("llama")

    trainer = Trainer(
        model_init=build,
        args=_arguments(tmp_path, ac="selective"),
        train_dataset=Rows(),
        activation_offloading=OffloadConfig(mode="all", min_bytes=0),
    )
    first = trainer.model
    trainer.train()
    assert trainer.model is not first and regions(trainer.model) == decoders.LAYERS
    assert trainer.activation_offload_context.model is trainer.model
    assert trainer.activation_offload_context.stats.moved_bytes > 0
    plain = transformers.Trainer(
        model_init=build, args=_arguments(tmp_path), train_dataset=Rows(), callbacks=[CheckpointingCallback("full")]
    )
    with pytest.raises(ValueError, match="Use CheckpointingMixin"):
        plain.train()


def test_a_late_callback_is_refused(tmp_path: Path) -> None:
    trainer = _made(tmp_path, transformers.Trainer)
    trainer.add_callback(CheckpointingCallback("full"))
    with pytest.raises(ValueError, match="added after the trainer was made"):
        trainer.train()


class Plain(CheckpointingMixin, transformers.Trainer):
    """Without the mixin that offloads."""


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(Rows())


def _callback(ac: str, **settings: Any) -> dict[str, Any]:
    return {"callbacks": [CheckpointingCallback(ac, **settings)]}


# Arguments, the trainer, more of its keywords, and the message.
REFUSED: dict[str, tuple[dict[str, Any], Any, dict[str, Any], str]] = {
    "transformers' own": ({"ac": "full", "gradient_checkpointing": True}, Trainer, {}, "recomputed twice"),
    "its new name": ({"ac": "full", "activation_checkpointing": True}, Trainer, {}, "recomputed twice"),
    "fsdp's": (
        {"ac": "full", "fsdp_config": {"activation_checkpointing": True}},
        Trainer, {}, r"fsdp_config\['activation_checkpointing'\]",
    ),
    "the loss of smoothed labels": (
        {"loss": "chunked", "label_smoothing_factor": 0.1}, Trainer, {}, "label_smoothing_factor=.*loss='model'"
    ),
    "the loss of a compiled model": (
        {"loss": "chunked", "torch_compile": True}, Trainer, {}, "torch_compile=.*loss='model'"
    ),
    "the callback's loss": (
        {"label_smoothing_factor": 0.1}, transformers.Trainer, _callback("none", loss="chunked"), "label_smoothing_factor"
    ),
    "a loss beside a function": (
        {"loss": "chunked"}, Trainer, {"compute_loss_func": lambda out, labels, num_items_in_batch: out.logits.sum()},
        "compute_loss_func= computes the loss from whole logits",
    ),
    "a wrong loss": ({"loss": "chunk"}, Trainer, {}, "loss is 'chunk'"),
    "a budget on a stream": ({"ac": "50%"}, Trainer, {"train_dataset": Stream()}, "Pass ac_sample_input="),
    "offloading": ({}, Trainer, {"activation_offloading": "disk"}, "mode is 'disk'"),
    "offload without its mixin": (
        {"offload": "saved"}, Plain, {}, "offload is 'saved' .*nothing here reads it.*ActivationOffloadingMixin"
    ),
    "offload beside the callback": (
        {"offload": "saved"}, transformers.Trainer, _callback("full"), "offload is 'saved' .*nothing here reads it"
    ),
    "cp beside the callback": (
        {"cp": 2}, transformers.Trainer, _callback("full"), "cp is 2 .*nothing here reads it.*CheckpointingMixin"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_arguments_ask_for_is_done_or_refused(tmp_path: Path, case: str) -> None:
    settings, kind, more, message = REFUSED[case]
    if not all(name in Arguments.__dataclass_fields__ for name in settings):
        pytest.skip(f"this transformers has none of {list(settings)}")
    model = decoders.build("llama")
    modules = dict(model.named_modules())
    with pytest.raises(ValueError, match=message):
        kind(**{"model": model, "args": _arguments(tmp_path, **settings), "train_dataset": Rows()} | more)
    assert dict(model.named_modules()) == modules


def test_a_model_that_checkpoints_by_itself_is_refused(tmp_path: Path) -> None:
    model = decoders.build("llama")
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="its own gradient checkpointing on"):
        Trainer(model=model, args=_arguments(tmp_path, ac="full"), train_dataset=Rows())


def test_a_budget_is_planned_under_the_precision_of_accelerates_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.state import AcceleratorState

    def policies(folder: str, **settings: Any) -> list[Any]:
        AcceleratorState._reset_state()
        trainer = _made(tmp_path / folder, ac="60%", **settings)
        return [module.forward.policy for module in trainer.model.modules() if is_checkpointed(module)]

    float32, bf16 = policies("float32"), policies("bf16", bf16=True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # what `accelerate launch` makes of mixed_precision: bf16
    try:
        assert policies("config") == bf16 != float32
    finally:
        AcceleratorState._reset_state()


def _right_tokens(prediction: Any) -> dict[str, float]:
    """Token accuracy, as people compute it from whole logits."""
    return {"accuracy": float((prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]).mean())}


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["arguments", "callback"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_chunked_loss_trains_and_evaluates_like_whole_logits(tmp_path: Path, lora: bool, how: str) -> None:
    chunks = ChunkedLoss(chunk_tokens=8)
    found = []
    for loss in ("model", chunks):
        model = decoders.build("llama")
        model = _lora(model) if lora else model
        mine = {"callbacks": [CheckpointingCallback("full", loss=loss)]} if how == "callback" else {"loss": loss}
        trainer = (transformers.Trainer if how == "callback" else Trainer)(
            model=model, args=_arguments(tmp_path, gradient_accumulation_steps=2), train_dataset=Rows(),
            eval_dataset=Rows(), compute_metrics=_right_tokens, **mine,
        )  # fmt: skip
        assert computes_in_chunks(trainer.model) == (loss is chunks)
        trainer.train()
        found.append((weights(trainer.model), trainer.evaluate()))
    (plain, metrics), (ours, our_metrics) = found
    for name, value in plain.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6)
    assert our_metrics["eval_accuracy"] == metrics["eval_accuracy"] > 0
    assert our_metrics["eval_loss"] == pytest.approx(metrics["eval_loss"], rel=1e-5)


def test_trl_sft_trainer(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed")

    @dataclass
    class SFTArguments(CheckpointingArguments, trl.SFTConfig):
        """What a user writes, as the next ones are."""

    class SFTTrainer(CheckpointingMixin, ActivationOffloadingMixin, trl.SFTTrainer):
        """With both mixins."""

    class AsDocumented(CheckpointingMixin, trl.SFTTrainer):
        """As the page has it."""

    import datasets
    import pyarrow

    table = pyarrow.table({"input_ids": [Rows()[index]["input_ids"].tolist() for index in range(12)]})
    rows = datasets.Dataset(datasets.table.InMemoryTable(table), fingerprint="rows")  # a given name: nothing is hashed

    def train(kind: Any, arguments: Any, **settings: Any) -> tuple[Any, dict[str, torch.Tensor]]:
        common = dict(
            output_dir=str(tmp_path), per_device_train_batch_size=2, max_steps=2, logging_strategy="no",
            gradient_checkpointing=False, bf16=False, dataset_kwargs={"skip_prepare_dataset": True}, **QUIET,
        )  # fmt: skip
        trainer = kind(
            model=decoders.build("llama"),
            args=arguments(**common, **settings),
            train_dataset=rows,
            processing_class=tokenizer(),
        )
        trainer.train()
        return trainer, weights(trainer.model)

    _, expected = train(trl.SFTTrainer, trl.SFTConfig)
    for setting in (dict(activation_offloading=True), dict(offload=OffloadConfig(mode="saved", min_bytes=0))):
        trainer, actual = train(SFTTrainer, SFTArguments, ac="selective", **setting)
        assert_bitwise(actual, expected)
        assert trainer.activation_offload_context.stats.copies > 0 and regions(trainer.model) == decoders.LAYERS
    trainer, actual = train(AsDocumented, SFTArguments, ac="selective", loss="chunked")
    assert_bitwise(actual, expected)
    assert regions(trainer.model) == decoders.LAYERS
    assert isinstance(trainer.maybe_activation_offload_context, contextlib.nullcontext), (
        "TRL's own is off, as by default"
    )


# ----------------------------------------------------------------------------------------------- the context itself


def test_the_defaults_are_the_contracts() -> None:
    context = get_lora_act_offloading_ctx_manager(decoders.build("llama"))
    assert isinstance(context, OffloadActivations)
    assert (context.config.mode, context.config.min_bytes, context.config.pin_memory) == ("all", 1024, True)
    assert context._mover.max_inflight_copies == 5
    assert context._mover._use_streams is True


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_a_stash_holds_at_least_one(value: Any) -> None:
    with pytest.raises(ValueError, match="max_fwd_stash_size is"):
        OffloadActivations(max_fwd_stash_size=value)
    with pytest.raises(ValueError, match="min_bytes is -1"):
        OffloadActivations(min_offload_size=-1)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_stash_bounds_how_many_copies_are_on_their_way(size: int) -> None:
    most = []

    class Late(torch.cpu.Event):
        def synchronize(self) -> None:
            most.append(len(context._mover._inflight))

        def query(self) -> bool:
            return False

    class Watching(Backend):
        def record(self, stream: Any) -> Late:
            return Late()

    context = OffloadActivations(max_fwd_stash_size=size, min_offload_size=0, backend=Watching())
    x = torch.randn(16, requires_grad=True)
    with context:
        y = x
        for _ in range(8):
            y = (y * 2).sin()
        assert len(context._mover._inflight) == size
    assert most == [size + 1] * (8 - size)
    y.sum().backward()


def test_min_offload_size_is_in_bytes() -> None:
    for size, moved in ((16, 1024), (256, 1024), (257, 0)):
        context = OffloadActivations(min_offload_size=4 * size, backend=Backend())
        with context:
            (torch.randn(256, requires_grad=True) * 2).sin()
        assert context.stats.moved_bytes == moved


def test_a_noop_manager_inside_leaves_everything_on_the_device() -> None:
    x = torch.randn(64, requires_grad=True)
    with OffloadActivations(min_offload_size=0, backend=Backend()) as context:
        y = (x * 2).sin()
        with NoOpManager():
            z = (y * 3).sin().exp()
        assert context.stats.copies == 1
    z.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad((((x * 2).sin()) * 3).sin().exp().sum(), x)[0])


def test_heads_are_found_or_their_absence_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    model = decoders.build("llama")
    assert output_head(model) is model.lm_head
    assert output_head(_lora(decoders.build("llama"))) is not None
    assert output_head(nn.DataParallel(model)) is model.lm_head
    plain = decoders.build("plain")
    assert output_head(plain) is plain.head
    headless = nn.Sequential(nn.Linear(4, 4))
    get_lora_act_offloading_ctx_manager(headless, warn_if_no_head=False)
    assert not said(caplog)
    get_lora_act_offloading_ctx_manager(headless)
    assert "found no output head in a Sequential" in caplog.text


def test_the_head_is_left_out_and_the_next_forward_is_not() -> None:
    model = decoders.build("plain")
    context = OffloadActivations(min_offload_size=0, model=model, left_out=(model.head,), backend=Backend())
    with context:
        for _ in range(2):
            before = context.stats.copies
            with contextlib.suppress(KeyError):
                decoders.loss_of(model, decoders.batch())
            assert context.stats.copies > before
    # Per forward: the head's input and weight, and the loss's log-probabilities and what it needs of the targets.
    assert context.stats.kept_count[LAST_LAYER] >= 2 * 3


def test_fields_that_would_hide_a_hosts_are_refused() -> None:
    @dataclass
    class Host:
        offload: bool = False

    with pytest.raises(TypeError, match="mixes CheckpointingArguments with Host, and both have a field 'offload'"):

        @dataclass
        class Mixed(CheckpointingArguments, Host):
            pass


def test_a_trainer_with_a_loss_of_its_own_is_given_it() -> None:
    class Own:
        """As sentence-transformers' trainer takes its loss."""

        def __init__(self, model: nn.Module, args: Any = None, loss: Any = None) -> None:
            self.model, self.args, self.loss = model, args, loss

    class Mixed(CheckpointingMixin, Own):
        pass

    own = nn.MSELoss()
    trainer: Any = Mixed(decoders.PlainDecoder(), ac="full", loss=own)
    assert trainer.loss is own and regions(trainer.model) == 3
