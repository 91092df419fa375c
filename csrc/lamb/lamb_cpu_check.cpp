// What is decided or refused before anything runs: the instruction set, and tables that make no sense.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "lamb_cpu.h"

namespace lamb {
namespace {

const char* best() {
#ifdef LAMB_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) return "avx512";
  // Every processor with these has F16C.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2";
#endif
  return "scalar";
}

int rank_of(const char* name) {
  if (std::strcmp(name, "scalar") == 0) return 0;
  if (std::strcmp(name, "avx2") == 0) return 1;
  if (std::strcmp(name, "avx512") == 0) return 2;
  return -1;
}

[[noreturn]] void refuse(const std::string& table, int64_t row, const std::string& what) {
  throw std::invalid_argument(table + "[" + std::to_string(row) + "]: " + what);
}

void check_segment(const Tables& tables, int64_t row) {
  const Segment& s = tables.segments[row];
  if (s.length < 0) refuse("segments", row, "length " + std::to_string(s.length) + " is negative");
  if (rule_of(s) >= tables.rule_count) refuse("segments", row, "rule " + std::to_string(rule_of(s)) + " is not in the rules");
  if (s.layer < 0 || s.layer >= tables.layer_count) refuse("segments", row, "layer " + std::to_string(s.layer) + " is not in the norms");
  if (row > 0 && s.layer < tables.segments[row - 1].layer) refuse("segments", row, "layers are not in ascending order");
  if (s.types < 0 || s.types >> 29) refuse("segments", row, "unknown bits in types");
  for (const int64_t type : {parameter_type(s), gradient_type(s), copy_type(s)}) {
    if (type > BFLOAT16) refuse("segments", row, "unknown element type " + std::to_string(type));
  }
  if (s.length > 0 && !(s.parameter && s.gradient && s.exp_avg && s.exp_avg_sq)) refuse("segments", row, "null address");
}

void check_rule(const Tables& tables, int64_t row) {
  const Rule& r = tables.rules[row];
  const double* values = &r.lr;
  for (int i = 0; i < 12; ++i) {
    if (std::isnan(values[i])) refuse("rules", row, "column " + std::to_string(i) + " is a nan");
  }
  if (!(r.beta1 >= 0 && r.beta1 < 1 && r.beta2 >= 0 && r.beta2 < 1)) refuse("rules", row, "betas must be in [0, 1)");
  if (!(r.eps >= 0)) refuse("rules", row, "eps is negative");
  if (!(r.step >= 1)) refuse("rules", row, "step is below 1");
  if (!(r.flags >= 0 && r.flags < 16)) refuse("rules", row, "unknown flags");
}

}  // namespace

const char* instruction_set() {
  const char* wanted = std::getenv("DS_TERAPIPE_LAMB_ISA");
  if (!wanted || !*wanted) return best();
  const int rank = rank_of(wanted);
  if (rank < 0) throw std::invalid_argument("DS_TERAPIPE_LAMB_ISA: got \"" + std::string(wanted) + "\", must be scalar, avx2 or avx512");
  if (rank > rank_of(best())) {
    throw std::invalid_argument("DS_TERAPIPE_LAMB_ISA: got \"" + std::string(wanted) + "\", this processor has " + best());
  }
  return rank == 2 ? "avx512" : rank == 1 ? "avx2" : "scalar";
}

const Kernels& kernels_of(const char* name) {
#ifdef LAMB_X86
  if (rank_of(name) == 2) return avx512_kernels;
  if (rank_of(name) == 1) return avx2_kernels;
#endif
  (void)name;
  return scalar_kernels;
}

void check_tables(const Tables& tables) {
  if (tables.segment_count < 0 || tables.rule_count < 0 || tables.layer_count < 0) throw std::invalid_argument("negative count");
  if ((tables.segment_count && !tables.segments) || (tables.rule_count && !tables.rules)) throw std::invalid_argument("null table");
  for (int64_t row = 0; row < tables.rule_count; ++row) check_rule(tables, row);
  for (int64_t row = 0; row < tables.segment_count; ++row) check_segment(tables, row);
}

}  // namespace lamb
