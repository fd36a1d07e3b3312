// torch's view of streams and events: the guard of the device type CUDA.
#pragma once

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "device.h"
#include "graphs.h"
#include "memory.h"

namespace refshard {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Device cuda(c10::DeviceIndex index) { return {c10::DeviceType::CUDA, index}; }
  static c10::DeviceIndex index_of(c10::Device given) { return given.index() < 0 ? current_device() : given.index(); }
  static int64_t event_of(void* event) { return reinterpret_cast<int64_t>(event); }

  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(device().options.count);
  }
  c10::Device getDevice() const override { return cuda(current_device()); }
  void setDevice(c10::Device given) const override { set_current_device(given.index()); }
  void uncheckedSetDevice(c10::Device given) const noexcept override { set_current_device(given.index()); }
  c10::Device exchangeDevice(c10::Device given) const override {
    const auto before = getDevice();
    set_current_device(given.index());
    return before;
  }

  c10::Stream getStream(c10::Device given) const override {
    const auto index = index_of(given);
    return c10::Stream(c10::Stream::UNSAFE, cuda(index), current_stream(index));
  }
  c10::Stream getDefaultStream(c10::Device given) const override {
    return c10::Stream(c10::Stream::DEFAULT, cuda(index_of(given)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device given, bool high_priority) const override {
    return getNewStream(given, high_priority ? -1 : 0);
  }
  c10::Stream getNewStream(c10::Device given, int priority) const override {
    std::lock_guard lock(device().mutex);
    return c10::Stream(c10::Stream::UNSAFE, cuda(index_of(given)), device().streams.from_pool(index_of(given), priority < 0));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    set_current_stream(stream.device_index(), stream.id());
    return before;
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    {
      std::lock_guard lock(device().mutex);
      *event = reinterpret_cast<void*>(device().streams.record(stream.id(), event_of(*event)));
      capture_record(stream.id(), event_of(*event));
    }
    recorder().add({.kind = Kind::Record, .stream = stream.id(), .subject = event_of(*event)});
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    {
      std::lock_guard lock(device().mutex);
      capture_wait(stream.id(), event_of(event));
      device().streams.wait(stream.id(), event_of(event));
    }
    recorder().add({.kind = Kind::Wait, .stream = stream.id(), .subject = event_of(event)});
  }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  // Whoever polls would do so for ever: nothing happens on this device while the host waits.
  bool queryEvent(void* event) const override {
    refuse_wait_in_capture(kNoStream, event_of(event));
    return true;
  }
  bool queryStream(const c10::Stream& stream) const override {
    refuse_wait_in_capture(stream.id(), 0);
    return true;
  }
  bool isStreamCapturing(const c10::Stream& stream) const override { return capturing(stream.id()); }
  void synchronizeEvent(void* event) const override { synchronise("event", kNoStream, event_of(event)); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronise("stream", stream.id()); }
  void synchronizeDevice(const c10::DeviceIndex) const override { synchronise("device"); }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 1.0; }  // ms; only a replay knows
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data.device().index(), data.get(), stream.id());
  }
};

const Guard& guard();

}  // namespace refshard
