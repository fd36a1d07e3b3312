// Integers as few arithmetic sequences: what a large tensor holds after it was filled, counted up, copied or compared.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace refshard {

// `length` elements from position `at` on: `value`, `value + step`, `value + 2 * step` ...
struct Run {
  int64_t at, length, value, step;

  int64_t end() const { return at + length; }
  int64_t value_at(int64_t position) const;
  // The part of it between two positions.
  Run part(int64_t from, int64_t to) const { return {from, to - from, value_at(from), step}; }
};

// Runs in the order of their positions. Positions that no run covers are unknown. What computes with values needs runs
// that leave no gap from position 0 on, as sequence(), of() and part() give them.
class Runs {
 public:
  static Runs sequence(int64_t length, int64_t value, int64_t step = 0);
  // Nothing if the values make more than `most` runs.
  static std::optional<Runs> of(const int64_t* values, int64_t count, size_t most);

  size_t count() const { return runs_.size(); }
  bool empty() const { return runs_.empty(); }
  int64_t begin() const { return runs_.empty() ? 0 : runs_.front().at; }
  int64_t end() const { return runs_.empty() ? 0 : runs_.back().end(); }

  // Overwrites the elements from `at` on.
  void put(int64_t at, const Runs& values);
  void forget(int64_t from, int64_t to);
  // The elements in [from, to), counted from 0; nothing if one of them is unknown.
  std::optional<Runs> part(int64_t from, int64_t to) const;
  void write(int64_t* values) const;
  // Calls `see` with each position and the value there.
  template <typename See>
  void for_each(See see) const {
    for (const auto& run : runs_) {
      for (auto position = run.at; position < run.end(); ++position) see(position, run.value_at(position));
    }
  }

  // For each element whether it is less than, equal to or greater than a value: 1 if that is asked for, else 0.
  Runs compared(int64_t with, bool less, bool equal, bool greater) const;
  Runs nonzero() const { return compared(0, true, false, true); }
  // Of at least one element.
  int64_t minimum() const;
  int64_t maximum() const;
  // Modulo 2^64, as torch's.
  int64_t sum() const;
  // Of zeros and ones: where the ones are.
  Runs positions() const;
  // The elements for which the mask, of zeros and ones, holds a one.
  Runs selected(const Runs& mask) const;

 private:
  void append(const Run& run);
  size_t first_ending_after(int64_t position) const;
  template <typename See>
  void for_each_stretch_of_ones(See see) const;

  std::vector<Run> runs_;
};

}  // namespace refshard
