// The kernel of every operator on the device type CUDA: run in its place the CPU's kernel or the meta one, and record it.
#include "operators.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <atomic>
#include <unordered_set>
#include <utility>

#include "generator.h"
#include "graphs.h"
#include "host_work.h"
#include "known_shapes.h"
#include "known_values.h"
#include "large_integers.h"
#include "launch.h"
#include "memory.h"
#include "routing.h"
#include "translation.h"
#include "workspaces.h"

extern "C" {
// OpenMP's, which torch's CPU build brings; nothing where it is built without.
__attribute__((weak)) int omp_get_max_threads();
__attribute__((weak)) void omp_set_num_threads(int count);
}

namespace refshard {
namespace {

// A dry run computes little at a time: to wait for other threads takes longer than they save, above all on a busy
// machine.
class OneThread {
 public:
  OneThread() : before_(omp_get_max_threads ? omp_get_max_threads() : 1) { set(1); }
  ~OneThread() { set(before_); }
  OneThread(const OneThread&) = delete;

 private:
  void set(int count) const {
    if (before_ > 1) omp_set_num_threads(count);
  }
  int before_;
};

// Operators whose CUDA kernels let the host wait, since the size of their result depends on values.
const std::unordered_set<std::string_view> kSynchronising = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::repeat_interleave",
};
// Above this, an operator on known values is looked at on meta before it is computed: its result may be huge.
constexpr size_t kComputeUnseen = 16384;
// From so many bytes of arguments on, results of operators on what follows from a choice are remembered.
constexpr size_t kRemembered = size_t{256} << 10;
// Operators that no meta kernel can size. Their results are at most a few times as large as their arguments.
const std::unordered_set<std::string_view> kSizedByValues = {"aten::nonzero", "aten::index"};
// An operator that makes a result of any size from no arguments.
constexpr std::string_view kArange = "aten::arange";

struct Known {
  bool all_resident = true;
  bool integers = false;
  bool in_runs = false;
  bool unknown = false;
  bool assumed = false;
  size_t bytes = 0;
};

Known known_arguments(const torch::jit::Stack& stack, size_t first) {
  Known found;
  for (size_t place = first; place < stack.size(); ++place) {
    for_each_tensor(stack[place], [&](const at::Tensor& tensor) {
      if (!tensor.is_cuda()) return;
      found.unknown = found.unknown || unknown(tensor);
      found.assumed = found.assumed || marked(tensor, Mark::Assumed);
      note_use(tensor);
      found.bytes += tensor.nbytes();
      found.all_resident = found.all_resident && resident(tensor);
      if (!c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/true)) return;
      found.integers = true;
      found.in_runs = found.in_runs || in_runs(tensor);
    });
  }
  return found;
}

// histc(self, bins, min, max, out): the CPU's kernel takes floats alone, a GPU's integers as well.
void count_in_bins(torch::jit::Stack& stack, size_t first) {
  const auto self = stack[first].toTensor();
  auto counts = at::histc(self.is_floating_point() ? self : self.to(at::kDouble), stack[first + 1].toInt(),
                          stack[first + 2].toScalar(), stack[first + 3].toScalar()).to(self.scalar_type());
  if (stack.size() - first > 4) {
    auto out = stack[first + 4].toTensor();
    counts = out.resize_(counts.sizes()).copy_(counts);
  }
  stack.resize(first);
  stack.emplace_back(counts);
}

void run(c10::DeviceType target, const c10::OperatorHandle& op, torch::jit::Stack& stack, size_t first,
         bool keeps = false) {
  Translation translation(target, keeps);
  translation.arguments(op, stack, first);
  const auto key = target == c10::DeviceType::CPU ? c10::DispatchKey::CPU : c10::DispatchKey::Meta;
  if (target == c10::DeviceType::CPU && op.schema().name() == "aten::histc") {
    count_in_bins(stack, first);
  } else {
    op.redispatchBoxed(c10::DispatchKeySet(key), &stack);
  }
  translation.results(stack, first);
}

// The device that an operator's arguments lie on or ask for; -1 if they do neither.
c10::DeviceIndex device_of_arguments(const torch::jit::Stack& stack, size_t first) {
  c10::DeviceIndex found = -1;
  for (size_t place = first; place < stack.size() && found < 0; ++place) {
    if (stack[place].isDevice() && stack[place].toDevice().is_cuda()) found = stack[place].toDevice().index();
    for_each_tensor(stack[place], [&](const at::Tensor& tensor) {
      if (tensor.is_cuda() && found < 0) found = tensor.device().index();
    });
  }
  return found;
}

