"""Fine-tune a Hugging Face model: options for TRL's `SFTTrainer`, with our mixins. Also under torchrun:

    torchrun --nproc-per-node 2 -m nemo_like.recipes.finetune --model DIR --data FILE.jsonl --lora

Data sets, chat templates, packing, steps, checkpoints and logs are TRL's and the Trainer's (docs/how-to/fine-tune.md).
"""

import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from nemo_like._util.console import as_flag, flag, start_logging
from nemo_like._util.device_work import is_out_of_memory
from nemo_like._util.extras import require
from nemo_like._util.json_file import replace_folder
from nemo_like._util.log import is_rank_zero
from nemo_like._util.option_fields import parse_options
from nemo_like._util.words import dtype_word
from nemo_like.distributed import launch
from nemo_like.flags import FLAGS, flags_of
from nemo_like.integrations.activation_offloading import ActivationOffloadingMixin
from nemo_like.integrations.trainer_batches import largest_batch
from nemo_like.integrations.trainer_job import call_of_model
from nemo_like.integrations.transformers import CheckpointingArguments, CheckpointingMixin
from nemo_like.options import FSDP2
from nemo_like.options.optimizers import TRAINER_OPTIMIZERS
from nemo_like.planning.devices import device_at_hand
from nemo_like.planning.fit import fit
from nemo_like.planning.fit.layouts import SHARDING
from nemo_like.recipes.data import bad_sample, open_samples
from nemo_like.recipes.log import Progress
from nemo_like.recipes.options import FinetuneOptions

transformers = require("transformers", "finetune", "to fine-tune")
trl = require("trl", "finetune", "to fine-tune")
datasets = require("datasets", "finetune", "to fine-tune")
peft = require("peft", "finetune", "to fine-tune")

FORMS = ({"messages"}, {"prompt", "completion"}, {"text"})  # Columns that samples have.
# Arguments of the trainer that have the value of an option, and that option.
_SAME = {f.metadata["trainer"]: f.name for f in fields(FinetuneOptions) if f.metadata["trainer"]}


@dataclass
class TrainerArguments(CheckpointingArguments, trl.SFTConfig):  # type: ignore[name-defined]
    """The arguments of `Trainer`."""


class Trainer(CheckpointingMixin, ActivationOffloadingMixin, trl.SFTTrainer):  # type: ignore[misc,name-defined]
    """TRL's trainer, with checkpointing, offloading and the checks that keep a step within memory."""


