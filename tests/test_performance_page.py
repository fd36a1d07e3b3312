"""The tables of docs/performance.md are what ``refshard show`` prints of the records that are in the repository."""

import re
from pathlib import Path

from refshard.commands.show import show

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "performance.md").read_text()
RECORDED = ROOT / "profiles" / "recorded" / "epyc-2-cores"


def test_every_table_is_printed_from_the_records() -> None:
    printed = "\n\n".join(
        show(RECORDED / run, as_json=False, against=against)
        for run in ("engine", "engine_network")
        for against in (None, "refshard-yafsdp")
    )
    tables = [
        part.strip() for block in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL) for part in block.split("\n\n")
    ]
    assert len(tables) == 6
    for table in tables:
        assert table in printed, table


def test_what_came_of_the_aims_is_what_the_tables_say() -> None:
    """Each ratio with an interval, in the table of aims, stands in one of the tables of ratios."""
    aims = PAGE[PAGE.index("## What was aimed at") : PAGE.index("### Where the time goes")]
    ratios = re.findall(r"\d\.\d\d \(\d\.\d\d to \d\.\d\d\)", aims)
    assert len(ratios) == 5
    for ratio in ratios:
        assert f"  {ratio}  " in PAGE, ratio
