"""The options of a step that is planned: the model, the job, the input; and the trace of it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from nemo_like._util.console import refuse_unread, whole_or
from nemo_like.commands import FOUR_BIT, LORA, MODEL, STORED, VOCAB_SIZE, WITHOUT_LORA
from nemo_like.flags import BATCH_SIZE, FLAGS, PRECISION, SEQ_LEN, flags_of, flags_on, job_of, options_of
from nemo_like.options import FLOAT8, normalise, parse_dtype

if TYPE_CHECKING:  # the options are needed without torch and the planner
    from nemo_like.job import Job
    from nemo_like.models import ModelSource
    from nemo_like.planning.model.inputs import ModelInput
    from nemo_like.planning.query import PlanQuery
    from nemo_like.planning.report import Step

JOB_FLAGS = flags_on("plan")


OPTIONS: dict[str, dict[str, Any]] = {
    "--model": MODEL,
    **options_of(JOB_FLAGS, precision=PRECISION),
    "--gpus": {
        "dest": "world_size",
        "group": "parallelism",
        "type": whole_or("min"),
        "least": 1,
        "default": FLAGS["world_size"].default,
        "help": "how many there are; min: the fewest that fit (default: %(default)s)",
    },
    "--seq-len": {
        "type": whole_or("max"),
        "least": 1,
        "default": SEQ_LEN,
        "help": "tokens per sequence; max: the most that fit (default: %(default)s)",
    },
    "--batch-size": {
        "type": whole_or("max"),
        "least": 1,
        "default": BATCH_SIZE,
        "help": "sequences per rank and micro-batch; max: the most that fit (default: %(default)s)",
    },
    "--input-shape": {"help": "shape of a float input, such as 2,3,224,224, for a model that takes no tokens"},
    "--images": {
        "type": int,
        "least": 0,
        "default": 1,
        "help": "pictures per sequence, for a model that takes some (default: %(default)s)",
    },
    "--image-size": {"type": int, "least": 1, "help": "pixels per side of a picture (default: the config's, or 448)"},
    "--audio-seconds": {
        "type": float,
        "least": 0,
        "help": "of a sound per sequence, for a model that takes some (default: as many as its config "
        "has positions for, or 30); 0: none",
    },
    "--vocab-size": {"type": int, "least": 1, "help": VOCAB_SIZE},
    "--dtype": STORED,
    "--lora": {"type": int, "least": 1, "metavar": "RANK", "help": LORA},
    "--four-bit": FOUR_BIT,
}
"""The options of a step."""


def check_step_options(args: argparse.Namespace) -> None:
    """Raise ValueError for an option that nothing reads."""
    alone = args.pp == 1
    for unread, names, why in (
        (alone, flags_of("pp"), "without --pp above 1 there is no pipeline."),
        (alone and args.grad_accum == 1, ["sync"], "of one micro-batch there is no other. Give --grad-accum too."),
        (
            alone and args.world_size == 1 and not args.on_one_rank,
            flags_of("strategy"),
            "one rank keeps the model whole. Give --gpus too, or --on-one-rank.",
        ),
        (args.cp == 1, flags_of("cp"), "without --cp above 1 every rank has whole sequences."),
        (args.lora is None, ["four_bit"], WITHOUT_LORA),
    ):
        if unread:
            refuse_unread(args, names, why)
    refuse_host_memory(args)
    if args.input_shape:
        refuse_unread(
            args,
            ["batch_size", "seq_len", "images", "image_size", "audio_seconds", "vocab_size"],
            "--input-shape is the whole input.",
        )


def refuse_host_memory(args: argparse.Namespace) -> None:
    """Raise ValueError for ``--host-memory`` where all flags that move tensors to CPU memory are given as off."""
    moving = [flag for flag in FLAGS.values() if flag.moves]
    given = [(flag, value if isinstance(value := getattr(args, flag.name), list) else [value]) for flag in moving]
    if all({normalise(each) if isinstance(each, str) else each for each in of} == {flag.default} for flag, of in given):
        refuse_unread(args, ["host_memory"], f"that takes {' or '.join(flag.word for flag in moving)}.")


def asked_job(args: argparse.Namespace) -> Job:
    """Return the job that the flags ask about.

    Raises:
        ValueError: a wrong value, or a flag that a pipeline's plans do not know.
    """
    flags = {name: getattr(args, name) for name in (*JOB_FLAGS, "world_size")}
    if args.pp > 1:
        for name, value in flags.items():
            if not FLAGS[name].stages and value != FLAGS[name].default:
                raise ValueError(f"{FLAGS[name].word} with --pp is not planned. Leave one of the two out.")
    stored, compute = parse_dtype("--dtype", args.dtype), flags["precision"]
    if compute not in FLOAT8 and parse_dtype("--precision", compute) == stored and flags["reduce_dtype"] is None:
        flags["precision"] = None  # a dtype that the parameters have anyway is not a cast
    return job_of(flags, ac="none")


def traced_step(args: argparse.Namespace, source: ModelSource, job: Job) -> tuple[PlanQuery, Step, ModelInput]:
    """Return the query of `job`, the step that it is of, and its input, for the model of `source`."""
    from nemo_like.commands import plan_inputs
    from nemo_like.planning.model.traced import with_adapters
    from nemo_like.planning.planner import query_of

    dtype = parse_dtype("--dtype", args.dtype)
    model, source = source.built("meta", dtype)
    if args.lora is not None:
        model = with_adapters(model.train(), args.lora, job.param_dtype or dtype, four_bit=args.four_bit)
    query, inputs = plan_inputs.query_with_inputs(lambda sample: query_of(model, sample, job), model, source, args)
    return query, plan_inputs.step_of(query, model, source, args), inputs
