"""What a plan looks like: sentences, tables, JSON, CSV and the page."""

import re
from typing import Any

import msgspec
import pytest

from refshard.plan.plan import TIME_PARTS, Failures, KindSpread, Plan, Reader, Row, Size, Spread, with_dry_rows
from refshard.plan.search import search
from refshard.plan.space import Space, candidates
from refshard.quantities import GIB, format_bytes, format_seconds
from refshard.report.blocks import Answer
from refshard.report.page import as_page
from refshard.report.plan import charts
from refshard.report.plan import text as plan_text
from refshard.report.plan.answer import COLUMNS, plan_answer
from refshard.specs.cluster import LinkSpec
from refshard.specs.job import Job
from refshard.specs.model import load_model
from tests.plan.made import cluster, hardware, job
from tests.report.pages import Page, numbers
from tests.report.printed import as_csv, as_json, notes, rows, tables, text, verdict

SPREAD = Spread(
    kinds={
        "data, bf16": KindSpread(count=300, sources=2, median=0.031, within=0.031, low=0.9, high=1.2),
        "pipeline, bf16": KindSpread(count=20, sources=2, median=0.06, within=0.06, low=0.8, high=1.3),
    }
)
MEMORY = {"masters": 10 * GIB, "optimizer": 20 * GIB, "gradients": 0, "activations": 5 * GIB}


