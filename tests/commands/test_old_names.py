"""Options and keys that had another name end with the new one."""

import pytest

from refshard.cli import _RENAMED, main
from refshard.errors import SpecError
from refshard.specs.case import RENAMED
from refshard.specs.suite import SuiteSpec


@pytest.mark.parametrize(
    ("command", "old", "new"), [(command, *pair) for command, pairs in _RENAMED.items() for pair in pairs.items()]
)
def test_an_old_option_names_the_new_one(command: str, old: str, new: str, capsys: pytest.CaptureFixture[str]) -> None:
    for given in ([old, "2"], [f"{old}=2"]):
        with pytest.raises(SystemExit) as ended:
            main([command, *given])
        assert ended.value.code == 2
        assert capsys.readouterr().err == f"refshard: {command}: no option {old}: it is now {new}\n"


@pytest.mark.parametrize("script", [["--"], ["train.py"]])
def test_a_script_may_have_options_of_these_names(script: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["dryrun", "--cluster", "none", *script, "--world-size", "2"])
    assert "it is now" not in capsys.readouterr().err


@pytest.mark.parametrize(("old", "new"), [*RENAMED.items(), ("dtype", "precision")])
def test_an_old_key_of_a_suite_names_the_new_one(old: str, new: str) -> None:
    with pytest.raises(SpecError, match=f"matrix has the unknown key '{old}'; it is now '{new}'"):
        SuiteSpec(name="s", matrix={"strategy": "ddp", old: 2})


def test_the_shard_axis_is_what_the_others_leave() -> None:
    with pytest.raises(
        SpecError, match=r"key 'dp_shard'; leave it out: it is gpus / \(dp_replicate \* tp \* cp \* pp\)"
    ):
        SuiteSpec(name="s", matrix={"strategy": "ddp", "dp_shard": 2})
