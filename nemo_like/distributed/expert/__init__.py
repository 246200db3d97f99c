"""Expert parallelism: each rank of ``ep`` holds some of a layer's experts, and tokens travel to them and back.

`find_experts` finds which modules contain experts. `check_experts` refuses what cannot be split before anything is changed.
`split_experts` keeps this rank's part of the weights and sends tokens. `shard_experts` puts FSDP2 around that part.
"""

from nemo_like.distributed.expert.expert_mesh import ExpertMesh, make_expert_mesh, shard_experts
from nemo_like.distributed.expert.find_experts import Experts, find_experts, refuse_lists
from nemo_like.distributed.expert.split_experts import check_experts, split_experts

__all__ = [
    "ExpertMesh",
    "Experts",
    "check_experts",
    "find_experts",
    "make_expert_mesh",
    "refuse_lists",
    "shard_experts",
    "split_experts",
]
