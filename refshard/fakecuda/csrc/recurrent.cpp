// Recurrent layers as cuDNN runs them: one launch forward and one backward, whatever the number of layers and steps.
// torch asks the stubs below for them where cuDNN is there.
#include <ATen/ATen.h>
#include <ATen/native/RNN.h>
#include <torch/library.h>

#include "device.h"
#include "memory.h"

namespace refshard {

void kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack);  // operators.cpp

namespace {

using at::Tensor;
using at::TensorList;

// cudnnRNNMode_t
enum Cell : int64_t { kRelu, kTanh, kLstm, kGru };

struct Layers {
  Cell mode;
  TensorList weights;
  bool has_biases;
  int64_t count;
  double dropout;
  bool train, bidirectional, batch_first;
};

int64_t elements_of(TensorList weights) {
  int64_t elements = 0;
  for (const auto& weight : weights) elements += weight.numel();
  return elements;
}

// The weights as one tensor. They lie in one storage where flatten_parameters() has put them there; otherwise cuDNN
// gets a copy.
Tensor in_one_buffer(TensorList weights) {
  const auto& storage = weights.front().storage();
  const bool together = std::all_of(weights.begin(), weights.end(), [&](const auto& weight) {
    return weight.storage().unsafeGetStorageImpl() == storage.unsafeGetStorageImpl();
  });
  const auto buffer = at::empty({together ? 0 : elements_of(weights)}, weights.front().options());
  if (!together) return buffer;
  const auto elements = static_cast<int64_t>(storage.nbytes() / weights.front().itemsize());
  return buffer.set_(storage, 0, {elements}, {1});
}

// Puts the weights into one buffer, of which they become views.
Tensor flatten(TensorList weights, int64_t, c10::SymInt, int64_t, c10::SymInt, c10::SymInt, int64_t, bool, bool) {
  at::AutoDispatchBelowADInplaceOrView below;
  const auto buffer = at::empty({elements_of(weights)}, weights.front().options());
  int64_t offset = 0;
  for (const auto& weight : weights) {
    buffer.narrow(0, offset, weight.numel()).view(weight.sizes()).copy_(weight);
    const_cast<Tensor&>(weight).set_(buffer.storage(), offset, weight.sizes(), weight.strides());
    offset += weight.numel();
  }
  return buffer;
}

// The state of dropout's generator, which torch keeps for the life of the process.
Tensor dropout_state(const Layers& layers, const at::TensorOptions& options) {
  if (layers.dropout == 0 || !layers.train) return {};
  static auto* states = new std::unordered_map<c10::DeviceIndex, Tensor>;
  static std::mutex mutex;
  std::lock_guard guard(mutex);
  auto& state = (*states)[current_device()];
  if (!state.defined()) {
    state = at::_cudnn_init_dropout_state(layers.dropout, layers.train, 0, options.dtype(at::kByte));
  }
  return state;
}

std::tuple<Tensor, Tensor, Tensor> run_layers(const Layers& layers, const Tensor& input, c10::IntArrayRef batch_sizes,
                                              const Tensor& hx, const Tensor& cx) {
  const bool lstm = layers.mode == kLstm;
  const auto hidden = lstm ? cx.size(2) : hx.size(2);
  const auto projection = hidden != hx.size(2) ? hx.size(2) : 0;
  const auto per_layer = (layers.has_biases ? 4 : 2) + (projection ? 1 : 0);
  auto found = at::_cudnn_rnn(input, layers.weights, per_layer, in_one_buffer(layers.weights), hx,
                              lstm ? std::optional<Tensor>(cx) : std::nullopt, layers.mode, hidden, projection,
                              layers.count, layers.batch_first, layers.dropout, layers.train, layers.bidirectional,
                              batch_sizes, dropout_state(layers, input.options()));
  return {std::get<0>(found), std::get<1>(found), std::get<2>(found)};
}

void lstm(Tensor& output, Tensor& hy, Tensor& cy, const Tensor& input, TensorList state, TensorList weights,
          bool biases, int64_t count, double dropout, bool train, bool bidirectional, bool batch_first) {
  const Layers layers{kLstm, weights, biases, count, dropout, train, bidirectional, batch_first};
  std::tie(output, hy, cy) = run_layers(layers, input, {}, state[0], state[1]);
}

std::vector<int64_t> on_host_sizes(const Tensor& sizes) {
  return {sizes.data_ptr<int64_t>(), sizes.data_ptr<int64_t>() + sizes.numel()};
}

void lstm_packed(Tensor& output, Tensor& hy, Tensor& cy, const Tensor& input, const Tensor& sizes, TensorList state,
                 TensorList weights, bool biases, int64_t count, double dropout, bool train, bool bidirectional) {
  const Layers layers{kLstm, weights, biases, count, dropout, train, bidirectional, false};
  std::tie(output, hy, cy) = run_layers(layers, input, on_host_sizes(sizes), state[0], state[1]);
}

template <Cell mode>
void rnn(Tensor& output, Tensor& hy, const Tensor& input, const Tensor& hx, TensorList weights, bool biases,
         int64_t count, double dropout, bool train, bool bidirectional, bool batch_first) {
  const Layers layers{mode, weights, biases, count, dropout, train, bidirectional, batch_first};
  std::tie(output, hy, std::ignore) = run_layers(layers, input, {}, hx, {});
}

template <Cell mode>
void rnn_packed(Tensor& output, Tensor& hy, const Tensor& input, const Tensor& sizes, const Tensor& hx,
                TensorList weights, bool biases, int64_t count, double dropout, bool train, bool bidirectional) {
  const Layers layers{mode, weights, biases, count, dropout, train, bidirectional, false};
  std::tie(output, hy, std::ignore) = run_layers(layers, input, on_host_sizes(sizes), hx, {});
}

// What cuDNN keeps for backward, of which it tells only the size: at least the gates and states of each step.
int64_t kept_for_backward(const Tensor& output, int64_t mode, int64_t hidden, int64_t projection, int64_t layers) {
  constexpr int64_t kValues[] = {1, 1, 6, 5};  // LSTM: 4 gates, cell, hidden; GRU: 3 gates, candidate, hidden
  const auto width = projection ? projection : hidden;
  return output.numel() / width * hidden * layers * kValues[mode] * static_cast<int64_t>(output.itemsize());
}

void forward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto first = stack->size() - op.schema().arguments().size();
  const auto argument = [&](size_t place) { return (*stack)[first + place]; };
  const auto mode = argument(6).toInt(), hidden = argument(7).toInt(), projection = argument(8).toInt();
  const auto layers = argument(9).toInt();
  const bool train = argument(12).toBool();
  kernel(op, stack);
  if (!train) return;
  const auto& output = (*stack)[first].toTensor();
  Allocating allocating("aten::_cudnn_rnn");
  (*stack)[first + 3] = at::empty({kept_for_backward(output, mode, hidden, projection, layers)},
                                  output.options().dtype(at::kByte));
}

