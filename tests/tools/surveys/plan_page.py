"""The section of `docs/evidence/surveys/models.md` that says how planned budgets fared, model type by model type."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import torch

from nemo_like._util.extras import require
from tests.tools.surveys.plans import BATCH, BUDGET, CLOSE, SECONDS, TOKENS, SurveyedPlan, model_types
from tests.tools.surveys.tiny_models import cell

SECTION = "## Budgets"

CAUSES: dict[str, str] = {
    "flaubert": "it fills a key/value cache in every forward, and cannot be told not to",
    "gpt_neox_japanese": "its layers return attention weights that nobody takes: those that a plan keeps are counted twice",
    "ibert": "its quantization needs values",
    "jetmoe": "its router needs values",
    "longcat_flash": "its expert loop needs values",
    "longformer": "its windows of attention need values",
    "openai_privacy_filter": "its expert loop needs values",
    "vits": "its masks need values",
    "xlm": "it fills a key/value cache in every forward, and cannot be told not to",
}
"""Model types whose peak is off by more than `CLOSE`, or that cannot be planned: each with the cause."""


def failures(rows: Iterable[SurveyedPlan]) -> Iterator[str]:
    """What is wrong, one line each, those in `CAUSES` left out; budgets that are exceeded are never left out."""
    for row in rows:
        if row.exceeded:
            yield f"{row.model_type}: its step peaks {-row.peak_error:.1%} higher than predicted"
        elif row.trains and not row.close and row.model_type not in CAUSES:
            yield f"{row.model_type}: {row.problem or f'its peak is predicted {row.peak_error:.1%} too high'}"


_COLUMNS = "| model type | class | planned | ran | peak error | held error | code | cause |"


def markdown(rows: Iterable[SurveyedPlan], page: str = "") -> str:
    """Return the section of the page of surveys; what the one in `page` has of types that are not in `rows` stays."""
    rows = list(rows)
    version = require("transformers", "hf", "to name its version").__version__
    again = {row.model_type for row in rows}
    kept, others = ({name: line for name, line in found.items() if name not in again} for found in _tables_in(page))
    lines = kept | {row.model_type: _line(row) for row in rows if row.trains}
    others |= {
        row.model_type: f"| {row.model_type} | {cell(row.problem)} | {row.code} |" for row in rows if not row.trains
    }
    cells = [_cells(line) for line in lines.values()]
    codes = Counter([*(row[6] for row in cells), *(_cells(line)[2] for line in others.values())])
    errors = [float(row[4].rstrip("%")) / 100 for row in cells if row[3] == "yes"]
    close = sum(abs(error) <= CLOSE for error in errors)
    return "\n".join(
        (
            SECTION,
            "",
            "Made by `python -m tests.tools.surveys --plan --output docs/evidence/surveys/models.md`; `--only` renews "
            "the rows of some types, `--resume` goes on where it was stopped.",
            "",
            f"Of the {len(model_types())} model types of transformers {version}, {len(lines) + len(others)} were tried, and "
            f"{len(lines)} of these train here tiny (CPU, torch {torch.__version__}) on random input of the kind that they "
            f"name as their main one: {BATCH} x {TOKENS} tokens, two pictures, or two sounds. Each was planned (in at most "
            f"{SECONDS} s of CPU time) for {BUDGET:.0%} of its activation bytes (or the least that it can hold, where that "
            "is more), on one device in float32 with AdamW, and run for two steps; the peak of the second was compared with "
            f"the prediction, by the CPU allocator's events. {len(errors)} were planned and ran; of {close} the peak is "
            f"within {CLOSE:.0%} ({close / max(1, len(lines)):.1%} of those that train); {sum(e < -CLOSE for e in errors)} "
            f"peaked more than {CLOSE:.0%} higher than predicted. Errors are (predicted - measured) / measured; held: "
            "what is alive between forward and backward.",
            "",
            "The column `code` has the commit of this package that a row was made with (≤: with it or one before): "
            + ", ".join(f"{count} rows with {code}" for code, count in codes.most_common())
            + ".",
            "",
            _COLUMNS,
            "|---|---|---|---|---|---|---|---|",
            *(line for _, line in sorted(lines.items())),
            "",
            f"{len(others)} types do not train here on such input:",
            "",
            _OTHERS,
            "|---|---|---|",
            *(line for _, line in sorted(others.items())),
            "",
        )
    )


_OTHERS = "| model type | what it raised | code |"


def surveyed(page: str) -> frozenset[str]:
    """The model types that the section in `page` has a row for."""
    return frozenset(name for table in _tables_in(page) for name in table)


def _tables_in(page: str) -> tuple[dict[str, str], dict[str, str]]:
    """The lines of the two tables in the section of `page`, by model type: types that train, and the others."""
    section = page.partition(SECTION + "\n")[2].partition("\n## ")[0]
    trained, _, others = section.partition(_OTHERS)
    return _rows_of(trained.partition(_COLUMNS)[2]), _rows_of(others)


def _rows_of(table: str) -> dict[str, str]:
    return {line.split("|")[1].strip(): line for line in table.splitlines() if line.startswith("| ")}


def _cells(line: str) -> list[str]:
    return [part.strip() for part in line.split("|")[1:-1]]


def _line(row: SurveyedPlan) -> str:
    cause = CAUSES.get(row.model_type, "") if not row.close else ""
    said = "; ".join(filter(None, (cause, cell(row.problem))))
    errors = f"{row.peak_error:+.2%} | {row.held_error:+.2%}" if row.ran else "- | -"
    ran = "yes" if row.ran else "no"
    return f"| {row.model_type} | {row.model_class} | {row.planned or 'no'} | {ran} | {errors} | {row.code} | {said} |"
