// The sink: a score of each row without a column, that takes part in the row's maximum and sum. And how a number that
// belongs to a row is stored.
#pragma once

#include "../row_math.h"
#include "arguments.h"
#include "elements.cuh"
#include "reduce.cuh"

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

// Stores the sink's probability, if that is wanted, given the row's totals with the sink. By one lane of the row.
template <Element kElement, typename Real>
__device__ __forceinline__ void store_sink_probability(const ForwardArguments& arguments, uint32_t row, Real maximum,
                                                       Real normalizer) {
  if (arguments.sink_probability.data == nullptr) return;
  const Real weight = exponential(read_sink<kElement>(arguments, row), finite_shift(maximum));
  store_row_value(arguments, arguments.sink_probability, row, multiply(weight, normalizer));
}

// Adds the sink to a maximum and the sum of exponentials against it.
template <Element kElement, typename Real>
__device__ __forceinline__ void add_sink(const ForwardArguments& arguments, uint32_t row, Real& maximum, Real& sum) {
  const Real sink = read_sink<kElement>(arguments, row);
  const Real larger = fmax(maximum, sink);
  sum = add(rescale(sum, maximum, larger), exponential(sink, finite_shift(larger)));
  maximum = larger;
}

// block_totals() of a row, the sink included. The block's first warp brings it in.
template <Element kElement, typename Real>
__device__ __forceinline__ Totals<Real> row_totals(const ForwardArguments& arguments, uint32_t row, Real maximum,
                                                   Real sum) {
  if (arguments.sink.data != nullptr && threadIdx.x < kWarpLanes) add_sink<kElement>(arguments, row, maximum, sum);
  const Totals<Real> totals = block_totals(maximum, sum);
  if (threadIdx.x == 0) store_sink_probability<kElement>(arguments, row, totals.maximum, totals.normalizer);
  return totals;
}

}  // namespace sms::cuda
