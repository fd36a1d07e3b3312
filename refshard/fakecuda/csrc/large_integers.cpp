#include "large_integers.h"

#include <ATen/ATen.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>

#include "launch.h"
#include "memory.h"
#include "translation.h"

namespace refshard {
namespace {

// A tensor whose values make more runs has unknown values.
constexpr size_t kMostRuns = 4096;
// Values on the host are looked through up to this size, which is that of the largest resident tensors.
constexpr size_t kLookedThrough = size_t{4} << 20;
// A resident tensor of more bytes is written only if the host uses its memory.
constexpr size_t kWrittenAtOnce = size_t{16} << 10;

struct Kept {
  at::ScalarType dtype;
  bool resident;  // Then all of the storage's values are kept, and those in its memory are stale.
  Runs runs;      // by element, from the address on
};

auto& kept_values = *new std::map<uintptr_t, Kept>;  // by the address of the storage; leaked, as in memory.cpp
auto& kept_mutex = *new std::mutex;
std::atomic<size_t> kept_count = 0;

struct Bounds {
  int64_t least, most;
};

template <typename Integer>
constexpr Bounds bounds() {
  return {std::numeric_limits<Integer>::min(), std::numeric_limits<Integer>::max()};
}

// The values that a type holds; nothing if it is not one of integers that an int64 can represent.
std::optional<Bounds> bounds_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBool: return Bounds{0, 1};
    case at::kByte: return bounds<uint8_t>();
    case at::kChar: return bounds<int8_t>();
    case at::kUInt16: return bounds<uint16_t>();
    case at::kShort: return bounds<int16_t>();
    case at::kUInt32: return bounds<uint32_t>();
    case at::kInt: return bounds<int32_t>();
    case at::kLong: return bounds<int64_t>();
    default: return std::nullopt;
  }
}

bool fit(const Runs& values, at::ScalarType dtype) {
  const auto bounds = bounds_of(dtype);
  return bounds && (values.empty() || (values.minimum() >= bounds->least && values.maximum() <= bounds->most));
}

bool plain(const at::Tensor& tensor) { return tensor.is_contiguous() && !tensor.is_neg() && !tensor.is_conj(); }

uintptr_t address_of(const at::Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.storage().data()); }

// The one element of which a tensor shows copies, as expand() does.
std::optional<at::Tensor> repeated(const at::Tensor& tensor) {
  auto element = tensor;
  for (auto d = tensor.dim() - 1; d >= 0; --d) {
    if (tensor.size(d) > 1 && tensor.stride(d) != 0) return std::nullopt;
    element = element.select(d, 0);
  }
  return element;
}

bool keeps_values() { return kept_count.load(std::memory_order_relaxed) > 0; }

bool keeps_values_of(const at::Tensor& tensor) {
  if (!keeps_values()) return false;
  std::lock_guard guard(kept_mutex);
  return kept_values.contains(address_of(tensor));
}

std::optional<Runs> kept_values_of(const at::Tensor& tensor) {
  if (!plain(tensor) || !keeps_values()) return std::nullopt;
  std::lock_guard guard(kept_mutex);
  const auto found = kept_values.find(address_of(tensor));
  if (found == kept_values.end() || found->second.dtype != tensor.scalar_type()) return std::nullopt;
  return found->second.runs.part(tensor.storage_offset(), tensor.storage_offset() + tensor.numel());
}

std::optional<Runs> looked_through(const at::Tensor& tensor) {
  if (tensor.is_cuda() ? !resident(tensor) || unknown(tensor) : !tensor.is_cpu()) return std::nullopt;
  if (tensor.nbytes() > kLookedThrough) return std::nullopt;
  const auto host = on_host(tensor).to(at::kLong).contiguous();
  return Runs::of(host.const_data_ptr<int64_t>(), host.numel(), kMostRuns);
}

void keep(const at::Tensor& tensor, const Runs& values) {
  std::lock_guard guard(kept_mutex);
  const auto fresh = Kept{tensor.scalar_type(), resident(tensor), {}};
  auto& kept = kept_values.try_emplace(address_of(tensor), fresh).first->second;
  if (kept.dtype != fresh.dtype) kept = fresh;
  kept.runs.put(tensor.storage_offset(), values);
  if (kept.runs.count() > kMostRuns) kept_values.erase(address_of(tensor));
  kept_count = kept_values.size();
}

// Writes to the host's memory, or to that of a resident tensor.
void write_values(const at::Tensor& tensor, const Runs& values) {
  const auto host = at::empty({tensor.numel()}, at::kLong);
  values.write(host.mutable_data_ptr<int64_t>());
  on_host(tensor).copy_(host.view(tensor.sizes()));
}

