"""Whether ranks that gather together run the same layers: FSDP2 pairs collectives by their order alone.

Where one rank skips a layer (LayerDrop, early exit, a head for each task), its next gather meets another layer's, and both
ranks compute with a mixture of weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nemo_like._util.log import warn_once
from nemo_like.distributed.agreement import all_have, gather_objects, mesh_groups, ranks_in_words
from nemo_like.distributed.launch import rank
from nemo_like.distributed.units import Unit
from nemo_like.torch_compat import before_each_gather, read_dtypes_again, unseen
from nemo_like.transformers_compat import layers_dropped_in_vain

_CALLS = 4
"""Calls of the model that are compared in each of its modes: training or not, with gradients or without."""


class SameLayers:
    """Compares over the ranks, before each gather in forward of the first calls, which unit it belongs to."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], mesh: dist.device_mesh.DeviceMesh) -> None:
        self._groups = mesh_groups(mesh)
        self._calls: dict[tuple[bool, bool], int] = {}
        self._compares = True
        model.register_forward_pre_hook(self._begin, prepend=True)
        model.register_forward_hook(self._end)
        for unit in units:
            before_each_gather(unit.modules[0], partial(self._next, unit))

    def _begin(self, model: nn.Module, _args: Any) -> None:
        mode = model.training, torch.is_grad_enabled()
        self._calls[mode] = self._calls.get(mode, 0) + 1
        self._compares = self._calls[mode] <= _CALLS

    def _end(self, _model: nn.Module, _args: Any, _output: Any) -> None:
        self._compare("the end of forward")

    def _next(self, unit: Unit, event: str) -> None:
        if event == "backward" and torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True was asked of a backward through a model that FSDP2 shards: it frees the weights that the "
                "second backward needs, and does not reduce what that gives. Compute a gradient penalty with "
                "strategy='ddp' or 'single'."
            )
        if event == "forward":
            read_dtypes_again(unit.modules[0])
            self._compare(f"the forward of {unit.name or 'the root'}")

    def _compare(self, event: str) -> None:
        """Raise where another rank is at another event."""
        if not self._compares:
            return
        with unseen():
            if all_have(event, self._groups):
                return
            everyone = gather_objects((rank(), event), self._groups)
        events: dict[str, list[int]] = {}
        for number, its_event in everyone:
            events.setdefault(its_event, []).append(number)
        differing = " and ".join(f"{words} on {ranks_in_words(numbers)}" for words, numbers in events.items())
        raise RuntimeError(
            f"Ranks run different layers: next is {differing}. FSDP2 gathers and reduces each layer on all ranks "
            "together. Run the same layers everywhere: draw what is skipped from a generator with the same seed on every "
            "rank, or run the layer and multiply its output by 0."
        )


def compare_layers(model: nn.Module, units: Sequence[Unit], mesh: dist.device_mesh.DeviceMesh) -> None:
    """Have the first calls of `model` raise on all ranks of `mesh` where they run different units.

    The ranks of torch's ``fake`` back end are one, and compare nothing. A warning names LayerDrop that transformers turns
    off for a sharded model.
    """
    if (share := layers_dropped_in_vain(model)) is not None:
        warn_once(
            f"layerdrop is {share}, and transformers runs every layer of a model that FSDP shards: no layer is dropped. "
            "Set it to 0 in the config, or train with strategy='ddp'."
        )
    if all(dist.get_backend(group) != "fake" for group in mesh_groups(mesh)):
        SameLayers(model, units, mesh)
