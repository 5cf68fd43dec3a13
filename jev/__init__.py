"""Decision worker for Open-Jev: a state and typed questions in, calibrated probabilities out."""

__version__ = "0.2.0"
