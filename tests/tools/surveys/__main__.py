"""`python -m tests.tools.surveys`: what works on each model type of transformers, as `docs/evidence/surveys/models.md`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from nemo_like._util.console import check_writable, examples, refuse_unread, start_logging
from nemo_like._util.words import check_whole
from nemo_like.options import did_you_mean
from tests.tools.surveys import initial_values, layers, losses, plan_page, plans, popular

PROGRAM = "python -m tests.tools.surveys"

_SECTIONS = (plan_page.SECTION, losses.SECTION)
"""What stands on the page below the table of layers, in this order. An option makes each."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one survey; the exit status is 0 if all is well, 1 if the survey saw a fault, 2 for bad input."""
    start_logging()
    args = make_parser().parse_args(argv)
    try:
        return _run(args)
    except KeyboardInterrupt:
        return 130
    except (ValueError, ImportError, OSError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2


def make_parser() -> argparse.ArgumentParser:
    """The options of the surveys."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Survey the layers found in every model type of the installed transformers.",
        epilog=examples(PROGRAM, ("--only llama gemma3", "--losses --output docs/evidence/surveys/models.md")),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, help="write the table to this Markdown file (default: print it)")
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="only these model types")
    parser.add_argument(
        "--losses", action="store_true", help="survey loss='chunked' instead: run every language model, tiny (minutes)"
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="survey budgets instead: plan and run every model type, tiny (most of an hour; --only renews single rows)",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="with --plan and --output: go on with the types that the page does not have",
    )
    parser.add_argument(
        "--popular", action="store_true", help="survey every option on thirty models instead (ten minutes)"
    )
    parser.add_argument(
        "--initial", action="store_true", help="compare the values of materialize(seed=) instead (15 minutes)"
    )
    parser.add_argument("--processes", type=int, default=2, help="worker processes (default: 2)")
    parser.set_defaults(own=parser)
    return parser


def _run(args: argparse.Namespace) -> int:
    if args.resume and not (args.plan and args.output):
        raise ValueError("--resume goes on with a page of budgets: it needs --plan and --output.")
    if args.losses and args.plan:
        raise ValueError("--losses and --plan are two surveys. Leave one of the two out.")
    if args.popular:
        refuse_unread(
            args, ["only", "losses", "plan", "resume", "processes"], "the thirty models are a list of their own."
        )
        args.output = args.output or popular.PAGE
        args.output.write_text(popular.page())
        return 0
    if args.losses or args.plan or args.initial:
        refuse_unread(args, ["processes"], "this survey runs in one process.")
    check_whole("--processes", args.processes, 1)
    check_writable("--output", args.output)
    if args.losses:
        return _survey_losses(args)
    if args.initial:
        return _survey_initial_values(args)
    return _survey_plans(args) if args.plan else _survey_layers(args)


def _survey_layers(args: argparse.Namespace) -> int:
    known = layers.model_types()
    types = args.only or known
    _check_types(types, known)
    chunks = [types[start :: args.processes * 4] for start in range(args.processes * 4)]
    with ProcessPoolExecutor(args.processes, initializer=start_logging) as pool:
        rows = sorted((row for part in pool.map(layers.survey, chunks) for row in part), key=lambda row: row.model_type)
    text = layers.to_markdown(rows)
    if args.output is None:
        sys.stdout.write(text)
    else:
        args.output.write_text("\n".join([text, *_sections(_page(args.output))]))
    return 1 if any(layers.failures(rows)) else 0


def _survey_losses(args: argparse.Namespace) -> int:
    known = losses.language_models()
    _check_types(args.only or (), known, "class with a language head")
    rows = list(losses.survey(args.only or known))
    _write_section(args.output, losses.SECTION, losses.markdown(rows))
    return 1 if any(row.wrong for row in rows) else 0


def _survey_initial_values(args: argparse.Namespace) -> int:
    known = layers.model_types()
    _check_types(args.only or (), known)
    rows = list(initial_values.survey(args.only or known))
    (args.output or initial_values.PAGE).write_text(initial_values.markdown(rows))
    return 1 if any(row.verdict == "different" for row in rows) else 0


def _survey_plans(args: argparse.Namespace) -> int:
    known = plans.model_types()
    _check_types(args.only or (), list(known))
    before = _page(args.output) if args.only or args.resume else ""
    done = plan_page.surveyed(before) if args.resume else frozenset()
    rows = []
    for row in plans.survey(name for name in args.only or known if name not in done):
        rows.append(row)
        if args.output is not None:  # after each: what was measured is not lost when the survey is stopped
            _write_section(args.output, plan_page.SECTION, plan_page.markdown(rows, before))
    if args.output is None:
        sys.stdout.write(plan_page.markdown(rows))
    wrong = list(plan_page.failures(rows))
    for line in wrong:
        print(f"{PROGRAM}: {line}", file=sys.stderr)
    return 1 if wrong else 0


def _check_types(types: Iterable[str], known: list[str], what: str = "model type") -> None:
    for name in types:
        if name not in known:
            raise ValueError(f"--only names {name!r}, and transformers has no such {what}." + did_you_mean(name, known))


def _page(path: Path | None) -> str:
    return path.read_text() if path is not None and path.exists() else ""


def _sections(page: str) -> list[str]:
    """The sections of `_SECTIONS` that `page` has."""
    starts = sorted(at for at in (page.find(title + "\n") for title in _SECTIONS) if at >= 0)
    return [page[start:end].rstrip("\n") + "\n" for start, end in zip(starts, [*starts[1:], None])]


def _write_section(path: Path | None, title: str, text: str) -> None:
    """Put `text` in the place of the section with that title, or print it; the rest of the page stays."""
    if path is None:
        sys.stdout.write(text)
        return
    page = _page(path)
    sections = {part.splitlines()[0]: part for part in _sections(page)} | {title: text}
    head = page[: min((at for at in map(page.find, _SECTIONS) if at >= 0), default=len(page))]
    path.write_text("\n".join([head.rstrip("\n") + "\n", *(sections[name] for name in _SECTIONS if name in sections)]))


if __name__ == "__main__":
    sys.exit(main())
