#include "attention_choice_binding.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <map>
#include <memory>

#include "attention_choice.h"
#include "workspaces.h"

namespace refshard {
namespace choice_binding {

namespace py = pybind11;
using Sizes = std::vector<int64_t>;

at::ScalarType dtype_of(const std::string& name) {
  static const std::map<std::string, at::ScalarType> names = {
      {"bf16", at::kBFloat16}, {"fp16", at::kHalf}, {"fp32", at::kFloat}, {"fp64", at::kDouble},
      {"fp8e4m3", at::kFloat8_e4m3fn}, {"int64", at::kLong}, {"int32", at::kInt}, {"bool", at::kBool}};
  const auto found = names.find(name);
  TORCH_CHECK_VALUE(found != names.end(), "unknown dtype ", name, "; known: bf16, fp16, fp32, fp64, fp8e4m3, int64, ",
                    "int32, bool");
  return found->second;
}

Sizes contiguous_strides(const Sizes& sizes) {
  Sizes strides(sizes.size());
  int64_t step = 1;
  for (size_t d = sizes.size(); d-- > 0; step *= sizes[d]) strides[d] = step;
  return strides;
}

// What a caller says of a tensor: sizes, and by name what differs from a contiguous bf16 tensor on the device.
AttentionTensor attention_tensor(const Sizes& sizes, const py::dict& given) {
  AttentionTensor made{sizes, contiguous_strides(sizes)};
  for (const auto& [key, value] : given) {
    const auto name = key.cast<std::string>();
    if (name == "strides") made.strides = value.cast<Sizes>();
    else if (name == "dtype") made.dtype = dtype_of(value.cast<std::string>());
    else if (name == "storage_offset") made.storage_offset = value.cast<int64_t>();
    else if (name == "requires_grad") made.requires_grad = value.cast<bool>();
    else if (name == "nested") made.nested = value.cast<bool>();
    else if (name == "on_device") made.on_device = value.cast<bool>();
    else TORCH_CHECK_VALUE(false, "unknown property of a tensor: ", name);
  }
  return made;
}

using Named = std::pair<Sizes, py::dict>;

AttentionCall attention_call(const Named& query, const Named& key, const Named& value,
                             const std::optional<Named>& mask, double dropout, bool causal, bool grouped,
                             bool grad_enabled) {
  AttentionCall call{attention_tensor(query.first, query.second), attention_tensor(key.first, key.second),
                     attention_tensor(value.first, value.second), std::nullopt, dropout, causal, grouped, grad_enabled};
  if (mask) call.mask = attention_tensor(mask->first, mask->second);
  return call;
}

using at::SDPBackend;

void bind_settings(py::module_& module) {
  py::class_<AttentionSettings>(module, "AttentionSettings")
      .def(py::init<>())
      .def_readwrite("math", &AttentionSettings::math)
      .def_readwrite("flash", &AttentionSettings::flash)
      .def_readwrite("efficient", &AttentionSettings::efficient)
      .def_readwrite("cudnn", &AttentionSettings::cudnn)
      .def_readwrite("overrideable", &AttentionSettings::overrideable)
      .def_readwrite("flash3", &AttentionSettings::flash3)
      .def_readwrite("deterministic", &AttentionSettings::deterministic)
      .def_property(
          "order",
          [](const AttentionSettings& self) {
            std::vector<int> order;
            for (const auto backend : self.order) order.push_back(static_cast<int>(backend));
            return order;
          },
          [](AttentionSettings& self, const std::array<int, at::num_sdp_backends>& order) {
            std::transform(order.begin(), order.end(), self.order.begin(),
                           [](int backend) { return static_cast<SDPBackend>(backend); });
          });
}

Refusal why_not(int backend, const AttentionCall& call, const AttentionSettings& settings,
                const Capability& capability) {
  switch (static_cast<SDPBackend>(backend)) {
    case SDPBackend::flash_attention: return refuse_flash(call, settings, capability);
    case SDPBackend::efficient_attention: return refuse_efficient(call, settings, capability);
    case SDPBackend::cudnn_attention: return refuse_cudnn(call, settings, capability);
    default: TORCH_CHECK_VALUE(false, "only flash (1), efficient (2) and cuDNN (3) give reasons, not ", backend);
  }
}

Scalars scalars_from(const py::dict& given) {
  Scalars made;
  for (const auto& [key, value] : given) {
    const auto name = key.cast<std::string>();
    if (name == "dim") made.dims = value.cast<Sizes>();
    else if (name == "dtype") made.dtype = dtype_of(value.cast<std::string>());
    else if (name == "num_weights") made.num_weights = value.cast<int64_t>();
    else if (name == "scale_grad_by_freq") made.scale_grad_by_freq = value.cast<bool>();
    else if (name == "accumulate") made.accumulate = value.cast<bool>();
    else if (name == "non_blocking") made.non_blocking = value.cast<bool>();
    else if (name == "dropout_p") made.dropout = value.cast<double>();
    else if (name == "deterministic") made.deterministic = value.cast<bool>();
    else TORCH_CHECK_VALUE(false, "unknown argument: ", name);
  }
  return made;
}

std::vector<TensorArgument> tensor_arguments(const std::vector<Named>& inputs) {
  std::vector<TensorArgument> made;
  for (const auto& [sizes, given] : inputs) {
    const auto tensor = attention_tensor(sizes, given);
    made.push_back({tensor.sizes, tensor.strides, tensor.dtype, tensor.on_device});
  }
  return made;
}

// The most bytes of workspaces that live at once, before and after the results are made.
std::pair<size_t, size_t> most_at_once(const std::vector<Workspace>& all) {
  size_t now = 0, most = 0;
  const auto allocate = [&](size_t bytes) {
    most = std::max(most, now += bytes);
    return std::shared_ptr<void>(nullptr, [&now, bytes](void*) { now -= bytes; });
  };
  const auto held = take(all, Moment::BeforeResults, allocate);
  const auto before = std::exchange(most, now);
  const auto more = take(all, Moment::AfterResults, allocate);
  return {before, most};
}

void bind_workspaces(py::module_& module) {
  // (bytes, after the results, lives for so many further ones or -1), in the order in which they are taken
  module.def(
      "workspaces",
      [](const std::string& op, const std::vector<Named>& inputs, const py::dict& scalars,
         const Capability& capability) {
        std::vector<std::tuple<size_t, bool, int>> found;
        for (const auto& one : workspaces({op, tensor_arguments(inputs), scalars_from(scalars)}, capability)) {
          found.emplace_back(one.bytes, one.moment == Moment::AfterResults, one.lives_for);
        }
        return found;
      },
      py::arg("op"), py::arg("inputs"), py::arg("scalars"), py::arg("capability"));
  module.def(
      "most_at_once",
      [](const std::string& op, const std::vector<Named>& inputs, const py::dict& scalars,
         const Capability& capability) {
        return most_at_once(workspaces({op, tensor_arguments(inputs), scalars_from(scalars)}, capability));
      },
      py::arg("op"), py::arg("inputs"), py::arg("scalars"), py::arg("capability"));
  module.def("persistent_workspace", &persistent_workspace, py::arg("op"), py::arg("capability"));
  module.def("cublas_workspace", &cublas_workspace, py::arg("configuration"), py::arg("capability"));
}

}  // namespace choice_binding

void bind_attention_choice(pybind11::module_& module) {
  using namespace choice_binding;
  py::class_<Capability>(module, "Capability")
      .def(py::init<>())
      .def_readwrite("name", &Capability::name)
      .def_readwrite("major", &Capability::major)
      .def_readwrite("minor", &Capability::minor)
      .def_readwrite("multiprocessors", &Capability::multiprocessors)
      .def_readwrite("cudnn", &Capability::cudnn)
      .def_readwrite("cudnn_version", &Capability::cudnn_version)
      .def_readwrite("cuda_version", &Capability::cuda_version);
  bind_settings(module);
  bind_workspaces(module);
  module.def("can_use_attention", &can_use_attention, py::arg("backend"), py::arg("query"), py::arg("key"),
             py::arg("value"), py::arg("mask"), py::arg("dropout"), py::arg("causal"), py::arg("grouped"));
  module.def("prefers_cudnn", &prefers_cudnn, py::arg("capability"));
  module.def(
      "choose_attention",
      [](const Named& query, const Named& key, const Named& value, const std::optional<Named>& mask, double dropout,
         bool causal, bool grouped, bool grad_enabled, const AttentionSettings& settings,
         const Capability& capability) {
        const auto call = attention_call(query, key, value, mask, dropout, causal, grouped, grad_enabled);
        return static_cast<int>(choose_backend(call, settings, capability));
      },
      py::arg("query"), py::arg("key"), py::arg("value"), py::arg("mask"), py::arg("dropout"), py::arg("causal"),
      py::arg("grouped"), py::arg("grad_enabled"), py::arg("settings"), py::arg("capability"));
  module.def(
      "why_not",
      [](int backend, const Named& query, const Named& key, const Named& value, const std::optional<Named>& mask,
         double dropout, bool causal, bool grouped, bool grad_enabled, const AttentionSettings& settings,
         const Capability& capability) {
        const auto call = attention_call(query, key, value, mask, dropout, causal, grouped, grad_enabled);
        return why_not(backend, call, settings, capability);
      },
      py::arg("backend"), py::arg("query"), py::arg("key"), py::arg("value"), py::arg("mask"), py::arg("dropout"),
      py::arg("causal"), py::arg("grouped"), py::arg("grad_enabled"), py::arg("settings"), py::arg("capability"));
}

}  // namespace refshard
