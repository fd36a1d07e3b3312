// Memory that other kernels take for themselves: copies that they need made, and what they sort.
#include <tuple>

#include "workspace_rules.h"

namespace refshard::workspace_rules {
namespace kernels {

// cuBlasCommonArgs.h, prepare_matrix_for_cublas: whether cuBLAS reads a matrix where it lies.
bool readable_matrix(const TensorArgument& matrix) {
  const auto& [rows, columns] = std::tie(matrix.sizes[0], matrix.sizes[1]);
  const auto& [down, across] = std::tie(matrix.strides[0], matrix.strides[1]);
  return dense(matrix) || (down == 1 && across >= std::max<int64_t>(1, rows)) ||
         (across == 1 && down >= std::max<int64_t>(1, columns));
}

// Blas.cpp, prepare_batch_matrix_for_cublas
bool readable_batch(const TensorArgument& batch) {
  const auto rows = std::max<int64_t>(1, batch.sizes[1]), columns = std::max<int64_t>(1, batch.sizes[2]);
  const auto down = batch.strides[1], across = batch.strides[2];
  return (across == 1 && down >= columns) || (down == 1 && across >= rows) ||
         (contiguous(batch) && down != 0 && across != 0);
}

// cub's DispatchRadixSort: a second copy of keys and values if there is more than one pass of 8 bits, histograms, and
// the look-back of its onesweep kernel (tiles of 384 threads that hold 84 bytes of keys or values each).
int64_t radix_sort_bytes(int64_t count, int64_t key_item, int64_t value_item, int64_t bits) {
  const auto passes = ceil_div(bits, 8);
  const auto tile = 384 * std::max<int64_t>(1, 84 / std::max<int64_t>({4, key_item, value_item}));
  int64_t total = 255;
  for (const auto part : {passes * 256 * 8, ceil_div(count, tile) * 256 * 4, passes > 1 ? count * key_item : 0,
                          passes > 1 ? count * value_item : 0, passes * 4}) {
    total += rounded_up(part, 256);
  }
  return total;
}

int64_t bits_of(int64_t most) {
  int64_t bits = 1;
  while (most > 1) {
    most >>= 1;
    ++bits;
  }
  return bits;
}

// SortStable.cu, launch_stable_sort_kernel
void stable_sort(int64_t segments, int64_t length, int64_t item, Taken& taken) {
  const auto count = segments * length;
  if (segments == 1 || length >= 1000000) {
    taken.hold(length * 8);
    taken.scratch(radix_sort_bytes(length, item, 8, item * 8));
  } else if (segments < 128) {
    taken.hold(count * 8);
    taken.hold(count * 8);
    taken.hold_for(1, count * item);
    taken.scratch(radix_sort_bytes(count, item, 8, item * 8));
    taken.scratch(radix_sort_bytes(count, 8, 0, std::max<int64_t>(1, bits_of(segments - 1))));
  } else {
    taken.hold(count * 8);
    taken.scratch(count * (item + 8));
  }
}

}  // namespace kernels

// cuBlasCommonArgs.h, Blas.cpp: copies of matrices that cuBLAS cannot read where they lie. The workspaces of
// cuBLAS and cuBLASLt themselves are persistent_workspace().
void matrix_product(const OperatorCall& call, const Capability&, Taken& taken) {
  const bool adds = call.name.find("add") != call.name.npos;  // addmm(bias, one, other)
  for (size_t place = adds ? 1 : 0; place < std::min<size_t>(call.inputs.size(), adds ? 3 : 2); ++place) {
    const auto& matrix = call.inputs[place];
    const bool readable = matrix.sizes.size() == 2   ? kernels::readable_matrix(matrix)
                          : matrix.sizes.size() == 3 ? kernels::readable_batch(matrix)
                                                     : true;
    if (!readable) taken.hold(bytes(matrix));
  }
}

// GroupMM.cu, bf16bf16_grouped_gemm_impl_sm90_sm100: pointers, strides and shapes of the groups. CUTLASS's workspace
// (a few tensor maps of 128 bytes for each multiprocessor) is left out.
void grouped_product(const OperatorCall& call, const Capability& capability, Taken& taken) {
  if (call.inputs.size() < 2 || (capability.number() != 90 && capability.major != 10)) return;
  const auto& one = call.inputs[0].sizes;
  const auto& other = call.inputs[1].sizes;
  int64_t groups = 0;
  if (one.size() == 3) groups = one[0];
  else if (other.size() == 3) groups = other[0];
  else if (call.inputs.size() > 2) groups = numel(call.inputs[2]);
  taken.hold(rounded_up(groups, 2) * 3 * 8 + groups * 12 + 3 * groups * 8);
}

// Embedding.cu, embedding_dense_backward_cuda, and EmbeddingBackwardKernel.cu, embedding_backward_cuda_kernel: more
// than 3,072 indices are sorted, and rows of one index are summed in runs of ten.
void embedding_backward(const OperatorCall& call, const Capability&, Taken& taken) {
  if (call.inputs.size() < 2) return;
  const auto& gradient = call.inputs[0];
  const auto& indices = call.inputs[1];
  const auto count = numel(indices), item = item_size(indices.dtype);
  taken.hold(contiguous_copy(indices), Moment::BeforeResults);
  taken.hold(contiguous_copy(gradient), Moment::BeforeResults);
  if (count == 0 || (count <= 3072 && !call.scalars.scale_grad_by_freq)) return;
  taken.hold(count * item, Moment::BeforeResults);           // sorted_indices
  taken.hold(count * item, Moment::BeforeResults);           // orig_indices
  taken.hold_for(1, count * item, Moment::BeforeResults);    // range
  taken.scratch(kernels::radix_sort_bytes(count, item, item, item * 8), Moment::BeforeResults);
  if (call.scalars.scale_grad_by_freq) taken.hold(count * item, Moment::BeforeResults);
  const auto rows = call.scalars.num_weights;
  const auto segments = rows > 0 ? std::min(count, rows) : count;
  const auto partial_segments = count / 10 + segments;
  taken.hold(count * item);             // segment_offsets
  taken.hold(8);                        // num_of_segments
  taken.hold(segments * item);          // partials_per_segment
  taken.hold(segments * item);          // partials_per_segment_offset
  taken.hold(8);                        // num_of_partial_segments
  taken.hold(partial_segments * item);  // partial_segment_offset
  taken.hold(partial_segments * gradient.sizes.back() * accumulator_size(gradient.dtype));
}

// Sort.cpp, sort_cuda_kernel
void sort(const OperatorCall& call, const Capability&, Taken& taken) {
  if (call.inputs.empty() || call.inputs[0].sizes.empty() || numel(call.inputs[0]) == 0) return;
  const auto& input = call.inputs[0];
  const auto rank = static_cast<int64_t>(input.sizes.size());
  const auto asked = call.scalars.dims.empty() ? -1 : call.scalars.dims[0];
  const auto dim = static_cast<size_t>(asked < 0 ? asked + rank : asked);
  const auto length = input.sizes[dim], item = item_size(input.dtype);
  if (length <= 4096) {
    taken.scratch(length * 8);  // fillSliceWithIndex
    return;
  }
  if (!dense(input) || input.strides[dim] != 1) {
    taken.hold(bytes(input));
    if (dense(input)) {  // the results lie as the input does, not as what is sorted
      taken.hold(bytes(input));
      taken.hold(numel(input) * 8);
    }
  }
  kernels::stable_sort(numel(input) / length, length, item, taken);
}

// Indexing.cu, index_put_with_sort_kernel: only where values add up, or must do so in a fixed order. Masks as indices
// are not modelled.
void index_put(const OperatorCall& call, const Capability&, Taken& taken) {
  if (call.inputs.size() < 3 || !(call.scalars.accumulate || call.scalars.deterministic)) return;
  const auto& self = call.inputs.front();
  const auto& values = call.inputs.back();
  const auto given = call.inputs.size() - 2;
  int64_t count = 1, rows = 1;
  for (size_t n = 1; n <= given; ++n) {
    if (c10::isIntegralType(call.inputs[n].dtype, false) == false) return;
    count = std::max(count, numel(call.inputs[n]));
    rows *= n <= self.sizes.size() ? self.sizes[n - 1] : 1;
  }
  taken.hold(contiguous_copy(self));
  taken.hold(count * 8);  // linearIndex
  taken.hold(contiguous_copy(values));
  taken.hold(count * 8);  // sorted_indices
  taken.hold(count * 8);  // orig_indices
  taken.hold(count * 8);  // range
  taken.scratch(kernels::radix_sort_bytes(count, 8, 8, kernels::bits_of(rows)));
}

// SoftMax.cu, host_softmax and host_softmax_backward: contiguous copies.
void softmax(const OperatorCall& call, const Capability&, Taken& taken) {
  for (const auto& tensor : call.inputs) taken.hold(contiguous_copy(tensor));
}

// SoftMax.cu, softmax_backward_cuda_out: the gradient times the output, whose rows are then summed.
void softmax_backward(const OperatorCall& call, const Capability& capability, Taken& taken) {
  if (call.inputs.empty()) return;
  taken.hold(bytes(call.inputs[0]));
  softmax(call, capability, taken);
}

// Copy.cu, copy_kernel_cuda: copies between host and device of what is not contiguous, or not of one dtype.
void copy(const OperatorCall& call, const Capability&, Taken& taken) {
  if (call.inputs.size() < 2 || call.inputs[0].on_device == call.inputs[1].on_device) return;
  const auto& to = call.inputs[0];
  const auto& from = call.inputs[1];
  const bool same_type = to.dtype == from.dtype;
  const bool same_layout = to.sizes == from.sizes && to.strides == from.strides && dense(to);
  if (same_type && (same_layout || (contiguous(to) && contiguous(from) && to.sizes == from.sizes))) return;
  const auto converted_on_device = call.scalars.non_blocking;
  if (to.on_device) {
    const bool direct = contiguous(to) && (same_type || !converted_on_device);
    if (!direct) taken.hold(numel(to) * item_size(converted_on_device ? from.dtype : to.dtype));
    return;
  }
  if (!same_type && converted_on_device) taken.hold(numel(from) * item_size(to.dtype));
  if (!contiguous(from) || to.sizes != from.sizes) {
    taken.hold(numel(to) * item_size(converted_on_device ? to.dtype : from.dtype));
  }
}

}  // namespace refshard::workspace_rules
