"""A Hugging Face model: checkpointed for training, and saved as any other.

    python docs/examples/hugging_face.py [FOLDER]

Needs the extra ``hf``. Use `from_pretrained` in place of the random weights here.
"""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_like import parallelize
from nemo_like.layers import find_layers

torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4)
model = LlamaForCausalLM(config).train()
print("layers:", ", ".join(layer.fqn for layer in find_layers(model)))

model = parallelize(model, ac="full")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
ids = torch.randint(64, (4, 32), device=model.device)
for step in range(5):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}")

# Parameter names are those of the bare model, so its own files and tools go on working.
with tempfile.TemporaryDirectory() as temporary:
    folder = sys.argv[1] if len(sys.argv) > 1 else temporary
    model.save_pretrained(folder)
    again = LlamaForCausalLM.from_pretrained(folder)
same = all(
    torch.equal(a, b.cpu()) for a, b in zip(again.state_dict().values(), model.state_dict().values(), strict=True)
)
print("saved and loaded:", "equal" if same else "different")