template <typename Unsigned>
void write_as(uintptr_t address, const Runs& values) {
  auto* to = reinterpret_cast<Unsigned*>(address);
  values.for_each([&](int64_t position, int64_t value) { to[position] = static_cast<Unsigned>(value); });
}

void write_out(uintptr_t address, const Kept& kept) {
  switch (c10::elementSize(kept.dtype)) {
    case 1: return write_as<uint8_t>(address, kept.runs);
    case 2: return write_as<uint16_t>(address, kept.runs);
    case 4: return write_as<uint32_t>(address, kept.runs);
    default: return write_as<uint64_t>(address, kept.runs);
  }
}

// The elements of kept values that lie among these bytes.
std::pair<int64_t, int64_t> elements(uintptr_t storage, const Kept& kept, uintptr_t from, uintptr_t to) {
  const auto itemsize = c10::elementSize(kept.dtype);
  const auto first = from > storage ? (from - storage) / itemsize : 0;
  const auto last = to > storage ? (to - storage + itemsize - 1) / itemsize : 0;
  return {static_cast<int64_t>(first), static_cast<int64_t>(last)};
}

// Forgets the values of these bytes. Resident ones are first written to their memory, of which a part is still valid,
// unless it has been freed.
void forget(const void* address, size_t size, bool freed) {
  if (!keeps_values() || !size) return;
  const auto from = reinterpret_cast<uintptr_t>(address), to = from + size;
  std::lock_guard guard(kept_mutex);
  for (auto one = kept_values.begin(); one != kept_values.end();) {
    auto& [storage, kept] = *one;
    const auto [first, last] = elements(storage, kept, from, to);
    const bool touched = first < kept.runs.end() && last > kept.runs.begin();
    if (touched && kept.resident && !freed) {
      write_out(storage, kept);
      kept.runs = {};
    }
    if (touched) kept.runs.forget(first, last);
    one = kept.runs.empty() ? kept_values.erase(one) : std::next(one);
  }
  kept_count = kept_values.size();
}

// Operators on runs. `stack` from `first` on are their arguments.

using Result = std::optional<ResultInRuns>;
using Stack = torch::jit::Stack;

Result with(std::optional<Runs> values) {
  return values ? Result({std::move(values), std::nullopt}) : std::nullopt;
}

// A scalar's value, if it is a whole number. It may be given as a float: ones_like() fills with 1.0.
std::optional<int64_t> integer(const c10::IValue& scalar) {
  constexpr double kExact = int64_t{1} << 53;
  if (scalar.isInt()) return scalar.toInt();
  if (scalar.isBool()) return scalar.toBool();
  if (!scalar.isDouble() || !(std::abs(scalar.toDouble()) <= kExact)) return std::nullopt;
  const auto whole = static_cast<int64_t>(scalar.toDouble());
  return static_cast<double>(whole) == scalar.toDouble() ? std::optional(whole) : std::nullopt;
}

Result filled(const Stack& stack, size_t first) {
  const auto length = stack[first].toTensor().numel();
  const auto& given = stack[first + 1];
  if (!given.isTensor()) {
    const auto value = integer(given);
    return value ? with(Runs::sequence(length, *value)) : std::nullopt;
  }
  const auto value = values_of(given.toTensor());
  return value && value->end() == 1 ? with(Runs::sequence(length, value->minimum())) : std::nullopt;
}

Result zeroed(const Stack& stack, size_t first) { return with(Runs::sequence(stack[first].toTensor().numel(), 0)); }

// arange(start, end, step, out)
Result counted_up(const Stack& stack, size_t first) {
  for (size_t place = first; place < first + 3; ++place) {
    if (!stack[place].isInt()) return std::nullopt;
  }
  const auto start = stack[first].toInt(), end = stack[first + 1].toInt(), step = stack[first + 2].toInt();
  int64_t distance = 0;
  if (!step || __builtin_sub_overflow(end, start, &distance) || (distance > 0) != (step > 0)) return std::nullopt;
  return with(Runs::sequence(distance / step + (distance % step ? 1 : 0), start, step));
}

template <bool less, bool equal, bool greater>
Result compared(const Stack& stack, size_t first) {
  const auto& tensor = stack[first].toTensor();
  const auto& given = stack[first + 1];
  if (!given.isInt() && !given.isBool()) return std::nullopt;
  const auto value = given.toScalar().toLong();
  // torch would compare in another type, or refuse.
  if (!fit(Runs::sequence(1, value), tensor.scalar_type())) return std::nullopt;
  const auto values = values_of(tensor);
  return values ? with(values->compared(value, less, equal, greater)) : std::nullopt;
}

