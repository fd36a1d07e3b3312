// Values of results by those of arguments, for operators on large integers that follow from a choice. All layers and steps
// choose alike, so each sort and each count comes again and again.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>
#include <string>

namespace refshard {

// A key of what is asked and of the arguments' values; nothing if the operator does more than make or fill tensors.
std::optional<std::string> values_key(const c10::OperatorHandle& op, const torch::jit::Stack& stack, size_t first);
// Makes what has been made of such a call, with values. False if there was none.
bool compute_as_before(const c10::OperatorHandle& op, const std::string& key, torch::jit::Stack& stack, size_t first);
// Remembers what has been made, in `stack` from `first` on.
void keep_computed(const std::string& key, const torch::jit::Stack& stack, size_t first);

}  // namespace refshard
