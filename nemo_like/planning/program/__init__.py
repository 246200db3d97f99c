"""The step of one rank as a program: allocations, frees and collectives in the order in which PyTorch makes them.

`step` writes one micro-batch of one stage, `rank` the steps of a rank of a pipeline, `units` what FSDP2 gathers and reduces.
What a layer and the model around the layers allocate was recorded (`records`). `readers` are what a program is written
into: one counts bytes, the other runs the caching allocator.
"""
