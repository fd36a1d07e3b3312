// Graphs, private pools and storages in them, as Python sees them: what torch.cuda's graphs and inductor's cudagraph
// trees (torch/_inductor/cudagraph_trees.py) ask of torch._C.
#include <ATen/EmptyTensor.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/utils/pybind.h>

#include <thread>

#include "caching_allocator_binding.h"
#include "graphs.h"
#include "memory.h"

namespace py = pybind11;

namespace refshard {

void drop_cublas_workspaces();  // operators.cpp

namespace {

using torch::wrap_pybind_function;

CachingAllocator& memory_of(int index) { return device().memory(static_cast<c10::DeviceIndex>(index)); }

// Has the pool serve the allocations that `takes` says, by their stream.
template <typename Takes>
void begin_to_pool(int index, PoolId pool, Takes takes) {
  std::lock_guard lock(device().mutex);
  memory_of(index).begin_allocate_to_pool(pool, takes);
}

c10::StorageImpl& storage_at(size_t address) { return *reinterpret_cast<c10::StorageImpl*>(address); }

// Frees what a storage holds, and leaves it the address.
void free_storage(size_t address) {
  auto& data = storage_at(address).mutable_data_ptr();  // NOLINT: not a copy on write
  auto* block = data.get();
  TORCH_CHECK(data.compare_exchange_deleter(device_allocator().raw_deleter(), &c10::detail::deleteNothing),
              "Expected standard deleter");
  free_block(block);
}

// Sets a pool back to a checkpoint. Storages in `stale` no longer own blocks that this frees; those in `live`, which
// replays made, own the blocks at their addresses from then on.
void restore_pool(int index, const Checkpoint& state, const std::vector<size_t>& stale,
                  const std::vector<size_t>& live) {
  std::lock_guard lock(device().mutex);
  const auto found = memory_of(index).restore(state);
  const auto has = [](const std::vector<Block>& blocks, const Block& block) {
    return std::any_of(blocks.begin(), blocks.end(), [&](const Block& one) { return one.id == block.id; });
  };
  const auto pointer = [](const Block& block) { return reinterpret_cast<void*>(block.address); };
  for (const auto& block : found.freed) {
    if (!has(found.held, block)) note_freed(block);
    for (const auto at : stale) {
      auto& data = storage_at(at).mutable_data_ptr();
      if (data.get() == pointer(block)) data.release_context();
    }
  }
  for (const auto& block : found.held) {
    if (!has(found.freed, block)) note_allocated(block);
    for (const auto at : live) {
      auto& storage = storage_at(at);
      if (storage.data_ptr().get() != pointer(block)) continue;
      storage.set_data_ptr_noswap(
          {pointer(block), pointer(block), &free_block, c10::Device(c10::DeviceType::CUDA, c10::DeviceIndex(index))});
    }
  }
}

at::Tensor tensor_over(const py::dict& about, const py::object& storage) {
  const auto dtype = reinterpret_cast<THPDtype*>(about["dtype"].ptr())->scalar_type;
  auto made = at::detail::make_tensor_base<c10::TensorImpl>(
      c10::Storage(THPStorage_Unpack(storage.ptr())), c10::DispatchKeySet(c10::DispatchKey::CUDA),
      c10::scalarTypeToTypeMeta(dtype));
  made.unsafeGetTensorImpl()->set_sizes_and_strides(
      about["size"].cast<std::vector<int64_t>>(), about["stride"].cast<std::vector<int64_t>>(),
      about["storage_offset"].cast<int64_t>());
  return made;
}

void bind_graph(py::module_& m) {
  const auto unsupported = [](const py::args&) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "the fake CUDA device has no cudaGraph_t, and no conditional nodes");
  };
  py::class_<Graph>(m, "CUDAGraph", py::module_local())
      .def(py::init<bool>(), py::arg("keep_graph") = false)
      .def("capture_begin",
           wrap_pybind_function([](Graph& self, std::optional<PoolId> pool, const std::string& capture_error_mode) {
             self.begin(pool.value_or(kOwnPool), capture_error_mode);
           }),
           py::arg("pool") = py::none(), py::arg("capture_error_mode") = "global")
      .def("capture_end", wrap_pybind_function([](Graph& self) { self.end(); }))
      .def("instantiate", wrap_pybind_function([](Graph& self) { self.instantiate(); }))
      .def("replay", wrap_pybind_function([](Graph& self) { self.replay(); }))
      .def("reset", wrap_pybind_function([](Graph& self) { self.reset(); }))
      .def("pool", wrap_pybind_function([](Graph& self) { return self.pool(); }))
      .def("register_generator_state", [](Graph&, const py::object&) {})  // as each is that is asked for numbers
      .def("enable_debug_mode", [](Graph&) {})
      .def("debug_dump", unsupported)
      .def("raw_cuda_graph", unsupported)
      .def("raw_cuda_graph_exec", unsupported)
      .def("begin_capture_to_if_node", unsupported)
      .def("end_capture_to_conditional_node", unsupported)
      .def_static("get_currently_capturing_graph", wrap_pybind_function([] { return &Graph::current(); }),
                  py::return_value_policy::reference);
  m.def("is_capturing", [] { return capturing(current_stream()); });
}

