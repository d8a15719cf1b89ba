// Runs cases from standard input, one a line as words "key=value", and prints what differs.
#include <stdio.h>

#include <iostream>
#include <map>
#include <sstream>

#include "../../csrc/cpu/adam.h"
#include "adam_case.h"
#include "convert_case.h"
#include "cuda_runtime.h"
#include "huge_case.h"
#include "warp_case.h"

using namespace statestream;
using Words = std::map<std::string, std::string>;

namespace {

std::string word(const Words &words, const std::string &key, const std::string &otherwise) {
  const auto found = words.find(key);
  return found == words.end() ? otherwise : found->second;
}
int64_t number(const Words &words, const std::string &key, int64_t otherwise) {
  return std::stoll(word(words, key, std::to_string(otherwise)));
}

TableFormats formats_from(const std::string &text) {
  TableFormats f;
  if (sscanf(text.c_str(), "%d,%d,%d,%d,%d", &f.param, &f.grad, &f.exp_avg, &f.exp_avg_sq, &f.master) != 5)
    throw std::invalid_argument("formats: " + text);
  return f;
}

Values values_from(const std::string &text) {
  static const std::map<std::string, Values> known = {
      {"ordinary", Values::kOrdinary}, {"any_bits", Values::kAnyBits}, {"zero_rows", Values::kZeroRows}};
  return known.at(text);
}

void set_up(const Words &words) {
  static const std::map<std::string, emulation::Order> orders = {{"forward", emulation::Order::kForward},
                                                                 {"reverse", emulation::Order::kReverse},
                                                                 {"shuffled", emulation::Order::kShuffled}};
  emulation::settings = {};
  emulation::settings.order = orders.at(word(words, "order", "forward"));
  emulation::settings.shuffle = (uint64_t)number(words, "seed", 1);
  emulation::settings.count_error = (int)number(words, "count_error", 0);
  emulation::settings.image_error = (int)number(words, "image_error", 0);
  emulation::settings.driver = (int)number(words, "driver", 13000);
  emulation::settings.capability = (int)number(words, "capability", 90);
  emulation::settings.multiprocessors = (int)number(words, "multiprocessors", 1);
  emulation::counters = {};
}

std::string run_adam(const Words &words) {
  AdamCase c{formats_from(word(words, "formats", ""))};
  c.lengths = word(words, "lengths", c.lengths);
  c.offsets = word(words, "offsets", c.offsets);
  c.steps = word(words, "steps", c.steps);
  c.values = values_from(word(words, "values", "ordinary"));
  c.betas = word(words, "betas", c.betas);
  c.l2 = number(words, "l2", 0);
  c.maximize = number(words, "maximize", 0);
  c.bias_correction = number(words, "bias_correction", 1);
  c.capturable = number(words, "capturable", 0);
  c.advance = number(words, "advance", 1);
  c.scalars_on_device = number(words, "scalars_on_device", 0);
  c.skip = number(words, "skip", 0);
  c.grad_scale = (double)number(words, "grad_scale", 1);
  c.seed = (uint64_t)number(words, "seed", 1);
  c.map = word(words, "map", c.map);
  c.stochastic = (int32_t)number(words, "stochastic", 0);
  return run(c);
}

std::string run_one(const std::string &kind, const Words &words) {
  if (kind == "adam") return run_adam(words);
  if (kind == "convert")
    return run_convert({word(words, "what", ""), (int32_t)number(words, "format", 0),
                        (int32_t)number(words, "param_format", kBFloat16), number(words, "root", 0) != 0,
                        number(words, "from_offset", 0), number(words, "to_offset", 0),
                        values_from(word(words, "values", "ordinary")), (uint64_t)number(words, "seed", 1)});
  if (kind == "huge") return run_huge(number(words, "elements", 0));
  if (kind == "warps") return run_warps(word(words, "kernel", ""));
  if (kind == "why_not") return why_not((int)number(words, "device", 0));
  throw std::invalid_argument("no such case: " + kind);
}

}  // namespace

// A line a case: its number, "ok" or what differs, then launches, threads, wide loads and wide stores.
int main() {
  int failed = 0, cases = 0;
  for (std::string line; std::getline(std::cin, line); ++cases) {
    std::istringstream text(line);
    std::string kind, pair;
    text >> kind;
    Words words;
    while (text >> pair) words[pair.substr(0, pair.find('='))] = pair.substr(pair.find('=') + 1);
    set_up(words);
    std::string difference;
    try {
      difference = run_one(kind, words);
    } catch (const std::exception &error) {
      difference = std::string("threw: ") + error.what();
    }
    failed += !difference.empty();
    const auto &seen = emulation::counters;
    printf("%d|%s|%llu|%llu|%llu|%llu\n", cases, difference.empty() ? "ok" : difference.c_str(),
           (unsigned long long)seen.launches, (unsigned long long)seen.threads, (unsigned long long)seen.wide_loads,
           (unsigned long long)seen.wide_stores);
    fflush(stdout);
  }
  return failed != 0;
}
