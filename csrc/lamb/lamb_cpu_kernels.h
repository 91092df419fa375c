// The kernels, written once over `Vector`, sixteen fp32 numbers. Each instruction set's file defines Vector and its operations in a
// namespace of its own and includes this file there, so that no function compiled for one processor is ever linked for another.
// No include guard and no includes: the files that include it do that first.

// Sixteen sums in fp64.
struct Sums {
  double lanes[WIDTH] = {};

  inline double total() const {
    double half[8];
    for (int i = 0; i < 8; ++i) half[i] = lanes[i] + lanes[i + 8];
    return ((half[0] + half[4]) + (half[2] + half[6])) + ((half[1] + half[5]) + (half[3] + half[7]));
  }
};

// An fp32 sum of so few squares is good to 1e-7, and fp64 takes it from there.
constexpr int64_t RUN = 16 * WIDTH;

// Squares below 1.2e-38 lose digits in fp32, those above 3.4e38 are lost. A sum between these limits has lost less than 1e-9 of itself.
inline bool trusted(double sum) { return sum >= 1e-32 && sum <= 3e38; }

// How far ahead of the loads data is asked for: a processor's own prefetching stops at the end of each page of memory.
constexpr uintptr_t AHEAD = 1024;

// The address may lie behind the array: it is only a hint, and made as a number because such a pointer must not be.
inline void ask_for(const float* x) { prefetch(reinterpret_cast<uintptr_t>(x) + AHEAD); }

inline void add_squares(Sums& sums, const float* x, int64_t n) {
  int64_t i = 0;
  for (; i + WIDTH <= n; i += WIDTH) {
    for (int j = 0; j < WIDTH; ++j) sums.lanes[j] += static_cast<double>(x[i + j]) * static_cast<double>(x[i + j]);
  }
  for (int j = 0; i < n; ++i, ++j) sums.lanes[j] += static_cast<double>(x[i]) * static_cast<double>(x[i]);
}

inline double exact_square_sum(const float* x, int64_t n) {
  Sums sums;
  add_squares(sums, x, n);
  return sums.total();
}

inline Vector load_tail(const float* x, int64_t n) {
  float padded[WIDTH] = {};
  std::memcpy(padded, x, n * sizeof(float));
  return load(padded);
}

inline void store_tail(Vector x, float* to, int64_t n) {
  float padded[WIDTH];
  store(padded, x);
  std::memcpy(to, padded, n * sizeof(float));
}

double square_sum(const float* x, int64_t n) {
  Sums sums;
  int64_t i = 0;
  while (i + WIDTH <= n) {
    Vector run = zero();
    const int64_t end = std::min(n - WIDTH, i + RUN - WIDTH);
    for (; i <= end; i += WIDTH) {
      ask_for(x + i);
      const Vector a = load(x + i);
      run = fma(a, a, run);
    }
    accumulate(sums.lanes, run);
  }
  if (i < n) {
    const Vector a = load_tail(x + i, n - i);
    accumulate(sums.lanes, mul(a, a));
  }
  const double total = sums.total();
  return trusted(total) ? total : exact_square_sum(x, n);
}

// The Coefficients in every lane.
struct Spread {
  Vector grad_scale, beta1_less_one, beta3, beta2_less_one, one_minus_beta2;
  Vector eps_inside, root_factor, eps_outside, weight_decay, largest;

  explicit Spread(const Coefficients& c)
      : grad_scale(all(c.grad_scale)), beta1_less_one(all(c.beta1_less_one)), beta3(all(c.beta3)),
        beta2_less_one(all(c.beta2_less_one)), one_minus_beta2(all(c.one_minus_beta2)), eps_inside(all(c.eps_inside)),
        root_factor(all(c.root_factor)), eps_outside(all(c.eps_outside)), weight_decay(all(c.weight_decay)),
        largest(all(FLT_MAX)) {}
};

inline Vector new_m(const Spread& c, Vector m, Vector g) {
  return fma(c.beta3, g, fma(c.beta1_less_one, m, m));
}

// Held at the largest fp32 number: an infinite v would never come back. A share of g^2 fits where g^2 itself does not.
inline Vector new_v(const Spread& c, Vector v, Vector g) {
  return min(c.largest, fma(mul(c.one_minus_beta2, g), g, fma(c.beta2_less_one, v, v)));
}

inline Vector update_of(const Spread& c, Vector p, Vector m, Vector v) {
  const Vector divisor = fma(c.root_factor, sqrt(add(v, c.eps_inside)), c.eps_outside);
  return fma(c.weight_decay, p, div(m, divisor));
}

void update(const Spread& c, const float* p, const float* m, const float* v, float* u, int64_t n) {
  int64_t i = 0;
  for (; i + WIDTH <= n; i += WIDTH) store(u + i, update_of(c, load(p + i), load(m + i), load(v + i)));
  if (const int64_t rest = n - i; rest > 0) {
    store_tail(update_of(c, load_tail(p + i, rest), load_tail(m + i, rest), load_tail(v + i, rest)), u + i, rest);
  }
}

inline double exact_update_square_sum(const Spread& c, const float* p, const float* m, const float* v, int64_t n) {
  Sums sums;
  float u[RUN];
  for (int64_t i = 0; i < n; i += RUN) {
    const int64_t piece = std::min(RUN, n - i);
    update(c, p + i, m + i, v + i, u, piece);
    add_squares(sums, u, piece);
  }
  return sums.total();
}

