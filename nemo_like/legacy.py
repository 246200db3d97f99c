"""The older words for the same thing: a checkpointer driven by a profile, and a transform by layer class names."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from nemo_like._util.log import warn_once
from nemo_like._util.words import a_or_an
from nemo_like.activation_checkpointing.apply import apply_specs, refuse_checkpointed
from nemo_like.layers import Layer, LayersNotFoundError, find_layers
from nemo_like.options import CheckpointConfig
from nemo_like.profiling import MemoryProfiler, ProfileReport
from nemo_like.resolve import choose_layers, class_names, config_specs, layers_of_classes


class SelectiveCheckpointer:
    """Checkpoints the layers that a config and a profile ask for.

    >>> from nemo_like import CheckpointConfig
    >>> config = CheckpointConfig(enabled=True, strategy="full", profile_before_apply=False, exclude_patterns=["0"])
    >>> block = lambda: nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    >>> checkpointer = SelectiveCheckpointer(config)
    >>> model = checkpointer.apply(nn.Sequential(block(), block(), block()))
    >>> checkpointer.get_checkpointed_layers()
    ['1', '2']
    """

    def __init__(self, config: CheckpointConfig | Mapping[str, Any], profiler: MemoryProfiler | None = None) -> None:
        """Prepare.

        Args:
            config: a `CheckpointConfig`, or a mapping of its fields.
            profiler: its last profile is used where `apply` is given none.

        Raises:
            ValueError, TypeError: a wrong config, or something else than a `MemoryProfiler`.
        """
        self.config = config if isinstance(config, CheckpointConfig) else CheckpointConfig.from_dict(config)
        if profiler is not None and not isinstance(profiler, MemoryProfiler):
            raise TypeError(f"profiler is {a_or_an(profiler)}; it must be a MemoryProfiler or None.")
        self._profiler = profiler
        self._checkpointed: list[str] = []

    def apply(
        self, model: nn.Module, profile_report: ProfileReport | None = None, *, sample_input: object = None
    ) -> nn.Module:
        """Checkpoint `model` in place and return it.

        With a profile (given, or the profiler's last, or made here from `sample_input`) and
        `CheckpointConfig.profile_before_apply`, only layers above `memory_threshold_mb` are checkpointed. Without
        one, all of them, and this is logged.

        Args:
            model: changed in place.
            profile_report: measured on this model.
            sample_input: one batch (see `MemoryProfiler.profile`), to profile where there is no report yet.

        Raises:
            ValueError: no layers, a pattern or class that matches nothing, or a model that is checkpointed already.
                The model is unchanged then.
        """
        self._checkpointed, config = [], self.config
        if config.mode == "none":
            return model
        refuse_checkpointed(model)
        if config.snn_timestep_checkpoint:
            self._checkpointed = list(apply_specs(model, config_specs(model, (), config)))
            return model
        report = profile_report
        if report is None and self._profiler is not None:
            report = self._profiler.report
        if report is None and sample_input is not None and config.profile_before_apply:
            report = MemoryProfiler(model).profile(sample_input, config.profile_num_runs)
        saved = None if report is None else {row.name: row.activation_bytes for row in report}
        chosen = choose_layers(
            model, _candidates(model, config, report), dataclasses.replace(config, layer_classes=None), saved
        )
        # The choice is made: no pattern and no threshold is left to be applied a second time.
        narrowed = dataclasses.replace(
            config, layer_classes=None, include_patterns=(), exclude_patterns=(), profile_before_apply=False
        )
        apply_specs(model, config_specs(model, chosen, narrowed, saved) if chosen else ())
        self._checkpointed = [layer.fqn for layer in chosen]
        return model

    def get_checkpointed_layers(self) -> list[str]:
        """The names of the layers (or cells) that the last `apply` checkpointed, in the model's order."""
        return list(self._checkpointed)


class ActivationCheckpointTransform:
    """Checkpoints the modules of given classes; of nested ones the outermost.

    >>> config = {"enabled": True, "strategy": "full", "layer_classes": ["Linear"]}
    >>> model = ActivationCheckpointTransform(config).apply(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    >>> from nemo_like import is_checkpointed
    >>> [is_checkpointed(module) for module in model]
    [True, False]
    """

    def __init__(self, cfg: CheckpointConfig | Mapping[str, Any]) -> None:
        """Prepare; raises ValueError or TypeError for a wrong config."""
        self.config = cfg if isinstance(cfg, CheckpointConfig) else CheckpointConfig.from_dict(cfg)

    def apply(self, model: nn.Module) -> nn.Module:
        """Checkpoint the modules of `CheckpointConfig.layer_classes` (None: the repeated layers); returns `model`.

        Where no module has such a class, a warning names the classes that there are, and nothing is changed.

        Raises:
            ValueError: a pattern that matches nothing, or a model that is checkpointed already.
        """
        config = self.config
        if config.mode == "none":
            return model
        refuse_checkpointed(model)
        if config.layer_classes is not None:
            layers = layers_of_classes(model, config.layer_classes)
            if not layers:
                warn_once(
                    f"ActivationCheckpointTransform was asked for the classes {', '.join(config.layer_classes)}, and "
                    f"the {type(model).__name__} has none of them: nothing is checkpointed. Its classes are: "
                    f"{', '.join(class_names(model))}."
                )
                return model
        else:
            layers = find_layers(model)
        narrowed = dataclasses.replace(config, layer_classes=None, profile_before_apply=False)
        apply_specs(model, config_specs(model, layers, narrowed))
        return model


def _candidates(model: nn.Module, config: CheckpointConfig, report: ProfileReport | None) -> tuple[Layer, ...]:
    if config.layer_classes is not None:
        layers = layers_of_classes(model, config.layer_classes)
        if not layers:
            raise ValueError(
                f"CheckpointConfig.layer_classes is {list(config.layer_classes)}, and the {type(model).__name__} has "
                f"no such module; it has {', '.join(class_names(model)[:12])}."
            )
        return layers
    try:
        return find_layers(model)
    except LayersNotFoundError:
        if report is None:
            raise
    return find_layers(model, report.call_names)  # a profile of a model without repeated layers names its children
