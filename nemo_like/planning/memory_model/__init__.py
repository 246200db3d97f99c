"""Model of the memory of one micro-batch: allocations, frees and collectives in the order in which PyTorch makes them.

`microbatch` writes it, with copies to CPU memory, and `fsdp_units` the gathers and reductions of FSDP2. Actions of a
whole step are in `nemo_like.planning.predictions.rank`. They are written into `storages`: one counts bytes, the other
lists allocations for the model of the caching allocator (`allocator`).
"""
