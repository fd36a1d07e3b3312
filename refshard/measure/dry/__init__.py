"""Dry runs of cases: one rank, through the strategy's own code, on a GPU of the cluster that is not there."""
