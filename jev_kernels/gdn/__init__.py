"""The gated delta rule and the convolution before it, portable and for Hopper."""
