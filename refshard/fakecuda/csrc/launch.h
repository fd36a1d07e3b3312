// What of an operator goes into the recording: its tensors, the bytes that it moves, and the memory that it touches.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string>
#include <string_view>
#include <vector>

#include "recorder.h"
#include "workspaces.h"

namespace refshard {

// Bytes of memory that a tensor's elements lie in; an expanded dimension lies in one.
int64_t touched_bytes(const at::Tensor& tensor);
Access access_of(const at::Tensor& tensor, bool write);
// As in `bf16[2,8192]`.
void describe(const at::Tensor& tensor, std::string& into);
// Whether elements at one place in memory belong together, so that a pointwise kernel need not compute where each is.
bool lie_alike(at::TensorList tensors);

// Lets the copies of gathered parameters count as unsharded, and what is packed for a reduction as gradients.
void spread_categories(std::string_view name, const std::vector<Access>& accesses);

// A kernel that the dispatcher does not call, as Triton's: what it reads and writes of each tensor, in bytes.
struct Operand {
  at::Tensor tensor;
  int64_t reads, writes;
};
// `flops` may be 0: then what it takes follows from its bytes. Values that it writes count as not computed.
void launch_kernel(std::string_view name, const std::vector<Operand>& operands, int64_t flops, int64_t stream,
                   int32_t flags);

// Launches of operators so far.
int64_t launches_made();

// Memory that a kernel reads, writes or both.
struct Touched {
  int64_t address, size;
  bool reads, writes;
};
// A kernel that a library launches by itself, past torch's dispatcher. It computes nothing: what it writes is unknown.
void launch_past_torch(std::string_view name, std::string_view signature, int64_t stream,
                       const std::vector<Touched>& touched);

class Launch {
 public:
  explicit Launch(const c10::OperatorHandle& op) : schema_(op.schema()), pointwise_(op.hasTag(at::Tag::pointwise)) {}

  // Before it runs: `stack` from `first` on are its arguments.
  void arguments(const torch::jit::Stack& stack, size_t first);
  // After it ran: `stack` from `first` on are its results.
  void results(const torch::jit::Stack& stack, size_t first);
  // Whether it launched nothing: all of its results are views of what it was given.
  bool view_only() const { return view_only_; }
  const std::vector<TensorArgument>& inputs() const { return inputs_; }
  // Before it runs: what it writes does not keep its values.
  void overwrites_values() const;
  // Puts it on the stream, in the recording and in the device's books.
  void put(int64_t stream);

 private:
  const c10::FunctionSchema& schema_;
  std::string signature_;
  std::vector<TensorArgument> inputs_;
  std::vector<Access> accesses_;
  int64_t reads_ = 0, writes_ = 0;
  int32_t flags_ = 0;
  bool view_only_ = true;
  bool pointwise_;
};

}  // namespace refshard
