"""Recording Kineto traces, and reading them."""
