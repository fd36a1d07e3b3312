// The recording: one row per event, in the order in which the host asked for it. refshard/dryrun/recording.py documents
// the columns; the enumerations below are the same as there.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "host_work.h"

namespace refshard {

enum class Kind : uint8_t {
  Launch, Collective, Record, Wait, Synchronise, Allocate, Free, Segment, Mark, Hold, Communicator
};
enum class Phase : uint8_t { Other, Forward, Backward, Recompute, Optimizer };
enum Flag : int32_t {
  kCausal = 1, kHostToDevice = 2, kDeviceToHost = 4, kHostOnly = 8, kValueUnknown = 16, kStrided = 32,
  kProducts = 64, kCompiled = 128, kCaptured = 256, kOfGraph = 512, kPrivatePool = 1024, kJoined = 2048,
};
enum class Category : uint8_t { Other, Parameters, Gradients, Optimizer, Unsharded, Activations, Workspace };

constexpr int64_t kNoStream = -1;

// Strings by code, each stored once; code 0 is the empty one.
class Table {
 public:
  Table() { code(""); }
  int32_t code(std::string_view text);
  std::string text(int32_t code) const;
  std::vector<std::string> texts() const;

 private:
  mutable std::mutex mutex_;
  std::unordered_map<std::string, int32_t> codes_;
  std::vector<std::string> texts_;
};

struct Access {
  int64_t address, size;
  bool write;
};

struct Event {
  Kind kind;
  int32_t name = 0;
  int64_t stream = kNoStream;
  int64_t subject = 0;
  int64_t size = 0;
  int64_t reads = 0, writes = 0;
  int32_t signature = 0;
  int32_t flags = 0;
  int32_t site = 0;
  int32_t module = 0;
  int32_t thread = 0;
  Phase phase = Phase::Other;
  Category category = Category::Other;
  int64_t access_end = 0;
  HostWork host;  // since the event before
};

// Where the host is: in which module, and in which part of a step.
struct Place {
  int32_t module = 0;
  Phase phase = Phase::Other;
};

class Recorder {
 public:
  // Whether events are kept. Allocations are kept track of regardless, so that what was there before is known.
  bool on = false;
  mutable Table names, signatures, modules, sites;

  // Appends an event of the calling thread, with the memory that it touches.
  void add(Event event, const std::vector<Access>& accesses = {});
  // Their rows have the address in the column of reads. `requested` bytes, as asked, are in that of writes.
  void allocated(int64_t block, int64_t address, int64_t size, int64_t requested, int64_t stream, std::string_view by,
                 Category category, int32_t flags = 0, int32_t site = 0);
  void freed(int64_t block, int64_t address, int64_t size, int64_t stream);
  void segment(int64_t delta);
  // record_stream(): once freed, the block is held back until the stream has passed what it was asked by then.
  void held(int64_t block, int64_t stream);
  // What a live block holds, also of blocks whose allocation was recorded earlier.
  void categorise(int64_t block, Category category);
  Category category_of(int64_t block) const;
  // Who writes a block first made it, where nobody is known to have: torch allocates results of some operators before
  // it calls their kernels.
  void written(int64_t block, int32_t name);
  void clear();

  // The modules that this thread is in: hooks on the model push and pop them.
  void push_module(int32_t module);
  void pop_module();
  void optimizer(bool running);
  // Whether this thread runs the wrapper of a compiled graph. It calls no modules: it tells the one that its next
  // kernels come from, by its path below the module that was entered last.
  void compiled(bool running);
  void compiled_module(std::string_view path);
  Place place() const;

  // A block that lives: what it was allocated for, and by whom.
  struct Live {
    int64_t size, stream;
    int32_t name, module;
    Phase phase;
    Category category;
    int64_t row;  // of its Allocate, -1 if that was not recorded
  };
  const std::vector<Event>& events() const { return events_; }
  const std::vector<Access>& accesses() const { return accesses_; }
  const std::unordered_map<int64_t, Live>& live() const { return live_; }

 private:
  Place entered() const;
  int32_t module_of_backward(uint64_t thread, uint64_t sequence) const;

  mutable std::mutex mutex_;
  std::vector<Event> events_;
  std::vector<Access> accesses_;
  std::unordered_map<int64_t, Live> live_;
  // By thread, from which of its autograd sequence numbers on which module made the nodes.
  std::unordered_map<uint64_t, std::vector<std::pair<uint64_t, int32_t>>> made_by_;
};

Recorder& recorder();

}  // namespace refshard
