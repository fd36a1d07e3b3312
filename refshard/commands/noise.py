"""``refshard noise``: how often gates on this machine would err, from launches of the same code."""

from collections.abc import Sequence
from pathlib import Path

from refshard import resources
from refshard.analysis.rehearsal import noise_of
from refshard.commands.launching import check_gated, run_folder
from refshard.commands.printing import tell
from refshard.commands.progress import observer as make_observer
from refshard.errors import SpecError
from refshard.measure.environment import capture_environment
from refshard.measure.gate import keep_noise, read_rounds, record_rounds
from refshard.measure.launchers.local import LocalLauncher
from refshard.measure.run import serial
from refshard.report.blocks import Answer
from refshard.report.gate.formats import noise_answer
from refshard.specs.suite import find_suite, load_suite


def noise(
    suite: str,
    *,
    rounds: int,
    permutations: int,
    recorded: Sequence[Path],
    oversubscribe: bool = False,
    baselines: Path = resources.BASELINES,
) -> Answer:
    """Launch ``suite`` against itself as often, or take rounds that were ``recorded`` in some folders; rehearse gates.

    Raises:
        RefshardError: the suite cannot be launched, or what is recorded is too little; nothing was written.
        KeyboardInterrupt: it was cut short; the rounds that ended are kept.
    """
    header, pairs, counted = read_rounds(recorded or [_record(suite, rounds, oversubscribe=oversubscribe)])
    try:
        found = noise_of(pairs, header.suite.gate.times, launches=counted, gates=permutations)
    except ValueError as error:
        raise SpecError(f"rounds: {error}") from None
    path = keep_noise(found, header.suite, header.environment, baselines)
    return noise_answer(found, path)


def _record(name: str, rounds: int, *, oversubscribe: bool) -> Path:
    suite = load_suite(find_suite(name))
    cases = check_gated(suite, oversubscribe=oversubscribe)
    references = [case for case in cases if case == case.reference()]
    timed = [case for case in cases if case not in references and serial(case)]
    if not timed:
        raise SpecError(f"suite: '{name}' has no measured case that is compared by time; add one")
    needed = suite.gate.times.screen_rounds + suite.gate.times.confirm_rounds
    if rounds < needed:
        raise SpecError(f"rounds must be >= {needed}, which one gate needs, got {rounds}; raise --rounds")
    folder = run_folder(f"noise-{suite.name}")
    environment = capture_environment(cases[0].protocol.threads_per_rank)
    with make_observer() as observer:
        record_rounds(
            suite, references, timed, folder, LocalLauncher(), environment, observer, tell, rounds=rounds
        )  # fmt: skip
    return folder
