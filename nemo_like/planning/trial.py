"""Refuse a split that structure allows and a line of the forward does not: try it on tensors without values.

A copy of the model without weights is run as one rank would run it, and where that fails, whole. A model that fails
whole, too (for want of values, or of the right input), says nothing about the split.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from nemo_like._util.module_tree import base_model
from nemo_like._util.tensors import split_sample, tensors_in
from nemo_like.distributed.context import cut_for_planning
from nemo_like.distributed.context.methods import method_of
from nemo_like.fake.model_copy import call_with, model_copy
from nemo_like.fake.reasons import in_place
from nemo_like.fake.run import FakeRun, cache_off, call_flags
from nemo_like.job import Job
from nemo_like.layers import Layer, find_layers
from nemo_like.losses.model_loss import LABELS
from nemo_like.options import ContextParallel, TensorParallel
from nemo_like.planning.tensor_twin import UnknownStyleError, known_rules, tensor_twin
from nemo_like.torch_compat import TorchDispatchMode, quiet_fake_tensors

_TOKENS = 8
"""Of a sample, for each rank."""


def try_split(model: nn.Module, job: Job, layers: Sequence[Layer], whole: Collection[str], sample_input: Any) -> None:
    """Raise ValueError where `model` runs whole, and fails as ``cp`` or ``tp`` of `job` split it.

    Args:
        model: bare; not changed.
        layers: of `model`.
        whole: names of modules that the plan of ``tp`` is not followed in.
        sample_input: what `model` is called with; None: a transformers model's own dummy inputs. Without any, nothing
            is tried.
    """
    if job.cp.size > 1:
        try_context_parallel(model, job.cp, layers, sample_input)
    if job.tp.size > 1:
        try_tensor_parallel(model, job.tp.size, job.tp, whole, sample_input)


def try_context_parallel(
    model: nn.Module, options: ContextParallel, layers: Sequence[Layer], sample_input: Any = None
) -> None:
    """Raise ValueError where `model` runs on whole sequences, and fails on parts of them.

    Args:
        model: bare; not changed.
        options, layers: as for `nemo_like.distributed.context.check_context_parallel`, which comes first.
        sample_input: what `model` is called with; None: a transformers model's own dummy inputs. Without any, nothing
            is tried.
    """
    # What fails on parts shows with any method, and some can send on fake tensors.
    options = options if method_of(options.method).planned else ContextParallel(options.size)
    twin, sample = _copied(model), _sample(model, sample_input, options.size)
    if twin is None or sample is None:
        return
    with cut_for_planning(twin, options, find_layers(twin, [layer.fqn for layer in layers])):
        error = _failure(twin, sample)
    if sample_input is None and error is not None and _is_ours(error):
        return  # it asks for arguments that the dummies lack, and says so in the call
    if error is not None and _runs_whole(model, sample):
        raise ValueError(
            f"cp={options.size} cannot cut the sequences of this {type(base_model(model)).__name__}: its forward runs on "
            f"whole sequences and fails on parts ({in_place(error)}), because it computes there with something of the whole "
            "sequence. Use cp=1."
        ) from error


def try_tensor_parallel(
    model: nn.Module, ranks: int, options: TensorParallel, whole: Collection[str] = (), sample_input: Any = None
) -> None:
    """Raise ValueError where `model` runs with whole weights, and fails with one rank's part of them.

    A weight that the plan cuts and that is read outside of its module's own forward counts as a failure: there it is a
    DTensor among plain tensors.

    Args:
        model, sample_input: as for `try_context_parallel`.
        ranks: of ``tp``.
        options: with the plan.
        whole: names of modules that the plan is not followed in.
    """
    twin, sample = _copied(model), _sample(model, sample_input, ranks)
    if twin is None or sample is None:
        return
    if options.loss_parallel:  # the loss of logits that stay cut is torch's
        sample = sample[0], {name: value for name, value in sample[1].items() if name not in LABELS}
    try:
        rules = known_rules(twin, ranks, options.plan, whole, exact=False)
        part = tensor_twin(
            twin,
            ranks,
            options.plan,
            whole,
            sequence_parallel=options.sequence_parallel,
            loss_parallel=options.loss_parallel,
        )
    except UnknownStyleError:
        return  # what a rank runs under that style is not known here
    watch = _OutsideReads(part, [rule.fqn for rule in rules if rule.parameter is None])
    error = _failure(part, sample, watch)
    if error is not None and _runs_whole(model, sample):
        raise ValueError(
            f"tp={ranks} cannot split this {type(base_model(model)).__name__} by its plan: its forward runs with whole "
            f"weights and fails with a part of them ({in_place(error)}). Give TensorParallel a plan= that leaves whole what "
            "fails, or use tp=1."
        ) from error


class _OutsideReads(TorchDispatchMode):
    """Look whether the weight of one of the modules `names` is computed with outside of that module's forward."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.found: str | None = None
        """The weight."""
        self._names = {f"{name}.weight": name for name in names}
        self._inside: list[str] = []
        self._weights: dict[int, str] = {}
        for name in names:
            module = model.get_submodule(name)
            module.register_forward_pre_hook(lambda *_, name=name: self._inside.append(name))
            module.register_forward_hook(lambda *_: self._inside.pop() and None)

    def watch(self, state: Mapping[str, Tensor]) -> None:
        """Look for the weights among `state`."""
        self._weights = {id(tensor.untyped_storage()): name for name, tensor in state.items() if name in self._names}
        self._alive = [tensor.untyped_storage() for name, tensor in state.items() if name in self._names]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._inside:
            for tensor in tensors_in((args, kwargs or {})):
                self.found = self._weights.get(id(tensor.untyped_storage()), self.found)
        return func(*args, **(kwargs or {}))


