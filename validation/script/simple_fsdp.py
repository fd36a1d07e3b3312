"""SimpleFSDP as torchtitan has it: parameters are gathered where they are read, and a compiler merges the gathers."""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._inductor.fx_passes.overlap_manual_scheduling import manual_overlap_bucketing
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy


class Gathered(nn.Module):
    """A sharded parameter as its module reads it: whole, in the dtype of compute; its gradient is reduced."""

    active = True

    def __init__(self, mesh: DeviceMesh, options: argparse.Namespace) -> None:
        super().__init__()
        self.mesh, self.options = mesh, options

    def forward(self, x: DTensor) -> Tensor:
        if not Gathered.active:
            return x
        tensor_axes = x._spec.mesh.ndim - self.mesh.ndim
        sharded = DTensor.from_local(x.to_local(), self.mesh, (Shard(0),)) if tensor_axes else x
        whole = sharded.redistribute(
            placements=[Replicate()] * self.mesh.ndim, forward_dtype=self.options.compute_dtype,
            backward_dtype=self.options.reduce_dtype,
        ).to_local(grad_placements=[Partial(reduce_op="avg")] * self.mesh.ndim)  # fmt: skip
        if not tensor_axes:
            return whole
        names = x._spec.mesh.mesh_dim_names or ()
        return DTensor.from_local(whole, x._spec.mesh[names[-tensor_axes:]], x._spec.placements[-tensor_axes:])


def apply_simple_fsdp(model: Any, mesh: DeviceMesh, options: argparse.Namespace) -> nn.Module:
    for module in list(model.modules()):
        names = [name for name, _ in module.named_parameters(recurse=False)]
        for name in names:
            whole = module._parameters[name]
            shard = shard_over if isinstance(whole, DTensor) else partial(distribute_tensor, placements=(Shard(0),))
            module.register_parameter(name, nn.Parameter(shard(whole, device_mesh=mesh)))
        read: Callable[[str], property] = partial(reader, Gathered(mesh, options))
        module.__class__ = type(module.__class__.__name__, (module.__class__,), {name: read(name) for name in names})
    model.to_empty(device="cuda")
    Gathered.active = False
    model.initialise()
    Gathered.active = True
    return model


def reader(gathered: Gathered, name: str) -> property:
    return property(lambda module: gathered(module._parameters[name]))


def shard_over(tensor: DTensor, device_mesh: DeviceMesh) -> DTensor:
    """Shard what tensor parallelism has sharded already over the data-parallel ranks too."""
    inner, parts = tensor._spec, tensor._spec.num_shards_map[0]
    outer = _StridedShard(0, split_factor=parts) if parts > 1 else Shard(0)
    before, after = (
        DTensorSpec(mesh=device_mesh, placements=(placement,), tensor_meta=inner.tensor_meta)
        for placement in (Replicate(), Shard(0))
    )
    local = redistribute_local_tensor(tensor._local_tensor, current_spec=before, target_spec=after)
    spec = DTensorSpec(
        mesh=DeviceMesh._concatenate([device_mesh, inner.mesh]), placements=(outer, *inner.placements),
        tensor_meta=inner.tensor_meta,
    )  # fmt: skip
    return DTensor(local.requires_grad_(), spec, requires_grad=True)


def compile_simple_fsdp(model: Any) -> nn.Module:
    """One graph, in which each block's collectives are merged; backward gathers again."""
    torch._inductor.config.reorder_for_peak_memory = False
    torch._inductor.config.allow_buffer_reuse = False
    plan: list[Any] = ["embedding", ["norm", "head"], *(f"layers.{name}" for name in model.layers)]

    def merge(graph: GraphModule, _: Any) -> GraphModule:
        manual_overlap_bucketing(graph, module_bucket_plans=plan, insert_overlap_deps=False)
        return graph

    inner = aot_autograd(fw_compiler=merge, bw_compiler=merge, keep_inference_input_mutations=True)

    def backend(*arguments: Any, **keywords: Any) -> Any:
        with functorch_config.patch("joint_custom_pass", gather_again):
            return inner(*arguments, **keywords)

    return torch.compile(model, backend=backend, fullgraph=True)


def gather_again(graph: GraphModule, _: Any) -> GraphModule:
    """Mark the gathers of parameters, and the casts around them, as recomputed in backward."""
    for node in graph.graph.nodes:
        if node.target != torch.ops._c10d_functional.wait_tensor.default or not of_parameter(node):
            continue
        gather = node.args[0]
        slices = [user for user in node.users if user.target == torch.ops.aten.slice.Tensor]
        casts = [one for one in gather.all_input_nodes if one.target == torch.ops.prims.convert_element_type.default]
        for one in (gather, node, *slices, *casts):
            one.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            one.meta["ac_graph_id"] = 100_000
    graph.recompile()
    return graph


def of_parameter(wait: Node) -> bool:
    """Whether a chain of operators with one input each leads from an input of the graph to the gather."""
    node: Node = wait.all_input_nodes[0]
    if node.target != torch.ops._c10d_functional.all_gather_into_tensor.default:
        return False
    while len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
        if node.op == "placeholder":
            return True
    return False
