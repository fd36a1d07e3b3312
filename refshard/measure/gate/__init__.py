"""What a gate runs: both sides in paired rounds, accepted baselines, and the noise of this machine."""
