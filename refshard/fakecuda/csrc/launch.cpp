#include "launch.h"

#include <atomic>
#include <string_view>
#include <unordered_set>

#include "device.h"
#include "large_integers.h"
#include "memory.h"
#include "operators.h"
#include "translation.h"

namespace refshard {
namespace {

// Operators that overwrite what they are given without reading it.
const std::unordered_set<std::string_view> kOverwriting = {
    "aten::fill_", "aten::zero_", "aten::normal_", "aten::uniform_", "aten::bernoulli_", "aten::random_",
    "aten::exponential_", "aten::_foreach_zero_", "aten::_foreach_copy_",
};
// Operators that read but those rows of their first tensor that an index names.
const std::unordered_set<std::string_view> kSelecting = {
    "aten::embedding", "aten::index", "aten::index_select", "aten::gather", "aten::nll_loss_forward",
    "aten::nll_loss_backward",
};

// Operators that move elements from one tensor to another.
const std::unordered_set<std::string_view> kMoving = {
    "aten::copy_", "aten::_foreach_copy_", "aten::split_with_sizes_copy", "aten::cat", "aten::_chunk_cat",
};

std::atomic<int64_t> made{0};

const char* name_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return "fp32";
    case at::kBFloat16: return "bf16";
    case at::kHalf: return "fp16";
    case at::kDouble: return "fp64";
    case at::kLong: return "int64";
    case at::kInt: return "int32";
    case at::kShort: return "int16";
    case at::kChar: return "int8";
    case at::kByte: return "uint8";
    case at::kBool: return "bool";
    case at::kFloat8_e4m3fn: return "fp8e4m3";
    case at::kFloat8_e5m2: return "fp8e5m2";
    case at::kComplexFloat: return "complex64";
    default: return c10::toString(type);
  }
}

int64_t span_bytes(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return (last + 1) * tensor.itemsize();
}

// Puts a launch on its stream, in the recording and in the device's books.
void launched(Event event, std::string_view name, std::string_view signature, const std::vector<Access>& accesses) {
  ++made;
  {
    std::lock_guard guard(device().mutex);
    device().streams.launched(event.stream);
  }
  if (!recorder().on) return;
  event.name = recorder().names.code(name);
  event.signature = recorder().signatures.code(signature);
  recorder().add(event, accesses);
  for (const auto& access : accesses) {
    if (!access.write) continue;
    recorder().written(block_at(current_device(), reinterpret_cast<const void*>(access.address)), event.name);
  }
  spread_categories(name, accesses);
}

}  // namespace

int64_t launches_made() { return made; }

int64_t touched_bytes(const at::Tensor& tensor) {
  int64_t elements = 1;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.stride(d) != 0 || tensor.size(d) == 0) elements *= tensor.size(d);
  }
  return elements * static_cast<int64_t>(tensor.itemsize());
}

Access access_of(const at::Tensor& tensor, bool write) {
  const auto start = reinterpret_cast<int64_t>(tensor.storage().data()) +
                     tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize());
  return {start, span_bytes(tensor), write};
}

void describe(const at::Tensor& tensor, std::string& into) {
  if (!into.empty()) into += ' ';
  into += name_of(tensor.scalar_type());
  into += '[';
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (d) into += ',';
    into += std::to_string(tensor.size(d));
  }
  into += ']';
}

bool lie_alike(at::TensorList tensors) {
  const at::Tensor* like = nullptr;
  for (const auto& one : tensors) {
    if (one.numel() < 2) continue;
    if (like == nullptr) like = &one;
    if (!one.is_non_overlapping_and_dense() || one.sizes() != like->sizes() || one.strides() != like->strides()) {
      return false;
    }
  }
  return true;
}

