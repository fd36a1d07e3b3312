// Memory that reductions take for themselves: partial results of thread blocks that share an output, casts of the
// input, and what normalisations and lists of tensors add to that.
#include <ATen/TensorIterator.h>
#include <ATen/ops/from_blob.h>

#include "workspace_rules.h"

namespace refshard::workspace_rules {
namespace reduce {

bool half(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

// How a kernel reduces: bytes of what it accumulates in, and how many inputs a load takes.
struct Kind {
  int64_t accumulator;
  int64_t vector = 4;
};

// ReduceSumProdKernel.cu, ReduceMomentKernel.cu, ReduceNormKernel.cu, ReduceMaxValuesKernel.cu, ReduceArgMaxKernel.cu;
// vector widths as compiled into torch 2.13.
Kind kind_of(std::string_view name, at::ScalarType type) {
  const auto has = [&](std::string_view part) { return name.find(part) != name.npos; };
  if (has("argm")) return {16};  // a value and an index
  if (has("var") || has("std")) return {type == at::kDouble ? 32 : 16, 2};  // Welford's four numbers
  if (has("amax") || has("amin")) return {item_size(type)};
  if (has("prod") && half(type)) return {2};
  const bool wide = half(type) && (has("mean") || (has("sum") && !has("nansum")));
  return {accumulator_size(type), wide ? 8 : 4};
}

int64_t power_of_two_below(int64_t value) {
  int64_t power = 1;
  while (power * 2 <= value) power *= 2;
  return power;
}

// Reduce.cuh, setReduceConfig: how the work is cut, as far as thread blocks share outputs.
class Configuration {
 public:
  Configuration(const at::TensorIterator& iterator, Kind kind, const Capability& capability)
      : accumulator_(kind.accumulator),
        outputs_(iterator.num_output_elements()),
        inputs_(iterator.numel() / std::max<int64_t>(1, outputs_)) {
    lay_out(iterator, kind);
    split(capability);
  }

  // Reduce.cuh, global_memory_size; 0 where no output is shared.
  int64_t staging_bytes() const {
    if (blocks_per_output_ == 1) return 0;
    return accumulator_ * outputs_ * blocks_per_output_ * (reduces_across_lanes_ ? 1 : width_ * output_vector_);
  }
  int64_t semaphore_bytes() const { return blocks_per_output_ == 1 ? 0 : 4 * grid(); }

 private:
  int64_t grid() const { return ceil_div(outputs_ / output_vector_, step_output_); }
  int64_t values_per_thread() const { return ceil_div(inputs_, step_input_); }

  void lay_out(const at::TensorIterator& iterator, Kind kind) {
    const auto item = static_cast<int64_t>(iterator.element_size(1));
    int64_t stride = item, lanes = 1, rows = 1;
    if (iterator.ndim() > 0) {
      const auto strides = iterator.strides(1);
      const auto reduced = iterator.num_reduce_dims();
      reduces_across_lanes_ = reduced == iterator.ndim() || strides[0] < strides[reduced];
      stride = strides[reduces_across_lanes_ ? 0 : reduced];
      lanes = reduces_across_lanes_ ? inputs_ : outputs_;
      rows = reduces_across_lanes_ ? outputs_ : inputs_;
    }
    if (stride == item && reduces_across_lanes_ && lanes >= 128 && iterator.num_reduce_dims() == 1) {
      lanes /= kind.vector;
    } else if (stride == item && !reduces_across_lanes_) {
      output_vector_ = output_vector(iterator, item);
      lanes /= output_vector_;
    }
    set_block(lanes, rows);
  }

  // get_output_vec_size, of memory that starts aligned
  static int64_t output_vector(const at::TensorIterator& iterator, int64_t item) {
    int64_t width = 4;
    const auto dividing = [&](int64_t n) {
      while (n % width) width /= 2;
    };
    const auto first = iterator.num_reduce_dims();
    dividing(iterator.shape()[first]);
    for (int d = 0; d < iterator.ndim(); ++d) {
      if (d != first) dividing(iterator.strides(1)[d] / item);
    }
    return width;
  }

  // set_block_dimension
  void set_block(int64_t lanes, int64_t rows) {
    const int64_t most = 512 / output_vector_;
    const auto limited = [&](int64_t n) { return n < most ? power_of_two_below(std::max<int64_t>(1, n)) : most; };
    width_ = std::min<int64_t>(limited(lanes), 32);
    height_ = std::min(limited(rows), most / width_);
    width_ = std::min(limited(lanes), most / height_);
  }

  void split(const Capability& capability) {
    (reduces_across_lanes_ ? step_input_ : step_output_) *= width_;
    const bool across_warps = values_per_thread() >= std::min<int64_t>(height_ * 16, 256);
    (across_warps ? step_input_ : step_output_) *= height_;
    const auto blocks_at_once =
        capability.multiprocessors * (capability.threads_per_multiprocessor() / (width_ * height_));
    if (!across_warps || values_per_thread() < 256 || grid() > blocks_at_once) return;
    const auto filling = std::min(ceil_div(blocks_at_once, grid()), ceil_div(values_per_thread(), 16));
    blocks_per_output_ = std::max(filling, ceil_div(values_per_thread(), 256));
  }

  int64_t accumulator_, outputs_, inputs_;
  int64_t width_ = 1, height_ = 1, output_vector_ = 1;
  int64_t step_input_ = 1, step_output_ = 1, blocks_per_output_ = 1;
  bool reduces_across_lanes_ = true;
};

// A tensor that nobody reads, for torch's own arithmetic on shapes.
at::Tensor unread(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, at::ScalarType type) {
  return at::from_blob(reinterpret_cast<void*>(uintptr_t{1} << 20), sizes, strides, at::TensorOptions().dtype(type));
}

// The result, with dimensions of size 1 and stride 0 where `input` is reduced: all of them if `dims` is empty.
at::Tensor result_of(const TensorArgument& input, const std::vector<int64_t>& dims) {
  const auto rank = static_cast<int64_t>(input.sizes.size());
  auto sizes = input.sizes;
  for (int64_t d = 0; d < rank; ++d) {
    const auto named = [&](int64_t dim) { return dim == d || dim + rank == d; };
    if (dims.empty() || std::any_of(dims.begin(), dims.end(), named)) sizes[static_cast<size_t>(d)] = 1;
  }
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (size_t d = sizes.size(); d-- > 0; step *= sizes[d]) strides[d] = sizes[d] == input.sizes[d] ? step : 0;
  return unread(sizes, strides, input.dtype);
}

// Reduce.cuh, gpu_reduce_kernel: a buffer and semaphores for each part that 32-bit indices can address, and one buffer
// to add the parts up in where the result is in half precision.
void shared_outputs(const TensorArgument& input, const std::vector<int64_t>& dims, Kind kind, bool half_result,
                    const Capability& capability, Taken& taken) {
  if (numel(input) == 0) return;
  auto out = result_of(input, dims);
  const auto in = unread(input.sizes, input.strides, input.dtype);
  const auto iterator = at::TensorIterator::reduce_op(out, in);
  const auto take_for = [&](const at::TensorIterator& part) {
    const Configuration configuration(part, kind, capability);
    taken.hold_for(1, configuration.staging_bytes());
    taken.scratch(configuration.semaphore_bytes());
  };
  if (iterator.can_use_32bit_indexing()) return take_for(iterator);
  if (half_result) taken.hold(out.numel() * kind.accumulator);
  for (auto& part : iterator.with_32bit_indexing()) take_for(part);
}

}  // namespace reduce

// aten/src/ATen/native/ReduceOps.cpp, make_reduction: the input is cast first, unless it is in half precision and the
// result in fp32.
void reduction(const OperatorCall& call, const Capability& capability, Taken& taken) {
  if (call.inputs.empty()) return;
  auto input = call.inputs[0];
  const bool counts = call.name.find("sum") != call.name.npos || call.name.find("prod") != call.name.npos;
  const bool integral = c10::isIntegralType(input.dtype, true);
  const auto wanted = call.scalars.dtype.value_or(counts && integral ? at::kLong : input.dtype);
  if (wanted != input.dtype && !(reduce::half(input.dtype) && wanted == at::kFloat)) {
    input.dtype = wanted;
    taken.hold(bytes(input));
  }
  reduce::shared_outputs(input, call.scalars.dims, reduce::kind_of(call.name, input.dtype), reduce::half(wanted),
                         capability, taken);
}

// ForeachReduceOp.cu, foreach_tensor_norm_cuda: a partial result for each 65,536 elements of the longest tensor, for
// every tensor. Lists that torch takes one by one (several dtypes, gaps) have no such buffer.
void foreach_reduction(const OperatorCall& call, const Capability&, Taken& taken) {
  if (call.inputs.empty()) return;
  int64_t chunks = 0;
  for (const auto& tensor : call.inputs) {
    if (tensor.dtype != call.inputs[0].dtype || !dense(tensor)) return;
    chunks = std::max(chunks, ceil_div(numel(tensor), 65536));
  }
  const auto type = call.scalars.dtype.value_or(call.inputs[0].dtype);
  const auto item = call.name.find("max") != call.name.npos ? item_size(type) : accumulator_size(type);
  taken.hold(static_cast<int64_t>(call.inputs.size()) * chunks * item, Moment::BeforeResults);
}

// layer_norm_kernel.cu, layer_norm_cuda and _fused_rms_norm_cuda: contiguous copies.
void layer_norm(const OperatorCall& call, const Capability&, Taken& taken) {
  for (const auto& tensor : call.inputs) taken.hold(contiguous_copy(tensor), Moment::BeforeResults);
}

namespace reduce {

// layer_norm_kernel.cu, LaunchGammaBetaBackwardCUDAKernel: many short rows are summed in two passes.
void weight_gradients(const OperatorCall& call, size_t rstd, int gradients, const Capability& capability,
                      Taken& taken) {
  if (call.inputs.size() <= rstd + 1) return;  // without a weight
  const auto& weight = call.inputs[rstd + 1];
  const auto rows = numel(call.inputs[rstd]);
  const auto columns = numel(call.inputs[1]) / std::max<int64_t>(1, rows);
  if (rows <= 64 * 1024 || columns / 32 >= capability.multiprocessors / 2 || weight.sizes.empty()) return;
  const auto across = ceil_div(columns, 32);
  const auto down = std::min(32 * 1024 / across, ceil_div(rows, 32));
  const TensorArgument partial{{down, weight.sizes.back()}, {weight.sizes.back(), 1}, weight.dtype};
  for (int n = 0; n < gradients; ++n) taken.hold(bytes(partial));
  for (int n = 0; n < gradients; ++n) {
    shared_outputs(partial, {0}, kind_of("sum", partial.dtype), half(partial.dtype), capability, taken);
  }
}

}  // namespace reduce

// layer_norm_kernel.cu, layer_norm_backward_cuda
void layer_norm_backward(const OperatorCall& call, const Capability& capability, Taken& taken) {
  if (call.inputs.size() < 4) return;
  taken.hold(contiguous_copy(call.inputs[1]), Moment::BeforeResults);
  taken.hold(contiguous_copy(call.inputs[0]));
  reduce::weight_gradients(call, 3, call.inputs.size() > 5 ? 2 : 1, capability, taken);
}

// layer_norm_kernel.cu, _fused_rms_norm_backward_cuda
void rms_norm_backward(const OperatorCall& call, const Capability& capability, Taken& taken) {
  if (call.inputs.size() < 3) return;
  taken.hold(contiguous_copy(call.inputs[1]), Moment::BeforeResults);
  taken.hold(contiguous_copy(call.inputs[0]));
  reduce::weight_gradients(call, 2, 1, capability, taken);
}

}  // namespace refshard::workspace_rules
