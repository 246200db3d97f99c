"""Flex attention of plain models, which import the function itself: every place that holds it gets another one.

The other function does what the first did but while a plain model runs on parts of sequences. A replay in backward is such
a time, too: the engine puts back what `CURRENT` was in forward.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from nemo_like.distributed.context_parallel import block_masks
from nemo_like.distributed.context_parallel.parts import CURRENT, StackCall

_OTHERS = ("torch", "transformers", "nemo_like")
"""Packages whose files are left alone: those of transformers reach flex attention by its interface."""
_OURS = "_nemo_like_flex"
_NAMES = ("query", "key", "value", "score_mod", "block_mask", "scale", "enable_gqa", "return_lse", "kernel_options")


def replace_flex(stack: nn.Module) -> Iterator[Callable[[], None]]:
    """Replace flex attention, compiled or not, in all files and in the attributes below `stack`; yields what undoes it."""
    flex: Any = sys.modules.get(block_masks.FLEX)
    if flex is None:
        return
    files = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] not in _OTHERS]
    inside = list(stack.modules())
    classes = {
        base for module in inside for base in type(module).__mro__ if base.__module__.partition(".")[0] not in _OTHERS
    }
    for owner in (*files, *classes, *inside):
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            function = value.__func__ if isinstance(value, staticmethod) else value
            # Of functions alone: any object may stand in a file, and some do things when they are asked for attributes.
            known = vars(function) if isinstance(function, types.FunctionType) else {}
            compiled = known.get("__wrapped__") is flex.flex_attention and _OURS not in known
            if function is flex.flex_attention or compiled:
                other = _over_parts(function)
                setattr(owner, name, staticmethod(other) if isinstance(value, staticmethod) else other)
                yield functools.partial(setattr, owner, name, value)


def _over_parts(own: Callable[..., Any]) -> Callable[..., Any]:
    """`own`, a `flex_attention`, of queries, keys and values (B, H, L, D) that are parts while a call is cut."""

    @functools.wraps(own)
    def attend(*args: Any, **kwargs: Any) -> Any:
        call = CURRENT.get()
        if call is None or call.parts.idle:
            return own(*args, **kwargs)
        given = dict(zip(_NAMES, args)) | kwargs
        query, key, value = given.pop("query"), given.pop("key"), given.pop("value")
        if query.shape[-2] != key.shape[-2]:
            raise NotImplementedError(
                f"cp cuts the sequence, and flex attention got {query.shape[-2]} queries and {key.shape[-2]} keys: whether "
                "these keys are cut is not known here. Use cp=1 for this model."
            )
        return call.parts.method.attend_flex(call, own, query, key, value, given)

    setattr(attend, _OURS, True)
    return attend


def over_whole(call: StackCall, query: Tensor, key: Tensor, given: dict[str, Any]) -> dict[str, Any]:
    """`given`, other arguments of flex attention, for these `query` and `key`: the mask and scores of their positions."""
    batch, heads, rows, _ = query.shape
    shape = (batch, heads, rows, key.shape[2])
    given["block_mask"] = block_masks.of_part(call.parts, given.get("block_mask"), shape, call.length, query.device)
    if given.get("score_mod") is not None:
        given["score_mod"] = block_masks.score_over_whole(call.parts, given["score_mod"], rows, heads, call.length)
    return given
