"""The events of traces: their columns, read from Kineto and Nsight Systems, and spans and intervals made of them."""
