"""Which tests a tier takes."""

from pathlib import Path
from typing import Any, NamedTuple

from tests.conftest import chosen


class Item(NamedTuple):
    """A test, as pytest has it."""

    path: Path
    nodeid: str


def test_quick_takes_the_first_and_the_last_input() -> None:
    tests: Any = {Item(Path("a"), f"a::t[{place}]"): "quick" for place in range(4)} | {Item(Path("a"), "a::u"): "test"}
    assert [test.nodeid for test in chosen(tests, "quick")] == ["a::t[0]", "a::t[3]"]
    assert len(chosen(tests, "test")) == 5


def test_each_file_with_full_tests_lies_in_one_part() -> None:
    tests: Any = {Item(Path(name), f"{name}::{of}"): of for name in "abcdefgh" for of in ("test", "full")}
    assert [test.nodeid for test in chosen(tests, "test")] == [f"{name}::test" for name in "abcdefgh"]
    assert chosen(tests, "full") == list(tests)
    parts = [chosen(tests, "test", f"{place}/3") for place in (1, 2, 3)]
    full = [test.nodeid for part in parts for test in part if tests[test] == "full"]
    assert sorted(full) == [test.nodeid for test, of in tests.items() if of == "full"]
