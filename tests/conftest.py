"""Settings of all tests."""

from hypothesis import settings

# A busy machine is no defect: tests assert values, never wall time.
settings.register_profile("refshard", deadline=None)
settings.load_profile("refshard")
