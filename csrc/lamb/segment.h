// The tables that both back ends read: what is updated (segments), how (rules), and what is shared by all (control).
// Python lays them out (ds_terapipe/optim/op/segments.py) as int64 and float64 arrays of these very columns.
#pragma once

#include <cstdint>

namespace lamb {

enum Type : int64_t { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2 };

// A run of elements, contiguous in every one of its tensors, that belongs to one layer. A layer, whose norms make one trust
// ratio, has one segment or more (a fused QKV matrix as three sub-layers), or a part of one (a shard).
struct Segment {
  int64_t parameter;    // address; fp32, fp16 or bf16
  int64_t gradient;     // address; fp32, fp16 or bf16
  int64_t exp_avg;      // address; fp32
  int64_t exp_avg_sq;   // address; fp32
  int64_t copy;         // address of the 16-bit (or fp32) copy of the new parameter, 0 for none
  int64_t length;       // elements, 0 or more
  int64_t layer;        // row of the norms; segments are sorted by it
  int64_t types;        // rule | parameter type << 16 | gradient type << 20 | copy type << 24 | counted << 28
};

inline int64_t rule_of(const Segment& s) { return s.types & 0xffff; }
inline int64_t parameter_type(const Segment& s) { return (s.types >> 16) & 0xf; }
inline int64_t gradient_type(const Segment& s) { return (s.types >> 20) & 0xf; }
inline int64_t copy_type(const Segment& s) { return (s.types >> 24) & 0xf; }
// Whether this rank adds the gradient to the global norm: a parameter that several ranks hold counts on one of them.
inline bool counted(const Segment& s) { return (s.types >> 28) & 1; }

enum Flag : int64_t {
  ADAPT = 1,               // multiply by the trust ratio; otherwise the ratio is 1
  CORRECT_MOMENTS = 2,     // divide the moments by 1 - beta^t before the norms (paper, v5)
  CORRECT_STEP = 4,        // multiply the step by sqrt(1 - beta2^t) / (1 - beta1^t) after the norms (DeepSpeed)
  EPS_INSIDE_SQRT = 8,     // sqrt(v + eps) in place of sqrt(v) + eps
};

// How a segment is updated: the settings of its parameter group. All float64, the flags too.
struct Rule {
  double lr;
  double beta1;
  double beta2;
  double beta3;            // what the gradient is multiplied by: 1 - beta1, or 1 without gradient averaging
  double eps;
  double weight_decay;
  double step;             // number of this step, from 1
  double min_coeff;        // clamp of the trust ratio
  double max_coeff;
  double min_weight_norm;  // clamp of the weight norm (phi of the paper)
  double max_weight_norm;
  double flags;
};

// t = step, g = grad_scale * gradient
//   m = beta1 m + beta3 g                      v = beta2 v + (1 - beta2) g^2
//   M = m / (1 - beta1^t), V = v / (1 - beta2^t) with CORRECT_MOMENTS, else m, v
//   u = M / (sqrt(V) + eps) + weight_decay p   or M / sqrt(V + eps) + weight_decay p
//   per layer, in fp64:  w = clamp(|p|, min_weight_norm, max_weight_norm), ratio = clamp(w / |u|, min_coeff, max_coeff)
//   with ADAPT; 1 without it and where |p| or |u| is zero
//   p = p - lr * ratio * u, times sqrt(1 - beta2^t) / (1 - beta1^t) with CORRECT_STEP

}  // namespace lamb
