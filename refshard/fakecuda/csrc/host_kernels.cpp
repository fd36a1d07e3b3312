// Operators that torch has for GPUs alone, on the CPU: host compute runs them, and what has no meta kernel either takes
// its shapes from here.
#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <torch/library.h>

#include <numeric>

namespace refshard {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

bool there(const OptionalTensor& tensor) { return tensor && tensor->defined(); }

// torch's kernels sum 16-bit values in fp32.
Tensor wide(const Tensor& tensor) { return tensor.to(at::toOpMathType(tensor.scalar_type())); }

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& input, c10::IntArrayRef shape,
                                             const Tensor& rstd, const OptionalTensor& weight,
                                             std::array<bool, 2> wanted) {
  const auto rows = input.dim() - static_cast<int64_t>(shape.size());
  std::vector<int64_t> outer(rows), inner(shape.size());
  std::iota(outer.begin(), outer.end(), 0);
  std::iota(inner.begin(), inner.end(), rows);
  const auto normal = wide(input) * wide(rstd);
  const auto given = wide(grad);
  Tensor of_input, of_weight;
  if (wanted[0]) {
    const auto scaled = there(weight) ? given * wide(*weight) : given;
    const auto along = (scaled * normal).mean(inner, /*keepdim=*/true);
    of_input = ((scaled - normal * along) * wide(rstd)).to(input.scalar_type());
  }
  if (wanted[1] && there(weight)) {
    const auto terms = given * normal;
    of_weight = (rows ? terms.sum(outer) : terms).to(weight->scalar_type());
  }
  return {of_input, of_weight};
}

// Batch normalisation in the parts that SyncBatchNorm sends between ranks. Channels are dimension 1.

std::vector<int64_t> all_but_channels(const Tensor& input) {
  std::vector<int64_t> dims;
  for (int64_t d = 0; d < input.dim(); ++d) {
    if (d != 1) dims.push_back(d);
  }
  return dims;
}

Tensor by_channel(const Tensor& values, const Tensor& input) {
  std::vector<int64_t> shape(input.dim(), 1);
  shape[1] = values.numel();
  return values.view(shape);
}

std::tuple<Tensor, Tensor> batch_norm_stats(const Tensor& input, double eps) {
  const auto dims = all_but_channels(input);
  const auto values = wide(input);
  return {values.mean(dims), (values.var(dims, /*unbiased=*/false) + eps).rsqrt()};
}

std::tuple<Tensor, Tensor> batch_norm_gather(const Tensor&, const Tensor& means, const Tensor& inverse_deviations,
                                             const OptionalTensor& running_mean, const OptionalTensor& running_var,
                                             double momentum, double eps, const Tensor& counts) {
  const auto weights = counts.to(means.scalar_type()).view({-1, 1});
  const auto count = weights.sum();
  const auto mean = (means * weights).sum(0) / count;
  const auto variances = inverse_deviations.pow(-2) - eps;
  const auto variance = ((variances + (means - mean).square()) * weights).sum(0) / count;
  if (there(running_mean)) running_mean->mul_(1 - momentum).add_(mean, momentum);
  if (there(running_var)) running_var->mul_(1 - momentum).add_(variance * (count / (count - 1)), momentum);
  return {mean, (variance + eps).rsqrt()};
}

Tensor batch_norm_apply(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                        const Tensor& mean, const Tensor& inverse_deviation, double) {
  auto values = (wide(input) - by_channel(mean, input)) * by_channel(inverse_deviation, input);
  if (there(weight)) values = values * by_channel(*weight, input);
  if (there(bias)) values = values + by_channel(*bias, input);
  return values.to(input.scalar_type());
}

std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_backward_sums(
    const Tensor& grad, const Tensor& input, const Tensor& mean, const Tensor& inverse_deviation,
    const OptionalTensor& weight, bool of_input, bool of_weight, bool of_bias) {
  const auto dims = all_but_channels(input);
  const auto given = wide(grad);
  const auto sum = given.sum(dims);
  const auto product = (given * (wide(input) - by_channel(mean, input))).sum(dims);
  const auto dtype = there(weight) ? weight->scalar_type() : input.scalar_type();
  return {of_input ? sum : Tensor(), of_input ? product : Tensor(),
          of_weight ? (product * inverse_deviation).to(dtype) : Tensor(), of_bias ? sum.to(dtype) : Tensor()};
}

Tensor batch_norm_backward_apply(const Tensor& grad, const Tensor& input, const Tensor& mean,
                                 const Tensor& inverse_deviation, const OptionalTensor& weight, const Tensor& sum,
                                 const Tensor& product, const Tensor& counts) {
  const auto count = counts.sum();
  const auto along = product / count * inverse_deviation.square();
  auto values = wide(grad) - by_channel(sum / count, input) -
                (wide(input) - by_channel(mean, input)) * by_channel(along, input);
  values = values * by_channel(inverse_deviation, input);
  if (there(weight)) values = values * by_channel(*weight, input);
  return values.to(input.scalar_type());
}

Tensor mm_to(const Tensor& a, const Tensor& b, at::ScalarType dtype) { return at::mm(a.to(dtype), b.to(dtype)); }
Tensor bmm_to(const Tensor& a, const Tensor& b, at::ScalarType dtype) { return at::bmm(a.to(dtype), b.to(dtype)); }
Tensor addmm_to(const Tensor& sum, const Tensor& a, const Tensor& b, at::ScalarType dtype, const at::Scalar& beta,
                const at::Scalar& alpha) {
  return at::addmm(sum.to(dtype), a.to(dtype), b.to(dtype), beta, alpha);
}

template <typename Library>
void put_batch_norm(Library& library) {
  library.impl("batch_norm_stats", batch_norm_stats);
  library.impl("batch_norm_gather_stats_with_counts", batch_norm_gather);
  library.impl("batch_norm_elemt", batch_norm_apply);
  library.impl("batch_norm_backward_reduce", batch_norm_backward_sums);
  library.impl("batch_norm_backward_elemt", batch_norm_backward_apply);
}

TORCH_LIBRARY_IMPL(aten, CPU, library) {
  library.impl("_fused_rms_norm_backward", rms_norm_backward);
  library.impl("mm.dtype", mm_to);
  library.impl("bmm.dtype", bmm_to);
  library.impl("addmm.dtype", addmm_to);
  put_batch_norm(library);
}

TORCH_LIBRARY_IMPL(aten, Meta, library) {
  put_batch_norm(library);
}

}  // namespace
}  // namespace refshard
