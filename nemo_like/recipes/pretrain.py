"""Train a decoder on text: ``python -m nemo_like.recipes.pretrain``, or the same under torchrun.

    torchrun --nproc-per-node 2 -m nemo_like.recipes.pretrain --steps 200

The same options give the same run on any number of ranks, up to the order of sums: the batch size is that of all ranks
together, and weights and data order depend on the seed alone. A run resumed on the same number of ranks repeats the
uninterrupted one bitwise where the device's kernels are deterministic, as they are on a CPU.
"""

import contextlib
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

from nemo_like._util.console import start_logging
from nemo_like._util.extras import MissingExtraError, require
from nemo_like._util.json_file import replace_folder, write_json
from nemo_like._util.live_bytes import memory_peak
from nemo_like._util.option_fields import parse_options
from nemo_like._util.rng import seed_all
from nemo_like.distributed import get_model_state, launch
from nemo_like.distributed.ranks import OtherRankError, Ranks
from nemo_like.distributed.weights.checkpoints import CheckpointError, writing
from nemo_like.distributed.weights.sources import CheckpointUnreadableError
from nemo_like.models import ModelSource, resolve_model
from nemo_like.options.parallel import undivided
from nemo_like.recipes.auto import MemoryRanOutError
from nemo_like.recipes.data import END, VOCABULARY, as_tokens, load_text, train_bpe
from nemo_like.recipes.log import DivergedError
from nemo_like.recipes.loop import Pretraining
from nemo_like.recipes.options import PretrainOptions

BAD_INPUT = 2  # exit code; also for a loss that is no longer finite, and where memory runs out
_REPORTED = (
    *(ValueError, MissingExtraError, CheckpointError, CheckpointUnreadableError),
    *(DivergedError, OtherRankError, MemoryRanOutError),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job; the process's exit code, see `run`."""
    return run(parse_options(PretrainOptions, arguments))


def run(options: PretrainOptions) -> int:
    """Run the job on this rank; the process's exit code: 0, `BAD_INPUT`, or 128 + the signal that stopped it."""
    start_logging()
    try:
        # An error leaves through `joined`, which then waits for no other rank, and is reported outside of it.
        with joined(options) as ranks:
            return run_job(options.on(ranks.device.type), ranks)
    except _REPORTED as error:
        print(f"[rank {launch.rank()}] error: {error}", file=sys.stderr, flush=True)
        return BAD_INPUT
    except KeyboardInterrupt:
        print(f"[rank {launch.rank()}] interrupted outside of training", file=sys.stderr, flush=True)
        return 128 + signal.SIGINT


@contextlib.contextmanager
def joined(options: PretrainOptions) -> Iterator[Ranks]:
    """This process's `Ranks`, with the process group where a launcher started more than one rank."""
    launch.let_segments_grow(launch.pick_device_type() if options.device == "auto" else options.device)
    device = launch.init_distributed(None if options.device == "auto" else options.device)
    world_size, axes = launch.world_size(), {"tp": options.tp, "cp": options.cp, "pp": options.pp}
    try:
        sizes = {f"--{axis}": size for axis, size in axes.items() if size > 1}
        if problem := undivided(sizes, world_size, f"the {world_size} rank(s)"):
            raise ValueError(problem)
        yield Ranks.of_process(device, **axes)
    finally:
        launch.shutdown()


def run_job(options: PretrainOptions, ranks: Ranks) -> int:
    """Train, and write the result, unless a signal stopped the run, and the summary; the exit code. A collective.

    Raises (every rank alike):
        ValueError: an option does not fit the data, the model or the number of ranks.
        CheckpointError: there are checkpoints to resume from, and none can be read.
    """
    job = prepare(options, ranks)
    job.run()
    peaks = ranks.gather(memory_peak(ranks.device))
    if job.options.export is not None and not job.interrupted:
        _export(job)
    if options.json is not None:
        with ranks.together("writing the summary"), writing(options.json):
            if ranks.rank == 0:
                write_json(options.json, job.summary(peaks))
    return 128 + job.interrupted if job.interrupted else 0


def prepare(options: PretrainOptions, ranks: Ranks) -> Pretraining:
    """Return the job with its text and its model, ready to run. A collective; raises as `run_job`."""
    tokenizer = ""
    with ranks.together("reading the training text"):
        text = load_text(options.data)
    if options.tokenizer == "bpe":
        with ranks.together("training the tokenizer"):
            trained = train_bpe(text.train, options.vocab_size) if ranks.rank == 0 else ""
        tokenizer = ranks.from_first(trained)
        with ranks.together("reading the training text"):
            text = as_tokens(text, tokenizer)
    if ranks.any(ranks.from_first(text.fingerprint) != text.fingerprint):
        raise ValueError(
            f"The ranks see different training texts: {text.name} differs between nodes. Give all of them the same "
            "files with --data."
        )
    with ranks.together("building the model"):
        source = resolve_model(options.model)
        model = _build(source, options, tokenizer)
    return Pretraining(options, ranks, text, source, model, tokenizer)


def _build(source: ModelSource, options: PretrainOptions, tokenizer: str) -> nn.Module:
    """Return the model, with weights on the CPU, whatever the device: the same on each strategy and number of ranks."""
    if tokenizer:
        _set_vocabulary(source, json.loads(tokenizer))
    if source.vocab_size is not None and source.vocab_size < VOCABULARY:
        raise ValueError(
            f"Model {source.name!r} has {source.vocab_size} tokens; bytes need a vocab_size >= {VOCABULARY}."
        )
    seed_all(options.seed)
    model = source.build("meta" if options.init == "sharded" else "cpu", torch.float32)
    if options.export is not None and not hasattr(model, "save_pretrained"):
        raise ValueError(f"--export writes a folder of transformers, and {type(model).__name__} is not a model of it.")
    return model


def _set_vocabulary(source: ModelSource, tokenizer: dict[str, Any]) -> None:
    """Have the model built with as many tokens as the tokenizer has."""
    if source.config is None:
        raise ValueError(
            f"--tokenizer bpe sets the model's vocabulary, and {source.name!r} has no config to set it in."
        )
    config = source.config.get_text_config()
    config.vocab_size = len(tokenizer["model"]["vocab"])
    end = next(token["id"] for token in tokenizer["added_tokens"] if token["content"] == END)
    config.eos_token_id = config.pad_token_id = end
    config.bos_token_id = None


def _export(job: Pretraining) -> None:
    """Write the folder of ``--export``, which gets its name when it is complete. A collective."""
    options, pipeline = job.options, job.pipeline
    state = get_model_state(job.model, full=True) if pipeline is None else pipeline.full_state_dict()
    with job.ranks.together(f"writing {options.export}"), writing(str(options.export)):
        if job.ranks.rank:
            return
        model: Any = job.source.build("meta", torch.float32)

        def write(folder: Path) -> None:
            model.save_pretrained(str(folder), state_dict=state)
            if job.tokenizer:
                rebuilt = require("tokenizers", "finetune", "for --tokenizer bpe").Tokenizer.from_str(job.tokenizer)
                make = require("transformers", "finetune", "to export a tokenizer").PreTrainedTokenizerFast
                make(tokenizer_object=rebuilt, eos_token=END, pad_token=END).save_pretrained(str(folder))

        replace_folder(Path(str(options.export)), write)


if __name__ == "__main__":
    sys.exit(record(main)())  # torchrun then shows the first failing rank's traceback in its own summary
