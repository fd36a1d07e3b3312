"""A training step that no tensor takes part in: the plan's op stream with modelled durations and modelled bytes."""
