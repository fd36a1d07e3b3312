"""Ranks on hosts that this machine makes of itself, joined by links of a limited rate."""
