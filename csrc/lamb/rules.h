// What both back ends make of a Rule and of sums, in fp64, before they touch an element.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "segment.h"

#ifdef __CUDACC__
#define LAMB_BOTH __host__ __device__
#else
#define LAMB_BOTH
#endif

namespace lamb {

// The formula of segment.h as the elements see it, with r = cm / sqrt(cv), cm = 1 - beta1^t and cv = 1 - beta2^t, or 1 where nothing
// is corrected:
//   m = (m + (beta1 - 1) m) + beta3 g             v = (v + (beta2 - 1) v) + (1 - beta2) g^2
//   u = m / (r sqrt(v + eps_inside) + eps_outside) + weight_decay p
// beta - 1 rather than beta: a rounded 0.999 would be compounded with the age of the gradients in v. Of a beta near 0 it leaves an
// error of 3e-8 of the old moment, of 0 itself none. A sum in brackets is one fma.
struct Coefficients {
  float grad_scale;
  float beta1_less_one, beta3;
  float beta2_less_one, one_minus_beta2;
  float eps_inside, root_factor, eps_outside;
  float weight_decay;
};

LAMB_BOTH inline double correction(double beta, double step) { return 1 - pow(beta, step); }

LAMB_BOTH inline double gradient_factor(double grad_scale, double max_grad_norm, double square_sum) {
  if (!(max_grad_norm > 0)) return grad_scale;
  return grad_scale * fmin(1.0, max_grad_norm / (grad_scale * sqrt(square_sum) + 1e-6));
}

LAMB_BOTH inline Coefficients coefficients_of(const Rule& rule, double factor) {
  const auto flags = static_cast<int64_t>(rule.flags);
  const bool corrects = (flags & CORRECT_MOMENTS) != 0;
  const bool inside = (flags & EPS_INSIDE_SQRT) != 0;
  const double of_m = corrects ? correction(rule.beta1, rule.step) : 1;
  const double of_v = corrects ? correction(rule.beta2, rule.step) : 1;
  Coefficients c;
  c.grad_scale = static_cast<float>(factor);
  c.beta1_less_one = static_cast<float>(rule.beta1 - 1);
  c.beta3 = static_cast<float>(rule.beta3);
  c.beta2_less_one = static_cast<float>(rule.beta2 - 1);
  c.one_minus_beta2 = static_cast<float>(1 - rule.beta2);
  c.eps_inside = static_cast<float>(inside ? of_v * rule.eps : 0.0);
  c.root_factor = static_cast<float>(of_m / sqrt(of_v));
  // Never zero, so that eps = 0 gives 0 where nothing has ever moved. No root but zero is so small that it would notice.
  c.eps_outside = static_cast<float>(fmax(double{FLT_MIN}, inside ? 0.0 : of_m * rule.eps));
  c.weight_decay = static_cast<float>(rule.weight_decay);
  return c;
}

LAMB_BOTH inline double step_factor(const Rule& rule) {
  if ((static_cast<int64_t>(rule.flags) & CORRECT_STEP) == 0) return rule.lr;
  return rule.lr * sqrt(correction(rule.beta2, rule.step)) / correction(rule.beta1, rule.step);
}

LAMB_BOTH inline double trust_ratio(const Rule& rule, double p_square, double u_square) {
  if ((static_cast<int64_t>(rule.flags) & ADAPT) == 0 || !(p_square > 0) || !(u_square > 0)) return 1;
  const double weight = fmin(fmax(sqrt(p_square), rule.min_weight_norm), rule.max_weight_norm);
  return fmin(fmax(weight / sqrt(u_square), rule.min_coeff), rule.max_coeff);
}

}  // namespace lamb