def row(
    step_s: float, *, ranks: int = 16, gpu_hours: float = 100.0, peak_gib: float = 35, kind: str = "", **fields: Any
) -> Row:
    """A row with round numbers."""
    given = {"dp_shard": ranks // (fields.get("tp", 1) * fields.get("pp", 1)), **fields}
    one = job(**given)
    kind = kind or ("pipeline, bf16" if one.pp > 1 else "data, bf16")
    low, high = SPREAD.bounds(kind) or (None, None)
    return Row(
        job=one, fits=peak_gib < 70, kind=kind, step_s=step_s, low_s=low and low * step_s,
        high_s=high and high * step_s, tokens_per_s_gpu=4096 / step_s, tflops=400.0, mfu=0.4,
        parts=dict.fromkeys(TIME_PARTS, step_s / 5), peak_bytes=int(peak_gib * GIB), usable_bytes=70 * GIB,
        memory={**MEMORY, "activations": int((peak_gib - 30) * GIB)}, checkpointed=0, layers=16, goodput=0.9,
        gpu_hours=gpu_hours, cost_usd=2 * gpu_hours,
    )  # fmt: skip


def size(*found: Row, ranks: int = 16, unfit: tuple[Row, ...] = (), front: tuple[Row, ...] = (), seen: int = 9) -> Size:
    return Size(gpus=ranks, considered=seen, fitting=len(found), rows=found, front=front, unfit=unfit)


def plan(*sizes: Size) -> Plan:
    return Plan(
        sizes=sizes, global_batch=32, seq_len=2048, available_bytes=80 * GIB, price_usd=2.0, failures=Failures(),
    )  # fmt: skip


def answer(*sizes: Size) -> Answer:
    return plan_answer(plan(*sizes), SPREAD, "llama on made", model="llama", cluster="made")


def searched(memory: int = 80 * GIB) -> Plan:
    """A plan as the command makes it, of 1B on 16 ranks."""
    model, between = load_model("llama3.2-1b"), LinkSpec(bytes_per_s=50e9, latency_s=1e-5)
    on = cluster(hardware=hardware(memory_bytes=memory), nodes=2, between=between)
    space = Space(strategies=("fsdp2", "ddp", "refshard-fsdp"), tp=(1, 2), gpus=16, global_batch=32, seq_len=2048,
                  model="llama3.2-1b")  # fmt: skip
    found = search(model, on, 2048, candidates(space, model, on))
    reader = Reader(model=model, cluster=on, seq_len=2048, price_usd=2.0, failures=Failures(), spread=SPREAD)
    return msgspec.structs.replace(plan(reader.size(found, 8)), available_bytes=on.accelerator.memory_bytes)


def test_the_verdict_begins_with_what_to_use_and_what_to_expect() -> None:
    best = row(1.0, microbatch=2, microbatches=4, reduce_each=False)
    (first,) = plan_text.verdict(plan(size(best)), SPREAD)
    assert first == (
        "Use fsdp2 with FSDP 16, 4 microbatches of 2 sequences, reduced once, no checkpointing: "
        "1.00 s (900 ms to 1.20 s) per step, 40 % MFU, 35.0 GiB of 70.0 GiB usable."
    )


def test_ties_are_within_the_median_error_of_the_bests_kind_and_the_next_is_not() -> None:
    best, tied, slower = row(1.0), row(1.031, strategy="ddp", dp_shard=16), row(1.032, tp=2)
    told = plan_text.verdict(plan(size(best, tied, slower)), SPREAD)
    assert told[1:] == [
        "Tied within the model's error: ddp with DP 16.", "Next: fsdp2 with TP 2 x FSDP 8, 3 % slower.",
    ]  # fmt: skip
    piped = [row(one.step_s, pp=2, microbatches=2, tp=n) for n, one in zip((1, 2, 4), (best, tied, slower))]
    assert [sentence.partition(" ")[0] for sentence in plan_text.verdict(plan(size(*piped)), SPREAD)] == ["Use", "Tied"]
    assert plan_text.verdict(plan(size(best, slower)), SPREAD)[1] == "Next: fsdp2 with TP 2 x FSDP 8, 3 % slower."


def test_the_first_sentence_names_the_memory_that_decided() -> None:
    best, other = row(1.01, peak_gib=30, strategy="refshard-yafsdp"), row(1.0, peak_gib=35)
    told = plan_text.verdict(plan(size(best, other)), SPREAD)
    assert told[0] == (
        "Use refshard-yafsdp with FSDP 16, 1 microbatch of 1 sequence, no checkpointing: 5.00 GiB (14 %) less memory "
        "than fsdp2 at the same speed."
    )
    assert told[1].startswith("1.01 s (909 ms to 1.21 s) per step, 40 % MFU, 30.0 GiB of 70.0 GiB usable.")


def test_a_lead_that_no_run_backs_is_named_as_the_models() -> None:
    told = plan_text.verdict(plan(size(row(1.0), row(0.91, strategy="refshard-fsdp"))), Spread(kinds={}))
    assert told[1] == (
        "Next: refshard-fsdp with FSDP 16, 9 % faster by the model, whose error is not known for this kind."
    )


def test_values_that_are_varied_are_in_every_table_and_sentence_and_others_in_none() -> None:
    best, other = (
        row(1.0, precision="fp8", compiled=True, tp=2),
        row(1.5, strategy="megatron", compiled=True, peak_gib=31),
    )
    eager = row(2.0)
    made = msgspec.structs.replace(
        plan(size(best, other, eager, unfit=(row(1.0, peak_gib=90),), front=(best, other))),
        varied=("precision", "compiled"),
    )
    assert [sentence.partition(", 1 micro")[0] for sentence in plan_text.verdict(made, SPREAD)] == [
        "Use fsdp2 in fp8, compiled, with TP 2 x FSDP 8",
        "Next: megatron in bf16 with ZeRO-1 16, 50 % slower.",
        "Best in bf16, eager: fsdp2 with FSDP 16, 100 % slower.",
    ]
    found = plan_answer(made, SPREAD, "t", model="m", cluster="c")
    for table in tables(found):
        assert {"precision", "compiled"} <= {*rows(table)[0]}, table.title
    (summary, *_) = tables(found, detail=False)
    assert [(line["precision"], line["compiled"]) for line in rows(summary)] == [
        ("fp8", "yes"), ("bf16", "own kernels"), ("bf16", "no"),
    ]  # fmt: skip
    seen = html(made)
    assert "megatron in bf16 with ZeRO-1 16 (1.50 s" in " ".join(seen.text.split())
    plain = plan_answer(plan(size(best, other, eager)), SPREAD, "t", model="m", cluster="c")
    assert not any({"precision", "compiled"} & {*rows(table)[0]} for table in tables(plain))
    assert not re.search("fp8|compiled|Best", " ".join(verdict(plain)))


def test_more_than_three_ties_are_counted() -> None:
    found = [row(1.0 + 0.001 * n, tp=1 if n == 0 else 2, dp_shard=2**n) for n in range(6)]
    told = plan_text.verdict(plan(size(*found)), SPREAD)[1]
    assert told.count("fsdp2 with") == 3
    assert told.endswith("; and 2 more.")


def test_of_several_sizes_the_largest_is_used_and_the_cheapest_named() -> None:
    small, large = row(2.0, ranks=8, gpu_hours=50.0), row(1.0, gpu_hours=80.0)
    told = plan_text.verdict(plan(size(small, ranks=8), size(large)), SPREAD)
    assert told[0].startswith("Use fsdp2 on 16 ranks with FSDP 16, ")
    assert told[-1] == "Cheapest: 8 ranks, 100 USD per 10^12 tokens (here 160)."
    cheap = plan_text.verdict(plan(size(msgspec.structs.replace(small, gpu_hours=90.0), ranks=8), size(large)), SPREAD)
    assert not [sentence for sentence in cheap if sentence.startswith("Cheapest")]


def test_a_size_on_which_nothing_fits_does_not_hide_those_on_which_something_does() -> None:
    told = plan_text.verdict(plan(size(row(2.0, ranks=8), ranks=8), size(unfit=(row(1.0, peak_gib=90),))), SPREAD)
    assert told[0].startswith("Use fsdp2 on 8 ranks with FSDP 8")


def test_where_nothing_fits_the_closest_is_named_and_what_would_help() -> None:
    least = row(1.0, peak_gib=90, tp=2)
    found = answer(size(unfit=(least, row(1.0, peak_gib=99))))
    assert verdict(found) == [
        "Nothing fits: 70.0 GiB of 80.0 GiB are usable, 2 % of which stay free for fragmentation.",
        "Closest: fsdp2 with TP 2 x FSDP 8, no checkpointing, needs 90.0 GiB. Use more nodes, a smaller microbatch, or "
        "--search.",
    ]
    assert found.status == 1
    (shown,) = tables(found, detail=False)
    assert [one["needs"] for one in rows(shown)] == ["90.0 GiB", "99.0 GiB"]
    for tuning, remedy in (("full", "more GPUs, --tuning qlora, or a smaller"), ("qlora", "more GPUs, or a smaller")):
        alone = row(1.0, ranks=1, peak_gib=90, strategy="single", tuning=tuning)
        assert f"Use {remedy} --seq-len." in verdict(answer(size(unfit=(alone,), ranks=1)))[1]


def test_where_nothing_can_run_the_rule_and_the_remedy_are_said() -> None:
    found = answer(size(seen=0))
    assert verdict(found) == [
        "No configuration can run: no choice of axes divides the ranks and the global batch of 32 sequences; change "
        "--tokens-per-step or the axes."
    ]
    assert found.status == 1
    assert not tables(found)
    assert as_csv(found) == []


@pytest.mark.parametrize(
    ("fields", "layout"),
    [
        ({"dp_shard": 16}, "FSDP 16"),
        ({"dp_shard": 8, "dp_replicate": 2}, "HSDP 2 x 8"),
        ({"strategy": "ddp", "dp_shard": 16}, "DP 16"),
        ({"strategy": "megatron", "dp_shard": 16}, "ZeRO-1 16"),
        ({"strategy": "megatron", "dp_shard": 8, "dp_replicate": 2}, "ZeRO-1 2 x 8"),
        ({"dp_shard": 4, "tp": 2, "cp": 2}, "TP 2 x CP 2 x FSDP 4"),
        ({"dp_shard": 16, "ep": 8}, "FSDP 16 x EP 8"),
        ({"dp_shard": 4, "pp": 4}, "FSDP 4 x PP 4 (1F1B)"),
        ({"dp_shard": 4, "pp": 4, "interleave": 2, "schedule": "interleaved"},
         "FSDP 4 x PP 4 (interleaved, 2 stages each)"),
        ({"dp_shard": 4, "pp": 4, "schedule": "zero-bubble"}, "FSDP 4 x PP 4 (zero bubble)"),
    ],
)  # fmt: skip
def test_meshes_are_written_as_the_field_does(fields: dict[str, Any], layout: str) -> None:
    assert plan_text.mesh_text(job(**fields)) == layout


def test_batches_and_checkpointing_in_words() -> None:
    one = job(strategy="fsdp2", reduce_each=False)
    assert plan_text.batch_text(one) == "1 microbatch of 1 sequence"
    many = job(microbatches=3, microbatch=2)
    assert plan_text.batch_text(many) == "3 microbatches of 2 sequences"
    plain = row(1.0)
    counts = [msgspec.structs.replace(plain, checkpointed=count) for count in (0, 4, 16)]
    assert [plan_text.checkpointing_text(found) for found in counts] == [
        "no checkpointing", "4 of 16 layers checkpointed", "full checkpointing",
    ]  # fmt: skip
    selective = msgspec.structs.replace(row(1.0, checkpointing="selective"), checkpointed=16)
    assert plan_text.checkpointing_text(selective) == "selective checkpointing"


def test_error_bars_say_on_how_many_runs_they_rest() -> None:
    found = notes(answer(size(row(1.0, pp=2, microbatches=2)), size(row(0.9))))
    assert (
        "Error bars: published runs of this kind (pipeline, bf16), 20 of them held out of the fit, from 2 sources: "
        "median error 6 %; 8 of 10 lie within the range."
    ) in found
    assert (
        "Error bars: published runs of this kind (data, bf16), 300 of them held out of the fit, from 2 sources: median "
        "error 3 %; 8 of 10 lie within the range."
    ) in found
    assert any(sentence.startswith("9 configurations considered for 16 ranks; 1 fit") for sentence in found)
    assert any(sentence.startswith("The model leaves out: ") for sentence in found)
    assert any("2 USD per GPU-hour (--usd-per-gpu-hour)" in sentence for sentence in found)


def test_without_published_runs_of_a_kind_there_is_no_range_and_no_tie() -> None:
    best, close = row(1.0, kind="experts, bf16"), row(1.001, tp=2, kind="experts, bf16")
    found = answer(size(best, close))
    assert verdict(found) == [
        "Use fsdp2 with FSDP 16, 1 microbatch of 1 sequence, no checkpointing: 1.00 s (error not known) per step, "
        "40 % MFU, 35.0 GiB of 70.0 GiB usable.",
        "Next: fsdp2 with TP 2 x FSDP 8, as fast by the model, whose error is not known for this kind.",
    ]
    assert [one["8 of 10 within"] for one in rows(tables(found, detail=False)[0])] == ["not known", "not known"]
    assert ("Error bars: not known: no published run of this kind (experts, bf16). No tie is claimed.") in notes(found)
    known, other = row(0.99), row(1.2, tp=2)
    assert plan_text.verdict(plan(size(known, best, other)), SPREAD)[1:] == [
        "Next: fsdp2 with FSDP 16, 1 % slower by the model, whose error is not known for this kind.",
    ]
    (line,) = charts.scaling_chart(plan(size(best))).figure["data"]
    assert numbers(line["error_y"]["array"]) == [0]
    tradeoff = charts.tradeoff(size(best, close), plan(size(best, close)), SPREAD)
    assert "error is not known" in tradeoff.alternative


def test_the_answer_comes_first_and_no_line_is_too_wide() -> None:
    best, next_ = row(1.0), row(1.5, tp=2)
    found = answer(size(best, next_, front=(best, row(1.2, tp=4, peak_gib=31))))
    shown = text(found)
    assert shown.startswith("Use fsdp2 with FSDP 16, ")
    assert shown.index("llama on made, 16 ranks (closed form)") < shown.index("Pareto front")
    for width in (100, 120, 160):
        assert max(len(line) for line in text(found, width, verbose=True).splitlines()) <= width
    assert "seconds of a step" not in shown
    assert "seconds of a step" in text(found, verbose=True)
    summary, front = tables(found, detail=False)
    assert [one["mesh"] for one in rows(summary)] == ["FSDP 16", "TP 2 x FSDP 8"]
    assert [one["peak memory"] for one in rows(front)] == ["35.0 GiB", "31.0 GiB"]


def test_a_table_of_sizes_compares_each_gpus_speed_with_the_smallest_size() -> None:
    found = answer(size(row(1.0, ranks=8), ranks=8), size(row(1.25)), size(ranks=32))
    (scaled,) = [one for one in tables(found) if one.columns[0].head == "ranks"]
    lines = rows(scaled)
    assert [line["ranks"] for line in lines] == ["8", "16"]
    assert [line["scaling efficiency"] for line in lines] == ["100.0 %", "80.0 %"]
    assert lines[1]["days for 10^12 tokens"] == f"{100 / 16 / 24:.1f}"
    assert [line["goodput"] for line in lines] == ["90.0 %", "90.0 %"]
    assert not [one for one in tables(answer(size(row(1.0)))) if one.columns[0].head == "ranks"]


def test_what_does_not_fit_is_listed_apart_smallest_first() -> None:
    unfit = tuple(row(1.0, peak_gib=90 + place) for place in range(9))
    found = answer(size(row(1.0), unfit=unfit))
    assert found.status == 0
    listed = text(found).partition("Out of memory, smallest first")[2]
    assert ["90.0 GiB" in listed, "93.0 GiB" in listed, "94.0 GiB" in listed] == [True, True, False]


def test_json_holds_everything_in_plain_units() -> None:
    made = searched()
    told = as_json(plan_answer(made, SPREAD, "t", model="m", cluster="c"))
    assert (told["fidelity"], told["model"], told["cluster"]) == ("plan", "m", "c")
    assert told["tokens_per_step"] == told["global_batch"] * told["seq_len"] == 32 * 2048
    assert told["verdict"] == plan_text.verdict(made, SPREAD)
    assert told["failures"]["mtbf_hours"] == Failures().mtbf_hours
    (one,) = told["sizes"]
    assert (one["gpus"], one["considered"], one["fitting"]) == (
        16,
        made.sizes[0].considered,
        made.sizes[0].fitting,
    )
    assert one["rows"]
    for found, expected in zip(one["rows"], made.sizes[0].rows):
        assert sum(found["memory"].values()) == pytest.approx(found["peak_bytes"], abs=10)
        assert sum(found["parts"].values()) == pytest.approx(found["step_s"])
        assert found["step_s"] == expected.step_s
        assert found["job"]["strategy"] == expected.job.strategy
        assert msgspec.convert(found["job"], Job) == expected.job
    assert told["warnings"]


def test_csv_has_a_row_for_each_configuration_of_each_size_and_nothing_nested() -> None:
    made = searched()
    small = msgspec.structs.replace(made.sizes[0], gpus=8)
    found = plan_answer(msgspec.structs.replace(made, sizes=(small, *made.sizes)), SPREAD, "t", model="m", cluster="c")
    lines = as_csv(found)
    assert len(lines) == 2 * len(made.sizes[0].rows)
    for line, one in zip(lines, small.rows):
        assert (line["strategy"], line["fits"]) == (one.job.strategy, "true")
        assert float(line["step_s"]) == one.step_s
        parts = [float(line[f"{part}_s"]) for part in TIME_PARTS]
        assert sum(parts) == pytest.approx(one.step_s)
        assert sum(float(line[f"{part}_bytes"]) for part in one.memory) == pytest.approx(one.peak_bytes, abs=10)
        assert int(line["dp_shard"]) == one.job.dp_shard
        assert line.keys() - {"schema_version"} == {*COLUMNS}
        assert not any("{" in cell for cell in line.values())


def html(made: Plan, title: str = "t", command: str = "refshard plan") -> Page:
    found = plan_answer(made, SPREAD, title, model="m", cluster="c")
    return Page("".join(as_page(found, product="plan", command=command)))


def test_the_page_escapes_names_runs_its_own_script_and_asks_for_nothing() -> None:
    made = searched()
    seen = html(made, "<script>alert(1)</script>", "refshard plan --model '<b>'")
    assert "<script>alert(1)</script>" in seen.text
    assert "--model '<b>'" in seen.text
    assert seen.policy.startswith("default-src 'none'; script-src 'sha256-")
    for kind, script in seen.scripts:
        assert seen.allows(script) == (kind is None)
    assert not any(name in attributes for _, attributes in seen.tags for name in ("src", "action"))
    assert "http" not in seen.text
    assert [box["id"] for box in seen.having("div") if box.get("class") == "chart"] == ["tradeoff", "time", "memory"]
    lead = " ".join(seen.text.split()).replace("\N{NO-BREAK SPACE}", " ")
    assert plan_text.verdict(made, SPREAD)[0].split(":")[0] in lead


def test_the_page_of_several_sizes_has_a_curve_and_one_of_none_says_why() -> None:
    several = plan(size(row(1.0, ranks=8), ranks=8), size(row(1.25)), size(unfit=(row(1.0, peak_gib=90),), ranks=32))
    drawn = [box["id"] for box in html(several).having("div") if box.get("class") == "chart"]
    assert drawn == ["tradeoff", "scaling", "time", "memory"]
    nothing = html(plan(size(unfit=(row(1.0, peak_gib=90),))))
    assert "Nothing fits" in nothing.text
    assert not [box for box in nothing.having("div") if box.get("class") == "chart"]
    assert "No configuration can run" in html(plan(size(seen=0))).text


def test_the_curve_is_of_each_sizes_best_with_its_error_bars() -> None:
    found = charts.scaling_chart(plan(size(row(1.0, ranks=8), row(2.0, ranks=8), ranks=8), size(row(1.25)), size()))
    (line,) = found.figure["data"]
    assert numbers(line["x"]) == [8, 16]
    assert numbers(line["y"]) == [4096.0, 4096 / 1.25]
    assert numbers(line["error_y"]["array"]) == pytest.approx([4096 * (1 / 0.9 - 1), 4096 / 1.25 * (1 / 0.9 - 1)])
    assert numbers(line["error_y"]["arrayminus"]) == pytest.approx([4096 * (1 - 1 / 1.2), 4096 / 1.25 * (1 - 1 / 1.2)])
    assert "8 ranks 4,096, 16 ranks 3,277" in found.alternative


def test_the_charts_hold_what_the_tables_do() -> None:
    made = searched()
    best = made.sizes[0].rows
    bars = charts.time_chart(best).figure["data"]
    scale = 1e3 if best[0].step_s < 1 else 1
    for place, one in enumerate(best):
        assert sum(bar["x"][place] for bar in bars) == pytest.approx(scale * one.step_s, rel=1e-3)
    chart = charts.memory_chart(made.largest)
    labels = [line["text"] for line in chart.figure["layout"]["meta"]["rows"]]
    assert labels == [f"{place} {one.job.strategy} {format_bytes(one.peak_bytes)}" for place, one in enumerate(best, 1)]
    for place, one in enumerate(best):
        assert sum(bar["x"][place] for bar in chart.figure["data"]) == pytest.approx(one.peak_bytes / GIB, rel=1e-3)
    assert f"Dashed: usable memory, {format_bytes(made.largest.usable_bytes)}" in chart.alternative
    assert charts.time_chart(best).alternative.count(format_seconds(best[0].step_s))


def test_memory_that_dwarfs_the_limit_is_cut() -> None:
    """Else the limit, and what fits, could not be seen."""
    layout = charts.memory_chart(size(row(1.0, peak_gib=400))).figure["layout"]
    (limit,) = [shape["x0"] for shape in layout["shapes"]]
    assert limit == pytest.approx(70)
    assert layout["xaxis"]["range"] == [0, pytest.approx(1.6 * limit)]


def test_the_tradeoff_shows_the_front_and_the_best_once_each() -> None:
    best, small, next_ = row(1.0), row(1.3, tp=2, peak_gib=31), row(1.1, tp=4)
    made = plan(size(best, next_, front=(best, small)))
    found = charts.tradeoff(made.sizes[0], made, SPREAD)
    assert "Shaded: within 3.1 % of the fastest" in found.alternative
    listed = re.findall(r"\((\d\.\d\d s), (\d\d\.\d GiB)\)", found.alternative)
    assert listed == [("1.00 s", "35.0 GiB"), ("1.30 s", "31.0 GiB")]


@pytest.mark.parametrize(("reserved_gib", "first"), [(45, "refshard-yafsdp"), (50, "fsdp2")])
def test_memory_decides_between_dry_runs_that_tie_on_one_mesh(reserved_gib: int, first: str) -> None:
    """The own engine's lead in time counts for nothing, and neither does less memory on another mesh."""
    peer = row(1.0).dried(1.0, 50 * GIB, 51 * GIB)
    own = row(1.0, strategy="refshard-yafsdp").dried(0.98, 44 * GIB, reserved_gib * GIB)
    divided = row(1.0, tp=2).dried(1.01, 30 * GIB, 30 * GIB)
    found = with_dry_rows(size(), (divided, own, peer), SPREAD).rows
    assert (found[0].job.strategy, found[0].job.tp) == (first, 1)


def test_the_line_of_the_tradeoff_joins_what_its_text_and_the_table_name_by_dry_runs() -> None:
    slow, fast, small = row(1.0), row(1.1, strategy="fsdp1"), row(1.3, strategy="ddp", peak_gib=31)
    dried = [slow.dried(1.2, 30 * GIB, 40 * GIB), fast.dried(1.05, 30 * GIB, 36 * GIB)]
    shown = with_dry_rows(size(front=(slow, small)), dried, SPREAD)
    assert [one.job.strategy for one in shown.front] == ["fsdp1", "ddp"], "and none without its dry run"
    chart = charts.tradeoff(shown, plan(shown), SPREAD)
    line = next(trace for trace in chart.figure["data"] if trace["name"] == "Pareto front")
    assert (line["x"], line["y"]) == ([36, 31], [1.05, 1.3])
    assert "1 fsdp1 with FSDP 16 (1.05 s, 36.0 GiB); 3 ddp with DP 16 (1.30 s, 31.0 GiB)" in chart.alternative
    front = next(table for table in tables(answer(shown)) if "Pareto" in table.caption)
    assert [line["step time"] for line in rows(front)] == ["1.05 s", "1.30 s"]
    assert len(next(t for t in chart.figure["data"] if t["name"] == "measured (filled)")["x"]) == 3


def test_of_one_point_no_line_is_drawn() -> None:
    shown = size(row(1.0), row(1.1, peak_gib=34))
    chart = charts.tradeoff(shown, plan(shown), SPREAD)
    assert "Dotted" not in chart.alternative
