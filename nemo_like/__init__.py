"""Fit a model's training into GPU memory with PyTorch FSDP2, at the least cost in speed.

>>> from nemo_like import parallelize
>>> model = parallelize(model, strategy="fsdp2", ac="selective")  # doctest: +SKIP
"""

from nemo_like._util.lazy import lazy_names

__version__ = "0.1.0"
"""The version's only place: packaging reads this line, without importing the package."""

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
