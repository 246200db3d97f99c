"""The commands of the program ``nemo-like``: a module ``NAME_command`` each, and its purpose in a line here.

Nothing here imports torch, and a module imports it only when its command runs.
"""

from nemo_like.recipes import JOBS

COMMANDS = {
    "bench": "run all modes of checkpointing side by side on a model: time, bytes, FLOPs, gradients",
    "explain": "name the parts of a GPU's memory at its peak, and those that should not be there, by a snapshot of PyTorch",
    "finetune": JOBS["finetune"],
    "fit": "find the fastest configuration that fits on a number of GPUs, without one",
    "layers": "print the layers of a model: its groups, the units to shard and to checkpoint, their parameters and bytes",
    "plan": "predict the peak memory of a training step and find the fastest plan that fits, without a GPU",
    "pretrain": JOBS["pretrain"],
    "profile": "measure what each layer of a model saves for backward and how long it takes, and what to recompute for a "
    "budget",
}
"""The commands there are, by name, and what each is for."""

LORA = "adapters of this rank train, all else is frozen, in the dtype of --precision (peft)"
"""The help of ``--lora``."""
VOCAB_SIZE = "for a module:function that takes token ids and states no vocab_size"
"""The help of ``--vocab-size``."""
