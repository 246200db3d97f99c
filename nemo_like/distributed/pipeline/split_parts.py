"""A model in stages that a function of the caller's makes (``PipelineParallel(split=...)``): checked, and run on fake
tensors for what the stages send each other."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like._util.tensors import split_sample
from nemo_like.distributed.pipeline.cut import Received, StageEnd, loss_of
from nemo_like.distributed.pipeline.dealing import StageSlice, TensorForm, slices
from nemo_like.fake.model_copy import model_copy
from nemo_like.fake.reasons import STAGES
from nemo_like.fake.run import FakeRun, cache_off, run_forward
from nemo_like.layers import Layer

Split = Callable[[nn.Module, int, int], nn.Module]
_ARGUMENT = "PipelineParallel.split"


class SplitCall:
    """What stands in the place of the forward of a caller's stage: it is called with a whole microbatch, by keyword."""

    def __init__(self, stage: nn.Module, received: Received, piece: StageSlice) -> None:
        self._forward, self._received, self._piece = stage.forward, received, piece
        parameters = list(inspect.signature(stage.forward).parameters.values())
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._names = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]

    def __call__(self, **batch: Any) -> Any:
        """What the last stage returns; the others end with `StageEnd`."""
        output = self.run(self._received.tensors, batch)
        if self._piece.is_last:
            return output
        raise StageEnd(output)

    def run(self, given: tuple[Tensor, ...], batch: Mapping[str, Any]) -> Any:
        """The stage's forward, of what the stage before sent and what it names of a microbatch.

        Raises:
            ValueError: a first stage that names nothing of it; a stage that returns what can't be sent.
        """
        taken, free = self._names[: len(given)], self._names[len(given) :]
        own = {k: v for k, v in batch.items() if k in free or (self._takes_all and k not in taken)}
        if self._piece.is_first and not own:
            raise ValueError(
                f"{_ARGUMENT}: the first stage's forward takes {', '.join(self._names) or 'nothing'}, and a microbatch has "
                f"{', '.join(batch)}. Name its arguments as the batch does."
            )
        output = self._forward(*given, **own)
        if self._piece.is_last:
            return output
        tensors = output if isinstance(output, tuple) else (output,)
        if not tensors or not all(isinstance(t, Tensor) and t.is_floating_point() for t in tensors):
            kinds = ", ".join(str(t.dtype) if isinstance(t, Tensor) else type(t).__name__ for t in tensors)
            raise ValueError(
                f"{_ARGUMENT}: stage {self._piece.index} returns {kinds or 'nothing'}. A stage sends one floating-point "
                "tensor or a tuple of them, through which gradients come back; what else the next one needs, it takes by "
                "name from the microbatch."
            )
        sent = tuple(t.contiguous() for t in tensors)
        return sent if isinstance(output, tuple) else sent[0]


