// What the CPU build of torch asks of CUDA where there is one. torch looks for these hooks once, so the extension has to
// be loaded before torch.
#include <ATen/detail/CUDAHooksInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include "device.h"
#include "generator.h"
#include "memory.h"

namespace refshard {

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}

  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasCuBLASLt() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  // The CPU has no kernel by the name of cuDNN's.
  bool compiledWithCuDNN() const override { return device().dry() && device().options.capability.cudnn; }
  bool hasCuDNN() const override { return compiledWithCuDNN(); }
  double batchnormMinEpsilonCuDNN() const override { return 0; }  // CUDNN_BN_MIN_EPSILON since cuDNN 7.5
  bool supportsDepthwiseConvolutionWithCuDNN() const override { return true; }
  bool supportsDilatedConvolutionWithCuDNN() const override { return true; }
  long versionCuDNN() const override { return device().options.capability.cudnn_version; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device().options.count); }
  int getNumGPUs() const override { return device().options.count; }
  c10::DeviceIndex current_device() const override { return refshard::current_device(); }
  c10::DeviceIndex getCurrentDevice() const override { return refshard::current_device(); }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_current_device(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto before = refshard::current_device();
    set_current_device(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_allocator(); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return make_generator(index < 0 ? refshard::current_device() : index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  void deviceSynchronize(c10::DeviceIndex) const override { synchronise("device"); }
};

// DDP's reducer asks for one; what it measures goes into its log alone.
struct ReducerTimer final : c10d::Timer {
  explicit ReducerTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

}  // namespace refshard

namespace at {
using RefshardHooks = refshard::Hooks;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", RefshardHooks)
}  // namespace at

namespace c10d {
using RefshardTimer = refshard::ReducerTimer;
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, RefshardTimer)
}  // namespace c10d
