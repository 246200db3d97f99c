"""A memory budget: plan once, save the plan, train with the saved plan.

    python docs/examples/budget_plan.py [PLAN.json]

Needs the extras ``hf`` and ``plan``. Planning needs no GPU, so it can be done before the job is in the queue.
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_like import Plan, parallelize, plan_for


def build() -> LlamaForCausalLM:
    """The same model in the planning and in the training process."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4
    )
    return LlamaForCausalLM(config).train()


path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp()) / "plan.json"
batch = {"input_ids": torch.randint(64, (4, 128))}
batch["labels"] = batch["input_ids"]

# Half of the activation bytes that no checkpointing would hold; "40GiB" would bound the peak of a whole step.
plan = plan_for(build(), ac="50%", sample_input=batch)
print(f"none would hold {plan.none_bytes / 1e6:.2f} MB, the plan holds {plan.held_bytes / 1e6:.2f} MB, ", end="")
print(f"replay is {plan.recompute_share:.0%} of a forward pass (predicted)")
plan.save(path)

model = build()
model = parallelize(model, ac=Plan.load(path, model))  # refused if it was made for another model
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(3):
    loss = model(**{name: ids.to(model.device) for name, ids in batch.items()}).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}")
