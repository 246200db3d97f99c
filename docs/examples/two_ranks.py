"""FSDP2 over all ranks of the job, from weights that are built in shards.

    torchrun --nproc-per-node 2 docs/examples/two_ranks.py

The same file runs on one rank, on many GPUs and on many nodes. The model is built on the meta device: no rank ever
holds more than its shards and one module whole.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_like import materialize, parallelize
from nemo_like.distributed import init_distributed, shutdown, world_size
from nemo_like.distributed.launch import rank


def main() -> None:
    """Train a few steps; each rank sees other data."""
    device = init_distributed()
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).train()
    model = parallelize(model, strategy="fsdp2", ac="selective")
    materialize(model, seed=0)  # the same weights on any number of ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    data = torch.Generator().manual_seed(rank())
    ids = torch.randint(64, (4, 32), generator=data).to(device)
    for step in range(5):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    held = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
    print(f"rank {rank()} of {world_size()} holds {held} of {sum(p.numel() for p in model.parameters())}", flush=True)
    shutdown()  # the last thing that every rank does


main()
