// What the rules of workspaces.h are written in.
#pragma once

#include <algorithm>

#include "workspaces.h"

namespace refshard::workspace_rules {

// Collects allocations in the order in which a kernel makes them. None is made for 0 bytes.
class Taken {
 public:
  // Lives until the operator returns.
  void hold(int64_t bytes, Moment moment = Moment::AfterResults) { add(bytes, moment, kUntilReturn); }
  // Freed before anything else is taken.
  void scratch(int64_t bytes, Moment moment = Moment::AfterResults) { add(bytes, moment, 0); }
  // Freed once `further` others have been taken.
  void hold_for(int further, int64_t bytes, Moment moment = Moment::AfterResults) { add(bytes, moment, further); }

  const std::vector<Workspace>& all() const { return all_; }

 private:
  void add(int64_t bytes, Moment moment, int lives_for) {
    if (bytes > 0) all_.push_back({static_cast<size_t>(bytes), moment, lives_for});
  }
  std::vector<Workspace> all_;
};

using Rule = void (*)(const OperatorCall& call, const Capability& capability, Taken& taken);

inline int64_t rounded_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }
inline int64_t ceil_div(int64_t value, int64_t by) { return (value + by - 1) / by; }

inline int64_t item_size(at::ScalarType type) { return static_cast<int64_t>(c10::elementSize(type)); }
// Of what torch accumulates a sum of this dtype in.
inline int64_t accumulator_size(at::ScalarType type) {
  return c10::isIntegralType(type, true) ? 8 : std::max<int64_t>(4, item_size(type));
}
int64_t numel(const TensorArgument& tensor);
int64_t bytes(const TensorArgument& tensor);
bool contiguous(const TensorArgument& tensor);
// Non-overlapping and dense: contiguous but for the order of its dimensions.
bool dense(const TensorArgument& tensor);
TensorArgument transposed(const TensorArgument& tensor, size_t one, size_t other);
// What .contiguous() takes.
inline int64_t contiguous_copy(const TensorArgument& tensor) { return contiguous(tensor) ? 0 : bytes(tensor); }

// attention_workspaces.cpp. The scaled_dot_product operators have heads before the sequence, the others after it.
void flash_forward(const OperatorCall& call, const Capability& capability, Taken& taken);
void flash_backward(const OperatorCall& call, const Capability& capability, Taken& taken);
void efficient_forward(const OperatorCall& call, const Capability& capability, Taken& taken);
void efficient_backward(const OperatorCall& call, const Capability& capability, Taken& taken);
void cudnn_backward(const OperatorCall& call, const Capability& capability, Taken& taken);

// reduction_workspaces.cpp
void reduction(const OperatorCall& call, const Capability& capability, Taken& taken);
void foreach_reduction(const OperatorCall& call, const Capability& capability, Taken& taken);
void layer_norm(const OperatorCall& call, const Capability& capability, Taken& taken);
void layer_norm_backward(const OperatorCall& call, const Capability& capability, Taken& taken);
void rms_norm_backward(const OperatorCall& call, const Capability& capability, Taken& taken);

// kernel_workspaces.cpp
void matrix_product(const OperatorCall& call, const Capability& capability, Taken& taken);
void grouped_product(const OperatorCall& call, const Capability& capability, Taken& taken);
void embedding_backward(const OperatorCall& call, const Capability& capability, Taken& taken);
void sort(const OperatorCall& call, const Capability& capability, Taken& taken);
void index_put(const OperatorCall& call, const Capability& capability, Taken& taken);
void softmax(const OperatorCall& call, const Capability& capability, Taken& taken);
void softmax_backward(const OperatorCall& call, const Capability& capability, Taken& taken);
void copy(const OperatorCall& call, const Capability& capability, Taken& taken);

}  // namespace refshard::workspace_rules
