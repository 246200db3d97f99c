"""A policy function written for PyTorch's selective contexts, used as a policy of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from nemo_like.activation_checkpointing.policy import HOST, RECOMPUTE, SAVE, Decision
from nemo_like.op_lookup import Op

_MEANING = {
    "MUST_SAVE": SAVE,
    "PREFER_SAVE": SAVE,
    "MUST_RECOMPUTE": RECOMPUTE,
    "PREFER_RECOMPUTE": RECOMPUTE,
    "MUST_CPU_OFFLOAD": HOST,  # PyTorch's own eager contexts recompute here (pytorch#180874)
    "PREFER_CPU_OFFLOAD": HOST,
}


class TorchPolicy:
    """`policy_fn(context, op, *args, **kwargs) -> CheckpointPolicy | bool`, as PyTorch's selective contexts take it.

    It is called once per operator of forward, views and in-place forms excepted, and never in replay. The decision
    to offload is honoured. `make`, if true, means that `policy_fn` is a factory that makes a fresh function for each
    region: needed for functions that count.

    Raises:
        TypeError: `policy_fn` is not callable; in forward, if it returns anything else.
    """

    keeps_nothing = False

    def __init__(self, policy_fn: Callable[..., Any], make: bool = False) -> None:
        if not callable(policy_fn):
            raise TypeError(f"TorchPolicy needs a function (context, op, *args, **kwargs), not {policy_fn!r}.")
        self.policy_fn = policy_fn
        self.make = make

    def tracked_ops(self) -> None:
        """Every operator that can be tracked."""
        return

    def start(self) -> Callable[..., Decision]:
        """A decision function that hands each call on to the policy function."""
        return _Ask(self.policy_fn() if self.make else self.policy_fn)


class _Ask:
    needs_call = True
    __slots__ = ("_policy_fn",)

    def __init__(self, policy_fn: Callable[..., Any]) -> None:
        self._policy_fn = policy_fn

    def __call__(self, op: Op, index: int, args: Any = (), kwargs: Any = None, output: Any = None) -> Decision:
        context = SelectiveCheckpointContext(is_recompute=False, op_output=output)
        answer = self._policy_fn(context, op, *args, **(kwargs or {}))
        if isinstance(answer, bool):
            return SAVE if answer else RECOMPUTE
        if isinstance(answer, CheckpointPolicy):
            return _MEANING[answer.name]
        raise TypeError(
            f"The policy function returned {answer!r} for {op}; it must return a CheckpointPolicy, or True to keep."
        )
