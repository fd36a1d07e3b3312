"""Parts of the slow tests: each file lies in one of them, and the first files in different ones."""

import argparse
from itertools import chain

import pytest

from tests.parts import part_of, places


@pytest.mark.parametrize("parts", [1, 2, 6, 9])
def test_each_file_lies_in_one_part(parts: int) -> None:
    files = list("abcdefgh")
    found = [part_of(files, (place, parts)) for place in range(1, parts + 1)]
    assert sorted(chain.from_iterable(found)) == files
    assert [part[0] for part in found if part] == files[:parts]


def test_a_part_is_written_as_a_fraction() -> None:
    assert places("2/6") == (2, 6)


@pytest.mark.parametrize("text", ["", "2", "0/6", "7/6", "2/0", "2/6/1", "-1/6"])
def test_what_is_no_part_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="K/N with 1 <= K <= N"):
        places(text)
