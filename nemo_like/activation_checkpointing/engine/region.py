"""One region call: the handles that autograd saves in place of its tensors, and the recomputation.

Rules; code that follows one names its number.

1. Owners. Autograd owns the handles, and its hooks own the region; a region refers to its handles weakly, and no handle to
   its region. So all of it goes when the graph goes, without a reference cycle.
2. Order. The n-th tensor that autograd saves in recomputation takes the place of the n-th of forward. Shape, dtype and
   version must agree, and so must the number and order of tracked operators; else `RegionError`, before a number is used.
3. Freeing. A handle has its tensor from the recomputation to the backward node that takes it. Outputs that the policy saved
   are handed out once, in order; only ``retain_graph=True`` keeps them, and each further backward recomputes again.
4. Early stop. Recomputation ends at the last tensor with a live handle, so operators after it never run again. It goes on
   while a collective that it started waits, and where an operator writes a tensor that it saved.
5. Versions. An input or a saved output that is written after forward raises. One that forward itself writes is copied before
   the write, and so are tensors that the region saved in that memory.
6. SKIP gives recomputation a placeholder without numbers; whatever computes with it is skipped as well, and backward, a
   random operator, a collective or a write that needs it raises. HOST waits in CPU memory until the recomputation.
7. Nesting. A region in a region saves handles of the outer one; a backward inside a region takes tensors of the
   recomputation's own graph, which holds numbers in place of tensors.
8. Hooks. Those of the module run outside of the region. Inside, one that only looks is not called again (`hooks`).
9. State. Random numbers, autocast, context variables, switches and the module's own state are those of forward
   (`global_state`, `module_state`); other state raises by name.
10. Errors. An error in forward or recomputation drops all that is saved: a backward after that raises.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from nemo_like import torch_compat
from nemo_like._util.tensors import versions
from nemo_like.activation_checkpointing.engine import verification
from nemo_like.activation_checkpointing.engine.dispatch import ForwardMode, ReplayMode, kinds_for, say_misfit
from nemo_like.activation_checkpointing.engine.global_state import Surroundings
from nemo_like.activation_checkpointing.engine.handles import (
    Kept,
    Placeholder,
    RegionError,
    decision_of,
    map_output,
)
from nemo_like.activation_checkpointing.engine.hooks import recomputation
from nemo_like.activation_checkpointing.engine.inputs import SavedInputs
from nemo_like.activation_checkpointing.engine.module_state import PLAIN_TENSORS
from nemo_like.activation_checkpointing.engine.random_state import host_states
from nemo_like.activation_checkpointing.ops import facts
from nemo_like.activation_checkpointing.policy import HOST, SAVE, SKIP, PlanMismatchError, Policy
from nemo_like.activation_checkpointing.transfer import SynchronousTransfer, Transfer


class _Handle:
    """The object that autograd saves in the place of one tensor."""

    # One is made for every tensor that autograd saves, so `Region.pack` fills it in, without the frame of an `__init__`.
    # And with slots: more objects than these would make Python's garbage collector look more often.
    __slots__ = ("__weakref__", "dtype", "replayed", "shape", "value", "version")
    shape: torch.Size  # Shape of the tensor; `dtype` and `version` are the tensor's as well.
    dtype: torch.dtype
    version: int
    value: Tensor | None  # The tensor that the recomputation made in the place of the forward's.
    replayed: int  # The version of `value` when the recomputation came to it.


class _Stop(Exception):
    """Recomputation has given every live handle its tensor. An Exception, so that ``always_call`` module hooks still run."""

    def __init__(self, region: Region) -> None:
        super().__init__("recomputation is complete (a signal of the checkpointing engine; please don't catch it)")
        self.region = region


class Region:
    """One call: its inputs, the handles that autograd keeps (rule 1), and the outputs that the policy saved.

    Functions that autograd calls are left to Python: a compiled layer whose frame Dynamo gave up runs its hooks under
    Dynamo's eye, which would compile them. So is `forward`: backward runs without Dynamo, and recomputation must run as
    forward did. A module inside that was compiled by itself is compiled in both.
    """

    @torch_compat.left_to_python
    def __init__(
        self,
        fn: Any,
        policy: Policy,
        name: str,
        transfer: Transfer | None,
        early_stop: bool,
        preserve_rng_state: bool = True,
        owner: object = None,
    ) -> None:
        self.owner = fn if owner is None else owner
        self.verification = verification.start(self.owner, name, preserve_rng_state)
        self.fn = fn
        self.preserve_rng_state = preserve_rng_state
        self.policy = policy
        self.name = name
        self.transfer = transfer or SynchronousTransfer()
        self.early_stop = early_stop
        self.handles: list[ref[_Handle]] = []
        self.kept: list[Kept] = []
        self.forward_mode: ForwardMode | None = None
        self.replay_mode: ReplayMode | None = None
        self.complete = False
        self.consumed = False
        self.graph_kept = False
        self.watch_versions = True
        self.lock = threading.RLock()
        if not policy.keeps_nothing:
            decide = policy.start()
            self.kinds = kinds_for(policy)
            self.forward_mode = ForwardMode(self.kinds, decide, self.handles, self.transfer, name, preserve_rng_state)
            self.kept = self.forward_mode.kept
        self.liveness = None if self.forward_mode is None else self.forward_mode.liveness

    # --- forward --------------------------------------------------------------------------------------------------

    @torch_compat.left_to_python
    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.inputs = SavedInputs(args, kwargs)
        if (begin := getattr(getattr(self.forward_mode, "decide", None), "begin", None)) is not None:
            begin(args, kwargs)
        self.surroundings = Surroundings(self.owner, self.preserve_rng_state)
        try:
            with (
                saved_tensors_hooks(self.pack, self.unpack),
                self.surroundings.in_forward(self, self.forward_mode, self.inputs),
            ):
                out = self.fn(*args, **kwargs)
            if self.forward_mode is not None:
                self.forward_mode.finish()
        except PlanMismatchError as error:
            self.drop()
            raise PlanMismatchError(f"Region {self.name!r}: {error}") from error
        except BaseException:
            self.drop()
            raise
        if self.verification is not None:
            self.verification.forward_done()
        self.inputs.forward_done()
        # Rule 5: recomputation gets copies of such things, whose versions begin again.
        self.watch_versions = not (self.surroundings.forward_done() or self.inputs.changed or self.keeps_on_host())
        if self.kept:
            self.drop_unreachable()
            if (tell := getattr(getattr(self.forward_mode, "decide", None), "tell", None)) is not None:
                tell(entry.label for entry in self.kept)
        self.forward_mode = self.liveness = None
        self.complete = True
        return out

    @torch_compat.left_to_python
    def pack(self, tensor: Tensor) -> _Handle:
        handle = _Handle()
        handle.value, handle.shape, handle.dtype, handle.version = None, tensor.shape, tensor.dtype, tensor._version
        self.handles.append(ref(handle))
        if self.liveness is not None:
            self.liveness.packed(tensor)
        if self.verification is not None:
            self.verification.saved(tensor)
        return handle

    def drop_unreachable(self) -> None:
        """At the end of forward: drop outputs that no recomputation can reach (rule 4), and cut the rest from the graph."""
        kept, packs = self.kept, len(self.handles)
        if self.early_stop:
            while kept and kept[-1].packs_before == packs:
                kept.pop()
        self.cut_kept()

    def cut_kept(self) -> None:
        """Cut saved outputs from the graph; doing so again does no harm."""
        for entry in self.kept:
            if entry.decision is SAVE:
                # Detached up here, above autograd, so that the version counter is shared with the original.
                entry.value = map_output(Tensor.detach, entry.value)
                if entry.version is None:
                    entry.version = versions(entry.value)

    def keeps_on_host(self) -> bool:
        """Return whether something that is saved waits in CPU memory."""
        return HOST in map(decision_of, self.kept)

    def drop(self) -> None:
        """Forget everything that is saved."""
        self.consumed = self.consumed or bool(self.kept)
        self.kept = []
        self.forward_mode = self.liveness = None
        for reference in self.handles:
            handle = reference()
            if handle is not None:
                handle.value = None

    # --- backward -------------------------------------------------------------------------------------------------

    @torch_compat.left_to_python
    def unpack(self, handle: _Handle) -> Tensor:
        value = handle.value
        if value is None:
            with self.lock:
                if handle.value is None:
                    self.replay()
                value = handle.value
            if value is None:
                raise RegionError(
                    f"Region {self.name!r}: recomputation ended without a tensor of {handle.dtype} and shape "
                    f"{tuple(handle.shape)} that backward needs: fewer tensors were saved than in forward. Something in "
                    "the region depends on state that changed since."
                )
        if value._version != handle.replayed:
            raise RegionError(
                f"Region {self.name!r}: one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {value.dtype} of shape {tuple(value.shape)}, saved for backward, was changed after "
                "that, in the region itself or between two parts of one backward. Autograd refuses it without "
                "checkpointing too: write the change out of place (y = x * 2 for x.mul_(2))."
            )
        if self.graph_kept:
            handle.value = None  # else autograd drops the handle itself, as soon as this node is done
        return value

    def replay(self) -> None:
        """Run the function again, and give every live handle its tensor."""
        self.graph_kept = torch_compat.graph_is_kept() is not False
        keep = self.graph_kept or not self.complete
        if self.consumed:
            raise RegionError(
                f"Region {self.name!r}: a second backward goes through it, and saved tensors are gone: the first one "
                "was run without retain_graph=True, or its recomputation failed."
            )
        self.last = max(index for index, reference in enumerate(self.handles) if reference() is not None)
        self.unwaited = torch_compat.unwaited_collectives()
        args, kwargs = self.inputs.get(self.name)
        outer = self.forward_mode
        if outer is not None:
            outer.paused = True
        host = host_states() if self.verification is not None else []
        mode: ReplayMode | None = None
        try:
            try:
                mode = self.new_replay_mode(keep)
                self.surroundings.run(self.name, self.run_again, args, kwargs, mode)
            except RegionError:
                skipped = mode.skipped_so_far() if mode is not None else ""
                if getattr(self.policy, "strict", True) or not skipped:
                    raise
                self.skip_nothing()
                say_misfit(self.name, f"it skips {skipped}, and this call's backward needs a tensor made of that")
                mode = self.new_replay_mode(keep)
                self.surroundings.run(self.name, self.run_again, args, kwargs, mode)
            for entry in () if keep else self.kept:
                entry.value = None
            self.check_again()
            if self.verification is not None:
                self.verification.compare_host(host)
                self.verification.compare()
        except BaseException as error:
            self.drop()
            error.add_note(f"(raised in the recomputation of checkpointed region {self.name!r}, in backward)")
            raise
        finally:
            self.lent.clear()
            self.replay_mode = None
            if outer is not None:
                outer.paused = False
        if self.complete:
            self.verification = None

    def check_again(self) -> None:
        """Raise RegionError where the recomputation has changed state that is not restored."""
        self.surroundings.check_again(self.name)

    def new_replay_mode(self, keep: bool) -> ReplayMode | None:
        """Return a mode that puts saved outputs back in the recomputation that now begins; None where nothing is
        saved."""
        self.position = 0
        self.lent: list[Tensor] = []
        if not self.policy.keeps_nothing:
            self.replay_mode = ReplayMode(self.kinds, self.kept, self.values_for_replay(keep), self.name)
        return self.replay_mode

    def skip_nothing(self) -> None:
        """Decide again, after a recomputation that needed a skipped output: compute it, and all that is gone since."""
        for entry in self.kept:
            if entry.decision is SKIP or (entry.decision in (SAVE, HOST) and entry.value is None):
                entry.recompute()

    def run_again(self, args: Any, kwargs: Any, mode: ReplayMode | None) -> None:
        with ExitStack() as stack, torch.enable_grad(), recomputation():
            self.surroundings.restore(stack, self)
            try:
                with saved_tensors_hooks(self.repack, self.give_lent), mode or self.surroundings.looker():
                    self.fn(*args, **kwargs)
            except _Stop as stop:  # in here, so that the contexts around it end as after any other call
                if stop.region is not self:
                    raise
            except (RuntimeError, NotImplementedError, TypeError) as error:
                skipped = mode.skipped_so_far() if mode is not None else ""
                if isinstance(error, RegionError) or not skipped:
                    raise
                raise RegionError(
                    f"Region {self.name!r}: the plan skips {skipped}, and recomputation failed after that, probably because "
                    f"it needs a skipped output: {error}. Take the SKIP out of the plan (RECOMPUTE or SAVE)."
                ) from error
        if mode is not None:
            self.check_count(mode)

    def check_count(self, mode: ReplayMode) -> None:
        """Rule 2: as many tracked calls must have been recomputed as forward had made by then."""
        if not self.early_stop or self.position <= self.last:
            return
        expected = len([entry for entry in self.kept if entry.packs_before <= self.last])
        if mode.finished_at != expected:
            raise RegionError(
                f"Region {self.name!r}: recomputation and forward disagree: forward had run {expected} tracked operators at "
                f"the point where recomputation stopped, recomputation ran {mode.finished_at}. Something in the region "
                "depends on state that changed since."
            )

    def values_for_replay(self, keep: bool) -> list[Any]:
        values = []
        skips, waits = SKIP in map(decision_of, self.kept), self.keeps_on_host()
        for entry in self.kept:
            value = entry.value
            # Rule 3. After a recomputation that fails, a second try can't run a pinned operator again.
            stays = keep or (skips and facts(entry.op).pinned)
            if entry.decision is SAVE:
                if versions(entry.value) != entry.version:
                    raise RegionError(
                        f"Region {self.name!r}: the saved output of {entry.op} was changed in place after the region ended, "
                        "so backward can't use it. Write the change out of place (x = x + y for x += y), or take the "
                        "operator out of the policy's save set."
                    )
                if stays:  # the output becomes part of recomputation's graph, which knows this region
                    value = entry.to_hand_out()
            values.append(value)
            if not stays:
                entry.value = None
        self.consumed = not keep and (waits or SAVE in map(decision_of, self.kept))
        return values

    @torch_compat.left_to_python
    def repack(self, tensor: Tensor) -> int:
        index = self.position
        self.position = index + 1
        # Rule 7: a number, and not the tensor, as the graph of an operator that saves its result (exp) would hold itself.
        self.lent.append(tensor)
        if index > self.last:
            if self.early_stop:
                self.stop_unless_waited_for()
            return index
        handle = self.handles[index]()
        if handle is not None:
            if handle.shape != tensor.shape or handle.dtype != tensor.dtype or isinstance(tensor, Placeholder):
                self.raise_wrong_tensor(index, handle, tensor)
            now = tensor._version
            if handle.version != now and self.watch_versions and type(tensor) in PLAIN_TENSORS:
                raise RegionError(
                    f"Region {self.name!r}: tensor {index} that autograd saved, of shape {tuple(handle.shape)}, was changed "
                    f"in place {handle.version} times in forward, and {now} by now. It may be a parameter that was updated "
                    "before the backward of an earlier forward. Change it after backward."
                )
            if self.verification is not None:
                self.verification.rebuilt(index, tensor)
            handle.value = tensor
            handle.replayed = now
        if index == self.last and self.early_stop:
            if self.replay_mode is not None:
                self.replay_mode.finish()
            self.stop_unless_waited_for()
        return index

    def stop_unless_waited_for(self) -> None:
        """End the recomputation (rule 4), or go on to the next tensor that autograd saves, or to the region's end.

        A collective that is never waited for keeps its buffers for ever, and memory would grow with every step
        (torchtitan#1467).
        """
        if torch_compat.unwaited_collectives() <= self.unwaited and not _written_later(*self.lent[-2:]):
            raise _Stop(self)

    def pass_over(self, packs: int) -> None:
        """In recomputation, leave out something in which forward's autograd saved as many tensors, none of which is left."""
        self.position += packs
        self.lent += [_NOTHING] * packs

    @torch_compat.left_to_python
    def give_lent(self, number: int) -> Tensor:
        return self.lent[number].detach()

    def raise_wrong_tensor(self, index: int, handle: _Handle, tensor: Tensor) -> None:
        if isinstance(tensor, Placeholder):
            raise RegionError(
                f"Region {self.name!r}: the plan skips an operator, and backward needs a tensor made of it: autograd "
                f"saved it as tensor {index} of the region, of shape {tuple(handle.shape)}. Take the SKIP out."
            )
        raise RegionError(
            f"Region {self.name!r}: recomputation and forward disagree: tensor {index} that autograd saved had shape "
            f"{tuple(handle.shape)} and {handle.dtype} in forward, and has {tuple(tensor.shape)} and {tensor.dtype} in "
            "recomputation. Something in the region depends on state that changed since."
        )


def _written_later(first: Tensor, second: Tensor | None = None) -> bool:
    """Return whether an operator that saves these two, one after the other, may write the first one after that.

    Autograd saves an operator's arguments before the operator runs. `rrelu` is called with new memory of its input's
    size, saves both, and then draws random numbers into that memory, without counting a version.
    """
    if second is None or first.requires_grad or first._version or type(first) is not Tensor:
        return False
    return first.shape == second.shape and first.dtype == second.dtype and first.is_floating_point()


_NOTHING = torch.empty(0)  # In the place of a tensor that a hook saved, which recomputation leaves out.