class StepLines(transformers.TrainerCallback):  # type: ignore[name-defined]
    """Lines with step, loss, speed, memory and the time that is left, as pretraining prints them.

    Speed is the mean of all steps but the first, which allocates and compiles, without evaluations and checkpoints.
    """

    def __init__(self) -> None:
        self._steps, self._seconds = 0, 0.0

    def on_train_begin(self, args: Any, state: Any, control: object, **kwargs: object) -> None:
        device = device_at_hand(args.device.type)
        limit = 0 if args.device.type == "cpu" else device.memory_bytes
        self._progress, self._first = Progress(state.max_steps, args.device, limit), state.global_step
        self._begun = self._since = time.perf_counter()

    def on_step_end(self, args: object, state: Any, control: object, **kwargs: object) -> None:
        now = time.perf_counter()
        if state.global_step > self._first + 1:
            self._steps, self._seconds = self._steps + 1, self._seconds + now - self._since
        self._since = now

    def on_save(self, args: object, state: object, control: object, **kwargs: object) -> None:
        self._since = time.perf_counter()

    on_evaluate = on_save

    def on_log(self, args: Any, state: Any, control: object, logs: Any = None, **kwargs: object) -> None:
        if "eval_loss" in logs:
            self._progress.say(f"step {state.global_step}: held-out loss {logs['eval_loss']:.4f} nats per token")
        if "loss" not in logs:
            return
        seconds = self._seconds / self._steps if self._steps else time.perf_counter() - self._begun
        tokens = logs.get("num_tokens", 0) / (state.global_step - self._first)  # TRL's count, of all ranks
        self._progress.step(
            state.global_step, logs["loss"], logs["learning_rate"], tokens / seconds, step_seconds=seconds
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job; the process's exit code, see `run`."""
    return run(parse_options(FinetuneOptions, arguments))


def run(options: FinetuneOptions) -> int:
    """Train, and write the result; the process's exit code: 0, 2 for bad input and where memory runs out, 130, 143."""
    code = 2
    start_logging()
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    try:
        return train(options)
    except (ValueError, ImportError, OSError, NotImplementedError) as error:
        text = f"error: {error}"
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        # The mixin's advice is in the trainer's words.
        text = "error: " + re.sub(r"\b(\w+)=('[^']*'|\d+)", _as_option, str(error))
    except KeyboardInterrupt:
        text, code = "interrupted; go on from the last checkpoint with --resume", 130
    finally:
        launch.shutdown()
    print(f"[rank {launch.rank()}] {text}", file=sys.stderr, flush=True)
    return code


def _as_option(match: re.Match[str]) -> str:
    name, value = _SAME.get(match[1]), match[2].strip("'")
    return match[0] if name is None else f"{flag(name)} {TRAINER_OPTIMIZERS.get(value, value)}"


def train(options: FinetuneOptions) -> int:
    """Read, train and write; 0, or 143 where SIGTERM ended the run, which then has a checkpoint. A collective.

    Raises:
        ValueError: an option does not fit the model or the data, or one of these cannot be read.
        MissingExtraError: a package is not installed.
    """
    checkpoint = _checkpoint(options)
    data = open_samples("--data", options.data, FORMS)
    held_out = None if options.eval_data is None else open_samples("--eval-data", options.eval_data, FORMS)
    held = min(options.eval_samples, len(data) // 10)
    if held_out is None and held:
        parts = data.train_test_split(held, seed=options.seed)
        data, held_out = parts["train"], parts["test"]
    trainer = make_trainer(options, data, held_out)
    if options.fit:
        options, ac = _fitted(options, trainer)
        trainer = make_trainer(options, data, held_out, trainer.model, ac)
    trainer.train(resume_from_checkpoint=checkpoint)
    if trainer.state.global_step < trainer.state.max_steps:
        print(f"Stopped after step {trainer.state.global_step}; go on with --resume.", file=sys.stderr, flush=True)
        return 128 + signal.SIGTERM
    save_result(trainer, options)
    return 0


def _checkpoint(options: FinetuneOptions) -> str | None:
    """Return the last complete checkpoint of an earlier run; None: the run begins."""
    output = Path(options.output)
    there = [path for path in output.glob("checkpoint-*") if path.name[11:].isdecimal()]
    # The Trainer writes its state last; its own mark is there while a signal's checkpoint is being written.
    whole = [p for p in there if (p / "trainer_state.json").exists() and not list(p.glob("*is-incomplete*"))]
    if options.resume == "no" and (there or (output / "adapter").exists() or (output / "model").exists()):
        raise ValueError(f"--output {options.output!r} has a run already. Go on with --resume, or give another folder.")
    if options.resume == "must" and not whole:
        raise ValueError(f"--resume finds no checkpoint in {options.output!r}. Write --resume=auto to start again.")
    return str(max(whole, key=lambda path: int(path.name[11:]))) if whole and options.resume != "no" else None


def _arguments(options: FinetuneOptions, held_out: Any, conversations: bool) -> Any:
    """Return the options as arguments of `SFTTrainer`, with our own."""
    loggers = ["tensorboard"] * options.tensorboard + ["wandb"] * (options.wandb is not None)
    for name in loggers:
        require(name, name, f"for {flag(name)}")
    os.environ |= {} if options.wandb is None else {"WANDB_PROJECT": options.wandb}
    cpu, ranks = options.device == "cpu" or not torch.cuda.is_available(), launch.world_size()
    launch.let_segments_grow("cpu" if cpu else "cuda")
    values = {theirs: getattr(options, ours) for theirs, ours in _SAME.items()}
    values["optim"] = next(name for name, word in TRAINER_OPTIMIZERS.items() if word == options.optimizer)
    if ranks > 1 and not cpu:  # accelerate has FSDP2 on accelerators; on CPUs it is DDP
        config = {
            name: FLAGS[name].read(getattr(options, name)) for name in flags_of("strategy") if hasattr(options, name)
        }
        values |= {"fsdp": True, "fsdp_config": {"version": 2} | {k: v for k, v in config.items() if v is not None}}
    return TrainerArguments(
        **values,
        per_device_eval_batch_size=options.batch_size,
        use_cpu=cpu,
        ddp_backend="gloo" if cpu and ranks > 1 else None,
        ddp_find_unused_parameters=False,
        bf16=options.precision == "bfloat16",
        activation_checkpointing=False,
        assistant_only_loss=conversations and options.train_on == "assistant",
        max_steps=options.steps or -1,
        warmup_steps=min(options.warmup_steps, options.steps or options.warmup_steps),
        lr_scheduler_type="constant_with_warmup" if options.schedule == "constant" else options.schedule,
        eval_strategy="no" if held_out is None else "steps",
        enable_jit_checkpoint=True,  # SIGTERM saves
        disable_tqdm=True,
        report_to=loggers,
    )


def make_trainer(options: FinetuneOptions, data: Any, held_out: Any, model: Any = None, ac: Any = None) -> Any:
    """Return the trainer of these options; `model`: one that is there already, with its adapters; `ac`: a plan.

    Raises:
        ValueError: model, tokenizer or data cannot be used.
    """
    arguments = _arguments(options, held_out, "messages" in data.column_names)
    how = {"trust_remote_code": options.trust_remote_code}
    with _opening(options):
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model, **how)
    if options.qlora and model is None:
        check_widths(options, **how)
    with _opening(options):
        model, adapters = _load_model(options, **how) if model is None else (model, None)
    try:
        trainer = Trainer(
            model=model,
            args=arguments,
            peft_config=adapters,
            ac=ac,
            train_dataset=data,
            eval_dataset=held_out,
            processing_class=tokenizer,
        )
    except Exception as error:  # a chat template is a program: it raises any error
        # `data` may be a shuffled part of the file.
        whole = open_samples("--data", options.data, FORMS)
        reason = bad_sample(options.data, whole, FORMS, options.train_on == "assistant")
        if reason:
            raise ValueError(f"--data is {options.data!r}: {reason}") from error
        if isinstance(error, ValueError):
            way_out = " Or give --train-on all, or samples with prompt and completion."
            raise ValueError(f"{error}{way_out if 'template' in str(error) else ''}") from error
        reason = " ".join(str(error).split())
        raise ValueError(f"--data is {options.data!r}, which TRL cannot prepare: {reason}") from error
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    trainer.add_callback(StepLines)
    return trainer


@contextmanager
def _opening(options: FinetuneOptions) -> Iterator[None]:
    """Turn errors of transformers into ValueError, in a line."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"--model is {options.model!r}, which transformers cannot open: {reason}") from error


def _load_model(options: FinetuneOptions, **how: Any) -> tuple[Any, Any]:
    """Return the model, with the parameters that train chosen, and the adapters to put into it."""
    half = options.precision == "bfloat16"
    if options.qlora:
        require("bitsandbytes", "qlora", "for --qlora")
        stored = _stored(options)
        how["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=stored, bnb_4bit_quant_storage=stored
        )
    # Trained parameters are float32, which the optimizer works on; frozen ones have the dtype to compute in.
    dtype = torch.bfloat16 if half and options.lora else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype, **how)
    if not options.lora:
        return model, None
    names = [name.strip() for name in options.lora_targets.split(",")]
    return model, peft.LoraConfig(
        target_modules="all-linear" if names == ["all-linear"] else names,
        task_type="CAUSAL_LM",
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
    )


def _stored(options: FinetuneOptions) -> torch.dtype:
    """Return the dtype that weights of 4 bits are packed into: FSDP2 shards only parameters of one dtype."""
    return torch.bfloat16 if options.precision == "bfloat16" else torch.float32


def check_widths(options: FinetuneOptions, **how: Any) -> None:
    """Raise ValueError if a linear's weights of 4 bits do not fill the numbers that they are packed into."""
    with _opening(options), torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(options.model, **how)
        model = transformers.AutoModelForCausalLM.from_config(config, **how)
    stored = _stored(options)
    in_one, head = 2 * stored.itemsize, model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and module is not head and module.weight.numel() % in_one:
            shape = " x ".join(map(str, module.weight.shape))
            raise ValueError(
                f"--qlora stores {in_one} weights of 4 bits in a number of {dtype_word(stored)}, and {name!r} has {shape}, "
                f"which {in_one} does not divide. Use --lora."
            )


def _fitted(options: FinetuneOptions, trainer: Any) -> tuple[FinetuneOptions, Any]:
    """Return the options that are the fastest by prediction for the same samples a step, and the plan of ``ac``."""
    (model, job), ranks = trainer.planned_job(), launch.world_size()
    pins: dict[str, Any] = {flag.name: [getattr(job.fsdp or FSDP2(), flag.name)] for flag in SHARDING}
    report = fit(
        model,
        gpus=ranks,
        gpu=device_at_hand(trainer.args.device.type),
        memory=options.fit_memory,
        tp=1,
        cp=options.cp,
        ep=1,
        pp=1,
        precision=job.precision,
        step=job.step,
        optimizer=job.step.optimizer,
        compile="none",
        loss="model",
        offload=options.offload,
        seq_len=largest_batch(trainer, 1)["input_ids"].shape[1],
        global_batch=options.batch_size * options.grad_accum * ranks // options.cp,
        sample=lambda rows: call_of_model(trainer, largest_batch(trainer, rows)),
        count=1,
        **pins,
    )
    if not report.candidates:
        raise ValueError(f"--fit: {report.problem}")
    best = report.best
    sizes: dict[str, Any] = {"batch_size": best.layout.micro_batch, "grad_accum": best.layout.grad_accum}
    chosen = replace(options, **sizes, ac=best.ac if best.plan is None else options.ac)
    if is_rank_zero():
        print("--fit chose", f"--ac {best.ac}", *(as_flag(name, size) for name, size in sizes.items()), flush=True)
    return chosen, best.plan


def save_result(trainer: Any, options: FinetuneOptions) -> None:
    """Write the trained weights, whole, to ``OUTPUT/adapter`` or ``OUTPUT/model``. A collective."""
    state, output = trainer.accelerator.get_state_dict(trainer.model), Path(options.output)
    if not trainer.is_world_process_zero():
        return
    how, tokenizer = {"trust_remote_code": options.trust_remote_code}, trainer.processing_class
    stored = None if options.lora else transformers.AutoConfig.from_pretrained(options.model, **how).dtype
    model, folder = trainer.accelerator.unwrap_model(trainer.model), output / ("adapter" if options.lora else "model")
    model.config.use_cache = True  # training switched it off

    def write(target: Path) -> None:
        if stored is None:
            model.save_pretrained(target, state_dict=state)
        else:
            model.save_pretrained(target, state_dict={name: tensor.to(stored) for name, tensor in state.items()})
            model.config.dtype = stored  # else it names that of training
            model.config.save_pretrained(target)
        tokenizer.save_pretrained(target)

    replace_folder(folder, write)
    if options.merge:
        base = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype="auto", **how)
        merged, folder = peft.PeftModel.from_pretrained(base, str(folder)).merge_and_unload(), output / "model"
        replace_folder(folder, lambda target: (merged.save_pretrained(target), tokenizer.save_pretrained(target)))
    print(f"The result is in {folder}.", flush=True)


if __name__ == "__main__":
    from torch.distributed.elastic.multiprocessing.errors import record

    sys.exit(record(main)())  # torchrun then shows the first failing rank's traceback in its own summary
