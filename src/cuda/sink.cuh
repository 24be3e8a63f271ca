// The sink: a score of each row without a column, that takes part in the row's sum. And how a number that belongs to a row
// is stored.
#pragma once

#include "../row_math.h"
#include "arguments.h"
#include "elements.cuh"

namespace sms::cuda {

// To be called by one lane of a row.
template <typename Real, typename Arguments>
__device__ __forceinline__ void store_row_value(const Arguments& arguments, const RowValues<char>& values, uint32_t row,
                                                Real value) {
  *reinterpret_cast<Real*>(arguments.rows.find(values, row)) = value;
}

template <Element kElement>
__device__ __forceinline__ Accumulate<kElement> read_sink(const ForwardArguments& arguments, uint32_t row) {
  const char* address = arguments.rows.find(arguments.sink, row);
  if (arguments.sink_float32) return *reinterpret_cast<const float*>(address);
  Chunk<16> chunk;
  load_element<kBytesOf<kElement>>(chunk, 0, address);
  Accumulate<kElement> value[kCountOf<kElement>];
  unpack<kElement>(chunk, value);
  return value[0];
}

// A row's normalizer with its sink in the sum, given that of its columns alone and their largest score. The lane for
// which `stores` is true writes what the sink takes, if that is wanted.
template <Element kElement, typename Real>
__device__ __forceinline__ Real with_sink(const ForwardArguments& arguments, uint32_t row, Real maximum,
                                          Real normalizer, bool stores) {
  const Real sink = read_sink<kElement>(arguments, row);
  Real result = sink - sink;  // NaN for a sink of NaN or +inf
  Real probability = result;
  if (sink < -kNegativeInfinity<Real>) {
    if (normalizer == Real{0}) {  // no column has any weight
      result = 0;
      probability = sink == kNegativeInfinity<Real> ? Real{0} : Real{1};
    } else {
      // Both against the larger of the two scores, so that nothing overflows.
      const Real distance = add(sink, -maximum);
      const Real weight = power_of_two(multiply(-fabs(distance), static_cast<Real>(kLog2E)));
      const Real columns = distance > Real{0} ? weight : Real{1};
      const Real beside = distance > Real{0} ? Real{1} : weight;
      const Real share = multiply(normalizer, reciprocal(add(columns, multiply(beside, normalizer))));
      result = multiply(columns, share);
      probability = multiply(beside, share);
    }
  }
  if (stores && arguments.sink_probability.given) {
    store_row_value(arguments, arguments.sink_probability, row, probability);
  }
  return result;
}

// The same, in a function of its own (is_apart(), kIsOddAddend).
template <Element kElement, typename Real>
__device__ __attribute__((noinline)) Real with_sink_apart(const ForwardArguments& arguments, uint32_t row, Real maximum,
                                                          Real normalizer, bool stores) {
  return with_sink<kElement>(arguments, row, maximum, normalizer, stores);
}

}  // namespace sms::cuda
