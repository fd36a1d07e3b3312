"""``refshard dryrun --sweep``, ``--largest`` and several sizes: many dry runs of one command, and the best of them."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path

import msgspec
from msgspec.structs import replace

from refshard.commands.dryrun import Options, trial_of
from refshard.commands.dryrun_model import changed
from refshard.commands.printing import check_writable, elapsed, tell, write_page
from refshard.commands.sizes import sized
from refshard.dryrun.measured_prices import check_share
from refshard.dryrun.sweep import Row, largest
from refshard.dryrun.template import PLACE, Combination, Search, combinations, inserted, read_search
from refshard.dryrun.trials import Laboratory, Prediction, Trial
from refshard.errors import SpecError
from refshard.folders import new_run_folder
from refshard.quantities import format_bytes, format_seconds
from refshard.report.blocks import Answer
from refshard.report.dryrun.sweep import sweep_answer
from refshard.specs.cluster import load_cluster

TRIALS = "trials.jsonl"


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """What varies, as on the command line: ``sweep`` and ``largest`` are templates, ``clusters`` and ``gpus`` lists.
    ``resume`` is the folder of an earlier sweep.
    """

    sweep: str | None = None
    largest: str | None = None
    clusters: str
    gpus: str | None = None
    resume: Path | None = None


def sweep(options: Options, varied: Sweep, *, html: Path | None = None) -> Answer:
    """Dry-run all combinations; the status is 0 if one fits, 3 if none gave an answer. ``html`` is a file for a
    page with the chart.

    Raises:
        SpecError: a template, the command, a cluster or another value is wrong.
        TraceError: the trace with prices is damaged, shows no kernels of a GPU, or is of another job.
    """
    if options.ranks or options.races or options.advise or options.compile == "both":
        raise SpecError(
            "dryrun: --ranks, --races, --advise and --compile both are for a single dry run, not for several"
        )
    check_writable(html=html)
    chosen = [Combination((), {})] if varied.sweep is None else combinations(varied.sweep, "--sweep")
    search = None if varied.largest is None else read_search(varied.largest)
    clusters = [name.strip() for name in varied.clusters.split(",")]
    places = [
        (cluster, part.world_size if varied.gpus else None)
        for cluster in clusters
        for part in sized(varied.gpus, load_cluster(cluster))
    ]
    several = {"cluster": len(clusters) > 1, "GPUs": len(places) > len(clusters)}

    labels = dict[str, str]()

    def at(place: tuple[str, int | None], words: Sequence[str]) -> Trial:
        trial = trial_of(replace(_with_words(options, words), cluster=place[0], gpus=place[1]))
        labels[trial.key] = shlex.join(words) or (options.training.model if options.training else "the command")
        return trial

    def choices_of(place: tuple[str, int | None], one: Combination, trial: Trial) -> Mapping[str, str]:
        named = {"cluster": place[0], "GPUs": f"{trial.request.world_size:,}"}
        return {**{name: text for name, text in named.items() if several[name]}, **one.choices}

    # All at once, so that what is wrong is said before anything runs.
    number = search.words(search.step) if search else ()
    first = [(place, one, at(place, (*one.words, *number))) for place, one in product(places, chosen)]
    for *_, trial in first:
        trial.check_prices()
    folder = _folder(varied.resume)
    progress = _Progress(labels, None if search else len(labels))
    with Laboratory(options.jobs, folder / TRIALS, progress.ended) as laboratory, elapsed(progress.standing):
        try:
            if search is None:
                progress.count = sum(map(laboratory.knows, {trial.key: trial for *_, trial in first}.values()))
                found = laboratory.try_all([trial for *_, trial in first])
                rows = [Row(choices=choices_of(*one), trial=one[2], tried=t) for one, t in zip(first, found)]
            else:
                rows = [
                    row
                    for place, one, trial in first
                    for row in _searched(
                        laboratory, search, choices_of(place, one, trial),
                        lambda number, place=place, one=one: at(place, (*one.words, *search.words(number))),  # type: ignore[misc]
                    )
                ]  # fmt: skip
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"what was tried is saved; go on with the same command and --resume {folder}"
            ) from None
    shares = [row.tried.measured for row in rows if row.tried.measured is not None]
    if options.prices is not None and shares:
        check_share(max(shares), options.prices)
    title = " ".join((*options.words, *filter(None, (varied.sweep, varied.largest))))
    answer = sweep_answer(rows, title, folder=folder, searched=search.name if search else "")
    if html is not None:
        write_page(answer, html, "dryrun")
    return answer


def _with_words(options: Options, words: Sequence[str]) -> Options:
    """The command with ``words`` in place of its ``{}``; the training with the options that they are."""
    if options.training is not None:
        return replace(options, training=changed(options.training, words))
    return replace(options, words=inserted(options.words, words) if words or PLACE in options.words else options.words)


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


class _Progress:
    """How many dry runs have ended, ``of`` how many (None: not known), and what each found; ``labels`` are the words
    that vary, by the trial's key.
    """

    def __init__(self, labels: Mapping[str, str], of: int | None) -> None:
        self.count, self._labels, self._of = 0, labels, "" if of is None else f"/{of}"

    def standing(self) -> str:
        """How many have ended, as text."""
        return f"[{self.count}{self._of}] dry runs"

    def ended(self, trial: Trial, tried: Prediction) -> None:
        """Print a line: what was run, and what it found."""
        self.count += 1
        found = f"no answer: {tried.why}" if tried.fits is None else f"fits, {format_bytes(tried.reserved_bytes)}"
        found = f"does not fit, {tried.why}" if tried.fits is False else found
        speed = f", {format_seconds(tried.step_s)} a step" if tried.fits and tried.step_s else ""
        request = trial.request
        where = f"{self._labels[trial.key]} on {request.world_size:,} GPUs of {request.cluster}"
        tell(f"[{self.count}{self._of}] {where}: {found}{speed}")
