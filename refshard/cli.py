"""The command line: parse, call one command, print.

Exit status: 0 when everything asked for was done and every case ended ok or is unsupported, 1 when a case did not, 2
for a mistake in what was asked, 130 when interrupted.
"""

import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from refshard import resources
from refshard.errors import RefshardError, SpecError
from refshard.harness.interruption import ignore_more, interruptible, mortal

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
_Baselines = Annotated[Path, typer.Option(help="Where accepted baselines lie, and the noise of machines.")]
_Output = Annotated[Path | None, typer.Option("--out", "-o", help="Where to write; a new place by default.")]


@contextmanager
def _interruptible(left: str) -> Iterator[None]:
    """A signal that asks this process to end does so in order, with one line that says what is ``left``."""
    try:
        with interruptible():
            yield
    except KeyboardInterrupt:
        ignore_more()
        print(f"refshard: interrupted; {left}", file=sys.stderr)
        raise typer.Exit(130) from None


@contextmanager
def _harness_errors() -> Iterator[None]:
    """An error that nobody foresaw must not end as a regression does, with status 1."""
    try:
        yield
    except (RefshardError, typer.Exit):
        raise
    except Exception:
        traceback.print_exc()
        raise typer.Exit(2) from None


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """Which way of sharding a training run is fastest and leanest here, by how much, and why."""
    if version:
        print(f"refshard {metadata.version('refshard')}")
        raise typer.Exit


@app.command()
def run(
    suite: Annotated[
        str | None, typer.Argument(help="A suite's TOML file, or the name of one that ships with refshard.")
    ] = None,
    out: _Output = None,
    resume: Annotated[Path | None, typer.Option(help="A run's folder: measure only what is missing there.")] = None,
    oversubscribe: Annotated[bool, typer.Option(help="Allow more ranks than the machine has cores.")] = False,
    launcher: Annotated[
        str | None, typer.Option(help="What starts ranks: local, torchrun or slurm; by default what the suite says.")
    ] = None,
    sbatch: Annotated[str | None, typer.Option(help="Options for sbatch, with launcher slurm.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Measure this case of the suite, by name or hash; may be given repeatedly.")
    ] = None,
    dry_run_on: Annotated[
        str | None,
        typer.Option(metavar="CLUSTER", help="Dry-run the measured cases on this cluster instead: no GPU is needed."),
    ] = None,
    dry_run_first: Annotated[
        str | None,
        typer.Option(
            metavar="CLUSTER",
            help="Dry-run the measured cases on this cluster first and skip those that will not fit. 'auto': the first "
            "cluster with this machine's GPUs; 'no': none. By default the suite decides.",
        ),
    ] = None,
    launch_all: Annotated[
        bool, typer.Option("--launch-all", help="Launch cases even if their dry run says that they will not fit.")
    ] = False,
) -> None:
    """Measure every case of a suite and compare them."""
    with mortal():
        from refshard.analysis.evidence import gather
        from refshard.commands import run as command
        from refshard.commands.launching import serve_harness
        from refshard.report.run.views import terminal_table, terminal_verdict

    if (status := serve_harness(launcher)) is not None:
        raise typer.Exit(status)
    asked = command.Asked(
        suite=suite, output=out, resume=resume, oversubscribe=oversubscribe, launcher=launcher, sbatch=sbatch,
        only=tuple(only or ()), dry_run_on=dry_run_on, dry_run_first=dry_run_first, launch_all=launch_all,
    )  # fmt: skip
    with _interruptible("what had ended is written; --resume goes on"):
        finished, dashboard = command.run(asked)
    found = gather(finished)
    print(f"\n{terminal_table(found)}\n\n{terminal_verdict(found)}\n\ndashboard: {dashboard}")
    if not finished.well:
        raise typer.Exit(1)


@app.command()
def show(
    run: Annotated[Path, typer.Argument(help="A run's folder, such as runs/latest.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array with one object per case.")] = False,
    as_csv: Annotated[
        bool,
        typer.Option(
            "--csv",
            help="Print CSV (RFC 4180): a header, a row per case, the columns of --json. Null is empty, and the parts "
            "of a list (warnings, checkpointed layers) are joined by ' | '.",
        ),
    ] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print Markdown, for a pull request or a job's summary.")
    ] = False,
    against: Annotated[str | None, typer.Option(help="Compare every strategy with this one: ratios.")] = None,
) -> None:
    """Print a run's verdict and tables."""
    from refshard.commands import show as command

    # Lines of CSV have their own ends, the last one too.
    printed = command.show(run, as_json=as_json, as_csv=as_csv, as_markdown=as_markdown, against=against)
    print(printed, end="" if as_csv else "\n")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, such as runs/latest.")],
    out: _Output = None,
    against: Annotated[Path | None, typer.Option(help="A run's folder: say what changed since.")] = None,
    multi: Annotated[
        bool, typer.Option("--multi", help="Write a folder: the dashboard, and a timeline of each case's trace.")
    ] = False,
) -> None:
    """Draw the dashboard of one run or several: one HTML file that needs no network."""
    from refshard.commands import report as command

    print(command.report(runs, out, against=against, multi=multi))


