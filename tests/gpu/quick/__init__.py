"""The first ten minutes on one borrowed GPU: cases that were predicted before, tests, and what a profile is made of."""
