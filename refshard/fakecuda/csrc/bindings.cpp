// The extension's face to Python. Functions that scripts call through torch.cuda get their names in torch_c.py.
#include <ATen/EmptyTensor.h>
#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "attention_choice_binding.h"
#include "caching_allocator_binding.h"
#include "device.h"
#include "generator.h"
#include "guard.h"
#include "large_integers.h"
#include "launch.h"
#include "memory.h"
#include "process_group.h"
#include "routing.h"
#include "translation.h"

namespace py = pybind11;

namespace refshard {
void register_attention();
void register_recurrent();
void bind_graphs(py::module_& m);

namespace {

struct Uncounted {
  std::optional<StandIn> stand_in;
};

template <typename Value, typename Read>
py::array_t<Value> column(const std::vector<Event>& events, Read read) {
  py::array_t<Value> made(static_cast<py::ssize_t>(events.size()));
  auto* to = made.mutable_data();
  for (const auto& event : events) *to++ = static_cast<Value>(read(event));
  return made;
}

py::dict recording() {
  const auto& events = recorder().events();
  const auto& accesses = recorder().accesses();
  py::dict found;
  found["kinds"] = column<uint8_t>(events, [](const Event& e) { return e.kind; });
  found["names"] = column<int32_t>(events, [](const Event& e) { return e.name; });
  found["streams"] = column<int64_t>(events, [](const Event& e) { return e.stream; });
  found["subjects"] = column<int64_t>(events, [](const Event& e) { return e.subject; });
  found["sizes"] = column<int64_t>(events, [](const Event& e) { return e.size; });
  found["reads"] = column<int64_t>(events, [](const Event& e) { return e.reads; });
  found["writes"] = column<int64_t>(events, [](const Event& e) { return e.writes; });
  found["signatures"] = column<int32_t>(events, [](const Event& e) { return e.signature; });
  found["modules"] = column<int32_t>(events, [](const Event& e) { return e.module; });
  found["phases"] = column<uint8_t>(events, [](const Event& e) { return e.phase; });
  found["flags"] = column<int32_t>(events, [](const Event& e) { return e.flags; });
  found["categories"] = column<uint8_t>(events, [](const Event& e) { return e.category; });
  found["threads"] = column<int32_t>(events, [](const Event& e) { return e.thread; });
  found["sites"] = column<int32_t>(events, [](const Event& e) { return e.site; });
  found["host_operators"] = column<int32_t>(events, [](const Event& e) { return e.host.operators; });
  found["host_dispatched"] = column<int32_t>(events, [](const Event& e) { return e.host.dispatched; });
  found["host_nodes"] = column<int32_t>(events, [](const Event& e) { return e.host.nodes; });
  found["host_calls"] = column<int32_t>(events, [](const Event& e) { return e.host.calls; });
  found["access_ends"] = column<int64_t>(events, [](const Event& e) { return e.access_end; });
  py::array_t<int64_t> addresses(static_cast<py::ssize_t>(accesses.size())), sizes(addresses.size());
  py::array_t<bool> writes(addresses.size());
  for (size_t i = 0; i < accesses.size(); ++i) {
    addresses.mutable_data()[i] = accesses[i].address;
    sizes.mutable_data()[i] = accesses[i].size;
    writes.mutable_data()[i] = accesses[i].write;
  }
  found["access_addresses"] = addresses;
  found["access_sizes"] = sizes;
  found["access_writes"] = writes;
  found["name_table"] = py::tuple(py::cast(recorder().names.texts()));
  found["signature_table"] = py::tuple(py::cast(recorder().signatures.texts()));
  found["module_table"] = py::tuple(py::cast(recorder().modules.texts()));
  found["site_table"] = py::tuple(py::cast(recorder().sites.texts()));
  return found;
}

// Blocks that live now: (id, bytes, stream, operator, module, phase, category).
py::list live_blocks() {
  const auto names = recorder().names.texts(), modules = recorder().modules.texts();
  py::list found;
  for (const auto& [id, block] : recorder().live()) {
    found.append(py::make_tuple(id, block.size, block.stream, names[block.name], modules[block.module],
                                static_cast<int>(block.phase), static_cast<int>(block.category)));
  }
  return found;
}

c10::Device cuda(int index) { return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index)}; }

py::tuple as_tuple(const c10::Stream& stream) {
  return py::make_tuple(stream.id(), int(stream.device_index()), int(stream.device_type()));
}

