#include "recorder.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/node.h>

#include <algorithm>
#include <atomic>

#include "graphs.h"

namespace refshard {
namespace {

constexpr std::string_view kRoot = "(root)";  // the outermost module, as refshard/dryrun/observe.py calls it

std::atomic<int32_t> next_thread{0};
thread_local int32_t this_thread = next_thread++;
thread_local std::vector<int32_t> modules_entered;
thread_local bool in_optimizer = false;
thread_local bool in_compiled = false;
thread_local std::string compiled_path;

}  // namespace

Recorder& recorder() {
  static auto* instance = new Recorder;  // never destroyed: tensors are freed as late as at exit
  return *instance;
}

int32_t Table::code(std::string_view text) {
  std::lock_guard guard(mutex_);
  auto [found, fresh] = codes_.try_emplace(std::string(text), static_cast<int32_t>(texts_.size()));
  if (fresh) texts_.emplace_back(text);
  return found->second;
}

std::string Table::text(int32_t code) const {
  std::lock_guard guard(mutex_);
  return texts_[code];
}

std::vector<std::string> Table::texts() const {
  std::lock_guard guard(mutex_);
  return texts_;
}

void Recorder::add(Event event, const std::vector<Access>& accesses) {
  if (!on) return;
  if (!(event.flags & kOfGraph)) {  // or it has its place from the capture
    const auto where = place();
    event.module = where.module;
    event.phase = where.phase;
  }
  event.thread = this_thread;
  if (in_compiled && event.kind == Kind::Launch && !(event.flags & kOfGraph)) event.flags |= kCompiled;
  if (capture(event, accesses)) {
    if (event.kind == Kind::Record || event.kind == Kind::Wait) return;
    event.kind = Kind::Launch;
    event.flags |= kHostOnly | kCaptured;
    return add(event);
  }
  std::lock_guard guard(mutex_);
  // A segment's is that of the allocation which follows, a communicator's that of its collective, and nodes of a graph
  // have none.
  const bool leads = event.kind == Kind::Segment || event.kind == Kind::Communicator;
  if (!leads && !(event.flags & kOfGraph)) event.host = take_host_work();
  accesses_.insert(accesses_.end(), accesses.begin(), accesses.end());
  event.access_end = static_cast<int64_t>(accesses_.size());
  events_.push_back(event);
}

void Recorder::allocated(int64_t block, int64_t address, int64_t size, int64_t requested, int64_t stream,
                         std::string_view by, Category category, int32_t flags, int32_t site) {
  const auto where = place();
  const auto name = names.code(by);
  Event event{.kind = Kind::Allocate, .name = name, .stream = stream, .subject = block, .size = size};
  event.category = category;
  event.flags = flags;
  event.site = site;
  event.reads = address;
  event.writes = requested;
  add(event);
  std::lock_guard guard(mutex_);
  const auto row = on ? static_cast<int64_t>(events_.size()) - 1 : -1;
  live_[block] = Live{size, stream, name, where.module, where.phase, category, row};
}

void Recorder::freed(int64_t block, int64_t address, int64_t size, int64_t stream) {
  add({.kind = Kind::Free, .stream = stream, .subject = block, .size = size, .reads = address});
  std::lock_guard guard(mutex_);
  live_.erase(block);
}

void Recorder::segment(int64_t delta) { add({.kind = Kind::Segment, .size = delta}); }

void Recorder::held(int64_t block, int64_t stream) { add({.kind = Kind::Hold, .stream = stream, .subject = block}); }

void Recorder::categorise(int64_t block, Category category) {
  std::lock_guard guard(mutex_);
  const auto found = live_.find(block);
  if (found == live_.end()) return;
  found->second.category = category;
  if (found->second.row >= 0) events_[found->second.row].category = category;
}

Category Recorder::category_of(int64_t block) const {
  std::lock_guard guard(mutex_);
  const auto found = live_.find(block);
  return found == live_.end() ? Category::Other : found->second.category;
}

void Recorder::written(int64_t block, int32_t name) {
  std::lock_guard guard(mutex_);
  const auto found = live_.find(block);
  if (found == live_.end() || found->second.name) return;
  found->second.name = name;
  if (found->second.row >= 0) events_[found->second.row].name = name;
}

void Recorder::clear() {
  std::lock_guard guard(mutex_);
  events_.clear();
  accesses_.clear();
  for (auto& [block, one] : live_) one.row = -1;
}

void Recorder::push_module(int32_t module) {
  modules_entered.push_back(module);
  std::lock_guard guard(mutex_);
  made_by_[at::RecordFunction::currentThreadId()].emplace_back(at::sequence_number::peek(), module);
}

void Recorder::pop_module() {
  if (modules_entered.empty()) return;  // a forward that raised left its modules without telling
  modules_entered.pop_back();
  const auto outer = modules_entered.empty() ? 0 : modules_entered.back();
  std::lock_guard guard(mutex_);
  made_by_[at::RecordFunction::currentThreadId()].emplace_back(at::sequence_number::peek(), outer);
}

void Recorder::optimizer(bool running) { in_optimizer = running; }

void Recorder::compiled(bool running) {
  in_compiled = running;
  compiled_path.clear();
}

void Recorder::compiled_module(std::string_view path) { compiled_path = path; }

Place Recorder::place() const {
  auto found = entered();
  if (compiled_path.empty()) return found;
  const auto base = modules.text(found.module);
  found.module = modules.code(base.empty() || base == kRoot ? compiled_path : base + "." + compiled_path);
  return found;
}

Place Recorder::entered() const {
  const auto inner = modules_entered.empty() ? 0 : modules_entered.back();
  if (in_optimizer) return {inner, Phase::Optimizer};
  const auto node = torch::autograd::get_current_node();
  if (!node) return {inner, inner ? Phase::Forward : Phase::Other};
  // Modules are entered while a node of backward runs only where activations are computed again.
  if (inner) return {inner, Phase::Recompute};
  std::lock_guard guard(mutex_);
  return {module_of_backward(node->thread_id(), node->sequence_nr()), Phase::Backward};
}

int32_t Recorder::module_of_backward(uint64_t thread, uint64_t sequence) const {
  const auto found = made_by_.find(thread);
  if (found == made_by_.end()) return 0;
  const auto& marks = found->second;
  const auto later = std::upper_bound(
      marks.begin(), marks.end(), sequence, [](uint64_t value, const auto& mark) { return value < mark.first; });
  return later == marks.begin() ? 0 : std::prev(later)->second;
}

}  // namespace refshard
