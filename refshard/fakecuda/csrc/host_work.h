// What the host does between two events, in counts that are the same in every run. refshard/dryrun/price.py makes
// seconds of them.
#pragma once

#include <cstdint>

namespace refshard {

struct HostWork {
  int32_t operators = 0;   // calls of torch's dispatcher, also for views and within composite operators
  int32_t dispatched = 0;  // those of them made under a Python dispatch mode, such as selective checkpointing's
  int32_t nodes = 0;       // autograd nodes that backward ran
  int32_t calls = 0;       // calls of Python functions
};

// Starts to count, in this thread and in those that run backward. The thread must hold Python's lock. A script that
// installs a Python profiler of its own ends the count of calls.
void count_host_work();
// What all threads did since the last call: while one runs backward, the others wait.
HostWork take_host_work();

// While one lives, its thread counts nothing: it runs what stands in for a kernel, and a real device would not.
class StandIn {
 public:
  StandIn();
  ~StandIn();
  StandIn(const StandIn&) = delete;
  StandIn& operator=(const StandIn&) = delete;
};

}  // namespace refshard
