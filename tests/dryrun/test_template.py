"""Command lines that differ in a few words."""

import pytest

from refshard.dryrun.template import combinations, inserted, read_search
from refshard.errors import SpecError


def test_all_combinations_are_made_the_last_choice_varies_first() -> None:
    made = combinations("--batch {1,2} {,--checkpoint} --name 'a b'", "--sweep")
    assert [one.words for one in made] == [
        ("--batch", "1", "--name", "a b"), ("--batch", "1", "--checkpoint", "--name", "a b"),
        ("--batch", "2", "--name", "a b"), ("--batch", "2", "--checkpoint", "--name", "a b"),
    ]  # fmt: skip
    assert [dict(one.choices) for one in made] == [
        {"--batch": "1", "--checkpoint": "no"}, {"--batch": "1", "--checkpoint": "yes"},
        {"--batch": "2", "--checkpoint": "no"}, {"--batch": "2", "--checkpoint": "yes"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("template", "names"),
    [
        ("--lr={1,2}", ["--lr"]),
        ("{--a,--b}", ["--a or --b"]),
        ("{,--a,--b}", ["--a or --b"]),
        ("--x {1,2} --x {3,4}", ["--x", "--x (2)"]),
        ("train.{small,large}.toml", ["small or large"]),
    ],
)
def test_choices_are_named_by_their_option(template: str, names: list[str]) -> None:
    assert list(combinations(template, "--sweep")[0].choices) == names


@pytest.mark.parametrize("template", ["--batch 4", "--batch {}", "--batch {1}", ""])
def test_a_sweep_without_choices_is_refused(template: str) -> None:
    with pytest.raises(SpecError, match=r"--sweep must have choices in braces, such as '--batch \{1,2,4\}', got"):
        combinations(template, "--sweep")


def test_quotes_that_do_not_close_are_refused() -> None:
    with pytest.raises(SpecError, match=r"--sweep: .* cannot be split into words \(No closing quotation\)"):
        combinations("--name 'a {1,2}", "--sweep")


def test_a_number_is_searched_for_in_steps() -> None:
    assert read_search("--batch {}").words(3) == ("--batch", "3")
    assert (read_search("--seq-len={1024}").name, read_search("--seq-len={1024}").step) == ("--seq-len", 1024)


@pytest.mark.parametrize("template", ["--batch", "--batch {1,2}", "--batch {} --length {}", "--batch {0}", "{x}"])
def test_a_search_for_no_number_is_refused(template: str) -> None:
    with pytest.raises(SpecError, match="--largest must leave one number open"):
        read_search(template)


def test_words_go_where_the_command_says() -> None:
    assert inserted(["train.py", "{}", "--last"], ["--batch", "2"]) == ("train.py", "--batch", "2", "--last")
    for command in (["train.py"], ["train.py", "{}", "{}"]):
        with pytest.raises(SpecError, match=r"must say once, with \{\}, where the options go that vary"):
            inserted(command, [])
