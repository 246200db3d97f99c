"""Planning: what to keep of each layer for a memory budget, and what a training step will peak at, without a GPU.

Names are imported when they are asked for: a job without a budget runs nothing of this folder but the check of a split.
"""

from nemo_like._util.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
