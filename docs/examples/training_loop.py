"""A loop of your own: gradient accumulation, clipping, and a checkpoint that any other mode reads.

python docs/examples/training_loop.py [FILE]
torchrun --nproc-per-node 2 docs/examples/training_loop.py [FILE]
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_like import parallelize
from nemo_like.distributed import clip_grad_norm_, get_model_state, init_distributed, set_gradient_sync, shutdown
from nemo_like.distributed.launch import rank

MICROBATCHES = 4


def build() -> LlamaForCausalLM:
    """The same weights on every rank: FSDP2 puts one model together from the ranks' shards."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4
    )
    return LlamaForCausalLM(config).train()


def main() -> None:
    """Train three steps of four microbatches, then write the weights."""
    device = init_distributed()
    model = parallelize(build(), strategy="fsdp2", ac="selective")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(1 + rank())
    ids = torch.randint(64, (MICROBATCHES, 2, 32), generator=data).to(device)
    for step in range(3):
        for number, microbatch in enumerate(ids, start=1):
            set_gradient_sync(model, number == MICROBATCHES)  # reduce over the ranks once per step
            loss = model(input_ids=microbatch, labels=microbatch).loss
            (loss / MICROBATCHES).backward()
        norm = clip_grad_norm_(model, max_norm=1.0)  # the norm of the whole model, not of this rank's shards
        optimizer.step()
        optimizer.zero_grad()
        if rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}, gradient norm {norm.item():.3f}", flush=True)

    state = get_model_state(model, full=True)  # a collective; whole tensors on rank 0, {} on the others
    if rank() == 0:
        path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp()) / "weights.pt"
        torch.save(state, path)
        build().load_state_dict(torch.load(path), strict=True)  # names are the bare model's
        print(f"saved {len(state)} tensors", flush=True)
    shutdown()


main()
