"""Guards around the calls of a sharded model and of its FSDP2 units.

FSDP2 takes the parameters of a unit away, registers gathered copies while the unit runs, and rebuilds the containers that
it is called with. Some effects of a bare module on these are lost then, without an error: a gathered copy that trains,
is written or exchanged, a filled list. Here they are repaired where possible, and else refused by name before a number
is used.
"""

import inspect
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, compress
from types import CellType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from nemo_like._util.code import names_in
from nemo_like._util.module_tree import bare_name
from nemo_like._util.named_containers import named_containers
from nemo_like._util.tensors import tensors_in
from nemo_like.distributed.consistency_checks import agree, devices_of, wire_device
from nemo_like.distributed.weights.replaced import checksum, put_marks, refuse_to_step
from nemo_like.torch_compat import (
    FsdpPlace,
    after_each_forward,
    around_each_call,
    around_end_of_backward,
    before_each_reduction,
    begin_from_root,
    call_is_inside_of,
    complete_accumulated,
    content_versions,
    explain_sharded_weights,
    forward_hooks,
    fsdp_is_idle,
    fsdp_params,
    fsdp_places,
    gather_before_backward_of,
    in_backward,
    is_fake,
    lend_containers,
    local_part,
    register_shards,
    register_whole_when_gathered,
    sharded_versions,
    shards_are_registered,
    unseen,
    without_gradient,
)

STEPS_LATER = "_nemo_like_steps_later"
"""Attribute of a parameter whose gradient may be FSDP2's zeros: steps to make once another rank is known to use it."""

# Calls of a unit whose weights are compared by content; later calls compare the counters of in-place changes alone.
_CALLS = 2


