"""A GPU of 1 GiB in a dry run, for :mod:`tests.fakecuda.test_torch_cuda`."""

from typing import Any

import torch

from tests.fakecuda.child import check

GIB = 1 << 30


@check
def facts() -> list[int]:
    free, total = torch.cuda.mem_get_info()
    return [free, total, torch.cuda.get_device_properties(0).total_memory]


@check
def too_much() -> dict[str, Any]:
    held = torch.empty(GIB // 2, dtype=torch.uint8, device="cuda")
    try:
        torch.empty(GIB // 4 * 3, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        text, alias = str(error), isinstance(error, torch.cuda.OutOfMemoryError)
    stats = torch.cuda.memory_stats()
    after = torch.cuda.memory_allocated()
    del held
    fits = torch.empty(GIB // 4 * 3, dtype=torch.uint8, device="cuda")
    return {
        "text": text, "alias": alias, "ooms": stats["num_ooms"], "retries": stats["num_alloc_retries"],
        "held": after, "fits afterwards": fits.nbytes,
        "runtime error": issubclass(torch.OutOfMemoryError, RuntimeError),
    }  # fmt: skip


@check
def cached_blocks_are_freed_first() -> dict[str, Any]:
    torch.cuda.empty_cache()
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    del_me = [torch.empty(GIB // 8, dtype=torch.uint8, device="cuda") for _ in range(4)]
    del_me.clear()
    whole = torch.empty(GIB // 4 * 3, dtype=torch.uint8, device="cuda")
    return {"fits": whole.nbytes, "retries": torch.cuda.memory_stats()["num_alloc_retries"] - retries}


@check
def in_an_operator() -> list[Any]:
    """An activation that does not fit; what was there before is intact."""
    torch.cuda.empty_cache()
    x = torch.ones(1 << 14, 1 << 10, device="cuda")  # 64 MiB
    try:
        (x @ x.t()).sum()  # 1 GiB
    except torch.OutOfMemoryError as error:
        return [str(error).splitlines()[0].split(". ")[1], list(x.shape)]
    return []
