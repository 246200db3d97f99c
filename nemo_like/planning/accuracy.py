"""Errors of predictions against published measurements."""

import json
from importlib import resources

from nemo_like._util.table import percent


def accuracy_words() -> str:
    """Return the median errors of the table of published steps (docs/evidence/public-numbers.md), in a line.

    >>> accuracy_words()
    'Off by: half of 58 published peaks within 2.6 %, half of 79 speeds within 11 %.'
    """
    text = resources.files("nemo_like.planning").joinpath("accuracy.json").read_text(encoding="utf-8")
    peaks, speeds = json.loads(text).values()
    of_peaks = f"half of {peaks['rows']} published peaks within {percent(peaks['median'])}"
    return f"Off by: {of_peaks}, half of {speeds['rows']} speeds within {percent(speeds['median'])}."