@app.command()
def trace(
    paths: Annotated[list[Path], typer.Argument(help="Kineto traces (.json, .json.gz), or folders of them.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON array with one object per trace; of a comparison, an object.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with timelines: one file, no network.")] = None,
    job: Annotated[bool, typer.Option("--job", help="Take all files as ranks of one job, whatever they say.")] = False,
    calibration: Annotated[
        Path | None, typer.Option(help="A trace taken with CUDA_LAUNCH_BLOCKING=1, for the give-way index.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="Compare: what accounts for the change in step time from PATHS to this.")
    ] = None,
    cross_check: Annotated[
        str | None, typer.Option(help="Set another analyser's figures beside these: hta (extra of the same name).")
    ] = None,
) -> None:
    """Analyse profiler traces: overlap, idle time, give-way, stragglers, and what is doubtful about them."""
    from refshard.commands import trace as command

    print(
        command.trace(
            paths,
            as_json=as_json,
            page=html,
            one_job=job,
            calibration=calibration,
            against=against,
            cross_check=cross_check,
        )
    )


@app.command()
def plan(
    model: Annotated[str, typer.Option(help="A model preset (`refshard list models` names them) or TOML file.")],
    cluster: Annotated[str, typer.Option(help="A cluster's profile or TOML file, and xN after it for N nodes.")],
    seq_len: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 8192,
    microbatch: Annotated[int, typer.Option(help="Sequences that a rank computes at once.")] = 1,
    accumulate: Annotated[int, typer.Option(help="Microbatches of a rank in a step.")] = 1,
    strategy: Annotated[
        str | None, typer.Option(help="Strategies, by commas; by default all with a closed form.")
    ] = None,
    checkpoint: Annotated[
        str,
        typer.Option(
            help="Layers that recompute: auto (as few as fit), none, full, every-K, or selective (all, by op)."
        ),
    ] = "auto",
    checkpoint_layers: Annotated[int | None, typer.Option(help="As many layers recompute, from the first.")] = None,
    replicas: Annotated[int, typer.Option(help="Groups of ranks that each hold the whole model (hybrid).")] = 1,
    dtype: Annotated[
        str | None, typer.Option(help="bf16 or fp32, in compute; by default what the hardware has.")
    ] = None,
    reduction: Annotated[str, typer.Option(help="bf16 or fp32, of gradients over ranks.")] = "fp32",
    compiled: Annotated[bool, typer.Option("--compiled", help="Blocks under torch.compile.")] = False,
    price: Annotated[float, typer.Option(help="USD per GPU and hour.")] = 2.5,
    as_json: Annotated[bool, typer.Option("--json", help="Print an object with everything.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with charts: one file, no network.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="A folder to write each simulated step to, as a Kineto trace.")
    ] = None,
) -> None:
    """Forecast memory, step time and cost of strategies on a cluster in closed form, without running anything."""
    from refshard.commands import plan as command

    asked = command.Asked(
        model=model,
        cluster=cluster,
        seq_len=seq_len,
        microbatch=microbatch,
        accumulate=accumulate,
        strategies=strategy,
        checkpoint=checkpoint,
        checkpoint_layers=checkpoint_layers,
        replicas=replicas,
        dtype=dtype,
        reduction=reduction,
        compiled=compiled,
        price_usd=price,
    )
    print(command.plan(asked, as_json=as_json, page=html, traces=trace))


@app.command(context_settings={"ignore_unknown_options": True})
def dryrun(
    command: Annotated[
        list[str], typer.Argument(help="After `--`: SCRIPT ARGS, -m MODULE ARGS, or a launcher's command line.")
    ],
    cluster: Annotated[str, typer.Option(help="Cluster profile or TOML file; append xN for N nodes.")],
    world_size: Annotated[
        int | None, typer.Option(help="Number of ranks (default: from torchrun's options, or the whole cluster).")
    ] = None,
    rank: Annotated[int, typer.Option(help="The rank to run.")] = 0,
    steps: Annotated[int, typer.Option(help="Stop after this many optimizer steps.")] = 3,
    tokens_per_step: Annotated[
        int | None, typer.Option(help="Tokens per step over all ranks (default: counted from the model's input).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Write the replayed steps as a Kineto trace.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with charts: one file, no network.")] = None,
    races: Annotated[
        bool, typer.Option("--races", help="Report unordered accesses to the same memory from two streams.")
    ] = False,
) -> None:
    """Run one rank of an unmodified training script on fake GPUs, and report whether it fits and how fast it is.

    Exit status: 0 if it fits; 1 if it does not, the script fails or --races finds a race; 2 if the command is wrong.
    """
    from refshard.commands import dryrun as made

    asked = made.Asked(
        words=made.words_of(command), cluster=cluster, world_size=world_size, rank=rank, steps=steps,
        tokens_per_step=tokens_per_step, races=races,
    )  # fmt: skip
    with _interruptible("nothing is written"):
        text, status = made.dryrun(asked, as_json=as_json, trace=trace, html=html)
    print(text)
    raise typer.Exit(status)


@app.command()
def calibrate(
    context: typer.Context,
    out: _Output = None,
    ranks: Annotated[
        int | None, typer.Option(help="Number of ranks. Default: all GPUs, or one per core; under torchrun all of its.")
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads of each rank, on a CPU.")] = 1,
    launcher: Annotated[
        str | None, typer.Option(help="What starts ranks: local (the default), torchrun or slurm, for several nodes.")
    ] = None,
    sbatch: Annotated[str | None, typer.Option(help="Options for sbatch, with launcher slurm.")] = None,
    network: Annotated[
        str | None, typer.Option(help="Join ranks by a real link of a limited rate: HOSTSxRATE, such as 2x2gbit.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="A few shapes and sizes only: seconds, and coarse.")] = False,
    sweeps: Annotated[
        int | None, typer.Option(help="How often to measure everything: 3, or more where the machine's speed drifts.")
    ] = None,
    earlier: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            help="Launch nothing: make a profile of the samples that a calibration left in this folder. With --aa: the "
            "folder of an earlier --aa; may be repeated.",
        ),
    ] = None,
    aa: Annotated[
        bool,
        typer.Option("--aa", help="Launch the same code against itself: how often gates here would err. For it alone:"),
    ] = False,
    suite: Annotated[str, typer.Option(help="A suite's TOML file, or the name of one that ships.")] = "gate",
    launches: Annotated[int, typer.Option(help="How many, each of all cases.", min=2)] = 300,
    permutations: Annotated[int, typer.Option(help="Gates to rehearse on them.", min=1)] = 1000,
    oversubscribe: Annotated[bool, typer.Option(help="Allow more ranks than the machine has cores.")] = False,
    baselines: _Baselines = resources.BASELINES,
    as_json: Annotated[bool, typer.Option("--json", help="Print an object with everything.")] = False,
) -> None:
    """Measure compute and collectives, here or on several nodes, and write a cluster's profile; with --aa, noise."""
    given = _given(context) - {"--from"}
    if wrong := given - _OF_NOISE if aa else given & _OF_NOISE:
        rule = f"with{'' if aa else 'out'} it, {'noise' if aa else 'a cluster'} is measured"
        raise SpecError(f"aa: {rule}; leave out {', '.join(sorted(wrong))}")
    if aa:
        _calibrate_noise(suite, launches, permutations, earlier or [], as_json, oversubscribe, baselines)
        return
    if earlier and (wrong := given - {"--out"} or set(map(str, earlier[1:]))):
        raise SpecError(
            f"from: nothing is measured, of one folder a profile is made; leave out {', '.join(sorted(wrong))}"
        )
    with mortal():
        from refshard.commands import calibrate as command
        from refshard.commands.launching import serve_harness

    if (status := serve_harness(launcher)) is not None:
        raise typer.Exit(status)
    asked = command.Asked(
        ranks=ranks, threads=threads, network=network, device=command.device(device), quick=quick, sweeps=sweeps,
        launcher=launcher, sbatch=sbatch,
    )  # fmt: skip
    with _interruptible("what was measured is kept; refshard calibrate --from FOLDER makes a profile of it"):
        made = command.from_samples(earlier[0], out) if earlier else command.calibrate(out, asked)
    print(f"{made.table}\n\nprofile: {made.path}")
    if made.ended is not None:
        print(f"refshard: not everything was measured: {made.ended}", file=sys.stderr)
        raise typer.Exit(1)


_OF_NOISE = {"--aa", "--suite", "--launches", "--permutations", "--oversubscribe", "--baselines", "--json"}


def _given(context: typer.Context) -> set[str]:
    """The options that stand on the command line."""
    sources = {p.opts[0]: context.get_parameter_source(p.name or "") for p in context.command.params}
    return {option for option, source in sources.items() if source and source.name == "COMMANDLINE"}


def _calibrate_noise(
    suite: str,
    launches: int,
    permutations: int,
    recorded: list[Path],
    as_json: bool,
    oversubscribe: bool,
    baselines: Path,
) -> None:
    with mortal():
        from refshard.commands import noise as command

    with _interruptible("rounds that ended are kept; --from takes them"):
        text = command.calibrate_noise(
            suite, launches=launches, permutations=permutations, recorded=recorded, as_json=as_json,
            oversubscribe=oversubscribe, baselines=baselines,
        )  # fmt: skip
    print(text)


@app.command()
def gate(
    suite: Annotated[str, typer.Option(help="A suite's TOML file, or the name of one that ships.")] = "gate",
    baseline: Annotated[
        str | None, typer.Option(help="A revision or a checkout; without one, the accepted exact metrics.")
    ] = None,
    candidate: Annotated[str, typer.Option(help="A revision or a checkout.")] = ".",
    strategies: Annotated[str | None, typer.Option(help="Compare two strategies instead: BASELINE,CANDIDATE.")] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Exact metrics only: one launch of each case.")] = False,
    portable: Annotated[
        bool,
        typer.Option("--portable", help="Where this machine has no baseline, take another's, as far as that can hold."),
    ] = False,
    oversubscribe: Annotated[bool, typer.Option(help="Allow more ranks than the machine has cores.")] = False,
    baselines: _Baselines = resources.BASELINES,
    as_json: Annotated[bool, typer.Option("--json", help="Print an object with everything.")] = False,
    markdown: Annotated[Path | None, typer.Option(help="Write tables for a pull request.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML.")] = None,
    annotate: Annotated[
        bool, typer.Option("--annotate", help="Print workflow commands that mark a job's page.")
    ] = False,
) -> None:
    """Compare two revisions, or one with what was accepted. Exit status: 0 pass, 1 regression, 2 harness error,
    3 inconclusive, 4 no comparable baseline.
    """
    with mortal():
        from refshard.commands import gate as command

    asked = command.Asked(
        suite=suite, baseline=baseline, candidate=candidate, strategies=command.two_strategies(strategies),
        exact=exact, portable=portable, oversubscribe=oversubscribe, baselines=baselines,
    )  # fmt: skip
    outputs = command.Outputs(as_json=as_json, markdown=markdown, junit=junit, annotate=annotate)
    with _interruptible("what had ended is written"), _harness_errors():
        text, status = command.gate(asked, outputs)
    print(text)
    raise typer.Exit(status)


@app.command()
def accept(
    run: Annotated[Path, typer.Argument(help="A run's folder, such as runs/latest.")],
    reason: Annotated[str, typer.Option(help="Why these metrics are what they should be.")],
    baselines: _Baselines = resources.BASELINES,
) -> None:
    """Make a run's exact metrics the baseline that `refshard gate` holds changes against."""
    from refshard.commands import gate as command

    print(command.accept(run, reason, baselines))


@app.command()
def history(
    runs: Annotated[Path, typer.Argument(help="A folder of runs.")] = Path("runs"),
    metric: Annotated[str, typer.Option(help="A metric, as `refshard show --json` names it.")] = "step_time_s",
    suite: Annotated[str | None, typer.Option(help="Runs of the suite of this name only.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array with one object per case.")] = False,
) -> None:
    """Show each case's trend across the runs of a folder."""
    from refshard.commands import history as command

    print(command.history(runs, metric=metric, suite=suite, as_json=as_json))


@app.command()
def validate(
    run: Annotated[Path | None, typer.Argument(help="A run's folder; without one, what others have published.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array instead of tables.")] = False,
    fidelity: Annotated[str, typer.Option(help="What predicts published results: simulated or dryrun.")] = "simulated",
    only: Annotated[str | None, typer.Option(help="With dryrun: published runs whose names hold this.")] = None,
) -> None:
    """Set predictions beside what was measured, or what others have published."""
    from refshard.commands import validate as command

    with _interruptible("nothing is written"):
        print(command.validate(run, as_json=as_json, fidelity=fidelity, only=only))


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print an object with everything.")] = False,
) -> None:
    """Say what this machine is, what can run here, and what would make measurements wrong, each with its remedy.

    Exit status: 1 if something makes measurements wrong or impossible (an "error"), else 0.
    """
    from refshard.commands import doctor as command

    printed, status = command.doctor(as_json=as_json)
    print(printed)
    raise typer.Exit(status)


@app.command(name="list")
def list_(
    what: Annotated[str, typer.Argument(help="strategies, models, modes, suites, clusters or hardware")],
) -> None:
    """List what refshard knows, a line each; of strategies also which can run here, and on which axes."""
    from refshard.commands import listing

    print(listing.lines(what))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, or ``arguments`` in its place; a user's mistake is one line on standard error."""
    try:
        app(arguments)
    except RefshardError as error:
        print(f"refshard: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        # The reader (head, say) has seen enough.
        sys.stderr.close()
        sys.exit(0)


if __name__ == "__main__":
    main()