Result reduced(const Stack& stack, size_t first, int64_t (Runs::*reduce)() const) {
  const auto values = values_of(stack[first].toTensor());
  return values && !values->empty() ? with(Runs::sequence(1, (*values.*reduce)())) : std::nullopt;
}

Result minimum(const Stack& stack, size_t first) { return reduced(stack, first, &Runs::minimum); }
Result maximum(const Stack& stack, size_t first) { return reduced(stack, first, &Runs::maximum); }

Result any(const Stack& stack, size_t first) {
  const auto values = values_of(stack[first].toTensor());
  return values && !values->empty() ? with(Runs::sequence(1, values->nonzero().maximum())) : std::nullopt;
}

Result all(const Stack& stack, size_t first) {
  const auto values = values_of(stack[first].toTensor());
  return values && !values->empty() ? with(Runs::sequence(1, values->nonzero().minimum())) : std::nullopt;
}

// sum(self, dim, keepdim, dtype, out), over all dimensions and in int64
Result summed(const Stack& stack, size_t first) {
  const auto& tensor = stack[first].toTensor();
  const auto& dims = stack[first + 1];
  const bool over_all = dims.isNone() || dims.toIntVector().empty() ||
                        static_cast<int64_t>(dims.toIntVector().size()) == tensor.dim();
  if (!over_all || stack[first + 4].toTensor().scalar_type() != at::kLong) return std::nullopt;
  const auto values = values_of(tensor);
  return values ? with(Runs::sequence(1, values->sum())) : std::nullopt;
}

Result positions_of_nonzero(const Stack& stack, size_t first) {
  const auto& tensor = stack[first].toTensor();
  const auto values = values_of(tensor);
  if (!values) return std::nullopt;
  auto positions = values->nonzero().positions();
  const auto made = at::empty({positions.end(), tensor.dim()}, tensor.options().dtype(at::kLong));
  return ResultInRuns{tensor.dim() == 1 ? std::optional(std::move(positions)) : std::nullopt, made};
}

// How many ones a mask of many runs holds, if it lies in memory.
std::optional<int64_t> ones_in_memory(const at::Tensor& mask) {
  if (mask.is_cuda() && (!resident(mask) || unknown(mask))) return std::nullopt;
  return on_host(mask).sum().item<int64_t>();
}

// index(self, indices, out) by one mask. torch has made `out` in its size, which it took from the mask's nonzero().
Result selected(const Stack& stack, size_t first) {
  const auto& tensor = stack[first].toTensor();
  const auto& indices = stack[first + 1].toListRef();
  const auto& out = stack[first + 2].toTensor();
  if (indices.size() != 1 || !indices[0].isTensor() || indices[0].toTensor().scalar_type() != at::kBool) {
    return std::nullopt;
  }
  const auto& mask = indices[0].toTensor();
  if (mask.dim() > tensor.dim() || mask.sizes() != tensor.sizes().slice(0, mask.dim())) return std::nullopt;
  const auto chosen = values_of(mask);
  const auto rows = mask.numel() ? tensor.numel() / mask.numel() : 0;
  const auto number = chosen ? std::optional(chosen->sum()) : ones_in_memory(mask);
  if (!number || out.numel() != *number * rows) return std::nullopt;
  const auto values = chosen && mask.dim() == tensor.dim() ? values_of(tensor) : std::nullopt;
  return ResultInRuns{values ? std::optional(values->selected(*chosen)) : std::nullopt, out};
}

// masked_select(self, mask)
Result masked(const Stack& stack, size_t first) {
  const auto& tensor = stack[first].toTensor();
  const auto& mask = stack[first + 1].toTensor();
  if (mask.sizes() != tensor.sizes()) return std::nullopt;
  const auto chosen = values_of(mask);
  const auto number = chosen ? std::optional(chosen->sum()) : ones_in_memory(mask);
  if (!number) return std::nullopt;
  const auto values = chosen ? values_of(tensor) : std::nullopt;
  return ResultInRuns{values ? std::optional(values->selected(*chosen)) : std::nullopt,
                      at::empty({*number}, tensor.options())};
}

using Compute = Result (*)(const Stack&, size_t);

