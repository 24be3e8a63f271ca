"""The health check of docker/runtime.Dockerfile: the operator, forward and backward, beside plain torch."""

import torch

import scaled_mask_softmax


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scores = torch.randn(2, 3, 5, 7, device=device, requires_grad=True)
    padding = torch.arange(7, device=device) >= 4
    grad = torch.randn(2, 3, 5, 7, device=device)
    found = scaled_mask_softmax.scaled_mask_softmax(scores, padding, scale=0.5)
    (gradient,) = torch.autograd.grad(found, scores, grad)
    expected = torch.softmax((scores * 0.5).masked_fill(padding, float("-inf")), -1)
    (expected_gradient,) = torch.autograd.grad(expected, scores, grad)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, expected_gradient)
    print(f"scaled_mask_softmax {scaled_mask_softmax.__version__} is right on {device}")


if __name__ == "__main__":
    main()
