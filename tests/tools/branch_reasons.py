"""Reasons why branches of the package cannot run on the simulated device."""

from __future__ import annotations

_AC, _DIST = "nemo_like/activation_checkpointing/engine", "nemo_like/distributed"
_CAPTURE = "torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()"
_COUNTS_STEPS = "device.kind == 'cuda' and (not optimizer.defaults.get('fused'))"
_DDP = "CUDA only: `device_ids` of DDP"
_WORD = "reads a word, not a device: a prediction for a kind of device runs anywhere"

REASONS: dict[tuple[str, str], str] = {
    ("nemo_like/_util/rng.py", "torch.cuda.is_initialized()"): "CUDA only: says that CUDA is in use",
    ("nemo_like/_util/rng.py", "current is None or current.type == 'cuda'"): "CUDA only: gpusim takes the other side",
    (f"{_AC}/global_state.py", "device == 'cuda'"): "CUDA only: switches of CUDA's libraries",
    (
        f"{_AC}/verification.py",
        f"count >= CALLS and wanted != '1' or ({_CAPTURE})",
    ): "CUDA only: capture of a CUDA graph",
    ("nemo_like/_util/tensor_summary.py", "tensor.device.type == 'mps'"): "MPS only: it has no float64",
    (f"{_DIST}/launch.py", "device.type != 'cpu'"): "CUDA only: `local_device` refuses a kind that BACKENDS lacks",
    ("nemo_like/fake_rank.py", "device.kind == 'cpu'"): "reads the description of a dry run's device",
    ("nemo_like/fake_rank.py", _COUNTS_STEPS): "reads the description of a dry run's device",
    ("nemo_like/losses/cross_entropy.py", "losses.device.type == 'mps'"): "MPS only: it has no float64",
    ("nemo_like/options/optimizers.py", "device == 'cpu' or fused"): _WORD,
    ("nemo_like/parallelizer.py", "place.type == 'cuda'"): _DDP,
    ("nemo_like/precision.py", "device_type != 'cuda'"): "CUDA only: float8 products, which are emulated elsewhere",
    ("nemo_like/torch_compat.py", "rows.device.type == 'cuda'"): "CUDA only: the grouped product's kernel",
}
"""The reason, by file and condition; `tests.tools.branches` shows it."""
