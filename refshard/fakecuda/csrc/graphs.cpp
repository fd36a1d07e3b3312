#include "graphs.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>

#include "large_integers.h"
#include "memory.h"

namespace refshard {

namespace {

// The captures that are under way; behind the device's mutex.
struct Captures {
  std::vector<Capture*> all;
  std::atomic<size_t> count = 0;

  void add(Capture* capture) {
    all.push_back(capture);
    count = all.size();
  }
  void remove(Capture* capture) {
    std::erase(all, capture);
    count = all.size();
  }
  Capture* of_stream(StreamId stream) const {
    return find([&](const Capture& one) { return one.clocks.contains(stream); });
  }
  Capture* of_event(int64_t event) const {
    return find([&](const Capture& one) { return one.events.contains(event); });
  }

 private:
  template <typename Is>
  Capture* find(Is is) const {
    const auto found = std::find_if(all.begin(), all.end(), [&](const auto* one) { return is(*one); });
    return found == all.end() ? nullptr : *found;
  }
};

auto& captures = *new Captures;

[[noreturn]] void fail(int32_t code, const std::string& name, const std::string& text) {
  throw c10::AcceleratorError(
      {__func__, __FILE__, __LINE__}, code,
      "CUDA error: " + text + "\nSearch for `" + name + "' in https://docs.nvidia.com/cuda/cuda-runtime-api/"
      "group__CUDART__TYPES.html for more information.\n");
}

}  // namespace

PoolId new_pool(bool of_user) {
  static std::atomic<uint64_t> of_users = 1, of_graphs = 1;
  return of_user ? PoolId{0, of_users++} : PoolId{of_graphs++, 0};
}

void Graph::begin(PoolId pool, const std::string& error_mode) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      device().dry(),
      "the fake CUDA device does not support CUDA graphs where the CPU computes: a capture computes nothing");
  TORCH_CHECK(!captured_, "This CUDAGraph instance already owns a captured graph. To capture a new graph, create a new "
              "instance.");
  TORCH_CHECK(error_mode == "global" || error_mode == "thread_local" || error_mode == "relaxed",
              "Unknown capture error mode. Expected `global`, `thread_local`, or `relaxed`, got ", error_mode);
  std::lock_guard lock(device().mutex);
  const auto origin = current_stream();
  TORCH_CHECK(origin != 0, "CUDA graphs must be captured on a non-default stream. (However, after capture, it's ok to "
              "replay them on the default stream.)");
  if (capturing(origin)) fail(401, "cudaErrorIllegalState", "the operation cannot be performed in the present state");
  device_ = current_device();
  pool_ = pool == kOwnPool ? new_pool(/*of_user=*/false) : pool;
  auto made = std::make_unique<Capture>(*this, origin);
  const auto* of = made.get();
  device().memory(device_).begin_allocate_to_pool(pool_, [of](StreamId stream) { return of->clocks.contains(stream); });
  capture_ = std::move(made);
  captures.add(capture_.get());
}

void Capture::keep(Event event, const std::vector<Access>& touched) {
  if (event.kind != Kind::Record && event.kind != Kind::Wait) ++clocks.at(event.stream)[event.stream];
  accesses.insert(accesses.end(), touched.begin(), touched.end());
  event.access_end = static_cast<int64_t>(accesses.size());
  event.flags |= kOfGraph;
  nodes.push_back(event);
}

bool Capture::joined() const {
  const auto& reached = clocks.at(origin);
  return std::all_of(clocks.begin(), clocks.end(), [&](const auto& entry) {
    const auto own = entry.second.find(entry.first);
    if (own == entry.second.end()) return true;
    const auto seen = reached.find(entry.first);
    return seen != reached.end() && seen->second >= own->second;
  });
}

