"""Activations that wait in host memory: with checkpointing, and as a context manager around a bare model.

    python docs/examples/offload.py

On a machine without an accelerator the bytes are copied within host memory, which shows what would move and saves
nothing.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_like import OffloadConfig, parallelize
from nemo_like.offload import offload_activations, offloader_of


def build() -> LlamaForCausalLM:
    """The same weights every time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4
    )
    return LlamaForCausalLM(config).train()


ids = torch.randint(64, (4, 128))


def gradients(model: LlamaForCausalLM) -> list[torch.Tensor]:
    """Of one step, on the CPU."""
    return [parameter.grad.cpu() for parameter in model.parameters()]


# What the policy keeps, and the layers' inputs, wait on the host. Real models keep the default of 1 MiB for min_bytes.
together = parallelize(build(), ac="selective", offload=OffloadConfig("saved", min_bytes=1024))
together(input_ids=ids.to(together.device), labels=ids.to(together.device)).loss.backward()
print("with checkpointing, bytes moved:", offloader_of(together).stats.moved_bytes)

# Everything that autograd keeps, without checkpointing.
alone = build().to(together.device)
offloader = offload_activations(OffloadConfig("all", min_bytes=1024), model=alone)
with offloader:
    loss = alone(input_ids=ids.to(alone.device), labels=ids.to(alone.device)).loss
loss.backward()
print("alone, bytes moved:", offloader.stats.moved_bytes)

same = all(torch.equal(a, b) for a, b in zip(gradients(together), gradients(alone), strict=True))
print("gradients:", "bitwise equal" if same else "different")
