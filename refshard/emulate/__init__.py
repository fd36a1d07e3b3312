"""One real rank in a world of modelled ranks: real kernels and real local memory traffic, a modelled wire."""