// Makes what the meta kernel says.
void run_meta(const c10::OperatorHandle& op, torch::jit::Stack& stack, size_t first) {
  const auto key = call_key(op, stack, first);
  const auto index = device_of_arguments(stack, first);
  const c10::Device device(c10::DeviceType::CUDA, index < 0 ? static_cast<c10::DeviceIndex>(current_device()) : index);
  if (key && make_as_before(op, *key, device, stack, first)) return;
  torch::jit::Stack arguments;
  if (key) arguments.assign(stack.begin() + static_cast<std::ptrdiff_t>(first), stack.end());
  run(c10::DeviceType::Meta, op, stack, first);
  if (key) keep_made(op, *key, arguments, stack, first);
}

bool has_meta_kernel(const c10::OperatorHandle& op) {
  const auto has = [&](c10::DispatchKey key) { return op.hasKernelForDispatchKey(key); };
  return has(c10::DispatchKey::Meta) || has(c10::DispatchKey::CompositeExplicitAutograd) ||
         has(c10::DispatchKey::CompositeImplicitAutograd);
}

// Whether an operator on these arguments gives results that are small enough to be computed.
bool gives_little(const c10::OperatorHandle& op, const Known& known, const torch::jit::Stack& stack, size_t first) {
  const auto& name = op.schema().name();
  if (known.bytes <= kComputeUnseen && name != kArange) return true;
  if (!known.unknown && (kSizedByValues.contains(name) || (known.assumed && !has_meta_kernel(op)))) return true;
  torch::jit::Stack trial(stack.begin() + static_cast<std::ptrdiff_t>(first), stack.end());
  Translation(c10::DeviceType::Meta).arguments(op, trial, 0);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &trial);
  size_t bytes = 0;
  bool worth = known.assumed && !known.unknown;
  for (const auto& value : trial) {
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      bytes += tensor.nbytes();
      worth = worth && worth_computing(tensor);
    });
  }
  return worth || bytes <= kept_values_limit();
}

// What a comparison gives if the values that nobody has are those that they read as; nothing for other operators.
std::optional<bool> compared(std::string_view name, const torch::jit::Stack& stack, size_t first) {
  const auto value = [&](size_t place) {
    const auto& given = stack[first + place];
    if (given.isTensor()) return c10::isFloatingType(given.toTensor().scalar_type()) ? kPlaceholder : 0.0;
    return given.isScalar() ? given.toScalar().toDouble() : 0.0;
  };
  if (name == "aten::eq") return value(0) == value(1);
  if (name == "aten::ne") return value(0) != value(1);
  if (name == "aten::lt") return value(0) < value(1);
  if (name == "aten::le") return value(0) <= value(1);
  if (name == "aten::gt") return value(0) > value(1);
  if (name == "aten::ge") return value(0) >= value(1);
  return std::nullopt;
}

// A value where there is none: kPlaceholder for a float, 0 for a count.
void put_placeholder(const at::Tensor& tensor, std::string_view name, std::optional<bool> truth) {
  if (!resident(tensor) || !tensor.numel()) return;
  auto host = on_host(tensor);
  if (!truth && c10::isFloatingType(host.scalar_type())) {
    host.fill_(kPlaceholder);
  } else {
    host.fill_(truth.value_or(name == "aten::all") ? 1 : 0);
  }
  set_unknown(tensor, true);
}

// What follows from placeholders and is not finite, such as the inverse of their variance, would stop a script's check.
void keep_finite(const at::Tensor& tensor) {
  const auto type = tensor.scalar_type();
  if (type != at::kFloat && type != at::kDouble && type != at::kBFloat16 && type != at::kHalf) return;
  on_host(tensor).nan_to_num_(kPlaceholder, kPlaceholder, kPlaceholder);
}

[[noreturn]] void refuse(const c10::OperatorHandle& op) {
  const auto path = c10::toString(op.operator_name());
  TORCH_CHECK_NOT_IMPLEMENTED(
      !device().dry(), path, " has no meta kernel, so the fake CUDA device cannot run it. Give it one that returns ",
      "empty tensors of the right shapes: @torch.library.register_fake(\"", path, "\")");
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, path, " has no CPU kernel, so the fake CUDA device cannot run it on the host. Give it one that computes ",
      "the values: @torch.library.register_kernel(\"", path, "\", \"cpu\")");
}

