"""The model as the first rank of ``tp`` and ``ep`` has it, to be run on tensors without values; and splits tried so."""

import functools
import traceback
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, nn

from nemo_like._util.log import quiet
from nemo_like._util.module_tree import base_model
from nemo_like._util.tensors import split_sample
from nemo_like.distributed.context import cut_for_planning
from nemo_like.distributed.context.methods import METHODS
from nemo_like.distributed.expert.split_experts import (
    Experts,
    check_experts,
    make_expert_mesh,
    split_experts,
)
from nemo_like.distributed.tensor.apply import apply_tensor_parallel, edges, set_edges_aside
from nemo_like.fake.model_copy import call_with, copy_on_meta, model_copy
from nemo_like.fake.ranks import fake_mesh
from nemo_like.fake.reasons import in_place
from nemo_like.fake.run import FakeRun, cache_off, call_flags
from nemo_like.job import Job
from nemo_like.layers import Layer, find_layers
from nemo_like.options import ContextParallel, ExpertParallel, TensorParallel
from nemo_like.torch_compat import FAKE_LOGGER, under_loss_parallel


def first_rank(
    model: nn.Module,
    tp: TensorParallel,
    ep: ExpertParallel = ExpertParallel(),
    whole: Collection[str] = (),
    ends: tuple[bool, bool] = (True, True),
) -> tuple[nn.Module, tuple[Experts, ...]]:
    """A copy of `model` with one rank's part of the weights, on the meta device, and its experts, if `ep` splits them.

    Its buffers are the model's. The cuts of sequence parallelism where stacks of layers begin and end act within
    `nemo_like.distributed.tensor.apply.edges`. `whole`: names of modules that the plan of `tp` is not followed in, besides
    experts that `ep` splits. `ends`: as for `apply_tensor_parallel`.

    Raises:
        ValueError: as `apply_tensor_parallel` and `check_experts`.
    """
    mine, (ranks, mesh) = copy_on_meta(model), fake_mesh(dp_shard=ep.size, tp=tp.size)
    experts: tuple[Experts, ...] = ()
    with ranks:
        if ep.size > 1:
            experts = check_experts(mine, mesh, ep)
        if tp.size > 1:
            apply_tensor_parallel(
                mine,
                mesh["tp"],
                tp.plan,
                sequence_parallel=tp.sequence_parallel,
                loss_parallel=tp.loss_parallel,
                whole=[*whole, *(expert.fqn for expert in experts)],
                ends=ends,
            )
        if experts:
            split_experts(mine, experts, _expert_mesh(mesh, ep.size))
    set_edges_aside(mine)
    return mine, experts


_expert_mesh = functools.cache(make_expert_mesh)


# Refuse a split that structure allows and a line of the forward does not: try it on tensors without values.
#
# A copy of the model without weights is run as one rank would run it, and where that fails, whole. A model that fails
# whole, too (for want of values, or of the right input), tells nothing about the split.


_TOKENS = 8  # The length of a sample, for each rank.


def try_split(model: nn.Module, job: Job, layers: Sequence[Layer], whole: Collection[str], sample_input: Any) -> None:
    """Raise ValueError where `model` runs whole, and fails as ``cp`` or ``tp`` of `job` split it.

    Args:
        model: bare; not changed.
        layers: of `model`.
        whole: names of modules that the plan of ``tp`` is not followed in.
        sample_input: the arguments of `model`; None: a transformers model's own dummy inputs. Without any, nothing
            is tried.
    """
    if job.cp.size > 1:
        try_context_parallel(model, job.cp, layers, sample_input)
    if job.tp.size > 1:
        try_tensor_parallel(model, job.tp, whole, sample_input)


