"""The eager engine: one region of the forward pass that backward recomputes, saving the outputs that a policy chooses.

How it works. Autograd's saved-tensor hooks give each tensor that autograd would keep a small `_Handle` instead. The
first handle that backward opens recomputes the region: the function runs again on the saved inputs, and hooks of the
recomputation give each live handle its tensor, up to the last one, where the recomputation stops. Policies with
something to keep add a dispatch mode to both runs (see `dispatch`). The region's inputs are saved by autograd itself,
*outside* our hooks: hooks further out (offloading, an outer region) get them, and a later in-place change is noticed.

The design is described in the comments of PyTorch's `torch/utils/checkpoint.py` ("Nestable Checkpoint"), whose rules
for nesting hold here; nothing is taken from it.

Higher-order use, as tested in `tests/activation_checkpointing/test_engine_higher_order.py`:

- ``retain_graph=True`` and double backward work: each further backward recomputes again, and saved outputs stay.
- Two forwards before one backward, nested regions, and a backward inside a region work.
- Under `torch.no_grad` the function simply runs. `torch.func` transforms are refused.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nemo_like import torch_compat
from nemo_like.activation_checkpointing.engine.compiled import compiled_region, warn_of_eager
from nemo_like.activation_checkpointing.engine.handles import RegionError
from nemo_like.activation_checkpointing.engine.hooks import is_recomputing
from nemo_like.activation_checkpointing.engine.region import Region
from nemo_like.activation_checkpointing.policy import Policy
from nemo_like.activation_checkpointing.transfer import Transfer

__all__ = [
    "RegionError",
    "is_recomputing",
    "run_region",
    "set_early_stop",
]

_early_stop_default = True


@contextmanager
def set_early_stop(enabled: bool) -> Iterator[None]:
    """Set whether regions whose *forward* runs in here stop their recomputation at the last tensor that backward needs.

    Switch it off where code after that point must run in the recomputation, such as a hook that frees a buffer.
    """
    global _early_stop_default
    before, _early_stop_default = _early_stop_default, enabled
    try:
        yield
    finally:
        _early_stop_default = before


def run_region(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    policy: Policy,
    name: str = "",
    preserve_rng_state: bool = True,
    transfer: Transfer | None = None,
    early_stop: bool | None = None,
    owner: object = None,
) -> Any:
    """Run ``fn(*args, **kwargs)`` as one region and return its result; backward will recompute it.

    Args:
        fn, args, kwargs: the call.
        policy: chooses the outputs to save.
        name: the region's in errors.
        preserve_rng_state: recompute with the forward's random numbers.
        transfer: moves outputs with the decision HOST (default: synchronous copies).
        early_stop: False recomputes the region to its end (default: as `set_early_stop` has set it).
        owner: the module or function whose state is restored, and whose first step is verified (default: `fn`).

    Raises:
        RegionError: in backward, if recomputation and forward disagree, or a plan skips an output that backward needs.
        PlanMismatchError: at the end of forward, if a `DecisionTable` does not fit.
        RuntimeError: inside a `torch.func` transform.

    >>> from nemo_like.activation_checkpointing.policy import FullPolicy
    >>> x = torch.ones(2, requires_grad=True)
    >>> run_region(lambda t: t.exp().sin(), (x,), {}, policy=FullPolicy()).sum().backward()
    >>> torch.equal(x.grad, x.exp().cos() * x.exp())
    True
    """
    if torch.compiler.is_compiling():

        def eagerly(*args: Any, **kwargs: Any) -> Any:
            warn_of_eager(name)
            return Region(fn, policy, name, transfer, _stops_early(early_stop), preserve_rng_state, owner).forward(
                args, kwargs
            )

        return compiled_region(fn, args, kwargs, policy, preserve_rng_state, eagerly)
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    if torch_compat.in_functorch_transform():
        raise RuntimeError(
            f"Region {name!r} runs inside a torch.func transform (grad, vmap, jvp, ...), whose levels saved-tensor "
            "hooks can't follow. Apply the transform to the model without activation checkpointing, or use "
            "torch.autograd.grad."
        )
    return Region(fn, policy, name, transfer, _stops_early(early_stop), preserve_rng_state, owner).forward(args, kwargs)


def _stops_early(early_stop: bool | None) -> bool:
    return _early_stop_default if early_stop is None else early_stop
