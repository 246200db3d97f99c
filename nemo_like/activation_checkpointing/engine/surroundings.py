"""All that steers the results of one call and is not an argument: noted in forward, put back for its recomputation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from nemo_like.activation_checkpointing.engine.buffers import BufferSnapshot
from nemo_like.activation_checkpointing.engine.dispatch import ForwardMode, look_on
from nemo_like.activation_checkpointing.engine.global_state import GlobalState
from nemo_like.activation_checkpointing.engine.hooks import hook_calls
from nemo_like.activation_checkpointing.engine.inputs import SavedInputs
from nemo_like.activation_checkpointing.engine.module_state import ModuleState, module_of
from nemo_like.activation_checkpointing.engine.random_state import Generators, closure_of, learned_of


class Surroundings:
    """The state of the module that `function` is, or is a method of, and of the program, at the moment of creation."""

    def __init__(self, function: Any, values: Iterable[Any], preserve_rng_state: bool) -> None:
        """`values`: the call's arguments."""
        module, self._learned = module_of(function), learned_of(function)
        self._module = ModuleState(module) if module is not None else None
        self._buffers = BufferSnapshot(module, self._module.attributes) if module is not None and self._module else None
        self._hooks = hook_calls(self._module, self._learned) if self._module is not None else None
        held = self._module.generators if self._module is not None else closure_of(function)
        self._global_state = GlobalState(Generators(self._learned, (*held, *values)) if preserve_rng_state else None)
        # Makes the context that the function runs in, in recomputation.
        self.looker: Callable[[], AbstractContextManager[Any]] = nullcontext

    def in_forward(
        self, region: Any, mode: ForwardMode | None, inputs: SavedInputs | None
    ) -> AbstractContextManager[Any]:
        """Return the context that the function of a `region` runs in, in forward; see `look_on`."""
        look, self.looker = look_on(mode, self._global_state.generators, inputs, self._learned)
        stack = ExitStack()
        if self._hooks is not None:
            stack.enter_context(self._hooks.in_forward(region))
        stack.enter_context(mode or look or nullcontext())
        return stack

    def forward_done(self) -> bool:
        """Keep only the state that the call used or changed. Returns whether recomputation gets copies of buffers."""
        self._global_state.forget_unused_rng()
        if self._buffers is not None and not self._buffers.forward_done():
            self._buffers = None
        if self._module is not None:
            self._module.forward_done()
        return self._buffers is not None

    def restore(self, stack: ExitStack, region: Any) -> None:
        """Make everything as it was, until `stack` ends.

        Raises:
            RegionError: something was changed that cannot be put back.
        """
        if self._module is not None:
            self._module.check(region.name, self._buffers.puts_back if self._buffers is not None else lambda *_: False)
            self._module.restore(stack)
        if self._buffers is not None:
            self._buffers.restore(stack)
        self._global_state.restore(stack)
        if self._hooks is not None:
            stack.enter_context(self._hooks.in_recomputation(region))

    def run(self, region: str, function: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        """Call `function` with the context variables that forward found."""
        return self._global_state.variables.run(region, function, *args, **kwargs)
