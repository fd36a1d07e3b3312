// In host compute, NCCL's collectives by what gloo has of them; each call returns when the bytes have moved.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "process_group.h"

namespace refshard {

// By what a premultiplied sum multiplies.
double factor_of(const c10d::ReduceOp& premultiplied);

void all_reduce_over(c10d::Backend& gloo, const at::Tensor& tensor, const c10d::ReduceOp& op, int size);
void reduce_scatter_over(c10d::Backend& gloo, const at::Tensor& out, const at::Tensor& in, const c10d::ReduceOp& op,
                         int rank, int size);
void all_gather_over(c10d::Backend& gloo, const at::Tensor& out, const at::Tensor& in);
void all_gather_over(c10d::Backend& gloo, const Tensors& out, const at::Tensor& in, int rank);

}  // namespace refshard