void Launch::arguments(const torch::jit::Stack& stack, size_t first) {
  const bool overwrites = kOverwriting.contains(schema_.name());
  const bool selects = kSelecting.contains(schema_.name());
  std::vector<at::Tensor> on_device;
  for (size_t place = 0; place < schema_.arguments().size(); ++place) {
    const auto& argument = schema_.arguments()[place];
    const auto& value = stack[first + place];
    if (argument.name() == "is_causal" && value.isBool() && value.toBool()) flags_ |= kCausal;
    const auto* alias = argument.alias_info();
    const bool writes = alias && alias->isWrite();
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      describe(tensor, signature_);
      inputs_.push_back({tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type(), tensor.is_cuda()});
      if (!tensor.is_cuda()) return;
      if (pointwise_) on_device.push_back(tensor);
      const auto bytes = touched_bytes(tensor);
      if (writes) {
        writes_ += bytes;
        view_only_ = false;
      }
      if (!writes || (!argument.is_out() && !overwrites)) reads_ += selects && place == 0 ? 0 : bytes;
      accesses_.push_back(access_of(tensor, writes));
    });
  }
  if (!lie_alike(on_device)) flags_ |= kStrided;
}

void Launch::results(const torch::jit::Stack& stack, size_t first) {
  std::string made;
  for (size_t place = 0; place < schema_.returns().size(); ++place) {
    const auto* alias = schema_.returns()[place].alias_info();
    if (alias) continue;  // a view, or an argument
    view_only_ = false;
    for_each_tensor(stack[first + place], [&](const at::Tensor& tensor) {
      describe(tensor, made);
      if (!tensor.is_cuda()) return;
      const auto bytes = touched_bytes(tensor);
      writes_ += bytes;
      if (kSelecting.contains(schema_.name())) reads_ += bytes;
      accesses_.push_back(access_of(tensor, true));
    });
  }
  if (schema_.returns().empty()) view_only_ = false;
  if (!made.empty()) signature_ += " -> " + made;
}

void spread_categories(std::string_view name, const std::vector<Access>& accesses) {
  if (!kMoving.contains(name)) return;
  const auto block = [](const Access& access) {
    return block_at(current_device(), reinterpret_cast<const void*>(access.address));
  };
  bool unsharded = false;
  for (const auto& access : accesses) {
    if (!access.write) unsharded = unsharded || recorder().category_of(block(access)) == Category::Unsharded;
  }
  for (const auto& access : accesses) {
    const auto of = block(access);
    if (recorder().category_of(of) != Category::Other) continue;
    if (access.write && unsharded) recorder().categorise(of, Category::Unsharded);
    if (!access.write && name == "aten::_chunk_cat") recorder().categorise(of, Category::Gradients);
  }
}

void Launch::overwrites_values() const {
  // torch's own operators declare all that they write; others may not.
  const bool declared = std::string_view(schema_.name()).starts_with("aten::");
  for (const auto& access : accesses_) {
    if (!access.write && declared) continue;
    values_are_overwritten(reinterpret_cast<const void*>(access.address), static_cast<size_t>(access.size));
  }
}

void Launch::put(int64_t stream) {
  Event event{.kind = Kind::Launch, .stream = stream, .reads = reads_, .writes = writes_, .flags = flags_};
  launched(event, schema_.name(), signature_, accesses_);
}

void launch_past_torch(std::string_view name, std::string_view signature, int64_t stream,
                       const std::vector<Touched>& touched) {
  Event event{.kind = Kind::Launch, .stream = stream};
  std::vector<Access> accesses;
  for (const auto& one : touched) {
    if (one.reads) event.reads += one.size;
    if (one.writes) event.writes += one.size;
    accesses.push_back({one.address, one.size, one.writes});
    if (!one.writes) continue;
    values_are_overwritten(reinterpret_cast<const void*>(one.address), static_cast<size_t>(one.size));
    forget_value(current_device(), reinterpret_cast<const void*>(one.address));
  }
  launched(event, name, signature, accesses);
}

void launch_kernel(std::string_view name, const std::vector<Operand>& operands, int64_t flops, int64_t stream,
                   int32_t flags) {
  Event event{.kind = Kind::Launch, .stream = stream, .size = flops, .flags = flags};
  std::string signature, made;
  std::vector<Access> accesses;
  for (const auto& [tensor, reads, writes] : operands) {
    describe(tensor, reads || !writes ? signature : made);
    event.reads += reads;
    event.writes += writes;
    if (!tensor.is_cuda() || !tensor.numel()) continue;
    accesses.push_back(access_of(tensor, writes > 0));
    if (!writes) continue;
    values_are_overwritten(tensor);
    not_computed(tensor);
  }
  if (!made.empty()) signature += " -> " + made;
  launched(event, name, signature, accesses);
}

}  // namespace refshard