void bind_device(py::module_& m) {
  m.def("create", [](bool dry, int count, size_t total, size_t context, std::pair<size_t, size_t> communicators,
                     const Capability& capability, const std::string& allocator) {
    create_device({dry ? Mode::Dry : Mode::HostCompute, count, total, context, communicators.first,
                   communicators.second, capability, parse_allocator_settings(allocator)});
  });
  m.def("is_dry", [] { return device().dry(); });
  m.def("capability", [] { return device().options.capability; });
  m.def("device_count", [] { return device().options.count; });
  m.def("show_devices", [](int count) { device().options.count = std::min(count, device().options.count); });
  m.def("current_device", [] { return int(current_device()); });
  m.def("set_device", [](int index) { set_current_device(static_cast<c10::DeviceIndex>(index)); });
  m.def("exchange_device", [](int index) { return int(guard().exchangeDevice(cuda(index)).index()); });
  m.def("synchronize", torch::wrap_pybind_function([](const char* why) { synchronise(why); }), py::arg("why") = "device");
  m.def("current_stream", [](int index) { return as_tuple(guard().getStream(cuda(index))); });
  m.def("default_stream", [](int index) { return as_tuple(guard().getDefaultStream(cuda(index))); });
  m.def("set_stream", [](int64_t stream, int index) {
    set_current_device(static_cast<c10::DeviceIndex>(index));
    set_current_stream(static_cast<c10::DeviceIndex>(index), stream);
  });
  m.def("default_generator", [](int index) { return default_generator(static_cast<c10::DeviceIndex>(index)); });
  m.def("set_site_callback", [](py::function callback) {
    set_site_callback([callback = new py::function(std::move(callback))] {
      py::gil_scoped_acquire gil;
      return (*callback)().cast<std::string>();
    });
  });
  m.def("record_sites_of_allocations", &record_sites_of_allocations);
  m.attr("PLACEHOLDER") = kPlaceholder;
  m.def("set_unknown_value_callback", [](py::function callback) {
    set_unknown_value_callback([callback = new py::function(std::move(callback))](std::optional<double> value) {
      py::gil_scoped_acquire gil;
      (*callback)(value);
    });
  });
}

// What generated code calls instead of the dispatcher.
void bind_generated(py::module_& m) {
  m.def("launch", [](std::string_view name, const std::vector<at::Tensor>& tensors, const std::vector<int64_t>& reads,
                     const std::vector<int64_t>& writes, int64_t flops, int64_t stream, bool products,
                     bool value_unknown) {
    std::vector<Operand> operands;
    for (size_t i = 0; i < tensors.size(); ++i) operands.push_back({tensors[i], reads.at(i), writes.at(i)});
    launch_kernel(name, operands, flops, stream, (products ? kProducts : 0) | (value_unknown ? kValueUnknown : 0));
  }, py::arg("name"), py::arg("tensors"), py::arg("reads"), py::arg("writes"), py::arg("flops"), py::arg("stream"),
     py::arg("products") = false, py::arg("value_unknown") = false);
  m.def("keep_values", &keep_values);
  // The sum of a tensor of integers, None if its values were not computed.
  m.def("known_sum", [](const at::Tensor& tensor) -> std::optional<int64_t> {
    StandIn stand_in;
    if (const auto values = values_of(tensor)) return values->sum();
    if (tensor.is_cuda() && (!resident(tensor) || unknown(tensor))) return std::nullopt;
    return on_host(tensor).sum().item<int64_t>();
  });
  // A copy of integers on the host, and whether they follow from a choice. Nothing if they were not computed.
  m.def("known_integers", [](const at::Tensor& tensor) -> std::optional<std::pair<at::Tensor, bool>> {
    StandIn stand_in;
    if (!tensor.is_cuda()) return {{tensor, false}};
    if (in_runs(tensor)) make_resident(tensor);
    if (!resident(tensor) || unknown(tensor)) return std::nullopt;
    note_use(tensor);
    return {{on_host(tensor).clone(), marked(tensor, Mark::Assumed)}};
  });
  // Gives a tensor integers that follow from a choice, unless it is too large for them.
  m.def("assume_integers", [](const at::Tensor& tensor, const at::Tensor& values) {
    StandIn stand_in;
    if (!resident(tensor)) {
      if (!worth_computing(tensor)) return;
      set_mark(tensor, Mark::Real, true);
    }
    on_host(tensor).copy_(values);
    set_unknown(tensor, false);
    set_mark(tensor, Mark::Assumed, true);
  });
  m.def("empty_strided", [](const std::vector<int64_t>& size, const std::vector<int64_t>& stride,
                            at::ScalarType dtype) -> at::Tensor {
    return at::detail::empty_strided_generic(size, stride, &device_allocator(),
                                             c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype);
  });
}