void Graph::end() {
  std::lock_guard lock(device().mutex);
  TORCH_CHECK(capture_ && !captured_, "capture_end() called before capture_begin().");
  TORCH_CHECK(current_stream(device_) == capture_->origin, "Capture must end on the same stream it began on.");
  stop_capturing();
  const bool invalid = capture_->invalid, joined = capture_->joined();
  if (invalid || !joined) reset();
  if (invalid) {
    fail(901, "cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture");
  }
  if (!joined) fail(904, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work");
  captured_ = true;
  if (capture_->nodes.empty()) {
    TORCH_WARN("The CUDA Graph is empty. This usually means that the graph was attempted to be captured on wrong "
               "device or stream.");
  }
  for (const auto& node : capture_->nodes) {
    if (node.stream != capture_->origin && !branches_.contains(node.stream)) {
      branches_[node.stream] = device().streams.another();
    }
  }
  for (const auto& access : capture_->accesses) {
    if (access.write) written_.emplace(access.address, access.size);
  }
}

void Graph::stop_capturing() {
  captures.remove(capture_.get());
  device().memory(device_).end_allocate_to_pool(pool_);
}

void Graph::instantiate() const {
  TORCH_CHECK(captured_, "capture_end() must have been called before calling instantiate");
  TORCH_CHECK(keep_, "instantiate() is intended to be called by the user only when keep_graph=true");
}

void Graph::replay() const {
  TORCH_CHECK(captured_, "Called CUDAGraph::replay without a preceding successful capture.");
  DeviceScope scope(device_);
  for (const auto& state : capture_->random_state) state.fill_(0);
  const auto current = current_stream();
  recorder().add({.kind = Kind::Launch, .name = recorder().names.code("cudaGraphLaunch"), .stream = current,
                  .flags = kHostOnly});
  std::unordered_map<int64_t, int64_t> events;
  int64_t first = 0;
  for (auto node : capture_->nodes) {
    const auto touched = capture_->accesses.begin();
    const std::vector<Access> accesses(touched + first, touched + node.access_end);
    first = node.access_end;
    node.stream = node.stream == capture_->origin ? current : branches_.at(node.stream);
    {
      std::lock_guard lock(device().mutex);
      auto& streams = device().streams;
      if (node.kind == Kind::Record) {
        node.subject = events[node.subject] = streams.record(node.stream);
        capture_record(node.stream, node.subject);
      } else if (node.kind == Kind::Wait) {
        node.subject = events.at(node.subject);
        capture_wait(node.stream, node.subject);
        streams.wait(node.stream, node.subject);
      } else {
        streams.launched(node.stream);
      }
    }
    recorder().add(node, accesses);
  }
  forget_values();
}

// What the capture computed of small tensors is not what a replay makes of them.
void Graph::forget_values() const {
  for (const auto& [address, size] : written_) {
    const auto* start = reinterpret_cast<const void*>(address);
    values_are_overwritten(start, static_cast<size_t>(size));
    forget_value(device_, start);
  }
}

void Graph::reset() {
  if (!capture_) return;
  std::lock_guard lock(device().mutex);
  if (std::find(captures.all.begin(), captures.all.end(), capture_.get()) != captures.all.end()) stop_capturing();
  captured_ = false;
  capture_.reset();
  branches_.clear();
  written_.clear();
  device().memory(device_).release_pool(pool_);
}

PoolId Graph::pool() const {
  TORCH_CHECK(captured_, "Called CUDAGraph::pool() without a preceding successful capture.");
  return pool_;
}

Graph& Graph::current() {
  std::lock_guard lock(device().mutex);
  auto* found = captures.of_stream(current_stream());
  TORCH_CHECK(found, "The current stream is not currently capturing.");
  return found->graph;
}

bool capturing() { return captures.count; }

bool capturing(StreamId stream) {
  if (!captures.count) return false;
  std::lock_guard lock(device().mutex);
  return captures.of_stream(stream) != nullptr;
}

bool capture(const Event& event, const std::vector<Access>& accesses) {
  if (!captures.count || event.stream == kNoStream || event.flags & kHostOnly) return false;
  const bool kept = event.kind == Kind::Launch || event.kind == Kind::Collective || event.kind == Kind::Record ||
                    event.kind == Kind::Wait;
  if (!kept) return false;
  std::lock_guard lock(device().mutex);
  auto* found = captures.of_stream(event.stream);
  if (found) found->keep(event, accesses);
  return found;
}

void capture_record(StreamId stream, int64_t event) {
  if (!captures.count) return;
  std::lock_guard lock(device().mutex);
  for (auto* one : captures.all) one->events.erase(event);
  if (auto* found = captures.of_stream(stream)) found->events[event] = found->clocks.at(stream);
}

void capture_wait(StreamId stream, int64_t event) {
  if (!captures.count) return;
  std::lock_guard lock(device().mutex);
  auto* waiting = captures.of_stream(stream);
  auto* recording = captures.of_event(event);
  if (waiting && !recording && device().streams.recorded(event)) {
    waiting->invalid = true;
    fail(905, "cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream");
  }
  if (waiting && recording && waiting != recording) {
    waiting->invalid = recording->invalid = true;
    fail(902, "cudaErrorStreamCaptureMerge", "operation would result in a merge of separate capture sequences");
  }
  if (recording) join(recording->clocks[stream], recording->events.at(event));
}

void refuse_wait_in_capture(StreamId stream, int64_t event) {
  if (!captures.count) return;
  std::lock_guard lock(device().mutex);
  if (event) {
    if (auto* found = captures.of_event(event)) {
      found->invalid = true;
      fail(907, "cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream");
    }
    return;
  }
  // Whoever waits for the device waits for each of its streams.
  for (auto* one : captures.all) {
    if (stream != kNoStream && captures.of_stream(stream) != one) continue;
    one->invalid = true;
    fail(900, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing");
  }
}

void capture_workspace(StreamId stream, const Block& block) {
  if (!captures.count) return;
  std::lock_guard lock(device().mutex);
  if (auto* found = captures.of_stream(stream)) {
    found->accesses.push_back({static_cast<int64_t>(block.address), static_cast<int64_t>(block.size), /*write=*/true});
  }
}

void capture_drawing() {
  if (!captures.count) return;
  std::lock_guard lock(device().mutex);
  auto* found = captures.of_stream(current_stream());
  if (!found || !found->random_state.empty()) return;
  const auto options = at::TensorOptions().dtype(at::kLong).device(c10::DeviceType::CUDA);
  found->random_state = {at::empty({1}, options), at::empty({1}, options)};
}

}  // namespace refshard