class SplitParts:
    """The stages that ``split=`` made of a model, and what they send each other."""

    def __init__(
        self, model: nn.Module, split: Split, stages: int, layers: Sequence[Layer], sample_input: Any, *,
        dtype: torch.dtype | None = None, autocast: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """Call `split` for every stage, check what it returns, and run all of them on fake tensors.

        Args:
            model: bare, on any device; not changed.
            split: as in `PipelineParallel`.
            stages: how many.
            layers: of the whole model, from `find_layers`.
            sample_input: one microbatch: what `model` is called with.
            dtype, autocast: as for `nemo_like.distributed.pipeline.stage_parts.stage_parts`.

        Raises:
            ValueError: stages that are not this model's, or that do not run.
        """
        self._dtype, self._autocast = dtype, autocast
        trees = self._trees = [_stage_of(model, split, index, stages) for index in range(stages)]
        self.tied, self.aliases = _shared(model, trees)
        dealt = [_layers_in(tree, index, layers) for index, tree in enumerate(trees)]
        self.layers = tuple(chain.from_iterable(dealt))
        self.slices = slices([len(names) for names in dealt])
        self._twins = list(model_copy(nn.ModuleList(trees)).children())
        for twin, piece in zip(self._twins, self.slices):
            twin.forward = SplitCall(twin, Received(), piece).run
        self._forms: dict[Any, list[tuple[TensorForm, ...]]] = {}
        args, batch = split_sample(sample_input)
        self.sent(0, dict(zip(inspect.signature(model.forward).parameters, args)) | dict(batch), 0, 0)

    def take(self, index: int) -> tuple[nn.Module, Received]:
        """A stage's own tree of modules, and where it looks for what it was sent."""
        tree, received = self._trees[index], Received()
        tree.forward = SplitCall(tree, received, self.slices[index])
        return tree, received

    def forget_weights(self) -> None:
        """Let go of the stages; what they send is known without their weights."""
        self._trees = []

    def sent(self, stage: int, microbatch: Mapping[str, Any], rows: int, tokens: int) -> tuple[TensorForm, ...]:
        """As `StagesOfModel.sent`; found by running the stages on fake tensors, once for each shape of a microbatch."""
        key = tuple((name, v.shape, v.dtype) for name, v in microbatch.items() if isinstance(v, Tensor))
        if key not in self._forms:
            self._forms[key] = self._run(microbatch)
        return self._forms[key][stage]

    def passing(self, layer: int) -> None:
        """As `StagesOfModel.passing`: what a caller's stage gives to its layers is not known."""

    def _run(self, microbatch: Mapping[str, Any]) -> list[tuple[TensorForm, ...]]:
        forms = []
        given: tuple[Tensor, ...] = ()
        with FakeRun(self._autocast, model=nn.ModuleList(self._twins)) as run:
            batch = run.sample(dict(microbatch), self._dtype)
            for twin in self._twins:
                with cache_off(twin), run.casting():
                    output = run_forward(twin, run.state(twin, self._dtype), (given, batch), {}, STAGES)
                if twin is self._twins[-1]:
                    loss_of(output)
                    break
                given = output if isinstance(output, tuple) else (output,)
                forms.append(tuple(TensorForm(tuple(t.shape), t.dtype) for t in given))
        return forms


def _stage_of(model: nn.Module, split: Split, index: int, stages: int) -> nn.Module:
    """What `split` returns for a stage, of which all that would be saved must be the model's own, under its name."""
    tensors = chain(model.parameters(), model.buffers())
    tree = split(copy.deepcopy(model, {id(tensor): tensor for tensor in tensors}), index, stages)
    if not isinstance(tree, nn.Module):
        raise ValueError(f"{_ARGUMENT} returned {tree!r} for stage {index} of {stages}; it must be an nn.Module.")
    whole = model.state_dict(keep_vars=True)
    names = {id(tensor): name for name, tensor in reversed(whole.items())}
    for name, tensor in tree.state_dict(keep_vars=True).items():
        if whole.get(name) is tensor or not isinstance(tensor, Tensor):
            continue
        found = names.get(id(tensor))
        reason = (
            "is none of the model's: give stages the model's own tensors, no copies of them"
            if found is None
            else f"is the model's {found!r}: keep that name, or no checkpoint of the whole model fits. An "
            f"nn.ModuleDict({{'2': layers[2]}}) keeps the numbers of a list"
        )
        raise ValueError(f"{_ARGUMENT}: {name!r} of stage {index} {reason}.")
    return tree


def _shared(model: nn.Module, trees: Sequence[nn.Module]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The parameters that the first and the last stage both have, and the other names that these stages have for them.

    Raises:
        ValueError: a parameter that no stage has, or one that two other stages have.
    """
    holders: dict[int, list[int]] = {id(p): [] for p in model.parameters()}
    for index, tree in enumerate(trees):
        for parameter in tree.parameters():
            holders[id(parameter)].append(index)
    first_names = {id(p): name for name, p in model.named_parameters()}
    tied: list[str] = []
    aliases: dict[str, str] = {}
    for key, stages in holders.items():
        if not stages:
            raise ValueError(
                f"{_ARGUMENT}: no stage has {first_names[key]!r}. Give it to one of the {len(trees)} stages, or delete it "
                "from the model."
            )
        if len(stages) > 1 and stages != [0, len(trees) - 1]:
            raise ValueError(
                f"{_ARGUMENT}: {first_names[key]!r} is in stages {', '.join(map(str, stages))}. A parameter is one "
                f"stage's, or the first and the last one's (0 and {len(trees) - 1}), which add up its gradients."
            )
        if len(stages) > 1:
            tied.append(first_names[key])
    for tree in (trees[0], trees[-1]):
        names = {name: first_names[id(p)] for name, p in tree.named_parameters(remove_duplicate=False)}
        aliases |= {name: first for name, first in names.items() if first in tied and name != first}
    return tuple(sorted(tied)), aliases


def _layers_in(tree: nn.Module, index: int, layers: Sequence[Layer]) -> list[str]:
    names = {name for name, _ in tree.named_modules()}
    found = [layer.fqn for layer in layers if layer.fqn in names]
    if not found:
        raise ValueError(
            f"{_ARGUMENT}: stage {index} has none of the model's layers ({layers[0].fqn}, ...). Give it one, or say with "
            "layers= what is to be checkpointed and sharded as one."
        )
    return found
