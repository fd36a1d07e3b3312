"""One rank of a world whose other ranks are modelled: real kernels and real local memory traffic, a modelled wire."""
