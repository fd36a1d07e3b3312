"""Fake H100s in mode ``dry``."""

from refshard.fakecuda import activate
from refshard.specs.hardware import load_hardware

activate(load_hardware("h100-sxm-80gb"), mode="dry")