// To allocate once more what a recording allocated: streams as they were, and allocators like the device's.
void bind_reallocation(py::module_& m) {
  py::class_<Streams, Progress>(m, "Streams")
      .def(py::init<>())
      .def("launched", &Streams::launched)
      .def("record", &Streams::record)
      .def("wait", &Streams::wait)
      .def("host_waits_for_stream", &Streams::host_waits_for_stream)
      .def("host_waits_for_event", &Streams::host_waits_for_event)
      .def("synchronise", &Streams::synchronise);
  // An empty allocator with the settings of the device's own, unless it is to be `expandable` or not, on a device of
  // `total` bytes.
  m.def(
      "allocator_like",
      [](int index, Progress& progress, std::function<void(int64_t)> on_segment, size_t total,
         std::optional<bool> expandable) {
        std::lock_guard lock(device().mutex);
        return device().allocator_like(static_cast<c10::DeviceIndex>(index), progress, std::move(on_segment), total,
                                       expandable);
      },
      py::arg("index"), py::arg("progress"), py::arg("on_segment"), py::arg("total"),
      py::arg("expandable") = std::nullopt, py::keep_alive<0, 2>());
  m.def("expandable_segments", [](int index) {
    std::lock_guard lock(device().mutex);
    return device().memory(static_cast<c10::DeviceIndex>(index)).settings().expandable_segments;
  });
}

void bind_memory(py::module_& m) {
  // Both as torch._C gives them to torch.cuda.memory_stats() and torch.cuda.memory_snapshot().
  m.def("statistics", [](int index) {
    std::lock_guard lock(device().mutex);
    return as_dict(device().memory(static_cast<c10::DeviceIndex>(index)).statistics());
  });
  m.def("snapshot", [](int index, PoolId pool) {
    std::lock_guard lock(device().mutex);
    return device().memory(static_cast<c10::DeviceIndex>(index)).snapshot(pool);
  }, py::arg("index"), py::arg("pool") = kOwnPool);
  m.def("memory_info", [](int index) { return device_allocator().getMemoryInfo(static_cast<c10::DeviceIndex>(index)); });
  m.def("reset_peak", [](int index) { device_allocator().resetPeakStats(static_cast<c10::DeviceIndex>(index)); });
  m.def("reset_accumulated",
        [](int index) { device_allocator().resetAccumulatedStats(static_cast<c10::DeviceIndex>(index)); });
  m.def("set_memory_fraction", [](double fraction, int index) {
    std::lock_guard lock(device().mutex);
    device().memory(static_cast<c10::DeviceIndex>(index)).set_memory_fraction(fraction);
  });
  m.def("memory_fraction", [](int index) {
    std::lock_guard lock(device().mutex);
    return device().memory(static_cast<c10::DeviceIndex>(index)).memory_fraction();
  });
  m.def("empty_cache", [](PoolId pool) { device_allocator().emptyCache(pool); }, py::arg("pool") = kOwnPool);
  m.def("resize_storage", [](size_t storage, size_t size) {
    resize_storage(*reinterpret_cast<c10::StorageImpl*>(storage), size);
  });
}

void bind_routing(py::module_& m) {
  m.def("set_routing", [](const std::string& rule, double exponent, int64_t rank, int64_t ranks) {
    using Rule = Routing::Rule;
    const auto chosen = rule == "worst" ? Rule::Worst : rule == "zipf" ? Rule::Zipf : Rule::Balanced;
    set_routing({chosen, exponent, rank, ranks});
  });
  // (choices: (operator, module, count, from, times), whether a size depends on one, rank and ranks of an exchange)
  m.def("assumed", [] {
    const auto found = assumed_so_far();
    return py::make_tuple(py::cast(found.choices), found.read, found.rank, found.ranks);
  });
}

