"""Speeds: the rate card, the saved calibration, live rates and the filter of noisy measurements."""