template <bool KEEP>
inline void moments_with(const Spread& c, const float* p, const float* g, float* m, float* v, float* u, int64_t n, Sums& p_sums,
                         Sums& u_sums) {
  int64_t i = 0;
  while (i + WIDTH <= n) {
    Vector p_run = zero();
    Vector u_run = zero();
    const int64_t end = std::min(n - WIDTH, i + RUN - WIDTH);
    for (; i <= end; i += WIDTH) {
      ask_for(g + i);
      ask_for(m + i);
      ask_for(v + i);
      ask_for(p + i);
      const Vector scaled = mul(load(g + i), c.grad_scale);
      const Vector m_new = new_m(c, load(m + i), scaled);
      const Vector v_new = new_v(c, load(v + i), scaled);
      const Vector weight = load(p + i);
      const Vector change = update_of(c, weight, m_new, v_new);
      store(m + i, m_new);
      store(v + i, v_new);
      if (KEEP) store(u + i, change);
      p_run = fma(weight, weight, p_run);
      u_run = fma(change, change, u_run);
    }
    accumulate(p_sums.lanes, p_run);
    accumulate(u_sums.lanes, u_run);
  }
  if (const int64_t rest = n - i; rest > 0) {
    const Vector scaled = mul(load_tail(g + i, rest), c.grad_scale);
    const Vector m_new = new_m(c, load_tail(m + i, rest), scaled);
    const Vector v_new = new_v(c, load_tail(v + i, rest), scaled);
    const Vector weight = load_tail(p + i, rest);
    const Vector change = update_of(c, weight, m_new, v_new);
    store_tail(m_new, m + i, rest);
    store_tail(v_new, v + i, rest);
    if (KEEP) store_tail(change, u + i, rest);
    accumulate(p_sums.lanes, mul(weight, weight));
    accumulate(u_sums.lanes, mul(change, change));
  }
}

void moments(const Coefficients& coefficients, const float* p, const float* g, float* m, float* v, float* u, int64_t n, double* sums) {
  const Spread c(coefficients);
  Sums p_sums;
  Sums u_sums;
  if (u) {
    moments_with<true>(c, p, g, m, v, u, n, p_sums, u_sums);
  } else {
    moments_with<false>(c, p, g, m, v, u, n, p_sums, u_sums);
  }
  const double p_total = p_sums.total();
  const double u_total = u_sums.total();
  sums[0] += trusted(p_total) ? p_total : exact_square_sum(p, n);
  sums[1] += trusted(u_total) ? u_total : exact_update_square_sum(c, p, m, v, n);
}

void apply_kept(float size, const float* p, const float* u, float* to, int64_t n) {
  const Vector back = all(-size);
  int64_t i = 0;
  for (; i + WIDTH <= n; i += WIDTH) {
    ask_for(p + i);
    ask_for(u + i);
    store(to + i, fma(back, load(u + i), load(p + i)));
  }
  if (const int64_t rest = n - i; rest > 0) {
    store_tail(fma(back, load_tail(u + i, rest), load_tail(p + i, rest)), to + i, rest);
  }
}

void apply(const Coefficients& coefficients, float size, const float* p, const float* m, const float* v, float* to, int64_t n) {
  const Spread c(coefficients);
  const Vector back = all(-size);
  int64_t i = 0;
  for (; i + WIDTH <= n; i += WIDTH) {
    ask_for(p + i);
    ask_for(m + i);
    ask_for(v + i);
    const Vector weight = load(p + i);
    store(to + i, fma(back, update_of(c, weight, load(m + i), load(v + i)), weight));
  }
  if (const int64_t rest = n - i; rest > 0) {
    const Vector weight = load_tail(p + i, rest);
    const Vector change = update_of(c, weight, load_tail(m + i, rest), load_tail(v + i, rest));
    store_tail(fma(back, change, weight), to + i, rest);
  }
}

template <int64_t TYPE>
inline void widen_as(const uint16_t* from, float* to, int64_t n) {
  int64_t i = 0;
  for (; i + WIDTH <= n; i += WIDTH) store(to + i, load_half<TYPE>(from + i));
  if (const int64_t rest = n - i; rest > 0) {
    uint16_t padded[WIDTH] = {};
    std::memcpy(padded, from + i, rest * sizeof(uint16_t));
    store_tail(load_half<TYPE>(padded), to + i, rest);
  }
}

template <int64_t TYPE>
inline void narrow_as(const float* from, uint16_t* to, int64_t n) {
  int64_t i = 0;
  for (; i + WIDTH <= n; i += WIDTH) store_half<TYPE>(to + i, load(from + i));
  if (const int64_t rest = n - i; rest > 0) {
    uint16_t padded[WIDTH];
    store_half<TYPE>(padded, load_tail(from + i, rest));
    std::memcpy(to + i, padded, rest * sizeof(uint16_t));
  }
}

void widen(const void* from, int64_t type, float* to, int64_t n) {
  if (type == FLOAT16) {
    widen_as<FLOAT16>(static_cast<const uint16_t*>(from), to, n);
  } else if (type == BFLOAT16) {
    widen_as<BFLOAT16>(static_cast<const uint16_t*>(from), to, n);
  } else {
    std::memcpy(to, from, n * sizeof(float));
  }
}

void narrow(const float* from, void* to, int64_t type, int64_t n) {
  if (type == FLOAT16) {
    narrow_as<FLOAT16>(from, static_cast<uint16_t*>(to), n);
  } else if (type == BFLOAT16) {
    narrow_as<BFLOAT16>(from, static_cast<uint16_t*>(to), n);
  } else {
    std::memcpy(to, from, n * sizeof(float));
  }
}
