#include "over_gloo.h"

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <algorithm>

namespace refshard {

double factor_of(const c10d::ReduceOp& premultiplied) {
  const auto* given = static_cast<c10d::NCCLPreMulSumSupplement*>(premultiplied.supplement_.get());
  return given->tensor_factor.defined() ? given->tensor_factor.item().toDouble() : given->double_factor;
}

namespace {

// gloo sums; what NCCL can besides is done after.
template <typename Options>
std::pair<Options, double> as_sum(Options options, int size) {
  double factor = 1;
  if (options.reduceOp.op_ == c10d::ReduceOp::AVG) {
    factor = 1.0 / size;
    options.reduceOp = c10d::ReduceOp::SUM;
  } else if (options.reduceOp.op_ == c10d::ReduceOp::PREMUL_SUM) {
    factor = factor_of(options.reduceOp);
    options.reduceOp = c10d::ReduceOp::SUM;
  }
  return {options, factor};
}

}  // namespace

void all_reduce_over(c10d::Backend& gloo, const at::Tensor& tensor, const c10d::ReduceOp& op, int size) {
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  const auto [summing, factor] = as_sum(options, size);
  Tensors one{tensor};
  gloo.allreduce(one, summing)->wait();
  if (factor != 1) tensor.mul_(factor);
}

// A reduce-scatter as the all-reduce of a copy.
void reduce_scatter_over(c10d::Backend& gloo, const at::Tensor& out, const at::Tensor& in, const c10d::ReduceOp& op,
                         int rank, int size) {
  auto copy = in.reshape(-1).clone();
  all_reduce_over(gloo, copy, op, size);
  out.view(-1).copy_(copy.narrow(0, rank * out.numel(), out.numel()));
}

// gloo wants the output shaped as its concatenation; NCCL asks for as many elements alone.
void all_gather_over(c10d::Backend& gloo, const at::Tensor& out, const at::Tensor& in) {
  auto whole = out.view(-1), mine = in.reshape(-1);
  gloo._allgather_base(whole, mine, {})->wait();
}

// NCCL gathers tensors of several sizes too, by a broadcast from each rank.
void all_gather_over(c10d::Backend& gloo, const Tensors& out, const at::Tensor& in, int rank) {
  const bool even = std::all_of(out.begin(), out.end(), [&](const auto& tensor) { return tensor.numel() == in.numel(); });
  if (even) {
    std::vector<Tensors> lists{out};
    Tensors mine{in};
    gloo.allgather(lists, mine, {})->wait();
    return;
  }
  out[rank].copy_(in);
  for (size_t root = 0; root < out.size(); ++root) {
    c10d::BroadcastOptions options;
    options.rootRank = static_cast<int64_t>(root);
    Tensors part{out[root]};
    gloo.broadcast(part, options)->wait();
  }
}

}  // namespace refshard
