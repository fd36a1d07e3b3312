#include "known_values.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "known_shapes.h"
#include "memory.h"
#include "translation.h"

namespace refshard {
namespace {

// The host's memory for values that are remembered. A model has a few such calls, not thousands.
constexpr size_t kMostRemembered = size_t{256} << 20;

struct Remembered {
  std::mutex mutex;
  std::unordered_map<std::string, std::vector<at::Tensor>> results;  // on the host
  size_t bytes = 0;
};
auto& remembered_values = *new Remembered;

uint64_t mixed(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 0x9e3779b97f4a7c15;
  return hash ^ (hash >> 29);
}

uint64_t hash_of(const at::Tensor& tensor) {
  const auto values = on_host(tensor).contiguous();
  const auto* bytes = static_cast<const char*>(values.const_data_ptr());
  const auto size = values.nbytes();
  uint64_t hash = size, word = 0;
  for (size_t at = 0; at < size; at += sizeof word) {
    word = 0;
    std::memcpy(&word, bytes + at, std::min(sizeof word, size - at));
    hash = mixed(hash, word);
  }
  return hash;
}

}  // namespace

std::optional<std::string> values_key(const c10::OperatorHandle& op, const torch::jit::Stack& stack, size_t first) {
  if (op.hasTag(at::Tag::nondeterministic_seeded)) return std::nullopt;
  const auto& arguments = op.schema().arguments();
  // An operator that makes its result reaches the device as the one that fills an output.
  const bool only_fills = std::all_of(arguments.begin(), arguments.end(), [](const auto& one) {
    return one.is_out() || !one.alias_info();
  });
  auto key = only_fills ? call_key(op, stack, first) : std::nullopt;
  if (!key) return std::nullopt;
  for (auto place = first; place < stack.size(); ++place) {
    if (arguments[place - first].is_out()) continue;
    for_each_tensor(stack[place], [&](const at::Tensor& tensor) {
      const auto hash = hash_of(tensor);
      key->append(reinterpret_cast<const char*>(&hash), sizeof hash);
    });
  }
  return key;
}

bool compute_as_before(const c10::OperatorHandle& op, const std::string& key, torch::jit::Stack& stack, size_t first) {
  std::vector<at::Tensor> results;
  {
    std::lock_guard guard(remembered_values.mutex);
    const auto found = remembered_values.results.find(key);
    if (found == remembered_values.results.end()) return false;
    results = found->second;
  }
  const bool makes = only_makes(op.schema());
  if (makes) {
    stack.resize(first);
  } else {
    give_back_arguments(op.schema(), stack, first);
  }
  const c10::Device device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(current_device()));
  for (size_t i = 0; i < results.size(); ++i) {
    const auto& values = results[i];
    if (makes) {
      stack.emplace_back(at::empty_strided(values.sizes(), values.strides(), values.options().device(device)));
    }
    const auto made = stack[first + i].toTensor();
    if (!makes) {
      made.resize_(values.sizes());
      made.unsafeGetTensorImpl()->set_sizes_and_strides(values.sizes(), values.strides());
    }
    if (!resident(made)) set_mark(made, Mark::Real, true);
    on_host(made).copy_(values);
  }
  return true;
}

void keep_computed(const std::string& key, const torch::jit::Stack& stack, size_t first) {
  std::vector<at::Tensor> results;
  size_t bytes = 0;
  for (auto place = first; place < stack.size(); ++place) {
    if (!stack[place].isTensor()) return;
    const auto& tensor = stack[place].toTensor();
    if (!tensor.defined() || !resident(tensor) || tensor.storage_offset() != 0) return;
    results.push_back(on_host(tensor).clone(at::MemoryFormat::Preserve));
    if (results.back().strides() != tensor.strides()) return;
    bytes += tensor.nbytes();
  }
  if (bytes > kMostRemembered) return;
  std::lock_guard guard(remembered_values.mutex);
  if (remembered_values.bytes + bytes > kMostRemembered) {
    remembered_values.results.clear();
    remembered_values.bytes = 0;
  }
  remembered_values.bytes += bytes;
  remembered_values.results.emplace(key, std::move(results));
}

}  // namespace refshard
