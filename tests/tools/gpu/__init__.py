"""`bash .ci/gpu`: what the package predicts about a GPU, measured on one. Requires torch and transformers alone.

Each check runs in a process of its own, with a budget in seconds; the next one imports in the meantime. A row is written
when it is measured, so a crash keeps it. A prediction that is wrong is a row like any other. At most 8 files and 11,000
printed characters, as many as a lent machine returns: traces and snapshots are in one archive.

| file | checks |
|---|---|
| `preflight` | 0: versions, private names of torch, rates of the machine |
| `memory` | 1: plans against the allocator; 11: memory that runs out, and snapshots |
| `speed` | 2: step times and AdamW; 7: compiled layers; 8: offloading; 10: the loss; 12: float8 |
| `bitwise` | 3: gradients of every mode; 13: first-step verification |
| `recipe` | 4: `nemo-like pretrain`, stopped and resumed |
| `ranks` | 5: sequences that are split; 6: the exchange of experts; 9: FSDP2 with one rank |
"""
