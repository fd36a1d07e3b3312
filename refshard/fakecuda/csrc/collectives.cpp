#include "process_group.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <algorithm>
#include <numeric>

#include "launch.h"
#include "memory.h"
#include "over_gloo.h"

// Each collective: its record, how gloo moves its bytes, and what it gives where all ranks hold the same.
namespace refshard {
namespace {

Tensors flat(const std::vector<Tensors>& lists) {
  Tensors all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

// NCCL's own tensor as large as these together, if they are alike and on the device.
Tensors flat_copy(const Tensors& tensors, const char* op) {
  const auto& first = tensors.front();
  const bool alike = std::all_of(tensors.begin(), tensors.end(), [&](const auto& tensor) {
    return tensor.is_cuda() && tensor.numel() == first.numel();
  });
  if (!alike) return {};
  Allocating allocating(op, Category::Workspace);
  return {at::empty({first.numel() * static_cast<int64_t>(tensors.size())}, first.options())};
}

// What a reduction over `size` ranks that all hold the same gives. Those that are not here give the same again.
void reduce_alike(const at::Tensor& tensor, const c10d::ReduceOp& op, int size) {
  if (tensor.scalar_type() == at::kBool) return;
  if (op.op_ == c10d::ReduceOp::SUM) tensor.mul_(size);
  if (op.op_ == c10d::ReduceOp::PREMUL_SUM) tensor.mul_(factor_of(op) * size);
  if (op.op_ == c10d::ReduceOp::PRODUCT) tensor.pow_(size);
}

// The elements that each of `size` ranks gets of a tensor: `splits` rows of it, or an equal part.
std::vector<int64_t> parts_of(const at::Tensor& tensor, const std::vector<int64_t>& splits, int size) {
  if (splits.empty()) return std::vector<int64_t>(size, tensor.numel() / size);
  const auto row = tensor.size(0) ? tensor.numel() / tensor.size(0) : 0;
  auto parts = splits;
  for (auto& part : parts) part *= row;
  return parts;
}

void fill_repeatedly(const at::Tensor& out, const at::Tensor& in) {
  if (!out.numel() || !in.numel()) return;
  auto to = out.view(-1);
  const auto from = in.reshape(-1);
  for (int64_t at = 0; at < to.numel(); at += from.numel()) {
    const auto count = std::min(from.numel(), to.numel() - at);
    to.narrow(0, at, count).copy_(from.narrow(0, 0, count));
  }
}

}  // namespace

WorkPtr FakeNccl::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  Call call{"broadcast", tensors, {}, options.asyncOp, bytes_of(tensors)};
  call.root = options.rootRank;
  call.over_gloo = [&](auto& gloo, const auto& out, const auto&) {
    auto mine = out;
    gloo.broadcast(mine, options)->wait();
    return WorkPtr();
  };
  return issue(call);
}

WorkPtr FakeNccl::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  Call call{"all_reduce", tensors, tensors, options.asyncOp, bytes_of(tensors)};
  call.reduces = options.reduceOp.op_;
  call.over_gloo = [&](auto& gloo, const auto& out, const auto&) {
    for (const auto& tensor : out) all_reduce_over(gloo, tensor, options.reduceOp, getSize());
    return WorkPtr();
  };
  call.alike = [&](const auto& out, const auto&) {
    for (const auto& tensor : out) reduce_alike(tensor, options.reduceOp, getSize());
  };
  return issue(call);
}

WorkPtr FakeNccl::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return allreduce(tensors, options);
}

WorkPtr FakeNccl::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  Call call{"reduce", tensors, tensors, options.asyncOp, bytes_of(tensors)};
  call.root = options.rootRank;
  call.reduces = options.reduceOp.op_;
  call.over_gloo = [&](auto& gloo, const auto& out, const auto&) {
    for (const auto& tensor : out) {
      auto mine = tensor.clone();  // only the root's changes
      all_reduce_over(gloo, mine, options.reduceOp, getSize());
      if (options.rootRank == getRank()) tensor.copy_(mine);
    }
    return WorkPtr();
  };
  call.alike = [&](const auto& out, const auto&) {
    for (const auto& tensor : out) reduce_alike(tensor, options.reduceOp, getSize());
  };
  return issue(call);
}