def _runs_whole(model: nn.Module, sample: tuple[tuple, dict[str, Any]]) -> bool:
    twin = _copied(model)
    return twin is not None and _failure(twin, sample) is None


def _failure(
    twin: nn.Module, sample: tuple[tuple, dict[str, Any]], watch: _OutsideReads | None = None
) -> Exception | None:
    """What the forward of `twin` raises; None: it runs."""
    with cache_off(twin), FakeRun(model=twin) as run, quiet_fake_tensors(), contextlib.ExitStack() as stack:
        state = run.state(twin)
        args, kwargs = run.sample(sample)
        if watch is not None:
            watch.watch(state)
            stack.enter_context(watch)
        try:
            call_with(twin, state, args, call_flags(twin, args, kwargs))
        except Exception as error:  # noqa: BLE001  (whatever a model's own code raises)
            return error
    if watch is not None and watch.found is not None:
        return RuntimeError(f"{watch.found} is read outside of its module's own forward")
    return None


def _copied(model: nn.Module) -> nn.Module | None:
    """A copy of `model`; None where a parameter is of a class of its own."""
    if any(type(p) is not nn.Parameter or type(p.data) is not Tensor for p in model.parameters()):
        return None
    return model_copy(model)


def _sample(model: nn.Module, given: Any, ranks: int) -> tuple[tuple, dict[str, Any]] | None:
    """What to call `model` with, on `ranks` that share it; None where it is not known."""
    if given is not None:
        return split_sample(given)
    inner: Any = base_model(model)
    if getattr(inner, "main_input_name", None) != "input_ids":
        return None
    length = _TOKENS * ranks  # the dummies are too few to be given to several ranks
    made = {name: value for name, value in inner.dummy_inputs.items() if isinstance(value, Tensor)}
    return (), {name: value.repeat(1, -(-length // value.shape[1]))[:, :length] for name, value in made.items()}


def _is_ours(error: Exception) -> bool:
    """Whether this package raised `error`, with its own words."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return frames[-1].f_globals.get("__name__", "").startswith(f"{__name__.partition('.')[0]}.distributed.")