// An operator in place, such as an optimizer's, or one that is given its results in their sizes: it makes no tensor that
// a meta kernel would have to shape.
bool only_writes(const c10::FunctionSchema& schema, const torch::jit::Stack& stack, size_t first) {
  const auto& arguments = schema.arguments();
  const auto& returns = schema.returns();
  bool sized = true;
  for (size_t place = 0; place < arguments.size(); ++place) {
    if (!arguments[place].is_out()) continue;
    for_each_tensor(stack[first + place], [&](const at::Tensor& tensor) { sized = sized && tensor.numel() > 0; });
  }
  return sized &&
         std::any_of(arguments.begin(), arguments.end(),
                     [](const auto& one) { return one.alias_info() && one.alias_info()->isWrite(); }) &&
         std::all_of(returns.begin(), returns.end(), [](const auto& one) { return one.alias_info(); });
}

// Runs an operator whose result gets its values, or at least its size, from runs. False if it needs another way.
bool run_on_runs(const c10::OperatorHandle& op, torch::jit::Stack& stack, size_t first) {
  const auto result = result_in_runs(op, stack, first);
  if (!result) return false;
  const auto& name = op.schema().name();
  const auto truth = compared(name, stack, first);
  if (result->tensor) {
    stack.resize(first);
    stack.emplace_back(*result->tensor);
  } else {
    run(c10::DeviceType::Meta, op, stack, first);
  }
  const auto made = stack[first].toTensor();
  if (!result->values || !put_values(made, *result->values)) put_placeholder(made, name, truth);
  return true;
}

// Gives memory to large tensors of an operator on what follows from a choice: integers that are known as runs, and its
// outputs if all else then has values.
void make_arguments_resident(const c10::FunctionSchema& schema, const torch::jit::Stack& stack, size_t first) {
  std::vector<at::Tensor> outputs;
  bool all_resident = true;
  for (size_t place = 0; place < schema.arguments().size(); ++place) {
    const bool out = schema.arguments()[place].is_out();
    for_each_tensor(stack[first + place], [&](const at::Tensor& tensor) {
      if (!tensor.is_cuda() || resident(tensor)) return;
      if (out) return outputs.push_back(tensor);
      if (worth_computing(tensor)) make_resident(tensor);
      all_resident = all_resident && resident(tensor);
    });
  }
  if (!all_resident) return;
  for (const auto& tensor : outputs) {
    if (worth_computing(tensor)) set_mark(tensor, Mark::Real, true);
  }
}

void run_dry(const c10::OperatorHandle& op, torch::jit::Stack& stack, size_t first, const Known& known) {
  const auto& name = op.schema().name();
  const auto choice = choosing(op, stack, first);
  if (known.integers && (known.in_runs || !known.all_resident) && run_on_runs(op, stack, first)) return;
  const bool chooses_unknown = choice && known.unknown;
  if (known.all_resident && !chooses_unknown && gives_little(op, known, stack, first)) {
    if (op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) {
      OneThread alone;
      const bool keeps = known.assumed && !known.unknown;
      const auto key = keeps && known.bytes >= kRemembered ? values_key(op, stack, first) : std::nullopt;
      if (!key || !compute_as_before(op, *key, stack, first)) {
        run(c10::DeviceType::CPU, op, stack, first, keeps);
        if (key) keep_computed(*key, stack, first);
      }
      if (!known.unknown && !known.assumed) return;
      for (size_t place = first; place < stack.size(); ++place) {
        for_each_tensor(stack[place], [&](const at::Tensor& tensor) {
          if (!tensor.is_cuda() || !resident(tensor)) return;
          if (known.assumed) set_mark(tensor, Mark::Assumed, true);
          if (!known.unknown) return;
          set_unknown(tensor, true);
          keep_finite(tensor);
        });
      }
      return;
    }
  }
  if (name == kArange && run_on_runs(op, stack, first)) return;
  if (!has_meta_kernel(op) && only_writes(op.schema(), stack, first)) {
    give_back_arguments(op.schema(), stack, first);
    return;
  }
  const auto truth = compared(name, stack, first);
  run_meta(op, stack, first);
  const auto& arguments = op.schema().arguments();
  const bool writes_out = std::any_of(arguments.begin(), arguments.end(), [](const auto& one) { return one.is_out(); });
  for (size_t place = 0; place < op.schema().returns().size(); ++place) {
    if (op.schema().returns()[place].alias_info() && !writes_out && !choice) continue;
    for_each_tensor(stack[first + place], [&](const at::Tensor& tensor) {
      if (!tensor.is_cuda()) return;
      put_placeholder(tensor, name, truth);
      // Values come before the places that they were chosen from.
      if (choice && place + 1 == op.schema().returns().size()) assume(name, *choice, tensor);
    });
  }
}