WorkPtr FakeNccl::allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& options) {
  Call call{"all_gather", flat(out), in, options.asyncOp, bytes_of(flat(out))};
  call.over_gloo = [&](auto& gloo, const auto& to, const auto& from) {
    all_gather_over(gloo, to, from.front(), getRank());
    return WorkPtr();
  };
  call.alike = [](const auto& to, const auto& from) {
    for (const auto& tensor : to) fill_repeatedly(tensor, from.front());
  };
  call.staging = flat_copy(call.out, "nccl::all_gather");  // what NCCL gathers into, and copies from
  return issue(call);
}

WorkPtr FakeNccl::_allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) {
  Tensors outs{out}, ins{in};
  return allgather_into_tensor_coalesced(outs, ins, options);
}

WorkPtr FakeNccl::allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& options) {
  Call call{"all_gather", out, in, options.asyncOp, bytes_of(out)};
  call.over_gloo = [](auto& gloo, const auto& to, const auto& from) {
    for (size_t i = 0; i < to.size(); ++i) all_gather_over(gloo, to[i], from[i]);
    return WorkPtr();
  };
  call.alike = [](const auto& to, const auto& from) {
    for (size_t i = 0; i < to.size(); ++i) fill_repeatedly(to[i], from[i]);
  };
  for (const auto& tensor : out) {
    if (tensor.is_cuda()) recorder().categorise(block_at(tensor.device().index(), tensor.storage().data()), Category::Unsharded);
  }
  return issue(call);
}

WorkPtr FakeNccl::gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& options) {
  Call call{"gather", flat(out), in, options.asyncOp, bytes_of(in) * getSize()};
  call.root = options.rootRank;
  call.over_gloo = [&](auto& gloo, const auto& to, const auto& from) {
    std::vector<Tensors> lists;
    if (!out.empty()) lists.push_back(to);
    auto mine = from;
    gloo.gather(lists, mine, options)->wait();
    return WorkPtr();
  };
  call.alike = [](const auto& to, const auto& from) {
    for (const auto& tensor : to) fill_repeatedly(tensor, from.front());
  };
  return issue(call);
}

WorkPtr FakeNccl::scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& options) {
  Call call{"scatter", out, flat(in), options.asyncOp, bytes_of(out) * getSize()};
  call.root = options.rootRank;
  call.over_gloo = [&](auto& gloo, const auto& to, const auto& from) {
    std::vector<Tensors> lists;
    if (!in.empty()) lists.push_back(from);
    auto mine = to;
    gloo.scatter(mine, lists, options)->wait();
    return WorkPtr();
  };
  call.alike = [this](const auto& to, const auto& from) {
    if (!from.empty()) to.front().copy_(from[getRank()]);
  };
  return issue(call);
}

WorkPtr FakeNccl::reduce_scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& options) {
  Call call{"reduce_scatter", out, flat(in), options.asyncOp, bytes_of(flat(in))};
  call.reduces = options.reduceOp.op_;
  call.over_gloo = [&](auto& gloo, const auto& to, const auto& from) {
    for (int rank = 0; rank < getSize(); ++rank) {
      auto part = from[rank].clone();
      all_reduce_over(gloo, part, options.reduceOp, getSize());
      if (rank == getRank()) to.front().copy_(part);
    }
    return WorkPtr();
  };
  call.alike = [&](const auto& to, const auto& from) {
    to.front().copy_(from[getRank()]);
    reduce_alike(to.front(), options.reduceOp, getSize());
  };
  call.staging = flat_copy(call.in, "nccl::reduce_scatter");
  return issue(call);
}

WorkPtr FakeNccl::_reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& options) {
  Tensors outs{out}, ins{in};
  return reduce_scatter_tensor_coalesced(outs, ins, options);
}

WorkPtr FakeNccl::reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in,
                                                  const c10d::ReduceScatterOptions& options) {
  Call call{"reduce_scatter", out, in, options.asyncOp, bytes_of(in)};
  call.reduces = options.reduceOp.op_;
  call.over_gloo = [&](auto& gloo, const auto& to, const auto& from) {
    for (size_t i = 0; i < to.size(); ++i) {
      reduce_scatter_over(gloo, to[i], from[i], options.reduceOp, getRank(), getSize());
    }
    return WorkPtr();
  };
  call.alike = [&](const auto& to, const auto& from) {
    for (size_t i = 0; i < to.size(); ++i) {
      to[i].view(-1).copy_(from[i].reshape(-1).narrow(0, getRank() * to[i].numel(), to[i].numel()));
      reduce_alike(to[i], options.reduceOp, getSize());
    }
  };
  for (const auto& tensor : in) {
    if (tensor.is_cuda()) recorder().categorise(block_at(tensor.device().index(), tensor.storage().data()), Category::Gradients);
  }
  return issue(call);
}

