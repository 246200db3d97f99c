"""Pipeline parallelism: a model cut into stages, on the schedules of `torch.distributed.pipelining`."""

from nemo_like.distributed.pipeline.pipeline import Pipeline

__all__ = ["Pipeline"]