// The caching allocator serves kernels' workspaces too.
c10::DataPtr allocate_workspace(size_t size) { return device_allocator().allocate(size); }

auto& kept_workspaces = *new std::vector<c10::DataPtr>;
std::mutex workspaces_mutex;
std::atomic<int64_t> workspaces_dropped = 0;  // how often

// cuBLAS keeps one for each host thread, which has a handle of its own, and stream.
void keep_workspace(std::string_view name, StreamId stream) {
  if (!device().dry()) return;
  const auto size = persistent_workspace(name, device().options.capability);
  if (!size) return;
  thread_local std::unordered_set<int64_t> mine;
  thread_local int64_t since = 0;
  if (std::exchange(since, workspaces_dropped.load()) != workspaces_dropped) mine.clear();
  if (!mine.insert(stream * 64 + current_device()).second) return;
  auto data = allocate_workspace(size);
  std::lock_guard guard(workspaces_mutex);
  kept_workspaces.push_back(std::move(data));
}

std::vector<Workspace> workspaces_of(const c10::OperatorHandle& op, const Launch& launch,
                                     const torch::jit::Stack& stack, size_t first) {
  if (!device().dry() || !takes_workspaces(op.schema().name())) return {};
  return workspaces({op.schema().name(), launch.inputs(), scalars_of(op.schema(), stack, first)},
                    device().options.capability);
}

}  // namespace

void not_computed(const at::Tensor& tensor) { put_placeholder(tensor, "", std::nullopt); }

void drop_cublas_workspaces() {
  std::vector<c10::DataPtr> dropped;
  std::lock_guard guard(workspaces_mutex);
  dropped.swap(kept_workspaces);
  ++workspaces_dropped;
}

void kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  StandIn stand_in;
  const auto& name = op.schema().name();
  const auto first = stack->size() - op.schema().arguments().size();
  DeviceScope scope(device_of_arguments(*stack, first));
  Allocating allocating(name);
  std::optional<Drawing> drawing;
  if (op.hasTag(at::Tag::nondeterministic_seeded)) {
    capture_drawing();
    drawing.emplace(*stack, first);
  }
  Launch launch(op);
  launch.arguments(*stack, first);
  auto known = known_arguments(*stack, first);
  if (known.assumed && !known.unknown) {
    make_arguments_resident(op.schema(), *stack, first);
    known = known_arguments(*stack, first);
  }
  launch.overwrites_values();
  const auto scratch = workspaces_of(op, launch, *stack, first);
  {
    Allocating for_kernel(name, Category::Workspace);
    keep_workspace(name, current_stream());
  }
  const auto take_at = [&](Moment moment) {
    Allocating for_kernel(name, Category::Workspace);
    return take(scratch, moment, allocate_workspace);
  };
  const auto before = take_at(Moment::BeforeResults);
  if (kSynchronising.contains(name)) {
    for (auto place = first; place < stack->size(); ++place) for_each_tensor((*stack)[place], note_read);
  }
  try {
    if (device().dry()) {
      run_dry(op, *stack, first, known);
    } else {
      run(c10::DeviceType::CPU, op, *stack, first);
    }
  } catch (const c10::NotImplementedError&) {
    refuse(op);
  }
  launch.results(*stack, first);
  if (launch.view_only()) return;
  const auto after = take_at(Moment::AfterResults);
  const auto stream = current_stream();
  launch.put(stream);
  if (kSynchronising.contains(name)) synchronise(name.c_str(), stream);
}

namespace {

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&kernel>());
}

// Operators that have a composite kernel beside the one for CUDA: torch would take the composite before the fallback,
// and launch many kernels where a GPU launches one. The list is written when the extension is built.
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  for (const auto* name : {
#include "operators.inc"
       }) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&kernel>());
  }
}

}  // namespace
}  // namespace refshard