WorkPtr FakeNccl::alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_splits,
                                std::vector<int64_t>& in_splits, const c10d::AllToAllOptions& options) {
  // Where ranks get more than they send, or less, the link's busier direction counts.
  Call call{"all_to_all", {out}, {in}, options.asyncOp, std::max(bytes_of({in}), bytes_of({out}))};
  call.over_gloo = [&](auto& gloo, const auto& to, const auto& from) {
    auto received = to.front(), sent = from.front();
    gloo.alltoall_base(received, sent, out_splits, in_splits, options)->wait();
    return WorkPtr();
  };
  // Each rank sends this one what this one would send itself.
  call.alike = [&](const auto& to, const auto& from) {
    const auto parts = parts_of(from.front(), in_splits, getSize());
    const auto start = std::accumulate(parts.begin(), parts.begin() + getRank(), int64_t{0});
    fill_repeatedly(to.front(), from.front().reshape(-1).narrow(0, start, parts[getRank()]));
  };
  return issue(call);
}

WorkPtr FakeNccl::alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& options) {
  Call call{"all_to_all", out, in, options.asyncOp, std::max(bytes_of(in), bytes_of(out))};
  call.over_gloo = [&](auto& gloo, const auto& to, const auto& from) {
    const auto sizes = [](const Tensors& tensors) {
      std::vector<int64_t> counts;
      for (const auto& tensor : tensors) counts.push_back(tensor.numel());
      return counts;
    };
    auto out_splits = sizes(to), in_splits = sizes(from);
    Tensors pieces;
    for (const auto& tensor : from) pieces.push_back(tensor.reshape(-1));
    auto sent = at::cat(pieces);
    auto received = at::empty({std::accumulate(out_splits.begin(), out_splits.end(), int64_t{0})}, sent.options());
    gloo.alltoall_base(received, sent, out_splits, in_splits, options)->wait();
    const auto parts = received.split_with_sizes(sizes(to));  // gloo takes the other vector for itself
    for (size_t i = 0; i < to.size(); ++i) to[i].view(-1).copy_(parts[i]);
    return WorkPtr();
  };
  call.alike = [this](const auto& to, const auto& from) {
    for (const auto& tensor : to) fill_repeatedly(tensor, from[getRank()]);
  };
  return issue(call);
}

WorkPtr FakeNccl::send(Tensors& tensors, int peer, int tag) {
  Call call{"send", {}, tensors, true, bytes_of(tensors), peer};
  call.over_gloo = [&](auto& gloo, const auto&, const auto& from) {
    auto mine = from;
    return gloo.send(mine, peer, tag);
  };
  return issue(call);
}

WorkPtr FakeNccl::recv(Tensors& tensors, int peer, int tag) {
  Call call{"recv", tensors, {}, true, bytes_of(tensors), peer};
  call.over_gloo = [&](auto& gloo, const auto& to, const auto&) {
    auto mine = to;
    return gloo.recv(mine, peer, tag);
  };
  return issue(call);
}

WorkPtr FakeNccl::recvAnysource(Tensors& tensors, int tag) {
  Call call{"recv", tensors, {}, true, bytes_of(tensors)};
  call.over_gloo = [&](auto& gloo, const auto& to, const auto&) {
    auto mine = to;
    return gloo.recvAnysource(mine, tag);
  };
  return issue(call);
}

WorkPtr FakeNccl::barrier(const c10d::BarrierOptions& options) {
  Call call{"barrier", {}, {}, options.asyncOp, 4};
  if (name_ == "nccl") {  // whose barrier is an all-reduce of one element for which the host waits
    Allocating allocating("nccl::barrier", Category::Workspace);
    call.out = {at::zeros({1}, at::TensorOptions().device(c10::Device(c10::DeviceType::CUDA, current_device())))};
  }
  call.over_gloo = [&](auto& gloo, const auto&, const auto&) {
    gloo.barrier(options)->wait();
    return WorkPtr();
  };
  return issue(call);
}

}  // namespace refshard
