"""What `nemo_like.planning.fit` has to find, by planning every layout in every way."""

from nemo_like.planning.fit.report import host_bytes_of
from nemo_like.planning.fit.search import Entry, PlannedLayout, Ranking, Search


def search_of_all(search: Search) -> list[PlannedLayout]:
    """All that fit, fastest first."""
    rows = [row for ranking in search.rankings for entry in _open(ranking) for row in _rows(search, entry)]
    return sorted(rows, key=lambda row: row.per_token)


def _open(ranking: Ranking) -> list[Entry]:
    every = ((i, j) for i in range(len(ranking.layouts)) for j in range(len(ranking.ways)) if ranking.open[i, j])
    return [Entry(ranking, *each) for each in every]


def _rows(search: Search, entry: Entry) -> list[PlannedLayout]:
    question, way = entry.ranking.question, entry.ranking.ways[entry.way]
    rows, modes = [], [mode for mode in ("none", "selective", "full") if mode != "none" or way.offload == "none"]
    for mode in modes:
        try:
            row = search.under(entry, mode)
        except ValueError:
            return []
        if row.need.bytes <= question.limit_of(row.query.job):
            rows.append(row)
    planned = search.planned(rows[-1]) if rows and "plan" in entry.ranking.modes else None
    rows = [row for row in rows if row.layout.ac in entry.ranking.modes] + ([planned] if planned is not None else [])
    return [row for row in rows if host_bytes_of(row.query, row.choices) <= question.host_memory]
