// Arithmetic of one row that host and device share. Free of torch.
//
// Products and sums that the definition rounds one by one go through multiply() and add(): the device compiler may
// otherwise contract them into fused multiply-adds, differently in each kernel, and a row's bits would follow.
#pragma once

#include <cmath>
#include <limits>

#include "problem.h"

namespace sms {

inline constexpr double kLog2E = 1.44269504088896340736;

template <typename Real>
inline constexpr Real kNegativeInfinity = -std::numeric_limits<Real>::infinity();

SMS_HOST_DEVICE float multiply(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

SMS_HOST_DEVICE double multiply(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

SMS_HOST_DEVICE float add(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

SMS_HOST_DEVICE double add(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dadd_rn(a, b);
#else
  return a + b;
#endif
}

// 2^x. On the device the float form is the hardware's ex2.approx: exact at 0, 0 at -inf, NaN at NaN, within 2.06 ulp
// (measured on an H200 over every float in [-126, 0]) and results below 2^-126 flushed to zero, far inside the
// 1e-6 that a probability may be off.
SMS_HOST_DEVICE float power_of_two(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return std::exp2(x);
#endif
}

SMS_HOST_DEVICE double power_of_two(double x) { return exp2(x); }

// exp(score - maximum). The maximum is subtracted before the change of base, so that a score of -1e38 that is itself
// the maximum still gives exactly 1.
template <typename Real>
SMS_HOST_DEVICE Real exponential(Real score, Real maximum) {
  return power_of_two(multiply(add(score, -maximum), static_cast<Real>(kLog2E)));
}

// 1 / x for 1 <= x < 2^126, or NaN. The device's reciprocal with one Newton step: the division it replaces has a slow
// path, called as a function, that such numbers never need.
SMS_HOST_DEVICE float reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return __fmaf_rn(y, __fmaf_rn(-x, y, 1.0f), y);
#else
  return 1.0f / x;
#endif
}

SMS_HOST_DEVICE double reciprocal(double x) { return 1.0 / x; }

// What to subtract for a maximum that may be -inf (no live cell, or none but NaN): 0 then, so that dead cells give
// exp(-inf) = 0 and NaN cells still reach the sum. The maximum itself may lose a NaN: the sum never does, because
// NaN - maximum and inf - inf are NaN. So the sum alone tells the three kinds of row apart: 0 dead, NaN, ordinary.
template <typename Real>
SMS_HOST_DEVICE Real finite_shift(Real maximum) {
  return maximum == kNegativeInfinity<Real> ? Real{0} : maximum;
}

// The factor that turns exponentials into probabilities: 0 for a dead row, NaN for a NaN row.
template <typename Real>
SMS_HOST_DEVICE Real normalizer(Real sum) {
  return sum == Real{0} ? Real{0} : reciprocal(sum);
}

// The gradient of one score. A cell of probability 0 gets exactly 0, whatever its gradient and the row's sum hold.
template <typename Real>
SMS_HOST_DEVICE Real score_gradient(Real probability, Real gradient, Real dot, Real scale) {
  const Real value = multiply(scale, multiply(probability, add(gradient, -dot)));
  return probability == Real{0} ? Real{0} : value;
}

// A sum that keeps what rounding drops (Knuth's two-sum), for rows too long to add plainly.
template <typename Real>
struct CompensatedSum {
  Real sum = 0;
  Real lost = 0;

  SMS_HOST_DEVICE void operator+=(Real value) {
    const Real total = add(sum, value);
    const Real added = add(total, -sum);
    lost = add(lost, add(add(sum, -add(total, -added)), add(value, -added)));
    sum = total;
  }

  // An infinite sum makes the correction NaN: the infinity is the answer then.
  SMS_HOST_DEVICE Real value() const {
    const bool finite = lost - lost == Real{0};
    return finite ? add(sum, lost) : sum;
  }
};

}  // namespace sms
