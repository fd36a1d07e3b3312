#include "runs.h"

#include <algorithm>

namespace refshard {
namespace {

__extension__ typedef __int128 Wide;

// Whether `next`, which follows at once, continues `run`; if so, `step` becomes the step of both together.
bool continues(const Run& run, const Run& next, int64_t& step) {
  if (__builtin_sub_overflow(next.value, run.value_at(run.end() - 1), &step)) return false;
  return (run.length == 1 || run.step == step) && (next.length == 1 || next.step == step);
}

}  // namespace

int64_t Run::value_at(int64_t position) const {
  // Unsigned, because the distance between two values may exceed what an int64 holds.
  return static_cast<int64_t>(static_cast<uint64_t>(value) +
                              static_cast<uint64_t>(step) * static_cast<uint64_t>(position - at));
}

Runs Runs::sequence(int64_t length, int64_t value, int64_t step) {
  Runs made;
  if (length > 0) made.runs_.push_back({0, length, value, step});
  return made;
}

std::optional<Runs> Runs::of(const int64_t* values, int64_t count, size_t most) {
  Runs made;
  for (int64_t i = 0; i < count; ++i) {
    made.append({i, 1, values[i], 0});
    if (made.count() > most) return std::nullopt;
  }
  return made;
}

void Runs::append(const Run& run) {
  int64_t step = 0;
  if (!runs_.empty() && runs_.back().end() == run.at && continues(runs_.back(), run, step)) {
    runs_.back().length += run.length;
    runs_.back().step = step;
  } else {
    runs_.push_back(run);
  }
}

size_t Runs::first_ending_after(int64_t position) const {
  const auto found = std::partition_point(runs_.begin(), runs_.end(),
                                          [&](const Run& run) { return run.end() <= position; });
  return static_cast<size_t>(found - runs_.begin());
}

void Runs::put(int64_t at, const Runs& values) {
  if (values.empty()) return;
  forget(at, at + values.end());
  const auto later = static_cast<std::ptrdiff_t>(first_ending_after(at));
  Runs made;
  made.runs_.assign(runs_.begin(), runs_.begin() + later);
  for (const auto& run : values.runs_) made.append({at + run.at, run.length, run.value, run.step});
  for (auto run = runs_.begin() + later; run != runs_.end(); ++run) made.append(*run);
  runs_ = std::move(made.runs_);
}

void Runs::forget(int64_t from, int64_t to) {
  if (from >= to || from >= end() || to <= begin()) return;
  std::vector<Run> kept;
  for (const auto& run : runs_) {
    if (run.at < from) kept.push_back(run.part(run.at, std::min(run.end(), from)));
    if (run.end() > to) kept.push_back(run.part(std::max(run.at, to), run.end()));
  }
  runs_ = std::move(kept);
}

std::optional<Runs> Runs::part(int64_t from, int64_t to) const {
  Runs made;
  auto reached = from;
  for (auto i = first_ending_after(from); reached < to; ++i) {
    if (i == runs_.size() || runs_[i].at > reached) return std::nullopt;
    auto piece = runs_[i].part(reached, std::min(runs_[i].end(), to));
    reached = piece.end();
    piece.at -= from;
    made.runs_.push_back(piece);
  }
  return made;
}

void Runs::write(int64_t* values) const {
  for_each([&](int64_t position, int64_t value) { values[position] = value; });
}

Runs Runs::compared(int64_t with, bool less, bool equal, bool greater) const {
  Runs made;
  for (const auto& run : runs_) {
    const auto put = [&](Wide from, Wide to, bool truth) {
      if (from < to) made.append({run.at + static_cast<int64_t>(from), static_cast<int64_t>(to - from), truth, 0});
    };
    if (!run.step) {
      put(0, run.length, run.value < with ? less : run.value > with ? greater : equal);
      continue;
    }
    // The first element that has reached the value, and the first that is past it.
    const auto distance = Wide{with} - run.value, step = Wide{run.step};
    const bool meets = distance % step == 0;
    const auto reaching = distance / step + (!meets && (distance > 0) == (step > 0) ? 1 : 0);
    const auto reached = std::clamp<Wide>(reaching, 0, run.length);
    const auto passed = std::clamp<Wide>(reaching + (meets ? 1 : 0), 0, run.length);
    put(0, reached, step > 0 ? less : greater);
    put(reached, passed, equal);
    put(passed, run.length, step > 0 ? greater : less);
  }
  return made;
}

int64_t Runs::minimum() const {
  auto least = runs_.front().value;
  for (const auto& run : runs_) least = std::min({least, run.value, run.value_at(run.end() - 1)});
  return least;
}

int64_t Runs::maximum() const {
  auto most = runs_.front().value;
  for (const auto& run : runs_) most = std::max({most, run.value, run.value_at(run.end() - 1)});
  return most;
}

int64_t Runs::sum() const {
  uint64_t total = 0;
  for (const auto& run : runs_) {
    const auto steps = Wide{run.length} * (run.length - 1) / 2;
    total += static_cast<uint64_t>(run.value) * static_cast<uint64_t>(run.length) +
             static_cast<uint64_t>(run.step) * static_cast<uint64_t>(steps);
  }
  return static_cast<int64_t>(total);
}

template <typename See>
void Runs::for_each_stretch_of_ones(See see) const {
  for (const auto& run : runs_) {
    if (!run.step) {
      if (run.value) see(run.at, run.end());
    } else {  // a zero and a one, in either order
      const auto one = run.value ? run.at : run.at + 1;
      see(one, one + 1);
    }
  }
}

Runs Runs::positions() const {
  Runs made;
  for_each_stretch_of_ones([&](int64_t from, int64_t to) { made.append({made.end(), to - from, from, 1}); });
  return made;
}

Runs Runs::selected(const Runs& mask) const {
  Runs made;
  mask.for_each_stretch_of_ones([&](int64_t from, int64_t to) {
    for (auto i = first_ending_after(from); i < runs_.size() && runs_[i].at < to; ++i) {
      auto piece = runs_[i].part(std::max(runs_[i].at, from), std::min(runs_[i].end(), to));
      piece.at = made.end();
      made.append(piece);
    }
  });
  return made;
}

}  // namespace refshard
