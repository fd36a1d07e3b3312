"""What people do to models (:mod:`tests.distributed.cases`), on fake GPUs: right there too, and no two streams race.

Backward runs in autograd's own threads there, gathers and reductions on streams, and optimizers by their kernels for
GPUs. ``make test`` runs a few cases, in the modes with transient or ring buffers by turns, ``make full`` all.
``python -m tests.distributed.cases --device fake-cuda`` runs all in all modes.
"""

import functools
import re
from collections.abc import Callable, Sequence

import pytest

from refshard.engine.placement import MODES
from tests.distributed.cases import deliberate
from tests.distributed.cases.case import PLAIN, Case
from tests.distributed.cases.corpus import CASES
from tests.distributed.cases.run import Outcome, Run, run_all
from tests.fakecuda.fresh import needs_device

pytestmark = pytest.mark.processes

ON_GPU = [case for case in CASES.values() if not case.only_on_cpu]
FEW = (
    "ordinary_language_model", "tied_language_model", "submodule_called_by_itself", "loops_that_vary",
    "forward_hook_from_before_reads_the_weight", "accumulated_without_reductions", "offloaded",
    "reentrant_with_adapters", "two_forwards_of_frozen_blocks", "bf16_with_a_norm_in_fp32", "complex_parameters",
    "full_state_dict_by_torch", "meta_device_with_buffers",
)  # fmt: skip
WRITTEN_WHILE_GATHERED = {
    "key_encoder_follows_by_lerp", "key_encoder_follows_by_copy", "key_encoder_follows_by_copy_in_fp32",
    "key_encoder_follows_through_data", "key_encoder_follows_through_data_in_fp32",
    "each_block_quantised_before_it_runs_in_fp32", "each_block_quantised_before_it_runs_through_data",
    "root_pre_hook_that_writes_weights", "root_pre_hook_that_writes_weights_in_fp32",
    "root_pre_hook_from_before_that_writes_weights", "root_pre_hook_from_before_that_writes_weights_in_fp32",
}  # fmt: skip
"""Known races: forward writes weights that a prefetched gather may still be reading. What it gathered is thrown away,
since the weights' version has changed, and gathered anew after the write.
"""
KNOWN = {
    **dict.fromkeys(WRITTEN_WHILE_GATHERED, re.compile(r"race: \d races: read-write, \d+ times: \S+ \(reads, other, ")),
    "blocks_looped_reentrant": re.compile("yafsdp, plain: refused: EngineError: unit 'layers.0' needs the slot"),
}
"""What a case may say besides what it allows, until the engine does better: never that it trained wrong."""
BUFFERED = ("yafsdp", "fsdp")


def _by_turns(cases: Sequence[Case], modes: Sequence[str]) -> list[Run]:
    """Each case once, in one of the modes and variants by turns."""
    runs = []
    for row, case in enumerate(cases):
        able = [mode for mode in modes if mode in case.modes] or case.modes
        runs.append(Run(case.name, able[row % len(able)], case.variants[row // len(able) % len(case.variants)]))
    return runs


WRITTEN_UNSEEN = Run("each_block_quantised_before_it_runs_through_data_in_fp32", "replicate", PLAIN[0])
"""Forward writes masters through ``.data``, which no version tells; what is computed with is a copy of them."""
COVER = [*(Run(name, BUFFERED[row % 2], CASES[name].variants[-1]) for row, name in enumerate(FEW)), WRITTEN_UNSEEN]
EVERY = [
    *_by_turns([case for case in ON_GPU if case.table], tuple(MODES)),
    *_by_turns([case for case in ON_GPU if not case.table], BUFFERED),
]


@pytest.fixture(scope="module")
def launch() -> Callable[[str], dict[Run, Outcome]]:
    """The outcomes of a selection of runs, launched once."""
    needs_device()

    @functools.cache
    def launched(selection: str) -> dict[Run, Outcome]:
        racing = Run(deliberate.races.name, "fsdp", PLAIN[0])
        return run_all(2, [racing, *COVER] if selection == "cover" else EVERY, device="fake-cuda")

    return launched


def _surprises(name: str, outcomes: dict[Run, Outcome]) -> list[str]:
    return [
        f"{run.way}, {run.variant.name}: {outcome.kind}: {outcome.message}"
        for run, outcome in outcomes.items()
        if run.case == name and not CASES[name].accepts(run.way, outcome.kind, outcome.message)
    ]


@pytest.mark.parametrize("name", [*FEW, WRITTEN_UNSEEN.case])
def test_case(name: str, launch: Callable[[str], dict[Run, Outcome]]) -> None:
    assert not _surprises(name, launch("cover"))


@pytest.mark.full
@pytest.mark.parametrize("case", ON_GPU, ids=lambda case: case.name)
def test_every_case(case: Case, launch: Callable[[str], dict[Run, Outcome]]) -> None:
    found = _surprises(case.name, launch("every"))
    assert not [one for one in found if not (case.name in KNOWN and KNOWN[case.name].search(one))]


def test_a_race_is_told(launch: Callable[[str], dict[Run, Outcome]]) -> None:
    (outcome,) = (outcome for run, outcome in launch("cover").items() if run.case == deliberate.races.name)
    assert outcome.kind == "race"
    assert outcome.message.startswith(
        "2 races: write-write, once: aten::zero_ (writes, other, stream 0), then aten::add"
    )


def test_every_case_is_met_in_a_mode() -> None:
    assert {run.case for run in EVERY} == {case.name for case in ON_GPU}
    assert {run.way for run in EVERY} == set(MODES)
