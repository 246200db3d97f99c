"""What `nemo_like.planning.fit` has to find, by looking at every configuration."""

from __future__ import annotations

import itertools
from typing import Any

from nemo_like.planning.fit.search import Found, Search, StateOnHost


def search_of_all(search: Search, count: int = 10) -> Found:
    """The `count` best that fit."""
    everything: list[tuple[Any, ...]] = []
    for key in search.by_shape:
        shape = search._traced(key)
        entries = [entry for _, entry in search._entries(key)]
        there = [search._ways(shape, item.conf, (True,)) for item in entries if isinstance(item, StateOnHost)]
        entries += [entry for _, entry in itertools.chain(*there)]
        for conf, _ in (entry for entry in entries if isinstance(entry, tuple)):
            assert not isinstance(shape, str)
            resolved = search._resolve(shape, conf)
            if resolved is not None:
                per_token = search.question.per_token(resolved.seconds.total, conf)
                everything.append((per_token, len(everything), shape, conf, resolved))
    everything.sort(key=lambda entry: entry[:2])
    search.found.best = [search.candidate(*entry[2:]) for entry in everything[:count]]
    search.found.nearest = None if search.found.best else search._nearest()
    return search.found


def with_shapes_of(search: Search, other: Search) -> Search:
    """`search`, to which the shapes that it asks for are given as `other` of the same question traced them."""
    search.trace = other._traced
    return search
