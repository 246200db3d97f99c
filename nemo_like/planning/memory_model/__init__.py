"""Model of the memory of one micro-batch: allocations, frees and collectives in the order in which PyTorch makes them.

`microbatch` writes it, `fsdp_units` the gathers and reductions of FSDP2, `host_copies` what moves to CPU memory. Actions of
a whole step are in `nemo_like.planning.predictions.rank`. They are written into `storages`: one counts bytes, the other
lists allocations for the model of the caching allocator (`allocator`).
"""
