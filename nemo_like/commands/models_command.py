"""`nemo-like models`: the models that ``--model`` knows by name."""

import argparse
from typing import Any

from nemo_like.presets import PRESETS

EXAMPLES = ("",)
OPTIONS: dict[str, dict[str, Any]] = {}


def run(args: argparse.Namespace) -> int:
    """Print a line for each model."""
    print(f"{'model':16}{'family':13}{'layers':>6}{'width':>8}{'heads':>7}{'vocabulary':>12}")
    for name, config in PRESETS.items():
        sizes = f"{config['num_hidden_layers']:>6}{config['hidden_size']:>8}{config['num_attention_heads']:>7}"
        print(f"{name:16}{config['model_type']:13}{sizes}{config['vocab_size']:>12,}")
    print("\nAlso: a config.json or its folder, and module:function.\nTry: nemo-like plan --model llama3-8b --gpus 8")
    return 0
