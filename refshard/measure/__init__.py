"""What needs processes: launching cases, measuring in them, recording what they measured."""
