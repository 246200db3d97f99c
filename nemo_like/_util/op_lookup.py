"""Operators by name: the one way from ``"torch.ops.aten.mm.default"`` to the operator, never by `eval`.

Used by configs (`CheckpointConfig.ops_to_save`), by policies and plans, and by the table of operators. Nothing is
remembered, because a package imported later brings new operators.
"""

import functools
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

import torch

from nemo_like.torch_compat import HigherOrderOperator, OpOverload, OpOverloadPacket, higher_order_op, registered_ops

Op = Any  # An `OpOverload` or a higher-order operator, as a dispatch mode gets it.


def find_op(name: str) -> Op | None:
    """The operator called `name`, or None where this torch and the packages imported so far have none.

    A name is ``namespace.operator.overload``, with or without ``torch.ops.`` in front and with ``::`` for the first
    dot; without an overload it is the one called ``default``. Higher-order operators have no overloads:
    ``"flex_attention"`` or ``"higher_order.flex_attention"``.

    >>> find_op("torch.ops.aten.mm.default")
    <OpOverload(op='aten.mm', overload='default')>
    >>> find_op("deepep.dispatch.default") is None
    True
    """
    parts = _parts(name)
    if len(parts) == 1 or parts[0] == "higher_order":
        return _higher_order(parts[-1]) if len(parts) <= 2 else None
    if len(parts) not in (2, 3):
        return None
    return _attribute(_packet(parts[0], parts[1]), parts[2] if len(parts) == 3 else "default")


def resolve_op(name: str | Op, *, field: str = "") -> frozenset[Op]:
    """One operator as a user gives it (a name, an overload, or a packet), as overloads.

    A packet (``"aten.topk"``, ``torch.ops.aten.topk``) means every overload that takes tensors and returns new ones.
    Its in-place and ``out=`` overloads must run again in any case, so they are left out, unless it has no others.
    `field` is the name in errors of the setting that holds the operator.

    Raises:
        ValueError: no operator has this name; the message lists close ones.
        TypeError: neither a name nor an operator.

    >>> sorted(map(str, resolve_op("aten.topk"))), sorted(map(str, resolve_op("aten.max")))
    (['aten.topk.default'], ['aten.max.default', 'aten.max.dim', 'aten.max.other'])
    """
    if isinstance(name, OpOverloadPacket):
        return _overloads(name)
    if isinstance(name, OpOverload | HigherOrderOperator):
        return frozenset((name,))
    if not isinstance(name, str):
        raise TypeError(
            f"{_in(field)}{name!r}, which is not an operator: give a name such as 'torch.ops.aten.mm.default', or the "
            "operator."
        )
    parts = _parts(name)
    if len(parts) == 2 and parts[0] != "higher_order":
        packet = _packet(*parts)
        if packet is not None:
            return _overloads(packet)
    op = find_op(name)
    if op is None:
        raise ValueError(
            f"{_in(field)}{name!r}, which is not an operator of this torch ({torch.__version__}) and the packages imported "
            f"so far.{_hint(parts)} Write it as 'torch.ops.<namespace>.<operator>.<overload>'; if a library brings it, "
            "import that library first."
        )
    return frozenset((op,))


def resolve_ops(names: Iterable[str | Op], *, field: str = "") -> frozenset[Op]:
    """The overloads that `names` mean together; raises as `resolve_op` does."""
    return frozenset(op for name in names for op in resolve_op(name, field=field))


@functools.cache
def argument_positions(op: Op) -> dict[str, int]:
    """Argument name → position, by the operator's schema; empty for a higher-order operator, which has none."""
    schema = getattr(op, "_schema", None)
    return {} if schema is None else {argument.name: index for index, argument in enumerate(schema.arguments)}


def argument(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any] | None, *names: str) -> Any:
    """Return the argument for the first of `names` that the call has and that is not None; None if there is none."""
    positions = argument_positions(op)
    for name in names:
        position = positions.get(name, len(args))
        value = args[position] if position < len(args) else (kwargs or {}).get(name)
        if value is not None:
            return value
    return None


def packet_name(op: Op) -> str:
    """``"aten.mm"`` of ``aten.mm.default``; the name itself of a higher-order operator."""
    return str(getattr(op, "overloadpacket", op))


def _parts(name: str) -> list[str]:
    return name.strip().removeprefix("torch.ops.").replace("::", ".").split(".")


def _packet(namespace: str, name: str) -> Any:
    if not (namespace.isidentifier() and name.isidentifier()):
        return None
    packet = _attribute(getattr(torch.ops, namespace), name)
    return packet if isinstance(packet, OpOverloadPacket) else None


def _higher_order(name: str) -> Op | None:
    if not name.isidentifier():
        return None
    op = higher_order_op(name) or _attribute(torch.ops.higher_order, name)
    return op if isinstance(op, HigherOrderOperator) else None


def _attribute(owner: object, name: str) -> Any:
    try:
        return getattr(owner, name, None)
    except RuntimeError:  # torch's word for an unknown operator in some namespaces
        return None


def _overloads(packet: Any) -> frozenset[Op]:
    overloads = [getattr(packet, name) for name in packet.overloads()]
    # TorchScript's `aten.add.int` adds two Python numbers: nothing that could be saved.
    overloads = [op for op in overloads if "Tensor" in str(op._schema)] or overloads
    return frozenset([op for op in overloads if not op._schema.is_mutable] or overloads)


def _in(field: str) -> str:
    return f"{field or 'A list of operators'} has "


def _hint(parts: list[str]) -> str:
    """Return the operators probably meant: the overloads of one that exists, else operators with a name close to
    it."""
    packet = _packet(parts[0], parts[1]) if len(parts) > 1 else None
    if packet is not None:
        return f" {packet} has the overloads {', '.join(packet.overloads())}."
    op_names = [name.replace("::", ".") for name in registered_ops()]
    wanted = ".".join(parts[:2]) if len(parts) > 1 else f"aten.{parts[0]}"
    near = get_close_matches(wanted, op_names, n=3)
    return f" Did you mean {', '.join(repr(name) for name in near)}?" if near else ""
