"""`nemo-like gpus`: the GPUs that ``--gpu`` knows by name."""

import argparse
from typing import Any

from nemo_like.planning.device_table import device_table, known_devices

EXAMPLES = ("",)
OPTIONS: dict[str, dict[str, Any]] = {}


def run(args: argparse.Namespace) -> int:
    """Print a line for each device."""
    print(f"{'gpu':12}{'memory':>11}{'16 bits':>17}{'bandwidth':>13}{'a node':>9}")
    table = device_table()
    for name in known_devices():
        device = table[name]
        speeds = f"{device['bf16_tflops']:>9,.4g} TFLOP/s{device['memory_gbps']:>8,} GB/s"
        print(f"{name:12}{device['memory_gib']:>7.1f} GiB{speeds}{device['gpus_per_node']:>9}")
    print("\nSpeeds are of the data sheet; plans use the share that kernels reach.\nAlso: a file like devices.json.")
    print("Try: nemo-like fit --model llama3-8b --gpus 8 --gpu h200")
    return 0
