"""`fit`: find the fastest configuration of a training job that fits, before a GPU is used."""

from nemo_like.planning.fit.fitting import fit
from nemo_like.planning.fit.report import Candidate, FitReport

__all__ = ["Candidate", "FitReport", "fit"]