void bind_pools(py::module_& m) {
  m.def("new_pool", &new_pool, py::arg("of_user") = true);
  m.def("begin_allocate_to_pool", wrap_pybind_function([](int index, PoolId pool) {
    begin_to_pool(index, pool, [](StreamId) { return true; });
  }));
  m.def("begin_allocate_thread_to_pool", wrap_pybind_function([](int index, PoolId pool) {
    const auto own = std::this_thread::get_id();
    begin_to_pool(index, pool, [own](StreamId) { return own == std::this_thread::get_id(); });
  }));
  m.def("begin_allocate_stream_to_pool", wrap_pybind_function([](int index, PoolId pool, StreamId stream) {
    begin_to_pool(index, pool, [stream](StreamId other) { return other == stream; });
  }));
  m.def("end_allocate_to_pool", wrap_pybind_function([](int index, PoolId pool) {
    std::lock_guard lock(device().mutex);
    memory_of(index).end_allocate_to_pool(pool);
  }));
  m.def("retain_pool", wrap_pybind_function([](int index, PoolId pool, bool splits, bool lends) {
    std::lock_guard lock(device().mutex);
    memory_of(index).retain_pool(pool, splits, lends);
  }));
  m.def("release_pool", wrap_pybind_function([](int index, PoolId pool) {
    std::lock_guard lock(device().mutex);
    memory_of(index).release_pool(pool);
  }));
  m.def("users_of_pool", wrap_pybind_function([](int index, PoolId pool) {
    std::lock_guard lock(device().mutex);
    return memory_of(index).users_of_pool(pool);
  }));
  m.def("pool_checkpoint", wrap_pybind_function([](int index, PoolId pool) {
    std::lock_guard lock(device().mutex);
    return memory_of(index).checkpoint(pool);
  }));
  m.def("restore_pool", wrap_pybind_function(restore_pool));
  m.def("drop_cublas_workspaces", &drop_cublas_workspaces);
}

void bind_storages(py::module_& m) {
  m.def("raw_allocate", [](size_t size, StreamId stream) {
    return reinterpret_cast<size_t>(allocate_block(size, current_device(), stream));
  });
  m.def("raw_free", [](size_t address) { free_block(reinterpret_cast<void*>(address)); });
  m.def("free_storage", wrap_pybind_function(free_storage));
  m.def("owns_its_block", [](size_t address) {
    return storage_at(address).data_ptr().get_deleter() == device_allocator().raw_deleter();
  });
  m.def("tensor_over", &tensor_over);
  m.def("forbid_tensor", [](const at::Tensor& tensor, std::string message) {
    tensor.unsafeGetTensorImpl()->release_storage_and_set_meta_custom_data_ptr_error_msg_(std::move(message));
  });
  m.def("forbid_storage", [](size_t address, std::string message) {
    storage_at(address).release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(message));
  });
  m.def("allow_storage", [](size_t address) { storage_at(address).clear_data_ptr_access_error_msg_(); });
}

}  // namespace

void bind_graphs(py::module_& m) {
  bind_graph(m);
  bind_pools(m);
  bind_storages(m);
}

}  // namespace refshard
