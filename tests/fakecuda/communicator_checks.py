"""Memory that NCCL takes for communicators, of a GPU of 1 GiB, for :mod:`tests.fakecuda.test_communicators`."""

import torch
import torch.distributed as dist

from tests.fakecuda.child import check

MIB = 1 << 20


@check
def taken() -> dict[str, object]:
    def free() -> int:
        return torch.cuda.mem_get_info()[0] // MIB

    dist.init_process_group("nccl")
    tensor = torch.ones(8, device="cuda")
    torch.cuda.empty_cache()
    steps = {"init": free()}
    dist.all_reduce(tensor)
    steps["first all-reduce"] = free()
    dist.all_gather_into_tensor(torch.empty(32, device="cuda"), tensor)
    torch.cuda.empty_cache()
    steps["another collective"] = free()
    pair = dist.new_group([0, 1])
    steps["another group"] = free()
    dist.broadcast(tensor, 0, group=pair)
    steps["its first collective"] = free()
    for operation in dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, 1)]):
        operation.wait()
    steps["a batch of messages"] = free()
    dist.send(tensor, 1)
    steps["a message"] = free()
    dist.all_reduce(torch.ones(2), group=dist.new_group(backend="gloo"))
    steps["gloo"] = free()
    dist.barrier(dist.new_group([0, 2]))
    steps["a barrier"] = free()
    try:
        for _ in range(9):
            dist.all_reduce(tensor, group=dist.new_group([0, 3]))
    except torch.OutOfMemoryError as error:
        return {"free": steps, "refused": str(error).splitlines()[0].partition(" Including")[0]}
    return {"free": steps}
