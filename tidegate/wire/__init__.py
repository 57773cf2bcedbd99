"""What travels between agent, daemon, command line and screens: one pydantic model for each message.

A module for each subject. Times are seconds since the epoch, durations are seconds, sizes are bytes.
"""
