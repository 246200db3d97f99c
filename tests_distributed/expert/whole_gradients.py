"""Loss and gradients of one process with experts, and those of several ranks made whole."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.models.expert_families import build


def expected(name: str, ids: Tensor, **changes: object) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one process."""
    model = build(name, **changes)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients by the bare model's names. A collective."""
    clean = lambda name: name.replace("_checkpoint_wrapped_module.", "")  # noqa: E731
    found = {clean(n): p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in found.items()}


def assert_close(mine: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert mine.keys() == wanted.keys()
    for name, grad in wanted.items():
        # Relative to the gradient's norm: sums over ranks round differently from one sum.
        error = (mine[name] - grad).norm() / grad.norm().clamp(min=1e-8)
        assert error <= tolerance, (name, error)
