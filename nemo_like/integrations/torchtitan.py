"""nemo_like's checkpointing where torchtitan takes a policy: ``activation_checkpoint=`` of its trainer's config.

    from nemo_like.integrations.torchtitan import activation_checkpoint

    config = llama3_debugmodel()                       # any of torchtitan's, or one of your own
    config.activation_checkpoint = activation_checkpoint("selective")

torchtitan then compiles and shards around it as around its own. torchtitan is imported when the policy is made.
"""

import functools
from dataclasses import dataclass
from typing import Any

from torch import nn

from nemo_like._util.extras import require
from nemo_like.activation_checkpointing.plan import Plan
from nemo_like.parallelizer import apply_activation_checkpointing

__all__ = ["activation_checkpoint"]


def activation_checkpoint(ac: object = "selective", *, sample_input: object = None) -> Any:
    """A config for torchtitan's ``activation_checkpoint``, whose policy is `nemo_like.apply_activation_checkpointing`.

    Args:
        ac: as for `nemo_like.parallelize`: a mode, a budget, a `Plan` or the path of a saved one (``*.json``), or a policy
            object.
        sample_input: one rank's input to the model in a step; needed by budgets.

    Raises:
        MissingExtraError: torchtitan is not installed.
        ValueError: where torchtitan applies it, for its own settings of PyTorch's checkpointing
            (``preserve_rng_state=False``, ``determinism_check``, ``debug``), and as `nemo_like.parallelize`.
    """
    return _policy().Config(ac=ac, sample_input=sample_input)


@functools.lru_cache(maxsize=1)
def _policy() -> Any:
    titan: Any = require(
        "torchtitan.distributed.activation_checkpoint", "torchtitan", "for its activation checkpointing"
    )

    class NemoLikeAC(titan.ActivationCheckpointing):
        @dataclass(kw_only=True, slots=True)
        class Config(titan.ActivationCheckpointing.Config):
            ac: Any = "selective"
            sample_input: Any = None

        def apply(self, model: nn.Module) -> None:
            config = self.config
            if not config.preserve_rng_state or config.debug or config.determinism_check != "default":
                raise ValueError(
                    f"preserve_rng_state={config.preserve_rng_state}, determinism_check={config.determinism_check!r}, "
                    f"debug={config.debug}: these are settings of PyTorch's checkpointing. nemo_like always recomputes "
                    "with the forward's random numbers, and compares recomputation and forward in the first step. Leave "
                    "them as they are."
                )
            saved = isinstance(config.ac, str) and config.ac.endswith(".json")
            # torchtitan compiles the blocks afterwards, or does not; the same modules are wrapped.
            apply_activation_checkpointing(
                model, Plan.load(config.ac) if saved else config.ac, compile=True, sample_input=config.sample_input
            )

    return NemoLikeAC
