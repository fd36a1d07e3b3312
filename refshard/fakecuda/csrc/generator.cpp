#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>

#include <cstring>
#include <mutex>
#include <optional>
#include <vector>

#include "device.h"

namespace refshard {
namespace {

struct FakeGenerator final : c10::GeneratorImpl {
  explicit FakeGenerator(c10::DeviceIndex index)
      : GeneratorImpl(c10::Device(c10::DeviceType::CUDA, index), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}

  void set_current_seed(uint64_t seed) override {
    values_->seed = seed;
    values_->offset = 0;
  }
  void set_offset(uint64_t offset) override {
    TORCH_CHECK(offset % kOffsetStep == 0, "a CUDA generator's offset must be a multiple of 4, got ", offset);
    values_->offset = offset;
  }
  // What the next operator seeds its numbers with: the seed itself at offset 0.
  uint64_t draw() {
    const auto drawn = values_->seed + 0x9e3779b97f4a7c15 * values_->offset;
    values_->offset += kOffsetStep;
    return drawn;
  }
  uint64_t get_offset() const override { return values_->offset; }
  uint64_t current_seed() const override { return values_->seed; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return values_->seed;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == kStateBytes, "a CUDA generator's state is of 16 bytes, got ", state.numel());
    uint64_t seed = 0, offset = 0;
    const auto* bytes = static_cast<const char*>(state.data());
    std::memcpy(&seed, bytes, sizeof seed);
    std::memcpy(&offset, bytes + sizeof seed, sizeof offset);
    set_current_seed(seed);
    if (offset) set_offset(offset);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({kStateBytes}, at::kByte);
    auto* bytes = static_cast<char*>(state.mutable_data_ptr());
    std::memcpy(bytes, &values_->seed, sizeof values_->seed);
    std::memcpy(bytes + sizeof values_->seed, &values_->offset, sizeof values_->offset);
    return state.getIntrusivePtr();
  }
  FakeGenerator* clone_impl() const override {
    auto* made = new FakeGenerator(device_.index());
    *made->values_ = *values_;
    return made;
  }
  // A generator that goes on with this one's numbers, as compiled code takes it where it computes dropout again.
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    auto made = c10::make_intrusive<FakeGenerator>(device_.index());
    made->values_ = values_;
    return made;
  }
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& state) override {
    values_ = static_cast<const FakeGenerator&>(*state).values_;
  }

  static constexpr int64_t kStateBytes = 16;
  std::mutex drawing;

 private:
  static constexpr uint64_t kOffsetStep = 4;  // numbers that Philox makes at once

  struct Values {
    uint64_t seed = c10::default_rng_seed_val, offset = 0;
  };
  std::shared_ptr<Values> values_ = std::make_shared<Values>();
};

}  // namespace

at::Generator make_generator(c10::DeviceIndex index) { return at::make_generator<FakeGenerator>(index); }

const at::Generator& default_generator(c10::DeviceIndex index) {
  static auto* generators = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < device().options.count; ++i) made->push_back(make_generator(static_cast<c10::DeviceIndex>(i)));
    return made;
  }();
  return generators->at(index < 0 ? current_device() : index);
}

namespace {

at::Generator generator_of(const torch::jit::Stack& stack, size_t first) {
  for (size_t place = first; place < stack.size(); ++place) {
    if (stack[place].isGenerator() && stack[place].toGenerator().device().is_cuda()) return stack[place].toGenerator();
  }
  return default_generator(-1);
}

at::CPUGeneratorImpl& host_generator() {
  return *at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator());
}

}  // namespace

struct Drawing::HostState {
  at::mt19937 engine;
  std::optional<float> next_float;
  std::optional<double> next_double;
};

Drawing::Drawing(const torch::jit::Stack& stack, size_t first) {
  const auto generator = generator_of(stack, first);
  uint64_t seed = 0;
  {
    auto& fake = *static_cast<FakeGenerator*>(generator.unsafeGetGeneratorImpl());
    std::lock_guard lock(fake.drawing);
    seed = fake.draw();
  }
  auto& host = host_generator();
  std::lock_guard lock(host.mutex_);
  before_ = std::make_unique<HostState>(host.engine(), host.next_float_normal_sample(), host.next_double_normal_sample());
  host.set_current_seed(seed);
}

Drawing::~Drawing() {
  auto& host = host_generator();
  std::lock_guard lock(host.mutex_);
  host.set_engine(before_->engine);
  host.set_next_float_normal_sample(before_->next_float);
  host.set_next_double_normal_sample(before_->next_double);
}

}  // namespace refshard
