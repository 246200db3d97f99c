"""Commands of the pages run as they are printed, each page in an empty folder."""

from __future__ import annotations

import pytest

from tests.tools.followed import follow, pages, steps

WITH_COMMANDS = [page for page in pages() if any(step.file is None and step.reason is None for step in steps(page))]


@pytest.mark.long
@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_the_commands_of_a_page_run_as_printed(page: str) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("tokenizers")
    for result in follow(page):
        assert result.code == 0, f"{result}\n{result.output[-3000:]}"


@pytest.mark.parametrize(
    "text",
    [
        "<!-- not run: -->\n```bash\nls\n```\n",  # no reason
        "<!-- not run: GPU -->\n```bash\nls\n```\n",  # a word is no reason
        "- item\n  ```bash\n  ls\n  ```\n",  # indented: would be left out silently
        "```bash\nls\n",  # never ends
    ],
)
def test_bad_comments_and_blocks_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"page\.md"):
        steps("page.md", text)


def test_a_page_is_read_in_its_order() -> None:
    text = (
        "<!-- file: a.py -->\n<!-- given:\nx = 1\n-->\n```python\nprint(x)\n```\n\n```bash\npython a.py\n```\n"
        "<!-- given: touch b -->\n```bash\nls b\n```\n\n```console\n$ ls\n```\n<!-- not run: needs a GPU -->\n"
        "```bash\nnvidia-smi\n```\n"
    )
    file, first, second, third = steps("page.md", text)
    assert (file.file, file.text) == ("a.py", "x = 1\n\nprint(x)\n") and first.text == "python a.py\n"
    assert (second.given, second.text, third.reason) == ("touch b", "ls b\n", "needs a GPU")
