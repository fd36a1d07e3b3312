"""Numbers in README and docs come from records, blocks or the code, and the docs stay small."""

import re
from pathlib import Path

import pytest

from tests.printed import PAGES, ROOT, find_values
from tests.values import evaluate, untested, words

pytestmark = pytest.mark.slow

MOST_PAGES, MOST_WORDS = 25, 22_000
VALUES = [
    pytest.param(found["expression"], found["text"], id=f"{page.name}-{found['expression']}")
    for page in PAGES
    for found in find_values(page.read_text())
]


@pytest.mark.parametrize(("expression", "text"), VALUES)
def test_a_marked_value_is_what_its_expression_says(expression: str, text: str) -> None:
    assert text.strip() == evaluate(expression), "python -m tests.printed"


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES])
def test_every_number_with_a_unit_is_held(page: Path) -> None:
    """By a block or a generated table of the page, a marked value, or a link to its source in the same sentence."""
    assert list(untested(page.read_text())) == [], "mark them, link to their source, or leave them out"


def test_the_site_has_few_pages() -> None:
    assert len(re.findall(r"[\w-]+\.md$", (ROOT / "mkdocs.yml").read_text(), re.M)) <= MOST_PAGES


def test_the_docs_have_few_words() -> None:
    found = {str(page.relative_to(ROOT)): words(page.read_text()) for page in PAGES[1:]}
    assert sum(found.values()) <= MOST_WORDS, found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It takes 12.5 ms.", ["12.5 ms"]),
        ("A step is 4 to 5 % shorter, with 2,048 MiB and 1.6 times as much.", ["4 to 5 %", "2,048 MiB", "1.6 times"]),
        ("On 8 H100s with 8,192 tokens, 3 launches and a 95 % interval.", []),
        ("Run `--memory 80GiB`.\n\n```text\n5 ms\n```\n", []),
        ("It takes <!-- value: time(0.0125) -->12.5 ms<!-- end -->.", []),
        ("It takes 5 ms ([paper](https://arxiv.org/abs/1)). Or 6 ms.", ["6 ms"]),
        ("- 5 ms by [a paper](https://arxiv.org/abs/1)\n- 6 ms", ["6 ms"]),
        (
            "<!-- prints: refshard x -->\n\n```text\na  5.0 ms\n   15 %\n```\n\n5.0 ms, not 5 % or 5.1 ms.",
            ["5 %", "5.1 ms"],
        ),
        ("<!-- value: t() -->\n\n| a | 5 ms |\n| b | 6 ms |\n\n<!-- end -->\n\nFrom 5 to 6 ms, not 7 ms.", ["7 ms"]),
    ],
)
def test_numbers_that_nothing_holds_are_found(text: str, found: list[str]) -> None:
    assert list(untested(text)) == found


def test_words_are_counted_outside_of_code_tables_and_comments() -> None:
    page = (
        "# A title\n\n<!-- value: t() -->\n\n| a |\n| b |\n\n<!-- end -->\n\n```text\nx\n```\n\n| c | <!-- y --> d |\n"
    )
    assert words(page) == 4  # A title, c, d
