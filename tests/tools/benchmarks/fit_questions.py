"""Twenty questions to `nemo-like fit`: what it answers, and the CPU seconds of each, in a process of its own.

python -m tests.tools.benchmarks.fit_questions OUT.json [NAME ...]      ask, and write OUT.json after each answer
python -m tests.tools.benchmarks.fit_questions --vs OLD.json NEW.json   tokens per second and CPU seconds, side by side
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

H100 = "--gpu h100-80gb"
QUESTIONS = {
    "8b-8": f"--model llama3-8b --gpus 8 --seq-len 8192 {H100}",
    "8b-8-batch": f"--model llama3-8b --gpus 8 --seq-len 8192 --global-batch 64 {H100}",
    "8b-64": f"--model llama3-8b --gpus 64 --seq-len 8192 --global-batch 512 {H100}",
    "8b-8-128k": f"--model llama3-8b --gpus 8 --seq-len 131072 {H100}",
    "8b-16-a100": "--model llama3-8b --gpus 16 --seq-len 4096 --gpu a100-80gb",
    "8b-8-fp8": f"--model llama3-8b --gpus 8 --seq-len 8192 --precision fp8 {H100}",
    "8b-8-compiled": f"--model llama3-8b --gpus 8 --seq-len 8192 --compile inductor --optimizer adamw-fused {H100}",
    "8b-4-short": f"--model llama3-8b --gpus 4 --seq-len 512 --global-batch 4 {H100}",
    "1b-1-card": "--model llama3-1b --gpus 1 --seq-len 2048 --gpu rtx-4090",
    "3b-1-card": "--model llama3-3b --gpus 1 --seq-len 2048 --gpu rtx-4090",
    "70b-8": f"--model llama3-70b --gpus 8 --seq-len 4096 {H100}",
    "70b-64": f"--model llama3-70b --gpus 64 --seq-len 8192 --global-batch 512 {H100}",
    "70b-128-h200": "--model llama3-70b --gpus 128 --seq-len 8192 --gpu h200",
    "70b-1-card": "--model llama3-70b --gpus 1 --seq-len 4096 --gpu rtx-4090",
    "405b-512": f"--model llama3-405b --gpus 512 --seq-len 8192 --global-batch 512 {H100}",
    "405b-16384": f"--model llama3-405b --gpus 16384 --seq-len 8192 --global-batch 2048 {H100}",
    "mixtral-64": f"--model mixtral-8x7b --gpus 64 --seq-len 4096 {H100}",
    "qwen3-moe-64": f"--model qwen3-30b-a3b --gpus 64 --seq-len 8192 {H100}",
    "gpt-oss-120b-64": f"--model gpt-oss-120b --gpus 64 --seq-len 8192 {H100}",
    "deepseek-2048": f"--model deepseek-v3 --gpus 2048 --seq-len 4096 {H100}",
}


def ask(words: str) -> dict[str, Any]:
    """Return what the command answers: its best, and the CPU seconds of the process, imports included."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        command = [sys.executable, "-m", "nemo_like", "fit", *words.split(), "--json", str(out)]
        before = os.times()
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        after = os.times()
        seconds = after.children_user + after.children_system - before.children_user - before.children_system
        body = json.loads(out.read_text()) if out.exists() else {}
    best = (body.get("candidates") or [{}])[0]
    names = ("dp_replicate", "dp_shard", "tp", "cp", "ep", "pp", "schedule", "micro_batch", "grad_accum", "ac", "loss")
    names += (
        "offload",
        "reshard_after_forward",
        "cpu_offload",
        "peak_bytes",
        "step_seconds",
        "tokens_per_second_per_gpu",
    )
    return {
        "code": ended.returncode,
        "cpu_seconds": round(seconds, 1),
        "best": {name: best[name] for name in names if name in best},
        "searched": body.get("searched"),
        "said": (ended.stdout if not best else "")[:600] or ended.stderr[-400:],
    }


def main(words: list[str]) -> None:
    if words[0] == "--vs":
        old, new = (json.loads(Path(name).read_text()) for name in words[1:])
        for name in QUESTIONS:
            speeds = [each.get(name, {}).get("best", {}).get("tokens_per_second_per_gpu", 0.0) for each in (old, new)]
            seconds = [each.get(name, {}).get("cpu_seconds", 0.0) for each in (old, new)]
            print(f"{name:16} {speeds[0]:9,.1f} {speeds[1]:9,.1f} tokens/s/GPU  {seconds[0]:6.1f} {seconds[1]:6.1f} s")
        return
    out = Path(words[0])
    answers = json.loads(out.read_text()) if out.exists() else {}
    for name in words[1:] or QUESTIONS:
        answers[name] = ask(QUESTIONS[name])
        out.write_text(json.dumps(answers, indent=1))
        print(name, answers[name]["code"], answers[name]["cpu_seconds"], answers[name]["best"], flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
