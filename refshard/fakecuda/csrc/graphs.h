// CUDA graphs. While a stream is captured, what it is asked for goes into a graph instead; a replay puts that into the
// recording. torch 2.13's aten/src/ATen/cuda/CUDAGraph.cpp says which calls are made of the allocator, CUDA's
// documentation of stream capture which streams take part and what is not permitted.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "device.h"

namespace refshard {

class Graph;

// What streams that are captured together were asked for.
struct Capture {
  Capture(Graph& graph, StreamId origin) : graph(graph), origin(origin), clocks{{origin, {}}} {}
  void keep(Event event, const std::vector<Access>& accesses);
  // Whether the stream on which the capture began waits for all that the others were asked for.
  bool joined() const;

  Graph& graph;
  StreamId origin;
  bool invalid = false;
  // By captured stream and by event recorded in the capture: how many nodes of each stream come before.
  std::unordered_map<StreamId, Clock> clocks;
  std::unordered_map<int64_t, Clock> events;
  std::vector<Event> nodes;
  std::vector<Access> accesses;
  std::vector<at::Tensor> random_state;  // the generator's seed and offset, which each replay sets
};

class Graph {
 public:
  explicit Graph(bool keep) : keep_(keep) {}
  ~Graph() { reset(); }
  Graph(const Graph&) = delete;

  // Captures the current stream, and those that come to wait for it. Memory comes from the pool, a new one for {0, 0}.
  void begin(PoolId pool, const std::string& error_mode);
  void end();
  void instantiate() const;
  // On the current stream. The graph's other branches run on streams of its own.
  void replay() const;
  void reset();
  PoolId pool() const;
  // The graph that the current stream is captured into.
  static Graph& current();

 private:
  void stop_capturing();
  void forget_values() const;

  bool keep_;
  bool captured_ = false;
  std::unique_ptr<Capture> capture_;  // under way, or what was captured; its pool is retained as long
  c10::DeviceIndex device_ = 0;
  PoolId pool_ = kOwnPool;
  std::unordered_map<StreamId, StreamId> branches_;  // streams of a replay by those of the capture
  std::set<std::pair<int64_t, int64_t>> written_;    // addresses and sizes
};

// A pool's id that no other has.
PoolId new_pool(bool of_user);

// Whether any stream is captured, or this one. This and what follows is quick where none is.
bool capturing();
bool capturing(StreamId stream);
// Takes an event into the graph that its stream is captured into. Returns whether it is.
bool capture(const Event& event, const std::vector<Access>& accesses);
void capture_record(StreamId stream, int64_t event);
// A stream that waits for an event of a capture takes part in it.
void capture_wait(StreamId stream, int64_t event);
// Throws CUDA's error, and makes the capture invalid, where the host would wait for a stream or an event of a capture.
void refuse_wait_in_capture(StreamId stream, int64_t event);
// The next node on this stream also writes this memory.
void capture_workspace(StreamId stream, const Block& block);
// The current stream is asked for random numbers.
void capture_drawing();

}  // namespace refshard
