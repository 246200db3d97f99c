"""How long an op takes on a device: a roofline over its FLOPs and the bytes it moves."""

from __future__ import annotations

from nemo_like.activation_checkpointing.ops import facts
from nemo_like.planning.devices import Device
from nemo_like.planning.trace import OpRecord


def op_seconds(op: OpRecord, device: Device) -> float:
    """``max(FLOPs / reachable FLOP/s, bytes moved / reachable bytes/s)`` (Williams et al., "Roofline", CACM 2009)."""
    if op.view:
        return 0.0
    kind = "half" if op.half else "single"
    speed = (device.attention_flops if facts(op.op).attention else device.matmul_flops)[kind]
    return max(op.flops / speed, op.moved / device.bandwidth)
