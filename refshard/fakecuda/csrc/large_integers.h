// The values of integer tensors that are too large to be computed in a dry run. They are kept as runs (runs.h), by the
// addresses of their elements, until something else is written there or the memory is freed.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>

#include "runs.h"

namespace refshard {

// Whether a tensor's values are kept as runs, if they are known: an integer tensor on the device that is not resident,
// or that is but has been given its values by put_values().
bool in_runs(const at::Tensor& tensor);

// The values of a tensor of integers, on the device or the host, in row-major order. Nothing if they are unknown or
// make too many runs.
std::optional<Runs> values_of(const at::Tensor& tensor);
// Gives a tensor values, in row-major order. False, and nothing is written, if it cannot hold them: they are of another
// number, or no type of integers, its elements do not follow each other in memory, or the values do not fit its type.
bool put_values(const at::Tensor& tensor, const Runs& values);

// To be called before memory is written to by what does not call put_values(), and where it has been freed.
void values_are_overwritten(const void* address, size_t size);
void values_are_overwritten(const at::Tensor& tensor);
void values_are_freed(const void* address, size_t size);
// Writes to a resident storage's memory what is kept as runs, before the host uses that memory.
void write_out_values(const void* storage);

// Writes to memory what is kept of a large storage, if that is all of it. From then on it is resident.
void make_resident(const at::Tensor& tensor);

// What an operator gives for arguments of which the values are known as runs.
struct ResultInRuns {
  std::optional<Runs> values;        // nothing if only its size is known
  std::optional<at::Tensor> tensor;  // nothing if a meta kernel can make it
};
// Nothing if the operator is not one of those few that compute with runs, or if values are missing.
std::optional<ResultInRuns> result_in_runs(const c10::OperatorHandle& op, const torch::jit::Stack& stack, size_t first);

}  // namespace refshard
