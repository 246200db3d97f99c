"""Why a model cannot be planned, in words: errors of a forward or a backward that ran without values."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import NamedTuple

from torch import nn

from nemo_like._util.module_tree import bare_modules
from nemo_like.activation_checkpointing.engine.handles import RegionError
from nemo_like.layers.structure import is_list_of_experts

# Errors of fake tensors where code looks at a value that they do not have, by name: the classes are private.
_LOOKS = ("DataDependentOutputException", "DynamicOutputShapeException")


class Aim(NamedTuple):
    """The purpose of a run without values, in the words of an error."""

    cannot: str
    instead: str  # A sentence: advice for the user.


PLAN = Aim("cannot be planned", "Use a mode instead of a budget, such as 'selective'.")
STAGES = Aim("cannot be cut into stages by pp", "Use strategy='fsdp2' with tp, cp or ep.")


def named_reason(model: nn.Module, reason: str, aim: Aim = PLAN) -> AbstractContextManager[None]:
    """Errors of a forward pass of `model` without values as ValueErrors that state why, and a way out; `given`: its
    input."""
    return without_values(
        f"{type(model).__name__} {aim.cannot}: its forward",
        model,
        aim,
        otherwise=lambda error: (
            f"The forward pass of {type(model).__name__} failed on the sample input ({reason}), run on "
            f"tensors without values: {in_a_line(error)}. Give what one step of one rank gives to the "
            f"model; if this is such an input, the model {aim.cannot}. {aim.instead}"
        ),
    )


@contextmanager
def without_values(
    who: str, module: nn.Module | None = None, aim: Aim = PLAN, otherwise: Callable[[Exception], str] | None = None
) -> Iterator[None]:
    """Raise the errors of a step without values as ValueErrors: a look at absent values, or a limit of the code.

    Args:
        who: begins the sentence: who looks.
        module: the model, or the part of it, that runs.
        aim: the purpose.
        otherwise: makes the message of an error that is not a look at values; default: that the code cannot do it.
    """
    try:
        yield
    except Exception as error:  # the model's code may raise anything
        look = _look_behind(error)
        if look is not None:
            raise ValueError(
                f"{who} depends on values that a run without weights does not have ({look}{place_of(look)}). "
                f"{_way_out(module, aim)}"
            ) from error
        if is_ours(error) or (isinstance(error, RegionError) and otherwise is None):
            raise
        if otherwise is not None:
            raise ValueError(otherwise(error)) from error
        reason = (
            "reads a tensor with a gradient that the model computed outside of it and does not pass as an argument"
            if "backward through the graph a second time" in str(error)
            else f"fails on tensors without values ({in_place(error)})"
        )
        raise ValueError(f"{who} {reason}. {_way_out(module, aim)}") from error


def in_a_line(error: Exception) -> str:
    """The error's first line, with its class where that tells the most: of a missing key, or of no text at all."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}".rstrip(": ") if isinstance(error, KeyError) or not first else first


def in_place(error: Exception) -> str:
    """``"TypeError: its first line, in line 12 of package.module"``."""
    message, kind = in_a_line(error), type(error).__name__
    return f"{message if message.startswith(kind) else f'{kind}: {message}'}{place_of(error)}"


def is_ours(error: Exception) -> bool:
    """Return whether this package raised it, and not the model's code, or an operator that it calls in our modes."""
    if not isinstance(error, ValueError):
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return _package(frame) == __name__.partition(".")[0]


def _way_out(module: nn.Module | None, aim: Aim) -> str:
    if module is None or not any("expert" in name.rpartition(".")[2].lower() for name, _ in module.named_modules()):
        return aim.instead
    if listed := next((name for name, inner in bare_modules(module) if is_list_of_experts(name, inner)), None):
        return (
            f"{listed!r} is a list of experts, whose block decides in Python how many rows each gets. {aim.instead[:-1]}, "
            "or convert it to fused experts, as from_pretrained() of transformers 5 or newer does."
        )
    return "Mixture-of-experts models of transformers can with experts_implementation='grouped_mm', where they have it."


def _look_behind(error: BaseException | None) -> BaseException | None:
    """The look at values that `error` is, or was raised from: torch's pipelines raise their own."""
    while isinstance(error, RuntimeError):
        if type(error).__name__ in _LOOKS:
            return error
        error = error.__cause__
    return None


def place_of(error: BaseException) -> str:
    """``", in line 12 of package.module"``: the innermost line of the model's code that `error` came from."""
    innermost_first = reversed(list(traceback.walk_tb(error.__traceback__)))
    theirs = (each for each in innermost_first if _package(each[0]) not in ("torch", __name__.partition(".")[0]))
    return next((f", in line {line} of {frame.f_globals.get('__name__', '')}" for frame, line in theirs), "")


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