def try_context_parallel(
    model: nn.Module, options: ContextParallel, layers: Sequence[Layer], sample_input: Any = None
) -> None:
    """Raise ValueError where `model` runs on whole sequences, and fails on parts of them.

    Args:
        model: bare; not changed.
        options, layers: as for `nemo_like.distributed.context.check_context_parallel`, which comes first.
        sample_input: the arguments of `model`; None: a transformers model's own dummy inputs. Without any, nothing
            is tried.
    """
    # A method without masks would only report of a layer's own mask that it has none.
    options = options if METHODS[options.method].takes_masks else ContextParallel(options.size)
    copied, sample = _copied(model), _sample(model, sample_input, options.size)
    if copied is None or sample is None:
        return
    with cut_for_planning(copied, options, find_layers(copied, [layer.fqn for layer in layers])):
        error = _failure(copied, sample)
    if sample_input is None and error is not None and _is_ours(error):
        return  # it requires arguments that the dummies lack, and reports that in the call
    if error is not None and _runs_whole(model, sample):
        raise ValueError(
            f"cp={options.size} cannot cut the sequences of this {type(base_model(model)).__name__}: its forward runs on "
            f"whole sequences and fails on parts ({in_place(error)}), because it computes there with something of the whole "
            "sequence. Use cp=1."
        ) from error


def try_tensor_parallel(
    model: nn.Module, options: TensorParallel, whole: Collection[str] = (), sample_input: Any = None
) -> None:
    """Raise ValueError where `model` runs with whole weights, and fails with one rank's part of them.

    A weight that the plan cuts and that is read outside of its module's own forward fails: there it is a DTensor among plain
    tensors.

    Args:
        model, sample_input: as for `try_context_parallel`.
        options: the ranks, and the plan.
        whole: names of modules that the plan is not followed in.
    """
    copied, sample = _copied(model), _sample(model, sample_input, options.size)
    if copied is None or sample is None:
        return
    part, _ = first_rank(copied, options, whole=whole)
    with edges(part), under_loss_parallel(options.loss_parallel):
        error = _failure(part, sample)
    if error is not None and _runs_whole(model, sample):
        raise ValueError(
            f"tp={options.size} cannot split this {type(base_model(model)).__name__} by its plan: its forward runs with "
            f"whole weights and fails with a part of them ({in_place(error)}). Give TensorParallel a plan= that leaves "
            f"the failing module whole, {'leave sequence_parallel off, ' if options.sequence_parallel else ''}or use "
            "tp=1."
        ) from error


def _runs_whole(model: nn.Module, sample: tuple[tuple, dict[str, Any]]) -> bool:
    copied = _copied(model)
    return copied is not None and _failure(copied, sample) is None


def _failure(model: nn.Module, sample: tuple[tuple, dict[str, Any]]) -> Exception | None:
    """Return the error that the forward of `model` raises; None: it runs."""
    with cache_off(model), FakeRun(model=model) as run, quiet(FAKE_LOGGER):
        state = run.state(model)
        args, kwargs = run.sample(sample)
        try:
            call_with(model, state, args, call_flags(model, args, kwargs))
        except Exception as error:  # noqa: BLE001  (whatever a model's own code raises)
            return error
    return None


def _copied(model: nn.Module) -> nn.Module | None:
    """A copy of `model`; None where a parameter is of a class of its own."""
    if any(type(p) is not nn.Parameter or type(p.data) is not Tensor for p in model.parameters()):
        return None
    return model_copy(model)


def _sample(model: nn.Module, sample_input: Any, ranks: int) -> tuple[tuple, dict[str, Any]] | None:
    """Return arguments of `model`, on `ranks` that share it; None where they are not known."""
    if sample_input is not None:
        return split_sample(sample_input)
    inner: Any = base_model(model)
    if getattr(inner, "main_input_name", None) != "input_ids":
        return None
    length = _TOKENS * ranks  # the dummies are too few to be given to several ranks
    dummies = {name: value for name, value in inner.dummy_inputs.items() if isinstance(value, Tensor)}
    return (), {name: value.repeat(1, -(-length // value.shape[1]))[:, :length] for name, value in dummies.items()}


def _is_ours(error: Exception) -> bool:
    """Return whether this package raised `error`, with its own words."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return frames[-1].f_globals.get("__name__", "").startswith(f"{__name__.partition('.')[0]}.distributed.")
