"""Trace how a model calls its layers: one forward pass on fake tensors, in which each distinct block runs once.

Later layers of a kind are not run: they pass on tensors of the shape that the first one returned. So a model of 126 layers
is planned as quickly as one of two.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from torch import nn

from nemo_like._util.tensors import by_argument, describe, map_tensors, split_sample, tensors_in
from nemo_like._util.words import a_or_an
from nemo_like.activation_checkpointing.kv_sharing import has_kv_sharing
from nemo_like.distributed.expert.split_experts import experts_per_token, find_experts, has_experts, zero_rows_stay_zero
from nemo_like.distributed.tensor.apply import edges
from nemo_like.fake.reasons import named_reason
from nemo_like.fake.run import FakeRun, PlannedRouting, cache_off, call_flags, replaced_forwards, run_forward
from nemo_like.job import Job
from nemo_like.planning.trace.kinds import (
    GIVEN,
    BlockKind,
    ModelTrace,
    TracedCall,
    attributes_of,
    attributes_with_gradient,
    autocast_now,
    call_key,
    changed_since,
    contents_of,
    every_attribute,
    handed_on,
    read_of,
    record_again,
    recording,
    settings_of,
    trace_kind,
)
from nemo_like.torch_compat import tree_leaves
from nemo_like.transformers_compat import given_cache, parameter_names


def trace_model(
    model: nn.Module,
    layers: Sequence[Any],
    sample_input: Any,
    *,
    dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    cuda: tuple[int, int] | None = None,
    routing: PlannedRouting | None = None,
) -> ModelTrace:
    """Run `model` on fake tensors and trace each distinct block as the model calls it.

    Args:
        model: bare (not sharded, not compiled, not checkpointed); on any device, `meta` included. It is not changed.
        layers: its layers, as `nemo_like.layers.find_layers` returns them (objects with ``fqn`` and ``module``).
        sample_input: the input of one step of one rank: keywords, positions or one tensor. Only shapes, dtypes and the
            values of small integer tensors count.
        dtype: dtype of floating-point parameters in forward (FSDP2's ``param_dtype``); default: their own.
        autocast: run forward passes under autocast to this dtype; default: without.
        cuda: trace the operators of a GPU of this compute capability; default: those of the CPU.
        routing: how tokens go to experts, where these are split over ranks.

    Raises:
        ValueError: no layer was called, or a layer's behaviour cannot be traced without real values.
    """
    watcher, parts = _Watcher(model, layers), _parts(model)
    with cache_off(model), FakeRun(autocast, cuda, model) as run:
        run.routing = routing
        state = run.state(model, dtype)
        args, kwargs = run.sample(split_sample(sample_input), dtype)
        kwargs = call_flags(model, args, kwargs)
        with watcher.installed(state), run.casting(), edges(model):
            run_forward(model, state, args, kwargs)
        if late := sorted(_parts(model) - parts):
            raise ValueError(
                f"{type(model).__name__} makes {late[0]!r} in its first forward: a plan is made of parts that are there. "
                "Call the model once before it is planned, or make the part in __init__."
            )
        return watcher.finish(run, state, args, kwargs)


def _parts(model: nn.Module) -> set[str]:
    """Return the names of the model's modules and parameters."""
    return {name for name, _ in (*model.named_modules(), *model.named_parameters())}


@dataclass
class _Watcher:
    model: nn.Module
    layers: Sequence[Any]
    calls: list[TracedCall] = field(default_factory=list)
    kinds: list[BlockKind] = field(default_factory=list)
    _keys: dict[Any, int] = field(default_factory=dict)
    _uses: dict[int, set[int]] = field(default_factory=dict)
    _held: list[Any] = field(default_factory=list)
    _own: list[Any] = field(default_factory=list)  # Values that layers have set attributes to.

    def installed(self, state: Mapping[str, torch.Tensor]) -> AbstractContextManager[None]:
        """Replace each layer's forward by a watching one within the context; put it back at the end, also after an error."""
        run_all = has_kv_sharing(self.model)
        names = {id(module): name for name, module in self.model.named_modules(remove_duplicate=False)}
        return replaced_forwards(
            self.layers,
            lambda layer, forward: self._watch(layer, forward, names[id(layer.inner)], state, run_all),
        )

    def _watch(
        self, layer: Any, forward: Callable, name: str, state: Mapping[str, torch.Tensor], run_all: bool
    ) -> Callable:
        module = layer.inner
        prefix = name + "." if name else ""
        layer_state = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        settings = settings_of(module)
        names = parameter_names(forward)

        def watching(*args: Any, **kwargs: Any) -> Any:
            grad = torch.is_grad_enabled()
            self._refuse_cache(layer.fqn, given_cache(names, args, kwargs))
            self._refuse_hidden_graph(layer.fqn, (args, kwargs))
            before, history = every_attribute(module), attributes_with_gradient(module)
            given = {place: value for place, value in history.items() if not any(value is own for own in self._own)}
            key = (settings, call_key(args), call_key(kwargs), call_key([*given.values()]), grad, autocast_now())
            for tensor in tensors_in((args, kwargs, [*given.values()])):
                storage = tensor.untyped_storage()
                self._held.append(storage)
                self._uses.setdefault(id(storage), set()).add(len(self.calls))
            kind = self._keys.get(key)
            if kind is not None and not run_all:
                self.calls.append(TracedCall(layer.fqn, module, kind))
                record_again(module, map_tensors(_another, self.kinds[kind].records))
                known = self.kinds[kind]
                output = known.put(module, known.output_with(_another, args, known.call_of(module, kwargs)))
                self._own += attributes_of(module, known.left)
                return output
            position = len(self.calls)
            self.calls.append(TracedCall(layer.fqn, module, -1))
            saved, tensors = map_tensors(_leaf, (args, kwargs)), tensors_in((args, kwargs))
            versions = [t._version if t.requires_grad else None for t in tensors]
            sizes = {place: len(tensors_in(value)) for place, value in history.items()}
            contents = contents_of(before)
            with recording(module) as records:
                output = forward(*args, **kwargs)
            self._refuse_written(layer.fqn, tensors, versions)
            left = self._left(layer.fqn, module, before, sizes)
            self._refuse_iterator(layer.fqn, output)
            if not run_all:  # layers that share keys and values write them into an argument of all
                self._refuse_changed(layer.fqn, tensors, tensors_in((args, kwargs)))
            if kind is None:
                kind = self._keys[key] = len(self.kinds)
                with_all = (output, attributes_of(module, left)) if left else output
                read = read_of(with_all, tensors, {place: value for place, value in given.items() if place not in left})
                if read:
                    kwargs = kwargs | {GIVEN: [given[place] for place in read]}
                    saved[1][GIVEN] = map_tensors(_leaf, kwargs[GIVEN])
                passed = handed_on(with_all, args, kwargs)
                at_start = {
                    place: before[place] if place in left else value
                    for place, value in changed_since(contents, module).items()
                    if place in before or place not in left
                }
                self.kinds.append(
                    BlockKind(
                        module,
                        saved[0],
                        saved[1],
                        with_all,
                        layer_state,
                        records=records,
                        passed=passed,
                        grad=grad,
                        key=key,
                        left=left,
                        before=at_start,
                        given=read,
                        autocast=autocast_now(),
                    )
                )
            self.calls[position] = TracedCall(layer.fqn, module, kind)
            return output

        return watching

    def _refuse_cache(self, fqn: str, cache: str | None) -> None:
        if cache is not None and torch.is_grad_enabled():
            raise ValueError(
                f"{type(self.model).__name__} hands {fqn} a key/value cache ({cache}=) that it makes in every forward "
                "and cannot be told not to: recomputation would write it a second time, so no plan can be made. Use "
                "ac='none', or layers= that are not handed it."
            )

    def _refuse_hidden_graph(self, fqn: str, call: Any) -> None:
        """Refuse an object with a tensor inside that has a gradient: the graph behind it is not part of this layer."""
        for leaf in tree_leaves(call):
            # Mappings are looked into by everything: a UserDict that hands states from layer to layer.
            hidden = {} if isinstance(leaf, torch.Tensor | Mapping) else getattr(leaf, "__dict__", {})
            inside = tensors_in(list(hidden.values()))
            if any(tensor.grad_fn is not None for tensor in inside):
                raise ValueError(
                    f"{type(self.model).__name__} calls {fqn} with {a_or_an(leaf)} that has a tensor inside through which a "
                    "gradient goes: no plan can be made. Give the layer this tensor as an argument, or use a mode instead "
                    "of a budget, such as 'selective'."
                )

    def _left(self, fqn: str, module: nn.Module, before: Mapping[Any, Any], sizes: Mapping[Any, int]) -> tuple:
        """Return the attributes that a layer has set in its forward, and refuse lists and dictionaries that it filled."""
        after = attributes_with_gradient(module)
        new = tuple(place for place, value in after.items() if value is not before.get(place))
        self._own += [after[place] for place in new]
        for place in after.keys() - {*new}:
            if len(tensors_in(after[place])) != sizes.get(place):
                raise ValueError(
                    f"{fqn} of {type(self.model).__name__} puts tensors with a gradient into its attribute "
                    f"{'.'.join(filter(None, place))!r}, {a_or_an(after[place])}: no plan can be made. Set an attribute to "
                    "them, return them, or use a mode instead of a budget, such as 'selective'."
                )
        return new

    def _refuse_written(self, fqn: str, inputs: Sequence[torch.Tensor], versions: Sequence[int | None]) -> None:
        """Refuse a layer that changes its own input in place: recomputation requires it as it was."""
        for tensor, version in zip(inputs, versions):
            if version is not None and tensor._version != version:
                raise ValueError(
                    f"{fqn} of {type(self.model).__name__} changes a tensor that it is called with in place "
                    f"({describe((tensor,), {})}): no plan can be made. Write x = x + y in place of x += y (or "
                    "inplace=False), or use a mode instead of a budget, such as 'selective'."
                )

    def _refuse_iterator(self, fqn: str, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, Iterator):
                raise ValueError(
                    f"{fqn} of {type(self.model).__name__} returns {a_or_an(leaf)}, which can be read once: no plan can be "
                    "made. Return a list or a tuple, or leave the layer out with layers=."
                )

    def _refuse_changed(self, fqn: str, before: Sequence[torch.Tensor], now: Sequence[torch.Tensor]) -> None:
        """Refuse a layer that changes a list or a dictionary of its call: the stand-ins of later layers do not change it."""
        same = len(before) == len(now) and all(map(is_, before, now))
        if not same and any(tensor.requires_grad for tensor in (*before, *now)):
            raise ValueError(
                f"{fqn} of {type(self.model).__name__} puts tensors into a list or a dictionary that it is called with, or "
                "takes them out: no plan can be made. Return a new one, or use a mode instead of a budget, such as "
                "'selective'."
            )

    def finish(self, run: FakeRun, state: dict[str, torch.Tensor], args: tuple, kwargs: dict[str, Any]) -> ModelTrace:
        if not self.calls:
            raise ValueError(
                f"The forward pass of {type(self.model).__name__} called none of its {len(self.layers)} layers with "
                "this sample input; give the input that training gives."
            )
        shared = {key for key, users in self._uses.items() if len(users) > 1}
        sizes: dict[int, int] = {}
        for kind in self.kinds:
            inputs = by_argument(kind.args, kind.kwargs)
            at = {place: tensor for place, tensor in inputs.items() if id(tensor.untyped_storage()) in shared}
            kind.shared_at, kind.shared = tuple(at), tuple(at.values())
            sizes |= {id(t.untyped_storage()): t.untyped_storage().nbytes() for t in kind.shared}
            first = next(call.fqn for call in self.calls if call.module is kind.module)
            with named_reason(self.model, describe(args, kwargs)):
                kind.trace = trace_kind(kind, run, f"{first} ({type(kind.module).__name__})")
        return ModelTrace(tuple(self.calls), tuple(self.kinds), sum(sizes.values()), run, state, args, kwargs)


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _another(tensor: torch.Tensor) -> torch.Tensor:
    another = torch.empty_like(tensor)
    # A tensor that is not a leaf, as a layer's output is: models may go on in place.
    return another.requires_grad_().clone() if tensor.requires_grad else another


# Default imbalance: rows of the fullest rank's experts, as a multiple of their rows in an even split. A router that
# is not trained yet spreads tokens badly, and its first hundred steps have the highest peak.
IMBALANCE = 1.5


def planned_imbalance(job: Job) -> float:
    """Return the imbalance that `job` is planned with."""
    return min(IMBALANCE if job.ep.imbalance is None else job.ep.imbalance, job.ep.size)


def routing_of(model: nn.Module, job: Job) -> PlannedRouting | None:
    """Return how tokens go to the experts of `model`, or of a stage of it; None: none are split."""
    experts = find_experts(model, job.ep.plan) if job.ep.size > 1 and has_experts(model, job.ep.plan) else ()
    if not experts:
        return None
    # Called with a row for each expert and token, such a module sends those that the router chose.
    sparse = zero_rows_stay_zero(experts[0].module)
    sent = (experts_per_token(model) or 1) / experts[0].count if sparse else 1.0
    return PlannedRouting(job.ep.size, planned_imbalance(job), sent)
