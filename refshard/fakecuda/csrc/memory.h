// Device memory as torch sees it: the allocator of the device type CUDA, and the host's pinned memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <string_view>

#include "device.h"

namespace refshard {

// The allocator that torch asks for CUDA memory, by the current device and stream.
c10::DeviceAllocator& device_allocator();
// Page-locked host memory: plain host memory whose addresses are known.
c10::Allocator& pinned_allocator();
bool is_pinned(const void* address);

// Says for whom this thread allocates, as long as it lives.
class Allocating {
 public:
  Allocating(std::string_view operator_name, Category category = Category::Other);
  ~Allocating();
  Allocating(const Allocating&) = delete;

 private:
  std::string_view name_before_;
  Category category_before_;
};

// The block that holds this address; -1 if none does.
int64_t block_at(c10::DeviceIndex device, const void* address);
// Once freed, the block waits until `stream` has passed what it is asked now; record_stream() says so in the recording.
void keep_until_passed(c10::DeviceIndex device, const void* address, StreamId stream);
void record_stream(c10::DeviceIndex device, const void* address, StreamId stream);

// Whether the tensor's bytes exist. In host compute all do. In a dry run those of small tensors do: frameworks read
// counts, shapes and flags back, and compute with integers what they then do.
bool resident(const at::Tensor& tensor);
// The most bytes of integers that have their values in memory, for this thread from now on. Returns what it was.
size_t keep_values(size_t most);
size_t kept_values_limit();
// Whether a resident tensor's values come from ones that were never computed.
bool unknown(const at::Tensor& tensor);
void set_unknown(const at::Tensor& tensor, bool unknown);
// The same for all that lies in the block which holds this address.
void set_unknown_at(c10::DeviceIndex device, const void* address);
// What a float reads as that nobody has computed. No check has it as its boundary: it is a share, its logarithm, its
// inverse and what it lacks to 1 are finite and not 0, and bf16 and fp8 hold it exactly.
constexpr double kPlaceholder = 0.8125;

// Lets a storage hold `size` bytes, keeping what is there; a size of 0 gives its memory back.
void resize_storage(c10::StorageImpl& storage, size_t size);

}  // namespace refshard
