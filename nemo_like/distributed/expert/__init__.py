"""Expert parallelism: each rank of ``ep`` holds some of a layer's experts, and tokens travel to them and back.

In `split_experts`, `find_experts` finds which modules contain experts. `check_experts` refuses experts that cannot be
split before anything is changed. `split_experts` keeps this rank's part of the weights and sends tokens by `exchange`.
`shard_experts` puts FSDP2 around that part.
"""
