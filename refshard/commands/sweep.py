"""``refshard dryrun --sweep``, ``--largest`` and several sizes: many dry runs of one command, and the best of them."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path

import msgspec

from refshard.commands.dryrun import Options, request_of
from refshard.commands.printing import tell, write_page
from refshard.dryrun.sweep import Row, largest
from refshard.dryrun.template import Combination, Search, combinations, inserted, read_search
from refshard.dryrun.trials import Laboratory, Prediction, Trial
from refshard.errors import SpecError
from refshard.folders import new_run_folder
from refshard.quantities import format_bytes, format_seconds
from refshard.report.blocks import Answer
from refshard.report.dryrun.sweep import sweep_answer

TRIALS = "trials.jsonl"
Command = Callable[[Sequence[str], str, int | None], tuple[tuple[str, ...], int | None]]
"""The words of the command with these words in their place, on a cluster and a number of GPUs, and its tokens/step."""


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """What varies: ``sweep`` and ``largest`` are templates, ``gpus`` is empty for the default number. ``resume`` is the
    folder of an earlier sweep.
    """

    sweep: str | None = None
    largest: str | None = None
    clusters: tuple[str, ...]
    gpus: tuple[int, ...] = ()
    jobs: int
    resume: Path | None = None


def sweep(options: Options, varied: Sweep, command: Command, *, html: Path | None = None) -> Answer:
    """Dry-run all combinations; the status is 0 if one fits. ``html`` is a file for a page with the chart.

    Raises:
        SpecError: a template, the command, a cluster or another value is wrong.
    """
    chosen = combinations(varied.sweep, "--sweep") if varied.sweep else [Combination((), {})]
    search = read_search(varied.largest) if varied.largest else None
    places = list(product(varied.clusters, varied.gpus or (None,)))
    folder = _folder(varied.resume)
    several = {"cluster": len(varied.clusters) > 1, "GPUs": len(varied.gpus) > 1}

    def trial_of(place: tuple[str, int | None], words: Sequence[str]) -> Trial:
        cluster, gpus = place
        all_words, tokens = command(words, cluster, gpus)
        one = msgspec.structs.replace(options, cluster=cluster, gpus=gpus, words=all_words, tokens_per_step=tokens)
        return Trial(request=request_of(one), global_tokens=tokens)

    def choices_of(place: tuple[str, int | None], one: Combination, trial: Trial) -> Mapping[str, str]:
        named = {"cluster": place[0], "GPUs": f"{trial.request.world_size:,}"}
        return {**{name: text for name, text in named.items() if several[name]}, **one.choices}

    # All at once, so that what is wrong is said before anything runs.
    sizes = search.step if search else 1
    first = [
        (place, one, trial_of(place, (*one.words, *(search.words(sizes) if search else ()))))
        for place in places
        for one in chosen
    ]
    with Laboratory(varied.jobs, folder / TRIALS, _progress(None if search else len(first))) as laboratory:
        try:
            if search is None:
                found = laboratory.try_all([trial for *_, trial in first])
                rows = [Row(choices=choices_of(*one), trial=one[2], tried=t) for one, t in zip(first, found)]
            else:
                rows = [
                    row
                    for place, one, trial in first
                    for row in _searched(
                        laboratory, search, choices_of(place, one, trial),
                        lambda number, place=place, one=one: trial_of(place, (*one.words, *search.words(number))),  # type: ignore[misc]
                    )
                ]  # fmt: skip
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"what was tried is saved; go on with the same command and --resume {folder}"
            ) from None
    title = " ".join((*options.words, *filter(None, (varied.sweep, varied.largest))))
    answer = sweep_answer(rows, title, folder=folder, searched=search.name if search else "")
    if html is not None:
        write_page(answer, html, "dryrun")
    return answer


def _searched(
    laboratory: Laboratory, search: Search, choices: Mapping[str, str], trial_of: Callable[[int], Trial]
) -> list[Row]:
    """All that was tried to find the largest number under these choices."""
    tried = largest(laboratory, trial_of, search.step)
    return [
        Row(choices={**choices, search.name: f"{number:,}"}, trial=trial_of(number), tried=one)
        for number, one in tried.items()
    ]


def _folder(resume: Path | None) -> Path:
    if resume is None:
        folder = new_run_folder("sweep")
        folder.mkdir(parents=True)
        return folder
    if not (resume / TRIALS).is_file():
        raise SpecError(f"--resume: {resume} is not the folder of a sweep: it has no {TRIALS}")
    return resume


def _progress(total: int | None) -> Callable[[Trial, Prediction], None]:
    count = 0

    def report(trial: Trial, tried: Prediction) -> None:
        nonlocal count
        count += 1
        place = f"{count} of {total}" if total else f"{count}"
        found = f"failed: {tried.why}" if tried.fits is None else f"fits, {format_bytes(tried.reserved_bytes)}"
        found = f"does not fit, {tried.why}" if tried.fits is False else found
        speed = f", {format_seconds(tried.step_s)} a step" if tried.fits and tried.step_s else ""
        request = trial.request
        tell(f"[{place}] {' '.join(request.command)} on {request.world_size:,} of {request.cluster}: {found}{speed}")

    return report


def script_command(words: Sequence[str], tokens_per_step: int | None, *, varies: bool) -> Command:
    """The command of a script: words go where it says ``{}``."""

    def made(chosen: Sequence[str], _cluster: str, _gpus: int | None) -> tuple[tuple[str, ...], int | None]:
        return (inserted(words, chosen) if varies else tuple(words)), tokens_per_step

    return made
