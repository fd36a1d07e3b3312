"""Settings of all tests."""

import torch
from hypothesis import settings

# As the ranks have: sums then round alike here and there, and threads do not spin for each other on a busy machine.
torch.set_num_threads(1)

# A busy machine is no defect: tests assert values, never wall time.
settings.register_profile("refshard", deadline=None)
settings.load_profile("refshard")
