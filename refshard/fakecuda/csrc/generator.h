// Random numbers. A CUDA generator's state is its seed and its offset, 16 bytes; frameworks save, split and restore it.
// Each operator that draws moves the offset on. Values, where they are computed, follow from seed and offset alone.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/stack.h>

#include <memory>

namespace refshard {

at::Generator make_generator(c10::DeviceIndex device);
const at::Generator& default_generator(c10::DeviceIndex device);

// Lets CPU kernels draw what a CUDA generator gives, while it lives: that among the arguments, else the device's own.
// The CPU's default generator is left as it was.
class Drawing {
 public:
  Drawing(const torch::jit::Stack& stack, size_t first);
  ~Drawing();
  Drawing(const Drawing&) = delete;

 private:
  struct HostState;
  std::unique_ptr<HostState> before_;
};

}  // namespace refshard
