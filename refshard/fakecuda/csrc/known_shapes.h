// What meta kernels made of arguments that come again: most of them are Python, and a step has thousands of calls alike.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>
#include <string>

namespace refshard {

// Whether an operator reads its arguments only, and makes nothing but tensors of its own.
bool only_makes(const c10::FunctionSchema& schema);

// An operator and its arguments as far as a meta kernel can see them; nothing if it could see more than is compared.
std::optional<std::string> call_key(const c10::OperatorHandle& op, const torch::jit::Stack& stack, size_t first);

// Puts on the stack, in place of the arguments, what an earlier call of this key made, on `device`. False if none did.
bool make_as_before(const c10::OperatorHandle& op, const std::string& key, c10::Device device,
                    torch::jit::Stack& stack, size_t first);

// Keeps what a call of this key with `arguments` has left on the stack, unless its results are views of them, or it
// gave one another shape.
void keep_made(const c10::OperatorHandle& op, const std::string& key, const torch::jit::Stack& arguments,
               const torch::jit::Stack& stack, size_t first);

// Leaves as results the arguments that they are.
void give_back_arguments(const c10::FunctionSchema& schema, torch::jit::Stack& stack, size_t first);

}  // namespace refshard
