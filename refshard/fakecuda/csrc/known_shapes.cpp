#include "known_shapes.h"

#include <ATen/Functions.h>

#include <unordered_map>
#include <vector>

#include "translation.h"

namespace refshard {
namespace {

struct Made {
  bool defined;
  c10::ScalarType dtype;
  std::vector<int64_t> sizes, strides;
};

// Each thread has its own: the host's and autograd's.
thread_local std::unordered_map<std::string, std::vector<Made>> known;

template <typename T>
void put(std::string& key, T value) {
  key.append(reinterpret_cast<const char*>(&value), sizeof value);
}

bool put_tensor(std::string& key, const at::Tensor& tensor) {
  if (!tensor.defined()) {
    put(key, 'u');
    return true;
  }
  if (tensor.layout() != at::kStrided || (!tensor.is_cuda() && tensor.dim() > 0)) return false;
  put(key, 't');
  put(key, tensor.scalar_type());
  put(key, static_cast<char>(tensor.is_cuda() | tensor.is_conj() << 1 | tensor.is_neg() << 2 |
                             tensor.unsafeGetTensorImpl()->is_wrapped_number() << 3));
  put(key, tensor.dim());
  for (const auto size : tensor.sizes()) put(key, size);
  for (const auto stride : tensor.strides()) put(key, stride);
  return true;
}

bool put_value(std::string& key, const c10::IValue& value) {
  if (value.isTensor()) return put_tensor(key, value.toTensor());
  if (value.isNone() || value.isGenerator()) {
    put(key, 'n');
  } else if (value.isInt()) {
    put(key, 'i');
    put(key, value.toInt());
  } else if (value.isDouble()) {
    put(key, 'd');
    put(key, value.toDouble());
  } else if (value.isBool()) {
    put(key, 'b');
    put(key, value.toBool());
  } else if (value.isString()) {
    put(key, 's');
    put(key, value.toStringRef().size());
    key += value.toStringRef();
  } else if (value.isDevice()) {
    put(key, 'v');
    put(key, value.toDevice().type());
  } else if (value.isList()) {
    put(key, 'l');
    const auto list = value.toListRef();
    put(key, list.size());
    return std::all_of(list.begin(), list.end(), [&](const auto& one) { return put_value(key, one); });
  } else {
    return false;
  }
  return true;
}

}  // namespace

bool only_makes(const c10::FunctionSchema& schema) {
  const auto& arguments = schema.arguments();
  const auto& returns = schema.returns();
  return !returns.empty() &&
         std::none_of(arguments.begin(), arguments.end(), [](const auto& one) { return one.alias_info(); }) &&
         std::all_of(returns.begin(), returns.end(), [](const auto& one) {
           return !one.alias_info() && one.type()->kind() == c10::TypeKind::TensorType;
         });
}

namespace {

bool writes(const c10::Argument& one) { return one.alias_info() && one.alias_info()->isWrite(); }

// Whether an operator writes to arguments, which it gives back, and makes nothing.
bool only_fills(const c10::FunctionSchema& schema) {
  const auto& arguments = schema.arguments();
  const auto& returns = schema.returns();
  return std::any_of(arguments.begin(), arguments.end(), writes) && std::all_of(returns.begin(), returns.end(), writes);
}

bool remembered(const c10::FunctionSchema& schema) {
  thread_local std::unordered_map<const c10::FunctionSchema*, bool> asked;
  const auto [place, fresh] = asked.try_emplace(&schema, false);
  if (fresh) place->second = only_makes(schema) || only_fills(schema);
  return place->second;
}

}  // namespace

void give_back_arguments(const c10::FunctionSchema& schema, torch::jit::Stack& stack, size_t first) {
  torch::jit::Stack results;
  for (const auto& made : schema.returns()) {
    for (size_t place = 0; place < schema.arguments().size(); ++place) {
      const auto* alias = schema.arguments()[place].alias_info();
      if (alias && *alias == *made.alias_info()) results.push_back(stack[first + place]);
    }
  }
  stack.resize(first);
  stack.insert(stack.end(), results.begin(), results.end());
}

std::optional<std::string> call_key(const c10::OperatorHandle& op, const torch::jit::Stack& stack, size_t first) {
  if (!remembered(op.schema())) return std::nullopt;
  std::string key;
  put(key, &op.schema());
  for (size_t place = first; place < stack.size(); ++place) {
    if (!put_value(key, stack[place])) return std::nullopt;
  }
  return key;
}

bool make_as_before(const c10::OperatorHandle& op, const std::string& key, c10::Device device,
                    torch::jit::Stack& stack, size_t first) {
  const auto found = known.find(key);
  if (found == known.end()) return false;
  if (!only_makes(op.schema())) {
    give_back_arguments(op.schema(), stack, first);
    return true;
  }
  stack.resize(first);
  for (const auto& made : found->second) {
    if (!made.defined) {
      stack.emplace_back(at::Tensor());
      continue;
    }
    stack.emplace_back(at::empty_strided(made.sizes, made.strides, at::dtype(made.dtype).device(device)));
  }
  return true;
}

void keep_made(const c10::OperatorHandle& op, const std::string& key, const torch::jit::Stack& arguments,
               const torch::jit::Stack& stack, size_t first) {
  std::vector<Made> made;
  if (!only_makes(op.schema())) {
    if (call_key(op, arguments, 0) == key) known.emplace(key, std::vector<Made>{});  // none was given another shape
    return;
  }
  for (size_t place = first; place < stack.size(); ++place) {
    if (!stack[place].isTensor()) return;
    const auto& tensor = stack[place].toTensor();
    if (!tensor.defined()) {
      made.push_back({false, at::kFloat, {}, {}});
      continue;
    }
    bool view = !tensor.is_cuda() || tensor.storage_offset() != 0 || tensor.is_conj() || tensor.is_neg();
    for (const auto& argument : arguments) {
      for_each_tensor(argument, [&](const at::Tensor& one) {
        view = view || (one.defined() && one.is_cuda() && one.is_alias_of(tensor));
      });
    }
    if (view) return;
    made.push_back({true, tensor.scalar_type(), tensor.sizes().vec(), tensor.strides().vec()});
  }
  known.emplace(key, std::move(made));
}

}  // namespace refshard
