// From a problem to launches: order of rows, plan, pieces, dispatch on types.
#include "kernels.h"

#include "../pieces.h"
#include "launch.h"

namespace sms::cuda {
namespace {

template <MaskKind kMask>
cudaError_t dispatch_forward(Element element, const Plan& plan, const ForwardArguments& arguments,
                             cudaStream_t stream) {
  switch (element) {
    case Element::float16: return launch_forward<Element::float16, kMask>(plan, arguments, stream);
    case Element::bfloat16: return launch_forward<Element::bfloat16, kMask>(plan, arguments, stream);
    case Element::float32:
      if constexpr (compiled(Direction::forward, Element::float32, kMask)) {
        return launch_forward<Element::float32, kMask>(plan, arguments, stream);
      }
      break;
    case Element::float64:
      if constexpr (compiled(Direction::forward, Element::float64, kMask)) {
        return launch_forward<Element::float64, kMask>(plan, arguments, stream);
      }
      break;
  }
  return cudaErrorInvalidValue;
}

cudaError_t launch_piece(const Plan& plan, const ForwardProblem& piece, cudaStream_t stream) {
  const int bytes = element_bytes(piece.element);
  const int mask_bytes = mask_element_bytes(piece.mask_kind, piece.element);
  ForwardArguments arguments{};
  arguments.rows = make_row_map(piece.rows, bytes, mask_bytes, bytes);
  arguments.x = static_cast<const char*>(piece.x);
  arguments.mask = static_cast<const char*>(piece.mask);
  arguments.y = static_cast<char*>(piece.y);
  arguments.columns = piece.columns;
  arguments.mask_column_stride = piece.mask == nullptr ? 0 : piece.mask_column_stride * mask_bytes;
  arguments.band = piece.band;
  arguments.key_lengths =
      make_row_values(piece.rows, piece.key_lengths, kBatch, key_length_bytes(piece.key_lengths_64));
  arguments.key_lengths_64 = piece.key_lengths_64;
  arguments.scale = piece.scale;
  switch (piece.mask_kind) {
    case MaskKind::none: return dispatch_forward<MaskKind::none>(piece.element, plan, arguments, stream);
    case MaskKind::boolean: return dispatch_forward<MaskKind::boolean>(piece.element, plan, arguments, stream);
    case MaskKind::same: return dispatch_forward<MaskKind::same>(piece.element, plan, arguments, stream);
    case MaskKind::float32: return dispatch_forward<MaskKind::float32>(piece.element, plan, arguments, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t launch_piece(const Plan& plan, const BackwardProblem& piece, cudaStream_t stream) {
  const int bytes = element_bytes(piece.element);
  BackwardArguments arguments{};
  arguments.rows = make_row_map(piece.rows, bytes, bytes, bytes);
  arguments.y = static_cast<const char*>(piece.y);
  arguments.grad = static_cast<const char*>(piece.grad);
  arguments.dx = static_cast<char*>(piece.dx);
  arguments.columns = piece.columns;
  arguments.grad_expanded = piece.grad_column_stride == 0;
  arguments.band = piece.band;
  arguments.key_lengths =
      make_row_values(piece.rows, piece.key_lengths, kBatch, key_length_bytes(piece.key_lengths_64));
  arguments.key_lengths_64 = piece.key_lengths_64;
  arguments.scale = piece.scale;
  switch (piece.element) {
    case Element::float16: return launch_backward<Element::float16>(plan, arguments, stream);
    case Element::bfloat16: return launch_backward<Element::bfloat16>(plan, arguments, stream);
    case Element::float32: return launch_backward<Element::float32>(plan, arguments, stream);
    case Element::float64: return launch_backward<Element::float64>(plan, arguments, stream);
  }
  return cudaErrorInvalidValue;
}

template <typename Problem>
cudaError_t launch_pieces(const Plan& plan, const Problem& problem, cudaStream_t stream) {
  cudaError_t status = cudaSuccess;
  for_each_piece(problem, kMapDims, kMapRows, [&](const Problem& piece) {
    if (status == cudaSuccess) status = launch_piece(plan, piece, stream);
  });
  return status;
}

}  // namespace

cudaError_t forward(const ForwardProblem& problem, int capability, cudaStream_t stream) {
  const bool masked = problem.mask_kind != MaskKind::none;
  ForwardProblem ordered = problem;
  const bool used[kOperands] = {true, masked, true, problem.band.active, problem.key_lengths != nullptr, false};
  ordered.rows = walk_order(problem.rows, used, masked);
  const Plan plan = choose({Direction::forward, problem.columns, problem.element, problem.mask_kind,
                            problem.band.active, capability});
  return launch_pieces(plan, ordered, stream);
}

cudaError_t backward(const BackwardProblem& problem, int capability, cudaStream_t stream) {
  BackwardProblem ordered = problem;
  const bool used[kOperands] = {true, true, true, problem.band.active, problem.key_lengths != nullptr, false};
  ordered.rows = walk_order(problem.rows, used, false);
  const Plan plan = choose({Direction::backward, problem.columns, problem.element, MaskKind::none,
                            problem.band.active, capability});
  return launch_pieces(plan, ordered, stream);
}

}  // namespace sms::cuda
