"""Step time and memory in closed form, for thousands of configurations at once."""