void bind_recorder(py::module_& m) {
  m.def("record", [](bool on) { recorder().on = on; });
  m.def("count_host_work", &count_host_work);
  // While entered, this thread counts no work of the host: it compiles, which is no part of a step.
  py::class_<Uncounted>(m, "Uncounted")
      .def(py::init<>())
      .def("__enter__", [](Uncounted& self) { self.stand_in.emplace(); })
      .def("__exit__", [](Uncounted& self, const py::args&) { self.stand_in.reset(); });
  m.def("clear_recording", [] { recorder().clear(); });
  m.def("recording", &recording);
  m.def("live_blocks", &live_blocks);
  m.def("module_code", [](const std::string& path) { return recorder().modules.code(path); });
  m.def("push_module", [](int32_t code) { recorder().push_module(code); });
  m.def("pop_module", [] { recorder().pop_module(); });
  m.def("compiled", [](bool running) { recorder().compiled(running); });
  m.def("compiled_module", [](std::string_view path) { recorder().compiled_module(path); });
  m.def("in_optimizer", [](bool running) { recorder().optimizer(running); });
  m.def("mark", [](const std::string& name) {
    recorder().add({.kind = Kind::Mark, .name = recorder().names.code(name)});
  });
  // `touched`: (address, bytes, whether it is read, whether it is written).
  m.def("launch_at", [](std::string_view name, std::string_view signature, int64_t stream,
                        const std::vector<std::tuple<int64_t, int64_t, bool, bool>>& touched) {
    std::vector<Touched> found;
    for (const auto& [address, size, reads, writes] : touched) found.push_back({address, size, reads, writes});
    launch_past_torch(name, signature, stream, found);
  });
  m.def("categorise", [](int index, size_t address, int category) {
    const auto block = block_at(static_cast<c10::DeviceIndex>(index), reinterpret_cast<void*>(address));
    if (block >= 0) recorder().categorise(block, static_cast<Category>(category));
  });
  m.def("set_places_callback", [](py::function callback) {
    set_places_callback([callback = new py::function(std::move(callback))] {
      py::gil_scoped_acquire gil;
      return (*callback)().cast<std::string>();
    });
  });
  // `callback(group, number, op, peer, root, reduces, out, in)`: in is None where it is not known.
  m.def("set_exchange_callback", [](py::function callback) {
    set_exchange_callback([callback = new py::function(std::move(callback))](const Exchanged& one) {
      py::gil_scoped_acquire gil;
      return (*callback)(one.group, one.number, one.op, one.peer, one.root, one.reduces, one.out, one.in).cast<bool>();
    });
  });
  m.def("groups", [] {
    py::list found;
    for (const auto& group : group_options()) found.append(py::make_tuple(group->group_name, group->global_ranks_in_group));
    return found;
  });
}

// torch's classes have to be there before one derives from them, so this is called once torch is imported. `make_gloo`
// gives what moves the bytes of a group (store, rank, size, options), None in a dry run.
void bind_process_group(py::module_& m) {
  m.def("make_process_group_classes", [m](const py::function& make_gloo) {
    auto nccl = py::class_<FakeNccl, c10::intrusive_ptr<FakeNccl>, c10d::Backend>(m, "ProcessGroupNCCL", py::dynamic_attr());
    nccl.def(py::init([make_gloo](const py::object& store, int rank, int size, const py::object& options) {
      auto gloo = make_gloo(store, rank, size, options).cast<std::optional<BackendPtr>>();
      auto made = c10::make_intrusive<FakeNccl>(rank, size, gloo.value_or(BackendPtr()));
      made->getBackendOptions()->group_name = options.attr("group_name").cast<std::string>();
      made->getBackendOptions()->global_ranks_in_group =
          options.attr("global_ranks_in_group").cast<std::vector<uint64_t>>();
      return made;
    }));
    nccl.def("_set_sequence_number_for_group", &FakeNccl::setSequenceNumberForGroup);
    nccl.def("_set_default_timeout", [](FakeNccl&, const py::object&) {});  // nothing here takes long
    nccl.def_property_readonly("options", &FakeNccl::getBackendOptions);
    nccl.def_property_readonly("group_id", &FakeNccl::id);
    py::class_<FakeGloo, c10::intrusive_ptr<FakeGloo>, FakeNccl>(m, "ProcessGroupGloo", py::dynamic_attr())
        .def(py::init([](const py::object&, int rank, int size, const py::object&) {
               return c10::make_intrusive<FakeGloo>(rank, size, nullptr);
             }),
             py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout") = py::none())
        .def(py::init([](const BackendPtr& gloo) {
          return c10::make_intrusive<FakeGloo>(gloo->getRank(), gloo->getSize(), gloo);
        }));
  });
}

}  // namespace
}  // namespace refshard

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(c10::DeviceType::CUDA, &refshard::device_allocator(), /*priority=*/1);
  refshard::register_attention();
  refshard::register_recurrent();
  refshard::bind_device(m);
  refshard::bind_memory(m);
  refshard::bind_recorder(m);
  refshard::bind_routing(m);
  refshard::bind_process_group(m);
  refshard::bind_caching_allocator(m);
  refshard::bind_reallocation(m);
  refshard::bind_generated(m);
  refshard::bind_attention_choice(m);
  refshard::bind_graphs(m);
}
