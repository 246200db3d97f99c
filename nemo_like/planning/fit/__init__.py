"""`fit`: which configuration of a training job is the fastest that fits, before a GPU is touched."""

from nemo_like.planning.fit.candidate import Candidate
from nemo_like.planning.fit.fitting import fit
from nemo_like.planning.fit.report import FitReport

__all__ = ["Candidate", "FitReport", "fit"]
