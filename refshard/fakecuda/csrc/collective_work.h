// What a collective hands back: the caller's streams wait for it, and what it uses lives until they do.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "guard.h"
#include "memory.h"
#include "process_group.h"

namespace refshard {

class FakeWork final : public c10d::Work {
 public:
  FakeWork(std::optional<c10::Stream> stream, int64_t event, Tensors results, Shelf held,
           std::vector<WorkPtr> pending, bool host_waits)
      : stream_(stream), event_(event), results_(std::move(results)), held_(std::move(held)),
        pending_(std::move(pending)), host_waits_(host_waits) {}

  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  std::vector<at::Tensor> result() override { return results_; }
  void synchronize() override {
    finish_pending();
    if (event_) {
      guard().block(reinterpret_cast<void*>(event_), guard().getStream(stream_->device()));
    }
    if (host_waits_) refshard::synchronise("barrier", stream_ ? stream_->id() : kNoStream);
    if (held_) held_->clear();  // as NCCL's: what a collective uses stays until its stream has been waited for
  }
  void blockCurrentStream() override { synchronize(); }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    if (future_) return future_;
    finish_pending();
    std::vector<c10::Device> devices;
    if (stream_) devices.push_back(stream_->device());
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    if (!stream_) {
      future_->markCompleted(c10::IValue(results_));
      return future_;
    }
    const auto before = guard().exchangeStream(*stream_);
    future_->markCompleted(c10::IValue(results_));
    guard().exchangeStream(before);
    return future_;
  }

 private:
  void finish_pending() {
    for (const auto& work : pending_) {
      if (work) work->wait();
    }
    pending_.clear();
  }

  std::optional<c10::Stream> stream_;
  int64_t event_;
  Tensors results_;
  Shelf held_;
  std::vector<WorkPtr> pending_;  // of gloo
  bool host_waits_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace refshard