// By name and overload: those that reach the device, which for many operators is the one with an out argument.
const std::map<std::pair<std::string_view, std::string_view>, Compute> kOnRuns = {
    {{"aten::fill_", "Scalar"}, filled},
    {{"aten::fill_", "Tensor"}, filled},
    {{"aten::zero_", ""}, zeroed},
    {{"aten::arange", "start_out"}, counted_up},
    {{"aten::eq", "Scalar_out"}, compared<false, true, false>},
    {{"aten::ne", "Scalar_out"}, compared<true, false, true>},
    {{"aten::lt", "Scalar_out"}, compared<true, false, false>},
    {{"aten::le", "Scalar_out"}, compared<true, true, false>},
    {{"aten::gt", "Scalar_out"}, compared<false, false, true>},
    {{"aten::ge", "Scalar_out"}, compared<false, true, true>},
    {{"aten::sum", "IntList_out"}, summed},
    {{"aten::min", ""}, minimum},
    {{"aten::max", ""}, maximum},
    {{"aten::any", "all_out"}, any},
    {{"aten::all", "all_out"}, all},
    {{"aten::nonzero", ""}, positions_of_nonzero},
    {{"aten::index", "Tensor_out"}, selected},
    {{"aten::masked_select", ""}, masked},
};

}  // namespace

bool in_runs(const at::Tensor& tensor) {
  return tensor.is_cuda() && bounds_of(tensor.scalar_type()) && (!resident(tensor) || keeps_values_of(tensor));
}

std::optional<Runs> values_of(const at::Tensor& tensor) {
  if (!bounds_of(tensor.scalar_type())) return std::nullopt;
  if (!tensor.numel()) return Runs();
  if (const auto element = tensor.numel() > 1 ? repeated(tensor) : std::nullopt) {
    const auto value = values_of(*element);
    return value ? std::optional(Runs::sequence(tensor.numel(), value->minimum())) : std::nullopt;
  }
  if (auto kept = tensor.is_cuda() ? kept_values_of(tensor) : std::nullopt) return kept;
  return looked_through(tensor);
}

bool put_values(const at::Tensor& tensor, const Runs& values) {
  if (values.end() != tensor.numel()) return false;
  if (!tensor.numel()) return true;
  const auto dtype = tensor.scalar_type();
  const auto converted = dtype == at::kBool ? values.nonzero() : values;
  if (bounds_of(dtype) && !fit(converted, dtype)) return false;
  const bool in_memory = tensor.is_cpu() ? tensor.nbytes() <= kLookedThrough : resident(tensor);
  const bool whole = tensor.nbytes() >= tensor.storage().nbytes();
  if (tensor.is_cuda() && in_memory && whole) set_unknown(tensor, false);
  const bool later = tensor.is_cuda() && whole && tensor.nbytes() > kWrittenAtOnce && converted.count() <= kMostRuns;
  if (in_memory && !(later && plain(tensor))) {
    write_values(tensor, converted);
    return true;
  }
  if (!tensor.is_cuda() || !bounds_of(dtype) || !plain(tensor)) return false;
  keep(tensor, converted);
  return true;
}

void values_are_overwritten(const void* address, size_t size) { forget(address, size, /*freed=*/false); }

void values_are_overwritten(const at::Tensor& tensor) {
  if (!keeps_values() || !tensor.is_cuda()) return;
  const auto access = access_of(tensor, /*write=*/true);
  values_are_overwritten(reinterpret_cast<const void*>(access.address), static_cast<size_t>(access.size));
}

void values_are_freed(const void* address, size_t size) { forget(address, size, /*freed=*/true); }

void write_out_values(const void* storage) {
  if (!keeps_values()) return;
  std::lock_guard guard(kept_mutex);
  const auto found = kept_values.find(reinterpret_cast<uintptr_t>(storage));
  if (found == kept_values.end() || !found->second.resident) return;
  write_out(found->first, found->second);
  kept_values.erase(found);
  kept_count = kept_values.size();
}

void make_resident(const at::Tensor& tensor) {
  if (!keeps_values()) return;
  std::lock_guard guard(kept_mutex);
  const auto found = kept_values.find(address_of(tensor));
  if (found == kept_values.end()) return;
  const auto& kept = found->second;
  if (!kept.runs.part(0, static_cast<int64_t>(tensor.storage().nbytes() / c10::elementSize(kept.dtype)))) return;
  write_out(found->first, kept);
  kept_values.erase(found);
  kept_count = kept_values.size();
  set_mark(tensor, Mark::Real, true);
}

std::optional<ResultInRuns> result_in_runs(const c10::OperatorHandle& op, const Stack& stack, size_t first) {
  const auto& name = op.operator_name();
  const auto found = kOnRuns.find({name.name, name.overload_name});
  return found == kOnRuns.end() ? std::nullopt : found->second(stack, first);
}

}  // namespace refshard
