from nemo_like.activation_checkpointing.apply import apply_specs as apply_specs
from nemo_like.activation_checkpointing.checkpointed import (
    SELECTIVE_AC_WRAPPER_FLAG as SELECTIVE_AC_WRAPPER_FLAG,
)
from nemo_like.activation_checkpointing.checkpointed import (
    is_checkpointed as is_checkpointed,
)
from nemo_like.activation_checkpointing.contexts import (
    make_selective_checkpoint_context_fn as make_selective_checkpoint_context_fn,
)
from nemo_like.activation_checkpointing.engine import is_recomputing as is_recomputing
from nemo_like.activation_checkpointing.kv_sharing import (
    detect_kv_sharing_and_maybe_disable_cache as detect_kv_sharing_and_maybe_disable_cache,
)
from nemo_like.activation_checkpointing.legacy import (
    CheckpointWrapper as CheckpointWrapper,
)
from nemo_like.activation_checkpointing.legacy import (
    apply_full_layer_checkpointing_to_layers as apply_full_layer_checkpointing_to_layers,
)
from nemo_like.activation_checkpointing.legacy import (
    apply_selective_checkpointing_to_layers as apply_selective_checkpointing_to_layers,
)
from nemo_like.activation_checkpointing.legacy import (
    apply_submodule_checkpointing as apply_submodule_checkpointing,
)
from nemo_like.activation_checkpointing.legacy import (
    is_selective_activation_checkpointing as is_selective_activation_checkpointing,
)
from nemo_like.activation_checkpointing.legacy import (
    unwrap_checkpoint_wrapper as unwrap_checkpoint_wrapper,
)
from nemo_like.activation_checkpointing.names import name as name
from nemo_like.activation_checkpointing.plan import Plan as Plan
from nemo_like.activation_checkpointing.policy import SelectivePolicy as SelectivePolicy
from nemo_like.activation_checkpointing.policy import TorchPolicy as TorchPolicy
from nemo_like.activation_checkpointing.spec import CheckpointSpec as CheckpointSpec
from nemo_like.activation_checkpointing.timesteps import checkpoint_timesteps as checkpoint_timesteps
from nemo_like.compile import compile_layers as compile_layers
from nemo_like.distributed.context.sequence_ops import (
    shard_sequence as shard_sequence,
)
from nemo_like.distributed.context.sequence_ops import (
    unshard_sequence as unshard_sequence,
)
from nemo_like.distributed.pipeline import Pipeline as Pipeline
from nemo_like.distributed.shard import shard_layers as shard_layers
from nemo_like.distributed.update_in_backward import (
    OptimizerInBackward as OptimizerInBackward,
)
from nemo_like.distributed.update_in_backward import (
    optimizer_in_backward as optimizer_in_backward,
)
from nemo_like.distributed.weights.materialize import materialize as materialize
from nemo_like.explaining.explain import explain as explain
from nemo_like.explaining.explanation import Explanation as Explanation
from nemo_like.fake_rank import DryRun as DryRun
from nemo_like.fake_rank import dry_run as dry_run
from nemo_like.integrations import (
    ActivationOffloadingMixin as ActivationOffloadingMixin,
)
from nemo_like.integrations import (
    NoOpManager as NoOpManager,
)
from nemo_like.integrations import (
    OffloadActivations as OffloadActivations,
)
from nemo_like.integrations import (
    get_lora_act_offloading_ctx_manager as get_lora_act_offloading_ctx_manager,
)
from nemo_like.job import Job as Job
from nemo_like.layers import layer_groups as layer_groups
from nemo_like.legacy import (
    ActivationCheckpointTransform as ActivationCheckpointTransform,
)
from nemo_like.legacy import (
    SelectiveCheckpointer as SelectiveCheckpointer,
)
from nemo_like.losses import chunked_cross_entropy as chunked_cross_entropy
from nemo_like.options import (
    DDP as DDP,
)
from nemo_like.options import (
    FSDP2 as FSDP2,
)
from nemo_like.options import (
    AllocatorConfig as AllocatorConfig,
)
from nemo_like.options import (
    CheckpointConfig as CheckpointConfig,
)
from nemo_like.options import (
    ChunkedLoss as ChunkedLoss,
)
from nemo_like.options import (
    ContextParallel as ContextParallel,
)
from nemo_like.options import (
    ExpertParallel as ExpertParallel,
)
from nemo_like.options import (
    MemoryBudget as MemoryBudget,
)
from nemo_like.options import (
    OffloadConfig as OffloadConfig,
)
from nemo_like.options import (
    PipelineParallel as PipelineParallel,
)
from nemo_like.options import (
    PlanSearch as PlanSearch,
)
from nemo_like.options import (
    Precision as Precision,
)
from nemo_like.options import (
    Single as Single,
)
from nemo_like.options import (
    StepSpec as StepSpec,
)
from nemo_like.options import (
    TensorParallel as TensorParallel,
)
from nemo_like.parallelizer import (
    apply_activation_checkpointing as apply_activation_checkpointing,
)
from nemo_like.parallelizer import (
    parallelize as parallelize,
)
from nemo_like.planning.fit import FitReport as FitReport
from nemo_like.planning.fit import fit as fit
from nemo_like.planning.planner import plan_for as plan_for
from nemo_like.planning.predict import predict as predict
from nemo_like.planning.report import PlanReport as PlanReport
from nemo_like.profiling import MemoryProfiler as MemoryProfiler
from nemo_like.profiling import ProfileReport as ProfileReport

__version__: str
