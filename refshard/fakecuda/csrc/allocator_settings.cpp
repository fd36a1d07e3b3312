#include "allocator_settings.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cctype>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>

// Named, since the extension is built as one unit, in which anonymous namespaces are one.
namespace refshard::alloc_conf {
namespace {

constexpr size_t kMebibyte = size_t{1} << 20;
constexpr size_t kLeastLargeSegment = 11 * kMebibyte;  // must exceed 10 MiB, the largest request that shares a segment
constexpr size_t kRoundedIntervals = 16;               // powers of two from 1 MiB to 32 GiB and above

// One "name:value". Whitespace means nothing to torch, within a value either.
struct Option {
  std::string name;
  std::string value;
};

[[noreturn]] void refuse(const Option& option, const std::string& rule) {
  throw std::invalid_argument(option.name + ":" + option.value + " is invalid; " + rule);
}

template <typename... Parts>
std::string text_of(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

// As torch reads numbers: what follows one is ignored, and a whole number below 0 means the largest there is.
template <typename Number>
std::optional<Number> number_in(std::string_view text) {
  try {
    if constexpr (std::is_floating_point_v<Number>) return std::stod(std::string(text));
    return std::stoull(std::string(text));
  } catch (const std::logic_error&) {  // no number, or one that is too large
    return std::nullopt;
  }
}

bool boolean(const Option& option) {
  if (option.value != "True" && option.value != "False") refuse(option, "write True or False");
  return option.value == "True";
}

size_t whole_number(const Option& option) {
  const auto number = number_in<size_t>(option.value);
  if (!number) refuse(option, "write a whole number");
  return *number;
}

size_t mebibytes(const Option& option) { return std::min(whole_number(option), SIZE_MAX / kMebibyte) * kMebibyte; }

double fraction(const Option& option) {
  const auto number = number_in<double>(option.value);
  if (!number || !(*number >= 0) || !(*number <= 1)) refuse(option, "write a number between 0 and 1");
  return *number;
}

void set_expandable_segments(AllocatorSettings& settings, const Option& option) {
  settings.expandable_segments = boolean(option);
}

void set_large_segment_size(AllocatorSettings& settings, const Option& option) {
  const auto size = mebibytes(option);
  if (size < kLeastLargeSegment) refuse(option, text_of("write ", kLeastLargeSegment / kMebibyte, " or more"));
  settings.large_segment_size = size;
}

// Both sizes around the largest block to be split must leave room for a large segment.
size_t split_size(const AllocatorSettings& settings, const Option& option) {
  const auto size = mebibytes(option);
  if (size < settings.large_segment_size) {
    refuse(option, text_of("write ", settings.large_segment_size / kMebibyte, " (large_segment_size_mb) or more"));
  }
  return size;
}

void set_max_split_size(AllocatorSettings& settings, const Option& option) {
  settings.max_split_size = split_size(settings, option);
}

void set_max_non_split_rounding(AllocatorSettings& settings, const Option& option) {
  settings.max_non_split_rounding_size = split_size(settings, option);
}

void set_garbage_collection_threshold(AllocatorSettings& settings, const Option& option) {
  const auto threshold = fraction(option);
  if (threshold == 0 || threshold == 1) refuse(option, "write a number between 0 and 1, both excluded");
  settings.garbage_collection_threshold = threshold;
}

void set_memory_fraction(AllocatorSettings& settings, const Option& option) {
  settings.per_process_memory_fraction = fraction(option);
}

void set_throw_on_oom(AllocatorSettings& settings, const Option& option) {
  settings.throw_on_cudamalloc_oom = boolean(option);
}

// One "MiB:divisions" of a list; '>' stands for all intervals above the one before it.
void set_interval(std::vector<size_t>& divisions, const Option& list, std::string_view entry, size_t& interval,
                  bool& first) {
  const auto colon = entry.find(':');
  const auto parts = colon == entry.npos ? std::nullopt : number_in<size_t>(entry.substr(colon + 1));
  if (!parts || (*parts && !std::has_single_bit(*parts))) {
    refuse(list, text_of("write the divisions in '", entry, "' as a power of two, or 0 for none, such as 256:8"));
  }
  if (entry.substr(0, colon) == ">") {
    std::fill(divisions.begin() + static_cast<ptrdiff_t>(interval) + 1, divisions.end(), *parts);
    return;
  }
  const auto start = number_in<size_t>(entry.substr(0, colon));
  if (!start || !std::has_single_bit(*start)) {
    refuse(list, text_of("write the interval in '", entry, "' as a power of two in MiB, or as '>', such as 256:8"));
  }
  interval = std::min<size_t>(std::bit_width(*start) - 1, kRoundedIntervals - 1);
  if (first) std::fill_n(divisions.begin(), interval, *parts);
  first = false;
  divisions[interval] = *parts;
}

void set_roundup(AllocatorSettings& settings, const Option& option) {
  settings.roundup_power2_divisions.assign(kRoundedIntervals, 0);
  std::string_view list = option.value;
  if (!list.starts_with('[')) {
    const auto divisions = number_in<size_t>(option.value);
    if (!divisions || !std::has_single_bit(*divisions)) {
      refuse(option, "write a power of two, or a list such as [256:1,512:2,>:4]");
    }
    settings.roundup_power2_divisions.assign(kRoundedIntervals, *divisions);
    return;
  }
  list = list.substr(1, list.size() - 2);
  size_t interval = 0;
  for (bool first = true; !list.empty();) {
    const auto comma = std::min(list.find(','), list.size());
    set_interval(settings.roundup_power2_divisions, option, list.substr(0, comma), interval, first);
    list.remove_prefix(std::min(comma + 1, list.size()));
  }
}

void check_backend(AllocatorSettings&, const Option& option) {
  if (option.value == "cudaMallocAsync") {
    refuse(option, "the fake device simulates torch's own allocator alone; write backend:native, or leave it out");
  }
  if (option.value != "native") refuse(option, "write native");
}

void check_boolean(AllocatorSettings&, const Option& option) { boolean(option); }
void check_number(AllocatorSettings&, const Option& option) { whole_number(option); }

void check_threads(AllocatorSettings&, const Option& option) {
  const auto threads = whole_number(option);
  if (!std::has_single_bit(threads) || threads > 128) refuse(option, "write a power of two of at most 128");
}

void check_segment(AllocatorSettings&, const Option& option) {
  if (whole_number(option) == 0) refuse(option, "write a whole number above 0");
}

struct Rule {
  std::string_view name;
  void (*apply)(AllocatorSettings&, const Option&);
};

// The first is applied before all others, since the limits of others depend on it.
constexpr std::array kRules{
    Rule{"large_segment_size_mb", set_large_segment_size},
    Rule{"expandable_segments", set_expandable_segments},
    Rule{"max_split_size_mb", set_max_split_size},
    Rule{"max_non_split_rounding_mb", set_max_non_split_rounding},
    Rule{"garbage_collection_threshold", set_garbage_collection_threshold},
    Rule{"roundup_power2_divisions", set_roundup},
    Rule{"per_process_memory_fraction", set_memory_fraction},
    Rule{"throw_on_cudamalloc_oom", set_throw_on_oom},
    Rule{"backend", check_backend},
    Rule{"release_lock_on_cudamalloc", check_boolean},
    Rule{"release_lock_on_hipmalloc", check_boolean},
    Rule{"graph_capture_record_stream_reuse", check_boolean},
    Rule{"pinned_use_cuda_host_register", check_boolean},
    Rule{"pinned_use_hip_host_register", check_boolean},
    Rule{"pinned_use_background_threads", check_boolean},
    Rule{"pinned_free_catch_all", check_boolean},
    Rule{"pinned_num_register_threads", check_threads},
    Rule{"pinned_reserve_segment_size_mb", check_segment},
    Rule{"pinned_max_round_threshold_mb", check_number},
    Rule{"pinned_max_cached_size_mb", check_number},
};

const Rule& rule_for(const Option& option) {
  const auto found = std::find_if(kRules.begin(), kRules.end(), [&](auto& rule) { return rule.name == option.name; });
  if (found != kRules.end()) return *found;
  std::string names;
  for (const auto& rule : kRules) names += (names.empty() ? "" : ", ") + std::string(rule.name);
  throw std::invalid_argument("unknown option '" + option.name + "'; torch 2.13 knows " + names);
}

Option option_in(std::string_view item) {
  const auto colon = item.find(':');
  Option option{std::string(item.substr(0, colon)), colon == item.npos ? "" : std::string(item.substr(colon + 1))};
  rule_for(option);
  if (option.value.empty()) refuse(option, "write a value after the colon, as in expandable_segments:True");
  if (option.value.starts_with('[') != option.value.ends_with(']')) refuse(option, "close the list with ']'");
  return option;
}

// Options are separated by commas, of which those within brackets separate a list's entries; one at the end is allowed.
std::vector<Option> options_in(std::string_view text) {
  std::vector<Option> options;
  std::string item;
  bool listed = false;
  for (const char letter : text) {
    if (letter == '[' || letter == ']') listed = letter == '[';
    if (letter == ',' && !listed) {
      options.push_back(option_in(item));
      item.clear();
    } else if (!std::isspace(static_cast<unsigned char>(letter))) {
      item += letter;
    }
  }
  if (!item.empty()) options.push_back(option_in(item));
  return options;
}

}  // namespace
}  // namespace refshard::alloc_conf

namespace refshard {

size_t AllocatorSettings::divisions(size_t bytes) const {
  if (roundup_power2_divisions.empty()) return 0;
  const size_t interval = std::bit_width(std::max(bytes / alloc_conf::kMebibyte, size_t{1})) - 1;
  return roundup_power2_divisions[std::min(interval, roundup_power2_divisions.size() - 1)];
}

AllocatorSettings parse_allocator_settings(std::string_view text, const AllocatorSettings& current) {
  using namespace alloc_conf;
  const auto options = options_in(text);
  AllocatorSettings settings;
  settings.expandable_segments = current.expandable_segments;
  settings.large_segment_size = current.large_segment_size;
  settings.per_process_memory_fraction = current.per_process_memory_fraction;
  settings.throw_on_cudamalloc_oom = current.throw_on_cudamalloc_oom;
  for (const auto& option : options) {
    if (option.name == kRules.front().name) set_large_segment_size(settings, option);
  }
  settings.max_non_split_rounding_size = settings.large_segment_size;
  for (const auto& option : options) {
    if (option.name != kRules.front().name) rule_for(option).apply(settings, option);
  }
  return settings;
}

}  // namespace refshard
