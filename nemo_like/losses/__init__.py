"""Losses that take hidden states and a head, and never hold the logits of more than a chunk of tokens."""

from nemo_like.losses.cross_entropy import chunked_cross_entropy, chunked_log_probs

__all__ = ["chunked_cross_entropy", "chunked_log_probs"]
