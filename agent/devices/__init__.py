"""Devices (CUDA and emulated) behind one interface of lanes, events and memory."""
