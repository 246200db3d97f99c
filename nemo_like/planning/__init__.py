"""Planning: the tensors of each layer to save for a memory budget, and the peak of a training step, without a GPU.

Names are imported when they are asked for: a job without a budget runs nothing of this folder but the check of a split.
"""

from nemo_like._util.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
