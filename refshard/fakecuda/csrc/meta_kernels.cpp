// Shapes of the results of operators that torch leaves without a meta kernel.
#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <torch/library.h>

#include <numeric>

namespace refshard {
namespace {

using at::Tensor;

// For operators whose result is like their first, or their second, argument.
template <typename... Rest>
Tensor like_first(const Tensor& first, Rest...) {
  return at::empty_like(first, at::MemoryFormat::Contiguous);
}
template <typename... Rest>
Tensor like_second(const Tensor&, const Tensor& second, Rest...) {
  return at::empty_like(second, at::MemoryFormat::Contiguous);
}

// Where the size of a result depends on values, it is the largest that it can be: all elements are selected, and all
// are distinct. torch's meta kernel of nonzero does the same.

Tensor masked_select(const Tensor& self, const Tensor& mask) {
  const auto shape = at::infer_size(self.sizes(), mask.sizes());
  return at::empty({c10::multiply_integers(shape)}, self.options());
}

Tensor places(const Tensor& self, c10::IntArrayRef size, bool wanted) {
  return wanted ? at::empty(size, self.options().dtype(at::kLong)) : at::empty({0}, self.options().dtype(at::kLong));
}

std::tuple<Tensor, Tensor, Tensor> unique2(const Tensor& self, bool, bool inverse, bool counts) {
  const auto distinct = self.numel();
  return {at::empty({distinct}, self.options()), places(self, self.sizes(), inverse || counts),
          places(self, {distinct}, counts)};
}

std::tuple<Tensor, Tensor> unique(const Tensor& self, bool, bool inverse) {
  return {at::empty({self.numel()}, self.options()), places(self, self.sizes(), inverse)};
}

std::tuple<Tensor, Tensor, Tensor> distinct_along(const Tensor& self, int64_t dim, bool, bool inverse, bool counts) {
  const auto distinct = self.size(dim);
  return {like_first(self), places(self, {distinct}, inverse), places(self, {distinct}, counts)};
}

std::tuple<Tensor, Tensor, Tensor> unique_dim_consecutive(const Tensor& self, int64_t dim, bool inverse, bool counts) {
  return distinct_along(self, dim, true, inverse, counts);
}

std::tuple<Tensor, Tensor, Tensor> unique_consecutive(const Tensor& self, bool inverse, bool counts,
                                                      std::optional<int64_t> dim) {
  if (dim) return distinct_along(self, *dim, true, inverse, counts);
  const auto distinct = self.numel();
  return {at::empty({distinct}, self.options()), places(self, self.sizes(), inverse),
          places(self, {distinct}, counts)};
}

// No value is larger than `minlength` says: it is what programs give that need a fixed size.
Tensor bincount(const Tensor& self, const std::optional<Tensor>& weights, c10::SymInt minlength) {
  const auto options = self.options().dtype(weights && weights->defined() ? at::kDouble : at::kLong);
  return at::empty({std::max<int64_t>(1, minlength.expect_int())}, options);
}

Tensor histogram(const Tensor& self, int64_t bins, const at::Scalar&, const at::Scalar&) {
  return at::empty({bins}, self.options());
}

// Fake quantisation: the rounded values, and which of them were not clamped.

template <typename... Rest>
std::tuple<Tensor, Tensor> values_and_mask(const Tensor& self, Rest...) {
  return {at::empty_like(self), at::empty_like(self, self.options().dtype(at::kBool))};
}

std::tuple<Tensor, Tensor, Tensor> learnable_quantisation_backward(const Tensor& grad, const Tensor&,
                                                                   const Tensor& scale, const Tensor& zero_point) {
  return {at::empty_like(grad), at::empty_like(scale), at::empty_like(zero_point, scale.options())};
}

std::tuple<Tensor, Tensor, Tensor> learnable_per_tensor_backward(const Tensor& grad, const Tensor& self,
                                                                 const Tensor& scale, const Tensor& zero_point,
                                                                 int64_t, int64_t, double) {
  return learnable_quantisation_backward(grad, self, scale, zero_point);
}

std::tuple<Tensor, Tensor, Tensor> learnable_per_channel_backward(const Tensor& grad, const Tensor& self,
                                                                  const Tensor& scale, const Tensor& zero_point,
                                                                  int64_t, int64_t, int64_t, double) {
  return learnable_quantisation_backward(grad, self, scale, zero_point);
}

// A GRU cell in one kernel keeps five values for each element: three gates and both hidden states.
std::tuple<Tensor, Tensor> gru_cell(const Tensor&, const Tensor&, const Tensor& hx, const std::optional<Tensor>&,
                                    const std::optional<Tensor>&) {
  return {at::empty_like(hx, at::MemoryFormat::Contiguous), at::empty({hx.size(0), 5 * hx.size(1)}, hx.options())};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad_hy, const Tensor&,
                                                                     bool has_bias) {
  const auto gates = [&](bool made, c10::IntArrayRef size) {
    return made ? at::empty(size, grad_hy.options()) : Tensor();
  };
  const auto rows = grad_hy.size(0), wide = 3 * grad_hy.size(1);
  return {gates(true, {rows, wide}), gates(true, {rows, wide}), at::empty_like(grad_hy), gates(has_bias, {wide}),
          gates(has_bias, {wide})};
}

// Householder reflections: the matrix and one factor for each.
std::tuple<Tensor, Tensor> geqrf(const Tensor& self) {
  auto factors = self.sizes().vec();
  factors.pop_back();
  factors.back() = std::min(self.size(-2), self.size(-1));
  return {at::empty_like(self.mT(), at::MemoryFormat::Contiguous).mT(), at::empty(factors, self.options())};
}

Tensor padded_to_jagged(const Tensor& dense, at::TensorList offsets, std::optional<c10::SymInt> total) {
  std::vector<int64_t> shape(dense.sizes().begin() + static_cast<std::ptrdiff_t>(offsets.size()), dense.sizes().end());
  shape.front() = total ? total->expect_int() : dense.size(0) * dense.size(1);
  return at::empty(shape, dense.options());
}

using IntList = c10::IntArrayRef;
using Generator = std::optional<at::Generator>;
using OptionalTensor = std::optional<Tensor>;
using OptionalInt = std::optional<int64_t>;
using T = const Tensor&;

TORCH_LIBRARY_IMPL(aten, Meta, library) {
  library.impl("masked_select", masked_select);
  library.impl("_unique", unique);
  library.impl("_unique2", unique2);
  library.impl("unique_dim", distinct_along);
  library.impl("unique_consecutive", unique_consecutive);
  library.impl("unique_dim_consecutive", unique_dim_consecutive);
  library.impl("bincount", bincount);
  library.impl("histc", histogram);
  library.impl("_ctc_loss_backward", like_second<T, IntList, IntList, T, T, int64_t, bool>);
  library.impl("_ctc_loss_backward.Tensor", like_second<T, T, T, T, T, int64_t, bool>);
  library.impl("multi_margin_loss_backward",
               like_second<T, const at::Scalar&, const at::Scalar&, const OptionalTensor&, int64_t>);
  library.impl("multilabel_margin_loss_backward", like_second<T, int64_t, T>);
  library.impl("_sample_dirichlet", like_first<Generator>);
  library.impl("_dirichlet_grad", like_first<T, T>);
  library.impl("_standard_gamma_grad", like_first<T>);
  library.impl("binomial", like_first<T, Generator>);
  library.impl("_logcumsumexp", like_first<int64_t>);
  library.impl("_masked_softmax", like_first<T, OptionalInt, OptionalInt>);
  library.impl("_masked_softmax_backward", like_first<T, T, OptionalInt>);
  library.impl("fake_quantize_per_tensor_affine_cachemask", values_and_mask<double, int64_t, int64_t, int64_t>);
  library.impl("_fake_quantize_per_tensor_affine_cachemask_tensor_qparams", values_and_mask<T, T, T, int64_t, int64_t>);
  library.impl("fake_quantize_per_channel_affine_cachemask", values_and_mask<T, T, int64_t, int64_t, int64_t>);
  library.impl("_fake_quantize_learnable_per_tensor_affine", like_first<T, T, int64_t, int64_t, double>);
  library.impl("_fake_quantize_learnable_per_channel_affine", like_first<T, T, int64_t, int64_t, int64_t, double>);
  library.impl("_fake_quantize_learnable_per_tensor_affine_backward", learnable_per_tensor_backward);
  library.impl("_fake_quantize_learnable_per_channel_affine_backward", learnable_per_channel_backward);
  library.impl("_thnn_fused_gru_cell", gru_cell);
  library.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
  library.impl("geqrf", geqrf);
  library.impl("_padded_dense_to_jagged_forward", padded_to_jagged);
}

}  // namespace
}  // namespace refshard
