"""`bash .ci/gpu`: what the package predicts about a GPU, measured on one. Requires torch and transformers alone.

Each check runs in a process of its own, with a budget in seconds. Its rows are written as they come into existence, so a
crash keeps them. A prediction that is wrong is a row like any other.

| file | checks |
|---|---|
| `preflight` | 0: versions, private names of torch, rates of the machine |
| `kernels` | 1: attention kernels; 6: the loss |
| `bitwise` | 2: gradients of every mode; 3: first-step verification |
| `memory` | 4: plans against the allocator; 10: snapshots |
| `speed` | 5: step times; 7: offloading |
| `ranks` | 8: sequences that are split; 9: FSDP2 with one rank |
"""