std::tuple<Tensor, Tensor, Tensor, std::vector<Tensor>> shapes_of_backward(
    const Tensor& input, TensorList weights, int64_t, const Tensor&, const Tensor& hx,
    const std::optional<Tensor>& cx, const Tensor&, const std::optional<Tensor>&, const std::optional<Tensor>&,
    const std::optional<Tensor>&, int64_t, c10::SymInt, c10::SymInt, int64_t, bool, double, bool, bool,
    c10::SymIntArrayRef, const std::optional<Tensor>&, const Tensor&, std::array<bool, 4> wanted) {
  std::vector<Tensor> of_weights;
  if (wanted[3]) {
    const auto buffer = at::empty({elements_of(weights)}, weights.front().options());  // gradients are views of it
    int64_t offset = 0;
    for (const auto& weight : weights) {
      of_weights.push_back(buffer.narrow(0, offset, weight.numel()).view(weight.sizes()));
      offset += weight.numel();
    }
  }
  const bool cell = cx && cx->defined();
  return {at::empty_like(input), at::empty_like(hx), cell ? at::empty_like(*cx) : Tensor(), of_weights};
}

// An estimate, as cuDNN does not document the size: 24 bytes for each thread that a GPU can run.
Tensor dropout_state_shape(double, bool, int64_t, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                           std::optional<c10::Device>, std::optional<bool>) {
  constexpr int64_t kThreads = 2048, kBytes = 24;
  return at::empty({device().options.capability.multiprocessors * kThreads * kBytes},
                   at::TensorOptions(at::kMeta).dtype(dtype.value_or(at::kByte)));
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("_cudnn_rnn", torch::CppFunction::makeFromBoxedFunction<&forward>());
  library.impl("_cudnn_rnn_flatten_weight", flatten);
}

TORCH_LIBRARY_IMPL(aten, Meta, library) {
  library.impl("_cudnn_rnn_backward", shapes_of_backward);
  library.impl("_cudnn_init_dropout_state", dropout_state_shape);
}

}  // namespace

void register_recurrent() {
  at::native::lstm_cudnn_stub.set_cuda_dispatch_ptr(&lstm);
  at::native::lstm_packed_cudnn_stub.set_cuda_dispatch_ptr(&lstm_packed);
  at::native::gru_cudnn_stub.set_cuda_dispatch_ptr(&rnn<kGru>);
  at::native::gru_packed_cudnn_stub.set_cuda_dispatch_ptr(&rnn_packed<kGru>);
  at::native::rnn_tanh_cudnn_stub.set_cuda_dispatch_ptr(&rnn<kTanh>);
  at::native::rnn_tanh_packed_cudnn_stub.set_cuda_dispatch_ptr(&rnn_packed<kTanh>);
  at::native::rnn_relu_cudnn_stub.set_cuda_dispatch_ptr(&rnn<kRelu>);
  at::native::rnn_relu_packed_cudnn_stub.set_cuda_dispatch_ptr(&rnn_packed<kRelu>);
}

}  // namespace refshard
