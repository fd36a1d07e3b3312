"""``PYTORCH_ALLOC_CONF``: what it sets, and that it accepts and refuses what torch does."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.fakecuda.allocator_build import allocator_module

pytestmark = pytest.mark.processes

MIB = 1 << 20
UNLIMITED = (1 << 64) - 1

ACCEPTED = [
    "",
    "expandable_segments:True",
    " expandable_segments : False ,",
    "expandable_segments:True,expandable_segments:False",
    "backend:native,max_split_size_mb:128,garbage_collection_threshold:0.6,roundup_power2_divisions:[256:1,512:2,>:4]",
    "max_split_size_mb:20",
    "max_split_size_mb:-1",
    "max_split_size_mb:99999999999999",
    "max_split_size_mb:128x",
    "max_split_size_mb:40,large_segment_size_mb:40",
    "large_segment_size_mb:11",
    "max_non_split_rounding_mb:20",
    "garbage_collection_threshold:.5",
    "roundup_power2_divisions:1",
    "roundup_power2_divisions:[]",
    "roundup_power2_divisions:[256:2,]",
    "pinned_use_background_threads:True",
]
REFUSED = [
    "expandable_segments",
    "expandable_segments:",
    "expandable_segments:true",
    "expandable_segments:1",
    "expandable_segments:[True]",
    "expandable_segments=True",
    "expandable_segments:True;max_split_size_mb:40",
    "expandable_segments:True max_split_size_mb:40",
    "expandable_segments:True,,",
    "max_split_size_mb:19",
    "max_split_size_mb:much",
    "max_split_size_mb:18446744073709551616",
    "max_split_size_mb:30,large_segment_size_mb:40",
    "large_segment_size_mb:10",
    "max_non_split_rounding_mb:19",
    "garbage_collection_threshold:0",
    "garbage_collection_threshold:1.0",
    "garbage_collection_threshold:nan",
    "roundup_power2_divisions:0",
    "roundup_power2_divisions:3",
    "roundup_power2_divisions:[256:3]",
    "roundup_power2_divisions:[100:4]",
    "roundup_power2_divisions:[256:1",
    "pinned_use_background_threads:1",
]
ONLY_CUDA_ACCEPTS = [
    "release_lock_on_cudamalloc:True",
    "pinned_use_cuda_host_register:True",
    "pinned_num_register_threads:8",
    "pinned_reserve_segment_size_mb:256",
    "pinned_free_catch_all:False",
    "graph_capture_record_stream_reuse:True",
]
"""Options that change nothing here; torch's CPU build does not look at them."""
ONLY_CUDA_REFUSES = [
    ("backend:cudaMallocAsync", "backend:cudaMallocAsync is invalid; the fake device simulates torch's own allocator"),
    ("backend:mine", "backend:mine is invalid; write native"),
    ("max_splt_size_mb:40", "unknown option 'max_splt_size_mb'; torch 2.13 knows .*max_split_size_mb"),
    ("per_process_memory_fraction:1.5", "per_process_memory_fraction:1.5 is invalid; write a number between 0 and 1"),
    ("pinned_num_register_threads:3", "write a power of two of at most 128"),
    ("pinned_reserve_segment_size_mb:0", "write a whole number above 0"),
    (",expandable_segments:True", "unknown option ''"),
]
TORCH = """
import json, sys, torch
def accepts(text):
    try:
        torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")
        torch._C._accelerator_setAllocatorSettings(text)
    except Exception:
        return False
    return True
print(json.dumps([accepts(text) for text in json.loads(sys.argv[1])]))
"""


def parse(text: str, **current: Any) -> Any:
    return allocator_module().parse_allocator_settings(text, **current)


def accepts(text: str) -> bool:
    try:
        parse(text)
    except ValueError:
        return False
    return True


def test_accepts_and_refuses_what_the_installed_torch_does() -> None:
    texts = ACCEPTED + REFUSED
    assert [accepts(text) for text in texts] == [True] * len(ACCEPTED) + [False] * len(REFUSED)
    done = subprocess.run([sys.executable, "-c", TORCH, json.dumps(texts)], capture_output=True, text=True, check=True)
    differing = [text for text, accepted in zip(texts, json.loads(done.stdout)) if accepted != accepts(text)]
    assert differing == []


@pytest.mark.parametrize("text", ONLY_CUDA_ACCEPTS)
def test_options_without_effect_are_accepted(text: str) -> None:
    assert values(parse(text)) == values(parse(""))


@pytest.mark.parametrize(("text", "message"), ONLY_CUDA_REFUSES)
def test_refusals_name_the_option_its_value_and_the_remedy(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_defaults() -> None:
    assert values(parse("")) == {
        "expandable_segments": False, "large_segment_size": 20 * MIB, "max_split_size": UNLIMITED,
        "max_non_split_rounding_size": 20 * MIB, "garbage_collection_threshold": 0.0,
        "per_process_memory_fraction": 1.0, "throw_on_cudamalloc_oom": False,
    }  # fmt: skip


def test_each_option_sets_its_value() -> None:
    text = (
        "max_split_size_mb:128,expandable_segments:True,large_segment_size_mb:24,garbage_collection_threshold:0.7,"
        "max_non_split_rounding_mb:30,per_process_memory_fraction:0.25,throw_on_cudamalloc_oom:True"
    )
    assert values(parse(text)) == {
        "expandable_segments": True, "large_segment_size": 24 * MIB, "max_split_size": 128 * MIB,
        "max_non_split_rounding_size": 30 * MIB, "garbage_collection_threshold": 0.7,
        "per_process_memory_fraction": 0.25, "throw_on_cudamalloc_oom": True,
    }  # fmt: skip


def test_some_settings_outlive_the_next_text() -> None:
    """As in torch 2.13: the others fall back to their defaults."""
    text = "expandable_segments:True,large_segment_size_mb:24,max_split_size_mb:128,garbage_collection_threshold:0.7"
    later = parse("", current=parse(text))
    assert (later.expandable_segments, later.large_segment_size) == (True, 24 * MIB)
    assert (later.max_split_size, later.garbage_collection_threshold) == (UNLIMITED, 0.0)
    assert later.max_non_split_rounding_size == 24 * MIB


@pytest.mark.parametrize(
    ("text", "divisions"),
    [
        ("8", [8] * 16),
        ("[256:1,512:2,1024:4,>:8]", [1] * 9 + [2, 4] + [8] * 5),
        ("[256:1,>:8,1024:2]", [1] * 9 + [8, 2] + [8] * 5),
        ("[512:2,256:4]", [2] * 8 + [4, 2] + [0] * 6),
        ("[1:2]", [2] + [0] * 15),
        ("[65536:2]", [2] * 16),
        ("[>:4]", [0] + [4] * 15),
        ("[]", [0] * 16),
    ],
)
def test_divisions_of_powers_of_two(text: str, divisions: list[int]) -> None:
    """One for each power of two from 1 MiB on, as torch 2.13 reads these lists."""
    settings = parse(f"roundup_power2_divisions:{text}")
    assert settings.roundup_power2_divisions == divisions
    assert [settings.divisions(MIB << interval) for interval in range(16)] == divisions
    assert settings.divisions(1) == settings.divisions(2 * MIB - 1) == divisions[0]
    assert settings.divisions(1 << 45) == divisions[15]


def values(settings: Any) -> dict[str, Any]:
    """All but the divisions."""
    names = [name for name in dir(settings) if not name.startswith("_") and name != "divisions"]
    return {name: getattr(settings, name) for name in names if name != "roundup_power2_divisions"}