class ModelCalls:
    """Before, and after, each call of a sharded model: ``parameters()`` gives trained shards, and forward reads them.

    FSDP2 leaves some units gathered behind forward. Their copies would go into an optimizer that is built then, or would
    be computed with again after the optimizer's step (pytorch#144289). So the shards are registered as soon as forward
    has ended, and gathered copies are freed where no backward has come in between, or a shard was written.

    Args:
        held: units that stay gathered after forward.
        keep: over several forwards (stages of a pipeline).
    """

    def __init__(self, model: nn.Module, held: Sequence[nn.Module], keep: bool) -> None:
        self._model, self._held, self._keep = model, held, keep
        self._versions: list[list[int]] = []
        # Calls of the model under way: a hook of it may call it, as context parallelism does in its first call.
        self._depth = 0
        for unit in held:
            register_whole_when_gathered(unit)
        model.register_forward_pre_hook(self._before, prepend=True)
        model.register_forward_hook(self._after, always_call=True)

    def _before(self, _module: nn.Module, _args: object) -> None:
        # No hook is called where forward ends with a KeyboardInterrupt: the depth alone proves nothing.
        if self._depth and not call_is_inside_of(self._model):
            self._depth = 0
        if not self._depth and not in_backward():
            self._begin()
        self._depth += 1

    def _begin(self) -> None:
        if not fsdp_is_idle(self._model):
            if call_is_inside_of(self._model):  # of a method that the caller has registered
                return
            self._model.reset_iter_state()  # type: ignore[operator]  # the call before has ended in an error
        now = [sharded_versions(unit) for unit in self._held]
        for unit in self._held:
            if now != self._versions or (not self._keep and shards_are_registered(unit)):
                unit.reshard()  # type: ignore[operator]
        self._versions = now

    def _after(self, _module: nn.Module, _args: object, _output: object) -> None:
        self._depth = max(self._depth - 1, 0)
        if self._depth:
            return
        for unit in self._held:
            if not torch.is_grad_enabled():
                unit.reshard()  # type: ignore[operator]
            elif not self._keep:  # a backward in halves looks for gathered copies, and a pipeline shows shards itself
                register_shards(unit)

    def around(self, name: str) -> None:
        """Gather the root for the whole of a call of the method `name`, too."""
        register_fsdp_forward_method(self._model, name)
        method = getattr(self._model, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self._before(self._model, args)
            try:
                return method(*args, **kwargs)
            finally:
                self._after(self._model, args, None)

        setattr(self._model, name, call)


def refuse_new_parameters(model: nn.Module, managed: Callable[[], Iterable[tuple[nn.Module, str]]]) -> None:
    """Have a forward of `model` raise where a parameter that trains has come, or was exchanged, since this call.

    Args:
        managed: the places, (module, name), whose parameters are known to be averaged over ranks whatever is there.
    """
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    accepted: set[int] = set()
    tables: list[dict[str, Any]] = []
    frozen: list[nn.Parameter] = []

    def check(module: nn.Module, _args: object) -> None:
        if not torch.is_grad_enabled() or in_backward():
            return
        now = hash(tuple(map(id, chain.from_iterable(map(dict.values, tables)))))
        if now in accepted and not any(parameter.requires_grad for parameter in frozen):
            return
        frozen.clear()
        places = {(id(holder), name) for holder, name in managed()}
        for prefix, holder in module.named_modules():
            for name, parameter in holder._parameters.items():
                if parameter is None or (id(holder), name) in places or parameters.get(id(parameter)) is parameter:
                    continue
                if not parameter.requires_grad:
                    frozen.append(parameter)
                else:
                    full = bare_name(f"{prefix}.{name}" if prefix else name)
                    raise RuntimeError(
                        f"{full} came into the model, or was exchanged, after parallelize(): its gradient would not be "
                        "averaged over ranks. Put it into the model before parallelize()."
                    )
        # The layer inside a checkpoint wrapper has children of its own, which `modules` does not visit.
        tables[:] = [table for holder in module.modules() for table in (holder._parameters, holder._modules)]
        if len(accepted) > 16:
            accepted.clear()
        accepted.add(hash(tuple(map(id, chain.from_iterable(map(dict.values, tables))))))

    model.register_forward_pre_hook(check, prepend=True)


class UnitCalls:
    """Around each call of one FSDP2 unit: its parameters are its own, and a write is not lost.

    A write in place is counted by autograd, and refused at any call. Nothing counts one through ``.data``. So a unit that
    has the name in its code is compared by content at each call, and the write is put into the shards: a clamp in each
    forward then trains as in the original model. Other units are compared in the first calls, and a write is refused.
    """

    def __init__(self, unit: nn.Module, name: str, groups: Sequence[dist.ProcessGroup | None]) -> None:
        self._unit, self._name, self._groups = unit, name, groups
        self._places: list[FsdpPlace] = list(fsdp_places(unit))
        self._registered = [(place.module._parameters, place.name, place.param) for place in self._places]
        self._versions: list[int] = []
        self._contents: list[Tensor] = []
        self._calls, self._writes = 0, False
        self._modules = [module for module in unit.modules() if not isinstance(module, FSDPModule)]
        self._reached: set[nn.Module] = set()
        around_each_call(unit, self._before, self._gathered, self._after)

    def _before(self) -> None:
        # In each step for each parameter: no call of a function where all is well.
        for table, name, param in self._registered:
            if table.get(name) is param.sharded_param:
                continue
            place = next(each for each in self._places if each.module._parameters is table and each.name == name)
            if not place.has_its_own():
                raise RuntimeError(
                    f"{self._full(place)} is not the parameter that parallelize() has put there. FSDP2 would put its own "
                    "back while the layer runs, so that the other one is neither used nor trained. Exchange parameters "
                    "before parallelize(). torch.func.functional_call of a sharded layer is not possible: use "
                    "strategy='ddp' or 'single', or leave the layer out (parallelize(..., layers=[...]))."
                )
        if torch.is_grad_enabled():
            for module in self._modules:
                # Seen by a hook of another owner. Ours would keep a chunked loss from the head's gradients by hand.
                if module not in self._reached and forward_hooks(module) not in ((), (explain_sharded_weights,)):
                    self._reached.add(module)
                    module.register_forward_hook(self._reach)

    def _reach(self, _module: nn.Module, _args: object, output: object) -> None:
        """Have the unit gathered for a loss of tensors that a hook inside it saw, though its own output is not used."""
        # Asked first: Dynamo cannot trace the question for the backward, and would leave the layer to eager.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or in_backward():
            return
        gather_before_backward_of(self._unit, [t for t in tensors_in(output) if t.requires_grad])

    def _gathered(self) -> None:
        self._versions = content_versions(self._registered)
        self._calls += 1
        if self._calls == 1:
            self._writes = _names_data(self._unit.modules())
            for place in self._places:
                put_marks(place.gathered, vars(place.param.sharded_param))
                # Registered in forward, and still where a KeyboardInterrupt has ended that.
                refuse_to_step(place.gathered, self._full(place))
        if self._calls <= _CALLS or self._writes:
            self._contents = self._checksums()

    def _after(self) -> None:
        now = content_versions(self._registered)
        if now != self._versions and len(now) == len(self._versions):
            self._refuse(next(p for p, old, new in zip(self._places, self._versions, now) if old != new))
        if not self._contents:
            return
        with unseen():  # one wait of the host for each of the two
            old, new = torch.stack(self._contents).tolist(), torch.stack(self._checksums()).tolist()
            self._contents = []
            written = list(compress(self._places, map(operator.ne, old, new)))
            if written and not self._writes:
                self._refuse(written[0])
            if not self._writes:
                return
            agree(
                new,
                self._groups,
                lambda _: RuntimeError(
                    f"The forward of {self._name or 'the model'} wrote other values into its parameters on each rank"
                    f"{f' ({self._full(written[0])} here)' if written else ''}, so the shards do not fit together. Write "
                    "the same values everywhere (torch.distributed.all_reduce averages the statistics that they are "
                    "computed from), or make the parameter a buffer."
                ),
            )
            for place in written:
                place.write_back()

    def _checksums(self) -> list[Tensor]:
        weights = [local_part(place.gathered).detach() for place in self._places]
        # A subclass (float8) has no elements of its own to look at.
        if any(is_fake(weight) or weight.is_meta or type(weight) not in (Tensor, nn.Parameter) for weight in weights):
            return []
        with unseen(), torch.no_grad():
            return [checksum(weight) for weight in weights]

    def _refuse(self, place: FsdpPlace) -> None:
        raise RuntimeError(
            f"{self._full(place)} was written in the forward of {self._name or 'the model'}. FSDP2 gathers a copy of it "
            "for the forward, so the write is lost. Write through .data in the layer's forward, set the parameter before "
            "parallelize() (with a first forward of the original model, for instance), make it a buffer, or use "
            "strategy='ddp'."
        )

    def _full(self, place: FsdpPlace) -> str:
        inner = next((name for name, module in self._unit.named_modules() if module is place.module), "")
        return bare_name(".".join(filter(None, (self._name, inner, place.name))))


def _names_data(modules: Iterable[nn.Module]) -> bool:
    """Return whether a forward or hook of `modules`, or a method or function that these call, names ``.data``."""
    modules = list(modules)
    kinds: set[Any] = set(map(type, modules))
    waiting: list[Any] = [kind.forward for kind in kinds]
    for module in modules:
        waiting += [module.forward, *module._forward_pre_hooks.values(), *forward_hooks(module)]
        kinds |= set(map(type, vars(module).values()))  # of plain objects that it holds
    seen = set[Any]()
    # PEFT names it to merge an adapter, in forward only where one was switched off while it was merged: a watch of every
    # layer with LoRA, which waits for the device, would be for nothing.
    others = {"torch", "nemo_like", "peft", *sys.stdlib_module_names}
    while waiting:
        function = waiting.pop()
        function = function.func if isinstance(function, partial) else function
        function = inspect.unwrap(function) if callable(function) else function
        kinds.add(type(getattr(function, "__self__", function)))  # whose other methods it may call
        if not inspect.isroutine(function):  # an object that is called
            function = inspect.getattr_static(type(function), "__call__", None)
        code = getattr(function, "__code__", None)
        if code is None or code in seen or str(function.__module__).partition(".")[0] in others:
            continue
        seen.add(code)
        called = names_in(function)
        if "data" in called:
            return True
        global_names = getattr(function, "__globals__", {})
        files = [vars(global_names[name]) for name in called if isinstance(global_names.get(name), ModuleType)]
        waiting += [
            *(place.get(name) for name in called for place in (global_names, *files)),
            *(getattr(kind, name, None) for name in called for kind in kinds),
            *(cell.cell_contents for cell in function.__closure__ or () if cell != CellType()),
        ]
    return False


# Tensors that a layer keeps on itself, or puts into a list of its file, such as an auxiliary loss: FSDP2 gathers for them.
#
# FSDP2 gathers a unit's weights again when a gradient reaches the unit's output. A gradient that reaches only a tensor
# that a layer kept would find them sharded, in the layer's recomputation or in the operators' own backward.

_LOOKS = 4  # Forwards of a unit after which all attributes are looked at; later ones look where something was found.
_NOT_KEPT = frozenset(vars(nn.Module())) - {"_buffers"}


class _Kept:
    """Tensors that the modules of one unit keep."""

    def __init__(self, unit: nn.Module, hooked: dict[int, weakref.ref[Tensor]]) -> None:
        self._unit, self._hooked = unit, hooked
        self._calls, self._places = 0, list[tuple[dict[str, Any], str]]()
        self._kinds = set(map(type, unit.modules()))

    def __call__(self) -> None:
        if not torch.is_grad_enabled():
            return
        if self._calls < _LOOKS:
            self._calls += 1
            self._places = [
                (vars(module), name)
                for module in self._unit.modules()
                for name, value in vars(module).items()
                if name not in _NOT_KEPT and any(tensor.grad_fn is not None for tensor in tensors_in(value))
            ]
        attributes = [attributes.get(name) for attributes, name in self._places]
        tensors = tensors_in([*attributes, *named_containers(self._kinds)])
        new = {id(t): t for t in tensors if t.grad_fn is not None and not self._is_hooked(t)}
        gather_before_backward_of(self._unit, list(new.values()))
        for key, tensor in new.items():
            self._hooked[key] = weakref.ref(tensor, lambda _, key=key: self._hooked.pop(key, None))  # type: ignore[misc]

    def _is_hooked(self, tensor: Tensor) -> bool:
        hooked = self._hooked.get(id(tensor))
        return hooked is not None and hooked() is tensor


class UnusedParameters:
    """Gradients of parameters that this rank's backward does not reach.

    FSDP2 sends zeros for them, so that all ranks pack the same gradients into one sum: one task's head on one rank, another
    task's on the next. A parameter that no rank has reached gets no gradient, as without sharding, and no optimizer moves
    it. For that, ranks send one small reduction behind each backward, for which only those wait that have such parameters.

    Args:
        units: of FSDP2, in `model`.
        groups: along which they reduce.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[nn.Module], groups: Sequence[dist.ProcessGroup | None]
    ) -> None:
        self._groups = groups
        self._params: list[Any] = []
        self._reached, self._fresh = set[int](), set[int]()
        self._ones: Tensor | None = None
        self._sent: object = None
        for unit in units:
            params = fsdp_params(unit)
            before_each_reduction(unit, partial(self._note, len(self._params), params))
            self._params += params
        around_end_of_backward(model, None, self._agree)

    def _note(self, first: int, params: Sequence[Any]) -> None:
        """params: of one unit, of which the first has the number `first`."""
        numbers = set(range(first, first + len(params)))
        without = {first + index for index in without_gradient(params)}
        numbers -= without
        for number in numbers & self._fresh:  # of a backward that has ended in an error
            vars(self._params[number].sharded_param).pop(STEPS_LATER, None)
        for number in without:
            shard = self._params[number].sharded_param
            if shard.requires_grad and shard.grad is None:
                self._fresh.add(number)
                setattr(shard, STEPS_LATER, [])
        self._reached |= numbers
        complete_accumulated(params)

    def _agree(self) -> None:
        """Behind a backward in which some unit was reduced."""
        if not self._reached and not self._fresh:
            return  # gradients are accumulated and not reduced
        unused = sorted(self._fresh - self._reached)
        self._reached, self._fresh = set(), set()
        with unseen(), torch.no_grad():
            if self._ones is None:
                own = self._params[0].device
                device = own if own.type in devices_of(self._groups[0]) else wire_device(self._groups[0])
                self._ones = torch.ones(len(self._params), dtype=torch.uint8, device=device)
            reached = self._ones.clone()
            if unused:
                reached[unused] = 0
            for group in self._groups:
                work = dist.all_reduce(reached, op=dist.ReduceOp.MAX, group=group, async_op=True)
                if unused or group is not self._groups[-1]:
                    work.wait()
            self._sent = reached, work  # kept until it has been sent
            somewhere = reached.tolist() if unused else []
        for index in unused:
            shard = self._params[index].sharded_param
            steps = vars(shard).pop(STEPS_LATER, ())
            if not somewhere[index]:
                shard.grad = None
                continue
            for step in steps:
                step()


def guard_units(
    model: nn.Module, units: Sequence[tuple[nn.Module, str]], groups: Sequence[dist.ProcessGroup | None]
) -> None:
    """Guard the calls of `units` of the sharded `model`, given with their names, which reduce along `groups`."""
    if all(dist.get_backend(group) != "fake" for group in groups):
        UnusedParameters(model, [unit for unit, _ in units], groups)
    for unit, name in units:
        UnitCalls(unit, name, groups)
        lend_containers(unit)
        if unit is not model:
            begin_from_root(unit, model)


def gather_for_what_is_kept(units: Sequence[nn.Module]) -> None:
    """Have each of `units` gathered in backward also for the gradients of tensors that its modules keep in forward."""
    hooked: dict[int, weakref.ref[Tensor]] = {}
    for unit in units:
        after_each_forward(unit, _Kept(unit, hooked))


def fsdp_managed(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The places in `model` whose parameters FSDP2 averages over ranks."""
    for unit in model.modules():
        for place in fsdp_places(unit, shared=True) if isinstance(unit, FSDPModule) else ():
            # torch takes another shard in the first forward: of load_state_dict(assign=True), or of `to`.
            if isinstance(place.module._parameters.get(place.name), DTensor) or place.has_its_own():
                yield place.module, place.name
